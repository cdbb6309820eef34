"""The work of a rank under a real Trainer, for `test_lightning`; it returns its findings."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

warnings.filterwarnings("ignore")
import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers.logger import DummyLogger  # noqa: E402

from ckptkit.integrations.lightning import FSDP2Strategy, ManagedCheckpoint  # noqa: E402

ZOO = Path(__file__).parents[1] / "zoo"
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Data(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(8.0) * (index + 1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Net()
        self.seen: list[float] = []

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.model(batch).pow(2).mean()
        self.log("loss_of_step", loss.detach(), sync_dist=True)
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("val_loss", self.model(batch).pow(2).mean(), sync_dist=True)

    def test_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("test_loss", self.model(batch).pow(2).mean(), sync_dist=True)

    def predict_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5), "interval": "step"}
        ]


class Probe(Callback):
    """Inspects the state before the first step, after the optimizer was restored."""

    def __init__(self) -> None:
        self.first: dict[str, Any] | None = None
        self.pending_before: bool | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if self.first is None:
            self.pending_before = trainer.strategy._pending is not None
            trainer.strategy.restore_pending()
            self.first = snapshot(module, trainer)


class Watch(Callback):
    """Records when the optimizer state is restored: in the first training step, before its update."""

    before: bool | None = None
    after: bool | None = None
    moments = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if self.before is None:
            self.before = trainer.strategy._pending is not None and not trainer.optimizers[0].state

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.after is None:
            self.after = trainer.strategy._pending is None
            self.moments = sum(len(values) for values in optimizer.state.values())


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()


def snapshot(module: Any, trainer: Any) -> dict[str, Any]:
    weights = {name: whole(p) for name, p in module.state_dict().items()}
    moments = {}
    for i, optimizer in enumerate(trainer.optimizers):
        names = {id(p): n for n, p in module.named_parameters()}
        for p, values in optimizer.state.items():
            moments |= {f"{i}.{names[id(p)]}.{k}": whole(v) for k, v in values.items()}
    lrs = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return {"weights": weights, "moments": moments, "lrs": lrs, "step": trainer.global_step}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    same = a["lrs"] == b["lrs"] and a["step"] == b["step"] and bool(a["moments"])
    return same and all(
        a[part].keys() == b[part].keys() and all(torch.equal(a[part][k], b[part][k]) for k in a[part])
        for part in ("weights", "moments")
    )


def trainer_of(work: Path, strategy: Any, *callbacks: Any, steps: int, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_steps=steps,
        callbacks=list(callbacks),
        default_root_dir=work,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        num_sanity_val_steps=0,
        use_distributed_sampler=True,
        **{"logger": False, **options},
    )


def loader() -> DataLoader:
    return StatefulDataLoader(Data(), batch_size=2)  # resumes in the middle of an epoch, on each rank


def fit(
    work: Path, strategy: Any, *callbacks: Any, steps: int, path: Any = None, module: Any = None, seed: Any = None,
    **options: Any,
):  # fmt: skip
    pl.seed_everything(7 + (int(os.environ["RANK"]) if seed is None else seed), verbose=False)
    module = module or Lit()
    trainer = trainer_of(work, strategy, *callbacks, steps=steps, **options)
    trainer.fit(
        module, loader(), val_dataloaders=loader() if options.get("val_check_interval") else None, ckpt_path=path
    )
    return module, trainer


# --- parts


def resume(work: Path, facts: dict[str, Any]) -> None:
    """6 uninterrupted steps, and 3 + 3: for each state-dict type, in the middle of an epoch."""
    straight = snapshot(*fit(work, "fsdp2", steps=6))
    for kind in ("sharded", "full", "local"):
        save = ManagedCheckpoint(dirpath=work / kind, every_n_train_steps=3, save_top_k=1, filename="{epoch}-{step}")
        strategy = FSDP2Strategy(state_dict_type=kind)
        fit(work, strategy, save, steps=3)
        path = work / kind / "epoch=0-step=3.ckpt"
        watch = Watch()
        module, trainer = fit(work, FSDP2Strategy(), watch, steps=6, path=str(path))
        facts[f"{kind}_bit_equal"] = equal(straight, snapshot(module, trainer))
        facts[f"{kind}_deferred"] = bool(watch.before and watch.after)
        facts[f"{kind}_moments_at_start"] = watch.moments
    torch.save(straight, work / f"straight{os.environ['RANK']}.pt")


def evaluate(work: Path, facts: dict[str, Any]) -> None:
    """Validate, test and predict from a checkpoint."""
    path = str(work / "full" / "epoch=0-step=3.ckpt")
    trainer = trainer_of(work, FSDP2Strategy(), steps=1)
    facts["val_loss"] = trainer.validate(Lit(), loader(), ckpt_path=path, verbose=False)[0]["val_loss"]
    trainer = trainer_of(work, FSDP2Strategy(), steps=1)
    facts["test_loss"] = trainer.test(Lit(), loader(), ckpt_path=path, verbose=False)[0]["test_loss"]
    trainer = trainer_of(work, FSDP2Strategy(), steps=1)
    facts["predicted"] = list(trainer.predict(Lit(), loader(), ckpt_path=path)[0].shape)


def rotate(work: Path, facts: dict[str, Any]) -> None:
    """Monitor, save_top_k and save_last through the retention policy; an overwritten Lightning file is removed."""
    save = ManagedCheckpoint(
        dirpath=work / "best", monitor="val_loss", save_top_k=2, save_last=True, filename="{step}",
        save_on_train_epoch_end=False,
    )  # fmt: skip
    fit(work, FSDP2Strategy(), save, steps=8, val_check_interval=1)
    facts["best_dir"] = sorted(p.name for p in (work / "best").iterdir() if p.is_dir())
    facts["best_model_path"] = Path(save.best_model_path).name
    facts["best_exists"] = Path(save.best_model_path).is_dir()


def plain_callback(work: Path, facts: dict[str, Any]) -> None:
    """Lightning's own ModelCheckpoint with our strategy: it removes its own checkpoints, also through a link."""
    save = ModelCheckpoint(
        dirpath=work / "plain", every_n_train_steps=1, save_top_k=1, filename="{step}", save_last="link"
    )
    _, trainer = fit(work, FSDP2Strategy(), save, steps=2)
    facts["plain_dir"] = sorted(p.name for p in (work / "plain").iterdir() if not p.name.startswith(".") and p.is_dir())
    facts["link"] = os.path.realpath(work / "plain" / "last.ckpt") == str(work / "plain" / "step=2.ckpt")
    if dist.get_rank() == 0:
        trainer.strategy.remove_checkpoint(work / "plain" / "last.ckpt")
    dist.barrier()
    facts["target_kept"] = (work / "plain" / "step=2.ckpt").is_dir() and not (work / "plain" / "last.ckpt").exists()


