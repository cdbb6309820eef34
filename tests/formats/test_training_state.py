"""Finds the parts of a training state that another program saved, without torch."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit.errors import StorageError
from ckptkit.formats import training_state
from ckptkit.formats.detect import open_source
from ckptkit.formats.pickles.objects import TensorValue
from ckptkit.formats.training_state import TrainingState, extra_keys, read_training_state
from tests.formats.readback import tensor_bytes
from tests.lazy import modules_after
from tests.patches import failing


def parts_of(saved: dict[str, Any], tmp_path: Any, **options: Any) -> TrainingState:
    """Return the parts of a state that torch.save wrote beside the weights of a small model."""
    torch.save({"model": torch.nn.Linear(3, 2).state_dict(), **saved}, tmp_path / "a.pt")
    source = open_source(str(tmp_path / "a.pt"))

    def read(entries: Any) -> dict[str, TensorValue]:
        return {e.name: TensorValue(e.dtype, e.shape, tensor_bytes(source.store, e)) for e in entries}

    return read_training_state(source.store, source.catalog, tensor=lambda value: value, read=read, **options)


SCHEDULER = {"last_epoch": 3, "_last_lr": [0.5]}
SCHEDULERS: dict[str, tuple[Any, list[str]]] = {
    "one": ({"scheduler": SCHEDULER}, ["scheduler"]),
    "of the user's own class": ({"lr_scheduler": {"count": 7}}, ["lr_scheduler"]),
    "a ChainedScheduler": ({"lr_scheduler": {"_last_lr": [1], "_schedulers": [SCHEDULER] * 2}}, ["lr_scheduler"]),
    "a list": ({"lr_schedulers": [SCHEDULER] * 2}, ["lr_schedulers.0", "lr_schedulers.1"]),
    "by name": ({"schedulers": {"a": SCHEDULER, "b": SCHEDULER}}, ["schedulers.a", "schedulers.b"]),
    "Lightning's": ({"meta": {"lr_schedulers": [{"count": 7}], "epoch": 1}}, ["meta.lr_schedulers.0"]),
    "below another key": ({"app": {"warmup": SCHEDULER}}, ["app.warmup"]),
    "a config": ({"args": {"lr_scheduler": {"kind": "cosine"}}}, []),
    "None": ({"scheduler": None}, []),
    "empty": ({"schedulers": [], "lr_scheduler": {}}, []),
}


@pytest.mark.parametrize("case", SCHEDULERS)
def test_schedulers_are_found_by_key_or_content(case, tmp_path):
    saved, keys = SCHEDULERS[case]
    found = parts_of(saved, tmp_path)
    assert list(found.schedulers) == keys
    assert set(found.rest(keys)) == (set(saved) if case in ("Lightning's", "a config", "empty") else set())


def test_random_states_are_found_by_rank_and_other_values_below_their_keys_are_objects(tmp_path):
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    others = {"random_state": 7, "rng": {"python": b"abc", "cpu": 1}}
    saved = {"rng_state_1": states, "extra_state": {"rng": states, "lr_scheduler": SCHEDULER}}
    found = parts_of({**saved, **others}, tmp_path)
    assert {rank: state.name for rank, state in found.random.items()} == {0: "extra_state", 1: "rng_state_1"}
    assert found.random[1].generators["python"]["words"].tolist() == list(random.getstate()[1])
    assert {name: found.objects[name] for name in ("extra_state", *others)} == {
        "extra_state": {"lr_scheduler": SCHEDULER}, **others
    }  # fmt: skip


def test_what_differs_between_the_ranks_beside_their_random_states_is_kept(tmp_path):
    states = {"random": random.getstate(), "cpu": torch.get_rng_state()}
    same = {"rng": states, "scale": np.ones(2), "scheduler": SCHEDULER}
    found = parts_of({f"extra_state_{rank}": {**same, "data": {"at": rank}} for rank in range(2)}, tmp_path)
    assert set(found.random) == {0, 1}
    assert found.objects["extra_state_0"].keys() == {"scale", "scheduler", "data"}
    assert found.objects["extra_state_1"] == {"data": {"at": 1}}


@pytest.mark.parametrize("count", [1, 2])
def test_the_random_states_of_several_gpus_are_named_because_it_is_unknown_which_is_the_ranks(count, tmp_path):
    """accelerate saves the states of all GPUs that a rank can see."""
    states = {"random_state": random.getstate(), "torch_manual_seed": torch.get_rng_state()}
    states["torch_cuda_manual_seed"] = [torch.zeros(16, dtype=torch.uint8)] * count
    found = parts_of({"random_states_0": states}, tmp_path)
    assert ("cuda" in found.random[0].generators) == (count == 1)
    assert list(found.unread) == ["random_states_0.cuda"] * (count > 1)


def test_keys_that_differ_only_in_punctuation_stay_apart():
    assert extra_keys(["lr.best", "lr_best"]) == {"lr_best": "extra.lr_best", "lr.best": "extra.lr_best_"}


def test_settings_and_states_of_an_unknown_form_are_named(tmp_path):
    found = parts_of({"optimizer": {"state": {}, "param_groups": [1], "loss_scaler": 7}}, tmp_path)
    assert found.unread == {
        "optimizer.param_groups": "expected param groups, found a list",
        "optimizer.loss_scaler": "torch optimizers have no such entry",
    }


def test_the_parts_are_found_without_torch(zoo):
    path = str(zoo / "hf_trainer_fsdp2_sharded_w2")
    code = f"""
from ckptkit.formats.detect import open_source
from ckptkit.formats.training_state import read_training_state
source = open_source({path!r})
read_training_state(source.store, source.catalog, tensor=lambda value: value, read=lambda entries: {{}})"""
    assert "torch" not in modules_after(code)


@pytest.mark.parametrize("saved", [{"scheduler": SCHEDULER}, {"step": torch.tensor(3)}, {"stats": torch.ones(2)}])
def test_a_store_that_does_not_answer_is_an_error_and_not_an_unreadable_part(saved, tmp_path, monkeypatch):
    fails = failing(StorageError("the store does not answer"))
    for name in ("read_object", "read_box"):
        monkeypatch.setattr(training_state, name, fails)
    monkeypatch.setattr("tests.formats.test_training_state.tensor_bytes", fails)
    with pytest.raises(StorageError):
        parts_of(saved, tmp_path)
