"""A manager on another system's directory resumes from it, and then saves its own checkpoints there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckptkit import CheckpointManager, DCPSavePlanner, DCPWriter, TrainState
from ckptkit.errors import (
    CheckpointMismatchError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsupportedFormatError,
    UsageError,
)
from tests.checkpoint.load.test_foreign import WITH_OPTIMIZER, check_optimizer, check_weights, run_of
from tests.checkpoint.states import check_misfit, load, optimized, save

SYSTEMS = {
    "LightRFT": "lightrft_naive_optim_w2",
    "Lightning, sharded": "lightning_real_mp_w2",
    "Lightning, one file": "lightning_trainer_full",
    "accelerate": "accelerate_fsdp2_sharded_llama_tied_w2",
    "HF Trainer": "hf_trainer_fsdp2_sharded_w2",
    "Oumi": "fsdp1_dcp_sharded_nomesh_w2",
    "verl": "verl_fsdp2_w2",
    "torchtitan": "dcp_torchtitan_like_w2",
}


def old_run(zoo: Path, name: str, tmp_path: Path) -> Path:
    """Return the directory as the other system left it."""
    return Path(shutil.copytree(zoo / name, tmp_path / "run", ignore=shutil.ignore_patterns("EXPECTED.safetensors")))


@pytest.mark.parametrize("system", SYSTEMS)
def test_model_and_optimizer_resume_from_a_directory_of_another_system(zoo, tmp_path, system):
    name = SYSTEMS[system]
    state = run_of(name)
    assert load(old_run(zoo, name, tmp_path), state).step == WITH_OPTIMIZER[name]
    check_weights(state.model, name)
    check_optimizer(state.optimizer, state.model, name)


def test_the_first_ckptkit_checkpoint_becomes_the_latest(zoo, tmp_path):
    root = old_run(zoo, "verl_fsdp2_w2", tmp_path)
    before = sorted(path.name for path in root.iterdir())
    state = run_of("verl_fsdp2_w2")
    with CheckpointManager(root) as manager:
        manager.load(state)
        manager.save(5, state)
    assert load(root, state).step == 5
    assert set(before) < {path.name for path in root.iterdir()}


def test_a_ckptkit_step_without_a_record_is_an_error_next_to_another_systems_run(zoo, tmp_path):
    root = old_run(zoo, "verl_fsdp2_w2", tmp_path)
    shutil.copytree(zoo / "dcp_fsdp2_uneven_w4" / "ckpt", root / "step_00000009")  # complete, but without its record
    state = run_of("verl_fsdp2_w2")
    with pytest.raises(IncompleteCheckpointError, match="step_00000009"):
        load(root, state)
    with CheckpointManager(root, start_fresh="if_none_committed") as manager:
        report = manager.load(state)
    assert report is not None and report.step == 4


def test_a_run_does_not_resume_from_weights_alone(zoo, tmp_path, caplog):
    shutil.copytree(zoo / "hf_ref_llama_untied", tmp_path / "base")
    state = run_of("verl_fsdp2_w2")
    with CheckpointManager(tmp_path) as manager:
        assert manager.load(state) is None
    assert "optimizer='skip'" in caplog.text


def test_a_run_resumes_from_its_newest_step_and_not_from_the_final_weights_beside_it(tmp_path):
    model, optimizer = trained()
    for step in (2, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file(model.state_dict(), folder / "model.safetensors")
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    live, other = trained()
    assert load(tmp_path, TrainState(model=live, optimizer=other)).step == 10


def test_an_optimizer_without_moments_is_restored(tmp_path):
    save(tmp_path / "run", optimized(torch.nn.Linear(2, 2)), 3)
    shutil.copytree(tmp_path / "run" / "step_00000003", tmp_path / "copied")
    live = optimized(torch.nn.Linear(2, 2), lr=0.5)
    assert load(tmp_path / "copied", live).step == 3
    assert live.optimizer.param_groups[0]["lr"] == 0.1


def test_a_damaged_foreign_checkpoint_is_an_error_and_not_a_new_start(zoo, tmp_path):
    shutil.copytree(zoo / "broken_missing_shard" / "ckpt", tmp_path / "step-3")
    with pytest.raises(CorruptCheckpointError):
        load(tmp_path, run_of("dcp_fsdp2_uneven_w4"))


def test_what_dcpwriter_saved_resumes_like_any_dcp(tmp_path):
    saved = torch.nn.Linear(4, 4)
    writer = DCPWriter(str(tmp_path / "run" / "step_7"))
    dcp.save({"model": saved.state_dict(), "step": 7}, storage_writer=writer, planner=DCPSavePlanner(), no_dist=True)
    state = TrainState(model=torch.nn.Linear(4, 4))
    assert load(tmp_path / "run", state).step == 7
    assert torch.equal(state.model.weight, saved.weight)
    save(tmp_path / "run", state, step=8)
    assert load(tmp_path / "run", state).step == 8


def test_a_directory_of_other_files_is_a_new_run(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.out").write_bytes(b"x" * 100)
    (tmp_path / "notes.txt").write_text("hello")
    for number in range(2):
        (tmp_path / f"tokens-0000{number}-of-00002.bin").write_bytes(b"x" * 100)
    with CheckpointManager(tmp_path) as manager:
        assert manager.load(optimized(torch.nn.Linear(2, 2))) is None


def adopted(root: str, name: str) -> int | None:
    step: int | None = load(root, run_of(name)).step
    return step


def test_all_ranks_resume_from_the_same_checkpoint(ranks, zoo, tmp_path):
    root = old_run(zoo, "steps_dir_lightrft", tmp_path)
    assert ranks.run(adopted, 2, str(root), "steps_dir_lightrft") == [10, 10]


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 5))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def write(root: Path, files: dict[str, str], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write files as scripts do with torch.save: "m" the model, "o" the optimizer, "mos" both and the step."""
    values = {
        "m": model.state_dict(),
        "o": optimizer.state_dict(),
        "mos": {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7},
    }
    for name, what in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(values[what], root / name)


