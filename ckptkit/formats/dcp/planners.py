"""Defines planners for `dcp.save` and `dcp.load` that neither create nor send an object per tensor.

    dcp.save(state, storage_writer=ckptkit.DCPWriter(url), planner=ckptkit.DCPSavePlanner())
    dcp.load(state, storage_reader=ckptkit.DCPReader(url), planner=ckptkit.DCPLoadPlanner())

With any other writer or reader, the planners behave like torch's default planners. The guarantees of torch's protocol
hold: the ranks agree on which rank writes what, every mismatch is found before a byte is read, and a failure on one
rank fails all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.planner_helpers import _init_state_dict

from ckptkit.errors import SaveError
from ckptkit.formats.dcp.plan import ShardedPlan, partial_holders, plan_sharded
from ckptkit.formats.dcp.read import ReadPlan

_MIXED = "Some ranks plan with DCPSavePlanner, others do not: all ranks must use the same planner."
_SAVE = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data", "lookup_object",
         "transform_object")  # fmt: skip
_LOAD = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "load_bytes", "resolve_tensor",
         "commit_tensor", "lookup_tensor", "transform_tensor")  # fmt: skip


@dataclass
class WriterMeta(StorageMeta):
    """Tells a planner that the storage writer is a `DCPWriter`.

    Attributes:
        rank: This process's rank in the process group that saves. Set by `set_up_storage_writer`.
        collective: True if the ranks plan together.
    """

    rank: int = 0
    collective: bool = True


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's message to the coordinator: the plan's digest, and the hashes of the rank's replicated keys."""

    digest: bytes
    hashes: bytes

    def __iter__(self) -> Iterator[str]:
        raise SaveError(_MIXED)  # torch's planner iterates over this field because it expects a dict


@dataclass(frozen=True, slots=True)
class _Turn:
    """The coordinator's answer to a rank.

    Attributes:
        sends_table: True if the rank must send its table of keys because no lower rank has the same keys.
        holders: The ranks that hold a replicated key, by the key's hash. Contains only the keys that this rank holds
            and at least one other rank lacks.
    """

    rank: int
    world_size: int
    sends_table: bool
    holders: dict[int, tuple[int, ...]]


class DCPSavePlanner(DefaultSavePlanner):
    """Plans a `dcp.save` on each rank separately, without sending an object per tensor.

    A tensor that several ranks hold is written once, and the writes are spread evenly over the ranks. With any writer
    other than `DCPWriter`, or without collectives, this planner behaves like torch's `DefaultSavePlanner`.

    Objects must be plain data, or instances of classes allowed by `torch.serialization.add_safe_globals`. Any other
    object raises a SaveError.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._sharded: ShardedPlan | None = None
        self._meta = (
            storage_meta if isinstance(storage_meta, WriterMeta) and is_itself(self, DCPSavePlanner, _SAVE) else None
        )
        if self._meta is None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            return
        self._values, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        if self._meta is not None and not self._meta.collective:
            super().set_up_planner(self._values, self._meta, self.is_coordinator)
            self._meta = None
        if self._meta is None:
            return super().create_local_plan()
        # This is the default group's size. The group that saves is not known here; `finish_plan` corrects the size.
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        rank = self._meta.rank
        plan = self._sharded = plan_sharded(self._values, rank=rank, world_size=max(world_size, rank + 1))
        self._values = {}
        hashes = np.array(sorted(plan.replicated().values()), "<u8").tobytes()
        return SavePlan([], planner_data=_Share(plan.digest, hashes))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        shares = [plan.planner_data for plan in all_plans if isinstance(plan.planner_data, _Share)]
        if not shares:
            return super().create_global_plan(all_plans)
        if len(shares) < len(all_plans):
            raise SaveError(_MIXED)
        digests = [share.digest for share in shares]
        first = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
        tables = [np.frombuffer(share.hashes, "<u8") for share in shares]
        partial = partial_holders(tables) if len(first) > 1 else {}
        turns = [
            _Turn(rank, len(shares), first[digest] == rank, {key: partial[key] for key in keys if key in partial})
            for rank, (digest, keys) in enumerate(zip(digests, (t.tolist() for t in tables), strict=True))
        ]
        return [SavePlan([], planner_data=turn) for turn in turns], Metadata({})  # the writer fills in the metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        turn, plan = new_plan.planner_data, self._sharded
        if not isinstance(turn, _Turn) or plan is None:
            return super().finish_plan(new_plan)
        self._sharded = None  # a planner that is no longer in use must not keep the tensors alive
        holders = {}
        if turn.holders:
            holders = {name: turn.holders[key] for name, key in plan.replicated().items() if key in turn.holders}
        plan = plan.placed(rank=turn.rank, world_size=turn.world_size, holders=holders)
        return replace(new_plan, planner_data=replace(plan, sends_table=turn.sends_table))


class DCPLoadPlanner(DefaultLoadPlanner):
    """Plans a `dcp.load` without creating an object per tensor.

    With any reader other than `DCPReader`, this planner behaves like torch's `DefaultLoadPlanner`.

    Args:
        allow_partial_load: If True, values whose keys are missing in the checkpoint stay unchanged. If False, an error
            that lists every mismatch is raised before any rank reads.
    """

    def __init__(self, *, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self.reads: ReadPlan | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.reads = None
        source: Any = None if metadata is None else metadata.state_dict_metadata
        self._source = (
            source if getattr(source, "is_plannable", False) and is_itself(self, DCPLoadPlanner, _LOAD) else None
        )
        if self._source is None:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        if _holds_meta(state_dict):
            _init_state_dict(state_dict)
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        if self._source is None:
            return super().create_local_plan()
        self.reads = self._source.plan(self.original_state_dict, strict=not self.allow_partial_load)
        return LoadPlan([])


def is_itself(made: object, ours: type, steps: Sequence[str]) -> bool:
    """Return whether `made` inherits all the methods in `steps` unchanged from `ours`."""
    return all(getattr(type(made), step) is getattr(ours, step) for step in steps)


def _holds_meta(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta
    if isinstance(value, Mapping):
        return any(map(_holds_meta, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_meta, value))
