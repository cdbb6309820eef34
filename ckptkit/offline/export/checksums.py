"""Writes and reads an export's SHA256SUMS: one line per file, for `sha256sum --check`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

from ckptkit.digests import SHA256, new_hasher
from ckptkit.errors import CorruptCheckpointError
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.store import Store, checked_path

SUMS_NAME = "SHA256SUMS"
_CHUNK = 16 << 20
_MAX_BYTES = 1 << 20  # enough for about 10,000 files
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def write_checksums(store: Store, paths: Iterable[str]) -> None:
    """Read the files back and write SHA256SUMS. The digests equal the LFS ids on the Hub."""
    names = sorted(paths)
    with WorkerPool(4, thread_name_prefix="ckptkit-sha256") as pool:
        lines = [
            f"{digest}  {name}\n" for name, digest in zip(names, pool.map(partial(_sha256, store), names), strict=True)
        ]
    store.write(SUMS_NAME, "".join(lines).encode(), overwrite=True)


def read_checksums(store: Store) -> dict[str, str]:
    """Return the SHA-256 (hex) of each file listed in SHA256SUMS, or {} if there is no SHA256SUMS.

    Raises:
        CorruptCheckpointError: SHA256SUMS is malformed.
        UnsafePathError: SHA256SUMS names a file outside of the directory.
    """
    info = store.info(SUMS_NAME)
    if info is None:
        return {}
    if info.kind not in ("file", "symlink"):
        raise CorruptCheckpointError(f"{SUMS_NAME} is not a list of SHA-256 digests: it is not a regular file.")
    data = store.read(SUMS_NAME, 0, _MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise CorruptCheckpointError(f"{SUMS_NAME} has more than {_MAX_BYTES} bytes, too many for an export's digests.")
    try:
        lines = data.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(f"{SUMS_NAME} is not a list of SHA-256 digests: {error}.") from error
    sums: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        found = _LINE.fullmatch(line)
        if found is None:
            raise CorruptCheckpointError(
                f"{SUMS_NAME}: line {number} is not a SHA-256 digest and a name: {line!r:.120}."
            )
        path = checked_path(found[2].removeprefix("./"))
        if sums.setdefault(path, found[1]) != found[1]:
            raise CorruptCheckpointError(f"{SUMS_NAME} lists two digests for {path!r:.200}.")
    return sums


def _sha256(store: Store, path: str) -> str:
    info, state = store.info(path), new_hasher(SHA256)
    size = info.size if info is not None else 0
    for start in range(0, size, _CHUNK):
        state.update(store.read(path, start, min(size, start + _CHUNK)))
    return state.hexdigest()
