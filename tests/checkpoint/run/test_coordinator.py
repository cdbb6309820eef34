"""All ranks raise the same error in bounded time, whichever rank fails."""

from typing import Any

import pytest
import torch.distributed as dist

from ckptkit.checkpoint.run import coordinator
from ckptkit.checkpoint.run.coordinator import Coordinator, Outcome
from ckptkit.errors import NoSpaceError, RankFailedError, StorageError
from tests.ranks import on_ranks, run_ranks


def test_a_base_exception_is_reported_too():
    class CheckpointError(BaseException):
        pass

    def fail() -> None:
        raise CheckpointError("torch's")

    with pytest.raises(RankFailedError, match=r"a save failed on rank 0: CheckpointError: torch's"):
        Coordinator().all_ok(fail, "a save")


@on_ranks(3)
def test_messages_of_every_length_arrive():
    c = Coordinator(timeout_s=20)
    for nbytes in (0, 1, *range(1900, 2100, 7), 5000, 300_000):
        told = c.settle(Outcome(bytes([c.rank]) * nbytes), "x", then=lambda all_: all_)
        assert told == [bytes([rank]) * nbytes for rank in range(3)]
    c.close()


def _error(fn: Any) -> tuple[str, str, Any]:
    try:
        fn()
    except BaseException as error:
        return type(error).__name__, str(error), getattr(error, "causes", None)
    return "", "", None


@pytest.mark.parametrize("kind", [StorageError, NoSpaceError])
@on_ranks(2)
def test_a_failure_on_rank_0_names_the_rank_and_a_refusal_does_not(kind):
    c = Coordinator(timeout_s=20)

    def of_publishing(error: Exception) -> Any:
        def publish(values: list[Any]) -> None:
            raise error

        return _error(lambda: c.settle(Outcome(), "saving step 7", then=publish))

    text = "[Errno 28] index: No space left on device"
    failed = ("RankFailedError", f"saving step 7 failed on rank 0: {text}", {0: text})
    assert of_publishing(kind(28, "index: No space left on device")) == failed
    assert of_publishing(kind("too large: refused")) == (kind.__name__, "too large: refused", None)


@on_ranks(3)
def test_an_error_of_several_ranks_is_reported_once():
    c = Coordinator(timeout_s=20)
    for failing, told in ((3, "on ranks 0, 1, 2: KeyError: 'a'"), (2, "on ranks 0, 1: KeyError: 'a'")):

        def fail(failing: int = failing) -> None:
            if c.rank < failing:
                raise KeyError("a")

        kind, text, causes = _error(lambda fail=fail: c.all_ok(fail, "a save"))
        assert (kind, text, sorted(causes)) == ("RankFailedError", f"a save failed {told}", list(range(failing)))
    kind, text, _ = _error(lambda: c.all_ok(lambda: {}[c.rank // 2], "a save"))
    assert text == "a save failed on ranks 0, 1: KeyError: 0; on rank 2: KeyError: 1"


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


def test_rank_0_does_not_wait_for_a_rank_that_has_failed():
    main, other = run_ranks(_one_misses_a_step, 2, timeout=60)
    assert other == ["RankFailedError", "RankFailedError"]
    assert main[1] == "RankFailedError"
