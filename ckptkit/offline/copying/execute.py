"""Executes a plan for any formats: copies bytes between stores in bounded memory, and checks the bytes."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptkit.errors import UsageError
from ckptkit.formats.checks import Verifier
from ckptkit.formats.sources import SourceReader
from ckptkit.offline.copying.copier import Copier, Digested, Infinite, Progress, Tally
from ckptkit.offline.copying.coverage import Covered, check_plan
from ckptkit.offline.copying.gather import Gatherer
from ckptkit.offline.copying.plan import Plan, check_room, restricted
from ckptkit.offline.copying.pool import Pool
from ckptkit.offline.copying.resume import FinishedObjects, Share, Taken, take_over
from ckptkit.offline.copying.runs import checking, prepare
from ckptkit.offline.copying.sinks import LocalSink
from ckptkit.offline.copying.streams import StreamWriter
from ckptkit.storage.local import is_directory
from ckptkit.storage.store import Store
from ckptkit.units import counted, first_few, format_size

if TYPE_CHECKING:
    from ckptkit.storage.journal import Journal
    from ckptkit.storage.ledger import Ledger


DEFAULT_MAX_MEMORY = 512_000_000
# This is large enough that few calls are needed, and small enough that data stays in the cache between read, digest and
# write. With 1 MiB, ext4 would allocate memory in pieces of 1 MiB. In fragmented memory, such an allocation takes three
# times as long as copying.
_CHUNK = 512 << 10
_REMOTE_CHUNK = 8 << 20
_TILE = 4 << 20
_WIDER = {"float16": "bf16", "bfloat16": "fp32", "float32": "fp64"}


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The result of an execution.

    Attributes:
        nbytes: Number of bytes written.
        nbytes_read: Number of source bytes read, including bytes that were read only to be checked.
        records: Number of source digests checked.
        covered: Numbers of tensors, elements and bytes in the whole plan, as counted by `check_plan`.
        seconds: Wall time.
        steps: Number of steps of the plan.
        taken_over: Number of steps that were skipped because an interrupted command had finished them.
        digested: Digests of the written regions (boxes) of tensors, if `execute` computed them. In each row, `file` is
            an index into the plan's files.
        infinite: The number of finite elements that became infinite in a cast, by tensor name and dtype.
    """

    nbytes: int
    nbytes_read: int
    records: int
    covered: Covered
    seconds: float
    steps: int = 0
    taken_over: int = 0
    digested: Digested | None = None
    infinite: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @classmethod
    def joined(cls, reports: Sequence[CopyReport]) -> CopyReport:
        """Combine the reports of several ranks into one report, without `digested`."""
        infinite: Counter[tuple[str, str]] = Counter()
        for report in reports:
            infinite.update(report.infinite)
        return cls(
            sum(report.nbytes for report in reports),
            sum(report.nbytes_read for report in reports),
            sum(report.records for report in reports),
            reports[0].covered,
            max(report.seconds for report in reports),
            sum(report.steps for report in reports),
            sum(report.taken_over for report in reports),
            infinite=dict(infinite),
        )

    def notes(self) -> tuple[str, ...]:
        if not self.taken_over:
            return ()
        return (f"continued an interrupted command: {self.taken_over} of {self.steps} parts were already done",)

    def warnings(self) -> tuple[str, ...]:
        """Return a warning for each dtype in which elements became infinite."""
        found = []
        for dtype in dict.fromkeys(dtype for _, dtype in self.infinite):
            counts = {name: count for (name, of), count in self.infinite.items() if of == dtype}
            shown = first_few([f"{name} ({count})" for name, count in counts.items()])
            found.append(
                f"{counted(sum(counts.values()), 'element', 'are')} beyond the range of {dtype} and became infinite: "
                f"{shown}. Use --dtype {_WIDER[dtype]} to keep them finite."
            )
        return tuple(found)


