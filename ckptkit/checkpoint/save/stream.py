"""Writes a safetensors file tensor by tensor, and computes its digests in the same pass."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from ckptkit.digests import new_hasher
from ckptkit.formats.dcp.host_bytes import HostBytes
from ckptkit.formats.hf.header import TensorToWrite, encode_header
from ckptkit.formats.own.outline import LEAST
from ckptkit.formats.own.record import FileRecord
from ckptkit.storage.store import BlobWriter, Store

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(slots=True)
class WrittenFile:
    """A file that was written: its size, and each tensor's (start, nbytes, digest) in it.

    Attributes:
        checksum: The digest of the file's outline (see `formats/own/outline.py`).
        seconds: Time spent in the phases "digest" and "sync". The phase "sync" includes the rename.
    """

    path: str
    nbytes: int = 0
    checksum: str = ""
    tensors: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"digest": 0.0, "sync": 0.0})

    @property
    def record(self) -> FileRecord:
        """The file's entry in the commit record."""
        return FileRecord(self.nbytes, self.checksum, outlined=True)


class SafetensorsStream:
    """Writes a file's tensors in the order of its header."""

    def __init__(
        self, writer: BlobWriter, path: str, tensors: Sequence[TensorToWrite], metadata: Mapping[str, str]
    ) -> None:
        starts = [0, *itertools.accumulate(tensor.nbytes for tensor in tensors)][:-1]
        head = encode_header(tensors, starts, metadata or None)
        self._writer = writer
        self._left = list(zip(tensors, (len(head) + start for start in starts), strict=True))[::-1]
        self._source = HostBytes()
        self._outline = new_hasher()
        self._outline.update(head)
        self.written = WrittenFile(path, len(head))
        self._writer.write(head)

    def write(self, name: str, values: torch.Tensor) -> None:
        """Append one tensor: its bytes, in row-major order."""
        tensor, start = self._left.pop()
        digest, nbytes, clock = new_hasher(), 0, time.perf_counter
        large = tensor.nbytes >= LEAST
        for piece in self._source.pieces(values):  # small enough to be in the CPU cache until they are written
            before = clock()
            digest.update(piece)
            if not large:
                self._outline.update(piece)
            self.written.seconds["digest"] += clock() - before
            self._writer.write(piece)
            nbytes += len(piece)
        self.written.nbytes += nbytes
        if tensor.name != name or nbytes != tensor.nbytes:
            raise ValueError(f"{self.written.path}: got {nbytes} bytes of {name!r}, expected {tensor}")
        if large:
            self._outline.update(digest.intdigest().to_bytes(8, "little"))
        self.written.tensors[name] = (start, nbytes, digest.intdigest())

    def finish(self) -> None:
        """Check that every tensor was written, and set the file's digest."""
        if self._left:
            raise ValueError(f"{self.written.path}: {len(self._left)} tensors were not written")
        self.written.checksum = self._outline.hexdigest()


@contextmanager
def open_stream(
    store: Store, path: str, tensors: Sequence[TensorToWrite], metadata: Mapping[str, str], *, sync: bool = True
) -> Iterator[SafetensorsStream]:
    """Open a new safetensors file. The file appears under its name only when every tensor is written."""
    with store.writer(path, sync=sync) as writer:
        stream = SafetensorsStream(writer, path, tensors, metadata)
        yield stream
        stream.finish()
        finished = time.perf_counter()
    stream.written.seconds["sync"] = time.perf_counter() - finished


def phases_of(files: Sequence[WrittenFile], seconds: float) -> list[tuple[str, float, int]]:
    """Split `seconds`, the total time for writing `files`, into the phases digest, sync and write."""
    nbytes = sum(item.nbytes for item in files)
    spent = {phase: sum(item.seconds[phase] for item in files) for phase in ("digest", "sync")}
    spent["write"] = max(0.0, seconds - sum(spent.values()))
    return [(phase, part, nbytes) for phase, part in spent.items()]


@dataclass(slots=True)
class LocalSteps:
    """Runs a rank's own steps between messages to other ranks. After the first error, runs no further steps.

    The rank continues to send and receive, so that the other ranks do not wait for the timeout. `check` then raises the
    error.
    """

    failure: Exception | None = None

    def __call__(self, step: Callable[[], T]) -> T | None:
        """Return the result of a step that does not communicate, or None if this step or an earlier one failed."""
        if self.failure is None:
            try:
                return step()
            except Exception as error:  # noqa: BLE001  `check` raises it
                self.failure = error
        return None

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self.failure is not None:
            raise self.failure
