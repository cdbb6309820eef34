"""Carrying out a plan: bytes from one store to another, checked, in bounded memory. Knows nothing of formats."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import distinct
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.errors import CheckpointMismatchError, UsageError
from ckptkit.gc_pause import collector_paused
from ckptkit.offline.copying.boxes import BoxCopier, tile_numel
from ckptkit.offline.copying.chains import Chains
from ckptkit.offline.copying.checks import Verifier, crc32
from ckptkit.offline.copying.coverage import check_plan
from ckptkit.offline.copying.gather import Gatherer
from ckptkit.offline.copying.jobs import BandJob, EntryMap, Runs, TileJob, Work, prepare
from ckptkit.offline.copying.plan import Literal, OutputFile, Placement, Plan, check_room
from ckptkit.offline.copying.pool import Job, Pool, Stopped, Worker
from ckptkit.offline.copying.resume import Contents, Share, Taken, Written, fingerprint, records_of, take_over
from ckptkit.offline.copying.sinks import LocalSink
from ckptkit.offline.copying.sources import SourceReader
from ckptkit.offline.copying.streams import ChainCopier, Digested, StreamCopier, direct_rows, spans, split, touched
from ckptkit.offline.copying.windows import WindowCopier, Windows, windowed
from ckptkit.storage.local import LocalStore
from ckptkit.storage.store import Store
from ckptkit.units import format_size

if TYPE_CHECKING:
    from ckptkit.storage.journal import Journal
    from ckptkit.storage.ledger import Ledger

__all__ = ["CopyReport", "Progress", "execute", "SequentialCopier", "restricted", "share_out"]

# Writing the files of a plan from first to last byte, each in one stream: for stores that can't go back.


_Event = tuple[int, Literal | tuple[Placement, int]]


class SequentialCopier:
    """Streams files to a store, several at once. Each is read in the order it is written."""

    def __init__(
        self,
        plan: Plan,
        gatherer: Gatherer,
        maps: dict[str, EntryMap],
        destination: Store,
        *,
        tile_nbytes: int,
        big_nbytes: int,
        done: Callable[[int, str], None],
        there: Collection[int] = (),
        finished: Callable[[int], None] | None = None,
    ) -> None:
        """`there`: files that need not be written. `finished`: is told of each that is."""
        self._plan = plan
        self._gatherer = gatherer
        self._maps = maps
        self._destination = destination
        self._tile_nbytes = tile_nbytes
        self._big_nbytes = big_nbytes
        self._done = done
        self._there = there
        self._finished = finished

    def run(self, pool: Pool) -> None:
        """Write all files, those of `Plan.last` after the others."""
        late = set(self._plan.last)
        for wanted in (False, True):
            indexes = [i for i, file in enumerate(self._plan.files) if (file.path in late) is wanted]
            pool.run([partial(self._write, index) for index in indexes if index not in self._there])

    def _write(self, index: int, worker: Worker) -> None:
        file = self._plan.files[index]
        placed = _placed(self._plan, index)
        literals = sorted(file.literals, key=lambda item: item.start)
        crcs = list(file.crcs)
        if crcs:
            literals = self._with_crcs(file, literals, placed, worker)
        last = 0  # counted once the file is there: what was taken over may be on its way for long
        with self._destination.writer(file.path) as writer:
            for block in self._blocks(_events(literals, placed), worker):
                self._done(last, file.path)
                writer.write(block)
                last = len(block)
        self._done(last, file.path)
        if self._finished is not None:
            self._finished(index)

    def _blocks(self, events: list[_Event], worker: Worker) -> Iterator[memoryview]:
        for _, event in events:
            if isinstance(event, Literal):
                yield memoryview(event.data)
                continue
            placement, row = event
            tensor = placement.tensor
            itemsize = dtype_of(tensor.dtype).itemsize
            numel = tile_numel(tensor, self._maps, self._tile_nbytes, self._big_nbytes, gatherer=self._gatherer)
            for tile in placement.box(row).tiles(numel):
                out = worker.room(tile.numel * itemsize)
                self._gatherer.make_box(tensor, tile, out)
                yield out.data

    def _with_crcs(
        self, file: OutputFile, literals: list[Literal], placed: list[_Event], worker: Worker
    ) -> list[Literal]:
        """The literals with the CRC fields filled: what they cover is made once just for them."""
        changed = [(item.start, bytearray(item.data)) for item in literals]
        events = _events(literals, placed)
        for item in file.crcs:
            inside = [event for event in events if item.start <= event[0] < item.start + item.nbytes]
            value = count = 0
            for block in self._blocks(inside, worker):
                value = crc32(block, value)
                count += len(block)
            if count != item.nbytes:
                raise CheckpointMismatchError(f"{file.path}: a CRC covers a part of what is placed. This is a bug.")
            for at in item.at:
                start, data = next(x for x in changed if x[0] <= at and at + 4 <= x[0] + len(x[1]))
                data[at - start : at - start + 4] = struct.pack("<I", value)
        return [Literal(start, bytes(data)) for start, data in changed]


def _placed(plan: Plan, index: int) -> list[_Event]:
    found: list[_Event] = []
    for placement in plan.placements:
        for row in np.flatnonzero(placement.files == index).tolist():
            found.append((int(placement.starts[row]), (placement, row)))
    return found


def _events(literals: list[Literal], placed: list[_Event]) -> list[_Event]:
    """What a file consists of, in order; empty things are left out."""
    events: list[_Event] = [(item.start, item) for item in literals if item.data]
    events += [event for event in placed if isinstance(event[1], tuple) and event[1][0].box(event[1][1]).numel]
    return sorted(events, key=lambda event: event[0])


# Which rank writes which files of a plan, and what of the plan is left for it. Pure.


def share_out(plan: Plan, world_size: int) -> list[int]:
    """Return the rank that writes each file: the largest files first, each to who has least.

    What is published last goes to rank 0, which publishes.
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
    """Return the same plan with some of its files, and what lies in them. Files keep their order."""
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


