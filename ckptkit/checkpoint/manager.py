"""Defines `CheckpointManager`, which saves, rotates and loads the checkpoints of one run."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import operator
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ckptkit.arguments import check_storage_options, location, wrong
from ckptkit.checkpoint.load.choose import Loader
from ckptkit.checkpoint.load.options import LoadOptions, load_options
from ckptkit.checkpoint.report import LoadReport, SaveReport, write_trace_file
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.coordinator import Coordinator, is_distributed
from ckptkit.checkpoint.run.delete import delete_any, rotate
from ckptkit.checkpoint.run.hold import RunHold
from ckptkit.checkpoint.run.inventory import list_checkpoints, resolve
from ckptkit.checkpoint.save.background import SaveHandle, report_failure
from ckptkit.checkpoint.save.hf_config import read_side_files
from ckptkit.checkpoint.save.saver import Prepared, Saver, SaveRequest
from ckptkit.checkpoint.save.staging import StagingBuffers, stand_ins
from ckptkit.checkpoint.state.train_state import StateDictType, TrainState, check_state
from ckptkit.errors import CkptkitError, SaveError, UsageError
from ckptkit.formats.own.record import CommitRecord, step_of_name
from ckptkit.storage.lock import obstacle
from ckptkit.storage.open import open_store
from ckptkit.storage.retry import BACKGROUND_S, Patience, timeout_s
from ckptkit.units import parse_duration, parse_size

if TYPE_CHECKING:
    from ckptkit.storage.store import Store

T = TypeVar("T")

_log = logging.getLogger(__name__)

SAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_HARMLESS = (signal.SIGUSR1, signal.SIGUSR2)
_watches: weakref.WeakSet[SignalWatch] = weakref.WeakSet()


class SignalWatch:
    """Records signals, and lets the ranks agree on them between two steps.

    The handlers only set a flag, because a save inside a handler would run in the middle of a collective. A previously
    installed handler also runs, unless it is the default one, which would end the process.

    Forked processes (DataLoader workers, multiprocessing pools) get the original handlers back, so SIGTERM ends them.
    SIGUSR1 and SIGUSR2 are exceptions. They do not end a forked process, because a scheduler may send them to all
    processes of a job, and training needs its workers until it has saved.

    Args:
        coordinator: Connects the ranks that must agree. No other thread may use it.
        signals: The signals to record. Default: SIGTERM (preemption) and SIGUSR1 (`sbatch --signal=USR1@300`).
    """

    def __init__(self, coordinator: Coordinator, *, signals: Iterable[int] = SAVE_SIGNALS) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("signal handlers can be installed only in the main thread: create the manager there.")
        self.coordinator = coordinator
        self.received: int | None = None
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
        """Return True once any rank has received a signal. All ranks must call it, and get the same result."""
        seen = self.coordinator.any(self.received is not None)
        if seen:
            received = "a signal" if self.received is None else signal.strsignal(self.received)
            _log.info("received %s: saving", received or f"signal {self.received}")  # real-time signals have no name
        return seen

    def close(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()


_forking = threading.local()


def _before_fork() -> None:
    """Block the watched signals in this thread.

    If they were not blocked, Python would lose signals that the child receives before its fork hooks have run.
    """
    numbers = {number for watch in _watches for number in watch._before}
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    """Restore the original handlers in a forked process."""
    for number in {number for watch in _watches for number in watch._before if number not in _HARMLESS}:
        found: Any = signal.getsignal(number)
        while isinstance(watch := getattr(found, "__self__", None), SignalWatch):
            found = watch._before.get(number)
            signal.signal(number, found if found is not None else signal.SIG_DFL)
    _in_parent()  # delivers the signals that arrived since the fork


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


class CheckpointManager:
    """Saves, rotates and loads the checkpoints of one run. All ranks must create it and call its methods together.

    In a forked process `close` does nothing, and all other methods raise.

    Args:
        url: The root of the run: a path, or a URL that fsspec can open ("s3://bucket/run").
        retention: The rotation policy; None keeps everything.
        state_dict_type: The type of checkpoint that `save` writes. `load` detects the type.
        max_shard_size: Maximum size of one file: bytes, or a string such as "5GB". Only for FULL checkpoints.
        timeout_s: How long to wait for a rank before all ranks raise: seconds, or a string such as "30min".
        async_policy: What `save_async` does while another save is running. "wait" waits for the other save. "refuse"
            raises.
        async_mode: How `save_async` writes staged data. "thread" is the only mode.
        on_signal: The signals that `interrupted` and `save_on_signal` react to. "save" means SIGTERM (preemption) and
            SIGUSR1 (`sbatch --signal=USR1@300`).
        on_commit: A function that is called on every rank with the report of each committed save, for logging (W&B,
            TensorBoard, MLflow). After `save_async`, it runs in the background thread.
        trace: A directory for Chrome traces, one file per rank and operation.
        process_group: A ProcessGroup of torch.distributed with the ranks that take part; None: all ranks.
        side_files: A directory with config, tokenizer, chat template and licence. Every checkpoint stores copies of
            these files, so that it can be exported on its own. A transformers model's config is always stored.
        start_fresh: When `load` may return None to start a new run. "if_empty": only if nothing was saved yet. If there
            are step directories but none is committed (an interrupted copy, for example), `load` raises.
            "if_none_committed": whenever nothing is committed. "never": `load` raises instead.
        storage_options: Passed to fsspec.
    """

    _watch: SignalWatch | None = None

    def __init__(
        self,
        url: str | Path,
        *,
        retention: RetentionPolicy | None = None,
        state_dict_type: StateDictType | str = StateDictType.SHARDED,
        max_shard_size: int | str = "5GB",
        timeout_s: float | str = 1800.0,
        async_policy: Literal["wait", "refuse"] = "wait",
        async_mode: Literal["thread"] = "thread",
        on_signal: Sequence[int] | Literal["save"] = (),
        on_commit: Callable[[SaveReport], None] | None = None,
        trace: str | Path | None = None,
        process_group: Any = None,
        side_files: str | Path | None = None,
        start_fresh: Literal["if_empty", "if_none_committed", "never"] = "if_empty",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "url")}
        # First check only the arguments that are needed to connect the ranks. The others are checked once the ranks are
        # connected, so that all ranks raise if one of them got a wrong argument.
        limit_s, signals = parse_duration(timeout_s, "timeout_s"), parse_signals(on_signal)
        _check_group(process_group)
        self._pid = os.getpid()
        self._closed = False
        self._in_flight: SaveHandle | None = None
        self._last_saved: int | None = None
        self._buffers = StagingBuffers()
        self._coordinator = Coordinator(process_group, timeout_s=limit_s)
        # While a save uses the first coordinator, `async_policy="refuse"` and signals need another one.
        alone = async_policy == "refuse" or bool(signals)
        self._control = Coordinator(process_group, timeout_s=limit_s) if alone else None

        def prepare() -> tuple[tuple[str, StateDictType, int], Store, Mapping[str, bytes]]:
            given = check_options(url, **options)
            Patience()  # raises if CKPTKIT_STORAGE_TIMEOUT is malformed
            if self._control is not None and signals:
                self._watch = SignalWatch(self._control, signals=signals)
            root = open_store(given[0], storage_options=storage_options)
            if self._coordinator.is_main and (why := obstacle(root)):
                _log.warning("%s. Loads work, but every save fails until this is fixed.", why)
            carried = side_files is not None and self._coordinator.is_main
            return given, root, read_side_files(str(side_files)) if carried else {}

        try:
            given, self._root, carried = self._coordinator.run_on_all(prepare, "creating a CheckpointManager")
        except BaseException:
            self._release()
            raise
        self.url, self.state_dict_type, max_shard_bytes = given
        self.retention = retention
        self.rotates: Callable[[CommitRecord], bool] | None = None
        """Returns whether `retention` applies to a checkpoint. None: it applies to all."""
        self._async_policy = async_policy
        self._on_commit = on_commit
        self._trace = None if trace is None else Path(trace)
        objective = retention.objective if retention is not None else None
        self._hold = RunHold(self._root)
        self._saver = Saver(
            self._root,
            self._coordinator,
            max_shard_bytes=max_shard_bytes,
            lease=self._hold.lease,
            objective=objective,
            side_files=carried,
            # `ckptkit ls` and `ckptkit prune` read the policy from the record.
            extra={} if retention is None else {"retention": dataclasses.asdict(retention)},
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

    def run_on_all(self, fn: Callable[[], T], what: str) -> T:
        """Run `fn` on every rank. Return this rank's result once all ranks have succeeded.

        All ranks must call this method. Use it for work that may fail on some ranks, before a save or a load. If a rank
        failed outside of this method, the other ranks would wait for that rank in their next call, until the timeout.

        Args:
            what: Names the work in errors.

        Raises:
            RankFailedError: With several ranks, `fn` raised on one of them. Every rank raises the same error.
        """
        self._settle()
        return self._coordinator.run_on_all(fn, what)

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
        """Save `state`, and return once the checkpoint is durable. All ranks must call it.

        Args:
            metrics: Numbers to store with the checkpoint, such as {"val_loss": 2.1}. `keep_best` of the retention
                policy compares them.
            client_state: Any JSON value. A load returns it as `LoadReport.client_state`.
            tag: The checkpoint's name; None: "step_" and the step.
            overwrite: Replace an existing checkpoint of this name.

        Raises:
            RankFailedError: A rank failed, died or hung. Every rank raises the same error. Nothing was published,
                unless rank 0 died or hung; the message says so. If there is only one rank, its ckptkit error
                (StorageError, NoSpaceError, ...) is raised unchanged.
            CheckpointExistsError: The step or tag was saved before, and `overwrite` is False.
            LeaseHeldError: Another job is saving to this run.
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
        """Copy `state` to host memory and return; the save continues in the background. All ranks must call it.

        Takes the arguments of `save`. Later changes to `state` do not affect the checkpoint. If the background work
        fails, the handle's `result` raises the error. If you do not call `result`, the next call to this manager raises
        the error.

        Raises:
            SaveError: The previous save failed, or it is still running and `async_policy` is "refuse".
            RankFailedError: A rank could not capture its state.
        """
        self._check_open()
        if self._async_policy == "refuse":
            assert self._control is not None
            if self._control.any(self._in_flight is not None and not self._in_flight.done()):
                raise SaveError(
                    f"step {step} is not saved: the previous save is still running, and async_policy is 'refuse'."
                )
        self._settle()
        # Capturing thousands of tensors creates enough objects to trigger a garbage collection, which takes longer than
        # the capture.
        collecting = gc.isenabled()
        gc.disable()
        try:
            prepared = self._saver.prepare(state, self._request(step, metrics, client_state, tag, overwrite))
            self._stage(prepared)
            stall = prepared.clock.seconds()
            # Retry storage calls for less time than the other ranks wait for this one.
            limit_s, several = timeout_s(BACKGROUND_S), self._coordinator.world_size > 1
            patience = Patience(min(limit_s, self._coordinator.timeout_s / 2) if several else limit_s)
            self._in_flight = SaveHandle(
                prepared.request.step,
                lambda: self._reported(prepared, self._saver.publish(prepared), stall),
                patience,
            )
            return self._in_flight.start()
        finally:
            if collecting:
                gc.enable()

    def wait(self) -> SaveReport | None:
        """Wait for the last `save_async` and return its report. Raises the save's error.

        Returns None if there was no such save, or if another call of this manager has already waited for it.
        """
        self._check_open()
        handle, self._in_flight = self._in_flight, None
        return None if handle is None else handle.result()

    def interrupted(self) -> bool:
        """Return True once any rank has received one of the `on_signal` signals. The job should then save and exit.

        Every rank returns True at the same step. All ranks must call it between two steps; it costs one small
        all-reduce. The result stays True.
        """
        self._check_open()
        return self._watch is not None and self._watch.agreed()

    def save_on_signal(
        self, step: int, state: TrainState, *, metrics: Mapping[str, float] | None = None, client_state: Any = None
    ) -> bool:
        """Save `state` and return True if any rank has received one of the `on_signal` signals.

        If it returns True, end the job. All ranks must call it between two steps. Call it after the regular save of the
        step, because it does not save a step that this manager has saved or resumed from. It waits for a running save.
        The arguments are those of `save`.

        Raises:
            UsageError: The manager was created without `on_signal`.
        """
        self._check_open()
        if self._watch is None:
            raise UsageError("save_on_signal: create the manager with on_signal='save'.")
        if not self._watch.agreed():
            return False
        # Wait for the running save first: it may be saving this step, and may have finished on only some ranks.
        try:
            self._settle()
        except SaveError as error:
            _log.error("the save that was running when the signal arrived failed; saving step %d now: %s", step, error)
        if step not in (self._last_saved, step_of_name(self.resumed_from or "")):
            self.save(step, state, metrics=metrics or {}, client_state=client_state)
        return True

    # --- loading

    @property
    def resumed_from(self) -> str | None:
        """The name of the run's checkpoint that this job was resumed from. Rotation does not delete it."""
        return self._loader.resumed.get(self._root.url)

    def load(
        self,
        state: TrainState,
        which: str | int | os.PathLike[str] = "latest",
        *,
        fallback: Literal["error", "previous"] = "error",
        options: LoadOptions | None = None,
        **overrides: Any,
    ) -> LoadReport | None:
        """Restore `state` in place. Return a report, or None if the run is new (see `start_fresh`).

        All ranks must call it; rank 0 chooses the checkpoint. A LOCAL checkpoint loads only on the world size and mesh
        that saved it. Other checkpoints load on any world size and mesh. Nothing is changed unless all keys, shapes and
        dtypes match. Then tensors are read straight into the state, without a second copy. If damage is found while
        reading, the load raises, and the half-loaded state cannot be saved until a load succeeds. With `atomic=True`
        nothing is changed until everything is read and checked. If the root holds another system's run (Lightning,
        verl, ...) and no ckptkit checkpoint, the newest checkpoint of that run is loaded.

        Args:
            which: "latest", "latest~1", "best", a step, a tag, or the URL of a checkpoint in any format that ckptkit
                reads.
            fallback: What to do if the checkpoint is damaged. "error" raises. "previous" logs the damage, and loads the
                newest undamaged checkpoint before it; the damaged step may then be saved again.
            options: How to treat mismatches. Its fields may also be passed as keywords: `strict`, `include`, `exclude`,
                `model`, `optimizer`, `key_map`, `convert_dtype`, `atomic`, `max_memory`, `verify`, `replicas`,
                `rng_on_resize`, `per_rank_on_resize`.

        Raises:
            CheckpointNotFoundError: The checkpoint `which` does not exist.
            IncompleteCheckpointError: There are step directories, but none is committed.
            CheckpointMismatchError: The state does not match. The message shows five names of each kind; the log
                (INFO) lists all.
            CorruptCheckpointError: The checkpoint is damaged. The message names the file and the tensor.
        """
        self._settle()

        def checked() -> tuple[str | int, LoadOptions]:
            if fallback not in ("error", "previous"):
                raise UsageError(f"fallback={fallback!r}: expected 'error' or 'previous'.")
            check_state(state, "load(state)")
            return _which(which), load_options(options, overrides)

        name, chosen = self._coordinator.run_on_all(checked, "checking the arguments")
        return self._loader.load(state, name, chosen, fallback=fallback)

    # --- listing and deleting

    def latest(self) -> int | None:
        """Return the step of the newest committed checkpoint, or None if the run is new. All ranks must call it.

        Raises:
            IncompleteCheckpointError: There are step directories, but none is committed (see `start_fresh`).
        """
        self._settle()
        return self._coordinator.decide(self._loader.latest, "looking for the latest checkpoint")

    def list(self) -> list[CommitRecord]:
        """Return the commit record of each checkpoint, without its file list, newest last. All ranks must call it.

        docs/format.md explains the fields.
        """
        self._settle()

        def records() -> Sequence[CommitRecord]:
            return [dataclasses.replace(item.record, files={}) for item in list_checkpoints(self._root).committed]

        return list(self._coordinator.decide(records, "listing checkpoints"))

    def delete(self, which: str | int) -> None:
        """Delete the checkpoint `which`: a step, a tag, "latest", ... All ranks must call it.

        Raises:
            CheckpointNotFoundError: There is no such checkpoint.
            UsageError: The checkpoint is pinned or being read, or this run was resumed from it.
        """
        self._settle()

        def delete() -> None:
            found = resolve(self._root, str(_which(which)))
            if found.name == self.resumed_from:
                raise UsageError(f"{self.url}/{found.name} is not deleted: this run was resumed from it.")
            if not delete_any(self._root, found.name, reason="asked for"):
                raise UsageError(f"{self.url}/{found.name} is not deleted: it is pinned or being read.")

        self._coordinator.decide(delete, "deleting a checkpoint")

    # --- closing

    def close(self) -> None:
        """Wait for the running save, and release all resources. Raises the save's error. All ranks must call it."""
        if self._closed or os.getpid() != self._pid:
            return
        try:
            self._settle()
        finally:
            self._hold.release()
            self._saver.close()
            self._release()

    def _release(self) -> None:
        self._closed = True
        self._buffers.release()
        if self._watch is not None:
            self._watch.close()  # from now on a signal ends the process again
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
            return  # in a fork: the resources belong to the parent
        # Training failed on this rank. Other ranks may never get here, so collective calls are impossible.
        handle, self._in_flight = self._in_flight, None
        if handle is not None:
            if not isinstance(error, Exception):  # Ctrl-C
                handle.hurry()
                self._hold.hurry()
            failure = _outcome(handle)
            if failure is not None:
                report_failure(handle.step, failure)
        self._hold.release()
        self._release()  # also closes the connections, so that ranks waiting for this one fail before the timeout

    # --- internals

    def _request(
        self, step: int, metrics: Mapping[str, float] | None, client_state: Any, tag: str | None, overwrite: bool
    ) -> SaveRequest:
        if not isinstance(step, bool):
            with contextlib.suppress(TypeError):  # the ranks refuse a wrong step together, in the save
                step = operator.index(step)  # an integer of numpy or torch becomes an int
        return SaveRequest(
            step=step,
            state_dict_type=self.state_dict_type,
            tag=tag,
            metrics=metrics,
            client_state=client_state,
            overwrite=overwrite,
            given_up=frozenset(self._loader.given_up),
            set_aside=self._loader.looked,
            resumed_from=self._loader.resumed.get(self._root.url),
        )

    def _stage(self, prepared: Prepared) -> None:
        """Copy the data to host memory.

        If the copy fails, this method does not raise, because other ranks have already started to save. Instead,
        `publish` raises the error on every rank.
        """
        started = prepared.clock.seconds()
        try:
            prepared.staged = self._buffers.copy(prepared.plan.tensors)
        except Exception as error:  # noqa: BLE001  probably out of memory
            prepared.failure = error
            prepared.staged = stand_ins(prepared.plan.tensors)
        prepared.clock.add("stage", prepared.clock.seconds() - started, self._buffers.staged)

    def _settle(self) -> None:
        """Wait for the running save, and raise the save's error unless the caller has already seen it.

        Every method that uses the coordinator calls this first, because the save's thread uses the coordinator too.
        Does nothing in that thread, which `on_commit` may call from.
        """
        self._check_open()
        if self._in_flight is None or self._in_flight.runs_here():
            return
        handle, self._in_flight = self._in_flight, None
        if handle.asked:
            _outcome(handle)
        else:
            handle.result()

    def _check_open(self) -> None:
        if self._closed:  # the group was destroyed, and torch would silently use the default group
            raise UsageError(f"the manager of {self.url} is closed. Create a new one.")
        if os.getpid() != self._pid:
            raise UsageError(
                f"the manager of {self.url} was created by process {self._pid} and cannot be used in its "
                f"fork, process {os.getpid()}: threads and connections do not survive a fork. Use it in the "
                "process that created it, or create another manager here."
            )

    def _reported(self, prepared: Prepared, record: CommitRecord, stall: float | None) -> SaveReport:
        """Rotate after a committed save, and return the report of the save.

        Args:
            stall: How many seconds training was blocked. None: for the whole save.
        """
        self._last_saved = record.step
        self._loader.given_up.discard(record.name)
        rotated: tuple[tuple[tuple[int, int, str], ...], int | None, int] = (), None, 0
        if self._coordinator.is_main:
            with prepared.clock.phase("rotate"):
                rotated = self._rotate(record)
        seconds = prepared.clock.seconds()
        report = SaveReport(
            url=f"{self.url}/{record.name}",
            step=record.step,
            total_bytes=record.total_bytes,
            rank_bytes=prepared.written,
            stall_seconds=seconds if stall is None else stall,
            seconds=seconds,
            deleted=rotated[0],
            kept=rotated[1],
            exempt=rotated[2],
            limit=self.retention.max_num if self.retention is not None else None,
            phases=tuple(prepared.clock.phases),
        )
        if self._coordinator.is_main and _log.isEnabledFor(logging.INFO):
            _log.info("%s", report.line())
        if self._coordinator.is_main and _log.isEnabledFor(logging.DEBUG):
            _log.debug("step %d: %s", report.step, report.phase_line())
        if self._trace is not None:
            write_trace_file(self._trace, "save", report, rank=self._coordinator.rank)
        if self._on_commit is not None:
            try:
                self._on_commit(report)
            except Exception:  # noqa: BLE001  an error in the callback must not fail a committed save
                _log.exception("on_commit failed; the checkpoint of step %d is committed", report.step)
        return report

    def _rotate(self, record: CommitRecord) -> tuple[tuple[tuple[int, int, str], ...], int | None, int]:
        """Delete old checkpoints. Never raises, because the save is already committed.

        Returns (step, bytes, reason) for each deleted checkpoint, the number of remaining checkpoints, and how many of
        them stay only because they are exempt.
        """
        try:
            seen = self._saver.seen
            if self.retention is None:
                return (), len((seen or list_checkpoints(self._root)).committed), 0
            resumed_from = self._loader.resumed.get(self._root.url)
            protected = {resumed_from: "the run was resumed from it"} if resumed_from else {}
            done = rotate(
                self._root, self.retention, protected=protected, among=self.rotates, seen=seen, level=logging.DEBUG
            )
            self._hold.remember(done.left, among=self.rotates)
            names = frozenset(done.deleted)
            gone = tuple((item.step, item.nbytes, item.reason) for item in done.decisions if item.name in names)
            older = done.decisions[: -self.retention.max_num] if self.retention.max_num is not None else ()
            return gone, len(done.decisions) - len(done.deleted), sum(item.keep for item in older)
        except Exception as error:  # noqa: BLE001  the other ranks have continued, and would wait for rank 0
            is_bug = not isinstance(error, (CkptkitError, OSError))
            text = "step %d is saved, but rotation failed; the next save retries: %s"
            _log.warning(text, record.step, error, exc_info=is_bug)
            return (), None, 0


