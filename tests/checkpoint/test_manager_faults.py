"""Faults under a `CheckpointManager`: disk errors of one rank, quotas, disks that are full or become read-only."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.run import commit
from ckptkit.errors import CkptkitError, RankFailedError
from ckptkit.offline.verify import verify
from tests.checkpoint import crash
from tests.checkpoint.killed import DEADLINE_S, MODES, same_as_saved, state
from tests.checkpoint.saving import leftovers
from tests.checkpoint.test_faults import small_disk
from tests.ranks import run_ranks

FAULTS = [  # errno, operation, rank, pattern of the file
    (errno.ENOSPC, "write", 1, r"\.distcp$"),
    (errno.EDQUOT, "write", 1, r"\.distcp$"),
    (errno.EIO, "write", 1, r"\.distcp$"),
    (errno.ESTALE, "open", 1, r"\.distcp$"),
    (errno.EIO, "fsync", 1, r"\.distcp$"),
    (errno.EIO, "close", 1, r"\.distcp$"),
    (errno.EIO, "write", 0, r"/\.objects\.json"),
    (errno.EIO, "_rename_noreplace", 0, r"/\.tmp-step_[^/]*$"),  # the commit itself
]
Fault = tuple[int, str, int, str]


def fails_once(armed: list[Fault]) -> None:
    """Let the operation that `armed` names fail once with its error, on a path that matches."""

    def fails(name: str, args: tuple[Any, ...]) -> None:
        path = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else os.fspath(args[0])
        if armed and armed[0][1] == name and re.search(armed[0][3], path):
            code, *_ = armed.pop()
            raise OSError(code, os.strerror(code))

    def before(name: str, args: tuple[Any, ...]) -> None:
        if name != "close":
            fails(name, args)

    def close(fd: int, real: Any = os.close) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        real(fd)  # the descriptor is closed, whatever is reported
        fails("close", (path,))

    os.close = close
    crash.watch(before, lambda name, args: None)


def faulty_disk(root: str, mode: str) -> list[tuple[str, str, list[int], list[int]]]:
    """Save repeatedly while one rank's disk fails in another way each time, and once more after each failure."""
    armed: list[Fault] = []
    fails_once(armed)
    seen = []
    with CheckpointManager(root, timeout_s=20, async_policy="wait") as manager:
        for number, fault in enumerate(FAULTS):
            armed[:] = [fault] if dist.get_rank() == fault[2] else []
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
def test_a_disk_fault_on_one_rank_is_the_same_error_on_all_ranks_and_the_next_save_works(
    tmp_path: Path, mode: str
) -> None:
    first, second = run_ranks(faulty_disk, 2, str(tmp_path), mode)
    assert first == second
    for number, (fault, (kind, text, causes, steps)) in enumerate(zip(FAULTS, first, strict=True)):
        code, name, rank, _ = fault
        assert steps[-1] == 2 * number + 2
        assert (kind, causes) == ("RankFailedError", [rank]), (name, kind, text)
        assert f"saving step_{2 * number + 1:08d} failed on rank {rank}" in text
        assert os.strerror(code) in text
        assert 2 * number + 1 not in steps
    assert leftovers(tmp_path) == []


# --- ranks that raise, write little at a time, are slow, or hang


class Unready:
    """A dataloader whose state_dict raises on one rank."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("no state here")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def odd_ranks(root: str) -> list[tuple[str, list[int]]]:
    """Save with a rank that raises, with one whose writes are short, and with one that writes late."""
    real, said = os.write, []

    def short(fd: int, data: Any) -> int:
        return real(fd, memoryview(data)[: 1 + len(data) // 2])

    def late(fd: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".distcp"):
            while not (Path(root) / "others are done").exists():
                time.sleep(0.01)
        return real(fd, data)

    with CheckpointManager(f"{root}/run", timeout_s=60) as manager:
        for step, write in ((1, real), (2, short), (3, late)):
            saved = state(step)
            if step == 1:
                saved.dataloader = Unready()
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == 1:
                    patch.setattr(os, "write", write)
                try:
                    handle = manager.save_async(step, saved)
                    if step == 3 and dist.get_rank() == 0:
                        (Path(root) / "others are done").touch()
                    handle.result(DEADLINE_S)
                    said.append(("", []))
                except RankFailedError as error:
                    said.append((str(error), sorted(error.causes)))
        loaded = state(0)
        for step in (2, 3):
            manager.load(loaded, step)
            same_as_saved(loaded, step)
    return said


def test_a_raising_rank_fails_all_ranks_and_a_slow_rank_does_not(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks.run(odd_ranks, 2, str(tmp_path))
    assert first == second
    (text, causes), *fine = first
    assert causes == [1] and "ZeroDivisionError: no state here" in text
    assert fine == [("", []), ("", [])]
    assert verify(str(tmp_path / "run" / "step_00000002")).ok and verify(str(tmp_path / "run" / "step_00000003")).ok
    assert leftovers(tmp_path / "run") == []


def hanging_disk(root: str) -> tuple[str, list[int], list[int]]:
    """Save while rank 1's disk does not respond until rank 0 has given up."""
    real, text, causes = os.write, "", []

    def hangs(fd: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".distcp"):
            while not (Path(root) / "given up").exists():
                time.sleep(0.01)
        return real(fd, data)

    with CheckpointManager(f"{root}/run", timeout_s=30) as manager:
        manager.save(1, state(1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager._coordinator, "timeout_s", 2.0)
            if dist.get_rank() == 1:
                patch.setattr(os, "write", hangs)
            try:
                manager.save(2, state(2))
            except RankFailedError as error:
                text, causes = str(error), sorted(error.causes)
            if dist.get_rank() == 0:
                (Path(root) / "given up").touch()
        manager.save(3, state(3))
        return text, causes, [record.step for record in manager.list()]


def test_a_hanging_disk_fails_all_ranks_in_bounded_time_and_the_next_save_works(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks.run(hanging_disk, 2, str(tmp_path))
    assert first == second
    text, causes, steps = first
    assert (causes, steps) == ([1], [1, 3]) and "rank 1" in text and "no answer within 2 s" in text
    assert leftovers(tmp_path / "run") == []


# --- disks that are full, or read-only


@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_fills_up_is_an_error_and_the_managers_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    with small_disk(tmp_path / "disk", 4096) as disk:
        root = disk / "run"
        with CheckpointManager(root, async_mode="process" if mode == "process" else "thread") as manager:
            manager.save(1, state(1))
            room = os.statvfs(disk)
            (disk / "ballast").write_bytes(bytes(max(0, room.f_bfree * room.f_frsize - 8192)))
            monkeypatch.setattr(commit, "_check_space", lambda *args: None)  # the space is used up after the check
            with pytest.raises((CkptkitError, OSError), match="No space left on device"):
                manager.save(2, state(2)) if mode == "sync" else manager.save_async(2, state(2)).result()
            loaded = state(0)
            manager.load(loaded)
            same_as_saved(loaded, 1)
            assert leftovers(root) == []
            (disk / "ballast").unlink()
            manager.save(3, state(3))
            assert [record.step for record in manager.list()] == [1, 3]


def test_a_file_system_that_became_read_only_fails_saves_and_still_loads(
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
