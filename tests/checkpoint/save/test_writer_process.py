"""Saves written by a separate process: the same files, and its death is always noticed."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.save import writer_process
from ckptkit.checkpoint.save.writer_child import Request
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CkptkitError, NoSpaceError, SaveError, UsageError
from tests.checkpoint import jobs
from tests.ranks import on_ranks


def writer_pid(manager: CheckpointManager) -> int:
    assert manager._writer is not None
    return manager._writer.pid


def data(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("*.distcp")}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_alive(pid)


class Asked:
    """Set when the process has been sent its work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.event = threading.Event()
        original = writer_process.send

        def send(connection: Any, message: Any, fd: int | None = None) -> None:
            original(connection, message, fd)
            if isinstance(message, Request):
                self.event.set()

        monkeypatch.setattr(writer_process, "send", send)

    def wait(self) -> None:
        assert self.event.wait(30)


def test_a_writer_process_writes_the_same_files_as_a_thread(tmp_path: Path) -> None:
    extra = {"table": torch.arange(70_000), "name": "x", "half": torch.randn(5, 3).to(torch.bfloat16).t()}
    state = TrainState(model=nn.Linear(700, 300), extra=extra)
    for mode in ("thread", "process"):
        with CheckpointManager(tmp_path / mode, async_mode=mode) as manager:
            manager.save_async(1, state).result()
    written = data(tmp_path / "process/step_00000001")
    assert written
    assert written == data(tmp_path / "thread/step_00000001")


def test_the_writer_process_does_not_import_torch(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, async_mode="process") as manager:
        manager.save_async(1, TrainState(model=nn.Linear(4, 4))).result()
        assert "libtorch" in Path("/proc/self/maps").read_text()
        assert "libtorch" not in Path(f"/proc/{writer_pid(manager)}/maps").read_text()


def test_changes_during_the_write_are_not_in_the_snapshot(tmp_path: Path) -> None:
    model = nn.Linear(600, 600)
    expected = model.weight.detach().clone()
    with CheckpointManager(tmp_path, async_mode="process") as manager:
        manager.save_async(1, TrainState(model=nn.Linear(600, 600))).result()  # its imports are done
        os.kill(writer_pid(manager), signal.SIGSTOP)
        handle = manager.save_async(2, TrainState(model=model))
        nn.init.zeros_(model.weight)
        assert not handle.done()
        os.kill(writer_pid(manager), signal.SIGCONT)
        handle.result()
        manager.load(TrainState(model=model))
    assert torch.equal(model.weight, expected)


def test_a_state_that_has_grown_is_written_from_new_memory(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, async_mode="process") as manager:
        for step, width in enumerate((10, 900, 30)):
            model = nn.Linear(width, width)
            manager.save_async(step, TrainState(model=model)).result()
            again = nn.Linear(width, width)
            manager.load(TrainState(model=again))
            assert torch.equal(again.weight, model.weight)


def test_a_rank_without_tensors_has_nothing_staged(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, async_mode="process") as manager:
        for step, size in enumerate((None, 900, None, 0)):
            tensors = {} if size is None else {"w": torch.ones(size)}
            manager.save_async(step, TrainState(extra={"all": {**tensors, "n": step}}, rng=False)).result()
            empty = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
            again = TrainState(extra={"all": {**empty, "n": -1}}, rng=False)
            manager.load(again)
            assert again.extra["all"].pop("n") == step
            assert all(torch.equal(again.extra["all"][key], tensor) for key, tensor in tensors.items())


def test_killing_the_writer_process_fails_the_save_and_the_next_save_starts_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    state = TrainState(model=nn.Linear(300, 300))
    with CheckpointManager(tmp_path, async_mode="process") as manager:
        first = writer_pid(manager)
        os.kill(first, signal.SIGSTOP)
        handle = manager.save_async(1, state)
        asked.wait()
        os.kill(first, signal.SIGKILL)
        with pytest.raises(SaveError, match="killed by SIGKILL"):
            handle.result(30)
        assert manager.latest() is None
        manager.save_async(2, state).result(30)
        assert writer_pid(manager) != first
        assert manager.latest() == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".tmp", "step"))] == ["step_00000002"]


