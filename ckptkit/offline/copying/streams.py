"""Runs of bytes copied in the order of the disk: read once, checked, cast, written."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.catalog.columns import distinct
from ckptkit.offline.copying.casts import cast_into
from ckptkit.offline.copying.chains import Chains
from ckptkit.offline.copying.checks import RecordTable, Verifier, crc32
from ckptkit.offline.copying.jobs import Runs, Work
from ckptkit.offline.copying.pool import Worker
from ckptkit.offline.copying.sinks import LocalSink, chunks
from ckptkit.offline.copying.sources import SourceReader

__all__ = ["Span", "StreamCopier", "direct_rows", "spans", "split", "touched", "BoxDigest", "ChainCopier", "Digested"]

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


# Chains carried out: each byte read once, compared with its digest, digested anew, written.


_ROW = struct.Struct("<qqqQ")
_COLUMNS = np.dtype([("file", "<i8"), ("start", "<i8"), ("nbytes", "<i8"), ("digest", "<u8")])


@dataclass(slots=True)
class Digested:
    """The xxh3_64 of boxes that were written. Safe for several threads: a row is added in one piece."""

    rows: bytearray = field(default_factory=bytearray)

    def add(self, file: int, start: int, nbytes: int, digest: int) -> None:
        """State the digest of `nbytes` from `start` of a file."""
        self.rows += _ROW.pack(file, start, nbytes, digest)

    def table(self) -> npt.NDArray[np.void]:
        """Return the rows, with the fields file, start, nbytes, digest."""
        table: npt.NDArray[np.void] = np.frombuffer(bytes(self.rows), _COLUMNS).copy()
        return table

    def renumbered(self, files: Sequence[int]) -> Digested:
        """Return the same of files that are numbered otherwise: `files[i]` for i."""
        table = self.table()
        table["file"] = np.array(files, np.int64)[table["file"]]
        return Digested(bytearray(table.tobytes()))

    @classmethod
    def joined(cls, parts: Iterable[Digested | None]) -> Digested:
        """Return what several processes have written."""
        return cls(bytearray(b"").join(part.rows for part in parts if part is not None))


class BoxDigest:
    """A box that is written from its start to its end: its xxh3, and its CRC-32 where the file has fields for it."""

    def __init__(self, sink: LocalSink, digested: Digested, file: int, start: int) -> None:
        self._sink = sink
        self._digested = digested
        self._file = file
        self._start = start
        self._nbytes = 0
        self._state = xxhash.xxh3_64()
        self._crc = 0
        self._has_crc = sink.needs_bytes(file)

    @property
    def end(self) -> int:
        """Where in the file the next bytes go."""
        return self._start + self._nbytes

    def write(self, view: memoryview) -> None:
        """Write the next bytes."""
        self._state.update(view)
        if self._has_crc:
            self._crc = crc32(view, self._crc)
        self._sink.put(self._file, self.end, view)
        self._nbytes += len(view)

    def finish(self) -> None:
        """State what was written."""
        if self._has_crc:
            self._sink.add_crc(self._file, self._start, self._nbytes, self._crc)
        self._digested.add(self._file, self._start, self._nbytes, self._state.intdigest())


class ChainCopier:
    """Does the steps of chains, in the buffers of the worker that it is called by.

    Args:
        done: Is told the bytes read.
    """

    def __init__(
        self,
        chains: Chains,
        reader: SourceReader,
        sink: LocalSink,
        verifier: Verifier | None,
        digested: Digested,
        *,
        done: Callable[[int], None],
    ) -> None:
        self._chains = chains
        self._reader = reader
        self._sink = sink
        self._verifier = verifier
        self._digested = digested
        self._done = done

    def records_of(self, step: int) -> npt.NDArray[np.int64]:
        """Return the records that a step proves."""
        found = self._chains.records[self._rows_of(step)]
        result: npt.NDArray[np.int64] = distinct(found[found >= 0])
        return result

    def copy(self, step: int, worker: Worker) -> None:
        """Do one step."""
        chains, rows = self._chains, self._rows_of(step)
        columns = (chains.origins, chains.starts, chains.nbytes, chains.files, chains.targets, chains.records)
        box: BoxDigest | None = None
        for origin, start, nbytes, file, target, record, last in zip(
            *(column[rows].tolist() for column in columns), chains.last[rows].tolist(), strict=True
        ):
            if box is None:
                box = BoxDigest(self._sink, self._digested, file, target)
            self._copy(origin, start, nbytes, record, box, worker)
            if last:
                box.finish()
                box = None

    def _copy(self, origin: int, start: int, nbytes: int, record: int, box: BoxDigest, worker: Worker) -> None:
        buffer = worker.buffer.data
        for at, stop in chunks(start, start + nbytes, len(buffer), shift=box.end - start):
            view = buffer[: stop - at]
            self._reader.read(origin, at, view)
            if record >= 0 and self._verifier is not None:
                self._verifier.feed(record, at, view)
            box.write(view)
            self._done(len(view))

    def _rows_of(self, step: int) -> slice:
        return slice(int(self._chains.steps[step]), int(self._chains.steps[step + 1]))
