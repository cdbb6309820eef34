"""copy: byte for byte, completely or not at all, for every format; runs in their order, with pins."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit import CheckpointManager, DCPWriter, RetentionPolicy, TrainState, copy, verify
from ckptkit.checkpoint.run.delete import rotate
from ckptkit.checkpoint.run.pins import list_pins, pin_forever
from ckptkit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    IntegrityError,
    LeaseHeldError,
    UsageError,
)
from ckptkit.offline import copy as copy_module
from ckptkit.storage import open_store, staging
from ckptkit.storage.lock import acquire_lease
from tests.checkpoint.killed import same_as_saved, state
from tests.checkpoint.saving import fork, killed_at, leftovers, steps
from tests.checkpoint.states import save
from tests.formats.damages import lay
from tests.offline.folders import copied, flip, hub_snapshot, largest, refused, tree
from tests.patches import before

STEP = "step_00000002"
FOREIGN = [
    "dcp_fsdp2_uneven_w4/ckpt", "dcp_zstd_w2/ckpt", "hf_ref_llama_tied", "deepspeed_zero2_bf16_w2", "verl_fsdp2_w2",
    "lightning_real_mp_w2", "accelerate_fsdp2_sharded_llama_tied_w2", "torchsave_pytorch_model_bin",
    "megatron_torch_dist_emulated",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints; the first is pinned."""
    run = tmp_path_factory.mktemp("copy") / "RUN"
    with CheckpointManager(run) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step), metrics={"loss": 1.0 / step})
    pin_forever(f"{run}/step_00000001", "table 2")
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return copied(made, tmp_path / "RUN")


