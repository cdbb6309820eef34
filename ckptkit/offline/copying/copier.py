"""Executes a plan's steps in worker threads: copies contiguous runs of bytes, and assembles all other regions."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box, row_major_strides
from ckptkit.catalog.casts import cast_into
from ckptkit.catalog.columns import distinct
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.digests import new_hasher
from ckptkit.formats.checks import Verifier
from ckptkit.formats.sources import Range, SourceReader, strided
from ckptkit.offline.copying.gather import Gatherer
from ckptkit.offline.copying.plan import Placement, Plan
from ckptkit.offline.copying.pool import Stopped, Worker
from ckptkit.offline.copying.runs import LEAST, BoxStep, Runs, Work, cut_runs
from ckptkit.offline.copying.sinks import LocalSink
from ckptkit.storage.journal import Journal

Progress = Callable[[int, int, str], None]
Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_SHORT = 32 << 10  # bytes; shorter local runs are read together, because a system call costs more than reading the gaps
_ROWS = 256  # maximum number of short runs read together
_ROW = struct.Struct("<qqqQ")
_COLUMNS = np.dtype([("file", "<i8"), ("start", "<i8"), ("nbytes", "<i8"), ("digest", "<u8")])


@dataclass(slots=True)
class Tally:
    """Counts bytes and reports progress. Also tells worker threads to stop after another thread has failed.

    Attributes:
        nbytes: Number of bytes copied or checked so far.
    """

    total: int
    progress: Progress | None
    stopped: threading.Event
    nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, nbytes: int, path: str) -> None:
        """Count bytes from the file at `path`. Raises `Stopped` if the workers are to stop."""
        if self.stopped.is_set():
            raise Stopped
        with self._lock:
            self.nbytes += nbytes
            if self.progress is not None:
                self.progress(min(self.nbytes, self.total), self.total, path)


@dataclass(slots=True)
class Digested:
    """Digests of the regions (boxes) that were written. Thread-safe."""

    rows: bytearray = field(default_factory=bytearray)

    def add(self, file: int, start: int, nbytes: int, digest: int) -> None:
        """Record the digest of the bytes [start, start + nbytes) of a file."""
        self.rows += _ROW.pack(file, start, nbytes, digest)

    def table(self) -> npt.NDArray[np.void]:
        """Return the digests as a table with the fields file, start, nbytes, digest."""
        table: npt.NDArray[np.void] = np.frombuffer(bytes(self.rows), _COLUMNS).copy()
        return table

    def renumbered(self, files: Sequence[int]) -> Digested:
        """Return the digests after renumbering the files: file i becomes `files[i]`."""
        table = self.table()
        table["file"] = np.array(files, np.int64)[table["file"]]
        return Digested(bytearray(table.tobytes()))

    @classmethod
    def joined(cls, parts: Iterable[Digested | None]) -> Digested:
        """Return the digests of several processes as one table."""
        return cls(bytearray(b"").join(part.rows for part in parts if part is not None))


class BoxDigest:
    """Computes the digest of a box from consecutive pieces. The box is the bytes [start, end) of a file."""

    def __init__(self, digested: Digested, file: int, start: int, end: int) -> None:
        self._digested, self._file, self._start, self._end = digested, file, start, end
        self._at, self._state = start, new_hasher()

    def take(self, data: Bytes) -> bool:
        """Add the next bytes. When the box is complete, record its digest and return True."""
        self._state.update(data.data)
        self._at += len(data)
        if self._at < self._end:
            return False
        self._digested.add(self._file, self._start, self._end - self._start, self._state.intdigest())
        return True


@dataclass(slots=True)
class Infinite:
    """Counts the elements that became infinite in casts. Thread-safe.

    Each item of `rows` is (file, offset in the file, count).
    """

    rows: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, file: int, start: int, count: int) -> None:
        """Record that `count` elements became infinite in a cast.

        `start` is the offset of any byte of the tensor in the file.
        """
        if count:
            self.rows.append((file, start, count))

    def by_tensor(self, plan: Plan) -> dict[tuple[str, str], int]:
        """Return the number of elements that became infinite in each tensor, by tensor name and dtype."""
        found: dict[tuple[str, str], int] = {}
        if not self.rows:
            return found
        files, starts, nbytes = Placement.joined(plan.placements)
        firsts = np.cumsum([0, *map(len, plan.placements)])
        for file in dict.fromkeys(row[0] for row in self.rows):
            boxes = np.flatnonzero((files == file) & (nbytes > 0))
            boxes = boxes[np.argsort(starts[boxes])]
            own = [row for row in self.rows if row[0] == file]
            at = np.searchsorted(starts[boxes], [start for _, start, _ in own], side="right") - 1
            for box, (_, _, count) in zip(boxes[at].tolist(), own, strict=True):
                index = int(np.searchsorted(firsts, box, side="right")) - 1
                tensor = plan.placements[index].tensor
                key = tensor.name, tensor.dtype
                found[key] = found.get(key, 0) + count
        return found


@dataclass(slots=True)
class Copier:
    """Executes a plan's steps. Thread-safe.

    Attributes:
        chunk: Bytes per read.
        sink: Writes the result. None means that nothing is written, and only the source's digests are checked.
        digests: Whether to compute digests of the boxes while they are written.
        journal: Records finished steps.
        digested: Digests of written boxes, if `digests` was set.
        infinite: Counts the elements that became infinite in casts.
    """

    work: Work
    reader: SourceReader
    verifier: Verifier | None
    gatherer: Gatherer
    tally: Tally
    chunk: int
    sink: LocalSink | None = None
    digests: bool = False
    journal: Journal | None = None
    digested: Digested = field(default_factory=Digested)
    infinite: Infinite = field(default_factory=Infinite)

    def do(self, index: int, worker: Worker) -> None:
        """Execute one step."""
        step = self.work.steps[index]
        if isinstance(step, BoxStep):
            infinite = self._copy_boxes(step, worker)
        else:
            runs = self.work.runs.take(slice(step.first, step.stop))
            infinite = self._copy_runs(cut_runs(runs, self.chunk, self.work.ratios()), worker)
            for origin in distinct(runs.origins).tolist():
                self.reader.forget(origin)
        # The journal must not list steps whose records came out of order, because these records are not checked yet.
        # It must not list steps with infinite elements either, because a resumed command must count those again.
        proved = self.verifier is None or self.verifier.proved[step.records].all()
        if self.journal is not None and proved and not infinite:
            self.journal.done(index)

    # --- runs

    def _copy_runs(self, runs: Runs, worker: Worker) -> int:
        """Copy runs of at most one chunk each: read, check, cast and write the bytes, and compute digests of boxes.

        Short runs are read together. Returns how many elements became infinite.
        """
        # Lists are faster here, because taking one number from a numpy array costs more than the rest of the loop body.
        nbytes, files, targets, casts, ends = (
            getattr(runs, name).tolist() for name in ("nbytes", "files", "targets", "casts", "ends")
        )
        ratios = self.work.ratios().tolist()
        digest: BoxDigest | None = None
        total = 0
        for first, stop in pairwise(self._batches(runs.nbytes)):
            views = self._read(runs, first, stop, worker)
            cast = [nbytes[i] // ratios[casts[i]][0] * ratios[casts[i]][1] for i in range(first, stop) if casts[i]]
            room, made = worker.buffer(sum(cast), made=True), 0
            pieces: dict[int, list[tuple[int, memoryview]]] = {}  # per file, each piece with its offset
            for i, view in enumerate(views, first):
                if self.sink is None:
                    continue
                data = view
                if casts[i]:
                    into, out = ratios[casts[i]]
                    data = room[made : made + nbytes[i] // into * out]
                    infinite = cast_into(view, data, *self.work.casts[casts[i]])
                    self.infinite.add(files[i], targets[i], infinite)
                    total += infinite
                    made += len(data)
                if ends[i]:
                    digest = digest or BoxDigest(self.digested, files[i], targets[i], ends[i])
                    digest = None if digest.take(data) else digest
                pieces.setdefault(files[i], []).append((targets[i], data.data))
            if self.sink is not None:
                for file, parts in pieces.items():
                    self.sink.write(file, parts)
            self.tally.add(sum(nbytes[first:stop]), self.work.origins[int(runs.origins[first])].path)
        return total

    def _batches(self, nbytes: Int64) -> list[int]:
        """Return the bounds of batches of runs that are read together.

        A long run is a batch of its own. Short runs are combined up to about half a chunk.
        """
        short = nbytes < (_SHORT if self.reader.is_local else self.chunk)
        turns = (np.cumsum(nbytes) - nbytes) // max(1, self.chunk // 2)
        new = np.append(True, ~short[1:] | ~short[:-1] | (turns[1:] != turns[:-1]))
        at = np.arange(len(nbytes))
        new |= (at - np.maximum.accumulate(np.where(new, at, 0))) % _ROWS == 0
        return [*np.flatnonzero(new).tolist(), len(nbytes)]

    def _read(self, runs: Runs, first: int, stop: int, worker: Worker) -> list[Bytes]:
        """Read and check the runs [first, stop). Return each run's bytes, which are in the worker's buffer."""
        some = runs.take(slice(first, stop))
        ends = np.cumsum(some.nbytes)
        buffer = worker.buffer(int(ends[-1]))
        views = [buffer[end - nbytes : end] for end, nbytes in zip(ends.tolist(), some.nbytes.tolist(), strict=True)]
        order = np.lexsort((some.starts, some.origins)).tolist()
        origins, starts, records = (column.tolist() for column in (some.origins, some.starts, some.records))
        self.reader.read_many([Range(origins[i], starts[i], views[i].data, records[i]) for i in order])
        return views

    # --- boxes

    def _copy_boxes(self, step: BoxStep, worker: Worker) -> int:
        """Assemble a tensor tile by tile, and write each tile's contents to all boxes that overlap it.

        Tiles are row-major, so each box's bytes are written in order. Returns how many elements became infinite.
        """
        assert self.sink is not None
        tensor, itemsize = step.tensor, dtype_of(step.tensor.dtype).itemsize
        path = self.work.origins[int(self.work.maps[tensor.sources[0]].origins[0])].path if tensor.sources else ""
        digests = [
            BoxDigest(self.digested, file, start, start + box.numel * itemsize)
            if self.digests and box.numel * itemsize >= LEAST
            else None
            for box, file, start in step.boxes
        ]
        offsets = tuple(map(min, zip(*(box.offsets for box, _, _ in step.boxes), strict=True)))
        stops = tuple(map(max, zip(*(box.stops for box, _, _ in step.boxes), strict=True)))
        bounding = Box(offsets, tuple(b - a for a, b in zip(offsets, stops, strict=True)))
        infinite = 0
        for tile in bounding.tiles(self.gatherer.tile_numel(tensor)):
            data = worker.buffer(tile.numel * itemsize, made=True)
            infinite += self.gatherer.make_box(tensor, tile, data)
            for (box, file, start), digest in zip(step.boxes, digests, strict=True):
                shared = tile.intersect(box)
                if shared is None:
                    continue
                part = _cut(data, tile, shared, itemsize)
                if digest is not None:
                    digest.take(part)
                at = start + shared.relative_to(box).flat_start(box.sizes) * itemsize
                self.sink.write(file, [(at, part.data)])
            self.tally.add(len(data), path)
        self.infinite.add(*step.boxes[0][1:], infinite)
        return infinite


def _cut(data: Bytes, tile: Box, shared: Box, itemsize: int) -> Bytes:
    """Return the row-major bytes of the region `shared`, which lies inside the tile."""
    inside = shared.relative_to(tile)
    first = inside.flat_start(tile.sizes) * itemsize
    if inside.is_contiguous_in(tile.sizes):
        return data[first : first + shared.numel * itemsize]
    view = strided(data, first, shared.sizes, row_major_strides(tile.sizes), itemsize)
    part: Bytes = np.ascontiguousarray(view).reshape(-1).view(np.uint8)
    return part
