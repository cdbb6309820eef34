"""What is opened for a URL: a file, a directory, the newest of many steps, or an error that lists what was found."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ckptkit.catalog.entry import Role
from ckptkit.errors import (
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsupportedFormatError,
)
from ckptkit.formats.detect import identify, open_source
from ckptkit.formats.trainers.steps import ordered, parse_step
from ckptkit.offline.reshard import reshard
from ckptkit.storage import open_store


def _dcp(zoo: Path, target: Path) -> None:
    shutil.copytree(zoo / "dcp_threads2_w2" / "ckpt", target)


def _hf(target: Path, value: float = 1.0) -> None:
    target.mkdir(parents=True)
    save_file({"w": np.full(3, value, np.float32)}, target / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("global_step10", 10),
        ("global_step_4", 4),
        ("checkpoint-2", 2),
        ("step-10", 10),
        ("iter_0000010", 10),
        ("step_00001000", 1000),
        ("epoch=0-step=3.ckpt", 3),
        ("epoch_1_step_7", 7),
        ("epoch_3", 0),
        ("1200", 1200),
        ("model_name--val_loss=1.2-step=30.0-consumed_samples=60.0", 30),
        *((name, None) for name in ("notes", "tensorboard", "last.ckpt", "hf_ref_qwen3moe", "v2-final", "step")),
    ],
)
def test_a_step_is_read_from_a_name(name, step):
    found = parse_step(name)
    assert (found and found.step) == step


@pytest.mark.parametrize("nonce", ["4224e5ffbba6bee3", "ba61ffe000000000", "ba61234567890123", "0123456789012345"])
def test_a_step_that_a_save_renamed_comes_after_the_one_in_its_place(nonce):
    names = [f"step_00000001.aside-{nonce}", "step_00000001"]
    assert [step.name for step in ordered(names)] == names[::-1]
    assert parse_step(names[0]).step == 1  # type: ignore[union-attr]


def test_steps_are_ordered_by_number_and_then_by_epoch():
    names = ["global_step9", "global_step10", "global_step2"]
    assert [step.name for step in ordered(names)] == ["global_step10", "global_step9", "global_step2"]
    assert ordered(["epoch_2", "epoch_10"])[0].name == "epoch_10"


def test_the_newest_step_by_number_is_opened_and_noted(tmp_path, zoo):
    for step in (2, 9, 10):
        _hf(tmp_path / f"step-{step}", step)
    (tmp_path / "notes").mkdir()
    (tmp_path / "latest").write_text("step-9")
    source = open_source(str(tmp_path))
    assert source.url.endswith("step-10")
    assert source.catalog.info.step == 10
    assert "newest of 3" in source.note
    assert "latest says step-9" in source.note


def test_an_unfinished_newest_step_is_skipped_and_a_damaged_one_is_an_error_that_names_it(tmp_path, zoo):
    _dcp(zoo, tmp_path / "step-1")
    _dcp(zoo, tmp_path / "step-2")
    (tmp_path / "step-2" / "__1_0.distcp").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"__1_0\.distcp.*step-2"):
        open_source(str(tmp_path))
    (tmp_path / "step-2" / ".metadata").rename(tmp_path / "step-2" / ".metadata.tmp")
    source = open_source(str(tmp_path))
    assert source.url.endswith("step-1")
    assert "step-2" in source.note


def test_only_committed_steps_of_ckptkit_count(tmp_path, zoo):
    _dcp(zoo, tmp_path / "step_00000005")
    (tmp_path / "step_00000005" / "checkpoint.json").write_text("{}")
    _dcp(zoo, tmp_path / "step_00000009")  # no record: an interrupted save
    with pytest.raises(CorruptCheckpointError, match="step_00000005"):  # it is opened, and its record is damaged
        open_source(str(tmp_path))
    assert identify(open_store(str(tmp_path / "step_00000005"))) == "ckptkit"


def test_among_names_without_numbers_a_pointer_file_decides_and_nothing_is_guessed(tmp_path):
    _hf(tmp_path / "best", 1)
    _hf(tmp_path / "last", 2)
    with pytest.raises(CheckpointNotFoundError, match="best, last"):
        open_source(str(tmp_path))
    (tmp_path / "latest").write_text("last\n")
    assert open_source(str(tmp_path)).url.endswith("/last")


def test_a_pointer_cannot_lead_outside(tmp_path):
    _hf(tmp_path / "outside")
    (tmp_path / "run" / "sub").mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("../outside")
    with pytest.raises(CheckpointNotFoundError):
        open_source(str(tmp_path / "run"))


def test_the_actor_is_chosen_before_the_critic(tmp_path, zoo):
    step = tmp_path / "run" / "global_step_4"
    shutil.copytree(zoo / "verl_fsdp2_w2" / "global_step_4" / "actor", step / "actor")
    shutil.copytree(zoo / "verl_fsdp2_w2" / "global_step_4" / "actor", step / "critic")
    (step / "data.pt").write_bytes(b"PK")
    source = open_source(str(tmp_path / "run"))
    assert source.url.endswith("global_step_4/actor")
    assert "critic/" in source.note


def test_an_optimizer_file_next_to_the_weights_is_not_a_second_checkpoint(tmp_path, zoo):
    """The step of NeMo-RL: policy/weights/model and policy/optimizer/optim."""
    policy = tmp_path / "step_10" / "policy"
    shutil.copytree(zoo / "dcp_threads2_w2" / "ckpt", policy / "weights" / "model")
    shutil.copytree(zoo / "dcp_threads2_w2" / "ckpt", policy / "optimizer" / "optim")
    assert "/step_10/policy/weights" in open_source(str(tmp_path / "step_10")).url


def test_opening_one_file_opens_the_whole_checkpoint(zoo):
    source = open_source(str(zoo / "lightrft_mp_optim_w2" / "global_step7" / ".metadata"))
    assert source.url.endswith("global_step7") and source.catalog.info.step == 7
    assert source.catalog.by_role(Role.MODEL)


def test_a_link_that_the_user_names_is_followed_and_a_slash_at_the_end_changes_nothing(tmp_path):
    _hf(tmp_path / "step-3")
    (tmp_path / "link").symlink_to(tmp_path / "step-3")
    assert open_source(str(tmp_path / "link")).catalog.tensors
    assert open_source(f"{tmp_path}/step-3/").catalog.info.step == 3


@pytest.mark.parametrize(
    ("files", "error", "text"),
    [
        (None, CheckpointNotFoundError, "does not exist"),
        ([], CheckpointNotFoundError, r"(?s)empty.*Expected"),
        (["notes.txt", "logs/x"], CheckpointNotFoundError, r"(?s)notes\.txt.*Expected"),
        (["__0_0.distcp"], CkptkitError, r"\.metadata"),
    ],
    ids=["missing", "empty", "foreign", "unfinished"],
)
def test_the_error_for_something_other_than_a_checkpoint_says_what_was_found(tmp_path, files, error, text):
    for name in files or []:
        (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "x" / name).write_bytes(b"PK")
    if files == []:
        (tmp_path / "x").mkdir()
    with pytest.raises(error, match=text) as caught:
        open_source(str(tmp_path / "x"))
    assert files is not None or "Expected" not in str(caught.value)


def test_rank_files_of_ckptkit_are_read_without_a_record(tmp_path):
    from ckptkit.catalog.box import Box
    from ckptkit.formats.own.local import LocalTensor, file_metadata, file_name

    for rank in range(2):
        part = LocalTensor("w", "model.w", "float32", (4, 2), Box((2 * rank, 0), (2, 2)), None)
        metadata = file_metadata(rank, 2, [], [part])
        save_file({"w": np.full((2, 2), rank, np.float32)}, tmp_path / file_name(rank), metadata=metadata)
    assert open_source(str(tmp_path)).catalog.by_role(Role.MODEL)["w"].shape == (4, 2)


def _torch_file(path: Path, value: float) -> None:
    torch.save({"model": {"w": torch.full((2,), value)}}, path)


def test_opening_a_directory_of_step_files_opens_the_newest(tmp_path):
    for step in (9, 10, 2):
        _torch_file(tmp_path / f"step_{step}.pt", step)
    source = open_source(str(tmp_path))
    assert source.url.endswith("/step_10.pt") and "newest of 3 files" in source.note
    assert list(source.catalog.by_role(Role.MODEL)) == ["w"]


def test_ckptkit_does_not_guess_between_two_files_of_one_step(tmp_path):
    _torch_file(tmp_path / "model_step_10.pt", 1)
    _torch_file(tmp_path / "optim_step_10.pt", 2)
    with pytest.raises(CheckpointNotFoundError, match=r"model_step_10\.pt"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("name", ["model_best.pth.tar", "weights.th", "step_100.pt"])
def test_the_only_torch_file_of_a_directory_is_read_whatever_its_name(tmp_path, name):
    _torch_file(tmp_path / name, 1)
    assert list(open_source(str(tmp_path)).catalog.by_role(Role.MODEL)) == ["w"]


@pytest.mark.parametrize("name", ["weights_rank{}.pt", "model_{}.pt", "checkpoint_{}.pt"])
def test_rank_files_of_an_unknown_system_are_joined(tmp_path, zoo, name):
    actor = zoo / "verl_fsdp2_w2" / "global_step_4" / "actor"
    for rank in range(2):
        shutil.copy(actor / f"model_world_size_2_rank_{rank}.pt", tmp_path / name.format(rank))
        if name.startswith("model_"):
            shutil.copy(actor / f"optim_world_size_2_rank_{rank}.pt", tmp_path / f"optimizer_{rank}.pt")
            (tmp_path / "metadata.pkl").write_bytes(b"\x80\x04}.")
    source = open_source(str(tmp_path))
    assert source.catalog.info.format == "rank-files"
    assert source.catalog.by_role(Role.MODEL).keys() == open_source(str(actor)).catalog.by_role(Role.MODEL).keys()
    (tmp_path / name.format(1)).unlink()
    with pytest.raises(CkptkitError, match=r"only the part of rank 0|_(rank)?1\.pt|parts are in model_\*\.pt"):
        open_source(str(tmp_path))


def test_a_nemo_archive_is_refused_with_the_advice_to_unpack_it(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "m.nemo").write_bytes(b"\x1f\x8b\x08" + bytes(600))
    for url in (tmp_path / "run", tmp_path / "run" / "m.nemo"):
        with pytest.raises(UnsupportedFormatError, match=r"m\.nemo is a tar archive of NeMo.*tar -xf"):
            open_source(str(url))


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_dry_run_names_trainer_state_next_to_the_weights(tmp_path, weights):
    source, beside = tmp_path / "in", ["custom_checkpoint_0.pkl", "random_states_0.pkl", "scheduler.bin"]
    source.mkdir()
    for name in beside:
        torch.save({"x": 1}, source / name)
    torch.save({"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}, source / "optimizer.bin")
    if weights == "model.safetensors":
        save_file({"w": np.ones(2, np.float32)}, source / weights)
    else:
        torch.save({"w": torch.ones(2)}, source / weights)
    notes = ("optimizer.bin is not read: it has no parameter names.", f"not read: {', '.join(beside)}.")
    assert open_source(str(source)).catalog.info.notes == notes
    report = reshard(str(source), str(tmp_path / "out"), world_size=2, dry_run=True)
    assert {*notes} < {*report.to_json()["notes"]} and {f"note: {note}" for note in notes} < {*report.plan_lines()}


def test_an_optimizer_without_weights_is_opened_only_by_its_own_name(tmp_path):
    state = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    torch.save(state, tmp_path / "optimizer.pt")
    with pytest.raises(IncompleteCheckpointError, match=r"optimizer\.pt, which has no weights"):
        open_source(str(tmp_path))
    assert open_source(str(tmp_path / "optimizer.pt")).catalog.tensors


def test_file_names_of_accelerate_before_0_25_are_known(tmp_path, zoo):
    sharded, ranks = tmp_path / "sharded", tmp_path / "ranks"
    now = zoo / "accelerate_fsdp2_sharded_llama_tied_w2" / "checkpoint"
    shutil.copytree(now / "pytorch_model_fsdp_0", sharded / "pytorch_model_0")
    shutil.copytree(now / "optimizer_0", sharded / "optimizer_0")
    ranks.mkdir()
    for path in (zoo / "accelerate_fsdp2_nodcp_llama_untied_w2" / "checkpoint").glob("*_0_rank*.bin"):
        shutil.copy(path, ranks / path.name.replace("_fsdp_0_", "_").replace("optimizer_0_", "optimizer_"))
    for folder in (sharded, ranks):
        catalog = open_source(str(folder)).catalog
        assert catalog.info.format == "accelerate"
        weights = catalog.by_role(Role.MODEL)
        assert {e.fqn for e in catalog.by_role(Role.OPTIMIZER).values() if e.state == "exp_avg"} <= set(weights)
        assert catalog.by_role(Role.OPTIMIZER) and "model.embed_tokens.weight" in weights


def test_a_model_file_is_chosen_among_torch_files_and_the_others_are_named(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    torch.save({"w": torch.zeros(2)}, tmp_path / "optim.pt")
    source = open_source(str(tmp_path))
    assert list(source.catalog.info.files) == ["model.pt"]
    assert source.catalog.info.notes == ("not read: optim.pt.",)


def test_a_recognized_format_is_chosen_before_rank_files(tmp_path, zoo):
    _dcp(zoo, tmp_path / "step10" / "model_and_optim")
    (tmp_path / "step10" / "train").mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, tmp_path / "step10" / "train" / f"rank{rank}.pt")
    source = open_source(str(tmp_path))
    assert source.url.endswith("step10/model_and_optim")
    assert "model_and_optim/ was chosen; not read: train/." in source.note


def test_safetensors_of_ranks_are_refused_with_advice(tmp_path):
    for rank in range(2):
        save_file({"w": np.ones(2, np.float32)}, tmp_path / f"model_rank{rank}.safetensors")
    with pytest.raises(UnsupportedFormatError, match=r"model_rank0\.safetensors and 1 more are per-rank files"):
        open_source(str(tmp_path))