def execute(
    plan: Plan,
    source: Store,
    destination: Store,
    *,
    workers: int = 0,
    max_memory: int = DEFAULT_MAX_MEMORY,
    check: bool = True,
    progress: Progress | None = None,
    files: Sequence[int] | None = None,
    journal: Journal | None = None,
    ledger: Ledger | None = None,
    digests: bool = False,
) -> CopyReport:
    """Write a plan's files to `destination`, which must not contain any of these files yet.

    Before anything is written, `check_plan` checks that each element and each file byte is written exactly once. The
    caller must make the files durable when it publishes the destination.

    Args:
        workers: Number of worker threads. 0 chooses a number for this machine.
        max_memory: Maximum bytes of tensor data in memory, over all workers.
        check: Compare all bytes that are read with the source's recorded digests.
        progress: A callback for (bytes done, total bytes, file). May be called from any thread, but never concurrently.
        files: Indices of the files that this process writes. None means all files.
        journal: The journal of a local destination. Steps that the journal lists as finished are skipped. Unfinished
            files that cannot be continued are written again from the start.
        ledger: The ledger of a remote destination. An object that an interrupted command finished is not written again
            if its content matches.
        digests: Compute the digest of each written region (box) of a tensor, if its bytes are written in order.

    Raises:
        IntegrityError: A digest differs. The message names file and tensor.
        IncompleteCheckpointError: The source has gaps, or a file is truncated.
        CheckpointMismatchError: The plan does not write each byte exactly once.
        NoSpaceError: The destination has too little space.
        UsageError: `max_memory` is too small for the workers, or for a computed tensor.
    """
    started = time.perf_counter()
    covered = check_plan(plan)
    kept = list(range(len(plan.files)) if files is None else files)
    own = restricted(plan, kept)
    local = is_directory(destination)
    # A local copy keeps one core busy. Copies beyond the number of cores would only wait for an output file's lock.
    least = 2 if local and is_directory(source) else 4
    workers = workers or min(16, max(least, os.cpu_count() or 1))
    if max_memory < workers * (64 << 10):
        raise UsageError(f"{format_size(max_memory)} of memory is too little for {workers} workers.")
    work = prepare(own, check=check, by_boxes=not local, digests=digests and local)
    verifier = Verifier(work.records, work.describe) if check else None
    each = max_memory // (4 * workers)
    reader = SourceReader(source, work.origins, verifier, span=max(1 << 20, each))
    chunk = max(64 << 10, min(_CHUNK if reader.is_local else _REMOTE_CHUNK, each) // 4096 * 4096)
    small = max(chunk, min(_TILE, each))
    gatherer = Gatherer(reader, work.maps, max_bytes=max_memory, small=small, big=each)
    pool = Pool(workers)
    tally = Tally(own.nbytes, progress, pool.stopped)
    digested, infinite = Digested(), Infinite()
    steps, own_files = len(work.steps), range(len(own.files))
    try:
        if is_directory(destination):
            taken = Taken()
            if journal is not None:
                share = Share.of(plan, kept, work, source, check=check)
                taken = take_over(destination, plan, share, journal, source, check=check, digests=digests)
            check_room(own, destination, held=taken.held)
            with closing(LocalSink(destination, own.files)) as sink:
                pool.run(lambda index, _: sink.begin(index, anew=index not in taken.files), own_files)
                copier = Copier(
                    work, reader, verifier, gatherer, tally, chunk=chunk, sink=sink, digests=digests, journal=journal
                )
                pool.run(copier.do, [index for index in range(steps) if index not in taken.steps])
                pool.run(lambda index, _: sink.finish(index), own_files)
                digested, infinite = copier.digested.renumbered(kept), copier.infinite
            if verifier is not None:  # the interrupted command checked these records
                verifier.proved[list(taken.records)] = True
            taken_over = len(taken.steps)
        else:
            check_room(own, destination)
            finished = None if ledger is None else FinishedObjects(own, work, source, verifier, ledger)
            there = frozenset() if finished is None else finished.take_over()
            streams, late = StreamWriter(own, gatherer, tally, destination, finished), set(own.last)
            for wanted in (False, True):  # the files in `Plan.last` come after all others
                pool.run(
                    streams.write, [i for i in own_files if i not in there and (own.files[i].path in late) is wanted]
                )
            steps, taken_over, infinite = len(own_files), len(there), streams.infinite
        if verifier is not None:  # reread the records that the copy could not check
            rest = checking(work, verifier.unproved())
            pool.run(Copier(rest, reader, verifier, gatherer, tally, chunk=chunk).do, range(len(rest.steps)))
    finally:
        reader.close()
    proved = int(verifier.proved.sum()) if verifier is not None else 0
    seconds = time.perf_counter() - started
    return CopyReport(
        own.nbytes, reader.nbytes, proved, covered, seconds, steps, taken_over, digested if digests else None,
        infinite.by_tensor(own),
    )  # fmt: skip
