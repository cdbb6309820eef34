"""Writes DCP data files: distributes records over a few files, and computes digests and CRCs while writing."""

from __future__ import annotations

import contextlib
import heapq
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptkit.digests import crc32, digest_of, new_hasher
from ckptkit.errors import NoSpaceError, StorageError
from ckptkit.formats.dcp.digests import all_of
from ckptkit.formats.dcp.host_bytes import HostBytes, lies_row_major, settle_device
from ckptkit.formats.dcp.records import RecordFrame
from ckptkit.formats.own.record import FileRecord
from ckptkit.storage.local import is_directory, start_writing
from ckptkit.storage.store import Store

if TYPE_CHECKING:
    import torch

Phase = tuple[str, float, int]
"""A phase of a write: (name, seconds, bytes)."""
ROW = np.dtype(
    [("key", "<i4"), ("file", "<i4"), ("start", "<i8"), ("length", "<i8"), ("payload", "<i8"), ("digest", "<u8")]
)
"""The location of a written record, of a slice or of an object. `start` and `payload` are byte positions in the file.

`digest` covers the payload. `key` is the tensor's number in the rank's table, or -1 for an object.
"""

_PACK = 1 << 20  # small records are joined into writes of this size
_FILE = 16 << 20  # fewer bytes are not worth an additional file, or an additional request to an object store
_SMALL_FILE = 1 << 20  # on an object store, a smaller file is merged into a larger one
_ONE_REQUEST = 216 << 20  # a larger file is uploaded in parts while it is written
_FILES = 8  # concurrent uploads
_COPIED_FILES = 4  # concurrent uploads if tensors must be copied, because the copies take up memory
_DIRTY = 16 << 20  # bytes between writebacks: 1 GiB took 0.36 s (with 32 MiB: 0.38 s; with only an fsync: 0.47 s)
_FULL = (28, 122, 27)  # ENOSPC, EDQUOT, EFBIG


@dataclass(slots=True)
class Written:
    """The locations of the written records, in the order in which the records were passed.

    Attributes:
        paths: The files.
        files: Each file's size, and the digest of its outline.
        rows: [n] of `ROW`. The keys are not set yet (-1).
        phases: Where the time was spent.
    """

    paths: list[str]
    files: dict[str, FileRecord]
    rows: npt.NDArray[np.void]
    phases: list[Phase] = field(default_factory=list)


def default_workers(store: Store, tensors: Sequence[torch.Tensor]) -> int:
    """Return how many files a rank writes at once: up to 8 on an object store, else its share of the cores."""
    if not store.asking_costs:
        return _cores()
    nbytes = copied = 0
    for tensor in tensors:  # iterate only once: some sequences create their tensors on access
        nbytes += tensor.nbytes
        copied += 0 if lies_row_major(tensor) else tensor.nbytes
    return _COPIED_FILES if 2 * copied > nbytes else _FILES


