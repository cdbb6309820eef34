"""Small training states: made, saved, loaded, and compared bit by bit."""

import contextlib
import copy
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ckptkit import CheckpointManager, TrainState
from ckptkit.errors import CheckpointMismatchError, CkptkitError, SaveError

KINDS = ("sharded", "full", "local")


def linear(value: float = 0.0) -> TrainState:
    """Return a state whose parameters all have one value."""
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return TrainState(model=model, rng=False)


def value_of(state: TrainState) -> float:
    """Return the value of the parameters of a `linear` state."""
    (value,) = {number for p in state.model.parameters() for number in p.flatten().tolist()}
    return float(value)


def bits(value: Any) -> Any:
    """Return a copy of a state or of any value in it, with tensors as bytes, that can be compared with `==`."""
    if isinstance(value, TrainState):
        names = ("model", "optimizer", "scheduler", "grad_scaler", "dataloader", "extra")
        return {name: bits(getattr(value, name)) for name in names}
    if isinstance(value, DTensor):
        return "DTensor", str(value.placements), tuple(value.shape), bits(value.to_local())
    if isinstance(value, torch.Tensor):
        kind = type(value)
        if kind not in (torch.Tensor, nn.Parameter) and hasattr(value, "__tensor_flatten__"):
            names, settings = value.__tensor_flatten__()
            return kind.__name__, str(settings), [bits(getattr(value, name)) for name in names]
        flat = value.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), value.stride(), flat.numpy().tobytes()
    if hasattr(value, "state_dict") and type(value).__name__ != "_MaybeQuantizedTensor":  # a state of flashoptim
        return bits(value.state_dict())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [bits(item) for item in value]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return type(value).__name__, bits(vars(value))
    return copy.copy(value)


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the keys that only one of two dicts has, or that have different values."""
    return sorted(key for key in one.keys() | other.keys() if one.get(key, "none") != other.get(key, "none"))


@contextlib.contextmanager
def unchanged(*states: TrainState) -> Iterator[None]:
    """Fail if the block changes a value of these states, or leaves one half loaded."""
    before = bits(states)
    try:
        yield
    finally:
        assert bits(states) == before
        assert not any(state.half_loaded for state in states)


class Kept:
    """An object with a state of one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class WithExtraState(nn.Linear):
    """A layer with a value besides its tensors."""

    kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def optimized(model: nn.Module, make: Any = torch.optim.SGD, **settings: Any) -> TrainState:
    """Return the state of a model and a new optimizer of its parameters."""
    return TrainState(model=model, optimizer=make(model.parameters(), **{"lr": 0.1, **settings}), rng=False)


def trained(model: nn.Module, make: Any = torch.optim.AdamW, *, steps: int = 1, params: Any = None, **more: Any) -> Any:
    """Return the state of a model and of an optimizer that made some steps with random gradients.

    `params` replaces the parameters of the model; `more` are settings of the optimizer.
    """
    optimizer = make(model.parameters() if params is None else params, **more)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return TrainState(model=model, optimizer=optimizer)


def check_resumed(live: TrainState, saved: TrainState) -> None:
    """Fail unless each parameter of a state, and what its optimizer keeps of it, equals that of another."""
    pairs = zip(live.model.named_parameters(), saved.model.parameters(), strict=True)
    for (name, mine), theirs in pairs:
        assert torch.equal(mine, theirs), name
        assert bits(live.optimizer.state.get(mine, {})) == bits(saved.optimizer.state.get(theirs, {})), name


def save(root: str | Path, state: TrainState, step: int = 1, **options: Any) -> str:
    """Save with a manager of these options; return the root."""
    with CheckpointManager(root, **options) as manager:
        manager.save(step, state)
    return str(root)


def save_steps(root: str | Path, *steps: int, make: Callable[[int], TrainState] = linear, **options: Any) -> Path:
    """Save what `make` returns for each step, with one manager of these options; return the root."""
    with CheckpointManager(root, **options) as manager:
        for step in steps:
            manager.save(step, make(step))
    return Path(root)


def load(root: str | Path, state: TrainState, which: str | int = "latest", **options: Any) -> Any:
    """Load with these options; return the report."""
    with CheckpointManager(root) as manager:
        report = manager.load(state, which, **options)
    assert report is not None
    return report


def load_all(root: str | Path, state: TrainState, which: str | int = "latest", **options: Any) -> Any:
    """Load; fail if the checkpoint and the state do not have the same parts. Return the report."""
    report = load(root, state, which, **options)
    assert not (report.missing or report.unexpected or report.skipped)
    return report


def check_round_trip(root: str | Path, source: TrainState, live: TrainState, kind: str, **options: Any) -> Any:
    """Save `source`, load it into `live`, and compare all their values; return the report."""
    report = load_all(save(root, source, state_dict_type=kind), live, **options)
    assert bits(live) == bits(source)
    return report


def check_refused(root: str | Path, state: TrainState, said: str, *, error: Any = SaveError, **options: Any) -> None:
    """Fail unless a save is refused with a text that matches `said`, and publishes nothing."""
    with pytest.raises(error, match=said):
        save(root, state, **options)
    assert not list(Path(root).glob("step_*"))


def check_misfit(
    root: str | Path, state: TrainState, said: str, *, error: Any = CheckpointMismatchError, **options: Any
) -> None:
    """Fail unless a load is refused with a text that matches `said`, and changes nothing."""
    with pytest.raises(error, match=said), unchanged(state):
        load(root, state, **options)


def refusal(call: Callable[[], Any]) -> str:
    """Return the class and the text of the error that a call raises, or nothing."""
    try:
        call()
    except CkptkitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def module_of(
    values: Mapping[str, torch.Tensor], trained: Collection[str] | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Return a module with copies of these tensors: parameters, or buffers if they are not among `trained`.

    With `dtype`, tensors of floats have this dtype.
    """
    model = nn.Module()
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        owner = model
        for part in path.split(".") if path else ():
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        tensor = value.to(dtype) if dtype is not None and value.is_floating_point() else value.clone()
        if trained is None or name in trained:
            owner.register_parameter(leaf, nn.Parameter(tensor))
        else:
            owner.register_buffer(leaf, tensor)
    return model


def on_all(value: Any) -> Any:
    """Return a value that must be equal on all ranks. All of them must call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert values == [value] * len(values)
    return value


measures_memory = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the most memory in use cannot be reset"
)


def memory_of(call: Callable[[], object]) -> int:
    """Return by how many bytes a call raises the memory of this process at most."""

    def status(name: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) << 10

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def flip(folder: str | Path, tensor: torch.Tensor) -> None:
    """Flip the last bit of the only file below a folder that has the bytes of a tensor."""
    wanted = tensor.detach().numpy().tobytes()
    holding = [path for path in Path(folder).rglob("*") if path.is_file() and wanted in path.read_bytes()]
    (file,) = holding
    data = bytearray(file.read_bytes())
    data[data.index(wanted) + len(wanted) - 1] ^= 1
    file.write_bytes(data)
