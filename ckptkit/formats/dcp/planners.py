"""Planners for `dcp.save` and `dcp.load` that create and send no per-tensor objects, for our writer and reader.

    dcp.save(state, storage_writer=ckptkit.DCPWriter(url), planner=ckptkit.DCPSavePlanner())
    dcp.load(state, storage_reader=ckptkit.DCPReader(url), planner=ckptkit.DCPLoadPlanner())

With any other writer or reader they are torch's default planners. What torch's protocol asks of a planner stays: the
ranks agree on who writes what, every mismatch is found before a byte is read, a failure of one rank fails all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.planner_helpers import _init_state_dict
from torch.distributed.tensor import DTensor

from ckptkit.digests import signature_of
from ckptkit.errors import CheckpointMismatchError, SaveError
from ckptkit.formats.dcp.plan import ShardedPlan, plan_sharded
from ckptkit.formats.dcp.read import ReadPlan

__all__ = ["CachedSavePlanner", "DCPLoadPlanner", "DCPSavePlanner", "WriterMeta"]

_UNSETTLED = bytes(8)
_MIXED = "Some ranks plan with DCPSavePlanner, others do not: all must have the same planner."
_SAVE = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data", "lookup_object",
         "transform_object")  # fmt: skip
_LOAD = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "load_bytes", "resolve_tensor",
         "commit_tensor", "lookup_tensor", "transform_tensor")  # fmt: skip
Holders = dict[int, tuple[int, ...]]


@dataclass
class WriterMeta(StorageMeta):
    """What `DCPWriter` says of itself, so that a planner knows whom it plans for.

    Attributes:
        rank: In the group that saves; known once the writer is set up.
        collective: The ranks plan together.
    """

    rank: int = 0
    collective: bool = True


@dataclass(frozen=True, slots=True)
class _Share:
    """What a rank says of its state: 24 bytes, and hashes of its replicated keys where the coordinator lacks them."""

    digest: bytes
    settlement: bytes
    hashes: bytes | None

    def __iter__(self) -> Iterator[str]:
        raise SaveError(_MIXED)  # to torch's planner, which takes it for a dict of paths


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the coordinator answers a rank.

    Attributes:
        settlement: A hash of what all ranks hold, by which they tell the next time that nothing has changed.
        sends_table: The rank is the lowest of those whose keys are the same.
        holders: Which ranks hold the replicated keys that not all do, by hash; None: those of the save before.
    """

    rank: int
    world_size: int
    settlement: bytes
    sends_table: bool
    holders: Holders | None


class DCPSavePlanner(DefaultSavePlanner):
    """Plans a `dcp.save` on each rank alone: no object a tensor is sent.

    Keep one for a state, on all ranks alike: where their keys, shapes, dtypes, meshes and placements are those of the
    save before, nothing is agreed on anew. Replicas are written once, spread evenly over their holders. With another
    writer than `DCPWriter`, or without collectives, this is torch's `DefaultSavePlanner`.

    Objects must be plain data, or of classes allowed by `torch.serialization.add_safe_globals`; others are a SaveError.
    """

    def __init__(self) -> None:
        super().__init__()
        self.__dict__.update(_blank())

    def __getstate__(self) -> dict[str, Any]:
        """Without what was planned: it is about the memory of this process."""
        made = {**self.__dict__, **_blank()}
        return {name: value for name, value in made.items() if name not in ("plan", "global_plan", "metadata")}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._meta = storage_meta if isinstance(storage_meta, WriterMeta) and _is_itself(self, _SAVE) else None
        self._values: dict[str, Any] = state_dict
        self.is_coordinator = is_coordinator
        if self._meta is None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        if self._meta is not None and not self._meta.collective:
            super().set_up_planner(self._values, self._meta, self.is_coordinator)
            self._meta = None
        if self._meta is None:
            return super().create_local_plan()
        world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1  # a guess
        rank = self._meta.rank
        plan = plan_sharded(self._values, rank=rank, world_size=max(world_size, rank + 1), previous=self._sharded)
        self._sharded: ShardedPlan | None = plan
        is_known = plan.digest == self._agreed
        settlement = self._settlement if is_known else _UNSETTLED
        hashes = None if is_known else np.array(sorted(plan.replicated().values()), "<u8").tobytes()
        self.plan = SavePlan([], planner_data=_Share(plan.digest, settlement, hashes))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        shares = [plan.planner_data for plan in all_plans if isinstance(plan.planner_data, _Share)]
        if not shares:
            return super().create_global_plan(all_plans)
        if len(shares) < len(all_plans):
            raise SaveError(_MIXED)
        self.global_plan = [SavePlan([], planner_data=turn) for turn in self._turns(shares)]
        self.metadata = Metadata({})  # what was written says the writer
        return self.global_plan, self.metadata

    def _turns(self, shares: Sequence[_Share]) -> list[_Turn]:
        digests = [share.digest for share in shares]
        settlement = signature_of(b"".join(digests))[:8]
        first = {digest: rank for rank, digest in reversed(list(enumerate(digests)))}
        found = self._holders(shares, settlement)
        return [
            _Turn(rank, len(digests), settlement, first[digest] == rank, None if found is None else found[digest])
            for rank, digest in enumerate(digests)
        ]

    def _holders(self, shares: Sequence[_Share], settlement: bytes) -> dict[bytes, Holders] | None:
        """Return, by digest, who holds the replicated keys that not all ranks do; None where that is known."""
        counts = Counter(share.digest for share in shares)
        self._tables.update({s.digest: np.frombuffer(s.hashes, "<u8") for s in shares if s.hashes is not None})
        if len(counts) == 1:
            return {digest: {} for digest in counts}
        if {share.settlement for share in shares} == {settlement}:
            return None
        unknown = [rank for rank, share in enumerate(shares) if share.digest not in self._tables]
        if unknown:
            raise SaveError(
                f"Ranks {unknown} have saved with their DCPSavePlanner before, rank 0 with another one. Make a new "
                "planner on all ranks, or on none."
            )
        self._tables: dict[bytes, npt.NDArray[np.uint64]] = {digest: self._tables[digest] for digest in counts}
        weights = np.concatenate([np.full(len(t), counts[d], np.int64) for d, t in self._tables.items()])
        hashes, inverse = np.unique(np.concatenate(list(self._tables.values())), return_inverse=True)
        partial = hashes[np.bincount(inverse, weights, len(hashes)) != len(shares)]
        own = {digest: table[np.isin(table, partial)].tolist() for digest, table in self._tables.items()}
        ranks: dict[int, list[int]] = {}
        for rank, share in enumerate(shares):
            for key in own[share.digest]:
                ranks.setdefault(key, []).append(rank)
        return {digest: {key: tuple(ranks[key]) for key in keys} for digest, keys in own.items()}

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        turn, plan = new_plan.planner_data, self._sharded
        if not isinstance(turn, _Turn) or plan is None:
            return super().finish_plan(new_plan)
        holders = plan.holders
        if turn.holders is not None:
            names = {key: name for name, key in plan.replicated().items()} if turn.holders else {}
            holders = {names[key]: ranks for key, ranks in turn.holders.items()}
        plan = plan.placed(rank=turn.rank, world_size=turn.world_size, holders=holders)
        plan = replace(plan, settled=() if turn.sends_table else (plan.digest,))
        self._sharded, self._agreed, self._settlement = plan, plan.digest, turn.settlement
        self.plan = replace(new_plan, planner_data=plan)
        return self.plan


