"""Every optimizer resumes bit-exactly in every checkpoint type on every number of ranks, or is refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from ckptkit import TrainState, convert, reshard, verify
from ckptkit.errors import CheckpointMismatchError
from ckptkit.formats.dcp.subclasses import with_lower_bits as of_a_load
from ckptkit.offline.export.dequantize_formulas import Stored, with_lower_bits
from tests.checkpoint.optimizers import Net, made, needs_flashoptim, of_flashoptim, train
from tests.checkpoint.states import KINDS, bits, check_misfit, different, load, load_all, refusal, save
from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # libraries use deprecated functions of torch

SIZES = (2, 1, 3)
ELSEWHERE = {1: 2, 2: 3, 3: 1}

# By the number of ranks that saved: the text of the refusal on another number of ranks; all others load.
Refused = dict[int, str]

LIBRARIES: dict[str, Refused] = {
    "Lion": {},
    "schedule-free": {},
    "schedule-free SGD": {},
    "Prodigy": {2: "param_groups.0.d, ", 3: "param_groups.0.d, "},
    "GaLore": dict.fromkeys(SIZES, "up.weight.projector"),
    "FlashAdamW": {},
    "FlashAdamW of flashoptim": {},
    "FlashAdamW of flashoptim, split runs": dict.fromkeys(SIZES, "up.weight.exp_avg is _MaybeQuantizedTensor"),
    "FlashAdam of flashoptim, plain": {},
    "FlashLion of flashoptim": dict.fromkeys(SIZES, "up.weight.exp_avg is _MaybeQuantizedTensor"),
    "FlashSGD of flashoptim, no momentum": {},
    "FlashSGD of flashoptim": dict.fromkeys(SIZES, "up.weight.momentum_buffer is _MaybeQuantizedTensor"),
    **{name: {} for name in ("GaLore of pytorch_optimizer", "AdEMAMix", "AggMo", "APOLLO")},
}
"""Optimizers of libraries that can step DTensors; they run at night."""

SHARDED: dict[str, Refused] = {
    "factored moments": {},  # the first one runs by day
    **{name: {} for name in ("AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "ASGD", "Muon", "masters of AdamW")},
    "LAMB": {},
    "local moments": {},
    "Shampoo": {1: "up.weight.left"},
    "Shampoo of each rank": dict.fromkeys(SIZES, "up.weight.factors"),
    "Shampoo of each rank, by name": {1: "up.weight.left", 2: "down.weight.left", 3: "down.weight.left"},
    "SOAP of each rank": {1: "up.weight.GG", 2: "down.weight.exp_avg", 3: "down.weight.exp_avg"},
    **LIBRARIES,
}
"""Parameters sharded by fully_shard."""

REPLICATED: dict[str, Refused] = {
    **{name: {} for name in ("Adafactor", "AdamW", "Muon", "Rprop", "Adafactor of transformers")},  # the first by day
    **{name: {} for name in ("AdamW8bit of bitsandbytes", "LAMB8bit of bitsandbytes", "masters of AdamW")},
    **{name: {} for name in ("Shampoo of each rank", "Shampoo of each rank, by name", "SOAP of each rank")},
    "ZeRO": {2: "up.weight, ", 3: "up.weight, "},
    **{name: {} for name in LIBRARIES},
    **{name: {} for name in ("SOAP", "SPlus", "Shampoo of pytorch_optimizer")},
    **{name: {} for name in ("Adafactor of pytorch_optimizer", "CAME", "Kron")},
}
"""Parameters whole on each rank, as under DDP; some of these optimizers support no others."""

NOT_SAVED = {
    "queue": "optimizer.values.up.weight.queue: a value of type collections.deque cannot be saved",  # runs by day
    "TRAC": "optimizer.shared.trac: a dict has tensors as keys",
    "Ranger21": "the state_dict of Ranger21 has 'lookahead_step', 'starting_lr', 'current_lr', but only 'state' ",
    "scalable Shampoo": "up.weight.pre_conditioner: a value of type pytorch_optimizer.optimizer.utils.preconditioner",
}
"""By optimizer: the text of the refusal to save its state."""


def joined(value: Any, shard_of: Any = None) -> Any:
    """Return a value with DTensors joined, and a plain tensor that is a shard of `shard_of`. All ranks must call it."""
    if type(value).__name__ == "_MaybeQuantizedTensor":  # of flashoptim: codes of this rank's shard, and their scales
        scales: list[Any] = [value._scales]
        if isinstance(shard_of, DTensor):
            scales = [None] * dist.get_world_size()
            dist.all_gather_object(scales, value._scales)
        codes = [joined(part, shard_of) for part in (value._quantized, value._data) if part is not None]
        return codes, scales[0] if scales[0] is None else bits(torch.cat(scales))
    if isinstance(value, torch.Tensor):
        value = value.int() if value.dtype is torch.int16 else value  # gloo does not send int16
        if isinstance(shard_of, DTensor) and not isinstance(value, DTensor):
            mesh, placements, stride = shard_of.device_mesh, shard_of.placements, shard_of.stride()
            value = DTensor.from_local(value, mesh, placements, run_check=False, shape=shard_of.shape, stride=stride)
        return bits(value.full_tensor() if isinstance(value, DTensor) else value)
    if isinstance(value, dict):
        return {key: joined(item) for key, item in value.items()}
    return [joined(item) for item in value] if isinstance(value, (list, tuple)) else bits(value)


def everything(model: Net, optimizer: Any, *, join: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[name] = joined(parameter) if join else bits(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            of_shard = key in ("exp_avg", "error_bits") or type(value).__name__ == "_MaybeQuantizedTensor"
            found[f"{name}.{key}"] = joined(value, parameter if of_shard else None) if join else bits(value)
    for index, group in enumerate(optimizer.param_groups):
        found |= {f"{index}.{key}": bits(value) for key, value in group.items() if "param" not in key}
    return found


@contextlib.contextmanager
def allowed(name: str) -> Iterator[None]:
    """Allow torch to load the class of GaLore's projectors, as its jobs must."""
    classes: list[Any] = []
    if name == "GaLore":
        from galore_torch.galore_projector import GaLoreProjector

        classes = [GaLoreProjector]
    with torch.serialization.safe_globals(classes):
        yield


