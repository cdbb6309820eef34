"""Describes the contents of a checkpoint: its tensors, its other objects, and how it was written.

Every format reader returns a `Catalog`, and every offline command works on a `Catalog`. A tensor consists of slices. A
slice is a box of the tensor that is stored in a byte range of a file. Slices are kept as columns of numbers, because a
checkpoint may have a million slices. A `TensorSlice` is a single slice, created from the columns on access.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, overload

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box, row_major_strides
from ckptkit.catalog.columns import distinct_boxes, tiles_exactly
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.digests import proves_equality
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]


class Role(str, enum.Enum):
    """An entry's purpose in the training run."""

    MODEL = "model"  # parameters and persistent buffers
    MASTER = "master"  # fp32 copies of low-precision parameters
    OPTIMIZER = "optimizer"  # moments, steps, param_groups
    OTHER = "other"  # schedulers, RNG, dataloader, user values


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest of the bytes [start, start + nbytes) of a slice's file, or of the decoded record if there is a codec.

    The range may be larger than the slice. For example, the CRC-32 of a zip record covers a whole torch storage, which
    may contain more than the slice.
    """

    algorithm: str  # one of `digests.NAMES`
    value: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Codec:
    """The compression of the record that contains a slice. The record is the bytes [start, start + nbytes) of the file.

    For a slice with a codec, `TensorSlice.start` counts from the first byte of the decoded record.
    """

    name: str  # "zstd"
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A region of a tensor, and the place in a file where its bytes are stored.

    Attributes:
        box: The region of the tensor.
        path: The file, relative to the checkpoint's store.
        start: Byte offset of the box's first element in the file, or in the decoded record if there is a codec.
        nbytes: Number of bytes from the start of the first element to the end of the last element. If the slice is
            contiguous, this is numel * itemsize.
        strides: The strides in elements. None if the box is stored row-major.
        digest: The recorded digest. None if no digest was recorded.
        codec: The compression of the slice's record. None if the record is not compressed.
        rank: The rank that wrote the slice. -1 if unknown.
    """

    box: Box
    path: str
    start: int
    nbytes: int
    strides: tuple[int, ...] | None = None
    digest: Digest | None = None
    codec: Codec | None = None
    rank: int = -1


