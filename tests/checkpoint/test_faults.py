"""Full disks, failing operations, ranks that raise, die or hang: nothing is published, and all ranks agree."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.run.delete import rotate
from ckptkit.errors import CkptkitError
from ckptkit.storage import staging
from ckptkit.storage.open import open_store
from tests.checkpoint.crash import fail_at
from tests.checkpoint.saving import check, fork, leftovers, save
from tests.ranks import RankError, run_ranks


@contextlib.contextmanager
def small_disk(place: Path, kib: int) -> Iterator[Path]:
    """A file system of `kib` KiB; skips the test if mounting is not possible."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a small file system can only be mounted by root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def used(place: Path) -> int:
    room = os.statvfs(place)
    return (room.f_blocks - room.f_bfree) * room.f_frsize


def failure(fn: Callable[[], Any]) -> tuple[str, str, list[int], float]:
    start = time.monotonic()
    try:
        fn()
    except CkptkitError as error:
        return type(error).__name__, str(error), sorted(getattr(error, "causes", {})), time.monotonic() - start
    return "", "", [], 0.0


# --- disk full


@pytest.mark.parametrize("planned", [None, 150_000])
def test_the_error_of_a_full_disk_names_the_rank_and_the_space_is_freed(tmp_path: Path, planned: int | None) -> None:
    with small_disk(tmp_path / "disk", 512) as disk:
        save(disk / "run", 1, nbytes=100_000)
        before = used(disk)
        (disk / "ballast").write_bytes(bytes(330_000))
        kind, text, _, _ = failure(lambda: save(disk / "run", 2, nbytes=150_000, planned_bytes=planned))
        assert "No space left on device" in text and kind in ("RankFailedError", "NoSpaceError")
        assert check(disk / "run") == [1] and leftovers(disk / "run") == []
        (disk / "ballast").unlink()
        assert used(disk) <= before + 8192
        save(disk / "run", 2, nbytes=150_000)
        assert check(disk / "run") == [1, 2]


@pytest.mark.parametrize("left_kib", [0, 4, 8, 12, 20, 40])
def test_a_disk_that_fills_up_at_any_point_of_a_save_loses_nothing(tmp_path: Path, left_kib: int) -> None:
    with small_disk(tmp_path / "disk", 400) as disk:
        save(disk / "run", 1, nbytes=20_000)
        room = os.statvfs(disk)
        (disk / "ballast").write_bytes(bytes(max(0, room.f_bfree * room.f_frsize - left_kib * 1024)))
        _, text, _, _ = failure(lambda: save(disk / "run", 2, nbytes=20_000))
        assert not text or "No space" in text
        assert check(disk / "run") == ([1] if text else [1, 2]) and leftovers(disk / "run") == []
        (disk / "ballast").unlink()
        save(disk / "run", 3, nbytes=20_000)
        assert check(disk / "run")[-1] == 3


