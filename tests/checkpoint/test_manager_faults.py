"""Faults under a `CheckpointManager`: disk errors of one rank, quotas, disks that are full or become read-only, kills.

`benchmarks.faults.manager` kills at every operation of one rank and of all ranks.
"""

import errno
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptkit import CheckpointManager, verify
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.errors import NoSpaceError, RankFailedError
from tests.checkpoint import full_disk, killed
from tests.checkpoint.crash import Fault, failing
from tests.checkpoint.full_disk import FILESYSTEMS, NEED, agreed, disk, sizes
from tests.checkpoint.killed import MODES, Plan, kill_everywhere, same_as_saved, state
from tests.checkpoint.saving import leftovers
from tests.checkpoint.states import on_all
from tests.ranks import on_ranks

FAULTS = [  # rank, fault
    (1, Fault("write", r"\.distcp")),
    (1, Fault("write", r"\.distcp", errno.EDQUOT)),
    (1, Fault("write", r"\.distcp", errno.EIO)),
    (1, Fault("open", r"\.distcp", errno.ESTALE)),
    (1, Fault("open", r"\.distcp", errno.EROFS)),
    (1, Fault("fsync", r"\.distcp", errno.EIO)),
    (1, Fault("close", r"\.distcp", errno.EIO)),
    (0, Fault("write", r"/\.objects\.json", errno.EIO)),
    (0, Fault("_rename_noreplace", r"/\.tmp-step_[^/]*$", errno.EIO)),  # the commit itself
]


def failure(manager: CheckpointManager, mode: str, step: int, saved: Any) -> tuple[str, list[int]]:
    """Save; return the error, and the ranks that it names."""
    try:
        killed.save(manager, mode, step, saved)
    except RankFailedError as error:
        return str(error), sorted(error.causes)
    return "", []


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_disk_fault_of_one_rank_is_the_same_error_on_all_ranks(tmp_path, mode, workers):
    """The disk fails in another way each time, for one of the writing threads, and the next save works."""
    armed: list[Fault] = []
    state, manager = full_disk.state, CheckpointManager(tmp_path, timeout_s=20, async_policy="wait")
    with failing(armed), full_disk.threads(workers), manager:
        for number, (rank, fault) in enumerate(FAULTS):
            failed, saved = 2 * number + 1, 2 * number + 2
            armed[:] = [replace(fault)] if dist.get_rank() == rank else []
            text, causes = on_all(failure(manager, mode, failed, state(failed)))
            armed.clear()
            manager.save(saved, state(saved))
            assert causes == [rank], (fault, text)
            assert f"saving step_{failed:08d} failed on rank {rank}" in text and os.strerror(fault.error) in text
            steps = [record.step for record in manager.list()]
            assert steps[-1] == saved and failed not in steps
    dist.barrier()
    assert leftovers(tmp_path) == []


def waiting_for(sign: Path) -> Callable[[int, Any], int]:
    """Return an `os.write` that writes data of checkpoints only once a file exists."""
    real = os.write

    def write(fd: int, data: Any) -> int:
        while ".distcp" in os.readlink(f"/proc/self/fd/{fd}") and not sign.exists():
            time.sleep(0.01)
        return real(fd, data)

    return write


@on_ranks(2)
def test_a_slow_rank_fails_no_save(tmp_path):
    """The writes of rank 1 are short, then they are late."""
    real, run = os.write, tmp_path / "run"

    def short(fd: int, data: Any) -> int:
        return real(fd, memoryview(data)[: 1 + len(data) // 2])

    late = waiting_for(tmp_path / "others are done")
    with CheckpointManager(run, timeout_s=60) as manager:
        for step, write in ((1, short), (2, late)):
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == 1:
                    patch.setattr(os, "write", write)
                if step == 2 and dist.get_rank() == 0:
                    (tmp_path / "others are done").touch()
                manager.save_async(step, state(step)).result()
        loaded = state(0)
        for step in (1, 2):
            manager.load(loaded, step)
            same_as_saved(loaded, step)
            assert verify(str(run / f"step_{step:08d}")).ok
    dist.barrier()
    assert leftovers(run) == []


@pytest.mark.parametrize("early_s", [0.0, 0.1])
@on_ranks(2)
def test_a_hanging_disk_fails_all_ranks_in_bounded_time(tmp_path, early_s):
    """Rank 1's disk does not respond until rank 0 has given up, `early_s` before its deadline."""
    wait, run = Coordinator._wait, tmp_path / "run"
    with CheckpointManager(run, timeout_s=30) as manager:
        manager.save(1, state(1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager._coordinator, "timeout_s", 2.0)
            patch.setattr(Coordinator, "_wait", lambda self, work, seconds: wait(self, work, seconds - early_s))
            if dist.get_rank() == 1:
                patch.setattr(os, "write", waiting_for(tmp_path / "given up"))
            text, causes = failure(manager, "sync", 2, state(2))
            if dist.get_rank() == 0:
                (tmp_path / "given up").touch()
        assert on_all(causes) == [1] and "rank 1" in on_all(text) and "no answer within 2 s" in text
        manager.save(3, state(3))
        assert [record.step for record in manager.list()] == [1, 3]
    dist.barrier()
    assert leftovers(run) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("filesystem", "workers"), list(zip(FILESYSTEMS, (2, 4), strict=True)))
def test_a_disk_full_at_any_point_fails_one_save_on_all_ranks_and_not_the_next(
    ranks, tmp_path, kind, filesystem, workers, mode
):
    with disk(tmp_path / "disk", filesystem) as place:
        results = ranks.run(full_disk.fill_up, 2, str(place), workers, sizes(4, NEED), False, kind, mode)
    assert agreed(results) == []
    failed = [outcome.error for outcome in results[0]]
    assert failed[0] is not None and failed[1] is not None and failed[-1] is None


def test_a_disk_with_too_little_free_space_is_an_error_before_anything_is_written(ranks, tmp_path):
    with disk(tmp_path / "disk") as place:
        results = ranks.run(full_disk.fill_up, 2, str(place), 1, [0, NEED // 2], True)
    assert agreed(results) == []
    assert all(outcome.error and "Nothing was written" in outcome.error[1] for outcome in results[0])


def test_the_error_of_a_full_disk_is_an_enospc_oserror():
    error = NoSpaceError(28, "/x: No space left on device")
    assert error.errno == 28 and str(error) == "[Errno 28] /x: No space left on device"
    assert str(NoSpaceError("just text")) == "just text"


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize(("mode", "keep", "swap"), [("sync", 1, True), ("async", 3, True), ("sync", 2, False)])
def test_a_manager_killed_at_any_file_operation_loses_nothing(tmp_path, mode, keep, swap):
    plan = Plan(mode, "all", 0, ranks=1, keep=keep, swap=swap)
    assert kill_everywhere(tmp_path, plan, stride=97, offset=1 + random.Random(mode).randrange(97)) >= 3


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize(("mode", "victim", "offset"), [("sync", "1", 25), ("async", "0", 180)])
def test_a_killed_rank_ends_the_others_and_loses_nothing(tmp_path, mode, victim, offset):
    assert kill_everywhere(tmp_path, Plan(mode, victim, 0), stride=5000, offset=offset, most=1) == 1
