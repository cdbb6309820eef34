"""`--overwrite` on an object store: the old export stays until the new one is complete; nothing else is replaced."""

import itertools
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from ckptkit import TrainState
from ckptkit.checkpoint.run import commit
from ckptkit.checkpoint.run.commit import clean_leftovers
from ckptkit.checkpoint.run.pins import _announced
from ckptkit.errors import CheckpointExistsError, CkptkitError
from ckptkit.storage.objects import RemoteStore
from tests.checkpoint.saving import check, fork, save
from tests.patches import before, die
from tests.remote.runs import MANY, ONE, Options, Place
from tests.storage.proxy import PASS, Answer, only

OVER = {**MANY, "overwrite": True}


def _killed_after_copies(say: Any, place: Place, copies: int) -> None:
    calls = itertools.count()
    before(pytest.MonkeyPatch(), RemoteStore, "copy_to", lambda *_: next(calls) == copies and die())
    place.make(**OVER)


@pytest.mark.parametrize("copies", [0, 1, 5])
def test_a_kill_during_the_replacement_keeps_the_new_export_and_the_command_continues(near, copies):
    near.make(max_shard_size="2kB")
    before = near.objects()
    assert fork(_killed_after_copies, near, copies)[0] == -signal.SIGKILL
    if not copies:  # nothing of the old was touched yet
        assert {name: data for name, data in near.objects().items() if not name.startswith(".")} == before
    (near / ".ckptkit-new").convert(near.beside("copy"))
    with pytest.raises(CheckpointExistsError):
        near.make(**MANY)
    near.make(**OVER)
    near.is_made()


DENIED = {
    "deletions": lambda method, path: method == "DELETE" or path.endswith("?delete"),
    "listings": lambda method, path: "list-type" in path,
}


@pytest.mark.parametrize("what", DENIED)
def test_a_denied_rotation_logs_one_line_and_saves_continue(proxy, far, what, caplog):
    state = TrainState(extra={"value": 1}, rng=False)
    with far.manager(retention=ONE) as manager:
        manager.save(1, state)
        proxy.rule = only(Answer(403, "AccessDenied"), DENIED[what])
        caplog.clear()
        manager.save(2, state)
        lines = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
        assert len(lines) == 1 and "AccessDenied" in lines[0] and "next save" in lines[0]
        assert not any(record.exc_info for record in caplog.records)
        proxy.rule = PASS
        assert [record.step for record in manager.list()] == [1, 2]
        assert not _announced(manager._root, "step_00000001")  # readers would wait for a deletion that never happens
        manager.save(3, state)
        assert [record.step for record in manager.list()] == [3]


# --- unfinished uploads


def test_prune_aborts_uploads_that_are_old_by_the_clock_of_the_store_and_no_foreign_one(near, monkeypatch):
    root = near.store
    save(root, 1)
    root.write("notes/readme.txt", b"mine")
    for name in ("step_00000009/0123456789abcdef/x", "datasets/tokens.bin"):
        root._api.upload(root._full(name))
    with monkeypatch.context() as patch:
        ahead = SimpleNamespace(time=lambda: time.time() + 1e10, monotonic=time.monotonic)
        patch.setattr("ckptkit.storage.objects.time", ahead)
        patch.setattr(commit, "UPLOAD_AGE_S", 1e10)  # moto's uploads are all of 2010
        assert clean_leftovers(root) == [] and len(root.unfinished_uploads()) == 2
    monkeypatch.setattr(commit, "UPLOAD_AGE_S", 0.0)
    assert len(clean_leftovers(root)) == 1
    (left,) = root.unfinished_uploads()
    assert left.name.endswith("/datasets/tokens.bin")
    assert root.read("notes/readme.txt") == b"mine" and check(root) == [1]


# --- two commands that write to one URL at once


def _making(say: Any, place: Place, start: float, options: Options) -> None:
    time.sleep(max(0.0, start - time.time()))
    try:
        place.make(**options)
        say(b"done")
    except CkptkitError as error:
        say(f"{type(error).__name__}: {error}".encode())


def at_once(place: Place, commands: list[Options], apart_s: float) -> list[str]:
    """Run two commands in two processes, the second a little later; return how each ended."""
    start = time.time() + 0.3
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(fork, _making, place, start + nth * apart_s, options, timeout=120)
            for nth, options in enumerate(commands)
        ]
        assert [end.result()[0] for end in ends] == [0, 0]
        return [end.result()[1].decode() for end in ends]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "both", [({}, MANY), (MANY, {"world_size": 2}), ({"to": "torch"}, {"to": "torch", "dtype": "bf16"})], ids=str
)
def test_one_of_two_concurrent_commands_wins_and_nothing_is_mixed(near, both, overwrite):
    alone = []
    for nth, options in enumerate(both):
        (near / f"alone-{nth}").make(**options)
        alone.append((near / f"alone-{nth}").comparable())
    for nth, apart_s in enumerate((0.0, 0.1)):
        here = near / f"both-{nth}"
        if overwrite:
            here.make(**both[0])
        ends = at_once(here, [{**options, "overwrite": overwrite} for options in both], apart_s)
        won = [result for result, end in zip(alone, ends, strict=True) if end == "done"]
        assert won and (overwrite or len(won) == 1), ends
        found = here.comparable()
        assert found in won, (ends, sorted(found))
