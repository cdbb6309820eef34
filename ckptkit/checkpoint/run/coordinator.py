"""Gives all ranks the same outcome of a call within bounded time, whichever ranks fail."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from ckptkit import errors
from ckptkit.errors import CkptkitError, RankFailedError, UsageError
from ckptkit.units import first_few

T = TypeVar("T")
_GRACE_S = 10.0
_BOARD_S = 5.0  # how long to wait for the outcome that rank 0 writes to the group's store if connections break
_STOPS = (KeyboardInterrupt, SystemExit)
_TAGS = (0, 1)  # gloo tags of a message's header (the number of the call, and the length in bytes) and of the rest
_TIMEOUT = "Timed out waiting"  # how gloo's timeout message begins
_MAX_NAMED = 4  # an error shows at most this many ranks' messages, and at most this many ranks per message


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call on one rank, or on all ranks together: a value, or the error that stopped it.

    Attributes:
        kind: The class name of a ckptkit error, so that every rank can raise that class.
        causes: In the result for all ranks: each failed rank's error.
        cause: The exception itself, only on the rank that raised it.
        interrupted: Whether the rank, or every failed rank, was lost or stopped by Ctrl-C.
    """

    value: Any = None
    error: str | None = None
    kind: str = ""
    causes: Mapping[int, str] = dataclasses.field(default_factory=dict)
    cause: BaseException | None = None
    interrupted: bool = False

    @classmethod
    def of(cls, fn: Callable[[], Any]) -> Outcome:
        """Run `fn` and return its outcome. Never raises; catches even torch's CheckpointException, a BaseException."""
        try:
            return cls(fn())
        except BaseException as error:  # noqa: BLE001  the boundary of a rank: `settle` raises it again
            return cls.of_error(error)

    @classmethod
    def of_error(cls, error: BaseException) -> Outcome:
        """Return the outcome of a rank that failed with `error`."""
        known = isinstance(error, CkptkitError)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        stopped = isinstance(error, KeyboardInterrupt)
        kind = type(error).__name__ if known else ""
        return cls(error=text[:20_000], kind=kind, cause=error, interrupted=stopped)


