"""A real Lightning Trainer on two CPU ranks with our strategy, callback and CheckpointIO."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning")
pytest.importorskip("torchdata")
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from safetensors.torch import load_file

from ckptkit import RetentionPolicy
from ckptkit.integrations.lightning import CkptkitCheckpointIO, FSDP2Strategy, ManagedCheckpoint
from tests.integrations.lightning_runs import (
    First,
    Lit,
    Sharded,
    checkpoints,
    ddp,
    equal,
    evaluated,
    fit,
    loader,
    model_keys,
    raised,
    restores,
    saving,
    snapshot,
    trainer_of,
)
from tests.integrations.on_ranks import on_ranks

pytestmark = pytest.mark.timeout(600)


class Watch(Callback):
    """Records when the optimizer state is restored: in the first training step, before its update."""

    seen: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if self.seen is None:
            assert trainer.strategy._pending is not None and not trainer.optimizers[0].state

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.seen is None:
            assert trainer.strategy._pending is None
            self.seen = sum(len(values) for values in optimizer.state.values())


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
@on_ranks(2)
def test_a_resumed_run_is_bit_equal_and_its_optimizer_state_is_applied_at_the_first_step(work, kind):
    straight = snapshot(*fit(work, "fsdp2", steps=6))
    fit(work, FSDP2Strategy(state_dict_type=kind), saving(work, every=3, filename="{epoch}-{step}"), steps=3)
    watch = Watch()
    resumed = fit(work, FSDP2Strategy(), watch, steps=6, path=work / "epoch=0-step=3.ckpt")
    assert equal(straight, snapshot(*resumed))
    assert watch.seen == 18


@on_ranks(2)
def test_a_checkpoint_can_be_used_for_validation_test_and_prediction(work):
    fit(work, FSDP2Strategy(state_dict_type="full"), saving(work, every=3), steps=3)
    path = str(work / "step=3.ckpt")
    validated = trainer_of(work, FSDP2Strategy()).validate(Lit(), loader(), ckpt_path=path, verbose=False)
    assert validated[0]["val_loss"] == evaluated(trainer_of(work, FSDP2Strategy()), Lit(), path) > 0
    predicted = trainer_of(work, FSDP2Strategy()).predict(Lit(), loader(), ckpt_path=path)
    assert predicted[0].shape == (2, 3)


@on_ranks(2)
def test_the_best_and_the_last_are_kept_and_the_last_is_a_link(work):
    save = ManagedCheckpoint(
        dirpath=work, monitor="val_loss", save_top_k=2, save_last=True, filename="{step}", save_on_train_epoch_end=False
    )
    fit(work, FSDP2Strategy(), save, steps=8, val_check_interval=1)
    kept = checkpoints(work)
    assert 2 <= len([name for name in kept if name.startswith("step=")]) <= 3
    assert {"step=8.ckpt", "last.ckpt"} < set(kept)
    assert Path(save.best_model_path).is_dir()


@on_ranks(2)
def test_a_removed_checkpoint_is_deleted_and_links_are_not_followed(work):
    save = ModelCheckpoint(dirpath=work, every_n_train_steps=1, save_top_k=1, filename="{step}", save_last="link")
    _, trainer = fit(work, FSDP2Strategy(), save, steps=2)
    last, target = work / "last.ckpt", work / "step=2.ckpt"
    assert "step=1.ckpt" not in checkpoints(work)
    assert os.path.realpath(last) == str(target)
    dist.barrier()
    if dist.get_rank() == 0:
        trainer.strategy.remove_checkpoint(last)
    dist.barrier()
    assert target.is_dir() and not last.exists()


class Frozen(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.head.parameters(), lr=0.05)


@on_ranks(2)
def test_a_state_dict_filter_selects_what_is_saved(work):
    def strategy() -> FSDP2Strategy:
        return FSDP2Strategy(lightning_module_filter=lambda name: ".head." in name, optimizer_restore="immediate")

    class Restored(First):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            assert self.state is not None or trainer.optimizers[0].state
            super().on_train_batch_start(trainer, *args)

    _, trainer = restores(work, strategy, build=Frozen, first=Restored())
    assert model_keys(work / "saved.ckpt") == ["model.model.head.bias", "model.model.head.weight"]
    assert len(trainer.strategy.lightning_module_state_dict("full")) == (2 if dist.get_rank() == 0 else 0)


@on_ranks(2)
def test_a_second_parallelize_only_warns(work):
    _, trainer = fit(work, FSDP2Strategy(), steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.strategy.parallelize()
    assert dist.get_rank() or any("before" in str(item.message) for item in caught)


class Tied(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[1][0].weight = self.model.blocks[0][0].weight


@on_ranks(2)
def test_a_checkpoint_io_finds_every_name_of_a_tied_weight_in_a_sharded_checkpoint(work):
    module, trainer = fit(work, FSDP2Strategy(), steps=1, module=Tied())
    trainer.save_checkpoint(work / "tied.ckpt")
    found = CkptkitCheckpointIO().load_checkpoint(work / "tied.ckpt")["state_dict"]
    assert list(found) == list(module.state_dict())


class Failing(DummyLogger):
    """A logger whose server is unreachable when rank 0 reports a checkpoint to it."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        raise ConnectionError("the tracking server is down")


