"""torchao's optimizer states on several ranks: exact on as many, resharded if blocks allow it, otherwise refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptkit import CheckpointManager, DCPLoadPlanner, DCPReader, DCPWriter, TrainState, convert
from ckptkit.cli.main import main
from ckptkit.errors import CkptkitError

TYPES = ("sharded", "full", "local")


def made(name: str, *, rows: int = 384, columns: int = 64, seed: int = 0, steps: int = 2) -> tuple[nn.Module, Any]:
    """Return a model under fully_shard and an optimizer of torchao after some steps."""
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
    """Return the elements of a tensor, or of its parts, gathered from all ranks."""
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
def test_quantized_optimizer_states_are_restored_exactly_on_the_same_number_of_ranks(
    ranks: Any, tmp_path: Path, name: str, kind: str, steps: int
) -> None:
    for number in (1, 2):
        url = str(tmp_path / str(number))
        saved = ranks.run(save, number, url, name, kind, {})
        assert "OptimState" in str(saved[0][2]), saved[0]
        assert ranks.run(load, number, url, name, steps, {}) == saved


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_quantized_optimizer_states_reshard_if_no_block_is_split(
    ranks: Any, tmp_path: Path, name: str, kind: str
) -> None:
    saved = ranks.run(save, 2, str(tmp_path), name, kind, {})
    for number in (1, 3):
        found = ranks.run(load, number, str(tmp_path), name, 0, {})
        assert found[0] == saved[0], number


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_a_number_of_ranks_that_would_split_a_block_is_refused(ranks: Any, tmp_path: Path, name: str) -> None:
    saved = ranks.run(save, 2, str(tmp_path), name, "sharded", {"rows": 392})
    assert "OptimState" in str(saved[0][2])
    for said in ranks.run(load, 3, str(tmp_path), name, 0, {"rows": 392}):
        assert "1.weight.exp_avg" in said and "[131, 64]" in said and "whole blocks" in said


def test_ranks_whose_shards_are_not_all_quantized_are_refused_by_name(ranks: Any, tmp_path: Path) -> None:
    """torchao quantizes from 4,096 elements on: with 23 rows of 512, the last of three ranks has fewer."""
    options = {"rows": 23, "columns": 512}
    for said in ranks.run(save, 3, str(tmp_path), "AdamW8bit", "sharded", options):
        assert "optimizer.state.1.weight.exp_avg and 1 more" in said and "a plain tensor" in said
    assert not list(tmp_path.glob("step_*"))


def float8(seed: int) -> nn.Module:
    """Return a model with float8 all-gathers under fully_shard: its shards have a class of torchao."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    assert type(model[0].weight._local_tensor).__name__ == "WeightWithDynamicFloat8CastTensor"
    return model


def weights(model: nn.Module) -> list[torch.Tensor]:
    locals_ = [p._local_tensor for p in model.parameters()]
    return [getattr(local, "_tensor", local).detach().clone() for local in locals_]


def float8_round_trip(url: str, kind: str) -> Any:
    source, live = float8(0), float8(1)
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (source, live))
    for p in source.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    live[0].weight._local_tensor._precomputed_scale = torch.ones(())
    with CheckpointManager(url, state_dict_type=kind) as manager:
        manager.save(1, TrainState(model=source, optimizer=optimizer))
        manager.load(TrainState(model=live, optimizer=other))
    assert live[0].weight._local_tensor._precomputed_scale is None  # it belonged to other weights
    assert all(map(torch.equal, weights(live), weights(source)))
    assert all(values(other.state[p]["exp_avg"]) == values(optimizer.state[q]["exp_avg"])
               for p, q in zip(live.parameters(), source.parameters(), strict=True))  # fmt: skip
    return [p.full_tensor().detach().tolist() for p in map(plain, source.parameters())]


def plain(parameter: Any) -> DTensor:
    local = getattr(parameter._local_tensor, "_tensor", parameter._local_tensor)
    mesh = parameter.device_mesh
    return DTensor.from_local(local, mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride())


