"""Checks, before anything is written, that a plan writes every byte of the result exactly once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.entry import Catalog, check_boxes
from ckptkit.catalog.tiles import check_coverage, row_cuts
from ckptkit.errors import CheckpointMismatchError, CkptkitError
from ckptkit.gc_pause import collector_paused
from ckptkit.offline.copying.plan import ComputedTensor, OutputFile, OutputTensor, Placement, Plan
from ckptkit.units import format_count

Int64 = npt.NDArray[np.int64]


def used_sources(plan: Plan) -> list[str]:
    """Return the keys of the source tensors that the plan reads, without duplicates."""
    return list(dict.fromkeys(key for placement in plan.placements for key in placement.tensor.sources))


@dataclass(frozen=True, slots=True)
class Covered:
    """The result of a coverage check: the numbers of tensors, elements and file bytes that the plan writes."""

    tensors: int
    elements: int
    nbytes: int

    def __str__(self) -> str:
        counts = ((str(self.tensors), "tensor"), (format_count(self.elements), "element"))
        return ", ".join(f"{n} {what}{'s' * (n != '1')}" for n, what in counts) + ", each covered once"


@collector_paused()
def check_plan(plan: Plan) -> Covered:
    """Check that sources have no gaps, and that the plan writes each target and each file byte exactly once.

    Raises:
        CorruptCheckpointError, IncompleteCheckpointError: A source tensor has gaps or overlaps.
        CheckpointMismatchError: The plan is inconsistent. Nothing was written.
    """
    sources = used_sources(plan)
    for key in sources:
        if key not in plan.catalog.tensors:
            raise CheckpointMismatchError(f"the plan reads {key!r}, which the source does not have.")
    check_coverage([plan.catalog.tensors[key] for key in sources])
    elements = 0
    for placement in plan.placements:
        tensor = placement.tensor
        elements += tensor.numel
        _check_parts(plan.catalog, tensor)
    cuts = row_cuts([placement.tensor.shape for placement in plan.placements], plan.placements)
    for index in np.flatnonzero(~cuts.cut).tolist():
        placement = plan.placements[index]
        _check_boxes(placement.tensor, placement.offsets, placement.sizes, "the boxes that are written")
    files, starts, lengths = Placement.joined(plan.placements)
    order = np.lexsort((starts, files))
    starts, lengths = starts[order], lengths[order]
    bounds = np.searchsorted(files[order], np.arange(len(plan.files) + 1)).tolist()
    for file, (a, b) in zip(plan.files, pairwise(bounds), strict=True):
        _check_file(file, starts[a:b], lengths[a:b])
    return Covered(len(plan.placements), elements, plan.nbytes)


def _check_parts(catalog: Catalog, tensor: OutputTensor) -> None:
    if isinstance(tensor, ComputedTensor):
        for target in tensor.read:
            _check_parts(catalog, target)
        return
    for part in tensor.parts:
        shape = catalog.tensors[part.source].shape
        if part.source_box is part.target_box and part.source_box.is_whole(shape):  # most parts are plain copies
            continue
        if not part.source_box.within(shape) or part.source_box.numel != part.target_box.numel:
            raise CheckpointMismatchError(
                f"tensor {tensor.name!r}: its part {part.target_box} does not match {part.source_box} of "
                f"{part.source!r}, whose shape is {list(shape)}."
            )
    if len(tensor.parts) == 1 and tensor.parts[0].target_box.is_whole(tensor.shape):
        return
    boxes = [part.target_box for part in tensor.parts]
    offsets, sizes = (
        np.array(rows, np.int64).reshape(len(boxes), len(tensor.shape))
        for rows in ([box.offsets for box in boxes], [box.sizes for box in boxes])
    )
    _check_boxes(tensor, offsets, sizes, "its parts")


def _check_boxes(tensor: OutputTensor, offsets: Int64, sizes: Int64, what: str) -> None:
    try:
        check_boxes(tensor.name, tensor.shape, offsets, sizes)
    except CkptkitError as error:
        words = f"tensor {tensor.name!r}: {what} do not cover it exactly once: {error}"
        raise CheckpointMismatchError(words) from error


def _check_file(file: OutputFile, starts: Int64, lengths: Int64) -> None:
    """Check that a file has no gaps or overlaps.

    The file consists of its literals (bytes known without reading tensors), and of boxes at the offsets `starts`.
    """
    extents = getattr(file.literals, "extents", None)
    if extents is not None:  # one range per box, sorted by start, to avoid creating a million literals
        own, sizes = extents(lengths)
    else:
        table = np.array([(item.start, len(item.data)) for item in file.literals], np.int64).reshape(-1, 2)
        own, sizes = table.T
    starts, lengths = np.concatenate([starts, own]), np.concatenate([lengths, sizes])
    filled = lengths > 0
    starts, lengths = starts[filled], lengths[filled]
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], (starts + lengths)[order]
    expected = np.concatenate([[0], ends])
    wrong = np.flatnonzero(np.append(starts, file.nbytes) != expected)
    if len(wrong):
        at = int(expected[wrong[0]])
        raise CheckpointMismatchError(
            f"{file.path}: the plan leaves a gap or writes twice at byte {at} of {file.nbytes}. This is a bug."
        )
