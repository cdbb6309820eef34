"""Reports what saves and loads did: bytes, seconds and phases, and which keys were loaded, skipped or missing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.load.options import LoadOptions
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import UsageError
from ckptkit.units import first_few, format_size

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)
_TURNS = ("write", "digest", "sync")
_TOLD = 0.0005  # seconds; shorter phases are printed without a rate


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a save or load in one thread.

    Attributes:
        start: Value of `time.perf_counter` at the start.
        seconds: Duration.
        nbytes: Number of bytes moved.
    """

    name: str
    start: float
    seconds: float
    nbytes: int = 0
    thread: str = ""


@dataclass(slots=True)
class PhaseClock:
    """Measures the phases of a save or load. Any thread may add phases."""

    started: float = field(default_factory=time.perf_counter)
    phases: list[Phase] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the `with` block as a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float, nbytes: int = 0) -> None:
        """Record a phase that ends now."""
        start, thread = time.perf_counter() - seconds, threading.current_thread().name
        self.phases.append(Phase(name, start, seconds, nbytes, thread))

    def add_in_turn(self, found: Sequence[tuple[str, float, int]]) -> None:
        """Record consecutive phases (name, seconds, bytes) of this thread. The last phase ends now.

        The phases write, digest and sync are put last, in this order.

        If several threads did the work, pass the longest time that a thread spent in each phase. Times that add up to
        more than the elapsed time are scaled down.
        """
        thread, now = threading.current_thread().name, time.perf_counter()
        since = max((p.start + p.seconds for p in self.phases if p.thread == thread), default=self.started)
        total = sum(seconds for _, seconds, _ in found)
        scale = min(1.0, (now - since) / total) if total else 1.0
        at = now - total * scale
        others = [item for item in found if item[0] not in _TURNS]
        for name, seconds, nbytes in [*others, *(item for turn in _TURNS for item in found if item[0] == turn)]:
            self.phases.append(Phase(name, at, seconds * scale, nbytes, thread))
            at += seconds * scale

    def seconds(self) -> float:
        """Return the seconds since the operation began."""
        return time.perf_counter() - self.started


