"""Writes DCP data files. Distributes the records over a few files, and computes digests and CRCs while writing."""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckptkit.digests import crc32, digest_of, new_hasher
from ckptkit.formats.dcp.digests import all_of
from ckptkit.formats.dcp.host_bytes import HostBytes, lies_row_major, settle_device
from ckptkit.formats.dcp.records import RecordFrame
from ckptkit.formats.own.record import FileRecord
from ckptkit.storage.store import Store

if TYPE_CHECKING:
    import torch

Phase = tuple[str, float, int]
"""A phase of a write: (name, seconds, bytes)."""
ROW = np.dtype(
    [("key", "<i4"), ("file", "<i4"), ("start", "<i8"), ("length", "<i8"), ("payload", "<i8"), ("digest", "<u8")]
)
"""The location of a written record, which holds a slice or an object.

`file` is the file's number. `start` and `payload` are byte positions in the file, and `length` is the record's size in
bytes. `digest` covers the payload. `key` is the tensor's number in the rank's table, or -1 for an object.
"""

_PACK = 1 << 20  # small records are joined into writes of this size
_FILE = 16 << 20  # fewer bytes are not worth an additional file, or an additional request to an object store
_SMALL_FILE = 1 << 20  # on an object store, a smaller file is merged into a larger one
_ONE_REQUEST = 216 << 20  # a larger file is uploaded in parts while it is written
_FILES = 8  # concurrent uploads
_COPIED_FILES = 4  # concurrent uploads if tensors must be copied, because the copies take up memory


@dataclass(slots=True)
class Written:
    """The locations of the written records, in the order in which `write_records` received the records.

    Attributes:
        paths: Path of each file, in order of file number.
        files: Size and digest of each file, by path. The digest is that of the file's outline (see `own.outline`).
        rows: [n], with the dtype `ROW`. The field `key` is -1 until the caller sets it.
        phases: Duration and size in bytes of each phase of the write.
    """

    paths: list[str]
    files: dict[str, FileRecord]
    rows: npt.NDArray[np.void]
    phases: list[Phase] = field(default_factory=list)


def default_workers(store: Store, tensors: Sequence[torch.Tensor]) -> int:
    """Return how many files a rank writes at once.

    On an object store, this is 8, or 4 if more than half of the bytes must be copied to the host or made contiguous
    first. On other storage, this is the rank's share of the CPU cores, at most 4.
    """
    if not store.asking_costs:
        return _cores()
    nbytes = copied = 0
    for tensor in tensors:  # iterate only once: some sequences create their tensors on access
        nbytes += tensor.nbytes
        copied += 0 if lies_row_major(tensor) else tensor.nbytes
    return _COPIED_FILES if 2 * copied > nbytes else _FILES


def _cores() -> int:
    """Return this rank's share of the CPU cores, at most 4."""
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
    """Write each tensor and each object as a record to files `<prefix><n>.distcp`. Return the location of each record.

    Each worker writes its own file, because file systems let only one thread at a time write to a file. If a worker
    fails, the error is raised after all workers have stopped.

    Args:
        frames: For each tensor, the bytes that surround the tensor's values in the record.
        records: The complete records of the objects.
        workers: Maximum number of files; 0 means `default_workers`.
    """
    settle_device()
    started = time.perf_counter()
    lengths = [frame.length for frame in frames] + [len(record) for record in records]
    bins = _bins(lengths, min(workers or default_workers(store, tensors), 1 + sum(lengths) // _FILE))
    if store.asking_costs:
        bins = _worth_a_request(bins, lengths)
    paths = [f"{prefix}{number}.distcp" for number in range(len(bins))]
    result = Written(paths, {}, np.zeros(len(lengths), ROW))
    turn, free = threading.BoundedSemaphore(_cores()), nullcontext()
    loads = [sum(lengths[row] for row in rows) for rows in bins]
    in_turn = [store.asking_costs and load <= _ONE_REQUEST for load in loads]
    jobs = [
        FileJob(store, path, number, rows, frames, tensors, records, result, sync, turn if waits else free)
        for number, (path, rows, waits) in enumerate(zip(paths, bins, in_turn, strict=True))
    ]
    if len(jobs) == 1:
        jobs[0].run()  # the usual case: no threads
    else:
        all_of([job.run for job in jobs], len(jobs), name="ckptkit-write")
    seconds, nbytes = time.perf_counter() - started, sum(lengths)
    digest_s = max((job.digest_s for job in jobs), default=0.0)
    sync_s = max((job.sync_s for job in jobs), default=0.0)
    write_s = max(0.0, seconds - digest_s - sync_s)
    result.phases += [("digest", digest_s, nbytes), ("sync", sync_s, nbytes), ("write", write_s, nbytes)]
    return result


def _bins(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Distribute the records over at most `count` files.

    The records are taken longest first. Each record goes to the file that has the fewest bytes so far.
    """
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
    """Move the records of files smaller than `_SMALL_FILE` to the smallest of the larger files.

    Such small files occur if one tensor is huge.
    """
    loads = [sum(lengths[row] for row in rows) for rows in bins]
    large = [(load, rows) for rows, load in zip(bins, loads, strict=True) if load >= _SMALL_FILE]
    small = [row for rows, load in zip(bins, loads, strict=True) if load < _SMALL_FILE for row in rows]
    if not large or not small:
        return bins
    min(large)[1].extend(sorted(small, key=lambda row: -lengths[row]))
    return [rows for _, rows in large]


@dataclass(slots=True)
class FileJob:
    """Writes one data file.

    Attributes:
        number: The file's index in `result.paths`.
        rows: Indices of the records to write, in order. Indices below `len(frames)` refer to tensors. Larger indices,
            minus `len(frames)`, refer to `records`.
        result: Receives the location of each record.
        turn: A context manager that is held while the file is hashed. If each file is uploaded in a single request,
            this is a semaphore that limits how many files are hashed at once, so that the first files are uploaded
            while other files are hashed.
        digest_s, sync_s: Seconds spent so far on hashing, and on making the file durable.
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

    def run(self) -> None:
        """Write the file, and make the file durable if `sync` is set. A failed write leaves no file."""
        result, clock, source = self.result, time.perf_counter, HostBytes()
        outline, pending, at = new_hasher(), bytearray(), 0
        with self.store.writer(self.path, sync=self.sync) as file, self.turn:
            lend = getattr(file, "lend", None)  # uploads memory without a copy
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
                        file.write(pending)
                        state, crc, sent = new_hasher(), 0, 0
                        whole = source.at_rest(tensor) if lend is not None else None
                        for piece in source.pieces(tensor):
                            before = clock()
                            state.update(piece)
                            crc = crc32(piece, crc)
                            self.digest_s += clock() - before
                            if lend is None or whole is None:
                                file.write(piece)
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
                    file.write(pending)
                    pending = bytearray()
            if pending:
                outline.update(pending)
                file.write(pending)
            written = clock()
        if not self.store.asking_costs:  # on an object store, the end of the upload counts as writing
            self.sync_s = clock() - written
        result.files[self.path] = FileRecord(at, outline.hexdigest(), outlined=True)
