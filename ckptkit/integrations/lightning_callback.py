"""Defines ManagedCheckpoint, which replaces ModelCheckpoint and saves and rotates with a CheckpointManager."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from ckptkit.arguments import check_storage_options, wrong
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.checkpoint.state.train_state import StateDictType
from ckptkit.errors import CheckpointNotFoundError, StorageError
from ckptkit.formats.detect import identify, open_source
from ckptkit.formats.own.record import RECORD_NAME
from ckptkit.integrations.lightning_io import CkptkitCheckpointIO
from ckptkit.integrations.lightning_position import FitPosition
from ckptkit.integrations.lightning_signals import StopSignal
from ckptkit.integrations.lightning_state import (
    LightningCheckpoints,
    collecting_live,
    live_state,
    newest_of,
    remove_checkpoint,
    state_of,
)
from ckptkit.integrations.lightning_strategy import FSDP2Strategy
from ckptkit.storage.open import open_store

_log = logging.getLogger(__name__)


class ManagedCheckpoint(ModelCheckpoint):  # type: ignore[misc]  # Lightning's types are not followed
    """Works like Lightning's ModelCheckpoint, but saves through a CheckpointManager and rotates by a RetentionPolicy.

    Lightning decides when to save and under which name, and handles `monitor` and `save_last`. The policy decides what
    to delete. By default, the policy keeps the newest checkpoint and the best `save_top_k` checkpoints by `monitor`.
    Without `monitor`, the policy keeps only the newest checkpoint, because Lightning then does not allow a `save_top_k`
    above 1. To keep three checkpoints, pass `retention=RetentionPolicy(max_num=3)`.

    The policy applies to this callback's checkpoints in one directory. The policy never deletes other callbacks'
    checkpoints, pinned checkpoints, or the checkpoint that the run was resumed from.

    With one of Lightning's own strategies, the callback itself saves the live model and optimizers. If `ckpt_path` is a
    checkpoint that the callback saved, the callback also loads it.

    With `save_on_exception=True`, SIGTERM on any rank stops all ranks at the same batch, and a checkpoint is saved. The
    save waits for the end of an optimizer step. It does not wait for the end of a validation, which a resumed run
    repeats. If the ranks have different numbers of validation batches, all ranks stop after the validation. Lightning's
    handler that saves and requeues a Slurm job on SIGUSR1 also runs at the end of an optimizer step, on all ranks.

    Args:
        retention: The policy. By default, the policy is derived from `save_top_k`, and -1 keeps all checkpoints.
        state_dict_type: As in CheckpointManager. Used only with strategies other than FSDP2Strategy.
        storage_options: Passed to fsspec. Used only with strategies other than FSDP2Strategy.
        arguments: Passed to ModelCheckpoint.
    """

    def __init__(
        self,
        *,
        retention: RetentionPolicy | None = None,
        state_dict_type: str = "sharded",
        storage_options: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        if retention is not None and not isinstance(retention, RetentionPolicy):
            raise wrong("retention", retention, "RetentionPolicy(max_num=3, ...)")
        check_storage_options(storage_options=storage_options)
        StateDictType.parse(state_dict_type)
        self.retention = retention if retention is not None else self._policy()
        self._type = state_dict_type
        self._storage_options = storage_options
        self._made: LightningCheckpoints | None = None
        self._stop: StopSignal | None = None
        self._saves_last = False

    def _policy(self) -> RetentionPolicy | None:
        if self.save_top_k < 1:
            return None
        if self.monitor is None:
            return RetentionPolicy(max_num=self.save_top_k)
        return RetentionPolicy(max_num=1, keep_best=(self.monitor, self.mode, self.save_top_k))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the strategy load this callback's checkpoints, unless the strategy can already load them."""
        super().setup(trainer, pl_module, stage)
        self._release_signals()
        FitPosition.detach(trainer)  # an exception in an earlier fit has left it there
        if self.save_on_exception and stage == TrainerFn.FITTING:
            self._stop = StopSignal(trainer)
        strategy = trainer.strategy
        if _saves_itself(strategy):
            return
        theirs = type(strategy).load_checkpoint

        def load_checkpoint(checkpoint_path: Any, *arguments: Any, **named: Any) -> Any:
            path = strategy.broadcast(str(checkpoint_path)).removesuffix(f"/{RECORD_NAME}")
            if self._own().decide(lambda: self._is_ours(path), f"looking at {path}"):
                return self._load_any(trainer, path)
            return theirs(strategy, checkpoint_path, *arguments, **named)

        strategy.load_checkpoint = load_checkpoint

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Register the functions that save and stop after each batch of the trainer's loops."""
        super().on_fit_start(trainer, pl_module)
        position = FitPosition.of(trainer)
        position.after_batch.insert(0, partial(self._save_after_batch, trainer, pl_module))
        if self._stop is not None:
            position.after_batch.append(self._stop.after_batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Do nothing here. The checkpoint is saved later, after the module's own `on_train_batch_end`."""

    def _save_after_batch(self, trainer: Any, pl_module: Any) -> None:
        """Save if a checkpoint is due. Never saves within an optimizer step, because gradients are not saved."""
        loop = trainer.fit_loop.epoch_loop
        if not loop._should_accumulate():
            super().on_train_batch_end(trainer, pl_module, None, None, loop.batch_idx)

    # --- signals

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Find out whether the ranks can agree to stop during this validation."""
        if self._stop is not None and trainer.validating:
            self._stop.prepare_validation()

    def on_validation_batch_end(self, trainer: Any, *arguments: Any, **named: Any) -> None:
        """Stop the validation after SIGTERM."""
        if self._stop is not None and trainer.validating:
            self._stop.in_validation()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if a checkpoint is due at the end of the epoch."""
        super().on_train_epoch_end(trainer, pl_module)
        if self._stop is not None:
            self._stop.after_epoch()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save if `save_on_exception` is set.

        Saves nothing if only some ranks have stopped, or if the model temporarily contains other weights, such as
        averages.
        """
        problem = None if self._stop is None else self._stop.problem(exception)
        if problem is None:
            super().on_exception(trainer, pl_module, exception)
        else:
            _log.error(
                "save_on_exception: nothing was saved, because %s. Resume from the newest checkpoint. (%s: %s)",
                problem, type(exception).__name__, exception,
            )  # fmt: skip

    def _release_signals(self) -> None:
        if self._stop is not None:
            self._stop.close()
            self._stop = None

    # --- saving

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        strategy = trainer.strategy
        dump = partial(trainer._checkpoint_connector.dump_checkpoint, self.save_weights_only)

        def dump_live() -> dict[str, Any]:
            with collecting_live(strategy, partial(live_state, trainer.lightning_module)):
                return dict(dump())

        if _saves_itself(strategy):
            own = strategy.own()
            strategy.save_checkpoint(own.run_on_all(dump, "collecting the checkpoint"), filepath, **self._ownership())
        else:
            own = self._own()
            checkpoint = own.run_on_all(dump_live, "collecting the checkpoint")
            own.save_trainer(strategy.broadcast(filepath), checkpoint, trainer, **self._ownership())
        strategy.barrier("ManagedCheckpoint")
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        own.decide(partial(self._tell_loggers, trainer), f"telling the loggers about {filepath}")

    def _tell_loggers(self, trainer: Any) -> None:
        for logger in trainer.loggers:
            logger.after_save_checkpoint(self)

    def _ownership(self) -> dict[str, Any]:
        """Return the save arguments that control rotation: the policy, and the owner to whose checkpoints it applies.

        A copy called "last" has a separate owner. With the same owner, rotation could keep the copy and delete the
        original, whose name Lightning still uses.
        """
        if self._saves_last:
            return {"retention": RetentionPolicy(max_num=1), "owner": f"{self.state_key}/last"}
        return {"retention": self.retention, "owner": self.state_key}

    def _save_last_checkpoint(self, trainer: Any, monitor_candidates: Any) -> None:
        """Make "last" a link to the checkpoint just saved. Save a copy only if a link is impossible.

        Rotation keeps the link's target, because the target is the newest checkpoint.
        """
        saved = self._last_checkpoint_saved
        fresh = bool(saved) and self._last_global_step_saved == trainer.global_step
        if not self.save_last or not fresh or "://" in saved:
            self._saves_last = True
            try:
                super()._save_last_checkpoint(trainer, monitor_candidates)
            finally:
                self._saves_last = False
            return
        made = self._linked(saved, monitor_candidates) if trainer.is_global_zero else ("", "")
        self.last_model_path, problem = trainer.strategy.broadcast(made)
        if problem:
            raise StorageError(saved, f"linking {self.last_model_path} to it failed: {problem}")

    def _linked(self, saved: str, monitor_candidates: Any) -> tuple[str, str]:
        """Create the link "last". Return the link's path, and an error message ("" if there was no error).

        Only rank 0 calls this. Replaces an existing link, or a checkpoint that this callback saved. If the path
        contains another run's data, or the checkpoint from which this run was resumed, a version number is added to the
        link's name, as in Lightning.
        """
        version: int | None = None
        try:
            while True:
                link = str(self.format_checkpoint_name(monitor_candidates, self.CHECKPOINT_NAME_LAST, ver=version))
                if os.path.abspath(link) == os.path.abspath(saved):
                    return link, ""
                if os.path.islink(link) or link == self.last_model_path or not self._enable_version_counter:
                    remove_checkpoint(link)
                if not os.path.lexists(link):
                    os.symlink(os.path.relpath(saved, os.path.dirname(link)), link)
                    return link, ""
                version = self.STARTING_VERSION if version is None else version + 1
        except Exception as error:  # noqa: BLE001  the other ranks wait for the answer
            return saved, str(error) or type(error).__name__

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        """Remove a checkpoint, except from the directory of the last save, where the retention policy decides."""
        if os.path.dirname(filepath) != os.path.dirname(self._last_checkpoint_saved) and trainer.is_global_zero:
            remove_checkpoint(filepath, storage_options=self._storage_options)

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """Return the candidates for `ckpt_path="last"`.

        Lightning strips the protocol from a URL and sorts candidates by date. On an object store only files have dates,
        so each checkpoint is represented by its commit record. If no checkpoint is called "last" (`save_last` was not
        set, or the target of the link is gone), the newest checkpoint is the only candidate.
        """
        root = str(self.dirpath or "").rstrip("/")
        if "://" not in root:
            named = {path for path in super()._find_last_checkpoints(trainer) if os.path.exists(path)}
        else:
            found = list_checkpoints(open_store(root, storage_options=self._storage_options)).committed
            named = {f"{root}/{item.path}/{RECORD_NAME}" for item in found if self.CHECKPOINT_NAME_LAST in item.name}
        return named or self._newest(root)

    def _newest(self, root: str) -> set[str]:
        """Return the newest checkpoint in `root`, or an empty set if `root` has no checkpoint.

        Used for `ckpt_path="last"` if no checkpoint is called "last". Without this, Lightning would find no checkpoint
        and start a new run.
        """
        if not root:
            return set()
        ours = newest_of(root, storage_options=self._storage_options)
        try:
            path = f"{root}/{ours}" if ours else open_source(root, storage_options=self._storage_options).url
        except CheckpointNotFoundError:
            return set()
        _log.warning('%s has no checkpoint called "last" (save_last=True): continuing from %s', root, path)
        return {f"{path}/{RECORD_NAME}" if ours and "://" in path else path}

    # --- loading, with one of Lightning's strategies

    def _is_ours(self, path: str) -> bool:
        """Return whether `path` is a checkpoint or a run of ckptkit."""
        if "://" not in path and not os.path.isdir(path):
            return False
        place = path if "://" in path else os.path.abspath(path)
        store = open_store(place, storage_options=self._storage_options)
        return identify(store) == "ckptkit" or bool(newest_of(place, storage_options=self._storage_options))

    def _load_any(self, trainer: Any, path: str) -> dict[str, Any]:
        strategy, module = trainer.strategy, trainer.lightning_module
        fitting = trainer.state.fn == TrainerFn.FITTING
        live = isinstance(strategy, (ModelParallelStrategy, FSDPStrategy))  # with others, Lightning fills the model
        state = state_of(module if live else None, trainer.optimizers if fitting and live else [], rng=fitting)
        options = {"strict": module.strict_loading, "per_rank_on_resize": "keep"}
        checkpoint, _ = self._own().load(path, state, trainer=trainer if fitting else None, **options)
        theirs = type(strategy).process_dataloader

        def process_dataloader(dataloader: Any) -> Any:
            made = theirs(strategy, dataloader)
            self._own().set_epoch(made)
            return made

        strategy.process_dataloader = process_dataloader
        if not live:
            return {**CkptkitCheckpointIO(storage_options=self._storage_options).load_checkpoint(path), **checkpoint}
        return {**checkpoint, "state_dict": live_state(module)}

    # --- teardown

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Release all resources."""
        self._release_signals()
        FitPosition.detach(trainer)
        for name in ("load_checkpoint", "process_dataloader"):
            vars(trainer.strategy).pop(name, None)
        if self._made is not None:
            self._made.close()
            self._made = None
        super().teardown(trainer, pl_module, stage)

    def _own(self) -> LightningCheckpoints:
        if self._made is None:
            self._made = LightningCheckpoints(self._type, storage_options=self._storage_options)
        return self._made


def _saves_itself(strategy: Any) -> bool:
    return isinstance(strategy, FSDP2Strategy) and strategy.checkpoint_io is None
