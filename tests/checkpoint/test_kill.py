"""Killed at any file operation or instant: every listed checkpoint was saved, and no finished save is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.delete import delete_checkpoint, rotate
from ckptkit.storage import publish
from ckptkit.storage.open import open_store
from tests.checkpoint.crash import kill_at
from tests.checkpoint.saving import check, fork, leftovers, save

Say = Callable[[bytes], Any]


def _chain(say: Say, root: str, keep: int) -> None:
    """Save three steps, each followed by rotation."""
    for step in (1, 2, 3):
        save(root, step)
        say(b"%d\n" % step)
        rotate(open_store(root), RetentionPolicy(max_num=keep))


def _overwrite(say: Say, root: str, swap: bool) -> None:
    if not swap:
        publish._exchange = lambda first, second: False
    for options in ({}, {"overwrite": True, "nbytes": 500}):
        save(root, 1, **options)
        say(b"1\n")


def _delete(say: Say, root: str) -> None:
    for step in (1, 2):
        save(root, step)
        say(b"%d\n" % step)
    delete_checkpoint(open_store(root), "step_00000001", reason="test")


SCENARIOS: dict[str, Callable[[Say, str], None]] = {
    "keep 1": lambda say, root: _chain(say, root, 1),
    "keep 2": lambda say, root: _chain(say, root, 2),
    "overwrite": lambda say, root: _overwrite(say, root, True),
    "overwrite without swap": lambda say, root: _overwrite(say, root, False),
    "delete": _delete,
}


def _killed(say: Say, name: str, root: str, nth: int) -> None:
    kill_at(nth)
    SCENARIOS[name](say, root)


def kill_everywhere(name: str, folder: Path, *, stride: int, offset: int = 1) -> int:
    """Kill the scenario at every `stride`-th operation and check what is left; return the number of kills."""
    for kills, nth in enumerate(range(offset, 100_000, stride)):
        root = folder / str(nth)
        root.mkdir()
        code, said = fork(_killed, name, str(root), nth)
        returned = [int(line) for line in said.split()]
        steps = check(root)
        where = f"{name}, operation {nth}: returned {returned}, listed {steps}, {os.listdir(root)}"
        assert code in (0, -signal.SIGKILL), where
        if returned:
            assert steps and steps[-1] >= returned[-1], where
        save(root, 9)  # the next job resumes and cleans up
        assert check(root)[-1] == 9 and leftovers(root) == [], where
        assert len(os.listdir(root)) == len(check(root)) + 2, where  # plus .ckptkit and latest
        if code == 0:
            return kills
    raise AssertionError("the scenario never ends")


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.usefixtures("no_grace")
def test_a_kill_at_any_file_operation_loses_nothing(name: str, tmp_path: Path) -> None:
    kills = kill_everywhere(name, tmp_path, stride=5, offset=1 + random.Random(name).randrange(5))
    assert kills > 20


def _endless(say: Say, root: str) -> None:
    step = max(check(root), default=0)
    while True:
        step += 1
        save(root, step, nbytes=200_000)
        say(b"%d\n" % step)
        rotate(open_store(root), RetentionPolicy(max_num=1))


def kill_at_random(root: Path, *, kills: int, seed: int) -> int:
    """Kill a run that saves continuously, again and again, each run resuming from what is left."""
    chance = random.Random(seed)
    returned = 0
    started = time.perf_counter()
    save(root.with_name("measured"), 1, nbytes=200_000)
    longest = max(0.12, 6 * (time.perf_counter() - started))  # long enough for a commit on a busy machine
    for _ in range(kills):
        code, said = fork(_endless, str(root), timeout=chance.uniform(0.0, longest))
        assert code == -signal.SIGKILL
        returned = max([returned, *(int(line) for line in said.split())])
        steps = check(root)
        assert not returned or steps[-1] >= returned, (returned, steps)
    return returned


def test_a_kill_at_any_instant_loses_nothing(tmp_path: Path) -> None:
    assert kill_at_random(tmp_path, kills=20, seed=5) > 0
