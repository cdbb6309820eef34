"""A checkpointer for torchtitan's trainer, based on a CheckpointManager; supports object stores.

    trainer.checkpointer = TorchtitanCheckpointer(dataloader, model_parts, optimizers, lr_schedulers, states,
                                                  checkpoint_config, url="s3://bucket/run")

Does not import torchtitan. To resume from torchtitan's own checkpoints, set `initial_load_path`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from ckptkit.arguments import check_flags, check_int, wrong
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.report import LoadReport
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.state.train_state import TrainState, is_stateful
from ckptkit.errors import UsageError

__all__ = ["TorchtitanCheckpointer"]


_POSITIONAL = (
    "dataloader", "model_parts", "optimizers", "lr_schedulers", "states", "checkpoint_config", "sd_adapter",
    "base_folder", "ft_manager",
)  # fmt: skip
# The fields of torchtitan's CheckpointConfig: supported ones, and those refused unless they have no effect.
_HONOURED = frozenset(
    ["async_mode", "create_seed_checkpoint", "enable", "enable_checkpoint", "enable_first_step_checkpoint",
     "enable_ft_dataloader_checkpoints", "exclude_from_loading", "export_dtype", "folder", "initial_load_model_only",
     "initial_load_path", "interval", "keep_latest_k", "last_save_model_only", "load_only", "load_step"]
)  # fmt: skip
_ASYNC_MODES = ("disabled", "async", "async_with_pinned_mem")
_REFUSED = {
    "initial_load_in_hf": "load the weights before training, or convert them",
    "initial_load_in_hf_quantized": "load the weights before training, or convert them",
    "last_save_in_hf": "export the checkpoint with `ckptkit convert CHECKPOINT OUT`",
}


class TorchtitanCheckpointer:
    """Replaces torchtitan's CheckpointManager: `save`, `load`, `maybe_wait_for_staging`, `close`.

    Same constructor arguments as torchtitan's: `(config, *, dataloader, model_parts, ...)` since 0.3, before that
    `(dataloader, model_parts, optimizers, lr_schedulers, states, checkpoint_config, sd_adapter, ...)`.

    Args:
        given: dataloader, model_parts, optimizers, lr_schedulers, states, base_folder (its dump_folder) and the
            config, a `[checkpoint]` section. sd_adapter is not used: an export is `ckptkit convert`.
        url: The root of the run; default: base_folder/folder.
        options: Of `CheckpointManager`: `retention` (in place of `keep_latest_k`), `storage_options`, ...

    Raises:
        UsageError: The config uses an unsupported feature (Hugging Face formats, a cast by `export_dtype`) or an
            unknown field; torchft is enabled; or the model has pipeline stages, whose optimizers have no common names.
    """

    def __init__(self, *given: Any, url: str | None = None, **options: Any) -> None:
        named = {name: options.pop(name) for name in (*_POSITIONAL, "config") if name in options}
        if len(given) == 1 and "dataloader" in named:
            named["config"], given = given[0], ()
        if len(given) > len(_POSITIONAL) or any(name in named for name in _POSITIONAL[: len(given)]):
            raise TypeError("TorchtitanCheckpointer: an argument is given twice, or there are too many.")
        named |= dict(zip(_POSITIONAL, given, strict=False))
        config = named.get("config", named.get("checkpoint_config"))
        if isinstance(config, (str, type)):
            raise wrong("checkpoint config", config, "torchtitan's [checkpoint] section, or a dict of its fields")
        self.enable = _flag(config, "enable", _flag(config, "enable_checkpoint", True))
        self._load_only = _flag(config, "load_only", False)
        if not self.enable:
            return
        missing = [name for name in ("model_parts", "optimizers", "states") if named.get(name) is None]
        if missing:
            raise UsageError(f"TorchtitanCheckpointer: {', '.join(missing)} must be given; see its arguments.")
        model_parts, optimizers = named["model_parts"], named["optimizers"]
        _check(config, named.get("ft_manager"))
        if not isinstance(model_parts, (list, tuple)):
            raise wrong("model_parts", model_parts, "a list with the model")
        if len(model_parts) != 1:
            raise UsageError(f"{len(model_parts)} model parts: pipeline stages are not supported by this checkpointer.")
        if not isinstance(named["states"], Mapping):
            raise wrong("states", named["states"], "a dict of objects by name")
        self.interval = _int(config, "interval", 500, least=1)
        self._first = _flag(config, "enable_first_step_checkpoint", False)
        mode = str(_of(config, "async_mode", "disabled")).lower().rpartition(".")[2]
        if mode not in _ASYNC_MODES:
            raise wrong("checkpoint config: async_mode", mode, f"one of {', '.join(_ASYNC_MODES)}")
        self._async = mode != "disabled"
        excluded = _of(config, "exclude_from_loading", ())
        if isinstance(excluded, str):
            raise wrong("checkpoint config: exclude_from_loading", excluded, "a list of names")
        self._excluded = frozenset(excluded)
        self._initial = _of(config, "initial_load_path", None)
        self._initial_model_only = _flag(config, "initial_load_model_only", True)
        self._load_step = _int(config, "load_step", -1, least=-1)
        self._last_model_only = _flag(config, "last_save_model_only", False)
        self._model = model_parts[0]
        self._optimizers = list(getattr(optimizers, "optimizers", optimizers))
        self._schedulers = named.get("lr_schedulers")
        self._dataloader = named.get("dataloader")
        self._states = dict(named["states"])
        if self._last_model_only and not self._load_only:
            _check_dtype(self._model, str(_of(config, "export_dtype", "")))
        strange = sorted(self._excluded - {"optimizer", "lr_scheduler", "dataloader", *self._states})
        if strange:
            raise UsageError(
                f"checkpoint config: exclude_from_loading names {', '.join(strange)}, which the trainer does not save."
            )
        self.last_load: LoadReport | None = None
        keep = _int(config, "keep_latest_k", 0, least=0)
        self.folder = url or os.path.join(str(named.get("base_folder") or ""), str(_of(config, "folder", "checkpoint")))
        options.setdefault("retention", RetentionPolicy(max_num=keep) if keep > 0 else None)
        self.manager = CheckpointManager(self.folder, **options)

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if the interval or the last step requires it; in the background if `async_mode` is on. Collective.

        Returns whether this step was saved.
        """
        if not self._due(curr_step, last_step):
            return False
        if last_step and self._last_model_only:
            self.manager.save(curr_step, TrainState(model=self._model, rng=False))
        elif self._async and not last_step:
            self.manager.save_async(curr_step, self._state())
        else:
            self.manager.save(curr_step, self._state())
        return True

    def load(self, step: int = -1) -> bool:
        """Restore `step`, the newest, or `initial_load_path`; return whether there was one. Collective.

        From step 0 (a seed checkpoint) only the model is loaded.

        Raises:
            CheckpointNotFoundError: `step` or `load_step` does not exist.
        """
        if not self.enable:
            return False
        step = step if step != -1 else self._load_step
        state, options = self._state(self._excluded), self._options()
        found = step if step != -1 else self.manager.latest()
        if found == 0:
            state, options = TrainState(model=self._model, rng=False), {}
        self.last_load = self.manager.load(state, "latest" if step == -1 else step, **options)
        if self.last_load is None and self._initial:
            if self._initial_model_only:
                state = TrainState(model=self._model, rng=False)
            # Only names of this run have no slash, so append one to a directory without.
            url = str(self._initial) if "/" in str(self._initial) else f"./{self._initial}"
            self.last_load = self.manager.load(state, url, per_rank_on_resize="keep", **options)
        return self.last_load is not None

    def maybe_wait_for_saving(self) -> None:
        """Wait for the running save. Collective."""
        if self.enable:
            self.manager.wait()

    def maybe_wait_for_staging(self) -> None:
        """Return at once: `save` has copied everything by the time it returns."""

    def close(self) -> None:
        """Wait for the running save and release all resources. Collective."""
        if self.enable:
            self.manager.close()

    def _due(self, step: int, last: bool) -> bool:
        if not self.enable or self._load_only:
            return False
        return bool(last or step % self.interval == 0 or (self._first and step == 1))

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


