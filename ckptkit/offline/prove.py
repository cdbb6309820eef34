"""Reads a result back and verifies that each tensor equals its source.

If each slice of a tensor is contiguous in the result and has a digest, the result's bytes are compared with the
digests, so the source is not read. All other tensors are made from the source again, and compared byte by byte.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.columns import distinct, distinct_boxes, first_of_equal, is_dense, row_major
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Role, TensorEntry
from ckptkit.digests import hash_of
from ckptkit.errors import IntegrityError
from ckptkit.formats.sources import Origin, SourceReader
from ckptkit.offline.copying.copier import Progress
from ckptkit.offline.copying.gather import Gatherer, cuts
from ckptkit.offline.copying.plan import Placement, Plan
from ckptkit.offline.copying.pool import Pool, Worker
from ckptkit.offline.copying.runs import copied_entry, prepare
from ckptkit.storage.store import Store

if TYPE_CHECKING:
    from ckptkit.formats.detect import Source


Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]


_CHUNK = 2 << 20  # bytes compared at a time


def prove_equal(
    plan: Plan, source: Store, result: Store, *, max_memory: int, workers: int = 0, progress: Progress | None = None
) -> int:
    """Check that all tensors in `result` equal the source. Return the number of tensors.

    Args:
        progress: A callback for (bytes read from the result, total bytes, "verify: FILE"). Never called concurrently.

    Raises:
        IntegrityError: Some tensors differ. The message names them.
    """
    workers = workers or 4
    prover = _Prover(plan, source, result, max_memory=max_memory, workers=workers, progress=progress)
    with closing(prover):
        Pool(workers).run(prover.compare, range(len(plan.placements)))
    if prover.different:
        names = ", ".join(sorted(prover.different)[:10])
        raise IntegrityError(
            f"{len(prover.different)} of {len(plan.placements)} tensors of the result differ from the "
            f"source: {names}. Nothing was published. Run the command again; if it fails again, the disk "
            "or memory is faulty, or this is a bug."
        )
    return len(plan.placements)


class _Prover:
    def __init__(
        self, plan: Plan, source: Store, result: Store, *, max_memory: int, workers: int, progress: Progress | None
    ) -> None:
        work = prepare(plan, check=False, by_boxes=True)
        self._plan = plan
        self._result = SourceReader(result, [Origin(file.path) for file in plan.files])
        each = max_memory // (4 * workers)
        self._source = SourceReader(source, work.origins, span=max(1 << 20, each))
        self._gatherer = Gatherer(self._source, work.maps, max_bytes=max_memory, small=_CHUNK, big=each)
        self._lock = threading.Lock()
        self._progress, self._done = progress, 0
        self._total = sum(int(p.sizes.prod(axis=1).sum()) * dtype_of(p.tensor.dtype).itemsize for p in plan.placements)
        self.different: list[str] = []

    def close(self) -> None:
        self._source.close()
        self._result.close()

    def compare(self, index: int, worker: Worker) -> None:
        placement = self._plan.placements[index]
        # If digests differ, bytes decide: the source may be damaged, and the result still a faithful copy of it.
        if not (self._has_same_digests(placement, worker) or self._has_same_bytes(placement, worker)):
            with self._lock:
                self.different.append(placement.tensor.name)

    def _has_same_digests(self, placement: Placement, worker: Worker) -> bool:
        """Return whether all slices are contiguous in the result, and the result's bytes have the slices' digests."""
        entry = copied_entry(self._plan.catalog, placement)
        if entry is None or entry.dtype != placement.tensor.dtype:
            return False
        runs, slices = slice_runs(entry, placement), entry.slices
        if runs is None or slices.algorithm is None or slices.digests is None:
            return False
        if slices.digest_starts is not None and slices.digest_nbytes is not None:
            own = (slices.digest_starts == slices.starts) & (slices.digest_nbytes == slices.nbytes)
            if not own.all():  # the digests cover other ranges
                return False
        for rows in runs.bounds():
            digest = hash_of(self._blocks(runs, rows, worker), slices.algorithm)
            if digest != int(slices.digests[int(runs.slices[rows[0]])]):
                return False
        return True

    def _blocks(self, runs: SliceRuns, rows: tuple[int, int], worker: Worker) -> Iterator[memoryview]:
        """Yield the bytes of a slice from the result, in order."""
        for row in range(*rows):
            file, start, nbytes = int(runs.files[row]), int(runs.starts[row]), int(runs.nbytes[row])
            for at in range(0, nbytes, _CHUNK):
                yield self._read(file, start + at, min(_CHUNK, nbytes - at), worker).data

    def _has_same_bytes(self, placement: Placement, worker: Worker) -> bool:
        """Return whether each box of the result has the bytes that the source gives."""
        tensor, itemsize = placement.tensor, dtype_of(placement.tensor.dtype).itemsize
        for tile in Box.whole(tensor.shape).tiles(self._gatherer.tile_numel(tensor)):
            made = worker.buffer(tile.numel * itemsize, made=True)
            self._gatherer.make_box(tensor, tile, made)
            for row, at, part in cuts(made, tile, placement.offsets, placement.sizes, itemsize):
                start = int(placement.starts[row]) + at
                if not np.array_equal(part, self._read(int(placement.files[row]), start, len(part), worker)):
                    return False
        return True

    def _read(self, file: int, start: int, nbytes: int, worker: Worker) -> Bytes:
        """Return bytes of the result, and report progress."""
        data = worker.buffer(nbytes)
        self._result.read(file, start, data.data)
        if self._progress is not None:
            with self._lock:
                self._done += nbytes
                self._progress(self._done, self._total, f"verify: {self._plan.files[file].path}")
        return data


# Locate each source slice in the result. This uses only the plan's boxes, not the steps of the copy, and so verifies
# the steps, too.


_MAX_PAIRS = 1 << 22  # maximum for the number of slices times the number of boxes


@dataclass(frozen=True, slots=True)
class SliceRuns:
    """Maps the bytes of a tensor's slices to the result's files.

    Each row is a run: a part of a slice that is contiguous in a file of the result. Rows are sorted by slice and
    offset. The runs of a slice cover the whole slice.

    Attributes:
        slices: [n] the index of the run's slice in the tensor's entry.
        inner: [n] the run's offset in the slice.
        files, starts: [n] the run's file and offset in the result.
        nbytes: [n] the run's size in bytes.
    """

    slices: Int64
    inner: Int64
    files: Int64
    starts: Int64
    nbytes: Int64

    def bounds(self) -> list[tuple[int, int]]:
        """Return, for each slice, the row numbers [a, b) of its runs."""
        first = np.flatnonzero(np.concatenate([[True], self.slices[1:] != self.slices[:-1]]))
        return list(zip(first.tolist(), [*first[1:].tolist(), len(self.slices)], strict=True))


def slice_runs(entry: TensorEntry, placement: Placement) -> SliceRuns | None:
    """Return where the source slices of an unchanged tensor are in the result.

    Returns None if a slice, or its intersection with a box of the result, is not contiguous (column shards, strides).
    Also returns None if boxes of the result repeat (replicas), or if there are no slices or too many.
    """
    slices, itemsize = entry.slices, dtype_of(entry.dtype).itemsize
    rows = distinct_boxes(slices.offsets, slices.sizes)
    boxes = np.concatenate([placement.offsets, placement.sizes], axis=1)
    if slices.strides or not entry.shape or len(rows) * len(placement) > _MAX_PAIRS:
        return None
    if first_of_equal(boxes) is not None:
        return None
    lo = np.maximum(slices.offsets[rows][:, None], placement.offsets[None])
    hi = np.minimum((slices.offsets + slices.sizes)[rows][:, None], (placement.offsets + placement.sizes)[None])
    which, box = np.nonzero((hi > lo).all(axis=2))
    lo, sizes, row = lo[which, box], (hi - lo)[which, box], rows[which]
    inside, outside = row_major(slices.sizes[row]), row_major(placement.sizes[box])
    if not len(row) or not (is_dense(sizes, inside) & is_dense(sizes, outside)).all():
        return None
    inner = ((lo - slices.offsets[row]) * inside).sum(axis=1) * itemsize
    starts = placement.starts[box] + ((lo - placement.offsets[box]) * outside).sum(axis=1) * itemsize
    order = np.lexsort((inner, row))
    found = SliceRuns(
        row[order], inner[order], placement.files[box][order].astype(np.int64), starts[order],
        (sizes.prod(axis=1) * itemsize)[order],
    )  # fmt: skip
    return found if _is_whole(found, entry, placement) else None


def _is_whole(runs: SliceRuns, entry: TensorEntry, placement: Placement) -> bool:
    """Return whether the runs cover each source slice and each box of the result completely."""
    ends = runs.inner + runs.nbytes
    new = np.concatenate([[True], runs.slices[1:] != runs.slices[:-1]])
    before = np.concatenate([[0], ends[:-1]])
    whole = int(runs.nbytes.sum()) == int(placement.nbytes().sum())
    last = np.concatenate([new[1:], [True]])
    seen = distinct(runs.slices)
    sizes = entry.slices.nbytes[seen]
    return whole and bool((runs.inner == np.where(new, 0, before)).all() and (ends[last] == sizes).all())


# --- unnamed fp32 masters: check that each one belongs to the weight whose name it was given


def prove_masters(source: Source, used: Collection[str] | None = None) -> int:
    """Check the names that ckptkit gave to masters that are stored without names.

    Each master, cast to its weight's dtype, must equal the weight bit for bit.

    Args:
        used: The source tensors that the command uses. None means all tensors. If there is no master among them,
            nothing is read.

    Returns:
        The number of masters checked.

    Raises:
        IntegrityError: Some masters do not equal their weights.
    """
    if source.catalog.info.format != "lightrft":
        return 0
    masters = [name for name, entry in source.catalog.tensors.items() if entry.role is Role.MASTER]
    if not masters or not (used is None or any(name in used for name in masters)):
        return 0
    from ckptkit.formats.trainers.master_check import check_masters

    wrong = check_masters(source.store, source.catalog)
    if wrong:
        raise IntegrityError(
            f"{source.url}: {len(wrong)} of {len(masters)} weights do not equal the fp32 master at the same position, "
            f"cast to their dtype: {', '.join(wrong[:4])}. Model and optimizer are from different saves, or the model "
            "was changed."
        )
    return len(masters)
