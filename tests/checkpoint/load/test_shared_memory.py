"""Tied weights and tensors that share memory: different saved values are refused."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckptkit import TrainState
from ckptkit.errors import CheckpointMismatchError
from ckptkit.fsdp.hf_load import load_hf
from tests.checkpoint import states
from tests.ranks import on_ranks

KINDS = ["sharded", "full", "local", "dcp", "safetensors"]


def net(tied: bool = True) -> Any:
    model: Any = nn.Sequential(OrderedDict(embed=nn.Embedding(6, 2), head=nn.Linear(2, 6, bias=False)))
    if tied:
        model.head.weight = model.embed.weight
    return model


def saved(folder: Path, model: nn.Module, kind: str) -> str:
    """Save the model, and return the URL to load from."""
    if kind == "dcp":
        dcp.save({"model": model.state_dict()}, checkpoint_id=str(folder / "plain"))
    elif kind == "safetensors":
        (folder / "plain").mkdir()
        save_file({name: t.clone() for name, t in model.state_dict().items()}, folder / "plain/model.safetensors")
    else:
        states.save(folder / "plain", TrainState(model=model), state_dict_type=kind)
        return str(folder / "plain/step_00000001")
    return str(folder / "plain")


def load(folder: Path, url: str, model: nn.Module, **options: Any) -> Any:
    return states.load(folder / "live", TrainState(model=model, rng=False), url, **options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"atomic": True}], ids=["", "lenient", "atomic"])
def test_different_weights_for_one_tied_tensor_are_refused_and_nothing_changes(tmp_path, kind, options):
    source, model = net(tied=False), net()
    url = saved(tmp_path, source, kind)
    said = r"model\.embed\.weight and model\.head\.weight"
    states.check_misfit(tmp_path / "live", TrainState(model=model, rng=False), said, which=url, **options)
    load(tmp_path, url, model, exclude=["embed.*"])  # the workaround that the error names
    assert torch.equal(model.embed.weight, source.head.weight)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("live", ["tied", "untied", "in another order"])
def test_equal_weights_load_into_a_model_that_ties_them_and_into_one_that_does_not(tmp_path, kind, live):
    source, model = net(), net(live == "tied")
    if live == "in another order":
        model = nn.ModuleDict({"head": model.head, "embed": model.embed})
    load(tmp_path, saved(tmp_path, source, kind), model)
    assert states.bits(model) == {f"{name}.weight": states.bits(source.embed.weight) for name in ("embed", "head")}


def views(seed: int) -> nn.Module:
    """Return a fused weight, and a view of a part of it under another name."""
    torch.manual_seed(seed)
    model = nn.Module()
    model.fused = nn.Parameter(torch.randn(6, 2))
    model.query = nn.Parameter(model.fused.data[2:4])
    return model


def test_tensors_that_share_a_part_of_their_memory_load_if_they_agree_there(tmp_path, kind):
    source, model = views(0), views(1)
    url = saved(tmp_path, source, kind)
    load(tmp_path, url, model)
    assert torch.equal(model.fused, source.fused)
    source.query = nn.Parameter(torch.zeros(2, 2))
    (tmp_path / "other").mkdir()
    url = saved(tmp_path / "other", source, kind)
    with pytest.raises(CheckpointMismatchError, match=r"model\.fused and model\.query"):
        load(tmp_path, url, model)
    assert torch.equal(model.fused[2:4], model.query)


def nearly_tied() -> tuple[Any, Any]:
    """Return weights whose last row differs, so that only the last rank reads the difference, and a sharded model."""
    source, model = net(tied=False), net()
    with torch.no_grad():
        source.embed.weight.copy_(torch.arange(12.0).view(6, 2))
        source.head.weight.copy_(source.embed.weight)
        source.head.weight[5] = 0
    fully_shard(model)
    return source, model


@pytest.mark.parametrize("kind", ["sharded", "full", "local", "dcp"])
@on_ranks(2)
def test_every_rank_refuses_tied_weights_that_differ_on_one_rank(tmp_path, kind):
    source, model = nearly_tied()
    fully_shard(source)
    if kind == "dcp":
        dcp.save({"model": source.state_dict()}, checkpoint_id=f"{tmp_path}/step_00000001")
    else:
        states.save(tmp_path, TrainState(model=source), state_dict_type=kind)
    live = TrainState(model=model, rng=False)
    states.check_misfit(tmp_path / "live", live, "share memory", which=f"{tmp_path}/step_00000001")
    dist.barrier()


@on_ranks(2)
def test_load_hf_refuses_different_weights_for_one_tied_tensor_on_every_rank(tmp_path):
    source, model = nearly_tied()
    if dist.get_rank() == 0:
        save_file(source.state_dict(), f"{tmp_path}/model.safetensors")
    dist.barrier()
    before = model.embed.weight.to_local().clone()
    with pytest.raises(CheckpointMismatchError, match=r"embed\.weight and model\.head\.weight"):
        load_hf(model, str(tmp_path))
    assert torch.equal(model.embed.weight.to_local(), before)
    dist.barrier()
    if dist.get_rank() == 0:
        save_file({"embed.weight": torch.ones(6, 2), "head.weight": torch.ones(6, 2)}, f"{tmp_path}/model.safetensors")
    dist.barrier()
    assert load_hf(model, str(tmp_path)).loaded == ("embed.weight", "head.weight")


class Seen(nn.Module):
    """Three buffers of one memory: plain, as its conjugate, and negated."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("z", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("conjugate", self.z.conj())
        self.register_buffer("negative", self.z.conj().imag)


def test_a_buffer_and_its_conjugate_view_load_and_a_different_value_is_refused(tmp_path, kind):
    model, live = Seen(), Seen()
    load(tmp_path, saved(tmp_path, model, kind), live)
    for name, buffer in model.named_buffers():
        assert torch.equal(live.get_buffer(name), buffer)
    model.conjugate = model.z.clone()
    with pytest.raises(CheckpointMismatchError, match=r"model\.z and model\.conjugate"):
        load(tmp_path, saved(tmp_path / "other", model, kind), live)
