"""A manager on another system's directory resumes from it, and then saves its own checkpoints there."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.checkpoint import states
from tests.checkpoint.load.test_foreign import copied, run_of
from tests.checkpoint.states import check_misfit, load, optimized, save


def test_a_ckptkit_step_without_a_record_is_an_error_next_to_another_systems_run(zoo, tmp_path):
    root = copied("verl_fsdp2_w2", tmp_path)
    shutil.copytree(zoo / "dcp_fsdp2_uneven_w4" / "ckpt", root / "step_00000009")  # complete, but without its record
    state = run_of("verl_fsdp2_w2")
    check_misfit(root, state, "step_00000009", error=IncompleteCheckpointError)
    with CheckpointManager(root, start_fresh="if_none_committed") as manager:
        report = manager.load(state)
    assert report is not None and report.step == 4


def test_a_run_does_not_resume_from_weights_alone(zoo, tmp_path, caplog):
    shutil.copytree(zoo / "hf_ref_llama_untied", tmp_path / "base")
    state = run_of("verl_fsdp2_w2")
    with CheckpointManager(tmp_path) as manager:
        assert manager.load(state) is None
    assert "optimizer='skip'" in caplog.text


def test_a_run_whose_optimizer_cannot_be_read_is_refused_with_the_reason(tmp_path):
    root = copied("verl_fsdp2_w2", tmp_path)
    (root / "global_step_4" / "actor" / "optim_world_size_2_rank_1.pt").unlink()
    check_misfit(root, run_of("verl_fsdp2_w2"), r"none that could be read: .*optim_world_size_2_rank_1\.pt")


def test_an_optimizer_without_moments_is_restored(tmp_path):
    save(tmp_path / "run", optimized(torch.nn.Linear(2, 2)), 3)
    shutil.copytree(tmp_path / "run" / "step_00000003", tmp_path / "copied")
    live = optimized(torch.nn.Linear(2, 2), lr=0.5)
    assert load(tmp_path / "copied", live).step == 3
    assert live.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("path", [("optimizer",), ("optimizers", "SGD"), ("state", "optimizers", "SGD"), ("opt", 0)])
def test_an_optimizer_without_moments_is_restored_wherever_torch_save_stored_it(tmp_path, path):
    saved, live = optimized(torch.nn.Linear(2, 2)), optimized(torch.nn.Linear(2, 2), lr=0.5)
    value = saved.optimizer.state_dict()
    for key in reversed(path):
        value = [value] if key == 0 else {key: value}
    torch.save({"model": saved.model.state_dict(), **value}, tmp_path / "a.pt")
    load(tmp_path / "run", live, str(tmp_path / "a.pt"))
    assert live.optimizer.param_groups[0]["lr"] == 0.1


def test_what_dcpwriter_saved_resumes_like_any_dcp(tmp_path):
    saved = torch.nn.Linear(4, 4)
    writer = DCPWriter(str(tmp_path / "run" / "step_7"))
    dcp.save({"model": saved.state_dict(), "step": 7}, storage_writer=writer, planner=DCPSavePlanner(), no_dist=True)
    state = TrainState(model=torch.nn.Linear(4, 4))
    assert load(tmp_path / "run", state).step == 7
    assert torch.equal(state.model.weight, saved.weight)
    save(tmp_path / "run", state, step=8)
    assert load(tmp_path / "run", state).step == 8


def adopted(root: str, name: str) -> int | None:
    step: int | None = load(root, run_of(name)).step
    return step


def test_all_ranks_resume_from_the_same_checkpoint(ranks, tmp_path):
    root = copied("steps_dir_lightrft", tmp_path)
    assert ranks.run(adopted, 2, str(root), "steps_dir_lightrft") == [10, 10]


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 5))


def job(steps: int = 1) -> TrainState:
    """Return a small state whose optimizer made some steps."""
    return states.trained(net(), steps=steps)


def write(root: Path, files: dict[str, str], state: TrainState) -> None:
    """Write files as scripts do: "m" the model, "o" the optimizer, "mos" both and the step, "args" settings."""
    model, optimizer = state.model.state_dict(), state.optimizer.state_dict()
    values = {"m": model, "o": optimizer, "mos": {"model": model, "optimizer": optimizer, "step": 7}}
    for name, what in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".safetensors"):
            save_file(model, root / name)
        else:
            torch.save(values.get(what, {"lr": 0.1}), root / name)


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
    write(tmp_path, files, theirs := states.trained(net(), lr=0.125))
    model = net()
    groups = [[*model.parameters()]]
    if grouped == "otherwise":
        groups = [[p for p in groups[0] if (p.dim() > 1) is one] for one in (True, False)]
    mine = states.trained(model, params=[{"params": group} for group in groups], steps=0)
    report = load(tmp_path, mine)
    assert report.step == step
    assert step is not None or any("records no step" in note for note in report.notes)
    states.check_resumed(mine, theirs)
    assert {group["lr"] for group in mine.optimizer.param_groups} == {0.125}


EPOCHS = {"epoch_1.pt": "m", "epoch_2.pt": "m", "optimizer.pt": "o"}
BESIDE: dict[str, tuple[dict[str, str], str, bool]] = {  # files, the one that is loaded, whether it has an optimizer
    "an epoch that is not the newest": (EPOCHS, "epoch_1.pt", False),
    "the newest of the epochs": (EPOCHS, "", True),
    "best and last": ({"best.pt": "m", "last.pt": "m", "optimizer.pt": "o"}, "best.pt", False),
    "another number": ({"model_1.pt": "m", "model_2.pt": "m", "optimizer_0.pt": "o"}, "model_2.pt", False),
    "the number of another": ({"model_1.bin": "m", "model_2.bin": "m", "optimizer_2.bin": "o"}, "model_1.bin", False),
    "a file without tensors": ({"net.pt": "m", "optimizer.pt": "o", "args.pt": "args"}, "net.pt", True),
}
for ending in ("safetensors", "bin", "pt"):
    steps = {f"step_{step}.{ending}": "m" for step in (1, 2)} | {"optimizer.pt": "o", "training_args.bin": "args"}
    BESIDE[f"not the latest {ending}"] = steps, f"step_1.{ending}", False
    BESIDE[f"the latest {ending}"] = steps, f"step_2.{ending}", True


@pytest.mark.parametrize("case", BESIDE)
def test_an_optimizer_beside_weights_is_read_only_if_it_belongs_to_them(tmp_path, case):
    files, name, belongs = BESIDE[case]
    saved = {file: job() for file in files}
    for file, what in files.items():
        write(tmp_path, {file: what}, saved[file])
    (tmp_path / "train.bin").write_bytes(b"\x01" * 100)
    mine, root, which = job(steps=0), tmp_path / "run", str(tmp_path / name)
    if not name:
        root, which = tmp_path, "latest"
    if not belongs:
        check_misfit(root, mine, r'(?s)the whole optimizer.*optimizer="skip"', which=which)
    load(root, mine, which, optimizer="restore" if belongs else "skip")
    assert states.bits(mine.model) == states.bits(saved[name or "epoch_2.pt"].model)
    assert not belongs or states.bits(mine.optimizer) == states.bits(saved["optimizer.pt"].optimizer)


def test_two_optimizers_beside_a_model_are_refused(tmp_path):
    write(tmp_path, {"net.pt": "m", "optimizer.pt": "o", "optimizer.bin": "o"}, job())
    check_misfit(tmp_path, job(), r"optimizer\.bin and optimizer\.pt", error=CorruptCheckpointError)


def test_ambiguous_parameter_numbers_are_refused(tmp_path):
    def alike() -> torch.nn.Module:
        return torch.nn.Sequential(*[torch.nn.Linear(3, 3, bias=False) for _ in range(3)])

    model = alike()
    groups = [{"params": [model[0].weight]}, {"params": [model[1].weight, model[2].weight]}]
    write(tmp_path, {"ckpt.pt": "mos"}, states.trained(model, params=groups))
    check_misfit(tmp_path, optimized(alike(), torch.optim.AdamW), r"groups of 1, 2; the live optimizer has groups of 3")


NEVER_A_FRESH_START = {
    "weights of a run": ("torchtitan_llama3_names_w2", CheckpointMismatchError, "optimizer='skip'"),
    "a DCP of weights": ("dcp_dtypes_w2", CheckpointMismatchError, "optimizer='skip'"),
    "a DCP without one of its files": ("broken_missing_shard", CorruptCheckpointError, "ckpt"),
    "a DCP that was cut off": ("broken_missing_metadata", IncompleteCheckpointError, ".metadata is missing"),
    "flat parameters": ("fsdp1_local_state_dict_nomesh_w2", UnsupportedFormatError, "save to another directory"),
}


@pytest.mark.parametrize("case", NEVER_A_FRESH_START)
def test_a_checkpoint_that_cannot_be_resumed_from_is_refused(tmp_path, case):
    name, kind, words = NEVER_A_FRESH_START[case]
    check_misfit(copied(name, tmp_path), optimized(net(), torch.optim.AdamW), words, error=kind)


def two_models_in_a_step(root: Path, zoo: Path) -> None:
    """Write what the training scripts of diffusers write."""
    for name in ("unet", "unet_ema"):
        write(root, {f"checkpoint-3/{name}/diffusion_pytorch_model.safetensors": "m"}, job())
    write(root, {f"checkpoint-3/{name}.bin": "o" for name in ("optimizer", "scheduler")}, job())


def copies(root: Path, source: Path, *names: str) -> None:
    for name in names:
        shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("EXPECTED*"))


UNORDERED: dict[str, Callable[[Path, Path], Any]] = {
    "two directories": lambda root, zoo: copies(root, zoo / "dcp_fsdp2_uneven_w4" / "ckpt", "good", "better"),
    "files that belong together": lambda root, zoo: write(root, {"net_a.pth": "m", "opt_a.pth": "o"}, job()),
    "two models in a step": two_models_in_a_step,
    "two runs of Lightning": lambda root, zoo: copies(
        root / "lightning_logs", zoo / "lightning_trainer_full", "version_0/checkpoints", "version_1/checkpoints"
    ),
}


@pytest.mark.parametrize("layout", UNORDERED)
def test_several_checkpoints_in_unknown_order_are_refused(zoo, tmp_path, layout):
    UNORDERED[layout](tmp_path, zoo)
    check_misfit(tmp_path, job(), "Name it", error=UsageError)