TORCH_SAVE = {
    "one file": ({"ckpt.pt": "mos"}, 7),
    "a file for each step": ({"checkpoint_5.pt": "m", "checkpoint_10.pt": "mos"}, 7),
    "two files": ({"model.pt": "m", "optimizer.pt": "o"}, None),
    "two files for each step": ({"step-3/model.pt": "m", "step-3/optimizer.pt": "o"}, 3),
}


@pytest.mark.parametrize("grouped", ["as saved", "otherwise"])
@pytest.mark.parametrize("layout", TORCH_SAVE)
def test_numbered_parameters_of_an_optimizer_are_matched_to_names(tmp_path, layout, grouped):
    files, step = TORCH_SAVE[layout]
    model, optimizer = trained()
    write(tmp_path, files, model, optimizer)
    again = net()
    params = list(again.parameters())
    groups = (
        [params] if grouped == "as saved" else [[p for p in params if (p.dim() > 1) is one] for one in (True, False)]
    )
    state = TrainState(model=again, optimizer=torch.optim.AdamW([{"params": group} for group in groups]), rng=False)
    report = load(tmp_path, state)
    assert report.step == step
    assert step is not None or any("records no step" in note for note in report.notes)
    for old, new in zip(model.parameters(), params, strict=True):
        assert torch.equal(old, new)
        assert torch.equal(optimizer.state[old]["exp_avg"], state.optimizer.state[new]["exp_avg"])


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["epoch_1.pt", "epoch_2.pt", "optimizer.pt"], "epoch_1.pt"),
        (["best.pt", "last.pt", "optimizer.pt"], "best.pt"),
        (["model_1.pt", "model_2.pt", "optimizer_0.pt"], "model_2.pt"),
    ],
)
def test_an_optimizer_that_may_belong_to_another_file_is_not_read(tmp_path, files, named):
    write(tmp_path, {name: "o" if name.startswith("optim") else "m" for name in files}, *trained())
    live = optimized(net(), torch.optim.AdamW)
    check_misfit(tmp_path / "run", live, "the whole optimizer", which=str(tmp_path / named))


