"""Wrong arguments in Python raise in the call that got them, with what was found and expected."""

import datetime
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit import CheckpointManager, DCPReader, DCPWriter, PerRank, RetentionPolicy, Shard, TrainState
from ckptkit.arguments import globs
from ckptkit.errors import UsageError
from ckptkit.fsdp import FSDPConfig, FSDPStrategy, param_groups
from ckptkit.integrations.torchtitan import TorchtitanCheckpointer
from tests.checkpoint.states import Kept
from tests.lazy import LazyModule

accelerate, trainer = LazyModule("ckptkit.integrations.accelerate"), LazyModule("ckptkit.integrations.transformers")
lightning = LazyModule("ckptkit.integrations.lightning")
MODEL = torch.nn.Linear(2, 2)
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())
SCHEDULER = torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)
RULED = type("Ruled", (Kept,), {"merge_ranks": {}})(0)
LOCATION = "expected a path or a URL"
SIZE = "is not a size"
INTEGER = "expected an integer of at least"
FLAG = "expected True or False"
DICT = "expected a dict"
SIGNALS = "expected 'save' or signals that can be caught"


def manager(**options: Any) -> CheckpointManager:
    return CheckpointManager("run", **options)


def state(**parts: Any) -> TrainState:
    return TrainState(**{"model": MODEL, **parts})


def save(*given: Any, **named: Any) -> Any:
    with manager() as made:
        return made.save(*(given or (1, state())), **named)


def load(which: Any = "latest", **options: Any) -> Any:
    with manager() as made:
        return made.load(state(), which, **options)


def titan(config: Any, **named: Any) -> Any:
    given = {"dataloader": None, "model_parts": [MODEL], "optimizers": [OPTIMIZER], "lr_schedulers": SCHEDULER}
    return TorchtitanCheckpointer(**{**given, "states": {}, "checkpoint_config": config, "url": "run", **named})