class TimedReport:
    """The part of a report that says how long each phase took."""

    __slots__ = ()
    step: Any
    phases: tuple[Phase, ...]

    def totals(self) -> dict[str, dict[str, float]]:
        """Return each phase's seconds, bytes and GB/s, for a logger: {"write": {"seconds": ..., ...}}.

        The time of a phase inside another phase ("index" in "commit") counts only for the inner phase, so that the
        seconds of all phases can be added up.
        """
        own = [phase.seconds for phase in self.phases]  # not counting the phases nested in it (in the same thread)
        for phase in self.phases:
            stop = phase.start + phase.seconds
            around = [
                (other.seconds, row)
                for row, other in enumerate(self.phases)
                if other.thread == phase.thread and other.start < phase.start and stop < other.start + other.seconds
            ]
            if around:
                own[min(around)[1]] -= phase.seconds
        totals: dict[str, dict[str, float]] = {}
        for phase, seconds in zip(self.phases, own, strict=True):
            entry = totals.setdefault(phase.name, {"seconds": 0.0, "bytes": 0.0})
            entry["seconds"] += seconds
            entry["bytes"] += phase.nbytes
        for entry in totals.values():
            entry["gb_per_s"] = entry["bytes"] / max(entry["seconds"], 1e-9) / 1e9
        return totals

    def phase_line(self) -> str:
        """Return a one-line summary of the phases and their times."""
        parts = []
        for name, entry in self.totals().items():
            rate = f", {entry['gb_per_s']:.2f} GB/s" if entry["seconds"] >= _TOLD else ""
            moved = f" ({format_size(int(entry['bytes']))}{rate})" if entry["bytes"] else ""
            parts.append(f"{name} {entry['seconds']:.3f} s{moved}")
        return ", ".join(parts)

    def write_trace(self, path: str, *, rank: int = 0) -> None:
        """Write the phases as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""
        threads = {name: i for i, name in enumerate(dict.fromkeys(phase.thread for phase in self.phases))}
        events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}
            for name, tid in threads.items()
        ]
        events += [
            {"name": phase.name, "ph": "X", "pid": rank, "tid": threads[phase.thread], "ts": phase.start * 1e6,
             "dur": phase.seconds * 1e6, "args": {"bytes": phase.nbytes, "step": self.step}}
            for phase in self.phases
        ]  # fmt: skip
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


@dataclass(frozen=True, slots=True)
class SaveReport(TimedReport):
    """A committed save, as seen by this rank.

    Attributes:
        url: URL of the checkpoint.
        total_bytes: Size of the whole checkpoint in bytes, over all ranks.
        rank_bytes: Bytes that this rank wrote.
        stall_seconds: How long training was blocked on this rank.
        seconds: Time from the call to the commit.
        deleted: (step, bytes, reason) of each checkpoint that rotation deleted.
        kept: Number of checkpoints after rotation; None on ranks other than 0, or if rotation failed.
        limit: The policy's `max_num`; None without a limit. Because of exempt checkpoints, `kept` may be larger.
        exempt: Number of kept checkpoints that are older than the `limit` newest checkpoints. They are kept because
            they are exempt (best, pinned, ...).
        phases: Where the time went: plan, stage, write, digest, sync, commit, ...
    """

    url: str
    step: int
    total_bytes: int
    rank_bytes: int
    stall_seconds: float
    seconds: float
    deleted: tuple[tuple[int, int, str], ...] = ()
    kept: int | None = None
    limit: int | None = None
    exempt: int = 0
    phases: tuple[Phase, ...] = field(default=(), repr=False)

    def line(self) -> str:
        """Return a one-line summary: step, size, stall, rate, and what rotation kept and deleted, and why."""
        rate = self.total_bytes / max(self.seconds, 1e-9)
        parts = [
            f"saved step {self.step}",
            format_size(self.total_bytes),
            f"stall {self.stall_seconds:.2f} s",
            f"{format_size(int(rate))}/s",
        ]
        freed = []
        for reason, group in itertools.groupby(self.deleted, lambda item: item[2]):
            gone = [f"step {step} ({format_size(nbytes)})" for step, nbytes, _ in group]
            freed.append(f"freed {first_few(gone)}: {reason}")
        kept, limit = self.kept, self.limit
        if kept is not None:
            text = f"keeping {kept}" if limit is None else f"keeping {kept}/{limit}"
            if limit is not None and kept > limit:
                left = kept - limit - self.exempt
                also = f", {left} could not be deleted" if left > 0 else ""
                text = f"keeping {kept} ({min(limit, kept - self.exempt)} newest, {self.exempt} exempt{also})"
            freed.insert(0, text)
        return " · ".join([*parts, *freed])

    __str__ = line  # print(report) shows one line


@dataclass(slots=True)
class LoadReport(TimedReport):
    """The result of a load. Keys are named as in the checkpoint.

    Attributes:
        url: URL of the checkpoint.
        step: The checkpoint's step; None if it records none.
        loaded: Restored keys.
        sources: With a key map: the checkpoint's tensors that each restored key was made from.
        padded: Restored keys with padding that a key map declares. The padding was left unchanged.
        missing: Keys that the training state needs but the checkpoint lacks (only with strict=False).
        unexpected: Keys of the checkpoint's loaded parts (model, optimizer, ...) that the training state lacks.
        skipped: Parts ("optimizer", "rng", ...) and tensors that were skipped on purpose, each with the reason.
        notes: Messages about casts, reseeded random number generators, hyperparameters that only the checkpoint or only
            the live optimizer has, and damaged checkpoints that a fallback passed over. Notes on state that could not
            be restored start with "not restored: ", and are also logged as warnings.
        extra: Values in the checkpoint's `extra` that the training state lacks.
        metrics, client_state: From the checkpoint's commit record.
        nbytes: Tensor bytes that this rank read.
        received: Tensor bytes that other ranks read and sent to this rank.
        held: With atomic=True: size in bytes of the second copy of the state.
        phases: plan, read (includes checking), exchange, apply.
        deferred: With optimizer="deferred": the handle that restores the optimizer later.
    """

    url: str
    step: int | None = None
    loaded: list[str] = field(default_factory=list)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    padded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    client_state: Any = None
    nbytes: int = 0
    received: int = 0
    held: int = 0
    seconds: float = 0.0
    phases: tuple[Phase, ...] = field(default=(), repr=False)
    deferred: DeferredOptimizer | None = None

    def line(self) -> str:
        """Return a one-line summary, with the first names that were missing, unexpected or skipped (and why)."""
        rate = self.nbytes / max(self.seconds, 1e-9)
        parts = [
            f"loaded step {self.step}",
            f"{format_size(self.nbytes)} on this rank"
            + (f", {format_size(self.received)} from others" if self.received else ""),
            f"{self.seconds:.2f} s",
            f"{format_size(int(rate))}/s",
        ]
        for name, items in (("missing", self.missing), ("unexpected", self.unexpected)):
            if items:
                parts.append(f"{len(items)} {name} ({first_few(items)})")
        if self.skipped:
            by_reason: dict[str, list[str]] = {}
            for name, reason in self.skipped.items():
                by_reason.setdefault(reason, []).append(name)
            groups = [f"{first_few(names)} ({reason})" for reason, names in by_reason.items()]
            parts.append(f"{len(self.skipped)} skipped: {'; '.join(groups)}")
        return " · ".join(parts)

    __str__ = line  # print(report) shows one line


def write_trace_file(folder: Path, what: str, report: SaveReport | LoadReport, *, rank: int) -> None:
    """Write the trace of a save or load into `folder`.

    A failure is only logged, because the save or load itself has succeeded.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.write_trace(str(folder / f"{what}-{report.step or 0:08d}-rank{rank:05d}.json"), rank=rank)
    except OSError as error:
        _log.warning("the trace of a %s could not be written: %s", what, error)


