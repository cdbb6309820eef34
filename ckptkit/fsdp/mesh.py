"""Arranges ranks into the mesh dimensions replicate, shard, cp and tp: computes the sizes and creates the meshes."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptkit.errors import UsageError
from ckptkit.fsdp.config import FSDPConfig, ShardingStrategy, Size

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


_BILLION = 10**9


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """The sizes of the replicate, shard, context-parallel (cp) and tensor-parallel (tp) dimensions, outermost first."""

    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def resolve(
        cls, world_size: int, *, replicate: Size = 1, shard: Size = "auto", tp: Size = 1, cp: Size = 1
    ) -> ParallelPlan:
        """Return the plan, with an "auto" size computed from `world_size` and the other sizes.

        Raises:
            UsageError: The product of the sizes is not `world_size`, or more than one size is "auto".
        """
        sizes = {"replicate": replicate, "shard": shard, "cp": cp, "tp": tp}
        open_sizes = [name for name, size in sizes.items() if size == "auto"]
        if len(open_sizes) > 1:
            raise UsageError(
                f"{' and '.join(open_sizes)} are both 'auto'; give at least one of them a number of ranks."
            )
        for name, size in sizes.items():
            if size != "auto" and size < 1:
                raise UsageError(f"{name} is {size}; it must be a number of ranks, 1 or more.")
        known = math.prod(size for size in sizes.values() if size != "auto")
        if known != world_size and (not open_sizes or world_size % known):
            text = " x ".join(f"{name}={size}" for name, size in sizes.items())
            reason = f"{world_size} is not a multiple of {known}" if open_sizes else f"Their product is {known}"
            raise UsageError(f"{text} does not fit a world size of {world_size}. {reason}.")
        for name in open_sizes:
            sizes[name] = world_size // known
        return cls(**sizes)  # type: ignore[arg-type]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.replicate * self.shard * self.cp * self.tp

    @property
    def dims(self) -> dict[str, int]:
        """The sizes of the mesh dimensions by name.

        "shard" includes cp. "replicate" and "tp" are present only if their size is greater than 1.
        """
        dims = {"shard": self.shard * self.cp}
        if self.replicate > 1:
            dims = {"replicate": self.replicate, **dims}
        if self.tp > 1:
            dims["tp"] = self.tp
        return dims


@dataclass(frozen=True, slots=True)
class TrainingMesh:
    """Holds a plan and its meshes.

    Attributes:
        root: The mesh with all dimensions of the plan. Its dimension "shard" includes cp.
        data: The mesh for fully_shard: `root` without the dimension "tp".
        tp, cp: The one-dimensional mesh of this rank's tp or cp group. None if the size is 1.
    """

    plan: ParallelPlan
    root: DeviceMesh
    data: DeviceMesh
    tp: DeviceMesh | None = None
    cp: DeviceMesh | None = None


def plan_for(config: FSDPConfig, world_size: int) -> ParallelPlan:
    """Return the mesh plan that `config` describes for `world_size` ranks.

    If `replicate` and `shard` of a HYBRID_* strategy are both "auto", parameters are sharded inside a node and
    replicated across nodes, as in FSDP1. All ranks must then call this, see `_ranks_per_node`.
    """
    replicate, shard = config.replicate, config.shard
    if config.sharding_strategy is ShardingStrategy.NO_SHARD:
        shard = 1
    elif not config.sharding_strategy.is_hybrid:
        replicate = 1
    elif replicate == "auto" and shard == "auto":
        local = _ranks_per_node(world_size)
        inside = config.tp * config.cp
        if local % inside:
            raise UsageError(
                f"{config.sharding_strategy.value} with 'auto' sizes shards inside nodes, but a node has {local} "
                f"ranks, not a multiple of tp={config.tp} x cp={config.cp} = {inside}. Give `shard` a number of ranks."
            )
        shard = local // inside
    return ParallelPlan.resolve(world_size, replicate=replicate, shard=shard, tp=config.tp, cp=config.cp)


def _ranks_per_node(world_size: int) -> int:
    """Return the number of ranks on each node.

    torchrun sets LOCAL_WORLD_SIZE. Other launchers (srun, Lightning's own) do not; the ranks then exchange the names of
    their hosts.
    """
    import torch.distributed as dist

    if (told := os.environ.get("LOCAL_WORLD_SIZE")) or not dist.is_initialized():
        return int(told or world_size)
    hosts: list[str] = [""] * world_size
    dist.all_gather_object(hosts, socket.gethostname())
    local = hosts.count(hosts[0])
    if world_size % local or any(len({*hosts[i : i + local]}) > 1 for i in range(0, world_size, local)):
        raise UsageError(
            "a HYBRID_* strategy with 'auto' sizes needs nodes with equal numbers of ranks, in the order of the nodes; "
            f"the ranks are on {', '.join(hosts[:16])}. Give `shard` a number of ranks."
        )
    return local


def auto_shard_size(numel: int, is_training: bool) -> int:
    """Return how many ranks should share a model of `numel` parameters; -1 means all ranks.

    For training, all ranks share the model. For inference, a model under 10e9 parameters is not sharded, and a model
    under 80e9 parameters is sharded over eight ranks, so that no gather crosses nodes if each node has eight ranks.
    """
    if is_training:
        return -1
    if numel < 10 * _BILLION:
        return 1
    return 8 if numel < 80 * _BILLION else -1


def configured(
    config: FSDPConfig,
    model: torch.nn.Module,
    *,
    data_ranks: int,
    is_training: bool,
    shard_size: int | str | None,
    reshard_after_forward: bool | int | None,
) -> FSDPConfig:
    """Return a copy of `config` in which the arguments of `prepare_model` replace settings.

    Raises:
        UsageError: `shard_size` does not divide the number of data-parallel ranks.
    """
    if reshard_after_forward is not None:
        config = dataclasses.replace(config, reshard_after_forward=reshard_after_forward)
    if shard_size == "auto":
        size = auto_shard_size(sum(parameter.numel() for parameter in model.parameters()), is_training)
        shard_size = -1 if data_ranks % size else size  # if groups of this size do not fit, use all ranks
    if shard_size is None:
        return config
    sizes: dict[str, Size]
    if shard_size in (-1, data_ranks):
        frees, keeps = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
        sizes = {"shard": "auto", "replicate": 1}
    elif isinstance(shard_size, int) and shard_size > 0 and data_ranks % shard_size == 0:
        frees, keeps = ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2
        sizes = {"shard": shard_size, "replicate": "auto"}
    else:
        raise UsageError(
            f"shard_size is {shard_size!r}; it must be -1, 'auto' or a divisor of the {data_ranks} data-parallel ranks."
        )
    return dataclasses.replace(config, sharding_strategy=frees if config.reshard else keeps, **sizes)  # type: ignore[arg-type]


def make_mesh(plan: ParallelPlan, device_type: str) -> TrainingMesh:
    """Return the meshes for `plan` over the default process group. All ranks must call this.

    Raises:
        UsageError: The group and the plan have different numbers of ranks. Nothing was communicated.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    ParallelPlan.resolve(dist.get_world_size(), **dataclasses.asdict(plan))  # checks that the product fits
    dims = plan.dims
    root = init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    data = root[tuple(name for name in dims if name != "tp")]
    cp = None
    if plan.cp > 1:
        # This mesh must be separate (with the same rank order), because fully_shard needs shard x cp as one dimension.
        whole = (plan.replicate, plan.shard, plan.cp, plan.tp)
        cp = init_device_mesh(device_type, whole, mesh_dim_names=("replicate", "shard", "cp", "tp"))["cp"]
    return TrainingMesh(plan, root, data, root["tp"] if plan.tp > 1 else None, cp)


def make_sample_mesh(device_type: str, *, inside: int) -> DeviceMesh:
    """Return this rank's 1-D mesh "dp", whose ranks have different samples. All ranks must call this.

    Groups of `inside` consecutive ranks work on the same samples.

    Raises:
        UsageError: `inside` does not divide the number of ranks. Nothing was communicated.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    world_size = dist.get_world_size()
    if world_size % inside:
        raise UsageError(
            f"tp x cp = {inside} ranks share one sample, but the world size {world_size} is not a multiple of it."
        )
    if inside == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("dp",))
    return init_device_mesh(device_type, (world_size // inside, inside), mesh_dim_names=("dp", "inside"))["dp"]


def device_type_of(model: torch.nn.Module | None, *, preferred: str = "auto") -> str:
    """Return the type of the device on which `model` will train.

    This is the first of the following that exists:

    1. `preferred`, if it is not "auto".
    2. The accelerator that the model's parameters are on.
    3. The machine's accelerator, if there is no process group yet or the group has a backend for the accelerator.
    4. The CPU.
    """
    import torch
    import torch.distributed as dist

    if preferred != "auto":
        return torch.device(preferred).type
    for tensor in model.parameters() if model is not None else ():
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device.type
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "cpu"
    if dist.is_initialized() and f"{accelerator.type}:" not in f"{dist.get_backend_config()}":
        return "cpu"
    return accelerator.type


def ensure_process_group(device_type: str, *, timeout: datetime.timedelta | None = None) -> bool:
    """Create the default process group if there is none. Return whether it was created.

    If torchrun has set its environment variables, the group contains all processes of the job. If not, it contains only
    this process.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return False
    backend = "gloo"
    if device_type != "cpu":
        # Add gloo for the CPU, because checkpoints and objects must not go through the accelerator.
        backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    return True
