"""Real ranks for tests: processes over gloo, forked from a server that has torch loaded, and reused.

`@on_ranks(n)` runs a whole test on each rank, and `logged` collects what the package logs there. `Pool.run(fn,
world_size, *args)` runs a function, and returns what each rank returned. Both take tenths of a second. `run_ranks`
forks fresh ranks, for tests that kill a rank, change the environment or leave global state behind. `fn` must be
importable (a module-level function); its result is pickled, so return numpy arrays, bytes or CPU tensors. `run_script`
runs a script in a separate process without a process group.
"""

import contextlib
import datetime
import faulthandler
import functools
import gc
import inspect
import logging
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.leases import release_leases

_GRACE_S = 3.0  # time for the others to report after the first rank has failed
_LEAVE_S = 1.0  # time for ranks to end by themselves
_GROUP_S = 300.0  # time for a collective of ranks that are reused
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


def _join(rank: int, world_size: int, rendezvous: str, timeout: float, device: str) -> Any:
    """Make the default process group, and return it.

    The ranks meet in a server on rank 0, whose port is in a file: they would read anything else in a file every 10 ms.
    """
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    limit = datetime.timedelta(seconds=timeout)
    meeting = dist.FileStore(rendezvous, world_size)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, timeout=limit, wait_for_workers=False)
        meeting.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), world_size, is_master=False, timeout=limit)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    return dist.group.WORLD


def _answer(fn: Callable[..., Any], rank: int, world_size: int, args: Any, join: Callable[[], object]) -> bytes:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    try:
        world = join()
        dist.barrier()  # a fast rank must not leave while a slow one is still connecting
        result = fn(*args)
        dist.barrier()
        assert dist.group.WORLD is world, "the default process group was replaced; use run_ranks"
        return pickle.dumps(("ok", result))
    except BaseException:
        return pickle.dumps(("error", traceback.format_exc()))


def _forget_meshes() -> None:
    """Clear DTensor's caches for the process groups of meshes that have just been destroyed.

    Two meshes are equal if their ranks and names are equal, whatever their groups. An operator on a tensor of the next
    task's mesh would find the cached result of this task's mesh, with groups that no longer exist. And each group that
    a cache or a cycle keeps alive has a gloo thread that wakes up a hundred times per second.
    """
    from torch.distributed.tensor import _redistribute, debug

    from tests.ranks_preload import CACHES, caches

    getattr(_redistribute, "clear_redistribute_planner_cache", list)()  # not in every version of torch
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
    for cache in (*CACHES, *caches()):
        cache.cache_clear()
    gc.collect()


def _serve(conn: Connection, rank: int, world_size: int, rendezvous: str, limit: float, device: str) -> None:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    world: Any = None

    def join() -> Any:
        nonlocal world
        world = world or _join(rank, world_size, rendezvous, limit, device)
        _world.group_count = number * 1000  # names new groups; a task that failed on one rank made fewer of them there
        return world

    while True:
        try:
            fn, number, args, timeout = pickle.loads(conn.recv_bytes())
        except EOFError:
            os._exit(0)
        faulthandler.dump_traceback_later(max(1.0, timeout - 1), exit=False)
        answer = _answer(fn, rank, world_size, args, join)
        release_leases()  # as at the end of a process: the next task may run in other ones
        if "ckptkit.checkpoint.state.rng" in sys.modules:  # a strategy has declared which ranks draw the same numbers
            sys.modules["ckptkit.checkpoint.state.rng"]._shared = None  # type: ignore[attr-defined]
        conn.send_bytes(answer)
        if len(_world.pg_map) > 1 and device == "cpu":
            while group := next((group for group in _world.pg_map if group is not world), None):
                dist.destroy_process_group(group)  # takes hundredths of a second, while the test goes on
            _forget_meshes()
        faulthandler.cancel_dump_traceback_later()


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


