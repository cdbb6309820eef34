"""convert, reshard and prune killed at any file operation: the source is unchanged, the result complete or absent."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit import RetentionPolicy, convert, reshard, verify
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.offline.prune import prune
from ckptkit.storage import open_store, staging
from tests.checkpoint.killed import check_run, state
from tests.checkpoint.saving import killed_at, leftovers
from tests.checkpoint.states import save_steps
from tests.offline.folders import tree

Command = Callable[[str, str, bool], Any]

COMMANDS: dict[str, Command] = {
    "convert to hf": lambda src, dst, again: convert(src, dst, to="hf", overwrite=again),
    "convert to torch": lambda src, dst, again: convert(src, f"{dst}/model.pt", to="torch", overwrite=again),
    "convert to dcp": lambda src, dst, again: convert(src, dst, to="dcp", world_size=2, overwrite=again),
    "convert to local": lambda src, dst, again: convert(src, dst, to="local", world_size=2, overwrite=again),
    "reshard": lambda src, dst, again: reshard(src, dst, world_size=3, overwrite=again),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_steps(tmp_path_factory.mktemp("kill") / "run", 1, 2, 3, make=state)


def kill_command(name: str, run: Path, folder: Path, *, again: bool, stride: int, offset: int) -> int:
    """Kill a command at every `stride`-th operation; return the number of kills."""
    before = tree(run / "step_00000003")
    for kills, nth in enumerate(range(offset, 100_000, stride)):
        place = folder / str(nth)
        place.mkdir(parents=True)
        target = place / "out"
        if again:
            COMMANDS[name](str(run / "step_00000002"), str(target), False)
        killed = killed_at(nth, COMMANDS[name], f"{run}/step_00000003", str(target), again)
        where = f"{name}, operation {nth}, {sorted(os.listdir(place))}"
        assert tree(run / "step_00000003") == before, where
        there = target.exists() and bool(tree(target))
        if there and not any(".tmp-" in path for path in tree(target)):
            assert verify(str(target)).ok, where
        assert there or not again or name == "convert to torch", where
        COMMANDS[name](f"{run}/step_00000003", str(target), there)
        assert verify(str(target)).ok, where
        assert os.listdir(place) == ["out"], where
        assert not [path for path in os.listdir(target) if path.startswith((".tmp", ".trash"))], where
        shutil.rmtree(place)
        if not killed:
            return kills
    raise AssertionError("the command never ends")


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_command_killed_at_any_file_operation_publishes_all_or_nothing(run, tmp_path, monkeypatch, name, again):
    monkeypatch.setattr(staging, "STARTING_S", -1.0)
    offset = 1 + random.Random(name).randrange(23)
    assert kill_command(name, run, tmp_path, again=again, stride=23, offset=offset) >= 2
    assert [item.step for item in list_checkpoints(open_store(str(run))).committed] == [1, 2, 3]


def kill_prune(run: Path, folder: Path, *, stride: int, offset: int) -> int:
    """Kill a prune at every `stride`-th operation; return the number of kills."""
    for kills, nth in enumerate(range(offset, 100_000, stride)):
        root = folder / str(nth)
        shutil.copytree(run, root)
        killed = killed_at(nth, prune, str(root), policy=RetentionPolicy(max_num=1))
        steps = check_run(root, [])
        assert steps[-1] == 3, f"operation {nth}: {steps}"
        prune(str(root), policy=RetentionPolicy(max_num=1))
        assert check_run(root, []) == [3] and leftovers(root) == [], f"operation {nth}: {os.listdir(root)}"
        if not killed:
            return kills
    raise AssertionError("prune never ends")


def test_a_prune_killed_at_any_file_operation_is_finished_by_the_next(run, tmp_path):
    assert kill_prune(run, tmp_path, stride=9, offset=4) > 2
