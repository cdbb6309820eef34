"""Saves and loads a sharded state in one call, from the steps that the manager and `DCPWriter` go through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ckptkit.catalog.entry import Catalog
from ckptkit.formats.dcp.index import write_index
from ckptkit.formats.dcp.plan import ShardedPlan, plan_sharded
from ckptkit.formats.dcp.read import ReadReport, plan_read
from ckptkit.formats.own.record import FileRecord
from ckptkit.storage.store import Store

Gather = Callable[[bytes], "list[bytes] | None"]


def write_sharded(
    state_dict: Mapping[str, Any],
    store: Store,
    *,
    gather: Gather,
    all_gather: Callable[[bytes], list[bytes]],
    rank: int = 0,
    world_size: int = 1,
    previous: ShardedPlan | None = None,
    sync: bool = True,
    workers: int = 0,
    save_id: str = "",
) -> tuple[Mapping[str, FileRecord] | None, ShardedPlan]:
    """Plan, write and index a state. All ranks must call it. Returns the files on rank 0 only, and the plan."""
    plan = plan_sharded(state_dict, rank=rank, world_size=world_size, previous=previous)
    plan = plan.settle(all_gather(plan.signature), all_gather)
    part = plan.write(store, sync=sync, workers=workers)
    parts = gather(part.part)
    if parts is None:
        return None, plan
    return write_index(parts, store, save_id=save_id, sync=sync), plan


def read_sharded(
    catalog: Catalog,
    store: Store,
    state_dict: dict[str, Any],
    *,
    report: Callable[[str, float, int], None] | None = None,
    **options: Any,
) -> ReadReport:
    """Fill a state in place; `options` are those of `plan_read`."""
    return plan_read(catalog, store, state_dict, **options).run(report)
