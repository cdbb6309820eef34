"""`CheckpointManager`: saves, keeps and loads the checkpoints of one run."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from ckptkit.checkpoint.load.choose import Loader, load_options
from ckptkit.checkpoint.load.plan import LoadOptions
from ckptkit.checkpoint.report import LoadReport, SaveReport, write_trace_file
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.run.delete import delete_checkpoint, rotate
from ckptkit.checkpoint.run.hold import RunHold
from ckptkit.checkpoint.run.inventory import list_checkpoints, resolve
from ckptkit.checkpoint.save.background import SaveHandle, collecting_later
from ckptkit.checkpoint.save.hf_config import read_side_files
from ckptkit.checkpoint.save.saver import Prepared, Saver, SaveRequest
from ckptkit.checkpoint.save.staging import StagingBuffers, stand_ins
from ckptkit.checkpoint.save.writer_process import WriterProcess
from ckptkit.checkpoint.state.train_state import StateDictType, TrainState
from ckptkit.errors import CkptkitError, SaveError, UsageError
from ckptkit.formats.own.record import CommitRecord, checkpoint_name
from ckptkit.storage.open import open_store
from ckptkit.storage.retry import BACKGROUND_S, Patience, timeout_s
from ckptkit.units import parse_duration, parse_size

__all__ = ["CheckpointManager", "SAVE_SIGNALS", "SignalWatch"]

# A signal on any rank becomes one decision of all ranks, between two training steps.


logger = logging.getLogger(__name__)

SAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_HARMLESS = (signal.SIGUSR1, signal.SIGUSR2)
_watches: weakref.WeakSet[SignalWatch] = weakref.WeakSet()


class SignalWatch:
    """Remembers that a signal came, and lets the ranks agree on it at a step boundary.

    The handlers only set a flag: a save inside a handler would run in the middle of a collective. A handler
    that was installed before runs as well, unless it is the default one, which would end the process.

    Forked processes (the workers of a DataLoader, of a multiprocessing Pool) have the handlers from before, so that
    SIGTERM ends them. Only SIGUSR1 and SIGUSR2 stay without effect there: a scheduler that sends one to all processes
    of a job must not end workers that the training needs until it has saved.

    Args:
        coordinator: The ranks that must agree; not used by any other thread.
        signals: By default SIGTERM (a scheduler that preempts) and SIGUSR1 (`sbatch --signal=USR1@300`).
        every: Ask the other ranks at each `every`-th call of `agreed`, the same ones on every rank.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        signals: Iterable[int] = SAVE_SIGNALS,
        every: int = 1,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signal handlers can be installed only in the main thread: create the manager there.")
        if every < 1:
            raise UsageError(f"every is {every}, expected an integer of at least 1.")
        self.coordinator = coordinator
        self.every = every
        self.received: int | None = None
        self._calls = 0
        self._before: dict[int, Any] = {}
        _watches.add(self)
        for number in signals:
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        before = self._before.get(number)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def agreed(self) -> bool:
        """Return True on every rank at the same call, once some rank has had a signal. All ranks call it.

        Stays True until `clear`.
        """
        self._calls += 1
        if self._calls % self.every:
            return False
        seen = self.coordinator.any(self.received is not None)
        if seen:
            logger.info("%s: saving", "a signal came" if self.received is None else signal.Signals(self.received).name)
        return seen

    def clear(self) -> None:
        """Forget the signal: it was acted upon."""
        self.received = None

    def close(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def __enter__(self) -> SignalWatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_forking = threading.local()


def _before_fork() -> None:
    """Block the watched signals of this thread: Python forgets what a child gets before it has run its fork hooks."""
    numbers = {number for watch in _watches for number in watch._before}
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    """Give a forked process the handlers that were there before all watches."""
    for number in {number for watch in _watches for number in watch._before if number not in _HARMLESS}:
        found: Any = signal.getsignal(number)
        while isinstance(watch := getattr(found, "__self__", None), SignalWatch):
            found = watch._before.get(number)
            signal.signal(number, found if found is not None else signal.SIG_DFL)
    _in_parent()  # what came meanwhile is delivered now


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


_log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, keeps and loads the checkpoints of one run. All ranks make it, and call its methods, together.

    A process that is forked from the one that made it can't use it: `close` does nothing there, the rest raises.

    Args:
        url: The root of the run: a path, or anything fsspec opens ("s3://bucket/run").
        retention: What rotation keeps; None keeps everything.
        state_dict_type: Of what is saved; a load finds out for itself.
        max_shard_size: The most bytes of one file of a FULL checkpoint.
        timeout_s: How long to wait for any rank before all give up: seconds, or "30min".
        async_policy: What `save_async` does while a save is under way: "wait" for it, or "refuse".
        async_mode: Who writes what `save_async` staged: a "thread" of this process, or a "process" of its own, so
            that training shares its interpreter lock with nobody (SHARDED, Linux).
        on_signal: Signals that `interrupted` reports and `save_on_signal` acts upon; "save" is short for SIGTERM (a
            scheduler that preempts) and SIGUSR1 (`sbatch --signal=USR1@300`).
        on_commit: Called on every rank after each commit with the report, to log it (W&B, TensorBoard, MLflow).
        trace: A directory for Chrome traces, one file a rank and a save or load.
        process_group: The ranks that take part; None for all.
        side_files: A directory whose config, tokenizer, chat template and licence every checkpoint carries, so that
            it can be exported with nothing else at hand. A transformers model brings its own config.
        start_fresh: When `load` returns None. "if_empty": where nothing was saved yet; directories of steps of which
            none is committed, as a copy that was cut off leaves them, are an error. "if_none_committed": there, too.
            "never": it raises instead.
        storage_options: Passed to fsspec.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        retention: RetentionPolicy | None = None,
        state_dict_type: StateDictType | str = StateDictType.SHARDED,
        max_shard_size: int | str = "5GB",
        timeout_s: float | str = 1800.0,
        async_policy: Literal["wait", "refuse"] = "wait",
        async_mode: Literal["thread", "process"] = "thread",
        on_signal: Sequence[int] | Literal["save"] = (),
        on_commit: Callable[[SaveReport], None] | None = None,
        trace: str | Path | None = None,
        process_group: Any = None,
        side_files: str | Path | None = None,
        start_fresh: Literal["if_empty", "if_none_committed", "never"] = "if_empty",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if async_policy not in ("wait", "refuse"):
            raise UsageError(f"async_policy={async_policy!r}: expected 'wait' or 'refuse'.")
        if start_fresh not in ("if_empty", "if_none_committed", "never"):
            raise UsageError(f"start_fresh={start_fresh!r}: expected 'if_empty', 'if_none_committed' or 'never'.")
        self.url = str(url)
        self.retention = retention
        self.rotates: Callable[[CommitRecord], bool] | None = None
        """Which checkpoints `retention` is about, where others lie beside them; None: all."""
        self.state_dict_type = StateDictType.parse(state_dict_type)
        self._writer = self._writer_process(async_mode, storage_options)
        self._async_policy = async_policy
        self._on_commit = on_commit
        self._trace = None if trace is None else Path(trace)
        self._root = open_store(self.url, storage_options=storage_options)
        self._coordinator = Coordinator(process_group, timeout_s=parse_duration(timeout_s))
        self._hold = RunHold(self._root)
        signals = SAVE_SIGNALS if on_signal == "save" else tuple(on_signal)
        # A coordinator of its own for what is asked while a save is under way: the other one is in use then.
        alone = async_policy == "refuse" or bool(signals)
        self._control = Coordinator(process_group, timeout_s=60.0) if alone else None
        self._watch = SignalWatch(self._control, signals=signals) if self._control and signals else None
        objective = retention.objective if retention is not None else None
        carried = {} if side_files is None or self._coordinator.rank else read_side_files(str(side_files))
        # `ckptkit ls` and `prune` go by it.
        extra = {} if retention is None else {"retention": dataclasses.asdict(retention)}
        self._saver = Saver(
            self._root,
            self._coordinator,
            max_shard_bytes=parse_size(max_shard_size),
            lease=self._hold.lease,
            objective=objective,
            side_files=carried,
            extra=extra,
        )
        self._loader = Loader(
            self.url,
            self._root,
            coordinator=self._coordinator,
            hold=self._hold,
            best=objective,
            start_fresh=start_fresh,
            trace=self._trace,
            storage_options=storage_options,
        )
        self._buffers = StagingBuffers()
        self._stager = self._writer.buffers if self._writer else self._buffers
        if self._writer is not None:
            self._writer.wait_ready()
        self._in_flight: SaveHandle | None = None
        self._pid = os.getpid()
        self._last_saved: int | None = None
        self._closed = False

    # --- saving

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        metrics: Mapping[str, float] | None = None,
        client_state: Any = None,
        tag: str | None = None,
        overwrite: bool = False,
    ) -> SaveReport:
        """Save `state` as it is now; return once the checkpoint survives a power cut. All ranks must call it.

        Raises:
            RankFailedError: A rank failed, died or hung: the same on every rank. Nothing was published.
            CheckpointExistsError: The step, or the tag, was saved before.
        """
        self._settle()
        prepared = self._saver.prepare(state, self._request(step, metrics, client_state, tag, overwrite))
        record = self._saver.publish(prepared)
        return self._reported(prepared, record, None)

    def save_async(
        self,
        step: int,
        state: TrainState,
        *,
        metrics: Mapping[str, float] | None = None,
        client_state: Any = None,
        tag: str | None = None,
        overwrite: bool = False,
    ) -> SaveHandle:
        """Copy `state` to host memory and return; the save goes on in the background. All ranks must call it.

        What training does next is not in the checkpoint. An error of the background work is raised by the handle's
        `result`, and by the next call of this manager if nobody asked.

        Raises:
            SaveError: The save before failed; or it is still under way and `async_policy` is "refuse".
            RankFailedError: A rank could not capture its state.
        """
        self._check_open()
        if self._async_policy == "refuse" and self._busy():
            raise SaveError(
                f"step {step} is not saved: the previous save is still running, and async_policy is 'refuse'."
            )
        self._settle()
        with collecting_later():
            request = self._request(step, metrics, client_state, tag, overwrite)
            prepared = self._saver.prepare(state, request)
            self._stage(prepared)
            publish = partial(self._publish_staged, prepared, prepared.clock.seconds())
            self._in_flight = SaveHandle(step, publish, self._patience())
            return self._in_flight.start()

    def wait(self) -> SaveReport | None:
        """Wait for the save under way and return its report; None where there is none. Raises what went wrong."""
        self._check_open()
        handle, self._in_flight = self._in_flight, None
        return None if handle is None else handle.result()

    def interrupted(self) -> bool:
        """Return True on every rank at the same step once a rank got a signal of `on_signal`: save, and end.

        All ranks call it between two steps; it costs one small all-reduce. Stays True.
        """
        self._check_open()
        return self._watch is not None and self._watch.agreed()

    def save_on_signal(
        self, step: int, state: TrainState, *, metrics: Mapping[str, float] | None = None, client_state: Any = None
    ) -> bool:
        """Return True once a rank got a signal of `on_signal`, and `state` is saved: end the job then.

        All ranks call it between two steps, after any save of that step. It waits for a save under way; a step that
        this manager has saved is not saved again, however many signals come.

        Raises:
            UsageError: The manager was made without `on_signal`.
        """
        self._check_open()
        if self._watch is None:
            raise UsageError("save_on_signal: create the manager with on_signal='save'.")
        if not self._watch.agreed():
            return False
        # First the save under way: it may be of this step, and be done on one rank and not yet on another.
        try:
            self._settle()
        except SaveError as error:
            _log.error("the save that was running when the signal arrived failed; saving step %d now: %s", step, error)
        if self._last_saved != step:
            self.save(step, state, metrics=metrics, client_state=client_state)
        return True

    # --- loading

    def load(
        self,
        state: TrainState,
        which: str | int = "latest",
        *,
        fallback: Literal["error", "previous"] = "error",
        options: LoadOptions | None = None,
        **overrides: Any,
    ) -> LoadReport | None:
        """Restore `state` in place; return what was loaded, or None where the run is new (see `start_fresh`).

        All ranks must call it; rank 0 chooses. Any state-dict type, any world size and mesh (LOCAL: its own). Nothing
        is touched unless all keys, shapes and dtypes fit. Tensors are then read straight into the state, without a
        second copy; damage found then is an error, the state is half loaded, and it can't be saved until a load
        succeeds. `atomic=True` changes nothing until all is read and checked. Where the root holds nothing of ours, but
        another system's run (Lightning's, verl's, ...), the newest checkpoint of that is loaded.

        Args:
            which: "latest", "latest~1", "best", a step, a tag, or the URL of a checkpoint, of any format that
                ckptkit reads.
            fallback: Where the checkpoint is damaged: "error", or "previous" loads the newest one before it that is
                not, and says so in the log. The damaged one may then be saved again.
            options: How to treat what does not fit; or its fields as keywords: `strict`, `include`, `exclude`,
                `model`, `optimizer`, `convert_dtype`, `atomic`, `max_memory`, `verify`, `replicas`, `rng_on_resize`,
                `per_rank_on_resize`.

        Raises:
            CheckpointNotFoundError: `which` names a checkpoint that is not there.
            IncompleteCheckpointError: There are directories of steps, and none is committed.
            CheckpointMismatchError: Lists all that does not fit.
            CorruptCheckpointError: The checkpoint is damaged; names file and tensor.
        """
        self._settle()
        return self._loader.load(state, which, load_options(options, overrides), fallback=fallback)

    # --- what there is

    def latest(self) -> int | None:
        """Return the step of the newest committed checkpoint, None where there is none. All ranks must call it.

        Raises:
            IncompleteCheckpointError: There are directories of steps, and none is committed (see `start_fresh`).
        """
        self._check_open()
        return self._coordinator.decide(self._loader.latest, "looking for the latest checkpoint")

    def list(self) -> list[CommitRecord]:
        """Return the records of the committed checkpoints, oldest first, without their files. Collective."""

        self._check_open()

        def records() -> Sequence[CommitRecord]:
            return [item.record.without_files() for item in list_checkpoints(self._root).committed]

        return list(self._coordinator.decide(records, "listing checkpoints"))

    def delete(self, which: str | int) -> None:
        """Delete one checkpoint. All ranks must call it.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            UsageError: It is pinned, being read, or what this run was resumed from.
        """
        self._settle()

        def delete() -> None:
            found = resolve(self._root, str(which))
            if found.name == self._loader.resumed_from:
                raise UsageError(f"{self.url}/{found.name} is not deleted: this run was resumed from it.")
            if not delete_checkpoint(self._root, found.name, reason="asked for"):
                raise UsageError(f"{self.url}/{found.name} is not deleted: it is pinned.")

        self._coordinator.decide(delete, "deleting a checkpoint")

    # --- the end

    def close(self) -> None:
        """Wait for the save under way, raise what went wrong with it, and give everything back. Collective."""
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self._settle()
        finally:
            self._closed = True
            self._hold.release()
            self._buffers.release()
            if self._writer is not None:
                self._writer.close()
            if self._watch is not None:
                self._watch.close()
            self._saver.close()
            self._coordinator.close()
            if self._control is not None:
                self._control.close()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if os.getpid() != self._pid:
            return  # a fork: what there is to give back is our parent's
        # Training failed on this rank: the others may not come here, so nothing collective can be done.
        handle, self._in_flight = self._in_flight, None
        if handle is not None:
            if not isinstance(error, Exception):  # Ctrl-C
                handle.hurry()
            failure = _outcome(handle)
            if failure is not None:
                _log.error("the save of step %d failed as well: %s", handle.step, failure)
        self._hold.release()
        if self._watch is not None:
            self._watch.close()  # nobody asks it any more: a signal must end the process again

    # --- inside

    def _writer_process(self, mode: str, storage_options: Mapping[str, Any] | None) -> WriterProcess | None:
        """Start the writing process, if one is asked for: it gets ready while the job does."""
        if mode not in ("thread", "process"):
            raise UsageError(f"async_mode={mode!r}: expected 'thread' or 'process'.")
        if mode == "thread":
            return None
        if self.state_dict_type is not StateDictType.SHARDED:
            raise UsageError(
                f"async_mode='process' writes SHARDED checkpoints only, not {self.state_dict_type.value}. Use "
                "async_mode='thread'."
            )
        return WriterProcess(storage_options=storage_options)

    def _request(
        self, step: int, metrics: Mapping[str, float] | None, client_state: Any, tag: str | None, overwrite: bool
    ) -> SaveRequest:
        return SaveRequest(
            step=step,
            state_dict_type=self.state_dict_type,
            tag=tag,
            metrics=dict(metrics or {}),
            client_state=client_state,
            overwrite=overwrite or checkpoint_name(step, tag) in self._loader.given_up,
            set_aside=self._loader.looked,
            resumed_from=self._loader.resumed_from,
        )

    def _patience(self) -> Patience:
        """Return how long a save in the background retries storage calls: less than other ranks wait for this one."""
        limit_s = timeout_s(BACKGROUND_S)
        return Patience(limit_s if self._coordinator.world_size == 1 else min(limit_s, self._coordinator.timeout_s / 2))

    def _stage(self, prepared: Prepared) -> None:
        """Copy what is to be written. A failure waits for `publish`: the other ranks are on their way."""
        started = prepared.clock.seconds()
        try:
            prepared.staged = (self._writer.stage if self._writer else self._buffers.copy)(prepared.plan.tensors)
        except Exception as error:  # noqa: BLE001  memory, most likely: `publish` raises it on every rank
            prepared.failure = error
            prepared.staged = stand_ins(prepared.plan.tensors)
        prepared.clock.add("stage", prepared.clock.seconds() - started, self._stager.staged)

    def _settle(self) -> None:
        """Wait for the save under way; raise its error if nobody has seen it."""
        self._check_open()
        handle, self._in_flight = self._in_flight, None
        if handle is None:
            return
        if handle.asked:
            _outcome(handle)
        else:
            handle.result()

    def _check_open(self) -> None:
        if self._closed:  # its group is gone: a collective would run over the group of all ranks
            raise UsageError(f"the manager of {self.url} is closed. Create a new one.")
        if os.getpid() != self._pid:
            raise UsageError(
                f"the manager of {self.url} was created by process {self._pid} and cannot be used in its "
                f"fork, process {os.getpid()}: threads and connections do not survive a fork. Use it in the "
                "process that created it, or create another manager here."
            )

    def _publish_staged(self, prepared: Prepared, stall: float) -> SaveReport:
        return self._reported(prepared, self._saver.publish(prepared), stall)

    def _reported(self, prepared: Prepared, record: CommitRecord, stall: float | None) -> SaveReport:
        """Rotate, and return the report of a save that is committed; `stall`: how long it stopped training, if not for
        all of it."""
        self._last_saved = record.step
        self._loader.given_up.discard(record.name)
        deleted: tuple[tuple[int, int], ...] = ()
        kept: int | None = None
        exempt = 0
        if self._coordinator.is_main:
            with prepared.clock.phase("rotate"):
                deleted, kept, exempt = self._rotate(record)
        seconds = prepared.clock.seconds()
        report = SaveReport(
            url=f"{self.url}/{record.name}",
            step=record.step,
            total_bytes=record.total_bytes,
            rank_bytes=prepared.plan.nbytes,
            stall_seconds=seconds if stall is None else stall,
            seconds=seconds,
            deleted=deleted,
            kept=kept,
            limit=self.retention.max_num if self.retention is not None else None,
            exempt=exempt,
            phases=prepared.clock.phases,
        )
        if self._coordinator.is_main:
            _log.info("%s", report.line())
            _log.info("step %d: %s", report.step, report.phase_line())
        write_trace_file(self._trace, "save", report, rank=self._coordinator.rank)
        if self._on_commit is not None:
            try:
                self._on_commit(report)
            except Exception:  # noqa: BLE001  a logger's fault must not undo a checkpoint that is there
                _log.exception("on_commit failed; the checkpoint of step %d is committed", report.step)
        return report

    def _rotate(self, record: CommitRecord) -> tuple[tuple[tuple[int, int], ...], int | None, int]:
        """Return (step, bytes) of what was deleted, how many are kept, and how many of them are exempt from the limit.
        Raises nothing: the save is done."""
        try:
            seen = self._saver.seen
            if self.retention is None:
                return (), len((seen or list_checkpoints(self._root)).committed), 0
            resumed_from = self._loader.resumed_from
            protected = {resumed_from: "the run was resumed from it"} if resumed_from else {}
            done = rotate(self._root, self.retention, protected=protected, among=self.rotates, seen=seen)
            self._hold.remember(done.left, among=self.rotates)
            gone = tuple((item.step, item.nbytes) for item in done.decisions if item.name in done.deleted)
            older = done.decisions[: -self.retention.max_num] if self.retention.max_num is not None else ()
            return gone, len(done.decisions) - len(done.deleted), sum(item.keep for item in older)
        except (CkptkitError, OSError) as error:
            _log.warning("step %d is saved, but rotation failed; the next save retries: %s", record.step, error)
            return (), None, 0

    def _busy(self) -> bool:
        """Whether the save before is under way on any rank; the same answer on all."""
        under_way = self._in_flight is not None and not self._in_flight.done()
        return under_way if self._control is None else self._control.any(under_way)


def _outcome(handle: SaveHandle) -> Exception | None:
    """Wait for a save and return its error."""
    try:
        handle.result()
    except (CkptkitError, OSError) as error:
        return error
    return None
