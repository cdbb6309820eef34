"""A command pins what it reads against rotation; where it cannot pin, it lists again, and finds what was replaced."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptkit import convert, diff, open_checkpoint, reshard, verify
from ckptkit.checkpoint.run.delete import delete_checkpoint
from ckptkit.checkpoint.run.pins import list_pins
from ckptkit.errors import CheckpointNotFoundError, CkptkitError, CorruptCheckpointError
from ckptkit.offline import conversion, reading
from ckptkit.storage import open_store
from ckptkit.storage.local import LocalStore
from tests import patches
from tests.checkpoint import killed
from tests.checkpoint.states import save_steps
from tests.offline.folders import copied, largest, names, refused
from tests.patches import before

COMMANDS: dict[str, Callable[[str, str], Any]] = {
    "convert": convert,
    "reshard": lambda src, dst: reshard(src, dst, world_size=3),
    "verify": lambda src, dst: verify(src),
    "diff": lambda src, dst: diff(src, src),
}


@pytest.fixture
def run(zoo: Path, tmp_path: Path) -> Path:
    """A run of ours with one checkpoint, step 4."""
    reshard(str(zoo / "verl_fsdp2_w2"), str(tmp_path / "run" / "step_00000004"), world_size=2)
    return tmp_path / "run"


def commit_another(run: Path, name: str) -> None:
    """Commit a newer checkpoint of the same step and tensors."""
    reshard(str(run / "step_00000004"), str(run / name), world_size=2)


def after(monkeypatch: pytest.MonkeyPatch, function: str, act: Callable[[], object], times: int = 1) -> None:
    """Run `act` after a function of `reading` has returned, the first `times` times."""
    left = [act] * times
    patches.after(monkeypatch, reading, function, lambda *_, **__: left and left.pop()())


OPENED, LOOKED_AT = "open_source", "_is_of"  # the second, before the data of the source is read


@pytest.mark.parametrize("command", COMMANDS)
def test_a_source_is_pinned_until_the_command_ends(run, tmp_path, monkeypatch, command):
    seen: list[str] = []
    refused: list[bool] = []

    def delete() -> None:
        root = open_store(str(run))
        seen.extend(pin.reason for pin in list_pins(root))
        refused.append(not delete_checkpoint(root, "step_00000004", reason="test"))

    after(monkeypatch, LOOKED_AT, delete)
    COMMANDS[command](str(run / "latest"), str(tmp_path / "out"))
    assert refused == [True] and command in seen[0]
    assert list_pins(open_store(str(run))) == []


def test_a_pin_leaves_no_files_in_a_directory_without_a_run(run):
    alone = copied(run / "step_00000004", run.parent / "archive" / "step_00000004")
    verify(str(alone))
    assert names(alone.parent) == ["step_00000004"]


def refuse_writing(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    def pins(store: LocalStore, path: str, *_: Any, **__: Any) -> bool:
        return store.url == str(run) and path.startswith(".ckptkit/pins/read-")

    patches.refuse(monkeypatch, LocalStore, "write", errno.EACCES, when=pins)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_newest_checkpoint_that_vanishes_before_it_is_pinned_is_chosen_again(
    run, tmp_path, monkeypatch, command, pinned
):
    commit_another(run, "first")
    if not pinned:
        refuse_writing(monkeypatch, run)

    def move_on() -> None:  # as another job rotates: the newest checkpoint is replaced by a newer one
        delete_checkpoint(open_store(str(run)), "first", reason="test")
        commit_another(run, "second")

    after(monkeypatch, OPENED if pinned else LOOKED_AT, move_on)
    report = COMMANDS[command](str(run / "latest"), str(tmp_path / "out"))
    assert "second" in json.dumps(report.to_json())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_named_source_that_vanishes_is_an_error(run, tmp_path, monkeypatch, command):
    refuse_writing(monkeypatch, run)
    root, said = open_store(str(run)), "step_00000004 was deleted or replaced while it was read"
    after(monkeypatch, LOOKED_AT, lambda: delete_checkpoint(root, "step_00000004", reason="test"))
    refused(CheckpointNotFoundError, said, COMMANDS[command], run / "step_00000004", tmp_path / "out")


@pytest.mark.parametrize("name", ["checkpoint.json", "manifest.safetensors", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_copy_without_a_file_is_reported_as_incomplete_and_not_as_replaced(run, tmp_path, command, name):
    (run / "step_00000004" / name).unlink()
    try:
        words = str(getattr(COMMANDS[command](str(run / "step_00000004"), str(tmp_path / "out")), "problems", ""))
    except CkptkitError as error:
        words = str(error)
    assert "replaced" not in words
    assert name in words or (command == "diff" and name in (".metadata", "__0_0.distcp"))  # decided by digests alone


@pytest.mark.parametrize("command", COMMANDS)
def test_an_error_names_a_step_that_is_replaced_whenever_it_is_opened(run, tmp_path, monkeypatch, command):
    step, other = run / "step_00000004", tmp_path / "run_2" / "step_00000004"
    reshard(str(step), str(other), world_size=2)

    def swap() -> None:
        step.rename(tmp_path / "parked")
        other.rename(step)
        (tmp_path / "parked").rename(other)

    after(monkeypatch, OPENED, swap, times=1000)
    said = "step_00000004 was replaced while it was opened"
    refused(CheckpointNotFoundError, said, COMMANDS[command], step, tmp_path / "out")


def while_copying(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Run `act` once the source is open, before its tensors are read."""
    before(monkeypatch, conversion, "execute", lambda *_, **__: act())


