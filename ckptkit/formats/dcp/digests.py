"""Checks objects and slices of a checkpoint against their digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.entry import Digest
from ckptkit.digests import hash_of, mismatch
from ckptkit.errors import CkptkitError, IncompleteCheckpointError, IntegrityError
from ckptkit.formats.checks import RecordTable, Verifier
from ckptkit.formats.sources import Origin, Range, SourceReader
from ckptkit.storage.pool import WorkerPool, result_of
from ckptkit.storage.store import Store

T = TypeVar("T")
Int64 = npt.NDArray[np.int64]

ADVICE = "load another checkpoint"
_JOB = 8 << 20  # bytes that a thread checks at a time
_BUFFER = 1 << 20  # each thread's buffer size when it checks slices
CHECK_BYTES = 32 << 20  # the same for a remote store


@dataclass(frozen=True, slots=True)
class SliceCheck:
    """A slice that is read only to check its digest."""

    name: str
    origin: Origin
    start: int
    nbytes: int
    algorithm: int  # an index into `digests.NAMES`
    value: int


def check_bytes(digest: Digest | None, data: memoryview, path: str, name: str) -> None:
    """Check `data`, the bytes of the entry `name`, against `digest`. Checks nothing if `digest` is None.

    Raises:
        IntegrityError: The bytes differ from the digest. The message names the file and the entry.
    """
    found = None if digest is None else hash_of((data,), digest.algorithm)
    if digest is not None and found is not None and found != digest.value:
        what = mismatch(digest.algorithm, digest.value, found, digest.start, digest.start + digest.nbytes)
        raise IntegrityError(f"{path}: {name!r}: {what} The file is damaged: {ADVICE}.")


def all_of(calls: Sequence[Callable[[], T]], workers: int, *, name: str = "ckptkit-read") -> list[T]:
    """Run the calls in `workers` threads, and return the results in the order of the calls.

    If a call fails, its error is raised after all threads have ended. If several calls fail, the error of the first of
    them is raised.
    """
    if workers <= 1 or len(calls) <= 1:
        results = []
        for call in calls:
            results.append(call())
        return results
    with WorkerPool(min(workers, len(calls)), thread_name_prefix=name) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            return list(map(result_of, futures))
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def check_slices(store: Store, slices: Sequence[SliceCheck], workers: int) -> int:
    """Read whole slices, compare the bytes with the recorded digests, and return the number of bytes read.

    Each worker holds at most 1 MiB if the store is local, or `CHECK_BYTES` if the store is remote.

    Raises:
        IntegrityError: The bytes of a slice differ from the digest. The message names the tensor and the file.
        IncompleteCheckpointError: A file is missing or too short.
    """
    if not slices:
        return 0
    slices = sorted(slices, key=lambda item: (item.origin.path, item.start))
    origins = list(dict.fromkeys(item.origin for item in slices))
    number = {origin: i for i, origin in enumerate(origins)}
    rows = [(number[item.origin], item.start, item.nbytes, item.algorithm) for item in slices]
    sources, starts, nbytes, algorithms = np.array(rows, np.int64).reshape(-1, 4).T
    values = np.array([item.value for item in slices], np.uint64)
    table = RecordTable(sources, starts, nbytes, values, algorithms, np.arange(len(slices)))
    verifier = Verifier(table, lambda row: f"{slices[row].origin.path}: {slices[row].name!r}", ADVICE)
    most = CHECK_BYTES if store.asking_costs else _BUFFER

    def check(batch: Int64) -> None:
        buffer, used = memoryview(bytearray(min(most, int(nbytes[batch].sum())))), 0
        ranges: list[Range] = []
        for row in batch.tolist():
            source, start, left = int(sources[row]), int(starts[row]), int(nbytes[row])
            while left:
                if used == len(buffer):
                    reader.read_many(ranges)
                    ranges, used = [], 0
                count = min(left, len(buffer) - used)
                ranges.append(Range(source, start, buffer[used : used + count], row))
                start, left, used = start + count, left - count, used + count
        reader.read_many(ranges)

    parts = batches(np.arange(len(slices)), nbytes, max(most, _JOB))
    with closing(SourceReader(store, origins, verifier, cached=False)) as reader:
        try:
            all_of([partial(check, batch) for batch in parts], workers)
        except (FileNotFoundError, IncompleteCheckpointError) as error:
            raise_with_tensor(error, {item.origin.path: item.name for item in slices})
            raise
    return int(nbytes.sum())


def batches(rows: Int64, nbytes: Int64, most: int) -> Iterator[Int64]:
    """Split rows into consecutive batches of about `most` bytes, given the size of each row in bytes."""
    if len(rows):
        turns = (np.cumsum(nbytes) - nbytes) // most
        yield from np.split(rows, np.flatnonzero(np.diff(turns)) + 1)


def raise_with_tensor(error: OSError | CkptkitError, names: Mapping[str, str]) -> None:
    """Raise an error about a missing or short file again, with the name of a tensor in that file in the message.

    Returns without raising if no tensor in the file is known, or if the message already names the tensor.

    Args:
        names: Path of a file -> name of a tensor in that file.

    Raises:
        IncompleteCheckpointError: The error, with the name of the tensor.
    """
    path = next((path for path in sorted(names, key=len, reverse=True) if path in str(error)), None)
    if path is not None and repr(names[path]) not in str(error):
        raise IncompleteCheckpointError(f"tensor {names[path]!r}, file {path}: {error}") from error
