"""Tensors of torchao and bitsandbytes: saved and loaded exactly, or refused by name before anything is written.

On other numbers of ranks they are resharded if blocks allow it, otherwise refused.
"""

import importlib
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ckptkit import (
    DCPLoadPlanner,
    DCPReader,
    DCPSavePlanner,
    DCPWriter,
    TrainState,
    convert,
    diff,
    merge,
    reshard,
    verify,
)
from ckptkit import Shard as DeclaredShard
from ckptkit.cli.main import main
from ckptkit.errors import CkptkitError, CorruptCheckpointError, UnsupportedFormatError, UsageError
from tests.checkpoint.states import (
    bits,
    check_misfit,
    check_refused,
    check_resumed,
    check_round_trip,
    load,
    load_all,
    optimized,
    save,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # both libraries use deprecated functions of torch
QUANTIZED = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]  # optimizers of torchao
WIDE = 4096  # bitsandbytes quantizes the states of parameters from this many elements on


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


def of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def alone(model: nn.Module) -> TrainState:
    return TrainState(model=model, rng=False)


def quantized(name: str, **options: Any) -> Callable[[], TrainState]:
    def made() -> TrainState:
        model = net()
        of("torchao.quantization", "quantize_")(model[:1], of("torchao.quantization", name)(**options))
        return alone(model)

    return made


def with_weight(convert: Callable[[torch.Tensor], Any]) -> Callable[[], TrainState]:
    def made() -> TrainState:
        model = net()
        model[0].weight = nn.Parameter(convert(model[0].weight.detach()), requires_grad=False)
        return alone(model)

    return made


def to_mx(weight: torch.Tensor, dtype: torch.dtype) -> Any:
    return of("torchao.prototype.mx_formats.mx_tensor", "MXTensor").to_mx(weight, dtype, 32)


def nvfp4(weight: torch.Tensor) -> Any:
    return of("torchao.prototype.mx_formats.nvfp4_tensor", "NVFP4Tensor").to_nvfp4(weight)


def nf4(weight: torch.Tensor) -> Any:
    return of("torchao.quantization.quantize_.workflows.nf4.nf4_tensor", "to_nf4")(torch.randn(256, 64))


