"""Writes each file of a plan from beginning to end, for stores that cannot seek."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.digests import crc32
from ckptkit.errors import CheckpointMismatchError
from ckptkit.offline.copying.copier import Infinite, Tally
from ckptkit.offline.copying.gather import Gatherer
from ckptkit.offline.copying.plan import Literal, OutputFile, Placement, Plan
from ckptkit.offline.copying.pool import Worker
from ckptkit.offline.copying.resume import FinishedObjects
from ckptkit.storage.store import Store

_Event = tuple[int, Literal | tuple[Placement, int]]


@dataclass(slots=True)
class StreamWriter:
    """Writes files to a store, several at a time, each from beginning to end.

    Attributes:
        finished: Records the finished files, so that a resumed command can keep them.
        infinite: Counts the elements that became infinite in casts.
    """

    plan: Plan
    gatherer: Gatherer
    tally: Tally
    destination: Store
    finished: FinishedObjects | None = None
    infinite: Infinite = field(default_factory=Infinite)

    def write(self, index: int, worker: Worker) -> None:
        """Write one file."""
        file = self.plan.files[index]
        placed: list[_Event] = []
        for placement in self.plan.placements:
            for row in np.flatnonzero(placement.files == index).tolist():
                if placement.box(row).numel:
                    placed.append((int(placement.starts[row]), (placement, row)))
        literals = sorted(file.literals, key=lambda item: item.start)
        if any(True for _ in file.crcs):
            literals = self._with_crcs(file, literals, placed, worker)
        infinite = Infinite()
        last = 0  # a block is counted when the next one is sent, because its upload may take long
        with self.destination.writer(file.path) as writer:
            for block in self._blocks(index, _events(literals, placed), worker, infinite):
                self.tally.add(last, file.path)
                writer.write(block)
                last = len(block)
        self.tally.add(last, file.path)
        self.infinite.rows += infinite.rows
        if self.finished is not None and not infinite.rows:  # a resumed command must count infinite elements again
            self.finished.finished(index)

    def _blocks(self, index: int, events: list[_Event], worker: Worker, infinite: Infinite) -> Iterator[memoryview]:
        for start, event in events:
            if isinstance(event, Literal):
                yield memoryview(event.data)
                continue
            placement, row = event
            tensor, itemsize = placement.tensor, dtype_of(placement.tensor.dtype).itemsize
            for tile in placement.box(row).tiles(self.gatherer.tile_numel(tensor)):
                out = worker.buffer(tile.numel * itemsize, made=True)
                infinite.add(index, start, self.gatherer.make_box(tensor, tile, out))
                yield out.data

    def _with_crcs(
        self, file: OutputFile, literals: list[Literal], placed: list[_Event], worker: Worker
    ) -> list[Literal]:
        """Return the literals (bytes that belong to no tensor, such as headers), with the CRC fields filled in.

        The bytes that a CRC covers are produced twice: once for the CRC, and once to be written.
        """
        changed = [(item.start, bytearray(item.data)) for item in literals]
        events = _events(literals, placed)
        for item in file.crcs:
            inside = [event for event in events if item.start <= event[0] < item.start + item.nbytes]
            value = count = 0
            for block in self._blocks(-1, inside, worker, Infinite()):
                value = crc32(block, value)
                count += len(block)
            if count != item.nbytes:
                raise CheckpointMismatchError(f"{file.path}: a CRC range ends inside a tensor. This is a bug.")
            for at in item.at:
                start, data = next(x for x in changed if x[0] <= at and at + 4 <= x[0] + len(x[1]))
                data[at - start : at - start + 4] = struct.pack("<I", value)
        return [Literal(start, bytes(data)) for start, data in changed]


def _events(literals: list[Literal], placed: list[_Event]) -> list[_Event]:
    """Return a file's non-empty literals (bytes of no tensor) and its boxes (`placed`), sorted by offset."""
    return sorted([*((item.start, item) for item in literals if item.data), *placed], key=lambda event: event[0])
