"""The protocol on an object store: private keys, one record written last, no renames."""

import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

from ckptkit import CheckpointManager, RetentionPolicy, verify
from ckptkit.checkpoint.run.attempt import RemotePlace
from ckptkit.checkpoint.run.commit import begin_save, clean_leftovers
from ckptkit.checkpoint.run.delete import rotate
from ckptkit.checkpoint.run.inventory import list_checkpoints, resolve
from ckptkit.errors import CheckpointExistsError, LeaseHeldError, RankFailedError, SaveError
from ckptkit.formats.own.record import CommitRecord
from ckptkit.storage import Store, open_store
from ckptkit.storage import lock as leases
from ckptkit.storage.lock import Lease, acquire_lease
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.publish import stage
from ckptkit.storage.s3 import S3Api
from tests.checkpoint import states
from tests.checkpoint.crash import kill_at_request
from tests.checkpoint.saving import check, fork, save, steps
from tests.checkpoint.states import linear, value_of
from tests.patches import failing

Options = dict[str, Any]


@pytest.fixture
def root(s3: Options, request: pytest.FixtureRequest) -> Store:
    return open_store(f"s3://bucket/{request.node.name.replace('[', '-').replace(']', '')}", storage_options=s3)


@pytest.fixture
def lease(root: Store) -> Iterator[Lease]:
    held = acquire_lease(root)
    yield held
    held.release()


def keys(root: Store) -> list[str]:
    return [item.path for item in root.list(recursive=True) if not item.path.startswith(".ckptkit/")]


def record_of(save_id: str, step: int) -> bytes:
    return CommitRecord(step=step, save_id=save_id, data=save_id, state_dict_type="sharded", files={}).to_json()


fail = failing(OSError(5, "Input/output error"))


def test_a_save_is_a_record_and_files_under_its_own_id(root):
    record = save(root, 7)
    assert record.data == record.save_id
    base = f"step_00000007/{record.save_id}"
    assert keys(root) == sorted(
        ["latest", f"{base}/objects.json", f"{base}/shards/__0_0.distcp", "step_00000007/checkpoint.json"]
    )
    assert check(root) == [7]


def test_saving_again_is_refused_and_overwrite_is_one_put(root):
    first = save(root, 7)
    with pytest.raises(CheckpointExistsError):
        save(root, 7)
    second = save(root, 7, overwrite=True, nbytes=10)
    assert check(root) == [7] and not any(first.save_id in key for key in keys(root))
    assert resolve(root, "7").record.save_id == second.save_id


def test_a_failed_save_that_leaves_files_says_why_it_failed(root, caplog):
    def spoil(store: Store) -> None:
        root.write("step_00000007/checkpoint.json", b"{")  # it does not say whose files are below it
        fail(store)

    with pytest.raises(RankFailedError, match="Input/output error"):
        save(root, 7, before=spoil)
    assert "could not be cleaned up" in caplog.text and "checkpoint.json" in caplog.text
    save(root, 8)  # lease and turn were released
    assert check(root) == [8]


def _killed(say: Any, url: str, options: Options) -> None:
    def die(store: Store) -> None:
        store.settle()  # what is on its way arrives
        say(b"dying")
        os.kill(os.getpid(), 9)

    save(open_store(url, storage_options=options), 8, before=die)


def test_uploads_of_a_dead_save_are_listed_as_abandoned_and_removed_by_the_next(root, s3):
    save(root, 7)
    assert fork(_killed, root.url, s3) == (-9, b"dying")
    found = list_checkpoints(root)
    assert steps(root) == [7]
    assert [item.name for item in found.abandoned] == ["step_00000008"] and found.foreign == found.skipped == ()
    save(root, 9)
    assert check(root) == [7, 9] and not any("step_00000008" in key for key in keys(root))


def test_one_of_two_writers_of_a_step_wins_and_the_other_leaves_nothing(root):
    places = [RemotePlace(root, "step_00000007", nonce * 16) for nonce in "ab"]
    for place in places:
        place.store.write("__0_0.distcp", b"1")
    wins: list[str] = []

    def publish(place: RemotePlace) -> None:
        with suppress(CheckpointExistsError):
            place.publish(record_of(place.save_id, 7), overwrite=False)
            wins.append(place.save_id)
        place.close()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(publish, places))
    assert len(wins) == 1 and resolve(root).record.save_id == wins[0]
    assert keys(root) == [f"step_00000007/{wins[0]}/__0_0.distcp", "step_00000007/checkpoint.json"]


