"""Tensors on a device are saved and loaded like tensors on the host."""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ckptkit import CheckpointManager, DCPLoadPlanner, DCPReader, DCPSavePlanner, DCPWriter, TrainState
from ckptkit.checkpoint.save.staging import StagingBuffers
from ckptkit.formats.dcp import host_bytes
from ckptkit.formats.dcp.host_bytes import HostBytes
from tests.checkpoint.states import bits, trained

DTYPES = "float32 float64 bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int8 uint8 bool"


class Tensors(nn.Module):
    """Buffers of every dtype, empty and large, transposed and sliced; filled with `seed`, or zeros."""

    def __init__(self, device: str, seed: int | None = None) -> None:
        super().__init__()

        def filled(*shape: int) -> torch.Tensor:
            made = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed or 0)).float()
            return (torch.zeros(shape) if seed is None else made).to(device)

        for dtype in DTYPES.split():
            self.register_buffer(f"as_{dtype}", filled(37, 11).to(getattr(torch, dtype)))
        self.register_buffer("empty", filled(0, 3))
        self.register_buffer("scalar", filled())
        self.register_buffer("columns", filled(300, 50).T)
        self.register_buffer("strided", filled(40, 40)[::2, 3:9])


def training(device: str, seed: int | None = None) -> TrainState:
    """Return a model with tensors of every dtype and an optimizer after a step; values depend on the seed."""
    torch.manual_seed(0 if seed is None else seed)
    model = nn.ModuleDict({"layer": nn.Linear(16, 8), "tensors": Tensors(device, seed)}).to(device)
    return trained(model, params=model["layer"].parameters(), lr=0.1)


def contents(state: TrainState) -> Any:
    """Return a copy of all tensors of a state on the host, which can be compared with `==`."""
    parts = (state.model.state_dict(), *state.optimizer.state_dict()["state"].values())
    return bits([{name: value.cpu().contiguous() for name, value in part.items()} for part in parts])


def assert_same(found: TrainState, expected: Any, device: str) -> None:
    """Check that a state holds these values bit for bit, and its model is on this device."""
    assert contents(found) == expected
    assert {value.device.type for value in found.model.state_dict().values()} == {device}


KINDS = pytest.mark.parametrize("kind", ["sharded", "full", "local"])
WAYS = pytest.mark.parametrize("way", ["save", "async"])


def save(manager: CheckpointManager, way: str, state: TrainState) -> None:
    manager.save(1, state) if way == "save" else manager.save_async(1, state).result()


@KINDS
@WAYS
@pytest.mark.parametrize("source", ["device", "host"])
def test_every_dtype_and_layout_round_trips_on_its_device_and_loads_on_another(device, kind, way, source, tmp_path):
    state = training("cpu" if source == "host" else device, 1)
    expected = contents(state)
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        save(manager, way, state)
        for target, atomic in (("cpu", False), (device, False), (device, True)):
            loaded = training(target)
            manager.load(loaded, atomic=atomic)
            assert_same(loaded, expected, target)


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_training_continues_with_a_parameter_without_dimensions(device, options, tmp_path):
    def stepped(steps):
        scale = nn.Parameter(torch.tensor(2.0, device=device))
        optimizer = torch.optim.AdamW([scale], lr=0.1, **options)
        return step(TrainState(model=nn.ParameterDict({"scale": scale}), optimizer=optimizer), steps)

    def step(state, steps):
        for _ in range(steps):
            state.model["scale"].grad = torch.full_like(state.model["scale"], 0.3)
            state.optimizer.step()
        return state

    state, loaded = stepped(2), stepped(0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        manager.load(loaded)
    devices = [{k: v.device.type for k, v in s.optimizer.state[s.model["scale"]].items()} for s in (state, loaded)]
    assert devices[0] == devices[1]
    assert_same(step(loaded, 1), contents(step(state, 1)), device)


@WAYS
def test_a_save_waits_for_pending_device_work(device, way, tmp_path):
    model = nn.Module()
    model.register_buffer("product", torch.eye(512, device=device))
    with CheckpointManager(tmp_path) as manager:
        for _ in range(50):  # on a device these are still running when the save begins
            model.product = model.product @ model.product
        model.product.mul_(3)
        save(manager, way, TrainState(model=model))
        target = nn.Module()
        target.register_buffer("product", torch.zeros(512, 512, device=device))
        manager.load(TrainState(model=target))
    assert torch.equal(target.product, 3 * torch.eye(512, device=device))


def test_training_after_the_start_of_a_background_save_does_not_change_it(device, tmp_path):
    model = nn.Linear(1024, 2048, bias=False).to(device)
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):  # the second step uses the memory that the first one allocated
            nn.init.constant_(model.weight, step)
            handle = manager.save_async(step, TrainState(model=model))
            with torch.no_grad():
                model.weight.fill_(-1)
            handle.result()
        for step in (1, 2):
            manager.load(TrainState(model=model), step)
            assert bool((model.weight == step).all())


