"""A checkpoint read into a live training state: all is checked and read before anything is changed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.entry import Catalog
from ckptkit.checkpoint.load.buffers import Place
from ckptkit.checkpoint.load.fill import share_checks
from ckptkit.checkpoint.load.plan import LoadOptions, LoadPlan, ObjectTarget, OptimizerPlan
from ckptkit.checkpoint.load.shared_reads import exchange, groups_of
from ckptkit.checkpoint.load.stage import DecodedOptimizer, Staged, module_name, stage
from ckptkit.checkpoint.report import LoadReport, PhaseClock
from ckptkit.checkpoint.run.coordinator import Coordinator, Outcome
from ckptkit.checkpoint.state.half_loaded import clear
from ckptkit.checkpoint.state.local_part import layout_of
from ckptkit.checkpoint.state.optimizer import apply_settings, apply_state
from ckptkit.checkpoint.state.rng import reseed, restore_rng, shared_stream
from ckptkit.checkpoint.state.train_state import (
    PerRank,
    TrainState,
    canonical_modules,
    is_stateful,
    model_tensors,
    section,
)
from ckptkit.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    LoadError,
    UsageError,
)
from ckptkit.formats.own.manifest import MESHES, PLACEMENTS
from ckptkit.units import format_size

if TYPE_CHECKING:
    import torch

    from ckptkit.formats.dcp.fill import SliceCheck
    from ckptkit.storage.store import Store

__all__ = ["apply", "restore"]

_log = logging.getLogger(__name__)


def restore(
    state: TrainState,
    opened: Callable[[], tuple[Catalog, Store]],
    options: LoadOptions,
    *,
    coordinator: Coordinator,
    workers: int = 0,
    ready: Callable[[bool], None] | None = None,
    origin: str | None = None,
) -> LoadReport:
    """Load the checkpoint that `opened` gives into `state`, on all ranks or on none. All ranks must call it.

    Keys, shapes and dtypes are checked first: where they do not fit, nothing has changed. Then tensors are read
    straight into the state, and their digests are checked as they are read. An error while reading says that the
    state is half loaded, and such a state can't be saved. With `options.atomic`, all is read and checked beside the
    state first.

    Args:
        ready: Waits for the checkpoint's pin; with True also for the answer whether it was there in time, or the
            checkpoint is being deleted: then it raises, and that comes before what was found of the files. Nothing
            is read into the state before that is known.
        origin: `state.half_loaded` before the first attempt, where this is another one with the same options.

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
        checks = staged.unchecked() if options.verify and options.verify != "read" else []
        return checks, staged.signature() if world_size > 1 and _shares(options, store) else b""

    with clock.phase("plan"):
        planned = plan if ready is None else partial(_meanwhile, ready, plan, lambda: not options.atomic)
        shares, alike = coordinator.settle(Outcome.of(lambda: _or_error(planned)), "loading", then=_shared)
    staged, report = made[0]
    members = alike[rank]
    parts = staged.share_out(members.index(rank), len(members)) if len(members) > 1 else []

    def read() -> Any:
        started = time.perf_counter()
        report.nbytes = staged.read(shares[rank])
        clock.add("read", time.perf_counter() - started, report.nbytes)
        return staged.second is not None

    # One rank that has read all that it needs need not ask; of many, another may have found a file gone.
    sure = partial(bool, world_size > 1 or staged.second is not None)
    all_read = read if ready is None else partial(_meanwhile, ready, read, sure)
    before = state._half
    if not options.atomic:
        state._half = report.url
    with _said_if_half(state):
        again = coordinator.settle(Outcome.of(lambda: _or_error(all_read)), "loading", then=_any)
        _note(staged, report)
        if any(len(ranks) > 1 for ranks in alike):
            _exchange(coordinator, members, parts, report, clock)

        def fill() -> None:
            if again:
                coordinator.settle(Outcome.of(lambda: _or_error(staged.fill)), "loading", then=_raise_one)

        with clock.phase("apply"):
            # Also with `atomic`: an object that refuses its state comes after others that have taken theirs.
            state._half = report.url
            apply(state, staged, report, agree=coordinator.settle, fill=fill, rank=rank)
    # A part makes a half-loaded state whole only where an earlier attempt of the same load has left it so.
    if not report.missing and (options.whole or origin == ""):
        state.half_loaded = ""
    else:
        state._half = before
        clear(item for kind in options.complete(report.missing) for item in state.objects(kind))
    report.seconds, report.phases = clock.seconds(), clock.phases
    return report