def test_rotation_removes_the_record_before_everything_else(root, monkeypatch):
    deleted: list[str] = []
    delete = type(root).delete

    def noted(self: Store, paths: Iterable[str]) -> None:
        deleted.extend(paths := list(paths))
        delete(self, paths)

    for step in (1, 2, 3):
        save(root, step)
    monkeypatch.setattr(type(root), "delete", noted)
    rotate(root, RetentionPolicy(max_num=1))
    for step in (1, 2):
        of_step = [path for path in deleted if path.startswith(f"step_{step:08d}/")]
        assert of_step[0] == f"step_{step:08d}/checkpoint.json" and len(of_step) > 2
    assert check(root) == [3] and {key.split("/")[0] for key in keys(root)} == {"latest", "step_00000003"}


def test_a_step_that_lost_its_record_is_not_removed(root, s3, caplog):
    for step in (1, 2):
        save(root, step)
    root.delete(["step_00000001/checkpoint.json"])
    before = keys(root)
    assert fork(_killed, root.url, s3) == (-9, b"dying")  # its lease is not released
    clean_leftovers(root)
    lease = acquire_lease(root)
    for step in (3, 4):
        save(root, step, lease=lease)
    assert set(before) <= set(keys(root)) and not any("step_00000008" in key for key in keys(root))
    lost = list_checkpoints(root)
    assert [item.path for item in lost.skipped] == ["step_00000001"] and lost.abandoned == lost.in_progress == ()
    lease.release()
    clean_leftovers(root)
    assert set(before) <= set(keys(root))
    said = [r.message for r in caplog.records if "step_00000001 is kept, but" in r.message]
    assert len(said) == 1 and "checkpoint.json" in said[0]


def test_a_cleanup_keeps_files_that_no_save_writes(root, s3, caplog):
    fork(_killed, root.url, s3)
    (dead,) = list_checkpoints(root).abandoned
    theirs = [f"{dead.path}/notes.txt", "step_00000008/0123456789abcdef/__0_0.distcp"]
    for path in theirs:
        root.write(path, b"mine")
    save(root, 9)
    assert [key for key in keys(root) if "step_00000008" in key] == sorted(theirs)
    assert f"{dead.path} was left by a dead save" in caplog.text and "notes.txt" in caplog.text
    assert list_checkpoints(root).abandoned == ()
    save(root, 8)
    assert steps(root) == [9, 8]
    rotate(root, RetentionPolicy(max_num=1))
    clean_leftovers(root)
    assert set(theirs) <= set(keys(root))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (fail, "Input/output error"),
        (lambda store: store.write("shards/__0_0.distcp", b"short", overwrite=True), "has 5 bytes"),
        (lambda store: store.delete(["shards/__0_0.distcp"]), r"__0_0\.distcp is missing"),
        (lambda store: store.write("__5_0.distcp", b"1"), "no rank wrote it"),
    ],
    ids=["failed", "truncated", "missing", "unreported"],
)
def test_a_save_that_fails_or_whose_objects_differ_leaves_no_object(root, spoil, said):
    with pytest.raises(SaveError, match=said):
        save(root, 3, before=spoil)
    assert keys(root) == []


@pytest.mark.parametrize("arrives", [True, False])
def test_objects_of_unconfirmed_puts_are_listed(root, arrives, monkeypatch):
    put = S3Api.put

    def mute(api: Any, name: str, data: Any, **options: Any) -> str:
        if not name.endswith("__0_0.distcp"):
            return put(api, name, data, **options)
        if arrives:
            put(api, name, data, **options)
        return ""  # a response without the tag of the object

    monkeypatch.setattr(S3Api, "put", mute)
    with nullcontext() if arrives else pytest.raises(SaveError, match=r"__0_0\.distcp is missing"):
        save(root, 3)
    assert check(root) == [3] if arrives else keys(root) == []