def _cores() -> int:
    """Return this rank's share of the cores, at most 4."""
    ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    return max(1, min(4, (os.cpu_count() or 1) // ranks_here))


def write_records(
    store: Store,
    prefix: str,
    frames: Sequence[RecordFrame],
    tensors: Sequence[torch.Tensor],
    records: Sequence[bytes],
    *,
    workers: int = 0,
    sync: bool = True,
) -> Written:
    """Write tensors and already framed records to files `<prefix><n>.distcp`, and return where they are.

    Each worker writes its own file, because file systems let only one thread at a time write to a file. If a worker
    fails, the error is raised after all workers have stopped.

    Args:
        frames, tensors: The tensors, and each tensor's frame.
        records: Objects, already framed.
    """
    settle_device()
    started = time.perf_counter()
    lengths = [frame.length for frame in frames] + [len(record) for record in records]
    bins = _bins(lengths, min(workers or default_workers(store, tensors), 1 + sum(lengths) // _FILE))
    if store.asking_costs:
        bins = _worth_a_request(bins, lengths)
    paths = [f"{prefix}{number}.distcp" for number in range(len(bins))]
    result = Written(paths, {}, np.zeros(len(lengths), ROW))
    turn = threading.BoundedSemaphore(_cores())
    jobs = [
        FileJob(store, path, number, rows, frames, tensors, records, result, sync, turn)
        for number, (path, rows) in enumerate(zip(paths, bins, strict=True))
    ]
    if len(jobs) == 1:
        jobs[0].run()  # the usual case: no threads
    else:
        all_of([job.run for job in jobs], len(jobs), name="ckptkit-write")
    if sync and jobs:
        store.sync_directory()
    seconds, nbytes = time.perf_counter() - started, sum(lengths)
    digest_s = max((job.digest_s for job in jobs), default=0.0)
    sync_s = max((job.sync_s for job in jobs), default=0.0)
    write_s = max(0.0, seconds - digest_s - sync_s)
    result.phases += [("digest", digest_s, nbytes), ("sync", sync_s, nbytes), ("write", write_s, nbytes)]
    return result


def _bins(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Distribute the records over files, longest record first, always to the file with the fewest bytes so far."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    if count <= 1 or len(lengths) <= 1:
        return [order] if order else []
    rows: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, i) for i in range(count)]
    for row in order:
        load, i = heapq.heappop(loads)
        rows[i].append(row)
        heapq.heappush(loads, (load + lengths[row], i))
    return [found for found in rows if found]


def _worth_a_request(bins: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Merge the small files into the smallest large file. Small files arise when one tensor is huge."""
    loads = [sum(lengths[row] for row in rows) for rows in bins]
    large = [(load, rows) for rows, load in zip(bins, loads, strict=True) if load >= _SMALL_FILE]
    small = [row for rows, load in zip(bins, loads, strict=True) if load < _SMALL_FILE for row in rows]
    if not large or not small:
        return bins
    min(large)[1].extend(sorted(small, key=lambda row: -lengths[row]))
    return [rows for _, rows in large]


@dataclass(slots=True)
class FileJob:
    """Writes one file.

    Attributes:
        number: The file's index in `result.paths`.
        rows: The indices of the file's records, in order. Indices from `len(frames)` on refer to `records`.
        result: Filled in with each record's location.
        turn: Limits how many files are hashed at once, if each is uploaded in a single request. So the first files are
            uploaded while others are still being hashed.
        digest_s, sync_s: The seconds spent so far in these phases.
    """

    store: Store
    path: str
    number: int
    rows: Sequence[int]
    frames: Sequence[RecordFrame]
    tensors: Sequence[torch.Tensor]
    records: Sequence[bytes]
    result: Written
    sync: bool
    turn: AbstractContextManager[object]
    digest_s: float = 0.0
    sync_s: float = 0.0
    _fd: int = -1
    _remote: Any = None
    _dirty: int = 0

    def run(self) -> None:
        """Write the file, and fsync it if `sync` is set. If writing fails, remove the file."""
        result, clock, source = self.result, time.perf_counter, HostBytes()
        outline, pending, at = new_hasher(), bytearray(), 0
        with self._open():
            lend = getattr(self._remote, "lend", None)  # uploads memory without a copy
            for row in self.rows:
                if row < len(self.frames):
                    frame, tensor = self.frames[row], self.tensors[row]
                    padding = -at % frame.alignment
                    pending += bytes(padding)
                    at += padding
                    payload_at, length = at + len(frame.prefix), frame.length
                    if not frame.streamed:
                        payload = source.whole(tensor)
                        pending += frame.record(payload)
                        digest = digest_of(payload)
                    else:
                        pending += frame.prefix
                        outline.update(pending)
                        self.append(pending)
                        state, crc, sent = new_hasher(), 0, 0
                        whole = source.at_rest(tensor) if lend is not None else None
                        for piece in source.pieces(tensor):
                            before = clock()
                            state.update(piece)
                            crc = crc32(piece, crc)
                            self.digest_s += clock() - before
                            if lend is None or whole is None:
                                self.append(piece)
                            else:
                                lend(whole, sent, sent + len(piece), owner=tensor)
                            sent += len(piece)
                        digest = state.intdigest()
                        outline.update(digest.to_bytes(8, "little"))
                        pending = bytearray(frame.suffix(crc))
                else:
                    record = self.records[row - len(self.frames)]
                    payload_at, length, digest = at, len(record), digest_of(record)
                    pending += record
                result.rows[row] = (-1, self.number, at, length, payload_at, digest)
                at += length
                if len(pending) >= _PACK:
                    outline.update(pending)
                    self.append(pending)
                    pending = bytearray()
            if pending:
                outline.update(pending)
                self.append(pending)
        result.files[self.path] = FileRecord(at, outline.hexdigest(), outlined=True)

    def append(self, data: bytes | bytearray | memoryview) -> None:
        """Write the file's next bytes. Start writeback to the disk early, so that the final fsync is short."""
        if self._remote is not None:
            self._remote.write(memoryview(data))
            return
        view = memoryview(data)
        self._dirty += len(view)
        with _naming(self.path):
            while view:
                view = view[os.write(self._fd, view) :]
        if self.sync and self._dirty >= _DIRTY:
            self._dirty = 0
            start_writing(self._fd)

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        if not is_directory(self.store):
            known = len(self.frames)
            lengths = (self.frames[i].length if i < known else len(self.records[i - known]) for i in self.rows)
            turn = self.turn if sum(lengths) <= _ONE_REQUEST else contextlib.nullcontext()
            with self.store.writer(self.path, sync=self.sync) as self._remote, turn:
                yield
            return
        # No fallocate: space was checked, appending does not fragment the file, and fallocate costs 3 % on tmpfs.
        self._fd = self.store.create(self.path)
        try:
            yield
            if self.sync:
                started = time.perf_counter()
                with _naming(self.path):
                    os.fsync(self._fd)
                self.sync_s = time.perf_counter() - started
        except BaseException:
            os.close(self._fd)
            self.store.delete([self.path])
            raise
        with _naming(self.path):
            os.close(self._fd)  # NFS reports a full disk here


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Add the file's name to errors raised by the operating system."""
    try:
        yield
    except OSError as error:
        text = f"{path}: {error.strerror}"
        if error.errno in _FULL:
            raise NoSpaceError(error.errno, f"{text}. Free some space or write elsewhere.") from error
        raise StorageError(error.errno, text) from error
