"""A manager whose root is another system's directory goes on from what lies there, and then keeps its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import CheckpointManager, TrainState
from ckptkit.errors import CorruptCheckpointError
from tests.checkpoint.test_foreign import WITH_OPTIMIZER, check_optimizer, check_weights, run_of

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
    """The directory as the other system left it."""
    return Path(shutil.copytree(zoo / name, tmp_path / "run", ignore=shutil.ignore_patterns("EXPECTED.safetensors")))


@pytest.mark.parametrize("system", SYSTEMS)
def test_model_and_optimizer_go_on_from_the_old_directory_without_a_word(
    zoo: Path, tmp_path: Path, system: str
) -> None:
    name = SYSTEMS[system]
    state = run_of(name)
    with CheckpointManager(old_run(zoo, name, tmp_path)) as manager:
        report = manager.load(state)
        assert report is not None
        assert report.step == WITH_OPTIMIZER[name]
        check_weights(state.model, name)
        check_optimizer(state.optimizer, state.model, name)


def test_once_a_checkpoint_of_ours_is_there_it_is_the_latest(zoo: Path, tmp_path: Path) -> None:
    root = old_run(zoo, "verl_fsdp2_w2", tmp_path)
    before = sorted(path.name for path in root.iterdir())
    state = run_of("verl_fsdp2_w2")
    with CheckpointManager(root) as manager:
        manager.load(state)
        manager.save(5, state)
        report = manager.load(state)
    assert report is not None
    assert report.step == 5
    assert set(before) < {path.name for path in root.iterdir()}


def test_a_save_of_ours_that_was_never_committed_is_not_gone_on_from(zoo: Path, tmp_path: Path) -> None:
    root = old_run(zoo, "verl_fsdp2_w2", tmp_path)
    shutil.copytree(zoo / "dcp_fsdp2_uneven_w4" / "ckpt", root / "step_00000009")  # whole, and without its record
    state = run_of("verl_fsdp2_w2")
    with CheckpointManager(root) as manager:
        report = manager.load(state)
    assert report is not None
    assert report.step == 4
    (tmp_path / "empty").mkdir()
    shutil.move(root / "step_00000009", tmp_path / "empty")
    with CheckpointManager(tmp_path / "empty") as manager:
        assert manager.load(state) is None


def test_weights_alone_are_no_run_to_go_on_with(
    zoo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(zoo / "hf_ref_llama_untied", tmp_path / "base")
    state = run_of("verl_fsdp2_w2")
    with CheckpointManager(tmp_path) as manager:
        assert manager.load(state) is None
    assert "optimizer='skip'" in caplog.text


def test_a_damaged_checkpoint_is_an_error_and_no_new_start(zoo: Path, tmp_path: Path) -> None:
    shutil.copytree(zoo / "broken_missing_shard" / "ckpt", tmp_path / "step-3")
    with CheckpointManager(tmp_path) as manager, pytest.raises(CorruptCheckpointError):
        manager.load(run_of("dcp_fsdp2_uneven_w4"))


def test_what_is_no_checkpoint_is_nobodys_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.out").write_bytes(b"x" * 100)
    (tmp_path / "notes.txt").write_text("hello")
    model = torch.nn.Linear(2, 2)
    with CheckpointManager(tmp_path) as manager:
        assert manager.load(TrainState(model=model, optimizer=torch.optim.SGD(model.parameters()))) is None


def adopted(root: str, name: str) -> Any:
    state = run_of(name)
    with CheckpointManager(root) as manager:
        report = manager.load(state)
        assert report is not None
        return report.step, manager.load(state, "latest") is not None


def test_all_ranks_go_on_from_the_same(ranks: Any, zoo: Path, tmp_path: Path) -> None:
    root = old_run(zoo, "steps_dir_lightrft", tmp_path)
    answers = ranks.run(adopted, 2, str(root), "steps_dir_lightrft")
    assert answers == [(10, True), (10, True)]
