"""Validates batch sizes, seeds random generators, and sets the number of ranks that share a model."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from torch import nn

from ckptkit.errors import UsageError
from ckptkit.fsdp.config import FSDPConfig, ShardingStrategy
from ckptkit.fsdp.mesh import auto_shard_size


def accumulation_steps(train_batch_size: int | None, *, micro: int, world_size: int) -> int:
    """Return how many backward passes each rank makes per optimizer step.

    Raises:
        UsageError: The sizes do not divide evenly.
    """
    check_batch_sizes(train_batch_size, micro=micro)
    if train_batch_size is None:
        return 1
    if train_batch_size % (micro * world_size):
        raise UsageError(
            f"train_batch_size {train_batch_size} is not a multiple of micro_train_batch_size {micro} x {world_size} "
            f"data-parallel ranks = {micro * world_size}."
        )
    return train_batch_size // (micro * world_size)


def check_batch_sizes(train_batch_size: int | None, *, micro: int) -> None:
    """Raise UsageError unless both are positive numbers of samples. `train_batch_size` may be None."""
    for name, value in (("micro_train_batch_size", micro), ("train_batch_size", train_batch_size)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UsageError(f"{name} is {value!r}; it must be a number of samples, 1 or more.")


def set_seed(seed: int, *, offset: int = 0) -> None:
    """Seed the random generators of Python, numpy and torch (on all devices) with `seed` + `offset`.

    Raises:
        UsageError: `seed` is negative or not an integer.
    """
    import numpy as np

    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise UsageError(f"seed is {seed!r}; it must be a whole number, 0 or more.")
    seed = (seed + offset) % 2**64
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def configured(
    config: FSDPConfig,
    model: nn.Module,
    *,
    data_ranks: int,
    is_training: bool,
    shard_size: int | str | None,
    reshard_after_forward: bool | int | None,
) -> FSDPConfig:
    """Return `config` with the changes that `prepare_model`'s arguments make for one model.

    Raises:
        UsageError: `shard_size` does not divide the number of data-parallel ranks.
    """
    changes: dict[str, Any] = {}
    if reshard_after_forward is not None:
        changes["reshard_after_forward"] = reshard_after_forward
    if shard_size == "auto":
        shard_size = auto_shard_size(sum(parameter.numel() for parameter in model.parameters()), is_training)
    if shard_size is None:
        return dataclasses.replace(config, **changes) if changes else config
    keeps = config.reshard if reshard_after_forward is None else reshard_after_forward
    if shard_size in (-1, data_ranks):
        kind = ShardingStrategy.FULL_SHARD if keeps else ShardingStrategy.SHARD_GRAD_OP
        changes |= {"sharding_strategy": kind, "shard": "auto", "replicate": 1}
    elif not isinstance(shard_size, int) or shard_size < 1 or data_ranks % shard_size:
        raise UsageError(
            f"shard_size is {shard_size!r}; it must be -1, 'auto' or a divisor of the {data_ranks} data-parallel ranks."
        )
    else:
        kind = ShardingStrategy.HYBRID_SHARD if keeps else ShardingStrategy.HYBRID_SHARD_ZERO2
        changes |= {"sharding_strategy": kind, "shard": shard_size, "replicate": "auto"}
    return dataclasses.replace(config, **changes)