def _check(config: Any, ft_manager: Any) -> None:
    names = config if isinstance(config, Mapping) else _fields(config)
    unknown = sorted(set(names) - _HONOURED - _REFUSED.keys())
    if unknown:
        raise UsageError(f"checkpoint config: {', '.join(unknown)} is not known to TorchtitanCheckpointer.")
    for name, instead in _REFUSED.items():
        if _of(config, name, False):
            raise UsageError(f"checkpoint config: {name}={_of(config, name, False)!r} is not done here: {instead}.")
    if getattr(ft_manager, "enabled", False):
        raise UsageError("ft_manager: checkpoints of torchft's replicas are not done here.")


def _fields(config: Any) -> list[str]:
    if dataclasses.is_dataclass(config):
        return [field.name for field in dataclasses.fields(config)]
    return [name for name in vars(config) if not name.startswith("_")] if hasattr(config, "__dict__") else []


def _check_dtype(model: nn.Module, export_dtype: str) -> None:
    """Raise if torchtitan would cast the last save: ours keeps the training dtype."""
    stored = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
    if export_dtype and stored - {export_dtype}:
        raise UsageError(
            f"checkpoint config: export_dtype={export_dtype!r} with last_save_model_only=True is a cast from "
            f"{', '.join(sorted(stored))}, not done here: give the model's dtype, and cast with convert --dtype."
        )


def _flag(config: Any, name: str, default: bool) -> bool:
    value = _of(config, name, default)
    check_flags(**{f"checkpoint config: {name}": value})
    return bool(value)


def _int(config: Any, name: str, default: int, *, least: int) -> int:
    value = _of(config, name, default)
    check_int(f"checkpoint config: {name}", value, least=least)
    return int(value)


def _of(config: Any, name: str, default: Any) -> Any:
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else value