def take_over(root: Store, number: int) -> None:
    """Write the lease of another process."""
    state = leases._State(number, "f" * 16, leases.this_process())
    root.write(state.path, state.to_json(root), overwrite=True)


def test_a_long_save_checks_its_lease_before_the_commit(root, monkeypatch):
    def expire(store: Store) -> None:
        later = leases._now() + leases.TTL_S
        monkeypatch.setattr(leases, "_now", lambda: later)
        take_over(root, 2)

    with pytest.raises(LeaseHeldError, match="may no longer write"):
        save(root, 3, before=expire)
    assert keys(root) == []


def test_two_writers_without_conditional_puts_only_one_commits(root, monkeypatch):
    monkeypatch.setattr(RemoteStore, "has_conditional_writes", False)
    with pytest.raises(LeaseHeldError, match="is now being written by"):
        save(root, 3, before=lambda store: take_over(root, 1))
    assert keys(root) == []


def test_a_step_saved_under_the_same_lease_is_refused_before_anything_is_sent(root, lease):
    save(root, 1, lease=lease)
    before = keys(root)
    with pytest.raises(CheckpointExistsError, match="exists already"):
        begin_save(root, 1, lease=lease)
    save(root, 2, lease=lease)
    assert check(root) == [1, 2] and set(before) < set(keys(root))


def test_the_next_save_cleans_up_a_failed_one(root, lease, monkeypatch):
    def fail_for_good(store: Any) -> None:
        store.settle()
        monkeypatch.setattr(RemoteStore, "delete", failing(PermissionError(13, "denied")))
        fail(store)

    save(root, 1, lease=lease)
    with pytest.raises(RankFailedError):
        save(root, 2, lease=lease, before=fail_for_good)
    assert any("step_00000002" in key for key in keys(root))
    monkeypatch.undo()
    save(root, 3, lease=lease)
    assert check(root) == [1, 3] and not any("step_00000002" in key for key in keys(root))


def test_an_attempt_is_abandoned_once_its_lease_is_released(root, lease):
    path = f"step_00000003/{lease.new_attempt()}"
    root.write(f"{path}/__0_0.distcp", b"1")
    assert [item.name for item in list_checkpoints(root).in_progress] == ["step_00000003"]
    assert clean_leftovers(root) == []
    lease.release()
    assert [item.name for item in list_checkpoints(root).abandoned] == ["step_00000003"]
    assert clean_leftovers(root) == [path] and keys(root) == []


@pytest.mark.parametrize("which", ["first", "next"])
def test_without_conditional_puts_an_old_listing_is_checked_again_before_the_commit(root, lease, monkeypatch, which):
    monkeypatch.setitem(root._connection.conditional, root._bucket, False)
    if which == "next":
        save(root, 1, lease=lease)
    other = record_of("f" * 16, 3)
    # The listing of the run, which happens concurrently, may be late enough to contain it.
    with pytest.raises(CheckpointExistsError, match=r"by another writer first|exists already"):
        save(root, 3, lease=lease, before=lambda store: root.write("step_00000003/checkpoint.json", other))
    assert root.read("step_00000003/checkpoint.json") == other


# --- stage


def test_names_that_readers_look_for_are_published_last(root, s3):
    with stage(root.url, last=["index.json"], storage_options=s3) as store:
        store.write("index.json", b"{}")
        store.child("sub").write("a", b"1")
        with store.writer("b") as file:
            file.write(b"2")
        assert store.read("index.json") == b"{}"
        assert keys(root) == [".ckptkit-owner.json", "b", "sub/a"]
    assert keys(root) == ["b", "index.json", "sub/a"]


def test_a_failed_stage_leaves_no_object_and_an_existing_one_is_refused(root, s3):
    with pytest.raises(ValueError), stage(root.url, storage_options=s3) as store:
        store.write("a", b"1")
        raise ValueError
    assert keys(root) == []
    with stage(root.url, storage_options=s3) as store:
        store.write("a", b"1")
    with pytest.raises(CheckpointExistsError), stage(root.url, storage_options=s3):
        pass
    with stage(root.url, replaceable=lambda *_: None, overwrite=True, storage_options=s3) as store:
        store.write("b", b"2")
        assert root.read("a") == b"1"
    assert keys(root) == ["b"]


