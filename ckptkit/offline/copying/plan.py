"""The plan of a conversion: files made of literal bytes and of boxes of tensors. A value, printed by --dry-run.

No I/O. Boxes are columns of numbers: a checkpoint for 1,024 ranks has a million.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog
from ckptkit.catalog.targets import Target
from ckptkit.errors import NoSpaceError
from ckptkit.storage.store import Store
from ckptkit.units import format_size

__all__ = [
    "ComputedTensor",
    "CrcField",
    "Literal",
    "OutputFile",
    "OutputTensor",
    "Placement",
    "Plan",
    "check_room",
    "restricted",
    "share_out",
]

Bytes = npt.NDArray[np.uint8]
_NAMED = 8  # leftovers listed by name per reason; if there are more, only the first is named


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """A tensor computed from others, in full or by rows: a merged adapter, for example.

    Attributes:
        inputs: The arguments of `compute`, in this order: full tensors as row-major bytes of their dtype.
        compute: Returns the tensor's bytes, row-major, of `dtype`. May be called from any thread.
        label: The formula, shown in the plan: "W + 2.0 * B @ A".
        scratch: Additional bytes that `compute` needs, beyond inputs and result.
        cut: Returns the tensor for only the rows [start, stop); None if rows cannot be computed separately.
        by_element: Whether each element depends only on the inputs' elements at the same position, so that computing
            few rows at a time is as fast as many.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    inputs: tuple[Target, ...]
    compute: Callable[[Sequence[Bytes]], Bytes]
    label: str
    scratch: int = 0
    cut: Callable[[int, int], ComputedTensor] | None = None
    by_element: bool = False

    @property
    def numel(self) -> int:
        return Box.whole(self.shape).numel

    @property
    def sources(self) -> tuple[str, ...]:
        """The catalog keys of its inputs, each once."""
        return tuple(dict.fromkeys(key for target in self.inputs for key in target.sources))


OutputTensor: TypeAlias = Target | ComputedTensor


@dataclass(frozen=True, slots=True)
class Literal:
    """Bytes that are known before the data: headers, framing, a whole small file."""

    start: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CrcField:
    """A CRC-32, four bytes little endian, of the file's bytes [start, start + nbytes). It is written last.

    Attributes:
        at: Positions of the field (local header, data descriptor, central directory). It overwrites literals. No
            position may be in a range that a CRC covers.
    """

    at: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file of the result. Its literals and the boxes placed in it must cover it exactly, once.

    Attributes:
        literals, crcs: May be lazy; they may be iterated several times.
    """

    path: str
    nbytes: int
    literals: Iterable[Literal] = ()
    crcs: Iterable[CrcField] = ()

    @classmethod
    def of_bytes(cls, path: str, data: bytes) -> OutputFile:
        """Return a file with the content `data`: a config or an index."""
        return cls(path, len(data), (Literal(0, data),))


@dataclass(frozen=True, slots=True)
class Placement:
    """Where boxes of one tensor are written, each row-major and without gaps. One row per box.

    Attributes:
        files: [n] index into `Plan.files`.
        starts: [n] byte offset in the file.
        offsets, sizes: [n, ndim] elements. Boxes may repeat (replicas) but must cover the tensor.
    """

    tensor: OutputTensor
    files: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    @classmethod
    def whole(cls, tensor: OutputTensor, file: int, start: int) -> Placement:
        """Return the placement of the whole tensor at one place."""
        return cls(
            tensor,
            np.array([file], np.int32),
            np.array([start], np.int64),
            np.zeros((1, len(tensor.shape)), np.int64),
            np.array([tensor.shape], np.int64).reshape(1, len(tensor.shape)),
        )

    def __len__(self) -> int:
        return len(self.starts)

    def box(self, row: int) -> Box:
        return Box(tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist()))

    def nbytes(self) -> npt.NDArray[np.int64]:
        """Return the bytes of each box, [n]."""
        itemsize = dtype_of(self.tensor.dtype).itemsize
        if len(self) == 1:  # the usual case, and faster without numpy: checkpoints have 100,000 small tensors
            return np.array([math.prod(self.sizes[0].tolist()) * itemsize], np.int64)
        numel: npt.NDArray[np.int64] = np.prod(self.sizes, axis=1, dtype=np.int64)
        return numel * itemsize


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that will be written, and its sources.

    Attributes:
        catalog: The source; the parts of the tensors name its entries.
        last: Paths that are published last, because they make the directory readable.
        leftovers: Unused source tensors, with the reason: [("optimizer.state...", "not the model's"), ...].
        missing: Names that the target needs and no source provides.
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
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def lines(self) -> Iterator[str]:
        """Yield one line per tensor: source -> target with dtype, shape, bytes and files; then the leftovers."""
        for placement in self.placements:
            tensor = placement.tensor
            yield (
                f"{_renamed(tensor)}  {_dtypes(self.catalog, tensor)} {list(tensor.shape)} "
                f"{format_size(sum(placement.nbytes().tolist()))}  {_places(self, placement)}"
                f"  from {_listed(_source_files(self.catalog, tensor.sources))}"
            )
        for file in self.files:
            yield f"{file.path}  {format_size(file.nbytes)}"
        for reason, names in self.left_over().items():
            if len(names) <= _NAMED:
                yield from (f"left over: {name} ({reason})" for name in names)
            else:
                yield f"left over: {len(names)} tensors, {names[0]}, ... ({reason}); --json lists all"
        yield from (f"missing: {name}" for name in self.missing)
        yield from (f"note: {note}" for note in self.notes)

    def left_over(self) -> dict[str, list[str]]:
        """Return the names of the leftovers by reason."""
        names: dict[str, list[str]] = {}
        for name, reason in self.leftovers:
            names.setdefault(reason, []).append(name)
        return names

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, row by row; for small plans."""
        return {
            "files": [{"path": file.path, "nbytes": file.nbytes} for file in self.files],
            "tensors": [_placement_json(self, placement) for placement in self.placements],
            "left_over": [{"name": name, "reason": reason} for name, reason in self.leftovers],
            "missing": list(self.missing),
            "notes": list(self.notes),
        }