def test_an_error_in_the_writer_process_keeps_its_class(tmp_path: Path) -> None:
    state = TrainState(model=nn.Linear(300, 300))
    with CheckpointManager(tmp_path, async_mode="process") as manager:
        manager.save_async(1, state).result()
        pid = writer_pid(manager)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, -1))
        with pytest.raises(NoSpaceError, match="distcp"):
            manager.save_async(2, state).result(30)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (-1, -1))
        manager.save_async(3, state).result(30)
        assert writer_pid(manager) == pid


def test_the_writer_process_ends_with_the_manager(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, async_mode="process")
    pid = writer_pid(manager)
    assert is_alive(pid)
    manager.close()
    assert not is_alive(pid)


def test_the_end_of_a_forked_process_does_not_end_the_writer_process(tmp_path: Path) -> None:
    script = f"""
import os, gc, sys
import torch
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
manager = CheckpointManager({str(tmp_path)!r}, async_mode="process")
if os.fork() == 0:
    del manager
    gc.collect()
    sys.exit(0)  # runs what is registered for the exit
os.wait()
pid = manager._writer.pid
manager.save_async(1, TrainState(model=torch.nn.Linear(9, 9)))
assert manager.wait() and manager._writer.pid == pid
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("how", "published"), [("os.kill(os.getpid(), 9)", False), ("sys.exit(0)", True)])
def test_the_writer_process_ends_with_training_and_exit_waits_for_it(tmp_path: Path, how: str, published: bool) -> None:
    script = f"""
import os, signal, sys, threading
import torch
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
manager = CheckpointManager({str(tmp_path)!r}, async_mode="process")
pid = manager._writer.pid
print(pid, flush=True)
if {not published}:
    os.kill(pid, signal.SIGSTOP)
manager.save_async(1, TrainState(model=torch.nn.Linear(900, 900)))
if {not published}:
    os.kill(pid, signal.SIGCONT)
{how}
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == (0 if published else -signal.SIGKILL)
    assert ends(int(done.stdout))
    assert (tmp_path / "step_00000001").exists() == published


@pytest.mark.parametrize("kind", ["full", "local"])
def test_only_sharded_saves_use_a_writer_process(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UsageError, match="SHARDED"):
        CheckpointManager(tmp_path, state_dict_type=kind, async_mode="process")


@on_ranks(2)
def test_the_death_of_one_writer_process_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    job = jobs.make("1d")
    with CheckpointManager(tmp_path, timeout_s=30, async_mode="process") as manager:
        pid = writer_pid(manager)
        with pytest.MonkeyPatch.context() as patch:
            asked = Asked(patch)
            if dist.get_rank() == 1:
                os.kill(pid, signal.SIGSTOP)
            handle = manager.save_async(1, job.state())
            if dist.get_rank() == 1:
                asked.wait()
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(CkptkitError, match=r"rank 1.*process that writes checkpoints"):
                handle.result()
        manager.save_async(2, job.state()).result()
        expected = jobs.whole(next(job.model.parameters()))
        job.train(1)
        manager.load(job.state())
    assert jobs.whole(next(job.model.parameters())) == expected
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000002"]


def test_the_writer_process_does_not_recreate_a_missing_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(monkeypatch)
    state = TrainState(model=nn.Linear(300, 300))
    root = tmp_path / "run"
    with CheckpointManager(root, async_mode="process") as manager:
        manager.save_async(1, state).result(30)
        asked.event.clear()
        pid = writer_pid(manager)
        os.kill(pid, signal.SIGSTOP)
        handle = manager.save_async(2, state)
        asked.wait()
        root.rename(tmp_path / "lost")  # like a mount that disappears
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(CkptkitError):
            handle.result(30)
        assert not root.exists()