def gathered_in_float8(model: nn.Module) -> nn.Module:
    """Let fully_shard gather the weights in float8: its shards have a class of torchao."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))


def stepping(module: str, name: str, **options: Any) -> Callable[[], TrainState]:
    """Return a function that makes a model with an optimizer of a library."""

    def made() -> TrainState:
        return optimized(net(WIDE), of(module, name), lr=1e-3, **options)

    return made


def layer_of_bitsandbytes(name: str, **options: Any) -> Callable[[], TrainState]:
    return lambda: alone(nn.Sequential(of("bitsandbytes.nn", name)(64, 64, **options)).to("cpu"))


def float8_weights() -> TrainState:
    model = nn.Module()
    model.w = nn.Parameter(torch.randn(16, 16).to(torch.float8_e4m3fn), requires_grad=False)
    model.register_buffer("scale", torch.randn(3).to(torch.float8_e8m0fnu))
    return TrainState(model=model, rng=False)


MAKERS: dict[str, Callable[[], TrainState]] = {
    "int8 weights": quantized("Int8WeightOnlyConfig"),
    "int8 weights and activations": quantized("Int8DynamicActivationInt8WeightConfig"),
    "float8 weights of torchao": quantized("Float8WeightOnlyConfig"),
    "int4 weights": quantized("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "float8 all-gather": lambda: alone(gathered_in_float8(net())),
    "float8 weights": float8_weights,
    "mxfp8 weights": with_weight(lambda weight: to_mx(weight, torch.float8_e4m3fn)),
    "mxfp4 weights": with_weight(lambda weight: to_mx(weight, torch.float4_e2m1fn_x2)),
    "nvfp4 weights": with_weight(nvfp4),
    **{name: stepping("torchao.optim", name) for name in QUANTIZED},
    "8-bit AdamW of bitsandbytes": stepping("bitsandbytes.optim", "AdamW8bit"),
    "8-bit Lion of bitsandbytes": stepping("bitsandbytes.optim", "Lion8bit", min_8bit_size=16),
    "32-bit AdamW of bitsandbytes": stepping("bitsandbytes.optim", "AdamW32bit"),
    "4-bit layer": layer_of_bitsandbytes("Linear4bit"),
    "4-bit layer of one table": layer_of_bitsandbytes("Linear4bit", quant_type="nf4", compress_statistics=False),
    "paged AdamW of bitsandbytes": stepping("bitsandbytes.optim", "PagedAdamW8bit"),
    "8-bit layer": layer_of_bitsandbytes("Linear8bitLt", has_fp16_weights=False),
    "nf4 weights": with_weight(nf4),  # an inner tensor is a column of one element, which torch cannot view as bytes
}
CASES = [name for name in MAKERS if name != "nf4 weights"]


def stepped(state: TrainState, *seeds: int) -> TrainState:
    for seed in seeds if state.optimizer is not None else ():
        torch.manual_seed(seed)
        state.model(torch.randn(4, 64)).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
    return state


def seeded(name: str, seed: int) -> TrainState:
    torch.manual_seed(seed)
    return stepped(MAKERS[name](), *((1, 2) if seed == 0 else (7,)))


def dcp_state(state: TrainState) -> dict[str, Any]:
    optimizer = {} if state.optimizer is None else get_optimizer_state_dict(state.model, state.optimizer)
    return {"model": state.model.state_dict(), "optimizer": optimizer}


@pytest.mark.parametrize("name", MAKERS)
def test_a_manager_restores_quantized_tensors_or_refuses_them_by_name(tmp_path, name, kind):
    source, live = seeded(name, 0), seeded(name, 1)
    assert bits(live) != bits(source)
    if name == "8-bit layer":
        check_refused(tmp_path, source, r"0\.weight .* tensors in its attr", state_dict_type=kind)
        return
    check_round_trip(tmp_path, source, live, kind)
    assert bits(stepped(live, 3)) == bits(stepped(source, 3))


WRITERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "torch's": lambda url: {"storage_writer": dcp.FileSystemWriter(url)},
    "ours": lambda url: {"storage_writer": DCPWriter(url)},
    "our planner's": lambda url: {"storage_writer": DCPWriter(url), "planner": DCPSavePlanner()},
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", CASES)
def test_torch_and_dcp_reader_read_each_others_quantized_tensors(tmp_path, name, writer):
    source, url, resharded = seeded(name, 0), tmp_path / "theirs", tmp_path / "resharded" / "step_00000001"
    options = WRITERS[writer](url)
    if name == "int4 weights" and writer != "our planner's":  # torch's planner reads attributes that they lack
        with pytest.raises(CheckpointException, match="IntxUnpackedToInt8Tensor"):
            dcp.save(dcp_state(source), **options, no_dist=True)
        assert writer == "torch's" or not list(tmp_path.rglob("*.distcp"))
        return
    dcp.save(dcp_state(source), **options, no_dist=True)
    readers: list[Any] = [dcp.FileSystemReader(url)] if writer == "ours" else []
    if writer == "torch's":
        assert verify(str(url)).ok
        reshard(str(url), str(resharded), world_size=3)
        assert verify(str(resharded)).ok
        readers = [DCPReader(resharded)]
    for reader in (*readers, DCPReader(url)):
        live = seeded(name, 0 if "4-bit layer" in name else 1)  # its state dict has other shapes
        state = dcp_state(live)
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert bits(state) == bits(dcp_state(source))
    if "4-bit layer" not in name and name != "8-bit layer":  # bitsandbytes' own load_state_dict accepts no quant_state
        live.model.load_state_dict(state["model"])
    if live.optimizer is not None:
        set_optimizer_state_dict(live.model, live.optimizer, state["optimizer"])
        assert bits(stepped(live, 3)) == bits(stepped(seeded(name, 0), 3))
    if writer != "torch's":
        return
    other = seeded(name, 2)
    if "layer" in name:
        check_misfit(tmp_path / "run", other, r"0\.weight", which=str(url))
    else:
        load(tmp_path / "run", other, str(url))
        assert bits(other) == bits(source)


IN_CLASSES = [name for name in CASES if name.endswith(" weights") and name not in ("int4 weights", "float8 weights")]
IN_CLASSES += ["int8 weights and activations", "float8 weights of torchao"]
BY_TORCH = [name for name in CASES if name != "int4 weights"]  # torch cannot save these


def of_torchao_file(folder: Path) -> dict[str, torch.Tensor]:
    """Read an export's only file with torchao, which rebuilds its weights."""
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    with safe_open(folder / "model.safetensors", "pt") as file:
        found, left = unflatten_tensor_state_dict(load_file(folder / "model.safetensors"), file.metadata())
    assert not left
    return found