def check_options(
    url: str | Path,
    *,
    retention: object = None,
    state_dict_type: Any = StateDictType.SHARDED,
    max_shard_size: Any = "5GB",
    timeout_s: Any = 1800.0,
    async_policy: object = "wait",
    async_mode: object = "thread",
    on_signal: Any = (),
    on_commit: object = None,
    trace: object = None,
    process_group: object = None,
    side_files: object = None,
    start_fresh: object = "if_empty",
    storage_options: object = None,
) -> tuple[str, StateDictType, int]:
    """Check the arguments of a CheckpointManager that an integration will create later.

    Returns three parsed arguments: the URL, the state-dict type, and the maximum file size in bytes.

    Raises:
        UsageError: An argument is wrong.
    """
    where = location("url", url)
    if retention is not None and not isinstance(retention, RetentionPolicy):
        raise wrong("retention", retention, "RetentionPolicy(max_num=3, ...)")
    for name, value, (*others, last) in (
        ("async_policy", async_policy, ("wait", "refuse")),
        ("start_fresh", start_fresh, ("if_empty", "if_none_committed", "never")),
    ):
        if value not in (*others, last):
            raise UsageError(f"{name}={value!r}: expected {', '.join(map(repr, others))} or {last!r}.")
    if async_mode == "process":
        raise UsageError(
            "async_mode='process' is not supported: without a spare core, a process slows training more than a thread. "
            "Use async_mode='thread', the default."
        )
    if async_mode != "thread":
        raise UsageError(f"async_mode={async_mode!r}: expected 'thread'.")
    parsed = StateDictType.parse(state_dict_type)
    max_shard_bytes = parse_size(max_shard_size, "max_shard_size")
    if max_shard_bytes < 1:
        raise wrong("max_shard_size", max_shard_size, "more than 0 bytes")
    if on_commit is not None and not callable(on_commit):
        raise wrong("on_commit", on_commit, "a function that takes a SaveReport")
    for name, place in (("trace", trace), ("side_files", side_files)):
        if place is not None:
            location(name, place)
    _check_group(process_group)
    check_storage_options(storage_options=storage_options)
    parse_duration(timeout_s, "timeout_s")
    parse_signals(on_signal)
    return where, parsed, max_shard_bytes


