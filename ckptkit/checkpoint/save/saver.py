"""Runs the steps of a save, for FULL, SHARDED and LOCAL alike: capture, plan, agree, write, index, commit.

A *recipe* describes how a tensor subclass (such as torchao's) is split into plain tensors.
"""

from __future__ import annotations

import copy
import json
import logging
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ckptkit.arguments import check_flags
from ckptkit.checkpoint.report import PhaseClock
from ckptkit.checkpoint.run.commit import SaveAttempt, begin_save
from ckptkit.checkpoint.run.coordinator import Coordinator, Outcome, check_equal, new_gloo_group
from ckptkit.checkpoint.save.full import FullTensors
from ckptkit.checkpoint.save.hf_config import side_files
from ckptkit.checkpoint.save.local import LocalTensors
from ckptkit.checkpoint.save.replicas import (
    EVERY,
    Fingerprints,
    part_ways,
    refuse_unlike,
    shared_names,
    unequal_classes,
    warn_of,
)
from ckptkit.checkpoint.state.capture import Captured, capture
from ckptkit.checkpoint.state.layout import refuse_idle
from ckptkit.checkpoint.state.local_part import layout_of
from ckptkit.checkpoint.state.optimizer.tree import UNITED, united
from ckptkit.checkpoint.state.train_state import StateDictType, TrainState, check_state
from ckptkit.checkpoint.state.values import JSON, decode, references
from ckptkit.digests import digest_of, hex_digest_of
from ckptkit.errors import SaveError, UsageError
from ckptkit.formats.dcp.index import RankPart, write_index
from ckptkit.formats.dcp.subclasses import SUBCLASSES, describe
from ckptkit.formats.own.json import check_json
from ckptkit.formats.own.reader import OBJECTS_NAME
from ckptkit.formats.own.record import (
    MANIFEST_NAME,
    CommitRecord,
    FileRecord,
    checkpoint_name,
    metrics_json,
)
from ckptkit.storage.retry import patient
from ckptkit.units import first_few
from ckptkit.version import __version__

if TYPE_CHECKING:
    import torch

    from ckptkit.checkpoint.run.inventory import Inventory
    from ckptkit.storage.lock import Lease
    from ckptkit.storage.store import Store

_log = logging.getLogger(__name__)

_IN = ": "  # separates the key of an object from a name in the object; no key contains this