Progress = Callable[[int, int, str], None]

DEFAULT_MAX_MEMORY = 512_000_000
# Few calls, and out of a cache from read to digest to write. Not 1 MiB: ext4 then looks for memory in pieces of a MiB,
# and on a machine that has been in use for a while the search takes three times the copying.
_CHUNK = 512 << 10
_REMOTE_CHUNK = 8 << 20
_TILE = 4 << 20
_LONG = 128 << 20  # of one step: as long as several others take together


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What an execution did.

    Attributes:
        nbytes: Bytes written.
        nbytes_read: Bytes of the source that were read, those that were only checked included.
        records: Digests of the source that were checked, and found right.
        seconds: Wall time.
        steps: In how many steps it was done.
        taken_over: How many of them an interrupted run had done.
        digested: The digests of boxes that were taken on the way, by the files of the plan.
    """

    nbytes: int
    nbytes_read: int
    records: int
    seconds: float
    steps: int = 0
    taken_over: int = 0
    digested: Digested | None = None

    @classmethod
    def joined(cls, reports: Sequence[CopyReport]) -> CopyReport:
        """Return what several ranks did, each its share; their digests of boxes are left out."""
        return cls(
            sum(report.nbytes for report in reports),
            sum(report.nbytes_read for report in reports),
            sum(report.records for report in reports),
            max(report.seconds for report in reports),
            sum(report.steps for report in reports),
            sum(report.taken_over for report in reports),
        )

    def notes(self) -> tuple[str, ...]:
        """Return what a person should know."""
        if not self.taken_over:
            return ()
        return (f"went on where an interrupted run had stopped: {self.taken_over} of {self.steps} steps were done",)


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
    journal: Journal | None = None,
    ledger: Ledger | None = None,
    digests: bool = False,
) -> CopyReport:
    """Write the files of a plan below `destination`, which has none of them.

    Nothing is written before coverage is proved. Whoever publishes the destination makes it durable.

    Args:
        workers: Copies in flight; 0 chooses by the machine.
        max_memory: Bytes of tensor data held at once, by all workers together.
        check: Check the digests that the source recorded, of all bytes that are read.
        progress: Called with (bytes done, bytes in all, what), from any thread, one call at a time.
        only: Which files, by index, this process writes; None for all.
        journal: Of the destination, a local one: steps that it says are done are not done again. Whatever else lies
            in the destination is deleted.
        ledger: Of the destination, a remote one: objects that it has from an interrupted run, and that hold what they
            should, are not written again.
        digests: Take the digests of the boxes that are written, of as many as pass by from their start to their end.

    Raises:
        IntegrityError: A digest differs; it names the file and the tensor.
        IncompleteCheckpointError: The source has gaps, or a file of it is too short.
        NoSpaceError: The destination is, or would become, full.
    """
    started = time.perf_counter()
    check_plan(plan)
    kept = [index for index in range(len(plan.files)) if only is None or only(index)]
    whole, plan = plan, restricted(plan, kept)
    local = isinstance(destination, LocalStore)
    # Local copies keep a processor each: more of them only wait in turn for the lock of one output file.
    least = 2 if local and isinstance(source, LocalStore) else 4
    workers = workers or min(16, max(least, os.cpu_count() or 1))
    run = _Execution(
        plan,
        source,
        kept=kept,
        workers=workers,
        max_memory=max_memory,
        check=check,
        by_boxes=not local,
        digests=digests and local,
        progress=progress,
    )
    try:
        if isinstance(destination, LocalStore):
            run.into_local(destination, journal, whole)
        else:
            check_room(plan, destination)
            run.into_store(destination, ledger)
        run.check_rest()
    finally:
        run.close()
    proved = int(run.verifier.proved.sum()) if run.verifier is not None else 0
    seconds = time.perf_counter() - started
    digested = run.digested.renumbered(kept) if digests else None
    return CopyReport(plan.nbytes, run.nbytes_read, proved, seconds, run.steps, run.taken_over, digested)


@dataclass(frozen=True, slots=True)
class _Step:
    """A part of the work that is done as a whole; `records` are the digests that are proved then.

    Attributes:
        written: Returns what of files is written: file, start, bytes.
        path: The file of the source that is read.
    """

    job: Job
    records: npt.NDArray[np.int64]
    written: Callable[[], Written]
    path: str = ""


_Placed = tuple[tuple[int, int], _Step]  # (origin, start): steps follow the disk


class _Execution:
    """One run of a plan: what its workers share."""

    def __init__(
        self,
        plan: Plan,
        source: Store,
        *,
        kept: Sequence[int],
        workers: int,
        max_memory: int,
        check: bool,
        by_boxes: bool,
        digests: bool,
        progress: Progress | None,
    ) -> None:
        self.plan = plan
        self.kept = kept
        self._again = partial(
            _Execution, workers=workers, max_memory=max_memory, check=check, by_boxes=by_boxes, digests=digests,
            progress=None,
        )  # fmt: skip
        self.work: Work = prepare(plan, check=check, by_boxes=by_boxes, digests=digests)
        self.digests = digests
        self.digested = Digested()
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
        self.steps = self.taken_over = 0
        self.source = source
        self._progress = progress
        self._path = ""  # of the file at work, for people
        self._lock = threading.Lock()

    def _describe(self, record: int) -> str:
        table = self.work.records
        path = self.work.origins[int(table.sources[record])].path
        return f"{path}: tensor {self.work.names[int(table.owners[record])]!r}"

    def done(self, nbytes: int, path: str = "") -> None:
        """Count bytes of the file at `path`, report them, and stop a worker whose fellow failed."""
        if self.pool.stopped.is_set():
            raise Stopped
        with self._lock:
            self._path = path or self._path
            self.nbytes_read += nbytes
            if self._progress is not None:
                self._progress(min(self.nbytes_read, self.plan.nbytes), self.plan.nbytes, self._path)

    def close(self) -> None:
        self.reader.close()

    # --- a local destination: any order

    def into_local(self, store: LocalStore, journal: Journal | None, whole: Plan) -> None:
        """Write the files. `whole`: the plan of all ranks together."""
        sink = LocalSink(store, self.plan.files)
        try:
            steps = self._steps(sink)
            taken = Taken() if journal is None else self._take_over(store, journal, whole, steps)
            check_room(self.plan, store, held=taken.held)
            files = range(len(self.plan.files))
            self.pool.run([partial(self._prepare_file, sink, index, taken) for index in files])
            self.steps, self.taken_over = len(steps), len(taken.steps)
            self.pool.run([self._stated(i, steps[i], journal) for i in range(len(steps)) if i not in taken.steps])
            if self.verifier is not None:  # those who had copied the bytes had compared them
                self.verifier.proved[list(taken.records)] = True
            self.pool.run([lambda _, index=index: sink.finish(index) for index in files])  # type: ignore[misc]
        finally:
            sink.close()

    def _prepare_file(self, sink: LocalSink, index: int, taken: Taken, _: Worker) -> None:
        if index in taken.files:
            sink.take_over(index)
        else:
            sink.create(index)

    def _take_over(self, store: LocalStore, journal: Journal, whole: Plan, steps: Sequence[_Step]) -> Taken:
        def derive(world_size: int, rank: int) -> Share:
            owners = share_out(whole, world_size)
            kept = [index for index, owner in enumerate(owners) if owner == rank]
            other = self._again(restricted(whole, kept), self.source, kept=kept)
            try:
                return other._share(other._steps(LocalSink(store, other.plan.files)))
            finally:
                other.close()

        taken = take_over(store, whole, self._share(steps), journal, derive)
        store.delete([file.path for index, file in enumerate(self.plan.files) if index not in taken.files])
        return taken

    def _share(self, steps: Sequence[_Step]) -> Share:
        plan = fingerprint(self.plan, self.work, self.source, check=self.verifier is not None)
        return Share(plan, self.kept, self.work, steps)

    def _stated(self, index: int, step: _Step, journal: Journal | None) -> Job:
        """The job of a step, which is stated in the journal once it is done and its records are proved."""

        def run(worker: Worker) -> None:
            self._path = step.path
            step.job(worker)
            # Another thread may have brought a piece of the same record out of order: then it is not proved yet, and
            # whoever takes over must not believe that it is.
            proved = self.verifier is None or bool(self.verifier.proved[step.records].all())
            if journal is not None and proved:
                journal.done(index)

        return run

    @collector_paused()
    def _steps(self, sink: LocalSink) -> list[_Step]:
        """Boxes first, which take longest, then runs in the order of the disk."""
        work = self.work
        boxes = BoxCopier(
            self.gatherer,
            work.maps,
            sink,
            tile_nbytes=self.tile_nbytes,
            big_nbytes=self.big_nbytes,
            done=self.done,
            digested=self.digested if self.digests else None,
        )
        jobs = boxes.jobs(work.bands, work.tiles)
        direct = direct_rows(work, sink) if self.reader.is_local else np.zeros(len(work.runs), bool)
        kernel, others = (work.runs.take(rows) for rows in (direct, ~direct))
        windows, gathered = windowed(others, work) if self.reader.is_local else (None, np.zeros(len(others), bool))
        kernel, streamed = (split(runs, work.ratios()) for runs in (kernel, others.take(~gathered)))
        wanted = touched(streamed, work.records)
        wanted = wanted[~work.chains.proves(len(work.records))[wanted]]
        if windows is not None:
            wanted = wanted[~np.isin(wanted, windows.records)]
        direct_copier = StreamCopier(work, kernel, self.reader, sink, None, wanted=wanted, done=self.done)
        copier = StreamCopier(work, streamed, self.reader, sink, self.verifier, wanted=wanted, done=self.done)
        none = np.zeros(0, np.int64)
        placed: list[_Placed] = [
            (
                (int(kernel.origins[row]), int(kernel.starts[row])),
                _Step(
                    partial(direct_copier.copy_direct, row),
                    none,
                    partial(_written, work, kernel, [(row, row + 1)]),
                    self._path_of(kernel.origins[row]),
                ),
            )
            for row in range(len(kernel))
        ]
        for job in spans(streamed, work.records, wanted):
            records = np.concatenate([wanted[slice(*span.records)] for span in job])
            placed.append(
                (
                    (job[0].origin, job[0].start),
                    _Step(
                        partial(copier.copy_spans, job),
                        records,
                        partial(_written, work, streamed, [span.runs for span in job]),
                        self._path_of(job[0].origin),
                    ),
                )
            )
        long, chains = self._chain_steps(sink)
        if windows is not None:
            placed += self._window_steps(windows, sink)
        placed = sorted([*placed, *chains], key=lambda item: item[0])
        of_boxes: list[BandJob | TileJob] = [*work.bands, *work.tiles]
        return [
            *(_Step(job, none, partial(_written_boxes, what)) for job, what in zip(jobs, of_boxes, strict=True)),
            *(step for _, step in (*long, *placed)),
        ]

    def _chain_steps(self, sink: LocalSink) -> tuple[list[_Placed], list[_Placed]]:
        """The steps of chains: the long ones, which would keep one worker when the others are done, and the rest."""
        chains = self.work.chains
        copier = ChainCopier(chains, self.reader, sink, self.verifier, self.digested, done=self.done)
        found: tuple[list[_Placed], list[_Placed]] = [], []
        for step in range(len(chains.steps) - 1):
            first, stop = chains.steps[step : step + 2].tolist()
            origin, start = int(chains.origins[first]), int(chains.starts[first])
            is_short = int(chains.nbytes[first:stop].sum()) < _LONG
            done = _Step(
                partial(copier.copy, step), copier.records_of(step), partial(_written_chain, chains, first, stop),
                self._path_of(origin),
            )  # fmt: skip
            found[is_short].append(((origin, start), done))
        return found

    def _window_steps(self, windows: Windows, sink: LocalSink) -> Iterator[_Placed]:
        copier = WindowCopier(windows, self.reader, sink, self.verifier, done=self.done)
        runs = windows.runs
        for index in range(len(windows)):
            first, stop = copier.rows_of(index)
            records = distinct(windows.records[first:stop])
            origin = int(runs.origins[first])
            yield (
                (origin, int(runs.starts[first])),
                _Step(
                    partial(copier.copy, index),
                    records[records >= 0],
                    partial(_written, self.work, runs, [(first, stop)]),
                    self._path_of(origin),
                ),
            )

    def _path_of(self, origin: int) -> str:
        return self.work.origins[int(origin)].path

    def into_store(self, store: Store, ledger: Ledger | None) -> None:

        spoken = None if ledger is None else _Spoken(self, ledger)
        taken = frozenset() if spoken is None else spoken.take_over()
        self.steps, self.taken_over = len(self.plan.files), len(taken)
        SequentialCopier(
            self.plan,
            self.gatherer,
            self.work.maps,
            store,
            tile_nbytes=max(self.tile_nbytes, self.chunk),
            big_nbytes=self.big_nbytes,
            done=self.done,
            there=taken,
            finished=None if spoken is None else spoken.finished,
        ).run(self.pool)

    def check_rest(self) -> None:
        """Read the records that were not proved on the way, for their digests alone."""
        if self.verifier is None:
            return
        rest = self.verifier.unproved()
        nothing = self.work.runs.take(np.zeros(0, np.int64))
        copier = StreamCopier(self.work, nothing, self.reader, None, self.verifier, wanted=rest, done=self.done)
        self.pool.run([partial(copier.copy_spans, job) for job in spans(nothing, self.work.records, rest)])


class _Spoken:
    """What is said of the objects of a run, and of those that it takes over."""

    def __init__(self, run: _Execution, ledger: Ledger) -> None:
        self._run = run
        self._ledger = ledger
        contents = Contents(run.plan, run.source, check=run.verifier is not None)
        worth = [index for index, file in enumerate(run.plan.files) if ledger.is_worth(file.nbytes)]
        self._contents = {index: contents.of(index) for index in worth}

    def take_over(self) -> frozenset[int]:
        """Return the files that are there. Others that an interrupted run has written are deleted."""
        run, earlier = self._run, self._ledger.earlier
        paths = {file.path: index for index, file in enumerate(run.plan.files) if file.path in earlier}
        taken = {index for path, index in paths.items() if earlier[path].content == self._contents.get(index)}
        for index in taken:
            path = run.plan.files[index].path
            self._ledger.keep(path)
            if run.verifier is not None and earlier[path].checked:
                run.verifier.proved[records_of(run.plan, index, run.work.maps)] = True
        self._ledger.drop(path for path, index in paths.items() if index not in taken)
        return frozenset(taken)

    def finished(self, index: int) -> None:
        """Say that a file is there whole."""
        run, content = self._run, self._contents.get(index)
        if content is None:
            return
        checked = False
        if run.verifier is not None:
            records = records_of(run.plan, index, run.work.maps)
            checked = bool((records >= 0).all() and run.verifier.proved[records].all())
        file = run.plan.files[index]
        self._ledger.finished(file.path, file.nbytes, content, checked=checked)


# --- what steps write: file, start, bytes


def _written(work: Work, runs: Runs, bounds: Sequence[tuple[int, int]]) -> Written:
    rows = np.concatenate([np.arange(*pair) for pair in bounds])
    into, out = work.ratios()[runs.casts[rows]].T
    return runs.files[rows], runs.targets[rows], runs.nbytes[rows] // into * out


def _written_chain(chains: Chains, first: int, stop: int) -> Written:
    return chains.files[first:stop], chains.targets[first:stop], chains.nbytes[first:stop]


def _written_boxes(job: BandJob | TileJob) -> Written:
    if isinstance(job, TileJob):
        rows = [(job.file, job.start, job.box.numel * dtype_of(job.tensor.dtype).itemsize)]
    else:
        rows = [(item.file, item.start, item.box.numel * dtype_of(item.dtype).itemsize) for item in job.targets]
    files, starts, nbytes = np.array(rows, np.int64).reshape(-1, 3).T
    return files, starts, nbytes
