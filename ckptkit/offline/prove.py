"""Reads a result back and verifies that each tensor equals its source.

If a source slice is contiguous in the result, the result's bytes are compared with the slice's recorded digest, so the
source is not read. If the slice has no digest, its bytes are compared with the result's bytes. Tensors that were cast,
split or rearranged are compared by fingerprints, which are checksums that can be added up box by box.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box, row_major_strides
from ckptkit.catalog.casts import cast_into
from ckptkit.catalog.columns import distinct, distinct_boxes, first_of_equal, is_dense, row_major
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Role, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.digests import Fingerprint, fingerprint_of_runs, new_hasher
from ckptkit.errors import IntegrityError
from ckptkit.formats.sources import UNITS, EntryMap, Origin, SourceReader
from ckptkit.offline.copying.copier import Progress
from ckptkit.offline.copying.gather import Gatherer
from ckptkit.offline.copying.plan import OutputTensor, Placement, Plan
from ckptkit.offline.copying.pool import Pool, Worker
from ckptkit.offline.copying.runs import prepare
from ckptkit.storage.store import Store

if TYPE_CHECKING:
    from ckptkit.formats.detect import Source


Bytes = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]


def fingerprint_of(data: Bytes, box: Box, shape: tuple[int, ...], itemsize: int) -> Fingerprint:
    """Return the contribution of a box to the fingerprint of a tensor of shape `shape`.

    Args:
        data: The box's bytes, row-major.
        itemsize: Bytes per element. An element of 16 bytes counts as two elements of 8 bytes.
    """
    if itemsize == 16:
        box, shape, itemsize = Box((*box.offsets, 0), (*box.sizes, 2)), (*shape, 2), 8
    if box.numel == 0:
        return Fingerprint()
    dim = box.ndim  # the box is contiguous in the tensor along the dimensions from this one on
    while dim > 0 and Box(box.offsets[dim - 1 :], box.sizes[dim - 1 :]).is_contiguous_in(shape[dim - 1 :]):
        dim -= 1
    starts = np.array([box.flat_start(shape)], np.uint64)  # index of each run's first element
    for size, stride in zip(box.sizes[:dim], row_major_strides(shape)[:dim], strict=True):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride)
        starts = (starts[:, None] + steps).reshape(-1)
    return fingerprint_of_runs(data.view(UNITS[itemsize]), starts, Box.whole(box.sizes[dim:]).numel)


_CHUNK = 1 << 20
_TILE = 4 << 20


def prove_equal(
    plan: Plan, source: Store, result: Store, *, max_memory: int, workers: int = 0, progress: Progress | None = None
) -> int:
    """Check that all tensors in `result` equal the source. Return the number of tensors.

    Tensors that cannot be compared by slices are compared by fingerprints, which are computed slice by slice for the
    source and box by box for the result. Fingerprints detect misplaced boxes as well as wrong bytes.

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
        self._maps: dict[str, EntryMap] = work.maps
        self._result = SourceReader(result, [Origin(file.path) for file in plan.files])
        each = max_memory // (4 * workers)
        self._source = SourceReader(source, work.origins, span=max(1 << 20, each))
        small = max(_CHUNK, min(_TILE, each))
        self._gatherer = Gatherer(self._source, work.maps, max_bytes=max_memory, small=small, big=each)
        self._lock = threading.Lock()
        self._progress, self._done = progress, 0
        self._total = sum(int(p.sizes.prod(axis=1).sum()) * dtype_of(p.tensor.dtype).itemsize for p in plan.placements)
        self.different: list[str] = []

    def close(self) -> None:
        self._source.close()
        self._result.close()

    def compare(self, index: int, worker: Worker) -> None:
        placement = self._plan.placements[index]
        # If digests differ, fingerprints decide: the source may be damaged, and the result still a faithful copy of it.
        if self._is_same_by_slices(placement, worker):
            return
        if self._found(placement, worker) != self._expected(placement.tensor, worker):
            with self._lock:
                self.different.append(placement.tensor.name)

    # --- slices that are contiguous in the result: compared by digests or bytes

    def _is_same_by_slices(self, placement: Placement, worker: Worker) -> bool:
        tensor, key = placement.tensor, _copied(placement.tensor)
        if key is None:
            return False
        entry = self._maps[key].entry
        if entry.dtype != tensor.dtype or entry.shape != tensor.shape:
            return False
        runs, slices = slice_runs(entry, placement), entry.slices
        if runs is None:
            return False
        algorithm, digests = slices.algorithm, slices.digests
        if slices.digest_starts is not None and slices.digest_nbytes is not None:  # digests may cover other ranges
            own = (slices.digest_starts == slices.starts) & (slices.digest_nbytes == slices.nbytes)
            digests = digests if own.all() else None
        for rows in runs.bounds():
            row, blocks = int(runs.slices[rows[0]]), self._blocks(runs, rows, worker)
            if algorithm is not None and digests is not None:
                hasher = new_hasher(algorithm)
                for _, data in blocks:
                    hasher.update(data.data)
                if hasher.intdigest() != int(digests[row]):
                    return False
                continue
            origin, start = int(self._maps[key].origins[row]), int(slices.starts[row])
            for inner, data in blocks:
                wanted = worker.buffer(len(data), made=True)
                self._source.read(origin, start + inner, wanted.data)
                if not np.array_equal(wanted, data):
                    return False
        return True

    def _blocks(self, runs: SliceRuns, rows: tuple[int, int], worker: Worker) -> Iterator[tuple[int, Bytes]]:
        """Read a slice's bytes from the result, in order. Yield (offset in the slice, bytes) pairs."""
        for row in range(*rows):
            inner, file, start = int(runs.inner[row]), int(runs.files[row]), int(runs.starts[row])
            nbytes = int(runs.nbytes[row])
            for at in range(0, nbytes, _CHUNK):
                data = worker.buffer(min(_CHUNK, nbytes - at))
                self._result.read(file, start + at, data.data)
                self._report(len(data), file)
                yield inner + at, data

    # --- the result's fingerprint: box by box, in file order; replicas must be equal

    def _found(self, placement: Placement, worker: Worker) -> Fingerprint | None:
        tensor = placement.tensor
        itemsize = dtype_of(tensor.dtype).itemsize
        known: dict[Box, Fingerprint] = {}
        for row in range(len(placement)):
            box = placement.box(row)
            total, at = Fingerprint(), int(placement.starts[row])
            for tile in box.tiles(max(1, _CHUNK // itemsize)):
                data = worker.buffer(tile.numel * itemsize)
                file = int(placement.files[row])
                self._result.read(file, at, data.data)
                self._report(len(data), file)
                total += fingerprint_of(data, tile, tensor.shape, itemsize)
                at += len(data)
            if known.setdefault(box, total) != total:
                return None
        return sum(known.values(), Fingerprint())

    def _report(self, nbytes: int, file: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += nbytes
                self._progress(self._done, self._total, f"verify: {self._plan.files[file].path}")

    # --- the source's fingerprint: slice by slice if the target copies one entry, otherwise by the plan's parts

    def _expected(self, tensor: OutputTensor, worker: Worker) -> Fingerprint:
        key, out = _copied(tensor), dtype_of(tensor.dtype).itemsize
        total = Fingerprint()
        entry = None if key is None else self._maps[key].entry
        if key is None or entry is None or entry.shape != tensor.shape or entry.slices.strides:
            for tile in Box.whole(tensor.shape).tiles(self._gatherer.tile_numel(tensor)):
                data = worker.buffer(tile.numel * out, made=True)
                self._gatherer.make_box(tensor, tile, data)
                total += fingerprint_of(data, tile, tensor.shape, out)
            return total
        where, slices = self._maps[key], entry.slices
        into = dtype_of(entry.dtype).itemsize
        for row in distinct_boxes(slices.offsets, slices.sizes).tolist():
            part = slices[row]
            at = part.start
            for tile in part.box.tiles(max(1, _CHUNK // into)):
                data = worker.buffer(tile.numel * into)
                self._source.read(int(where.origins[row]), at, data.data)
                at += len(data)
                if entry.dtype != tensor.dtype:
                    made = worker.buffer(tile.numel * out, made=True)
                    cast_into(data, made, entry.dtype, tensor.dtype)
                    data = made
                total += fingerprint_of(data, tile, entry.shape, out)
        return total


def _copied(tensor: OutputTensor) -> str | None:
    """Return the key of the source entry that a tensor copies or casts. Returns None for any other tensor."""
    part = tensor.only_part if isinstance(tensor, Target) else None
    return part.source if part is not None and part.source_box.sizes == tensor.shape else None


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
    """Check the names that ckptkit gave to masters that LightRFT stored without names.

    Each master, cast to its weight's dtype, must equal the weight bit for bit. Other formats are not checked.

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