def _exchange(
    coordinator: Coordinator,
    members: Sequence[int],
    parts: Sequence[Sequence[torch.Tensor]],
    report: LoadReport,
    clock: PhaseClock,
) -> None:
    """Let ranks that need the same send each other what they read: all ranks have read by now, and well."""

    def send() -> None:
        report.received = exchange(coordinator, members, parts) if parts else 0

    started = time.perf_counter()
    coordinator.settle(Outcome.of(send), "sending each other what replicas share")
    clock.add("exchange", time.perf_counter() - started, report.received)


def _shares(options: LoadOptions, store: Store) -> bool:
    """Whether a share is read and sent to the others, where ranks need the same."""
    return options.replicas == "broadcast" or (options.replicas == "auto" and store.asking_costs)


def _note(staged: Staged, report: LoadReport) -> None:
    report.missing = staged.plan.mismatches.everything("missing")
    report.unexpected = staged.plan.mismatches.everything("unexpected")
    report.skipped = dict(staged.plan.skipped)
    report.notes = list(staged.plan.notes)
    report.held, report.read_twice = staged.held, staged.read_twice
    if staged.read_twice:
        report.notes.append(
            f"{format_size(staged.read_twice)} are checked first and then read again, straight into the state: to hold "
            "them beside it is more than max_memory allows, or half of the memory that is free"
        )


@contextlib.contextmanager
def _said_if_half(state: TrainState) -> Iterator[None]:
    """Let an error say so if it leaves the state half loaded."""
    try:
        yield
    except BaseException as error:
        if not state.half_loaded:
            raise
        state.mark_objects_half_loaded()
        if not isinstance(error, CkptkitError):
            raise
        _log.error("the state is half loaded from %s; load a checkpoint before it is used or saved", state.half_loaded)
        text = "The state is half loaded: load a checkpoint before it is used or saved."
        if isinstance(error, OSError) and error.errno is not None:
            said: CkptkitError = type(error)(error.errno, f"{error.strerror}\n{text}")
        else:
            said = type(error)(f"{error}\n{text}")
        said.__dict__.update(error.__dict__)
        raise said from error


def _meanwhile(ready: Callable[[bool], None], part: Callable[[], Any], sure: Callable[[], bool]) -> Any:
    """Return what `part` returned, once the checkpoint is pinned; `sure`: and known to have been pinned in time."""
    try:
        found = part()
    except FileNotFoundError as error:
        ready(True)
        if isinstance(error, CkptkitError):
            raise
        raise IncompleteCheckpointError(f"{error}. Was it deleted while it was opened?") from error
    except Exception:
        ready(True)
        raise
    ready(sure())
    return found


def _or_error(part: Callable[[], Any]) -> Any:
    """Return what `part` returned, or the ckptkit error that it raised: rank 0 makes one error of all."""
    try:
        return part()
    except CkptkitError as error:
        return error


def _shared(answers: Sequence[Any]) -> tuple[list[list[SliceCheck]], list[list[int]]]:
    """Return by rank the slices that it checks for others, and the ranks that read the same as it does."""
    _raise_one([answer if isinstance(answer, CkptkitError) else None for answer in answers])
    return share_checks([checks for checks, _ in answers]), groups_of([signature for _, signature in answers])


def _any(answers: Sequence[Any]) -> bool:
    _raise_one([answer if isinstance(answer, CkptkitError) else None for answer in answers])
    return any(answers)


