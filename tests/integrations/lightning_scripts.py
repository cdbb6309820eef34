"""Typical user scripts under a real Trainer with our strategy and callback, for `test_lightning_scripts`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from ckptkit import CheckpointManager, TrainState, open_checkpoint
from ckptkit.integrations.lightning import CkptkitCheckpointIO, FSDP2Strategy, ManagedCheckpoint
from tests.integrations.lightning_job import (
    FirstState,
    Lit,
    Net,
    Probe,
    equal,
    fit,
    loader,
    raised,
    run_parts,
    snapshot,
    trainer_of,
)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".") and p.suffix == ".ckpt")


def same_everywhere(module: Any) -> bool:
    mine = torch.cat(
        [p.full_tensor().flatten() if hasattr(p, "full_tensor") else p.flatten() for p in module.parameters()]
    )
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.detach())
    return all(torch.equal(part, parts[0]) for part in parts)


def fit_twice(work: Path, facts: dict[str, Any]) -> None:
    pl.seed_everything(7 + int(os.environ["RANK"]), verbose=False)
    trainer = trainer_of(work, FSDP2Strategy(), steps=2)
    first, second = Lit(), Lit()
    trainer.fit(first, loader())
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(second, loader())
    facts["second_is_sharded"] = any(isinstance(m, FSDPModule) for m in second.modules())
    facts["second_is_same"] = same_everywhere(second)
    again = trainer_of(work, FSDP2Strategy(), steps=2)
    again.fit(second, loader())
    again.save_checkpoint(work / "again.ckpt")
    facts["again_step"] = again.global_step
    facts["again_tests"] = (
        again.test(second, loader(), ckpt_path=str(work / "again.ckpt"), verbose=False)[0]["test_loss"] > 0
    )


def resumed_from(work: Path, facts: dict[str, Any]) -> None:
    def callback() -> ManagedCheckpoint:
        return ManagedCheckpoint(dirpath=work / "from", every_n_train_steps=1, save_top_k=1, filename="{step}")

    fit(work, FSDP2Strategy(), callback(), steps=3)
    facts["from_before"] = names(work / "from")
    fit(work, FSDP2Strategy(), callback(), steps=6, path=str(work / "from" / "step=3.ckpt"))
    facts["from_after"] = names(work / "from")


def two_callbacks(work: Path, facts: dict[str, Any]) -> None:
    best = ManagedCheckpoint(
        dirpath=work / "both",
        monitor="loss_of_step",
        mode="max",
        every_n_train_steps=1,
        save_top_k=1,
        filename="best-{step}",
    )
    recent = ManagedCheckpoint(
        dirpath=work / "both", every_n_train_steps=1, save_top_k=1, filename="recent-{step}", save_last=True
    )
    fit(work, FSDP2Strategy(), best, recent, steps=5)
    facts["both"] = names(work / "both")
    facts["both_best"] = Path(best.best_model_path).name
    facts["both_best_exists"] = Path(best.best_model_path).is_dir()


def last_and_best(work: Path, facts: dict[str, Any]) -> None:
    def callback() -> ManagedCheckpoint:
        return ManagedCheckpoint(
            dirpath=work / "lb",
            monitor="loss_of_step",
            every_n_train_steps=1,
            save_top_k=1,
            filename="{step}",
            save_last=True,
        )

    straight = snapshot(*fit(work, FSDP2Strategy(), steps=5))
    fit(work, FSDP2Strategy(), callback(), steps=3, path="last")  # no checkpoint yet: a new run
    save = callback()
    module, trainer = fit(work, FSDP2Strategy(), save, steps=5, path="last")
    facts["last_equal"] = equal(straight, snapshot(module, trainer))
    facts["lb"] = names(work / "lb")
    facts["best_tests"] = trainer.test(module, loader(), ckpt_path="best", verbose=False)[0]["test_loss"] > 0
    facts["last_predicts"] = len(trainer.predict(module, loader(), ckpt_path="last"))


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


def own_state_dict(work: Path, facts: dict[str, Any]) -> None:
    module, trainer = fit(work, FSDP2Strategy(), steps=2, module=Partly())
    trainer.save_checkpoint(work / "partly.ckpt")
    before = snapshot(module, trainer)
    keys = [k for k in open_checkpoint(str(work / "partly.ckpt")) if k.startswith("model.")]
    facts["partly_keys"] = len(keys), any("encoder" in k for k in keys)
    first = Probe()
    fit(work, FSDP2Strategy(), first, steps=3, module=Partly(), path=str(work / "partly.ckpt"))
    facts["partly_resumed"] = equal(before, first.first)


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


def state_dict_hooks(work: Path, facts: dict[str, Any]) -> None:
    module, trainer = fit(work, FSDP2Strategy(), steps=2, module=Changed())
    weights = {n: p.full_tensor().clone() for n, p in module.named_parameters()}
    trainer.save_checkpoint(work / "changed.ckpt")
    keys = [k for k in open_checkpoint(str(work / "changed.ckpt")) if k.startswith("model.")]
    facts["changed_keys"] = sorted(keys)

    class Look(Callback):
        found: Any = None

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.found = {n: p.full_tensor().clone() for n, p in module.named_parameters()}

    look = Look()
    fit(work, FSDP2Strategy(), look, steps=3, module=Changed(), path=str(work / "changed.ckpt"))
    facts["changed_resumed"] = [n for n in weights if not torch.equal(weights[n], look.found[n])]


class Gan(pl.LightningModule):
    """Two optimizers, each with a scheduler, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.critic = Net(), Net()
        self.automatic_optimization = False

    def training_step(self, batch: Any, _: int) -> None:
        for net, optimizer, scheduler in zip(
            (self.model, self.critic), self.optimizers(), self.lr_schedulers(), strict=True
        ):
            loss = net(batch).pow(2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            scheduler.step()

    def configure_optimizers(self) -> Any:
        both = [
            torch.optim.AdamW(self.model.parameters(), lr=0.05),
            torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9),
        ]
        return both, [torch.optim.lr_scheduler.LinearLR(o, total_iters=5) for o in both]


