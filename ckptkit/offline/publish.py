"""Where a result goes: a directory or a single file, staged and published whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import CheckpointExistsError
from ckptkit.storage.local import LocalStore
from ckptkit.storage.staging import new_nonce, stage
from ckptkit.storage.store import Store, open_store

__all__ = ["OutputPlace", "open_target"]

_FILE_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
Share = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """The place of a result.

    Attributes:
        url: A directory; for a single file the one it lies in.
        file_name: Of the single file; "" for a directory.
    """

    url: str
    file_name: str
    is_file: bool
    overwrite: bool
    storage_options: Mapping[str, Any] | None

    @contextlib.contextmanager
    def stage(self, last: Sequence[str] = ()) -> Iterator[tuple[Store, Share | None]]:
        """Yield a store to write into, and which of the plan's files are this process's (None: all)."""
        if self.is_file:
            with self._stage_file() as store:
                yield store, None
            return
        # A shard is never held back: stores keep what comes last in memory.
        small = [name for name in last if not name.endswith(".safetensors")]
        with stage(self.url, overwrite=self.overwrite, last=small, storage_options=self.storage_options) as store:
            yield store, None

    @contextlib.contextmanager
    def _stage_file(self) -> Iterator[Store]:
        store = open_store(self.url, storage_options=self.storage_options)
        found = store.info(self.file_name)
        if found is not None and not self.overwrite:
            raise CheckpointExistsError(
                f"{self.url}/{self.file_name} exists already; nothing was written. Use --overwrite."
            )
        if not isinstance(store, LocalStore):
            if found is not None:
                store.delete([self.file_name])
            yield store  # its writer makes the file appear whole or not at all
            return
        staging = f".tmp-{self.file_name}-{new_nonce()}"
        store.make_directory(staging)
        try:
            inner = store.child(staging)
            yield inner
            with contextlib.closing(_Descriptor(inner.path_of(self.file_name))) as file:
                os.fsync(file.fd)
            if self.overwrite:
                os.replace(inner.path_of(self.file_name), store.path_of(self.file_name))
            else:
                store.rename(f"{staging}/{self.file_name}", self.file_name)
            store.sync_directory("")
        finally:
            store.delete_tree(staging)


class _Descriptor:
    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.fd)


def open_target(
    dst: str, *, single_file: bool, overwrite: bool, storage_options: Mapping[str, Any] | None
) -> OutputPlace:
    """Return the place that `dst` names. `single_file`: what is written is one file, which `dst` may name."""
    if single_file and dst.endswith(_FILE_ENDINGS) and not os.path.isdir(dst):
        folder, _, name = dst.rpartition("/")
        return OutputPlace(folder or ("/" if dst.startswith("/") else "."), name, True, overwrite, storage_options)
    return OutputPlace(dst, "pytorch_model.bin" if single_file else "", False, overwrite, storage_options)