def _raise_one(errors: Sequence[CkptkitError | None]) -> None:
    """Raise what ranks ran into as one error. Most often it is the same on all: then as it is."""
    texts: dict[str, list[int]] = {}
    for rank, error in enumerate(errors):
        if error is not None:
            texts.setdefault(str(error), []).append(rank)
    kinds = {type(error) for error in errors if error is not None}
    if not kinds:
        return
    gone = next((error for error in errors if isinstance(error, CheckpointNotFoundError)), None)
    if gone is not None:
        raise gone  # which explains whatever others did not find
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
    why = (
        f"it was saved at world size {saved}, this job has {world_size}"
        if saved != world_size
        else _moved(state, catalog)
    )
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
    state: TrainState,
    staged: Staged,
    report: LoadReport,
    *,
    agree: Callable[[Outcome, str], None],
    fill: Callable[[], None],
    rank: int,
) -> None:
    """Change the training state, once everything was read. User objects come first: they are all that can still fail.

    Args:
        agree: Gets what each half came to (user objects, then tensors); raises on every rank if any failed.
        fill: Reads what is read straight into tensors.
    """
    plan, decoded = staged.plan, staged.decoded
    if decoded is None:
        raise UsageError("apply takes what `stage` returned.")

    def objects() -> None:
        for target, values in zip(plan.objects, decoded.objects, strict=True):
            _apply_object(state, target, values)
            report.loaded.append(target.key)

    def tensors() -> None:
        _apply_weights(staged, report)
        loaded = {id(target.live) for target in plan.models}
        for optimizer, places, other in zip(plan.optimizers, staged.states, decoded.optimizers, strict=True):
            states = {fqn: {name: _finished(place) for name, place in found.items()} for fqn, found in places.items()}
            apply_optimizer(optimizer, states, other, loaded)
            if not optimizer.skip:
                report.loaded.append(optimizer.key)
        if plan.rng is not None:
            _apply_rng(plan, decoded.rng, report, rank)

    agree(Outcome.of(objects), "restoring the state of schedulers, dataloaders and extras")
    fill()
    agree(Outcome.of(tensors), "restoring models and optimizers")
    if report.step is not None:
        state.step = report.step
    report.extra.update(decoded.leftovers)


def _apply_object(state: TrainState, target: ObjectTarget, values: Sequence[Any]) -> None:
    import torch

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
    elif target.kind == "extra" and isinstance(item, torch.nn.Module):
        item.load_state_dict(value, strict=False)  # what differs was found before, or may
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
        for place, target in zip(staged.weights, staged.plan.models, strict=True):
            place.finish()
            report.loaded.append(target.key)
            live = str(target.live.dtype).removeprefix("torch.")
            if live != target.entry.dtype:
                report.notes.append(f"{target.key}: cast from {target.entry.dtype} to {live}")
        for module, state in staged.plan.handed:
            module.load_state_dict(state, strict=False)
    staged.weights.clear()


def _finished(place: Place) -> torch.Tensor:
    place.finish()
    assert place.tensor is not None
    return place.tensor


def apply_optimizer(
    plan: OptimizerPlan, states: Mapping[str, Any], other: DecodedOptimizer, loaded: Collection[int]
) -> None:
    """Replace an optimizer's state and settings; masters that nothing was saved for follow the loaded weights.

    Args:
        loaded: The ids of the parameters whose weights were loaded.
    """
    if not plan.skip:
        new = {fqn: dict(state) for fqn, state in states.items()}
        for fqn, values in other.values.items():
            new.setdefault(fqn, {}).update(values)
        _kept_masters(plan, new)
        apply_state(plan.optimizer, plan.parameters, new, other.shared, keep=plan.keep)
        apply_settings(plan.optimizer, plan.groups.settings)
    _follow_weights(plan, loaded)


def _kept_masters(plan: OptimizerPlan, new: dict[str, dict[str, Any]]) -> None:
    """Carry over the live masters that the checkpoint has none for; `_follow_weights` fills them."""
    if plan.master_name is None:
        return
    for fqn, entry in plan.masters.items():
        live = plan.optimizer.state.get(plan.parameters[fqn], {})
        if entry is None and plan.master_name in live:
            new.setdefault(fqn, {})[plan.master_name] = live[plan.master_name]


def _follow_weights(plan: OptimizerPlan, loaded: Collection[int]) -> None:
    import torch

    if plan.master_name is None:
        return
    with torch.no_grad():
        for fqn, entry in plan.masters.items():
            parameter = plan.parameters[fqn]
            master = plan.optimizer.state.get(parameter, {}).get(plan.master_name)
            if entry is None and master is not None and id(parameter) in loaded:
                master.copy_(parameter)  # placed alike: no communication


def _apply_rng(plan: LoadPlan, saved: Mapping[str, Any], report: LoadReport, rank: int) -> None:
    if plan.reseed:
        # ranks that share a stream go on sharing it
        seed = reseed(saved["torch"].tolist(), shared_stream(rank, 0)[0])
        report.notes.append(f"rng: seeded with {seed} on rank {rank}")
        return
    missing = restore_rng(saved)
    report.loaded.append("rng")
    report.notes += [f"rng: the state of {name} was not restored, there is none here" for name in missing]