def _renamed(tensor: OutputTensor) -> str:
    """Return "source -> name", or only the name if it is unchanged."""
    sources = _sources(tensor)
    return sources if sources == tensor.name else f"{sources} -> {tensor.name}"


def _sources(tensor: OutputTensor) -> str:
    names = tensor.sources
    if isinstance(tensor, ComputedTensor):
        return f"{tensor.label} of ({', '.join(names)})"
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown}, ... ({len(names)} sources)"


def _dtypes(catalog: Catalog, tensor: OutputTensor) -> str:
    found = dict.fromkeys(catalog.tensors[key].dtype for key in tensor.sources)
    origin = "+".join(found)
    return tensor.dtype if origin == tensor.dtype else f"{origin} -> {tensor.dtype}"


def _places(plan: Plan, placement: Placement) -> str:
    files = [plan.files[i].path for i in sorted(set(placement.files.tolist()))]
    if len(placement) == 1:
        return f"{files[0]} @ {int(placement.starts[0])}"
    return f"{len(placement)} boxes in {_listed(files)}"


def _listed(files: Sequence[str]) -> str:
    return ", ".join(files[:3]) + (f", ... ({len(files)} files)" if len(files) > 3 else "")


def _source_files(catalog: Catalog, names: Iterable[str]) -> list[str]:
    """Return the files that hold the slices of these tensors, in order."""
    slices = [catalog.tensors[name].slices for name in dict.fromkeys(names)]
    return sorted({path for item in slices for path, _, _ in item.records()})


def _placement_json(plan: Plan, placement: Placement) -> dict[str, Any]:
    tensor = placement.tensor
    result: dict[str, Any] = {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "nbytes": int(placement.nbytes().sum()),
        "sources": [_source_json(plan.catalog, key) for key in tensor.sources],
        "boxes": [
            {
                "file": plan.files[int(placement.files[row])].path,
                "start": int(placement.starts[row]),
                "offsets": placement.offsets[row].tolist(),
                "sizes": placement.sizes[row].tolist(),
            }
            for row in range(len(placement))
        ],
    }
    if isinstance(tensor, ComputedTensor):
        result["computed"] = tensor.label
    return result


def _source_json(catalog: Catalog, key: str) -> dict[str, Any]:
    entry = catalog.tensors[key]
    return {
        "name": key,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "slices": len(entry.slices),
        "files": _source_files(catalog, [key]),
    }


def check_room(plan: Plan, destination: Store, *, held: int = 0) -> None:
    """Raise if there is not enough space for the files of a plan, of which `held` bytes already exist."""
    free, wanted = destination.free_bytes(), max(0, plan.nbytes - held)
    if free is not None and free < wanted:
        raise NoSpaceError(
            f"{destination.url} has {format_size(free)} free, but {format_size(wanted)} are needed. Free "
            "some space or write elsewhere."
        )


# Distribute the files of a plan over ranks.


def share_out(plan: Plan, world_size: int) -> list[int]:
    """Return the rank of each file: the largest files first, each to the least loaded rank.

    Files that are published last go to rank 0, which publishes them.
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
    """Return the plan restricted to some of its files, in the same order."""
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
            placements.append(type(placement)(placement.tensor, files, *columns))
    return Plan(plan.catalog, tuple(plan.files[index] for index in kept), tuple(placements), plan.last)
