"""One save, step by step: capture, plan, agree, write, index, commit. The same for FULL, SHARDED and LOCAL."""

from __future__ import annotations

import copy
import json
import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import xxhash

from ckptkit.checkpoint.report import PhaseClock
from ckptkit.checkpoint.run.commit import begin_save
from ckptkit.checkpoint.run.coordinator import Coordinator, Outcome
from ckptkit.checkpoint.save.hf_config import side_files
from ckptkit.checkpoint.save.replicas import Fingerprints, holding, part_ways, warn_of
from ckptkit.checkpoint.save.writers import ShardedTensors, TensorPlan, load_writers
from ckptkit.checkpoint.state.local_part import layout_of
from ckptkit.checkpoint.state.train_state import Captured, StateDictType, TrainState, capture
from ckptkit.checkpoint.state.values import Seen
from ckptkit.errors import UsageError
from ckptkit.formats.own.reader import OBJECTS_NAME
from ckptkit.formats.own.record import MANIFEST_NAME, CommitRecord, FileRecord, check_given
from ckptkit.storage.retry import patient

if TYPE_CHECKING:
    import torch

    from ckptkit.checkpoint.run.inventory import Inventory
    from ckptkit.checkpoint.run.lease import Lease
    from ckptkit.storage.store import Store

__all__ = ["Prepared", "SaveRequest", "Saver"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What the caller asked for.

    Attributes:
        metrics: Measured values; `best` is found by them.
        client_state: The caller's own JSON, kept in the commit record.
        overwrite: Replace a committed checkpoint of the same name, once the new one is complete.
        set_aside: What is in the way and no checkpoint gets another name: a load has passed over it, and said so.
        resumed_from: The checkpoint that the run went on from, for the record.
    """

    step: int
    state_dict_type: StateDictType
    tag: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    client_state: Any = None
    overwrite: bool = False
    set_aside: bool = False
    resumed_from: str | None = None


@dataclass(slots=True)
class Prepared:
    """A save that every rank has agreed to: what it writes, and the objects as they were at that moment.

    Attributes:
        side_files: On rank 0, what `index` writes beside the tensors.
        failure: What went wrong on this rank since: `publish` tells all ranks.
        staged: Copies of `plan.tensors`; None where nobody asked for them.
    """

    request: SaveRequest
    plan: TensorPlan
    objects: dict[str, Any]
    rank_objects: dict[str, Any]
    mesh: dict[str, Any] | None
    clock: PhaseClock
    side_files: Mapping[str, bytes] = field(default_factory=dict)
    failure: Exception | None = None
    staged: Sequence[torch.Tensor] | None = None


@dataclass(frozen=True, slots=True)
class _Proposal:
    """What one rank would save, before all have agreed."""

    captured: Captured
    prepared: Prepared
    prints: Fingerprints | None

    def message(self) -> Any:
        """Return what the other ranks must know of it."""
        request = self.prepared.request
        wanted = (request.step, request.tag, request.state_dict_type.value)
        return self.prepared.plan.signature, wanted, self.prints and self.prints.digests


class Saver:
    """Saves the states of one run below `root`. Plans are kept from save to save.

    Args:
        side_files: Files that go into every checkpoint (a tokenizer, say), by path; rank 0's are written.
        extra: JSON for the commit records' `extra`.
    """

    def __init__(
        self,
        root: Store,
        coordinator: Coordinator,
        *,
        sync: bool = True,
        max_shard_bytes: int = 5 * 10**9,
        lease: Lease | Callable[[], Lease] | None = None,
        objective: tuple[str, str] | None = None,
        side_files: Mapping[str, bytes] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self._root = root
        self._side_files = dict(side_files or {})
        self._extra = dict(extra or {})
        self._coordinator = coordinator
        self._lease = lease
        self._objective = objective
        self._sync = sync
        self._max_shard_bytes = max_shard_bytes
        self.seen: Inventory | None = None
        """What is known to be there after the last save, on rank 0, where looking again costs requests."""
        self._plans: dict[StateDictType, TensorPlan] = {}
        self._seen = Seen()
        load_writers()
        self._transfers: Any = None
        # Plain tensors that ranks differ in -> the rank whose copy is everybody's; None: not seen on any rank.
        self._keepers: dict[str, int] | None = None
        self._holdings: list[bytes] = []  # which plain tensors each rank had when they were compared one by one

    def prepare(
        self, state: TrainState, request: SaveRequest, *, stage: Callable[[Prepared], None] | None = None
    ) -> Prepared:
        """Capture and plan; all ranks agree. Nothing is written. All ranks must call it, in the training's thread.

        Args:
            stage: Sets `staged`, or `failure`; raises nothing. It runs while ranks agree, where that is likely to
                change nothing, and again where it did.

        Raises:
            RankFailedError: Some rank could not capture its state; the same on every rank.
            UsageError: Ranks want to save different steps.
        """
        clock = PhaseClock()
        made: list[_Proposal] = []
        self._open_transfers(request)

        def propose() -> Any:
            nonlocal request
            if not made:
                if self._coordinator.is_main:  # only rank 0's are written
                    check_given(request.metrics, request.client_state)
                # The record is written when training goes on.
                request = replace(request, client_state=copy.deepcopy(request.client_state))
            captured = (
                made[0].captured
                if made
                else capture(state, rank=self._coordinator.rank, step=request.step, seen=self._seen)
            )
            made.append(self._proposed(captured, state, request, clock, copied=stage is not None))
            return made[-1].message()

        with clock.phase("plan"):
            outcome = Outcome.of(propose)
        started, staging = clock.seconds(), 0.0

        def meanwhile() -> None:
            nonlocal staging
            if stage is not None and outcome.error is None and made[0].prepared.plan.reused:
                before = clock.seconds()
                stage(made[0].prepared)
                staging = clock.seconds() - before

        signatures, alike = self._exchanged(outcome, meanwhile)
        if not alike and self._found_differences(made[0]):
            signatures, _ = self._exchanged(Outcome.of(propose))
        prepared = made[-1].prepared
        before, prepared.plan = prepared.plan, prepared.plan.settle(signatures, self._all_gather)
        clock.add("agree", clock.seconds() - started - staging)
        self._plans[request.state_dict_type] = prepared.plan
        same = prepared.plan is before or prepared.plan.tensors is before.tensors
        if stage is not None and not (same and prepared.staged is not None):
            stage(prepared)
        return prepared

    @patient()
    def publish(self, prepared: Prepared, tensors: Sequence[torch.Tensor] | None = None) -> CommitRecord:
        """Write, and commit once every rank has written. All ranks must call it; another thread than the training's
        may.

        Args:
            tensors: Copies of `prepared.plan.tensors`; None writes the live ones.

        Raises:
            RankFailedError: Some rank failed; nothing was published. The same on every rank.
        """
        try:
            return self._published(prepared, tensors)
        except BaseException:
            # All ranks raise together. Messages may be left in the group: the next FULL save makes another.
            self._drop_transfers()
            self._plans.clear()  # what was wrong with a tensor is found, and said, where it is planned for anew
            raise

    def close(self) -> None:
        """Give back the group that whole tensors are gathered over. Collective."""
        if self._transfers is not None:
            import torch.distributed as dist

            dist.destroy_process_group(self._transfers)
            self._transfers = None

    # --- steps

    def _published(self, prepared: Prepared, tensors: Sequence[torch.Tensor] | None) -> CommitRecord:
        request, clock, plan = prepared.request, prepared.clock, prepared.plan
        with clock.phase("begin"):
            attempt = begin_save(
                self._root,
                request.step,
                tag=request.tag,
                planned_bytes=plan.nbytes,
                coordinator=self._coordinator,
                overwrite=request.overwrite,
                set_aside=request.set_aside,
                lease=self._lease,
            )
        try:
            done: list[tuple[str, float, int]] = []
            written = plan.write(attempt.store, tensors, sync=self._sync, report=lambda *phase: done.append(phase))
            clock.add_in_turn(done)
            if prepared.failure is not None:
                raise prepared.failure
            digests = {key: xxhash.xxh3_64_hexdigest(_json(tree)) for key, tree in prepared.objects.items()}
            payload = (written.part, _json(prepared.rank_objects), digests)
        except BaseException as error:  # noqa: BLE001  a rank's failure is every rank's: abort raises it
            attempt.abort(prepared.failure or error)
        fields = {
            "state_dict_type": request.state_dict_type.value,
            "manifest": MANIFEST_NAME,
            "mesh": prepared.mesh,
            "metrics": dict(request.metrics),
            "client_state": request.client_state,
            "objective": self._objective,
            "versions": _versions(),
            "extra": {**self._extra, **({"resumed_from": request.resumed_from} if request.resumed_from else {})},
        }
        with clock.phase("commit"):
            record = attempt.commit(
                written.files,
                fields,
                payload=payload,
                complete=lambda answers: self._index(prepared, attempt.store, attempt.save_id, answers),
            )
        self.seen = attempt.after
        return record

    def _proposed(
        self, captured: Captured, state: TrainState, request: SaveRequest, clock: PhaseClock, *, copied: bool
    ) -> _Proposal:
        rank, world_size = self._coordinator.rank, self._coordinator.world_size
        part_ways(captured, self._keepers, rank)
        small = {**self._side_files, **side_files(state)} if rank == 0 else {}
        plan = self._tensor_plan(captured, request.state_dict_type, rank, world_size, small, copied)
        if request.state_dict_type is StateDictType.FULL:
            small = {}  # they lie among the model's own files, and its plan writes them
        prepared = Prepared(request, plan, captured.objects, captured.rank_objects, _mesh(captured), clock, small)
        return _Proposal(captured, prepared, Fingerprints(captured) if world_size > 1 else None)

    def _tensor_plan(
        self,
        captured: Captured,
        kind: StateDictType,
        rank: int,
        world_size: int,
        configs: Mapping[str, bytes],
        copied: bool,
    ) -> TensorPlan:
        previous = self._plans.get(kind)
        if kind is StateDictType.SHARDED:
            return ShardedTensors.of(captured, rank, world_size, previous, copied=copied)
        if kind is StateDictType.LOCAL:
            from ckptkit.checkpoint.save.local import LocalTensors

            return LocalTensors.of(captured, rank, world_size, previous)
        from ckptkit.checkpoint.save.full import FullTensors

        return FullTensors.of(
            captured,
            rank,
            world_size,
            previous,
            group=self._transfers,
            configs=configs,
            max_shard_bytes=self._max_shard_bytes,
        )

    def _index(
        self, prepared: Prepared, store: Store, save_id: str, answers: Sequence[tuple[bytes, bytes, dict[str, str]]]
    ) -> dict[str, FileRecord]:
        """Write the manifest and objects.json; return all files."""
        started = time.perf_counter()
        objects = dict(prepared.objects)
        for _, own, _ in answers:
            objects.update(json.loads(own))
        _warn_of_differences([digests for _, _, digests in answers])
        small = {**prepared.side_files, OBJECTS_NAME: _json({"format": 1, "objects": objects})}
        for path, data in small.items():
            store.write(path, data, sync=self._sync)
        indexed = [len(data) for data in small.values()]
        files = prepared.plan.index(
            [part for part, _, _ in answers],
            store,
            save_id=save_id,
            extra={"step": prepared.request.step, "objects": OBJECTS_NAME},
            sync=self._sync,
            report=lambda phase, seconds, nbytes: indexed.append(nbytes),
        )
        prepared.clock.add("index", time.perf_counter() - started, sum(indexed))
        records = {path: FileRecord(len(data), xxhash.xxh3_64_hexdigest(data)) for path, data in small.items()}
        return {**files, **records}

    # --- talking

    def _exchanged(self, outcome: Outcome, meanwhile: Callable[[], None] | None = None) -> tuple[list[bytes], bool]:
        """Return all ranks' signatures, and whether their plain tensors are the same, as far as digests tell: ranks
        that have the same ones also have the same in them, and who has which was looked into before."""

        def agreed(answers: list[tuple[bytes, Any, tuple[bytes, bytes] | None]]) -> tuple[list[bytes], bool]:
            signatures = _agreed([(signature, wanted) for signature, wanted, _ in answers])
            digests = [digest for _, _, digest in answers if digest is not None]
            held = [which for which, _ in digests]
            one_each = len(set(digests)) == len(set(held))
            return signatures, one_each and (len(set(held)) <= 1 or held == self._holdings)

        exchanged: tuple[list[bytes], bool] = self._coordinator.settle(
            outcome, "planning the save", then=agreed, meanwhile=meanwhile
        )
        return exchanged

    def _found_differences(self, proposal: _Proposal) -> bool:
        """Compare plain tensors one by one; all ranks call it and get the same answer. What differs is remembered."""
        assert proposal.prints is not None  # there are several ranks
        tables = self._all_gather(proposal.prints.to_bytes())
        self._holdings = [holding(table) for table in tables]
        found, anywhere = proposal.prints.differing(tables)
        if self._coordinator.is_main:
            warn_of(found, proposal.captured)
        if anywhere:
            self._keepers = {**(self._keepers or {}), **found}
        return anywhere

    def _all_gather(self, value: bytes) -> list[bytes]:
        return self._coordinator.broadcast(self._coordinator.gather(value))

    def _open_transfers(self, request: SaveRequest) -> None:
        """Make the group that whole tensors are gathered over, at the first FULL save. Collective."""
        if request.state_dict_type is not StateDictType.FULL or self._coordinator.group is None:
            return
        if self._transfers is None:
            import torch.distributed as dist

            ranks = dist.get_process_group_ranks(self._coordinator.group)
            # Made by its members alone, a group is named by its ranks: a second one would meet what the first left.
            alone = len(ranks) != dist.get_world_size()
            timeout = timedelta(seconds=self._coordinator.timeout_s)
            self._transfers = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=alone)

    def _drop_transfers(self) -> None:
        """Forget the group. It is not destroyed: that could wait for messages, and would free its name."""
        self._transfers = None


def _agreed(answers: list[tuple[bytes, Any]]) -> list[bytes]:
    for rank, (_, wanted) in enumerate(answers):
        if wanted != answers[0][1]:
            raise UsageError(
                f"ranks want to save different things: rank 0 (step, tag, type) {answers[0][1]}, rank {rank} {wanted}. "
                "Call save with the same arguments on every rank."
            )
    return [signature for signature, _ in answers]


def _warn_of_differences(digests: Sequence[Mapping[str, str]]) -> None:
    for key in sorted({key for table in digests for key in table}):
        if len({table.get(key) for table in digests}) > 1:
            _log.warning(
                "%s differs between ranks; rank 0's was saved. Wrap it into ckptkit.PerRank.",
                key,
            )


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _mesh(captured: Captured) -> dict[str, Any] | None:
    from torch.distributed.tensor import DTensor

    for _, tensor in captured.tensors(aliases=True):
        if isinstance(tensor, DTensor):
            layout = layout_of(tensor)
            return {"shape": list(layout.mesh_shape), "names": list(layout.mesh_names)}
    return None


def _versions() -> dict[str, str]:
    import torch

    from ckptkit.version import __version__

    return {"ckptkit": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
