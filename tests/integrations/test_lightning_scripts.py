"""Typical user scripts under a real Lightning Trainer on two ranks, with our strategy and callback."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

pytest.importorskip("lightning")
pytest.importorskip("torchdata")
import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from ckptkit import TrainState, open_checkpoint
from ckptkit.integrations.lightning import FSDP2Strategy, ManagedCheckpoint
from tests.checkpoint import states
from tests.fsdp.models import whole
from tests.integrations.lightning_runs import (
    First,
    Lit,
    Net,
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
    resumes,
    saving,
    snapshot,
    trainer_of,
)
from tests.integrations.on_ranks import on_ranks

pytestmark = pytest.mark.timeout(600)


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


@on_ranks(2)
def test_a_trainer_shards_a_second_module_too(work):
    pl.seed_everything(7 + int(os.environ["RANK"]), verbose=False)
    trainer, second = trainer_of(work, FSDP2Strategy(), steps=2), Lit()
    trainer.fit(Lit(), loader())
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(second, loader())
    assert any(isinstance(module, FSDPModule) for module in second.modules())
    mine = torch.cat([value.flatten() for value in weights(second).values()])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    assert all(torch.equal(part, mine) for part in parts)


@on_ranks(2)
def test_a_fitted_module_can_be_fitted_and_tested_again(work):
    module, _ = fit(work, FSDP2Strategy(), steps=2)
    again = trainer_of(work, FSDP2Strategy(), steps=2)
    again.fit(module, loader())
    again.save_checkpoint(work / "again.ckpt")
    assert again.global_step == 2
    assert evaluated(again, module, work / "again.ckpt") > 0


@pytest.mark.parametrize("at", [4, 6])
@on_ranks(2)
def test_a_resume_at_the_end_of_an_epoch_and_within_a_later_one_is_bit_equal(work, at):
    resumes(work, steps=7, at=at)


@on_ranks(2)
def test_the_checkpoint_resumed_from_is_not_rotated_away(work):
    fit(work, FSDP2Strategy(), saving(work), steps=3)
    assert checkpoints(work) == ["step=3.ckpt"]
    fit(work, FSDP2Strategy(), saving(work), steps=6, path=work / "step=3.ckpt")
    assert checkpoints(work) == ["step=3.ckpt", "step=6.ckpt"]


@on_ranks(2)
def test_two_callbacks_keep_each_others_checkpoints(work):
    best = saving(work, monitor="loss_of_step", mode="max", filename="best-{step}")
    recent = saving(work, filename="recent-{step}", save_last=True)
    fit(work, FSDP2Strategy(), best, recent, steps=5)
    assert checkpoints(work) == ["best-step=1.ckpt", "last.ckpt", "recent-step=5.ckpt"]
    assert best.best_model_path == str(work / "best-step=1.ckpt")


@on_ranks(2)
def test_ckpt_path_accepts_last_and_best_and_the_link_to_the_last_does_not_replace_it(work):
    def callback() -> ManagedCheckpoint:
        return saving(work, monitor="loss_of_step", save_last=True)

    straight = snapshot(*fit(work, FSDP2Strategy(), steps=5))
    fit(work, FSDP2Strategy(), callback(), steps=3, path="last")  # no checkpoint yet: a new run
    module, trainer = fit(work, FSDP2Strategy(), callback(), steps=5, path="last")
    assert equal(straight, snapshot(module, trainer))
    assert checkpoints(work) == ["last-v1.ckpt", "last.ckpt", "step=4.ckpt"]
    assert evaluated(trainer, module, "best") > 0
    assert len(trainer.predict(module, loader(), ckpt_path="last")) == 4


@on_ranks(2)
def test_ckpt_path_last_resumes_from_the_newest_checkpoint_if_none_is_called_last(work):
    first = First()
    trained = snapshot(*fit(work, FSDP2Strategy(), saving(work), steps=3))
    fit(work, FSDP2Strategy(), saving(work), first, steps=5, path="last")
    assert equal(trained, first.state)


class Partly(Lit):
    """Omits frozen weights from its state dict, as Lightning's documentation shows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.encoder.requires_grad_(False)
        self.strict_loading = False

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(self.encoder(batch), index)

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().state_dict().items() if "encoder" not in k}


