"""Our checkpointer follows the contract of torchtitan's trainer with its checkpointer."""

import dataclasses
import json
import pickle
import shutil
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from ckptkit import RetentionPolicy
from ckptkit.errors import CheckpointNotFoundError, UsageError
from ckptkit.integrations.torchtitan import TorchtitanCheckpointer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from torchtitan_checkpointer import Schedulers, TrainState, main

from tests.checkpoint.load.test_foreign import check_optimizer, check_weights, run_of
from tests.checkpoint.states import bits
from tests.ranks import RankError

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
ZOO = Path(__file__).parents[1] / "zoo"


def small():
    torch.manual_seed(0)  # all ranks have the same model
    model = torch.nn.Linear(2, 2)
    return type("Small", (), {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})


@dataclasses.dataclass
class Config:
    """The fields of torchtitan 0.3's config with their defaults, without `enable`."""

    enable: bool = True
    folder: str = "checkpoint"
    interval: int = 500
    initial_load_path: str | None = None
    initial_load_model_only: bool = True
    initial_load_in_hf: bool = False
    initial_load_in_hf_quantized: bool = False
    last_save_model_only: bool = True
    last_save_in_hf: bool = False
    export_dtype: str = "float32"
    keep_latest_k: int = 10
    load_step: int = -1
    exclude_from_loading: list[str] = dataclasses.field(default_factory=list)
    enable_first_step_checkpoint: bool = False
    create_seed_checkpoint: bool = False
    load_only: bool = False
    async_mode: str = "disabled"


def parts_of(state):
    """Return the arguments that torchtitan 0.3 passes for the parts of a job, with one model and one optimizer."""
    return {
        "model_parts": [state.model], "optimizers": [state.optimizer], "lr_schedulers": Schedulers(state.optimizer),
        "dataloader": None, "states": {"train_state": TrainState()},
    }  # fmt: skip


def newest(base, state=None, options=None, **config):
    """Create a checkpointer as torchtitan 0.3 does."""
    parts = {**parts_of(state or small()), **(options or {})}
    return TorchtitanCheckpointer(Config(**config), sd_adapter=None, base_folder=str(base), **parts)


def saved(folder, options=None, **config):
    """Return which of 7 steps are saved; `save` must return the same."""
    with closing(newest(folder, options=options, **config)) as checkpointer:
        told = [step for step in range(1, 8) if checkpointer.save(step, last_step=step == 7)]
    found = sorted(int(path.name[5:]) for path in folder.glob("checkpoint/step_*"))
    assert told == found or config.get("keep_latest_k")
    return found


SAVES = {  # field: (its value, the steps of 7 that are saved)
    "interval": (3, [3, 6, 7]),
    "enable": (False, []),
    "enable_first_step_checkpoint": (True, [1, 7]),
    "load_only": (True, []),
    "async_mode": ("async", [7]),
    "last_save_model_only": (False, [7]),
}


@pytest.mark.parametrize("field", SAVES)
def test_each_saving_option_has_its_documented_effect(tmp_path, field):
    value, steps = SAVES[field]
    assert saved(tmp_path, **{field: value}) == steps


@pytest.mark.parametrize(
    ("folder", "place"), [("run", "base/run"), ("memory://titan/run", "memory://titan/run"), ("/run", "/run")]
)
def test_a_folder_is_relative_to_the_dump_folder_unless_it_is_a_url_or_absolute(folder, place):
    with closing(newest("base", folder=folder)) as checkpointer:
        assert checkpointer.folder == checkpointer.manager.url == place


@pytest.mark.parametrize(("options", "kept"), [
    ({}, [6, 7]), ({"retention": RetentionPolicy(max_num=1, keep_every=3)}, [3, 6, 7]),
], ids=["alone", "with a policy"])  # fmt: skip
def test_keep_latest_k_keeps_the_latest_k_unless_there_is_a_policy(tmp_path, options, kept):
    assert saved(tmp_path, options, interval=1, keep_latest_k=2) == kept


REFUSED = {
    "initial_load_in_hf": True,
    "initial_load_in_hf_quantized": True,
    "last_save_in_hf": True,
    "export_dtype": "bfloat16",
    "exclude_from_loading": ["nothing"],
}


@pytest.mark.parametrize("field", REFUSED)
def test_an_unsupported_option_is_refused_by_name(tmp_path, field):
    with pytest.raises(UsageError, match=field):
        newest(tmp_path, **{field: REFUSED[field]})


def test_only_the_model_of_a_seed_checkpoint_is_loaded(tmp_path):
    with closing(newest(tmp_path, create_seed_checkpoint=True)) as seed:
        seed.save(curr_step=0, last_step=True)
    state = small()
    with closing(newest(tmp_path, state)) as checkpointer:
        assert checkpointer.load() is True
    assert not state.optimizer.state


