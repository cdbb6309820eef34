"""Writes DCP data files. Distributes the records over a few files, and computes digests and CRCs while writing."""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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
    turn, free = threading.BoundedSemaphore(_cores()), nullcontext()
    paths, jobs = [f"{prefix}{number}.distcp" for number in range(len(bins))], []
    for path, rows in zip(paths, bins, strict=True):
        in_turn = store.asking_costs and sum(lengths[row] for row in rows) <= _ONE_REQUEST
        items = ((frames[r], tensors[r]) if r < len(frames) else (None, records[r - len(frames)]) for r in rows)
        jobs.append(partial(_write_file, store, path, items, sync=sync, turn=turn if in_turn else free))
    done = [jobs[0]()] if len(jobs) == 1 else all_of(jobs, len(jobs), name="ckptkit-write")
    result = Written(paths, {}, np.zeros(len(lengths), ROW))
    for number, (path, rows, file) in enumerate(zip(paths, bins, done, strict=True)):
        result.files[path] = file.record
        result.rows[rows] = [(-1, number, *place) for place in file.places]
    seconds, nbytes = time.perf_counter() - started, sum(lengths)
    digest_s = max((file.digest_s for file in done), default=0.0)
    sync_s = max((file.sync_s for file in done), default=0.0)
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


class _DataFile(NamedTuple):
    """A written file.

    Attributes:
        places: Start and length of each record in the file, start of its payload, and the payload's digest.
        digest_s, sync_s: Seconds spent on hashing large payloads, and on making the file durable.
    """

    record: FileRecord
    places: list[tuple[int, int, int, int]]
    digest_s: float
    sync_s: float


def _write_file(
    store: Store, path: str, items: Iterable[tuple[RecordFrame | None, Any]], *, sync: bool,
    turn: AbstractContextManager[object],
) -> _DataFile:  # fmt: skip
    """Write one data file, and make the file durable if `sync` is set. A failed write leaves no file.

    Args:
        items: The records in order: a tensor with its frame, or an object's complete record without a frame.
        turn: A context manager that is held while the file is hashed. If each file is uploaded in a single request,
            this is a semaphore that limits how many files are hashed at once, so that the first files are uploaded
            while other files are hashed.
    """
    clock, source = time.perf_counter, HostBytes()
    outline, pending, at, digest_s = new_hasher(), bytearray(), 0, 0.0
    places: list[tuple[int, int, int, int]] = []
    with store.writer(path, sync=sync) as file, turn:
        lend = getattr(file, "lend", None)  # uploads memory without a copy
        for frame, value in items:
            if frame is None:
                payload_at, length, digest = at, len(value), digest_of(value)
                pending += value
            else:
                padding = -at % frame.alignment
                pending += bytes(padding)
                at += padding
                payload_at, length = at + len(frame.prefix), frame.length
                if not frame.streamed:
                    payload = source.whole(value)
                    pending += frame.record(payload)
                    digest = digest_of(payload)
                else:
                    pending += frame.prefix
                    outline.update(pending)
                    file.write(pending)
                    state, crc, sent = new_hasher(), 0, 0
                    whole = source.at_rest(value) if lend is not None else None
                    for piece in source.pieces(value):
                        before = clock()
                        state.update(piece)
                        crc = crc32(piece, crc)
                        digest_s += clock() - before
                        if lend is None or whole is None:
                            file.write(piece)
                        else:
                            lend(whole, sent, sent + len(piece), owner=value)
                        sent += len(piece)
                    digest = state.intdigest()
                    outline.update(digest.to_bytes(8, "little"))
                    pending = bytearray(frame.suffix(crc))
            places.append((at, length, payload_at, digest))
            at += length
            if len(pending) >= _PACK:
                outline.update(pending)
                file.write(pending)
                pending = bytearray()
        if pending:
            outline.update(pending)
            file.write(pending)
        written = clock()
    sync_s = 0.0 if store.asking_costs else clock() - written  # on an object store, this would be the upload's end
    return _DataFile(FileRecord(at, outline.hexdigest(), outlined=True), places, digest_s, sync_s)
