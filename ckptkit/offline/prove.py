"""Reading a result again and proving it equal to its source, tensor by tensor.

By the digests that the source recorded of its slices, where they lie in runs of the result: then the result alone is
read. By its bytes, where it recorded none. By additive fingerprints where anything was cast, cut or moved otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import SliceArray
from ckptkit.catalog.targets import Target
from ckptkit.errors import IntegrityError
from ckptkit.offline.boxes import tile_numel
from ckptkit.offline.casts import cast_into
from ckptkit.offline.checks import new_hasher
from ckptkit.offline.copy import Progress
from ckptkit.offline.fingerprint import Fingerprint, fingerprint_of
from ckptkit.offline.gather import Gatherer
from ckptkit.offline.jobs import EntryMap, prepare
from ckptkit.offline.plan import OutputTensor, Placement, Plan
from ckptkit.offline.pool import Pool, Worker
from ckptkit.offline.slice_match import SliceRuns, slice_runs
from ckptkit.offline.sources import Origin, SourceReader
from ckptkit.storage.store import Store

__all__ = ["prove_equal"]

Bytes = npt.NDArray[np.uint8]

_CHUNK = 1 << 20
_TILE = 4 << 20


def prove_equal(
    plan: Plan, source: Store, result: Store, *, max_memory: int, workers: int = 0, progress: Progress | None = None
) -> int:
    """Read `result`, and the source again, and compare; return how many tensors are equal: all of them.

    A slice is looked for where the boxes say that it must lie. What can't be told from slices is fingerprinted: the
    source slice by slice as its files hold it, the result box by box as it lies there. So a box that went to the
    wrong place is found as well as a wrong byte.

    Args:
        progress: Called with (bytes of the result read, bytes in all, the file) by one worker at a time.

    Raises:
        IntegrityError: Some tensors differ; it names them.
    """
    workers = workers or 4
    prover = _Prover(plan, source, result, max_memory=max_memory, workers=workers, progress=progress)
    pool = Pool(workers, _CHUNK)
    try:
        pool.run([partial(prover.compare, index) for index in range(len(plan.placements))])
    finally:
        prover.close()
    if prover.different:
        names = ", ".join(sorted(prover.different)[:10])
        raise IntegrityError(
            f"{len(prover.different)} of {len(plan.placements)} tensors of the result differ from the source: {names}. "
            "Nothing was published. Run it again; if it stays, the disk or the memory is faulty, or this is a bug."
        )
    return len(plan.placements)


class _Prover:
    def __init__(
        self,
        plan: Plan,
        source: Store,
        result: Store,
        *,
        max_memory: int,
        workers: int,
        progress: Progress | None,
    ) -> None:
        work = prepare(plan, check=False, by_boxes=True)
        self._plan = plan
        self._maps: dict[str, EntryMap] = work.maps
        self._source = SourceReader(source, work.origins)
        self._result = SourceReader(result, [Origin(file.path) for file in plan.files])
        self._gatherer = Gatherer(self._source, work.maps, None, max_bytes=max_memory)
        self._tile_nbytes = max(_CHUNK, min(_TILE, max_memory // (4 * workers)))
        self._big_nbytes = max(self._tile_nbytes, max_memory // (4 * workers))
        self._lock = threading.Lock()
        self._progress, self._done = progress, 0
        self._total = sum(int(p.sizes.prod(axis=1).sum()) * dtype_of(p.tensor.dtype).itemsize for p in plan.placements)
        self.different: list[str] = []

    def close(self) -> None:
        self._source.close()
        self._result.close()

    def compare(self, index: int, worker: Worker) -> None:
        placement = self._plan.placements[index]
        # Where digests differ, the source may be what is damaged: it is equal all the same.
        if self._is_same_by_slices(placement, worker):
            return
        if self._found(placement, worker) != self._expected(placement.tensor, worker):
            with self._lock:
                self.different.append(placement.tensor.name)

    # --- slices that lie in runs of the result: no element is looked at

    def _is_same_by_slices(self, placement: Placement, worker: Worker) -> bool:
        tensor, key = placement.tensor, _copied(placement.tensor)
        if key is None:
            return False
        entry = self._maps[key].entry
        if entry.dtype != tensor.dtype or entry.shape != tensor.shape:
            return False
        runs = slice_runs(entry, placement)
        if runs is None:
            return False
        same = self._has_digest if _has_digests(entry.slices) else self._has_bytes
        return all(same(self._maps[key], runs, rows, worker) for rows in runs.bounds())

    def _has_digest(self, where: EntryMap, runs: SliceRuns, rows: tuple[int, int], worker: Worker) -> bool:
        """Whether a slice in the result has the digest that the source recorded of it."""
        slices, row = where.entry.slices, int(runs.slices[rows[0]])
        assert slices.digests is not None and slices.algorithm is not None
        hasher = new_hasher(slices.algorithm)
        for _, data in self._blocks(runs, rows, worker):
            hasher.update(data.data)
        return hasher.intdigest() == int(slices.digests[row])

    def _has_bytes(self, where: EntryMap, runs: SliceRuns, rows: tuple[int, int], worker: Worker) -> bool:
        """Whether a slice in the result has the bytes that the source has."""
        row = int(runs.slices[rows[0]])
        origin, start = int(where.origins[row]), int(where.entry.slices.starts[row])
        for inner, data in self._blocks(runs, rows, worker):
            wanted = worker.room(len(data))
            self._source.read(origin, start + inner, wanted.data)
            if not np.array_equal(wanted, data):
                return False
        return True

    def _blocks(self, runs: SliceRuns, rows: tuple[int, int], worker: Worker) -> Iterator[tuple[int, Bytes]]:
        """Read what the result has of a slice: (place in the slice, bytes), in order."""
        for row in range(*rows):
            inner, file, start = int(runs.inner[row]), int(runs.files[row]), int(runs.starts[row])
            nbytes = int(runs.nbytes[row])
            for at in range(0, nbytes, len(worker.buffer)):
                data = worker.buffer[: min(len(worker.buffer), nbytes - at)]
                self._result.read(file, start + at, data.data)
                self._report(len(data), file)
                yield inner + at, data

    # --- the result: its boxes as they lie in the files; of replicas each must be the same

    def _found(self, placement: Placement, worker: Worker) -> Fingerprint | None:
        tensor = placement.tensor
        itemsize = dtype_of(tensor.dtype).itemsize
        known: dict[Box, Fingerprint] = {}
        for row in range(len(placement)):
            box = placement.box(row)
            total, at = Fingerprint(), int(placement.starts[row])
            for tile in box.tiles(max(1, len(worker.buffer) // itemsize)):
                data = worker.buffer[: tile.numel * itemsize]
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
                self._progress(self._done, self._total, self._plan.files[file].path)

    # --- the source: slice by slice where the target is a copy of one entry, else as the plan's parts say

    def _expected(self, tensor: OutputTensor, worker: Worker) -> Fingerprint:
        key = _copied(tensor)
        entry = None if key is None else self._maps[key].entry
        if key is not None and entry is not None and entry.shape == tensor.shape and not entry.slices.strides:
            return self._of_slices(key, tensor, worker)
        total = Fingerprint()
        itemsize = dtype_of(tensor.dtype).itemsize
        numel = tile_numel(tensor, self._maps, self._tile_nbytes, self._big_nbytes, gatherer=self._gatherer)
        for tile in Box.whole(tensor.shape).tiles(numel):
            data = worker.room(tile.numel * itemsize)
            self._gatherer.make_box(tensor, tile, data)
            total += fingerprint_of(data, tile, tensor.shape, itemsize)
        return total

    def _of_slices(self, key: str, tensor: OutputTensor, worker: Worker) -> Fingerprint:
        where = self._maps[key]
        entry, slices = where.entry, where.entry.slices
        into, out = dtype_of(entry.dtype).itemsize, dtype_of(tensor.dtype).itemsize
        total = Fingerprint()
        for row in slices.distinct().tolist():
            part = slices[row]
            at = part.start
            for tile in part.box.tiles(max(1, len(worker.buffer) // into)):
                data = worker.buffer[: tile.numel * into]
                self._source.read(int(where.origins[row]), at, data.data)
                at += len(data)
                if entry.dtype != tensor.dtype:
                    made = worker.room(tile.numel * out)
                    cast_into(data, made, entry.dtype, tensor.dtype)
                    data = made
                total += fingerprint_of(data, tile, entry.shape, out)
        return total


def _has_digests(slices: SliceArray) -> bool:
    """Whether each slice has a digest, of just its bytes."""
    if slices.algorithm is None or slices.digests is None:
        return False
    if slices.digest_starts is None or slices.digest_nbytes is None:
        return True
    starts, sizes = slices.digest_starts == slices.starts, slices.digest_nbytes == slices.nbytes
    return bool(starts.all() and sizes.all())


def _copied(tensor: OutputTensor) -> str | None:
    """The source that the tensor is a copy of, but for a cast."""
    if not isinstance(tensor, Target) or len(tensor.parts) != 1:
        return None
    part = tensor.parts[0]
    whole = part.is_plain and part.target_box == Box.whole(tensor.shape) and part.source_box.sizes == tensor.shape
    return part.source if whole else None
