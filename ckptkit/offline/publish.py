"""Where a result goes: a directory or a single file, staged and published whole, by one process or by many ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

from ckptkit.checkpoint.run.coordinator import Coordinator, Outcome
from ckptkit.errors import RankFailedError, UsageError
from ckptkit.formats.own.record import MANIFEST_NAME, RECORD_NAME
from ckptkit.formats.replaceable import check_replaceable
from ckptkit.offline.copying.plan import Plan, check_room, share_out
from ckptkit.offline.copying.resume import clear_strays, left_beside
from ckptkit.offline.export.checksums import SUMS_NAME
from ckptkit.storage.journal import Journal, dead_owner_files
from ckptkit.storage.ledger import Finished, Ledger
from ckptkit.storage.local import LocalStore, is_directory
from ckptkit.storage.open import open_store
from ckptkit.storage.publish import (
    check_target,
    check_writable,
    stage,
    sync_files,
    sync_tree,
)
from ckptkit.storage.staging import (
    Replaceable,
    is_interruption,
    leftover_of,
    owner_path,
    write_owner,
)
from ckptkit.storage.store import Store, split_url

__all__ = [
    "OutputPlace",
    "Session",
    "is_one_of_many",
    "open_target",
    "options_of_both",
    "process_group",
    "staged_together",
]

T = TypeVar("T")
_BESIDE = (MANIFEST_NAME, RECORD_NAME, SUMS_NAME)  # is written as well, or may be
_FILE_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


class Session(Protocol):
    """A place that is being written.

    Attributes:
        store: Where this process writes.
        only: Which files of the plan are its own, by index; None for all.
        journal: Where steps that are done are stated, so that the next run can go on; None where none can.
        ledger: The same for objects of an object store.
    """

    store: Store
    only: Callable[[int], bool] | None
    journal: Journal | None
    ledger: Ledger | None

    def everyone(self, fn: Callable[[], T]) -> list[T]:
        """Run `fn` on every rank; raises on all where it failed on any. Returns what it returned here, and, where
        `one` is run, on every other rank."""

    def one(self, fn: Callable[[], T]) -> T:
        """Run `fn` on one rank; its result, or error, is everybody's."""


class _Alone:
    """The session of a process that does all by itself."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.only: Callable[[int], bool] | None = None
        staged = is_directory(store) and leftover_of(os.path.basename(store.url)) is not None
        self.journal = Journal(store.url) if staged and is_directory(store) else None
        self.ledger: Ledger | None = getattr(store, "ledger", None)

    def everyone(self, fn: Callable[[], T]) -> list[T]:
        return [fn()]

    def one(self, fn: Callable[[], T]) -> T:
        return fn()


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """The place of a result.

    Attributes:
        url: A directory; for a single file the one it lies in.
        file_name: Of the single file; "" for a directory.
    """

    url: str
    file_name: str
    is_file: bool
    overwrite: bool
    storage_options: Mapping[str, Any] | None

    @property
    def replaceable(self) -> Replaceable | None:
        """What decides whether something may be replaced; None: nothing may."""
        return check_replaceable if self.overwrite else None

    @contextlib.contextmanager
    def stage(self, plan: Plan) -> Iterator[Session]:
        """Yield where to write the plan; it is published when the block ends well, and gone when it doesn't."""
        if is_one_of_many():
            with staged_together(self, plan) as session:
                yield session
            return
        with self.open(plan, resume=True) as store:
            clear_strays(store, plan)
            session = _Alone(store)
            try:
                yield session
            finally:
                if session.journal is not None:
                    session.journal.close()

    def local_name(self) -> tuple[str, str]:
        """Return the local directory in which the result is staged, and under which name; "" where it is remote."""
        protocol, rest = split_url(self.url)
        if protocol not in ("file", "local"):
            return "", ""
        whole = LocalStore(rest).url
        return (whole, self.file_name) if self.is_file else os.path.split(whole)

    def open(
        self, plan: Plan, *, resume: bool = False, dead: Collection[str] = ()
    ) -> contextlib.AbstractContextManager[Store]:
        """Return the staging store of this place, as a context that publishes; for one process.

        Args:
            resume: It may hold what an interrupted process left, and is left so in turn.
            dead: Owner files of earlier writers on other machines that are known to be dead.
        """
        # A shard is never held back: stores keep what comes last in memory.
        small = [name for name in plan.last if not name.endswith(".safetensors")]
        names = {**dict.fromkeys((*plan.last, *_BESIDE), -1), **{file.path: file.nbytes for file in plan.files}}
        return stage(
            self.url,
            file=self.file_name if self.is_file else "",
            replaceable=check_replaceable,
            overwrite=self.overwrite,
            last=small,
            storage_options=self.storage_options,
            resume=resume,
            dead=dead,
            names=names,
        )

    def check(self, plan: Plan) -> None:
        """Raise what `open` would, of the place itself; nothing is written.

        Raises:
            CheckpointExistsError: It is taken.
            NoSpaceError: The plan does not fit on the disk.
            PermissionError: A local directory can't be written to.
        """
        self.check_free()
        folder, name = self.local_name()
        if not folder:
            return
        check_writable(LocalStore(folder))
        left = left_beside(f"{folder}/{name}")
        check_room(plan, LocalStore(folder), held=left[1] if left is not None else 0)

    def check_free(self) -> None:
        """Raise CheckpointExistsError where the place is taken."""
        store = open_store(self.url, storage_options=self.storage_options)
        if is_directory(store):
            folder, name = self.local_name()
            check_target(LocalStore(folder), name, replaceable=self.replaceable)
            return
        from ckptkit.storage.publish_remote import check_object, check_remote

        if self.is_file:
            check_object(store, self.file_name, self.replaceable)
        else:
            check_remote(store, self.replaceable)