def as_stored(tensors: dict[str, torch.Tensor]) -> Any:
    """Return tensors and descriptions as torchao stores them: unlike `bits`, without telling tuples from lists."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    data, metadata = flatten_tensor_state_dict({name: tensor.detach() for name, tensor in tensors.items()})
    return bits(data), {name: json.loads(text) for name, text in metadata.items() if name != "tensor_names"}


@pytest.mark.parametrize("to", ["hf", "dcp", "torch"])
@pytest.mark.parametrize("name", BY_TORCH)
def test_convert_exports_weights_that_torch_wrote_or_refuses_them_by_name(tmp_path, name, to):
    source = seeded(name, 0)
    url, result = str(tmp_path / "theirs"), tmp_path / "result"
    dcp.save(dcp_state(source), checkpoint_id=url, no_dist=True)
    saved = source.model.state_dict()
    if name in IN_CLASSES and to == "hf":
        convert(url, str(result))
        assert bits(of_torchao_file(result)) == bits(saved)
        return
    if name in IN_CLASSES:
        with pytest.raises(UnsupportedFormatError, match=r"model\.0\.weight is a torchao(?s:.*) so does --to hf"):
            convert(url, str(result), to=to)
        assert not result.exists()
        return
    convert(url, str(result), to=to)
    if name == "float8 all-gather":
        saved = {key: getattr(value, "_tensor", value).detach() for key, value in saved.items()}
    saved = {key: value for key, value in saved.items() if isinstance(value, torch.Tensor)}
    if to == "hf":
        found = load_file(result / "model.safetensors")
    elif to == "torch":
        found = torch.load(result / "pytorch_model.bin", weights_only=True)
    else:
        found = {key: torch.empty_like(value, device="cpu") for key, value in saved.items()}
        dcp.load({"model": found}, checkpoint_id=result, no_dist=True)
    assert bits(found) == bits(saved)


@pytest.mark.parametrize("name", [*IN_CLASSES, "int4 weights"])
def test_weights_of_torchao_go_from_a_run_to_its_safetensors_layout_and_into_a_job(tmp_path, name):
    source, live = seeded(name, 0), seeded(name, 1)
    run, export = str(tmp_path / "run"), tmp_path / "export"
    save(run, source)
    convert(run, str(export), verify=True)
    assert as_stored(of_torchao_file(export)) == as_stored(source.model.state_dict())
    assert not diff(run, str(export)).differs
    load(tmp_path / "other", live, str(export))
    assert bits(live) == bits(source)
    convert(str(export), str(tmp_path / "again"))
    assert as_stored(of_torchao_file(tmp_path / "again")) == as_stored(source.model.state_dict())


def exported(folder: Path, name: str, seed: int = 0) -> TrainState:
    """Save a run and convert it to "export"; return what was saved."""
    source = seeded(name, seed)
    save(folder / "run", source)
    convert(str(folder / "run"), str(folder / "export"))
    return source


@pytest.mark.parametrize("name", ["int8 weights", "float8 weights of torchao"])
def test_merge_refuses_weights_of_torchao_whose_codes_it_cannot_average(tmp_path, name):
    for seed in (0, 1):
        exported(tmp_path / f"{seed}", name, seed)
    for kind in ("run", "export"):
        sources = [str(tmp_path / f"{seed}" / kind) for seed in (0, 1)]
        with pytest.raises(UnsupportedFormatError, match=r"0\.weight(?s:.*)--exclude"):
            merge(sources, str(tmp_path / "merged"))
        merge(sources, str(tmp_path / kind), exclude=["*0.weight"])
    assert not (tmp_path / "merged").exists()


def test_diff_names_weights_of_torchao_that_differ_only_in_their_description(tmp_path):
    exported(tmp_path, "float8 weights of torchao")
    file = tmp_path / "export/model.safetensors"
    changed = file.read_bytes().replace(b'\\"AUTO\\"', b'\\"MSLK\\"')
    assert changed != file.read_bytes()
    (tmp_path / "b").mkdir()
    (tmp_path / "b/model.safetensors").write_bytes(changed)
    found = diff(str(tmp_path / "export"), str(tmp_path / "b"))
    assert found.differs and list(found.values) == ["0.weight"]


def test_transformers_reads_weights_of_torchao_after_every_way_through_ckptkit(tmp_path):
    """Without the headers' description, transformers would silently use random weights."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=96,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "plain")
    quantization = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=quantization)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    save(tmp_path / "run", TrainState(model=model))
    theirs, run = str(tmp_path / "theirs"), str(tmp_path / "run")
    convert(theirs, str(tmp_path / "one"), max_shard_size="40KB", verify=True)
    convert(run, str(tmp_path / "two"), base=theirs)
    convert(run, str(tmp_path / "three"))
    tokens = torch.arange(8)[None]
    expected = model(tokens).logits
    for name in ("one", "two", "three"):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(found(tokens).logits, expected), name
    with pytest.raises(UnsupportedFormatError, match="no quantization_config with quant_method torchao"):
        convert(run, str(tmp_path / "four"), base=str(tmp_path / "plain"))
    for options in ({"dtype": "bf16"}, {"to": "dcp"}, {"quantize": "fp8-block"}):
        with pytest.raises(UnsupportedFormatError, match=r"down_proj\.weight is a torchao\.quantization\.Int8Tensor"):
            convert(theirs, str(tmp_path / "four"), **options)
    assert not (tmp_path / "four").exists()


