"""Several processes, started by torchrun, that write one result: files shared out, published once, failing together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

from ckptkit.checkpoint.coordinator import Coordinator, Outcome
from ckptkit.errors import RankFailedError, UsageError
from ckptkit.offline.plan import Plan
from ckptkit.offline.publish import OutputPlace, Session
from ckptkit.offline.resume import clear_strays
from ckptkit.offline.shares import share_out
from ckptkit.storage.journal import Journal, dead_statements
from ckptkit.storage.ledger import Finished, Ledger
from ckptkit.storage.local import LocalStore
from ckptkit.storage.staging import is_interruption, leftover_of, owner_path, sync_files, sync_tree, write_owner
from ckptkit.storage.store import Store, open_store

__all__ = ["process_group", "staged_together"]

T = TypeVar("T")
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
            if not self._coordinator.is_main and self.store.local_root is None and not is_interruption(error):
                # Rank 0 clears away what it staged; on an object store it does not know of these.
                with contextlib.suppress(OSError):
                    self.store.delete(self.own_paths)
            raise
        return [outcome.value] if results is None else results

    def _durable(self, fn: Callable[[], T]) -> T:
        """Run `fn`, and make what it wrote durable: rank 0, on another machine, can't."""
        value = fn()
        if isinstance(self.store, LocalStore):
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
    if not isinstance(store, LocalStore) or leftover_of(os.path.basename(store.url)) is None:
        return None
    return Journal.beside(store, world_size=coordinator.world_size, rank=coordinator.rank)


def _join(store: Store, coordinator: Coordinator) -> None:
    """Look whether this rank sees the staging directory, and state beside it that it writes there."""
    if coordinator.is_main or not isinstance(store, LocalStore):
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
    """Return, on rank 0, the statements of earlier writers that some rank's machine knows to be dead."""
    found = coordinator.all_ok(lambda: _dead_here(place, coordinator), "looking for what an earlier run left")
    return [path for paths in found or () for path in paths]


def _dead_here(place: OutputPlace, coordinator: Coordinator) -> list[str]:
    folder, name = place.local_name()
    if not name:
        return []
    dead = dead_statements(LocalStore(folder), name)
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
        gone = _known_dead(place, coordinator)

        def open_staging() -> tuple[str, dict[str, Finished] | None]:
            staged.append(stack.enter_context(place.open(plan, resume=True, gone=gone)))
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