def test_an_object_added_in_an_overwrite_is_kept(root, s3, caplog):
    def late(store: Store, path: str, known: Any) -> None:
        asked.append(path)
        if len(asked) == 2:
            root.write("notes.txt", b"mine")

    asked: list[str] = []
    root.write("a", b"1")
    with stage(root.url, replaceable=late, overwrite=True, storage_options=s3) as store:
        store.write("b", b"2")
    assert keys(root) == ["b", "notes.txt"] and "were added while it was replaced: notes.txt" in caplog.text


def test_a_single_object_that_changed_during_the_write_is_not_replaced(root, s3):
    def rule(store: Store, path: str, known: Any) -> None:
        if store.read(path) == b"mine":
            raise CheckpointExistsError("theirs")

    root.write("x.bin", b"1")
    place: dict[str, Any] = {"file": "x.bin", "replaceable": rule, "overwrite": True, "storage_options": s3}
    with pytest.raises(CheckpointExistsError, match="theirs"), stage(root.url, **place) as store:
        store.write("x.bin", b"2")
        root.write("x.bin", b"mine", overwrite=True)
    assert keys(root) == ["x.bin"] and root.read("x.bin") == b"mine"


# --- kills

MOST = 80  # requests of `job`
THEIRS = {
    "notes/run.txt": b"mine",
    "step_00000001/eval/results.json": b"mine",
    "step_00000002/0123456789abcdef/__0_0.distcp": b"copied here",  # no save of this run has recorded this id
    "step_00000003/notes.txt": b"mine",
    "step_00000009/fedcba9876543210/.metadata": b"a half copy",
}


def job(say: Any, url: str, options: Options, nth: int) -> None:
    """Save two steps, which rotates, and the second one again; report after each what was saved."""
    torch.set_num_threads(1)
    kill_at_request(nth)
    with CheckpointManager(url, retention=RetentionPolicy(max_num=2), storage_options=options) as manager:
        for step, value in ((2, 2), (3, 3), (3, 30)):
            manager.save(step, linear(value), overwrite=value == 30)
            say(b"%d %d\n" % (step, value))


def strays(root: Store, theirs: Iterable[str]) -> set[str]:
    """Return the objects and uploads that belong to no checkpoint and are not `theirs`."""
    known = {"latest", *theirs}
    for item in list_checkpoints(root).committed:
        known |= {f"{item.name}/checkpoint.json", *(f"{item.name}/{item.record.data}/{p}" for p in item.record.files)}
    there = {item.path for item in root.list(recursive=True)} - known
    return {
        path
        for path in there
        if ".ckptkit-deleted-" not in path and not path.startswith((".ckptkit/lease-", ".ckptkit/deleting/"))
    } | {found.path for found in root.unfinished_uploads()}


@pytest.mark.parametrize("nth", range(1, MOST + 1))
@pytest.mark.usefixtures("no_grace")
def test_a_kill_at_any_request_loses_nothing_and_leaves_nothing(root, s3, nth):
    url = root.url
    states.save(url, linear(1), storage_options=s3)
    theirs = {**THEIRS, f"step_00000001/{resolve(root).record.data}/eval/x.json": b"mine"}
    for path, data in theirs.items():
        root.write(path, data)
    code, said = fork(job, url, s3, nth)
    assert code in (0, -signal.SIGKILL) and (code == 0 or nth < MOST), (code, said)
    returned = [tuple(map(int, line.split())) for line in said.splitlines()]
    found = list_checkpoints(root).committed
    assert found and found[-1].step >= max((step for step, _ in returned), default=1)
    with CheckpointManager(url, storage_options=s3) as manager:
        report = manager.load(loaded := linear())
        assert report is not None and report.step == found[-1].step
        value = value_of(loaded)
        assert value in ({1: (1,), 2: (2,), 3: (3, 30)}[report.step])
        assert not returned or value >= returned[-1][1]
        manager.save(4, linear(4))
        assert manager.latest() == 4
    assert strays(root, theirs) == set()
    assert {path: root.read(path) for path in theirs} == theirs
    for item in list_checkpoints(root).committed:
        assert not verify(f"{url}/{item.name}", storage_options=s3).problems
