"""Which rank writes which files of a plan, and what of the plan is left for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptkit.offline.plan import Plan

__all__ = ["restricted", "share_out"]


def share_out(plan: Plan, world_size: int) -> list[int]:
    """Return the rank that writes each file: the largest files first, each to who has least.

    What is published last goes to rank 0, which publishes.
    """
    late = set(plan.last)
    owners = [0] * len(plan.files)
    loads = [0] * world_size
    for index in sorted(range(len(plan.files)), key=lambda i: -plan.files[i].nbytes):
        if plan.files[index].path in late and not plan.files[index].path.endswith(".safetensors"):
            continue
        rank = loads.index(min(loads))
        owners[index] = rank
        loads[rank] += plan.files[index].nbytes
    return owners


def restricted(plan: Plan, kept: Sequence[int]) -> Plan:
    """Return the same plan with some of its files, and what lies in them. Files keep their order."""
    if len(kept) == len(plan.files):
        return plan
    renumbered = np.full(len(plan.files), -1, np.int32)
    renumbered[list(kept)] = np.arange(len(kept))
    placements = []
    for placement in plan.placements:
        rows = np.flatnonzero(renumbered[placement.files] >= 0)
        if len(rows):
            files = renumbered[placement.files[rows]]
            columns = (placement.starts[rows], placement.offsets[rows], placement.sizes[rows])
            placements.append(type(placement)(placement.tensor, files, *columns))
    return Plan(plan.catalog, tuple(plan.files[index] for index in kept), tuple(placements), plan.last)
