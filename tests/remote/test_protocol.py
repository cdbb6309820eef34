"""The commit protocol on S3: one of two writers wins, and a kill at any moment publishes nothing incomplete."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from ckptkit.checkpoint.run import commit
from ckptkit.checkpoint.run.attempt import RemotePlace
from ckptkit.checkpoint.run.commit import clean_leftovers
from ckptkit.errors import CheckpointExistsError, CkptkitError
from ckptkit.formats.own.record import CommitRecord, find_record, record_path
from tests.checkpoint.saving import check, fork, save
from tests.remote.runs import MANY, Options, Place, on


@on("s3", "gcs")
def test_in_fifty_races_exactly_one_of_two_writers_commits(near):
    roots, rng = [near.store, near.store], random.Random(0)

    def publish(place: RemotePlace, step: int, delay: float) -> str | None:
        time.sleep(delay)
        save_id = place.save_id
        record = CommitRecord(step=step, save_id=save_id, data=save_id, state_dict_type="sharded", files={})
        try:
            place.publish(record.to_json(), overwrite=False)
        except CheckpointExistsError:
            return None
        return save_id

    with ThreadPoolExecutor(2) as pool:
        for step in range(50):
            name = f"step_{step:08d}"
            places = [RemotePlace(root, name, letter * 16) for root, letter in zip(roots, "ab", strict=True)]
            saved = set(pool.map(publish, places, [step] * 2, [rng.random() / 500 for _ in places]))
            record = find_record(roots[0], record_path(name))
            assert record is not None and saved == {None, record.save_id}


@pytest.fixture
def root(near: Place) -> Any:
    """The store of a run with one checkpoint."""
    save(near.store, 1)
    return near.store


def test_prune_aborts_old_uploads_and_touches_no_foreign_object(root, monkeypatch):
    root.write("notes/readme.txt", b"mine")
    for name in ("step_00000009/0123456789abcdef/x", "datasets/tokens.bin"):
        root._api.upload(root._full(name))
    monkeypatch.setattr(commit, "UPLOAD_AGE_S", 1e11)
    clean_leftovers(root)
    assert len(root.unfinished_uploads()) == 2
    monkeypatch.setattr(commit, "UPLOAD_AGE_S", 0.0)
    assert len(clean_leftovers(root)) == 1
    (left,) = root.unfinished_uploads()
    assert left.name.endswith("/datasets/tokens.bin")
    assert root.read("notes/readme.txt") == b"mine" and check(root) == [1]


def test_the_age_of_an_upload_is_measured_by_the_clock_of_the_store(root, monkeypatch):
    root._api.upload(root._full("step_00000009/0123456789abcdef/x"))
    ahead = SimpleNamespace(time=lambda: time.time() + 1e10, monotonic=time.monotonic)
    monkeypatch.setattr("ckptkit.storage.objects.time", ahead)
    monkeypatch.setattr(commit, "UPLOAD_AGE_S", 1e10)  # moto's uploads are all of 2010
    assert clean_leftovers(root) == []
    assert len(root.unfinished_uploads()) == 1


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
