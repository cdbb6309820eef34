"""Stages a result (a directory or a single file) and publishes it atomically, from one or several ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

from ckptkit.checkpoint.run.address import checkpoint_named
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
from ckptkit.storage.publish import check_target, check_writable, stage, sync_files, sync_tree
from ckptkit.storage.staging import is_interruption, leftover_of, owner_path, write_owner
from ckptkit.storage.store import Store, split_url

T = TypeVar("T")
_BESIDE = (MANIFEST_NAME, RECORD_NAME, SUMS_NAME)  # files that may be written in addition to the plan's
_FILE_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")


Options: TypeAlias = Mapping[str, Any]


class Session:
    """The files that one process writes for a result, and the functions that coordinate all processes.

    Attributes:
        store: The store to which this process writes.
        files: Indices of the plan's files that this process writes.
        journal: Records finished steps, so that the next command can resume. None if resuming is impossible.
        ledger: Records finished objects on an object store, so that the next command can resume. None if resuming is
            impossible.
    """

    def __init__(self, store: Store, plan: Plan, coordinator: Coordinator, ledger: Ledger | None) -> None:
        self.store = store
        self.ledger = ledger
        self._coordinator = coordinator
        rank, world_size = coordinator.rank, coordinator.world_size
        self.files = [index for index, owner in enumerate(share_out(plan, world_size)) if owner == rank]
        self._paths = [plan.files[index].path for index in self.files]
        self.journal: Journal | None = None
        if is_directory(store) and leftover_of(os.path.basename(store.url)) is not None:
            self.journal = Journal(store.url, world_size=world_size, rank=rank)

    def everyone(self, fn: Callable[[], T]) -> list[T]:
        """Run `fn` on every rank. If `fn` fails on any rank, all ranks raise.

        Rank 0 returns the results of all ranks. Every other rank returns only its own result.
        """
        if self._coordinator.world_size == 1:
            return [fn()]

        def durable() -> T:
            value = fn()
            if is_directory(self.store):  # rank 0, perhaps on a different machine, could not sync these files
                sync_files(self.store, [path for path in self._paths if self.store.info(path) is not None])
            return value

        outcome = Outcome.of(durable)
        try:
            results: list[T] | None = self._coordinator.settle(outcome, "writing the files")
        except BaseException as error:
            if not self._coordinator.is_main and not is_directory(self.store) and not is_interruption(error):
                # Rank 0 deletes the staging directory. On an object store, rank 0 does not know this rank's files.
                with contextlib.suppress(OSError):
                    self.store.delete(self._paths)
            raise
        return [outcome.value] if results is None else results

    def one(self, fn: Callable[[], T]) -> T:
        """Run `fn` on rank 0. All ranks return the result, or all ranks raise."""
        return _decide(self._coordinator, fn, "checking the result")


def _decide(coordinator: Coordinator, fn: Callable[[], T], what: str) -> T:
    """Run `fn` on rank 0. All ranks return the result.

    If there is only one process, the errors of `fn` are raised unchanged.
    """
    return fn() if coordinator.world_size == 1 else coordinator.decide(fn, what)


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """The destination of a result.

    Attributes:
        url: The result's directory. For a single file, the directory that contains the file.
        file_name: Name of the single file. "" for a directory.
    """

    url: str
    file_name: str
    is_file: bool
    overwrite: bool
    storage_options: Mapping[str, Any] | None

    @contextlib.contextmanager
    def stage(self, plan: Plan) -> Iterator[Session]:
        """Yield a session with which to write the plan's files, and publish the result if the block succeeds.

        If the block fails, at most a staging directory is left, from which the next command resumes. If there are
        several ranks, all must enter and leave the block together. If there is no process group, a gloo group is
        created from torchrun's environment.

        Raises:
            RankFailedError: A rank failed. Nothing was published.
        """
        with contextlib.ExitStack() as group, contextlib.ExitStack() as staging:
            if is_one_of_many():
                group.enter_context(process_group())
            coordinator = group.enter_context(contextlib.closing(Coordinator()))
            dead = _known_dead(self, coordinator) if coordinator.world_size > 1 else []
            staged: list[Store] = []

            def open_staging() -> tuple[str, dict[str, Finished] | None]:
                staged.append(staging.enter_context(self.open(plan, dead=dead)))
                clear_strays(staged[0], plan)
                made = getattr(staged[0], "ledger", None)
                return staged[0].url, None if made is None else dict(made.earlier)

            url, earlier = _decide(coordinator, open_staging, "creating the staging directory")
            store = staged[0] if staged else open_store(url, storage_options=self.storage_options)
            coordinator.all_ok(lambda: _join(store, coordinator), "opening the staging directory")
            ledger = None if earlier is None else Ledger(store, earlier)
            session = Session(store, plan, coordinator, getattr(store, "ledger", ledger))
            try:
                yield session
                _decide(coordinator, staging.close, "publishing the result")
            except BaseException as error:
                # Keep an interrupted rank's finished steps for the next command. For rank 0, `staging` does this.
                if session.journal is not None and is_interruption(error) and not coordinator.is_main:
                    session.journal.leave()
                raise
            finally:
                if session.journal is not None:
                    session.journal.close()

    def local_name(self) -> tuple[str, str]:
        """Return the local directory in which the result is staged, and the result's name.

        Returns ("", "") for a remote destination.
        """
        protocol, rest = split_url(self.url)
        if protocol not in ("file", "local"):
            return "", ""
        whole = LocalStore(rest).url
        return (whole, self.file_name) if self.is_file else os.path.split(whole)

    def open(self, plan: Plan, *, dead: Collection[str] = ()) -> contextlib.AbstractContextManager[Store]:
        """Return a context manager that yields the staging store, and publishes the store's files on exit.

        Only one process may call this. The staging store may contain files that an interrupted process left.

        Args:
            dead: Owner files of earlier writers on other machines. These writers are known to be dead.
        """
        # Don't publish shards last, because stores keep the files to publish last in memory.
        small = [name for name in plan.last if not name.endswith(".safetensors")]
        names = {**dict.fromkeys((*plan.last, *_BESIDE), -1), **{file.path: file.nbytes for file in plan.files}}
        return stage(
            self.url, file=self.file_name if self.is_file else "", replaceable=check_replaceable,
            overwrite=self.overwrite, last=small, storage_options=self.storage_options, resume=True, dead=dead,
            names=names,
        )  # fmt: skip

    def check(self, plan: Plan) -> None:
        """Raise the errors about the destination that `open` would raise, without writing anything.

        Raises:
            CheckpointExistsError: The target exists.
            NoSpaceError: The disk has too little space.
            PermissionError: A local directory is not writable.
        """
        self.check_free()
        folder, name = self.local_name()
        if not folder:
            return
        check_writable(LocalStore(folder))
        left = left_beside(f"{folder}/{name}")
        check_room(plan, LocalStore(folder), held=left[1] if left is not None else 0)

    def check_free(self) -> None:
        """Raise CheckpointExistsError if the target exists and must not be replaced."""
        store = open_store(self.url, storage_options=self.storage_options)
        replaceable = check_replaceable if self.overwrite else None  # None: no target may be replaced
        if is_directory(store):
            folder, name = self.local_name()
            check_target(LocalStore(folder), name, replaceable=replaceable)
            return
        from ckptkit.storage.publish_remote import check_object, check_remote

        if self.is_file:
            check_object(store, self.file_name, replaceable)
        else:
            check_remote(store, replaceable)


def is_one_of_many() -> bool:
    """Return whether this process is one of several ranks, started by torchrun or in a process group.

    The variables RANK and WORLD_SIZE do not prove this. A batch job may set them for a shell that runs the command only
    once, and the command would then wait for the other ranks forever.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_world_size() > 1)
    started = "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ
    return started and int(os.environ.get("WORLD_SIZE", "1") or 1) > 1


