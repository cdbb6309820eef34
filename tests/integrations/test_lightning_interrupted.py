"""A Trainer that is stopped anywhere and resumed continues like one that was not stopped."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from tests.dtensors import local

pytest.importorskip("lightning")
pytest.importorskip("torchdata")
from lightning.pytorch.callbacks import EMAWeightAveraging
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptkit.integrations import lightning_signals
from tests.integrations.lightning_runs import (
    Callback,
    Data,
    FSDP2Strategy,
    Lit,
    ManagedCheckpoint,
    Two,
    equal,
    pl,
    raised,
    saving,
    snapshot,
    trainer_of,
)
from tests.patches import failing
from tests.ranks import logged, on_ranks

pytestmark = pytest.mark.timeout(600)

BATCHES = 4  # of each rank, in an epoch


class Trace(Callback):
    """Records what a run does: its batches with the weights after them, its validations and its hooks."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.events.append(("epoch starts", trainer.current_epoch))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        weight = module.model.head.weight
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        self.events.append(("batch", trainer.current_epoch, index, batch.tolist(), local(weight).tolist(), lr))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking and "val_loss" in trainer.callback_metrics:
            self.events.append(("validated", trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.events.append(("epoch ends", trainer.current_epoch))


class At(Callback):
    """Sends SIGTERM to this process in one hook, at one batch of one epoch, on the given ranks; or calls `act`."""

    def __init__(self, hook: str, epoch: int, index: int = 0, *, ranks: Any = (0, 1), act: Any = None) -> None:
        def called(trainer: Any, module: Any, *arguments: Any) -> None:
            now = arguments[-1] if hook.endswith(("train_batch_start", "train_batch_end")) else 0
            now = arguments[1] if hook == "on_validation_batch_start" else now
            if (trainer.current_epoch, now) == (epoch, index) and trainer.global_rank in ranks:
                (act or self.terminate)(trainer, module)

        setattr(self, hook, called)

    def terminate(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # schedulers often send it more than once


CRASH = failing(RuntimeError("the node is gone"))


class Scheduled(Lit):
    """A module with a hook, whose learning rate depends on steps, on epochs and on the validation's metric."""

    def __init__(self) -> None:
        super().__init__()
        self.model.register_buffer("seen", torch.zeros(()))

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, index: int) -> None:
        self.model.seen.mul_(0.5).add_(batch.sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        step = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return [optimizer], [
            {"scheduler": step, "interval": "step"},
            {"scheduler": epoch, "interval": "epoch"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val_loss", "strict": False},
        ]


class Epochs(Data):
    def __init__(self, batches: int) -> None:
        self.length = 2 * batches * dist.get_world_size()

    def __len__(self) -> int:
        return self.length


def run(
    work: Path, strategy: Any, *callbacks: Any, path: Any = None, module: Any = Lit, validates: bool = True,
    validation: Any = None, batches: int = BATCHES, loader: Any = StatefulDataLoader, **options: Any,
) -> tuple[Any, Any, list[Any]]:  # fmt: skip
    """Train with a shuffled dataset; return the module, the trainer, and what it did."""
    pl.seed_everything(7 + dist.get_rank(), verbose=False)
    trace, made = Trace(), module()
    # `max_steps` ends most runs, because Lightning's loops then guess their position from other counters.
    limits = {"steps": options.pop("max_steps", -1), "max_epochs": options.pop("max_epochs", None)}
    trainer = trainer_of(work, strategy, trace, *callbacks, **limits, **options)
    data = Epochs(batches)
    train = loader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=True, seed=3))
    if validates and validation is None:
        validation = StatefulDataLoader(Epochs(2), batch_size=2)
    try:
        trainer.fit(made, train, val_dataloaders=validation, ckpt_path=path and str(path))
    except SystemExit:  # Lightning's SIGTERMException
        trace.events.append("stopped")
    return made, trainer, trace.events


def newest(folder: Path) -> Path:
    dist.barrier()
    return max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)


def state(module: Any, trainer: Any) -> dict[str, Any]:
    for part in module.modules():
        getattr(part, "reshard", lambda: None)()  # FSDP2 leaves parameters gathered after a validation
    return snapshot(module, trainer)


def counters(trainer: Any) -> Any:
    """The loops' counters, and the state of the schedulers."""
    loops = {key: value for key, value in trainer.fit_loop.state_dict().items() if key != "state_dict"}
    return loops, [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]


def stopping(folder: Path) -> ManagedCheckpoint:
    return ManagedCheckpoint(dirpath=folder, filename="{step}", every_n_epochs=100, save_on_exception=True)


def continues(work: Path, strategy: Any, save: Any, at: At, more: Callable[[], Any] = Callback, **options: Any) -> None:
    """Check that a run that was stopped and resumed does what an uninterrupted run does, no more and no less."""

    def made() -> Any:
        return strategy() if callable(strategy) else strategy

    straight = run(work, made(), more(), **options)
    raised(lambda: run(work, made(), more(), save, at, **options))
    again = run(work, made(), more(), stopping(work / "again"), path=newest(Path(save.dirpath)), **options)
    ends_like(straight, again)


def ends_like(straight: Any, again: Any) -> None:
    """Check that a resumed run did what an uninterrupted one did at its end, and has the same state."""
    assert again[2] == straight[2][len(straight[2]) - len(again[2]) :]
    assert equal(state(*straight[:2]), state(*again[:2]))
    assert counters(straight[1]) == counters(again[1])


# Where the signal arrives: hook, epoch, batch. There are two epochs of four batches, each with a validation at its end.
PLACES: dict[str, tuple[Any, ...]] = {
    "inside an epoch": ("on_train_batch_start", 0, 1),
    "in the last batch": ("on_train_batch_start", 0, 3),
    "at the end of the last batch": ("on_train_batch_end", 0, 3),
    "when a validation starts": ("on_validation_start", 0),
    "in a validation": ("on_validation_batch_start", 0, 0),
    "in the last batch of a validation": ("on_validation_batch_start", 0, 1),
    "when a validation ends": ("on_validation_end", 0),
    "at the end of an epoch": ("on_train_epoch_end", 0),
    "at the start of an epoch": ("on_train_epoch_start", 1),
}
LIMITS: dict[str, dict[str, Any]] = {"epochs": {"max_epochs": 2}, "steps": {"max_steps": 2 * BATCHES}}
STRATEGIES: dict[str, Any] = {"ddp": "ddp", "fsdp2": FSDP2Strategy}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_a_run_stopped_by_a_signal_on_one_rank_resumes_bit_equal(tmp_path, name, place, limit):
    at = At(*PLACES[place], ranks=[1])
    continues(tmp_path, STRATEGIES[name], stopping(tmp_path / "c"), at, module=Scheduled, **LIMITS[limit])


OTHER: dict[str, tuple[Any, dict[str, Any]]] = {
    "without validation": (("on_train_batch_start", 0, 3), {"validates": False}),
    "with a validation inside the epoch": (("on_train_batch_start", 0, 1), {"val_check_interval": 2}),
    "in a validation inside the epoch": (("on_validation_batch_start", 0, 0), {"val_check_interval": 2}),
    "while gradients accumulate": (
        ("on_train_batch_start", 0, 2),
        {"accumulate_grad_batches": 2, "batches": 5, "validates": False, "max_steps": 6},
    ),
    "in the last step": (("on_train_batch_start", 1, 3), {"validates": False}),
    "in the sanity check": (("on_sanity_check_start", 0), {"num_sanity_val_steps": 1}),
}


@pytest.mark.parametrize("case", OTHER)
@on_ranks(2, 1)
def test_a_run_stopped_by_a_signal_on_all_ranks_resumes_bit_equal(tmp_path, case):
    (at, options), ranks = OTHER[case], dist.get_world_size()
    folder, limits = tmp_path / str(ranks), {"max_steps": 2 * BATCHES, **options}
    continues(folder, "auto" if ranks == 1 else "ddp", stopping(folder / "c"), At(*at), **limits)


SPECIAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "steps its optimizers itself": (FSDP2Strategy, {"module": Two}),
    # The averaged and the trained weights are exchanged at the start and at the end of a validation.
    "averages its weights": ("ddp", {"more": partial(EMAWeightAveraging, decay=0.5)}),
}


