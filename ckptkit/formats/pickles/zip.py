"""Reads and writes the zip archives of torch.save. Reads the pickle, and finds the position of each storage.

Nothing in an archive is decompressed or copied. torch stores members uncompressed, so a tensor is a byte range in the
file. Any other kind of zip is refused.
"""

from __future__ import annotations

import errno
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ckptkit.digests import crc32
from ckptkit.errors import CorruptCheckpointError, UnsafePathError, UnsupportedFormatError
from ckptkit.formats.pickles.inert import StorageType
from ckptkit.formats.pickles.tensors import Storage, TensorRebuilder, known_dtype
from ckptkit.formats.pickles.walk import MAX_PICKLE_BYTES, Unknown, loads
from ckptkit.storage.store import FileInfo, ReadInto, Store
from ckptkit.units import first_few

LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # APPNOTE.TXT 4.3.7
_CENTRAL_HEADER = struct.Struct("<4s6H3I5H2I")  # 4.3.12
_END = struct.Struct("<4s4H2IH")  # 4.3.16
_END64 = struct.Struct("<4sQ2H2I4Q")  # 4.3.14
_LOCATOR64 = struct.Struct("<4sIQI")  # 4.3.15
_MAX_DIRECTORY_BYTES = 256 << 20
_MAX_NAME_BYTES = 1024
_NONE16, _NONE32 = 0xFFFF, 0xFFFFFFFF
_DOS_DIRECTORY = 0x10
_ENCRYPTED = 0x1 | 0x40
_ZIP64, _PADDING = 0x0001, 0x4246  # kinds of extra fields; the second is torch's own
_DOS_DATE = 0x21  # 1980-01-01, where zip timestamps start
_PLAIN_NAME = re.compile(rb"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")  # matches nearly all names


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive.

    Attributes:
        crc32: The recorded CRC-32 of the member, or None if unknown.
        header: Offset of the local header from the start of the archive.
    """

    name: str
    crc32: int | None
    nbytes: int
    header: int


def read_archive(
    store: Store,
    path: str,
    start: int = 0,
    nbytes: int | None = None,
    *,
    unknown: Unknown = "refuse",
    classes: bool = False,
) -> Any:
    """Return the value in the torch.save zip at bytes [start, start + nbytes) of `path`.

    Tensors become `StoredTensor`s. Reads only the zip directory, the pickle, and a small header per storage, but no
    tensor bytes.

    Args:
        nbytes: Length of the zip. By default, the zip extends to the end of the file.
        unknown: See `walk.loads`.
        classes: Return tensor subclasses as `ClassRecord`. If False, tensor subclasses are refused.
    """
    return Archive(store, path, start, nbytes).value(unknown=unknown, classes=classes)


def file_size(store: Store, path: str) -> int:
    """Return the size of a file or of the target of a symlink.

    Raises:
        FileNotFoundError: `path` does not exist.
        CorruptCheckpointError: `path` is neither a file nor a symlink.
        UnsafePathError: The symlink leads out of the store.
    """
    info = store.info(path)
    if info is None:
        raise FileNotFoundError(f"{path} does not exist")
    if info.kind not in ("file", "symlink"):
        raise CorruptCheckpointError(f"{path}: it is not a regular file.")
    if info.kind == "file":
        return info.size
    low, step = 0, 1 << 20
    while store.read(path, low + step - 1, low + step):
        low += step
        step *= 2
    high = low + step
    while low < high:  # search for the first offset at which nothing can be read
        middle = (low + high) // 2
        if store.read(path, middle, middle + 1):
            low = middle + 1
        else:
            high = middle
    return low


def sizes_in(store: Store, folder: str = "") -> dict[str, int]:
    """Return the size of each file in a folder. A link has its target's size, or -1 if the store does not follow it."""
    found = {item.path: item.size for item in store.list(folder) if item.kind in ("file", "symlink")}
    for path in (path for path, size in found.items() if size < 0):
        try:
            found[path] = file_size(store, path)
        except (FileNotFoundError, UnsafePathError, CorruptCheckpointError):
            continue
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
    return found


