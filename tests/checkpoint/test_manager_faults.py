"""Faults under a `CheckpointManager`: errors of one rank's disk, quotas, disks that are full or become read-only."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptkit.checkpoint import commit
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.errors import CkptkitError, RankFailedError
from tests.checkpoint import crash
from tests.checkpoint.killed import DEADLINE_S, MODES, same_as_saved, state
from tests.checkpoint.saving import leftovers
from tests.checkpoint.test_faults import small_disk
from tests.ranks import run_ranks

FAULTS = [
    (errno.ENOSPC, "write"),
    (errno.EDQUOT, "write"),
    (errno.EIO, "fsync"),
    (errno.ESTALE, "open"),
    (errno.EIO, "close"),
]


def fails_once(armed: list[tuple[int, str]]) -> None:
    """Let the operation that `armed` names fail with its error, for files of a checkpoint, and take it off the list."""

    def before(name: str, args: tuple[Any, ...]) -> None:
        path = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else os.fspath(args[0])
        if armed and armed[0][1] == name and path.endswith(".distcp"):
            code, _ = armed.pop()
            raise OSError(code, os.strerror(code))

    crash.watch(before, lambda name, args: None)


def faulty_disk(root: str, mode: str) -> list[tuple[str, str, list[int], list[int]]]:
    """Save again and again while rank 1's disk fails in another way each time, and once more after each."""
    armed: list[tuple[int, str]] = []
    if dist.get_rank() == 1:
        fails_once(armed)
    seen = []
    with CheckpointManager(root, timeout_s=20, async_policy="wait") as manager:
        for number, fault in enumerate(FAULTS):
            armed[:] = [fault] if dist.get_rank() == 1 else []
            kind, text, causes = "", "", []
            try:
                if mode == "sync":
                    manager.save(2 * number + 1, state(2 * number + 1))
                else:
                    manager.save_async(2 * number + 1, state(2 * number + 1)).result(DEADLINE_S)
            except RankFailedError as error:
                kind, text, causes = type(error).__name__, str(error), sorted(error.causes)
            armed.clear()
            manager.save(2 * number + 2, state(2 * number + 2))
            seen.append((kind, text, causes, [record.step for record in manager.list()]))
    return seen


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_a_fault_of_one_ranks_disk_is_the_same_error_on_all_and_the_next_save_works(tmp_path: Path, mode: str) -> None:
    first, second = run_ranks(faulty_disk, 2, str(tmp_path), mode)
    assert first == second
    for number, ((code, name), (kind, text, causes, steps)) in enumerate(zip(FAULTS, first, strict=True)):
        assert steps[-1] == 2 * number + 2
        assert (kind, causes) == ("RankFailedError", [1]), (name, kind, text)
        assert f"saving step_{2 * number + 1:08d} failed on rank 1" in text
        assert os.strerror(code) in text
        assert 2 * number + 1 not in steps
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_fills_up_under_a_manager_is_said_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    with small_disk(tmp_path / "disk", 4096) as disk:
        root = disk / "run"
        with CheckpointManager(root, async_mode="process" if mode == "process" else "thread") as manager:
            manager.save(1, state(1))
            room = os.statvfs(disk)
            (disk / "ballast").write_bytes(bytes(max(0, room.f_bfree * room.f_frsize - 8192)))
            monkeypatch.setattr(commit, "_check_space", lambda *args: None)  # the space went after it was asked for
            with pytest.raises((CkptkitError, OSError), match="No space left on device"):
                manager.save(2, state(2)) if mode == "sync" else manager.save_async(2, state(2)).result()
            loaded = state(0)
            manager.load(loaded)
            same_as_saved(loaded, 1)
            assert leftovers(root) == []
            (disk / "ballast").unlink()
            manager.save(3, state(3))
            assert [record.step for record in manager.list()] == [1, 3]


def test_a_file_system_that_became_read_only_fails_the_save_by_its_name_and_can_still_be_loaded(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", 4096) as disk, CheckpointManager(disk / "run") as manager:
        manager.save(1, state(1))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        try:
            with pytest.raises((CkptkitError, OSError), match="Read-only file system"):
                manager.save(2, state(2))
            loaded = state(0)
            manager.load(loaded)
            same_as_saved(loaded, 1)
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        manager.save(2, state(2))
        assert manager.latest() == 2
