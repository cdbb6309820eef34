"""Defines FSDPStrategy, which prepares models and optimizers, runs training steps, and saves and loads checkpoints."""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

from ckptkit.arguments import Location, check_flags, check_int
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.state.rng import share_stream
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CheckpointMismatchError, CheckpointNotFoundError, IncompleteCheckpointError, UsageError
from ckptkit.fsdp import meta, offload
from ckptkit.fsdp.accumulation import StepCounter, Windows, accumulation_steps
from ckptkit.fsdp.arguments import check_arguments, checked
from ckptkit.fsdp.config import FSDPConfig
from ckptkit.fsdp.grad_scaler import DynamicGradScaler
from ckptkit.fsdp.gradients import (
    checked_max_norm,
    checked_norm_type,
    inspect_gradients,
    named_parameters_of,
    refuse_nonfinite,
    scale_gradients,
    widened,
)
from ckptkit.fsdp.groups import NO_DECAY, NoDecay, param_groups
from ckptkit.fsdp.hf_load import HFLoadReport, load_hf
from ckptkit.fsdp.hf_save import save_hf
from ckptkit.fsdp.master_weights import MasterWeightOptimizer
from ckptkit.fsdp.mesh import (
    TrainingMesh,
    configured,
    device_type_of,
    ensure_process_group,
    make_mesh,
    make_sample_mesh,
    plan_for,
)
from ckptkit.fsdp.reset import reset_parameters
from ckptkit.fsdp.tensor_parallel import TPPlan
from ckptkit.fsdp.units import Policy
from ckptkit.fsdp.wrap import shard, unwrap_model
from ckptkit.units import first_few

if TYPE_CHECKING:
    from ckptkit.checkpoint.report import LoadReport, SaveReport
    from ckptkit.keymaps.keymap import NameMap


logger = logging.getLogger(__name__)
ModelOptimPair = tuple[nn.Module, Optimizer]
ModelOrModelOptimPair = nn.Module | ModelOptimPair
OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
T = TypeVar("T")
O = TypeVar("O", bound=Optimizer)  # noqa: E741 - the one-letter name of a type variable
Outcome = Literal["stepped", "skipped", "accumulating"]
StartFresh = Literal["if_empty", "if_none_committed", "never"]
_NUMBER_AT_END = re.compile(r"(\d+)$")


