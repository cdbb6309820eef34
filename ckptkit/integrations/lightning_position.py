"""Records where in Lightning's fit loop a checkpoint is saved, and continues a resumed run exactly there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn

from ckptkit.checkpoint.state.rng import capture_rng, restore_rng

_log = logging.getLogger(__name__)
_KEY = "ckptkit_position"

# What a resumed run does before it continues with the next batch, or with the next epoch.
_ITERATION = "iteration"  # the end of the iteration: validation, if it is due, and what depends on its metrics
_VALIDATED = "validated"  # the same, without the validation
_UNKNOWN = "unknown"  # as Lightning decides: _VALIDATED if a validation was due, else nothing
_NOTHING = "nothing"
_EPOCH = "epoch"  # between epochs; schedulers that depend on metrics have not been updated
_BETWEEN = "between"  # between epochs, and nothing is left to do


class FitPosition:
    """Lets a Trainer continue from any checkpoint as if it had not been interrupted.

    Lightning's loops guess from their counters where a checkpoint was saved, and guess wrong at the end of an epoch, in
    a validation, and with `max_steps`. They then repeat or skip batches, validations and hooks. This object
    records the missing information with a save. After a load, it changes the counters to one of two positions from
    which Lightning continues correctly, between two batches or between two epochs, and does the rest itself.

    `attach` and `detach` are called once per `fit`.
    """

    def __init__(self) -> None:
        self.left: str | None = None
        """What a resumed run does before its next batch or epoch. None: the run was not resumed, or has continued."""
        self.random: Mapping[str, Any] | None = None
        self.loaders: list[Any] = []
        self._metrics: Mapping[str, Any] = {}
        self._before_validation: Mapping[str, Any] | None = None
        self._told: set[str] = set()

    def attach(self, trainer: Any, restore: Callable[[], None] = lambda: None) -> None:
        """Take part in the trainer's loops.

        Args:
            restore: Restores what the load has deferred. Called before a resumed run finishes what was interrupted.
        """
        fit = trainer.fit_loop
        epochs, validation = fit.epoch_loop, fit.epoch_loop.val_loop

        def start_fit() -> None:
            if self.left == _EPOCH:
                restore()
            if self.left is not None:
                self._start(trainer)
            type(fit).on_run_start(fit)

        def start_epoch(fetcher: Any) -> None:
            type(epochs).on_run_start(epochs, fetcher)
            if self.left is not None:
                restore()
                self._finish_iteration(trainer, fetcher)

        def validate() -> Any:
            # Creating the iterator draws numbers, and the validation of a resumed run must draw the same ones.
            self._before_validation = capture_rng()
            return type(validation).run(validation)

        vars(fit)["on_run_start"], vars(epochs)["on_run_start"] = start_fit, start_epoch
        vars(validation)["run"] = validate

    @staticmethod
    def detach(trainer: Any) -> None:
        """Leave the trainer's loops."""
        fit = trainer.fit_loop
        for loop, name in ((fit, "on_run_start"), (fit.epoch_loop, "on_run_start"), (fit.epoch_loop.val_loop, "run")):
            vars(loop).pop(name, None)

    # --- saving

    @contextlib.contextmanager
    def recorded(self, checkpoint: dict[str, Any], trainer: Any) -> Iterator[None]:
        """Add the position to `checkpoint`. Within this context, the random state is the one to resume with.

        A checkpoint that is saved during a validation resumes before the validation. Logs a warning if the position is
        one from which no run can continue exactly.
        """
        loop = trainer.fit_loop.epoch_loop
        validating = trainer.state.fn == TrainerFn.FITTING and trainer.validating
        done = loop.val_loop.batch_progress
        finished = done.is_last_batch and done.current.completed == done.current.ready
        stage = ("finished" if finished else "running") if validating else "none"
        metrics = {k: v.detach().cpu() for k, v in trainer.callback_metrics.items() if isinstance(v, torch.Tensor)}
        checkpoint[_KEY] = {"validation": stage, "metrics": metrics}
        if "optimizer_states" in checkpoint and trainer.state.fn == TrainerFn.FITTING:
            batch = loop.batch_progress.current
            if batch.ready != batch.processed:
                self._warn(
                    trainer,
                    "a checkpoint is saved inside a training batch. A resumed run skips the rest of this batch, so it "
                    "will not be equal to an uninterrupted one.",
                )
            elif batch.ready > 0 and loop._should_accumulate():
                self._warn(
                    trainer,
                    "a checkpoint is saved between the batches of one optimizer step. It does not contain the "
                    "accumulated gradients, so a resumed run will not be equal to an uninterrupted one.",
                )
        random = self._before_validation if stage == "running" else None
        now = capture_rng() if random is not None else None
        if random is not None:
            restore_rng(random)
        try:
            yield
        finally:
            if now is not None:
                restore_rng(now)

    def _warn(self, trainer: Any, text: str) -> None:
        if text not in self._told and trainer.is_global_zero:
            self._told.add(text)
            _log.warning("%s", text)

    # --- resuming

    def resume(self, checkpoint: dict[str, Any], trainer: Any) -> None:
        """Prepare the loops' counters in a loaded checkpoint, and remember what is left to do."""
        fit = checkpoint.get("loops", {}).get("fit_loop")
        self.left, self.loaders = None, []
        if not fit or "epoch_loop.batch_progress" not in fit:
            return
        position = checkpoint.get(_KEY, {})
        going_on = trainer.max_steps != -1 and checkpoint.get("global_step", 0) < trainer.max_steps
        self.left = _left(fit, position.get("validation"), going_on)
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

    def _start(self, trainer: Any) -> None:
        """Called before a resumed run starts to train."""
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
            fit.epoch_progress.current.completed -= 1
            epochs.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            fit.epoch_progress.current.completed += 1
        self._forget()

    def _finish_iteration(self, trainer: Any, fetcher: Any) -> None:
        """Called in a resumed epoch, once there is an iterator of its batches."""
        fit, epochs = trainer.fit_loop, trainer.fit_loop.epoch_loop
        left = self.left
        if left == _UNKNOWN:
            left = _VALIDATED if epochs._should_check_val_fx(fetcher) else _NOTHING
        self._forget()
        fit._restarting = False
        epochs.restarting = False
        if left != _NOTHING:
            epochs._skip_next_val = left == _VALIDATED
            epochs.on_advance_end(fetcher)
        epochs.on_iteration_done()

    def _forget(self) -> None:
        """Restore the loaded random state once more: creating iterators has drawn numbers."""
        if self.random is not None:
            restore_rng(self.random)
        self.left, self.random, self.loaders, self._metrics = None, None, [], {}


def _left(fit: dict[str, Any], validation: str | None, going_on: bool) -> str | None:
    """Change the counters to a position between batches or epochs. Return what is left to do there.

    Args:
        validation: "none", "running" or "finished". None: an older version, or Lightning, saved the checkpoint.
        going_on: Whether the run has a `max_steps` that it has not reached.
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
    left = _NOTHING if validation == "none" else _VALIDATED if validation == "finished" else _UNKNOWN
    if batch["completed"] != batch["ready"] or validation == "running":
        for counter in (progress["total"], batch):  # a batch that was not finished is skipped, as in the dataloader
            counter["started"] = counter["processed"] = counter["completed"] = counter["ready"]
        left = _ITERATION
    if validation == "running":  # it will be repeated
        done = fit["epoch_loop.val_loop.batch_progress"]
        for name, number in done["current"].items():
            done["total"][name] -= number
            done["current"][name] = 0
        done["is_last_batch"] = False
    return left
