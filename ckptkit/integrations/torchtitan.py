"""A checkpointer with the interface that torchtitan's trainer calls, over a CheckpointManager: object stores included.

    trainer.checkpointer = TorchtitanCheckpointer(dataloader, model_parts, optimizers, lr_schedulers, states,
                                                  checkpoint_config, url="s3://bucket/run")

Needs no torchtitan: it is called by it. Its own checkpoints are resumed from by `initial_load_path`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.report import LoadReport
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.state import TrainState, is_stateful
from ckptkit.errors import UsageError

__all__ = ["TorchtitanCheckpointer"]


class TorchtitanCheckpointer:
    """Takes the place of torchtitan's CheckpointManager: `save`, `load`, `maybe_wait_for_staging`, `close`.

    Args:
        dataloader, model_parts, optimizers, lr_schedulers, states: As torchtitan gives them.
        checkpoint_config: Its `[checkpoint]` section. Used: enable (enable_checkpoint), interval, keep_latest_k,
            async_mode, folder, exclude_from_loading, initial_load_path, initial_load_model_only, load_step,
            last_save_model_only, enable_first_step_checkpoint.
        sd_adapter, ft_manager: Not used: an export is `ckptkit convert`.
        base_folder: torchtitan's dump_folder.
        url: The root of the run; default: base_folder/folder.
        options: Of `CheckpointManager`: `storage_options`, `state_dict_type`, ...

    Raises:
        UsageError: The model is cut into pipeline stages, whose optimizers have no common names.
    """

    def __init__(
        self,
        dataloader: Any,
        model_parts: Sequence[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: Mapping[str, Any],
        checkpoint_config: Any = None,
        sd_adapter: Any = None,
        base_folder: str = "",
        ft_manager: Any = None,
        *,
        url: str | None = None,
        **options: Any,
    ) -> None:
        config = checkpoint_config
        self.enable = bool(_of(config, "enable", _of(config, "enable_checkpoint", True)))
        if not self.enable:
            return
        if len(model_parts) != 1:
            raise UsageError(f"{len(model_parts)} model parts: pipeline stages are not supported by this checkpointer.")
        self.interval = int(_of(config, "interval", 500))
        self._first = bool(_of(config, "enable_first_step_checkpoint", False))
        self._async = str(_of(config, "async_mode", "disabled")).lower().rpartition(".")[2] != "disabled"
        self._excluded = frozenset(_of(config, "exclude_from_loading", ()))
        self._initial = _of(config, "initial_load_path", None)
        self._initial_model_only = bool(_of(config, "initial_load_model_only", True))
        self._load_step = int(_of(config, "load_step", -1))
        self._last_model_only = bool(_of(config, "last_save_model_only", False))
        self._model = model_parts[0]
        self._optimizers = list(getattr(optimizers, "optimizers", optimizers))
        self._schedulers = lr_schedulers
        self._dataloader = dataloader
        self._states = dict(states)
        self.last_load: LoadReport | None = None
        keep = int(_of(config, "keep_latest_k", 0))
        self.folder = url or os.path.join(base_folder, str(_of(config, "folder", "checkpoint")))
        policy = RetentionPolicy(max_num=keep) if keep > 0 else None
        self.manager = CheckpointManager(self.folder, retention=policy, **options)

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save where the interval, or the last step, says so; in the background if `async_mode` is on. Collective."""
        if not self._due(curr_step, last_step):
            return
        if last_step and self._last_model_only:
            self.manager.save(curr_step, TrainState(model=self._model, rng=False))
        elif self._async and not last_step:
            self.manager.save_async(curr_step, self._state())
        else:
            self.manager.save(curr_step, self._state())

    def load(self, step: int = -1) -> bool:
        """Restore `step`, or the newest, or what `initial_load_path` names; tell whether there was one. Collective."""
        if not self.enable:
            return False
        step = step if step != -1 else self._load_step
        state, options = self._state(self._excluded), self._options()
        if step != -1:
            if not any(record.step == step for record in self.manager.list()):
                return False
            self.last_load = self.manager.load(state, step, **options)
        else:
            self.last_load = self.manager.load(state, **options)
        if self.last_load is None and self._initial:
            if self._initial_model_only:
                state = TrainState(model=self._model, rng=False)
            # A directory without a slash is a URL still: only a name of this run has none.
            url = str(self._initial) if "/" in str(self._initial) else f"./{self._initial}"
            self.last_load = self.manager.load(state, url, per_rank_on_resize="keep", **options)
            return True
        return self.last_load is not None

    def maybe_wait_for_staging(self) -> None:
        """Return at once: `save` has copied everything by the time it returns."""

    def close(self) -> None:
        """Wait for the save under way and give everything back. Collective."""
        if self.enable:
            self.manager.close()

    def _due(self, step: int, last: bool) -> bool:
        return self.enable and (last or step % self.interval == 0 or (self._first and step == 1))

    def _options(self) -> dict[str, Any]:
        return {"optimizer": "skip"} if "optimizer" in self._excluded else {}

    def _state(self, excluded: frozenset[str] = frozenset()) -> TrainState:
        found = self._optimizers
        optimizers: Any = found[0] if len(found) == 1 else {str(i): item for i, item in enumerate(found)}
        loader = self._dataloader if is_stateful(self._dataloader) else None
        return TrainState(
            model=self._model,
            optimizer=optimizers,
            scheduler=None if "lr_scheduler" in excluded else self._schedulers,
            dataloader=None if "dataloader" in excluded else loader,
            extra={name: item for name, item in self._states.items() if name not in excluded},
        )


def _of(config: Any, name: str, default: Any) -> Any:
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else value
