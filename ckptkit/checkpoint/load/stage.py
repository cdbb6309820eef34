"""A load made ready: what is read where, planned and checked, before anything of the training state is touched."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.entry import Catalog
from ckptkit.checkpoint.load.buffers import Place, Places, own_budget
from ckptkit.checkpoint.load.fill import check_ahead, check_sizes, prepare, read_whole, run, whole_fills
from ckptkit.checkpoint.load.foreign import Adopted, adopt
from ckptkit.checkpoint.load.plan import LoadOptions, LoadPlan, ObjectTarget, OptimizerPlan, plan_load
from ckptkit.checkpoint.save.replicas import own_copies
from ckptkit.checkpoint.state.local_part import part_view
from ckptkit.checkpoint.state.rng import check_rng
from ckptkit.checkpoint.state.train_state import PerRank, TrainState, canonical_modules, is_stateful
from ckptkit.checkpoint.state.values import JSON, decode, encode
from ckptkit.errors import CheckpointMismatchError, CorruptCheckpointError, LoadError, SaveError
from ckptkit.formats.dcp.shared_memory import check_claims, overlapping
from ckptkit.formats.own.reader import OBJECTS_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ckptkit.formats.dcp.digests import SliceCheck
    from ckptkit.formats.dcp.fill import Filler
    from ckptkit.storage.store import Store

__all__ = ["Staged", "json_objects", "stage", "Decoded", "DecodedOptimizer", "decode_plan"]

# What the objects of a checkpoint become, made and looked at before a load touches anything.


Tensors = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class DecodedOptimizer:
    """State of an optimizer that is no tensor of the checkpoint: by FQN and name, and that of no parameter."""

    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decoded:
    """The values of a plan's trees.

    Attributes:
        objects: For each of `plan.objects`, the value of each of its trees.
        optimizers: In the order of `plan.optimizers`.
        rng: What `restore_rng` takes; None where nothing is restored.
        leftovers: Extra state that nothing takes, by name.
    """

    objects: list[list[Any]]
    optimizers: list[DecodedOptimizer]
    rng: Any
    leftovers: dict[str, Any]


def decode_plan(plan: LoadPlan, tensor: Tensors) -> Decoded:
    """Return all that the plan's trees stand for.

    Args:
        tensor: The tensor under a key; its elements may be read later.

    Raises:
        CorruptCheckpointError, LoadError: A tree is none that a save writes; names its key.
        CheckpointMismatchError: A value is nothing that the live object it is for could take.
    """
    objects = [[_named(target.key, tree, tensor) for tree in target.trees] for target in plan.objects]
    for target, values in zip(plan.objects, objects, strict=True):
        if target.merge is None:
            _check_object(target, values[0])
    rng = None
    if plan.rng is not None:
        rng = _named("rng", plan.rng, tensor)
        check_rng(rng)
    optimizers = [_optimizer(item, tensor) for item in plan.optimizers]
    leftovers = {name: _named(f"extra.{name}", tree, tensor) for name, tree in plan.leftovers.items()}
    return Decoded(objects, optimizers, rng, leftovers)


def _optimizer(plan: OptimizerPlan, tensor: Tensors) -> DecodedOptimizer:
    values = {
        fqn: {name: _named(f"{plan.key}.{fqn}.{name}", tree, tensor) for name, tree in trees.items()}
        for fqn, trees in plan.values.items()
        if fqn in plan.parameters
    }
    return DecodedOptimizer(values, {name: _named(plan.key, tree, tensor) for name, tree in plan.shared.items()})


def _named(key: str, tree: JSON, tensor: Tensors) -> Any:
    try:
        return decode(tree, tensor)
    except (CorruptCheckpointError, LoadError) as error:
        raise type(error)(f"{key}: {error}") from error


def _check_object(target: ObjectTarget, value: Any) -> None:
    """Look at what is taken apart by key: of all else, the object that takes it is the judge."""
    if target.kind in ("model", "scheduler", "grad_scaler") and not isinstance(value, Mapping):
        raise CorruptCheckpointError(f"{target.key}: the saved state is a {type(value).__name__}, expected a mapping.")
    if target.kind == "model":
        modules = canonical_modules(target.item)
        strangers = [str(name) for name in value if module_name(str(name)) not in modules]
        if strangers:
            raise CheckpointMismatchError(
                f"{target.key}: the model has no module for {', '.join(map(repr, strangers[:5]))}; nothing was loaded."
            )


def module_name(key: str) -> str:
    """Return the name of the module whose extra state stands under `key`."""
    return key.removesuffix("_extra_state").removesuffix(".")


_log = logging.getLogger(__name__)


def json_objects(catalog: Catalog) -> dict[str, JSON]:
    """Return what a checkpoint of ours holds besides tensors; nothing for one that ckptkit did not write."""
    found = catalog.objects.values()
    return {entry.name: entry.value for entry in found if entry.path.rpartition("/")[2] == OBJECTS_NAME}


@dataclass(slots=True)
class Staged:
    """A load that has read and checked everything, and changed nothing yet.

    Attributes:
        weights: Where each is read to, in the order of `plan.models`.
        states: The same for each optimizer of the plan, by FQN and the name of the state.
        refs: The tensors that objects refer to.
        decoded: What objects stand for; known once the tensors that they refer to are read.
        filler: Reads `weights`, `states` and `refs`.
        second: Reads what is too much to be held beside the live state, straight into that.
        held: Bytes that are held beside live tensors until all is checked.
        read_twice: Bytes that `second` reads.
        checks: How many slices of those may be checked at once.
    """

    plan: LoadPlan
    weights: list[Place] = field(default_factory=list)
    states: list[dict[str, dict[str, Place]]] = field(default_factory=list)
    refs: dict[str, torch.Tensor] = field(default_factory=dict)
    decoded: Decoded | None = None
    filler: Filler | None = None
    second: Filler | None = None
    held: int = 0
    read_twice: int = 0
    checks: int = 1

    def unchecked(self) -> list[SliceCheck]:
        """Return the slices of which this rank reads only parts."""
        return [item for filler in (self.filler, self.second) if filler is not None for item in filler.unchecked()]

    def signature(self) -> bytes:
        """Return what is the same on ranks that read the same first; b"" where there is nothing to share."""
        return b"" if self.filler is None else self.filler.signature()

    def share_out(self, own: int, count: int) -> list[list[torch.Tensor]]:
        """Keep one of `count` shares of what is read first, and return the tensors of all: others read theirs."""
        assert self.filler is not None
        return self.filler.share_out(own, count)

    def read(self, share: Sequence[SliceCheck]) -> int:
        """Read what is read first, check what is read later, and return the bytes.

        Args:
            share: Slices that ranks read only parts of, for this rank to check.
        """
        nbytes = 0
        if self.second is not None:
            nbytes += check_ahead(self.second, self.checks)
        if self.filler is not None:
            nbytes += run(self.filler, share)
            self.filler = None
        if self.decoded is None:
            self.decoded = decode_plan(self.plan, self.refs.__getitem__)
        return nbytes

    def fill(self) -> None:
        """Read what is read straight into the state."""
        if self.second is not None:
            run(self.second)
            self.second = None


def stage(
    state: TrainState,
    catalog: Catalog,
    store: Store,
    options: LoadOptions,
    *,
    rank: int,
    world_size: int,
    workers: int = 0,
) -> Staged:
    """Plan what a load needs, with memory of its own for it; `fill.run(staged.filler)` reads it. The training state
    is not touched. No communication.

    Raises:
        CheckpointMismatchError: Lists all that does not fit.
        CorruptCheckpointError: The checkpoint is damaged.
    """
    objects = json_objects(catalog)
    catalog, unlike = own_copies(catalog, objects, rank=rank, world_size=world_size)
    foreign = Adopted(catalog, objects)
    if not objects:
        foreign = adopt(catalog, store, state, optimizer=options.optimizer == "restore")
        catalog = foreign.catalog
    plan = plan_load(
        state,
        catalog,
        foreign.objects,
        options,
        rank=rank,
        world_size=world_size,
        small=lambda key: foreign.tensors[key] if key in foreign.tensors else read_whole(catalog, store, [key])[key],
        foreign=not objects,
    )
    plan.notes += [*foreign.notes, *([unlike] if unlike else [])]
    if unlike and rank == 0:
        _log.warning("%s: %s.", store.url, unlike)
    plan.mismatches.check(store.url, strict=options.strict)
    places = Places(rank, in_place=not options.atomic, budget=own_budget(options.max_nbytes))
    staged = Staged(plan)
    staged.weights = [places.weight(target.live, target.entry) for target in plan.models]
    _check_shared_memory(plan, staged.weights, store, rank)
    staged.states = [_optimizer_places(optimizer, places) for optimizer in plan.optimizers]
    # One round trip less from an object store. Not where ranks share reads: what a rank gets from another is not there
    # yet when its own reads end.
    together = store.asking_costs and world_size == 1
    staged.refs = _reference_fills(state, plan, catalog, store, places, rank, foreign.tensors, together=together)
    if not together:
        staged.decoded = decode_plan(plan, staged.refs.__getitem__)
    staged.read_twice, staged.checks, staged.held = places.settle(), places.checks, places.held
    verify = bool(options.verify)
    staged.filler = prepare(catalog, store, places.now, workers=workers, verify=verify, cast=not options.atomic)
    if not options.atomic and store.sizes_are_free:
        # Before anything is read into the live state. Not on object stores: objects are never cut off, and each look
        # is a request.
        check_sizes(staged.filler)
    if places.later:
        staged.second = prepare(catalog, store, places.later, workers=workers, verify=verify, cast=True)
    return staged


def _check_shared_memory(plan: LoadPlan, weights: Sequence[Place], store: Store, rank: int) -> None:
    pairs = [(target.entry, p.view) for target, p in zip(plan.models, weights, strict=True) if p.view is not None]
    groups = [[pairs[i][1].claim(pairs[i][0]) for i in group] for group in overlapping([v.local for _, v in pairs])]
    groups += [[part_view(twin.key, twin.live, rank).claim(twin.entry) for twin in twins] for twins in plan.twins]
    check_claims(store, groups)


def _optimizer_places(plan: OptimizerPlan, places: Places) -> dict[str, dict[str, Place]]:
    on_device = {
        id(parameter): bool(group.get("fused") or group.get("capturable"))
        for group in plan.optimizer.param_groups
        for parameter in group["params"]
    }
    states: dict[str, dict[str, Place]] = {}
    for fqn, parameter in plan.parameters.items():
        wanted = dict(plan.states.get(fqn, {}))
        master = plan.masters.get(fqn)
        if master is not None and plan.master_name is not None:
            wanted[plan.master_name] = master
        live = plan.optimizer.state.get(parameter, {})
        for name, entry in wanted.items():
            place = places.state(parameter, name, entry, live.get(name), on_device=on_device[id(parameter)])
            states.setdefault(fqn, {})[name] = place
    return states


def _reference_fills(
    state: TrainState,
    plan: LoadPlan,
    catalog: Catalog,
    store: Store,
    places: Places,
    rank: int,
    held: Mapping[str, torch.Tensor],
    *,
    together: bool,
) -> dict[str, torch.Tensor]:
    """Plan the reads of tensors inside objects: placed like the live value's own under that name, else whole.

    Args:
        held: Those that were read already.
        together: Read whole ones with all else; they are read now otherwise.
    """
    import torch
    from torch.distributed.tensor import DTensor

    wanted = plan.references()
    refs = {key: held[key] for key in wanted if key in held}
    wanted = [key for key in wanted if key not in refs]
    if not wanted:
        return refs
    live = _live_references(plan)
    plain = []
    for key in wanted:
        entry, template = catalog.tensors.get(key), live.get(key)
        if entry is None or not isinstance(template, DTensor) or tuple(template.shape) != entry.shape:
            plain.append(key)
            continue
        refs[key] = torch.empty_like(template, dtype=getattr(torch, entry.dtype), requires_grad=False)
        places.into(refs[key], entry)
    if together:
        for item in whole_fills(catalog, store, plain):
            refs[item.entry] = item.local
            places.now.append(item)
    else:
        refs.update(read_whole(catalog, store, plain))
    return refs


def _live_references(plan: LoadPlan) -> dict[str, torch.Tensor]:
    """Return the tensors that the live extra state has where the saved one has references."""
    live: dict[str, torch.Tensor] = {}
    for target in plan.objects:
        item = target.item
        if target.kind == "extra" and not isinstance(item, PerRank):
            # What is there now may be anything: it need not be such as could be saved.
            with contextlib.suppress(SaveError):
                encode(item.state_dict() if is_stateful(item) else item, target.key, live)
    return live
