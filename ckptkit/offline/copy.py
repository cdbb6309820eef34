"""Carrying out a plan: bytes from one store to another, checked, in bounded memory. Knows nothing of formats."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from ckptkit.errors import NoSpaceError, UsageError
from ckptkit.offline.boxes import BoxCopier
from ckptkit.offline.checks import Verifier
from ckptkit.offline.coverage import check_plan
from ckptkit.offline.gather import Gatherer
from ckptkit.offline.jobs import Work, prepare
from ckptkit.offline.plan import Plan
from ckptkit.offline.pool import Job, Pool, Stopped
from ckptkit.offline.sinks import LocalSink
from ckptkit.offline.sources import SourceReader
from ckptkit.offline.streams import StreamCopier, direct_rows, spans, split, touched
from ckptkit.storage.local import LocalStore
from ckptkit.storage.store import Store
from ckptkit.units import format_size

__all__ = ["CopyReport", "Progress", "execute"]

Progress = Callable[[int, int, str], None]

DEFAULT_MAX_MEMORY = 512_000_000
_CHUNK = 512 << 10  # stays in the second-level cache between read, digest and write
_REMOTE_CHUNK = 8 << 20
_TILE = 4 << 20


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What an execution did.

    Attributes:
        nbytes: Bytes written.
        nbytes_read: Bytes of the source that were read, those that were only checked included.
        records: Digests of the source that were checked, and found right.
        seconds: Wall time.
    """

    nbytes: int
    nbytes_read: int
    records: int
    seconds: float


def execute(
    plan: Plan,
    source: Store,
    destination: Store,
    *,
    workers: int = 0,
    max_memory: int = DEFAULT_MAX_MEMORY,
    check: bool = True,
    progress: Progress | None = None,
    only: Callable[[int], bool] | None = None,
) -> CopyReport:
    """Write the files of a plan below `destination`, which has none of them.

    Nothing is written before coverage is proved. Whoever publishes the destination makes it durable.

    Args:
        workers: Copies in flight; 0 chooses by the machine.
        max_memory: Bytes of tensor data held at once, by all workers together.
        check: Check the digests that the source recorded, of all bytes that are read.
        progress: Called with (bytes done, bytes in all, what), from any thread, one call at a time.
        only: Which files, by index, this process writes; None for all.

    Raises:
        IntegrityError: A digest differs; it names the file and the tensor.
        IncompleteCheckpointError: The source has gaps, or a file of it is too short.
        NoSpaceError: The destination is, or would become, full.
    """
    started = time.perf_counter()
    check_plan(plan)
    if only is not None:
        plan = _restricted(plan, only)
    _check_room(plan, destination)
    local = isinstance(destination, LocalStore)
    # Local copies keep a processor each: more of them only wait in turn for the lock of one output file.
    least = 2 if local and isinstance(source, LocalStore) else 4
    workers = workers or min(16, max(least, os.cpu_count() or 1))
    run = _Execution(
        plan, source, workers=workers, max_memory=max_memory, check=check, by_boxes=not local, progress=progress
    )
    try:
        if isinstance(destination, LocalStore):
            run.into_local(destination)
        else:
            run.into_store(destination)
        run.check_rest()
    finally:
        run.close()
    proved = int(run.verifier.proved.sum()) if run.verifier is not None else 0
    return CopyReport(plan.nbytes, run.nbytes_read, proved, time.perf_counter() - started)


def _restricted(plan: Plan, only: Callable[[int], bool]) -> Plan:
    """The same plan with the files, and what lies in them, of one process. Files keep their order."""
    kept = [index for index in range(len(plan.files)) if only(index)]
    renumbered = np.full(len(plan.files), -1, np.int32)
    renumbered[kept] = np.arange(len(kept))
    placements = []
    for placement in plan.placements:
        rows = np.flatnonzero(renumbered[placement.files] >= 0)
        if len(rows):
            files = renumbered[placement.files[rows]]
            columns = (placement.starts[rows], placement.offsets[rows], placement.sizes[rows])
            placements.append(type(placement)(placement.tensor, files, *columns))
    return Plan(plan.catalog, tuple(plan.files[index] for index in kept), tuple(placements), plan.last)


def _check_room(plan: Plan, destination: Store) -> None:
    free = destination.free_bytes()
    if free is not None and free < plan.nbytes:
        raise NoSpaceError(
            f"{destination.url} has {format_size(free)} free, and {format_size(plan.nbytes)} are to be written. "
            "Free some space or write elsewhere."
        )


