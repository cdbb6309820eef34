"""Disturbances of a running job by people and machines: it continues or raises, and no finished save is lost."""

import contextlib
import itertools
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptkit import RetentionPolicy
from ckptkit.checkpoint.load import choose as loader_module
from ckptkit.checkpoint.manager import CheckpointManager, SignalWatch
from ckptkit.checkpoint.run import coordinator
from ckptkit.checkpoint.run import inventory as inventory_module
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.run.delete import delete_checkpoint, rotate
from ckptkit.checkpoint.run.inventory import choose
from ckptkit.checkpoint.save.saver import Saver
from ckptkit.errors import RankFailedError
from ckptkit.storage import open_store
from ckptkit.storage.local import LocalStore
from ckptkit.storage.lock import open_attempts
from tests.checkpoint import jobs, states
from tests.checkpoint.saving import save, steps
from tests.checkpoint.states import linear, value_of
from tests.patches import after, before, failing, refuse
from tests.ranks import run_ranks

# --- signals


def interrupted_save(root: Path) -> None:
    """Save step 3 in the background, get a signal, and save the same step for it."""
    with CheckpointManager(root, on_signal="save") as manager:
        manager.save_async(3, linear())
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.save_on_signal(3, linear())
    assert steps(root) == [3]


def test_a_signal_during_the_save_of_the_same_step_saves_once(tmp_path, monkeypatch):
    signalled = threading.Event()
    before(monkeypatch, Saver, "publish", lambda *_: signalled.wait(30))
    before(monkeypatch, SignalWatch, "agreed", lambda _: signalled.set())
    interrupted_save(tmp_path)


def test_a_signal_after_a_failed_background_save_saves(tmp_path, monkeypatch):
    calls = itertools.count()
    refuse(monkeypatch, Saver, "publish", OSError(5, "the disk had a moment"), when=lambda *_: next(calls) == 0)
    interrupted_save(tmp_path)


def test_a_signal_at_the_step_that_the_job_resumed_from_needs_no_save(tmp_path):
    for step in (1, 2):
        states.save(tmp_path, linear(step), step)
    for step in (1, 3):
        with CheckpointManager(tmp_path, on_signal="save") as manager:
            manager.load(state := linear(), 1)
            os.kill(os.getpid(), signal.SIGTERM)
            assert manager.save_on_signal(step, state)
    assert steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_during_a_load_is_handled_later(tmp_path, monkeypatch, times):
    states.save(tmp_path, linear(1))
    signals = [signal.SIGTERM] * times
    before(monkeypatch, loader_module, "load_checkpoint", lambda *_, **__: [os.kill(os.getpid(), s) for s in signals])
    with CheckpointManager(tmp_path, on_signal="save") as manager:
        manager.load(loaded := linear())
        assert value_of(loaded) == 1.0
        assert manager.save_on_signal(2, loaded)
        assert manager.save_on_signal(2, loaded)
    assert steps(tmp_path) == [1, 2]


def test_closing_restores_the_previous_signal_handlers():
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR1)
        with contextlib.closing(SignalWatch(Coordinator(), signals=[signal.SIGUSR1])) as watch:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert watch.agreed() and seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupted(url: str, on_signal: Any, number: int) -> tuple[list[bool], list[int]]:
    seen, saves, before = [], [], signal.getsignal(number)
    job = jobs.make("1d")
    with CheckpointManager(url, on_signal=on_signal, on_commit=lambda report: saves.append(report.step)) as manager:
        for step in range(1, 5):
            job.train(1)
            if step == 2:
                manager.save_async(step, job.state())
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), number)
            seen.append(manager.save_on_signal(step, job.state()))
            if seen[-1]:
                os.kill(os.getpid(), number)  # the scheduler sends a second signal
                seen.append(manager.save_on_signal(step, job.state()))
                break
        assert manager.interrupted()
    assert signal.getsignal(number) == before
    return seen, saves


UNNAMED = signal.SIGRTMIN + 3


@pytest.mark.parametrize(
    ("on_signal", "number"), [("save", signal.SIGTERM), ("save", signal.SIGUSR1), ((UNNAMED,), UNNAMED)]
)
def test_a_signal_on_one_rank_saves_once_on_all_at_the_same_step(tmp_path, on_signal, number):
    found = run_ranks(interrupted, 2, str(tmp_path), on_signal, number)
    assert found == [([False, False, True, True], [2, 3])] * 2


def ask_late(url: str) -> str:
    """Rank 1 calls `interrupted` only after rank 0 has given up."""
    coordinator._GRACE_S = 0.0
    with CheckpointManager(url, on_signal="save", timeout_s=0.25) as manager:
        if dist.get_rank() == 1:
            time.sleep(1.5)
        try:
            manager.interrupted()
        except RankFailedError as error:
            return str(error)
    return "all ranks answered"


def test_timeout_s_of_the_manager_also_limits_the_wait_for_signals(tmp_path):
    waited, late = run_ranks(ask_late, 2, str(tmp_path))
    assert "no answer within 0.5 s: it hangs, or needs a longer timeout_s" in waited
    assert "the connection to a rank was lost" in late


