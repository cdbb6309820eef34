"""Checks slices against their digests, during a load or with separate reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ckptkit.catalog.entry import Digest
from ckptkit.digests import hash_of, new_hasher
from ckptkit.errors import IncompleteCheckpointError, IntegrityError
from ckptkit.storage.local import is_directory
from ckptkit.storage.pool import WorkerPool, result_of
from ckptkit.storage.store import ReadInto, Store

T = TypeVar("T")

_PIECE = 1 << 20  # bytes hashed at once: more than in the writer, because each piece is also a disk read
_GAP = 64 << 10  # a gap of at most this size is read and discarded
_VECTOR = 512  # buffers per preadv call; the system allows up to 1,024
_REMOTE = 16 << 20  # bytes per request to a remote store
CHECK_BYTES = 32 << 20  # each thread's buffer size when it checks slices in a remote store


@dataclass(frozen=True, slots=True)
class SliceCheck:
    """A slice that is read only to check its digest."""

    name: str
    path: str
    start: int
    nbytes: int
    digest: Digest


class Running:
    """Hashes a slice piece by piece, then compares the hash with the slice's digest if it has one."""

    def __init__(self, digest: Digest | None, path: str, name: str) -> None:
        self._digest, self._path, self._name = digest, path, name
        self._hasher = None if digest is None else new_hasher(digest.algorithm)

    def update(self, piece: memoryview) -> None:
        if self._hasher is not None:
            self._hasher.update(piece)

    def check(self) -> None:
        """Raise an IntegrityError that names the file and the tensor if the hash differs from the digest."""
        if self._digest is not None and self._hasher is not None:
            _compare(self._digest, self._hasher.intdigest(), self._path, self._name)


def check_bytes(digest: Digest | None, data: memoryview, path: str, name: str) -> None:
    """Raise an IntegrityError that names the file and the entry if the bytes differ from their digest (if any)."""
    if digest is not None:
        _compare(digest, hash_of((data,), digest.algorithm), path, name)


def _compare(digest: Digest, found: int, path: str, name: str) -> None:
    if found != digest.value:
        raise IntegrityError(
            f"{path}: {name!r}: checksum mismatch in bytes [{digest.start}, {digest.start + digest.nbytes}): expected "
            f"{digest.algorithm} {digest.value:x}, found {found:x}. The file is damaged: load another checkpoint."
        )


def all_of(calls: Sequence[Callable[[], T]], workers: int, *, name: str = "ckptkit-read") -> list[T]:
    """Make the calls in several threads, and return their results.

    If any call fails, raise the first error once all threads have ended.
    """
    if workers <= 1 or len(calls) <= 1:
        return [call() for call in calls]
    with WorkerPool(min(workers, len(calls)), thread_name_prefix=name) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            return list(map(result_of, futures))
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def read_pieces(store: Store, path: str, parts: Sequence[tuple[int, memoryview, Running]]) -> None:
    """Read parts of one file into memory, and hash each piece while it is still in the CPU cache.

    A single call reads neighboring parts if the gaps between them are small.

    Args:
        parts: (position in the file, memory to fill, running hash) per part, in file order.

    Raises:
        IncompleteCheckpointError: The file is too short.
    """
    if not is_directory(store):
        for start, view, running in parts:
            for at in range(0, len(view), _REMOTE * 4):
                part = view[at : at + _REMOTE * 4]
                store.read_many(
                    [ReadInto(path, start + at + i, part[i : i + _REMOTE]) for i in range(0, len(part), _REMOTE)]
                )
                running.update(part)
        return
    gap = memoryview(bytearray(_GAP))
    fd = store.open_file(path)
    try:
        begin = at = 0
        vector: list[memoryview] = []
        seen: list[tuple[Running, memoryview]] = []
        for start, view, running in parts:
            for done in range(0, len(view), _PIECE):
                piece, skipped = view[done : done + _PIECE], start + done - at
                if vector and (not 0 <= skipped <= _GAP or at + len(piece) - begin > _PIECE or len(vector) > _VECTOR):
                    _read_vector(fd, path, begin, vector, seen)
                    vector, seen = [], []
                if not vector:
                    begin = at = start + done
                elif skipped:
                    vector.append(gap[:skipped])
                vector.append(piece)
                seen.append((running, piece))
                at = start + done + len(piece)
        _read_vector(fd, path, begin, vector, seen)
    finally:
        os.close(fd)


def _read_vector(
    fd: int, path: str, at: int, vector: list[memoryview], seen: Sequence[tuple[Running, memoryview]]
) -> None:
    while vector:
        got = os.preadv(fd, vector, at)
        if not got:
            stop = at + sum(map(len, vector))
            raise IncompleteCheckpointError(f"{path} is truncated: it ends at byte {at}, expected {stop} bytes.")
        at += got
        while vector and got >= len(vector[0]):
            got -= len(vector.pop(0))
        if got:
            vector[0] = vector[0][got:]
    for running, piece in seen:
        running.update(piece)


def check_slices(store: Store, slices: Iterable[SliceCheck], workers: int) -> int:
    """Read whole slices in small pieces, compare them with their digests, and return the number of bytes read.

    Each worker holds at most 1 MiB if the store is local, or `CHECK_BYTES` if it is remote.

    Raises:
        IntegrityError: Bytes differ from their digest. The message names the tensor and the file.
        IncompleteCheckpointError: A file is missing or too short.
    """
    size = CHECK_BYTES if store.asking_costs else _PIECE
    return sum(all_of([partial(_check, store, batch, size) for batch in _batches(slices, size)], workers))


def _batches(slices: Iterable[SliceCheck], size: int) -> Iterator[list[SliceCheck]]:
    """Yield batches of at most `size` bytes, or of one larger slice. A batch reads one file, in file order."""
    batch: list[SliceCheck] = []
    nbytes = 0
    for item in sorted(slices, key=lambda item: (item.path, item.start)):
        if batch and (nbytes + item.nbytes > size or batch[-1].path != item.path):
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += item.nbytes
    if batch:
        yield batch


def _check(store: Store, batch: Sequence[SliceCheck], size: int) -> int:
    nbytes = sum(item.nbytes for item in batch)
    buffer = memoryview(bytearray(min(size, nbytes)))
    if len(batch) == 1:
        item = batch[0]
        running = Running(item.digest, item.path, item.name)
        for at in range(0, item.nbytes, size):
            read_pieces(store, item.path, [(item.start + at, buffer[: min(size, item.nbytes - at)], running)])
        running.check()
        return nbytes
    reads, at = [], 0
    for item in batch:
        reads.append(ReadInto(item.path, item.start, buffer[at : at + item.nbytes]))
        at += item.nbytes
    store.read_many(reads, workers=1)
    for item, read in zip(batch, reads, strict=True):
        check_bytes(item.digest, read.view, item.path, item.name)
    return nbytes
