"""Checks bytes against their digests while the bytes are read, in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.entry import SliceArray
from ckptkit.digests import CRC, NAMES, Crc32, Hasher, crc32, crc32_combine, mismatch, new_hasher
from ckptkit.errors import IntegrityError

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RecordTable:
    """The byte ranges that digests cover, as columns. Each row is a record. Equal ranges of a source share one record.

    Attributes:
        sources: [n] index of the source: a file, or the decompressed bytes of a part of a file.
        starts, nbytes: [n] start and size of the range in bytes.
        values: [n] digests.
        algorithms: [n] index into `NAMES`.
        owners: [n] index of a tensor with bytes in the range, for messages. The caller defines these indices.
    """

    sources: Int64
    starts: Int64
    nbytes: Int64
    values: UInt64
    algorithms: Int64
    owners: Int64

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, rows: Int64) -> RecordTable:
        return RecordTable(*(getattr(self, name)[rows] for name in self.__slots__))

    @classmethod
    def of(cls, columns: Sequence[Sequence[npt.NDArray[Any]]]) -> RecordTable:
        """Return one table with the records of several groups, sorted by source and start.

        Duplicate and empty records are left out. Each group is (sources, starts, nbytes, values, algorithms, owners).
        """
        nothing = np.zeros(0, np.int64)
        joined = [np.concatenate(column) for column in zip(*columns, strict=True)] if columns else [nothing] * 6
        sources, starts, nbytes = joined[:3]
        order = np.lexsort((nbytes, starts, sources))
        key = np.stack([sources[order], starts[order], nbytes[order]], axis=1)
        new = np.append(True, (key[1:] != key[:-1]).any(axis=1))[: len(order)]
        first = order[new & (key[:, 2] > 0)]
        sources, starts, nbytes, values, algorithms, owners = (column[first] for column in joined)
        return cls(sources, starts, nbytes, values.astype(np.uint64), algorithms, owners)

    def find(self, sources: Int64, starts: Int64, nbytes: Int64) -> Int64:
        """Return, for each range, the index of the record with the same range, or -1 if there is none.

        The records must be sorted by source and start.
        """
        if not len(self) or not len(starts):
            return np.full(len(starts), -1, np.int64)
        span = int(max(self.starts.max(), starts.max())) + 1
        exact = np.int64 if (int(max(self.sources.max(), sources.max())) + 1) * span < 2**63 else object
        keys = self.sources.astype(exact) * span + self.starts
        wanted = sources.astype(exact) * span + starts
        at = np.minimum(np.searchsorted(keys, wanted), len(self) - 1)
        found = (keys[at] == wanted) & (self.nbytes[at] == nbytes)
        return np.where(found.astype(bool), at, -1)


def recorded(slices: SliceArray) -> tuple[int, Int64, Int64, UInt64]:
    """Return the recorded digest of each slice, and the byte range that this digest covers.

    Returns:
        The algorithm (an index into `NAMES`, or -1 if there are no digests), the starts and the sizes of the ranges,
        and the digests.
    """
    if slices.algorithm is None or slices.digests is None:
        return -1, slices.starts, slices.nbytes, np.zeros(len(slices), np.uint64)
    if slices.digest_starts is None or slices.digest_nbytes is None:
        return NAMES.index(slices.algorithm), slices.starts, slices.nbytes, slices.digests
    return NAMES.index(slices.algorithm), slices.digest_starts, slices.digest_nbytes, slices.digests


class Crcs:
    """Computes a file's CRC-32 in pieces, and joins adjacent pieces. Pieces may come in any order from any thread."""

    def __init__(self) -> None:
        self._by_stop: dict[int, tuple[int, int]] = {}  # stop -> start, CRC
        self._by_start: dict[int, int] = {}  # start -> stop
        self._lock = threading.Lock()

    def begin(self, start: int) -> tuple[int, int]:
        """Remove the piece that ends at `start`, and return its start and CRC-32 (`start` and 0 if there is none).

        The caller extends the piece, and adds it again with `end`.
        """
        with self._lock:
            first, value = self._by_stop.pop(start, (start, 0))
            self._by_start.pop(first, None)
        return first, value

    def end(self, first: int, stop: int, value: int) -> tuple[int, int, int]:
        """Add the bytes [first, stop) of the file as a piece with the CRC-32 `value`, and join adjacent pieces.

        Returns:
            (start, stop, CRC-32) of the joined piece.
        """
        with self._lock:
            if first in self._by_stop:  # meanwhile, another thread added the preceding piece
                before, crc = self._by_stop.pop(first)
                self._by_start.pop(before, None)
                value, first = crc32_combine(crc, value, stop - first), before
            end = self._by_start.pop(stop, -1)
            if self._by_stop.get(end, (-1, 0))[0] == stop:  # pieces may overlap, so a different piece may end here
                value, stop = crc32_combine(value, self._by_stop.pop(end)[1], end - stop), end
            self._by_stop[stop], self._by_start[first] = (first, value), stop
        return first, stop, value

    def feed(self, start: int, data: memoryview) -> None:
        """Add `data`, the bytes of the file from position `start` on."""
        first, value = self.begin(start)
        self.end(first, start + len(data), crc32(data, value))  # outside the lock, so that threads hash in parallel

    def parts(self) -> list[tuple[int, int, int]]:
        """Return the joined pieces in order: (start, size in bytes, CRC-32)."""
        with self._lock:
            return sorted((start, stop - start, crc) for stop, (start, crc) in self._by_stop.items())


