"""What a save or a load did: bytes, seconds and phases; what was loaded, skipped, kept."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.load.plan import LoadOptions
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import UsageError
from ckptkit.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LoadReport", "Phase", "PhaseClock", "SaveReport", "write_trace_file", "DeferredOptimizer"]

_log = logging.getLogger(__name__)
_TURNS = ("write", "digest", "sync")
_NAMED = 3  # items of each kind in the line of a load
_TOLD = 0.0005  # seconds: what shows as 0.000 has no rate worth telling


@dataclass(frozen=True, slots=True)
class Phase:
    """One thing that one thread did: [start, start + seconds) on the monotonic clock, and the bytes it moved."""

    name: str
    start: float
    seconds: float
    nbytes: int = 0
    thread: str = ""


class PhaseClock:
    """Collects the phases of one operation, from any thread."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._phases: list[Phase] = []
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Time the block as a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start, nbytes)

    def add(self, name: str, seconds: float, nbytes: int = 0) -> None:
        """Record a phase that ends now."""
        phase = Phase(name, time.perf_counter() - seconds, seconds, nbytes, threading.current_thread().name)
        with self._lock:
            self._phases.append(phase)

    def add_in_turn(self, found: Sequence[tuple[str, float, int]]) -> None:
        """Record what this thread did since its last phase, as one (name, seconds, bytes) after the other, ending now.

        What several threads did for it by turns is told by the longest of each, which together may be longer than it
        took: then all are shortened alike.
        """
        thread, now = threading.current_thread().name, time.perf_counter()
        with self._lock:
            since = max((p.start + p.seconds for p in self._phases if p.thread == thread), default=self.started)
            total = sum(seconds for _, seconds, _ in found)
            scale = min(1.0, (now - since) / total) if total else 1.0
            at = now - total * scale
            for name, seconds, nbytes in sorted(
                found, key=lambda item: _TURNS.index(item[0]) if item[0] in _TURNS else -1
            ):
                self._phases.append(Phase(name, at, seconds * scale, nbytes, thread))
                at += seconds * scale

    @property
    def phases(self) -> tuple[Phase, ...]:
        with self._lock:
            return tuple(self._phases)

    def seconds(self) -> float:
        """Return the time since the operation began."""
        return time.perf_counter() - self.started


