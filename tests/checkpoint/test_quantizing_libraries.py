"""Tensors of torchao and bitsandbytes: saved and loaded exactly, or refused by name before anything is written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from ckptkit import CheckpointManager, DCPReader, DCPSavePlanner, DCPWriter, TrainState
from ckptkit.errors import CheckpointMismatchError, SaveError

pytestmark = pytest.mark.filterwarnings("ignore")  # both libraries use deprecated functions of torch
WIDE = 4096  # bitsandbytes quantizes the states of parameters from this many elements on

Made = tuple[nn.Module, Any]


@pytest.fixture(scope="module", autouse=True)
def libraries() -> Iterator[None]:
    """Import both libraries here and not at collection, because it takes seconds. A missing one is an error."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        import bitsandbytes
        import torchao.quantization

        assert bitsandbytes and torchao
        yield


def net(rows: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, rows))


def quantized(name: str, **options: Any) -> Callable[[], Made]:
    def made() -> Made:
        import torchao.quantization as torchao

        model = net()
        torchao.quantize_(model[:1], getattr(torchao, name)(**options))
        return model, None

    return made


def float8_all_gather() -> Made:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = net()
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    return model, None


def mx(dtype: torch.dtype) -> Callable[[], Made]:
    def made() -> Made:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        model = net()
        model[0].weight = nn.Parameter(MXTensor.to_mx(model[0].weight.detach(), dtype, 32), requires_grad=False)
        return model, None

    return made


def nvfp4() -> Made:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    model = net()
    model[0].weight = nn.Parameter(NVFP4Tensor.to_nvfp4(model[0].weight.detach()), requires_grad=False)
    return model, None


def of_torchao(name: str) -> Callable[[], Made]:
    def made() -> Made:
        import torchao.optim

        model = net(WIDE)
        return model, getattr(torchao.optim, name)(model.parameters(), lr=1e-3)

    return made


def of_bitsandbytes(name: str, **options: Any) -> Callable[[], Made]:
    def made() -> Made:
        import bitsandbytes.optim

        model = net(WIDE)
        return model, getattr(bitsandbytes.optim, name)(model.parameters(), lr=1e-3, **options)

    return made


def layer_of_bitsandbytes(name: str, **options: Any) -> Callable[[], Made]:
    def made() -> Made:
        import bitsandbytes.nn

        return nn.Sequential(getattr(bitsandbytes.nn, name)(64, 64, **options)).to("cpu"), None

    return made


def float8_weights() -> Made:
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(16, 16).to(torch.float8_e4m3fn), requires_grad=False)
    model.register_buffer("scale", torch.randn(3).to(torch.float8_e8m0fnu))
    return model, None


CASES: dict[str, tuple[Callable[[], Made], str]] = {  # factory, and the text of a manager's refusal ("": exact)
    "int8 weights": (quantized("Int8WeightOnlyConfig"), ""),
    "int8 weights and activations": (quantized("Int8DynamicActivationInt8WeightConfig"), ""),
    "float8 weights of torchao": (quantized("Float8WeightOnlyConfig"), ""),
    "int4 weights": (quantized("IntxWeightOnlyConfig", weight_dtype=torch.int4), ""),
    "float8 all-gather": (float8_all_gather, ""),
    "float8 weights": (float8_weights, ""),
    "mxfp8 weights": (mx(torch.float8_e4m3fn), ""),
    "mxfp4 weights": (mx(torch.float4_e2m1fn_x2), ""),
    "nvfp4 weights": (nvfp4, ""),
    "AdamW8bit": (of_torchao("AdamW8bit"), ""),
    "AdamW4bit": (of_torchao("AdamW4bit"), ""),
    "AdamWFp8": (of_torchao("AdamWFp8"), ""),
    "8-bit AdamW of bitsandbytes": (of_bitsandbytes("AdamW8bit"), ""),
    "8-bit Lion of bitsandbytes": (of_bitsandbytes("Lion8bit", min_8bit_size=16), ""),
    "32-bit AdamW of bitsandbytes": (of_bitsandbytes("AdamW32bit"), ""),
    "4-bit layer": (layer_of_bitsandbytes("Linear4bit"), ""),
    "4-bit layer of one table": (layer_of_bitsandbytes("Linear4bit", quant_type="nf4", compress_statistics=False), ""),
    "paged AdamW of bitsandbytes": (of_bitsandbytes("PagedAdamW8bit"), ""),
    "8-bit layer": (layer_of_bitsandbytes("Linear8bitLt", has_fp16_weights=False), r"0\.weight .* tensors in its attr"),
}


def stepped(made: Made, *seeds: int) -> Made:
    model, optimizer = made
    for seed in seeds if optimizer is not None else ():
        torch.manual_seed(seed)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return made