def test_a_forked_child_dies_of_sigterm_and_survives_sigusr1():
    with contextlib.closing(SignalWatch(Coordinator())) as watch:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        os.kill(pid, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
        assert not watch.agreed()
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.agreed()  # the parent still notices it


def test_two_watches_do_not_keep_a_child_alive_even_if_it_is_ended_at_once():
    """Python loses a signal that a forked child gets before its fork hooks have run."""
    with contextlib.closing(SignalWatch(Coordinator())), contextlib.closing(SignalWatch(Coordinator())):
        for _ in range(20):
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            worker.start()
            worker.terminate()
            worker.join(20)
            assert worker.exitcode == -signal.SIGTERM


# --- other jobs at the same root


@pytest.mark.parametrize("times", [1, 3])
def test_a_load_of_latest_retries_after_a_rotation(tmp_path, monkeypatch, times):
    """Before the load pins a checkpoint, another job saves the next one and rotates it away."""
    left = list(range(1 + times, 1, -1))

    def move_on(*_: Any, **__: Any) -> None:
        if left:
            states.save(tmp_path, linear(left[-1]), left.pop())
            rotate(open_store(str(tmp_path)), RetentionPolicy(max_num=1))

    states.save(tmp_path, linear(1))
    before(monkeypatch, loader_module, "pin_while_reading", move_on)
    states.load(tmp_path, loaded := linear())
    assert value_of(loaded) == 1.0 + times


def test_a_listing_during_a_rotation_is_never_empty(tmp_path, monkeypatch):
    turns, busy = [4, 3, 2], list[int]()

    def move_on(*_: Any) -> None:
        if turns and not busy:
            busy.append(step := turns.pop())
            save(tmp_path, step)
            delete_checkpoint(open_store(str(tmp_path)), f"step_{step - 1:08d}", reason="test")
            busy.clear()

    save(tmp_path, 1)
    before(monkeypatch, inventory_module, "_look", move_on)
    assert choose(open_store(str(tmp_path)), "latest") is not None


# --- nothing fails a save after its commit


@pytest.mark.parametrize(("error", "has_traceback"), [(OSError(5, "Input/output error"), False), (KeyError("x"), True)])
def test_a_listing_that_fails_after_the_commit_does_not_fail_the_save_and_a_bug_is_logged_with_its_place(
    tmp_path, monkeypatch, caplog, error, has_traceback
):
    with CheckpointManager(tmp_path, retention=RetentionPolicy(max_num=1)) as manager:
        manager.save(1, linear())
        after(monkeypatch, Saver, "publish", lambda *_: monkeypatch.setattr(LocalStore, "list", failing(error)))
        assert manager.save(2, linear()).step == 2
        monkeypatch.undo()
        manager.save(3, linear())
    (said,) = [r for r in caplog.records if "rotation failed" in r.getMessage()]
    assert str(error) in said.getMessage() and bool(said.exc_info) is has_traceback
    assert steps(tmp_path) == [3]


def test_a_trace_that_cannot_be_written_fails_no_save(tmp_path, caplog):
    (tmp_path / "file").touch()
    with CheckpointManager(tmp_path / "run", trace=tmp_path / "file" / "traces") as manager:
        assert manager.save(1, linear()).step == 1
    assert "trace" in caplog.text


# --- a root that changes


def delete_leases(root: Path) -> None:
    for path in (root / ".ckptkit").glob("lease-*"):
        path.unlink()


@pytest.mark.parametrize("delete", [delete_leases, lambda root: shutil.rmtree(root / ".ckptkit")])
def test_a_manually_deleted_lease_is_acquired_again(tmp_path, delete):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, linear())
        delete(tmp_path)
        manager.save(2, linear())
        assert open_attempts(open_store(str(tmp_path))).owner is not None
    assert open_attempts(open_store(str(tmp_path))).owner is None
    assert steps(tmp_path) == [1, 2]


def test_a_root_replaced_by_a_link_to_itself_is_written(tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    with CheckpointManager(run) as manager:
        manager.save(1, linear())
        run.rename(moved)
        run.symlink_to(moved)
        manager.save(2, linear(2))
        assert manager.latest() == 2


@pytest.mark.parametrize("kind", ["a file", "a broken link", "a link to a directory", "a directory"])
def test_the_file_called_latest_decides_nothing(tmp_path, kind):
    latest = tmp_path / "run" / "latest"
    latest.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    if kind == "a file":
        latest.write_text("step_00000099\n")
    elif kind == "a directory":
        latest.mkdir()
    else:
        latest.symlink_to(tmp_path / ("nowhere" if "broken" in kind else "elsewhere"))
    for step in (1, 2):
        states.save(latest.parent, linear(step), step, retention=RetentionPolicy(max_num=1))
    states.load(latest.parent, loaded := linear())
    assert value_of(loaded) == 2.0
    assert os.listdir(tmp_path / "elsewhere") == []
    assert not (tmp_path / "nowhere").exists()
