"""Defines TorchtitanCheckpointer, which replaces torchtitan's own checkpointer and uses a CheckpointManager.

Object stores are supported, too.

torchtitan 0.3 and its main branch build the checkpointer from the trainer's config:

    config.checkpoint = TorchtitanCheckpointer.Config(enable=True, url="s3://bucket/run")

With earlier versions, replace the trainer's checkpointer:

    trainer.checkpointer = TorchtitanCheckpointer(dataloader, model_parts, optimizers, lr_schedulers, states,
                                                  checkpoint_config, url="s3://bucket/run")

To resume from torchtitan's own checkpoints, set `initial_load_path`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from torch import nn

from ckptkit.arguments import check_flags, check_int, wrong
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.report import LoadReport
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.state.optimizer.methods import class_name
from ckptkit.checkpoint.state.train_state import StateDictType, TrainState, is_stateful
from ckptkit.errors import CheckpointMismatchError, CheckpointNotFoundError, UsageError


class _Manager:
    """Serves as the base class in versions of torchtitan without a base class for checkpoint managers."""

    enable: bool
    save_future: Any

    def load(self: Any, step: int = -1) -> bool:
        return bool(self.enable and self._load(step))

    def save(self: Any, curr_step: int, last_step: bool = False) -> bool:
        return bool(self.enable and self._save(curr_step, last_step))

    def maybe_wait_for_staging(self) -> None:
        """Return at once."""

    def maybe_wait_for_saving(self: Any) -> None:
        if self.enable and self.save_future is not None:
            self._wait_for_saving()

    def close(self: Any) -> None:
        if getattr(self, "enable", False):
            self._close()


def _base() -> Any:
    try:
        found = importlib.import_module("torchtitan.components.checkpointer")
    except ImportError:  # torchtitan is not installed, or older than 0.3
        return _Manager
    return getattr(found, "BaseCheckpointManager", _Manager)


_Base = _base()


def _config_of(base: Any) -> Any:
    """Return a subclass of torchtitan's config class with ckptkit's fields. Its `build` creates the checkpointer."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(base.Config):  # type: ignore[misc]  # known once torchtitan is installed
        """torchtitan's [checkpoint] section with ckptkit's additional fields."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """Whether to save in the background."""

        url: str | None = None
        """The root of the run's checkpoints. Default: `folder` inside the trainer's dump folder."""

        state_dict_type: Literal["sharded", "full", "local"] = "sharded"
        """How a checkpoint is stored."""

        storage_options: dict[str, str] = dataclasses.field(default_factory=dict)
        """Options for fsspec, such as an endpoint."""

    return Config


_POSITIONAL = (
    "dataloader", "model_parts", "optimizers", "lr_schedulers", "states", "checkpoint_config", "sd_adapter",
    "base_folder", "ft_manager",
)  # fmt: skip
# The fields of torchtitan's CheckpointConfig that are supported. The fields in _REFUSED are accepted only if unset.
_HONOURED = frozenset(
    ["async_mode", "create_seed_checkpoint", "enable", "enable_checkpoint", "enable_first_step_checkpoint",
     "enable_ft_dataloader_checkpoints", "exclude_from_loading", "export_dtype", "folder", "initial_load_model_only",
     "initial_load_path", "interval", "keep_latest_k", "last_save_model_only", "load_only", "load_step",
     "state_dict_type", "storage_options", "url"]
)  # fmt: skip
_ASYNC_MODES = ("disabled", "async", "async_with_pinned_mem")
_REFUSED = {
    "initial_load_in_hf": "load the weights before training, or convert them",
    "initial_load_in_hf_quantized": "load the weights before training, or convert them",
    "last_save_in_hf": "export the checkpoint with `ckptkit convert CHECKPOINT OUT`",
}


class TorchtitanCheckpointer(_Base):  # type: ignore[misc,valid-type]  # torchtitan's class, if there is one
    """Replaces torchtitan's CheckpointManager: `save`, `load`, `maybe_wait_for_staging`, `close`.

    If torchtitan has a `BaseCheckpointManager` (0.3 and later), this class derives from it and has a nested `Config`
    with torchtitan's fields, and with `url`, `state_dict_type` and `storage_options`:
    `config.checkpoint = TorchtitanCheckpointer.Config(enable=True, url="s3://bucket/run")`. To resume from torchtitan's
    own checkpoints, set `initial_load_path`.

    The constructor takes the same arguments as torchtitan's class: `(config, *, dataloader, model_parts, ...)` since
    0.3, and `(dataloader, model_parts, optimizers, lr_schedulers, states, checkpoint_config, sd_adapter, ...)` in
    earlier versions.

    Args:
        given: The arguments of torchtitan's class: dataloader, model_parts (several if this rank has several pipeline
            stages), optimizers, lr_schedulers, states, base_folder (the trainer's dump_folder) and the config, a
            `[checkpoint]` section. sd_adapter is ignored. To export, use `ckptkit convert`.
        url: The root of the run. Default: the config's `url`, or else base_folder/folder.
        options: Passed to `CheckpointManager`: `retention` (replaces `keep_latest_k`; without `keep_best`),
            `storage_options`, ...

    Raises:
        UsageError: The config contains an unknown field, or uses an unsupported feature: a Hugging Face format, an
            `export_dtype` that casts, or torchft. Or `retention` has `keep_best`, but torchtitan passes no metrics.
    """

    if hasattr(_Base, "Config"):
        Config = _config_of(_Base)

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
            raise UsageError(f"TorchtitanCheckpointer: {', '.join(missing)} must be given.")
        model_parts, optimizers = named["model_parts"], named["optimizers"]
        _check(config, named.get("ft_manager"))
        if not isinstance(model_parts, (list, tuple)) or not model_parts:
            raise wrong("model_parts", model_parts, "a list with the model or its pipeline stages")
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
        self._model = model_parts[0] if len(model_parts) == 1 else list(model_parts)
        self._optimizers = list(getattr(optimizers, "optimizers", optimizers))
        self._optimizer = _by_class(self._optimizers, stages=len(model_parts))
        self._schedulers = named.get("lr_schedulers")
        loader = named.get("dataloader")
        self._dataloader = _ByDataRank(loader) if hasattr(loader, "dp_world_size") and is_stateful(loader) else loader
        self._states = dict(named["states"])
        if self._last_model_only and not self._load_only:
            _check_dtype(model_parts, str(_of(config, "export_dtype", "")))
        strange = sorted(self._excluded - {"optimizer", "lr_scheduler", "dataloader", *self._states})
        if strange:
            raise UsageError(
                f"checkpoint config: exclude_from_loading names {', '.join(strange)}, which the trainer does not save."
            )
        self.last_load: LoadReport | None = None
        folder = str(_of(config, "folder", "checkpoint"))
        if "://" not in folder:  # torchtitan also leaves a URL unchanged
            folder = os.path.join(str(named.get("base_folder") or ""), folder)
        self.folder = str(url or _of(config, "url", None) or folder)
        self.keep_latest_k = _int(config, "keep_latest_k", 0, least=0)
        self.save_future: Any = None
        options.setdefault("retention", RetentionPolicy(max_num=self.keep_latest_k) if self.keep_latest_k else None)
        _check_policy(options["retention"])
        options.setdefault("storage_options", _of(config, "storage_options", None) or None)
        options.setdefault("state_dict_type", _of(config, "state_dict_type", StateDictType.SHARDED))
        self.manager = CheckpointManager(self.folder, **options)

    # These methods are documented in torchtitan's base class, which calls them if `enable` is set.

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if the interval or the last step requires a checkpoint. All ranks must call this.

        Saves in the background if `async_mode` is on, except in the last step. Returns whether this step was saved.
        """
        due = last_step or curr_step % self.interval == 0 or (self._first and curr_step == 1)
        if self._load_only or not due:
            return False
        if last_step and self._last_model_only:
            self.manager.save(curr_step, TrainState(model=self._model, rng=False))
        elif self._async and not last_step:
            self.save_future = self.manager.save_async(curr_step, self._state())
        else:
            self.manager.save(curr_step, self._state())
        return True

    def _load(self, step: int = -1) -> bool:
        """Restore a checkpoint. Return whether a checkpoint was found. All ranks must call this.

        Loads the checkpoint of `step`. If `step` is -1, loads the checkpoint of `load_step`. If both are -1, loads the
        newest checkpoint. If the run has no checkpoint, loads `initial_load_path`. From step 0 (a seed checkpoint),
        only the model is loaded.

        Raises:
            CheckpointNotFoundError: `step` or `load_step` does not exist.
        """
        step = step if step != -1 else self._load_step
        state = self._state(self._excluded)
        options: dict[str, Any] = {"optimizer": "skip"} if "optimizer" in self._excluded else {}
        found = step if step != -1 else self.manager.latest()
        if found == 0:
            state, options = TrainState(model=self._model, rng=False), {}
        try:
            self.last_load = self._restore(state, "latest" if step == -1 else step, options)
        except CheckpointNotFoundError as error:
            if step == -1:
                raise
            try:
                self.last_load = self._restore(state, f"{self.folder}/step-{step}", options)  # torchtitan's own
            except CheckpointNotFoundError:
                raise error from None
        if self.last_load is None and self._initial:
            if self._initial_model_only:
                state = TrainState(model=self._model, rng=False)
            # A name without a slash would mean a checkpoint of this run, so turn it into a path.
            url = str(self._initial) if "/" in str(self._initial) else f"./{self._initial}"
            self.last_load = self._restore(state, url, {"per_rank_on_resize": "keep", **options})
        return self.last_load is not None

    def _restore(self, state: TrainState, which: str | int, options: Mapping[str, Any]) -> LoadReport | None:
        try:
            return self.manager.load(state, which, **options)
        except CheckpointMismatchError as error:
            if not isinstance(state.optimizer, dict):
                raise
            # torchtitan's own checkpoints store all optimizers as one. So do our older checkpoints of several stages.
            state.optimizer = _joined(self._optimizers)
            try:
                return self.manager.load(state, which, **options)
            except CheckpointMismatchError:
                raise error from None

    def _wait_for_saving(self) -> None:
        """Wait for the running save. All ranks must call this."""
        self.manager.wait()
        self.save_future = None

    def _maybe_wait_for_staging(self) -> None:
        """Return at once, because `save` returns only after everything has been copied."""

    def _close(self) -> None:
        """Wait for the running save and release all resources. All ranks must call this."""
        self.manager.close()

    def _state(self, excluded: frozenset[str] = frozenset()) -> TrainState:
        loader = self._dataloader if is_stateful(self._dataloader) else None
        return TrainState(
            model=self._model,
            optimizer=self._optimizer,
            scheduler=None if "lr_scheduler" in excluded else self._schedulers,
            dataloader=None if "dataloader" in excluded else loader,
            extra={name: item for name, item in self._states.items() if name not in excluded},
        )


def _by_class(optimizers: list[Any], *, stages: int) -> Any:
    """Return the optimizers in a form that TrainState accepts: one optimizer, or a dict with the keys "0", "1", ...

    With several pipeline stages per rank, the optimizers of each class are first joined into one. The checkpoint then
    does not depend on the number of stages per rank, and can be loaded on another mesh.
    """
    if stages > 1:
        classes: dict[str, list[Any]] = {}
        for optimizer in optimizers:
            classes.setdefault(type(optimizer).__name__, []).append(optimizer)
        optimizers = [_joined(items) for items in classes.values()]
    return optimizers[0] if len(optimizers) == 1 else {str(i): item for i, item in enumerate(optimizers)}


def _joined(optimizers: list[Any]) -> Any:
    """Return one optimizer that represents all given optimizers.

    The result has the class name of the first optimizer, because a checkpoint records the class name.
    """
    return type(class_name(optimizers[0]), (_OneOptimizer,), {})(optimizers)


class _ByDataRank:
    """Wraps torchtitan's dataloader, whose state contains the number of its data-parallel rank.

    The state can be loaded on any mesh with the same number of data-parallel ranks, even if the global ranks differ.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.state_dict = loader.state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state_dict)
        # Let the loader create its iterator now, which draws a random number. The random state is restored later.
        self._loader.state_dict()

    def merge_ranks(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Return one state that contains the states of all saved ranks. The dataloader picks its own entry.

        Raises:
            CheckpointMismatchError: The number of data-parallel ranks has changed.
        """
        found = {name: value for state in states for name, value in state.items()}
        saved, here = found.get("world_size"), self._loader.dp_world_size
        if saved != here:
            raise CheckpointMismatchError(
                f"the dataloader was saved on {saved} data-parallel ranks, but this job has {here}, and torchtitan "
                "cannot redistribute its state. To read the data from the start, add 'dataloader' to "
                "exclude_from_loading."
            )
        return found


class _OneOptimizer:
    """Presents several optimizers as one optimizer. A load sets the groups and states of the optimizers in place."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.state = _States(optimizers)
        self.inner_optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.inner_optimizers for group in optimizer.param_groups]

    def lend_state(self) -> AbstractContextManager[Mapping[int, Any]]:
        """Return a context that does nothing. Unlike in a MasterWeightOptimizer, the optimizers always have states."""
        return nullcontext({})

    def state_dict(self) -> dict[str, Any]:
        return {"state": dict(self.state), "param_groups": self.param_groups}


class _States(MutableMapping[Any, Any]):
    """Presents the states of several optimizers as one mapping. The states stay in the optimizers."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers  # not their states, which `load_state_dict` replaces
        self._of = {id(p): o for o in optimizers for group in o.param_groups for p in group["params"]}

    def _at(self, key: Any) -> Any:
        return self._of.get(id(key), self._optimizers[0]).state

    def __getitem__(self, key: Any) -> Any:
        held = self._at(key)
        if key not in held:  # looking it up in a defaultdict would create it
            raise KeyError(key)
        return held[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._at(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._at(key)[key]

    def __iter__(self) -> Iterator[Any]:
        for optimizer in self._optimizers:
            yield from optimizer.state

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)


def _check_policy(policy: Any) -> None:
    if isinstance(policy, RetentionPolicy) and policy.keep_best is not None:
        raise UsageError(
            "TorchtitanCheckpointer: keep_best compares metrics, but torchtitan passes none to a checkpointer. "
            "Use max_num, max_mem, keep_every or keep_daily."
        )


def _check(config: Any, ft_manager: Any) -> None:
    names = config if isinstance(config, Mapping) else _fields(config)
    unknown = sorted(set(names) - _HONOURED - _REFUSED.keys())
    if unknown:
        raise UsageError(f"checkpoint config: TorchtitanCheckpointer does not know {', '.join(unknown)}.")
    for name, instead in _REFUSED.items():
        if _of(config, name, False):
            raise UsageError(f"checkpoint config: {name}={_of(config, name, False)!r} is not supported: {instead}.")
    if getattr(ft_manager, "enabled", False):
        raise UsageError("ft_manager: checkpoints of torchft's replicas are not supported.")


def _fields(config: Any) -> list[str]:
    if dataclasses.is_dataclass(config):
        return [field.name for field in dataclasses.fields(config)]
    return [name for name in vars(config) if not name.startswith("_")] if hasattr(config, "__dict__") else []


def _check_dtype(model_parts: Sequence[nn.Module], export_dtype: str) -> None:
    """Raise if torchtitan would cast the last save to `export_dtype`. This checkpointer never casts."""
    every = [parameter for part in model_parts for parameter in part.parameters()]
    stored = {str(p.dtype).removeprefix("torch.") for p in every if p.is_floating_point()}
    if export_dtype and stored - {export_dtype}:
        raise UsageError(
            f"checkpoint config: export_dtype={export_dtype!r} with last_save_model_only=True would cast "
            f"{', '.join(sorted(stored))}, which is not supported. Set export_dtype "
            "to the model's dtype, and cast the checkpoint afterwards (`--dtype` of convert)."
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