@dataclass(eq=False, slots=True)
class SliceArray(Sequence[TensorSlice]):
    """The slices of one tensor as columns. `self[i]` is slice i as a `TensorSlice`.

    Attributes:
        paths: A tuple of file names. The tensors of a catalog may share the tuple.
        files: [n] the index of each slice's file in `paths`.
        starts, nbytes: [n] the byte range of each slice, as in `TensorSlice`.
        offsets, sizes: [n, ndim] the box of each slice, in elements.
        ranks: [n] the rank that wrote the slice, -1 if unknown. None if all are unknown.
        algorithm: The digest algorithm of all slices. None if there are no digests.
        digests: [n] digest values. None if there are no digests.
        digest_starts, digest_nbytes: [n] the byte range that each digest covers. `digest_nbytes` is 0 for a slice
            without a digest. Both are None if each digest covers exactly its slice.
        strides: A mapping from slice index to strides. Contiguous slices are left out.
        codecs: A mapping from slice index to codec. Slices that are not compressed are left out.
    """

    paths: Sequence[str]
    files: npt.NDArray[np.int32]
    starts: Int64
    nbytes: Int64
    offsets: Int64
    sizes: Int64
    _: KW_ONLY
    ranks: npt.NDArray[np.int32] | None = None
    algorithm: str | None = None
    digests: UInt64 | None = None
    digest_starts: Int64 | None = None
    digest_nbytes: Int64 | None = None
    strides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    codecs: Mapping[int, Codec] = field(default_factory=dict)
    opaque: ClassVar[str] = ""
    """Why the tensor's bytes cannot be located, such as "is a quantized tensor". "" if they can be located."""

    @classmethod
    def of(cls, slices: Sequence[TensorSlice], ndim: int) -> SliceArray:
        """Convert slices to columns. If a slice has no digest, all digests are dropped.

        All digests must use the same algorithm.
        """
        n = len(slices)
        paths = list(dict.fromkeys(s.path for s in slices))
        index = {path: i for i, path in enumerate(paths)}
        digests = [s.digest for s in slices]
        known = [d for d in digests if d is not None] if n else []
        has_digests = n > 0 and len(known) == n
        return cls(
            paths,
            np.array([index[s.path] for s in slices], np.int32),
            np.array([s.start for s in slices], np.int64),
            np.array([s.nbytes for s in slices], np.int64),
            np.array([s.box.offsets for s in slices], np.int64).reshape(n, ndim),
            np.array([s.box.sizes for s in slices], np.int64).reshape(n, ndim),
            ranks=np.array([s.rank for s in slices], np.int32),
            algorithm=known[0].algorithm if has_digests else None,
            digests=np.array([d.value for d in known], np.uint64) if has_digests else None,
            digest_starts=np.array([d.start for d in known], np.int64) if has_digests else None,
            digest_nbytes=np.array([d.nbytes for d in known], np.int64) if has_digests else None,
            strides={i: s.strides for i, s in enumerate(slices) if s.strides is not None},
            codecs={i: s.codec for i, s in enumerate(slices) if s.codec is not None},
        )

    def under(self, paths: Sequence[str]) -> SliceArray:
        """Return the same slices with renamed files. `paths` contains the new names, in the order of `self.paths`."""
        return replace(self, paths=paths)

    def take(self, rows: Int64) -> SliceArray:
        """Return the slices with the indices `rows`."""
        names = ("files", "starts", "nbytes", "offsets", "sizes", "ranks", "digests", "digest_starts", "digest_nbytes")
        columns = {name: column[rows] for name in names if (column := getattr(self, name)) is not None}
        numbers, strides, codecs = list(enumerate(rows.tolist())), self.strides, self.codecs
        return SliceArray(
            paths=self.paths,
            algorithm=self.algorithm,
            strides={i: strides[row] for i, row in numbers if row in strides},
            codecs={i: codecs[row] for i, row in numbers if row in codecs},
            **columns,
        )

    def __len__(self) -> int:
        return len(self.starts)

    def byte_range(self, row: int) -> tuple[str, int, int]:
        """Return (path, start, nbytes) of slice `row`. Faster than `self[row]`."""
        return self.paths[self.files.item(row)], self.starts.item(row), self.nbytes.item(row)

    def byte_ranges(self) -> list[tuple[str, int, int]]:
        """Return (path, start, nbytes) of each slice."""
        files = [self.paths[file] for file in self.files.tolist()]
        return list(zip(files, self.starts.tolist(), self.nbytes.tolist(), strict=True))

    def records(self) -> list[tuple[str, int, int]]:
        """Return (path, start, nbytes) of the record of each slice.

        The record is the byte range that the checkpoint's index gives. In DCP, this is the range in the `_StorageInfo`,
        which may contain more than the slice's bytes. In other formats, it is the slice's own byte range. Also works
        for tensors that cannot be read without their Python class.
        """
        return self.byte_ranges()

    @overload
    def __getitem__(self, row: int) -> TensorSlice: ...
    @overload
    def __getitem__(self, row: slice) -> list[TensorSlice]: ...
    def __getitem__(self, row: int | slice) -> TensorSlice | list[TensorSlice]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if row < 0:
            row += len(self)
        if not 0 <= row < len(self):
            raise IndexError(row)
        start, nbytes = int(self.starts[row]), int(self.nbytes[row])
        return TensorSlice(
            Box(tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist())),
            self.paths[int(self.files[row])],
            start,
            nbytes,
            self.strides.get(row),
            self.digest(row),
            self.codecs.get(row),
            -1 if self.ranks is None else int(self.ranks[row]),
        )

    def __iter__(self) -> Iterator[TensorSlice]:
        return (self[i] for i in range(len(self)))

    @staticmethod
    def whole(paths: tuple[str], start: int, nbytes: int, shape: tuple[int, ...]) -> SliceArray:
        """Return the array for a tensor that is stored as one contiguous slice.

        Most tensors are stored like this, so this array creates its columns only on demand. `paths` contains only the
        tensor's file. All tensors in a file share this tuple.
        """
        return _WholeSlice(paths, start, nbytes, shape)

    def is_all_of(self, shape: tuple[int, ...]) -> bool:
        """Return True if the array is known to be one row-major slice that covers a tensor of this shape.

        False may also mean "unknown": the columns are not examined, because creating columns is slow.
        """
        return False

    @staticmethod
    def joined(columns: Sequence[SliceArray]) -> tuple[Int64, Int64]:
        """Return two arrays: the `starts` of several tensors concatenated, and their `nbytes` concatenated."""
        if all(isinstance(item, _WholeSlice) for item in columns):  # creating 300,000 tiny arrays would take seconds
            rows = [item.byte_range(0) for item in columns]
            return np.array([row[1] for row in rows], np.int64), np.array([row[2] for row in rows], np.int64)
        return np.concatenate([item.starts for item in columns]), np.concatenate([item.nbytes for item in columns])

    def digest(self, row: int) -> Digest | None:
        """Return the digest of slice `row`, or None if no digest was recorded."""
        if self.algorithm is None or self.digests is None:
            return None
        starts, lengths = self.digest_starts, self.digest_nbytes
        if starts is None or lengths is None:
            starts, lengths = self.starts, self.nbytes
        return Digest(self.algorithm, self.digests.item(row), starts.item(row), lengths.item(row))


