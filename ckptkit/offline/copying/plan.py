"""Defines the plan of a conversion: files of literal bytes (such as headers) and boxes (regions) of tensors.

--dry-run prints the plan. A plan is plain data, and this module does no I/O. Boxes are stored as columns of numbers,
because a checkpoint for 1,024 ranks has a million boxes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.columns import products
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.errors import NoSpaceError
from ckptkit.storage.store import Store
from ckptkit.units import first_few, format_size

if TYPE_CHECKING:
    from ckptkit.formats.hf.header import FileLayout

Bytes = npt.NDArray[np.uint8]
_Int64 = npt.NDArray[np.int64]
# Fills a buffer with a tensor's row-major bytes, and returns how many finite elements its last cast made infinite.
Compute: TypeAlias = Callable[[Sequence[Bytes], Bytes], int]


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """A tensor that is computed from other tensors, such as a weight with a merged adapter.

    Attributes:
        inputs: The tensors that `compute` takes, in order. Each input is a whole tensor, which is either read from the
            source or computed, too. `compute` gets the input's row-major bytes in the input's dtype.
        compute: A function that fills a buffer with the tensor in `dtype`. May be called from any thread.
        label: The formula that the plan shows: "W + 2.0 * B @ A".
        scratch: How many bytes `compute` needs in addition to the inputs and the result.
        cut: A function that returns the tensor for only the rows [start, stop). None if rows cannot be computed
            separately.
        by_element: Whether each element depends only on the inputs' elements at the same position. If so, computing few
            rows at a time is as fast as computing many rows.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    inputs: tuple[OutputTensor, ...]
    compute: Compute
    label: str
    scratch: int = 0
    cut: Callable[[int, int], ComputedTensor] | None = None
    by_element: bool = False

    @property
    def numel(self) -> int:
        return Box.whole(self.shape).numel

    @property
    def sources(self) -> tuple[str, ...]:
        """The inputs' catalog keys, without duplicates."""
        return tuple(dict.fromkeys(key for target in self.inputs for key in target.sources))

    @property
    def read(self) -> tuple[Target, ...]:
        """The stored tensors to read in order to compute this tensor, including those for its computed inputs."""
        return tuple(t for item in self.inputs for t in ((item,) if isinstance(item, Target) else item.read))

    def rows(self, start: int, stop: int) -> ComputedTensor:
        """Return a tensor that consists of only the rows [start, stop).

        `cut` must be set, unless the range covers all rows.
        """
        if (start, stop) == (0, self.shape[0]):
            return self
        assert self.cut is not None
        return self.cut(start, stop)


OutputTensor: TypeAlias = Target | ComputedTensor


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes of a file that are known without reading tensors: a header, framing, or a whole small file."""

    start: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CrcField:
    """A field for the CRC-32 of the file's bytes [start, start + nbytes): four bytes, little-endian, written last.

    Attributes:
        at: Offsets in the file at which the CRC is written (local header, data descriptor, central directory). The CRC
            overwrites literal bytes. No offset may be in a range that a CRC covers.
    """

    at: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file of the result. Its literal bytes and the tensor boxes placed in it must cover each byte exactly once.

    Attributes:
        literals, crcs: The literal bytes and CRC fields. Both may be lazy, but can be iterated several times.
    """

    path: str
    nbytes: int
    literals: Iterable[Literal] = ()
    crcs: Iterable[CrcField] = ()

    @classmethod
    def of_bytes(cls, path: str, data: bytes) -> OutputFile:
        """Return a file whose content is `data`, such as a config or an index."""
        return cls(path, len(data), (Literal(0, data),))

    @classmethod
    def of_layout(cls, path: str, layout: FileLayout) -> OutputFile:
        return cls(path, layout.nbytes, tuple(starmap(Literal, layout.literals)), tuple(starmap(CrcField, layout.crcs)))


