"""Loads from an object store: which requests run early, and what happens if a guess was wrong or late."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.run.delete import delete_checkpoint
from ckptkit.checkpoint.run.pins import list_pins
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.formats.dcp.torch_api import DCPReader, DCPWriter
from ckptkit.storage import open_store
from tests.checkpoint.states import linear, value_of
from tests.remote.runs import Options
from tests.storage.proxy import PASS, Proxy


def elsewhere(options: Options) -> Options:
    """Return options for another connection, with an empty cache."""
    return {**options, "client_kwargs": {"region_name": "us-east-1"}}


def state_with(value: float) -> TrainState:
    return TrainState(model=linear(value).model, extra={"value": value})


def save(url: str, options: Options, *steps: int, tag: str | None = None) -> None:
    with CheckpointManager(url, storage_options=options) as manager:
        for step in steps:
            manager.save(step, state_with(step), tag=tag)


def test_a_load_repeats_only_the_check_of_its_pin(proxy: Proxy, options: Options, url: str) -> None:
    save(url, options, 1, 2)
    state = state_with(0)
    with CheckpointManager(url, storage_options=elsewhere(options)) as manager:
        proxy.clear()
        manager.load(state)
        kinds, seen = proxy.kinds(), list(proxy.seen)
    assert value_of(state) == 2
    # Two records, two of the index, the data, the pin; and a listing of deletions and the record once more before
    # anything is read into the state.
    assert kinds == {"LIST": 2, "GET": 6, "PUT": 1}, kinds
    assert [path for _, path in seen if seen.count(("GET", path)) > 1] == [
        path for _, path in seen if path.endswith("step_00000002/checkpoint.json")
    ]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_small_files_take_one_request_each(proxy: Proxy, options: Options, url: str) -> None:
    saved = {f"w{i}": torch.full((9 << 18,), float(i)) for i in range(4)}  # 36 MiB
    dcp.save(saved, storage_writer=DCPWriter(url, storage_options=options))
    files = [item.path for item in open_store(url, storage_options=options).list() if item.path.endswith(".distcp")]
    target = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    proxy.clear()
    dcp.load(target, storage_reader=DCPReader(url, storage_options=options))
    assert all(torch.equal(target[key], saved[key]) for key in saved)
    assert len(files) > 1
    assert sorted(path.rpartition("/")[2] for _, path in proxy.seen if path.endswith(".distcp")) == sorted(files)


@pytest.mark.parametrize("atomic", [False, True])
def test_a_load_whose_checkpoint_is_rotated_away_loads_the_next_one(
    proxy: Proxy, options: Options, url: str, atomic: bool
) -> None:
    near = elsewhere(options)
    save(url, options, 1)
    gone, once = threading.Event(), threading.Lock()

    def rule(number: int, method: str, path: str) -> str:
        if method == "PUT" and "/pins/" in path and once.acquire(blocking=False):
            proxy.rule = PASS  # of what another job does now
            save(url, near, 2)
            delete_checkpoint(open_store(url, storage_options=near), "step_00000001", reason="test")
            gone.set()
        elif "step_00000001" in path and method == "GET" and not path.endswith("checkpoint.json"):
            gone.wait(60)
        return "pass"

    proxy.rule = rule
    state = state_with(0)
    with CheckpointManager(url, storage_options=elsewhere(options)) as manager:
        report = manager.load(state, atomic=atomic)
    assert gone.is_set() and report is not None and report.step == 2
    assert value_of(state) == 2 and not state.half_loaded


def test_a_loaded_checkpoint_stays_pinned_until_the_next_load(s3: Options, url: str) -> None:
    save(url, s3, 1, 2)
    root = open_store(url, storage_options=s3)
    with CheckpointManager(url, storage_options=s3) as manager:
        for step in (1, 2, 1):
            manager.load(state_with(0), step)
        assert "step_00000001" in [pin.name for pin in list_pins(root)]
    assert not list_pins(root)


@pytest.mark.parametrize("which", ["latest", 3, "3", "step_00000003"])
def test_a_run_that_was_rolled_back_loads_its_latest_save_not_its_highest_step(
    s3: Options, url: str, which: str | int
) -> None:
    save(url, s3, 5)
    save(url, s3, 3)
    state = state_with(0)
    with CheckpointManager(url, storage_options=elsewhere(s3)) as manager:
        report: Any = manager.load(state, which)
    assert report.step == 3 and value_of(state) == 3 and state.extra["value"] == 3


def test_a_tag_of_digits_is_not_a_step(s3: Options, url: str) -> None:
    save(url, s3, 7)
    save(url, s3, 7, tag="7")
    with CheckpointManager(url, storage_options=elsewhere(s3)) as manager:
        report: Any = manager.load(state_with(0), 7)
    assert report.url.endswith("/7")
