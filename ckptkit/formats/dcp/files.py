"""Writing DCP data files: records laid out over a few files, digests and CRC in the same pass as the write."""

from __future__ import annotations

import contextlib
import functools
import heapq
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.errors import NoSpaceError, StorageError
from ckptkit.formats.dcp.records import RecordFrame, crc32
from ckptkit.formats.own.record import FileRecord
from ckptkit.storage.local import LocalStore, start_writing
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.store import Store

if TYPE_CHECKING:
    import torch

    from ckptkit.formats.dcp.host_bytes import HostBytes

__all__ = ["ROW", "Report", "Written", "default_workers", "write_records"]

Report = Callable[[str, float, int], None]
"""Gets (phase, seconds, bytes)."""
ROW = np.dtype(
    [("key", "<i4"), ("file", "<i4"), ("start", "<i8"), ("length", "<i8"), ("payload", "<i8"), ("digest", "<u8")]
)
"""What a rank says of a slice, or of an object (key -1): the key's number in its table, and where the record lies."""

_PACK = 1 << 20  # small records are joined into writes of this size
_FILE = 16 << 20  # below this many bytes another file is not worth it
_REMOTE_FILE = 16 << 20  # as _FILE, where each is a request, and a connection carries a few of them a second
_LITTLE_FILE = 1 << 20  # less is sent in a moment, with what goes anyway
_ONE_REQUEST = 216 << 20  # a larger one goes in parts while it is written
_COPIED_FILES = 4  # on an object store, where what goes up is held for that alone
_DIRTY = 16 << 20  # a GiB takes 0.36 s on a disk so; 0.38 at 32 MiB, 0.47 where nothing is begun before the sync
_FULL = (28, 122, 27)  # ENOSPC, EDQUOT, EFBIG


@dataclass(frozen=True, slots=True)
class Written:
    """Where the records lie, in the order they were given.

    Attributes:
        paths: The files.
        files: Of each file, its size and the digest of its outline.
        file: [n] index into `paths`.
        starts, lengths: [n] the whole records.
        payloads: [n] where the payload starts.
        digests: [n] xxh3_64 of the payload.
    """

    paths: list[str]
    files: dict[str, FileRecord]
    file: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    payloads: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]


def default_workers(store: Store) -> int:
    """Return how many files a rank writes at once: its share of the cores, at most 4; 8 where connections are slow."""
    if store.local_root is None:
        return 8
    return _cores()


def _workers(store: Store, tensors: Sequence[torch.Tensor] | Sequence[memoryview]) -> int:
    if store.local_root is not None:
        return default_workers(store)
    from ckptkit.formats.dcp.host_bytes import lies_row_major

    # Once: some are made on demand.
    found = [(t.nbytes, isinstance(t, memoryview) or lies_row_major(t)) for t in tensors]
    copied = sum(nbytes for nbytes, at_rest in found if not at_rest)
    return _COPIED_FILES if 2 * copied > sum(nbytes for nbytes, _ in found) else default_workers(store)


