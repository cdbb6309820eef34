"""ls and prune on a run with entries of every kind: committed, pinned, dead, damaged, foreign."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptkit import CheckpointManager, RetentionPolicy, list_run, reshard
from ckptkit.checkpoint.run.pins import pin_forever
from ckptkit.errors import UsageError
from ckptkit.offline.prune import prune
from tests.checkpoint.states import linear, save_steps

LEFT = ".tmp-step_00000010-0123456789abcdef"


TOLD = RetentionPolicy(keep_every=3, keep_best=("loss", "min"))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps with everything that matters: a best, a pin, one resumed from, foreign files, unfinished saves."""
    run = tmp_path_factory.mktemp("full") / "RUN"
    with CheckpointManager(run, retention=TOLD) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, linear(step), metrics={"loss": abs(step - 2)})
    with CheckpointManager(run, retention=TOLD) as manager:
        manager.load(linear(0))
        for step in (5, 6):
            manager.save(step, linear(step), metrics={"loss": float(step)})
    pin_forever(f"{run}/step_00000001", "table 2")
    for name in ("step_00000004/eval", "step_00000005/eval", "notes", "step_00000009", LEFT):
        (run / name).mkdir()
    for step in (4, 5):
        (run / f"step_0000000{step}" / "eval" / "results.json").write_text("{}")
    os.utime(run / LEFT, (0, 0))
    return run


@pytest.fixture
def root(full: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(full, tmp_path / "RUN", symlinks=True))


def committed(root: Path) -> set[str]:
    return {row.name for row in list_run(str(root)).checkpoints if row.state == "committed"}


def test_ls_shows_that_a_resumed_checkpoint_is_released_when_its_job_ends(tmp_path):
    keep = RetentionPolicy(max_num=1)
    with CheckpointManager(save_steps(tmp_path, 1, retention=keep), retention=keep) as manager:
        manager.load(linear(0))
        manager.save(2, linear(2))
        running = list_run(str(tmp_path)).checkpoints[0]
    over = list_run(str(tmp_path)).checkpoints[0]
    assert (running.name, running.keep, "being read" in running.why) == ("step_00000001", True, True)
    assert (over.name, over.keep, "that job has ended" in over.why) == ("step_00000001", False, True)


def test_prune_without_limits_deletes_only_leftovers_and_asks_for_limits(tmp_path):
    root = save_steps(tmp_path / "RUN", 1, 2)
    (root / LEFT).mkdir()
    before, plan = committed(root), prune(str(root), dry_run=True)
    assert plan.cleaned
    assert set(plan.cleaned) <= set(prune(str(root)).cleaned)
    assert committed(root) == before
    with pytest.raises(UsageError, match="--max-num"):
        prune(str(root))


def test_a_metric_that_is_not_finite_is_a_string_in_json(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, linear(1), metrics={"loss": float("inf")})
    assert list_run(str(tmp_path)).to_json()["checkpoints"][0]["metrics"] == {"loss": "inf"}


def test_missing_saves_are_counted_at_their_position(tmp_path):
    save_steps(tmp_path, 10, 20, 30, 40, 50, retention=RetentionPolicy(max_num=2, keep_every=20))
    listing = list_run(str(tmp_path))
    assert {row.step: row.absent_before for row in listing.checkpoints} == {20: 1, 40: 1, 50: 0}
    assert listing.absent == listing.to_json()["absent"] == 2


def test_limits_are_not_applied_to_a_run_with_an_unknown_policy(tmp_path, monkeypatch, caplog):
    save_steps(tmp_path, 10, 11, retention=RetentionPolicy(max_num=9, keep_every=10))
    monkeypatch.setattr(RetentionPolicy, "__slots__", ("max_num", "max_mem"))  # an older version, without keep_every
    with pytest.raises(UsageError, match=r"keep_every.*--forget-recorded"):
        prune(str(tmp_path), policy=RetentionPolicy(max_num=1))
    with pytest.raises(UsageError):
        prune(str(tmp_path))
    caplog.clear()
    assert list_run(str(tmp_path)).policy is None
    assert caplog.text.count("keep_every") == 1
    assert prune(str(tmp_path), policy=RetentionPolicy(max_num=1), recorded=False, dry_run=True).deleted == ()


def test_a_limit_that_the_kept_checkpoints_exceed_is_reported_once(tmp_path, caplog):
    save_steps(tmp_path, 1, 2)
    tight = RetentionPolicy(max_mem=1)
    for look in (list_run, partial(prune, dry_run=True), prune):
        caplog.clear()
        look(str(tmp_path), policy=tight)
        assert caplog.text.count("more than max_mem") == 1


def test_a_run_that_begins_with_a_reshard_counts_no_absent_saves(tmp_path):
    save_steps(tmp_path / "run", 1, 2, 3)
    reshard(str(tmp_path / "run" / "step_00000003"), str(tmp_path / "new" / "step_00000003"), world_size=2)
    assert list_run(str(tmp_path / "new")).absent == 0


POLICIES: dict[str, tuple[dict[str, Any], list[int]]] = {  # with the steps that are kept
    "what was recorded": ({}, [1, 2, 3, 4, 5, 6]),
    "a number": ({"policy": RetentionPolicy(max_num=1)}, [1, 2, 3, 6]),
    "a number alone": ({"policy": RetentionPolicy(max_num=1), "recorded": False}, [1, 6]),
    "bytes": ({"policy": RetentionPolicy(max_mem=1), "recorded": False}, [1, 6]),
    "multiples": ({"policy": RetentionPolicy(max_num=1, keep_every=2), "recorded": False}, [1, 2, 4, 6]),
    "the best two": ({"policy": RetentionPolicy(max_num=1, keep_best=("loss", "max", 2))}, [1, 3, 5, 6]),
    "more than there are": ({"policy": RetentionPolicy(max_num=99)}, [1, 2, 3, 4, 5, 6]),
}


@pytest.mark.parametrize("name", POLICIES)
def test_ls_and_a_dry_prune_predict_what_prune_does(root, name):
    run, (options, kept) = root, POLICIES[name]
    listed = list_run(str(run), **options)
    plan = prune(str(run), dry_run=True, **options)
    rows = [row for row in listed.checkpoints if row.state == "committed"]
    assert [row.step for row in rows if row.keep] == kept
    assert [(row.name, row.keep) for row in rows] == [(d.name, d.keep) for d in plan.decisions]
    assert all(row.why.startswith(d.reason) for row, d in zip(rows, plan.decisions, strict=True))
    assert all(row.why for row in listed.checkpoints) and listed.foreign == ("notes",)
    stays = [f"{row.name}/{path}" for row in rows for path in row.kept_files]
    assert stays == [f"step_0000000{n}/eval/results.json" for n in (4, 5) if n not in kept]
    assert stays == list(plan.kept_files)
    left = [f".tmp-{row.name}-0123456789abcdef" for row in listed.checkpoints if row.state == "abandoned"]
    assert [path for path in plan.cleaned if not path.endswith(".owner")] == left
    done = prune(str(run), **options)
    assert [(d.name, d.keep) for d in done.decisions] == [(d.name, d.keep) for d in plan.decisions]
    assert (sorted(done.kept_files), done.cleaned) == (stays, plan.cleaned)
    after = list_run(str(run)).checkpoints
    assert [row.step for row in after if row.state == "committed"] == kept
    assert (run / "notes").is_dir() and (run / "step_00000009").is_dir()