def adapter(work: Path, facts: dict[str, Any]) -> None:
    """A checkpoint of tensors selected by a predicate, loaded over a model with the rest; a second parallelize()."""
    from ckptkit import open_checkpoint

    class Frozen(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.model.blocks.requires_grad_(False)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.head.parameters(), lr=0.05)

    def of() -> FSDP2Strategy:
        return FSDP2Strategy(lightning_module_filter=lambda name: ".head." in name, optimizer_restore="immediate")

    module, trainer = fit(work, of(), steps=2, module=Frozen())
    trainer.save_checkpoint(work / "adapter.ckpt")
    before = snapshot(module, trainer)
    facts["adapter_keys"] = sorted(k for k in open_checkpoint(str(work / "adapter.ckpt")) if k.startswith("model."))
    first = FirstState()
    fit(work, of(), first, steps=3, path=str(work / "adapter.ckpt"), module=Frozen())
    facts["adapter_resumed"] = equal(before, first.state)
    whole_on = trainer.strategy.lightning_module_state_dict("full")
    facts["whole_on_rank_0"] = [len(whole_on) == 2] if dist.get_rank() == 0 else [not whole_on]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.strategy.parallelize()
    facts["second_parallelize_warns"] = any("before" in str(item.message) for item in caught)


def foreign(work: Path, facts: dict[str, Any]) -> None:
    """A checkpoint of Lightning's ModelParallelStrategy, resumed by ours, with loops and callbacks."""
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Own(Lit):
        def configure_model(self) -> None:
            if not hasattr(self.model.head, "unshard"):
                for block in self.model.blocks:
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.model.head, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    world = int(os.environ["WORLD_SIZE"])
    made = {
        "mp_sharded": (ModelParallelStrategy(world, 1), Own),
        "mp_full": (ModelParallelStrategy(world, 1, save_distributed_checkpoint=False), Own),
        "ddp": (DDPStrategy(), Lit),
    }
    for name, (strategy, build) in made.items():
        module, trainer = fit(work, strategy, steps=3, module=build())
        path = work / f"{name}.ckpt"
        trainer.save_checkpoint(path)
        before = snapshot(module, trainer)
        probe = Probe()
        fit(work, FSDP2Strategy(), probe, steps=4, path=str(path))
        facts[f"from_{name}"] = equal(before, probe.first)
    save = ManagedCheckpoint(dirpath=work / "over", every_n_train_steps=1, save_top_k=1, filename="last")
    (work / "over").mkdir(exist_ok=True)
    if dist.get_rank() == 0:
        (work / "ddp.ckpt").rename(work / "over" / "last.ckpt")
    dist.barrier()
    module, trainer = fit(work, FSDP2Strategy(), steps=2)
    trainer.save_checkpoint(work / "over" / "last.ckpt")
    facts["over_a_file"] = sorted(p.name for p in (work / "over").iterdir())
    del save
    # The callback under a strategy that bypasses CheckpointIO, resumed by ours.
    save = ManagedCheckpoint(dirpath=work / "theirs", every_n_train_steps=3, filename="three")
    module, trainer = fit(work, ModelParallelStrategy(world, 1), save, steps=3, module=Own())
    before = snapshot(module, trainer)
    probe = Probe()
    fit(work, FSDP2Strategy(), probe, steps=4, path=str(work / "theirs" / "three.ckpt"))
    facts["callback_under_model_parallel"] = equal(before, probe.first)