@on_ranks(2)
def test_weights_omitted_by_a_modules_state_dict_are_not_saved_or_expected(work):
    restores(work, FSDP2Strategy, build=Partly)
    keys = model_keys(work / "saved.ckpt")
    assert len(keys) == 6 and not any("encoder" in key for key in keys)


class Changed(Lit):
    """Saves one weight doubled and another under an old name, and reverts both on load."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._save)
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _save(module: Any, state: dict[str, Any], prefix: str, meta: Any) -> None:
        state[prefix + "model.head.bias"] = state[prefix + "model.head.bias"] * 2
        state[prefix + "old_head"] = state.pop(prefix + "model.head.weight")

    @staticmethod
    def _load(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[prefix + "model.head.bias"] = state[prefix + "model.head.bias"] / 2
        state[prefix + "model.head.weight"] = state.pop(prefix + "old_head")


@on_ranks(2)
def test_state_changed_by_state_dict_hooks_is_restored_by_the_modules_hooks(work):
    restores(work, FSDP2Strategy, build=Changed)  # compares what the hooks return
    assert "model.old_head" in model_keys(work / "saved.ckpt")


class Gan(pl.LightningModule):
    """Two optimizers, each with a scheduler, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.critic = Net(), Net()
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        parts = zip((self.model, self.critic), self.optimizers(), self.lr_schedulers(), strict=True)
        for net, optimizer, scheduler in parts:
            optimizer.zero_grad()
            self.manual_backward(net(batch).pow(2).mean())
            optimizer.step()
            scheduler.step()

    def configure_optimizers(self) -> Any:
        both = [
            torch.optim.AdamW(self.model.parameters(), lr=0.05),
            torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9),
        ]
        return both, [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5) for optimizer in both]


@on_ranks(2)
def test_several_optimizers_are_resumed_bit_equal(work):
    resumes(work, steps=8, at=4, module=Gan)  # each optimizer step counts
    error = raised(lambda: fit(work, FSDP2Strategy(), steps=8, path=work / "step=4.ckpt"))
    assert "critic.head.weight" in error