class _WholeSlice(SliceArray):
    """Holds the single, contiguous slice of a tensor.

    Creates the columns only on demand, so that the headers of files with many tensors are read faster.
    """

    __slots__ = ("_nbytes", "_shape", "_start")

    ranks = algorithm = digests = digest_starts = digest_nbytes = None
    strides: Mapping[int, tuple[int, ...]] = {}
    codecs: Mapping[int, Codec] = {}

    def __init__(self, paths: Sequence[str], start: int, nbytes: int, shape: tuple[int, ...]) -> None:
        self.paths = paths
        self._start = start
        self._nbytes = nbytes
        self._shape = shape

    def __getattr__(self, name: str) -> Any:
        """Create a column."""
        match name:
            case "files":
                return np.zeros(1, np.int32)
            case "starts" | "nbytes":
                return np.array([self._start if name == "starts" else self._nbytes], np.int64)
            case "offsets":
                return np.zeros((1, len(self._shape)), np.int64)
            case "sizes":
                return np.array(self._shape, np.int64).reshape(1, -1)
        raise AttributeError(name)

    def is_all_of(self, shape: tuple[int, ...]) -> bool:
        return self._shape == shape

    def under(self, paths: Sequence[str]) -> SliceArray:
        return _WholeSlice(paths, self._start, self._nbytes, self._shape)

    def byte_range(self, row: int) -> tuple[str, int, int]:
        return self.paths[0], self._start, self._nbytes

    def byte_ranges(self) -> list[tuple[str, int, int]]:
        return [(self.paths[0], self._start, self._nbytes)]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(1))]
        if row not in (0, -1):
            raise IndexError(row)
        return TensorSlice(Box.whole(self._shape), self.paths[0], self._start, self._nbytes)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint.

    Attributes:
        name: The unique key in the catalog, as the format stores it.
        dtype: torch's name without "torch.".
        shape: The whole tensor's shape.
        slices: The stored slices. They must cover the whole tensor. Slices may be replicas of each other.
        role: The tensor's purpose in the training run.
        fqn: For MODEL and MASTER: the parameter's name in the model, without wrappers' prefixes. For OPTIMIZER: the
            name of the parameter that the state belongs to, or "". For OTHER: "".
        state: For OPTIMIZER: the state's name, such as "exp_avg". For other roles: "".
        key: The path in the nested state dict, if the format records it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: SliceArray
    role: Role = Role.MODEL
    fqn: str = ""
    state: str = ""
    key: tuple[str | int, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes. Replicas are not counted."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def check_coverage(self) -> None:
        """Check that the slices cover every element. Only replicas (slices of the same box) may overlap.

        Raises:
            CorruptCheckpointError: A slice is outside the shape, or two slices overlap partially.
            IncompleteCheckpointError: Elements are missing.
        """
        check_boxes(self.name, self.shape, self.slices.offsets, self.slices.sizes)


def check_boxes(name: str, shape: tuple[int, ...], offsets: Int64, sizes: Int64) -> None:
    """Do the check of `TensorEntry.check_coverage` for slices with these offsets and sizes (two arrays, [n, ndim])."""
    rows = distinct_boxes(offsets, sizes)
    offsets, sizes, numel, whole = offsets[rows], sizes[rows], math.prod(shape), np.asarray(shape, np.int64)
    if ((offsets < 0) | (sizes < 0) | (sizes > whole) | (offsets > whole - sizes)).any():
        raise CorruptCheckpointError(f"tensor {name!r}: a slice is outside its shape {list(shape)}.")
    # Use Python's integers where 64 bits could overflow, because the shape may be malicious.
    exact = np.int64 if numel * max(1, len(rows)) < 2**63 else object
    covered = int(np.prod(sizes.astype(exact), axis=1).sum()) if len(rows) else 0
    if covered > numel or (covered == numel > 0 and not tiles_exactly(offsets, sizes, whole)):
        raise CorruptCheckpointError(f"tensor {name!r}: two of its slices overlap, but are not equal.")
    if covered != numel:
        raise IncompleteCheckpointError(
            f"tensor {name!r} of shape {list(shape)}: its slices cover only {covered} of {numel} elements."
        )


def same_by_record(first: TensorEntry, second: TensorEntry) -> bool | None:
    """Return whether two tensors have equal bytes, judging only by their catalog entries.

    Returns True if both tensors consist of the same byte ranges of the same files. Also returns True if all boxes and
    digests are equal, and the digest is strong enough to prove equality. Returns False if the boxes are equal but a
    digest differs. Returns None in all other cases, and for tensors of more than 4,096 slices.
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return None
    if len(first.slices) != len(second.slices) or len(first.slices) > 4096:
        return None
    a, b = (sorted(e.slices, key=lambda s: (s.box.offsets, s.box.sizes, s.path, s.start)) for e in (first, second))
    if any(x.box != y.box or x.strides != y.strides for x, y in zip(a, b, strict=True)):
        return None
    if all((x.path, x.start, x.codec) == (y.path, y.start, y.codec) for x, y in zip(a, b, strict=True)):
        return True
    digests = [(x.digest, y.digest, x.nbytes, x.start, y.start) for x, y in zip(a, b, strict=True)]
    for one, other, nbytes, start, other_start in digests:
        if one is None or other is None or one.algorithm != other.algorithm:
            return None
        if (one.start, one.nbytes, other.start, other.nbytes) != (start, nbytes, other_start, nbytes):
            return None
    if any(one.value != other.value for one, other, *_ in digests if one and other):
        return False
    return True if digests and digests[0][0] and proves_equality(digests[0][0].algorithm) else None


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """A value in a checkpoint that is not a tensor.

    Attributes:
        encoding: "torch_save" (decoded as by torch.load(weights_only=True)), "json", or "value" (not encoded).
        value: The value itself if `encoding` is "value".
    """

    name: str
    path: str = ""
    start: int = 0
    nbytes: int = 0
    codec: Codec | None = None
    encoding: str = "torch_save"
    value: Any = None
    digest: Digest | None = None
    role: Role = Role.OTHER
    key: tuple[str | int, ...] = ()


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """The device mesh of the job that wrote a checkpoint: the sizes and names of the dimensions, outermost first."""

    shape: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CatalogInfo:
    """Describes how a checkpoint was written, and lists its files.

    Attributes:
        format: The reader's name: "dcp", "safetensors", "ckptkit-sharded", "verl", ...
        producer: The program that wrote the checkpoint: "ckptkit 0.1.0", "accelerate", ... "" if unknown.
        step: Training step, if recorded.
        world_size: Number of ranks that wrote the checkpoint, if recorded.
        mesh: Device mesh, if recorded.
        files: Every file of the checkpoint, with its size in bytes (-1 if unknown).
        side_files: Files to include in an export (config.json, tokenizer...), relative to the store.
        model_files: The same for each of several models or adapters. Maps "<name>/config.json" to a path.
        notes: Notes for the user, for example "2 optimizer files were skipped: ...".
        extra: Anything else that the format records, as JSON values.
    """

    format: str
    producer: str = ""
    step: int | None = None
    world_size: int | None = None
    mesh: MeshInfo | None = None
    files: Mapping[str, int] = field(default_factory=dict)
    side_files: tuple[str, ...] = ()
    model_files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


class WholeTensors(Mapping[str, TensorEntry]):
    """A mapping of tensors that all have exactly one slice.

    Callers test for this type, which is faster than examining each of up to 300,000 tensors.
    """


@dataclass(frozen=True, slots=True)
class Catalog:
    """The contents of a checkpoint: its tensors and objects by name, and general information (`CatalogInfo`)."""

    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, ObjectEntry] = field(default_factory=dict)
    info: CatalogInfo = field(default_factory=lambda: CatalogInfo("unknown"))

    def opaque(self) -> dict[str, str]:
        """Return the tensors that cannot be read without their Python class, each with the reason.

        Examines all tensors that `in_parts` returns.
        """
        found = dict(self.info.extra.get("opaque", {}))
        found.update((e.name, why) for e in self.in_parts() if (why := e.slices.opaque))
        return found

    def in_parts(self) -> Iterable[TensorEntry]:
        """Return the tensors that may have gaps, or that only their Python class can read.

        These are all tensors, or none if `tensors` is a `WholeTensors`.
        """
        return () if isinstance(self.tensors, WholeTensors) else self.tensors.values()

    def paths(self) -> set[str]:
        """Return the files that contain slices."""
        tables = {id(entry.slices.paths): entry.slices.paths for entry in self.tensors.values()}  # often shared
        return {path for table in tables.values() for path in table}

    def has(self, role: Role) -> bool:
        """Return whether a tensor or an object has this role. An optimizer without momentum has only objects."""
        objects, tensors = self.objects.values(), self.tensors.values()
        return any(item.role is role for item in objects) or any(entry.role is role for entry in tensors)

    def by_role(self, role: Role) -> dict[str, TensorEntry]:
        """Return the tensors with this role, keyed by FQN for MODEL and MASTER, and by name for the other roles.

        A master weight without an FQN is also keyed by name. Some formats only number the parameters.

        Raises:
            CorruptCheckpointError: Two tensors with this role have the same key.
        """
        keyed = role in (Role.MODEL, Role.MASTER)
        found: dict[str, TensorEntry] = {}
        for entry in self.tensors.values():
            if entry.role is role:
                key = entry.fqn or entry.name if keyed else entry.name
                if key in found:
                    raise CorruptCheckpointError(
                        f"{role.value} tensor {key!r} exists twice: as {found[key].name!r} and as {entry.name!r}."
                    )
                found[key] = entry
        return found


def contiguous_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether a tensor with these strides is row-major. Ignores dimensions of size 1."""
    if 0 in shape:
        return True
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, row_major_strides(shape), strict=True))