@dataclass(frozen=True, slots=True)
class SaveReport:
    """One committed save, as this rank saw it.

    Attributes:
        url: Of the checkpoint.
        total_bytes: Of all ranks, as committed.
        rank_bytes: Written by this rank.
        stall_seconds: How long training stood still on this rank.
        seconds: From the call to the commit.
        deleted: (step, bytes) of the checkpoints that rotation removed.
        kept: How many checkpoints there are now; None on ranks other than 0, and where rotation failed.
        limit: The most that rotation keeps, beside exempt ones; None where there is no limit.
        exempt: How many of `kept` are older than the `limit` newest and kept by another rule (best, pinned, ...).
        phases: What took the time: plan, stage, write, digest, sync, commit, ...
    """

    url: str
    step: int
    total_bytes: int
    rank_bytes: int
    stall_seconds: float
    seconds: float
    deleted: tuple[tuple[int, int], ...] = ()
    kept: int | None = None
    limit: int | None = None
    exempt: int = 0
    phases: tuple[Phase, ...] = ()

    def line(self) -> str:
        """Return one line: step, size, stall, rate, and what rotation did."""
        rate = self.total_bytes / max(self.seconds, 1e-9)
        parts = [
            f"saved step {self.step}",
            format_size(self.total_bytes),
            f"stall {self.stall_seconds:.2f} s",
            f"{format_size(int(rate))}/s",
        ]
        freed = [f"freed step {step} ({format_size(nbytes)})" for step, nbytes in self.deleted]
        kept = [] if self.kept is None else [self._keeping(self.kept)]
        return " · ".join([*parts, *([", ".join([*kept, *freed])] if kept or freed else [])])

    def _keeping(self, kept: int) -> str:
        if self.limit is None:
            return f"keeping {kept}"
        if kept <= self.limit:
            return f"keeping {kept}/{self.limit}"
        left = kept - self.limit - self.exempt
        also = f", {left} could not be deleted" if left > 0 else ""
        return f"keeping {kept} ({min(self.limit, kept - self.exempt)} newest, {self.exempt} exempt{also})"

    def totals(self) -> dict[str, dict[str, float]]:
        """Return seconds, bytes and GB/s of each phase, for a logger: {"write": {"seconds": ..., ...}}. What one phase
        did within another ("index" within "commit") is counted once, so that the seconds add up."""
        return _totals(self.phases)

    def phase_line(self) -> str:
        """Return what took the time, in a line."""
        return _phase_line(self.phases)

    def write_trace(self, path: str, *, rank: int = 0) -> None:
        """Write the phases as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""
        _write_trace(path, self.phases, rank=rank, step=self.step)


def _totals(phases: Sequence[Phase]) -> dict[str, dict[str, float]]:
    totals: dict[str, dict[str, float]] = {}
    for phase, seconds in zip(phases, _own_seconds(phases), strict=True):
        entry = totals.setdefault(phase.name, {"seconds": 0.0, "bytes": 0.0})
        entry["seconds"] += seconds
        entry["bytes"] += phase.nbytes
    for entry in totals.values():
        entry["gb_per_s"] = entry["bytes"] / max(entry["seconds"], 1e-9) / 1e9
    return totals


def _own_seconds(phases: Sequence[Phase]) -> list[float]:
    """Return the seconds of each phase, less those of the phases of its thread that lie within it."""
    own = [phase.seconds for phase in phases]
    for row, phase in enumerate(phases):
        around = [
            (other.seconds, at)
            for at, other in enumerate(phases)
            if at != row
            and other.thread == phase.thread
            and other.start < phase.start
            and phase.start + phase.seconds < other.start + other.seconds
        ]
        if around:
            own[min(around)[1]] -= phase.seconds
    return own


def _phase_line(phases: Sequence[Phase]) -> str:
    parts = []
    for name, entry in _totals(phases).items():
        rate = f", {entry['gb_per_s']:.2f} GB/s" if entry["seconds"] >= _TOLD else ""
        moved = f" ({format_size(int(entry['bytes']))}{rate})" if entry["bytes"] else ""
        parts.append(f"{name} {entry['seconds']:.3f} s{moved}")
    return ", ".join(parts)


def _write_trace(path: str, phases: Sequence[Phase], *, rank: int, step: int | None) -> None:
    threads = {name: i for i, name in enumerate(dict.fromkeys(phase.thread for phase in phases))}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}}
        for name, tid in threads.items()
    ]
    for phase in phases:
        times = {"ts": phase.start * 1e6, "dur": phase.seconds * 1e6}
        args = {"bytes": phase.nbytes, "step": step}
        events.append({"name": phase.name, "ph": "X", "pid": rank, "tid": threads[phase.thread], **times, "args": args})
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


@dataclass(slots=True)
class LoadReport:
    """What a load did. Keys are those of the checkpoint.

    Attributes:
        url: Of the checkpoint.
        step: Its step; None where it records none.
        loaded: What was restored.
        missing: What the training state wanted and the checkpoint has not (without `strict` only).
        unexpected: What the checkpoint holds for a section that was loaded, and the training state has not.
        skipped: Sections and tensors that were left out on purpose, each with the reason.
        notes: Hyper-parameters that only one side knows, casts, random numbers that were seeded anew.
        extra: Values of `extra` that the training state has no place for.
        metrics, client_state: Of the checkpoint.
        nbytes: Bytes of tensors that this rank read.
        received: Bytes of tensors that other ranks read for it and sent.
        held: Bytes of tensors that this rank held beside live ones until all was checked, with `atomic`.
        phases: What took the time: plan, read, exchange, apply. What is read is checked on the way.
        deferred: With optimizer="deferred": applies the optimizer's state, once.
    """

    url: str
    step: int | None = None
    loaded: list[str] = field(default_factory=list)
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
    phases: tuple[Phase, ...] = ()
    deferred: DeferredOptimizer | None = None

    def line(self) -> str:
        """Return one line: what was loaded, and the first names that were missing, unexpected or skipped."""
        rate = self.nbytes / max(self.seconds, 1e-9)
        parts = [
            f"loaded step {self.step}",
            f"{format_size(self.nbytes)} on this rank"
            + (f", {format_size(self.received)} from others" if self.received else ""),
            f"{self.seconds:.2f} s",
            f"{format_size(int(rate))}/s",
        ]
        for name, items in (("missing", self.missing), ("unexpected", self.unexpected), ("skipped", self.skipped)):
            if items:
                more = ", ..." if len(items) > _NAMED else ""
                parts.append(f"{len(items)} {name} ({', '.join(list(items)[:_NAMED])}{more})")
        return " · ".join(parts)

    def totals(self) -> dict[str, dict[str, float]]:
        """Return seconds, bytes and GB/s of each phase, for a logger."""
        return _totals(self.phases)

    def phase_line(self) -> str:
        """Return what took the time, in a line."""
        return _phase_line(self.phases)

    def write_trace(self, path: str, *, rank: int = 0) -> None:
        """Write the phases as a Chrome trace."""
        _write_trace(path, self.phases, rank=rank, step=self.step)


def write_trace_file(folder: Path | None, what: str, report: SaveReport | LoadReport, *, rank: int) -> None:
    """Write the trace of a save or a load into `folder`, if there is one. Where that fails, the log says so: what
    was saved or loaded is done, on the other ranks too."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.write_trace(str(folder / f"{what}-{report.step or 0:08d}-rank{rank:05d}.json"), rank=rank)
    except OSError as error:
        _log.warning("the trace of a %s could not be written: %s", what, error)


