"""Defines FSDP2Strategy, which runs Lightning's Trainer with FSDP2 and checkpoints with a CheckpointManager.

The strategy accepts the arguments of NeMo's FSDP2Strategy and of Lightning's FSDPStrategy.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from ckptkit.checkpoint.report import DeferredOptimizer
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.state.capture import check_whole
from ckptkit.checkpoint.state.train_state import StateDictType, TrainState
from ckptkit.errors import UsageError
from ckptkit.fsdp.mesh import make_mesh, plan_for
from ckptkit.fsdp.meta import materialize, uninitialized
from ckptkit.fsdp.reset import reset_parameters
from ckptkit.fsdp.wrap import checkpoint_blocks, shard
from ckptkit.integrations import lightning_setup as arguments
from ckptkit.integrations.lightning_full import (
    gathered,
    gathered_optimizer,
    placed_like,
    scatter_model,
    scatter_optimizer,
    sharded_optimizer,
)
from ckptkit.integrations.lightning_position import FitPosition
from ckptkit.integrations.lightning_state import (
    LightningCheckpoints,
    collecting_live,
    live_state,
    remove_checkpoint,
    state_of,
)
from ckptkit.units import first_few

_LIVE = "ckptkit_live"  # marks a dictionary as containing live tensors that are about to be saved
_TIMEOUT = timedelta(minutes=30)


class FSDP2Strategy(ModelParallelStrategy):  # type: ignore[misc]  # Lightning's types are not followed
    """Trains a LightningModule with FSDP2, on any device. Saves and loads it with ckptkit.

    Shards each child of the LightningModule that has parameters, unless `configure_model` has already done so. Resumes
    from checkpoints, including those from Lightning's own strategies, on any number of ranks. On the same number of
    ranks, training continues bit-identically.

    Args:
        data_parallel_size, tensor_parallel_size, context_parallel_size: Numbers of ranks. If one number is "auto", it
            is computed from the other numbers. If both the data-parallel and the tensor-parallel size are "auto", all
            ranks are data-parallel; with a `custom_tp_plan`, each node is one tensor-parallel group instead.
        sequence_parallel: Not supported; put the sequence-parallel styles into `custom_tp_plan`.
        offload_policy, cpu_offload: If set, parameters and gradients stay on the host.
        data_sampler: An object whose `transform_dataloader` is applied to every dataloader.
        checkpoint_io: A CheckpointIO that receives full tensors on rank 0. If None, every rank writes its own shards.
        mp_policy, mixed_precision: torch's precision policy for FSDP2 or FSDP1. Overrides the Trainer's `precision`.
        parallelize_fn: Function that replaces ckptkit's sharding of the model. It is called once, with the
            LightningModule's `model`. The arguments `device_mesh`, `mp_policy`, `offload_policy`, `use_hf_tp_plan` and
            `tp_shard_plan` are passed if the function accepts them.
        use_hf_tp_plan, custom_tp_plan: Use the tensor-parallel plan of a transformers model, or a custom plan.
        auto_wrap_policy, activation_checkpointing_policy: Select modules, by a set of classes or by FSDP1's callable.
        activation_checkpointing: Lightning's old name for activation_checkpointing_policy.
        sharding_strategy: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or HYBRID_SHARD, in any spelling.
        state_dict_type: "sharded", "full" or "local".
        device_mesh: The sizes (replicate, shard).
        lightning_module_filter: Selects the FQNs to save, for example only the FQNs of an adapter. The optimizer must
            not contain parameters that are not saved.
        optimizer_restore: "deferred" restores optimizers before the first training step, after callbacks have added
            parameters. "immediate" restores them during the load.
        process_group_backend, timeout: Backend and timeout of the default process group.
        storage_options: Passed to fsspec.
    """

    strategy_name = "fsdp2"
    lightning_restore_optimizer = True
    """Lightning passes the optimizer's state to `load_optimizer_state_dict`."""

    checkpoint_io: Any = None
    """The CheckpointIO for full dictionaries; None if every rank writes its own shards."""

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
                "activation_checkpointing and activation_checkpointing_policy are two names for the same option: "
                "pass only one."
            )
        if mp_policy is not None and mixed_precision is not None:
            raise UsageError("mp_policy and mixed_precision are two names for the same option: pass only one.")
        if sequence_parallel:
            raise UsageError("sequence_parallel=True: put the sequence-parallel styles into custom_tp_plan instead.")
        if optimizer_restore not in ("deferred", "immediate"):
            raise UsageError(f"optimizer_restore is {optimizer_restore!r}; it must be 'deferred' or 'immediate'.")
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
        self._mesh: Any = None
        self._config: Any = None
        self._sharded: Callable[[], Any] = lambda: None
        self.checkpoint_io = checkpoint_io
        self._state_dict_type = StateDictType.parse(state_dict_type)
        self._filter = lightning_module_filter
        self._optimizer_restore = optimizer_restore
        self._storage_options = storage_options
        self._pending: DeferredOptimizer | Mapping[str, Any] | None = None
        self._checkpoints: LightningCheckpoints | None = None
        self._shown: dict[str, Any] = {}

    # --- setup

    def setup_environment(self) -> None:
        """Initialize the process group and create the device mesh.

        The mesh's dimensions are data_parallel, context_parallel and tensor_parallel, from the outermost to the
        innermost.
        """
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
        """Shard the model, unless `configure_model` has done so, then create the optimizers."""
        _refuse_averaging(trainer)
        self._show_live(trainer)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if not any(isinstance(m, FSDPModule) for m in self.model.modules()):
            self.parallelize()
        for root in arguments.roots(self.model):
            fill_meta(root, "cpu" if self._offload else self.root_device)
        if not self._offload:
            self.model_to_device()
        self.barrier()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
            _refuse_early(self.optimizers, self.model)
            FitPosition.of(trainer).restore = self.restore_pending
        self.setup_precision_plugin()

    def parallelize(self) -> None:
        """Shard the LightningModule's network. A second call for the same module only warns."""
        module = self.lightning_module
        if self._sharded() is module:
            rank_zero_warn("parallelize() was called before; the model is not changed.")
            return
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
        self._sharded = weakref.ref(module)  # a reference, because the Trainer may fit a different module later

    def _parallelize(self, module: nn.Module) -> None:
        roots = arguments.roots(module)
        loose = arguments.loose_parameters(module, roots)
        if loose:
            raise UsageError(
                f"{type(module).__name__} has trainable parameters of its own ({first_few(loose)}). Their "
                "gradients would not be reduced. Put them into a child module, or shard in configure_model()."
            )
        if self._tensor_parallel_size > 1 and self._custom_tp_plan is None and not self._use_hf_tp_plan:
            raise UsageError(f"tensor_parallel_size={self._tensor_parallel_size} needs a custom_tp_plan.")
        for root in roots:
            if self._recompute is not None:
                checkpoint_blocks(root, arguments.modules_of(root, self._recompute))
            plan = dict(self._custom_tp_plan) if self._custom_tp_plan is not None else None
            policy = arguments.wrap_policy(self._wrap)
            shard(root, self._config, mesh=self._mesh, policy=policy, tp_plan=plan)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This rank's share of the dataset, as arguments for DistributedSampler."""
        mesh = self.device_mesh["data_parallel"]
        return {"num_replicas": mesh.size(), "rank": mesh.get_local_rank()}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the dataloader, transformed by the data sampler if there is one."""
        if self._data_sampler is not None:
            dataloader = self._data_sampler.transform_dataloader(dataloader)
        if self._checkpoints is not None:
            self._checkpoints.set_epoch(dataloader)
        return dataloader

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context in which backward passes accumulate gradients without reducing them."""
        units = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for unit in units:
                unit.set_requires_gradient_sync(True, recurse=False)

    # --- deferred until the first step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the LightningModule's step. Before the first step, restore the deferred optimizer state."""
        self.restore_pending()
        return super().training_step(*args, **kwargs)

    def restore_pending(self) -> None:
        """Apply a deferred optimizer state, unless this was already done. All ranks must call this."""
        pending = self._pending
        if pending is None:
            return
        if isinstance(pending, DeferredOptimizer):
            pending.apply(self._state(), strict=self.lightning_module.strict_loading)
        else:
            states = pending["optimizer_states"]
            for index, optimizer in enumerate(self.optimizers):
                scatter_optimizer(optimizer, self._state(), states[index] if index < len(states) else {})
        self._pending = None

    # --- states

    def lightning_module_state_dict(self, kind: StateDictType | str | None = None) -> dict[str, Any]:
        """Return the model's state by FQN. All ranks must call this.

        Args:
            kind: "sharded" returns DTensors that share the live tensors' memory. "full" returns full tensors on rank
                0's CPU, and {} on other ranks. "local" returns this rank's local tensors. The default is the strategy's
                `state_dict_type`.
        """
        check_whole(self._state())
        taken = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in self._live().items()}
        wanted = self._kind if kind is None else StateDictType.parse(kind)
        if wanted is StateDictType.FULL:
            return gathered(taken)
        if wanted is StateDictType.LOCAL:
            return {k: v.to_local() if hasattr(v, "to_local") else v for k, v in taken.items()}
        return taken

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state by FQN. All ranks must call this.

        With the state-dict type "full", returns the complete state on rank 0 and {} on other ranks.
        """
        self.restore_pending()
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        taken = gathered_optimizer if self._kind is StateDictType.FULL else sharded_optimizer
        return taken(inner, self._state())

    @property
    def _kind(self) -> StateDictType:
        return StateDictType.FULL if self.checkpoint_io is not None else self._state_dict_type

    def _show_live(self, trainer: Any) -> None:
        """Make `trainer` collect the model's own sharded tensors for a save, unless a `checkpoint_io` writes it.

        `save_checkpoint` then gathers one tensor at a time. If Lightning gathered all tensors before the save, rank 0
        would need memory for all of them.
        """
        connector = trainer._checkpoint_connector
        dump = type(connector).dump_checkpoint

        def dump_live(*args: Any, **kwargs: Any) -> dict[str, Any]:
            if self.checkpoint_io is not None or trainer.strategy is not self:
                return dict(dump(connector, *args, **kwargs))
            self.restore_pending()
            with collecting_live(self, self._live):
                return {**dump(connector, *args, **kwargs), _LIVE: True}

        connector.dump_checkpoint = dump_live

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the tensors that a CheckpointIO has read.

        Without a CheckpointIO, `load_checkpoint` has already restored the model. In that case, only tensors that an
        `on_load_checkpoint` hook has replaced are loaded.
        """
        given = checkpoint.get("state_dict", {})
        if self.checkpoint_io is not None:
            scatter_model(self.lightning_module, given, strict=strict)
            return
        shown, self._shown = self._shown, {}
        changed = {name: value for name, value in given.items() if value is not shown.get(name)}
        if changed:
            placed = {name: placed_like(shown.get(name), value) for name, value in changed.items()}
            self.lightning_module.load_state_dict(placed, strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Apply the optimizer's state, either now or before the first training step (see `optimizer_restore`)."""
        states = checkpoint["optimizer_states"]
        self._pending = states if isinstance(states, DeferredOptimizer) else checkpoint
        if self._optimizer_restore == "immediate":
            self.restore_pending()

    # --- checkpoints

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: str | Path,
        storage_options: Any = None,
        *,
        retention: RetentionPolicy | None = None,
        owner: str | None = None,
    ) -> None:
        """Save the state that Lightning collected, and return once the checkpoint is durable. All ranks must call this.

        Args:
            storage_options: Supported only with a `checkpoint_io`. Otherwise, pass the options to the strategy.
            retention: Which of the checkpoints of `owner` to keep.
            owner: Name of the callback that saves.

        Raises:
            SaveError: Some rank failed. All ranks raise the same error. Nothing was published, and an existing
                checkpoint is unchanged.
        """
        path = self.broadcast(str(filepath))
        self.restore_pending()
        if self.checkpoint_io is not None:
            checkpoint.pop(_LIVE, None)
            save = partial(self.checkpoint_io.save_checkpoint, checkpoint, path, storage_options=storage_options)
            self.own().decide(save, f"saving {path}")
            return
        if storage_options is not None:
            raise UsageError("A save takes no storage_options: pass them to FSDP2Strategy(storage_options=...).")
        if not checkpoint.pop(_LIVE, False):  # the tensors were gathered on rank 0, but only their keys are needed
            live = self._live()
            keys = self.broadcast(list(checkpoint.get("state_dict", {})))
            checkpoint["state_dict"] = {key: live[key] for key in keys if key in live}
        trainer = self.lightning_module.trainer
        self.own().save_trainer(path, checkpoint, trainer, retention=retention, owner=owner)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Restore the model and return Lightning's dictionary. All ranks must call this.

        Reads every format that ckptkit reads, including Lightning's sharded and full checkpoints, whatever the
        state-dict type is. The optimizers are restored by `load_optimizer_state_dict`.

        Raises:
            CheckpointMismatchError: The checkpoint does not match the model. Nothing was changed.
        """
        path = self.broadcast(str(checkpoint_path))
        if self.checkpoint_io is not None:
            main: dict[str, Any] = {}

            def read() -> tuple[dict[str, Any], int | None]:
                main.update(self.checkpoint_io.load_checkpoint(path))
                rest = {k: v for k, v in main.items() if k not in ("state_dict", "optimizer_states")}
                return rest, len(main["optimizer_states"]) if "optimizer_states" in main else None

            rest, count = self.own().decide(read, f"loading {path}")
            rest = {**rest, "state_dict": main.get("state_dict", {})}
            if count is not None:
                rest["optimizer_states"] = main.get("optimizer_states", [{}] * count)
            return rest
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING and bool(self.optimizers)
        state = state_of(self.lightning_module, self.optimizers if fitting else [], rng=fitting)
        options: dict[str, Any] = {"strict": self.lightning_module.strict_loading}
        if fitting:
            options["optimizer"] = "deferred"
        if self._filter is not None:
            options["include"] = self._filter
        trainer = self.lightning_module.trainer if fitting else None
        checkpoint, report = self.own().load(path, state, trainer=trainer, per_rank_on_resize="keep", **options)
        if report.deferred is not None and checkpoint.pop("ckptkit_optimizers", 1):
            checkpoint["optimizer_states"] = report.deferred
        self._shown = self.lightning_module_state_dict(StateDictType.SHARDED)
        checkpoint["state_dict"] = dict(self._shown)  # for hooks that read it
        return checkpoint

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint. If the path is a link, remove only the link."""
        if not self.is_global_zero:
            return
        if self.checkpoint_io is not None:
            self.checkpoint_io.remove_checkpoint(filepath)
            return
        remove_checkpoint(filepath, storage_options=self._storage_options)

    def teardown(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None
        self._pending, self._shown = None, {}
        if self.lightning_module is not None:
            FitPosition.detach(self.lightning_module.trainer)
        with contextlib.suppress(AttributeError):
            self.checkpoint_io.teardown()
        super().teardown()

    # --- helpers

    def own(self) -> LightningCheckpoints:
        """Return the LightningCheckpoints that saves and loads for this strategy.

        All ranks must make the first call.
        """
        if self._checkpoints is None:
            self._checkpoints = LightningCheckpoints(self._state_dict_type, storage_options=self._storage_options)
        return self._checkpoints

    def _live(self) -> dict[str, Any]:
        live = live_state(self.lightning_module)
        return {k: v for k, v in live.items() if self._filter is None or self._filter(k)}

    def _state(self) -> TrainState:
        return state_of(self.lightning_module, self.optimizers, rng=False)


def fill_meta(root: nn.Module, device: Any) -> None:
    """Initialize the tensors that are on the meta device. They get the values that a single process would draw."""
    if any(tensor.is_meta for tensor in [*root.parameters(), *root.buffers()]):
        materialize(root, device)
        reset_parameters(root, seed=int(os.environ.get("PL_GLOBAL_SEED", "42")))
        _warn_of_garbage(root)


def _taken(fn: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the offered arguments that `fn` accepts."""
    parameters = inspect.signature(fn).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def _warn_of_garbage(root: nn.Module) -> None:
    """Warn about modules whose tensors were on the meta device and have not been initialized."""
    owners: dict[str, list[str]] = {}
    for name in sorted(uninitialized(root)):
        owners.setdefault(type(root.get_submodule(name.rpartition(".")[0])).__name__, []).append(name)
    if owners:
        listed = "; ".join(f"{cls} ({first_few(names, 3)})" for cls, names in owners.items())
        rank_zero_warn(
            "these modules were created on the meta device and have no reset_parameters(), so their values are "
            f"NaN until a checkpoint is loaded: {listed}."
        )


def _refuse_early(optimizers: Iterable[Any], module: nn.Module) -> None:
    """Raise UsageError if an optimizer has parameters that are not, or no longer, in the module.

    Such an optimizer, created before the model was sharded, would not train the module.
    """
    live = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        lost = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in live]
        if lost:
            raise UsageError(
                f"{type(optimizer).__name__} has {len(lost)} parameters that {type(module).__name__} does not have: it "
                "was created before the model was sharded and would train nothing. Create it in configure_optimizers()."
            )


def _refuse_averaging(trainer: Any) -> None:
    """Raise for callbacks that average the weights of a sharded model into an unsharded copy."""
    for callback in trainer.callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise UsageError(
                f"{type(callback).__name__} averages an unsharded copy of the model, which FSDP2 does not support. "
                "Average in your own module (torch.optim.swa_utils.AveragedModel of what configure_model() "
                "sharded), or use DDPStrategy with CkptkitCheckpointIO."
            )


def register_strategies() -> None:
    """Register `Trainer(strategy="fsdp2")` and similar names for `FSDP2Strategy`, keeping names already registered."""
    spellings: dict[str, dict[str, Any]] = {
        "fsdp2": {},
        "fsdp2_cpu_offload": {"cpu_offload": True},
        "fsdp2_full": {"state_dict_type": "full"},
    }
    for name, options in spellings.items():
        if name not in StrategyRegistry:
            StrategyRegistry.register(name, FSDP2Strategy, description=f"ckptkit's FSDP2Strategy, {options}", **options)