@pytest.mark.parametrize("place", ["in the last batch", "in a validation", "at the end of an epoch"])
@pytest.mark.parametrize("kind", SPECIAL)
@on_ranks(2)
def test_a_stopped_run_of_a_special_kind_resumes_bit_equal(tmp_path, kind, place):
    strategy, options = SPECIAL[kind]
    continues(tmp_path, strategy, stopping(tmp_path / "c"), At(*PLACES[place]), max_epochs=2, **options)


@on_ranks(2)
def test_a_stopped_trainer_can_fit_and_test_again(tmp_path):
    save = stopping(tmp_path / "c")
    module, trainer, did = run(tmp_path, "ddp", save, At("on_train_batch_start", 0, 1, ranks=[1]), max_epochs=1)
    assert did[-1] == "stopped" and trainer.received_sigterm
    trainer.callbacks.remove(next(callback for callback in trainer.callbacks if isinstance(callback, At)))
    trainer.fit(module, StatefulDataLoader(Epochs(BATCHES), batch_size=2), ckpt_path=str(newest(tmp_path / "c")))
    assert trainer.global_step == BATCHES and not trainer.received_sigterm
    trainer.test(module, StatefulDataLoader(Epochs(2), batch_size=2), verbose=False)


@on_ranks(2)
def test_a_signal_after_the_last_batch_is_reported_and_the_next_one_ends_the_process(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with logged(name="ckptkit.integrations.lightning_signals") as texts:
        late = At("on_train_end", 1, ranks=[1])
        _, trainer, did = run(tmp_path, "ddp", stopping(tmp_path / "c"), late, max_epochs=1)
    assert did[-1] == ("epoch ends", 0) and signal.getsignal(signal.SIGTERM) is before
    assert trainer.received_sigterm == (dist.get_rank() == 1) == any("training was already over" in t for t in texts)


@on_ranks(2)
def test_a_slurm_job_is_saved_and_requeued_between_two_batches(tmp_path):
    def requeue(trainer: Any, _: Any) -> None:  # as Lightning's handler for SIGUSR1 does, if it detects Slurm
        trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)

    straight = run(tmp_path, FSDP2Strategy(), max_epochs=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "7")  # there is no scontrol here, which Lightning only logs
        at = At("on_train_batch_start", 0, 3, ranks=[1], act=requeue)
        run(tmp_path, FSDP2Strategy(), stopping(tmp_path / "c"), at, max_epochs=2)
    ends_like(straight, run(tmp_path, FSDP2Strategy(), path=newest(tmp_path), max_epochs=2))


