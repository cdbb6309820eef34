"""Full disks, failing operations, kills, and ranks that raise, die or hang: nothing incomplete is published or lost."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptkit import RetentionPolicy
from ckptkit.checkpoint.run.delete import rotate
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.errors import CkptkitError, StorageError
from ckptkit.storage import Store, open_store
from tests.checkpoint.crash import fail_at
from tests.checkpoint.saving import check, fork, leftovers, save
from tests.checkpoint.states import refusal


def _with_error(say: Any, root: str, nth: int, code: int) -> None:
    fail_at(nth, code)
    text = refusal(lambda: save(root, 2, fields={"metrics": {"x": 1.0}}))
    say(b"failed" if text else b"saved")
    with contextlib.suppress(CkptkitError):  # the failing operation may belong to the rotation
        rotate(open_store(root), RetentionPolicy(max_num=1))
    if text:
        assert os.strerror(code) in text or "mount lost" in text, text


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.usefixtures("no_grace")
def test_an_error_of_any_operation_fails_the_save_or_has_no_effect(tmp_path, code):
    outcomes = set()
    for nth in range(1 + code % 3, 200, 3):
        root = tmp_path / str(nth)
        save(root, 1)
        exit_code, said = fork(_with_error, str(root), nth, code)
        assert exit_code == 0, f"operation {nth}"
        steps = check(root)
        # An error of closing the last descriptor comes after the commit: the save succeeds, and the log reports the
        # error.
        assert steps in ([2], [1, 2]) if said == b"saved" else steps in ([1], [1, 2]), (
            f"operation {nth}: {said!r} {steps}"
        )
        save(root, 9)
        assert check(root)[-1] == 9 and leftovers(root) == [], f"operation {nth}"
        outcomes.add(said)
    assert outcomes == {b"failed", b"saved"}


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
def test_one_failing_call_leaves_a_complete_checkpoint_or_none(when):
    seen = set()
    for store, flaky in each_call(when, 1):
        error = refusal(lambda flaky=flaky: save(flaky, 2))
        assert check(store) == ([1] if error else [1, 2]), error
        save(store, 3)
        assert check(store)[-1] == 3 and list_checkpoints(store).abandoned == (), error
        seen.add(bool(error))
    assert seen == {True, False}


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_failing_call_of_a_rotation_leaves_no_half_deleted_checkpoint(when):
    for store, flaky in each_call(when, 1, 2, 3):
        with contextlib.suppress(OSError):  # listing may fail too
            rotate(flaky, RetentionPolicy(max_num=1))
        assert check(store)[-1] == 3
        rotate(store, RetentionPolicy(max_num=1), clean=True)
        assert check(store) == [3]
        names = {item.path.split("/")[0] for item in store.list(recursive=True)}
        assert names == {".ckptkit", "latest", "step_00000003"}


def _endless(say: Callable[[bytes], Any], root: str) -> None:
    step = max(check(root), default=0)
    while True:
        step += 1
        save(root, step, nbytes=200_000)
        say(b"%d\n" % step)
        rotate(open_store(root), RetentionPolicy(max_num=1))


def test_a_kill_at_any_instant_loses_nothing(tmp_path):
    """Each run resumes from what is left of the last one."""
    chance, returned, started = random.Random(5), 0, time.perf_counter()
    save(tmp_path.with_name("measured"), 1, nbytes=200_000)
    longest = max(0.12, 6 * (time.perf_counter() - started))  # long enough for a commit on a busy machine
    for _ in range(20):
        code, said = fork(_endless, str(tmp_path), timeout=chance.uniform(0.0, longest))
        assert code == -signal.SIGKILL
        returned = max([returned, *(int(line) for line in said.split())])
        steps = check(tmp_path)
        assert not returned or steps[-1] >= returned, (returned, steps)
    assert returned > 0