@pytest.fixture
def new(run: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    copy(str(run), str(tmp_path / "new"))
    return tmp_path / "new"


def check_copy(source: Path | str, out: Path, original: Path | None = None, **options: Any) -> Any:
    """Copy one checkpoint; assert that the copy has the same files as the original. Return what is reported of it."""
    (item,) = copy(str(source), str(out), **options).checkpoints
    assert tree(out) == tree(original or Path(source))
    return item


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("check", [True, False])
def test_a_checkpoint_of_any_format_is_copied_byte_for_byte(zoo, tmp_path, name, check):
    source = zoo / name  # for verl, DeepSpeed and Megatron: the directory around the one step
    item, files = check_copy(source, tmp_path / "out", check=check, verify=True), tree(source)
    assert (item.files, item.nbytes) == (len(files), sum(map(len, files.values())))
    assert item.verified and (item.digests > 0 or not check or "hf" in name)
    assert item.unproved <= item.nbytes and (check or item.unproved == item.nbytes)


@pytest.mark.parametrize("name", ["latest", STEP, "1"])
def test_a_checkpoint_of_a_run_is_copied_with_its_record_and_every_byte_is_proved(run, tmp_path, name):
    done = copy(f"{run}/{name}", str(tmp_path / "out"), verify=True)
    (item,) = done.checkpoints
    assert tree(tmp_path / "out") == tree(Path(item.src)) and verify(str(tmp_path / "out")).ok
    assert item.unproved == 0 and done.nbytes == item.nbytes
    assert "not proved" not in done.proof() and "the copy is equal to the source" in done.proof()
    assert f"{item.digests} source digests checked" in done.proof()
    assert [pin.owner for pin in list_pins(open_store(str(run)))] == [None]  # no pin of ours is left


def test_a_dcp_writer_checkpoint_without_a_commit_record_is_copied(tmp_path):
    dcp.save({"a": torch.arange(9.0)}, storage_writer=DCPWriter(str(tmp_path / "in")))
    assert check_copy(tmp_path / "in", tmp_path / "out").digests


def test_damage_in_or_between_slices_names_file_and_tensor_and_nothing_is_published(tmp_path):
    step = Path(save(tmp_path / "RUN", TrainState(model=torch.nn.Linear(300, 300))), "step_00000001")
    assert check_copy(step, tmp_path / "out").unproved == 0
    data = largest(step)
    for at, what in ((None, "weight"), (3, "the bytes between the tensors")):
        flip(data, at)
        refused(IntegrityError, rf"(?s){data.name}.*{what}", copy, step, tmp_path / "bad")
        check_copy(step, tmp_path / f"unchecked {at}", check=False)
        flip(data, at)


def test_an_incomplete_checkpoint_is_never_copied(run, tmp_path):
    next((run / STEP).glob("*.distcp")).unlink()
    for check in (True, False):
        refused(IncompleteCheckpointError, "missing", copy, f"{run}/2", tmp_path / "out", check=check)


def test_files_missing_from_the_record_are_reported_and_not_copied(run, tmp_path):
    (run / STEP / "eval").mkdir()
    (run / STEP / "eval" / "results.json").write_text("{}")
    done = copy(f"{run}/2", str(tmp_path / "out"))
    assert list(done.checkpoints[0].left_out) == ["eval/results.json"]
    assert any("eval/results.json" in line and "--all-files" in line for line in done.lines())
    assert not (tmp_path / "out" / "eval").exists()
    check_copy(f"{run}/2", tmp_path / "all", run / STEP, all_files=True)


@pytest.mark.parametrize(("name", "target", "expected"), [
    ("a.bin", "new.bin", "new.bin"), ("a.bin", "new", "new/a.bin"), ("a.bin", "folder", "folder/a.bin"),
    ("a.bin", "folder/new.bin", "folder/new.bin"), ("checkpoint", "new", "new"),
    ("checkpoint", "folder", "folder/checkpoint"), ("checkpoint", "new/", "new/checkpoint"),
])  # fmt: skip
def test_a_single_file_is_copied_to_a_file_or_into_a_directory(zoo, tmp_path, name, target, expected):
    source = Path(shutil.copy(zoo / "torchsave_pytorch_model_bin" / "pytorch_model.bin", tmp_path / name))
    (tmp_path / "folder").mkdir()
    copy(str(source), f"{tmp_path}/{target}")
    copied = tmp_path / expected
    assert copied.read_bytes() == source.read_bytes()
    refused(CheckpointExistsError, "", copy, source, tmp_path / target)


def test_links_of_a_hub_cache_are_copied_as_files(zoo, tmp_path):
    source = zoo / "hf_ref_llama_tied"
    done = copy(str(hub_snapshot(source, tmp_path / "hub")), str(tmp_path / "out"))
    assert tree(tmp_path / "out") == tree(source) and "not proved: " in done.proof()
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_copy_overwrites_under_the_same_rules_as_convert(run, tmp_path):
    out = tmp_path / "best so far"
    copy(f"{run}/1", str(out))
    assert verify(str(out)).ok
    refused(UsageError, "another step", copy, f"{run}/2", tmp_path / "step_00000007")
    refused(CheckpointExistsError, "--overwrite", copy, f"{run}/2", out)
    check_copy(f"{run}/2", out, run / STEP, overwrite=True)
    (out / "notes.txt").write_text("mine")
    refused(CheckpointExistsError, r"notes\.txt", copy, f"{run}/1", out, overwrite=True)
    refused(UsageError, "is the source: the result", copy, f"{run}/1", run / "step_00000001", overwrite=True)


def test_a_run_is_copied_with_its_pins_and_latest_and_loads(run, tmp_path):
    told: list[tuple[int, int]] = []
    done = copy(str(run), str(tmp_path / "new"), progress=lambda at, total, what: told.append((at, total)))
    for name in ("step_00000001", STEP, "step_00000003"):
        assert tree(tmp_path / "new" / name) == tree(run / name)
    pins = list_pins(open_store(str(tmp_path / "new")))
    assert [(pin.name, pin.why) for pin in pins] == [("step_00000001", "table 2")] and done.pins == ("step_00000001",)
    assert (tmp_path / "new" / "latest").read_text() == "step_00000003\n"
    assert leftovers(tmp_path / "new") == [] and told == sorted(told) and len({total for _, total in told}) == 1
    loaded = state(0)
    with CheckpointManager(tmp_path / "new") as manager:
        manager.load(loaded)
        same_as_saved(loaded, 3)
        manager.save(4, state(4))  # the run continues
    assert steps(tmp_path / "new") == [1, 2, 3, 4]


def test_running_a_copy_again_copies_only_new_checkpoints_even_through_links(run, new, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in new.rglob("*.distcp")}
    with CheckpointManager(run) as manager:
        manager.save(4, state(4))
    for place in (run, new):
        (tmp_path / f"to {place.name}").symlink_to(place)
    done = copy(f"{tmp_path}/to RUN", f"{tmp_path}/to new")
    assert [item.there for item in done.checkpoints] == [True, True, True, False]
    for item in done.checkpoints:
        assert item.nbytes == sum(path.stat().st_size for path in Path(item.dst).iterdir())
    assert steps(new) == [1, 2, 3, 4] and all(p.stat().st_mtime_ns == at for p, at in before.items())
    assert done.nbytes == done.checkpoints[-1].nbytes


def test_uncommitted_entries_are_named_and_skipped(run, tmp_path):
    uncommitted = (".tmp-step_00000010-0123456789abcdef", "step_00000009", "notes")
    for name in uncommitted:
        (run / name).mkdir()
    (run / "step_00000008").symlink_to(run / "step_00000001")
    done = copy(str(run), str(tmp_path / "new"))
    assert set(done.left_out) == {*uncommitted, "step_00000008"}
    assert all(any(name in line for line in done.lines()) for name in done.left_out)
    assert steps(tmp_path / "new") == [1, 2, 3] and not (tmp_path / "new" / "notes").exists()
    for name in ("step_00000001", STEP, "step_00000003"):
        shutil.rmtree(run / name)
    refused(CheckpointNotFoundError, "no committed checkpoint", copy, run, tmp_path / "none")


@pytest.mark.parametrize(("harm", "error", "planned"), [
    (lambda step: flip(largest(step)), IntegrityError, ""),
    (lambda step: os.truncate(largest(step), 10), IncompleteCheckpointError, "distcp"),
    (lambda step: (step / "checkpoint.json").write_bytes(b"{"), CorruptCheckpointError, "checkpoint.json is not JSON"),
], ids=["a bit", "a truncated file", "the record"])  # fmt: skip
def test_damage_in_one_checkpoint_is_an_error_but_the_others_are_copied(run, tmp_path, harm, error, planned):
    harm(run / STEP)
    (run / "step_00000009").mkdir()
    assert planned in "".join(copy(str(run), str(tmp_path / "new"), dry_run=True).faults)
    with pytest.raises(error, match=r"step_00000002 was not copied; .* has 2 other complete ") as caught:
        copy(str(run), str(tmp_path / "new"))
    assert "\nleft out: step_00000009: " in str(caught.value)
    assert steps(tmp_path / "new") == [1, 3] and leftovers(tmp_path / "new") == []


def test_a_checkpoint_of_another_save_is_replaced_only_on_request_and_if_not_pinned(run, tmp_path):
    new = tmp_path / "new"
    with CheckpointManager(new) as manager:
        manager.save(2, state(2, 1))
        manager.save(9, state(9))
    other = tree(new / STEP)
    refused(CheckpointExistsError, "step_00000002 from another save", copy, run, new)
    assert steps(new) == [2, 9] and tree(new / STEP) == other
    pin_forever(f"{new}/step_00000002", "mine")
    refused(CheckpointExistsError, "pinned: mine", copy, run, new, overwrite=True)
    (new / ".ckptkit" / "pins" / "keep-step_00000002.json").unlink()
    done = copy(str(run), str(new), overwrite=True)
    assert sorted(steps(new)) == [1, 2, 3, 9] and tree(new / STEP) == tree(run / STEP)
    assert any("step_00000009" in note for note in done.notes)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_an_incomplete_or_damaged_copy_does_not_count_as_copied(run, new, damage):
    file = largest(new / STEP)
    file.unlink() if damage == "missing" else os.truncate(file, 10)
    said = f"step_00000002 already exists, but it is incomplete: {file.name}"
    refused(CheckpointExistsError, said, copy, run, new)
    assert "incomplete" in str(copy(str(run), str(new), dry_run=True).faults)
    done = copy(str(run), str(new), overwrite=True)
    assert [item.there for item in done.checkpoints] == [True, False, True]
    assert "2 there already, files and sizes compared" in done.proof()
    assert tree(new / STEP) == tree(run / STEP)
    assert copy(str(run), str(new), verify=True).proof() == "proved: 3 there already, verified"
    flip(file)
    refused(IntegrityError, "step_00000002 already exists, but is damaged", copy, run, new, verify=True)


def test_all_files_skips_and_names_what_is_not_a_readable_file(run, tmp_path):
    step = run / "step_00000003"
    (step / "notes.txt").write_text("mine")
    (step / "gone").symlink_to("nowhere")
    (step / "away").symlink_to("/etc/hostname")
    os.mkfifo(step / "pipe")
    (item,) = copy(str(step), str(tmp_path / "out"), all_files=True).checkpoints
    assert set(item.left_out) == {"gone", "away", "pipe"}
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine" and verify(str(tmp_path / "out")).ok


def test_a_run_in_use_by_a_job_is_refused_as_destination(run, tmp_path):
    new = tmp_path / "new"
    lease = acquire_lease(open_store(str(new)))
    try:  # by another process
        assert fork(lambda say: refused(LeaseHeldError, "", copy, run, new)) == (0, b"")
    finally:
        lease.release()
    copy(str(run), str(new))


@pytest.mark.parametrize("pinned", [True, False])
def test_rotation_waits_for_a_copy_or_the_report_names_what_was_deleted(run, tmp_path, monkeypatch, pinned):
    kept: list[list[int]] = []
    root, policy = open_store(str(run)), RetentionPolicy(max_num=1)
    before(monkeypatch, copy_module, "carry_out", lambda *_, **__: (rotate(root, policy), kept.append(steps(run))))
    if not pinned:
        monkeypatch.setattr(copy_module, "_PINNED", 0)
    done = copy(str(run), str(tmp_path / "new"))
    if pinned:  # the first by its owner; the second is deleted once it is copied
        assert kept == [[1, 2, 3], [1, 2, 3], [1, 3]] and steps(tmp_path / "new") == [1, 2, 3]
    else:
        assert steps(tmp_path / "new") == [1, 3] and "deleted" in done.left_out[STEP]


def test_a_copy_killed_at_any_file_operation_leaves_a_valid_run_and_continues(run, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "STARTING_S", -1.0)
    before, kills = tree(run, ".ckptkit"), 0
    for nth in range(7, 100_000, 61):
        new = tmp_path / f"at {nth}"
        killed = killed_at(nth, copy, str(run), str(new))
        done = steps(new) if new.exists() else []
        assert done == [1, 2, 3][: len(done)], f"operation {nth}: {done}"
        for step in done:
            assert verify(f"{new}/{step}").ok
        copy(str(run), str(new))
        assert steps(new) == [1, 2, 3] and leftovers(new) == [], f"operation {nth}: {os.listdir(new)}"
        assert [pin.name for pin in list_pins(open_store(str(new)))] == ["step_00000001"]
        assert tree(run, ".ckptkit") == before
        kills += killed
        if not killed:
            break
        shutil.rmtree(new)
    assert kills >= 3


@pytest.mark.parametrize(("put", "error", "said", "overwrite"), [
    (lambda new: new.write_text("mine"), NotADirectoryError, "new is not a directory", False),
    (lambda new: new.symlink_to("nowhere"), NotADirectoryError, "new is not a directory", False),
    (lambda new: lay(new, {".ckptkit": "mine"}), NotADirectoryError, r"new/\.ckptkit is a file", False),
    (lambda new: lay(new, {f"{STEP}/thesis.txt": "mine"}), CheckpointExistsError, "exists already", False),
    (lambda new: lay(new, {f"{STEP}/thesis.txt": "mine"}), CheckpointExistsError, "thesis.txt", True),
], ids=["a file", "a dangling link", "a file called .ckptkit", "a folder", "a folder, with --overwrite"])  # fmt: skip
def test_an_obstacle_is_reported_once_before_anything_is_written(run, tmp_path, put, error, said, overwrite):
    new = tmp_path / "new"
    put(new)
    before = sorted(tmp_path.rglob("*"))
    written = "" if error is NotADirectoryError else "(?s:.*)[Nn]othing was"
    refused(error, said + written, copy, run, new, overwrite=overwrite)
    told = "\n".join(copy(str(run), str(new), dry_run=True, overwrite=overwrite).lines())
    assert re.search(said, told) and told.count("would fail") == 1
    assert sorted(tmp_path.rglob("*")) == before
