"""One writer for a run: who holds the lease, and who may take it over, whatever the clocks show."""

import gc
import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptkit.errors import LeaseHeldError
from ckptkit.storage import Store, open_store
from ckptkit.storage import lock as module
from ckptkit.storage.lock import acquire_lease
from ckptkit.storage.owner import Owner, _start_of, owner_json, this_process
from ckptkit.storage.staging import STARTING_S
from tests.patches import before

BOOT = "boot/pid:[4026531836]/0123"
ELSEWHERE = Owner("other-host", 1, "1", "another/machine/entirely")
PARENT = replace(this_process(), pid=os.getppid(), started=_start_of(os.getppid()) or "")


@pytest.fixture
def root(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def put(root: Store, owner: Owner, *, generation: int = 1, beat: int = 0, age_s: float = 0.0) -> Path:
    """Write the lease of an owner."""
    path = Path(root.path_of(f".ckptkit/lease-{generation:08d}.json"))
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"nonce": "e" * 16, "beat": beat, "released": False, **owner_json(root, owner)}))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


GONE = {
    "a reused pid": replace(PARENT, started="1"),
    "before a reboot": replace(this_process(), machine=BOOT.replace("boot", "before")),
    "expired, of another machine": ELSEWHERE,
}


@pytest.mark.parametrize("why", GONE)
def test_the_lease_of_an_owner_that_is_surely_gone_is_taken_over_at_once(root, monkeypatch, why):
    if why == "before a reboot":
        monkeypatch.setattr("ckptkit.storage.owner._machine", lambda: BOOT)
    put(root, GONE[why], age_s=module.TTL_S + 5 if GONE[why] is ELSEWHERE else 0)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: pytest.fail("it waits"))
    acquire_lease(root).release()


def test_without_a_machine_id_a_reboot_is_unknown(monkeypatch):
    monkeypatch.setattr("ckptkit.storage.owner._machine", lambda: "boot/pid:[4026531836]/")
    assert replace(this_process(), machine="another/pid:[4026531836]/").alive() is None
    assert this_process().alive()


@pytest.mark.parametrize("skew", [0, -3e7, 3e7])
def test_a_heartbeat_of_another_machine_keeps_its_lease_whatever_our_clock_says(root, skew, monkeypatch):
    put(root, ELSEWHERE)
    real = time.time
    monkeypatch.setattr(module.time, "time", lambda: real() + skew)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: put(root, ELSEWHERE, beat=7))
    with pytest.raises(LeaseHeldError, match="process 1 on other-host"):
        acquire_lease(root)


def test_another_machine_without_a_heartbeat_loses_its_lease(root, monkeypatch):
    put(root, ELSEWHERE)
    monkeypatch.setattr(module, "_POLL_S", 0.05)
    monkeypatch.setattr(module, "TTL_S", 0.3)
    acquire_lease(root).release()


def test_the_store_clock_survives_a_concurrent_cleanup(root, monkeypatch):
    calls = itertools.count()
    before(monkeypatch, root, "info", lambda path: next(calls) or root.delete([path]))
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: 0.0))  # years behind
    assert module.store_clock(root) > 1e9
    assert not [item for item in root.list(".ckptkit") if "clock-" in item.path]


def test_a_contender_that_is_slower_by_one_rename_is_told_who_holds_the_lease(root, monkeypatch):
    put(root, replace(PARENT, started="1"), generation=41)
    won: list[Any] = []

    def win(*_: str) -> None:
        if not won:
            won.append(None)
            won[0] = acquire_lease(root)

    before(monkeypatch, type(root), "rename", lambda store, *paths: win(*paths))
    with pytest.raises(LeaseHeldError, match="this process"):
        acquire_lease(root)
    won[0].check()


def test_what_killed_contenders_left_is_deleted_and_what_living_ones_write_is_not(root):
    part = put(root, replace(PARENT, started="1")).with_name(".lease-00000002.json.0123456789ab.part")
    part.touch()
    acquire_lease(root).release()
    assert part.exists()
    os.utime(part, (time.time() - 2 * STARTING_S,) * 2)
    acquire_lease(root).release()
    assert not part.exists()


def test_a_held_lease_writes_heartbeats(root, monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    held = acquire_lease(root)
    deadline = time.monotonic() + 10
    while json.loads(root.read(held.path))["beat"] < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    held.check()
    held.release()
    found = json.loads(root.read(held.path))
    assert found["beat"] >= 2 and found["released"]


def test_a_damaged_or_garbage_collected_lease_does_not_count(root):
    put(root, ELSEWHERE).write_bytes(b"\0\0")
    acquire_lease(root).check()
    gc.collect()
    acquire_lease(root).release()