def several_optimizers(work: Path, facts: dict[str, Any]) -> None:
    straight = snapshot(*fit(work, FSDP2Strategy(), steps=8, module=Gan()))  # each optimizer step counts
    save = ManagedCheckpoint(dirpath=work / "gan", every_n_train_steps=4, filename="{step}")
    fit(work, FSDP2Strategy(), save, steps=4, module=Gan())
    path = str(work / "gan" / "step=4.ckpt")
    facts["gan_equal"] = equal(straight, snapshot(*fit(work, FSDP2Strategy(), steps=8, path=path, module=Gan())))
    facts["gan_into_one"] = raised(lambda: fit(work, FSDP2Strategy(), steps=8, path=path))


def accumulation(work: Path, facts: dict[str, Any]) -> None:
    class Mid(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 2:
                trainer.save_checkpoint(work / "mid.ckpt")

    straight = snapshot(*fit(work, FSDP2Strategy(), steps=4, accumulate_grad_batches=2))
    save = ManagedCheckpoint(dirpath=work / "acc", every_n_train_steps=2, filename="{step}")
    disturbed = fit(work, FSDP2Strategy(), Mid(), save, steps=4, accumulate_grad_batches=2)
    facts["mid_save_disturbs_nothing"] = equal(straight, snapshot(*disturbed))
    _, trainer = fit(work, FSDP2Strategy(), steps=4, accumulate_grad_batches=2, path=str(work / "mid.ckpt"))
    facts["mid_resumes_at"] = trainer.global_step


def precisions(work: Path, facts: dict[str, Any]) -> None:
    for name in ("bf16-mixed", "bf16-true", "scaler"):

        def options(name: str = name) -> dict[str, Any]:
            if name == "scaler":
                return {
                    "plugins": MixedPrecision(
                        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
                    )
                }
            return {"precision": name}

        folder = work / f"precision-{name}"
        save = ManagedCheckpoint(dirpath=folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        module, trainer = fit(work, FSDP2Strategy(), save, steps=5, **options())
        facts[f"{name}_dtype"] = str(next(module.parameters()).dtype)
        straight = snapshot(module, trainer)
        module, trainer = fit(work, FSDP2Strategy(), steps=5, path=str(folder / "step=3.ckpt"), **options())
        facts[f"{name}_equal"] = equal(straight, snapshot(module, trainer))
        if name == "scaler":
            facts["scale"] = trainer.precision_plugin.scaler.get_scale()


def averaging(work: Path, facts: dict[str, Any]) -> None:
    facts["ema_fsdp2"] = raised(lambda: fit(work, FSDP2Strategy(), EMAWeightAveraging(decay=0.5), steps=2))

    def ddp() -> Any:
        strategy = DDPStrategy()
        strategy.checkpoint_io = CkptkitCheckpointIO()
        return strategy

    save = ManagedCheckpoint(dirpath=work / "ema", every_n_train_steps=3, filename="{step}")
    theirs = ModelCheckpoint(dirpath=work / "ema_io", every_n_train_steps=3, filename="{step}")

    class Average(EMAWeightAveraging):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            self.kept = {n: p.clone() for n, p in self._average_model.module.named_parameters()}

    ema = Average(decay=0.5)
    before = snapshot(*fit(work, ddp(), ema, save, theirs, steps=3))

    class First(FirstState):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if self.state is None:
                average = trainer.callbacks[0]._average_model.module
                self.average = {n: p.clone() for n, p in average.named_parameters()}
            super().on_train_batch_start(trainer, module, batch, index)

    for where in ("ema", "ema_io"):
        first = First()
        fit(work, ddp(), Average(decay=0.5), first, steps=4, path=str(work / where / "step=3.ckpt"))
        same = all(torch.equal(first.average[n], ema.kept[n]) for n in ema.kept)
        facts[f"{where}_equal"] = equal(before, first.state), same


def other_strategies(work: Path, facts: dict[str, Any]) -> None:
    """The callback under DDP and under Lightning's ModelParallelStrategy, which resume from its checkpoints."""

    class Own(Lit):
        def configure_model(self) -> None:
            if not isinstance(self.model, FSDPModule):
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    for name, strategy, build in (
        ("ddp", DDPStrategy, Lit),
        ("mp", lambda: ModelParallelStrategy(dist.get_world_size(), 1), Own),
    ):
        folder = work / f"under-{name}"
        save = ManagedCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=1, filename="{step}", save_last=True)
        before = snapshot(*fit(work, strategy(), save, steps=3, module=build()))
        first = FirstState()
        save = ManagedCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=1, filename="{step}", save_last=True)
        module, trainer = fit(work, strategy(), first, save, steps=5, path="last", module=build())
        facts[f"under_{name}_equal"] = equal(before, first.state)
        facts[f"under_{name}"] = names(folder)
        facts[f"under_{name}_best"] = (
            trainer.test(module, loader(), ckpt_path="best", verbose=False)[0]["test_loss"] > 0
        )


