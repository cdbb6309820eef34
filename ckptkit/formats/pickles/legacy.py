"""Reads torch.save files that predate zip archives: pickles and storages, in sequence or in a tar archive.

Tensors become the same records as in `pickles.zip`: byte ranges in the file. Neither format has checksums. Sources for
the layouts: `_legacy_save` and `legacy_load` in torch/serialization.py.
"""

from __future__ import annotations

import struct
from typing import Any

from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.pickles.inert import StorageType
from ckptkit.formats.pickles.tensors import (
    Storage,
    TensorRebuilder,
    known_dtype,
    read_storage_type,
    stored,
)
from ckptkit.formats.pickles.walk import MAX_PICKLE_BYTES, Unknown, guarded, load_prefix, loads
from ckptkit.formats.pickles.zip import file_size, storage_of
from ckptkit.storage.store import Store

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_TAR_BLOCK = 512
_TAR_MEMBERS = ("sys_info", "pickle", "storages", "tensors")
_MAX_OBJECTS = 1 << 22


def is_legacy(head: bytes) -> bool:
    """Return whether a file begins with the legacy format's pickled magic number."""
    return head[:1] == b"\x80" and _MAGIC.to_bytes(10, "little") in head[:32]


def is_tar(head: bytes) -> bool:
    """Return whether a file begins like the tar that old versions of torch.save wrote."""
    return head[257:262] == b"ustar" or head[:100].rstrip(b"\0") in [name.encode() for name in _TAR_MEMBERS]


def read_legacy(store: Store, path: str, *, unknown: Unknown = "refuse") -> Any:
    """Return the value in the legacy file at `path`, with records in place of tensors.

    Raises:
        CorruptCheckpointError: The file is not a legacy file, or is truncated.
        UnsafePickleError: The pickle refers to a global that is not allowed.
        UnsupportedFormatError: The file is big-endian, or contains tensors that are not dense.
    """
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


def read_tar(store: Store, path: str, *, unknown: Unknown = "refuse") -> Any:
    """Return the value in a tar file from an old torch.save. Raises the same errors as `read_legacy`."""
    members = _tar_members(store, path)
    return guarded(path, lambda: _Tar(store, path, members).value(unknown))


def _tar_members(store: Store, path: str) -> dict[str, tuple[int, int]]:
    """Return (start, nbytes) of each of the four members, by name. A tar with any other member is refused."""
    found: dict[str, tuple[int, int]] = {}
    nbytes, pos = file_size(store, path), 0
    while pos + _TAR_BLOCK <= nbytes:
        header = store.read(path, pos, pos + _TAR_BLOCK)
        if not header.strip(b"\0"):
            break
        name = header[:100].rstrip(b"\0").decode("latin1").removeprefix("./")
        size_text, checksum = header[124:136].strip(b" \0"), header[148:156].strip(b" \0")
        if not _octal(size_text) or not _octal(checksum):
            raise CorruptCheckpointError(f"{path}: a header of its tar is damaged.")
        if int(checksum, 8) != sum(header[:148]) + 8 * 32 + sum(header[156:]):
            raise CorruptCheckpointError(f"{path}: a header of its tar does not match its checksum.")
        if name not in _TAR_MEMBERS or name in found or header[156:157] not in (b"0", b"\0"):
            raise CorruptCheckpointError(f"{path}: member {name!r:.80} does not belong in the tar of a torch.save.")
        size = int(size_text, 8)
        if pos + _TAR_BLOCK + size > nbytes:
            raise CorruptCheckpointError(f"{path}: member {name!r} reaches past the end of the file. It is truncated.")
        found[name] = (pos + _TAR_BLOCK, size)
        pos += _TAR_BLOCK + -(-size // _TAR_BLOCK) * _TAR_BLOCK
    for name in ("pickle", "storages", "tensors"):
        if name not in found:
            raise CorruptCheckpointError(f"{path}: its tar has no member {name!r}.")
    return found


def _octal(text: bytes) -> bool:
    return 0 < len(text) <= 12 and all(0x30 <= c < 0x38 for c in text)


class _Tar:
    def __init__(self, store: Store, path: str, members: dict[str, tuple[int, int]]) -> None:
        self.store = store
        self.path = path
        self.members = members
        self.objects: dict[str, Any] = {}

    def value(self, unknown: Unknown) -> Any:
        self._storages()
        self._tensors()
        start, nbytes = self.members["pickle"]
        if nbytes > MAX_PICKLE_BYTES:
            raise ValueError("member 'pickle' is too large")
        return loads(
            self.store.read(self.path, start, start + nbytes),
            file=self.path,
            functions=TensorRebuilder().functions,
            persistent_load=self._object,
            unknown=unknown,
        )

    def _object(self, identity: Any) -> Any:
        if isinstance(identity, tuple):
            raise UnsupportedFormatError("holds a pickled module with its source code, which is never run.")
        return self.objects[str(identity)]

    def _pickle(self, name: str, pos: int) -> tuple[Any, int]:
        """Return the value of the small pickle at `pos` in a member, and the position after the pickle."""
        start, nbytes = self.members[name]
        data = self.store.read(self.path, start + pos, start + min(nbytes, pos + (64 << 10)))
        value, end = load_prefix(data, file=self.path)
        return value, pos + end

    def _count(self, name: str) -> tuple[int, int]:
        count, pos = self._pickle(name, 0)
        if type(count) is not int or not 0 <= count <= min(_MAX_OBJECTS, self.members[name][1]):
            raise ValueError(f"member {name!r} has an invalid count")
        return count, pos

    def _storages(self) -> None:
        count, pos = self._count("storages")
        start, nbytes = self.members["storages"]
        for _ in range(count):
            (key, _, kind), pos = self._pickle("storages", pos)
            dtype = read_storage_type(kind)
            head = self.store.read(self.path, start + pos, start + pos + 8)
            size = int.from_bytes(head, "little") * known_dtype(dtype or "uint8").itemsize
            if len(head) != 8 or pos + 8 + size > nbytes:
                raise ValueError("a storage reaches past its member: it is truncated")
            self._add(key, Storage(self.path, str(key), size, dtype, start + pos + 8))
            pos += 8 + size
        views, _ = self._pickle("storages", pos)
        if views:
            raise UnsupportedFormatError(
                "holds views of storages that only torch < 0.2 writes. Save it again with a newer torch."
            )

    def _tensors(self) -> None:
        count, pos = self._count("tensors")
        start, _ = self.members["tensors"]
        for _ in range(count):
            (key, storage_key, kind), pos = self._pickle("tensors", pos)
            if not isinstance(kind, StorageType):
                raise ValueError("a tensor's type is not a tensor class")
            ndim = self._longs(start + pos, 1)[0] & 0xFFFFFFFF
            if ndim > 64:
                raise ValueError(f"a tensor has {ndim} dimensions")
            numbers = self._longs(start + pos + 8, 2 * ndim + 1)
            pos += 8 + 8 * len(numbers)
            storage = self.objects[str(storage_key)]
            self._add(key, stored(storage, None, numbers[-1], numbers[:ndim], numbers[ndim:-1]))

    def _longs(self, start: int, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}q", self.store.read(self.path, start, start + 8 * count))

    def _add(self, key: Any, made: Any) -> None:
        if not isinstance(key, (int, str)) or str(key) in self.objects:
            raise ValueError("two of its objects have the same key")
        self.objects[str(key)] = made