# --- the host memory through which device tensors are copied to a file


def test_a_device_snapshot_reuses_pinned_memory(device):
    buffers = StagingBuffers()
    given = [torch.randn(1000, 70), torch.arange(5), torch.randn(64, 48).T, torch.randn(9, 9).bfloat16()]
    given = [tensor.to(device) for tensor in given]
    first = buffers.copy(given)
    places = [view.data_ptr() for view in first]
    assert all(view.is_pinned() for view in first) == (device == "cuda")
    for tensor in given:
        tensor.add_(1)
    second = buffers.copy(given)
    assert [view.data_ptr() for view in second] == places
    assert all(torch.equal(view, tensor.cpu()) for view, tensor in zip(second, given, strict=True))
    buffers.release()
    assert buffers.nbytes == 0


def test_snapshots_of_another_device_use_other_memory(device):
    buffers = StagingBuffers()
    buffers.copy([torch.ones(10)])
    (view,) = buffers.copy([torch.full((10,), 2.0, device=device)])
    assert view.is_pinned() == (device == "cuda")
    assert torch.equal(view, torch.full((10,), 2.0))
    (view,) = buffers.copy([torch.ones(10)])
    assert not view.is_pinned()


@pytest.mark.parametrize("rest", [-8, 0, 8])
def test_a_large_tensor_is_copied_through_two_alternating_buffers(device, rest):
    numel = (3 * host_bytes._STAGE + rest) // 4
    tensor = torch.arange(numel, dtype=torch.int32, device=device)
    tensor.mul_(2)  # on a device it is still running
    source, at, expected = HostBytes(), 0, memoryview(tensor.cpu().numpy()).cast("B")
    for piece in source.pieces(tensor):
        assert piece == expected[at : at + len(piece)]
        at += len(piece)
    assert at == 4 * numel
    pinned = [buffer.is_pinned() for buffers in source._stages.values() for buffer in buffers]
    assert pinned == ([True, True] if device == "cuda" else [])


def test_a_device_state_round_trips_through_a_disk(device, tmp_path):
    made = {
        "large": torch.randn(10 << 20, device=device), "columns": torch.randn(300, 5000, device=device).T,
        "bf16": torch.randn(1000, 1000, device=device).bfloat16(), "small": torch.arange(5, device=device),
        "scalar": torch.tensor(2.5, device=device), "host": torch.randn(1000),
    }  # fmt: skip
    made["large"].mul_(2)  # on a device it is still running
    dcp.save(made, storage_writer=DCPWriter(tmp_path, workers=2), planner=DCPSavePlanner(), no_dist=True)
    target = {name: torch.zeros_like(value) for name, value in made.items()}
    dcp.load(target, storage_reader=DCPReader(tmp_path), planner=DCPLoadPlanner(), no_dist=True)
    assert all(torch.equal(target[name], made[name]) for name in made)