def _check_group(process_group: object) -> None:
    # Accept negative ints: torch's GroupMember.NON_GROUP_MEMBER is negative, and the Coordinator raises a better
    # error for it.
    if (
        isinstance(process_group, Sequence)
        or hasattr(process_group, "get_group")
        or (isinstance(process_group, int) and process_group >= 0)
    ):
        raise wrong("process_group", process_group, "a ProcessGroup of torch.distributed; a mesh has get_group()")
    started = os.environ.get("WORLD_SIZE", "1") if {"TORCHELASTIC_RUN_ID", "RANK"} <= os.environ.keys() else "1"
    if started != "1" and not is_distributed():
        raise UsageError(
            f"torchrun started {started} ranks, but torch.distributed is not initialized: each rank would save alone. "
            "Call torch.distributed.init_process_group() before you create the CheckpointManager."
        )


def parse_signals(given: Any) -> tuple[int, ...]:
    """Return the signals that an `on_signal` option names.

    Raises:
        UsageError: The option is neither "save" nor a sequence of signals that can be caught.
    """
    if isinstance(given, str) and given == "save":
        return SAVE_SIGNALS
    caught = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    if isinstance(given, str) or not isinstance(given, Iterable) or not all(number in caught for number in given):
        raise UsageError(
            f"on_signal is {given!r:.80}, expected 'save' or signals that can be caught, such as [signal.SIGTERM]."
        )
    return tuple(given)


def _which(value: Any) -> str | int:
    """Return the argument `which` as a step, a tag or a URL.

    A path object without a slash becomes "./PATH", because a string without a slash means a tag.
    """
    if isinstance(value, os.PathLike):
        text = location("which", value)
        return text if "/" in text else f"./{text}"
    if isinstance(value, bool) or not (isinstance(value, str) or hasattr(value, "__index__")):
        raise wrong("which", value, "'latest', 'best', a step (an int), a tag or a URL")
    return value if isinstance(value, str) else operator.index(value)


def _outcome(handle: SaveHandle) -> Exception | None:
    """Wait for a save. Return its error, or None if it succeeded."""
    try:
        handle.result()
    except (CkptkitError, OSError) as error:
        return error
    return None