@on_ranks(2)
def test_a_save_during_accumulation_does_not_change_training(work):
    class Mid(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 2:
                trainer.save_checkpoint(work / "mid.ckpt")

    options = {"steps": 4, "accumulate_grad_batches": 2}
    straight = snapshot(*fit(work, FSDP2Strategy(), **options))
    disturbed = fit(work, FSDP2Strategy(), Mid(), saving(work, every=2), **options)
    assert equal(straight, snapshot(*disturbed))
    assert fit(work, FSDP2Strategy(), path=work / "mid.ckpt", **options)[1].global_step == 4


PRECISIONS = {
    "bf16-mixed": (torch.float32, lambda: {"precision": "bf16-mixed"}),
    "bf16-true": (torch.bfloat16, lambda: {"precision": "bf16-true"}),
    "scaler": (torch.float32, lambda: {"plugins": MixedPrecision("16-mixed", "cpu", scaler())}),
}


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


@pytest.mark.parametrize("precision", PRECISIONS)
@on_ranks(2)
def test_each_precision_is_resumed_bit_equal(work, precision):
    dtype, options = PRECISIONS[precision]
    module, trainer = resumes(work, steps=5, at=3, fresh=options)
    assert next(module.parameters()).dtype == dtype
    assert precision != "scaler" or trainer.precision_plugin.scaler.get_scale() == 4096.0


@on_ranks(2)
def test_callbacks_that_average_an_unsharded_copy_are_refused(work):
    error = raised(lambda: fit(work, FSDP2Strategy(), EMAWeightAveraging(decay=0.5), steps=2))
    assert error.startswith("UsageError: EMAWeightAveraging averages an unsharded copy")


class Average(EMAWeightAveraging):
    """Copies the averaged weights before the first step and after the last one."""

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.first = getattr(self, "first", None) or weights(self._average_model.module)
        super().on_train_batch_start(*args, **kwargs)

    def on_train_end(self, *args: Any) -> None:
        self.last = weights(self._average_model.module)


@pytest.mark.parametrize("callback", [ManagedCheckpoint, ModelCheckpoint])
@on_ranks(2)
def test_averaged_and_trained_weights_are_both_restored_under_ddp(work, callback):
    save, first = callback(dirpath=work, every_n_train_steps=3, filename="{step}"), First()
    saved, loaded = Average(decay=0.5), Average(decay=0.5)
    before = snapshot(*fit(work, ddp(), saved, save, steps=3))
    fit(work, ddp(), loaded, first, steps=4, path=work / "step=3.ckpt")
    assert equal(before, first.state)
    assert all(torch.equal(loaded.first[name], value) for name, value in saved.last.items())


@pytest.mark.parametrize("name", ["ddp", "mp"])
@on_ranks(2)
def test_checkpoints_saved_under_a_lightning_strategy_are_resumed_by_it(work, name):
    def strategy() -> Any:
        return DDPStrategy() if name == "ddp" else ModelParallelStrategy(dist.get_world_size(), 1)

    build = Lit if name == "ddp" else Sharded
    before, first = snapshot(*fit(work, strategy(), saving(work, save_last=True), steps=3, module=build())), First()
    module, trainer = fit(work, strategy(), first, saving(work, save_last=True), steps=5, path="last", module=build())
    assert equal(before, first.state)
    assert {"last.ckpt", "step=5.ckpt"} <= set(checkpoints(work))
    assert evaluated(trainer, module, "best") > 0


@on_ranks(2)
def test_type_full_gathers_nothing_before_the_save_and_gives_rank_0_whole_tensors_on_request(work):  # NB4
    class Looking(Lit):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.saw = {type(v).__name__ for v in checkpoint["state_dict"].values()}

    module, trainer = fit(work, FSDP2Strategy(state_dict_type="full"), steps=1, module=Looking())
    trainer.save_checkpoint(work / "streamed.ckpt")
    assert module.saw == {"DTensor"}
    given = len(trainer.strategy.lightning_module_state_dict())
    moments = len(trainer.strategy.optimizer_state(trainer.optimizers[0]).get("state", {}))
    assert (given, moments) == ((6, 6) if dist.get_rank() == 0 else (0, 0))


@on_ranks(2)
def test_a_checkpoint_not_written_by_lightning_is_resumed_from(work):
    module, trainer = fit(work, FSDP2Strategy(), steps=2)
    states.save(work / "run", TrainState(model=module, optimizer=trainer.optimizers[0], step=2), 2)
    before, first = snapshot(module, trainer), First()
    fit(work, FSDP2Strategy(), first, steps=2, path=work / "run" / "step_00000002")
    assert equal({**before, "step": 0}, {**first.state, "lrs": before["lrs"]})


class Hooked(Lit):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"tokens": 17, "names": ("a", "b"), "table": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]
        self.had = sorted(checkpoint["state_dict"])


@on_ranks(2)
def test_module_hooks_get_their_saved_values_and_the_loaded_weights(work):
    _, trainer = fit(work, FSDP2Strategy(), steps=2, module=Hooked())
    trainer.save_checkpoint(work / "hooked.ckpt")
    again, _ = fit(work, FSDP2Strategy(), steps=3, module=Hooked(), path=work / "hooked.ckpt")
    assert {**again.mine, "table": again.mine["table"].tolist()} == {
        "tokens": 17, "names": ("a", "b"), "table": [0, 1, 2],
    }  # fmt: skip
    assert len(again.had) == 6


