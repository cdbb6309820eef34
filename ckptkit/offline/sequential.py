"""Writing the files of a plan from first to last byte, each in one stream: for stores that can't go back."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator
from functools import partial

import numpy as np

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.errors import CheckpointMismatchError
from ckptkit.offline.boxes import tile_numel
from ckptkit.offline.checks import crc32
from ckptkit.offline.gather import Gatherer
from ckptkit.offline.jobs import EntryMap
from ckptkit.offline.plan import Literal, OutputFile, Placement, Plan
from ckptkit.offline.pool import Pool, Worker
from ckptkit.storage.store import Store

__all__ = ["SequentialCopier"]

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