def full_is_streamed(work: Path, facts: dict[str, Any]) -> None:
    """With the type "full", a save by the Trainer does not gather the model into a dictionary first."""

    class Looking(Lit):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.saw = {type(v).__name__ for v in checkpoint["state_dict"].values()}

    module, trainer = fit(work, FSDP2Strategy(state_dict_type="full"), steps=1, module=Looking())
    trainer.save_checkpoint(work / "streamed.ckpt")
    facts["full_saw"] = sorted(module.saw)
    facts["full_given"] = len(trainer.strategy.lightning_module_state_dict())
    facts["full_moments"] = len(trainer.strategy.optimizer_state(trainer.optimizers[0]).get("state", {}))


def foreign_weights(work: Path, facts: dict[str, Any]) -> None:
    """`ckpt_path` may name a checkpoint that Lightning did not write."""
    module, trainer = fit(work, FSDP2Strategy(), steps=2)
    state = TrainState(model=module, optimizer=trainer.optimizers[0], step=2)
    with CheckpointManager(work / "plain-run") as manager:
        manager.save(2, state)
    before = snapshot(module, trainer)
    first = Probe()
    fit(work, FSDP2Strategy(), first, steps=2, path=str(work / "plain-run" / "step_00000002"))
    facts["foreign_equal"] = equal({**before, "step": 0}, {**first.first, "lrs": before["lrs"]})


class Hooked(Lit):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"tokens": 17, "names": ("a", "b"), "table": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]
        self.had = sorted(checkpoint["state_dict"])


def module_hooks(work: Path, facts: dict[str, Any]) -> None:
    _, trainer = fit(work, FSDP2Strategy(), steps=2, module=Hooked())
    trainer.save_checkpoint(work / "hooked.ckpt")
    again, _ = fit(work, FSDP2Strategy(), steps=3, module=Hooked(), path=str(work / "hooked.ckpt"))
    facts["hook_value"] = again.mine["tokens"], again.mine["names"], again.mine["table"].tolist()
    facts["hook_saw"] = len(again.had)


