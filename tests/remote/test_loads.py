"""Loads from an object store: which requests run early, and what happens if a guess was wrong or late."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ckptkit.checkpoint.run.delete import delete_checkpoint
from ckptkit.checkpoint.state.train_state import TrainState
from tests.checkpoint.states import linear, value_of
from tests.remote.runs import Place
from tests.storage.proxy import PASS


def state_with(value: float) -> TrainState:
    return TrainState(model=linear(value).model, extra={"value": value})


def save(place: Place, *steps: int, tag: str | None = None) -> None:
    with place.manager() as manager:
        for step in steps:
            manager.save(step, state_with(step), tag=tag)


def loaded(place: Place, *which: Any, **how: Any) -> Any:
    """Load in a new process; check that the values are those of the report's step, and return the report."""
    state = state_with(0)
    with place.elsewhere().manager() as manager:
        report = manager.load(state, *which, **how)
    assert report is not None and not state.half_loaded
    assert value_of(state) == state.extra["value"] == report.step
    return report


def test_a_load_repeats_only_the_check_of_its_pin(proxy, far):
    save(far, 1, 2)
    with far.elsewhere().manager() as manager:
        proxy.clear()
        manager.load(state_with(0))
        kinds, seen = proxy.kinds(), list(proxy.seen)
    # Two records, two of the index, the data, the pin; and a listing of deletions and the record once more before
    # anything is read into the state.
    assert kinds == {"LIST": 2, "GET": 6, "PUT": 1}, kinds
    assert [path for _, path in seen if seen.count(("GET", path)) > 1] == [
        path for _, path in seen if path.endswith("step_00000002/checkpoint.json")
    ]


@pytest.mark.parametrize("atomic", [False, True])
def test_a_load_whose_checkpoint_is_rotated_away_loads_the_next_one(proxy, far, atomic):
    save(far, 1)
    gone, once = threading.Event(), threading.Lock()

    def rule(number: int, method: str, path: str) -> str:
        if method == "PUT" and "/pins/" in path and once.acquire(blocking=False):
            proxy.rule = PASS  # of what another job does now
            save(far, 2)
            delete_checkpoint(far.store, "step_00000001", reason="test")
            gone.set()
        elif "step_00000001" in path and method == "GET" and not path.endswith("checkpoint.json"):
            gone.wait(60)
        return "pass"

    proxy.rule = rule
    assert loaded(far, atomic=atomic).step == 2 and gone.is_set()
