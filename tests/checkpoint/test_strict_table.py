"""Every way in which a part of a checkpoint can differ, with and without `strict`, for model, optimizer and extras."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CheckpointMismatchError


class Shelf:
    """Extra state with one tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["value"]


def made(fault: str = "", section: str = "") -> TrainState:
    """Return the state that was saved, or one that differs from it in one way."""
    model = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["a"].weight.data.fill_(1.0)
    extra: dict[str, Any] = {"shelf": Shelf(torch.ones(2)), "note": 1}
    if section == "model" and fault == "missing":
        model["new"] = nn.Linear(2, 2)
    elif section == "model" and fault == "unexpected":
        del model["b"]
    elif section == "model" and fault == "shape":
        model["a"] = nn.Linear(2, 5, bias=False)
    elif section == "model" and fault == "dtype":
        model["a"].to(torch.float64)
    held = list(model.parameters())
    if section == "model":
        return TrainState(model=model, extra=extra)
    if section == "optimizer" and fault == "missing":
        model["new"] = nn.Linear(2, 2, bias=False)
        held = list(model.parameters())
    elif section == "optimizer" and fault == "unexpected":
        held = held[:1]
    elif section == "optimizer" and fault == "shape":
        model["a"] = nn.Linear(2, 5, bias=False)
        held = list(model.parameters())
    elif section == "optimizer" and fault == "dtype":
        model = model.to(torch.bfloat16)
        held = list(model.parameters())
    optimizer = torch.optim.AdamW(held, lr=0.1)
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    if section == "extra":
        change = {
            "missing": {"more": 5},
            "unexpected": {"note": None},
            "shape": {"shelf": Shelf(torch.zeros(7))},
            "dtype": {"shelf": Shelf(torch.zeros(2, dtype=torch.int64))},
        }[fault]
        extra.update(change)
        if fault == "unexpected":
            del extra["note"]
    return TrainState(model=model, optimizer=optimizer, extra=extra)


TABLE = [  # section, difference, result with strict, result without
    ("model", "missing", "refused", "model.new.weight is reported"),
    ("model", "unexpected", "refused", "model.b.weight is reported"),
    ("model", "shape", "refused", "refused"),
    ("model", "dtype", "refused", "refused"),
    ("optimizer", "missing", "refused", "optimizer.new.weight is reported"),
    ("optimizer", "unexpected", "refused", "optimizer.b.weight is reported"),
    ("optimizer", "shape", "refused", "refused"),
    ("optimizer", "dtype", "as saved", "as saved"),  # fp32 moments of a low-precision parameter stay fp32
    ("extra", "missing", "refused", "extra.extra.more is reported"),
    ("extra", "unexpected", "returned", "returned"),
    ("extra", "shape", "as saved", "as saved"),
    ("extra", "dtype", "as saved", "as saved"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    with CheckpointManager(root) as manager:
        manager.save(1, made())
    return root


def tensors(state: TrainState) -> list[torch.Tensor]:
    optimizer = state.optimizer.state.values() if state.optimizer else ()
    return copy.deepcopy([*state.model.state_dict().values(), *(v for s in optimizer for v in s.values())])


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "lenient"])
@pytest.mark.parametrize(("section", "fault", "with_strict", "without"), TABLE, ids=lambda value: str(value)[:12])
def test_every_difference_is_refused_or_reported_as_documented(
    saved: Path, section: str, fault: str, with_strict: str, without: str, strict: bool
) -> None:
    expected = with_strict if strict else without
    state = made(fault, section)
    before = tensors(state)
    which: dict[str, Any] = {"model": "skip"} if section == "optimizer" else {}
    with CheckpointManager(saved) as manager:
        if expected == "refused":
            with pytest.raises(CheckpointMismatchError, match=section):
                manager.load(state, strict=strict, **which)
            assert alike(tensors(state), before)
            return
        report = manager.load(state, strict=strict, **which)
    assert report is not None
    if expected.endswith("is reported"):
        assert expected.removesuffix(" is reported") in [*report.missing, *report.unexpected]
    elif expected == "returned":
        assert report.extra == {"note": 1}
    elif section == "optimizer":
        assert all(s["exp_avg"].dtype == torch.float32 for s in state.optimizer.state.values())
    else:
        assert torch.equal(state.extra["shelf"].value, torch.ones(2))
        assert state.extra["shelf"].value.dtype == torch.float32
