"""The dynamic loss scale: its updates and its state."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import CheckpointMismatchError, UsageError
from ckptkit.fsdp import DynamicGradScaler

O, F = True, False  # overflow, finite  # noqa: E741


@pytest.mark.parametrize(("updates", "scale", "growth", "hysteresis"), [
    ([], 16, 0, 0),
    ([F], 16, 1, 0),
    ([F, F, F], 32, 0, 0),
    ([O], 16, 0, 1),
    ([F, F, O], 16, 0, 1),
    ([O, O], 8, 0, 2),
    ([O, O, O], 4, 0, 3),
    ([O, O, F, O], 4, 0, 3),  # a backoff keeps the hysteresis count
    ([O, O, F, F, F], 16, 0, 0),
    ([O, F, F, F, O], 32, 0, 1),  # a growth resets it
    ([O] * 9, 2, 0, 9),  # the minimum
    ([F] * 15, 64, 0, 0),  # the maximum
])  # fmt: skip
def test_the_scale_follows_the_documented_rules(updates, scale, growth, hysteresis):
    scaler = DynamicGradScaler(16, growth_interval=3, min_scale=2, max_scale=64)
    for overflow in updates:
        scaler.update(overflow)
    assert scaler.state_dict() == {"_scale": scale, "_growth_step": growth, "_hysteresis_step": hysteresis}
    assert scaler.scale * scaler.inv_scale == 1.0


@given(st.lists(st.booleans(), max_size=40), st.lists(st.booleans(), max_size=20))
def test_a_loaded_scaler_continues_like_the_saved_one(before, after):
    first, second = (DynamicGradScaler(2.0**10, growth_interval=4) for _ in range(2))
    for overflow in before:
        first.update(overflow)
    second.load_state_dict(first.state_dict())
    for overflow in after:
        first.update(overflow)
        second.update(overflow)
    assert first.state_dict() == second.state_dict()


def test_scaler_states_with_tensors_or_a_constant_scale_are_accepted():
    scaler = DynamicGradScaler()
    scaler.load_state_dict({"_scale": torch.tensor([8.0]), "_growth_step": 2, "_hysteresis_step": 1})
    assert scaler.state_dict() == {"_scale": 8.0, "_growth_step": 2, "_hysteresis_step": 1}
    scaler.load_state_dict({"scale": torch.tensor([4.0])})
    assert scaler.state_dict() == {"_scale": 4.0, "_growth_step": 0, "_hysteresis_step": 0}


@pytest.mark.parametrize("state", [{}, {"_scale": 1.0}, {"_scale": 0.0, "_growth_step": 0, "_hysteresis_step": 0}])
def test_a_scaler_state_that_does_not_fit_is_refused_and_changes_nothing(state):
    scaler = DynamicGradScaler()
    with pytest.raises(CheckpointMismatchError):
        scaler.load_state_dict(state)
    assert scaler.scale == 2.0**16


@pytest.mark.parametrize("options", [
    {"growth_factor": 0.5}, {"backoff_factor": 1.5}, {"backoff_factor": 0}, {"growth_interval": 0}, {"hysteresis": 0},
    {"growth_factor": 1.0, "dtype": torch.float16}, {"backoff_factor": 1.0, "dtype": torch.float16},
    {"initial_scale": 0.5}, {"initial_scale": 2.0**30},
])  # fmt: skip
def test_impossible_scale_factors_are_refused(options):
    with pytest.raises(UsageError):
        DynamicGradScaler(**options)


def test_a_constant_scale_is_allowed_for_bf16():
    scaler = DynamicGradScaler(1.0, 1.0, 1.0, growth_interval=1)
    for overflow in (O, F, O, O):
        scaler.update(overflow)
    assert scaler.scale == 1.0