class Configured(Lit):
    def __init__(self, where: Path, dtype: torch.dtype, kind: type, size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


@on_ranks(2)
def test_hyperparameters_that_are_not_plain_values_are_saved_as_text(work):
    def module() -> Configured:
        return Configured(Path("/data"), torch.bfloat16, nn.GELU)

    path = work / "hparams.ckpt"
    fit(work, FSDP2Strategy(), steps=1, module=module())[1].save_checkpoint(path)
    saved = repr(open_checkpoint(str(path))["extra.lightning"]["hyper_parameters"])
    assert "'where': '/data'" in saved and "torch.bfloat16" in saved
    fit(work, FSDP2Strategy(), steps=2, path=path, module=module())


@on_ranks(2)
def test_two_callbacks_and_the_end_of_training_may_save_the_same_step(work):
    class AtEnd(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(work / "step=4.ckpt")

    epoch = ManagedCheckpoint(dirpath=work, every_n_epochs=1, save_top_k=-1, filename="{step}")
    fit(work, FSDP2Strategy(), saving(work, every=2, keep=-1), epoch, AtEnd(), steps=4)
    assert checkpoints(work) == ["step=2.ckpt", "step=4-v1.ckpt", "step=4.ckpt"]
    assert fit(work, FSDP2Strategy(), steps=5, path=work / "step=4.ckpt")[1].global_step == 5


@on_ranks(2)
def test_save_weights_only_checkpoints_validate_and_do_not_resume(work):
    path = work / "step=2.ckpt"
    fit(work, FSDP2Strategy(), saving(work, every=2, save_weights_only=True), steps=2)
    assert not any(key.startswith("optimizer") for key in open_checkpoint(str(path)))
    validated = trainer_of(work, FSDP2Strategy()).validate(Lit(), loader(), ckpt_path=str(path), verbose=False)
    assert validated[0]["val_loss"] > 0
    assert "contains only the model" in raised(lambda: fit(work, FSDP2Strategy(), steps=3, path=path))


@on_ranks(2)
def test_paths_that_are_not_checkpoints_are_refused_by_name_and_not_overwritten(work):  # P6
    def error_of(name: str) -> str:
        return raised(lambda: fit(work, FSDP2Strategy(), steps=1, path=work / name))

    if dist.get_rank() == 0:
        (work / "folder.ckpt").mkdir()
        (work / "folder.ckpt" / "notes.txt").write_text("mine")
        (work / "junk.ckpt").write_bytes(b"junk" * 100)
    dist.barrier()
    assert error_of("nothing.ckpt").startswith("CheckpointNotFoundError")
    assert "notes.txt" in error_of("folder.ckpt")
    assert error_of("junk.ckpt").startswith("CorruptCheckpointError")
    _, trainer = fit(work, FSDP2Strategy(), steps=1)
    over = raised(lambda: trainer.save_checkpoint(work / "folder.ckpt"))
    assert over.startswith("CheckpointExistsError") and (work / "folder.ckpt" / "notes.txt").exists()


@on_ranks(2)
def test_a_model_of_another_shape_is_refused_with_every_shape(work):
    wide = Lit()
    wide.model.head = nn.Linear(8, 5)
    fit(work, FSDP2Strategy(), steps=1)[1].save_checkpoint(work / "narrow.ckpt")
    error = raised(lambda: fit(work, FSDP2Strategy(), steps=1, path=work / "narrow.ckpt", module=wide))
    assert "[3, 8] in the checkpoint, expected [5, 8]" in error
    assert "[3] in the checkpoint, expected [5]" in error


@on_ranks(2)
def test_names_with_directories_are_rotated_too(work):
    fit(work, FSDP2Strategy(), saving(work, filename="{step}/x"), steps=3)
    dist.barrier()
    assert [str(path.relative_to(work)) for path in work.glob("*/*.ckpt")] == ["step=3/x.ckpt"]