def new_gloo_group(parent: Any, timeout_s: float) -> Any:
    """Return a new gloo group of `parent`'s ranks; None means all ranks. Exactly these ranks must call it."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(parent or dist.group.WORLD)
    some = len(ranks) != dist.get_world_size()
    timeout = timedelta(seconds=timeout_s)
    group = dist.new_group(ranks if some else None, timeout=timeout, backend="gloo", use_local_synchronization=some)
    if some and os.environ.get("TORCH_GLOO_LAZY_INIT", "0") == "0":  # else the ranks connect only when they send
        # torch derives the name of a group of only some ranks from these ranks. Once this group is destroyed, the
        # next group of the same ranks gets the same name, and must not find the old addresses.
        dist.barrier(group)  # every rank is connected to every other
        if dist.get_rank(group) == 0:
            with contextlib.suppress(AttributeError, RuntimeError):  # some stores cannot list their keys
                store = group.get_group_store()
                for key in store.list_keys():
                    store.delete_key(key)
        dist.barrier(group)
    return group


class Coordinator:
    """Coordinates the ranks of a job. All ranks must call its methods in the same order.

    If `torch.distributed` is not initialized, this process is the only rank, and torch is not imported. Otherwise the
    coordinator creates its own gloo group (a collective call). Two threads must not use one coordinator at a time.

    Args:
        group: The ranks that take part; None for all.
        timeout_s: How long rank 0 waits for any rank. The other ranks wait for rank 0 a little more than twice as long.
    """

    def __init__(self, group: Any = None, *, timeout_s: float = 1800.0) -> None:
        if not timeout_s > 0:
            raise UsageError(f"timeout_s is {timeout_s!r}, expected more than 0 seconds.")
        self.timeout_s = timeout_s
        self.rank, self.world_size = 0, 1
        self.is_main = True
        """Whether this is rank 0, which decides and publishes."""
        self.group: Any = None  # the gloo group; None with a single rank
        self.members: frozenset[int] | None = None
        """The ranks of `group`, by their numbers in the default group. None without `group`."""
        self._parent = group
        self._ranks: list[int] = [0]  # each rank's number in the default group
        self._step = 0
        self._broken = False
        self._closed = False
        self._lost = False
        self._kept: list[Any] = []  # buffers that gloo may still be reading or writing
        if is_distributed():
            self._join()

    def _join(self) -> None:
        import torch.distributed as dist

        self._ranks = dist.get_process_group_ranks(self._parent or dist.group.WORLD)
        self.rank, self.world_size = dist.get_rank(self._parent), len(self._ranks)
        self.is_main = self.rank == 0
        self.members = None if self._parent is None else frozenset(self._ranks)
        if self.rank < 0:
            raise UsageError("this rank is not in the given group; only ranks of the group may save.")
        if self.world_size > 1:
            try:
                self.group = new_gloo_group(self._parent, 2 * self.timeout_s + _GRACE_S)
            except RuntimeError as error:
                raise RankFailedError(
                    f"rank {self.rank}: the {self.world_size} ranks could not connect to each other: a rank died, "
                    f"hung, or did not make this call ({_reason(error)})."
                ) from error

    @property
    def step(self) -> int:
        """The number of collective calls so far. It is the same on all ranks. Reading it is not collective."""
        return self._step

    def global_rank(self, rank: int) -> int:
        """Convert a rank of this coordinator to its rank in the default group. Not collective."""
        return self._ranks[rank]

    def close(self) -> None:
        """Destroy the group. Other methods raise afterwards."""
        self._closed = True
        self._kept.clear()  # these buffers keep the connections open
        self._leave()

    def _leave(self) -> None:
        if self.group is not None:
            import torch.distributed as dist

            with contextlib.suppress(RuntimeError, ValueError):  # after a failure the group may be partly closed
                dist.destroy_process_group(self.group)
            self.group = None

    # --- agreeing

    def all_gather(self, value: T) -> list[T]:
        """Return all ranks' values on every rank. If a rank fails, every rank raises RankFailedError."""
        values: list[T] = self.settle(Outcome(value), "exchanging values", then=list)
        return values

    def all_ok(self, fn: Callable[[], T], what: str) -> list[T] | None:
        """Run `fn` on every rank. Return the results of all ranks on rank 0, and None on the other ranks.

        Raises:
            RankFailedError: `fn` raised on some rank, or a rank died or hung. Every rank raises the same error.
                If there is only one rank, its ckptkit error is raised unchanged.
        """
        results: list[T] | None = self.settle(Outcome.of(fn), what)
        return results

    def run_on_all(self, fn: Callable[[], T], what: str) -> T:
        """Run `fn` on every rank. Return this rank's result once `fn` has succeeded on every rank.

        Raises the same errors as `all_ok`, except in two cases: if there is only one rank, any error is raised
        unchanged, and a ckptkit error that is the same on all ranks is raised unchanged.
        """
        if self.world_size == 1:
            self._begin()
            return fn()
        own = Outcome.of(fn)
        try:
            self.settle(dataclasses.replace(own, value=None), what)
        except RankFailedError as error:
            if own.kind and list(error.causes.values()) == [own.error] * self.world_size:  # the same error on all ranks
                raise own.cause from None  # type: ignore[misc]
            raise
        return own.value  # type: ignore[no-any-return]

    def settle(self, outcome: Outcome, what: str, *, then: Callable[[list[Any]], Any] | None = None) -> Any:
        """Exchange the outcomes of all ranks. Call `then` on rank 0, and return its result on every rank.

        Without `then`, return the values of all ranks on rank 0, and None on the other ranks.

        Args:
            then: Called on rank 0 with all values, unless a rank failed. Its result is sent to all ranks, so it should
                be small. If it raises, all ranks fail; a ckptkit error without an errno is raised unchanged on every
                rank.

        Raises:
            RankFailedError: A rank failed, died or hung. Every rank raises the same error. If there is only one rank,
                its ckptkit error is raised unchanged.
        """
        self._begin()
        if not self.is_main:
            # Don't wait, because rank 0 may be busy. If the message is lost, `_hear` notices that nobody answers.
            self._post(dataclasses.replace(outcome, cause=None), [0])
            verdict = self._hear()
            value = verdict.value
        else:
            outcomes = self._collect(outcome)
            if bad := {rank: item for rank, item in outcomes.items() if item.error is not None}:
                verdict, value = _verdict(what, bad), None
            else:
                verdict, value = Outcome(), [outcomes[rank].value for rank in range(self.world_size)]
                if then is not None:
                    verdict = outcome = Outcome.of(partial(then, value))
                    value = verdict.value
                # Raise a ckptkit error from `then` unchanged. Report any other error as a failure of rank 0.
                refused = verdict.kind and not (isinstance(verdict.cause, OSError) and verdict.cause.errno is not None)
                if verdict.error is not None and not refused:
                    verdict = _verdict(what, {0: verdict})
            self._tell_all(verdict)
        if isinstance(outcome.cause, _STOPS):
            raise outcome.cause
        if verdict.error is None:
            return value
        if self.world_size == 1 and isinstance(outcome.cause, CkptkitError):
            raise outcome.cause
        raise _exception(verdict) from outcome.cause

    def decide(self, fn: Callable[[], T], what: str) -> T:
        """Run `fn` on rank 0, and return the result on every rank.

        A ckptkit error of `fn` is raised unchanged on every rank. Any other error becomes a RankFailedError.
        """
        self._begin()
        if self.is_main:
            own = Outcome.of(fn)
            verdict = own if own.error is None or own.kind else _verdict(what, {0: own})
            self._tell_all(verdict)
            if own.cause is not None and (isinstance(own.cause, (CkptkitError, *_STOPS))):
                raise own.cause
        else:
            own = verdict = self._hear()
        if verdict.error is not None:
            raise _exception(verdict) from own.cause
        return verdict.value  # type: ignore[no-any-return]

    def any(self, flag: bool) -> bool:
        """Return whether any rank sets `flag`. Takes one small all-reduce: cheap enough for every training step."""
        self._begin()
        if self.world_size == 1:
            return flag
        import torch
        import torch.distributed as dist

        seen = torch.tensor([int(flag)])
        try:
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=self.group)
        except RuntimeError as error:
            reason = _reason(error)
            if reason == "timed out":
                reason = f"no answer within {2 * self.timeout_s + _GRACE_S:g} s: it hangs, or needs a longer timeout_s"
            raise RankFailedError(f"the connection to a rank was lost: {reason}") from error
        return bool(seen.item())

    # --- messages, always between rank 0 and one other rank, so that losing a rank does not affect the others

    def _collect(self, own: Outcome) -> dict[int, Outcome]:
        """Return the outcomes by rank. Runs on rank 0. A rank that sent no outcome counts as failed."""
        found = {0: own}
        deadline = time.monotonic() + self.timeout_s
        headers = {rank: self._expect(rank) for rank in range(1, self.world_size)}
        for rank, (header, work) in headers.items():
            try:
                self._wait(work, deadline - time.monotonic())
                found[rank] = self._body(rank, header, deadline - time.monotonic())
            except RuntimeError as error:
                # gloo counts whole milliseconds, so its timeout may come shortly before the deadline.
                if time.monotonic() < deadline and _TIMEOUT not in str(error):
                    text = f"it died, or its connection broke ({_reason(error)})"
                    found[rank] = Outcome(error=text, interrupted=True)
                    continue
                # After a timeout gloo closes all of the group's connections, so nothing more can arrive.
                self._broken = True
                silent = [other for other, (head, _) in headers.items() if other not in found and int(head[0]) < 0]
                text = f"no answer within {self.timeout_s:g} s: it hangs, or needs a longer timeout_s"
                return {**found, **dict.fromkeys(silent or [rank], Outcome(error=text, interrupted=True))}
        return found

    def _begin(self) -> None:
        if self._closed:  # the group is gone, and torch would use training's group instead
            raise UsageError("the CheckpointManager is closed. Create a new one.")
        if self._lost:
            raise RankFailedError("an earlier call lost the connection to rank 0. Restart the job.")
        if self._broken:  # the same on all ranks, because rank 0 sent it: every rank creates a new group here
            self._leave()
            self._join()
            self._broken = False
        self._step += 1
        self._kept.clear()

    def _expect(self, rank: int) -> tuple[Any, Any]:
        """Start to receive a message from `rank`. Return the buffer for its first part, and a `Work` or an error."""
        import torch
        import torch.distributed as dist

        header = torch.full((2,), -1, dtype=torch.int64)
        try:
            work = dist.irecv(header, self._ranks[rank], group=self.group, tag=_TAGS[0])
        except RuntimeError as error:
            return header, error
        self._kept.append((header, work))
        return header, work

    def _wait(self, work: Any, seconds: float) -> None:
        if isinstance(work, RuntimeError):
            raise work
        work.wait(timedelta(seconds=max(0.001, seconds)))

    def _body(self, rank: int, header: Any, seconds: float) -> Any:
        import torch
        import torch.distributed as dist

        step, nbytes = header.tolist()
        if step != self._step:
            raise RuntimeError(f"rank {rank} is at call {step}, rank {self.rank} at call {self._step}")
        body = torch.empty(nbytes, dtype=torch.uint8)
        work = dist.irecv(body, self._ranks[rank], group=self.group, tag=_TAGS[1])
        self._kept.append((body, work))
        self._wait(work, seconds)
        return pickle.loads(body.numpy().tobytes())  # safe: a rank of this job sent it over this group's connection

    def _post(self, value: Any, ranks: list[int]) -> tuple[list[Any], bool]:
        """Start to send `value` to `ranks`. Return the `Work`s to wait for, and whether all ranks are connected."""
        import torch
        import torch.distributed as dist

        data = bytearray(pickle.dumps(value))
        header, body = torch.tensor([self._step, len(data)]), torch.frombuffer(data, dtype=torch.uint8)
        works: list[Any] = []
        reached = True
        for rank in ranks:
            for tensor, tag in zip((header, body), _TAGS, strict=True):
                try:
                    works.append(dist.isend(tensor, self._ranks[rank], group=self.group, tag=tag))
                except RuntimeError:
                    reached = False
        self._kept.append((header, body, works))
        return works, reached

    def _tell_all(self, verdict: Outcome) -> None:
        """Send `verdict` to all ranks. If a rank can't be reached, also write the verdict to the group's store."""
        if self.world_size == 1:
            return
        message, reached = dataclasses.replace(verdict, cause=None), not self._broken
        if reached:
            deadline = time.monotonic() + self.timeout_s
            works, reached = self._post(message, list(range(1, self.world_size)))
            for work in works:
                try:
                    self._wait(work, deadline - time.monotonic())
                except RuntimeError:
                    reached = False
        if not reached:
            with contextlib.suppress(RuntimeError):
                board, key = self._board()
                board.set(key, pickle.dumps((message, self._broken)))

    def _hear(self) -> Any:
        """Return rank 0's message. If the connection broke, read it from the group's store."""
        header, work = self._expect(0)
        try:
            self._wait(work, 2 * self.timeout_s + _GRACE_S)
            return self._body(0, header, self.timeout_s)
        except RuntimeError as error:
            try:
                board, key = self._board()
                board.wait([key], timedelta(seconds=_BOARD_S))
                value, self._broken = pickle.loads(board.get(key))
            except RuntimeError:
                # Close the connections, so that ranks waiting for this one fail at once. The traceback refers to these
                # buffers, and they keep the connections open.
                del header, work
                self._kept.clear()
                self._leave()
                self._lost = True
                raise RankFailedError(
                    f"rank 0 died or hung ({_reason(error)}). The checkpoint may or may not be published: resume from "
                    "the latest one.",
                    {0: _reason(error)},
                    interrupted=True,
                ) from error.with_traceback(None)
            return value

    def _board(self) -> tuple[Any, str]:
        """Return the group's key-value store, which works after connections break, and this call's key in it."""
        return self.group.get_group_store(), f"ckptkit/{self.group.group_name}/{self._step}"