def test_a_resumed_run_is_bit_equal():
    assert main() == 0


def test_load_returns_whether_a_checkpoint_was_found(tmp_path):
    with closing(newest(tmp_path, interval=1)) as checkpointer:
        assert checkpointer.load() is False
        checkpointer.save(curr_step=1, last_step=False)
        for wait in (checkpointer.maybe_wait_for_staging, checkpointer.maybe_wait_for_saving):
            wait()
        assert checkpointer.load() is True
        assert checkpointer.load(step=1) is True
    with closing(newest(tmp_path, enable=False)) as checkpointer:
        assert checkpointer.load() is False
    with pytest.raises(CheckpointNotFoundError):
        newest(tmp_path, load_step=5).load()


def test_a_checkpoint_written_by_torchtitan_is_resumed_from_with_its_optimizer(tmp_path):
    name = "dcp_torchtitan_like_w2"
    state = run_of(name)
    config = {"initial_load_path": str(ZOO / name / "step-2"), "initial_load_model_only": False}
    parts = parts_of(state)
    given = [parts[key] for key in ("dataloader", "model_parts", "optimizers", "lr_schedulers", "states")]
    with closing(TorchtitanCheckpointer(*given, config, url=str(tmp_path))) as checkpointer:  # as before torchtitan 0.3
        assert checkpointer.load() is True
    assert checkpointer._states["train_state"].step == 2
    check_weights(state.model, name)
    check_optimizer(state.optimizer, state.model, name)


def test_load_step_names_a_step_that_torchtitan_wrote(tmp_path):
    name = "dcp_torchtitan_like_w2"
    shutil.copytree(ZOO / name, tmp_path / "checkpoint")
    shutil.copytree(ZOO / name / "step-2", tmp_path / "checkpoint/step-4")
    state = run_of(name)
    with closing(newest(tmp_path, state, load_step=2)) as checkpointer:
        assert checkpointer.load() and checkpointer.last_load.url.endswith("/step-2")
        check_weights(state.model, name)
        checkpointer.save(6, last_step=True)
        assert checkpointer.load(4) and checkpointer.last_load.url.endswith("/step-4")
        with pytest.raises(CheckpointNotFoundError, match=r"has no checkpoint .3.*step_00000006"):
            checkpointer.load(3)


class Stage(torch.nn.Module):
    """Some layers of a model of four, under their names in the model."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(layer): torch.nn.Linear(2, 2) for layer in layers})

    def train(self):
        """Give each layer its own gradient."""
        for name, parameter in self.named_parameters():
            parameter.grad = torch.full_like(parameter, float(name.split(".")[1]) - 1.5)


def _of_one_class(parts, trains):
    """Return an optimizer for each stage."""
    return [torch.optim.AdamW(part.parameters(), lr=0.1 if trains else 0.2) for part in parts]


def _of_two_classes(parts, trains):
    """Return an optimizer of each class for each stage, as torchtitan's container makes them."""
    rates, optimizers = {"weight": 0.1 if trains else 0.3, "bias": 0.2 if trains else 0.4}, []
    for part in parts:
        for make, kind in ((torch.optim.SGD, "bias"), (torch.optim.AdamW, "weight")):
            chosen = [parameter for name, parameter in part.named_parameters() if name.endswith(kind)]
            optimizers.append(make(chosen, lr=rates[kind], **({"momentum": 0.9} if kind == "bias" else {})))
    return optimizers


def _of_stages(folder, parts, optimizers):
    """Create the checkpointer of a rank with these stages."""
    container = SimpleNamespace(optimizers=optimizers)
    parts = {"model_parts": parts, "optimizers": container, "lr_schedulers": TrainState()}
    return closing(newest(folder, None, parts, interval=1))


