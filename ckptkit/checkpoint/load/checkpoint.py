"""Runs the steps of a load on all ranks: open, plan, agree, read, apply."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.entry import Catalog
from ckptkit.checkpoint.load.apply import apply_objects, apply_tensors, decode_plan
from ckptkit.checkpoint.load.differences import MANAGER, Mismatches, in_all
from ckptkit.checkpoint.load.options import LoadOptions
from ckptkit.checkpoint.load.plan_objects import check_merged
from ckptkit.checkpoint.load.planner import plan_load
from ckptkit.checkpoint.load.read import Reading
from ckptkit.checkpoint.load.shared_reads import exchange, groups_of
from ckptkit.checkpoint.report import LoadReport, PhaseClock
from ckptkit.checkpoint.run.coordinator import Coordinator, Outcome
from ckptkit.checkpoint.state.layout import refuse_idle
from ckptkit.checkpoint.state.train_state import TrainState, clear_half_loaded, mark_half_loaded
from ckptkit.errors import (
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    LoadError,
)

if TYPE_CHECKING:
    from ckptkit.formats.dcp.digests import SliceCheck
    from ckptkit.storage.store import Store

_log = logging.getLogger(__name__)


def load_checkpoint(
    state: TrainState,
    opened: Callable[[], tuple[Catalog, Store]],
    options: LoadOptions,
    *,
    coordinator: Coordinator,
    ready: Callable[[bool], None] | None = None,
    origin: str | None = None,
    call: str = MANAGER,
) -> LoadReport:
    """Load the checkpoint that `opened` returns into `state`, on all ranks or on none. All ranks must call it.

    Keys, shapes and dtypes are checked first; on a mismatch nothing is changed. Then tensors are read straight into the
    state, and their digests are checked during the read. If a read fails, the state is half loaded and cannot be saved.
    With `options.atomic`, everything is first read into a second copy and checked.

    Args:
        ready: Waits until the checkpoint is pinned, that is, protected from deletion. It is called before anything is
            read into the state, and again after the read. `ready(True)` also raises an error if the checkpoint was
            deleted before the pin took effect. This error replaces errors about missing files.
        origin: For a caller that retries with the same options: the value of `state.half_loaded` before its first
            attempt.
        call: What the user called; see `Mismatches.check`.

    Raises:
        CheckpointMismatchError: The checkpoint does not match the state. Every rank raises the same error, which lists
            all mismatches.
        CorruptCheckpointError: The checkpoint is damaged.
        LoadError: There is not enough memory for the second copy (only with `options.atomic`).
        RankFailedError: Another rank failed.
    """
    import torch

    from ckptkit.formats.dcp.digests import check_slices

    clock, rank, world_size = PhaseClock(), coordinator.rank, coordinator.world_size
    with clock.phase("plan"):
        # no_grad makes a DTensor's `to_local` twice as fast, because autograd does not record it.
        with _RankPart() as planned, _pinned(ready, sure=not options.atomic), torch.no_grad():
            catalog, store = opened()
            plan = plan_load(state, catalog, store, options, rank=rank, world_size=world_size)
            plan.mismatches.check(store.url, strict=options.strict, elsewhere=world_size > 1, call=call)
            reading = Reading(plan, store, options, world_size=world_size)
            decode = partial(decode_plan, plan, reading.refs.__getitem__, rank=rank, world_size=world_size)
            decoded = None
            if reading.first is not None:
                reading.first.run()
                decoded = decode()
                if reading.merges:
                    check_merged(plan, decoded.objects, options, rank, store.url)
            checks = reading.filler.unchecked() if options.verify and options.verify != "read" else []
            # Whether ranks that need the same data each read a share of it and send that share to the others.
            shared = options.replicas == "broadcast" or (options.replicas == "auto" and store.asking_costs)
            signature = reading.filler.signature() if world_size > 1 and shared else b""
            planned.value = checks, signature, plan.mismatches, store.url, plan.globs
        combine = partial(_shared, strict=options.strict, call=call)
        shares, alike, left = coordinator.settle(planned.answer, "loading", then=combine)
    plan.mismatches.unexpected = left
    report = LoadReport(
        store.url,
        plan.catalog.info.step,
        padded=plan.padded,
        missing=plan.mismatches.everything("missing"),
        unexpected=plan.mismatches.everything("unexpected"),
        skipped=dict(plan.skipped),
        notes=[*plan.notes, *plan.warnings],
        held=reading.held,
    )
    members, before = alike[rank], state._half
    parts = reading.filler.share_out(members.index(rank), len(members)) if len(members) > 1 else []
    if not options.atomic:
        state._half = report.url
    with _said_if_half(state):
        # With several ranks, check the pin even if this rank succeeds, because another rank may find a missing file.
        with _RankPart() as read, _pinned(ready, sure=world_size > 1):
            started = time.perf_counter()
            reading.filler.run()
            report.nbytes = reading.filler.nbytes + check_slices(store, shares[rank], reading.filler.workers)
            decoded = decoded or decode()
            clock.add("read", time.perf_counter() - started, report.nbytes)
        coordinator.settle(read.answer, "loading", then=_raise_one)
        if any(len(ranks) > 1 for ranks in alike):  # all ranks have now read successfully
            started = time.perf_counter()
            with _RankPart() as sent:
                report.received = exchange(coordinator, members, parts) if parts else 0
            coordinator.settle(sent.outcome, "exchanging replicated data")
            clock.add("exchange", time.perf_counter() - started, report.received)
        with clock.phase("apply"):
            # Set this even with `atomic`, because an object may refuse its state after other objects accepted theirs.
            state._half = report.url
            with _RankPart() as applied:
                apply_objects(state, plan, decoded, report)
            coordinator.settle(applied.outcome, "restoring the state of schedulers, dataloaders and extras")
            with _RankPart() as applied:
                apply_tensors(plan, reading, decoded, report, rank)
            coordinator.settle(applied.outcome, "restoring models and optimizers")
    if report.step is not None and options.key_map is None:
        state.step = report.step
    # A load of everything clears the half-loaded mark. A partial load clears it only if the state was whole before its
    # first attempt.
    complete = options.complete(report.missing)
    if len(complete) == 2 or (not report.missing and origin == ""):
        state.half_loaded = ""
    else:
        state._half = before
        clear_half_loaded(item for kind in complete for item in state.objects(kind))
    report.seconds, report.phases = clock.seconds(), tuple(clock.phases)
    return report


@dataclass(slots=True)
class _RankPart:
    """Runs one phase of a load on this rank, in a `with` block, and keeps the error instead of raising it.

    `outcome` contains the error or, if there is none, the `value` that the block set.
    """

    value: Any = None
    outcome: Outcome = field(default_factory=Outcome)

    @property
    def answer(self) -> Outcome:
        """Return the outcome to send to rank 0.

        A ckptkit error is sent as the value of a successful outcome, so that rank 0 receives the errors of all ranks
        and can combine them.
        """
        known = isinstance(self.outcome.cause, CkptkitError)
        return Outcome(self.outcome.cause) if known else self.outcome

    def __enter__(self) -> _RankPart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # Suppress even torch's CheckpointException, a BaseException. `settle` raises the error on all ranks.
        self.outcome = Outcome(self.value) if error is None else Outcome.of_error(error)
        return True


@contextmanager
def _pinned(ready: Callable[[bool], None] | None, *, sure: bool) -> Iterator[None]:
    """At the end of the `with` block, wait until the checkpoint is pinned, that is, protected from deletion.

    If `sure` is set, or if the block raises an error, also check that the checkpoint was not deleted before the pin
    took effect. If it was deleted, raise an error that says so, instead of the block's error.
    """
    if ready is None:
        yield
        return
    try:
        yield
    except FileNotFoundError as error:
        ready(True)
        if isinstance(error, CkptkitError):
            raise
        raise IncompleteCheckpointError(f"{error}. Was it deleted while it was opened?") from error
    except Exception:
        ready(True)
        raise
    ready(sure)


def _shared(
    answers: Sequence[Any], *, strict: bool, call: str
) -> tuple[list[list[SliceCheck]], list[list[int]], dict[str, list[str]]]:
    """Combine the ranks' plans. Returns three values:

    - for each rank, the slices that this rank checks for other ranks;
    - for each rank, the ranks that read the same data as this rank;
    - the names of saved tensors that no rank's state contains. All ranks must be asked, because a rank of a pipeline
      has only the names of its own stages.

    Raises:
        CheckpointMismatchError: The checkpoint has a tensor that no rank has (only with `strict`).
        UsageError: A glob in `TrainState(layout=...)` matches no tensor of any rank.
    """
    _raise_one(answers)
    checks, signatures, found, urls, globs = zip(*answers, strict=True)
    if any(globs):
        refuse_idle(globs)
    left = in_all([one.unexpected for one in found])
    Mismatches(unexpected=left, models=found[0].models).check(urls[0], strict=strict, call=call)
    return _share_checks(checks) if any(checks) else list(checks), groups_of(signatures), left


def _share_checks(wanted: Sequence[Sequence[SliceCheck]]) -> list[list[SliceCheck]]:
    """For each slice that no rank reads completely, choose a rank to check the slice's digest.

    Of the ranks that read a part of the slice, the rank that has been given the fewest bytes so far is chosen. The
    chosen rank reads the whole slice before any rank uses the data.
    """
    readers: dict[tuple[Any, int], list[int]] = {}
    slices: dict[tuple[Any, int], SliceCheck] = {}
    for rank, items in enumerate(wanted):
        for item in items:
            slices[item.origin, item.start] = item
            readers.setdefault((item.origin, item.start), []).append(rank)
    shares: list[list[SliceCheck]] = [[] for _ in wanted]
    load = [0] * len(wanted)
    for key, item in sorted(slices.items(), key=lambda pair: (-pair[1].nbytes, pair[0][0].path, pair[0][1])):
        rank = min(readers[key], key=load.__getitem__)
        load[rank] += item.nbytes
        shares[rank].append(item)
    return shares


@contextmanager
def _said_if_half(state: TrainState) -> Iterator[None]:
    """If the block fails and leaves the state half loaded, say so in the error message."""
    try:
        yield
    except BaseException as error:
        if not state.half_loaded:
            raise
        mark_half_loaded(state.objects(), state.half_loaded)  # another TrainState may contain these objects
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


def _raise_one(answers: Sequence[Any]) -> None:
    """Raise the ranks' errors, if any, as one error. Its message names the ranks, unless all have the same message.

    A CheckpointNotFoundError of any rank is raised as it is, because it explains the errors of the others.
    """
    errors = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, CkptkitError)}
    if not errors:
        return
    texts: dict[str, list[int]] = {}
    for rank, error in errors.items():
        if isinstance(error, CheckpointNotFoundError):
            raise error
        texts.setdefault(str(error), []).append(rank)
    kinds = {type(error) for error in errors.values()}
    lines = [text if len(ranks) == len(answers) else f"rank {ranks}: {text}" for text, ranks in texts.items()]
    kind = kinds.pop() if len(kinds) == 1 else LoadError
    if kinds and all(issubclass(other, CorruptCheckpointError) for other in kinds):
        kind = CorruptCheckpointError
    raise kind("\n".join(lines))