def check_equal(values: Sequence[Any], what: str) -> None:
    """Raise UsageError unless the values of all ranks are equal. `what` names the values."""
    for rank, other in enumerate(values):
        if other != values[0]:
            raise UsageError(
                f"ranks disagree on {what}: rank 0 has {values[0]!r:.300}, rank {rank} has {other!r:.300}. Use the "
                "same arguments on every rank."
            )


def is_distributed() -> bool:
    """Return whether torch.distributed is initialized. Does not import torch."""
    if "torch" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _reason(error: BaseException) -> str:
    """Return an error's message without gloo's source lines and port numbers, which differ between ranks."""
    text = str(error)
    if any(phrase in text for phrase in ("closed by peer", "reset by peer", "refused", "roken pipe")):
        return "connection lost"
    if "imed out" in text or "timeout" in text:
        return "timed out"
    return text.strip().split("\n", maxsplit=1)[0][:200]


def _verdict(what: str, bad: Mapping[int, Outcome]) -> Outcome:
    causes = {rank: item.error or "" for rank, item in sorted(bad.items())}
    alike: dict[str, list[str]] = {}
    for rank, text in causes.items():
        alike.setdefault(text, []).append(str(rank))
    parts = [
        f"on rank{'s' * (len(ranks) > 1)} {first_few(ranks, _MAX_NAMED)}: {text}"
        for text, ranks in list(alike.items())[:_MAX_NAMED]
    ]
    if len(alike) > _MAX_NAMED:
        parts.append(f"and on {sum(map(len, list(alike.values())[_MAX_NAMED:]))} more")
    interrupted = all(item.interrupted for item in bad.values())
    return Outcome(error=f"{what} failed {'; '.join(parts)}", causes=causes, interrupted=interrupted)


def _exception(verdict: Outcome) -> Exception:
    known = getattr(errors, verdict.kind, None) if verdict.kind else None
    text = verdict.error or ""
    if isinstance(known, type) and issubclass(known, CkptkitError) and known is not RankFailedError:
        return known(text)
    return RankFailedError(text, verdict.causes or {0: text}, interrupted=verdict.interrupted)
