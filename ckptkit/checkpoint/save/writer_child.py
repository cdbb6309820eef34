"""Runs in the writer process: maps the snapshot memory and writes it. Imports neither torch nor the training script.

`writer_process` starts this process and talks to it over a socket. Each request gets one answer, after all of the
request's workers have stopped. The process exits on request, when the socket closes, or when its parent is gone.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import socket
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptkit.errors import CkptkitError, SaveError
from ckptkit.formats.dcp.files import write_records
from ckptkit.storage.open import open_store
from ckptkit.storage.retry import Patience

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ckptkit.formats.dcp.files import Written
    from ckptkit.formats.dcp.records import RecordFrame

_LENGTH = struct.Struct("<Q")
_WATCH_MS = 1000
READY = "ready"
"""The message that this process sends once all imports are done."""


@dataclass(frozen=True, slots=True)
class Block:
    """A message that announces new memory, to replace the previous block. The file descriptor is sent with it."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of `write_records`."""

    url: str
    storage_options: Mapping[str, Any] | None
    prefix: str
    frames: Sequence[RecordFrame]
    starts: Sequence[int]  # offset of each tensor's bytes in the block
    records: Sequence[bytes]
    workers: int
    sync: bool
    patience_s: float  # how long to retry storage calls, in seconds


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request: what was written, or the error."""

    written: Written | None
    error: BaseException | None


def send(connection: socket.socket, message: Any, fd: int | None = None) -> None:
    """Send one message, optionally with a file descriptor."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    head = _LENGTH.pack(len(data))
    if fd is None:
        connection.sendall(head)
    else:
        socket.send_fds(connection, [head], [fd])
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Any, int | None]:
    """Return the next message, and its file descriptor or None. Raises EOFError if the connection is closed."""
    head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    head += _exactly(connection, _LENGTH.size - len(head))
    (length,) = _LENGTH.unpack(head)
    return pickle.loads(_exactly(connection, length)), (fds[0] if fds else None)


def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError("the other process closed the connection")
        view = view[got:]
    return bytes(data)


def main(fd: int, parent: int) -> None:
    """Answer requests until the training process closes the connection."""
    connection = socket.socket(fileno=fd)
    threading.Thread(target=_watch, args=(fd, parent), daemon=True, name="ckptkit-watch").start()
    block = memoryview(b"")
    try:
        send(connection, READY)
        while True:
            message, passed = receive(connection)
            if message is None:
                return
            if isinstance(message, Block):
                assert passed is not None
                try:
                    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
                    block = memoryview(mmap.mmap(passed, message.nbytes, flags=flags, prot=mmap.PROT_READ))
                finally:
                    os.close(passed)
            else:
                send(connection, _answer(message, block))
    except (EOFError, OSError):
        return  # the training process is gone, so no other process waits for the save


def _answer(request: Request, block: memoryview) -> Answer:
    try:
        pieces = [block[s : s + f.nbytes] for s, f in zip(request.starts, request.frames, strict=True)]
        # Invariant: if a staging directory was removed or unmounted, it is never recreated.
        store = open_store(request.url, storage_options=request.storage_options).existing()
        with Patience(request.patience_s).entered():
            what = (request.prefix, request.frames, pieces, request.records)
            written = write_records(store, *what, workers=request.workers, sync=request.sync)
    except Exception as error:  # noqa: BLE001  the boundary of a process: the training raises it
        return Answer(None, _portable(error))
    return Answer(written, None)


def _portable(error: Exception) -> BaseException:
    """Return a ckptkit error or OSError unchanged if it can be pickled. Return any other error as a SaveError."""
    if isinstance(error, (CkptkitError, OSError)):
        try:
            copy = pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001  the exception's class may define its own pickling
            copy = None
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    return SaveError(f"the writing process failed: {type(error).__name__}: {error}")


def _watch(fd: int, parent: int) -> None:
    """Exit at once when no process waits for the result any more, because the data would belong to no save."""
    poller = select.poll()
    poller.register(fd, 0)  # reports only that the connection is closed
    while os.getppid() == parent and not poller.poll(_WATCH_MS):
        pass
    os._exit(0)