@pytest.fixture
def foreign(zoo: Path, tmp_path: Path) -> Path:
    return copied(zoo / "verl_fsdp2_w2", tmp_path / "in")


def replaced(source: Path) -> None:
    path = largest(source, "**/model_*.pt").resolve()
    shutil.copyfile(path, source / "new")
    os.replace(source / "new", path)  # of the same size


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("command", ["convert", "reshard"])
def test_nothing_is_published_from_a_source_replaced_while_it_is_read(foreign, tmp_path, monkeypatch, command, linked):
    if linked:
        path = largest(foreign, "**/model_*.pt")
        path.rename(path.with_name("target"))
        path.symlink_to("target")
    while_copying(monkeypatch, lambda: replaced(foreign))
    said = r"model_\S+ was changed or replaced while it was read"
    refused(CorruptCheckpointError, said, COMMANDS[command], foreign, tmp_path / "out")


def test_new_files_next_to_the_source_do_not_matter(foreign, tmp_path, monkeypatch):
    while_copying(monkeypatch, lambda: (foreign / "train.log").write_text("step 5"))
    convert(str(foreign), str(tmp_path / "out"))


def converts_what_rank_0_chose(run: str, target: str) -> list[str]:
    """Convert and reshard the run while rank 1 chooses another step as the latest."""
    real = reading.resolve_url

    def outdated(url: str, **options: Any) -> str:
        return f"{run}/step_00000001" if url == run and dist.get_rank() else real(url, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reading, "resolve_url", outdated)
        hf = convert(run, f"{target}/hf", max_shard_size=60)
        dcp = reshard(run, f"{target}/step_00000002", world_size=2)
    return [hf.opened, dcp.opened]


def test_ranks_of_torchrun_read_the_checkpoint_that_rank_0_has_chosen(ranks, tmp_path):
    run = str(save_steps(tmp_path / "run", 1, 2, make=killed.state))
    found = ranks.run(converts_what_rank_0_chose, 2, run, str(tmp_path))
    assert found == [[f"{run}/step_00000002"] * 2] * 2
    assert (open_checkpoint(f"{tmp_path}/hf")["weight"].numpy() == killed.content(2, 0)).all()
    assert (open_checkpoint(f"{tmp_path}/step_00000002")["model.weight"].numpy() == killed.content(2, 0)).all()
    assert list_pins(open_store(run)) == []