@dataclass(frozen=True, slots=True)
class Placement:
    """The positions in the result at which the boxes of a tensor are written. Each row describes one box.

    Each box is row-major and without gaps.

    Attributes:
        files: [n] index into `Plan.files`.
        starts: [n] byte offset in the file.
        offsets, sizes: [n, ndim] the box, in elements. Boxes may repeat (replicas), but must cover the tensor.
    """

    tensor: OutputTensor
    files: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    @staticmethod
    def whole(tensor: OutputTensor, file: int, start: int) -> Placement:
        """Return a placement that writes the whole tensor as one box."""
        return _WholePlacement(tensor, file, start)

    @staticmethod
    def joined(placements: Sequence[Placement]) -> tuple[_Int64, _Int64, _Int64]:
        """Return three columns with a row for each box in all placements: its file, start, and size in bytes."""
        if all(isinstance(item, _WholePlacement) for item in placements):
            columns = np.array([item.only() for item in placements], np.int64).reshape(-1, 3).T
            return columns[0], columns[1], columns[2]
        counts = [len(item) for item in placements]
        # One product for all placements, because a product for each would take seconds.
        widths = np.repeat([len(item.tensor.shape) for item in placements], counts)
        numels = products(np.concatenate([item.sizes.reshape(-1) for item in placements]), widths)
        return (
            np.concatenate([item.files for item in placements]).astype(np.int64),
            np.concatenate([item.starts for item in placements]),
            numels * np.repeat([dtype_of(item.tensor.dtype).itemsize for item in placements], counts),
        )

    def is_all_of(self, shape: tuple[int, ...]) -> bool:
        """Return whether this placement is known to be a single box that covers a tensor of shape `shape`."""
        return False

    def only(self) -> tuple[int, int, int]:
        """Return the first box's file (an index into `Plan.files`), and its start and size in bytes."""
        return int(self.files[0]), int(self.starts[0]), int(self.nbytes()[0])

    def __len__(self) -> int:
        return len(self.starts)

    def box(self, row: int) -> Box:
        return Box(tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist()))

    def nbytes(self) -> npt.NDArray[np.int64]:
        """Return the size of each box in bytes, [n]."""
        itemsize = dtype_of(self.tensor.dtype).itemsize
        numel: npt.NDArray[np.int64] = np.prod(self.sizes, axis=1, dtype=np.int64)
        return numel * itemsize


class _WholePlacement(Placement):
    """The placement of a whole tensor as one box.

    Creates the columns (`files`, `starts`, ...) only when they are read, because there may be many such placements.
    """

    __slots__ = ("_file", "_start")

    _file: int
    _start: int

    def __init__(self, tensor: OutputTensor, file: int, start: int) -> None:
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "_file", file)
        object.__setattr__(self, "_start", start)

    @property
    def files(self) -> npt.NDArray[np.int32]:
        return np.array([self._file], np.int32)

    @property
    def starts(self) -> _Int64:
        return np.array([self._start], np.int64)

    @property
    def offsets(self) -> _Int64:
        return np.zeros((1, len(self.tensor.shape)), np.int64)

    @property
    def sizes(self) -> _Int64:
        return np.array(self.tensor.shape, np.int64).reshape(1, -1)

    def __len__(self) -> int:
        return 1

    def is_all_of(self, shape: tuple[int, ...]) -> bool:
        return self.tensor.shape == shape

    def only(self) -> tuple[int, int, int]:
        return self._file, self._start, math.prod(self.tensor.shape) * dtype_of(self.tensor.dtype).itemsize

    def box(self, row: int) -> Box:
        return Box.whole(self.tensor.shape)

    def nbytes(self) -> _Int64:
        return np.array([self.only()[2]], np.int64)


