"""Records where in Lightning's fit loop a checkpoint is saved, and continues a resumed run exactly there."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.tensor import DTensor

from ckptkit.checkpoint.state.model_tensors import model_tensors
from ckptkit.checkpoint.state.rng import capture_rng, restore_rng
from ckptkit.checkpoint.state.train_state import is_stateful

_log = logging.getLogger(__name__)
_KEY = "ckptkit_position"

# The point of the loops at which a checkpoint was saved. The loops' counters do not show these points.
_STAGE_NONE = "none"  # any other point
_STAGE_BATCH = "batch"  # after all hooks of a batch
_STAGE_RUNNING = "running"  # in the validation after a batch
_STAGE_FINISHED = "finished"  # at the end of this validation

# What a resumed run does before it continues with the next batch, or with the next epoch.
_ITERATION = "iteration"  # the end of the iteration: validation, if it is due, and what depends on its metrics
_VALIDATED = "validated"  # the same, without the validation
_UNKNOWN = "unknown"  # as Lightning decides: _VALIDATED if a validation was due, else nothing
_NOTHING = "nothing"
_EPOCH = "epoch"  # between epochs; schedulers that depend on metrics have not been updated
_BETWEEN = "between"  # between epochs, and nothing is left to do


class FitPosition:
    """Lets a Trainer continue from any checkpoint as if the training had not been interrupted.

    The counters of Lightning's loops do not always show where a checkpoint was saved. At the end of an epoch, in a
    validation, and with `max_steps`, a resumed run would therefore repeat or skip batches, validations and hooks. A
    FitPosition saves the missing information. After a load, the FitPosition sets the counters to a position between two
    batches or between two epochs, from which Lightning continues correctly. The FitPosition itself does whatever the
    saved run still had to do before that position.
    """

    def __init__(self, trainer: Any) -> None:
        self.left: str | None = None
        """What a resumed run does before its next batch or epoch. None if the run was not resumed, or has continued."""
        self.random: Mapping[str, Any] | None = None
        self.loaders: list[Any] = []
        self.restore: Callable[[], None] = lambda: None
        """Function that restores the optimizer states that a load has deferred."""
        self.after_batch: list[Callable[[], None]] = []
        """Functions to call after each training batch and its hooks, before a validation. Saves come first.

        A save in `on_train_batch_end` would come before the module's hook with this name, which a resumed run can't
        repeat.
        """
        self._trainer = weakref.proxy(trainer)
        self._metrics: Mapping[str, Any] = {}
        self._before_validation: Mapping[str, Any] | None = None
        self._trained: Mapping[str, torch.Tensor] = {}
        self._after_batch = False
        self._told: set[str] = set()
        self._attach()

    @classmethod
    def of(cls, trainer: Any) -> FitPosition:
        """Return the trainer's FitPosition. The first call creates the object and attaches it to the loops."""
        kept = vars(trainer.fit_loop)
        if _KEY not in kept:
            kept[_KEY] = cls(trainer)
        position: FitPosition = kept[_KEY]
        return position

    def _attach(self) -> None:
        fit = self._trainer.fit_loop
        epochs, validation = fit.epoch_loop, fit.epoch_loop.val_loop

        def start_fit() -> None:
            self._after_batch = False
            if self.left is not None:
                self._start()
            type(fit).on_run_start(fit)

        def start_epoch(fetcher: Any) -> None:
            type(epochs).on_run_start(epochs, fetcher)
            if self.left is not None:
                self._finish_iteration(fetcher)

        def end_batch(fetcher: Any) -> None:
            self._after_batch = True
            for act in self.after_batch:
                act()
            self._after_batch = False
            type(epochs).on_advance_end(epochs, fetcher)

        def validate() -> Any:
            # Creating the iterator draws random numbers. The validation of a resumed run must draw the same numbers.
            self._before_validation = capture_rng()
            self._trained = _samples(self._trainer.lightning_module)
            return type(validation).run(validation)

        vars(fit)["on_run_start"], vars(epochs)["on_run_start"] = start_fit, start_epoch
        vars(epochs)["on_advance_end"], vars(validation)["run"] = end_batch, validate

    @staticmethod
    def detach(trainer: Any) -> None:
        """Detach the trainer's FitPosition from the trainer's loops."""
        fit = trainer.fit_loop
        epochs = fit.epoch_loop
        for loop, name in (
            (fit, _KEY),
            (fit, "on_run_start"),
            (epochs, "on_run_start"),
            (epochs, "on_advance_end"),
            (epochs.val_loop, "run"),
        ):
            vars(loop).pop(name, None)

    # --- saving

    @property
    def validating(self) -> bool:
        """Whether a validation is running and has batches left. A resumed run will repeat this validation."""
        trainer = self._trainer
        done = trainer.fit_loop.epoch_loop.val_loop.batch_progress
        finished = done.is_last_batch and done.current.completed == done.current.ready
        return trainer.state.fn == TrainerFn.FITTING and trainer.validating and not finished

    def weights_are_replaced(self) -> bool:
        """Return whether other weights have temporarily replaced the weights being trained.

        Callbacks that average weights put the average into the model during validation.
        """
        if not self.validating:
            return False
        now = _samples(self._trainer.lightning_module)
        return any(not torch.equal(kept, now[name]) for name, kept in self._trained.items() if name in now)

    @contextlib.contextmanager
    def recorded(self, checkpoint: dict[str, Any]) -> Iterator[None]:
        """Add the position to `checkpoint`.

        Within this context, the random number generators have the state from which a resumed run continues. During a
        validation, this is their state before the validation. Logs a warning if no run can continue exactly from
        this position.
        """
        trainer = self._trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        stage = _STAGE_NONE
        if fitting and self._after_batch:
            stage = _STAGE_BATCH
        elif fitting and trainer.validating:
            stage = _STAGE_RUNNING if self.validating else _STAGE_FINISHED
        metrics = {k: v.detach().cpu() for k, v in trainer.callback_metrics.items() if isinstance(v, torch.Tensor)}
        checkpoint[_KEY] = {"stage": stage, "metrics": metrics}
        problem = self._problem() if fitting and "optimizer_states" in checkpoint else None
        if problem is not None and problem not in self._told and trainer.is_global_zero:
            self._told.add(problem)
            _log.warning(
                "a checkpoint is saved %s, so a resumed run will not be equal to an uninterrupted one.", problem
            )
        random = self._before_validation if stage == _STAGE_RUNNING else None
        now = capture_rng() if random is not None else None
        if random is not None:
            restore_rng(random)
        try:
            yield
        finally:
            if now is not None:
                restore_rng(now)

    def _problem(self) -> str | None:
        """Return why no run can continue exactly from the current position, or None if a run can."""
        loop, module = self._trainer.fit_loop.epoch_loop, self._trainer.lightning_module
        batch = loop.batch_progress.current
        if batch.ready != batch.processed:
            return "inside a training batch, the rest of which the resumed run skips"
        if batch.completed != batch.processed and is_overridden("on_train_batch_end", module):
            return "before the module's on_train_batch_end, which the resumed run does not call"
        if batch.ready > 0 and loop._should_accumulate():
            return "between the batches of one optimizer step, without the accumulated gradients"
        fetcher = self._trainer.fit_loop._data_fetcher
        if getattr(fetcher, "batches", None):  # Lightning does so to find out which batch is the last one
            if all(is_stateful(loader) for loader in self._trainer.fit_loop._combined_loader.flattened):
                return "after Lightning has read one batch ahead, which the resumed run skips (the data has no length)"
            return "inside an epoch, whose data the resumed run reads from the start (the dataloader has no state_dict)"
        if self.weights_are_replaced():
            return "in a validation, while the weights being trained are temporarily replaced"
        return None

    # --- resuming

    def resume(self, checkpoint: dict[str, Any]) -> None:
        """Adjust the loops' counters in a loaded checkpoint, and remember what the resumed run must do first."""
        fit = checkpoint.get("loops", {}).get("fit_loop")
        self.left, self.loaders = None, []
        if not fit or "epoch_loop.batch_progress" not in fit:
            return
        position, trainer = checkpoint.get(_KEY, {}), self._trainer
        going_on = trainer.max_steps != -1 and checkpoint.get("global_step", 0) < trainer.max_steps
        self.left = _left(fit, position.get("stage"), going_on)
        self._metrics = position.get("metrics", {})
        if self.left is not None:
            self.random = capture_rng()
        if self.left in (_ITERATION, _VALIDATED) and trainer.max_steps != -1 and not going_on:
            _log.warning(
                "the checkpoint was saved before the end of step %d, the last one (max_steps=%d). Lightning does not "
                "repeat the end of the step: validation and hooks at the end of the epoch are not called.",
                trainer.max_steps, trainer.max_steps,
            )  # fmt: skip

    @property
    def between_epochs(self) -> bool:
        """Whether the resumed run starts with a new epoch."""
        return self.left in (_EPOCH, _BETWEEN)

    def _start(self) -> None:
        """Prepare the trainer before a resumed run starts to train."""
        trainer = self._trainer
        fit, epochs = trainer.fit_loop, trainer.fit_loop.epoch_loop
        device = trainer.strategy.root_device
        restored = {key: value.to(device) for key, value in self._metrics.items()}
        trainer._logger_connector._callback_metrics.update(restored)
        if not self.between_epochs:
            return
        fit._restarting = False  # with max_steps, Lightning's setter always sets it to True
        epochs.restarting = False
        fit.reset_restart_stage()
        epochs.reset_restart_stage()
        if fit.epoch_progress.current.completed > 0:
            fit._resuming_from_checkpoint = False  # so that Lightning creates a new iterator
        if self.loaders:
            fit._combined_loader._load_state_dicts(self.loaders)
            iter(fit._data_fetcher)  # this iterator is at the end of its epoch; it is replaced by the next one
        if self.left == _EPOCH and epochs._num_ready_batches_reached():
            self.restore()
            fit.epoch_progress.current.completed -= 1
            epochs.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            fit.epoch_progress.current.completed += 1
        self._forget()

    def _finish_iteration(self, fetcher: Any) -> None:
        """Finish the iteration in which the checkpoint was saved.

        Called once the data iterator of the resumed epoch exists.
        """
        fit, epochs = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        left = self.left
        if left == _UNKNOWN:
            left = _VALIDATED if epochs._should_check_val_fx(fetcher) else _NOTHING
        self._forget()
        fit._restarting = False
        epochs.restarting = False
        if left != _NOTHING:
            if epochs._num_ready_batches_reached() or any(
                c.reduce_on_plateau for c in self._trainer.lr_scheduler_configs
            ):
                self.restore()  # schedulers, or hooks at the end of the epoch, may change the optimizers
            epochs._skip_next_val = left == _VALIDATED
            type(epochs).on_advance_end(epochs, fetcher)
        epochs.on_iteration_done()

    def _forget(self) -> None:
        """Restore the loaded random state again, because creating iterators has drawn random numbers."""
        if self.random is not None:
            restore_rng(self.random)
        self.left, self.random, self.loaders, self._metrics = None, None, [], {}