def run(name: str, url: str, sharded: bool) -> tuple[dict[str, Any], str]:
    """Save and continue, then resume in a fresh job, in each type; return the saved values, joined, or the refusal."""
    first = made(name, 0, sharded)
    train(*first, range(3))
    at, whole = everything(*first), everything(*first, join=sharded)
    state = TrainState(model=first[0], optimizer=first[1])
    with allowed(name):
        for kind in KINDS:
            if text := refusal(lambda kind=kind: save(f"{url}/{kind}", state, 3, state_dict_type=kind)):
                dist.barrier()
                assert not list(Path(url).rglob("step_*"))
                return {}, text
        train(*first, range(3, 6))
        end = everything(*first)
        for kind in KINDS:
            again = made(name, 1, sharded)
            if kind != "sharded":  # this type loads into an optimizer without a state
                train(*again, range(50, 51))
            load_all(f"{url}/{kind}", TrainState(model=again[0], optimizer=again[1]))
            assert different(everything(*again), at) == [], kind
            train(*again, range(3, 6))
            assert different(everything(*again), end) == [], kind
    return whole, ""


def elsewhere(name: str, url: str, sharded: bool) -> list[Any]:
    """Return the loaded values of each type, or the refusal."""
    found: list[Any] = []
    for kind in KINDS[:2]:
        again = made(name, 1, sharded)
        before = everything(*again)
        try:
            with allowed(name):
                load(f"{url}/{kind}", TrainState(model=again[0], optimizer=again[1]))
        except CheckpointMismatchError as error:
            assert different(everything(*again), before) == []
            found.append(str(error))
        else:
            found.append(everything(*again, join=sharded))
            train(*again, range(3, 5))
    return found


def check(ranks: Any, tmp_path: Path, name: str, size: int, sharded: bool, named: str) -> None:
    saved = ranks.run(run, size, name, str(tmp_path), sharded)
    assert {text for _, text in saved} == {""}
    for loaded in ranks.run(elsewhere, ELSEWHERE[size], name, str(tmp_path), sharded):
        for found in loaded:
            if named:
                assert isinstance(found, str), f"loaded, but {named} should be refused"
                assert named in found
                in_parts = "_MaybeQuantizedTensor" in named  # the message shows both placements
                assert in_parts or "load only where the parameters are sharded the same way" in found
            else:
                assert not isinstance(found, str), found
                assert different(found, saved[0][0]) == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SHARDED)
