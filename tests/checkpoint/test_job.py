"""Events in a job with a manager: a signal that ends it, and a full disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.errors import CkptkitError, NoSpaceError
from tests.checkpoint import jobs
from tests.checkpoint.saving import leftovers
from tests.checkpoint.test_faults import small_disk
from tests.ranks import run_ranks


def interrupted(url: str) -> tuple[list[bool], int]:
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


def fill_up(url: str, kind: str, background: bool) -> tuple[str, list[int]]:
    job = jobs.make("1d")
    ballast, said = Path(url).parent / "ballast", ""
    with CheckpointManager(url, state_dict_type=kind) as manager:
        manager.save(1, job.state())
        dist.barrier()
        if dist.get_rank() == 0:
            room = os.statvfs(ballast.parent)
            ballast.write_bytes(bytes(room.f_bfree * room.f_frsize - 16384))
        dist.barrier()
        try:
            if background:
                manager.save_async(2, job.state()).result()
            else:
                manager.save(2, job.state())
        except CkptkitError as error:
            said = str(error)
        dist.barrier()
        if dist.get_rank() == 0:
            ballast.unlink()
        dist.barrier()
        manager.save(3, job.state())
        return said, [record.step for record in manager.list()]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_a_full_disk_fails_one_save_of_a_job_and_the_next_one_works(
    ranks: Any, tmp_path: Path, kind: str, background: bool
) -> None:
    with small_disk(tmp_path / "disk", 4096) as disk:
        results = ranks.run(fill_up, 2, str(disk / "run"), kind, background)
        assert results[0] == results[1]
        said, steps = results[0]
        assert "No space left on device" in said and steps == [1, 3]
        assert leftovers(disk / "run") == []


def test_the_error_of_a_full_disk_is_an_enospc_oserror() -> None:
    error = NoSpaceError(28, "/x: No space left on device")
    assert error.errno == 28 and str(error) == "[Errno 28] /x: No space left on device"
    assert str(NoSpaceError("just text")) == "just text"