DESCRIPTION = {
    "_type": "Int8Tensor",
    "_data": {"block_size": [1, 8], "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}},
    "_tensor_data_names": ["qdata", "scale"],
}


def described_file(folder: Path, described: dict[str, Any], name: str = "model.safetensors", at: str = "a") -> str:
    """Write a file of torchao's layout with the weight `<at>.weight`; return its directory."""
    folder.mkdir(exist_ok=True)
    tensors = {f"{at}._weight_qdata": torch.ones(4, 8, dtype=torch.int8), f"{at}._weight_scale": torch.ones(4, 1)}
    extra = described.pop("tensors", {})
    metadata = {f"{at}.weight": json.dumps({**DESCRIPTION, **described})}
    metadata |= {name: json.dumps(text) for name, text in described.pop("more", {}).items()}
    save_file({**tensors, **extra}, folder / name, {**metadata, "tensor_names": json.dumps(list(metadata))})
    return str(folder)


@pytest.mark.parametrize(
    "described",
    [
        {"_tensor_data_names": ["qdata", "scale", "zero"]},
        *({"_tensor_data_names": names} for names in ([["qdata"]], [1], ["qdata", "qdata"])),
        *({"_data": {"shape": shape}} for shape in (["x", 8], [-4, 8], [[4], 8])),
        *({"_data": {"dtype": {"_type": kind, "_data": data}}} for kind, data in (("torch.dtype", 1), (["x"], "y"))),
        *({"_data": {"block_size": {tag: 5}}} for tag in ("$tuple", "$shape", "$object", "$enum")),
        {"tensors": {"a.weight::qdata": torch.ones(4)}},
        {"tensors": {"a.weight": torch.ones(4)}},
        {"tensors": {"a._weight_x_y": torch.ones(4)}, "_tensor_data_names": ["qdata", "x_y"],
         "more": {"a.weight_x": {**DESCRIPTION, "_tensor_data_names": ["y"]}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_malformed_description_of_torchao_is_refused_by_name(tmp_path, described):
    source = described_file(tmp_path / "a", dict(described))
    said = r"description of 'a\.weight|a\.weight is of the class Int8Tensor, but a\._weight_zero is missing"
    with pytest.raises(CorruptCheckpointError, match=said):
        convert(source, str(tmp_path / "b"))


def test_files_of_torchao_may_each_describe_only_their_own_weights(tmp_path):
    for index, at in enumerate(("a", "b"), 1):
        source = described_file(tmp_path / "two", {}, f"model-0000{index}-of-00002.safetensors", at)
    with pytest.raises(UsageError, match=r"--exclude skips scale, a part of a\.weight"):
        convert(source, str(tmp_path / "none"), exclude=["a.*scale"])
    convert(source, str(tmp_path / "one"))
    assert of_torchao_file(tmp_path / "one").keys() == {"a.weight", "b.weight"}


def test_torchao_weights_with_more_dimensions_inside_than_outside_are_read(tmp_path):
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int4TilePackedTo4dTensor

    packed = torch.arange(8 * 64, dtype=torch.int32).reshape(1, 2, 32, 8)
    made = Int4TilePackedTo4dTensor(packed, torch.ones(4, 8, 2).bfloat16(), [1, 32], torch.Size([8, 128]))
    tensors, metadata = flatten_tensor_state_dict({"a.weight": made})
    (tmp_path / "a").mkdir()
    save_file(tensors, tmp_path / "a/model.safetensors", metadata)
    convert(str(tmp_path / "a"), str(tmp_path / "b"))
    assert as_stored(of_torchao_file(tmp_path / "b")) == as_stored({"a.weight": made})


# --- on several ranks


SHAPES = (384, 64), (64,)  # on up to three ranks, the first is quantized, and the second is too small for it


def placed(name: str, *shapes: tuple[int, ...], steps: int = 2, mesh: Any = None, placements: Any = None) -> TrainState:
    """Return sharded weights and an optimizer of torchao after some steps, whose values are equal on any ranks."""
    mesh = mesh or (dist.get_world_size(),)
    over = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])

    def drawn(seed: int, shape: tuple[int, ...]) -> DTensor:
        whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return distribute_tensor(whole, over, placements or [Shard(0)], src_data_rank=None)

    model = nn.ParameterDict({f"w{at}": drawn(steps, shape) for at, shape in enumerate(shapes)})
    state = optimized(model, of("torchao.optim", name), lr=1e-3)
    for step in range(steps):
        for parameter in model.values():
            parameter.grad = drawn(step, parameter.shape)
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state.optimizer.step()
    return state


def save_placed(url: str, name: str, by: Any) -> None:
    """Save with a manager of this type, or with dcp.save and this writer."""
    state = placed(name, *SHAPES)
    assert "OptimState" in type(state.optimizer.state[state.model["w0"]]["exp_avg"].to_local()).__name__
    if isinstance(by, str):
        save(url, state, state_dict_type=by)
    else:
        dcp.save(dcp_state(state), storage_writer=by(url))


def load_placed(url: str, name: str, which: str = "latest") -> None:
    """Load into an optimizer without states, and into one with states."""
    for steps in (0, 1):
        load_all(url, live := placed(name, *SHAPES, steps=steps), which)
        assert bits(live) == bits(placed(name, *SHAPES))


def load_by_dcp(url: str, name: str, reader: Any = DCPReader, planner: Any = None) -> None:
    live = placed(name, *SHAPES, steps=1)
    state = dcp_state(live)
    dcp.load(state, storage_reader=reader(url), planner=planner and planner())
    set_optimizer_state_dict(live.model, live.optimizer, state["optimizer"])
    live.model.load_state_dict(state["model"])
    assert bits(live) == bits(placed(name, *SHAPES))


def command(*args: str) -> Any:
    with pytest.raises(SystemExit) as done:
        main(list(args))
    return done.value.code


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_states_load_if_no_block_is_split(ranks, tmp_path, name, kind):
    ranks.run(save_placed, 2, str(tmp_path), name, kind)
    for number in (1, 2, 3) if kind != "local" else (2,):
        ranks.run(load_placed, number, str(tmp_path), name)


@pytest.mark.parametrize("name", QUANTIZED)
@on_ranks(2, 3)
def test_a_number_of_ranks_that_would_split_a_block_is_refused(tmp_path, name):
    run, theirs, said = tmp_path / "run", str(tmp_path / "theirs"), r"w0\.exp_avg(?s:.*)\[131, 64\](?s:.*)whole blocks"
    if dist.get_world_size() == 2:
        save(run, state := placed(name, (392, 64)))
        dcp.save(dcp_state(state), checkpoint_id=theirs)
        return
    check_misfit(run, placed(name, (392, 64), steps=0), said, error=CkptkitError)
    check_misfit(tmp_path / "other", placed(name, (392, 64), steps=0), r"w0\.exp_avg", error=CkptkitError, which=theirs)
    with pytest.raises(CheckpointException, match=r"w0\.exp_avg"):
        dcp.load(dcp_state(placed(name, (392, 64), steps=1)), storage_reader=DCPReader(theirs))


@on_ranks(3)
def test_ranks_whose_shards_are_not_all_quantized_are_refused_by_name(tmp_path):
    """torchao quantizes from 4,096 elements on: with 23 rows of 512, the last of three ranks has fewer."""
    state = placed("AdamW8bit", (23, 512))
    check_refused(tmp_path, state, r"optimizer\.state\.w0\.exp_avg and 1 more.*a plain tensor")


MESHES: list[tuple[int, tuple[int, ...], Any]] = [
    (1, (1,), [Shard(1)]),
    (2, (2, 1), [Shard(0), Shard(1)]),
    (2, (1, 2), [_StridedShard(0, split_factor=2), Shard(0)]),  # as FSDP2 on one rank and tensor parallelism on two
]


@pytest.mark.parametrize(("size", "mesh", "placements"), MESHES, ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
@on_ranks("size")
def test_a_mesh_dimension_of_one_rank_splits_no_block(tmp_path, name, kind, size, mesh, placements):
    for steps in (1, 0):
        source, live = (placed(name, (64, 128), steps=n, mesh=mesh, placements=placements) for n in (2, steps))
        check_round_trip(tmp_path / str(steps), source, live, kind)


def state_of_two_rows(steps: int) -> TrainState:
    """Return a weight of two rows and its quantized optimizer state: on three ranks, the last one has none."""
    return placed("AdamW8bit", (2, 8192), steps=steps)


def weight_of_two_rows(seed: int) -> TrainState:
    """Return a quantized weight of two rows."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed)).tensor_split(size)[rank]
    local, shape = to_mx(mine, torch.float8_e4m3fn), {"shape": torch.Size((2, 64)), "stride": (64, 1)}
    weight = DTensor.from_local(local, init_device_mesh("cpu", (size,)), [Shard(0)], run_check=False, **shape)
    return TrainState(model=nn.ParameterDict({"w0": nn.Parameter(weight, requires_grad=False)}), rng=False)


EMPTY_STATE = "an empty shard (use fewer ranks) here, but OptimState8bit"
EMPTY_WEIGHT = "sharded, and its local part is a MXTensor of shape [0, 64], which is empty: use fewer ranks"


@pytest.mark.parametrize(
    ("make", "refused", "misfits"),
    [
        (weight_of_two_rows, f"w0 is {EMPTY_WEIGHT}", {1: f"w0 here is {EMPTY_WEIGHT}"}),
        (state_of_two_rows, f"w0.exp_avg and 1 more: it is {EMPTY_STATE}", {
            1: f"w0.exp_avg is {EMPTY_STATE}", 0: "OptimState8bit, whose shard on this rank would be empty: use fewer ",
        }),
    ],
    ids=["weight", "state"],
)  # fmt: skip
@on_ranks(2, 3)
def test_an_empty_quantized_shard_is_refused_with_that_reason(tmp_path, make, refused, misfits):
    """`misfits`: the expected errors, by the number of steps that the live optimizer has made."""
    if dist.get_world_size() == 2:
        save(tmp_path / "two", make(1))
        return
    check_refused(tmp_path / "three", make(1), re.escape(refused))
    for steps, expected in misfits.items():
        check_misfit(tmp_path / "two", make(steps), re.escape(expected), error=CkptkitError)


def float8(seed: int, *, sharded: bool = True) -> TrainState:
    """Return a model after a step: under fully_shard, or with the same values without float8."""
    torch.manual_seed(seed)
    model: nn.Module = net(64)
    if sharded:
        model = gathered_in_float8(model)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        assert type(model[0].weight._local_tensor).__name__ == "WeightWithDynamicFloat8CastTensor"
    state = optimized(model, torch.optim.AdamW)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    state.optimizer.step()
    return state


def float8_round_trip(url: str, kind: str) -> None:
    source, live = float8(0), float8(1)
    live.model[0].weight._local_tensor._precomputed_scale = torch.ones(())
    check_round_trip(url, source, live, kind)
    assert live.model[0].weight._local_tensor._precomputed_scale is None  # it belonged to other weights


def test_weights_gathered_in_float8_are_saved_as_their_values(ranks, tmp_path, kind):
    ranks.run(float8_round_trip, 2, str(tmp_path / "run"), kind)
    saved, model = float8(0, sharded=False).model, net(64)
    if kind != "local":
        load(tmp_path / "run", TrainState(model=model))
        assert bits(model) == bits(saved)
    convert(str(tmp_path / "run"), str(tmp_path / "hf"))
    assert bits(load_file(tmp_path / "hf" / "model.safetensors")) == bits(saved)


def test_commands_treat_the_parts_of_a_subclass_as_tensors(ranks, tmp_path, kind):
    source = str(tmp_path / "run" / "step_00000001")
    ranks.run(save_placed, 2, str(tmp_path / "run"), "AdamW8bit", kind)
    assert command("verify", source) == command("inspect", source, "--tensors", "*exp_avg::scale") == 0
    copied, sharded, local = (str(tmp_path / name / "step_00000001") for name in ("copy", "sharded", "local"))
    assert command("copy", source, copied) == 0
    assert command("reshard", source, sharded, "--world-size", "3") == 0
    assert command("reshard", source, local, "--world-size", "3", "--type", "local") == 0
    for url in (copied, sharded, local):
        assert command("verify", url) == command("diff", source, url) == 0
    for root in ("sharded", "local"):
        ranks.run(load_placed, 3, str(tmp_path / root), "AdamW8bit")


@on_ranks(2)
def test_a_4bit_weight_sharded_by_fsdp2_is_refused_on_every_rank(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes as bnb

        model = nn.Sequential(bnb.nn.Linear4bit(64, 64, bias=False, quant_storage=torch.float32), nn.Linear(64, 64))
        model.to("cpu")
        model[0](torch.randn(1, 64))  # the first use quantizes
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    said = r"model\.0\.weight holds packed 4-bit values of bitsandbytes\. Under FSDP2, their scales \(quant_state\)"
    check_refused(tmp_path, TrainState(model=model), said)


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, DCPWriter])
@pytest.mark.parametrize("name", QUANTIZED)
def test_records_of_a_class_load_on_any_number_of_ranks(ranks, tmp_path, name, writer):
    """`DCPWriter` writes such shards like torch."""
    url = str(tmp_path / "theirs")
    ranks.run(save_placed, 2, url, name, writer)
    for number in (1, 2, 3):
        for planner in (None, DCPLoadPlanner):
            ranks.run(load_by_dcp, number, url, name, DCPReader, planner)
        ranks.run(load_placed, number, f"{url}-run", name, url)
    ranks.run(load_by_dcp, 2, url, name, dcp.FileSystemReader)
    assert command("verify", url) == 0
    for kind in ("sharded", "local"):
        run = tmp_path / f"resharded-{kind}"
        assert command("reshard", url, str(run / "step_00000001"), "--world-size", "3", "--type", kind) == 0
        assert command("verify", str(run / "step_00000001")) == 0
        ranks.run(load_placed, 3, str(run), name)
    assert command("convert", url, str(tmp_path / "hf")) == 0
    assert list(load_file(tmp_path / "hf" / "model.safetensors")) == ["w0", "w1"]


@pytest.mark.parametrize("name", QUANTIZED)
@on_ranks(2, 1, 3)
def test_dcp_reader_fills_the_parts_of_a_class_that_ckptkit_saved(tmp_path, name):
    source, live = (dcp_state(placed(name, *SHAPES, steps=steps)) for steps in (2, 1))
    if dist.get_world_size() == 2:
        save(tmp_path, placed(name, *SHAPES))
    found = {"model": live["model"], "optimizer": {"state": live["optimizer"]["state"]}}
    dcp.load(found, storage_reader=DCPReader(tmp_path / "step_00000001"))
    assert bits(live) == bits(source)


@pytest.mark.parametrize("planner", [None, DCPLoadPlanner])
@on_ranks(2)
def test_another_class_than_the_saved_one_is_refused_by_name(tmp_path, planner):
    save_placed(str(tmp_path), "AdamW8bit", dcp.FileSystemWriter)
    state = dcp_state(placed("AdamWFp8", *SHAPES))
    before = bits(state)
    with pytest.raises(CheckpointException, match=r"w0\.exp_avg is OptimStateFp8.*but OptimState8bit"):
        dcp.load(state, storage_reader=DCPReader(tmp_path), planner=planner and planner())
    assert bits(state) == before


def shard_of_float8(rank: int) -> Any:
    """Return one of two shards of a weight, with a scale of its own."""
    from torchao.quantization import Float8Tensor, PerTensor

    torch.manual_seed(rank)
    return Float8Tensor.from_hp(torch.randn(32, 64).bfloat16() * (rank + 1), granularity=PerTensor())


def save_shards_of_float8(url: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = DTensor.from_local(
        shard_of_float8(dist.get_rank()), mesh, [Shard(0)], run_check=False, shape=torch.Size((64, 64)), stride=(64, 1)
    )
    dcp.save({"model": {"a.weight": weight}}, checkpoint_id=f"{url}/theirs")
    model = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False)})
    model["a"].weight = nn.Parameter(weight, requires_grad=False)
    save(Path(f"{url}/run"), TrainState(model=model, rng=False))


def test_an_export_of_shards_with_their_own_scales_has_one_block_per_shard(ranks, tmp_path):
    ranks.run(save_shards_of_float8, 2, str(tmp_path))
    expected = torch.cat([shard_of_float8(rank).dequantize() for rank in range(2)])
    for name in ("theirs", "run"):
        convert(str(tmp_path / name), str(tmp_path / f"{name}_hf"))
        weight: Any = of_torchao_file(tmp_path / f"{name}_hf")["a.weight"]
        assert torch.equal(weight.dequantize(), expected) and weight.block_size == [32, 64]


def of_rank(name: str, steps: int, dim: int = 0) -> TrainState:
    """Return this rank's part of four experts, declared over all ranks, and their optimizer after some steps."""
    size = (4 if dim == 0 else 64) // dist.get_world_size()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))

    def drawn() -> torch.Tensor:
        return torch.randn(4, 64, 64).narrow(dim, dist.get_rank() * size, size).clone()

    torch.manual_seed(0)
    model = nn.ParameterDict({"w": drawn()})
    optimizer = of("torchao.optim", name)(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model["w"].grad = drawn()
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
    return TrainState(model=model, optimizer=optimizer, layout={"w": DeclaredShard(dim, mesh=mesh["ep"])}, rng=False)


def save_experts(url: str, name: str, kind: str, dim: int) -> None:
    save(url, of_rank(name, 2, dim), state_dict_type=kind)


def load_experts(url: str, name: str) -> None:
    """Load into an optimizer with state, and into one without."""
    expected = of_rank(name, 2)
    for steps in (1, 0):
        state = of_rank(name, steps)
        load(url, state)
        check_resumed(state, expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_states_of_experts_load_on_other_ranks(ranks, tmp_path, name, kind):
    for source, target in ((2, 2), (2, 4), (2, 1), (4, 2), (1, 2)) if kind != "local" else ((2, 2), (1, 1)):
        url, dim = str(tmp_path / f"{source}-{target}"), 2 if source == 1 else 0  # on one rank, no block is split
        ranks.run(save_experts, source, url, name, kind, dim)
        ranks.run(load_experts, target, url, name)


@on_ranks(2)
def test_quantized_states_of_declared_experts_whose_blocks_are_split_are_refused(tmp_path):
    said = r"optimizer\.state\.w\.exp_avg has the shape \[4, 64, 64\].*blocks must not be split between ranks"
    check_refused(tmp_path, of_rank("AdamW8bit", 2, 2), said)
