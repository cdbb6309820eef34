"""Saves and loads checkpoints for FSDP2Strategy, independently of how the model is sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from ckptkit.checkpoint.report import DeferredOptimizer
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.state.rng import capture_rng, restore_rng
from ckptkit.checkpoint.state.train_state import StateDictType, TrainState, check_whole, model_tensors
from ckptkit.errors import UsageError
from ckptkit.integrations.lightning_full import (
    gathered,
    gathered_optimizer,
    placed_like,
    scatter_model,
    scatter_optimizer,
    sharded_optimizer,
)
from ckptkit.integrations.lightning_state import (
    LightningCheckpoints,
    StateView,
    inside_an_epoch,
    remove_checkpoint,
)

_LIVE = "ckptkit_live"  # marks a dictionary as containing live tensors that are about to be saved


class ShardedCheckpoints(ModelParallelStrategy):  # type: ignore[misc]  # Lightning's types are not followed
    """A ModelParallelStrategy whose ranks each write and read their part through a CheckpointManager."""

    def __init__(
        self,
        *,
        data_parallel_size: int | str,
        tensor_parallel_size: int | str,
        process_group_backend: str | None,
        timeout: timedelta | None,
        checkpoint_io: Any,
        state_dict_type: StateDictType | str,
        lightning_module_filter: Callable[[str], bool] | None,
        optimizer_restore: str,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if optimizer_restore not in ("deferred", "immediate"):
            raise UsageError(f"optimizer_restore is {optimizer_restore!r}; it must be 'deferred' or 'immediate'.")
        self._checkpoint_io = checkpoint_io
        self._state_dict_type = StateDictType.parse(state_dict_type)
        self._filter = lightning_module_filter
        self._optimizer_restore = optimizer_restore
        self._storage_options = storage_options
        self._streaming = False
        self._pending: DeferredOptimizer | Mapping[str, Any] | None = None
        self._random: Mapping[str, Any] | None = None
        self._checkpoints: LightningCheckpoints | None = None
        self._shown: dict[str, Any] = {}
        self._position: dict[str, Any] = {}  # where in the epochs the resumed run continues

    # --- deferred until the first step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's step. Before the first one, restore deferred optimizer and random state."""
        self.restore_pending()
        if self._random is not None:
            restore_rng(self._random)
            self._random = None
        return super().training_step(*args, **kwargs)

    def restore_pending(self) -> None:
        """Apply the optimizer state if it was deferred and not applied yet. All ranks must call this."""
        pending = self._pending
        if pending is None:
            return
        if isinstance(pending, DeferredOptimizer):
            pending.apply(self._state(rng=False), strict=self.lightning_module.strict_loading)
        else:
            self._scatter_optimizers(pending)
        self._pending = None

    # --- states

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True, so that Lightning passes the optimizer's state to `load_optimizer_state_dict`."""
        return True

    def lightning_module_state_dict(self, kind: StateDictType | str | None = None) -> dict[str, Any]:
        """Return the model's state by FQN. All ranks must call this.

        Args:
            kind: "sharded": DTensors that share the live tensors' memory. "full": full tensors on rank 0's CPU, and {}
                on other ranks. "local": this rank's local tensors. Default: the strategy's `state_dict_type`.
        """
        check_whole(self._state(optimizers=False, rng=False))
        taken = {k: v for k, v in self._live().items() if self._filter is None or self._filter(k)}
        taken = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in taken.items()}
        wanted = self._kind(kind)
        if wanted is StateDictType.FULL:
            return gathered(taken)
        if wanted is StateDictType.LOCAL and not self._streaming:
            return {k: v.to_local() if hasattr(v, "to_local") else v for k, v in taken.items()}
        return taken

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state by FQN. If "full", it is complete on rank 0 and {} on other ranks. Collective."""
        self.restore_pending()
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._kind(None) is StateDictType.FULL:
            return gathered_optimizer(inner, self._state(rng=False))
        return sharded_optimizer(inner, self._state(rng=False))

    def _kind(self, kind: StateDictType | str | None) -> StateDictType:
        if kind is not None:
            return StateDictType.parse(kind)
        if self._streaming:
            return StateDictType.SHARDED
        return StateDictType.FULL if self._checkpoint_io is not None else self._state_dict_type

    def _show_live(self, trainer: Any) -> None:
        """Make `trainer` collect live tensors for a save, whatever the state-dict type is.

        `save_checkpoint` then gathers them one by one. Gathering them into a dictionary would take memory for all of
        them on rank 0.
        """
        connector = trainer._checkpoint_connector
        dump = type(connector).dump_checkpoint

        def dump_live(*args: Any, **kwargs: Any) -> dict[str, Any]:
            self._streaming = self._checkpoint_io is None and trainer.strategy is self
            try:
                return {**dump(connector, *args, **kwargs), _LIVE: self._streaming}
            finally:
                self._streaming = False

        connector.dump_checkpoint = dump_live

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the tensors that a CheckpointIO has read.

        Without a CheckpointIO, `load_checkpoint` has already restored the model. Then this loads only tensors that an
        `on_load_checkpoint` hook has replaced.
        """
        given = checkpoint.get("state_dict", {})
        if self._checkpoint_io is not None:
            scatter_model(self.lightning_module, given, strict=strict)
            return
        shown, self._shown = self._shown, {}
        changed = {name: value for name, value in given.items() if value is not shown.get(name)}
        if changed:
            placed = {name: placed_like(shown.get(name), value) for name, value in changed.items()}
            self.lightning_module.load_state_dict(placed, strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep the optimizer's state until the first training step, or apply it now (see `optimizer_restore`)."""
        states = checkpoint["optimizer_states"]
        self._pending = states if isinstance(states, DeferredOptimizer) else checkpoint
        if self._optimizer_restore == "immediate":
            self.restore_pending()

    def _scatter_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        for index, optimizer in enumerate(self.optimizers):
            given = states[index] if index < len(states) else {}
            scatter_optimizer(optimizer, self._state(rng=False), given)

    # --- checkpoints

    @property
    def checkpoint_io(self) -> Any:
        """The CheckpointIO for full dictionaries; None if every rank writes its own part."""
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any = None,
        *,
        retention: RetentionPolicy | None = None,
        owner: str | None = None,
    ) -> None:
        """Save the state that Lightning collected, and return once it is durable. All ranks must call this.

        Args:
            storage_options: Only with a `checkpoint_io`; otherwise pass them to the strategy.
            retention: The policy for the checkpoints of this `owner`.

        Raises:
            SaveError: Some rank failed. All ranks raise the same error. Nothing was published, and an existing
                checkpoint is unchanged.
        """
        path = self.broadcast(str(filepath))
        self.restore_pending()
        if self._checkpoint_io is not None:
            checkpoint.pop(_LIVE, None)
            save = partial(self._checkpoint_io.save_checkpoint, checkpoint, path, storage_options=storage_options)
            self.own().decide(save, f"saving {path}")
            return
        if storage_options is not None:
            raise UsageError("A save takes no storage_options: pass them to FSDP2Strategy(storage_options=...).")
        names = checkpoint.pop("state_dict", {})
        whole = checkpoint.pop("optimizer_states", None)
        if not checkpoint.pop(_LIVE, False):  # the tensors were gathered on rank 0, but only their keys are needed
            keys = self.broadcast(list(names))
            live = self._live()
            names = {key: live[key] for key in keys if key in live}
        checkpoint["ckptkit_optimizers"] = 0 if whole is None else len(self.optimizers)
        checkpoint["ckptkit_world_size"] = self.world_size

        def collect() -> tuple[TrainState, dict[str, float]]:
            state = self._state(optimizers=whole is not None)
            state.model = StateView.of(self.lightning_module, names)
            return state, self._metrics()

        state, metrics = self.own().run_on_all(collect, "collecting the checkpoint")
        self.own().save(path, checkpoint, state, metrics=metrics, retention=retention, owner=owner)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore the model and return Lightning's dictionary. All ranks must call this.

        Reads every format that ckptkit reads, including Lightning's sharded and full checkpoints, whatever the
        state-dict type is. The optimizers are restored by `load_optimizer_state_dict`.

        Raises:
            CheckpointMismatchError: The checkpoint does not match; nothing was changed.
        """
        path = self.broadcast(str(checkpoint_path))
        if self._checkpoint_io is not None:
            main: dict[str, Any] = {}

            def read() -> tuple[dict[str, Any], int | None]:
                main.update(self._checkpoint_io.load_checkpoint(path))
                rest = {k: v for k, v in main.items() if k not in ("state_dict", "optimizer_states")}
                return rest, len(main["optimizer_states"]) if "optimizer_states" in main else None

            rest, count = self.own().decide(read, f"loading {path}")
            rest = {**rest, "state_dict": main.get("state_dict", {})}
            if count is not None:
                rest["optimizer_states"] = main.get("optimizer_states", [{}] * count)
            return rest
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING and bool(self.optimizers)
        state = self._state(optimizers=fitting, rng=fitting)
        options: dict[str, Any] = {"strict": self.lightning_module.strict_loading}
        if fitting:
            options["optimizer"] = "deferred"
        if self._filter is not None:
            options["include"] = self._filter
        checkpoint, report = self.own().load(path, state, per_rank_on_resize="keep", **options)
        if report.deferred is not None and checkpoint.pop("ckptkit_optimizers", 1):
            checkpoint["optimizer_states"] = report.deferred
        self._shown = self.lightning_module_state_dict(StateDictType.SHARDED)
        checkpoint["state_dict"] = dict(self._shown)  # for hooks that read it
        self._position = {"loops": checkpoint.get("loops", {})} if fitting else {}
        if "rng" in report.loaded and inside_an_epoch(checkpoint):
            self._random = capture_rng()  # creating the resumed iterator will draw random numbers
        return checkpoint

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint. If the path is a link, remove only the link."""
        if not self.is_global_zero:
            return
        if self._checkpoint_io is not None:
            self._checkpoint_io.remove_checkpoint(filepath)
            return
        remove_checkpoint(filepath, storage_options=self._storage_options)

    def teardown(self) -> None:
        """Release all resources."""
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None
        self._pending, self._random, self._shown, self._position = None, None, {}, {}
        with contextlib.suppress(AttributeError):
            self._checkpoint_io.teardown()
        super().teardown()

    # --- helpers

    def own(self) -> LightningCheckpoints:
        """Return the LightningCheckpoints that saves and loads for this strategy. The first call is collective."""
        if self._checkpoints is None:
            self._checkpoints = LightningCheckpoints(self._state_dict_type, storage_options=self._storage_options)
        return self._checkpoints

    def _live(self) -> dict[str, Any]:
        tensors, extra = model_tensors(self.lightning_module)
        return {**tensors, **extra}

    def _state(self, *, optimizers: bool = True, rng: bool = True) -> TrainState:
        live = [o._optimizer if isinstance(o, LightningOptimizer) else o for o in self.optimizers]
        named: Any = live[0] if len(live) == 1 else {str(i): o for i, o in enumerate(live)}
        return TrainState(
            model=self.lightning_module,
            optimizer=named if optimizers and live else None,
            rng=rng,
        )

    def _metrics(self) -> dict[str, float]:
        trainer = self.lightning_module.trainer
        values = {k: v for k, v in trainer.callback_metrics.items() if getattr(v, "numel", lambda: 1)() == 1}
        return {key: float(value) for key, value in values.items()}