def test_an_optimizer_under_fully_shard_resumes_bit_exactly(ranks: Any, tmp_path: Path, name: str, size: int) -> None:
    check(ranks, tmp_path, name, size, True, SHARDED[name].get(size, ""))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", REPLICATED)
def test_an_optimizer_on_replicas_resumes_bit_exactly(ranks: Any, tmp_path: Path, name: str, size: int) -> None:
    check(ranks, tmp_path, name, size, False, REPLICATED[name].get(size, ""))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NOT_SAVED)
def test_state_that_no_load_could_restore_is_refused_by_all(ranks: Any, tmp_path: Path, name: str, size: int) -> None:
    for _, text in ranks.run(run, size, name, str(tmp_path), name == "queue"):
        assert NOT_SAVED[name] in text


@needs_flashoptim
def test_reshard_keeps_the_quantized_states_of_flashoptim(ranks: Any, tmp_path: Path) -> None:
    name, url = "FlashAdamW of flashoptim", str(tmp_path / "run")
    (saved, text), _ = ranks.run(run, 2, name, url, True)
    assert text == ""
    for kind in KINDS[:2]:
        reshard(f"{url}/{kind}/step_00000003", f"{tmp_path}/again/{kind}/step_00000003", world_size=3)
        assert verify(f"{tmp_path}/again/{kind}/step_00000003").ok
    for loaded in ranks.run(elsewhere, 3, name, str(tmp_path / "again"), True):
        assert [different(found, saved) for found in loaded] == [[], []]


def exact_weights(name: str, url: str) -> dict[str, torch.Tensor]:
    """Save; return the fp32 weights as flashoptim computes them."""
    model, optimizer = made(name, 0, True)
    train(model, optimizer, range(3))
    save(url, TrainState(model=model, optimizer=optimizer))
    found = {}
    for key, value in optimizer.get_fp32_model_state_dict(model).items():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, value.to_local() if isinstance(value, DTensor) else value)
        found[key] = torch.cat(parts)
    return found


@needs_flashoptim
@pytest.mark.parametrize("name", ["FlashAdamW of flashoptim", "FlashAdamW of flashoptim, split runs"])
def test_an_export_has_the_exact_weights_of_flashoptim(ranks: Any, tmp_path: Path, name: str) -> None:
    exact = ranks.run(exact_weights, 2, name, str(tmp_path / "run"))[0]
    cases: list[tuple[dict[str, Any], torch.dtype]] = [
        ({"weights": "master"}, torch.float32), ({"dtype": "fp32"}, torch.float32), ({"dtype": "fp16"}, torch.float16)
    ]  # fmt: skip
    for index, (options, dtype) in enumerate(cases):
        convert(f"{tmp_path}/run/step_00000001", str(tmp_path / f"{index}"), **options)
        found = load_file(tmp_path / f"{index}/model.safetensors")
        assert found.keys() == exact.keys()
        assert all(torch.equal(found[key].to(dtype), value.to(dtype)) for key, value in exact.items())
        assert {str(found[key].dtype) for key in found if key != "unused"} == {str(dtype)}
    convert(f"{tmp_path}/run/step_00000001", str(tmp_path / "model"), weights="model", dtype="fp32")
    rounded = load_file(tmp_path / "model/model.safetensors")
    assert not torch.equal(rounded["up.weight"], exact["up.weight"])


