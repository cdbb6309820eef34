"""Tensors on a device are saved and loaded like tensors on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckptkit import CheckpointManager, TrainState
from tests.gpu import states

WAYS = [
    ("sharded", "save"),
    ("sharded", "async"),
    ("full", "save"),
    ("full", "async"),
    ("local", "save"),
    ("local", "async"),
]


def save(manager: CheckpointManager, way: str, state: TrainState) -> None:
    if way == "save":
        manager.save(1, state)
    else:
        manager.save_async(1, state).result()


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_every_dtype_and_layout_round_trips_on_its_device(device, kind, way, tmp_path):
    state = states.training(device, 1)
    expected = states.copied(state)
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        save(manager, way, state)
        for atomic in (False, True):
            loaded = states.training(device)
            manager.load(loaded, atomic=atomic)
            states.assert_same(loaded, expected, device)


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
@pytest.mark.parametrize("to_device", [True, False], ids=["to the device", "from the device"])
def test_a_checkpoint_loads_on_another_device(device, kind, to_device, tmp_path):
    source, target = ("cpu", device) if to_device else (device, "cpu")
    state = states.training(source, 1)
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        manager.save(1, state)
        loaded = states.training(target)
        manager.load(loaded)
    states.assert_same(loaded, states.copied(state), target)


@pytest.mark.parametrize("way", ["save", "async"])
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