def _left(fit: dict[str, Any], stage: str | None, going_on: bool) -> str | None:
    """Set the loops' counters in `fit`, so that the position is between two batches or epochs.

    Returns what the resumed run must do first.

    Args:
        stage: Where the checkpoint was saved. None if Lightning or an older version of ckptkit saved the checkpoint.
        going_on: Whether `max_steps` is set and not yet reached.
    """
    epoch, progress = fit["epoch_progress"], fit["epoch_loop.batch_progress"]
    now, batch = epoch["current"], progress["current"]
    if now["ready"] == 0:
        return None
    if now["started"] < now["ready"]:  # at the start of an epoch, which will be started again
        for counter in epoch.values():
            counter["ready"] = counter["started"]
        return _BETWEEN
    if now["processed"] == now["ready"]:
        complete = now["completed"] == now["processed"]
        if progress["is_last_batch"] or not going_on:
            for counter in epoch.values():
                counter["completed"] = counter["processed"]
            return _BETWEEN if complete else _EPOCH
        for counter in epoch.values():  # an earlier max_steps ended the epoch, which is now continued
            counter["processed"] -= 1
            counter["completed"] = counter["processed"]
        return _NOTHING
    left = {_STAGE_NONE: _NOTHING, _STAGE_FINISHED: _VALIDATED}.get(str(stage), _UNKNOWN)
    if batch["completed"] != batch["ready"] or stage in (_STAGE_BATCH, _STAGE_RUNNING):
        for counter in (progress["total"], batch):  # a batch that was not finished is skipped, as in the dataloader
            counter["started"] = counter["processed"] = counter["completed"] = counter["ready"]
        left = _ITERATION
    if stage == _STAGE_RUNNING:  # the validation will be repeated
        done = fit["epoch_loop.val_loop.batch_progress"]
        for name, number in done["current"].items():
            done["total"][name] -= number
            done["current"][name] = 0
        done["is_last_batch"] = False
    return left


def _samples(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a few bytes of each plain tensor of the module, enough to notice that the weights were replaced."""
    found = {}
    for name, tensor in model_tensors(module)[0].items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if type(local) in (torch.Tensor, torch.nn.Parameter) and local.numel() > 0:
            row = local.detach()[(0,) * (local.dim() - 1)] if local.dim() > 0 else local.detach().reshape(1)
            found[name] = row[:16].clone().view(torch.uint8)
    return found