class _Team:
    """The ranks of one world size. They keep their process group, and with it what DTensor has computed on its mesh."""

    def __init__(self, world_size: int, timeout: float = _GROUP_S, device: str = "cpu") -> None:
        self.rendezvous, self.processes, self.conns = _rendezvous(), list[Any](), list[Connection]()
        self.tasks, self.last = 0, ""
        making = multiprocessing.get_context("spawn") if device == "cuda" else context()
        for rank in range(world_size):
            ours, theirs = making.Pipe()
            serve = functools.partial(_serve, theirs, rank, world_size, self.rendezvous, timeout, device)
            process = making.Process(target=serve, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.conns.append(ours)

    def dead(self) -> list[str]:
        return [f"rank {rank}: {p.exitcode}" for rank, p in enumerate(self.processes) if not p.is_alive()]

    def run(self, fn: Callable[..., Any], args: Any, timeout: float) -> list[Any]:
        self.tasks, self.last = self.tasks + 1, getattr(fn, "__qualname__", str(fn))
        task = pickle.dumps((fn, self.tasks, args, timeout))
        for conn in self.conns:
            conn.send_bytes(task)
        return _values(_collect(self.conns, timeout))

    def close(self) -> None:
        """End all ranks: idle ranks exit by themselves, so that coverage is written, the others are killed."""
        for conn in self.conns:
            with contextlib.suppress(OSError):
                conn.close()
        deadline = time.monotonic() + _LEAVE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        Path(self.rendezvous).unlink(missing_ok=True)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 150, device: str = "cpu"
) -> list[Any]:
    """Run `fn(*args)` on fresh ranks and return their results by rank. Raises RankError.

    With `device="cuda"` each rank has a GPU, uses NCCL and gloo, and is spawned: CUDA does not work after a fork.
    """
    team = _Team(world_size, timeout, device)
    try:
        return team.run(fn, args, timeout)
    finally:
        team.close()


class Pool:
    """Ranks that are reused between tests, a team for each world size.

    After a failure the team is replaced, so that the next test starts clean.
    """

    def __init__(self) -> None:
        self._teams: dict[int, _Team] = {}

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 150) -> list[Any]:
        """Run `fn(*args)` on ranks 0 to world_size - 1 and return their results. Raises RankError."""
        if (team := self._teams.get(world_size)) and (dead := team.dead()):
            # because of an earlier task: a leftover thread, or a late signal
            print(f"after {team.last} ranks of the pool ended ({', '.join(dead)}); new ones are started")
            self._end(world_size)
        if world_size not in self._teams:
            self._teams[world_size] = _Team(world_size)
        try:
            return self._teams[world_size].run(fn, args, timeout)
        except BaseException:
            self._end(world_size)
            raise

    def _end(self, world_size: int) -> None:
        self._teams.pop(world_size).close()

    def close(self) -> None:
        for world_size in list(self._teams):
            self._end(world_size)


def on_ranks(*world_sizes: int | str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that runs a test on every rank of a group; its fixtures and parameters are sent there.

    Groups of several sizes run one after the other. A string names the parameter that has the number of ranks.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def started(ranks: Pool, **given: Any) -> None:
            for size in world_sizes:
                ranks.run(_test_here, given[size] if isinstance(size, str) else size, started, given)

        own = inspect.signature(test)
        ranks = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        started.__signature__ = own.replace(parameters=[*own.parameters.values(), ranks])  # type: ignore[attr-defined]
        return started

    return decorate


def _test_here(started: Any, given: dict[str, Any]) -> None:
    try:
        started.__wrapped__(**given)
    finally:
        if "monkeypatch" in given:  # this rank's copy, which pytest does not undo
            given["monkeypatch"].undo()


@contextlib.contextmanager
def logged(level: int = logging.WARNING, *, name: str = "ckptkit") -> Iterator[list[str]]:
    """Collect the messages of a logger on this rank, where pytest's `caplog` does not exist."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(name).removeHandler(handler)