def _find_directory(tail: bytes, nbytes: int, file: str) -> tuple[int, int, int]:
    """Return the central directory's (count, size, offset).

    Archive comments are refused, because torch writes none.
    """
    base = len(tail) - _END.size
    if base < 0 or tail[base : base + 4] != b"PK\x05\x06":
        raise CorruptCheckpointError(
            f"{file}: it does not end like a zip archive of torch.save. It is truncated or overwritten."
        )
    _, disk, start_disk, here, count, size, offset, comment = _END.unpack_from(tail, base)
    at64 = base - _LOCATOR64.size
    if at64 >= 0 and tail[at64 : at64 + 4] == b"PK\x06\x07":
        _, _, end64, disks = _LOCATOR64.unpack_from(tail, at64)
        at = end64 - (nbytes - len(tail))
        if not 0 <= at <= at64 - _END64.size or tail[at : at + 4] != b"PK\x06\x06" or disks > 1:
            raise CorruptCheckpointError(f"{file}: its zip64 end record is not where its locator says.")
        wide = _END64.unpack_from(tail, at)
        for narrow, value, none in ((count, wide[7], _NONE16), (size, wide[8], _NONE32), (offset, wide[9], _NONE32)):
            if narrow not in (none, value):
                raise CorruptCheckpointError(f"{file}: its two zip end records contradict each other.")
        here, count, size, offset = wide[6:10]
        limit = end64
    else:
        limit = nbytes - _END.size
    if disk or start_disk or comment or here != count or size > _MAX_DIRECTORY_BYTES or offset + size != limit:
        raise CorruptCheckpointError(f"{file}: its zip end record is damaged.")
    if count > size // _CENTRAL_HEADER.size:
        raise CorruptCheckpointError(f"{file}: its zip directory declares {count} members in {size} bytes.")
    return count, size, offset


def _member(tail: bytes, pos: int, stop: int, file: str) -> tuple[Member, int]:
    if pos + _CENTRAL_HEADER.size > stop:
        raise CorruptCheckpointError(f"{file}: its zip directory is cut short.")
    (magic, _, _, flags, method, _, _, crc, packed, size, name_n, extra_n, comment_n, disk, _, attributes, header) = (
        _CENTRAL_HEADER.unpack_from(tail, pos)
    )
    pos += _CENTRAL_HEADER.size
    end = pos + name_n + extra_n + comment_n
    # For a member that is marked as a directory, torch's reader would return uninitialized memory.
    if magic != b"PK\x01\x02" or disk or attributes & _DOS_DIRECTORY or end > stop or name_n > _MAX_NAME_BYTES:
        raise CorruptCheckpointError(f"{file}: its zip directory is damaged.")
    name = _checked_name(tail[pos : pos + name_n], file)
    if _NONE32 in (packed, size, header):
        packed, size, header = _zip64(tail[pos + name_n : pos + name_n + extra_n], packed, size, header, file)
    if (method != 0 or packed != size) and "/code/" in name:
        raise UnsupportedFormatError(
            f"{file} is a TorchScript program (torch.jit.save), not a checkpoint. Save its state_dict() instead."
        )
    if method != 0 or packed != size:
        raise CorruptCheckpointError(
            f"{file}: member {name!r:.80} is compressed, which torch.save never does. It was not unpacked."
        )
    if flags & _ENCRYPTED:
        raise CorruptCheckpointError(f"{file}: member {name!r:.80} is encrypted.")
    return Member(name, crc, size, header), end


def _zip64(extra: bytes, packed: int, size: int, header: int, file: str) -> tuple[int, int, int]:
    """Return an entry's packed size, size and header offset.

    Numbers that do not fit into the entry are in the zip64 extra field (APPNOTE 4.5.3).
    """
    pos = 0
    while pos + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, pos)
        if kind == _ZIP64 and pos + 4 + length <= len(extra):
            values = iter(struct.unpack_from(f"<{length // 8}Q", extra, pos + 4))
            try:
                size = next(values) if size == _NONE32 else size
                packed = next(values) if packed == _NONE32 else packed
                header = next(values) if header == _NONE32 else header
            except StopIteration:
                break
            return packed, size, header
        pos += 4 + length
    raise CorruptCheckpointError(f"{file}: a zip64 field is missing.")


