"""Whole tensors of rank 0 loaded into live models, as `FSDP2Strategy` does for a CheckpointIO."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.errors import CheckpointMismatchError
from ckptkit.integrations.lightning_full import scatter_model


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(6, 2), "head": nn.Linear(2, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def test_a_cast_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    whole = {name: value.to(torch.bfloat16) for name, value in nn.Linear(2, 2).state_dict().items()}
    with caplog.at_level(logging.WARNING):
        scatter_model(model, whole)
    assert "2 tensors" in caplog.text and "weight from torch.bfloat16 to torch.float32" in caplog.text
    assert torch.equal(model.weight, whole["weight"].float())
    caplog.clear()
    scatter_model(model, model.state_dict())
    assert not caplog.text


def different_twins() -> list[Any]:
    model = tied()
    before = model["embed"].weight.clone()
    rank = torch.distributed.get_rank()
    whole = {"embed.weight": torch.zeros(6, 2), "head.weight": torch.ones(6, 2)} if rank == 0 else {}
    with pytest.raises(CheckpointMismatchError, match=r"embed\.weight and head\.weight"):
        scatter_model(model, whole)
    untouched = torch.equal(model["embed"].weight, before)
    scatter_model(model, {name: torch.full((6, 2), torch.nan) for name in whole})
    return [untouched, bool(model["embed"].weight.isnan().all())]


def test_different_weights_for_one_tied_tensor_are_refused_on_every_rank(ranks: Any) -> None:
    assert ranks.run(different_twins, 2) == [[True, True]] * 2