class DeferredOptimizer:
    """Restores the optimizers after a load with optimizer="deferred", from the checkpoint of that load.

    Add parameters (adapters) to the model and build the optimizer, then call `apply` before the first step. Nothing is
    read before `apply`. Rotation keeps the checkpoint, because the run was resumed from it.
    """

    def __init__(
        self, state: TrainState, options: LoadOptions, restore: Callable[[TrainState, LoadOptions], LoadReport]
    ) -> None:
        self._state: TrainState | None = state
        self._options = dataclasses.replace(options, model="skip", optimizer="restore")
        self._restore: Callable[[TrainState, LoadOptions], LoadReport] | None = restore

    @property
    def pending(self) -> bool:
        """Whether `apply` has not succeeded yet."""
        return self._restore is not None

    def apply(self, state: TrainState | None = None, *, strict: bool = True) -> LoadReport | None:
        """Restore the optimizers. All ranks must call it. After a success, further calls do nothing and return None.

        Args:
            state: The current model and optimizer, if they are not the objects that were passed to the load.
            strict: True raises if the checkpoint's optimizer has parameters that the current optimizer lacks.
                Parameters that were added since the load always start without state. The report's `missing` lists them.

        Raises:
            CheckpointMismatchError: The state does not match. Nothing was changed, and `apply` may be called again.
            CorruptCheckpointError: The checkpoint is damaged.
            UsageError: There is no optimizer.
        """
        if self._restore is None or self._state is None:
            return None
        whole = state if state is not None else self._state
        if whole.optimizer is None:
            raise UsageError("apply: the training state has no optimizer. Pass TrainState(model=..., optimizer=...).")
        only = TrainState(model=whole.model, optimizer=whole.optimizer, layout=whole.layout, rng=False)
        options = dataclasses.replace(self._options, strict=strict)
        try:
            report = self._restore(only, options)
        except BaseException:
            whole.half_loaded = only.half_loaded or whole.half_loaded
            raise
        self._restore = self._state = None
        return report
