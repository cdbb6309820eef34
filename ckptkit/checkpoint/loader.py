"""The load half of a manager: which checkpoint, pinned while it is read, and the one before a damaged one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptkit.catalog.entry import Catalog
from ckptkit.checkpoint.address import resolve_url
from ckptkit.checkpoint.coordinator import Coordinator
from ckptkit.checkpoint.deferred import DeferredOptimizer
from ckptkit.checkpoint.hold import RunHold
from ckptkit.checkpoint.inventory import Skipped, choose
from ckptkit.checkpoint.likely import fetch_likely
from ckptkit.checkpoint.load import restore
from ckptkit.checkpoint.load_plan import LoadOptions
from ckptkit.checkpoint.pins import pin_unseen, pin_url, pin_while_reading
from ckptkit.checkpoint.report import LoadReport, write_trace_file
from ckptkit.checkpoint.state import TrainState
from ckptkit.errors import CheckpointNotFoundError, CorruptCheckpointError, StorageError, UsageError
from ckptkit.formats.ckptkit import open_catalog
from ckptkit.formats.layout import CommitRecord
from ckptkit.storage.ahead import ReadAhead
from ckptkit.storage.snapshot import snapshot
from ckptkit.storage.store import Store

__all__ = ["Loader", "load_options"]

_log = logging.getLogger(__name__)

_ADVICE = (
    "`ckptkit verify {url}` names all the damage; load(..., fallback='previous') loads the checkpoint before it; "
    "'latest~1' or a step loads another one."
)


class Loader:
    """Loads checkpoints of one run, or of anywhere. All ranks make it, and call `load`, together.

    Args:
        url: The root as the user calls it.
        hold: Keeps the pin of what the run was resumed from.
        best: What "best" means: a metric, and "min" or "max".
        trace: A directory for Chrome traces.

    Attributes:
        resumed_from: The name of the checkpoint that was loaded last from the run itself.
        given_up: Damaged checkpoints that a load has fallen back from.
    """

    def __init__(
        self,
        url: str,
        root: Store,
        *,
        coordinator: Coordinator,
        hold: RunHold,
        best: tuple[str, str] | None,
        trace: Path | None,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self._url = url
        self._root = root
        self._coordinator = coordinator
        self._hold = hold
        self._best = best
        self._trace = trace
        self._storage_options = storage_options
        self._ahead: ReadAhead | None = None  # what is fetched on a guess, while a checkpoint is chosen
        self.resumed_from: str | None = None
        self.given_up: set[str] = set()

    def load(self, state: TrainState, which: str | int, options: LoadOptions, *, fallback: str) -> LoadReport | None:
        """Restore `state` in place, as `CheckpointManager.load` says."""
        if isinstance(which, str) and _is_url(which):
            return self._load_url(which, state, options)
        if fallback not in ("error", "previous"):
            raise UsageError(f"fallback={fallback!r}: it is 'error' or 'previous'.")
        found = self._load_chosen(which, state, options, fallback == "previous")
        if found is None:
            other = self._coordinator.decide(lambda: self._adoptable(which, state), "looking for others' checkpoints")
            if other:
                if self._coordinator.is_main:
                    _log.info("%s has no checkpoint of ckptkit yet; going on from %s", self._url, other)
                return self._load_url(other, state, options)
            if self._coordinator.is_main:
                _log.info("%s has no checkpoint yet", self._url)
            return None
        path, record, report = found
        report.metrics = dict(record.metrics)
        report.client_state = record.client_state
        if options.optimizer == "deferred":
            report.deferred = DeferredOptimizer(state, options, lambda s, o: self._load_committed(path, s, o))
        return report

    def _adoptable(self, which: str | int, state: TrainState) -> str:
        if which != "latest":
            return ""
        from ckptkit.checkpoint.adopt import adoptable

        return adoptable(self._url, self._root, state, storage_options=self._storage_options)

    def _choose(self, which: str | int, damaged: Collection[str] = ()) -> tuple[str, CommitRecord] | Skipped | None:
        view = snapshot(self._root)
        self._ahead = None
        if not damaged:
            self._ahead = fetch_likely(self._root, view, which, data=self._coordinator.world_size == 1)
        found = choose(self._root, which, damaged=damaged, best=self._best, view=view)
        if isinstance(found, Skipped) and found.unanswered:  # the one before is no stand-in for what may be well
            raise StorageError(found.reason)
        return found

    def _load_chosen(
        self, which: str | int, state: TrainState, options: LoadOptions, fall_back: bool
    ) -> tuple[str, CommitRecord, LoadReport] | None:
        """Load what `which` means; with `fall_back`, the newest before it that is not damaged."""
        damaged: list[str] = []
        first: CorruptCheckpointError | None = None
        rotated = ""
        while True:
            name = ""
            try:
                chosen = self._coordinator.decide(lambda: self._choose(which, damaged), "choosing a checkpoint")
                if chosen is None:
                    break
                if isinstance(chosen, Skipped):
                    name = chosen.path
                    raise CorruptCheckpointError(chosen.reason)
                path, record = chosen
                name = record.name
                report = self._load_committed(path, state, options, resume=True, chosen=record)
                self.resumed_from = name
                self.given_up.update(damaged)
                return path, record, report
            except CheckpointNotFoundError:
                # Another job's rotation was faster than our pin: choose again, unless it is the same one once more.
                if not name or name == rotated:
                    raise
                rotated = name
            except CorruptCheckpointError as error:
                if not fall_back or not name:
                    raise type(error)(f"{error}\n{_ADVICE.format(url=f'{self._url}/{name}')}") from error
                if self._coordinator.is_main:
                    _log.warning("%s/%s is damaged, falling back to the one before it: %s", self._url, name, error)
                first = first or error
                damaged.append(name)
        if first is not None:
            raise type(first)(f"{first}\nThere is no older checkpoint to fall back to.") from first
        return None

    def _load_committed(
        self,
        path: str,
        state: TrainState,
        options: LoadOptions,
        *,
        resume: bool = False,
        chosen: CommitRecord | None = None,
    ) -> LoadReport:
        ahead, self._ahead = self._ahead, None
        store = self._root.child(path) if chosen is None or ahead is None else ahead.child(path)
        with ExitStack() as stack:
            # Rank 0 holds the pin for all: it leaves only once every rank has read.
            record, pinned = self._begin_pin(path, stack, chosen, why="resumed from" if resume else "load")
            report = restore(
                state,
                lambda: (open_catalog(store, record=record), store),
                options,
                coordinator=self._coordinator,
                ready=pinned,
            )
            if resume and self._coordinator.is_main:
                self._hold.keep(stack.pop_all())  # `ckptkit prune` beside this job must not delete it either
        self._announce_load(report)
        return report

    def _begin_pin(
        self, path: str, stack: ExitStack, chosen: CommitRecord | None, *, why: str
    ) -> tuple[CommitRecord, Callable[[bool], None] | None]:
        """Pin a checkpoint on rank 0, and return its record on all, and what waits for the pin.

        On an object store a pin is a request, and to know that it was there in time two more, all in a row: what
        `chosen` names is opened and read meanwhile. What was read whole was there; what can't be had was deleted.
        """
        if chosen is None or self._root.local_root is not None:
            pin = pin_while_reading(self._root, path, why=why)
            return self._coordinator.decide(lambda: stack.enter_context(pin), "pinning the checkpoint"), None
        if not self._coordinator.is_main:
            return chosen, lambda sure: None
        unseen = pin_unseen(self._root, path, why=why)
        pool = ThreadPoolExecutor(1, thread_name_prefix="ckptkit-pin")
        entered = pool.submit(unseen.__enter__)

        def ask() -> CommitRecord:
            return entered.result()()

        looked = pool.submit(ask) if self._coordinator.world_size > 1 else None  # where it will be asked for anyway
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
                raise CheckpointNotFoundError(
                    f"{self._url}/{chosen.name} was replaced while it was opened. Load again."
                )

        return chosen, pinned

    def _load_url(self, url: str, state: TrainState, options: LoadOptions) -> LoadReport:
        from ckptkit.formats.detect import open_source

        def opened() -> tuple[Catalog, Store]:
            source = open_source(exact, storage_options=self._storage_options)
            return source.catalog, source.store

        def choose() -> str:
            named = resolve_url(url, storage_options=self._storage_options)
            return open_source(named, storage_options=self._storage_options).url

        # Rank 0 chooses: the newest of a run may be another one a moment later.
        exact = self._coordinator.decide(choose, "choosing a checkpoint")
        with ExitStack() as stack:
            pin = pin_url(exact, storage_options=self._storage_options)
            self._coordinator.decide(lambda: stack.enter_context(pin), "pinning the checkpoint")
            report = restore(state, opened, options, coordinator=self._coordinator)
        self._announce_load(report)
        if options.optimizer == "deferred":
            report.deferred = DeferredOptimizer(state, options, lambda s, o: self._load_url(exact, s, o))
        return report

    def _announce_load(self, report: LoadReport) -> None:
        if self._coordinator.is_main:
            _log.info("%s", report.line())
            for name, reason in report.skipped.items():
                _log.info("not loaded: %s (%s)", name, reason)
            for note in report.notes:
                _log.info("%s", note)
            _log.info("step %s: %s", report.step, report.phase_line())
        write_trace_file(self._trace, "load", report, rank=self._coordinator.rank)


def _is_url(which: str) -> bool:
    return "/" in which or "\\" in which


def load_options(options: LoadOptions | None, overrides: Mapping[str, Any]) -> LoadOptions:
    """Return `options` with the fields that `overrides` names replaced. Raises UsageError for an unknown one."""
    unknown = [name for name in overrides if name not in LoadOptions.__dataclass_fields__]
    if unknown:
        known = ", ".join(LoadOptions.__dataclass_fields__)
        raise UsageError(f"load has no option {unknown[0]!r}. Known: {known}.")
    return replace(options or LoadOptions(), **overrides)
