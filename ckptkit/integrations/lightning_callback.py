"""A ModelCheckpoint whose rotation is ours: limits and pins in one place, for any strategy."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.state import TrainState
from ckptkit.integrations.lightning_state import LightningCheckpoints
from ckptkit.integrations.lightning_strategy import FSDP2Strategy

__all__ = ["ManagedCheckpoint"]


class ManagedCheckpoint(ModelCheckpoint):  # type: ignore[misc]  # Lightning's types are not followed
    """Lightning's ModelCheckpoint, saved through a CheckpointManager and rotated by a RetentionPolicy.

    When to save, the names, `monitor` and `save_last` are Lightning's. What is deleted decides the policy: by default
    the best `save_top_k` by `monitor` and the newest are kept; without `monitor`, the newest `save_top_k`. Pinned
    checkpoints and the one that the run was resumed from always stay. Under Lightning's own strategies, which bypass
    a CheckpointIO for shards, the callback saves the strategy's model and optimizers itself.

    Args:
        retention: In place of what `save_top_k` means.
        state_dict_type: For other strategies than FSDP2Strategy.
        arguments: Of ModelCheckpoint.
    """

    def __init__(
        self, *, retention: RetentionPolicy | None = None, state_dict_type: str = "sharded", **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.retention = retention if retention is not None else self._policy()
        self._type = state_dict_type
        self._made: LightningCheckpoints | None = None

    def _policy(self) -> RetentionPolicy | None:
        if self.save_top_k < 1:
            return None
        if self.monitor is None:
            return RetentionPolicy(max_num=self.save_top_k)
        return RetentionPolicy(max_num=1, keep_best=(self.monitor, self.mode, self.save_top_k))

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        strategy = trainer.strategy
        own = isinstance(strategy, FSDP2Strategy) and strategy.checkpoint_io is None
        if own:
            with strategy.streaming():
                checkpoint = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
                strategy.save_checkpoint(checkpoint, filepath, retention=self.retention)
        else:
            self._save_any(trainer, filepath)
        strategy.barrier("ManagedCheckpoint")
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)

    def _save_any(self, trainer: Any, filepath: str) -> None:
        """Save what a strategy of Lightning's holds live, without asking it for dictionaries of tensors."""
        module = trainer.lightning_module
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
        checkpoint.pop("state_dict", None)
        with_optimizers = checkpoint.pop("optimizer_states", None) is not None
        optimizers = {str(i): optimizer for i, optimizer in enumerate(trainer.optimizers)}
        state = TrainState(model=module, optimizer=_alone(optimizers) if with_optimizers else None)
        if self._made is None:
            self._made = LightningCheckpoints(self._type)
        metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if v.numel() == 1}
        checkpoint["ckptkit_world_size"] = trainer.world_size
        checkpoint["ckptkit_optimizers"] = len(optimizers) if with_optimizers else 0
        path = trainer.strategy.broadcast(filepath)
        self._made.save(path, checkpoint, state, metrics=metrics, retention=self.retention)

    def _save_last_checkpoint(self, trainer: Any, monitor_candidates: Any) -> None:
        """Let "last" be a link to what was just saved, which rotation keeps as the newest; a save only without one."""
        saved = self._last_checkpoint_saved
        fresh = bool(saved) and self._last_global_step_saved == trainer.global_step
        if not self.save_last or not fresh or "://" in saved:
            super()._save_last_checkpoint(trainer, monitor_candidates)
            return
        link = self.format_checkpoint_name(monitor_candidates, self.CHECKPOINT_NAME_LAST)
        self.last_model_path = link
        if trainer.is_global_zero and os.path.abspath(link) != os.path.abspath(saved):
            trainer.strategy.remove_checkpoint(link)
            os.symlink(os.path.basename(saved), link)
        trainer.strategy.barrier("ManagedCheckpoint.last")

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        """Leave it to the policy, which has removed it with the save, or keeps it."""

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give everything back."""
        if self._made is not None:
            self._made.close()
            self._made = None
        super().teardown(trainer, pl_module, stage)


def _alone(named: dict[str, Any]) -> Any:
    return next(iter(named.values())) if len(named) == 1 else named or None
