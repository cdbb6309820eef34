"""Real ranks for tests: processes over gloo, forked from a server that has torch loaded, and reused.

`Pool.run(fn, world_size, *args)` is the default (tenths of a second). `run_ranks` forks fresh ranks, for tests that
kill a rank, change the environment or leave global state behind. `fn` must be importable (a module-level function);
its result is pickled, so return numpy arrays, bytes or CPU tensors. `run_script` runs a script in a separate process
without a process group.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_GRACE_S = 3.0  # time for the others to report after the first rank has failed
_LEAVE_S = 1.0  # time for ranks to end by themselves
_context: Any = None


class RankError(AssertionError):
    """A rank failed, died or hung; the text has the traceback of each rank."""


def context() -> Any:
    """Return the forkserver context; its server is preloaded once per session."""
    global _context
    if _context is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["tests.ranks_preload"])
    return _context


def _answer(
    fn: Callable[..., Any], rank: int, world_size: int, rendezvous: str, args: Any, timeout: float, device: str = "cpu"
) -> bytes:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            init_method="file://" + rendezvous,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout),
        )
        dist.barrier()  # a fast rank must not leave while a slow one is still connecting
        result = fn(*args)
        dist.barrier()
        return pickle.dumps(("ok", result))
    except BaseException:
        return pickle.dumps(("error", traceback.format_exc()))


def _forget_meshes() -> None:
    """Clear DTensor's caches for the process groups that have just been destroyed.

    Two meshes are equal if their ranks and names are equal, whatever their groups. An operator on a tensor of the next
    task's mesh would find the cached result of this task's mesh, with groups that no longer exist.
    """
    from torch.distributed.tensor import debug

    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()


def _once(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    rendezvous: str,
    args: Any,
    conn: Connection,
    timeout: float,
    device: str,
) -> None:
    faulthandler.dump_traceback_later(max(1.0, timeout - 1), exit=False)
    conn.send_bytes(_answer(fn, rank, world_size, rendezvous, args, timeout, device))
    conn.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no atexit hooks, no hanging gloo threads


def _serve(conn: Connection, rank: int) -> None:
    import torch.distributed as dist

    while True:
        try:
            fn, world_size, rendezvous, args, timeout = pickle.loads(conn.recv_bytes())
        except EOFError:
            os._exit(0)
        if rank < world_size:
            faulthandler.dump_traceback_later(max(1.0, timeout - 1), exit=False)
            conn.send_bytes(_answer(fn, rank, world_size, rendezvous, args, timeout))
            if dist.is_initialized():
                dist.destroy_process_group()  # takes hundredths of a second, while the test goes on
            faulthandler.cancel_dump_traceback_later()
            _forget_meshes()


def _rendezvous() -> str:
    return str(Path(tempfile.gettempdir()) / f"ranks-{uuid.uuid4().hex}")


def _collect(conns: list[Connection], timeout: float) -> list[tuple[str, Any]]:
    results: list[tuple[str, Any]] = [("error", "no answer: it hangs, or waits for a rank that failed")] * len(conns)
    left = {conn: rank for rank, conn in enumerate(conns)}
    deadline = time.monotonic() + timeout
    while left and time.monotonic() < deadline:
        for ready in wait(list(left), timeout=0.2):
            assert isinstance(ready, Connection)
            rank = left.pop(ready)
            try:
                results[rank] = pickle.loads(ready.recv_bytes())
            except (EOFError, ConnectionResetError):
                results[rank] = ("error", "the rank died")
            if results[rank][0] == "error":
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return results


def _values(results: list[tuple[str, Any]]) -> list[Any]:
    bad = [f"--- rank {rank}\n{text}" for rank, (status, text) in enumerate(results) if status == "error"]
    if bad:
        raise RankError("\n".join(bad))
    return [value for _, value in results]


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 150, device: str = "cpu"
) -> list[Any]:
    """Run `fn(*args)` on fresh ranks and return their results by rank. Raises RankError.

    With `device="cuda"` each rank has a GPU, uses NCCL and gloo, and is spawned: CUDA does not work after a fork.
    """
    rendezvous, processes, conns = _rendezvous(), [], []
    making = multiprocessing.get_context("spawn") if device == "cuda" else context()
    for rank in range(world_size):
        ours, theirs = making.Pipe(False)
        process = making.Process(target=_once, args=(fn, rank, world_size, rendezvous, args, theirs, timeout, device))
        process.start()
        theirs.close()
        processes.append(process)
        conns.append(ours)
    try:
        return _values(_collect(conns, timeout))
    finally:
        for process in processes:
            process.kill()
            process.join()
        Path(rendezvous).unlink(missing_ok=True)


def _execute(code: str, arguments: tuple[str, ...], output: str) -> None:
    to = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(to, 1)
    os.dup2(to, 2)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "script", "exec"), {"__name__": "__main__"})


def run_script(code: str, *arguments: str) -> tuple[int, str]:
    """Run a script like `python -c`, with torch already loaded; return the exit code and its output.

    It does not run `atexit` functions: a test of the end of a process needs a real one.
    """
    output = Path(_rendezvous())
    process = context().Process(target=_execute, args=(code, arguments, str(output)))
    process.start()
    process.join(150)
    process.kill()
    process.join()
    said = output.read_text(encoding="utf-8") if output.exists() else ""
    output.unlink(missing_ok=True)
    return process.exitcode, said


class Pool:
    """Ranks that are reused between tests; after a failure all are replaced, so that the next test starts clean."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._conns: list[Connection] = []
        self._last = ""

    def _start(self) -> None:
        for rank in range(self.size):
            ours, theirs = context().Pipe()
            process = context().Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._conns.append(ours)

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 150) -> list[Any]:
        """Run `fn(*args)` on ranks 0 to world_size - 1 and return their results. Raises RankError."""
        dead = [f"rank {rank}: {p.exitcode}" for rank, p in enumerate(self._processes) if not p.is_alive()]
        if dead:  # because of an earlier task: a leftover thread, or a late signal
            print(f"after {self._last} ranks of the pool ended ({', '.join(dead)}); new ones are started")
            self.close()
        if not self._processes:
            self._start()
        self._last = fn.__qualname__
        rendezvous = _rendezvous()
        task = pickle.dumps((fn, world_size, rendezvous, args, timeout))
        try:
            for conn in self._conns[:world_size]:
                conn.send_bytes(task)
            return _values(_collect(self._conns[:world_size], timeout))
        except BaseException:
            self.close()
            raise
        finally:
            Path(rendezvous).unlink(missing_ok=True)

    def close(self) -> None:
        """End all ranks: idle ranks exit by themselves, so that coverage is written, the others are killed."""
        for conn in self._conns:
            with contextlib.suppress(OSError):
                conn.close()
        deadline = time.monotonic() + _LEAVE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        self._processes, self._conns = [], []
