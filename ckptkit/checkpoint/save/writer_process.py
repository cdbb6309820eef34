"""Writes snapshots in shared memory from a separate process, which does not need training's interpreter lock."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.save.staging import StagingBuffers
from ckptkit.checkpoint.save.writer_child import READY, Block, Request, receive, send
from ckptkit.errors import SaveError, UsageError
from ckptkit.storage.retry import current_limit_s

if TYPE_CHECKING:
    import torch

    from ckptkit.formats.dcp.files import Written
    from ckptkit.formats.dcp.records import RecordFrame
    from ckptkit.storage.store import Store

_LOOK_S = 0.5  # how often to check whether a silent process is still alive
_GRACE_S = 5.0
_READY_S = 10.0
# The child uses this process's import path. Its working directory does not matter.
_CODE = (
    "import sys; sys.path[:] = {path!r}; from ckptkit.checkpoint.save.writer_child import main; main({fd}, {parent})"
)


class WriterProcess:
    """A process that writes snapshots, one at a time. It is started before the first save, to be ready in time.

    If it dies, the current save fails, and the next write starts a new process.

    Attributes:
        buffers: The memory for the last snapshot.
    """

    def __init__(self, *, storage_options: Mapping[str, Any] | None = None) -> None:
        if not hasattr(os, "memfd_create") or not hasattr(socket, "send_fds"):
            raise UsageError("async_mode='process' needs memory shared by file descriptor, which only Linux has.")
        self._storage_options = storage_options
        self.buffers = StagingBuffers(shared=True)
        self._lock = threading.Lock()
        self._child = _Child()

    def copy(self, tensors: Sequence[torch.Tensor]) -> SharedSnapshot:
        """Copy the tensors to shared memory. The copies are valid until the next call."""
        snapshot = SharedSnapshot(self.buffers.copy(tensors))
        snapshot.write_records = self.write_records
        return snapshot

    def wait_ready(self) -> None:
        """Wait until the process is ready, so that its startup does not slow down the first save.

        If the process does not start, the first write raises an error.
        """
        with contextlib.suppress(EOFError, OSError):
            self._child.hear_ready(_READY_S)

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def write_records(
        self,
        store: Store,
        prefix: str,
        frames: Sequence[RecordFrame],
        tensors: Sequence[torch.Tensor],
        records: Sequence[bytes],
        *,
        workers: int = 0,
        sync: bool = True,
    ) -> Written:
        """Run `dcp.files.write_records` on the last snapshot, in the writer process."""
        starts = self.buffers.starts
        if len(tensors) != len(starts):
            raise SaveError(f"expected {len(starts)} staged tensors, found {len(tensors)}.")
        request = Request(
            store.url, self._storage_options, prefix, frames, starts, records, workers, sync, current_limit_s()
        )
        with self._lock:
            if self._child.process.poll() is not None:
                self._child.end()
                self._child = _Child()
            answer = self._child.ask(request, self.buffers)
        if answer.error is not None:
            raise answer.error
        return answer.written  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stop the process and release the memory. No write may be in progress."""
        with self._lock:
            self._child.end()
            self.buffers.release()


class SharedSnapshot(list["torch.Tensor"]):
    """Staged tensors in memory that is shared with the writer process, which `write_records` uses."""

    write_records: Any


class _Child:
    """The child process and its socket."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        code = _CODE.format(path=sys.path, fd=theirs.fileno(), parent=os.getpid())
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            # Signals to training's process group may request a save, and must not kill this process.
            start_new_session=True,
        )
        theirs.close()
        self._block = -1
        self._ready = False
        self.end = weakref.finalize(self, _end, self.process, self.connection, os.getpid())

    def hear_ready(self, seconds: float) -> None:
        """Wait until the process is ready, but at most `seconds`."""
        if not self._ready and select.select([self.connection], [], [], seconds)[0]:
            self._ready = receive(self.connection)[0] == READY

    def ask(self, request: Request, buffers: StagingBuffers) -> Any:
        try:
            while not self._ready:
                self.hear_ready(_LOOK_S)
                self._look()
            if buffers.generation != self._block and buffers.fd >= 0:  # no fd if a rank has no tensors to write
                send(self.connection, Block(buffers.nbytes), buffers.fd)
                self._block = buffers.generation
            send(self.connection, request)
            while not select.select([self.connection], [], [], _LOOK_S)[0]:
                self._look()
            answer, _ = receive(self.connection)
        except (EOFError, OSError) as error:
            raise SaveError(f"the process that writes checkpoints {self._fate()}; nothing was published.") from error
        return answer

    def _look(self) -> None:
        # A closed socket may go unnoticed, because processes that training forked keep it open.
        if self.process.poll() is not None:
            raise EOFError

    def _fate(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE_S)
        code = self.process.poll()
        if code is None:
            self.process.kill()
            self.process.wait()
            return "closed its connection"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"(pid {self.process.pid}) was killed by {signal.Signals(-code).name}"
        return f"(pid {self.process.pid}) ended with exit code {code}"


def _end(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    if os.getpid() != owner:
        return  # in a fork of training: the process belongs to the parent
    with contextlib.suppress(OSError):
        send(connection, None)
    connection.close()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