class _Execution:
    """One run of a plan: what its workers share."""

    def __init__(
        self,
        plan: Plan,
        source: Store,
        *,
        workers: int,
        max_memory: int,
        check: bool,
        by_boxes: bool,
        progress: Progress | None,
    ) -> None:
        self.plan = plan
        self.work: Work = prepare(plan, check=check, by_boxes=by_boxes)
        self.reader = SourceReader(source, self.work.origins)
        self.verifier = Verifier(self.work.records, self._describe) if check else None
        if self.verifier is not None:
            self.verifier.proved[self.work.records.nbytes == 0] = True
        chunk = _CHUNK if self.reader.is_local else _REMOTE_CHUNK
        self.chunk = max(64 << 10, min(chunk, max_memory // (4 * workers)) // 4096 * 4096)
        if max_memory < workers * (64 << 10):
            raise UsageError(f"{format_size(max_memory)} of memory are too little for {workers} workers.")
        self.tile_nbytes = max(self.chunk, min(_TILE, max_memory // (4 * workers)))
        self.big_nbytes = max(self.tile_nbytes, max_memory // (4 * workers))
        self.gatherer = Gatherer(self.reader, self.work.maps, self.verifier, max_bytes=max_memory)
        self.pool = Pool(workers, self.chunk)
        self.nbytes_read = 0
        self._progress = progress
        self._lock = threading.Lock()

    def _describe(self, record: int) -> str:
        table = self.work.records
        path = self.work.origins[int(table.sources[record])].path
        return f"{path}: tensor {self.work.names[int(table.owners[record])]!r}"

    def done(self, nbytes: int) -> None:
        """Count bytes, report them, and stop a worker whose fellow failed."""
        if self.pool.stopped.is_set():
            raise Stopped
        with self._lock:
            self.nbytes_read += nbytes
            if self._progress is not None:
                self._progress(min(self.nbytes_read, self.plan.nbytes), self.plan.nbytes, "")

    def close(self) -> None:
        self.reader.close()

    # --- a local destination: any order

    def into_local(self, store: LocalStore) -> None:
        sink = LocalSink(store, self.plan.files)
        try:
            files = range(len(self.plan.files))
            self.pool.run([lambda _, index=index: sink.create(index) for index in files])  # type: ignore[misc]
            self.pool.run(self._jobs(sink))
            self.pool.run([lambda _, index=index: sink.finish(index) for index in files])  # type: ignore[misc]
        finally:
            sink.close()

    def _jobs(self, sink: LocalSink) -> list[Job]:
        """Boxes first, which take longest, then runs in the order of the disk."""
        work = self.work
        boxes = BoxCopier(
            self.gatherer, work.maps, sink, tile_nbytes=self.tile_nbytes, big_nbytes=self.big_nbytes, done=self.done
        )
        jobs = boxes.jobs(work.bands, work.tiles)
        direct = direct_rows(work, sink) if self.reader.is_local else np.zeros(len(work.runs), bool)
        kernel, streamed = (split(work.runs.take(rows), work.ratios()) for rows in (direct, ~direct))
        wanted = touched(streamed, work.records)
        direct_copier = StreamCopier(work, kernel, self.reader, sink, None, wanted=wanted, done=self.done)
        copier = StreamCopier(work, streamed, self.reader, sink, self.verifier, wanted=wanted, done=self.done)
        placed: list[tuple[tuple[int, int], Job]] = [
            ((int(kernel.origins[row]), int(kernel.starts[row])), partial(direct_copier.copy_direct, row))
            for row in range(len(kernel))
        ]
        for job in spans(streamed, work.records, wanted):
            placed.append(((job[0].origin, job[0].start), partial(copier.copy_spans, job)))
        placed.sort(key=lambda item: item[0])
        return [*jobs, *(job for _, job in placed)]

    def into_store(self, store: Store) -> None:
        from ckptkit.offline.sequential import SequentialCopier

        SequentialCopier(
            self.plan,
            self.gatherer,
            self.work.maps,
            store,
            tile_nbytes=max(self.tile_nbytes, self.chunk),
            big_nbytes=self.big_nbytes,
            done=self.done,
        ).run(self.pool)

    def check_rest(self) -> None:
        """Read the records that were not proved on the way, for their digests alone."""
        if self.verifier is None:
            return
        rest = self.verifier.unproved()
        nothing = self.work.runs.take(np.zeros(0, np.int64))
        copier = StreamCopier(self.work, nothing, self.reader, None, self.verifier, wanted=rest, done=self.done)
        self.pool.run([partial(copier.copy_spans, job) for job in spans(nothing, self.work.records, rest)])