class TensorPlan(Protocol):
    """This rank's plan for a save. There is one implementation per state-dict type."""

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...  # staging copies exactly these
    @property
    def nbytes(self) -> int: ...  # approximately what this rank writes
    @property
    def file_names(self) -> str: ...  # a regular expression for all ranks' files; known after `settle`
    @property
    def signature(self) -> bytes: ...  # equal on ranks that agree about their shared tensors
    @property
    def indexes(self) -> Mapping[str, bytes]: ...  # more files that rank 0 writes: path to bytes

    def settle(self, signatures: Sequence[bytes], all_gather: Callable[[bytes], list[bytes]]) -> TensorPlan:
        """Adjust this plan to the tensors of the other ranks, and return it.

        `signatures` has one item per rank. Communicates only if the signatures have changed since the previous call.
        """

    def write(self, store: Store, tensors: Sequence[torch.Tensor] | None, *, sync: bool) -> RankPart:
        """Write this rank's files. `tensors` are staged copies in the plan's order. None: write the live tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """The caller's arguments of a save.

    Attributes:
        given_up: Names of damaged checkpoints. An earlier load has fallen back to another checkpoint because of them. A
            save may replace them.
        set_aside: Rename a directory that has the checkpoint's name but is not a checkpoint. This is set if a load has
            already reported such directories.
    """

    step: int
    state_dict_type: StateDictType
    tag: str | None = None
    metrics: Mapping[str, float] | None = None  # measured values, which determine `best`. None: the caller passed none
    client_state: Any = None  # the caller's JSON value, stored in the commit record
    overwrite: bool = False  # replace a committed checkpoint of the same name once the new one is complete
    given_up: frozenset[str] = frozenset()
    set_aside: bool = False
    resumed_from: str | None = None  # the checkpoint that the run was resumed from, for the commit record


@dataclass(slots=True)
class Prepared:
    """A training state that this rank has captured for a save. Objects are already encoded.

    Attributes:
        spread: Those of `objects` that contain names of parameters or modules (see `_spread`).
        aliases: For each model's section of the checkpoint, maps the name of a tied weight to the name under which the
            weight is stored.
        tellers: The lowest rank of each pipeline stage other than rank 0's. From these ranks, rank 0 gets the values of
            optimizers and modules that are not in its own stage.
    """

    request: SaveRequest
    plan: TensorPlan
    objects: dict[str, Any]
    spread: dict[str, Any]
    rank_objects: dict[str, Any]
    mesh: dict[str, Any] | None
    clock: PhaseClock
    aliases: Mapping[str, Mapping[str, str]]
    side_files: Mapping[str, bytes] = field(default_factory=dict)  # on rank 0: additional files that `_index` writes
    prints: Fingerprints | None = None  # of the values that several ranks have; None with a single rank
    failure: Exception | None = None  # an error on this rank after the capture; `publish` reports it to all ranks
    staged: Sequence[torch.Tensor] | None = None  # copies of `plan.tensors`; None if they were not staged
    tellers: tuple[int, ...] = ()
    written: int = 0  # bytes of the files that this rank wrote


@dataclass(eq=False)
class Saver:
    """Saves the states of one run.

    If nothing has changed since the previous save, the ranks do not exchange their plans again.

    Attributes:
        objective: The metric of `keep_best`, and "min" or "max".
        side_files: Contents, by path, of files to store in every checkpoint, such as a tokenizer. Rank 0's files are
            written.
        seen: On rank 0, the run's checkpoints as of the last save. None: they must be listed again.
        keepers: Keys of plain tensors and optimizer values that differ between ranks. For each key, the rank whose copy
            is saved under this key (see `part_ways`). None if nothing differs.
    """

    root: Store
    coordinator: Coordinator
    max_shard_bytes: int
    lease: Lease | Callable[[], Lease]
    objective: tuple[str, str] | None
    side_files: Mapping[str, bytes]
    extra: Mapping[str, Any]  # JSON for the commit records' `extra`
    seen: Inventory | None = None
    ranked: bool = False  # whether any save has had metrics
    plans: dict[StateDictType, TensorPlan] = field(default_factory=dict)
    transfers: Any = None  # the group for gathering full tensors
    keepers: dict[str, int] | None = None
    classes: dict[int, int] = field(default_factory=dict)  # classes of plain tensors, as of the last comparison
    apart: bytes = b""  # signature of the tensors on meshes of only some ranks, at their last comparison
    shared: frozenset[int] = frozenset()  # digests of the names of such tensors that exist on several meshes
    turn: int = 0  # selects the blocks of large replicas to compare; 0 before the first save

    def __post_init__(self) -> None:
        import ckptkit.formats.dcp.plan  # noqa: F401  now, so that the first save does not block for it

    def prepare(self, state: TrainState, request: SaveRequest) -> Prepared:
        """Capture the state, plan the save, and compare the plans of all ranks. Writes nothing.

        All ranks must call it, in the training thread.

        Raises:
            RankFailedError: Some rank could not capture its state. Every rank raises the same error.
            UsageError: The ranks disagree on what to save, or a glob of `TrainState(layout=...)` matches no tensor.
        """
        clock, what = PhaseClock(), "planning the save"
        # The first block depends on the step: if a job often restarts, its managers should not all begin with the same
        # blocks of large replicas.
        self.turn = self.turn + 1 if self.turn else digest_of(str(request.step).encode())
        group = self.coordinator.group
        if request.state_dict_type is StateDictType.FULL and self.transfers is None and group is not None:
            self.transfers = new_gloo_group(group, self.coordinator.timeout_s)  # for gathering full tensors
        captured = Captured()
        with clock.phase("plan"):
            try:
                check_state(state, "save(step, state)")
                check_flags(overwrite=request.overwrite)
                if self.coordinator.is_main:  # other ranks' metrics and client state are not written
                    metrics_json(request.metrics or {})
                    check_json(request.client_state, "client_state", " Put other state into TrainState.extra.")
                    if self.objective is not None and not self.ranked:
                        self._check_ranked(request, self.objective[0])
                overwrite = request.overwrite or checkpoint_name(request.step, request.tag) in request.given_up
                # Copy them, because training continues before the record is written.
                metrics, client_state = dict(request.metrics or {}), copy.deepcopy(request.client_state)
                request = replace(request, overwrite=overwrite, metrics=metrics, client_state=client_state)
                captured = capture(state, rank=self.coordinator.rank, step=request.step)
            except BaseException as error:  # noqa: BLE001  the boundary of a rank: `settle` raises it
                made, outcome = None, Outcome.of_error(error)
            else:
                made, outcome = self._plan(captured, state, request, clock)
        with clock.phase("agree"):
            try:
                signatures, unequal, one_recipe, apart, tellers = self.coordinator.settle(
                    outcome, what, then=self._agreed
                )
            except BaseException:
                self.turn = 0  # the ranks may have begun with different steps
                raise
            assert made is not None  # if it were None, `settle` would have raised
            if not one_recipe:
                self._join_recipes(captured)
            if apart and self._found_shared(captured, made):
                unequal = [EVERY, *unequal]
            if unequal and self._found_differences(captured, made.prints, unequal):
                made, outcome = self._plan(captured, state, request, clock)
                signatures, *_, tellers = self.coordinator.settle(outcome, what, then=self._agreed)
                assert made is not None
            made.tellers = tellers
            made.plan = made.plan.settle(signatures, self.coordinator.all_gather)
        self.plans[request.state_dict_type] = made.plan
        return made

    @patient()
    def publish(self, prepared: Prepared) -> CommitRecord:
        """Write the staged or live tensors. When every rank has written its tensors, commit the checkpoint.

        All ranks must call it, in any thread.

        Raises:
            RankFailedError: Some rank failed. Every rank raises the same error. Nothing was published.
        """
        import torch

        request, clock, plan = prepared.request, prepared.clock, prepared.plan
        small = (MANIFEST_NAME, OBJECTS_NAME, *prepared.side_files)
        try:
            with clock.phase("begin"):
                attempt = begin_save(
                    self.root,
                    request.step,
                    tag=request.tag,
                    planned_bytes=plan.nbytes,
                    coordinator=self.coordinator,
                    overwrite=request.overwrite,
                    set_aside=request.set_aside,
                    file_names="|".join([plan.file_names, *map(re.escape, small)]),
                    lease=self.lease,
                )
            try:
                part = plan.write(attempt.store, prepared.staged, sync=True)
                written = part.written
                clock.add_in_turn(written.phases)
                prepared.written = sum(item.nbytes for item in written.files.values())
                if prepared.failure is not None:
                    raise prepared.failure
                own = prepared.spread if self.coordinator.rank in prepared.tellers else {}
                digests = _digests(prepared.objects, prepared.spread) if self.coordinator.world_size > 1 else {}
                payload = (part, prepared.rank_objects, digests, own)
            except BaseException as error:  # noqa: BLE001  `abort` raises it on every rank
                attempt.abort(prepared.failure or error)
            fields = {
                "state_dict_type": request.state_dict_type.value,
                "manifest": MANIFEST_NAME,
                "mesh": prepared.mesh,
                "metrics": dict(request.metrics or {}),
                "client_state": request.client_state,
                "objective": self.objective,
                "versions": {
                    "ckptkit": __version__,
                    "torch": str(torch.__version__),
                    "python": platform.python_version(),
                },
                "extra": {**self.extra, **({"resumed_from": request.resumed_from} if request.resumed_from else {})},
            }
            with clock.phase("commit"):
                complete = partial(self._index, prepared, attempt)
                record = attempt.commit(written.files, fields, payload=payload, complete=complete)
        except BaseException:
            # All ranks get here. The group may still contain messages, so the next FULL save creates a new group.
            # The old group is not destroyed, because that could wait for messages, and would free its name for reuse.
            self.transfers = None
            self.plans.clear()
            raise
        self.seen = attempt.after
        self._warn_of_new_start(request)
        return record

    def close(self) -> None:
        """Destroy the process group that gathers full tensors. All ranks must call it."""
        if self.transfers is not None:
            import torch.distributed as dist

            dist.destroy_process_group(self.transfers)
            self.transfers = None

    # --- steps

    def _warn_of_new_start(self, request: SaveRequest) -> None:
        """Warn if this job has loaded no checkpoint, and the run's previous checkpoint has a later step than this save.

        In this case, the user probably forgot to call `load`.
        """
        if self.seen is None or request.resumed_from is not None or len(self.seen.committed) < 2:
            return
        before, saved = self.seen.committed[-2:]
        if before.step > saved.step:
            _log.warning(
                "%s/%s was saved, but this job did not load %s, which was the latest checkpoint until now. The next "
                "load continues from step %d. To continue the old run instead, load %s by its name.",
                self.root.url,
                saved.name,
                before.name,
                saved.step,
                before.name,
            )

    def _check_ranked(self, request: SaveRequest, metric: str) -> None:
        """Raise if the save has no metrics. Warn if the metrics do not include the metric of `keep_best`.

        Call this only until a save has had metrics. Later saves may have no metrics, for example the last save before a
        job ends.
        """
        if request.metrics is None:
            raise UsageError(
                f"keep_best ranks checkpoints by {metric!r}, but this save has no metrics. Pass metrics={{{metric!r}: "
                "...}, or metrics={} if nothing was evaluated."
            )
        self.ranked = bool(request.metrics)
        if request.metrics and metric not in request.metrics:
            _log.warning(
                "keep_best ranks checkpoints by %r, but step %d has only the metrics: %s",
                metric,
                request.step,
                ", ".join(request.metrics),
            )

    def _plan(
        self, captured: Captured, state: TrainState, request: SaveRequest, clock: PhaseClock
    ) -> tuple[Prepared | None, Outcome]:
        """Return this rank's plan, and the outcome to send to the other ranks. After an error, the plan is None."""
        from torch.distributed.tensor import DTensor

        from ckptkit.formats.dcp.plan import ShardedPlan, plan_sharded

        rank, world_size, saving = self.coordinator.rank, self.coordinator.world_size, self.coordinator.members
        kind, previous = request.state_dict_type, self.plans.get(request.state_dict_type)
        try:
            if self.keepers is not None:
                part_ways(captured, self.keepers, rank)
            small = {**self.side_files, **side_files(state)} if rank == 0 else {}
            in_parts = any(key.startswith("model") for key in captured.objects.get(SUBCLASSES, ()))
            if kind is StateDictType.FULL and in_parts:
                # With a config, from_pretrained would randomly initialize the weights that are stored in parts.
                small = {path: data for path, data in small.items() if path.rpartition("/")[2] != "config.json"}
            plan: TensorPlan
            if kind is StateDictType.SHARDED:
                nested, private = dcp_state_dict(captured)
                last = previous if isinstance(previous, ShardedPlan) else None
                plan = plan_sharded(
                    nested, rank=rank, world_size=world_size, previous=last, private=private, saving=saving
                )
            elif kind is StateDictType.LOCAL:
                plan = LocalTensors.of(captured, rank, world_size, saving)
            else:
                plan = FullTensors.of(
                    captured, rank, world_size, previous, group=self.transfers, max_shard_bytes=self.max_shard_bytes
                )
            aliases = {} if kind is StateDictType.SHARDED else captured.aliases  # SHARDED stores them under each name
            prints = self._fingerprints(captured) if world_size > 1 else None
            every = (tensor for _, tensor in captured.tensors(aliases=True))
            found = next((layout_of(tensor) for tensor in every if isinstance(tensor, DTensor)), None)
            mesh = None if found is None else {"shape": list(found.mesh_shape), "names": list(found.mesh_names)}
            spread = _spread(captured)
            made = Prepared(
                request, plan, captured.objects, spread, captured.rank_objects, mesh, clock, aliases, small, prints
            )
        except BaseException as error:  # noqa: BLE001  the boundary of a rank: `settle` raises it
            return None, Outcome.of_error(error)
        wanted = (request.step, request.tag, kind.value)
        recipes = digest_of(_json(captured.objects.get(SUBCLASSES)))
        names = {
            key: [
                [group["params"] for group in tree["param_groups"]],
                list(tree["values"]),
                *(tree.get(part) for part in UNITED),
            ]
            if key.partition("_")[0] == "optimizer"
            else list(tree)
            for key, tree in spread.items()
        }
        named = digest_of(_json(names))
        is_new = prints is not None and prints.apart_signature != self.apart
        return made, Outcome(
            (plan.signature, wanted, prints and prints.signatures, recipes, named, captured.globs, is_new)
        )

    def _index(
        self,
        prepared: Prepared,
        attempt: SaveAttempt,
        answers: Sequence[tuple[RankPart, JSON, dict[str, str], JSON]],
    ) -> dict[str, FileRecord]:
        """Write the manifest and objects.json, and return these files. Runs on rank 0, after all ranks have written."""
        started = time.perf_counter()
        objects = dict(prepared.objects)
        for _, own, _, _ in answers:
            objects.update(own)
        told = [trees for *_, trees in answers]
        for key in dict.fromkeys(key for trees in told for key in trees):
            found = [trees[key] for trees in [prepared.spread, *told] if key in trees]
            joins = key.partition("_")[0] == "optimizer"
            objects[key] = united(found) if joins else {k: v for tree in reversed(found) for k, v in tree.items()}
        tables = [digests for _, _, digests, _ in answers]
        for key in sorted({key for table in tables for key in table}):
            if len({table.get(key) for table in tables if key in table or _IN not in key}) > 1:
                _log.warning(
                    "%s differs between ranks; only rank 0's value was saved. To save all, wrap it in ckptkit.PerRank.",
                    key,
                )
        indexes, found_objects = prepared.plan.indexes, _json({"format": 1, "objects": objects})
        small = {**prepared.side_files, **indexes, OBJECTS_NAME: found_objects}
        for path, data in small.items():
            attempt.store.write(path, data, sync=False)  # the attempt makes them durable
        files = write_index(
            [part for part, *_ in answers],
            attempt.store,
            kind=f"ckptkit-{prepared.request.state_dict_type.value}",
            save_id=attempt.save_id,
            sync=False,
            extra={"step": prepared.request.step, "objects": OBJECTS_NAME},
            aliases=prepared.aliases,
        )
        records = {path: FileRecord(len(data), hex_digest_of(data)) for path, data in small.items()}
        nbytes = sum(item.nbytes for item in [*files.values(), *records.values()])
        prepared.written += nbytes
        prepared.clock.add("index", time.perf_counter() - started, nbytes)
        return {**files, **records}

    # --- communication

    def _agreed(
        self, answers: list[tuple[bytes, Any, dict[int, bytes] | None, int, int, dict[str, bool], bool]]
    ) -> tuple[list[bytes], list[int], bool, bool, tuple[int, ...]]:
        """Compare the ranks' plans. Runs on rank 0. Returns five values:

        - all ranks' signatures;
        - the groups of tensors (classes in `Fingerprints`) whose keys or contents differ between ranks;
        - whether all ranks split tensor subclasses into the same parts;
        - whether any rank has added or removed a tensor whose mesh does not have all ranks;
        - the lowest rank of each pipeline stage, except rank 0's. Ranks with the same parameter names are one stage.
        """
        signatures, wanted, prints, recipes, spread, globs, apart = zip(*answers, strict=True)
        check_equal(wanted, "what to save: (step, tag, type)")
        if any(globs):
            refuse_idle(globs)
        unequal = unequal_classes([table for table in prints if table is not None])
        tellers = tuple(sorted({spread.index(names) for names in spread} - {0}))
        return list(signatures), unequal, len(set(recipes)) == 1, any(apart), tellers

    def _fingerprints(self, captured: Captured) -> Fingerprints:
        return Fingerprints(captured, self.classes, self.shared, self.turn, self.coordinator.world_size)

    def _found_shared(self, captured: Captured, made: Prepared) -> bool:
        """Find the DTensors that have the same name on several meshes. All ranks must call it.

        Returns whether the result differs from that of the previous call.
        """
        assert made.prints is not None  # it is None only with a single rank
        self.apart, before = made.prints.apart_signature, self.shared
        outcome = Outcome(made.prints.apart)
        self.shared = frozenset(self.coordinator.settle(outcome, "comparing meshes", then=shared_names))
        if self.shared != before:
            made.prints = self.coordinator.run_on_all(partial(self._fingerprints, captured), "comparing meshes")
        return self.shared != before

    def _join_recipes(self, captured: Captured) -> None:
        """Collect from all ranks how tensor subclasses are split, because ranks may have different tensors.

        All ranks must call it.

        Raises:
            SaveError: Two ranks split the same tensor into different plain tensors, or only one of them splits it.
        """
        own = captured.objects.get(SUBCLASSES, {})
        found: dict[str, tuple[int, Any]] = {}
        for rank, table in enumerate(map(json.loads, self.coordinator.all_gather(_json(own)))):
            found.update({key: (rank, recipe) for key, recipe in table.items() if key not in found})
        tensors = dict(captured.tensors(aliases=True))
        mine = tensors.keys() | own.keys()
        differing = [key for key, (_, recipe) in found.items() if key in mine and own.get(key) != recipe]
        outcome = Outcome()
        if differing:
            key = differing[0]
            (rank, recipe), live = found[key], None if key.startswith("model") else tensors.get(key)
            error = SaveError(
                f"{first_few(differing, 1)}: it is {describe(own.get(key), live)} here, but {describe(recipe)} on rank "
                f"{rank}. Shard it so that all ranks have the same class and settings."
            )
            outcome = Outcome.of_error(error)
        self.coordinator.settle(outcome, "planning the save")
        captured.objects[SUBCLASSES] = {key: recipe for key, (_, recipe) in found.items()}

    def _found_differences(self, captured: Captured, prints: Fingerprints | None, unequal: Sequence[int]) -> bool:
        """Compare tensors one by one, and record in `keepers` those that differ between ranks. Return whether any do.

        All ranks must call it.
        """
        assert prints is not None  # it is None only with a single rank
        found, anywhere, classes = prints.differing(self.coordinator.all_gather(prints.to_bytes(unequal)))
        self.classes = classes or self.classes
        if anywhere:
            what = "comparing the parameters of the ranks"
            self.coordinator.run_on_all(partial(refuse_unlike, found, captured), what)
            self.coordinator.decide(partial(warn_of, found, captured), what)  # a user's logging handler may raise
            self.keepers = {**(self.keepers or {}), **found}
        return anywhere


