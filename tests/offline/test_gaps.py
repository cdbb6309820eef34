"""Leftovers of an aborted save or an interrupted copy are never called ok."""

import os
import re
import shutil
from pathlib import Path

import pytest

from ckptkit import diff, reshard, verify
from ckptkit.errors import CheckpointNotFoundError, CkptkitError, IncompleteCheckpointError
from ckptkit.formats.detect import open_source
from tests.cli.commands import ran
from tests.offline.folders import refused

ONLY = {  # the remaining files of the checkpoint
    "megatron_torch_dist_emulated/iter_0000010": ("common.pt",),
    "lightning_trainer_fsdp_w2/epoch=0-step=3.ckpt": ("meta.pt",),
    "lightrft_naive_optim_w2/global_step6": ("optim_states/.metadata", "optim_states/*.distcp"),
    "lightrft_mp_optim_w2/global_step7": ("client_state.pt",),
    "accelerate_fsdp2_sharded_llama_tied_w2/checkpoint": ("optimizer_0/.metadata", "optimizer_0/*.distcp"),
    "verl_fsdp1_nomesh_w2": ("**/optim_world_size_2_rank_0.pt",),
    "verl_fsdp2_w2": ("**/extra_state_world_size_2_rank_0.pt",),
    "deepspeed_zero2_bf16_w2/ckpt/global_step2": ("mp_rank_00_model_states.pt",),
}
WITHOUT = (  # a checkpoint, its missing file, and what verify says
    ("verl_fsdp2_w2", "**/optim_world_size_2_rank_1.pt", "optim_world_size_2_rank_1.pt is missing"),
    ("verl_fsdp1_nomesh_w2", "**/optim_world_size_2_rank_1.pt", "optim_world_size_2_rank_1.pt is missing"),
    ("megatron_torch_dist_emulated/iter_0000010", ".metadata", "save did not finish"),
    ("megatron_torch_dist_emulated/iter_0000010", "metadata.json", "Megatron writes metadata.json last"),
    ("lightning_trainer_fsdp_w2/epoch=0-step=3.ckpt", ".metadata", "save did not finish"),
    ("lightrft_naive_optim_w2/global_step6", ".metadata", "save did not finish"),
    ("lightrft_mp_optim_w2/global_step7", ".metadata", "save did not finish"),
    ("accelerate_fsdp2_sharded_llama_tied_w2/checkpoint", "random_states_0.pkl", "random_states_0.pkl is missing"),
    ("accelerate_fsdp2_sharded_qwen3moe_w2/checkpoint", "random_states_1.pkl", "random_states_1.pkl is missing"),
    ("hf_trainer_fsdp2_sharded_w2/out/checkpoint-2", "rng_state_1.pth", "rng_state_1.pth is missing"),
    ("verl_fsdp2_w2", "**/extra_state_world_size_2_rank_1.pt", "extra_state_world_size_2_rank_1.pt is missing"),
)
CUT = {  # a checkpoint, a file next to its tensors, and how many of its bytes are lost; 0 for all
    "hf_ref_llama_tied": ("config.json", 0),
    "hf_ref_llama_untied": ("config.json", 30),
    "verl_fsdp1_nomesh_w2": ("**/huggingface/config.json", 30),
    "hf_trainer_fsdp2_sharded_w2/out/checkpoint-2": ("scheduler.pt", 0),
    "lightning_trainer_fsdp_w2/epoch=0-step=3.ckpt": ("meta.pt", 0),
    "lightrft_naive_optim_w2/global_step6": ("client_state.pt", 0),
    "megatron_torch_dist_emulated/iter_0000010": ("common.pt", 0),
    "verl_fsdp2_w2": ("**/fsdp_config.json", 0),
    "accelerate_fsdp2_sharded_llama_tied_w2/checkpoint": ("random_states_1.pkl", 100),
}


def _copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("EXPECTED*"))
    for path in (target, *target.rglob("*")):
        path.chmod(0o755)
    return target


