"""Defines FSDP2FabricStrategy, which runs Lightning Fabric's loops with FSDP2 and saves and loads with ckptkit."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY, ModelParallelStrategy
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ckptkit.checkpoint.manager import SignalWatch, parse_signals
from ckptkit.checkpoint.mapping import open_checkpoint
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.state.train_state import TrainState, is_stateful, section
from ckptkit.errors import UsageError
from ckptkit.formats.state_names import STEPS
from ckptkit.fsdp.config import FSDPConfig, MixedPrecision
from ckptkit.fsdp.gradients import clip_grad_norm
from ckptkit.fsdp.mesh import make_mesh, plan_for
from ckptkit.fsdp.wrap import shard
from ckptkit.integrations.lightning_state import LightningCheckpoints, StateView, lightning_extras, live_state
from ckptkit.integrations.lightning_strategy import fill_meta

_TIMEOUT = timedelta(minutes=30)


class FSDP2FabricStrategy(ModelParallelStrategy):  # type: ignore[misc]  # Lightning's types are not followed
    """Shards each module passed to `fabric.setup` with FSDP2, on any device.

    `fabric.save` and `fabric.load` write and read committed checkpoints, which resume on any number of ranks. Call
    `fabric.setup(module)` first, then create the optimizer and pass the optimizer to `fabric.setup_optimizers`.

    Args:
        config: An FSDPConfig, or a dict with fields of FSDPConfig. The field `state_dict_type` also applies to the
            checkpoints. If the field `mixed_precision` is not set, Fabric's `precision` determines the compute dtype.
        on_signal: The signals that `interrupted` reacts to, as in CheckpointManager. "save" means SIGTERM and SIGUSR1.
        process_group_backend, timeout: Backend and timeout of the default process group.
        storage_options: Passed to fsspec.

    Raises:
        UsageError: The configuration is invalid.
    """

    def __init__(
        self,
        config: FSDPConfig | Mapping[str, Any] | None = None,
        *,
        on_signal: Sequence[int] | Literal["save"] = (),
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(parallelize_fn=self._parallelize, process_group_backend=process_group_backend, timeout=timeout)
        self._config = config if isinstance(config, FSDPConfig) else FSDPConfig.from_dict(config or {})
        self._signals = parse_signals(on_signal)
        self._watch: SignalWatch | None = None
        self._storage_options = storage_options
        self._checkpoints: LightningCheckpoints | None = None

    def setup_environment(self) -> None:
        """Initialize the process group and create the device mesh (data_parallel, tensor_parallel)."""
        self._tensor_parallel_size = self._config.tp * self._config.cp
        self._data_parallel_size = self.num_nodes * self.num_processes // self._tensor_parallel_size
        super().setup_environment()
        precision = str(self.precision.precision)
        if self._config.mixed_precision is None and precision.endswith("-mixed"):
            low: MixedPrecision = "bf16" if precision.startswith("bf16") else "fp16"
            self._config = dataclasses.replace(self._config, mixed_precision=low)
        device = self.root_device.type
        self._config = dataclasses.replace(self._config, device=device)
        self._mesh = make_mesh(plan_for(self._config, self.world_size), device)
        if self._signals and self._watch is None:
            self._watch = SignalWatch(Coordinator(), signals=self._signals)

    def interrupted(self) -> bool:
        """Return whether any rank has received one of the `on_signal` signals.

        If the result is True, save and end the loop. The result becomes True on all ranks at the same step, and stays
        True. All ranks must call `fabric.strategy.interrupted()` between two steps. Each call takes one small
        all-reduce.
        """
        return self._watch is not None and self._watch.agreed()

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, scheduler: Any = None) -> NoReturn:
        """Raise UsageError, because an optimizer that was created before the module was sharded would train nothing."""
        raise UsageError(
            f"fabric.setup({type(module).__name__}, optimizer): FSDP2 replaces the parameters of the optimizer. "
            "Call model = fabric.setup(model) first, create the optimizer from model.parameters(), then call "
            "optimizer = fabric.setup_optimizers(optimizer)."
        )

    def _parallelize(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        shard(module, self._config, mesh=self._mesh)
        fill_meta(module, "cpu" if self._config.offload == "params" else self.root_device)
        return module

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Unscale the gradients (fp16), and clip their joint norm over all ranks. Return the norm before clipping.

        Raises:
            NonFiniteGradientError: `error_if_nonfinite` is set, and a gradient on some rank is inf or NaN.
        """
        self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        return clip_grad_norm(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the modules, optimizers and other values in `state`, and return once the checkpoint is durable.

        All ranks must call this. Values are saved once, but the state of dataloaders is saved for each rank. The
        checkpoint's step is the value of "global_step", "step", "iteration" or "iter_num", or 0 if `state` has no such
        key.

        Args:
            storage_options: Not supported in this method. Pass the options to the strategy.
            filter: Maps a module's key to a function that selects the tensors to save.

        Raises:
            SaveError: Some rank failed. All ranks raise the same error, and nothing was published.
        """
        if storage_options is not None:
            raise UsageError("A save takes no storage_options: pass them to FSDP2FabricStrategy(storage_options=...).")
        url = self.broadcast(str(path))

        filters = filter or {}
        if not all(isinstance(state.get(key), nn.Module) for key in filters):
            raise UsageError(f"filter={sorted(filters)}: only the tensors of modules can be filtered.")

        def collect() -> TrainState:
            return _train_state({**state, **{key: _filtered(state[key], wanted) for key, wanted in filters.items()}})

        own = self._own()
        collected = own.run_on_all(collect, "collecting the checkpoint")
        step = next((state[key] for key in STEPS if isinstance(state.get(key), int)), 0)
        own.save(url, {"global_step": step}, collected)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill the modules, optimizers and values in `state` in place. Return the values for which `state` has no key.

        All ranks must call this. Reads every format that ckptkit reads. A checkpoint written by another program need
        not contain the values in `state`. If the number of ranks has changed, dataloaders whose states differ between
        ranks are left unchanged, with a warning.

        Args:
            strict: True raises if names are missing or unexpected. False loads what matches.
            weights_only: Has no effect: a load never runs code from a checkpoint.

        Raises:
            CheckpointMismatchError: The checkpoint does not match `state`. Nothing was changed.
        """
        given = {"model": state} if isinstance(state, nn.Module) else state
        if not isinstance(given, dict) or not any(isinstance(item, nn.Module) for item in given.values()):
            raise UsageError("load: pass the module to fill, or a dict that contains one: {'model': model, ...}.")
        url, own = self.broadcast(str(path)), self._own()

        def look() -> tuple[bool, set[str]]:
            root, name, other = own.find(url)
            if other:
                return True, set()
            catalog = open_checkpoint(f"{root}/{name}", storage_options=self._storage_options).catalog
            return False, {name.partition(".")[0] for name in (*catalog.tensors, *catalog.objects)}

        foreign, sections = own.decide(look, "looking for the checkpoint")
        plain = [key for key, item in given.items() if not isinstance(item, (nn.Module, Optimizer))]
        target = _train_state({key: item for key, item in given.items() if not (foreign and key in plain)}, sections)
        options: dict[str, Any] = {} if target.optimizer else {"optimizer": "skip"}
        _, report = own.load(url, target, strict=strict, per_rank_on_resize="keep", **options)
        found = {**lightning_extras(report.extra)} if foreign else {**report.extra, **target.extra}
        found.pop("lightning", None)
        given.update({key: found[key] for key in plain if key in found and not is_stateful(given[key])})
        return {key: value for key, value in found.items() if key not in given}

    def teardown(self) -> None:
        """Release all resources, and restore the signal handlers."""
        if self._watch is not None:
            self._watch.close()
            self._watch.coordinator.close()
            self._watch = None
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None
        with contextlib.suppress(NotImplementedError):  # Lightning's last step asks for a CheckpointIO
            super().teardown()

    def _own(self) -> LightningCheckpoints:
        if self._checkpoints is None:
            kind = self._config.state_dict_type
            self._checkpoints = LightningCheckpoints(kind, storage_options=self._storage_options)
        return self._checkpoints


def _train_state(state: Mapping[str, Any], sections: Collection[str] = ()) -> TrainState:
    """Return `state` as a TrainState.

    A single module or optimizer is passed without its key, unless the checkpoint has a section with this key, such as
    "model_actor" for the key "actor".
    """

    def parts(kind: str, items: Mapping[str, Any]) -> Any:
        is_named = len(items) > 1 or any(section(kind, key) in sections for key in items)
        return items if is_named else next(iter(items.values()), None)

    models = {key: item for key, item in state.items() if isinstance(item, nn.Module)}
    optimizers = {key: item for key, item in state.items() if isinstance(item, Optimizer)}
    loaders = {key: item for key, item in state.items() if isinstance(item, DataLoader) and is_stateful(item)}
    others = {key: item for key, item in state.items() if key not in {**models, **optimizers, **loaders}}
    return TrainState(
        model=parts("model", models),
        optimizer=parts("optimizer", optimizers),
        dataloader=loaders or None,
        extra=others,
        rng=bool(optimizers),
    )


def _filtered(module: nn.Module, wanted: Callable[[str, Any], bool]) -> nn.Module:
    return StateView.of(module, {name: value for name, value in live_state(module).items() if wanted(name, value)})


def register_fabric_strategies() -> None:
    """Register `Fabric(strategy="fsdp2")` and similar names. Names that are already registered are kept."""
    spellings: dict[str, dict[str, Any]] = {
        "fsdp2": {},
        "fsdp2_cpu_offload": {"offload": "params"},
        "fsdp2_full": {"state_dict_type": "FULL"},
    }
    for name, config in spellings.items():
        if name not in STRATEGY_REGISTRY:
            text = f"ckptkit's FSDP2FabricStrategy, {config}"
            STRATEGY_REGISTRY.register(name, FSDP2FabricStrategy, description=text, config=config)
