"""One writer for a run: who holds the lease, and who may take it over, whatever the clocks show."""

from __future__ import annotations

import gc
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptkit.errors import LeaseHeldError
from ckptkit.storage import lock as module
from ckptkit.storage.lock import acquire_lease, lease_holder
from ckptkit.storage.open import open_store
from ckptkit.storage.owner import Owner, this_process
from tests.checkpoint.saving import fork


def put(root: Path, owner: Owner, *, generation: int = 1, beat: int = 0, age_s: float = 0.0) -> Path:
    path = root / ".ckptkit" / f"lease-{generation:08d}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"nonce": "e" * 16, "beat": beat, "released": False, **owner.to_json()}))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


ELSEWHERE = Owner("other-host", 1, "1", "another/machine/entirely")


def test_a_held_lease_is_refused_and_names_its_owner(tmp_path: Path) -> None:
    root = open_store(str(tmp_path))
    held = acquire_lease(root)
    with pytest.raises(LeaseHeldError, match=f"process {os.getpid()} on "):
        acquire_lease(root)
    held.release()
    assert lease_holder(root) is None
    acquire_lease(root).release()


def test_a_living_process_of_this_machine_keeps_its_lease(tmp_path: Path) -> None:
    from ckptkit.storage.owner import _start_of

    put(tmp_path, replace(this_process(), pid=os.getppid(), started=_start_of(os.getppid()) or ""))
    with pytest.raises(LeaseHeldError, match=str(os.getppid())):
        acquire_lease(open_store(str(tmp_path)))


def _take(say: Any, root: str) -> None:
    acquire_lease(open_store(root))
    say(b"taken")
    os.kill(os.getpid(), 9)


def test_a_dead_process_of_this_machine_loses_its_lease_at_once(tmp_path: Path) -> None:
    assert fork(_take, str(tmp_path)) == (-9, b"taken")
    start = time.monotonic()
    acquire_lease(open_store(str(tmp_path))).release()
    assert time.monotonic() - start < 5


def test_a_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    put(tmp_path, replace(this_process(), pid=os.getppid(), started="1"))
    acquire_lease(open_store(str(tmp_path))).release()


def test_after_a_reboot_the_old_owner_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.storage.owner._machine", lambda: "boot/pid:[4026531836]/0123")
    put(tmp_path, replace(this_process(), machine="before/pid:[4026531836]/0123"))
    acquire_lease(open_store(str(tmp_path))).release()


def test_without_a_machine_id_a_reboot_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.storage.owner._machine", lambda: "boot/pid:[4026531836]/")
    assert replace(this_process(), machine="another/pid:[4026531836]/").alive() is None
    assert this_process().alive()


def test_an_expired_lease_of_another_machine_is_taken_over(tmp_path: Path) -> None:
    put(tmp_path, ELSEWHERE, age_s=module.TTL_S + 5)
    acquire_lease(open_store(str(tmp_path)), patience_s=60).release()


def test_a_heartbeat_of_another_machine_keeps_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, ELSEWHERE)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: put(tmp_path, ELSEWHERE, beat=7))
    with pytest.raises(LeaseHeldError, match="process 1 on other-host"):
        acquire_lease(open_store(str(tmp_path)), patience_s=5)


def test_another_machine_without_a_heartbeat_loses_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, ELSEWHERE)
    monkeypatch.setattr(module, "_POLL_S", 0.05)
    acquire_lease(open_store(str(tmp_path)), patience_s=0.3).release()


@pytest.mark.parametrize("skew", [-3e7, 3e7])
def test_our_clock_decides_nothing(tmp_path: Path, skew: float, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, ELSEWHERE)
    real = time.time
    monkeypatch.setattr(module.time, "time", lambda: real() + skew)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: put(tmp_path, ELSEWHERE, beat=7))
    with pytest.raises(LeaseHeldError):
        acquire_lease(open_store(str(tmp_path)), patience_s=5)


def _contend(say: Any, root: str) -> None:
    try:
        lease = acquire_lease(open_store(root))
    except LeaseHeldError:
        say(b"l")
        Path(root, f"lost-{os.getpid()}").touch()
    else:
        say(b"w")
        deadline = time.monotonic() + 25
        while len(list(Path(root).glob("lost-*"))) < 7 and time.monotonic() < deadline:
            time.sleep(0.02)
        lease.check()


def test_the_store_clock_survives_a_concurrent_cleanup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = open_store(str(tmp_path))
    real, lost = root.info, []

    def info(path: str) -> Any:
        if not lost:
            lost.append(path)
            root.delete([path])
        return real(path)

    monkeypatch.setattr(root, "info", info)
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 0.0))  # years behind
    assert module.store_clock(root) > 1e9
    assert not list(tmp_path.glob(".ckptkit/clock-*"))


def test_one_of_many_contenders_takes_over(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    put(tmp_path, replace(this_process(), pid=os.getppid(), started="1"), generation=41)
    with ThreadPoolExecutor(8) as pool:  # each forks a process of its own
        results = list(pool.map(lambda _: fork(_contend, str(tmp_path)), range(8)))
    assert sorted(said for _, said in results) == [b"l"] * 7 + [b"w"] and {code for code, _ in results} == {0}


def test_a_garbage_collected_lease_is_free(tmp_path: Path) -> None:
    root = open_store(str(tmp_path))
    acquire_lease(root)
    gc.collect()
    acquire_lease(root).release()


def test_a_held_lease_writes_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    held = acquire_lease(open_store(str(tmp_path)))
    path = tmp_path / ".ckptkit" / "lease-00000001.json"
    deadline = time.monotonic() + 10
    while json.loads(path.read_text())["beat"] < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    held.check()
    held.release()
    assert json.loads(path.read_text())["beat"] >= 2 and json.loads(path.read_text())["released"]


def test_a_damaged_lease_file_does_not_count(tmp_path: Path) -> None:
    put(tmp_path, ELSEWHERE).write_bytes(b"\0\0")
    held = acquire_lease(open_store(str(tmp_path)))
    held.check()
    held.release()