def _found(url: Path) -> str:
    """Return verify's findings; "" if it says ok."""
    try:
        return " ".join(problem.message for problem in verify(str(url)).problems)
    except CkptkitError as error:
        return str(error)


@pytest.mark.parametrize("name", ONLY)
def test_an_incomplete_checkpoint_is_not_ok_and_every_command_refuses_it(zoo, tmp_path, name):
    copy = _copy(zoo / name, tmp_path / Path(name).name)
    kept = {path for pattern in ONLY[name] for path in copy.glob(pattern)}
    for path in [path for path in copy.rglob("*") if path.is_file() and path not in kept]:
        path.unlink()
    assert kept and _found(copy)
    errors = IncompleteCheckpointError, CheckpointNotFoundError
    refused(errors, "", reshard, copy, tmp_path / "new", world_size=2)


@pytest.mark.parametrize(("name", "pattern", "words"), WITHOUT)
def test_verify_names_a_missing_file_and_a_reshard_refuses_half_an_optimizer(zoo, tmp_path, name, pattern, words):
    copy = _copy(zoo / name, tmp_path / Path(name).name)
    (gone,) = copy.glob(pattern)
    gone.unlink()
    assert words in _found(copy)
    if "optim" in pattern:
        refused(IncompleteCheckpointError, words, reshard, copy, tmp_path / "new", world_size=2)


@pytest.mark.parametrize("name", CUT)
def test_an_error_names_an_empty_or_truncated_file_next_to_the_tensors(zoo, tmp_path, name):
    copy, (pattern, lost) = _copy(zoo / name, tmp_path / Path(name).name), CUT[name]
    (file,) = copy.glob(pattern)
    os.truncate(file, file.stat().st_size - lost if lost else 0)
    assert file.name + ("" if lost else " is empty") in _found(copy)


def test_no_sample_of_a_real_library_is_called_incomplete(zoo):
    for case in sorted(zoo.iterdir()):
        if case.is_dir() and not case.name.startswith(("broken", "hostile", "fsdp1_local", "peft")):
            report = verify(str(case))
            assert report.ok, (case.name, report.problems)


def test_an_unrecorded_number_of_ranks_is_reported_as_not_proved(zoo, tmp_path):
    copy = _copy(zoo / "hf_dcp_sharded_w2", tmp_path / "sharded")
    next(copy.rglob("shard-00002*")).unlink()
    assert "how many ranks" in verify(str(copy)).summary()


@pytest.mark.parametrize(("name", "step"), [
    ("verl_fsdp2_w2", "global_step_4/actor"), ("lightrft_naive_optim_w2", "global_step6"),
    ("hf_trainer_fsdp2_sharded_w2", "out/checkpoint-2"), ("megatron_torch_dist_emulated", "iter_0000010"),
])  # fmt: skip
def test_files_behind_links_are_neither_missing_nor_left_out(zoo, tmp_path, name, step):
    copy = _copy(zoo / name, tmp_path / name) / step
    for path in [path for path in copy.rglob("*") if path.is_file()]:
        (path.parent / ".targets").mkdir(exist_ok=True)
        path.rename(path.parent / ".targets" / path.name)
        path.symlink_to(f".targets/{path.name}")
    (copy / "loop").symlink_to("loop")
    assert _found(copy) == ""
    assert diff(str(copy), str(zoo / name / step)).equal
    assert reshard(str(copy), str(tmp_path / "new"), world_size=3, verify=True).verified
    shown = ran("inspect", copy)
    assert "-" not in re.findall(r"files, (-|\d)", shown) and ("unknown size" in shown) == ("actor" not in step)


def test_an_optimizer_without_a_model_can_be_opened_by_name(zoo):
    folder = zoo / "accelerate_fsdp2_sharded_llama_tied_w2" / "checkpoint" / "optimizer_0"
    assert verify(str(folder)).ok
    assert open_source(str(folder)).catalog.tensors