def _checked_name(raw: bytes, file: str) -> str:
    if _PLAIN_NAME.fullmatch(raw):
        return raw.decode("ascii")
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise CorruptCheckpointError(f"{file}: a member's name is not UTF-8.") from None
    parts = name.split("/")
    if name != name.strip() or not name.isprintable() or "\\" in name or ".." in parts or "" in parts or ":" in name:
        raise CorruptCheckpointError(f"{file}: member {name!r:.80} has an unsafe name.")
    return name


class Layout:
    """The members of one archive, by their names inside the archive's folder.

    Attributes:
        directory_nbytes: Size of the directory and the end records.
    """

    def __init__(self, directory: bytes, count: int, size: int, offset: int, file: str) -> None:
        """Parse `count` entries in `size` bytes of a directory that starts at `offset` in the archive."""
        self.file = file
        self.directory_nbytes = len(directory)
        members: dict[str, Member] = {}
        pos = stop = 0
        for _ in range(count):
            member, pos = _member(directory, pos, size, file)
            if member.name in members:
                raise CorruptCheckpointError(f"{file}: two members are called {member.name!r:.80}.")
            members[member.name] = member
        if not any(member.crc32 for member in members.values()):  # after torch.serialization.set_crc32_options(False)
            members = {name: replace(member, crc32=None) for name, member in members.items()}
        if pos != size:
            raise CorruptCheckpointError(f"{file}: its zip directory has {size - pos} extra bytes.")
        ordered = sorted(members.values(), key=lambda m: m.header)
        for member in ordered:
            if member.header < stop:
                raise CorruptCheckpointError(f"{file}: member {member.name!r:.80} overlaps another one.")
            stop = member.header + LOCAL_HEADER.size + len(member.name.encode()) + member.nbytes
        if stop > offset:
            raise CorruptCheckpointError(f"{file}: its members reach past the zip directory.")
        pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
        inside = [name for name in members if name.endswith((".pt", ".pth", ".bin", ".ckpt"))]
        if not pickles and inside:  # stable-baselines3
            raise UnsupportedFormatError(
                f"{file} is an archive of several torch.save files: {first_few(inside)}. Unpack it into an empty "
                "directory, and give one of these files."
            )
        if len(pickles) != 1:
            raise CorruptCheckpointError(f"{file}: a zip without the data.pkl of torch.save. Is it a model archive?")
        prefix = pickles[0].removesuffix("data.pkl")
        self.members = {name.removeprefix(prefix): m for name, m in members.items() if name.startswith(prefix)}
        following = [m.header for m in ordered[1:]] + [offset]
        self._next = {m.name: stop for m, stop in zip(ordered, following, strict=True)}
        if self.members["data.pkl"].nbytes > MAX_PICKLE_BYTES:
            raise CorruptCheckpointError(f"{file}: a pickle of {self.members['data.pkl'].nbytes} bytes is too large.")

    def start(self, member: Member, header: bytes) -> int:
        """Check a member's local header, and return the start of the member's bytes in the archive."""
        shown, name = f"member {member.name!r:.80}", member.name.encode()
        if len(header) < LOCAL_HEADER.size:
            raise CorruptCheckpointError(f"{self.file}: {shown} is cut short.")
        fields = LOCAL_HEADER.unpack_from(header)
        if fields[0] != b"PK\x03\x04" or fields[3] != 0 or fields[9] != len(name) or fields[2] & _ENCRYPTED:
            raise CorruptCheckpointError(f"{self.file}: the header of {shown} is damaged.")
        if header[LOCAL_HEADER.size : LOCAL_HEADER.size + len(name)] != name:
            raise CorruptCheckpointError(f"{self.file}: the header of {shown} names another member.")
        begin = member.header + LOCAL_HEADER.size + len(name) + int(fields[10])
        if begin + member.nbytes > self._next[member.name]:
            raise CorruptCheckpointError(f"{self.file}: {shown} overlaps what follows it.")
        return begin