def other_world(work: Path, facts: dict[str, Any]) -> None:
    """Resume the checkpoint of two ranks on another number of ranks."""
    for kind in ("sharded", "full"):
        probe = Probe()
        _, trainer = fit(work, FSDP2Strategy(), probe, steps=5, path=str(work / kind / "epoch=0-step=3.ckpt"))
        facts[f"{kind}_step"] = [probe.first["step"], trainer.global_step]
        facts[f"{kind}_moments"] = len(probe.first["moments"])
    one = probe.first["weights"]
    from safetensors.torch import load_file

    saved = load_file(next((work / "full" / "epoch=0-step=3.ckpt").glob("model*.safetensors")))
    facts["weights_equal"] = all(torch.equal(one[k], saved[k]) for k in saved) and len(saved) == len(one)


def pluggable(work: Path, facts: dict[str, Any]) -> None:
    """A custom CheckpointIO receives every write, with whole tensors on rank 0; ours runs under DDP."""
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch.strategies import DDPStrategy

    from ckptkit import RetentionPolicy
    from ckptkit.integrations.lightning import CkptkitCheckpointIO

    class Seen(TorchCheckpointIO):
        def __init__(self) -> None:
            self.paths: list[str] = []

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.paths.append(Path(path).name)
            super().save_checkpoint(checkpoint, path, storage_options)

    io = Seen()
    module, trainer = fit(work, FSDP2Strategy(checkpoint_io=io), steps=3)
    trainer.save_checkpoint(work / "io.ckpt")
    before = snapshot(module, trainer)
    facts["io_saw"] = io.paths
    if dist.get_rank() == 0:
        held = torch.load(work / "io.ckpt", weights_only=False)
        facts["io_whole"] = all(torch.equal(v, before["weights"][k]) for k, v in held["state_dict"].items())
    probe = Probe()
    fit(work, FSDP2Strategy(checkpoint_io=Seen()), probe, steps=4, path=str(work / "io.ckpt"))
    facts["io_resumed"] = equal(before, probe.first)
    io = CkptkitCheckpointIO(retention=RetentionPolicy(max_num=1))
    save = ModelCheckpoint(dirpath=work / "ddp", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    strategy = DDPStrategy()
    strategy.checkpoint_io = io
    module, trainer = fit(work, strategy, save, steps=3)
    before = snapshot(module, trainer)
    facts["ddp_kept"] = sorted(p.name for p in (work / "ddp").iterdir() if p.is_dir())
    strategy = DDPStrategy()
    strategy.checkpoint_io = CkptkitCheckpointIO()
    first = FirstState()
    fit(work, strategy, first, steps=4, path=str(work / "ddp" / "step=3.ckpt"))
    facts["ddp_resumed"] = equal(before, first.state)


class FailingLogger(DummyLogger):
    """A logger whose server is unreachable when rank 0 reports a checkpoint to it."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        raise ConnectionError("the tracking server is down")


def failing_logger(work: Path, facts: dict[str, Any]) -> None:
    """An error on rank 0 only, after a save."""
    save = ManagedCheckpoint(dirpath=work / "logged", every_n_train_steps=1, filename="{step}")
    trainer = trainer_of(work, FSDP2Strategy(), save, steps=2, logger=FailingLogger())
    mine = raised(lambda: trainer.fit(Lit(), loader()))
    both: list[str] = ["", ""]
    dist.all_gather_object(both, mine)
    facts["logger_errors"] = both


class FirstState(Callback):
    state: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if self.state is None:
            self.state = snapshot(module, trainer)


def raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_parts(functions: dict[str, Any], work: str, parts: Sequence[Any]) -> dict[str, Any]:
    """Run the parts, each a name or (name, arguments), in turn on this rank."""
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # tells Lightning that another launcher has started the ranks
    warnings.filterwarnings("ignore")
    facts: dict[str, Any] = {}
    for part in parts:
        name, *arguments = [part] if isinstance(part, str) else part
        functions[name](Path(work), facts, *arguments)
    return facts


def run(work: str, *parts: str) -> dict[str, Any]:
    return run_parts(globals(), work, parts)