@contextlib.contextmanager
def rank_0_warns(name: str, text: str) -> Iterator[None]:
    """Check that the block logs one warning, with this text, on rank 0 only."""
    with logged(name=name) as texts:
        yield
    assert [text in line for line in texts] == [True] * (dist.get_rank() == 0), texts


@on_ranks(2)
def test_an_order_of_data_that_cannot_be_restored_is_warned_about(tmp_path):
    def train(*callbacks: Any, path: Any = None) -> None:
        loader = StatefulDataLoader(Epochs(BATCHES), batch_size=2, shuffle=True)  # Lightning wraps torchdata's sampler
        trainer_of(tmp_path, "ddp", *callbacks, steps=6).fit(Lit(), loader, ckpt_path=path and str(path))

    train(saving(tmp_path / "c", every=5))
    with rank_0_warns("ckptkit.integrations.lightning_state", "order of the data"):
        train(saving(tmp_path / "again", every=100), path=newest(tmp_path / "c"))


@pytest.mark.parametrize("loader", [StatefulDataLoader, DataLoader])
@on_ranks(2, 1)
def test_a_run_on_a_different_number_of_ranks_warns_that_it_repeats_or_skips_samples(tmp_path, loader):
    if dist.get_world_size() == 2:
        run(tmp_path, FSDP2Strategy(), saving(tmp_path / "c", every=3), max_steps=3, loader=loader)
        return
    options = {"path": newest(tmp_path / "c"), "max_steps": 5, "loader": loader}
    with rank_0_warns("ckptkit.integrations.lightning_state", "repeats or skips samples"):
        again = run(tmp_path, FSDP2Strategy(), stopping(tmp_path / "d"), **options)
    assert again[1].global_step == 5