@on_ranks(2)
def test_a_logger_that_fails_on_rank_0_fails_all_ranks(work):
    trainer = trainer_of(work, FSDP2Strategy(), saving(work), steps=2, logger=Failing())
    both = ["", ""]
    dist.all_gather_object(both, raised(lambda: trainer.fit(Lit(), loader())))
    assert both[0] == both[1]
    assert "telling the loggers" in both[0] and "the tracking server is down" in both[0]


THEIRS = {
    "mp_sharded": (lambda: ModelParallelStrategy(dist.get_world_size(), 1), Sharded),
    "mp_full": (lambda: ModelParallelStrategy(dist.get_world_size(), 1, save_distributed_checkpoint=False), Sharded),
    "ddp": (DDPStrategy, Lit),
}


@pytest.mark.parametrize("source", THEIRS)
@on_ranks(2)
def test_checkpoints_written_by_lightning_are_resumed_from(work, source):
    strategy, build = THEIRS[source]
    restores(work, strategy, build=build, by=FSDP2Strategy, into=Lit)


@on_ranks(2)
def test_a_lightning_file_is_replaced_after_the_new_checkpoint_is_committed(work):
    fit(work, DDPStrategy(), steps=1)[1].save_checkpoint(work / "last.ckpt")
    assert (work / "last.ckpt").is_file()
    fit(work, FSDP2Strategy(), steps=2)[1].save_checkpoint(work / "last.ckpt")
    assert checkpoints(work) == ["last.ckpt"] and (work / "last.ckpt").is_dir()
    assert not [path for path in work.iterdir() if "replaced" in path.name]


@on_ranks(2)
def test_the_callback_saves_under_a_strategy_that_bypasses_checkpoint_io(work):
    strategy, build = THEIRS["mp_sharded"]
    save = saving(work, every=3)
    restores(work, strategy, save, build=build, steps=3, path="step=3.ckpt", by=FSDP2Strategy, into=Lit)


@on_ranks(2, 1)
def test_the_callback_resumes_bit_for_bit_under_ddp(work):
    """Inside an epoch, with dropout: the random state and the loader's position are restored too."""
    work /= str(dist.get_world_size())
    straight = snapshot(*fit(work, DDPStrategy(), steps=6))
    fit(work, DDPStrategy(), saving(work, every=3), steps=3)
    resumed = fit(work, DDPStrategy(), saving(work / "again"), steps=6, path=work / "step=3.ckpt")
    assert equal(straight, snapshot(*resumed))


class Seen(TorchCheckpointIO):
    def __init__(self) -> None:
        self.paths: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.paths.append(Path(path).name)
        super().save_checkpoint(checkpoint, path, storage_options)


@on_ranks(2)
def test_a_custom_checkpoint_io_receives_whole_tensors_and_resumes(work):
    io = Seen()
    weights = snapshot(*restores(work, lambda: FSDP2Strategy(checkpoint_io=io)))["weights"]
    if dist.get_rank() == 0:
        assert io.paths == ["saved.ckpt"]
        held = torch.load(work / "saved.ckpt", weights_only=False)["state_dict"]
        assert all(torch.equal(value, weights[name]) for name, value in held.items())


@on_ranks(2)
def test_ckptkit_checkpoint_io_rotates_and_resumes_under_ddp(work):
    save = ModelCheckpoint(dirpath=work, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    restores(work, lambda: ddp(retention=RetentionPolicy(max_num=1)), save, steps=3, path="step=3.ckpt", by=ddp)
    kept = checkpoints(work)
    assert "step=3.ckpt" in kept and "step=2.ckpt" not in kept


@pytest.mark.parametrize("kind", ["sharded", "full"])
@on_ranks(2, 1)
def test_a_run_resumes_on_another_number_of_ranks(work, kind):
    if dist.get_world_size() == 2:
        fit(work, FSDP2Strategy(state_dict_type=kind), saving(work, every=3), steps=3)
        return
    first = First()
    _, trainer = fit(work, FSDP2Strategy(), first, steps=5, path=work / "step=3.ckpt")
    assert (first.state["step"], trainer.global_step, len(first.state["moments"])) == (3, 5, 18)
    if kind == "full":
        saved = load_file(next((work / "step=3.ckpt").glob("model*.safetensors")))
        assert saved.keys() == first.state["weights"].keys()
        assert all(torch.equal(first.state["weights"][name], value) for name, value in saved.items())