def _limited(say: Any, root: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    say(repr(failure(lambda: save(root, 2, nbytes=150_000))[:2]).encode())
    save(root, 3, nbytes=10_000)


def test_exceeding_a_file_size_limit_fails_the_save_and_smaller_saves_work(tmp_path: Path) -> None:
    save(tmp_path, 1)
    code, said = fork(_limited, str(tmp_path))
    assert code == 0 and b"File too large" in said
    assert check(tmp_path) == [1, 3] and leftovers(tmp_path) == []


# --- every operation fails once


def _with_error(say: Any, root: str, nth: int, code: int) -> None:
    fail_at(nth, code)
    kind, text, _, _ = failure(lambda: save(root, 2, fields={"metrics": {"x": 1.0}}))
    say(b"failed" if kind else b"saved")
    with contextlib.suppress(CkptkitError):  # the failing operation may belong to the rotation
        rotate(open_store(root), RetentionPolicy(max_num=1))
    if kind:
        assert os.strerror(code) in text or "mount lost" in text, text


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_error_of_any_operation_fails_the_save_or_has_no_effect(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STARTING_S", -1.0)
    outcomes = set()
    for nth in range(1 + code % 3, 200, 3):
        root = tmp_path / str(nth)
        save(root, 1)
        exit_code, said = fork(_with_error, str(root), nth, code)
        assert exit_code == 0, f"operation {nth}"
        steps = check(root)
        # An error of closing the last descriptor comes after the commit: the save succeeds, and the log reports the
        # error.
        assert steps in ([2], [1, 2]) if said == b"saved" else steps in ([1], [1, 2]), (
            f"operation {nth}: {said!r} {steps}"
        )
        save(root, 9)
        assert check(root)[-1] == 9 and leftovers(root) == [], f"operation {nth}"
        outcomes.add(said)
    assert outcomes == {b"failed", b"saved"}


# --- ranks


def _one_full(root: str) -> Any:
    c = Coordinator(timeout_s=20)
    save(root, 1, coordinator=c)

    def full(store: Any) -> None:
        if c.rank == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first = failure(lambda: save(root, 2, coordinator=c, before=full))
    save(root, 3, coordinator=c)
    return first[:3], check(root)


def test_a_full_disk_on_one_rank_fails_all_ranks_and_the_next_save_works(ranks: Any, tmp_path: Path) -> None:
    results = ranks.run(_one_full, 3, str(tmp_path))
    assert len({repr(r) for r in results}) == 1
    (kind, text, causes), steps = results[0]
    assert (kind, causes, steps) == ("RankFailedError", [2], [1, 3])
    assert "saving step_00000002 failed on rank 2" in text and "No space left on device" in text
    assert leftovers(tmp_path) == []


class CheckpointError(BaseException):
    """Like torch's CheckpointException: a BaseException that is no Exception."""


def _base_exception(root: str) -> Any:
    c = Coordinator(timeout_s=20)

    def fail(store: Any) -> None:
        if c.rank == 0:
            raise CheckpointError("rank 0 has no plan")

    return failure(lambda: save(root, 2, coordinator=c, before=fail))[:3]


def test_a_base_exception_on_one_rank_fails_all_ranks(ranks: Any, tmp_path: Path) -> None:
    text = "CheckpointError: rank 0 has no plan"
    expected = ("RankFailedError", f"saving step_00000002 failed on rank 0: {text}", [0])
    assert ranks.run(_base_exception, 2, str(tmp_path)) == [expected] * 2
    assert check(tmp_path) == [] and leftovers(tmp_path) == []


def _one_dies(root: str, victim: int, notes: str) -> None:
    c = Coordinator(timeout_s=20)
    save(root, 1, coordinator=c)

    def die(store: Any) -> None:
        if c.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    found = failure(lambda: save(root, 2, coordinator=c, before=die))
    (Path(notes) / str(c.rank)).write_text(f"{found[0]} {found[1]} {found[2]} {found[3] < 15}")
    time.sleep(0.5)
    os._exit(0)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_dead_rank_fails_all_others_soon(tmp_path: Path, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks._GRACE_S", 15.0)
    with pytest.raises(RankError):
        run_ranks(_one_dies, 3, str(tmp_path / "run"), victim, str(tmp_path), timeout=40)
    notes = {(tmp_path / str(rank)).read_text() for rank in range(3) if rank != victim}
    assert len(notes) == 1
    (note,) = notes
    assert note.startswith("RankFailedError") and f"rank {victim}" in note and note.endswith(f"[{victim}] True")
    save(tmp_path / "run", 3)  # the next job detects that the old one is dead, and cleans up
    assert check(tmp_path / "run") == [1, 3] and leftovers(tmp_path / "run") == []


def _one_hangs(root: str) -> Any:
    c = Coordinator(timeout_s=1.5)
    save(root, 1, coordinator=c)

    def hang(store: Any) -> None:
        if c.rank == 1:
            time.sleep(3)

    first = failure(lambda: save(root, 2, coordinator=c, before=hang))
    save(root, 3, coordinator=c)
    return first[:3], first[3] < 12


def test_a_hanging_rank_fails_all_ranks_in_bounded_time_and_the_next_save_works(tmp_path: Path) -> None:
    results = run_ranks(_one_hangs, 3, str(tmp_path), timeout=40)
    assert len({repr(r) for r in results}) == 1
    (kind, text, causes), quick = results[0]
    assert (kind, causes, quick) == ("RankFailedError", [1], True) and "no answer within 1.5 s" in text
    assert check(tmp_path) == [1, 3] and leftovers(tmp_path) == []


def _fails_at(root: str, nth: int, victim: int) -> Any:
    c = Coordinator(timeout_s=20)
    if c.rank == victim:
        fail_at(nth, errno.EIO)
    found = failure(lambda: save(root, 1, coordinator=c))
    return found[:3]


@pytest.mark.parametrize(("victim", "nth"), [(0, 2), (0, 9), (0, 30), (1, 3), (1, 7), (1, 14)])
def test_an_error_on_any_rank_at_any_operation_is_raised_on_all_ranks(tmp_path: Path, victim: int, nth: int) -> None:
    results = run_ranks(_fails_at, 2, str(tmp_path / "run"), nth, victim)
    assert len({repr(r) for r in results}) == 1
    saved = not results[0][0]
    assert check(tmp_path / "run") == ([1] if saved else [])