def is_one_of_many() -> bool:
    """Return whether this process is a rank among several that torchrun started, or that joined a group themselves.

    RANK and WORLD_SIZE alone say nothing: a batch job may leave them to a shell in which one process converts,
    and it would wait for the others for ever.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_world_size() > 1)
    started = "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ
    return started and int(os.environ.get("WORLD_SIZE", "1") or 1) > 1


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _identity(url: str) -> str:
    kind, path = split_url(url)
    if "\0" in path:
        return url  # no path at all: whoever opens it says so
    return os.path.realpath(path) if kind in ("file", "local") else f"{kind}://{path.strip('/')}"


Options: TypeAlias = Mapping[str, Any]


def options_of_both(both: Options | None, src: Options | None, dst: Options | None) -> list[Options | None]:
    """Return the storage options of the source and of the destination: what is common, and over it each one's own."""
    return [{**(both or {}), **own} if own else both for own in (src, dst)]


def open_target(
    dst: str, *, source: str, single_file: bool, overwrite: bool, storage_options: Mapping[str, Any] | None
) -> OutputPlace:
    """Return the place that `dst` names. `single_file`: what is written is one file, which `dst` may name.

    Raises:
        UsageError: `dst` is the checkpoint that is read, `source`, or a directory that holds it.
    """
    here, there = _identity(dst), _identity(source)
    if f"{there}/".startswith(f"{here}/"):
        what = "the checkpoint that is read" if here == there else f"a directory that holds what is read, {source}"
        raise UsageError(f"{dst} is {what}: it would be replaced by a part of itself. Give another DST.")
    if single_file and dst.endswith(_FILE_ENDINGS) and not os.path.isdir(dst):
        folder, _, name = dst.rpartition("/")
        return OutputPlace(folder or ("/" if dst.startswith("/") else "."), name, True, overwrite, storage_options)
    return OutputPlace(dst, "pytorch_model.bin" if single_file else "", False, overwrite, storage_options)


# Several processes, started by torchrun, that write one result: files shared out, published once, failing together.


_MEET_S = 120  # ranks that torchrun starts together are there within seconds


