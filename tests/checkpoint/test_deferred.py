"""The optimizer state is restored once, after adapters were added."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CheckpointMismatchError, UsageError
from tests.checkpoint.states import bits, optimized


def trained() -> TrainState:
    torch.manual_seed(0)
    state = optimized(nn.ModuleDict({"base": nn.Linear(4, 4)}), torch.optim.AdamW, lr=0.5)
    state.model["base"](torch.ones(2, 4)).sum().backward()
    state.optimizer.step()
    return state


def fresh(*, adapters: bool = False) -> TrainState:
    layers = {"base": nn.Linear(4, 4)} | ({"lora": nn.Linear(4, 4, bias=False)} if adapters else {})
    return optimized(nn.ModuleDict(layers), torch.optim.AdamW)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path) as made:
        made.save(1, trained())
        yield made


def test_a_deferred_optimizer_applies_once_to_a_changed_model(manager: CheckpointManager) -> None:
    source, state = trained(), fresh()
    handle = manager.load(state, optimizer="deferred").deferred
    assert bits(state.model) == bits(source.model)
    assert len(state.optimizer.state) == 0
    state.model["lora"] = nn.Linear(4, 4, bias=False)
    state.optimizer = torch.optim.AdamW(state.model.parameters(), lr=0.1)
    state.model["base"].weight.data.add_(1)  # the model is not loaded again
    moved = bits(state.model)
    report = handle.apply(strict=False)
    assert report.missing == ["optimizer.lora.weight"]
    assert bits(state.model) == moved
    restored, saved = (s.optimizer.state[s.model["base"].weight] for s in (state, source))
    assert bits(restored) == bits(saved)
    assert state.model["lora"].weight not in state.optimizer.state
    assert handle.apply() is None
    assert not handle.pending


def test_applying_a_deferred_optimizer_frees_its_memory(manager: CheckpointManager) -> None:
    state = fresh()
    handle = manager.load(state, optimizer="deferred").deferred
    handle.apply()
    model = weakref.ref(state.model["base"])
    del state
    gc.collect()
    assert model() is None


def test_a_deferred_optimizer_that_does_not_fit_can_be_applied_again(manager: CheckpointManager) -> None:
    state = fresh(adapters=True)
    handle = manager.load(state, optimizer="deferred", strict=False).deferred
    with pytest.raises(CheckpointMismatchError, match=r"lora\.weight"):
        handle.apply()
    assert handle.pending
    assert handle.apply(strict=False) is not None


def test_applying_without_an_optimizer_is_an_error_that_says_what_to_pass(manager: CheckpointManager) -> None:
    state = fresh()
    state.optimizer = None
    handle = manager.load(state, optimizer="deferred").deferred
    with pytest.raises(UsageError, match="no optimizer"):
        handle.apply()


def test_the_optimizer_of_any_url_can_be_deferred(manager: CheckpointManager, tmp_path: Path) -> None:
    state = fresh()
    handle = manager.load(state, f"{tmp_path}/step_00000001", optimizer="deferred").deferred
    handle.apply()
    assert state.optimizer.param_groups[0]["lr"] == 0.5
