"""A checkpoint read into a live training state: all is checked and read before anything is changed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.entry import Catalog, TensorEntry
from ckptkit.checkpoint.coordinator import Coordinator, Outcome
from ckptkit.checkpoint.decoded import Decoded, DecodedOptimizer, decode_plan, module_name
from ckptkit.checkpoint.fill import Fill, prepare, read_whole, run, share_checks
from ckptkit.checkpoint.foreign import Adopted, adopt
from ckptkit.checkpoint.load_plan import LoadOptions, LoadPlan, ObjectTarget, OptimizerPlan, plan_load
from ckptkit.checkpoint.optimizer_state import apply_settings, apply_state, new_state_tensor
from ckptkit.checkpoint.parts import layout_of, part_view
from ckptkit.checkpoint.replicas import own_copies
from ckptkit.checkpoint.report import LoadReport, PhaseClock
from ckptkit.checkpoint.rng import reseed, restore_rng
from ckptkit.checkpoint.state import PerRank, TrainState, canonical_modules, is_stateful, model_tensors, section
from ckptkit.checkpoint.values import JSON, encode
from ckptkit.errors import (
    CheckpointMismatchError,
    CkptkitError,
    CorruptCheckpointError,
    LoadError,
    SaveError,
    UsageError,
)
from ckptkit.formats.ckptkit import OBJECTS_NAME
from ckptkit.formats.manifest import MESHES, PLACEMENTS

if TYPE_CHECKING:
    import torch

    from ckptkit.formats.dcp_fill import Filler, SliceCheck
    from ckptkit.storage.store import Store

__all__ = ["Staged", "apply", "json_objects", "restore", "stage"]

_log = logging.getLogger(__name__)


def json_objects(catalog: Catalog) -> dict[str, JSON]:
    """Return what a checkpoint of ours holds besides tensors; nothing for one that ckptkit did not write."""
    found = catalog.objects.values()
    return {entry.name: entry.value for entry in found if entry.path.rpartition("/")[2] == OBJECTS_NAME}


@dataclass(slots=True)
class Staged:
    """A load that has read and checked everything, and changed nothing yet.

    Attributes:
        weights: (live local tensor, what it gets), in the order of `plan.models`; the same twice if read in place.
        states: For each optimizer of the plan, FQN -> state name -> new tensor.
        refs: The tensors that objects refer to.
        decoded: What objects stand for.
        filler: Reads `weights`, `states` and `refs`.
    """

    plan: LoadPlan
    weights: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    states: list[dict[str, dict[str, torch.Tensor]]] = field(default_factory=list)
    refs: dict[str, torch.Tensor] = field(default_factory=dict)
    decoded: Decoded | None = None
    filler: Filler | None = None


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
    staged = Staged(plan)
    fills = _Fills(rank)
    for target in plan.models:
        staged.weights.append(fills.like(target.live, target.entry, in_place=options.in_place))
    for optimizer in plan.optimizers:
        staged.states.append(_optimizer_fills(optimizer, fills))
    staged.refs = _reference_fills(state, plan, catalog, store, fills, rank, foreign.tensors)
    staged.decoded = decode_plan(plan, staged.refs.__getitem__)
    staged.filler = prepare(catalog, store, fills.fills, workers=workers, verify=bool(options.verify))
    return staged


class _Fills:
    """Collects what is to be read."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.fills: list[Fill] = []

    def like(
        self, live: torch.Tensor, entry: TensorEntry, *, in_place: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan to read a live tensor's part into a new one; return the local live one and the new one."""
        import torch

        view = part_view(entry.name, live, self.rank)
        dtype = getattr(torch, entry.dtype)
        same = in_place and view.local.dtype == dtype
        new = view.local if same else torch.empty(tuple(view.local.shape), dtype=dtype)
        self.fills.append(Fill(entry.name, new, view.parts))
        return view.local, new

    def into(self, new: torch.Tensor, entry: TensorEntry) -> None:
        """Plan to read into a new tensor, which nothing else refers to."""
        view = part_view(entry.name, new, self.rank)
        self.fills.append(Fill(entry.name, view.local, view.parts))


def _optimizer_fills(plan: OptimizerPlan, fills: _Fills) -> dict[str, dict[str, torch.Tensor]]:
    import torch

    on_device = {
        id(parameter): bool(group.get("fused") or group.get("capturable"))
        for group in plan.optimizer.param_groups
        for parameter in group["params"]
    }
    states: dict[str, dict[str, torch.Tensor]] = {}
    for fqn, parameter in plan.parameters.items():
        wanted = dict(plan.states.get(fqn, {}))
        master = plan.masters.get(fqn)
        if master is not None and plan.master_name is not None:
            wanted[plan.master_name] = master
        for name, entry in wanted.items():
            dtype = getattr(torch, entry.dtype)
            new = new_state_tensor(parameter, name, dtype, entry.shape, on_device=on_device[id(parameter)])
            fills.into(new, entry)
            states.setdefault(fqn, {})[name] = new
    return states


def _reference_fills(
    state: TrainState,
    plan: LoadPlan,
    catalog: Catalog,
    store: Store,
    fills: _Fills,
    rank: int,
    held: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Plan the reads of tensors inside objects: placed like the live value's own under that name, else whole.

    Args:
        held: Those that were read already.
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
        fills.into(refs[key], entry)
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


def restore(
    state: TrainState,
    opened: Callable[[], tuple[Catalog, Store]],
    options: LoadOptions,
    *,
    coordinator: Coordinator,
    workers: int = 0,
) -> LoadReport:
    """Load the checkpoint that `opened` gives into `state`, on all ranks or on none. All ranks must call it.

    Everything is checked and read first; where a rank fails in that, every rank raises and nothing has changed.

    Raises:
        CheckpointMismatchError: Lists all that does not fit, the same on every rank.
        CorruptCheckpointError: The checkpoint is damaged.
        RankFailedError: Another rank failed.
    """
    clock = PhaseClock()
    rank, world_size = coordinator.rank, coordinator.world_size
    made: list[tuple[Staged, LoadReport]] = []

    def plan() -> Any:
        catalog, store = opened()
        check_local(state, catalog, store.url, world_size=world_size)
        staged = stage(state, catalog, store, options, rank=rank, world_size=world_size, workers=workers)
        made.append((staged, LoadReport(store.url, catalog.info.step)))
        everything = options.verify and options.verify != "read"
        return staged.filler.unchecked() if everything and staged.filler is not None else []

    with clock.phase("plan"):
        shares = coordinator.settle(Outcome.of(lambda: _or_error(plan)), "loading", then=_shared)
    staged, report = made[0]

    def read() -> Any:
        if staged.filler is not None:
            started = time.perf_counter()
            report.nbytes = run(staged.filler, shares[rank])
            staged.filler = None
            clock.add("read", time.perf_counter() - started, report.nbytes)

    coordinator.settle(Outcome.of(lambda: _or_error(read)), "loading", then=_raise_one)
    report.missing = staged.plan.mismatches.everything("missing")
    report.unexpected = staged.plan.mismatches.everything("unexpected")
    report.skipped = dict(staged.plan.skipped)
    report.notes = list(staged.plan.notes)

    def agree(outcome: Outcome) -> None:
        coordinator.settle(outcome, "restoring the state of schedulers, dataloaders and extras")

    with clock.phase("apply"):
        apply(state, staged, report, agree=agree, rank=rank)
    report.seconds, report.phases = clock.seconds(), clock.phases
    return report


def _or_error(part: Callable[[], Any]) -> Any:
    """Return what `part` returned, or the ckptkit error that it raised: rank 0 makes one error of all."""
    try:
        return part()
    except CkptkitError as error:
        return error


def _shared(answers: Sequence[Any]) -> list[list[SliceCheck]]:
    _raise_one([answer if isinstance(answer, CkptkitError) else None for answer in answers])
    return share_checks(answers)


def _raise_one(errors: Sequence[CkptkitError | None]) -> None:
    """Raise what ranks ran into as one error. Most often it is the same on all: then as it is."""
    texts: dict[str, list[int]] = {}
    for rank, error in enumerate(errors):
        if error is not None:
            texts.setdefault(str(error), []).append(rank)
    kinds = {type(error) for error in errors if error is not None}
    if not kinds:
        return
    lines = [text if len(ranks) == len(errors) else f"rank {ranks}: {text}" for text, ranks in texts.items()]
    kind = kinds.pop() if len(kinds) == 1 else LoadError
    if kinds and all(issubclass(other, CorruptCheckpointError) for other in kinds):
        kind = CorruptCheckpointError
    raise kind("\n".join(lines))


def check_local(state: TrainState, catalog: Catalog, url: str, *, world_size: int) -> None:
    """Raise unless a LOCAL checkpoint was saved by as many ranks, on the same mesh, with the same placements.

    Raises:
        CheckpointMismatchError: Names the command that makes a checkpoint for this job.
    """
    if catalog.info.format != "ckptkit-local":
        return
    saved = catalog.info.world_size
    why = f"it was saved by {saved} ranks, this job has {world_size}" if saved != world_size else _moved(state, catalog)
    if why:
        mesh = _live_mesh(state)
        flag = f" --mesh {mesh}" if mesh else ""
        raise CheckpointMismatchError(
            f"{url} is a LOCAL checkpoint, which loads only where it was saved: {why}. Make one for this job:\n"
            f"  ckptkit reshard {url} DST --world-size {world_size}{flag} --type local"
        )


def _moved(state: TrainState, catalog: Catalog) -> str:
    """Tell which parameter is placed otherwise than in the checkpoint; "" where none is."""
    from torch.distributed.tensor import DTensor

    meshes, placements = catalog.info.extra.get(MESHES, []), catalog.info.extra.get(PLACEMENTS, {})
    for name, module in state.parts("model").items():
        for fqn, tensor in model_tensors(module)[0].items():
            key = f"{section('model', name)}.{fqn}"
            if key not in catalog.tensors:
                continue
            saved = placements.get(key)
            was = None if saved is None else (tuple(meshes[saved[0]]["shape"]), tuple(saved[1]))
            layout = layout_of(tensor) if isinstance(tensor, DTensor) else None
            now = None if layout is None else (layout.mesh_shape, layout.texts())
            if was != now:
                return f"{key} was placed {was or 'whole on each rank'}, here it is {now or 'whole on each rank'}"
    return ""


def _live_mesh(state: TrainState) -> str:
    from torch.distributed.tensor import DTensor

    for module in state.parts("model").values():
        for tensor in model_tensors(module)[0].values():
            if isinstance(tensor, DTensor) and tensor.device_mesh.ndim > 1:
                layout = layout_of(tensor)
                return ",".join(f"{n}={s}" for n, s in zip(layout.mesh_names, layout.mesh_shape, strict=True))
    return ""


def apply(
    state: TrainState, staged: Staged, report: LoadReport, *, agree: Callable[[Outcome], None], rank: int
) -> None:
    """Change the training state, once everything was read. User objects come first: they are all that can still fail.

    Args:
        agree: Gets what restoring user objects came to; raises on every rank if any failed, before tensors change.
    """
    plan, decoded = staged.plan, staged.decoded
    if decoded is None:
        raise UsageError("apply takes what `stage` returned.")

    def objects() -> None:
        for target, values in zip(plan.objects, decoded.objects, strict=True):
            _apply_object(state, target, values)
            report.loaded.append(target.key)

    agree(Outcome.of(objects))
    _apply_weights(staged, report)
    for optimizer, states, other in zip(plan.optimizers, staged.states, decoded.optimizers, strict=True):
        apply_optimizer(optimizer, states, other)
        if not optimizer.skip:
            report.loaded.append(optimizer.key)
    if plan.rng is not None:
        _apply_rng(plan, decoded.rng, report, rank)
    if report.step is not None:
        state.step = report.step
    report.extra.update(decoded.leftovers)


def _apply_object(state: TrainState, target: ObjectTarget, values: Sequence[Any]) -> None:
    value = values[0]
    if target.merge is not None:
        import torch.distributed as dist

        ready = dist.is_available() and dist.is_initialized()
        value = target.merge(values, dist.get_rank() if ready else 0, dist.get_world_size() if ready else 1)
    item = target.item.value if isinstance(target.item, PerRank) else target.item
    if target.kind == "model":
        modules = canonical_modules(target.item)
        for name, extra_state in value.items():
            modules[module_name(name)].set_extra_state(extra_state)
    elif target.kind != "extra" or is_stateful(item):
        item.load_state_dict(value)
        if target.kind == "dataloader":
            _make_iterator(item)
    else:
        name = target.key.removeprefix("extra.")
        state.extra[name] = PerRank(value) if isinstance(target.item, PerRank) else value


def _make_iterator(dataloader: Any) -> None:
    """Let torchdata's StatefulDataLoader make its iterator now. That draws a random number; in the run that was saved
    it was drawn before, so it must come before the generators are restored. The next `iter` takes this iterator."""
    from torch.utils.data import DataLoader

    if isinstance(dataloader, DataLoader):
        dataloader.state_dict()  # type: ignore[attr-defined]  # the only way in; torch's own has no state


def _apply_weights(staged: Staged, report: LoadReport) -> None:
    import torch

    with torch.no_grad():
        for (live, new), target in zip(staged.weights, staged.plan.models, strict=True):
            if live is not new:
                live.copy_(new)
            report.loaded.append(target.key)
            if live.dtype != new.dtype:
                report.notes.append(f"{target.key}: cast from {target.entry.dtype} to {str(live.dtype)[6:]}")
        for module, state in staged.plan.handed:
            module.load_state_dict(state, strict=False)
    staged.weights.clear()


def apply_optimizer(plan: OptimizerPlan, states: Mapping[str, Any], other: DecodedOptimizer) -> None:
    """Replace an optimizer's state and settings; masters that nothing was saved for follow the loaded weights."""
    if not plan.skip:
        new = {fqn: dict(state) for fqn, state in states.items()}
        for fqn, values in other.values.items():
            new.setdefault(fqn, {}).update(values)
        _kept_masters(plan, new)
        apply_state(plan.optimizer, plan.parameters, new, other.shared, keep=plan.keep)
        apply_settings(plan.optimizer, plan.groups.settings)
    _follow_weights(plan)


def _kept_masters(plan: OptimizerPlan, new: dict[str, dict[str, Any]]) -> None:
    """Carry over the live masters that the checkpoint has none for; `_follow_weights` fills them."""
    if plan.master_name is None:
        return
    for fqn, entry in plan.masters.items():
        live = plan.optimizer.state.get(plan.parameters[fqn], {})
        if entry is None and plan.master_name in live:
            new.setdefault(fqn, {})[plan.master_name] = live[plan.master_name]


def _follow_weights(plan: OptimizerPlan) -> None:
    import torch

    if plan.master_name is None:
        return
    with torch.no_grad():
        for fqn, entry in plan.masters.items():
            parameter = plan.parameters[fqn]
            master = plan.optimizer.state.get(parameter, {}).get(plan.master_name)
            if entry is None and master is not None:
                master.copy_(parameter)  # placed alike: no communication


def _apply_rng(plan: LoadPlan, saved: Mapping[str, Any], report: LoadReport, rank: int) -> None:
    if plan.reseed:
        seed = reseed(saved["torch"].tolist(), rank)
        report.notes.append(f"rng: seeded with {seed} on rank {rank}")
        return
    missing = restore_rng(saved)
    report.loaded.append("rng")
    report.notes += [f"rng: the state of {name} was not restored, there is none here" for name in missing]