# An optimizer's state that is restored later: once the optimizer, and what was added to the model, are there.


class DeferredOptimizer:
    """Restores the optimizers of a training state from the checkpoint its model was loaded from, once.

    Until then nothing but the address of the checkpoint is held; rotation keeps the checkpoint a run was resumed
    from. Call `apply` before the first step, when parameters that training adds (adapters) are in the model and the
    optimizer was built.
    """

    def __init__(
        self, state: TrainState, options: LoadOptions, restore: Callable[[TrainState, LoadOptions], LoadReport]
    ) -> None:
        self._state: TrainState | None = state
        self._options = dataclasses.replace(options, model="skip", optimizer="restore")
        self._restore: Callable[[TrainState, LoadOptions], LoadReport] | None = restore

    @property
    def pending(self) -> bool:
        """Whether `apply` still has something to do."""
        return self._restore is not None

    def apply(self, state: TrainState | None = None, *, strict: bool = True) -> LoadReport | None:
        """Restore the optimizers; all ranks must call it. The first call only: later ones return None.

        Args:
            state: Model and optimizer as they are now, where they are other objects than at the load.
            strict: The checkpoint's optimizer may not hold parameters that the live one has not. Parameters that
                were added since start without state either way, and are in the report's `missing`.

        Raises:
            CheckpointMismatchError: The state does not fit; nothing was changed, and `apply` may be called again.
        """
        if self._restore is None or self._state is None:
            return None
        whole = state if state is not None else self._state
        if whole.optimizer is None:
            raise UsageError("apply: the training state has no optimizer. Pass TrainState(model=..., optimizer=...).")
        only = TrainState(model=whole.model, optimizer=whole.optimizer, rng=False)
        options = dataclasses.replace(self._options, strict=strict)
        try:
            report = self._restore(only, options)
        except BaseException:
            whole.half_loaded = only.half_loaded or whole.half_loaded
            raise
        self._restore = self._state = None
        return report