def seeded(make: Callable[[], Made], seed: int) -> Made:
    torch.manual_seed(seed)
    return stepped(make(), *((1, 2) if seed == 0 else (7,)))


def values(value: Any) -> Any:
    """Return everything in a state, tensors as their classes and bytes."""
    if isinstance(value, torch.Tensor):
        kind = type(value)
        if kind not in (torch.Tensor, nn.Parameter) and hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            return kind.__name__, str(context), [values(getattr(value, name)) for name in names]
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return str(value.dtype), tuple(value.shape), flat
    if isinstance(value, dict):
        return {key: values(item) for key, item in value.items()}
    return [values(item) for item in value] if isinstance(value, (list, tuple)) else value


def all_of(made: Made) -> Any:
    model, optimizer = made
    state = [] if optimizer is None else [values(optimizer.state[p]) for p in model.parameters()]
    return [values(dict(model.state_dict())), state]


def dcp_state(made: Made) -> dict[str, Any]:
    model, optimizer = made
    states = {} if optimizer is None else get_optimizer_state_dict(model, optimizer)
    return {"model": model.state_dict(), "optimizer": states}


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
@pytest.mark.parametrize("name", CASES)
def test_a_manager_restores_quantized_tensors_exactly_or_refuses_them_by_name(
    tmp_path: Path, name: str, kind: str
) -> None:
    make, said = CASES[name]
    source, live = seeded(make, 0), seeded(make, 1)
    assert all_of(live) != all_of(source)
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        before = sorted(tmp_path.rglob("*"))
        if said:
            with pytest.raises(SaveError, match=said):
                manager.save(1, TrainState(model=source[0], optimizer=source[1]))
            assert sorted(tmp_path.rglob("*")) == before
            return
        manager.save(1, TrainState(model=source[0], optimizer=source[1]))
        report = manager.load(TrainState(model=live[0], optimizer=live[1]))
    assert report is not None and not (report.missing or report.unexpected or report.skipped)
    assert all_of(live) == all_of(source)
    assert all_of(stepped(live, 3)) == all_of(stepped(source, 3))


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, DCPSavePlanner])
@pytest.mark.parametrize("name", CASES)
def test_dcp_writer_restores_quantized_tensors_exactly(tmp_path: Path, name: str, planner: Any) -> None:
    make, _ = CASES[name]
    source, live = seeded(make, 0), seeded(make, 0 if "4-bit layer" in name else 1)  # its state dict has other shapes
    if (name, planner) == ("int4 weights", dcp.DefaultSavePlanner):  # torch's planner reads attributes that they lack
        with pytest.raises(CheckpointException, match="IntxUnpackedToInt8Tensor"):
            dcp.save(dcp_state(source), storage_writer=DCPWriter(tmp_path), no_dist=True)
        assert not list(tmp_path.iterdir())
        return
    dcp.save(dcp_state(source), storage_writer=DCPWriter(tmp_path), planner=planner(), no_dist=True)
    state = dcp_state(live)
    dcp.load(state, storage_reader=DCPReader(tmp_path), no_dist=True)
    assert values(state) == values(dcp_state(source))
    if "4-bit layer" not in name and name != "8-bit layer":  # bitsandbytes' own load_state_dict accepts no quant_state
        live[0].load_state_dict(state["model"])
    if live[1] is not None:
        set_optimizer_state_dict(live[0], live[1], state["optimizer"])
        assert all_of(stepped(live, 3)) == all_of(stepped(source, 3))


@pytest.mark.parametrize("name", [name for name in CASES if name != "int4 weights"])  # torch cannot save these
def test_what_torch_wrote_of_quantized_tensors_loads_exactly(tmp_path: Path, name: str) -> None:
    make, _ = CASES[name]
    source, live, other = (seeded(make, seed) for seed in (0, 1, 2))
    if "4-bit layer" in name:
        live = seeded(make, 0)  # its state dict has other shapes
    url = tmp_path / "theirs"
    dcp.save(dcp_state(source), checkpoint_id=url, no_dist=True)
    state = dcp_state(live)
    dcp.load(state, storage_reader=DCPReader(url), no_dist=True)
    assert values(state) == values(dcp_state(source))
    if "layer" in name:
        with CheckpointManager(tmp_path / "run") as manager, pytest.raises(CheckpointMismatchError, match=r"0\.weight"):
            manager.load(TrainState(model=other[0], optimizer=other[1], rng=False), str(url))
        return
    with CheckpointManager(tmp_path / "run") as manager:
        manager.load(TrainState(model=other[0], optimizer=other[1], rng=False), str(url))
    assert all_of(other) == all_of(source)
