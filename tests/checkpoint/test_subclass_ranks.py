"""States of torchao's optimizers on several ranks: bit-exact on as many, resharded where blocks allow, else refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptkit import CheckpointManager, TrainState
from ckptkit.errors import CkptkitError

TYPES = ("sharded", "full", "local")


def made(name: str, *, rows: int = 384, columns: int = 64, seed: int = 0, steps: int = 2) -> tuple[nn.Module, Any]:
    """Return a model under fully_shard with an optimizer of torchao that has taken some steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.optim

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, columns), nn.Linear(columns, rows))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = getattr(torchao.optim, name)(model.parameters(), lr=1e-3)
    return stepped(model, optimizer, steps), optimizer


def stepped(model: nn.Module, optimizer: Any, steps: int) -> nn.Module:
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(steps):
            torch.manual_seed(100 + seed)
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def values(tensor: Any) -> Any:
    """Return the elements of a tensor, or of those that it is made of, gathered from all ranks."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if hasattr(local, "dequantize") and type(local) is not torch.Tensor:
        local = local.dequantize()
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, local.detach().clone())
    whole = torch.cat([part for part in found if part is not None]) if isinstance(tensor, DTensor) else local
    return whole.detach().view(torch.uint8).tolist() if whole.dim() else whole.item()


def state_of(model: nn.Module, optimizer: Any) -> Any:
    moments = {
        name: {key: values(value) for key, value in optimizer.state[p].items()} for name, p in model.named_parameters()
    }
    classes = {
        name: {key: type(getattr(value, "_local_tensor", value)).__name__ for key, value in optimizer.state[p].items()}
        for name, p in model.named_parameters()
    }
    return [values(p) for p in model.parameters()], moments, classes


def save(url: str, name: str, kind: str, options: dict[str, int]) -> Any:
    model, optimizer = made(name, **options)
    with CheckpointManager(url, state_dict_type=kind) as manager:
        try:
            manager.save(1, TrainState(model=model, optimizer=optimizer))
        except CkptkitError as error:
            return str(error)
    return state_of(model, optimizer)


def load(url: str, name: str, steps: int, options: dict[str, int]) -> Any:
    model, optimizer = made(name, seed=5, steps=steps, **options)
    with CheckpointManager(url) as manager:
        try:
            report = manager.load(TrainState(model=model, optimizer=optimizer))
        except CkptkitError as error:
            return str(error)
    assert report is not None and not (report.missing or report.unexpected or report.skipped)
    return state_of(model, optimizer)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_states_come_back_exactly_on_as_many_ranks(
    ranks: Any, tmp_path: Path, name: str, kind: str, steps: int
) -> None:
    for number in (1, 2):
        url = str(tmp_path / str(number))
        saved = ranks.run(save, number, url, name, kind, {})
        assert "OptimState" in str(saved[0][2]), saved[0]
        assert ranks.run(load, number, url, name, steps, {}) == saved


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_states_are_resharded_where_no_block_is_split(ranks: Any, tmp_path: Path, name: str, kind: str) -> None:
    saved = ranks.run(save, 2, str(tmp_path), name, kind, {})
    for number in (1, 3):
        found = ranks.run(load, number, str(tmp_path), name, 0, {})
        assert found[0] == saved[0], number


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_ranks_that_would_split_a_block_are_refused_with_numbers(ranks: Any, tmp_path: Path, name: str) -> None:
    saved = ranks.run(save, 2, str(tmp_path), name, "sharded", {"rows": 392})
    assert "OptimState" in str(saved[0][2])
    for said in ranks.run(load, 3, str(tmp_path), name, 0, {"rows": 392}):
        assert "1.weight.exp_avg" in said and "[131, 64]" in said and "whole blocks" in said


def test_ranks_whose_shards_are_not_all_quantized_are_refused_by_name(ranks: Any, tmp_path: Path) -> None:
    """torchao quantizes from 4,096 elements: with 23 rows of 512, the last of three ranks has fewer."""
    options = {"rows": 23, "columns": 512}
    for said in ranks.run(save, 3, str(tmp_path), "AdamW8bit", "sharded", options):
        assert "optimizer.state.1.weight.exp_avg and 1 more" in said and "a plain tensor" in said
    assert not list(tmp_path.glob("step_*"))
