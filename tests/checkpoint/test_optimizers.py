"""Every optimizer resumes bit-exactly in every checkpoint type on every number of ranks, or is refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckptkit import CheckpointManager, TrainState
from ckptkit.errors import CheckpointMismatchError, CkptkitError
from tests.checkpoint.optimizers import Net, made, train

pytestmark = pytest.mark.filterwarnings("ignore")  # libraries use deprecated functions of torch

KINDS = ("sharded", "full", "local")
ELSEWHERE = {1: 2, 2: 3, 3: 1}

# By the number of ranks that saved: the text of the refusal on another number of ranks; all others load.
Refused = dict[int, str]

SHARDED: dict[str, Refused] = {
    "AdamW": {},
    "SGD": {},
    "Adagrad": {},
    "RMSprop": {},
    "NAdam": {},
    "ASGD": {},
    "Muon": {},
    "masters of AdamW": {},
    "masters of Lion": {},
    "LAMB": {},
    "local moments": {},
    "factored moments": {},
    "Shampoo": {1: "up.weight.left"},
    "Prodigy of each rank": {2: "param_groups.0.d, ", 3: "param_groups.0.d, "},
    "Shampoo of each rank": {1: "up.weight.factors", 2: "up.weight.factors", 3: "up.weight.factors"},
    "Shampoo of each rank, by name": {1: "up.weight.left", 2: "down.weight.left", 3: "down.weight.left"},
    "SOAP of each rank": {1: "up.weight.GG", 2: "down.weight.exp_avg", 3: "down.weight.exp_avg"},
}
"""Parameters sharded by fully_shard."""

REPLICATED: dict[str, Refused] = {
    "AdamW": {},
    "Muon": {},
    "Adafactor": {},
    "Rprop": {},
    "Adafactor of transformers": {},
    "AdamW8bit of bitsandbytes": {},
    "LAMB8bit of bitsandbytes": {},
    "masters of AdamW": {},
    "Prodigy of each rank": {},
    "Shampoo of each rank": {},
    "Shampoo of each rank, by name": {},
    "SOAP of each rank": {},
    "ZeRO": {2: "up.weight, ", 3: "up.weight, "},
}
"""Parameters whole on each rank, as under DDP; some of these optimizers support no others."""


LIBRARIES_SHARDED: dict[str, Refused] = {
    "Lion": {},
    "schedule-free": {},
    "schedule-free SGD": {},
    "Prodigy": {2: "param_groups.0.d, ", 3: "param_groups.0.d, "},
    "GaLore": {1: "up.weight.projector", 2: "up.weight.projector", 3: "up.weight.projector"},
    "FlashAdamW": {},
    "GaLore of pytorch_optimizer": {},
    "AdEMAMix": {},
    "AggMo": {},
    "APOLLO": {},
}
"""Those that can step DTensors."""

LIBRARIES_REPLICATED: dict[str, Refused] = {
    **{name: {} for name in LIBRARIES_SHARDED},
    "SOAP": {},
    "SPlus": {},
    "Shampoo of pytorch_optimizer": {},
    "Adafactor of pytorch_optimizer": {},
    "CAME": {},
    "Kron": {},
}

NOT_SAVED = {
    "Ranger21": "the state_dict of Ranger21 has 'lookahead_step', 'starting_lr', 'current_lr', but only 'state' ",
    "scalable Shampoo": "up.weight.pre_conditioner: a value of type pytorch_optimizer.optimizer.utils.preconditioner",
}
"""By optimizer: the text of the refusal to save its state."""


def bits(value: Any) -> Any:
    """Return a value with its classes, placements and bytes."""
    if isinstance(value, DTensor):
        return "DTensor", str(value.placements), tuple(value.shape), bits(value.to_local())
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), value.stride(), flat.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [bits(item) for item in value]
    return (type(value).__name__, bits(vars(value))) if type(value).__name__ == "GaLoreProjector" else value


def joined(value: Any, shard_of: Any = None) -> Any:
    """Return a value with DTensors joined, and a plain tensor that is a shard of `shard_of`. All ranks must call it."""
    if isinstance(value, torch.Tensor):
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
            found[f"{name}.{key}"] = joined(value, parameter if key == "exp_avg" else None) if join else bits(value)
    for index, group in enumerate(optimizer.param_groups):
        found |= {f"{index}.{key}": bits(value) for key, value in group.items() if "param" not in key}
    return found


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(key for key in one.keys() | other.keys() if one.get(key, "none") != other.get(key, "none"))


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
    with allowed(name):
        for kind in KINDS:
            try:
                with CheckpointManager(f"{url}/{kind}", state_dict_type=kind) as manager:
                    manager.save(3, TrainState(model=first[0], optimizer=first[1]))
            except CkptkitError as error:
                dist.barrier()
                assert not list(Path(url).rglob("step_*"))
                return {}, str(error)
        train(*first, range(3, 6))
        end = everything(*first)
        for kind in KINDS:
            again = made(name, 1, sharded)
            if kind != "sharded":  # this type loads into an optimizer without a state
                train(*again, range(50, 51))
            with CheckpointManager(f"{url}/{kind}") as manager:
                report = manager.load(TrainState(model=again[0], optimizer=again[1]))
            assert report is not None and not (report.missing or report.unexpected or report.skipped)
            assert not different(everything(*again), at), (kind, different(everything(*again), at))
            train(*again, range(3, 6))
            assert not different(everything(*again), end), (kind, different(everything(*again), end))
    return whole, ""


def elsewhere(name: str, url: str, sharded: bool) -> list[Any]:
    """Return the loaded values of each type, or the refusal."""
    found: list[Any] = []
    for kind in KINDS[:2]:
        again = made(name, 1, sharded)
        before = everything(*again)
        try:
            with allowed(name), CheckpointManager(f"{url}/{kind}") as manager:
                manager.load(TrainState(model=again[0], optimizer=again[1]))
        except CheckpointMismatchError as error:
            assert not different(everything(*again), before)
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
                assert named in found and "load only where the parameters are sharded the same way" in found
            else:
                assert not isinstance(found, str), found
                assert not different(found, saved[0][0])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", SHARDED)
def test_an_optimizer_under_fully_shard_resumes_bit_exactly(ranks: Any, tmp_path: Path, name: str, size: int) -> None:
    check(ranks, tmp_path, name, size, True, SHARDED[name].get(size, ""))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", REPLICATED)
def test_an_optimizer_on_replicas_resumes_bit_exactly(ranks: Any, tmp_path: Path, name: str, size: int) -> None:
    check(ranks, tmp_path, name, size, False, REPLICATED[name].get(size, ""))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", LIBRARIES_SHARDED)
def test_a_librarys_optimizer_under_fully_shard_resumes_bit_exactly(
    ranks: Any, tmp_path: Path, name: str, size: int
) -> None:
    check(ranks, tmp_path, name, size, True, LIBRARIES_SHARDED[name].get(size, ""))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", LIBRARIES_REPLICATED)
def test_a_librarys_optimizer_on_replicas_resumes_bit_exactly(ranks: Any, tmp_path: Path, name: str, size: int) -> None:
    check(ranks, tmp_path, name, size, False, LIBRARIES_REPLICATED[name].get(size, ""))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", NOT_SAVED)
def test_state_of_a_librarys_optimizer_that_no_load_could_restore_is_refused_on_every_rank(
    ranks: Any, tmp_path: Path, name: str, size: int
) -> None:
    for _, text in ranks.run(run, size, name, str(tmp_path), False):
        assert NOT_SAVED[name] in text


@pytest.mark.parametrize("size", [1, 2])
def test_optimizer_state_that_no_load_could_restore_is_refused_on_every_rank(
    ranks: Any, tmp_path: Path, size: int
) -> None:
    for _, text in ranks.run(run, size, "queue", str(tmp_path), True):
        assert "optimizer.values.up.weight.queue: a value of type collections.deque cannot be saved" in text
