"""Runs of bytes copied in the order of the disk: read once, checked, cast, written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import distinct
from ckptkit.offline.casts import cast_into
from ckptkit.offline.checks import RecordTable, Verifier
from ckptkit.offline.jobs import Runs, Work
from ckptkit.offline.pool import Worker
from ckptkit.offline.sinks import LocalSink, chunks
from ckptkit.offline.sources import SourceReader

__all__ = ["Span", "StreamCopier", "direct_rows", "spans", "split", "touched"]

Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_GAP = 64 << 10  # below this, reading on is cheaper than another call
_DIRECT = 256 << 10  # runs below this are cheaper to gather in a buffer than to copy in the kernel one by one
_JOB = 32 << 20  # bytes of a source that one worker takes at a time


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, stop) of an origin that are read in one go, and what lies in them: rows [a, b) of both tables."""

    origin: int
    start: int
    stop: int
    runs: tuple[int, int]
    records: tuple[int, int]


def direct_rows(work: Work, sink: LocalSink) -> npt.NDArray[np.bool_]:
    """Return which runs the kernel may copy: long, as they are, and with no digest to be checked."""
    runs = work.runs
    rows = (runs.casts == 0) & (runs.nbytes >= _DIRECT)
    decoded = np.array([origin.codec is not None for origin in work.origins], bool)
    checked = np.zeros(len(work.origins), bool)
    checked[work.records.sources] = True
    rows &= ~(decoded | checked)[runs.origins] if len(work.origins) else False
    through = np.array([index for index in distinct(runs.files).tolist() if sink.needs_bytes(index)], np.int64)
    rows &= ~np.isin(runs.files, through)
    result: npt.NDArray[np.bool_] = rows
    return result


def touched(runs: Runs, records: RecordTable) -> Int64:
    """Return the records in whose bytes a run lies, ascending. Empty records need no reading and are left out."""
    if not len(runs) or not len(records):
        return np.zeros(0, np.int64)
    both = np.concatenate([runs.origins, records.sources])
    bases = _bases(both, np.concatenate([runs.starts + runs.nbytes, records.starts + records.nbytes]))
    lo = runs.starts + bases[runs.origins]
    furthest = np.maximum.accumulate(lo + runs.nbytes)
    start = records.starts + bases[records.sources]
    before = np.searchsorted(lo, start + records.nbytes)  # runs that begin before the record ends
    found = (before > 0) & (furthest[np.maximum(before - 1, 0)] > start) & (records.nbytes > 0)
    return np.flatnonzero(found)