def storage_of(identity: Any, find: Callable[[str], tuple[int, int | None]] | None, path: str) -> Storage:
    """Return the storage that a persistent id ("storage", class, key, location, numel) describes.

    Args:
        find: Returns (nbytes, crc32) of the member that contains the storage with the given key. Raises ValueError if
            there is no such member. If `find` is None, the id alone determines the size of the storage.
    """
    if not isinstance(identity, tuple) or len(identity) != 5 or identity[0] != "storage":
        raise ValueError("a persistent id is not a storage")
    _, kind, key, location, numel = identity
    if not isinstance(key, str) or not isinstance(location, str) or type(numel) is not int or numel < 0:
        raise ValueError("a persistent id is not a storage")
    if not isinstance(kind, StorageType):
        raise ValueError("a storage's type is not a storage class")
    dtype = kind.dtype
    wanted = numel * (1 if dtype is None else known_dtype(dtype).itemsize)
    nbytes, crc = (wanted, None) if find is None else find(key)
    if wanted > nbytes:
        raise ValueError(f"storage {key!r:.40} declares {wanted} bytes, but {nbytes} are stored")
    return Storage(path, key, nbytes, dtype, crc32=crc)


class Archive:
    """The torch.save zip at bytes [start, start + nbytes) of a file. By default, extends to the end of the file.

    The constructor reads and checks the directory.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        start: int = 0,
        nbytes: int | None = None,
        *,
        file: str = "",
        tail: int = 64 << 10,
    ) -> None:
        """Read the zip directory.

        Args:
            tail: Number of bytes to read first, from the end of the archive.
        """
        self.store = store
        self.path = path
        self.start = start
        self.nbytes = file_size(store, path) - start if nbytes is None else nbytes
        self.file = file or (path if start == 0 else f"{path} (item at byte {start})")
        self.storages: dict[tuple[str, str | None], Storage] = {}
        length = min(tail, self.nbytes)
        end = self.read(self.start + self.nbytes - length, length)
        count, size, offset = _find_directory(end, self.nbytes, self.file)
        wanted = self.nbytes - offset
        end = end[-wanted:] if wanted <= length else self.read(self.start + offset, wanted)
        self.layout = Layout(end, count, size, offset, self.file)

    def members(self) -> list[tuple[int, int, int | None]]:
        """Return (start in the file, nbytes, CRC-32 or None) of each member, without reading the pickle."""
        members = [*self.layout.members.values()]
        return [(at, m.nbytes, m.crc32) for at, m in zip(self._starts(members), members, strict=True)]

    def check(self) -> None:
        """Read all members and check their CRC-32s. Raises CorruptCheckpointError for the first CRC that differs."""
        for name, member in self.layout.members.items():
            if member.crc32 is not None:
                self.member(name)

    def value(self, *, unknown: Unknown = "refuse", classes: bool = False) -> Any:
        """Return the saved value, with `StoredTensor`s in place of tensors."""
        rebuilder = TensorRebuilder(classes=classes)
        value = loads(
            self.pickled(),
            file=self.file,
            functions=rebuilder.functions,
            persistent_load=self.storage,
            unknown=unknown,
        )
        self._locate_storages()
        rebuilder.finish(lambda tensor: self.read(tensor.start, tensor.nbytes))
        return value

    def pickled(self) -> bytes:
        """Return the bytes of the pickle, after checking that the archive is little-endian."""
        order = self.member("byteorder") if "byteorder" in self.layout.members else b"little"
        if order != b"little":
            raise UnsupportedFormatError(
                f"{self.file}: its byte order is {order[:16]!r}; only little-endian is supported."
            )
        return self.member("data.pkl")

    def member(self, name: str) -> bytes:
        """Return a member's bytes, after checking their CRC-32 if it is known."""
        member = self.layout.members[name]
        data = self.read(self._start(member, self._header(member)), member.nbytes)
        if member.crc32 not in (None, crc32(data)):
            raise CorruptCheckpointError(f"{self.file}: member {member.name!r:.80} does not match its CRC-32.")
        return data

    def read(self, start: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes of the file."""
        buffer = bytearray(nbytes)
        self.store.read_into(self.path, start, memoryview(buffer))
        return bytes(buffer)

    def _start(self, member: Member, header: bytes) -> int:
        return self.start + self.layout.start(member, header)

    def _header(self, member: Member) -> bytes:
        return self.read(self.start + member.header, LOCAL_HEADER.size + len(member.name.encode()))

    def storage(self, identity: Any) -> Storage:
        """Return the storage that a persistent id describes. `_locate_storages` later sets the storage's position.

        The pickle may refer to a storage with two dtypes, if a tensor is a view of another tensor in a different dtype.
        """
        made = storage_of(identity, self.stored, self.path)
        return self.storages.setdefault((made.key, made.dtype), made)

    def stored(self, key: str) -> tuple[int, int | None]:
        member = self.layout.members.get(f"data/{key}")
        if member is None:
            raise ValueError(f"storage {key!r:.40} is not in the archive")
        return member.nbytes, member.crc32

    def _locate_storages(self) -> None:
        """Set the positions of all storages that the pickle refers to."""
        storages = list(self.storages.values())
        starts = self._starts([self.layout.members[f"data/{s.key}"] for s in storages])
        for storage, start in zip(storages, starts, strict=True):
            storage.start = start

    def _starts(self, members: Sequence[Member]) -> list[int]:
        """Return the start of each member's bytes in the file. Reads all local headers in one batch."""
        headers = [bytearray(LOCAL_HEADER.size + len(m.name.encode())) for m in members]
        self.store.read_many(
            [ReadInto(self.path, self.start + m.header, memoryview(h)) for m, h in zip(members, headers, strict=True)]
        )
        return [self._start(member, bytes(header)) for member, header in zip(members, headers, strict=True)]


def memory_store(path: str, data: bytes) -> Store:
    """Return a store whose only file is `data`, for functions that read archives."""
    return cast(Store, _Memory(path, data))


class _Memory:
    """Implements, for bytes in memory, the few store methods that reading an archive needs."""

    url = "memory:"
    asking_costs = sizes_are_free = True

    def __init__(self, path: str, data: bytes) -> None:
        self._path = path
        self._data = data

    def info(self, path: str) -> FileInfo | None:
        return FileInfo(path, "file", len(self._data), 0.0)

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._data[start:stop]

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        data = self._data[start : start + len(view)]
        if len(data) != len(view):
            raise CorruptCheckpointError(f"{path}: a decoded record ends early.")
        view[:] = data

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        for read in reads:
            self.read_into(read.path, read.start, read.view)


# --- writing: members are stored uncompressed, and ZIP64 is used only if an offset or a size requires it

_WIDE = _NONE32  # this number and larger ones are in a ZIP64 field; the usual field then contains _NONE32


def _narrow(value: int) -> int:
    return _NONE32 if value >= _WIDE else value


def local_header(name: bytes, crc: int, nbytes: int, *, flags: int = 0, padding: int | None = None) -> bytes:
    """Return the header that precedes a member's bytes. `padding` is the number of zeros that align the bytes."""
    wide = nbytes >= _WIDE
    extra = struct.pack("<HHQQ", _ZIP64, 16, nbytes, nbytes) if wide else b""
    if padding is not None:
        extra += struct.pack("<HH", _PADDING, padding) + bytes(padding)
    size, version = _narrow(nbytes), 45 if wide else 20
    fields = (b"PK\x03\x04", version, flags, 0, 0, _DOS_DATE, crc, size, size, len(name), len(extra))
    return LOCAL_HEADER.pack(*fields) + name + extra


def central_header(name: bytes, crc: int, nbytes: int, offset: int, *, flags: int = 0) -> bytes:
    """Return the directory entry of a member whose local header is at `offset`."""
    wide = [value for value in (nbytes, nbytes, offset) if value >= _WIDE]
    extra = struct.pack(f"<HH{len(wide)}Q", _ZIP64, 8 * len(wide), *wide) if wide else b""
    size, version = _narrow(nbytes), 45 if wide else 20
    fields = (b"PK\x01\x02", version, version, flags, 0, 0, _DOS_DATE, crc, size, size, len(name), len(extra))
    return _CENTRAL_HEADER.pack(*fields, 0, 0, 0, 0, _narrow(offset)) + name + extra


def end_records(entries: int, directory_nbytes: int, directory_at: int) -> bytes:
    """Return the end records, which follow the zip directory."""
    end = b""
    if entries >= _NONE16 or directory_nbytes >= _WIDE or directory_at >= _WIDE:
        end = _END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, entries, entries, directory_nbytes, directory_at)
        end += _LOCATOR64.pack(b"PK\x06\x07", 0, directory_at + directory_nbytes, 1)
    count, nbytes, at = min(entries, _NONE16), _narrow(directory_nbytes), _narrow(directory_at)
    return end + _END.pack(b"PK\x05\x06", 0, 0, count, count, nbytes, at, 0)