@dataclass(frozen=True, slots=True)
class Plan:
    """The files to write, and the source of every byte in them.

    Attributes:
        catalog: The source's catalog. The placed tensors refer to its entries by key.
        last: Paths of the files that make the directory readable, and are therefore published last.
        leftovers: The unused source tensors, each with the reason: [("optimizer.state...", "not the model's"), ...].
        missing: Names of tensors that the target needs but no source provides.
        notes: Notes for the user about the choices made.
    """

    catalog: Catalog
    files: tuple[OutputFile, ...]
    placements: tuple[Placement, ...]
    last: tuple[str, ...] = ()
    leftovers: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def nbytes(self) -> int:
        """The total size of all files in bytes."""
        return sum(file.nbytes for file in self.files)

    def lines(self) -> Iterator[str]:
        """Yield lines for tensors (with dtype, shape, size and files), files, unused and missing tensors, and notes."""
        for placement in self.placements:
            tensor, sources = placement.tensor, placement.tensor.sources
            entries = [self.catalog.tensors[name] for name in sources]
            if isinstance(tensor, ComputedTensor):
                made = f"{tensor.label} of ({', '.join(sources)})"
            else:
                made = first_few(sources, 3)
            name = made if made == tensor.name else f"{made} -> {tensor.name}"
            origin = "+".join(dict.fromkeys(entry.dtype for entry in entries))
            dtype = origin if origin == tensor.dtype else f"{origin} -> {tensor.dtype}"
            if len(placement) == 1:
                file, start, nbytes = placement.only()
                places = f"{self.files[file].path} @ {start}"
            else:
                files = [self.files[i].path for i in sorted(set(placement.files.tolist()))]
                nbytes, places = int(placement.nbytes().sum()), f"{len(placement)} boxes in {first_few(files, 3)}"
            shape = f"{list(tensor.shape)} {format_size(nbytes)}"
            yield f"{name}  {dtype} {shape}  {places}  from {first_few(_source_files(entries), 3)}"
        for item in self.files:
            yield f"{item.path}  {format_size(item.nbytes)}"
        for reason, names in self.left_over().items():
            yield f"left over: {first_few(names)} ({reason})"
        if self.missing:
            yield f"missing: {first_few(self.missing)}"
        yield from (f"note: {note}" for note in self.notes)

    def left_over(self) -> dict[str, list[str]]:
        """Return the names of the unused source tensors, grouped by reason."""
        names: dict[str, list[str]] = {}
        for name, reason in self.leftovers:
            names.setdefault(reason, []).append(name)
        return names

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, box by box. Use it only for small plans."""
        return {
            "files": [{"path": file.path, "nbytes": file.nbytes} for file in self.files],
            "tensors": [_placement_json(self, placement) for placement in self.placements],
            "left_over": [{"name": name, "reason": reason} for name, reason in self.leftovers],
            "missing": list(self.missing),
            "notes": list(self.notes),
        }


def _source_files(entries: Sequence[TensorEntry]) -> list[str]:
    return sorted({path for entry in entries for path, _, _ in entry.slices.records()})


def _placement_json(plan: Plan, placement: Placement) -> dict[str, Any]:
    tensor = placement.tensor
    entries = {key: plan.catalog.tensors[key] for key in tensor.sources}
    sources = [
        {"name": key, "dtype": entry.dtype, "shape": list(entry.shape), "slices": len(entry.slices),
         "files": _source_files([entry])}
        for key, entry in entries.items()
    ]  # fmt: skip
    columns = (placement.files, placement.starts, placement.offsets, placement.sizes)
    boxes = [
        {"file": plan.files[file].path, "start": start, "offsets": offsets, "sizes": sizes}
        for file, start, offsets, sizes in zip(*(column.tolist() for column in columns), strict=True)
    ]
    nbytes, computed = int(placement.nbytes().sum()), {}
    if isinstance(tensor, ComputedTensor):
        computed["computed"] = tensor.label
    about = {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "nbytes": nbytes}
    return {**about, "sources": sources, "boxes": boxes, **computed}


def check_room(plan: Plan, destination: Store, *, held: int = 0) -> None:
    """Raise NoSpaceError if there is not enough space for a plan's files.

    `held` is the number of bytes of these files that are already on disk.
    """
    free, wanted = destination.free_bytes(), max(0, plan.nbytes - held)
    if free is not None and free < wanted:
        raise NoSpaceError(
            f"{destination.url} has {format_size(free)} free, but {format_size(wanted)} are needed. Free "
            "some space or write elsewhere."
        )


# --- distribution of files over ranks


def share_out(plan: Plan, world_size: int) -> list[int]:
    """Return the rank that writes each file.

    Assigns the largest files first. Each file goes to the rank that has the fewest bytes so far. Rank 0 publishes
    the result, so it also writes the files that are published last, except shards (.safetensors).
    """
    late = set(plan.last)
    owners = [0] * len(plan.files)
    loads = [0] * world_size
    for index in sorted(range(len(plan.files)), key=lambda i: -plan.files[i].nbytes):
        if plan.files[index].path in late and not plan.files[index].path.endswith(".safetensors"):
            continue
        rank = loads.index(min(loads))
        owners[index] = rank
        loads[rank] += plan.files[index].nbytes
    return owners


def restricted(plan: Plan, kept: Sequence[int]) -> Plan:
    """Return a plan that writes only the files with the indices `kept`, in the order of `kept`."""
    if len(kept) == len(plan.files):
        return plan
    renumbered = np.full(len(plan.files), -1, np.int32)
    renumbered[list(kept)] = np.arange(len(kept))
    placements = []
    for placement in plan.placements:
        rows = np.flatnonzero(renumbered[placement.files] >= 0)
        if len(rows):
            files = renumbered[placement.files[rows]]
            columns = (placement.starts[rows], placement.offsets[rows], placement.sizes[rows])
            placements.append(Placement(placement.tensor, files, *columns))
    return Plan(plan.catalog, tuple(plan.files[index] for index in kept), tuple(placements), plan.last)