def _identity(url: str) -> str:
    kind, path = split_url(url)
    if "\0" in path:
        return url  # not a valid path; opening it raises
    return os.path.realpath(path) if kind in ("file", "local") else f"{kind}://{path.strip('/')}"


def options_of_both(both: Options | None, src: Options | None, dst: Options | None) -> list[Options | None]:
    """Return the options of the source and of the destination: `both`, overridden by `src` or by `dst`."""
    return [{**(both or {}), **own} if own else both for own in (src, dst)]


def open_target(
    dst: str, *, source: str, single_file: bool, overwrite: bool, storage_options: Mapping[str, Any] | None
) -> OutputPlace:
    """Return the destination that `dst` names. With `single_file`, `dst` may name the file itself.

    Raises:
        UsageError: `dst` is `source`, or a directory that contains `source`, or a name of a checkpoint (RUN/1200).
    """
    here, there = _identity(dst), _identity(source)
    if f"{there}/".startswith(f"{here}/"):
        what = "is the source" if here == there else f"contains the source, {source}"
        raise UsageError(f"{dst} {what}: the result would replace it. Give another DST.")
    if named := checkpoint_named(dst, storage_options=storage_options):
        raise UsageError(
            f"{dst} is a name of the checkpoint {named}, so no command would find the result. Give another DST."
        )
    if single_file and dst.endswith(_FILE_ENDINGS) and not os.path.isdir(dst):
        folder, _, name = dst.rpartition("/")
        return OutputPlace(folder or ("/" if dst.startswith("/") else "."), name, True, overwrite, storage_options)
    return OutputPlace(dst, "pytorch_model.bin" if single_file else "", False, overwrite, storage_options)