def split(runs: Runs, ratios: Int64) -> Runs:
    """Cut long runs, so that several workers can share them. Cuts lie between elements."""
    counts = -(-runs.nbytes // _JOB)
    if not len(runs) or counts.max() <= 1:
        return runs
    rows = np.repeat(np.arange(len(runs)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    skipped = within * _JOB
    parts = runs.take(rows)
    into, out = ratios[parts.casts].T
    return Runs(
        parts.origins,
        parts.starts + skipped,
        np.minimum(parts.nbytes - skipped, _JOB),
        parts.files,
        parts.targets + skipped // into * out,
        parts.casts,
    )


def spans(runs: Runs, records: RecordTable, wanted: Int64) -> Iterator[list[Span]]:
    """Yield jobs, in the order of the disk, each a list of spans. `wanted`: rows of the records to check.

    Runs and records that overlap, or nearly touch, are one span; a span is never cut.
    """
    origins = np.concatenate([runs.origins, records.sources[wanted]])
    starts = np.concatenate([runs.starts, records.starts[wanted]])
    stops = starts + np.concatenate([runs.nbytes, records.nbytes[wanted]])
    if not len(starts):
        return
    bases = _bases(origins, stops)
    order = np.argsort(starts + bases[origins], kind="stable")
    lo, hi = (starts + bases[origins])[order], np.maximum.accumulate((stops + bases[origins])[order])
    own = origins[order]
    new = np.concatenate([[True], (lo[1:] > hi[:-1] + _GAP) | (own[1:] != own[:-1])])
    # Touching spans stay apart where they are big: they can be shared between workers.
    new |= np.concatenate([[False], (lo[1:] >= hi[:-1]) & (lo[1:] // _JOB != lo[:-1] // _JOB)])
    first = np.flatnonzero(new)
    begin, end = lo[first], hi[np.append(first[1:], len(lo)) - 1]
    run_bounds = np.searchsorted(runs.starts + bases[runs.origins], np.append(begin, hi[-1] + 1))
    at = records.starts[wanted] + bases[records.sources[wanted]] if len(wanted) else wanted
    record_bounds = np.searchsorted(at, np.append(begin, hi[-1] + 1))
    job: list[Span] = []
    size = 0
    rows = zip(
        own[first].tolist(), begin.tolist(), end.tolist(), run_bounds.tolist()[:-1], run_bounds.tolist()[1:],
        record_bounds.tolist()[:-1], record_bounds.tolist()[1:], strict=True,
    )  # fmt: skip
    for origin, a, b, run_a, run_b, record_a, record_b in rows:
        base = int(bases[origin])
        if job and (size + b - a > _JOB or job[-1].origin != origin):
            yield job
            job, size = [], 0
        job.append(Span(origin, a - base, b - base, (run_a, run_b), (record_a, record_b)))
        size += b - a
    yield job


def _bases(origins: Int64, stops: Int64) -> Int64:
    """Addresses at which the origins start, laid one after the other."""
    extents = np.zeros(int(origins.max()) + 1, np.int64)
    np.maximum.at(extents, origins, stops)
    bases: Int64 = np.concatenate([[0], np.cumsum(extents + 2 * _GAP)[:-1]])
    return bases


class StreamCopier:
    """Does the spans of a plan, in the buffers of the worker that it is called by.

    Args:
        wanted: The rows of `work.records` that spans count in.
        done: Is told the bytes read.
    """

    def __init__(
        self,
        work: Work,
        runs: Runs,
        reader: SourceReader,
        sink: LocalSink | None,
        verifier: Verifier | None,
        *,
        wanted: Int64,
        done: Callable[[int], None],
    ) -> None:
        self._work = work
        self._runs = runs
        self._reader = reader
        self._sink = sink
        self._verifier = verifier
        self._wanted = wanted
        self._done = done
        self._itemsizes = work.ratios().tolist()

    def copy_direct(self, row: int, worker: Worker) -> None:
        """Copy one run in the kernel, or through the buffer from where the kernel gives up."""
        runs = self._runs
        origin, start, nbytes = int(runs.origins[row]), int(runs.starts[row]), int(runs.nbytes[row])
        file, target = int(runs.files[row]), int(runs.targets[row])
        sink, descriptors = self._sink, self._reader.descriptors
        assert sink is not None and descriptors is not None
        buffer, path, at = worker.buffer, self._reader.origin(origin).path, start
        while at < start + nbytes:
            copied = 0
            if sink.kernel is not None:
                with descriptors.using(path) as descriptor:
                    copied = sink.copy(descriptor, at, file, target + at - start, start + nbytes - at)
            if not copied:
                _, stop = next(chunks(at, start + nbytes, len(buffer), shift=target - start))
                view = buffer[: stop - at].data
                self._reader.read(origin, at, view)
                sink.write(file, target + at - start, [view])
                copied = stop - at
            at += copied
        self._done(nbytes)

    def copy_spans(self, job: list[Span], worker: Worker) -> None:
        """Do the spans of one job."""
        for span in job:
            self._copy_span(span, worker)
            if self._work.origins[span.origin].codec is not None:
                self._reader.forget(span.origin)

    def _copy_span(self, span: Span, worker: Worker) -> None:
        runs = _Cursor(
            self._runs.starts[slice(*span.runs)].tolist(), self._runs.nbytes[slice(*span.runs)].tolist(), span.runs[0]
        )
        rows = self._wanted[slice(*span.records)]
        table = self._work.records
        records = _Cursor(table.starts[rows].tolist(), table.nbytes[rows].tolist(), span.records[0])
        buffer = worker.buffer
        for start, stop in chunks(span.start, span.stop, len(buffer), shift=self._shift(span)):
            view = buffer[: stop - start]
            self._reader.read(span.origin, start, view.data)
            if self._verifier is not None:
                for row, a, b in records.between(start, stop):
                    self._verifier.feed(int(self._wanted[row]), a, view[a - start : b - start].data)
            self._write_out(span.origin, view, start, list(runs.between(start, stop)), worker)
            self._done(stop - start)

    def _shift(self, span: Span) -> int:
        """How much further on the target of a span is, so that chunks end where its pages do; of casts where elements
        do."""
        row, stop = span.runs
        if row == stop or int(self._runs.casts[row]):
            return -span.start
        return int(self._runs.targets[row]) - int(self._runs.starts[row])

    def _write_out(
        self, origin: int, view: Bytes, start: int, parts: list[tuple[int, int, int]], worker: Worker
    ) -> None:
        """Write what runs have in one chunk; what lies side by side in the target goes out in one call."""
        if not parts or self._sink is None:
            return
        columns = self._runs
        pending: list[Any] = []
        file = at = end = -1
        for row, a, b in parts:
            target = int(columns.targets[row]) - int(columns.starts[row])
            into = int(columns.files[row])
            cast = int(columns.casts[row])
            if cast:
                self._write_cast(origin, view, start, (row, a, b), worker)
                continue
            if into != file or target + a != end:
                if pending:
                    self._sink.write(file, at, pending)
                pending, file, at, end = [], into, target + a, target + a
            pending.append(view[a - start : b - start].data)
            end += b - a
        if pending:
            self._sink.write(file, at, pending)

    def _write_cast(self, origin: int, view: Bytes, start: int, part: tuple[int, int, int], worker: Worker) -> None:
        """Cast the elements that end in this chunk; one that began in the chunk before is read again."""
        assert self._sink is not None
        row, a, b = part
        columns = self._runs
        cast = int(columns.casts[row])
        into, out = self._itemsizes[cast]
        first = int(columns.starts[row])
        lo, hi = (a - first) // into, (b - first) // into  # elements of the run
        if hi <= lo:
            return
        begin, stop = first + lo * into, first + hi * into
        if begin >= start:
            data = view[begin - start : stop - start]
        else:
            data = np.empty(stop - begin, np.uint8)
            self._reader.read(origin, begin, data[: start - begin].data)
            data[start - begin :] = view[: stop - start]
        made = worker.room((hi - lo) * out)
        cast_into(data, made, *self._work.casts[cast])
        self._sink.write(int(columns.files[row]), int(columns.targets[row]) + lo * out, [made.data])


class _Cursor:
    """Intervals sorted by start, of which those that lie in rising windows are asked for."""

    def __init__(self, starts: list[int], nbytes: list[int], first: int) -> None:
        self._starts = starts
        self._stops = [a + n for a, n in zip(starts, nbytes, strict=True)]
        self._first = first
        self._next = 0
        self._open: list[int] = []

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (row, a, b) for what each interval has in [start, stop)."""
        i = self._next
        while i < len(self._starts) and self._starts[i] < stop:
            self._open.append(i)
            i += 1
        self._next = i
        still = []
        for i in self._open:
            a, b = max(self._starts[i], start), min(self._stops[i], stop)
            if a < b:
                yield self._first + i, a, b
            if self._stops[i] > stop:
                still.append(i)
        self._open = still
