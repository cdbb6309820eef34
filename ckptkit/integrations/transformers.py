"""Defines a callback for transformers' Trainer that saves through a CheckpointManager, resumes, and exports.

trainer = Trainer(..., args=...)
CheckpointCallback("s3://bucket/run", retention=RetentionPolicy(max_num=2)).attach(trainer)
trainer.train()
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.integrations.extras import missing

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import HubStrategy
except ImportError as error:
    raise missing("transformers", "hf") from error

from ckptkit.arguments import check_flags, check_int, location
from ckptkit.checkpoint.manager import CheckpointManager, check_options
from ckptkit.checkpoint.report import LoadReport
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.state.rng import capture_rng, restore_rng
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CheckpointMismatchError, UsageError
from ckptkit.formats.own.record import checkpoint_name

_log = logging.getLogger(__name__)
_SAMPLES = "samples_per_step"  # a key in the checkpoint's client state; the number counts the samples of all ranks


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
    """Saves model, optimizer, scheduler, random state and the Trainer's own state. Resumes from the newest checkpoint.

    Call `attach(trainer)` before `trainer.train()`. Saves when the Trainer would save (`save_strategy`). If
    `save_steps` is set, also saves every `save_steps` steps. The metrics of an evaluation at the same step are stored,
    for example for `keep_best=("eval_loss", "min")`. `save_total_limit`, `save_only_model` and
    `load_best_model_at_end` keep their meaning. Checkpoints that a Trainer saved are never deleted.

    At the start of training, loads the newest committed checkpoint, on any number of ranks. If `url` has no committed
    checkpoint, loads the newest checkpoint that a Trainer saved there. The Trainer then skips the batches already seen,
    as usual. `train(resume_from_checkpoint=...)` works too: True requires a checkpoint (ckptkit's or the Trainer's),
    False starts a new run (in an empty `url`), and a path loads that Trainer checkpoint.

    At the end of training, exports the model (or a PEFT model's adapter) for `from_pretrained`. If no step is
    left to train, only exports. All ranks need the callback. Plain, DDP and FSDP2 models are supported.

    Args:
        url: The root of the run's checkpoints.
        save_steps: Number of steps between saves. None saves only when the Trainer does.
        resume: Whether to load the newest checkpoint at the start.
        export: A directory for the export at the end of training. None exports nothing.
        background: Save while training continues.
        options: Passed to `CheckpointManager`: `retention`, `state_dict_type`, `storage_options`, ...
    """

    def __init__(
        self,
        url: str | Path,
        *,
        save_steps: int | None = None,
        resume: bool = True,
        export: str | Path | None = None,
        background: bool = False,
        **options: Any,
    ) -> None:
        self.url = check_options(url, **options)[0]
        if save_steps is not None:
            check_int("save_steps", save_steps, least=1)
        check_flags(resume=resume, background=background)
        self.save_steps = save_steps
        self.resume = resume
        self.export = None if export is None else location("export", export)
        self.background = background
        self.loaded: LoadReport | None = None
        self._options = options
        self._manager: CheckpointManager | None = None
        self._trainer: Any = None
        self._metrics: dict[str, float] = {}
        self._evaluated = -1  # the step that `_metrics` describes
        self._saved = -1  # the step of the last save
        self._random: dict[str, Any] | None = None
        self._ours: str | None = None
        self._limits: RetentionPolicy | None = None

    def attach(self, trainer: Any) -> CheckpointCallback:
        """Add this callback to `trainer`, and make `trainer` save and resume through the callback.

        Raises:
            UsageError: The callback belongs to another Trainer, or `load_best_model_at_end` is set and `retention` does
                not keep the best model. Or the Trainer uses DeepSpeed.
        """
        if self._trainer is trainer:
            return self
        if self._trainer is not None:
            raise UsageError("this CheckpointCallback belongs to another Trainer; create one per Trainer.")
        if trainer.is_deepspeed_enabled:
            raise UsageError(
                "CheckpointCallback cannot save a model that DeepSpeed shards. Train without the callback; ckptkit "
                "reads the Trainer's own checkpoints."
            )
        self._limits = self._retention(trainer.args)
        self._trainer = trainer
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        if trainer.args.push_to_hub and trainer.args.hub_strategy != HubStrategy.END:
            _log.warning("push_to_hub=True: CheckpointCallback does not push its checkpoints to the Hub.")
        train, run_epoch, is_best = trainer.train, trainer._run_epoch, trainer._determine_best_metric

        def resumed(resume_from_checkpoint: Any = None, trial: Any = None, *arguments: Any, **named: Any) -> Any:
            if trial is not None or trainer.hp_search_backend is not None:
                raise UsageError(
                    "CheckpointCallback does not support hyperparameter_search: each trial would resume from the "
                    "checkpoints of the one before. Search with a Trainer without the callback."
                )
            ours = self.resume if resume_from_checkpoint is None else resume_from_checkpoint is True
            with contextlib.ExitStack() as stack:
                stack.callback(setattr, trainer.args, "save_total_limit", trainer.args.save_total_limit)
                report = self._managed().load(TrainState(rng=False)) if ours else None
                if report is not None:
                    find = partial(_to_resume_from, report, stack)
                    resume_from_checkpoint = self._managed().run_on_all(find, "resuming")
                    self._ours = resume_from_checkpoint
                    if resume_from_checkpoint == report.url:
                        self._ours, self.loaded = None, report  # the Trainer itself loads the checkpoint
                return train(resume_from_checkpoint, trial, *arguments, **named)

        def unless_done(*arguments: Any, **named: Any) -> None:
            if trainer.state.global_step < trainer.state.max_steps:
                run_epoch(*arguments, **named)
            else:  # the Trainer would train one more step
                trainer.control.should_training_stop = True

        trainer.train, trainer._run_epoch = resumed, unless_done
        # With save_strategy="best", the Trainer saves only if this method returns True.
        trainer._determine_best_metric = lambda *a, **k: is_best(*a, **k) or self._is_due(trainer.state)
        trainer._save_checkpoint = self._save
        for name, method in {
            "_load_from_checkpoint": self._skip,
            "_load_optimizer_and_scheduler": self._load,
            "_load_scaler": self._skip,
            "_load_rng_state": self._load_rng,
        }.items():
            setattr(trainer, name, self._instead(getattr(trainer, name), method))
        trainer._load_best_model = partial(self._load_best, trainer._load_best_model)
        return self

    def _retention(self, args: Any) -> RetentionPolicy | None:
        """Return the caller's policy, or else a policy derived from the Trainer's arguments."""
        given: RetentionPolicy | None = self._options.get("retention")
        metric = str(args.metric_for_best_model or "loss")
        metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        best = (metric, "max" if args.greater_is_better else "min", 1) if args.load_best_model_at_end else None
        if given is None:
            return RetentionPolicy(max_num=args.save_total_limit, keep_best=best) if args.save_total_limit else None
        if best is not None and (given.keep_best or ())[:2] != best[:2] and _limits(given):
            raise UsageError(
                f"load_best_model_at_end=True: retention must keep the best model, as in keep_best={best}. Otherwise "
                "the best model would be deleted before it is loaded."
            )
        return given

    # --- events

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise UsageError if the callback is not attached. Turn off the Trainer's own rotation."""
        if self._trainer is None:
            raise UsageError("CheckpointCallback does nothing until it is attached: callback.attach(trainer).")
        self._saved = -1
        args.save_total_limit = None  # `train` restores it. With 1, the Trainer would delete its own old checkpoints

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Request a save every `save_steps` steps."""
        if self._is_due(state):
            control.should_save = True
        return control

    def _is_due(self, state: Any) -> bool:
        return bool(self.save_steps) and state.global_step % self.save_steps == 0

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Keep the metrics for a save at the same step."""
        if self._evaluated != state.global_step:  # not another dataset at the same step
            self._metrics = {}
        self._evaluated = state.global_step
        self._metrics |= {k: float(v) for k, v in (metrics or {}).items() if isinstance(v, (int, float))}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the save that is still running, then export."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None
        if self.export is not None:
            from ckptkit.fsdp.hf_save import save_hf

            tokenizer = kwargs.get("processing_class")
            save_hf(kwargs["model"], self.export, tokenizer=tokenizer, overwrite=True)

    # --- methods that replace the Trainer's

    def _save(self, model: Any, trial: Any = None) -> None:
        trainer = self._trainer
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        self._find_best()

        def collect() -> TrainState:
            states: dict[str, list[Any]] = {}
            for callback in [*trainer.callback_handler.callbacks, trainer.control]:
                if isinstance(callback, ExportableState):
                    states.setdefault(type(callback).__name__, []).append(callback.state())
            single = {name: found[0] if len(found) == 1 else found for name, found in states.items()}
            trainer.state.stateful_callbacks.update(single)
            state = TrainState(model=trainer.model, rng=False) if trainer.args.save_only_model else self._state()
            first = {"is_local_process_zero": True, "is_world_process_zero": True}  # as in the file that rank 0 writes
            state.extra["trainer"] = json.loads(json.dumps(dataclasses.asdict(trainer.state) | first))
            return state

        state = self._managed().run_on_all(collect, "collecting the Trainer's state")
        save = self._managed().save_async if self.background else self._managed().save
        step = trainer.state.global_step
        # Without an evaluation, the metrics are empty, not None: with `keep_best`, None would be refused.
        # At the end of an epoch, the Trainer may save a step again that it saved before the evaluation.
        metrics = self._metrics if self._evaluated == step else {}
        consumed = {_SAMPLES: trainer.get_total_train_batch_size(trainer.args)}
        save(step, state, metrics=metrics, client_state=consumed, overwrite=step == self._saved)
        self._saved = step

    def _load(self, path: Any) -> None:
        """Restore model, optimizer, scheduler and random state, once the Trainer has created them."""
        trainer = self._trainer
        try:
            self.loaded = self._managed().load(self._state())
        except CheckpointMismatchError as error:
            if trainer.state.global_step >= trainer.state.max_steps:  # no step is left, so only the model is needed
                self.loaded = self._managed().load(TrainState(model=trainer.model, rng=False))
            elif trainer.args.save_only_model:
                raise CheckpointMismatchError(
                    f"{error}\nCheckpoints saved with save_only_model=True have no optimizer, so training cannot "
                    "continue from them. To train anew, pass another url to CheckpointCallback."
                ) from error
            else:
                raise CheckpointMismatchError(
                    f"{error}\nA Trainer has no options for this: train with the saved model, optimizer and "
                    "scheduler, or pass another url to CheckpointCallback to start a new run."
                ) from error
        if trainer.state.global_step < trainer.state.max_steps:
            self._warn_of_other_samples()
        self._random = capture_rng()
        self._find_best()  # the Trainer forgets checkpoints that it does not find on disk

    def _warn_of_other_samples(self) -> None:
        """Warn if a step has more or fewer samples than in the saved run: the Trainer skips steps, not samples."""
        trainer, report = self._trainer, self.loaded
        assert report is not None
        now = trainer.get_total_train_batch_size(trainer.args)
        saved = (report.client_state or {}).get(_SAMPLES, now)
        if saved != now and trainer.is_world_process_zero():
            _log.warning(
                "%s: each step of the saved run had %d samples; now a step has %d. The Trainer skips the steps already "
                "done, so some samples are repeated or left out, and epochs begin at other steps. To avoid that, set "
                "per_device_train_batch_size or gradient_accumulation_steps so that a step has %d samples again.",
                report.url, saved, now, saved,
            )  # fmt: skip

    def _skip(self, path: Any, model: Any = None) -> None:
        """Do nothing, because `_load` restores the whole state."""

    def _load_rng(self, path: Any) -> None:
        """Restore the random state again: the Trainer drew random numbers while it skipped the batches already seen."""
        if self._random is not None:
            restore_rng(self._random)

    def _load_best(self, theirs: Any) -> None:
        state = self._trainer.state
        best = state.best_global_step  # None in the checkpoints of older Trainers
        if best is None or state.best_model_checkpoint != self._place(best):
            theirs()  # the run was resumed from a checkpoint of the Trainer, and has not become better
        else:
            self._managed().load(TrainState(model=self._trainer.model, rng=False), best)

    def _find_best(self) -> None:
        """Set the URL of the best checkpoint, unless it is a checkpoint that the Trainer saved."""
        state = self._trainer.state
        best = state.best_global_step
        theirs = Path(state.best_model_checkpoint or "").name == f"checkpoint-{best}"
        if best is not None and not theirs and (best == state.global_step or self._has(best)):
            state.best_model_checkpoint = self._place(best)

    def _place(self, step: int) -> str:
        return f"{self.url}/{checkpoint_name(step, None)}"

    def _has(self, step: int) -> bool:
        return any(record.step == step for record in self._managed().list())

    def _instead(self, theirs: Any, ours: Any) -> Any:
        """Return a function that calls `ours` for the path that this class gave to `train`, and `theirs` otherwise."""

        def either(path: Any = None, *arguments: Any, **named: Any) -> Any:
            mine = path is not None and path == self._ours
            return (ours if mine else theirs)(path, *arguments, **named)

        return either

    def _state(self) -> TrainState:
        trainer = self._trainer
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        scaler = getattr(trainer.accelerator, "scaler", None)
        return TrainState(model=trainer.model, optimizer=optimizer, scheduler=trainer.lr_scheduler, grad_scaler=scaler)

    def _managed(self) -> CheckpointManager:
        if self._manager is None:
            self._manager = CheckpointManager(self.url, **{**self._options, "retention": self._limits})
        return self._manager


def _to_resume_from(report: LoadReport, stack: contextlib.ExitStack) -> str:
    """Return the directory to pass to `train`.

    This is a new directory that contains only trainer_state.json, which the Trainer reads first. It is deleted when
    `stack` is closed. There is one exception: if the Trainer saved only the adapter of a PEFT model, this is the
    checkpoint's own directory, from which PEFT loads the adapter.
    """
    state = report.extra.get("trainer", report.extra.get("trainer_state"))  # from ckptkit's checkpoint or the Trainer's
    if state is None:
        raise UsageError(
            f"{report.url} is not a checkpoint of a Trainer: it has no trainer_state.json. To start a new run, give "
            "CheckpointCallback another url."
        )
    if "trainer" not in report.extra and any(Path(report.url).glob("adapter_model.*")):
        return report.url
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptkit-"))
    path = Path(folder) / "trainer_state.json"
    path.write_text(json.dumps(state, allow_nan=True), encoding="utf-8")
    return folder


def _limits(policy: RetentionPolicy) -> bool:
    return policy.max_num is not None or policy.max_mem is not None