@pytest.mark.parametrize("kind", TYPES)
def test_weights_gathered_in_float8_are_saved_as_their_values(ranks: Any, tmp_path: Path, kind: str) -> None:
    saved = ranks.run(float8_round_trip, 2, str(tmp_path / "run"), kind)[0]
    with CheckpointManager(tmp_path / "run") as manager:
        if kind != "local":
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            manager.load(TrainState(model=model))
            assert [p.tolist() for p in model.parameters()] == saved
    convert(str(tmp_path / "run"), str(tmp_path / "hf"))
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found["0.weight"].tolist() == saved[0]


def float8_dcp(url: str) -> None:
    source, live = float8(0), float8(1)
    dcp.save({"model": source.state_dict()}, storage_writer=DCPWriter(url))
    for reader in (DCPReader(url), dcp.FileSystemReader(url)):
        state = {"model": live.state_dict()}
        dcp.load(state, storage_reader=reader)
        live.load_state_dict(state["model"])
        assert all(map(torch.equal, weights(live), weights(source)))
        live = float8(2)


def test_dcp_writer_saves_weights_gathered_in_float8_for_any_reader(ranks: Any, tmp_path: Path) -> None:
    ranks.run(float8_dcp, 2, str(tmp_path))


def command(*args: str) -> Any:
    with pytest.raises(SystemExit) as done:
        main(list(args))
    return done.value.code


@pytest.mark.parametrize("kind", TYPES)
def test_commands_treat_the_parts_of_a_subclass_as_tensors(ranks: Any, tmp_path: Path, kind: str) -> None:
    source = str(tmp_path / "run" / "step_00000001")
    saved = ranks.run(save, 2, str(tmp_path / "run"), "AdamW8bit", kind, {})[0]
    assert command("verify", source) == command("inspect", source, "--tensors", "*exp_avg::scale") == 0
    copied, sharded, local = (str(tmp_path / name / "step_00000001") for name in ("copy", "sharded", "local"))
    assert command("copy", source, copied) == 0
    assert command("reshard", source, sharded, "--world-size", "3") == 0
    assert command("reshard", source, local, "--world-size", "3", "--type", "local") == 0
    for url in (copied, sharded, local):
        assert command("verify", url) == command("diff", source, url) == 0
    for root in ("sharded", "local"):
        assert ranks.run(load, 3, str(tmp_path / root), "AdamW8bit", 0, {})[0] == saved, root


def save_a_sharded_4bit_layer(path: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes as bnb

        model = nn.Sequential(bnb.nn.Linear4bit(64, 64, bias=False, quant_storage=torch.float32), nn.Linear(64, 64))
        model.to("cpu")
        model[0](torch.randn(1, 64))  # the first use quantizes
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with CheckpointManager(path) as manager, pytest.raises(CkptkitError) as found:
        manager.save(1, TrainState(model=model))
    return str(found.value)


def test_a_4bit_weight_sharded_by_fsdp2_is_refused_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    for message in ranks.run(save_a_sharded_4bit_layer, 2, str(tmp_path / "run")):
        assert (
            "model.0.weight holds packed 4-bit values of bitsandbytes. Under FSDP2, their scales (quant_state)"
            in message
        )
    assert not list(tmp_path.glob("run/step_*"))


def dcp_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save_by_torch(url: str, name: str, options: dict[str, int], by_ours: bool = False) -> Any:
    model, optimizer = made(name, **options)
    dcp.save(dcp_state(model, optimizer), storage_writer=(DCPWriter if by_ours else dcp.FileSystemWriter)(url))
    return state_of(model, optimizer)


def load_by_dcp(url: str, name: str, reader: str, options: dict[str, int]) -> Any:
    model, optimizer = made(name, seed=5, **options)
    state = dcp_state(model, optimizer)
    before = state_of(model, optimizer)
    by_torch = reader == "torch's"
    try:
        dcp.load(
            state,
            storage_reader=(dcp.FileSystemReader if by_torch else DCPReader)(url),
            planner=DCPLoadPlanner() if reader == "our planner's" else None,
        )
    except CheckpointException as error:
        assert state_of(model, optimizer) == before
        return str(error)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    model.load_state_dict(state["model"])
    return state_of(model, optimizer)


def load_foreign(url: str, name: str, steps: int, options: dict[str, int]) -> Any:
    model, optimizer = made(name, seed=5, steps=steps, **options)
    with CheckpointManager(f"{url}-run") as manager:
        try:
            report = manager.load(TrainState(model=model, optimizer=optimizer, rng=False), url)
        except CkptkitError as error:
            return str(error)
    assert report is not None and not (report.missing or report.unexpected)
    return state_of(model, optimizer)


QUANTIZED = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]
WIDE = {"columns": 384}  # both weights are quantized on one, two and three ranks