def load_as(
    name: str, url: str, dtype: torch.dtype, optimizer_option: Any
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Load as another dtype; return the weights, gathered, and the report's notes."""
    model = made(name, 1, True)[0].to(dtype)
    bits = None if dtype is torch.float32 else 24  # fp32 weights have no lower bits
    optimizer = of_flashoptim("FlashAdamW", bits, quantize=True)(list(model.parameters()))
    report = load(
        url, TrainState(model=model, optimizer=optimizer, rng=False), convert_dtype=True, optimizer=optimizer_option
    )
    assert not any("error_bits" in state for state in optimizer.state.values())  # the weights have them
    return {key: value.full_tensor() for key, value in model.state_dict().items()}, report.notes


@needs_flashoptim
@pytest.mark.parametrize("name", ["FlashAdamW of flashoptim", "FlashAdamW of flashoptim, split runs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_load_into_another_dtype_has_exact_weights(ranks: Any, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    exact = ranks.run(exact_weights, 2, name, str(tmp_path / "run"))[0]
    for size, optimizer in ((2, "restore"), (3, "skip")):
        found, notes = ranks.run(load_as, size, name, str(tmp_path / "run"), dtype, optimizer)[0]
        assert found.keys() == exact.keys()
        assert all(torch.equal(found[key], value.to(dtype)) for key, value in exact.items())
        assert any("restored exactly, with the lower bits that flashoptim keeps" in note for note in notes)
        assert [note.partition(":")[0] for note in notes if "cast from" in note] == ["model.unused"]


@needs_flashoptim
@pytest.mark.parametrize("held", [torch.int8, torch.int16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_ranks(1)
def test_every_weight_gets_the_lower_bits_of_flashoptim(dtype: torch.dtype, held: torch.dtype) -> None:
    made("FlashAdamW of flashoptim", 0, False)  # lets the library's kernels run here
    from flashoptim import reconstruct_fp32_param

    weights = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    weights = weights[weights.isfinite()]
    if dtype is torch.bfloat16:  # Triton's interpreter takes its subnormal numbers for zeros
        weights = weights[(weights == 0) | (weights.abs() >= torch.finfo(dtype).tiny)]
    largest = torch.iinfo(held).max
    lower = torch.randint(-largest, largest + 1, weights.shape, dtype=held, generator=torch.Generator().manual_seed(0))
    names = [str(kind).removeprefix("torch.") for kind in (dtype, held)]
    stored = [
        Stored(tensor.view(torch.uint8).numpy(), name, tuple(tensor.shape))
        for tensor, name in zip((weights, lower), names, strict=True)
    ]
    computed, _ = with_lower_bits(stored[0], stored[1:], 0, dtype="float32")
    expected = reconstruct_fp32_param(weights, lower)
    assert torch.equal(torch.from_numpy(computed).view(torch.float32), expected)
    assert torch.equal(of_a_load(weights, lower), expected)


@needs_flashoptim
@on_ranks(2)
def test_states_in_the_form_of_flashoptims_state_dict_are_refused_by_name(tmp_path: Path) -> None:
    """A new optimizer would take them for other states, and start without moments."""
    first, again = (made("FlashAdamW of flashoptim", seed, True) for seed in (0, 1))
    train(*first, range(2))
    url, state = (
        str(tmp_path / "theirs"),
        {"model": first[0].state_dict(), "optimizer": get_optimizer_state_dict(*first)},
    )
    dcp.save(state, checkpoint_id=url)
    live = TrainState(model=again[0], optimizer=again[1], rng=False)
    said = r"up\.weight\.exp_avg::.*FlashAdamW keeps these states in another form"
    check_misfit(tmp_path / "run", live, f"(?s){said}", which=url)


@needs_flashoptim
@on_ranks(2)
def test_masters_of_flashoptim_take_the_values_of_weights_that_are_loaded_alone(tmp_path: Path) -> None:
    first, again = (made("FlashAdamW of flashoptim", seed, True) for seed in (0, 1))
    train(*first, range(2))
    train(*again, range(2))
    before = everything(*again)
    save(tmp_path, TrainState(model=first[0], optimizer=first[1]))
    load(tmp_path, TrainState(model=again[0], optimizer=again[1]), optimizer="skip")
    changed = different(everything(*again), before)
    assert {name.rpartition(".")[2] for name in changed} == {"weight", "error_bits"}


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon", "Lion"])
@on_ranks(2)
def test_torch_loads_a_managers_states_like_those_that_it_saved(tmp_path: Path, name: str) -> None:
    """For a parameter without a gradient, torch's `get_state_dict` creates states that no checkpoint has."""
    first = made(name, 0, True)
    train(*first, range(2))
    save(tmp_path / "ours", TrainState(model=first[0], optimizer=first[1]))
    model, states = get_state_dict(*first)
    dcp.save({"model": model, "optimizer": states}, checkpoint_id=tmp_path / "theirs")
    found: list[Any] = []
    for url in (tmp_path / "ours/step_00000001", tmp_path / "theirs"):
        again = made(name, 1, True)
        model, states = get_state_dict(*again)
        state, planner = {"model": model, "optimizer": states}, DefaultLoadPlanner(allow_partial_load=True)
        try:
            dcp.load(state, checkpoint_id=url)
        except CheckpointException as error:
            assert "Missing key in checkpoint state_dict: optimizer.state.unused." in str(error)
            dcp.load(state, checkpoint_id=url, planner=planner)
        set_state_dict(*again, model_state_dict=model, optim_state_dict=states)
        found.append(everything(*again))
    assert different(*found) == []