def _blank() -> dict[str, Any]:
    """The planner's own state before its first save."""
    return {"_meta": None, "_values": {}, "_sharded": None, "_agreed": b"", "_settlement": _UNSETTLED, "_tables": {}}


class DCPLoadPlanner(DefaultLoadPlanner):
    """Plans a `dcp.load` by columns. With another reader than `DCPReader` this is torch's `DefaultLoadPlanner`.

    Args:
        allow_partial_load: Keys that the checkpoint lacks are left as they are. Otherwise they are an error, listed
            in full with all else that does not fit, before any rank reads.
    """

    def __init__(self, *, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self.reads: ReadPlan | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.reads = None
        source: Any = None if metadata is None else metadata.state_dict_metadata
        self._source = source if getattr(source, "is_plannable", False) and _is_itself(self, _LOAD) else None
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
        try:
            reads: ReadPlan = self._source.plan(self.original_state_dict, strict=not self.allow_partial_load)
        except CheckpointMismatchError as error:
            if not self._source.is_foreign:
                raise
            return self._by_old_keys(error)
        if reads.missing and self._source.is_foreign:
            return self._by_old_keys(None)
        self.reads = reads
        return LoadPlan([])

    def _by_old_keys(self, error: CheckpointMismatchError | None) -> LoadPlan:
        """Let torch look whether these are the keys that its versions before 2.4 gave."""
        super().set_up_planner(self.original_state_dict, self.metadata, self.is_coordinator)
        try:
            return super().create_local_plan()
        except (RuntimeError, ValueError) as torchs:
            raise (error or torchs) from torchs


def _is_itself(planner: object, steps: Sequence[str]) -> bool:
    """Whether no subclass takes part in the planning: what it does must not be passed over."""
    ours = DCPSavePlanner if isinstance(planner, DCPSavePlanner) else DCPLoadPlanner
    return all(getattr(type(planner), step) is getattr(ours, step) for step in steps)


def _holds_meta(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta
    if isinstance(value, Mapping):
        return any(map(_holds_meta, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_meta, value))


class CachedSavePlanner(DefaultSavePlanner):
    """torch's plan caching, with a key that sees every change: a dtype or a placement, not only names and sizes.

    Args:
        name: Of the state that is saved: states saved by turns need a name each, to keep a plan each.
    """

    _structures: dict[str, tuple[Any, ...]] = {}  # noqa: RUF012 - like torch's own caches, of the process

    def __init__(self, name: str = "default", **options: Any) -> None:
        super().__init__(enable_plan_caching=True, **options)
        self._cached_plans_key = f"{type(self).__qualname__}:{name}"

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        key = self._cached_plans_key
        structure = tuple(_structure(name, value) for name, value in self.state_dict.items())
        changed = self._structures.get(key) != structure
        self._structures[key] = structure
        if plan.usable or not changed:
            return plan
        self._pending_local_plan = self.plan
        return self.plan

    def _create_global_plan_with_caching(
        self, all_plans: list[SavePlan]
    ) -> tuple[list[SavePlan], list[SavePlan], Metadata]:
        delta, plans, metadata = super()._create_global_plan_with_caching(all_plans)
        # torch compares the new plans with the old by name and size alone: once any changed, all get theirs.
        return (plans if any(plan.usable for plan in all_plans) else delta), plans, metadata


def _structure(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, DTensor):
        return (name, value.dtype, value.device_mesh, tuple(value.placements))
    return (name, value.dtype) if isinstance(value, torch.Tensor) else (name,)
