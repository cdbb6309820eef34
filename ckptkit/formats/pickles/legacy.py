"""Reads torch.save files that predate zip archives: pickles, then storages.

Tensors become the same records as in `pickles.zip`: byte ranges in the file. The format has no checksums. The layout is
that of `_legacy_save` in torch/serialization.py.
"""

from __future__ import annotations

from typing import Any

from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.pickles.tensors import Storage, TensorRebuilder, known_dtype
from ckptkit.formats.pickles.walk import MAX_PICKLE_BYTES, Unknown, guarded, load_prefix
from ckptkit.formats.pickles.zip import file_size, storage_of
from ckptkit.storage.store import Store

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001


def is_legacy(head: bytes) -> bool:
    """Return whether a file begins with the legacy format's pickled magic number."""
    return head[:1] == b"\x80" and _MAGIC.to_bytes(10, "little") in head[:32]


def read_legacy(store: Store, path: str, *, unknown: Unknown = "refuse") -> Any:
    """Return the value in the legacy file at `path`, with records in place of tensors."""
    nbytes = file_size(store, path)
    window = 1 << 20
    while True:
        head = store.read(path, 0, min(window, nbytes))
        try:
            return _Legacy(store, path, nbytes, head).value(unknown)
        except CorruptCheckpointError:
            # The pickles may extend past the bytes read so far. Each read is 8 times longer than the previous read, so
            # the pickles are parsed only a few times.
            if len(head) >= min(nbytes, MAX_PICKLE_BYTES):
                raise
            window *= 8


class _Legacy:
    def __init__(self, store: Store, path: str, nbytes: int, head: bytes) -> None:
        self.store = store
        self.path = path
        self.nbytes = nbytes
        self.head = head
        self.storages: dict[str, Storage] = {}

    def value(self, unknown: Unknown) -> Any:
        head, path = self.head, self.path
        magic, pos = load_prefix(head, file=path)
        version, pos = load_prefix(head, pos, file=path)
        system, pos = load_prefix(head, pos, file=path)
        if magic != _MAGIC or version != _PROTOCOL or not isinstance(system, dict):
            raise CorruptCheckpointError(f"{path} was not written by torch.save.")
        if system.get("little_endian") is not True:
            raise UnsupportedFormatError(f"{path}: its tensors are big-endian; only little-endian is supported.")
        rebuilder = TensorRebuilder()
        value, pos = load_prefix(
            head, pos, file=path, functions=rebuilder.functions, persistent_load=self._storage, unknown=unknown
        )
        keys, pos = load_prefix(head, pos, file=path)
        guarded(path, lambda: self._locate(keys, pos))
        guarded(path, lambda: rebuilder.finish(lambda t: self.store.read(path, t.start, t.start + t.nbytes)))
        return value

    def _storage(self, identity: Any) -> Storage:
        if not isinstance(identity, tuple) or not identity or identity[0] != "storage":
            raise UnsupportedFormatError("holds a pickled module with its source code, which is never run.")
        if len(identity) not in (5, 6) or (len(identity) == 6 and identity[5] is not None):
            raise UnsupportedFormatError(
                "holds views of storages that only torch < 0.4 writes. Save it again with a newer torch."
            )
        made = storage_of(identity[:5], None, self.path)
        if made.nbytes > self.nbytes:
            raise ValueError(f"storage {made.key!r:.40} declares {made.nbytes} bytes, but the file holds {self.nbytes}")
        known = self.storages.setdefault(made.key, made)
        if (known.nbytes, known.dtype) != (made.nbytes, made.dtype):
            raise ValueError(f"storage {made.key!r:.40} has two different descriptions")
        return known

    def _locate(self, keys: Any, pos: int) -> None:
        """Locate the storages, which are stored in the order of `keys`, each after an 8-byte count of its elements."""
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
            raise ValueError("the list of storages is damaged")
        for key in keys:
            storage = self.storages.get(key)
            if storage is None:
                raise ValueError(f"storage {key!r:.40} is not described in the pickle")
            count = self.store.read(self.path, pos, pos + 8)
            itemsize = known_dtype(storage.dtype or "uint8").itemsize
            if len(count) != 8 or int.from_bytes(count, "little") * itemsize != storage.nbytes:
                raise ValueError(f"storage {key!r:.40} is truncated, or does not have the size recorded in the pickle")
            storage.start = pos + 8
            pos = storage.start + storage.nbytes
        if pos > self.nbytes:
            raise ValueError(
                f"the file is truncated: it ends at byte {self.nbytes}, but its storages extend to byte {pos}"
            )
        missing = self.storages.keys() - set(keys)
        if missing:
            raise ValueError(f"storage {min(missing)!r:.40} is not in the file")
