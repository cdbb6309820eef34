"""State in a checkpoint that a load does not restore is listed, and is an error with strict=True."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit import CheckpointManager, TrainState, reshard, verify
from ckptkit.errors import SaveError, UnsupportedFormatError
from tests.checkpoint.states import check_misfit, load, save

# Written by an early version with torchao's AdamW8bit: its moments were stored as objects, which no load accepted.
EARLY = Path(__file__).with_name("states_as_objects")


@pytest.fixture
def early(tmp_path: Path) -> Path:
    return shutil.copytree(EARLY, tmp_path / "run")


def fresh() -> TrainState:
    model = nn.Linear(64, 64, bias=False)
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), rng=False)


def test_a_load_names_optimizer_states_that_it_cannot_restore(early: Path) -> None:
    said = r"unexpected: weight\.exp_avg \(was stored.*weight\.exp_avg_sq"
    check_misfit(early, fresh(), said)


def test_without_strict_the_report_lists_lost_optimizer_states(early: Path) -> None:
    lost = [name.partition(" ")[0] for name in load(early, fresh(), strict=False).unexpected]
    assert lost == ["optimizer.weight.exp_avg", "optimizer.weight.exp_avg_sq"]


def test_verify_names_lost_optimizer_states_and_reshard_refuses_them(early: Path, tmp_path: Path) -> None:
    url = str(early / "step_00000001")
    report = verify(url)
    assert report.ok
    assert list(report.uninterpreted) == ["optimizer.state.weight.exp_avg", "optimizer.state.weight.exp_avg_sq"]
    with pytest.raises(UnsupportedFormatError, match=r"optimizer\.state\.weight\.exp_avg was stored"):
        reshard(url, str(tmp_path / "out"), world_size=2)
    assert not (tmp_path / "out").exists()


class Packed(nn.Module):
    """Its state dict has a tensor that its load_state_dict rejects."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_state_dict_post_hook(self.pack)

    @staticmethod
    def pack(module: Packed, state: dict[str, Any], prefix: str, meta: Mapping[str, Any]) -> None:
        state[prefix + "scale"] = module.w.detach().abs().max().reshape(1) * 2


class Taking(Packed):
    """Accepts in load_state_dict what its hook adds."""

    scale = 0.0

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "scale" in state:
            self.scale = state.pop(prefix + "scale").item()
        super()._load_from_state_dict(state, prefix, *rest)


class Versioned(nn.Linear):
    """Adds state other than tensors."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_post_hook(lambda module, state, prefix, meta: state.update({f"{prefix}version": 3}))


def test_state_dict_hook_output_that_no_load_accepts_is_refused(tmp_path: Path, kind: str) -> None:
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        before = sorted(tmp_path.rglob("*"))
        for model, name in ((Packed(), "scale"), (nn.Sequential(Versioned()), "0.version")):
            with pytest.raises(SaveError, match=rf"model: a state_dict hook adds {name}, which a load could not"):
                manager.save(1, TrainState(model=model, rng=False))
        assert sorted(tmp_path.rglob("*")) == before
        source, live = Taking(), Taking()
        source.w.data.fill_(3.0)
        manager.save(1, TrainState(model=source, rng=False))
        assert not manager.load(TrainState(model=live, rng=False)).unexpected
        assert torch.equal(live.w, source.w) and live.scale == 6


def test_a_load_names_keys_that_the_modules_own_load_rejects(tmp_path: Path) -> None:
    root = save(tmp_path, TrainState(model=Taking(), rng=False))
    check_misfit(root, TrainState(model=Packed(), rng=False), r"scale .*does not accept it")
