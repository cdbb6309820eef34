"""FSDP2Strategy: Lightning's Trainer over FSDP2, with the arguments of NeMo's FSDP2Strategy and of FSDPStrategy."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from ckptkit.checkpoint.deferred import DeferredOptimizer
from ckptkit.checkpoint.rng import capture_rng, restore_rng
from ckptkit.checkpoint.state import StateDictType, TrainState, model_tensors
from ckptkit.errors import UsageError
from ckptkit.fsdp.blocks import checkpoint_blocks
from ckptkit.fsdp.mesh import make_mesh, plan_for
from ckptkit.fsdp.meta import materialize
from ckptkit.fsdp.reset import reset_parameters
from ckptkit.fsdp.wrap import shard
from ckptkit.integrations import lightning_setup as arguments
from ckptkit.integrations.lightning_full import (
    gathered,
    gathered_optimizer,
    scatter_model,
    scatter_optimizer,
    sharded_optimizer,
)
from ckptkit.integrations.lightning_setup import fsdp2_strategy_parallelize
from ckptkit.integrations.lightning_state import LightningCheckpoints, StateView, remove_checkpoint

__all__ = ["FSDP2Strategy", "fsdp2_strategy_parallelize", "register_strategies"]

_log = logging.getLogger(__name__)
_TIMEOUT = timedelta(minutes=30)


class FSDP2Strategy(ModelParallelStrategy):  # type: ignore[misc]  # Lightning's types are not followed
    """Trains a LightningModule under FSDP2, on any device, and checkpoints it with ckptkit's storage and commit.

    Each child of the LightningModule that has parameters is sharded, unless `configure_model` did it. A checkpoint is
    resumed at any number of ranks, bit-exactly at the same one; those that Lightning's own strategies wrote are too.

    Args:
        data_parallel_size, tensor_parallel_size, context_parallel_size: Ranks; "auto" is what the others leave. Both
            "auto": all ranks are data-parallel, or with a `custom_tp_plan` each node is one tensor-parallel group.
        sequence_parallel: Refused: put the sequence styles into `custom_tp_plan`.
        offload_policy, cpu_offload: Not None or False: parameters and gradients live on the host.
        data_sampler: Its `transform_dataloader` is applied to every dataloader.
        checkpoint_io: None: every rank writes its part, here. Else it gets whole tensors on rank 0.
        mp_policy, mixed_precision: torch's FSDP2 or FSDP1 precision policy; wins over the Trainer's `precision`.
        parallelize_fn: Called instead of ours, once, with the LightningModule's `model` and what it takes of
            `device_mesh`, `mp_policy`, `offload_policy`, `use_hf_tp_plan`, `tp_shard_plan`.
        use_hf_tp_plan, custom_tp_plan: The tensor-parallel plan that a transformers model carries, or your own.
        auto_wrap_policy, activation_checkpointing_policy: A set of module classes, or FSDP1's callable.
        activation_checkpointing: Lightning's old name of the latter.
        sharding_strategy: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, in any spelling.
        state_dict_type: "sharded", "full" or "local".
        device_mesh: (replicate, shard).
        lightning_module_filter: Which FQNs a checkpoint holds: an adapter alone, say. The optimizer must hold no
            others.
        optimizer_restore: "deferred" restores optimizers at the first training step, when parameters that callbacks
            add are there; "immediate" at the load.
        process_group_backend, timeout: Of the default process group.
        storage_options: Passed to fsspec.
    """

    strategy_name = "fsdp2"
    model: Any
    _data_parallel_size: Any
    _tensor_parallel_size: Any

    def __init__(  # noqa: PLR0913  the arguments of two strategies
        self,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int | str = "auto",
        context_parallel_size: int = 1,
        sequence_parallel: bool = False,
        offload_policy: Any = None,
        data_sampler: Any = None,
        checkpoint_io: Any = None,
        mp_policy: Any = None,
        parallelize_fn: Callable[..., Any] | None = None,
        use_hf_tp_plan: bool = True,
        custom_tp_plan: Mapping[str, Any] | None = None,
        *,
        cpu_offload: Any = None,
        mixed_precision: Any = None,
        auto_wrap_policy: Any = None,
        activation_checkpointing: Any = None,
        activation_checkpointing_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        state_dict_type: StateDictType | str = "sharded",
        device_mesh: tuple[int, int] | None = None,
        lightning_module_filter: Callable[[str], bool] | None = None,
        optimizer_restore: str = "deferred",
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if activation_checkpointing is not None and activation_checkpointing_policy is not None:
            raise UsageError(
                "activation_checkpointing and activation_checkpointing_policy are two names of one: give one."
            )
        if mp_policy is not None and mixed_precision is not None:
            raise UsageError("mp_policy and mixed_precision are two names of one: give one.")
        if sequence_parallel:
            raise UsageError("sequence_parallel=True: put the sequence-parallel styles into custom_tp_plan instead.")
        if optimizer_restore not in ("deferred", "immediate"):
            raise UsageError(f"optimizer_restore={optimizer_restore!r}: it is 'deferred' or 'immediate'.")
        self._checkpoint_io = checkpoint_io
        self._state_dict_type = StateDictType.parse(state_dict_type)
        self._context_parallel_size = context_parallel_size
        self._offload = bool(cpu_offload) or offload_policy is not None
        self._offload_policy = offload_policy
        self._data_sampler = data_sampler
        self._mp_policy = mp_policy if mp_policy is not None else mixed_precision
        self._parallelize_fn = parallelize_fn
        self._use_hf_tp_plan = use_hf_tp_plan
        self._custom_tp_plan = custom_tp_plan
        self._wrap = auto_wrap_policy
        self._recompute = activation_checkpointing_policy or activation_checkpointing
        self._sharding = sharding_strategy
        self._mesh_sizes = None if device_mesh is None else (int(device_mesh[0]), int(device_mesh[1]))
        self._filter = lightning_module_filter
        self._optimizer_restore = optimizer_restore
        self._storage_options = storage_options
        self._mesh: Any = None
        self._config: Any = None
        self._parallelized = False
        self._streaming = False
        self._pending: DeferredOptimizer | Mapping[str, Any] | None = None
        self._random: Mapping[str, Any] | None = None
        self._checkpoints: LightningCheckpoints | None = None

    # --- setup

    def setup_environment(self) -> None:
        """Join the ranks and make the device mesh: (data_parallel, context_parallel, tensor_parallel), the last
        innermost."""
        Strategy.setup_environment(self)
        self._setup_distributed()
        dp, tp = arguments.group_sizes(
            self.world_size,
            dp=self._data_parallel_size,
            tp=self._tensor_parallel_size,
            cp=self._context_parallel_size,
            has_plan=self._custom_tp_plan is not None,
            nodes=self.num_nodes,
        )
        self._data_parallel_size, self._tensor_parallel_size = dp, tp
        device = self.root_device.type
        self._config = arguments.fsdp_config(
            sharding_strategy=self._sharding,
            mesh=self._mesh_sizes,
            dp=dp,
            tp=tp,
            cp=self._context_parallel_size,
            precision=str(self.precision_plugin.precision),
            mp_policy=self._mp_policy,
            offload=self._offload,
            state_dict_type=self._state_dict_type.name,
            device=device,
        )
        self._mesh = make_mesh(plan_for(self._config, self.world_size), device)
        names = ("data_parallel", "context_parallel", "tensor_parallel")
        self._device_mesh = init_device_mesh(device, (dp, self._context_parallel_size, tp), mesh_dim_names=names)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def setup(self, trainer: Any) -> None:
        """Shard the model, unless `configure_model` did, and make the optimizers over what it became."""
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if not self._parallelized and not any(isinstance(m, FSDPModule) for m in self.model.modules()):
            self.parallelize()
        self._fill_meta()
        if not self._offload:
            self.model_to_device()
        self.barrier()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def parallelize(self) -> None:
        """Shard the LightningModule's network; a second call only warns."""
        if self._parallelized:
            rank_zero_warn("parallelize() was called before; the model stays as it is.")
            return
        module = self.lightning_module
        if self._parallelize_fn is None:
            self._parallelize(module)
        else:
            offered = {
                "device_mesh": self._device_mesh,
                "mp_policy": self._mp_policy,
                "offload_policy": self._offload_policy,
                "use_hf_tp_plan": self._use_hf_tp_plan,
                "tp_shard_plan": self._custom_tp_plan,
            }
            model = getattr(module, "model", None)
            target = model if isinstance(model, nn.Module) else module
            self._parallelize_fn(target, **_taken(self._parallelize_fn, offered))
        self._parallelized = True

    def _parallelize(self, module: nn.Module) -> None:
        roots = arguments.roots(module)
        loose = arguments.loose_parameters(module, roots)
        if loose:
            raise UsageError(
                f"{type(module).__name__} has trainable parameters of its own ({', '.join(loose[:5])}), whose "
                "gradients nobody would reduce. Put them into a module of their own, or shard in configure_model()."
            )
        if self._tensor_parallel_size > 1 and self._custom_tp_plan is None and not self._use_hf_tp_plan:
            raise UsageError(f"tensor_parallel_size={self._tensor_parallel_size} needs a custom_tp_plan.")
        for root in roots:
            if self._recompute is not None:
                checkpoint_blocks(root, arguments.modules_of(root, self._recompute))
            plan = dict(self._custom_tp_plan) if self._custom_tp_plan is not None else None
            policy = arguments.wrap_policy(self._wrap)
            shard(root, self._config, mesh=self._mesh, policy=policy, tp_plan=plan)

    def _fill_meta(self) -> None:
        """Give parameters that were made on the meta device the values that one process would draw."""
        for root in arguments.roots(self.model):
            if any(tensor.is_meta for tensor in [*root.parameters(), *root.buffers()]):
                materialize(root, "cpu" if self._offload else self.root_device)
                reset_parameters(root, seed=int(os.environ.get("PL_GLOBAL_SEED", "42")))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part of a dataset this rank draws."""
        mesh = self.device_mesh["data_parallel"]
        return {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the dataloader, made over by the data sampler if there is one."""
        if self._data_sampler is None:
            return dataloader
        return self._data_sampler.transform_dataloader(dataloader)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Reduce no gradients in the backward passes inside: they accumulate."""
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for unit in units:
                unit.set_requires_gradient_sync(True, recurse=False)

    # --- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's step; before the first one, restore what a checkpoint left for it."""
        self.restore_pending()
        if self._random is not None:
            restore_rng(self._random)
            self._random = None
        return super().training_step(*args, **kwargs)

    def restore_pending(self) -> None:
        """Apply the optimizer state that was loaded and not applied yet, once. All ranks must call it."""
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
        """Lightning hands the optimizer's state over: `load_optimizer_state_dict`."""
        return True

    def lightning_module_state_dict(self, kind: StateDictType | str | None = None) -> dict[str, Any]:
        """Return the model's state by FQN: what the state-dict type says, or `kind`. All ranks must call it.

        "sharded": DTensors that alias the live ones. "full": whole tensors on the CPU of rank 0, {} elsewhere.
        "local": this rank's parts.
        """
        tensors, extra = model_tensors(self.lightning_module)
        taken = {k: v for k, v in {**tensors, **extra}.items() if self._filter is None or self._filter(k)}
        taken = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in taken.items()}
        wanted = self._kind(kind)
        if wanted is StateDictType.FULL:
            return gathered(taken)
        if wanted is StateDictType.LOCAL and not self._streaming:
            return {k: v.to_local() if hasattr(v, "to_local") else v for k, v in taken.items()}
        return taken

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state by FQN; of the type "full" whole on rank 0, {} elsewhere. Collective."""
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

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Inside this, Lightning is shown the live tensors whatever the type: a save gathers them one by one."""
        before, self._streaming = self._streaming, self._checkpoint_io is None
        try:
            yield
        finally:
            self._streaming = before

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give the model what a CheckpointIO read; else it was restored by `load_checkpoint` already."""
        if self._checkpoint_io is not None:
            scatter_model(self.lightning_module, checkpoint.get("state_dict", {}), strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep the optimizer's state for the first training step, or apply it now (`optimizer_restore`)."""
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
        """What whole dictionaries are given to; None where every rank writes its part."""
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None, *, retention: Any = None
    ) -> None:
        """Save what Lightning collected; return once it survives a power cut. All ranks must call it.

        Raises:
            SaveError: Some rank failed: the same on every rank. Nothing was published, and what lay there stays.
        """
        path = self.broadcast(str(filepath))
        self.restore_pending()
        if self._checkpoint_io is not None:
            if self.is_global_zero:
                self._checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            self.barrier("save_checkpoint")
            return
        names = checkpoint.pop("state_dict", {})
        whole = checkpoint.pop("optimizer_states", None)
        keys = self.broadcast(list(names))
        live = {**dict.fromkeys(keys), **names} if self._given_live() else self._live(keys)
        state = self._state(optimizers=whole is not None)
        state.model = StateView.of(self.lightning_module, live)
        checkpoint["ckptkit_optimizers"] = 0 if whole is None else len(self.optimizers)
        checkpoint["ckptkit_world_size"] = self.world_size
        self._own().save(path, checkpoint, state, metrics=self._metrics(), retention=retention)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore the model, and return Lightning's dictionary. All ranks must call it.

        Reads every format that ckptkit reads, Lightning's sharded and full ones among them, whatever the state-dict
        type. Optimizers follow in `load_optimizer_state_dict`.

        Raises:
            CheckpointMismatchError: It does not fit; nothing was changed.
        """
        path = self.broadcast(str(checkpoint_path))
        if self._checkpoint_io is not None:
            main = self._checkpoint_io.load_checkpoint(path) if self.is_global_zero else None
            rest = {k: v for k, v in main.items() if k not in ("state_dict", "optimizer_states")} if main else {}
            rest = self.broadcast(rest)
            count = self.broadcast(len(main["optimizer_states"]) if main and "optimizer_states" in main else None)
            rest["state_dict"] = main["state_dict"] if main else {}
            if count is not None:
                rest["optimizer_states"] = main["optimizer_states"] if main else [{}] * count
            return dict(rest)
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING and bool(self.optimizers)
        state = self._state(optimizers=fitting, rng=fitting)
        options: dict[str, Any] = {"strict": self.lightning_module.strict_loading}
        if fitting:
            options["optimizer"] = "deferred"
        if self._filter is not None:
            options["include"] = self._filter
        checkpoint, report = self._own().load(path, state, per_rank_on_resize="keep", **options)
        if report.deferred is not None and checkpoint.pop("ckptkit_optimizers", 1):
            checkpoint["optimizer_states"] = report.deferred
        if "rng" in report.loaded and _inside_an_epoch(checkpoint):
            self._random = capture_rng()  # making the iterator that goes on draws numbers which the first run did not
        return checkpoint

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint; of a link only the link."""
        if not self.is_global_zero:
            return
        if self._checkpoint_io is not None:
            self._checkpoint_io.remove_checkpoint(filepath)
            return
        remove_checkpoint(filepath, storage_options=self._storage_options)

    def teardown(self) -> None:
        """Give everything back."""
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None
        self._pending = None
        with contextlib.suppress(AttributeError):
            self._checkpoint_io.teardown()
        super().teardown()

    # --- inside

    def _own(self) -> LightningCheckpoints:
        """Return what saves and loads here. The first call is collective."""
        if self._checkpoints is None:
            self._checkpoints = LightningCheckpoints(self._state_dict_type, storage_options=self._storage_options)
        return self._checkpoints

    def _given_live(self) -> bool:
        return self._kind(None) is StateDictType.SHARDED

    def _live(self, keys: list[str]) -> dict[str, Any]:
        tensors, extra = model_tensors(self.lightning_module)
        live = {**tensors, **extra}
        return {key: live[key] for key in keys if key in live}

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


def _taken(fn: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the offered arguments that a function has parameters for."""
    parameters = inspect.signature(fn).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def _inside_an_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Tell whether a checkpoint was taken between two batches of one epoch."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {})
    progress = loop.get("epoch_loop.batch_progress", {})
    return bool(progress) and not progress.get("is_last_batch", False)


def register_strategies() -> None:
    """Let `Trainer(strategy="fsdp2")` and its relatives mean `FSDP2Strategy`. Names that are taken are left alone."""
    spellings: dict[str, dict[str, Any]] = {
        "fsdp2": {},
        "fsdp2_cpu_offload": {"cpu_offload": True},
        "fsdp2_full": {"state_dict_type": "full"},
    }
    for name, options in spellings.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, FSDP2Strategy, description=f"ckptkit's FSDP2Strategy, {options}", **options)