Run = tuple[int, Hasher]
"""A digest in progress: the start of its bytes, and the hasher that has been updated with the bytes so far."""


class Verifier:
    """Checks records against their digests while the bytes are read. Thread-safe.

    A record is a byte range that has a digest (see `RecordTable`). If the digest is a CRC-32, the record is checked
    once all its bytes have been read, in any order. Any other record is checked only if its bytes are read in order.
    `unproved` returns the records that must be read again.

    Args:
        describe: Returns text for the error message: the record's file, and a tensor in the record.
        advice: End of the error message, which says what the user can do.
    """

    def __init__(
        self, table: RecordTable, describe: Callable[[int], str], advice: str = "use another copy of it"
    ) -> None:
        self._table = table
        self._describe = describe
        self._advice = advice
        self._crcs: dict[int, Crcs] = {}
        self._runs: dict[tuple[int, int], Run] = {}  # by (record, where its next bytes start)
        self._lock = threading.Lock()
        self.proved = table.nbytes == 0

    def begin(self, record: int, start: int) -> Run | None:
        """Return an unfinished digest, to which the caller adds the record's bytes from `start` on.

        The caller then passes this digest to `end`, or drops it if reading fails. Returns None if the bytes are not
        checked, because the record was already checked, or because the bytes are read out of order.
        """
        table = self._table
        if self.proved[record]:
            return None
        algorithm, first = NAMES[int(table.algorithms[record])], int(table.starts[record])
        if start == first:
            return first, new_hasher(algorithm)
        with self._lock:
            if algorithm != CRC:
                return self._runs.pop((record, start), None)  # None: out of order
            crcs = self._crcs.setdefault(record, Crcs())
        first, value = crcs.begin(start)
        return first, Crc32(value)

    def end(self, record: int, run: Run, stop: int) -> None:
        """Take back the digest that `begin` returned, to which the caller has added the record's bytes up to `stop`.

        `stop` must lie inside the record.

        Raises:
            IntegrityError: All bytes of the record have been read, and they differ from the digest.
        """
        table, first, value = self._table, run[0], run[1].intdigest()
        algorithm, expected = NAMES[int(table.algorithms[record])], int(table.values[record])
        start, end = int(table.starts[record]), int(table.starts[record] + table.nbytes[record])
        if (first, stop) != (start, end):
            with self._lock:
                if algorithm != CRC:
                    self._runs[record, stop] = run
                    return
                crcs = self._crcs.setdefault(record, Crcs())
            # Use what `end` returns, not `crcs.parts()`: if a thread reads a piece twice, the second reading may have
            # replaced the joined piece in `crcs`.
            first, stop, value = crcs.end(first, stop, value)
            if (first, stop) != (start, end):
                return
        with self._lock:
            self._crcs.pop(record, None)
        if value != expected:
            what = mismatch(algorithm, expected, value, start, end)
            raise IntegrityError(f"{self._describe(record)}: {what} The file is damaged: {self._advice}.")
        self.proved[record] = True

    def feed(self, record: int, start: int, data: memoryview) -> None:
        """Check `data`, bytes of a record that were read from position `start` of the record's source."""
        run = self.begin(record, start)
        if run is not None:
            run[1].update(data)
            self.end(record, run, start + len(data))

    def unproved(self) -> Int64:
        """Return the indices of the records that were not checked, and drop the digests in progress."""
        with self._lock:
            self._crcs.clear()
            self._runs.clear()
        return np.flatnonzero(~self.proved)
