"""Short runs of a real Lightning Trainer on CPU ranks: a model, its data, and what tests compare of a run."""

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from ckptkit.integrations.lightning import CkptkitCheckpointIO, FSDP2Strategy, ManagedCheckpoint
from ckptkit import open_checkpoint
from tests.checkpoint.states import bits
from tests.fsdp.models import whole

warnings.filterwarnings("ignore")  # on each rank
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


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

    def _logged(self, name: str, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(batch).pow(2).mean()
        self.log(name, loss.detach(), sync_dist=True)
        return loss

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self._logged("loss_of_step", batch)

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self._logged("val_loss", batch)

    def test_step(self, batch: torch.Tensor, _: int) -> None:
        self._logged("test_loss", batch)

    def predict_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Sharded(Lit):
    """Shards itself, as Lightning's ModelParallelStrategy wants it."""

    def configure_model(self) -> None:
        if not hasattr(self.model.head, "unshard"):
            for part in (*self.model.blocks, self.model.head, self.model):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])


class Two(Lit):
    """Two optimizers and a scheduler that the module steps itself."""

    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, _: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.model(batch).pow(2).mean())
            optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        parts = (self.model.blocks, self.model.head)
        optimizers = [torch.optim.AdamW(part.parameters(), lr=0.05) for part in parts]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5)]


class First(Callback):
    """Takes a snapshot before the first step, with the optimizer state that waits for it."""

    state: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if self.state is None:
            getattr(trainer.strategy, "restore_pending", lambda: None)()
            self.state = snapshot(module, trainer)


def snapshot(module: Any, trainer: Any) -> dict[str, Any]:
    """Return whole weights and moments by their names without prefixes, with learning rates and the step."""
    names = {id(p): n.replace("_orig_mod.", "") for n, p in module.named_parameters()}
    moments = {
        f"{i}.{names[id(p)]}.{key}": whole(value)
        for i, optimizer in enumerate(trainer.optimizers)
        for p, values in optimizer.state.items()
        for key, value in values.items()
    }
    weights = {name.replace("_orig_mod.", ""): whole(p) for name, p in module.state_dict().items()}
    lrs = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return {"weights": weights, "moments": moments, "lrs": lrs, "step": trainer.global_step}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return bool(a["moments"]) and bits(a) == bits(b)


def loader() -> StatefulDataLoader:
    return StatefulDataLoader(Data(), batch_size=2)  # resumes in the middle of an epoch, on each rank


def trainer_of(
    work: Path, strategy: Any, *callbacks: Any, steps: int = 1, plugins: tuple[Any, ...] = (), **options: Any
) -> pl.Trainer:
    """Return a Trainer on ranks that another launcher has started."""
    return pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=steps,
        callbacks=list(callbacks),
        default_root_dir=work,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        use_distributed_sampler=True,
        plugins=[TorchElasticEnvironment(), *plugins],
        **{"logger": False, "num_sanity_val_steps": 0, **options},
    )


def fit(
    work: Path, strategy: Any, *callbacks: Any, steps: int, path: Any = None, module: Any = None, seed: Any = None,
    **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Train a module, by default a new one; `path` is a checkpoint to resume from."""
    pl.seed_everything(7 + (dist.get_rank() if seed is None else seed), verbose=False)
    module = module or Lit()
    trainer = trainer_of(work, strategy, *callbacks, steps=steps, **options)
    validation = loader() if options.get("val_check_interval") else None
    trainer.fit(module, loader(), val_dataloaders=validation, ckpt_path=path and str(path))
    return module, trainer


def evaluated(trainer: Any, module: Any, path: Any) -> float:
    return trainer.test(module, loader(), ckpt_path=str(path), verbose=False)[0]["test_loss"]


def saving(folder: Any, every: int = 1, keep: int = 1, **options: Any) -> ManagedCheckpoint:
    return ManagedCheckpoint(
        dirpath=folder, every_n_train_steps=every, save_top_k=keep, **{"filename": "{step}", **options}
    )


def resumes(
    folder: Path, strategy: Any = FSDP2Strategy, *, steps: int = 4, at: int = 2, module: Any = Lit,
    fresh: Callable[[], dict[str, Any]] = dict,
) -> tuple[Any, Any]:  # fmt: skip
    """Check that `steps` uninterrupted steps equal those that were resumed from step `at`; return the resumed run."""
    save = saving(folder, every=at, keep=-1)
    straight = snapshot(*fit(folder, strategy(), save, steps=steps, module=module(), **fresh()))
    path = folder / f"step={at}.ckpt"
    again = fit(folder, strategy(), steps=steps, module=module(), path=path, **fresh())
    assert equal(straight, snapshot(*again))
    return again


def restores(
    work: Path, strategy: Any, *callbacks: Any, build: Any = Lit, steps: int = 2, path: str = "saved.ckpt",
    by: Any = None, into: Any = None, first: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Check that a run that resumes from `path` begins with exactly what was saved; return the run that saved it.

    Without a callback that saves, the trainer does. The resumed run has the strategy `by` and the module `into`, by
    default the same ones; `first` takes its snapshot.
    """
    module, trainer = fit(work, strategy(), *callbacks, steps=steps, module=build())
    if not callbacks:
        trainer.save_checkpoint(work / path)
    first = first or First()
    before = snapshot(module, trainer)
    fit(work, (by or strategy)(), first, steps=steps + 1, module=(into or build)(), path=work / path)
    assert equal(before, first.state)
    return module, trainer


def ddp(**options: Any) -> DDPStrategy:
    """Return Lightning's strategy for replicas, with our CheckpointIO."""
    made = DDPStrategy()
    made.checkpoint_io = CkptkitCheckpointIO(**options)
    return made


def model_keys(path: Path) -> list[str]:
    return sorted(key for key in open_checkpoint(str(path)) if key.startswith("model."))


def checkpoints(folder: Path) -> list[str]:
    dist.barrier()
    return sorted(p.name for p in folder.iterdir() if not p.name.startswith(".") and p.suffix == ".ckpt")


def raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
