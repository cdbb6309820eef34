"""`CheckpointManager`: saves, keeps and loads the checkpoints of one run."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ckptkit.checkpoint.async_save import SaveHandle, collecting_later
from ckptkit.checkpoint.coordinator import Coordinator
from ckptkit.checkpoint.delete import delete_checkpoint, rotate
from ckptkit.checkpoint.hf_config import read_side_files
from ckptkit.checkpoint.hold import RunHold
from ckptkit.checkpoint.inventory import list_checkpoints, resolve
from ckptkit.checkpoint.load_plan import LoadOptions
from ckptkit.checkpoint.loader import Loader, load_options
from ckptkit.checkpoint.report import LoadReport, SaveReport, write_trace_file
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.save import Prepared, Saver, SaveRequest
from ckptkit.checkpoint.signals import SAVE_SIGNALS, SignalWatch
from ckptkit.checkpoint.staging_buffers import StagingBuffers, stand_ins
from ckptkit.checkpoint.state import StateDictType, TrainState
from ckptkit.checkpoint.writer_process import WriterProcess
from ckptkit.errors import CkptkitError, SaveError, UsageError
from ckptkit.formats.layout import CommitRecord, checkpoint_name
from ckptkit.storage.store import open_store
from ckptkit.units import parse_duration, parse_size

__all__ = ["CheckpointManager"]

_log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, keeps and loads the checkpoints of one run. All ranks make it, and call its methods, together.

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
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if async_policy not in ("wait", "refuse"):
            raise UsageError(f"async_policy={async_policy!r}: it is 'wait' or 'refuse'.")
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
            trace=self._trace,
            storage_options=storage_options,
        )
        self._buffers = StagingBuffers()
        self._stager = self._writer.buffers if self._writer else self._buffers
        if self._writer is not None:
            self._writer.wait_ready()
        self._in_flight: SaveHandle | None = None
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
        return self._publish(prepared, None, None)

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
        if self._async_policy == "refuse" and self._busy():
            raise SaveError(
                f"step {step} is not saved: the save before is still under way, and async_policy is 'refuse'."
            )
        self._settle()
        with collecting_later():
            request = self._request(step, metrics, client_state, tag, overwrite)
            prepared = self._saver.prepare(state, request, stage=self._stage)
            stall = prepared.clock.seconds()
            self._in_flight = SaveHandle(step, lambda: self._publish_staged(prepared, stall))
            return self._in_flight.start()

    def wait(self) -> SaveReport | None:
        """Wait for the save under way and return its report; None where there is none. Raises what went wrong."""
        handle, self._in_flight = self._in_flight, None
        return None if handle is None else handle.result()

    def interrupted(self) -> bool:
        """Return True on every rank at the same step once a rank got a signal of `on_signal`: save, and end.

        All ranks call it between two steps; it costs one small all-reduce. Stays True.
        """
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
        if self._watch is None:
            raise UsageError("save_on_signal: make the manager with on_signal='save'.")
        if not self._watch.agreed():
            return False
        # First the save under way: it may be of this step, and be done on one rank and not yet on another.
        try:
            self._settle()
        except SaveError as error:
            _log.error("the save under way when the signal came failed, saving step %d now: %s", step, error)
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
        """Restore `state` in place; return what was loaded, or None where the run has no checkpoint yet.

        All ranks must call it; rank 0 chooses. Any state-dict type, any world size and mesh (LOCAL: its own). Nothing
        is touched unless everything fits and was read (where memory is short: checked) without error. Where the root
        holds nothing of ours, but another system's run (Lightning's, verl's, ...), the newest checkpoint of that is
        loaded.

        Args:
            which: "latest", "latest~1", "best", a step, a tag, or the URL of a checkpoint, of any format that
                ckptkit reads.
            fallback: Where the checkpoint is damaged: "error", or "previous" loads the newest one before it that is
                not, and says so in the log. The damaged one may then be saved again.
            options: How to treat what does not fit; or its fields as keywords: `strict`, `include`, `exclude`,
                `model`, `optimizer`, `convert_dtype`, `in_place`, `max_memory`, `verify`, `replicas`, `rng_on_resize`,
                `per_rank_on_resize`.

        Raises:
            CheckpointNotFoundError: `which` names a checkpoint that is not there.
            CheckpointMismatchError: Lists all that does not fit.
            CorruptCheckpointError: The checkpoint is damaged; names file and tensor.
        """
        self._settle()
        return self._loader.load(state, which, load_options(options, overrides), fallback=fallback)

    # --- what there is

    def latest(self) -> int | None:
        """Return the step of the newest committed checkpoint, None where there is none. All ranks must call it."""

        def step() -> int | None:
            found = list_checkpoints(self._root).latest
            return None if found is None else found.step

        return self._coordinator.decide(step, "looking for the latest checkpoint")

    def list(self) -> list[CommitRecord]:
        """Return the records of the committed checkpoints, oldest first, without their files. Collective."""

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
                raise UsageError(f"{self.url}/{found.name} is what this run was resumed from; it is not deleted.")
            if not delete_checkpoint(self._root, found.name, reason="asked for"):
                raise UsageError(f"{self.url}/{found.name} is pinned; it is not deleted.")

        self._coordinator.decide(delete, "deleting a checkpoint")

    # --- the end

    def close(self) -> None:
        """Wait for the save under way, raise what went wrong with it, and give everything back. Collective."""
        if self._closed:
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
        # Training failed on this rank: the others may not come here, so nothing collective can be done.
        handle, self._in_flight = self._in_flight, None
        if handle is not None:
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
            raise UsageError(f"async_mode={mode!r}: it is 'thread' or 'process'.")
        if mode == "thread":
            return None
        if self.state_dict_type is not StateDictType.SHARDED:
            raise UsageError(
                f"async_mode='process' writes SHARDED checkpoints, not {self.state_dict_type.value}: FULL ones are "
                "gathered over the ranks of the training. Use async_mode='thread'."
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
            client_state=copy.deepcopy(client_state),  # the record is written when training goes on
            overwrite=overwrite or checkpoint_name(step, tag) in self._loader.given_up,
            resumed_from=self._loader.resumed_from,
        )

    def _stage(self, prepared: Prepared) -> None:
        """Copy what is to be written. A failure waits for `publish`: the other ranks are on their way."""
        started = prepared.clock.seconds()
        if not prepared.plan.reused:
            self._stager.forget()
        try:
            prepared.staged = (self._writer.stage if self._writer else self._buffers.copy)(prepared.plan.tensors)
        except Exception as error:  # noqa: BLE001  memory, most likely: `publish` raises it on every rank
            prepared.failure = error
            prepared.staged = stand_ins(prepared.plan.tensors)
        prepared.clock.add("stage", prepared.clock.seconds() - started, self._stager.staged)

    def _settle(self) -> None:
        """Wait for the save under way; raise its error if nobody has seen it."""
        if self._closed:
            raise UsageError(f"the manager of {self.url} is closed.")
        handle, self._in_flight = self._in_flight, None
        if handle is None:
            return
        if handle.asked:
            _outcome(handle)
        else:
            handle.result()

    def _publish(self, prepared: Prepared, tensors: Any, stall: float | None) -> SaveReport:
        record = self._saver.publish(prepared, tensors)
        self._last_saved = record.step
        self._loader.given_up.discard(record.name)
        deleted: tuple[tuple[int, int], ...] = ()
        kept = 0
        if self._coordinator.is_main:
            with prepared.clock.phase("rotate"):
                deleted, kept = self._rotate(record)
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
            phases=prepared.clock.phases,
        )
        self._announce(report)
        return report

    def _publish_staged(self, prepared: Prepared, stall: float) -> SaveReport:
        return self._publish(prepared, prepared.staged, stall)

    def _rotate(self, record: CommitRecord) -> tuple[tuple[tuple[int, int], ...], int]:
        """Return (step, bytes) of what was deleted, and how many are kept. Raises nothing: the save is done."""
        try:
            return self._rotated()
        except (CkptkitError, OSError) as error:
            _log.warning("step %d is saved, but rotating failed; the next save tries again: %s", record.step, error)
            return (), 0

    def _rotated(self) -> tuple[tuple[tuple[int, int], ...], int]:
        seen = self._saver.seen
        if self.retention is None:
            return (), len((seen or list_checkpoints(self._root)).committed)
        protected = {self._loader.resumed_from: "the run was resumed from it"} if self._loader.resumed_from else {}
        done = rotate(self._root, self.retention, protected=protected, among=self.rotates, seen=seen)
        self._hold.remember(done.left, among=self.rotates)
        gone = tuple((item.step, item.nbytes) for item in done.decisions if item.name in done.deleted)
        return gone, len(done.decisions) - len(done.deleted)

    def _announce(self, report: SaveReport) -> None:
        if self._coordinator.is_main:
            _log.info("%s", report.line())
            _log.info("step %d: %s", report.step, report.phase_line())
        write_trace_file(self._trace, "save", report, rank=self._coordinator.rank)
        if self._on_commit is not None:
            try:
                self._on_commit(report)
            except Exception:  # noqa: BLE001  a logger's fault must not undo a checkpoint that is there
                _log.exception("on_commit failed; the checkpoint of step %d is committed", report.step)

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
