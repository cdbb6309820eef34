"""All ranks raise the same error in bounded time, whichever rank fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist

from ckptkit.checkpoint.run import coordinator
from ckptkit.checkpoint.run.coordinator import Coordinator, Outcome, check_equal
from ckptkit.errors import CheckpointExistsError, NoSpaceError, RankFailedError, StorageError, UsageError
from tests.ranks import RankError, on_ranks, run_ranks

# --- one process


def test_a_single_process_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom ckptkit.checkpoint.run.coordinator import Coordinator\nc = Coordinator()\n"
        "assert (c.rank, c.world_size, c.all_gather(3), c.any(True)) == (0, 1, [3], True)\n"
        "assert c.all_ok(lambda: 5, 'x') == [5]\nassert c.run_on_all(lambda: 6, 'x') == 6\nc.close()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_single_process_raises_its_ckptkit_error_unchanged() -> None:
    def fail() -> None:
        raise NoSpaceError("full")

    with pytest.raises(NoSpaceError, match="full"):
        Coordinator().all_ok(fail, "a save")


def test_a_base_exception_is_reported_too() -> None:
    class CheckpointError(BaseException):
        pass

    def fail() -> None:
        raise CheckpointError("torch's")

    with pytest.raises(RankFailedError, match=r"a save failed on rank 0: CheckpointError: torch's"):
        Coordinator().all_ok(fail, "a save")


def test_a_keyboard_interrupt_is_raised_unchanged() -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Coordinator().all_ok(fail, "a save")


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(UsageError):
        Coordinator(timeout_s=0)


# --- several ranks


@on_ranks(3)
def test_all_ranks_get_all_values() -> None:
    c = Coordinator(timeout_s=20)
    assert c.all_gather(c.rank * 10) == [0, 10, 20]
    assert c.run_on_all(lambda: c.rank, "x") == c.rank
    assert (c.any(c.rank == 2), c.any(False)) == (True, False)
    assert c.decide(lambda: c.rank + 7, "deciding") == 7
    assert (c.all_ok(lambda: bytes(1 << 20), "big") is not None) == (c.rank == 0)
    c.close()


@on_ranks(3)
def test_messages_of_every_length_arrive() -> None:
    c = Coordinator(timeout_s=20)
    for nbytes in (0, 1, *range(1900, 2100, 7), 5000, 300_000):
        told = c.settle(Outcome(bytes([c.rank]) * nbytes), "x", then=lambda all_: all_)
        assert told == [bytes([rank]) * nbytes for rank in range(3)]
    c.close()


def _error(fn: Any) -> tuple[str, str, Any, float]:
    start = time.monotonic()
    try:
        fn()
    except BaseException as error:
        return type(error).__name__, str(error), getattr(error, "causes", None), time.monotonic() - start
    return "", "", None, time.monotonic() - start


@on_ranks(3)
def test_an_exception_on_one_rank_is_raised_on_all_and_the_next_call_works() -> None:
    c = Coordinator(timeout_s=20)

    def fail() -> None:
        if c.rank == 1:
            raise OSError(28, "No space left on device")

    text = "OSError: [Errno 28] No space left on device"
    expected = ("RankFailedError", f"saving step 7 failed on rank 1: {text}", {1: text})
    assert _error(lambda: c.all_ok(fail, "saving step 7"))[:3] == expected
    assert c.all_gather(c.rank) == [0, 1, 2]


@on_ranks(3)
def test_an_error_of_rank_0_has_its_class_on_every_rank() -> None:
    c = Coordinator(timeout_s=20)

    def refuse() -> None:
        raise CheckpointExistsError("step 7 exists")

    assert _error(lambda: c.decide(refuse, "x"))[:2] == ("CheckpointExistsError", "step 7 exists")


@pytest.mark.parametrize("kind", [StorageError, NoSpaceError])
@on_ranks(2)
def test_a_failure_on_rank_0_names_the_rank_and_a_refusal_does_not(kind: Any) -> None:
    c = Coordinator(timeout_s=20)

    def of_publishing(error: Exception) -> Any:
        def publish(values: list[Any]) -> None:
            raise error

        return _error(lambda: c.settle(Outcome(), "saving step 7", then=publish))[:3]

    text = "[Errno 28] index: No space left on device"
    failed = ("RankFailedError", f"saving step 7 failed on rank 0: {text}", {0: text})
    assert of_publishing(kind(28, "index: No space left on device")) == failed
    assert of_publishing(kind("too large: refused")) == (kind.__name__, "too large: refused", None)


@on_ranks(3)
def test_an_error_about_disagreeing_ranks_names_their_values() -> None:
    c = Coordinator(timeout_s=20)
    with pytest.raises(UsageError, match="the step: rank 0 has 5, rank 2 has 6"):
        c.settle(Outcome(5 + (c.rank == 2)), "x", then=lambda steps: check_equal(steps, "the step"))


@on_ranks(3)
def test_a_coordinator_of_a_subgroup_numbers_its_own_ranks() -> None:
    group = dist.new_group([1, 2])
    if (rank := dist.get_rank()) > 0:
        c = Coordinator(group, timeout_s=20)
        assert (c.rank, c.all_gather(rank)) == (rank - 1, [1, 2])


def _one_dies(victim: int, path: str) -> None:
    c = Coordinator(timeout_s=20)
    c.all_gather(None)
    if c.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    kind, text, causes, seconds = _error(lambda: c.all_ok(lambda: None, "saving"))
    with open(f"{path}/{c.rank}", "w") as file:
        file.write(repr((kind, text, sorted(causes or ()), seconds < 15)))
    time.sleep(1)
    os._exit(0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_fails_the_others_soon(tmp_path: Any, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks._GRACE_S", 15.0)  # the others write what they saw before they are killed
    with pytest.raises(RankError):
        run_ranks(_one_dies, 3, victim, str(tmp_path), timeout=40)
    seen = [(tmp_path / str(rank)).read_text() for rank in range(3) if rank != victim]
    assert len(set(seen)) == 1
    assert all(f"rank {victim}" in text and f"[{victim}], True" in text for text in seen)


def _one_hangs() -> Any:
    c = Coordinator(timeout_s=1.5)
    c.all_gather(None)
    if c.rank == 1:
        time.sleep(3)
    result = _error(lambda: c.all_ok(lambda: None, "saving"))
    return result, c.all_gather(c.rank)


def test_every_rank_names_a_hanging_rank_and_the_next_call_works() -> None:
    results = run_ranks(_one_hangs, 3, timeout=40)
    assert {r[0][:2] for r in results} == {results[0][0][:2]}
    kind, text, causes, _ = results[0][0]
    assert (kind, list(causes)) == ("RankFailedError", [1])
    assert "saving failed on rank 1: no answer within 1.5 s" in text
    assert all(r[0][3] < 12 for r in results)
    assert results[0][1] == [0, 1, 2]


def _one_misses_a_step() -> Any:
    coordinator._BOARD_S = 0.5  # rank 1 waits here for a verdict that never comes
    c = Coordinator(timeout_s=300)
    c.all_gather(None)
    if c.rank == 1:
        c._step += 1  # makes the next message of rank 0 invalid
    try:
        c.decide(lambda: "x" * 100_000, "choosing")
        first = ""
        dist.barrier()
    except RankFailedError as error:
        first = type(error).__name__
        dist.barrier()  # rank 0 gets here while its caller still holds the error
    return [first, _error(lambda: c.all_gather(None))[0]]


def test_rank_0_does_not_wait_for_a_rank_that_has_failed() -> None:
    main, other = run_ranks(_one_misses_a_step, 2, timeout=60)
    assert other == ["RankFailedError", "RankFailedError"]
    assert main[1] == "RankFailedError"
