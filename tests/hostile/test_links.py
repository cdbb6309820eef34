"""Symbolic links in a run's directory: nothing is written, renamed or deleted through one that leads outside."""

import os
import shutil
from collections.abc import Callable

import pytest
import torch

from ckptkit import RetentionPolicy, TrainState
from ckptkit.checkpoint.run.delete import rotate
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.checkpoint.run.pins import list_pins, pin_forever
from ckptkit.errors import CkptkitError, UnsafePathError, UsageError
from ckptkit.formats.detect import open_source
from ckptkit.storage.local import LocalStore
from tests.checkpoint import states
from tests.checkpoint.states import save_steps
from tests.hostile import harness, sources
from tests.hostile.harness import Place, run_commands, tree
from tests.hostile.records import edit_record

STEP = "step_00000002"
COMMANDS = [name for name in harness.COMMANDS if name not in ("inspect --json", "inspect --html", "verify --quick")]


@pytest.fixture
def place(tmp_path):
    """A run, with links in it that a test adds; no test may change what is outside."""
    made = Place(tmp_path / "case")
    for folder in (made.src, made.control, made.outside / "run"):
        sources.own(folder)
    for name in ("x", "pins/read-0123456789abcdef", "pins/keep-step_00000001", f"deleting/{STEP}", "lease-00000001"):
        (made.outside / f"{name}.json").parent.mkdir(exist_ok=True)
        (made.outside / f"{name}.json").write_text("{}")
    before = tree(made.outside, without=made.work)
    yield made
    assert tree(made.outside, without=made.work) == before


def _moved(name: str, *, to: str = "") -> Callable[[Place], None]:
    """Replace the file at `name` of the run by a link to a copy outside."""

    def build(place: Place) -> None:
        path = place.src / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(place.outside / to if to else place.outside, target_is_directory=True)

    return build


LINKS: dict[str, Callable[[Place], None]] = {
    "state": _moved(".ckptkit"),
    "pins": _moved(".ckptkit/pins", to="pins"),
    "deleting": _moved(".ckptkit/deleting", to="deleting"),
    "step": _moved("step_00000001", to="run/step_00000001"),
    "newest step": _moved(STEP, to=f"run/{STEP}"),
    "another step": _moved("step_00000009", to=f"run/{STEP}"),
    "latest": _moved("latest", to="run"),
    "staging": _moved(f".tmp-{STEP}-0123456789abcdef", to="run"),
    "trash": _moved(f".trash-{STEP}-0123456789abcdef", to="run"),
    "within a step": _moved("step_00000001/more"),  # at which a deletion must stop
}


@pytest.mark.parametrize("name", LINKS)
def test_no_command_changes_the_target_of_a_link(name, place):
    LINKS[name](place)
    outcomes = run_commands(place, ("convert hf", "load", "pin", "prune"))
    # Listing a directory opens it; opening a file there would read it.
    assert not {key: (bad, o.text[-200:]) for key, o in outcomes.items() for bad in o.bad
                if not bad.startswith("opened") or bad.endswith((".json", ".distcp", ".txt"))}  # fmt: skip
    assert outcomes["convert hf"].code == 0 or name not in ("state", "pins")  # without a pin


@pytest.mark.parametrize("name", LINKS)
def test_no_save_or_rotation_changes_the_target_of_a_link(name, place):
    LINKS[name](place)
    try:
        save_steps(place.src, 3, 4, retention=RetentionPolicy(max_num=1))
    except CkptkitError:
        assert name in ("state", "pins", "deleting")
    else:
        assert committed(place)[-1] == "step_00000004"


def test_without_links_the_same_commands_succeed(place):
    outcomes = run_commands(place, COMMANDS)
    assert {key: (o.code, o.bad) for key, o in outcomes.items() if o.code or o.bad} == {}


@pytest.mark.parametrize("name", ["state", "pins", "deleting"])
def test_a_checkpoint_whose_pins_cannot_be_read_is_not_deleted(name, place):
    LINKS[name](place)
    try:
        done = rotate(LocalStore(place.src), RetentionPolicy(max_num=1))
    except UnsafePathError as error:
        assert str(place.outside) in str(error)
    else:
        assert list(done.failed) == ["step_00000001"]
    assert (place.src / "step_00000001" / "checkpoint.json").exists()


def committed(place: Place) -> list[str]:
    return [item.name for item in list_checkpoints(LocalStore(place.src)).committed]


def test_a_symlinked_run_directory_works_like_any_other(place):
    """A link given by the user is followed; only links below it are restricted."""
    link = place.top / "link"
    link.symlink_to(place.src, target_is_directory=True)
    states.save(link, TrainState(model=torch.nn.Linear(4, 4), step=3), 3, retention=RetentionPolicy(max_num=1))
    assert committed(place) == ["step_00000003"]


@pytest.mark.parametrize("change", [
    lambda store: store.write("a/x", b""), lambda store: store.child("a").write("x", b""), lambda store: store.create("a/x"),
    lambda store: store.child("a").create("b/x"), lambda store: store.delete(["a/x.json"]),
    lambda store: store.child("a").delete(["x.json"]), lambda store: store.delete_tree("a/run"),
    lambda store: store.child("a").delete_tree("run"), lambda store: store.rename("f", "a/f"),
    lambda store: store.rename("a/x.json", "g"), lambda store: store.make_directory("a/d"),
    lambda store: store.child("a").make_directory("d"), lambda store: store.child("a").existing().write("x", b""),
    lambda store: store.child("a").read("x.json"), lambda store: store.list("a"), lambda store: store.child("a").list(),
])  # fmt: skip
def test_a_store_refuses_links_that_lead_out_of_it(change, place):
    (place.src / "a").symlink_to(place.outside, target_is_directory=True)
    (place.src / "f").write_bytes(b"x")
    with pytest.raises(UnsafePathError, match="symbolic link"):
        change(LocalStore(place.src))


def test_a_link_within_the_store_is_followed(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a").symlink_to("b", target_is_directory=True)
    store = LocalStore(tmp_path)
    store.child("a").write("x", b"1")
    assert (store.read("b/x"), [item.path for item in store.list("a")]) == (b"1", ["a/x"])
    store.delete(["a/x"])
    assert os.listdir(tmp_path / "b") == []


# --- records of another checkpoint


def test_a_step_with_the_record_of_another_checkpoint_is_not_read_pinned_or_deleted(place):
    step, store = place.src / STEP, LocalStore(place.src)
    edit_record(step, lambda body: body.update(tag="other"))
    with pytest.raises(UnsafePathError, match="other"):
        open_source(str(step))
    with pytest.raises(UsageError, match="copied or renamed"):
        pin_forever(str(step), "mine")
    assert committed(place) == ["step_00000001"] and list_pins(store) == []
    rotate(store, RetentionPolicy(max_num=1))
    assert step.exists()


def test_a_renamed_step_directory_is_read_with_a_note_unless_it_has_the_name_of_another_step(place):
    step = place.src / STEP
    assert not open_source(str(step)).catalog.info.notes
    assert STEP in " ".join(open_source(str(step.rename(place.src / "mine"))).catalog.info.notes)
    with pytest.raises(UnsafePathError, match="step_00000001"):
        open_source(str((place.src / "step_00000001").rename(place.src / "step_00000007")))