def _cores() -> int:
    """Return how many cores this rank may keep busy."""
    ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    return max(1, min(4, (os.cpu_count() or 1) // ranks_here))


def write_records(
    store: Store,
    prefix: str,
    frames: Sequence[RecordFrame],
    tensors: Sequence[torch.Tensor] | Sequence[memoryview],
    records: Sequence[bytes],
    *,
    workers: int = 0,
    sync: bool = True,
    report: Report | None = None,
) -> Written:
    """Write tensor records, then finished records, to files `<prefix><n>.distcp`, and return where they lie.

    Each worker writes a file of its own: file systems let one writer at a time into a file. All failures of all
    workers are seen; the first is raised once every worker has stopped.

    Args:
        frames, tensors: The tensors and what goes around their bytes.
        records: Objects, already framed.
    """
    from ckptkit.formats.dcp.host_bytes import settle_device

    settle_device()
    started = time.perf_counter()
    lengths = [frame.length for frame in frames] + [len(record) for record in records]
    most = 1 + sum(lengths) // (_REMOTE_FILE if store.local_root is None else _FILE)
    bins = _bins(lengths, min(workers or _workers(store, tensors), most))
    if store.local_root is None:
        bins = _worth_a_request(bins, lengths)
    jobs = [_File(f"{prefix}{i}.distcp", rows, frames, tensors, records) for i, rows in enumerate(bins)]
    result = _empty(len(lengths), [job.path for job in jobs])
    turn = threading.BoundedSemaphore(_cores())
    _run([_Job(job, store, sync, result, i, turn) for i, job in enumerate(jobs)])
    if sync and isinstance(store, LocalStore) and jobs:
        store.sync_directory()
    if report is not None:
        _report(report, [job.times for job in jobs], time.perf_counter() - started, sum(lengths))
    return result


def _bins(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Spread the records over files: longest first to the emptiest, each file in descending order of length."""
    if count <= 1 or len(lengths) <= 1:
        return [sorted(range(len(lengths)), key=lambda row: -lengths[row])] if lengths else []
    rows: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, i) for i in range(count)]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        load, i = heapq.heappop(loads)
        rows[i].append(row)
        heapq.heappush(loads, (load + lengths[row], i))
    return [found for found in rows if found]


def _worth_a_request(bins: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Put the rows of files that would hold little, beside those of a huge tensor, at the end of another one."""
    loads = [sum(lengths[row] for row in rows) for rows in bins]
    large = [rows for rows, load in zip(bins, loads, strict=True) if load >= _LITTLE_FILE]
    little = [row for rows, load in zip(bins, loads, strict=True) if load < _LITTLE_FILE for row in rows]
    if not large or not little:
        return bins
    least = min(large, key=lambda rows: sum(lengths[row] for row in rows))
    least += sorted(little, key=lambda row: -lengths[row])
    return large


def _empty(count: int, paths: list[str]) -> Written:
    starts, lengths, payloads = (np.zeros(count, np.int64) for _ in range(3))
    return Written(paths, {}, np.zeros(count, np.int32), starts, lengths, payloads, np.zeros(count, np.uint64))


def _run(jobs: Sequence[_Job]) -> None:
    if len(jobs) <= 1:
        for job in jobs:
            job.run()
        return
    with WorkerPool(len(jobs), thread_name_prefix="ckptkit-write") as pool:
        futures = [pool.submit(job.run) for job in jobs]
        failed = [error for error in (future.exception() for future in futures) if error is not None]
    if failed:
        raise failed[0]


def _report(report: Report, times: Sequence[dict[str, float]], seconds: float, nbytes: int) -> None:
    longest = {phase: max((t.get(phase, 0.0) for t in times), default=0.0) for phase in ("digest", "sync")}
    report("digest", longest["digest"], nbytes)
    report("sync", longest["sync"], nbytes)
    report("write", max(0.0, seconds - sum(longest.values())), nbytes)


class _File:
    """The records of one file, in order, and the clock of its phases."""

    def __init__(
        self,
        path: str,
        rows: Sequence[int],
        frames: Sequence[RecordFrame],
        tensors: Sequence[torch.Tensor] | Sequence[memoryview],
        records: Sequence[bytes],
    ) -> None:
        self.path = path
        self.rows = rows
        self.frames = frames
        self.tensors = tensors
        self.records = records
        self.times: dict[str, float] = {"digest": 0.0, "sync": 0.0}

    @property
    def nbytes(self) -> int:
        """Bytes of the records, without what aligns them."""
        frames, records = self.frames, self.records
        return sum(frames[row].length if row < len(frames) else len(records[row - len(frames)]) for row in self.rows)


class _Job:
    """Writes one file."""

    def __init__(
        self,
        file: _File,
        store: Store,
        sync: bool,
        result: Written,
        index: int,
        turn: AbstractContextManager[object],
    ) -> None:
        self.file = file
        self.store = store
        self.sync = sync
        self.result = result
        self.index = index
        self._turn = turn
        self._write: Callable[[Any], None] = lambda data: None
        self._lend: Callable[..., None] | None = None  # for memory that may go up as it lies there
        self._outline = xxhash.xxh3_64()
        self._pending = bytearray()
        self._at = 0

    def run(self) -> None:
        """Write the file, durable where asked."""
        from ckptkit.formats.dcp.host_bytes import HostBytes

        source = HostBytes()
        with self._opened() as write:
            self._write = write
            with self._turn if self._is_one_request() else contextlib.nullcontext():
                for row in self.file.rows:
                    self._record(row, source)
                self._flush()
        self.result.files[self.file.path] = FileRecord(self._at, self._outline.hexdigest(), outlined=True)

    def _is_one_request(self) -> bool:
        """Whether nothing is on its way before all is digested: then the first files go up while the others wait."""
        return not isinstance(self.store, LocalStore) and self.file.nbytes <= _ONE_REQUEST

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Callable[[Any], None]]:
        if not isinstance(self.store, LocalStore):
            with self.store.writer(self.file.path, sync=self.sync) as writer:
                self._lend = getattr(writer, "lend", None)
                yield writer.write
            return
        # Not reserved beforehand: the space was checked, appending is laid out well, and reserving costs 3 % on tmpfs.
        fd = self.store.create(self.file.path)
        write = functools.partial(_write_all, fd, path=self.file.path)
        try:
            yield _begun_early(fd, write) if self.sync else write
            if self.sync:
                started = time.perf_counter()
                _checked(self.file.path, os.fsync, fd)
                self.file.times["sync"] = time.perf_counter() - started
        except BaseException:
            os.close(fd)
            self.store.delete([self.file.path])
            raise
        _checked(self.file.path, os.close, fd)  # NFS reports a full disk here

    def _record(self, row: int, source: HostBytes) -> None:
        result, frames = self.result, self.file.frames
        if row >= len(frames):
            record = self.file.records[row - len(frames)]
            self._place(row, self._at, self._at, len(record), xxhash.xxh3_64_intdigest(record))
            self._put(record)
            return
        frame, tensor = frames[row], self.file.tensors[row]
        if -self._at % frame.alignment:
            self._put(bytes(-self._at % frame.alignment))
        start = self._at
        if not frame.streamed:
            payload = source.whole(tensor)
            self._put(frame.record(payload))
            digest = xxhash.xxh3_64_intdigest(payload)
        else:
            digest = self._stream(frame, tensor, source)
        self._place(row, start, start + len(frame.prefix), frame.length, digest)
        result.file[row] = self.index

    def _place(self, row: int, start: int, payload: int, length: int, digest: int) -> None:
        result = self.result
        result.file[row], result.starts[row], result.lengths[row] = self.index, start, length
        result.payloads[row], result.digests[row] = payload, digest

    def _stream(self, frame: RecordFrame, tensor: torch.Tensor | memoryview, source: HostBytes) -> int:
        self._put(frame.prefix)
        self._flush()
        state, crc, clock = xxhash.xxh3_64(), 0, time.perf_counter
        spent = 0.0
        lend = self._lend
        whole = source.at_rest(tensor) if lend is not None else None
        at = 0
        for piece in source.pieces(tensor):
            before = clock()
            state.update(piece)
            crc = crc32(piece, crc)
            spent += clock() - before
            if lend is None or whole is None:
                self._write(piece)
            else:
                lend(whole, at, at + len(piece), owner=tensor)
            at += len(piece)
        self._at += frame.nbytes
        self.file.times["digest"] += spent
        digest = state.intdigest()
        self._outline.update(digest.to_bytes(8, "little"))
        self._put(frame.suffix(crc))
        return digest

    def _put(self, data: bytes) -> None:
        self._pending += data
        self._at += len(data)
        if len(self._pending) >= _PACK:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._outline.update(self._pending)
            self._write(memoryview(self._pending))
            self._pending = bytearray()


def _begun_early(fd: int, write: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what writes, and has the disk begin long before the sync."""
    dirty = 0

    def write_and_begin(data: Any) -> None:
        nonlocal dirty
        write(data)
        dirty += len(data)
        if dirty >= _DIRTY:
            dirty = 0
            start_writing(fd)

    return write_and_begin


def _write_all(fd: int, data: Any, path: str) -> None:
    view = memoryview(data)
    while view:
        view = view[_checked(path, os.write, fd, view) :]


def _checked(path: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except OSError as error:
        text = f"{path}: {error.strerror}"
        if error.errno in _FULL:
            raise NoSpaceError(error.errno, f"{text}. Free some space or write elsewhere.") from error
        raise StorageError(error.errno, text) from error