class Stream(IterableDataset):
    """Data without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([Data()[i] for i in range(self.count)])


class Alone(Lit):
    """Validates without communication."""

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.model(batch)


@on_ranks(2)
def test_ranks_with_different_numbers_of_validation_batches_stop_after_the_validation(tmp_path):
    validation = DataLoader(Stream(4 * (dist.get_rank() + 1)), batch_size=2)
    stop = At("on_validation_batch_start", 0, 1, ranks=[1])
    did = run(tmp_path, "ddp", stopping(tmp_path / "c"), stop, module=Alone, max_epochs=2, validation=validation)[2]
    assert did[-2:] == [("epoch ends", 0), "stopped"] and newest(tmp_path / "c").name == f"step={BATCHES}.ckpt"


REGULAR: dict[str, dict[str, Any]] = {
    "after the last batch of an epoch": {"every_n_train_steps": 4},
    "at the end of an epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "at the end of a validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("when", REGULAR)
@on_ranks(2)
def test_a_run_resumes_bit_equal_from_its_regular_checkpoints(tmp_path, when, limit):
    save = ManagedCheckpoint(dirpath=tmp_path / "c", filename="{step}", **REGULAR[when])
    end = At("on_train_batch_start", 1, 2, act=CRASH)
    continues(tmp_path, "ddp", save, end, module=Scheduled, **LIMITS[limit])


@on_ranks(2)
def test_a_run_with_more_steps_continues_the_epoch_that_max_steps_ended(tmp_path):
    straight = run(tmp_path, "ddp", max_steps=8)
    save = ManagedCheckpoint(dirpath=tmp_path / "c", every_n_epochs=1, save_on_train_epoch_end=True)
    run(tmp_path, "ddp", save, max_steps=6)
    ends_like(straight, run(tmp_path, "ddp", stopping(tmp_path / "again"), path=newest(tmp_path / "c"), max_steps=8))


@on_ranks(2)
def test_a_resumed_run_does_not_save_between_the_batches_of_one_step(tmp_path):
    options = {"accumulate_grad_batches": 2, "validates": False}
    run(tmp_path, "ddp", saving(tmp_path / "c", every=2), max_steps=2, **options)
    end = At("on_train_batch_end", 1, 0, act=CRASH)
    again = {"path": newest(tmp_path / "c"), "max_steps": 4, **options}
    assert "the node is gone" in raised(lambda: run(tmp_path, "ddp", saving(tmp_path / "again", every=2), end, **again))
    assert not list((tmp_path / "again").glob("*.ckpt"))


@pytest.mark.parametrize(("hook", "options", "text"), [
    ("on_train_batch_start", {}, "inside a training batch"),
    ("on_train_batch_end", {}, "before the module's on_train_batch_end"),
    ("on_train_batch_end", {"accumulate_grad_batches": 3}, "between the batches of one optimizer step"),
])  # fmt: skip
@on_ranks(2)
def test_a_save_that_no_run_can_continue_exactly_is_warned_about(tmp_path, hook, options, text):
    save = At(hook, 0, 1, act=lambda trainer, _: trainer.save_checkpoint(tmp_path / "early.ckpt"))
    with rank_0_warns("ckptkit.integrations.lightning_position", text):
        run(tmp_path, FSDP2Strategy(), save, module=Lit if options else Scheduled, max_epochs=1, **options)


@pytest.mark.parametrize(("loader", "text"), [
    (StatefulDataLoader, "one batch ahead, which the resumed run skips"), (DataLoader, "reads from the start"),
])  # fmt: skip
@on_ranks(2)
def test_a_save_inside_an_epoch_of_unknown_length_is_warned_about(tmp_path, loader, text):
    with rank_0_warns("ckptkit.integrations.lightning_position", text):
        trainer_of(tmp_path, "ddp", saving(tmp_path, every=3), steps=4).fit(Lit(), loader(Stream(8), batch_size=2))


@on_ranks(2)
def test_an_exception_on_one_rank_saves_nothing_and_ends_the_rank_soon(tmp_path):
    lightning_signals._GATHER_S = 0.2  # instead of a minute
    save = stopping(tmp_path / "c")
    end = At("on_train_batch_end", 0, 1, ranks=[0], act=lambda *two: save.on_exception(*two, RuntimeError("only here")))
    with rank_0_warns("ckptkit.integrations.lightning_callback", "nothing was saved"):
        run(tmp_path, "ddp", end, save, max_epochs=1)
    assert not list((tmp_path / "c").glob("*.ckpt"))
