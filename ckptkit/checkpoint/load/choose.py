"""Chooses a checkpoint of a run, pins it, and loads it. If it is damaged, falls back to an earlier checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from ckptkit.catalog.entry import Catalog
from ckptkit.checkpoint.load.checkpoint import load_checkpoint
from ckptkit.checkpoint.load.foreign_run import find_foreign, refuse_lost_step
from ckptkit.checkpoint.load.options import LoadOptions
from ckptkit.checkpoint.report import DeferredOptimizer, LoadReport, write_trace_file
from ckptkit.checkpoint.run.address import resolve_url
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.run.hold import RunHold
from ckptkit.checkpoint.run.inventory import Skipped, about_new, check_new, choose, list_checkpoints
from ckptkit.checkpoint.run.pins import pin_unseen, pin_url, pin_while_reading
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, command_line
from ckptkit.formats.detect import Candidate, open_source
from ckptkit.formats.own.reader import open_catalog
from ckptkit.formats.own.record import CommitRecord
from ckptkit.storage.listing import snapshot
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.retry import patient
from ckptkit.storage.store import Store

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Loader:
    """Loads checkpoints from one run, or from any URL. All ranks must create it and call `load` together.

    Attributes:
        looked: Whether a load has already searched for the latest checkpoint and reported the directories that it
            skipped.
        resumed: The checkpoint that this process resumed from, by the run's root URL. All loaders of a process share
            it, so it is still known after the manager was closed.
    """

    url: str  # the root, as the user passed it
    root: Store
    coordinator: Coordinator
    hold: RunHold  # keeps the pin on the checkpoint that the run was resumed from
    best: tuple[str, str] | None  # what "best" means: a metric, and "min" or "max"
    start_fresh: str  # as for `CheckpointManager`
    trace: Path | None  # a directory for Chrome traces
    storage_options: Mapping[str, Any] | None
    given_up: set[str] = field(default_factory=set)  # damaged checkpoints; a load fell back to an earlier one
    looked: bool = False

    resumed: ClassVar[dict[str, str]] = {}

    @patient()
    def load(self, state: TrainState, which: str | int, options: LoadOptions, *, fallback: str) -> LoadReport | None:
        """Restore `state` in place; see `CheckpointManager.load`."""
        if isinstance(which, str) and ("/" in which or "\\" in which):

            def exact() -> str:  # once, on rank 0, because a run's newest checkpoint may change
                named = resolve_url(which, storage_options=self.storage_options)
                return open_source(named, storage_options=self.storage_options).url

            url = self.coordinator.decide(exact, "choosing a checkpoint")
            return self._restore(url, None, state, options)
        damaged: list[str] = []
        notes: list[str] = []
        first: CorruptCheckpointError | None = None
        rotated, origin = "", state.half_loaded
        while True:
            name = ""
            try:
                chosen = self.coordinator.decide(partial(self._choose, which, damaged), "choosing a checkpoint")
                if chosen is None:
                    break
                if isinstance(chosen, Skipped):
                    name = chosen.path
                    raise CorruptCheckpointError(f"{self.url}/{name} cannot be opened: {chosen.reason}")
                path, record = chosen
                name = record.name
                report = self._restore(path, record, state, options, resume=True, origin=origin)
            except CheckpointNotFoundError:
                # Another job's rotation deleted the checkpoint before we pinned it. Choose again; if the choice is the
                # same, raise.
                if not name or name == rotated:
                    raise
                rotated = name
            except CorruptCheckpointError as error:
                if not name:
                    raise
                if fallback == "error":
                    ways = self.coordinator.decide(partial(self._older, name), "looking for an older checkpoint")
                    raise type(error)(f"{error}\n{ways}") from error
                text = f"{self.url}/{name} is damaged, falling back to the previous checkpoint: {error}"
                self.coordinator.decide(partial(_log.warning, "%s", text), "warning of damage")
                first = first or error
                damaged.append(name)
                notes.append(text.partition("\n")[0])
            else:
                self.resumed[self.root.url] = name
                self.given_up.update(damaged)
                self.looked |= which == "latest"
                report.metrics, report.client_state = dict(record.metrics), record.client_state
                report.notes[:0] = notes
                return report
        if first is not None:
            raise type(first)(f"{first}\nThere is no older checkpoint to fall back to.") from first
        self.looked |= which == "latest"
        self.resumed.pop(self.root.url, None)
        other = self.coordinator.decide(partial(self._begin, state, options), "beginning a run")
        return self._restore(other, None, state, options) if other else None

    def latest(self) -> int | None:
        """Return the latest checkpoint's step, or None if the run is new. Call on rank 0. Raises what `load` raises."""
        inventory = list_checkpoints(self.root)
        if inventory.latest is not None:
            return inventory.latest.step
        if self.start_fresh != "if_none_committed":
            check_new(self.root, inventory)
        return None

    def _begin(self, state: TrainState, options: LoadOptions) -> str:
        """Return the URL of another system's checkpoint to resume from, or "" if there is none. Call on rank 0."""
        self.latest()
        wanted, lost = options.optimizer != "skip", self.start_fresh == "if_none_committed"
        other = find_foreign(
            self.url, self.root, state, optimizer=wanted, lost_steps=lost, storage_options=self.storage_options
        )
        text = about_new(self.root, list_checkpoints(self.root))
        if not other and not lost:
            refuse_lost_step(self.url, Candidate(self.root))
        if other:
            _log.info("%s has no ckptkit checkpoint yet; continuing from %s", self.url, other)
        elif self.start_fresh == "never":
            raise CheckpointNotFoundError(f"start_fresh='never' requires a checkpoint, but {text}")
        else:
            _log.log(logging.WARNING if "did you mean" in text.lower() else logging.INFO, "%s", text)
        return other

    def _choose(self, which: str | int, damaged: Collection[str] = ()) -> tuple[str, CommitRecord] | Skipped | None:
        found = choose(self.root, which, damaged=damaged, best=self.best, view=snapshot(self.root))
        if isinstance(found, Skipped) and found.unanswered:  # don't fall back: this checkpoint may be undamaged
            raise StorageError(found.reason)
        return found

    def _older(self, name: str) -> str:
        """Return how to see the damage of the checkpoint `name`, and how to load an older one. Call on rank 0."""
        see = f"To see all damage: `{command_line('verify', f'{self.url}/{name}')}`."
        try:
            names = [item.name for item in list_checkpoints(self.root).committed]
        except (StorageError, OSError):
            return see
        older = names[: names.index(name)] if name in names else names
        if not older:
            return f"{see} There is no older checkpoint to load."
        return (
            f"{see} The checkpoint before it is {older[-1]}: load it by its name, or pass fallback='previous' to "
            "CheckpointManager.load, or move the damaged one away."
        )

    def _restore(
        self,
        place: str,
        record: CommitRecord | None,
        state: TrainState,
        options: LoadOptions,
        *,
        resume: bool = False,
        origin: str | None = None,
    ) -> LoadReport:
        """Load one checkpoint.

        With a `record`, `place` is the checkpoint's path in this run. Without one, `place` is any checkpoint's URL.
        With `resume`, the checkpoint stays pinned after the load.
        """

        with ExitStack() as stack:
            # Rank 0 pins the checkpoint for all ranks until every rank has finished reading.
            pinned, ready = self._pin(place, record, stack, resume=resume)

            def opened() -> tuple[Catalog, Store]:
                if pinned is not None:
                    store = self.root.child(place)
                    return open_catalog(store, record=pinned), store
                source = open_source(place, storage_options=self.storage_options)
                return source.catalog, source.store

            report = load_checkpoint(state, opened, options, coordinator=self.coordinator, ready=ready, origin=origin)
            if resume and self.coordinator.is_main:
                self.hold.keep(stack.pop_all())  # protects the checkpoint from `ckptkit prune`, too
        self._announce_load(report)
        if options.optimizer == "deferred":
            report.deferred = DeferredOptimizer(state, options, partial(self._restore, place, record))
        return report

    def _pin(
        self, place: str, chosen: CommitRecord | None, stack: ExitStack, *, resume: bool
    ) -> tuple[CommitRecord | None, Callable[[bool], None] | None]:
        """Pin a checkpoint on rank 0. Return its record on all ranks, and a function that waits until it is pinned.

        On an object store, a pin takes three requests: one writes the pin, two confirm that it took effect. The load
        reads metadata in the meantime. If all files can be read, the load is valid. If a file is missing, the
        confirmation shows whether the checkpoint was deleted before the pin took effect.
        """
        why = "resumed from" if resume else "load"
        if chosen is None:
            foreign = pin_url(place, storage_options=self.storage_options)
            self.coordinator.decide(partial(stack.enter_context, foreign), "pinning the checkpoint")
            return None, None
        if not resume or not self.root.asking_costs:
            pin = pin_while_reading(self.root, place, why=why)
            return self.coordinator.decide(partial(stack.enter_context, pin), "pinning the checkpoint"), None
        if not self.coordinator.is_main:
            return chosen, lambda sure: None
        unseen = pin_unseen(self.root, place, why=why)
        pool = WorkerPool(1, thread_name_prefix="ckptkit-pin")
        entered = pool.submit(unseen.__enter__)

        def ask() -> CommitRecord:
            return entered.result()()

        looked = pool.submit(ask) if self.coordinator.world_size > 1 else None  # always needed with several ranks
        pool.shutdown(wait=False)

        def leave(kind: Any, error: Any, trace: Any) -> None:
            if looked is not None:
                looked.exception()
            if entered.exception() is None:
                unseen.__exit__(kind, error, trace)

        stack.push(leave)

        def pinned(sure: bool) -> None:
            look = entered.result()
            if sure and (look() if looked is None else looked.result()).save_id != chosen.save_id:
                raise CheckpointNotFoundError(f"{self.url}/{chosen.name} was replaced while it was opened. Load again.")

        return chosen, pinned

    def _announce_load(self, report: LoadReport) -> None:
        if self.coordinator.is_main:
            if _log.isEnabledFor(logging.INFO):
                _log.info("%s", report.line())
            for note in report.notes:
                lacks = note.startswith(("not proved: ", "not restored: "))
                _log.log(logging.WARNING if lacks else logging.INFO, "%s", note)
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("step %s: %s", report.step, report.phase_line())
        if self.trace is not None:
            write_trace_file(self.trace, "load", report, rank=self.coordinator.rank)