def test_an_optimizer_beside_the_steps_of_a_script_belongs_to_the_newest(tmp_path):
    write(tmp_path, {"epoch_1.pt": "m", "epoch_2.pt": "m", "optimizer.pt": "o"}, *trained())
    assert "optimizer" in load(tmp_path, optimized(net(), torch.optim.AdamW)).loaded


def test_two_optimizers_beside_a_model_are_refused(tmp_path):
    write(tmp_path, {"net.pt": "m", "optimizer.pt": "o", "optimizer.bin": "o"}, *trained())
    with pytest.raises(CorruptCheckpointError, match=r"optimizer\.bin and optimizer\.pt"):
        load(tmp_path, optimized(net(), torch.optim.AdamW))


def test_an_optimizer_beside_a_file_without_tensors_belongs_to_the_model(tmp_path):
    write(tmp_path, {"net.pt": "m", "optimizer.pt": "o"}, *trained())
    torch.save({"lr": 0.1}, tmp_path / "args.pt")
    live = optimized(net(), torch.optim.AdamW)
    assert "optimizer" in load(tmp_path, live, which=str(tmp_path / "net.pt")).loaded


def test_ambiguous_parameter_numbers_are_refused(tmp_path):
    def alike() -> torch.nn.Module:
        return torch.nn.Sequential(*[torch.nn.Linear(3, 3, bias=False) for _ in range(3)])

    model = alike()
    optimizer = torch.optim.AdamW([{"params": [model[0].weight]}, {"params": [model[1].weight, model[2].weight]}])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    write(tmp_path, {"ckpt.pt": "mos"}, model, optimizer)
    check_misfit(tmp_path, optimized(alike(), torch.optim.AdamW), r"groups of 1, 2; the live optimizer has groups of 3")


NEVER_A_FRESH_START = {
    "weights of a run": ("torchtitan_llama3_names_w2", CheckpointMismatchError, "optimizer='skip'"),
    "a DCP of weights": ("dcp_dtypes_w2", CheckpointMismatchError, "optimizer='skip'"),
    "a DCP that was cut off": ("broken_missing_metadata", IncompleteCheckpointError, ".metadata is missing"),
    "flat parameters": ("fsdp1_local_state_dict_nomesh_w2", UnsupportedFormatError, "save to another directory"),
}


@pytest.mark.parametrize("case", NEVER_A_FRESH_START)
def test_a_checkpoint_that_cannot_be_resumed_from_is_refused(zoo, tmp_path, case):
    name, kind, words = NEVER_A_FRESH_START[case]
    check_misfit(old_run(zoo, name, tmp_path), optimized(net(), torch.optim.AdamW), words, error=kind)


@pytest.mark.parametrize(
    "layout", ["two directories", "files that belong together", "two models in a step", "two runs of Lightning"]
)
def test_several_checkpoints_in_unknown_order_are_refused(zoo, tmp_path, layout):
    model, optimizer = trained()
    if layout == "two directories":
        for name in ("good", "better"):
            shutil.copytree(zoo / "dcp_fsdp2_uneven_w4" / "ckpt", tmp_path / name)
    elif layout == "two models in a step":  # as the training scripts of diffusers write them
        for name in ("unet", "unet_ema"):
            (tmp_path / "checkpoint-3" / name).mkdir(parents=True)
            save_file(model.state_dict(), tmp_path / "checkpoint-3" / name / "diffusion_pytorch_model.safetensors")
        for name in ("optimizer.bin", "scheduler.bin"):
            torch.save(optimizer.state_dict(), tmp_path / "checkpoint-3" / name)
    elif layout == "two runs of Lightning":
        for name in ("version_0", "version_1"):
            folder = tmp_path / "lightning_logs" / name / "checkpoints"
            shutil.copytree(zoo / "lightning_trainer_full", folder, ignore=shutil.ignore_patterns("EXPECTED*"))
    else:
        write(tmp_path, {"net_a.pth": "m", "opt_a.pth": "o"}, model, optimizer)
    with pytest.raises(UsageError, match="Name it"):
        load(tmp_path, TrainState(model=model, optimizer=optimizer))