@pytest.mark.parametrize("by_ours", [False, True])
@pytest.mark.parametrize("name", QUANTIZED)
def test_shards_that_torch_wrote_as_records_of_a_class_load_on_any_number_of_ranks(
    ranks: Any, tmp_path: Path, name: str, by_ours: bool
) -> None:
    """`DCPWriter` writes such shards like torch."""
    url = str(tmp_path / "theirs")
    saved = ranks.run(save_by_torch, 2, url, name, WIDE, by_ours)
    assert "OptimState" in str(saved[0][2])
    for number in (1, 2, 3):
        for reader in ("ours", "our planner's"):
            assert ranks.run(load_by_dcp, number, url, name, reader, WIDE)[0] == saved[0], (number, reader)
        for steps in (0, 1):
            assert ranks.run(load_foreign, number, url, name, steps, WIDE)[0] == saved[0], (number, steps)
    assert ranks.run(load_by_dcp, 2, url, name, "torch's", WIDE) == saved
    assert command("verify", url) == 0
    for kind in ("sharded", "local"):
        run = tmp_path / f"resharded-{kind}"
        assert command("reshard", url, str(run / "step_00000001"), "--world-size", "3", "--type", kind) == 0
        assert command("verify", str(run / "step_00000001")) == 0
        assert ranks.run(load, 3, str(run), name, 0, WIDE)[0] == saved[0], kind
    assert command("convert", url, str(tmp_path / "hf")) == 0
    weight = load_file(tmp_path / "hf" / "model.safetensors")["1.weight"]
    assert weight.view(torch.uint8).tolist() == saved[0][0][2]


@pytest.mark.parametrize("name", QUANTIZED)
def test_dcp_reader_fills_the_parts_of_a_class_that_ckptkit_saved(ranks: Any, tmp_path: Path, name: str) -> None:
    saved = ranks.run(save, 2, str(tmp_path), name, "sharded", WIDE)
    for number in (1, 3):
        found = ranks.run(load_tensors, number, str(tmp_path / "step_00000001"), name)
        assert found[0] == saved[0], number


def load_tensors(url: str, name: str) -> Any:
    model, optimizer = made(name, seed=5, **WIDE)
    state = dcp_state(model, optimizer)
    state["optimizer"] = {"state": state["optimizer"]["state"]}
    dcp.load(state, storage_reader=DCPReader(url))
    model.load_state_dict(state["model"])
    return state_of(model, optimizer)


@pytest.mark.parametrize("reader", ["ours", "our planner's"])
def test_another_class_than_the_saved_one_is_refused_by_name(ranks: Any, tmp_path: Path, reader: str) -> None:
    ranks.run(save_by_torch, 2, str(tmp_path), "AdamW8bit", {})
    for said in ranks.run(load_by_dcp, 2, str(tmp_path), "AdamWFp8", reader, {}):
        assert "1.weight.exp_avg is OptimStateFp8" in said and "but OptimState8bit" in said


@pytest.mark.parametrize("name", QUANTIZED)
def test_shards_of_a_class_that_would_be_split_are_refused_by_name(ranks: Any, tmp_path: Path, name: str) -> None:
    options = {"rows": 392}
    ranks.run(save_by_torch, 2, str(tmp_path), name, options)
    for found in (
        *ranks.run(load_by_dcp, 3, str(tmp_path), name, "ours", options),
        *ranks.run(load_foreign, 3, str(tmp_path), name, 0, options),
    ):
        assert "1.weight.exp_avg" in found, found