class FSDPStrategy:
    """Trains one or more sharded models. Works without arguments and in a single process.

    Methods take their arguments in the order of LightRFT's `FSDPV2Strategy`.

    Args:
        config: The settings for sharding models (default: `FSDPConfig()`).
        seed: Seed for all random generators, set by `setup_distributed`. Data-parallel rank r gets `seed` + r, so
            dropout differs between samples. The tp and cp ranks that share a sample get the same seed.
        max_norm: The maximum joint gradient norm. 0 or None means no clipping.
        norm_type: The p of the gradient norm, from 1 to inf.
        error_if_nonfinite: What to do if a gradient on any rank is inf or NaN. True raises on every rank before the
            step. False skips the step. True is not available with fp16, because overflows are needed to find the loss
            scale.
        micro_train_batch_size: Samples per backward pass on one rank.
        train_batch_size: Samples per optimizer step over all ranks. None means one backward pass per step.
        sync_every_micro_batch: True reduces gradients in every backward pass. This communicates more, but no rank holds
            unsharded gradients during accumulation.

    Attributes:
        last_outcome: What the last `optimizer_step` did: "stepped", "skipped" (a gradient was not finite) or
            "accumulating" (the step needs more backward passes). None before the first call.
        last_grad_norm: The joint `norm_type`-norm of the gradients at the last step, before clipping.
        last_load: The report of the last `load_ckpt`. None if there was no checkpoint.

    Raises:
        UsageError: An argument is invalid, or the batch sizes do not divide evenly. The batch sizes are checked once
            the world size is known.
    """

    def __init__(
        self,
        config: FSDPConfig | None = None,
        *,
        seed: int = 42,
        max_norm: float | None = 0.0,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        micro_train_batch_size: int = 1,
        train_batch_size: int | None = None,
        sync_every_micro_batch: bool = False,
    ) -> None:
        if config is not None and not isinstance(config, FSDPConfig):
            raise UsageError(
                f"FSDPStrategy(config): an FSDPConfig is expected, found {config!r}. "
                "Try FSDPConfig.from_dict(...) for a mapping; pass seed=, max_norm= and so on by name."
            )
        check_int("micro_train_batch_size", micro_train_batch_size, least=1)
        if train_batch_size is not None:
            check_int("train_batch_size", train_batch_size, least=1)
        check_int("seed", seed, least=0)
        check_flags(sync_every_micro_batch=sync_every_micro_batch, error_if_nonfinite=error_if_nonfinite)
        self.config = config or FSDPConfig()
        if error_if_nonfinite and self.config.needs_grad_scaler:
            raise UsageError(
                "error_if_nonfinite=True conflicts with mixed_precision='fp16': its loss scale grows until a "
                "gradient overflows, and that step is skipped. Try mixed_precision='bf16', or error_if_nonfinite=False."
            )
        self.seed = seed
        self.max_norm = checked_max_norm(max_norm)
        self.norm_type = checked_norm_type(norm_type)
        self.error_if_nonfinite = error_if_nonfinite
        self.micro_train_batch_size = micro_train_batch_size
        self.train_batch_size = train_batch_size
        self.sync_every_micro_batch = sync_every_micro_batch
        self.last_grad_norm: torch.Tensor | None = None
        self.last_load: LoadReport | None = None
        self.last_outcome: Outcome | None = None
        self._samples: DeviceMesh | None = None
        self._made_group = False
        self._mesh: dict[Any, TrainingMesh] = {}
        self._windows = Windows()
        self._steps = StepCounter()
        self._syncing: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._scalers: WeakKeyDictionary[Optimizer, DynamicGradScaler] = WeakKeyDictionary()
        self._checked: WeakKeyDictionary[Optimizer, WeakKeyDictionary[nn.Module, dict[str, int]]] = WeakKeyDictionary()

    # ------------------------------------------------------------------ setup

    def setup_distributed(self, timeout: datetime.timedelta | None = None) -> None:
        """Join or create the process group, check the batch sizes and seed the random generators.

        Data-parallel ranks get different seeds, and so draw different initial weights. `sync_module_states` (the
        default) or loading from files makes the weights equal.

        Args:
            timeout: The timeout of a new process group. None means torch's default.
        """
        self._join(timeout)
        seed = (self.seed + self.data_parallel_rank) % 2**64
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        if self.config.tp > 1 and self.data_parallel_mesh.device_type != "cpu":
            # Without this, the first random operation on a DTensor would copy rank 0's generator to all ranks.
            from torch.distributed.tensor._random import manual_seed

            manual_seed(seed, self.data_parallel_mesh)

    def _join(self, timeout: datetime.timedelta | None = None) -> DeviceMesh:
        """At the first call, join the process group and check the batch sizes. Does not seed the random generators.

        Return the mesh of ranks with different samples.
        """
        if self._samples is None:
            device_type = device_type_of(None, preferred=self.config.device)
            self._made_group = ensure_process_group(device_type, timeout=timeout)
            # Ask again, because "auto" depends on the group's backends.
            device_type = device_type_of(None, preferred=self.config.device)
            samples = make_sample_mesh(device_type, inside=self.config.tp * self.config.cp)
            self._passes_on(samples.size())
            share_stream(samples.get_local_rank(), samples.size())
            self._samples = samples
        return self._samples

    def _passes_on(self, ranks: int) -> int:
        return accumulation_steps(self.train_batch_size, micro=self.micro_train_batch_size, world_size=ranks)

    @property
    def accumulated_gradient(self) -> int:
        """The number of backward passes per optimizer step."""
        return self._passes_on(self.data_parallel_size)

    @property
    def data_parallel_rank(self) -> int:
        """The index of this rank's share of the data. Ranks in the same tp or cp group have the same index.

        For a sampler: `DistributedSampler(data, strategy.data_parallel_size, strategy.data_parallel_rank)`.
        """
        return self.data_parallel_mesh.get_local_rank()

    @property
    def data_parallel_size(self) -> int:
        """The number of shares that the data is split into: the world size divided by tp x cp."""
        return self.data_parallel_mesh.size()

    @property
    def data_parallel_mesh(self) -> DeviceMesh:
        """The 1-D mesh of the ranks that have different samples, for example for averaging a loss."""
        return self._join()

    @property
    def context_parallel_mesh(self) -> DeviceMesh | None:
        """The 1-D mesh of the ranks among which this rank's sequences are split. None if `cp` is 1.

        The first access creates process groups. Like `prepare_model`, it must happen at the same point on all ranks.
        """
        self._join()
        return self._mesh_for(None, self.config).cp

    @property
    def global_step(self) -> int:
        """The number of steps taken (with several optimizers, the largest number). Assign to this to set the count."""
        return self._steps.total

    @global_step.setter
    def global_step(self, step: int) -> None:
        self._steps.restart(step)

    def close(self) -> None:
        """Destroy the process group if this strategy created it."""
        if waiting := self._windows.open():
            logger.warning(
                "%d backward passes were not used by a step: more were expected. Pass last=True to the last one.",
                waiting,
            )
        self._windows.clear()
        if self._made_group and dist.is_initialized():
            dist.destroy_process_group()
        self._made_group = False
        self._samples = None
        self._mesh.clear()

    def __enter__(self) -> FSDPStrategy:
        self.setup_distributed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ models

    @contextlib.contextmanager
    def init_model_context(self, meta_init: bool = False) -> Iterator[None]:
        """Return a context in which to build models. With `meta_init`, parameters take no memory until `prepare_model`.

        After `prepare_model`, give the parameters values with `load_ckpt`, `load_hf` or `reset_parameters`, or load a
        checkpoint with a CheckpointManager. Until then, all parameters are NaN, and a save raises SaveError.
        """
        with meta.parameters_on_meta() if meta_init else contextlib.nullcontext():
            yield

    @checked("is_training")
    def prepare_model(
        self,
        model: T,
        is_training: bool = True,
        shard_size: int | str | None = None,
        reshard_after_forward: bool | int | None = None,
        *,
        policy: Policy | None = None,
        tp_plan: TPPlan | None = None,
        ignored_params: Collection[nn.Parameter] | None = None,
        shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    ) -> T:
        """Shard `model` over the ranks and return it.

        Models that are already sharded, and objects that are not modules, are returned unchanged.

        Args:
            model: A module. If it was built on the meta device, its tensors are allocated, but get no values yet.
            is_training: False computes in the stored dtype.
            shard_size: Number of ranks that share one copy of the model. -1 means all ranks, "auto" chooses by the
                model's size, and None uses the configuration.
            reshard_after_forward: Overrides the configuration.
            policy: A function that takes the model and returns the names of the modules that become units. Overrides
                the configuration.
            tp_plan: A mapping from module globs to tensor-parallel styles (default: the model's own plan).
            ignored_params: Parameters that FSDP ignores, in addition to those that the configuration names.
            shard_placement_fn: A function that takes a parameter and returns the dimension to shard, for example
                `Shard(1)`, or None for `Shard(0)`.

        Raises:
            NotShardableError: FSDP1 has already wrapped the model or a part of it.
            UsageError: A parameter, unit, size or plan cannot be used. The message says which, and why.
        """
        if not isinstance(model, nn.Module) or self._is_prepared(model):
            return model
        self._join()
        config = configured(
            self.config,
            model,
            data_ranks=self.data_parallel_size,
            is_training=is_training,
            shard_size=shard_size,
            reshard_after_forward=reshard_after_forward,
        )
        if not config.enable_fsdp and self.data_parallel_size > 1 and is_training:
            logger.warning(
                "enable_fsdp=False: gradients are not averaged over the %d data-parallel ranks, unless the model does "
                "so itself, like DistributedDataParallel.",
                self.data_parallel_size,
            )
        mesh = self._mesh_for(model, config)
        shard(
            model,
            config,
            mesh=mesh,
            policy=policy,
            tp_plan=tp_plan,
            ignored_params=ignored_params,
            shard_placement_fn=shard_placement_fn,
            is_training=is_training,
        )
        if config.enable_fsdp:
            device = mesh.data.device_type if config.offload != "params" else "cpu"
            with contextlib.closing(Coordinator()) as coordinator:
                coordinator.run_on_all(lambda: meta.materialize(model, device), "allocating the model")
        return model

    @checked("model")
    def reset_parameters(self, model: nn.Module, *, seed: int | None = None) -> None:
        """Initialize a model that was built on the meta device, with the values that a single process would draw.

        All ranks must call this. `seed` defaults to the strategy's seed.
        """
        reset_parameters(model, seed=self.seed if seed is None else seed)

    @checked("model", "url")
    def load_hf(self, model: nn.Module, url: Location, *, strict: bool = True) -> HFLoadReport:
        """Fill a prepared model from the safetensors files at `url`. Each rank reads only its own shards.

        All ranks must call this; if one rank fails, all raise its error. If the optimizer already exists, its fp32
        masters are updated to the loaded values. Lossy casts (fp32 files into bf16 parameters) are allowed only if
        `mixed_precision` is set.

        Args:
            url: A Hugging Face directory or a bucket prefix, with config.json and *.safetensors.
            strict: True raises if a name is only in the model or only in the files. False only reports such names.

        Raises:
            CheckpointMismatchError: Names, shapes or dtypes do not match. The log (INFO) lists all. The model is
                unchanged.
        """
        return load_hf(model, url, cast=self.config.mixed_precision is not None, strict=strict)

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the module inside the wrappers of DDP, torch.compile and activation checkpointing."""
        return unwrap_model(model)

    # ------------------------------------------------------------------ optimizers

    @checked("model")
    def create_optimizer(
        self,
        model: nn.Module,
        *,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        weight_decay: float = 0.0,
        eps: float | None = None,
        no_decay: Sequence[NoDecay] = NO_DECAY,
        factory: OptimizerFactory | None = None,
    ) -> Optimizer:
        """Return an optimizer over the model's trainable parameters: fused AdamW, or the result of `factory(groups)`.

        With precision="master", the optimizer is wrapped in a MasterWeightOptimizer. All ranks must call this.

        Args:
            model: A prepared model.
            lr, betas, eps: Arguments of AdamW (defaults: 1e-3, (0.9, 0.999) and 1e-8). Not allowed with a factory.
            weight_decay: Applies to all parameters that `no_decay` does not exclude. The groups that are passed to a
                factory contain this value.
            no_decay: Name components, module classes or functions (see `param_groups`). The default is biases and
                norms.
            factory: Creates an optimizer of your choice from the groups.

        Raises:
            UsageError: No parameter is trainable, or a factory is given along with `lr`, `betas` or `eps`, which would
                have no effect.
        """
        groups = param_groups(model, weight_decay=weight_decay, no_decay=no_decay)
        if not groups:
            raise UsageError(f"{type(model).__name__} has no trainable parameters for an optimizer.")
        given = {name: value for name, value in (("lr", lr), ("betas", betas), ("eps", eps)) if value is not None}
        if factory is None:
            # The fused kernel can't mix plain tensors with DTensors, so no group contains both.
            base: Optimizer = torch.optim.AdamW(groups, weight_decay=weight_decay, fused=True, **given)  # type: ignore[arg-type]
        elif given:
            raise UsageError(f"create_optimizer: {', '.join(given)} would have no effect; set it in the factory.")
        else:
            base = factory(groups)
            check_arguments("create_optimizer(factory=)", optimizer=base)
        scaler = None
        if self.config.needs_grad_scaler:
            scaler = DynamicGradScaler(
                self.config.initial_loss_scale, hysteresis=self.config.loss_scale_hysteresis, dtype=torch.float16
            )
        optimizer = base
        if self.config.precision == "master":
            optimizer = MasterWeightOptimizer(
                base, grad_scaler=scaler, max_norm=self.max_norm, norm_type=self.norm_type
            )
        if scaler is not None:
            self._scalers[optimizer] = scaler
        self._steps.start(optimizer)
        return optimizer

    def is_mp_optimizer(self, optimizer: object) -> bool:
        """Return whether `optimizer` keeps fp32 masters of its parameters."""
        return isinstance(optimizer, MasterWeightOptimizer)

    @checked("optimizer")
    def grad_scaler(self, optimizer: Optimizer) -> DynamicGradScaler | None:
        """Return the optimizer's loss scaler, or None if it has no scaler. Only fp16 needs a scaler."""
        if isinstance(optimizer, MasterWeightOptimizer):
            return optimizer.grad_scaler
        return self._scalers.get(optimizer)

    @checked("loss", "model", "optimizer")
    def backward(self, loss: torch.Tensor, model: nn.Module, optimizer: Optimizer, *, last: bool = False) -> None:
        """Divide `loss` by the number of passes per step, apply the loss scale, and run backward.

        Gradients are reduced over the ranks only in the last pass before a step. This is the pass that completes the
        batch. To step after fewer passes (for example, at the end of an epoch), set `last=True` in the last of them.
        The step then uses the mean over these passes. `last` must be equal on all ranks.

        Args:
            model: The model that `loss` was computed with.
            optimizer: The optimizer that will step. With fp16, it determines the loss scale.

        Raises:
            UsageError: An argument has the wrong type, for example because two are swapped.
        """
        steps = self.accumulated_gradient
        scaler = self.grad_scaler(optimizer)
        scale = scaler.scale if scaler is not None else 1.0
        root = _fsdp_root(model)
        window = self._windows.backward(root, steps, last=last, scale=scale)
        self._set_sync(root, window.closed or (self.sync_every_micro_batch and root not in self._windows.held))
        factor = scale / steps
        if factor != 1.0:
            loss = widened(loss) * factor
        loss.backward()  # type: ignore[no-untyped-call]

    @checked("model")
    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which backward passes accumulate gradients without communication. Optimizers do not step.

        The next `backward` outside the context reduces the accumulated gradients. The step then uses the mean over all
        passes, including that one. Passes that you run with `loss.backward()` are not counted: their gradients are
        added up, not averaged. All ranks must enter the context at the same pass.
        """
        root = _fsdp_root(model)
        if root in self._windows.held:
            raise UsageError("no_sync(model) is already active for this model.")
        # DistributedDataParallel has its own `no_sync`, which also affects its forward.
        own = getattr(root, "no_sync", None)
        with own() if callable(own) else contextlib.nullcontext():
            self._windows.held.add(root)
            self._set_sync(root, False)
            try:
                yield
            finally:
                self._windows.held.discard(root)
                self._set_sync(root, True)

    @checked("optimizer", "model", "scheduler", "name")
    def optimizer_step(
        self, optimizer: Optimizer, model: nn.Module, scheduler: Any = None, name: str = "model"
    ) -> bool:
        """Step the optimizer after the last backward pass: unscale, clip, step, advance `scheduler`, clear gradients.

        Returns whether the weights changed. If not, `last_outcome` says why: "accumulating" if the step needs more
        backward passes, "skipped" if a gradient on some rank is not finite. A skipped step changes no weights, moments
        or scheduler on any rank, but the loss scale may decrease. All ranks must call this.

        Args:
            scheduler: Its `step` is called after each step that changes the weights.
            name: Names the model in log messages.

        Raises:
            UsageError: An argument has the wrong type, the optimizer has no parameter of the model (because it was
                created before `prepare_model`), parameters were replaced since the last step, or the loss was not
                scaled.
            NonFiniteGradientError: `error_if_nonfinite` is set, and a gradient on some rank is not finite. The message
                names the affected parameters of this rank. The gradients are kept.
        """
        self._check_belongs(optimizer, model)
        window = self._windows.step(_fsdp_root(model), self.accumulated_gradient, optimizer)
        if not window.closed:
            self.last_outcome = "accumulating"
            return False
        stepped = self._step(optimizer, window.divisor)
        optimizer.zero_grad()
        self.last_outcome = "stepped" if stepped else "skipped"
        if stepped:
            self._steps.count(optimizer)
            if scheduler is not None:
                scheduler.step()
        else:
            scaler = self.grad_scaler(optimizer)
            scale = "" if scaler is None else f" The loss scale is {scaler.scale:g} now."
            logger.warning("%s: the gradient norm is %g; this step was skipped.%s", name, self.last_grad_norm, scale)
        return stepped

    @checked("optimizer")
    def maybe_offload_optimizer(self, optimizer: O) -> O:
        """Move the optimizer's state to the host if `offload` is "optimizer". Return the optimizer."""
        return offload.offload_optimizer(optimizer) if self.config.offload == "optimizer" else optimizer

    @checked("optimizer")
    def maybe_load_optimizer(self, optimizer: O) -> O:
        """Move the optimizer's state back to its device if `offload` is "optimizer". Return the optimizer."""
        return offload.load_optimizer(optimizer) if self.config.offload == "optimizer" else optimizer

    def offload_model(self, models: T, empty_cache: bool = True) -> T:
        """Move a module, or each module in a list, to the host. Return the argument.

        Args:
            empty_cache: Return the freed memory from torch's caching allocator to the device.

        Raises:
            UsageError: The argument is or contains an optimizer.
        """
        return offload.offload_model(models, empty_cache=empty_cache)

    def reload_model(self, models: T) -> T:
        """Move a module, or each module in a list, back to the device for training. Return the argument.

        Raises:
            UsageError: The argument is or contains an optimizer.
        """
        return offload.reload_model(models, device=device_type_of(None, preferred=self.config.device))

    # ------------------------------------------------------------------ checkpoints

    @checked("model", "save_dir", "tag", "step", "optimizer")
    def save_ckpt(
        self,
        model: nn.Module,
        save_dir: str,
        tag: str | None = None,
        max_num: int | None = 3,
        max_mem: int | float | str | None = 1000,
        client_state: Any = None,
        save_latest: bool = True,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveReport:
        """Save model, optimizer, scheduler, loss scale and random state, commit, and delete old checkpoints.

        All ranks must call this.

        Args:
            model: A prepared model.
            save_dir: The root of the run's checkpoints: a path or a URL.
            tag: The checkpoint's name. None means "step_" and the step.
            max_num: Number of checkpoints to keep. None keeps all. Only checkpoints that ckptkit committed are counted
                or deleted.
            max_mem: Maximum total size: a number of GiB, or a string such as "500GB". None means no limit.
            client_state: Any JSON value. `load_ckpt` returns this value.
            save_latest: Has no effect. "latest" always means the newest committed checkpoint.
            optimizer: An optimizer from `create_optimizer`, or any other optimizer.
            scheduler: Any object with a `state_dict` method.
            step: The step. None uses the number at the end of `tag`. If `tag` has no such number, None uses the number
                of steps taken so far.
            metrics: Metrics to record with the checkpoint. `ckptkit ls` shows them, and `best:METRIC:min` names the
                best checkpoint. To keep the best checkpoint, pass a RetentionPolicy to a CheckpointManager instead.

        Raises:
            SaveError: A rank failed, or the model has no values. Nothing was published or deleted.
        """
        del save_latest
        self._join()
        if self._windows.open():
            logger.warning("Saving between two backward passes of one step: checkpoints do not contain gradients.")
        if step is None:
            number = _NUMBER_AT_END.search(tag or "")
            step = int(number[1]) if number else self.global_step
        limit: Any = max_mem
        if isinstance(max_mem, (int, float)) and not isinstance(max_mem, bool):
            limit = max_mem * 2**30
        state = self._training_state(model, optimizer, scheduler, step)
        limits = RetentionPolicy(max_num=max_num, max_mem=limit)
        with CheckpointManager(save_dir, retention=limits, state_dict_type=self.config.state_dict_type) as manager:
            return manager.save(step, state, tag=tag, client_state=client_state, metrics=metrics, overwrite=True)

    @checked("model", "load_dir", "optimizer")
    def load_ckpt(
        self,
        model: nn.Module,
        load_dir: str,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        *,
        which: str | int = "latest",
        key_map: NameMap | str | None = None,
        start_fresh: StartFresh = "if_empty",
    ) -> tuple[str | None, Any]:
        """Load the newest committed checkpoint (or `which`) in place. All ranks must call this.

        The number of ranks may differ from that of the save. Returns the checkpoint's URL and its client state, or
        (None, {}) if there is no checkpoint. `last_load` is the full report.

        Args:
            load_dir: The root of the run's checkpoints: a path or a URL.
            load_module_strict: True raises if parameters are missing or unexpected. False only reports such parameters.
            load_optimizer_states, load_lr_scheduler_states: True restores the given optimizer or scheduler, and raises
                if the checkpoint lacks its state. False leaves the optimizer or scheduler unchanged.
            which: A step, a tag, "best" or a URL, as in `CheckpointManager.load`.
            key_map: Maps the checkpoint's names to the model's names. If given, only weights are loaded, as in
                `CheckpointManager.load`.
            start_fresh: When to return (None, {}) instead of raising an error, as in `CheckpointManager`.

        Raises:
            CheckpointMismatchError: The checkpoint does not match. The log (INFO) lists all mismatches. Nothing was
                changed.
            IncompleteCheckpointError: The run has step directories, but none is committed (see `start_fresh`).
            CheckpointNotFoundError: The checkpoint `which` does not exist.
            CorruptCheckpointError: The checkpoint is damaged.
            UsageError: Gradients of backward passes have not been used by a step.
        """
        self._join()
        state = self._training_state(model, optimizer, scheduler if load_lr_scheduler_states else None, 0)
        if not load_optimizer_states:
            state.grad_scaler = None
        models = state.parts("model").values()

        def check() -> None:
            if waiting := self._windows.open(*map(_fsdp_root, models)):
                raise UsageError(
                    f"load_ckpt: {waiting} backward passes have not been used by a step; the first step after the load "
                    "would use their gradients. Pass last=True to the last backward and call optimizer_step before it."
                )

        optimizers = "restore" if load_optimizer_states else "skip"
        with CheckpointManager(load_dir, start_fresh=start_fresh) as manager, _own_options():
            manager.run_on_all(check, "loading")
            load = functools.partial(
                manager.load, state, strict=load_module_strict, optimizer=optimizers, key_map=key_map
            )
            report = load(which)
            if report is None:  # the directory may itself be a checkpoint in a foreign format
                half = (IncompleteCheckpointError,) if start_fresh == "if_none_committed" else ()
                with contextlib.suppress(CheckpointNotFoundError, *half):
                    # A name without a slash would mean a checkpoint of this run.
                    report = load(manager.url if "/" in manager.url else f"./{manager.url}")
        self.last_load = report
        if report is None:
            return None, {}
        for part in models:
            meta.restore_buffers(part)
        if key_map is None:
            self.global_step = state.step
        return report.url, report.client_state

    @checked("model", "tokenizer", "output_dir")
    def save_model(
        self,
        model: nn.Module,
        tokenizer: Any,
        output_dir: str,
        *,
        dtype: str = "keep",
        max_shard_size: str | int = "5GB",
        overwrite: bool = False,
    ) -> None:
        """Write the model, or a PEFT model's adapters, as a Hugging Face directory for `from_pretrained`.

        All ranks must call this; rank 0 writes. Each rank holds one full tensor at a time.

        Args:
            tokenizer: Any object with a `save_pretrained` method, or None.
            output_dir: A path, or anything else that fsspec opens.
            dtype: The dtype of floating-point tensors in the files: "bf16", "fp16" or "fp32". "keep" casts nothing.
            max_shard_size: Maximum size of one file: bytes, or a string such as "5GB".
            overwrite: Replace the export or checkpoint at `output_dir`. A directory that contains anything else is
                refused.

        Raises:
            SaveError: Some tensors of the model have no values, `from_pretrained` would not read all tensors, or a rank
                failed. All ranks raise the same error.
            CheckpointExistsError: `output_dir` already exists.
        """
        self._join()
        save_hf(
            model,
            str(output_dir),
            tokenizer=tokenizer,
            dtype=dtype,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
        )

    # ------------------------------------------------------------------ helpers

    def _training_state(self, model: nn.Module, optimizer: Optimizer | None, scheduler: Any, step: int) -> TrainState:
        scaler = self.grad_scaler(optimizer) if optimizer is not None else None
        return TrainState(model=model, optimizer=optimizer, scheduler=scheduler, grad_scaler=scaler, step=step)

    def _step(self, optimizer: Optimizer, divisor: float | None) -> bool:
        if isinstance(optimizer, MasterWeightOptimizer):
            # An optimizer created elsewhere may have its own `max_norm` and `norm_type`.
            stepped = optimizer.step(
                max_norm=self.max_norm or None,
                norm_type=self.norm_type if self.max_norm else None,
                divisor=divisor,
                error_if_nonfinite=self.error_if_nonfinite,
            )
            self.last_grad_norm = optimizer.last_grad_norm
            return stepped
        scaler = self.grad_scaler(optimizer)
        if scaler is not None and divisor is None:
            raise UsageError(
                f"optimizer_step would divide the gradients by the loss scale {scaler.scale:g}, but the loss was not "
                "multiplied by it. Run backward with strategy.backward(loss, model, optimizer)."
            )
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
        ]
        report = inspect_gradients(
            parameters, scaler=scaler, max_norm=self.max_norm, norm_type=self.norm_type, divisor=divisor
        )
        self.last_grad_norm = report.norm
        if not report.finite:
            if self.error_if_nonfinite:
                refuse_nonfinite(named_parameters_of(optimizer), report.norm)
            return False
        if report.factor != 1.0:
            scale_gradients(parameters, report.factor)
        optimizer.step()
        return True

    def _check_belongs(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Raise if the optimizer has no parameter of `model`, or if parameters were replaced since the last step."""
        known = self._checked.setdefault(optimizer, WeakKeyDictionary())
        names = known.get(model)
        if names is not None and set(names.values()) <= set(map(id, model.parameters())):
            return
        # A state dict contains the sharded parameters even while some of them are gathered.
        own = {name: id(tensor) for name, tensor in nn.Module.state_dict(model, keep_vars=True).items()}
        if names is None:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            names = known[model] = {name: tensor for name, tensor in own.items() if tensor in held}
            if not names:
                raise UsageError(
                    f"The optimizer has no parameter of {type(unwrap_model(model)).__name__}: a step would "
                    "not train that model. Is it another model's optimizer, or was it created before prepare_model? "
                    "Create it afterwards, with create_optimizer."
                )
        replaced = [name for name, tensor in names.items() if own.get(name, tensor) != tensor]
        if replaced:
            raise UsageError(
                f"{len(replaced)} parameters of {type(unwrap_model(model)).__name__} were replaced since the last "
                f"step, and the optimizer has the old ones: {first_few(replaced, 3)}. Load with "
                "load_state_dict(..., assign=False), which fills them, or create a new optimizer."
            )

    def _set_sync(self, root: nn.Module, sync: bool) -> None:
        if self._syncing.get(root, True) != sync and isinstance(root, FSDPModule):
            root.set_requires_gradient_sync(sync)
            root.set_is_last_backward(sync)
            self._syncing[root] = sync

    def _is_prepared(self, model: nn.Module) -> bool:
        inner = getattr(model, "base_model", None)  # LightRFT's actors and transformers models have this attribute
        return isinstance(model, FSDPModule) or (isinstance(inner, FSDPModule) and id(inner) != id(model))

    def _mesh_for(self, model: nn.Module | None, config: FSDPConfig) -> TrainingMesh:
        device_type = device_type_of(model, preferred=config.device)
        plan = plan_for(config, dist.get_world_size())
        key = (plan, device_type)
        if key not in self._mesh:  # models with equal plans share a mesh, because every mesh creates process groups
            self._mesh[key] = make_mesh(plan, device_type)
        return self._mesh[key]


@contextlib.contextmanager
def _own_options() -> Iterator[None]:
    """If an error advises options of `CheckpointManager.load`, add the names that they have in `load_ckpt`."""
    try:
        yield
    except (CheckpointMismatchError, UsageError) as error:
        names = {"strict=False": "load_module_strict=False", "optimizer='skip'": "load_optimizer_states=False"}
        own = [f"{there} is {here}" for there, here in names.items() if there in str(error).replace('"', "'")]
        if not own:
            raise
        raise type(error)(f"{error}\nIn load_ckpt, {' and '.join(own)}.") from error


def _fsdp_root(model: nn.Module) -> nn.Module:
    """Return the outermost sharded module in `model`, or `model` itself if there is none.

    For example, LightRFT's actors hold the sharded module in an attribute.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            return module
    return model