def dcp_state_dict(captured: Captured) -> tuple[dict[str, Any], set[str]]:
    """Return a captured state as a state dict for DCP, and the keys that only this rank has.

    The state dict is nested like the result of torch's `get_state_dict`, so plain DCP can restore a model and an
    optimizer from the checkpoint. Tied weights appear under each of their names, as in `Module.state_dict`.
    """
    nested: dict[str, Any] = {name: dict(tensors) for name, tensors in captured.models.items()}
    for name, taken in captured.optimizers.items():
        states: dict[str, dict[str, Any]] = {}
        for (fqn, state), tensor in taken.tensors.items():
            states.setdefault(fqn, {})[state] = tensor
        for fqn, values in taken.tree["values"].items():
            states.setdefault(fqn, {}).update({k: v for k, v in values.items() if not isinstance(v, (dict, list))})
        groups = [
            # torch requires these names if the optimizer was created with named parameters.
            # Large tensors are in `loose`, under the names that DCP would give them here.
            {k: decode(value, captured.loose.__getitem__) for k, value in group.items() if not references(value)}
            | {"param_names": group["params"]}
            for group in taken.tree["param_groups"]
        ]
        nested[name] = {"state": states, "param_groups": groups, **({"master": taken.masters} if taken.masters else {})}
    loose = captured.loose
    if not nested.keys().isdisjoint(loose):
        loose = {key: tensor for key, tensor in loose.items() if key not in nested}
    return {**nested, **loose}, captured.own - nested.keys()


def _spread(captured: Captured) -> dict[str, Any]:
    """Return the captured objects that contain names of parameters or modules.

    In a pipeline, these objects differ between ranks: each rank has only the names in its own stages.
    """
    return {
        key: tree
        for key, tree in captured.objects.items()
        if key == "classes"
        or key in captured.modules
        or (key.startswith("model") and key.endswith(".extra_state"))
        or key.partition("_")[0] == "optimizer"
    }


def _digests(objects: Mapping[str, Any], spread: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of objects. Omits optimizers, because they are compared by their fingerprints.

    If an object's keys are names of parameters or modules, each name has its own digest, because ranks may have
    different parameters and modules.
    """
    whole = {key: tree for key, tree in objects.items() if key not in spread}
    trees = {key: tree for key, tree in spread.items() if key.partition("_")[0] != "optimizer"}
    entries = {f"{key}{_IN}{name}": value for key, tree in trees.items() for name, value in tree.items()}
    return {key: hex_digest_of(_json(value)) for key, value in {**whole, **entries}.items()}


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
