"""Saves and loads a sharded state in one call, with the steps of the manager and `DCPWriter`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from ckptkit.catalog.entry import Catalog
from ckptkit.formats.dcp.index import write_index
from ckptkit.formats.dcp.plan import ShardedPlan, plan_sharded
from ckptkit.formats.dcp.read import ReadPlan, plan_read
from ckptkit.formats.own.reader import open_manifest
from ckptkit.formats.own.record import FileRecord
from ckptkit.storage.local import LocalStore
from ckptkit.storage.store import Store
from tests.formats.dcp_states import differences
from tests.formats.interop_cases import blank

Place = Store | str | os.PathLike[str]
Gather = Callable[[Any], "list[Any] | None"]


def all_gather(data: bytes) -> list[bytes]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, data)
    return found


def gather(data: bytes) -> list[bytes] | None:
    found = all_gather(data)
    return found if dist.get_rank() == 0 else None


def write_alone(state_dict: Mapping[str, Any], place: Place, **options: Any) -> Mapping[str, FileRecord]:
    """Save a state from one process, by default without fsync."""
    options = {"sync": False, "gather": lambda part: [part], "all_gather": lambda part: [part], **options}
    files, _ = write_sharded(state_dict, _store(place), **options)
    assert files is not None
    return files


def catalog_of(place: Place) -> Catalog:
    """Open a checkpoint by its manifest."""
    found = open_manifest(_store(place))
    assert found is not None
    return found


def read_alone(place: Place, state_dict: dict[str, Any], **options: Any) -> ReadPlan:
    """Fill a state in place with this rank's part of the checkpoint."""
    return read_sharded(catalog_of(place), _store(place), state_dict, **options)


def assert_reads(place: Place, made: dict[str, Any]) -> None:
    """Read a checkpoint into a blank copy of a state, which must become equal to it on this rank."""
    target = blank(made)
    read_alone(place, target)
    assert differences(target, made) == []


def _store(place: Place) -> Store:
    return LocalStore(place) if isinstance(place, (str, os.PathLike)) else place


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
    """Plan, write and index a state. All ranks must call it. Returns the plan, and the files on rank 0 only."""
    plan = plan_sharded(state_dict, rank=rank, world_size=world_size, previous=previous)
    plan = plan.settle(all_gather(plan.signature), all_gather)
    part = plan.write(store, sync=sync, workers=workers)
    parts = gather(part)
    if parts is None:
        return None, plan
    return write_index(parts, store, save_id=save_id, sync=sync), plan


def read_sharded(catalog: Catalog, store: Store, state_dict: dict[str, Any], **options: Any) -> ReadPlan:
    """Fill a state in place; `options` are those of `plan_read`."""
    plan = plan_read(catalog, store, state_dict, **options)
    plan.run()
    return plan
