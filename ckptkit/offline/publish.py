"""Where a result goes: a directory or a single file, staged and published whole, by one process or by many ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from ckptkit.errors import CheckpointExistsError, UsageError
from ckptkit.formats.layout import MANIFEST_NAME, RECORD_NAME
from ckptkit.offline.checksums import SUMS_NAME
from ckptkit.offline.plan import Plan
from ckptkit.offline.resume import clear_strays
from ckptkit.storage.journal import Journal, adopt, give_up, resumable
from ckptkit.storage.ledger import Ledger
from ckptkit.storage.local import LocalStore
from ckptkit.storage.staging import (
    clean_siblings,
    close_staging,
    is_interruption,
    leftover_of,
    new_nonce,
    open_staging,
    stage,
    staging_name,
)
from ckptkit.storage.store import Store, open_store, split_url

__all__ = ["OutputPlace", "Session", "is_one_of_many", "open_target", "options_of_both"]

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
        staged = isinstance(store, LocalStore) and leftover_of(os.path.basename(store.url)) is not None
        self.journal = Journal.beside(store) if staged and isinstance(store, LocalStore) else None
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

    @contextlib.contextmanager
    def stage(self, plan: Plan) -> Iterator[Session]:
        """Yield where to write the plan; it is published when the block ends well, and gone when it doesn't."""
        if is_one_of_many():
            from ckptkit.offline.team import staged_together

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
        self, plan: Plan, *, resume: bool = False, gone: Collection[str] = ()
    ) -> contextlib.AbstractContextManager[Store]:
        """Return the staging store of this place, as a context that publishes; for one process.

        Args:
            resume: It may hold what an interrupted process left, and is left so in turn.
            gone: Statements of earlier writers on other machines that are known to be dead.
        """
        if self.is_file:
            return self._stage_file(resume=resume, gone=gone)
        # A shard is never held back: stores keep what comes last in memory.
        small = [name for name in plan.last if not name.endswith(".safetensors")]
        options = self.storage_options
        names = {**dict.fromkeys((*plan.last, *_BESIDE), -1), **{file.path: file.nbytes for file in plan.files}}
        return stage(
            self.url, overwrite=self.overwrite, last=small, storage_options=options, resume=resume, gone=gone,
            names=names,
        )  # fmt: skip

    @contextlib.contextmanager
    def _stage_file(self, *, resume: bool, gone: Collection[str]) -> Iterator[Store]:
        store = open_store(self.url, storage_options=self.storage_options)
        found = store.info(self.file_name)
        if found is not None and not self.overwrite:
            raise CheckpointExistsError(
                f"{self.url}/{self.file_name} exists already; nothing was written. Choose another place, or use "
                "overwrite=True (--overwrite)."
            )
        if not isinstance(store, LocalStore):
            from ckptkit.storage.staging_remote import stage_object

            with stage_object(store, self.file_name, overwrite=self.overwrite):
                if found is not None:
                    store.delete([self.file_name])
                yield store  # its writer makes the file appear whole or not at all
            return
        nonce = new_nonce()
        staging = staging_name(self.file_name, nonce)
        left = resumable(store, self.file_name, gone=gone) if resume else None
        if store.info("") is not None:
            clean_siblings(store, self.file_name, but=left)
        kept = False
        try:
            taken = adopt(store, left, self.file_name, nonce) if left is not None else None
            inner = taken or open_staging(store, self.file_name, nonce)
            yield inner
            _sync_file(inner.path_of(self.file_name))
            Journal.beside(inner).end()
            if self.overwrite:
                os.replace(inner.path_of(self.file_name), store.path_of(self.file_name))
            else:
                store.rename(f"{staging}/{self.file_name}", self.file_name)
            store.sync_directory("")
        except BaseException as error:
            kept = resume and is_interruption(error) and give_up(store, self.file_name, nonce)
            raise
        finally:
            if not kept:
                close_staging(store, self.file_name, nonce)


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
