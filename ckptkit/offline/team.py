"""Several processes, started by torchrun, that write one result: files shared out, published once, failing together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TypeVar

from ckptkit.checkpoint.coordinator import Coordinator, Outcome
from ckptkit.errors import RankFailedError
from ckptkit.offline.plan import Plan
from ckptkit.offline.publish import OutputPlace, Session
from ckptkit.storage.journal import Journal
from ckptkit.storage.store import Store, open_store

__all__ = ["process_group", "share_out", "staged_together"]

T = TypeVar("T")
_MEET_S = 120  # ranks that torchrun starts together are there within seconds


def share_out(plan: Plan, world_size: int) -> list[int]:
    """Return the rank that writes each file: the largest files first, each to who has least.

    What is published last goes to rank 0, which publishes.
    """
    late = set(plan.last)
    owners = [0] * len(plan.files)
    loads = [0] * world_size
    for index in sorted(range(len(plan.files)), key=lambda i: -plan.files[i].nbytes):
        if plan.files[index].path in late and not plan.files[index].path.endswith(".safetensors"):
            continue
        rank = loads.index(min(loads))
        owners[index] = rank
        loads[rank] += plan.files[index].nbytes
    return owners


class _Together:
    """The session of one rank among several."""

    def __init__(self, store: Store, coordinator: Coordinator, plan: Plan) -> None:
        self.store = store
        self.journal: Journal | None = None  # ranks share a staging directory, and no journal
        self._coordinator = coordinator
        owners = share_out(plan, coordinator.world_size)
        self.only: Callable[[int], bool] | None = lambda index: owners[index] == coordinator.rank
        self.own_paths = [plan.files[i].path for i, rank in enumerate(owners) if rank == coordinator.rank]

    def everyone(self, fn: Callable[[], T]) -> list[T]:
        outcome = Outcome.of(fn)
        try:
            results: list[T] | None = self._coordinator.settle(outcome, "writing the files")
        except BaseException:
            if not self._coordinator.is_main and self.store.local_root is None:
                # Rank 0 clears away what it staged; on an object store it does not know of these.
                with contextlib.suppress(OSError):
                    self.store.delete(self.own_paths)
            raise
        return [outcome.value] if results is None else results

    def one(self, fn: Callable[[], T]) -> T:
        return self._coordinator.decide(fn, "checking the result")


@contextlib.contextmanager
def staged_together(place: OutputPlace, plan: Plan) -> Iterator[Session]:
    """Yield the session of this rank. Every rank must come here, and leave together.

    Makes a gloo group from torchrun's environment where the process has none.

    Raises:
        RankFailedError: Some rank failed; nothing was published.
    """
    with process_group(), contextlib.closing(Coordinator()) as coordinator, contextlib.ExitStack() as stack:
        staged: list[Store] = []

        def open_staging() -> str:
            staged.append(stack.enter_context(place.open(plan)))
            return staged[0].url

        url = coordinator.decide(open_staging, "making room for the result")
        store = staged[0] if staged else open_store(url, storage_options=place.storage_options)
        yield _Together(store, coordinator, plan)
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
