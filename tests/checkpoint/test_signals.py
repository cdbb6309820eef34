"""A signal on one rank becomes one decision of all ranks at one step."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ckptkit.checkpoint.manager import CheckpointManager, SignalWatch
from ckptkit.checkpoint.run import coordinator
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.errors import RankFailedError, UsageError
from tests.checkpoint import jobs
from tests.ranks import run_ranks


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_seen_at_the_next_step_until_it_is_cleared(number: int) -> None:
    with SignalWatch(Coordinator()) as watch:
        assert not watch.agreed()
        os.kill(os.getpid(), number)
        assert watch.agreed() and watch.agreed()
        watch.clear()
        assert not watch.agreed()


def test_closing_restores_the_previous_signal_handlers() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR1)
        with SignalWatch(Coordinator(), signals=[signal.SIGUSR1]) as watch:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert watch.agreed() and seen == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_only_the_main_thread_can_install_handlers() -> None:
    caught: list[BaseException] = []

    def make() -> None:
        try:
            SignalWatch(Coordinator())
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


def interrupted(url: str) -> tuple[list[bool], list[int]]:
    seen, saves = [], []
    job = jobs.make("1d")
    with CheckpointManager(url, on_signal="save", on_commit=lambda report: saves.append(report.step)) as manager:
        for step in range(1, 5):
            job.train(1)
            if step == 2:
                manager.save_async(step, job.state())
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            seen.append(manager.save_on_signal(step, job.state()))
            if seen[-1]:
                os.kill(os.getpid(), signal.SIGTERM)  # the scheduler sends a second signal
                seen.append(manager.save_on_signal(step, job.state()))
                break
    return seen, saves


def test_a_signal_on_one_rank_saves_once_on_all_at_the_same_step(tmp_path: Path) -> None:
    assert run_ranks(interrupted, 2, str(tmp_path)) == [([False, False, True, True], [2, 3])] * 2


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


def test_the_time_limit_of_the_manager_is_also_that_of_its_question_for_signals(tmp_path: Path) -> None:
    waited, late = run_ranks(ask_late, 2, str(tmp_path))
    assert "no answer within 0.5 s: it hangs, or needs a longer timeout_s" in waited
    assert "the connection to a rank was lost" in late


def test_a_forked_child_dies_of_sigterm_and_survives_sigusr1() -> None:
    with SignalWatch(Coordinator()) as watch:
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


def test_a_signal_before_a_child_has_run_its_fork_hooks_ends_the_child() -> None:
    """Python loses a signal that a forked child gets before its hooks have run."""
    with SignalWatch(Coordinator()):
        for _ in range(50):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_two_watches_do_not_keep_a_child_alive() -> None:
    with SignalWatch(Coordinator()), SignalWatch(Coordinator()):
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        worker.terminate()
        worker.join(20)
        assert worker.exitcode == -signal.SIGTERM