class _Together:
    """The session of one rank among several."""

    def __init__(self, store: Store, coordinator: Coordinator, plan: Plan, ledger: Ledger | None) -> None:
        self.store = store
        self.ledger = ledger
        self.journal = _journal_of(store, coordinator)
        self._coordinator = coordinator
        owners = share_out(plan, coordinator.world_size)
        self.only: Callable[[int], bool] | None = lambda index: owners[index] == coordinator.rank
        self.own_paths = [plan.files[i].path for i, rank in enumerate(owners) if rank == coordinator.rank]

    def everyone(self, fn: Callable[[], T]) -> list[T]:
        outcome = Outcome.of(lambda: self._durable(fn))
        try:
            results: list[T] | None = self._coordinator.settle(outcome, "writing the files")
        except BaseException as error:
            if not self._coordinator.is_main and not is_directory(self.store) and not is_interruption(error):
                # Rank 0 clears away what it staged; on an object store it does not know of these.
                with contextlib.suppress(OSError):
                    self.store.delete(self.own_paths)
            raise
        return [outcome.value] if results is None else results

    def _durable(self, fn: Callable[[], T]) -> T:
        """Run `fn`, and make what it wrote durable: rank 0, on another machine, can't."""
        value = fn()
        if is_directory(self.store):
            sync_files(self.store, [path for path in self.own_paths if self.store.info(path) is not None])
        return value

    def one(self, fn: Callable[[], T]) -> T:
        return self._coordinator.decide(fn, "checking the result")

    @contextlib.contextmanager
    def until_published(self) -> Iterator[None]:
        """Keep what this rank has said of its steps, where the block is interrupted; rank 0 does so for itself."""
        if self.journal is None:
            yield
            return
        try:
            yield
        except BaseException as error:
            if is_interruption(error) and not self._coordinator.is_main:
                self.journal.leave()
            raise
        finally:
            self.journal.close()


def _journal_of(store: Store, coordinator: Coordinator) -> Journal | None:
    if not is_directory(store) or leftover_of(os.path.basename(store.url)) is None:
        return None
    return Journal(store.url, world_size=coordinator.world_size, rank=coordinator.rank)


def _join(store: Store, coordinator: Coordinator) -> None:
    """Look whether this rank sees the staging directory, and write its owner file beside it."""
    if coordinator.is_main or not is_directory(store):
        return
    head, name = os.path.split(store.url)
    kept = leftover_of(name)
    if LocalStore(head).info(name) is None:
        raise UsageError(
            f"rank {coordinator.rank}, on {os.uname().nodename}, does not see {store.url}, which rank 0 has just made. "
            "Over several machines, DST must be on storage that all of them share."
        )
    if kept is not None:
        write_owner(LocalStore(head), owner_path(name, coordinator.rank), kept.nonce)


def _known_dead(place: OutputPlace, coordinator: Coordinator) -> list[str]:
    """Return, on rank 0, the owner files of earlier writers that some rank's machine knows to be dead."""
    found = coordinator.all_ok(lambda: _dead_here(place, coordinator), "looking for what an earlier run left")
    return [path for paths in found or () for path in paths]


def _dead_here(place: OutputPlace, coordinator: Coordinator) -> list[str]:
    folder, name = place.local_name()
    if not name:
        return []
    dead = dead_owner_files(LocalStore(folder), name)
    if dead and not coordinator.is_main and os.environ.get("LOCAL_RANK", "0") == "0":
        # What the dead wrote may be in the memory of this machine alone.
        for staging in set(dead.values()):
            with contextlib.suppress(OSError):
                sync_tree(LocalStore(f"{folder}/{staging}"))
    return list(dead)


@contextlib.contextmanager
def staged_together(place: OutputPlace, plan: Plan) -> Iterator[Session]:
    """Yield the session of this rank. Every rank must come here, and leave together.

    Makes a gloo group from torchrun's environment where the process has none.

    Raises:
        RankFailedError: Some rank failed; nothing was published.
    """
    with process_group(), contextlib.closing(Coordinator()) as coordinator, contextlib.ExitStack() as stack:
        staged: list[Store] = []
        dead = _known_dead(place, coordinator)

        def open_staging() -> tuple[str, dict[str, Finished] | None]:
            staged.append(stack.enter_context(place.open(plan, resume=True, dead=dead)))
            clear_strays(staged[0], plan)
            made = getattr(staged[0], "ledger", None)
            return staged[0].url, None if made is None else dict(made.earlier)

        url, earlier = coordinator.decide(open_staging, "making room for the result")
        store = staged[0] if staged else open_store(url, storage_options=place.storage_options)
        coordinator.all_ok(lambda: _join(store, coordinator), "joining the others")
        ledger = None if earlier is None else Ledger(store, earlier)
        session = _Together(store, coordinator, plan, getattr(store, "ledger", ledger))
        with session.until_published():
            yield session
            coordinator.decide(stack.close, "publishing the result")


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Let there be a process group in the block: the one there is, or one of the ranks that torchrun started.

    Raises:
        RankFailedError: They did not meet.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_MEET_S))
    except (RuntimeError, ValueError) as error:
        raise RankFailedError(
            f"the {os.environ.get('WORLD_SIZE')} ranks that torchrun started did not meet within {_MEET_S} s: {error}. "
            "Every rank must run the same command; nothing was written."
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()
