"""Tensors made of sources that arithmetic changes first: cut, joined or permuted, whole or by their rows."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.targets import Part, Target
from ckptkit.offline.merge_formulas import Formula
from ckptkit.offline.plan import ComputedTensor

if TYPE_CHECKING:
    import torch

__all__ = ["Change", "changed"]

Bytes = npt.NDArray[np.uint8]

_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter does to one tensor of the base.

    Attributes:
        inputs: What the formula takes besides the weight.
        by_rows: Whether rows of the weight may be changed apart.
        scratch: Bytes for each element of the weight that the formula takes in between.
    """

    inputs: tuple[Target, ...]
    formula: Formula
    label: str
    by_rows: bool = True
    scratch: int = 0

    def then(self, other: Change) -> Change:
        """Return both changes, one after the other."""
        own = len(self.inputs)

        def both(w: torch.Tensor, inputs: Sequence[torch.Tensor], first: int) -> torch.Tensor:
            return other.formula(self.formula(w, inputs[:own], first), inputs[own:], first)

        return Change(
            (*self.inputs, *other.inputs),
            both,
            f"{self.label}, then {other.label}",
            self.by_rows and other.by_rows,
            max(self.scratch, other.scratch),
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """One source of a tensor: its rows from `first` on are read as `rows`, and changed."""

    source: str
    first: int
    rows: Target
    change: Change | None

    @property
    def inputs(self) -> tuple[Target, ...]:
        return (self.rows, *(self.change.inputs if self.change is not None else ()))

    @property
    def scratch(self) -> int:
        return self.rows.numel * self.change.scratch if self.change is not None else 0

    def carry_out(self, data: Sequence[Bytes], dtype: str) -> npt.NDArray[Any]:
        """Return the rows, changed, in a dtype, as bits."""
        tensors = [_tensor(raw, target) for raw, target in zip(data, self.inputs, strict=True)]
        made = tensors[0]
        if self.change is not None:
            made = self.change.formula(made, tensors[1:], self.first)
        return _bits(made, dtype).reshape(self.rows.shape)


def changed(target: Target, changes: Mapping[str, Change], whole: Mapping[str, Target]) -> ComputedTensor:
    """Return a target whose sources are changed before its parts are taken from them.

    Sources are changed in their own dtype; the cast to the target's comes after. Of a source just the rows that the
    parts lie in are read, where its change allows that.

    Args:
        whole: Each source as a target of its own.
    """
    steps = [
        _Step(source, first, _rows_of(whole[source], first, stop), changes.get(source))
        for source, (first, stop) in _ranges(target, changes, whole).items()
    ]
    inputs = [item for step in steps for item in step.inputs]
    plain = len(steps) == 1 and _is_plain(target, steps[0])

    def compute(data: Sequence[Bytes]) -> Bytes:
        made: dict[str, tuple[npt.NDArray[Any], int]] = {}
        at = 0
        for step in steps:
            made[step.source] = step.carry_out(data[at : at + len(step.inputs)], target.dtype), step.first
            at += len(step.inputs)
        if plain:
            return made[steps[0].source][0].reshape(-1).view(np.uint8)
        out: npt.NDArray[Any] = np.empty(target.shape, _UNITS[dtype_of(target.dtype).itemsize])
        for part in target.parts:
            out[_slices(part.target_box)] = _part(part, *made[part.source])
        return out.reshape(-1).view(np.uint8)

    def cut(start: int, stop: int) -> ComputedTensor:
        box = Box((start, *(0,) * (len(target.shape) - 1)), (stop - start, *target.shape[1:]))
        parts = tuple(p.moved(p.target_box.relative_to(box)) for part in target.parts for p in part.cut(box))
        return changed(replace(target, shape=box.sizes, parts=parts), changes, whole)

    by_rows = bool(target.shape) and all(step.change is None or step.change.by_rows for step in steps)
    label = "; ".join(dict.fromkeys(step.change.label for step in steps if step.change is not None))
    if not plain:  # what is made of the same sources in another way has another label
        label += f", cut up [{zlib.crc32(repr(target.parts).encode()):08x}]"
    # The result is there twice for a while: in the dtype of the source, or in pieces.
    scratch = sum(step.scratch + step.rows.numel * dtype_of(target.dtype).itemsize for step in steps)
    return ComputedTensor(
        target.name, target.dtype, target.shape, tuple(inputs), compute, label, scratch, cut if by_rows else None
    )


def _ranges(target: Target, changes: Mapping[str, Change], whole: Mapping[str, Target]) -> dict[str, tuple[int, int]]:
    """The rows of each source that are wanted, [first, stop)."""
    found: dict[str, tuple[int, int]] = {}
    for part in target.parts:
        change = changes.get(part.source)
        shape = whole[part.source].shape
        first, stop = 0, shape[0] if shape else 1
        if shape and (change is None or change.by_rows):
            first, stop = part.source_box.offsets[0], part.source_box.stops[0]
        before = found.get(part.source, (first, stop))
        found[part.source] = min(first, before[0]), max(stop, before[1])
    return found


def _rows_of(source: Target, first: int, stop: int) -> Target:
    """A source, or some of its rows, in its own dtype."""
    if not source.shape:
        return replace(source, dtype=source.source_dtype)
    shape = (stop - first, *source.shape[1:])
    part = Part(Box.whole(shape), source.parts[0].source, Box((first, *(0,) * (len(shape) - 1)), shape))
    return Target(source.name, source.source_dtype, shape, (part,), source.source_dtype)


def _is_plain(target: Target, step: _Step) -> bool:
    """Whether a target is just the rows of its one source."""
    part = target.parts[0]
    same = len(target.parts) == 1 and part.is_plain and part.source_box.numel == step.rows.numel
    return same and part.target_box == Box.whole(target.shape)


def _part(part: Part, made: npt.NDArray[Any], first: int) -> npt.NDArray[Any]:
    offsets = part.source_box.offsets
    box = Box((offsets[0] - first, *offsets[1:]) if offsets else (), part.source_box.sizes)
    view = made[_slices(box)].reshape(part.unfold or part.source_box.sizes)
    turned: npt.NDArray[Any] = view.transpose(part.axes or tuple(range(view.ndim))).reshape(part.target_box.sizes)
    return turned


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.offsets, box.stops, strict=True))


def _tensor(raw: Bytes, target: Target) -> torch.Tensor:
    import torch

    if not raw.flags.writeable or raw.size == 0:
        raw = raw.copy()
    flat: torch.Tensor = torch.from_numpy(raw).view(getattr(torch, dtype_of(target.dtype).name))
    return flat.reshape(target.shape)


def _bits(tensor: torch.Tensor, dtype: str) -> npt.NDArray[Any]:
    import torch

    flat = tensor.to(getattr(torch, dtype)).contiguous().reshape(-1).view(torch.uint8).numpy()
    bits: npt.NDArray[Any] = flat.view(_UNITS[dtype_of(dtype).itemsize])
    return bits