Mistakes = list[tuple[Callable[[], Any], str]]
MANAGER: Mistakes = [
    (lambda: CheckpointManager(MODEL), f"url is of type Linear, {LOCATION}"),
    (lambda: CheckpointManager(Path("s3://bucket/run")), "Path has changed '://' to ':/'"),
    (lambda: manager(retention=RetentionPolicy), "retention is the class RetentionPolicy, expected RetentionPolicy("),
    (lambda: manager(state_dict_type="shard"), "'shard': expected full, sharded or local"),
    (lambda: manager(max_shard_size=0), "max_shard_size is 0, expected more than 0 bytes"),
    (lambda: manager(max_shard_size="5 gigs"), f"max_shard_size: '5 gigs' {SIZE}"),
    (lambda: manager(timeout_s=0), "timeout_s is 0.0, expected more than 0 seconds"),
    (lambda: manager(timeout_s=datetime.timedelta(minutes=5)), "timeout_s: datetime.timedelta(seconds=300) is"),
    (lambda: manager(async_policy="drop"), "async_policy='drop': expected"),
    (lambda: manager(async_mode=True), "async_mode=True: expected"),
    (lambda: manager(async_mode="process"), "more than a thread. Use async_mode='thread'"),
    (lambda: manager(on_signal="SIGTERM"), f"on_signal is 'SIGTERM', {SIGNALS}"),
    (lambda: manager(on_signal=[signal.SIGKILL]), SIGNALS),
    (lambda: manager(on_signal=None), f"on_signal is None, {SIGNALS}"),
    (lambda: manager(on_commit="wandb"), "on_commit is 'wandb', expected a function"),
    (lambda: manager(trace=True), f"trace is True, {LOCATION}"),
    (lambda: manager(side_files=["config.json"]), f"side_files is of type list, {LOCATION}"),
    (lambda: manager(process_group="gloo"), "process_group is 'gloo', expected a ProcessGroup"),
    (lambda: manager(start_fresh=True), "start_fresh=True: expected"),
    (lambda: manager(storage_options="key=1"), f"storage_options is 'key=1', {DICT}"),
    (lambda: RetentionPolicy("1TB"), f"max_num is '1TB', {INTEGER} 1"),
    (lambda: RetentionPolicy(max_mem=["1TB"]), f"max_mem: ['1TB'] {SIZE}"),
    (lambda: RetentionPolicy(keep_best=("loss",)), "expected (metric, 'min' or 'max', count)"),
    (lambda: RetentionPolicy(keep_best=("loss", "min", "2")), f"keep_best keeps '2', {INTEGER} 1"),
]  # fmt: skip
CALLS: Mistakes = [
    (lambda: TrainState(model=torch.nn.Linear), "TrainState: model is the class Linear, expected a module"),
    (lambda: TrainState(model=MODEL.state_dict()), "TrainState: model['weight'] is of type Tensor"),
    (lambda: state(optimizer=OPTIMIZER.state_dict()), "expected an optimizer with param_groups"),
    (lambda: state(optimizer=SCHEDULER), "TrainState: optimizer is of type StepLR, expected an optimizer"),
    (lambda: state(scheduler=torch.optim.lr_scheduler.StepLR), "TrainState: scheduler is the class StepLR"),
    (lambda: state(dataloader=torch.utils.data.DataLoader([1])), "such as torchdata's StatefulDataLoader"),
    (lambda: state(grad_scaler=True), "TrainState: grad_scaler is True, expected an object"),
    (lambda: state(extra=[1]), f"TrainState: extra is of type list, {DICT}"),
    (lambda: state(rng="yes"), f"rng is 'yes', {FLAG}"),
    (lambda: save("1", state()), "step is '1', expected an int"),
    (lambda: save(1, TrainState), "state is the class TrainState, expected TrainState("),
    (lambda: save(1, state(), metrics=0.5), f"metrics is 0.5, {DICT} of names and numbers"),
    (lambda: save(1, state(), metrics={"loss": "0.5"}), "metric 'loss' is '0.5' (str), expected a number"),
    (lambda: save(1, state(), overwrite="no"), f"overwrite is 'no', {FLAG}"),
    (lambda: save(1, state(), tag="a/b"), "tag 'a/b' is refused"),
    (lambda: load(10.0), "which is 10.0, expected 'latest', 'best', a step"),
    (lambda: load(strict="no"), f"strict is 'no', {FLAG}"),
    (lambda: load(convert_dtype="bf16"), f"convert_dtype is 'bf16', {FLAG}"),
    (lambda: load(exclude=3), "exclude is 3, expected globs of FQNs"),
    (lambda: load(optimizer=False), "optimizer=False: expected 'restore', 'skip' or 'deferred'"),
    (lambda: load(strickt=False), "load has no option 'strickt'. Known: strict"),
    (lambda: load(fallback="last"), "fallback='last': expected 'error' or 'previous'"),
    (lambda: load(replicas="all"), "replicas='all'"),
    (lambda: load(verify="full"), "verify='full'"),
    (lambda: load(atomic=True, max_memory="much"), f"max_memory: 'much' {SIZE}"),
    (lambda: state(dataloader=RULED), "Ruled.merge_ranks is of type dict, expected a function"),
    (lambda: state(extra={"mine": PerRank(RULED)}), "Ruled.merge_ranks is of type dict, expected a function"),
    (lambda: state(layout=[1]), "of type list, expected a dict of globs"),
    (lambda: state(layout={"*": 0}), "expected ckptkit.Shard(dim, mesh=...), "),
    (lambda: state(layout={"*": Shard(0, mesh=None)}), "needs a mesh of one dimension"),
    (lambda: DCPWriter(MODEL.state_dict()), f"url is of type OrderedDict, {LOCATION}"),
    (lambda: DCPWriter("out", workers="4"), f"workers is '4', {INTEGER} 0"),
    (lambda: DCPWriter("out", overwrite="no"), f"overwrite is 'no', {FLAG}"),
    (lambda: DCPWriter("out", storage_options="key"), f"storage_options is 'key', {DICT}"),
    (lambda: DCPReader(None), f"url is None, {LOCATION}"),
    (lambda: DCPReader("in", verify="all"), "verify is 'all', expected 'read', 'full' or 'off'"),
    (lambda: ckptkit.convert(None, "out"), f"src is None, {LOCATION}"),
    (lambda: ckptkit.convert("in", 3), f"dst is 3, {LOCATION}"),
    (lambda: ckptkit.convert("in", "out", dtype=torch.int8), "an export casts to fp64, fp32, fp16 or bf16 only"),
    (lambda: ckptkit.convert("in", "out", to="dcp", world_size="4"), f"world_size is '4', {INTEGER} 1"),
    (lambda: ckptkit.convert("in", "out", workers=-1), f"workers is -1, {INTEGER} 0"),
    (lambda: ckptkit.convert("in", "out", adapter_config="a.json"), "adapter_config is 'a.json', expected the dict in"),
    (lambda: ckptkit.convert("in", "out", verify="yes"), f"verify is 'yes', {FLAG}"),
    (lambda: ckptkit.reshard("in", "out", world_size=None), f"world_size is None, {INTEGER} 1"),
    (lambda: ckptkit.reshard("in", "out", world_size=4, mesh=4), "mesh is 4, expected sizes by name"),
    (lambda: ckptkit.merge("in", ["out"]), "sources is 'in', expected a sequence of URLs"),
    (lambda: ckptkit.merge(["a", None], "out"), f"sources[1] is None, {LOCATION}"),
    (lambda: ckptkit.merge(["a", "b"], "out", weights=None), "weights is None, expected 'uniform'"),
    (lambda: ckptkit.merge(["a"], "out", last="3"), f"last is '3', {INTEGER} 2"),
    (lambda: ckptkit.copy("in", MODEL), f"dst is of type Linear, {LOCATION}"),
    (lambda: ckptkit.verify("in", workers="4"), f"workers is '4', {INTEGER} 0"),
    (lambda: ckptkit.verify("in", max_memory="lots"), f"max_memory: 'lots' {SIZE}"),
    (lambda: ckptkit.diff("in", None), f"b is None, {LOCATION}"),
    (lambda: ckptkit.diff("a", "b", include=3), "include is 3, expected globs of names"),
    (lambda: ckptkit.inspect("in", depth="all"), f"depth is 'all', {INTEGER} 0"),
    (lambda: ckptkit.list_run("in", policy={"max_num": 3}), "policy is of type dict, expected RetentionPolicy("),
    (lambda: ckptkit.open_checkpoint(MODEL), f"url is of type Linear, {LOCATION}"),
]  # fmt: skip
TRAINING: Mistakes = [
    (lambda: FSDPConfig.from_dict(None), f"values is None, {DICT}"),
    (lambda: FSDPConfig.from_yaml(None), f"path is None, {LOCATION}"),
    (lambda: FSDPStrategy({"tp": 1}), "an FSDPConfig is expected, found {'tp': 1}"),
    (lambda: FSDPStrategy(42), "pass seed="),
    (lambda: FSDPStrategy(seed="42"), f"seed is '42', {INTEGER} 0"),
    (lambda: FSDPStrategy(micro_train_batch_size=0), "micro_train_batch_size is 0"),
    (lambda: FSDPStrategy(train_batch_size=True), "train_batch_size is True"),
    (lambda: FSDPStrategy(norm_type=0.5), "norm type p is 0.5"),
    (lambda: FSDPStrategy(error_if_nonfinite="no"), f"error_if_nonfinite is 'no', {FLAG}"),
    (lambda: FSDPStrategy(FSDPConfig(mixed_precision="fp16"), error_if_nonfinite=True), "conflicts with"),
    (lambda: FSDPStrategy().create_optimizer(MODEL, lr=1, eps=1, factory=torch.optim.SGD), "lr, eps would have no"),
    (lambda: FSDPStrategy().create_optimizer(MODEL, factory=list), "optimizer is of type list, expected"),
    (lambda: param_groups(MODEL, no_decay="bias"), "no_decay"),
    *((lambda item=item: param_groups(MODEL, no_decay=[item]), "no_decay") for item in (1, "", int)),
    (lambda: FSDPStrategy(sync_every_micro_batch="no"), f"sync_every_micro_batch is 'no', {FLAG}"),
    (lambda: accelerate.AcceleratorCheckpoints("run", "run"), "accelerator is 'run', expected an Accelerator"),
    (lambda: trainer.CheckpointCallback(None), f"url is None, {LOCATION}"),
    (lambda: trainer.CheckpointCallback("run", retention=3), "retention is 3, expected RetentionPolicy("),
    (lambda: trainer.CheckpointCallback("run", save_steps="100"), f"save_steps is '100', {INTEGER} 1"),
    (lambda: trainer.CheckpointCallback("run", resume="no"), f"resume is 'no', {FLAG}"),
    (lambda: trainer.CheckpointCallback("run", state_dict_type="dcp"), "'dcp': expected full, sharded or local"),
    (lambda: lightning.ManagedCheckpoint(retention=3), "retention is 3, expected RetentionPolicy("),
    (lambda: lightning.ManagedCheckpoint(state_dict_type="dcp"), "'dcp': expected full, sharded or local"),
    (lambda: lightning.ManagedCheckpoint(storage_options=[1]), f"storage_options is of type list, {DICT}"),
    (lambda: titan("checkpoint"), "checkpoint config is 'checkpoint', expected torchtitan's [checkpoint] section"),
    (lambda: titan({"intervall": 5}), "TorchtitanCheckpointer does not know intervall"),
    (lambda: titan({"interval": "ten"}), f"interval is 'ten', {INTEGER} 1"),
    (lambda: titan({"keep_latest_k": -1}), f"keep_latest_k is -1, {INTEGER} 0"),
    (lambda: titan({"async_mode": "asnyc"}), "async_mode is 'asnyc', expected one of disabled, async"),
    (lambda: titan({"exclude_from_loading": "optimizer"}), "exclude_from_loading is 'optimizer', expected a list"),
    (lambda: titan({"enable": "false"}), f"enable is 'false', {FLAG}"),
    (lambda: titan({}, model_parts=MODEL), "model_parts is of type Linear, expected a list"),
    (lambda: titan({}, optimizers=None), "optimizers must be given"),
    (lambda: titan({}, states=[1]), f"states is of type list, {DICT}"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), [*MANAGER, *CALLS, *TRAINING])
def test_a_wrong_argument_raises_at_once_and_writes_nothing(tmp_path, monkeypatch, call, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        call()
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_string_is_one_glob_not_its_characters():
    assert globs("include", "model.*") == ("model.*",) and globs("include", ["a", "b"]) == ("a", "b")
