"""If one rank fails in code that runs before the ranks communicate, all ranks fail at once."""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from ckptkit import CheckpointManager, TrainState
from ckptkit.fsdp import FSDPStrategy
from ckptkit.fsdp.hf_save import save_hf
from tests.checkpoint import jobs
from tests.checkpoint.states import linear, load, on_all, refusal, save
from tests.ranks import on_ranks


def _model(alone: bool) -> nn.Module:
    """Return a model that has no values on the rank that must fail."""
    with torch.device("meta" if alone else "cpu"):
        return nn.Linear(3, 2)


def _environment(url: str, alone: bool) -> None:
    os.environ["CKPTKIT_STORAGE_TIMEOUT"] = "soon" if alone else "90s"
    try:
        CheckpointManager(url)
    finally:
        del os.environ["CKPTKIT_STORAGE_TIMEOUT"]


def _saves(url: str, wrong: dict[str, Any], **options: Any) -> None:
    with CheckpointManager(url, **options) as manager:
        manager.save(1, linear(), **wrong)


def _work_of_the_caller(url: str, alone: bool) -> None:
    with CheckpointManager(url) as manager:
        manager.run_on_all(lambda: {}["none"] if alone else None, "looking up none")


def _waiting_backward(url: str, alone: bool) -> None:
    with FSDPStrategy(train_batch_size=4) as strategy:
        model = strategy.prepare_model(nn.Linear(3, 2))
        optimizer = strategy.create_optimizer(model)
        if alone:
            strategy._windows.backward(model, 2, last=False, scale=1.0)
        strategy.load_ckpt(model, url, optimizer)


def _prepared(alone: bool) -> None:
    def policy(model: nn.Module) -> list[str]:
        return ["no.such.module"] if alone else []

    with FSDPStrategy() as strategy:
        strategy.prepare_model(nn.Linear(3, 2), policy=policy)


def _load_hf(url: str, alone: bool) -> None:
    place = Path(f"{url}_files_{dist.get_rank()}")
    place.mkdir()
    if not alone:
        save_file(nn.Linear(3, 2).state_dict(), place / "model.safetensors")
    with FSDPStrategy() as strategy:
        strategy.load_hf(strategy.prepare_model(nn.Linear(3, 2)), str(place))


ALONE: dict[str, tuple[Callable[[str, bool], Any], str]] = {
    "environment": (_environment, "CKPTKIT_STORAGE_TIMEOUT"),
    "url": (lambda url, alone: CheckpointManager("" if alone else url), "path is empty"),
    "tag": (lambda url, alone: _saves(url, {"tag": "../up"} if alone else {}), "tag '../up'"),
    "state": (
        lambda url, alone: save(url, TrainState(extra={"bad": object() if alone else 1})),
        "extra.bad",
    ),
    "metrics": (lambda url, alone: _saves(url, {"metrics": 5} if alone else {}), "not iterable"),
    "type of url": (lambda url, alone: CheckpointManager(None if alone else url), "url is None, expected a path"),
    "retention": (lambda url, alone: CheckpointManager(url, retention=3 if alone else None), "retention is 3, expect"),
    "overwrite": (lambda url, alone: _saves(url, {"overwrite": "no"} if alone else {}), "overwrite is 'no'"),
    "which": (lambda url, alone: load(url, linear(), 1.5 if alone else "latest"), "which is 1.5, expected"),
    "load option": (lambda url, alone: load(url, linear(), strict="no" if alone else True), "strict is 'no'"),
    "first FULL save": (
        lambda url, alone: _saves(url, {"tag": ".."} if alone else {}, state_dict_type="full"),
        "tag '..'",
    ),
    "work of the caller": (_work_of_the_caller, "looking up none"),
    "save_ckpt without values": (
        lambda url, alone: FSDPStrategy().save_ckpt(_model(alone), url, step=1),
        "no values to save",
    ),
    "save_model without values": (lambda url, alone: save_hf(_model(alone), f"{url}/hf"), "no values to save"),
    "prepare_model with a policy": (lambda url, alone: _prepared(alone), "no.such.module"),
    "load_hf without files": (_load_hf, "safetensors"),
    "load_ckpt between two backward passes": (_waiting_backward, "have not been used by a step"),
}


@pytest.mark.parametrize("name", ALONE)
@on_ranks(2)
def test_an_error_of_one_rank_is_raised_on_all_and_nothing_is_written(tmp_path, name):
    act, said = ALONE[name]
    text = on_all(refusal(lambda: act(str(tmp_path / "run"), dist.get_rank() == 1)))
    assert "rank 1" in text and said in text
    assert not list(tmp_path.rglob("step_*")) and not (tmp_path / "run/hf").exists()


@on_ranks(2)
def test_a_rank_that_can_start_no_thread_does_not_leave_the_others_waiting(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        threading.stack_size(1 << 46 if dist.get_rank() == 1 else 0)  # an impossible stack size: no thread starts
        try:
            text = refusal(lambda: manager.save_async(1, linear()).result())
        finally:
            threading.stack_size(0)
    assert on_all(text) == ""


@on_ranks(2)
def test_training_that_fails_on_one_rank_ends_the_saves_on_the_other_ranks_at_once(tmp_path):
    text = ""
    with contextlib.suppress(ValueError), CheckpointManager(tmp_path) as manager:
        manager.save(1, jobs.make("1d").state())
        if dist.get_rank() == 1:
            raise ValueError("the loss is NaN")
        text = refusal(lambda: manager.save(2, jobs.make("1d").state()))
    assert dist.get_rank() == 1 or ("rank 1" in text and "it died, or its connection broke" in text)
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000001"]
