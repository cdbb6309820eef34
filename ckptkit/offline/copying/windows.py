"""Many short runs, gathered by where they go: read in a few long pieces, checked, and written in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckptkit.offline.copying.checks import Verifier
from ckptkit.offline.copying.jobs import Runs, Work
from ckptkit.offline.copying.pool import Worker
from ckptkit.offline.copying.sinks import LocalSink
from ckptkit.offline.copying.sources import SourceReader

__all__ = ["WindowCopier", "Windows", "windowed"]

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_SHORT = 32 << 10  # runs below this cost more for their calls than for their bytes
_WINDOW = 256 << 10  # bytes of the target that are made at once
_ROWS = 256
_GAP = 2 << 10  # what lies between the tensors of a torch.save archive, and of DCP's items, is read over
_MANY = 1000  # runs from which it is worth it; fewer are steps in the order of the disk
_LEAST = 2  # runs a read, on average: else the source has another order, and is read in its own


@dataclass(frozen=True, slots=True)
class Windows:
    """Runs by file and target. Those of window i are rows [bounds[i], bounds[i + 1]), all of one file.

    Attributes:
        records: [n] the digest of just the bytes of the run; -1 for none that is to be checked.
    """

    runs: Runs
    records: Int64
    bounds: Int64

    def __len__(self) -> int:
        return len(self.bounds) - 1


def windowed(runs: Runs, work: Work) -> tuple[Windows, Bool]:
    """Return the runs that are better gathered, and which of `runs` they are."""
    none = Windows(runs.take(np.zeros(0, np.int64)), np.zeros(0, np.int64), np.zeros(1, np.int64))
    records = work.records.find(runs.origins, runs.starts, runs.nbytes)
    apart = np.zeros(len(work.origins), bool)
    apart[[index for index, origin in enumerate(work.origins) if origin.codec is not None]] = True
    checked = np.zeros(len(work.origins), bool)
    checked[work.records.sources] = True
    chosen = (runs.casts == 0) & (runs.nbytes < _SHORT) & ~apart[runs.origins]
    chosen &= (records >= 0) | ~checked[runs.origins]  # a digest of other bytes too is checked where they are read
    rows = np.flatnonzero(chosen)
    if len(rows) < _MANY:
        return none, np.zeros(len(runs), bool)
    rows = rows[np.lexsort((runs.targets[rows], runs.files[rows]))]
    found = Windows(runs.take(rows), records[rows], _bounds(runs.files[rows], runs.nbytes[rows]))
    if _reads(found) * _LEAST > len(rows):
        return none, np.zeros(len(runs), bool)
    return found, chosen


def _bounds(files: Int64, nbytes: Int64) -> Int64:
    turns = (np.cumsum(nbytes) - nbytes) // _WINDOW
    new = np.append(True, (files[1:] != files[:-1]) | (turns[1:] != turns[:-1]))
    at = np.arange(len(files))
    new |= (at - np.maximum.accumulate(np.where(new, at, 0))) % _ROWS == 0
    return np.append(np.flatnonzero(new), len(files))


def _reads(windows: Windows) -> int:
    """Count the pieces in which the source is read."""
    runs = windows.runs
    owners = np.repeat(np.arange(len(windows)), np.diff(windows.bounds))
    order = np.lexsort((runs.starts, runs.origins, owners))
    owners, origins, starts = owners[order], runs.origins[order], runs.starts[order]
    ends = starts + runs.nbytes[order]
    new = (owners[1:] != owners[:-1]) | (origins[1:] != origins[:-1]) | (starts[1:] - ends[:-1] > _GAP)
    return 1 + int(new.sum())


class WindowCopier:
    """Does windows, in the buffers of the worker that it is called by.

    Args:
        done: Is told the bytes read.
    """

    def __init__(
        self,
        windows: Windows,
        reader: SourceReader,
        sink: LocalSink,
        verifier: Verifier | None,
        *,
        done: Callable[[int], None],
    ) -> None:
        self._windows = windows
        self._reader = reader
        self._sink = sink
        self._verifier = verifier
        self._done = done

    def rows_of(self, index: int) -> tuple[int, int]:
        """Return the first row of a window, and where its rows end."""
        first, stop = self._windows.bounds[index : index + 2].tolist()
        return first, stop

    def copy(self, index: int, worker: Worker) -> None:
        """Do one window."""
        first, stop = self.rows_of(index)
        rows, runs = slice(first, stop), self._windows.runs
        views = self._read(rows, worker)
        if self._verifier is not None:
            for record, view in zip(self._windows.records[rows].tolist(), views, strict=True):
                if record >= 0:
                    self._verifier.whole(record, view)
        targets, file = runs.targets[rows], int(runs.files[first])
        ends = targets + runs.nbytes[rows]
        cuts = [0, *(np.flatnonzero(targets[1:] != ends[:-1]) + 1).tolist(), stop - first]
        for begin, end in pairwise(cuts):
            self._sink.write(file, int(targets[begin]), views[begin:end])

    def _read(self, rows: slice, worker: Worker) -> list[memoryview]:
        """Return the bytes of each run of some rows, which lie in the second buffer of the worker."""
        runs = self._windows.runs
        origins, starts = runs.origins[rows], runs.starts[rows]
        order = np.lexsort((starts, origins))
        origins, starts = origins[order], starts[order]
        ends = starts + runs.nbytes[rows][order]
        new = np.append(True, (origins[1:] != origins[:-1]) | (starts[1:] - ends[:-1] > _GAP))
        begins = np.flatnonzero(new)
        lows, highs = starts[begins], np.maximum.reduceat(ends, begins)
        places = np.cumsum(highs - lows) - (highs - lows)
        total = int((highs - lows).sum())
        buffer = worker.room(total).data
        for origin, low, high, place in zip(
            origins[begins].tolist(), lows.tolist(), highs.tolist(), places.tolist(), strict=True
        ):
            self._reader.read(origin, low, buffer[place : place + high - low])
        self._done(total)
        shift = (places - lows)[np.cumsum(new) - 1]
        found = np.empty((2, len(order)), np.int64)
        found[0, order], found[1, order] = starts + shift, ends + shift
        return [buffer[a:b] for a, b in found.T.tolist()]