class Configured(Lit):
    def __init__(self, where: Path, dtype: torch.dtype, kind: type, size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


def hyperparameters(work: Path, facts: dict[str, Any]) -> None:
    _, trainer = fit(work, FSDP2Strategy(), steps=1, module=Configured(Path("/data"), torch.bfloat16, nn.GELU))
    facts["hparams_error"] = raised(lambda: trainer.save_checkpoint(work / "hparams.ckpt"))
    if not facts["hparams_error"]:
        facts["hparams"] = repr(open_checkpoint(str(work / "hparams.ckpt"))["extra.lightning"]["hyper_parameters"])
    facts["hparams_resume"] = raised(
        lambda: fit(
            work,
            FSDP2Strategy(),
            steps=2,
            path=str(work / "hparams.ckpt"),
            module=Configured(Path("/data"), torch.bfloat16, nn.GELU),
        )
    )
    facts["load_from_checkpoint"] = raised(lambda: Configured.load_from_checkpoint(work / "hparams.ckpt"))


def same_step(work: Path, facts: dict[str, Any]) -> None:
    class AtEnd(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(work / "same" / "step=4.ckpt")

    save = ManagedCheckpoint(dirpath=work / "same", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    epoch = ManagedCheckpoint(dirpath=work / "same", every_n_epochs=1, save_top_k=-1, filename="{step}")
    fit(work, FSDP2Strategy(), save, epoch, AtEnd(), steps=4)
    facts["same_dir"] = names(work / "same")
    facts["same_loads"] = fit(work, FSDP2Strategy(), steps=5, path=str(work / "same" / "step=4.ckpt"))[1].global_step


def weights_only(work: Path, facts: dict[str, Any]) -> None:
    save = ManagedCheckpoint(dirpath=work / "wo", every_n_train_steps=2, save_weights_only=True, filename="{step}")
    fit(work, FSDP2Strategy(), save, steps=2)
    path = str(work / "wo" / "step=2.ckpt")
    facts["wo_keys"] = sorted({k.partition(".")[0] for k in open_checkpoint(path)})
    trainer = trainer_of(work, FSDP2Strategy(), steps=1)
    facts["wo_validates"] = trainer.validate(Lit(), loader(), ckpt_path=path, verbose=False)[0]["val_loss"] > 0
    facts["wo_fit"] = raised(lambda: fit(work, FSDP2Strategy(), steps=3, path=path))


def wrong_paths(work: Path, facts: dict[str, Any]) -> None:
    facts["no_path"] = raised(lambda: fit(work, FSDP2Strategy(), steps=1, path=str(work / "nothing.ckpt")))
    if dist.get_rank() == 0:
        (work / "folder.ckpt").mkdir()
        (work / "folder.ckpt" / "notes.txt").write_text("mine")
        (work / "junk.ckpt").write_bytes(b"junk" * 100)
    dist.barrier()
    facts["no_checkpoint"] = raised(lambda: fit(work, FSDP2Strategy(), steps=1, path=str(work / "folder.ckpt")))
    facts["junk"] = raised(lambda: fit(work, FSDP2Strategy(), steps=1, path=str(work / "junk.ckpt")))
    _, trainer = fit(work, FSDP2Strategy(), steps=1)
    facts["over_folder"] = raised(lambda: trainer.save_checkpoint(work / "folder.ckpt"))
    facts["folder_kept"] = (work / "folder.ckpt" / "notes.txt").exists()

    class Wide(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.model.head = nn.Linear(8, 5)

    trainer.save_checkpoint(work / "narrow.ckpt")
    facts["wide"] = raised(lambda: fit(work, FSDP2Strategy(), steps=1, path=str(work / "narrow.ckpt"), module=Wide()))


def crash(work: Path, facts: dict[str, Any]) -> None:
    class Break(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if trainer.global_step == 4:
                raise RuntimeError("the node is gone")

    def callback() -> ManagedCheckpoint:
        return ManagedCheckpoint(
            dirpath=work / "crash", every_n_train_steps=3, save_top_k=1, filename="{step}", save_last=True
        )

    facts["crash"] = raised(lambda: fit(work, FSDP2Strategy(), callback(), Break(), steps=6))
    straight = snapshot(*fit(work, FSDP2Strategy(), steps=6))
    facts["crash_equal"] = equal(straight, snapshot(*fit(work, FSDP2Strategy(), callback(), steps=6, path="last")))


def nested_names(work: Path, facts: dict[str, Any]) -> None:
    save = ManagedCheckpoint(dirpath=work / "nest", every_n_train_steps=1, save_top_k=1, filename="{step}/x")
    fit(work, FSDP2Strategy(), save, steps=3)
    facts["nest"] = sorted(str(p.relative_to(work / "nest")) for p in (work / "nest").glob("*/*.ckpt"))


def epochs(work: Path, facts: dict[str, Any]) -> None:
    """Saved in the middle and at the end of an epoch; each epoch has another order."""
    save = ManagedCheckpoint(dirpath=work / "epochs", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    straight = snapshot(*fit(work, FSDP2Strategy(), save, steps=7))
    for step in (4, 6):
        path = str(work / "epochs" / f"step={step}.ckpt")
        facts[f"epochs_{step}"] = equal(straight, snapshot(*fit(work, FSDP2Strategy(), steps=7, path=path)))


def run(work: str, *parts: Any) -> dict[str, Any]:
    return run_parts(globals(), work, parts)
