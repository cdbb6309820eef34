"""Chains carried out: each byte read once, compared with its digest, digested anew, written."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.catalog.columns import distinct
from ckptkit.offline.chains import Chains
from ckptkit.offline.checks import Verifier, crc32
from ckptkit.offline.pool import Worker
from ckptkit.offline.sinks import LocalSink, chunks
from ckptkit.offline.sources import SourceReader

__all__ = ["BoxDigest", "ChainCopier", "Digested"]


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
