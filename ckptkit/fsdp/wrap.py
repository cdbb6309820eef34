"""Wraps a model with FSDP2 (`shard`), or raises an error that explains why this is impossible."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ckptkit.arguments import wrong
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.errors import UsageError
from ckptkit.formats.dcp.fsdp_units import keep_fp32_gradients
from ckptkit.formats.dcp.host_bytes import dtype_name
from ckptkit.fsdp.config import BackwardPrefetch, FSDPConfig
from ckptkit.fsdp.mesh import ParallelPlan, TrainingMesh, device_type_of, ensure_process_group, make_mesh, plan_for
from ckptkit.fsdp.precision import (
    check_unit_dtypes,
    mixed_precision_policy,
    offload_policy,
    set_storage_dtype,
    storage_dtype,
)
from ckptkit.fsdp.tensor_parallel import TPPlan, apply_tensor_parallel
from ckptkit.fsdp.units import ROOT, VISION_NAMES, Policy, Units, plan_units, policy_of
from ckptkit.fsdp.units import blocks as blocks_of
from ckptkit.keymaps.wrappers import without_infixes
from ckptkit.units import first_few

logger = logging.getLogger(__name__)
M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
_INNER = ("module", "_orig_mod", "_checkpoint_wrapped_module")


class NotShardableError(UsageError, TypeError):
    """The argument is not a module that FSDP2 can shard."""


def shard(
    model: M,
    config: FSDPConfig | None = None,
    *,
    mesh: TrainingMesh | DeviceMesh | None = None,
    policy: Policy | None = None,
    tp_plan: TPPlan | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    is_training: bool = True,
) -> M:
    """Shard `model` in place and return it. All ranks must call this.

    A model that is already sharded is returned unchanged, with a warning. If `config.enable_fsdp` is False, every model
    is returned unchanged. The steps:

    1. Broadcast rank 0's values (`sync_module_states`).
    2. For training, cast parameters to their storage dtype.
    3. Apply tensor parallelism.
    4. Apply activation checkpointing (for training) and compilation to each block.
    5. Call fully_shard from the innermost unit to the root.

    Args:
        config: The settings for sharding (default: `FSDPConfig()`).
        mesh: The ranks to shard over. The default is all ranks, arranged by `config`. A plain DeviceMesh is used as the
            data-parallel mesh.
        policy: A function that takes the model and returns the names of the modules that become units. Overrides the
            policy in `config`.
        tp_plan: A mapping from module globs to tensor-parallel styles (default: the model's own plan).
        ignored_params: Parameters that FSDP ignores, in addition to those that `config.ignored_params` names.
        shard_placement_fn: A function that takes a parameter and returns the dimension to shard, for example
            `Shard(1)`. If it returns None, dimension 0 is sharded. The size of any other dimension must be divisible by
            the number of ranks.
        is_training: False computes in the stored dtype and does not reduce gradients.

    Raises:
        NotShardableError: `model` is not a module, or FSDP1 has already wrapped the model or a part of it.
        UsageError: A parameter, unit, size or plan cannot be used. The message says which, and why.
    """
    config = config or FSDPConfig()
    given: object = model
    if not isinstance(given, nn.Module):
        raise NotShardableError(f"shard() takes a torch.nn.Module, found {type(given).__name__}.")
    if isinstance(given, FSDPModule):
        logger.warning("%s is already sharded; shard() did not change it.", _class_name(model))
        return model
    if not config.enable_fsdp:
        return model
    mesh = _mesh(model, mesh, config)

    def planned() -> tuple[Units, frozenset[str]]:
        ignored = _ignored(model, config.ignored_params, ignored_params)
        _check_model(model, ignored)
        _check_placements(model, ignored, shard_placement_fn, mesh)
        vision = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in VISION_NAMES]
        exclude = (*config.exclude, *(vision if config.mixed_modal else ()))
        units = plan_units(model, policy or policy_of(config, model), exclude=exclude, heads=config.wrap_lm_head)
        return units, ignored

    with contextlib.closing(Coordinator()) as coordinator:
        units, ignored = coordinator.run_on_all(planned, "sharding the model")
    device_type = mesh.data.device_type
    managed = {name: parameter for name, parameter in model.named_parameters() if name not in ignored}
    if config.sync_module_states:
        sync_module_states(model, device_type, ignored=ignored)
    elif mesh.plan.replicate > 1:
        _warn_of_different_values(
            managed,
            "sync_module_states=False keeps them: the replicas would diverge. Load the same values on all ranks, or "
            "set sync_module_states=True.",
        )
    if ignored:
        _warn_of_ignored(model, ignored, mesh, is_training)
    dtype = storage_dtype(config)
    if dtype is not None and is_training:
        set_storage_dtype(managed.values(), dtype)
    policies = _precision_policies(model, units, mesh.data, config, is_training, ignored)
    if mesh.tp is not None:
        apply_tensor_parallel(model, mesh.tp, tp_plan)
    blocks = _block_modules(model, units)
    if config.activation_checkpointing and is_training:
        checkpoint_blocks(model, blocks)
    if config.compile:
        for block in blocks:  # FSDP's hooks stay outside the graph, and FQNs don't change
            backend = config.compile if isinstance(config.compile, str) else "inductor"
            block.forward = torch.compile(block.forward, backend=backend)
    _fully_shard(model, units, policies, mesh.data, config, ignored, shard_placement_fn)
    if config.precision == "master" and is_training and policies[-1].reduce_dtype == torch.float32:
        keep_fp32_gradients(model)
    _configure_units(model, units, mesh.data, config)
    logger.debug("FSDP units of %s:\n%s", _class_name(model), "\n".join(" + ".join(group) for group in units))
    return model


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of DistributedDataParallel, torch.compile and activation checkpointing.

    A wrapper is a module whose only child is named "module", "_orig_mod" or "_checkpoint_wrapped_module".
    """
    while True:
        held = {**model._modules, **model._parameters, **model._buffers}
        inner = next((m for name, m in held.items() if name in _INNER and isinstance(m, nn.Module)), None)
        if inner is None or len(held) > 1:  # if it has siblings, `module` is just a part of the model
            return model
        model = inner


def sync_module_states(model: nn.Module, device_type: str, *, ignored: Set[str] = frozenset()) -> None:
    """Broadcast rank 0's parameters and buffers. All ranks must call this.

    Meta tensors and the parameters named in `ignored` are skipped.

    Raises:
        UsageError: The ranks have different models. Nothing was sent.
    """
    if dist.get_world_size() == 1:
        return
    tensors = {
        name: tensor.detach()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if not isinstance(tensor, DTensor) and name not in ignored
    }
    _check_same(tensors)
    for tensor in tensors.values():
        if tensor.is_meta or tensor.numel() == 0:
            continue
        # Move CPU tensors to the accelerator first, because the group may have no backend for the CPU.
        moved = tensor.to(device_type).resolve_conj().resolve_neg().contiguous()
        # Send bytes, because some backends lack some dtypes (gloo has no float8, nccl no bool in some versions).
        dist.broadcast(moved.reshape(-1).view(torch.uint8), 0)
        if moved is not tensor:
            tensor.copy_(moved)


def _ignored(model: nn.Module, globs: Sequence[str], given: Collection[nn.Parameter] | None) -> frozenset[str]:
    """Return the names of the parameters that FSDP ignores, including all names of tied parameters."""
    every = dict(model.named_parameters(remove_duplicate=False))
    if given is not None and (isinstance(given, (torch.Tensor, str, Mapping)) or not isinstance(given, Iterable)):
        raise wrong("ignored_params", given, "a set of the model's parameters; names go into FSDPConfig.ignored_params")
    chosen = list(given or ())
    held = {id(parameter) for parameter in every.values()}
    for parameter in chosen:
        if not isinstance(parameter, nn.Parameter):
            raise wrong("an item of ignored_params", parameter, "a parameter of the model")
        if id(parameter) not in held:
            raise UsageError(
                f"ignored_params contains a parameter of shape {list(parameter.shape)} that {_class_name(model)} does "
                "not have. Was the model changed or copied since?"
            )
    for glob in globs:
        found = [parameter for name, parameter in every.items() if fnmatch.fnmatchcase(without_infixes(name), glob)]
        if not found:
            raise UsageError(f"ignored_params contains {glob!r}, which matches no parameter of {_class_name(model)}.")
        chosen += found
    ignored = set(map(id, chosen))
    return frozenset(name for name, parameter in every.items() if id(parameter) in ignored)


def _warn_of_ignored(model: nn.Module, ignored: Set[str], mesh: TrainingMesh, is_training: bool) -> None:
    parameters = {name: model.get_parameter(name) for name in sorted(ignored)}
    if dist.get_world_size() > 1:
        _warn_of_different_values(
            parameters, "ignored_params keeps them. Load the same values, unless each rank should have its own."
        )
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    if trained and is_training and mesh.data.size() > 1 and dist.get_rank() == 0:
        logger.warning(
            "ignored_params has trainable parameters (%s): FSDP2 does not reduce their gradients over the %d ranks. "
            "Reduce them yourself, as docs/training.md shows, or freeze them.",
            first_few([*map(without_infixes, trained)], 1),
            mesh.data.size(),
        )


def _warn_of_different_values(parameters: Mapping[str, torch.Tensor], consequence: str) -> None:
    """Warn if ranks have different values of a parameter. All ranks must call this."""
    # Compare sums as strings, so that NaN equals NaN and no rank has to send a whole parameter.
    mine = [
        (name, repr(parameter.detach().sum(dtype=torch.float64).item()))
        for name, parameter in parameters.items()
        if not parameter.is_meta and not isinstance(parameter, DTensor) and parameter.is_floating_point()
    ]
    everyone = _gathered(mine)
    for rank, theirs in enumerate(everyone):
        different = [name for (name, value), other in zip(everyone[0], theirs, strict=False) if (name, value) != other]
        if different and dist.get_rank() == 0:
            logger.warning(
                "Ranks 0 and %d hold different values of %r and %d more parameters, and %s",
                rank,
                different[0],
                len(different) - 1,
                consequence,
            )
            return


def _check_same(tensors: Mapping[str, torch.Tensor]) -> None:
    mine = [
        f"{name!r} {list(tensor.shape)} {dtype_name(tensor.dtype)}{' (meta)' if tensor.is_meta else ''}"
        for name, tensor in tensors.items()
    ]
    everyone = _gathered(mine)
    for rank, theirs in enumerate(everyone):
        for first, other in zip_longest(everyone[0], theirs, fillvalue="no more tensors"):
            if first != other:
                raise UsageError(
                    f"The ranks hold different models: rank 0 has {first}, rank {rank} has {other}. Build the same "
                    "model on every rank."
                )


def _gathered(mine: T) -> list[T]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _check_model(model: nn.Module, ignored: Set[str]) -> None:
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise NotShardableError(
                f"{name or type(module).__name__!r} is an FSDP1 FullyShardedDataParallel; FSDP2 can't shard it again. "
                "Pass the plain module. To read its checkpoints, see `ckptkit convert --help`."
            )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 and name not in ignored:
            raise UsageError(
                f"Parameter {name!r} is a scalar; FSDP2 shards dimension 0, so it needs one. "
                "Make it a tensor of shape [1], or a buffer if it isn't trained."
            )


def _check_placements(
    model: nn.Module,
    ignored: Set[str],
    place: Callable[[nn.Parameter], Shard | None] | None,
    mesh: TrainingMesh,
) -> None:
    if place is None:
        return
    if not callable(place):
        raise wrong("shard_placement_fn", place, "a function of a parameter that returns Shard(dim) or None")
    for name, parameter in model.named_parameters():
        found = None if name in ignored else place(parameter)
        if found is None:
            continue
        if not isinstance(found, Shard):
            raise UsageError(
                f"shard_placement_fn returned {found!r} for {name!r}, expected torch.distributed.tensor.Shard or None."
            )
        shape, ranks = list(parameter.shape), mesh.data.size(-1)
        if not -len(shape) <= found.dim < len(shape):
            raise UsageError(f"shard_placement_fn returned {found} for {name!r}, which has shape {shape}.")
        # Tensor parallelism may split this dimension later. If the smaller size is not divisible, torch raises.
        if found.dim % len(shape) > 0 and shape[found.dim] % ranks:
            raise UsageError(
                f"shard_placement_fn returned {found} for {name!r} of shape {shape}: FSDP2 shards dimensions other "
                f"than 0 evenly only, and {shape[found.dim]} is not divisible by {ranks}. Return None for it."
            )


def _mesh(model: nn.Module, mesh: TrainingMesh | DeviceMesh | None, config: FSDPConfig) -> TrainingMesh:
    if isinstance(mesh, TrainingMesh):
        return mesh
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        if mesh.ndim > 2 or (mesh.ndim == 2 and "tp" in names):
            raise UsageError(
                f"A DeviceMesh for shard() has one dimension (shard) or two (replicate, shard); this one has "
                f"{mesh.ndim}: {list(names)}. Pass its data-parallel part, or a TrainingMesh."
            )
        shape = tuple(mesh.mesh.shape)
        plan = ParallelPlan(replicate=shape[0] if mesh.ndim == 2 else 1, shard=shape[-1])
        return TrainingMesh(plan, mesh, mesh)
    device_type = device_type_of(model, preferred=config.device)
    ensure_process_group(device_type)
    return make_mesh(plan_for(config, dist.get_world_size()), device_type)


def _precision_policies(
    model: nn.Module, units: Units, mesh: DeviceMesh, config: FSDPConfig, is_training: bool, ignored: Set[str]
) -> list[MixedPrecisionPolicy]:
    """Return each unit's precision policy, after checking that FSDP2 can gather and reduce the unit as one buffer."""
    taken = {id(model.get_parameter(name)) for name in ignored}
    policies = []
    for group in units:
        mine: list[tuple[str, nn.Parameter]] = []  # the parameters that are in no inner unit
        for name in group:
            for inner, parameter in model.get_submodule(name).named_parameters():
                if id(parameter) not in taken:
                    taken.add(id(parameter))
                    mine.append((f"{name}.{inner}" if name else inner, parameter))
        trained = next(((name, parameter.dtype) for name, parameter in mine if parameter.requires_grad), ("", None))
        policy = mixed_precision_policy(config, is_root=group == ROOT, is_training=is_training, stored=trained[1])
        check_unit_dtypes(" + ".join(group), mine, policy)
        reduced = policy.reduce_dtype or policy.param_dtype or trained[1]
        divided = config.gradient_divide_factor is not None and mesh.size(-1) == 1
        if divided and trained[1] is not None and reduced not in (torch.float32, torch.bfloat16):
            raise UsageError(
                f"gradient_divide_factor={config.gradient_divide_factor}: the gradient of {trained[0]!r} is reduced in "
                f"{str(reduced).removeprefix('torch.')}, and torch applies the factor twice to this dtype if a "
                "parameter is not sharded. Use reduce_dtype='fp32', or shard over several ranks."
            )
        policies.append(policy)
    return policies


def _block_modules(model: nn.Module, units: Units) -> list[nn.Module]:
    names = [name for group in units for name in group if name] or blocks_of(model)
    found = [model.get_submodule(name) for name in names]
    # Embeddings and heads have no activations worth recomputing, and they gain nothing from compilation.
    return [module for module in found if next(module.children(), None) is not None] or [model]


def checkpoint_blocks(model: Any, modules: Sequence[nn.Module]) -> None:
    """Recompute the activations of `modules` in backward. transformers models use their own implementation.

    This replaces the forward method, not the module, because a wrapper module would add its name to every FQN.
    """
    if getattr(model, "supports_gradient_checkpointing", False):
        # transformers knows what must not run twice, such as filling a key-value cache.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for module in modules:
        module.forward = functools.wraps(module.forward)(functools.partial(_recomputed, module, module.forward))


def _recomputed(module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _fully_shard(
    model: nn.Module,
    units: Units,
    policies: list[MixedPrecisionPolicy],
    mesh: DeviceMesh,
    config: FSDPConfig,
    ignored: Set[str],
    place: Callable[[nn.Parameter], Shard | None] | None,
) -> None:
    wrap = functools.partial(
        fully_shard,
        mesh=mesh,
        offload_policy=offload_policy(config, mesh.device_type),
        shard_placement_fn=place,
        # Look the parameters up now, because tensor parallelism has replaced some.
        ignored_params={model.get_parameter(name) for name in ignored} or None,
    )
    kept = _last_block(model, units) if config.keep_last_block else None
    for group, policy in zip(units[:-1], policies[:-1], strict=True):
        members = [model.get_submodule(name) for name in group]
        if any(isinstance(member, FSDPModule) for member in members):
            continue
        wrap(
            members[0] if len(members) == 1 else members,
            reshard_after_forward=False if kept in members else config.reshard,
            mp_policy=policy,
        )
    # Always wrap the root, because parameters outside all units would never be synchronized. FSDP2's default (None)
    # keeps the root gathered after forward, because backward needs it first.
    root = config.reshard_after_forward
    wrap(model, reshard_after_forward=False if root is None and not config.reshard else root, mp_policy=policies[-1])


def _last_block(model: nn.Module, units: Units) -> nn.Module | None:
    inner = {name for group in units[:-1] for name in group}
    found = [m for name, m in model.named_modules() if name in inner and next(m.children(), None) is not None]
    return found[-1] if found else None


def _configure_units(model: nn.Module, units: Units, mesh: DeviceMesh, config: FSDPConfig) -> None:
    _set_prefetch(model, units, config)
    for unit in [module for module in model.modules() if isinstance(module, FSDPModule)]:
        _set_reduction(unit, mesh, config)
        for name in config.forward_methods:
            if callable(getattr(unit, name, None)):
                register_fsdp_forward_method(unit, name)
    if config.mixed_modal:
        _fill_unused_gradients(model)


def _set_reduction(unit: FSDPModule, mesh: DeviceMesh, config: FSDPConfig) -> None:
    factor = config.gradient_divide_factor
    if factor is not None:
        unit.set_gradient_divide_factor(float(factor))
    # gloo has no reduction that multiplies and sums, so request plain sums. But if the shard size is 1 and a factor is
    # set, torch already uses plain sums, and the request would make it divide by the factor twice.
    sums = config.force_sum_reduction_for_comms or (factor is not None and mesh.device_type == "cpu")
    if sums and not (factor is not None and mesh.size(-1) == 1):
        unit.set_force_sum_reduction_for_comms(True)


def _set_prefetch(model: nn.Module, units: Units, config: FSDPConfig) -> None:
    """Set the units that each unit prefetches, if they differ from FSDP2's default."""
    single = {model.get_submodule(group[0]) for group in units if len(group) == 1}
    forward = list(dict.fromkeys(_in_order(model, single, backward=False)))
    backward = list(dict.fromkeys(_in_order(model, single, backward=True)))
    for index, unit in enumerate(forward if config.forward_prefetch else ()):
        if following := forward[index + 1 :][: int(config.forward_prefetch)]:
            unit.set_modules_to_forward_prefetch(following)
    if config.backward_prefetch is BackwardPrefetch.NO_PREFETCH:
        for unit in backward:
            unit.set_modules_to_backward_prefetch([unit])  # replaces the default; the unit itself is already gathered
    elif isinstance(config.backward_prefetch, int):
        for index, unit in enumerate(backward):
            # An empty list would mean the default, so the last unit gets itself.
            unit.set_modules_to_backward_prefetch(backward[index + 1 :][: config.backward_prefetch] or [unit])


def _in_order(module: nn.Module, units: Set[nn.Module], *, backward: bool) -> Iterator[FSDPModule]:
    """Yield the modules in `module` that are in `units`, in the order of their registration (reversed for backward)."""
    if module in units and isinstance(module, FSDPModule):
        yield module
    children = list(module.children())
    for child in reversed(children) if backward else children:
        yield from _in_order(child, units, backward=backward)


def _fill_unused_gradients(root: Any) -> None:
    """Let ranks skip different modules of the root unit in the same step.

    FSDP2 reduces only the gradients that exist. If a rank lacks some gradients, its buffer has a different size, and
    the reduction hangs. So this replaces missing gradients with zeros.
    """
    if hasattr(root, "set_reduce_scatter_unused_params"):
        root.set_reduce_scatter_unused_params(True)
        return
    # torch < 2.13: replace missing gradients in a hook that runs when the root unit's backward begins
    inner = [module for module in root.modules() if isinstance(module, FSDPModule) and module is not root]
    inside = {id(child) for module in inner for child in module.modules()}  # type: ignore[attr-defined]
    owners = [module for module in root.modules() if id(module) not in inside]

    def fill(gradient: torch.Tensor) -> torch.Tensor:
        # FSDP's own hook on the output has already run, so the parameters registered now are the gathered ones.
        for owner in owners:
            for parameter in owner.parameters(recurse=False):
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return gradient

    def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(fill)  # type: ignore[no-untyped-call]

    root.register_forward_hook(after_forward)


def _class_name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")