# --- Several ranks write one result: they divide the files, publish once, and fail together.


_MEET_S = 120  # enough, because torchrun starts its ranks within seconds


def _join(store: Store, coordinator: Coordinator) -> None:
    """Check that this rank sees the staging directory, and write this rank's owner file next to that directory."""
    if coordinator.is_main or not is_directory(store):
        return
    head, name = os.path.split(store.url)
    kept = leftover_of(name)
    if LocalStore(head).info(name) is None:
        raise UsageError(
            f"rank {coordinator.rank}, on {os.uname().nodename}, does not see {store.url}, which rank 0 has just "
            "created. With several machines, DST must be on storage that all machines share."
        )
    if kept is not None:
        write_owner(LocalStore(head), owner_path(name, coordinator.rank), kept.nonce)


def _known_dead(place: OutputPlace, coordinator: Coordinator) -> list[str]:
    """Return the owner files of earlier writers whose processes have ended.

    Each rank looks for such processes on its own machine. Rank 0 returns what all ranks found, and the others return
    [].
    """

    def look() -> list[str]:
        folder, name = place.local_name()  # in here, because a rank that raises alone would leave the others waiting
        dead = dead_owner_files(LocalStore(folder), name) if name else {}
        if dead and not coordinator.is_main and os.environ.get("LOCAL_RANK", "0") == "0":
            # The data that dead writers wrote may so far be only in this machine's page cache.
            for staging in set(dead.values()):
                with contextlib.suppress(OSError):
                    sync_tree(LocalStore(f"{folder}/{staging}"))
        return list(dead)

    found = coordinator.all_ok(look, "looking for leftovers of an earlier run")
    return [path for paths in found or () for path in paths]


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Provide a process group inside the block: the existing group, or a new group of the ranks that torchrun started.

    Raises:
        RankFailedError: The ranks did not connect in time.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_MEET_S))
    except (RuntimeError, ValueError) as error:
        raise RankFailedError(
            f"the {os.environ.get('WORLD_SIZE')} ranks that torchrun started did not connect within {_MEET_S} s: "
            f"{error}. Every rank must run the same command; nothing was written."
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()
