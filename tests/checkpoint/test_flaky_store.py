"""A store whose Nth call fails, before or after it took effect: every listed checkpoint is complete."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.delete import rotate
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.errors import StorageError
from ckptkit.storage.open import open_store
from ckptkit.storage.store import Store
from tests.checkpoint.saving import check, save
from tests.checkpoint.states import refusal

_CALLS = ("info", "list", "read", "write", "claim", "delete", "delete_tree")
_numbers = itertools.count()


class Flaky:
    """A Store whose nth call fails as `fails(n)` says: "before" or "after" it took effect."""

    def __init__(self, inner: Store, fails: Callable[[int], str], count: Iterator[int] | None = None) -> None:
        self.inner, self.fails, self.count = inner, fails, count or itertools.count(1)
        self.url = inner.url
        self.asking_costs, self.sizes_are_free = inner.asking_costs, inner.sizes_are_free

    def child(self, path: str) -> Flaky:
        return Flaky(self.inner.child(path), self.fails, self.count)

    def existing(self) -> Flaky:
        return self

    def with_free_names(self) -> Flaky:
        return self

    def with_each_put(self, around: Callable[[Callable[[], str]], str]) -> Flaky:
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name not in _CALLS:
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            when = self.fails(next(self.count))
            if when == "before":
                raise StorageError(5, f"503 Slow Down ({name})")
            result = method(*args, **kwargs)
            if when == "after":
                raise StorageError(5, f"the connection broke ({name})")
            return result

        return call


def fresh() -> Store:
    return open_store(f"memory://flaky-{next(_numbers)}")


def each_call(when: str, *steps: int) -> Iterator[tuple[Store, Any]]:
    """Yield a store with these steps, and the same store failing at call 1, at call 2, ..., until that is not made."""
    for nth in itertools.count(1):
        store = fresh()
        for step in steps:
            save(store, step)
        flaky = Flaky(store, lambda n, nth=nth: when if n == nth else "")
        yield store, flaky
        if next(flaky.count) <= nth:
            assert nth > 10
            return


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_failing_call_leaves_a_complete_checkpoint_or_none(when: str) -> None:
    seen = set()
    for store, flaky in each_call(when, 1):
        error = refusal(lambda flaky=flaky: save(flaky, 2))
        assert check(store) == ([1] if error else [1, 2]), error
        save(store, 3)
        assert check(store)[-1] == 3 and list_checkpoints(store).abandoned == (), error
        seen.add(bool(error))
    assert seen == {True, False}


@pytest.mark.parametrize("every", [3, 7])
def test_a_store_that_always_fails_never_shows_an_incomplete_checkpoint(every: int) -> None:
    store = fresh()
    flaky = Flaky(store, lambda n: ("before", "after")[n % 2] if n % every == 0 else "")
    saved = [step for step in range(1, 25) if not refusal(lambda step=step: save(flaky, step))]
    listed = check(store)
    assert set(saved) <= set(listed)
    save(store, 99)
    assert check(store)[-1] == 99 and list_checkpoints(store).abandoned == ()


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_failing_call_of_a_rotation_leaves_no_half_deleted_checkpoint(when: str) -> None:
    for store, flaky in each_call(when, 1, 2, 3):
        with contextlib.suppress(OSError):  # listing may fail too
            rotate(flaky, RetentionPolicy(max_num=1))
        assert check(store)[-1] == 3
        rotate(store, RetentionPolicy(max_num=1), clean=True)
        assert check(store) == [3]
        names = {item.path.split("/")[0] for item in store.list(recursive=True)}
        assert names == {".ckptkit", "latest", "step_00000003"}