def _values(parts, optimizers):
    """Return the value, the optimizer state and the learning rate of each parameter."""
    states = {
        id(p): (optimizer.state[p], group["lr"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    return bits({name: [p, *states[id(p)]] for part in parts for name, p in part.named_parameters()})


def _stages(folder, split, trains, made):
    """Train and save, or load, this rank's stages; return their values."""
    parts = [Stage(*layers) for layers in split[dist.get_rank()]]
    optimizers = made(parts, trains)
    with _of_stages(folder, parts, optimizers) as checkpointer:
        if trains:
            for trained in (*parts, *optimizers):
                trained.train() if isinstance(trained, Stage) else trained.step()
            assert checkpointer.save(1)
        else:
            assert checkpointer.load()
    return _values(parts, optimizers)


def _on_ranks(ranks, folder, split, *args):
    """Return the values of the stages of all ranks."""
    found = ranks.run(_stages, len(split), str(folder), split, *args)
    assert sum(map(len, found)) == 8
    return {name: value for rank in found for name, value in rank.items()}


SPLITS = [
    [[(0,), (2,)], [(1,), (3,)]],
    [[(0, 1)], [(2, 3)]],
    [[(0,), (1,), (2, 3)]],
    [[(0,)], [(1,), (2,), (3,)]],
]


@pytest.mark.parametrize("made", [_of_one_class, _of_two_classes])
def test_pipeline_stages_load_on_any_division_into_stages(ranks, tmp_path, made):
    for number, saved_with in enumerate(SPLITS):
        saved = _on_ranks(ranks, tmp_path / str(number), saved_with, True, made)
        for split in SPLITS:
            assert _on_ranks(ranks, tmp_path / str(number), split, False, made) == saved


def test_optimizers_of_two_classes_load_from_a_checkpoint_of_torchtitan(tmp_path):
    part, again = Stage(0, 1), Stage(0, 1)
    optimizers, others = _of_two_classes([part], True), _of_two_classes([again], False)
    part.train()
    for optimizer in optimizers:
        optimizer.step()
    content = {"optimizer": get_optimizer_state_dict(part, optimizers, options=FLAT), **part.state_dict()}
    content |= {"train_state": TrainState(), "lr_scheduler": TrainState()}
    dcp.save(content, checkpoint_id=tmp_path / "checkpoint/step-1", no_dist=True)
    with _of_stages(tmp_path, [again], others) as checkpointer:
        assert checkpointer.load()
    assert _values([again], others) == _values([part], optimizers)


class DataRanks:
    """A dataloader as torchtitan has it: its state is kept under the name of its data-parallel rank."""

    def __init__(self, rank, size, position=0):
        self.dp_rank, self.dp_world_size, self.position = rank, size, position

    def state_dict(self):
        return {f"dp_rank_{self.dp_rank}": pickle.dumps(self.position), "world_size": self.dp_world_size}

    def load_state_dict(self, state):
        if f"dp_rank_{self.dp_rank}" in state:  # else torchtitan logs a warning, and starts with the first sample
            assert state["world_size"] == self.dp_world_size
            self.position = pickle.loads(state[f"dp_rank_{self.dp_rank}"])


def _data(folder, data_ranks, trains, own=False):
    """Save, or load, on ranks of which each reads the data of `data_ranks[rank]`; return the position in them."""
    rank, size = data_ranks[dist.get_rank()], len(set(data_ranks))
    loader, state = DataRanks(rank, size, 100 + rank if trains else 0), small()
    state.optimizer.step()
    if own:  # as torchtitan's checkpointer stores them
        content = {"optimizer": get_optimizer_state_dict(state.model, state.optimizer, options=FLAT)}
        content |= {**state.model.state_dict(), "dataloader": loader, "train_state": TrainState(), "lr_scheduler": {}}
        dcp.save(content, checkpoint_id=f"{folder}/checkpoint/step-1")
        return loader.position
    with closing(newest(folder, state, {"dataloader": loader}, interval=1)) as checkpointer:
        assert checkpointer.save(1) if trains else checkpointer.load()
    return loader.position


@pytest.mark.parametrize("own", [False, True], ids=["ours", "torchtitan's"])
def test_each_rank_continues_with_the_data_of_its_data_parallel_rank(ranks, tmp_path, own):
    folder = str(tmp_path)
    assert ranks.run(_data, 4, folder, [0, 0, 1, 1], True, own) == [100, 100, 101, 101]
    assert ranks.run(_data, 4, folder, [0, 1, 0, 1], False) == [100, 101, 100, 101]
    assert ranks.run(_data, 2, folder, [0, 1], False) == [100, 101]
    with pytest.raises(RankError, match=r"saved on 2 data-parallel ranks, but this job has 1.* exclude_from_loading"):
        ranks.run(_data, 2, folder, [0, 0], False)


def test_the_checkpointer_is_built_from_a_torchtitan_config(tmp_path):
    base = pytest.importorskip("torchtitan.components.checkpointer").BaseCheckpointManager
    config = TorchtitanCheckpointer.Config(enable=True, interval=2, url=str(tmp_path / "run"), state_dict_type="full")
    assert isinstance(config, base.Config)
    theirs = {field.name for field in dataclasses.fields(base.Config)}
    assert {field.name for field in dataclasses.fields(Config)} == theirs | {"async_mode"}
    with closing(config.build(sd_adapter=None, base_folder="elsewhere", **parts_of(small()))) as checkpointer:
        assert isinstance(checkpointer, base)
        assert [checkpointer.save(step) for step in (1, 2)] == [False, True]
        checkpointer.maybe_wait_for_saving()
        assert checkpointer.load()
    assert json.loads((tmp_path / "run/step_00000002/checkpoint.json").read_text())["state_dict_type"] == "full"
    with closing(TorchtitanCheckpointer.Config().build(sd_adapter=None, base_folder="", **parts_of(small()))) as off:
        assert off.load() is off.save(1) is False
