"""Each request of each operation fails once; servers restart, lack features of S3, and send wrong bytes."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ckptkit.checkpoint.run.delete import delete_checkpoint
from ckptkit.errors import CkptkitError, CorruptCheckpointError, StorageError
from ckptkit.storage import retry
from tests.checkpoint.states import unchanged
from tests.remote.runs import TWO, Place, full, on, state_of
from tests.storage.proxy import PASS, Answer, Changed, Reply, always, first_of_each, only

THROTTLED = [Answer(status, text=b'{"error": {"code": %d}}' % status) for status in (408, 429, 500, 503)]


@on("s3", "gcs")
def test_each_request_of_each_operation_may_fail_once(proxy, near, far, at_once):
    run = far / "run"
    operations: dict[str, Callable[[], object]] = {
        "save": lambda: run.save(1, 2),
        "load": lambda: run.loads(2),
        "ls": lambda: run.cli("ls", run.url),
        "convert": lambda: run.convert(far / "dcp", to="dcp", world_size=2),
        "reshard": lambda: run.reshard(far / "three", world_size=3, verify=True),
        "verify": lambda: (run / "latest").verify(),
        "rotate": lambda: run.save(3, retention=TWO),
        "prune": lambda: run.prune(),
    }
    for name, operation in operations.items():
        proxy.clear()
        proxy.rule = first_of_each(*(THROTTLED if near.url.startswith("gs:") else ("503", "reset", "lost", "cut")))
        operation()
        assert proxy.count >= 2, name
    proxy.rule = PASS
    run = near / "run"
    run.loads(3)
    assert run.steps() == [3] and run.top() == {".ckptkit", "latest", "step_00000003"}
    assert (near / "three").verify().ok and (near / "dcp").verify().ok
    assert run.store.unfinished_uploads() == []


def test_an_outage_does_not_trigger_the_fallback_to_an_older_checkpoint(proxy, near, far, at_once):
    near.save(1, 2)
    far = far.elsewhere()  # it has not read the record yet
    proxy.rule = only("503", lambda method, path: path.endswith("/step_00000002/checkpoint.json"))
    with far.manager() as manager, pytest.raises(StorageError):
        manager.load(state_of(99), fallback="previous")
    proxy.rule = PASS
    far.loads(2)


@on("s3", "gcs")
def test_a_run_at_the_root_of_a_bucket_with_paged_listings_is_seen_completely(proxy, far):
    pages: set[str] = set()

    def between(handler: Any, body: bytes) -> Reply:
        small = handler.path.replace("maxResults=1000", "maxResults=3")
        handler.path = small.replace("list-type=2", "list-type=2&max-keys=3")
        pages.update(re.findall("(?:pageToken|continuation-token)=[^&]+", handler.path))
        return handler.forward(body)

    proxy.between = between
    root = Place(f"{far.url.partition(':')[0]}://whole-bucket", far.options)
    root.store.fs.mkdir("whole-bucket")
    root.save(1, 2, 3, retention=TWO)
    (root / "").loads(3)
    assert pages
    root.prune()
    assert root.top() == {".ckptkit", "latest", "step_00000003"}


@pytest.mark.parametrize("first", ["a run", "a large object"])
@pytest.mark.usefixtures("small_parts")
def test_a_server_that_refuses_conditions_is_used_without_them(proxy, far, caplog, first):
    proxy.rule = lambda number, method, path: (
        Answer(501, "NotImplemented") if "if-none-match" in proxy.headers[number - 1] else "pass"
    )
    place = far.by(default_fill_cache=False)  # a connection of its own: what servers can is remembered
    if first == "a run":
        place.save(1)
        place.loads(1)
    with place.store.writer("large") as out:
        out.write(bytes(12 << 20))
    assert place.store.read("large") == bytes(12 << 20) and place.store.has_conditional_writes is False
    assert any("conditional writes" in record.message for record in caplog.records)
    proxy.rule = PASS
    with pytest.raises(FileExistsError):
        place.store.write("large", b"1")


@pytest.mark.parametrize("atomic", [False, True])
def test_a_load_whose_checkpoint_is_rotated_away_loads_the_next_one(proxy, far, atomic):
    far.save(1)
    gone, once = threading.Event(), threading.Lock()

    def rule(number: int, method: str, path: str) -> str:
        if method == "PUT" and "/pins/" in path and once.acquire(blocking=False):
            proxy.rule = PASS  # of what another job does now
            far.save(2)
            delete_checkpoint(far.store, "step_00000001", reason="test")
            gone.set()
        elif "step_00000001" in path and method == "GET" and not path.endswith("checkpoint.json"):
            gone.wait(60)
        return "pass"

    proxy.rule = rule
    state = state_of(99)
    with far.elsewhere().manager() as manager:
        report = manager.load(state, atomic=atomic)
    assert report is not None and report.step == 2 and gone.is_set()
    assert not state.half_loaded and full(state) == full(state_of(2))


LIES: dict[str, Callable[[bytes], bytes]] = {
    "short": lambda data: data[:-5],
    "flipped": lambda data: bytes(byte ^ 1 for byte in data) if len(data) > 100 else data,
}


@pytest.mark.parametrize("lie", LIES)
def test_every_reader_finds_wrong_bytes_and_short_answers(proxy, near, far, lie):
    run = far / "run"
    (near / "run").save(1)
    proxy.rule = only(Changed(LIES[lie]), lambda method, path: method == "GET" and path.endswith("__0_0.distcp"))
    state = state_of(99)
    with run.manager() as manager, unchanged(state), pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp"):
        manager.load(state, atomic=True)
    with run.manager() as manager, pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp"):
        manager.load(state)  # into the live state, which says that it is half loaded
    assert state.half_loaded
    assert not (run / "latest").verify().ok
    if lie == "flipped":  # the end of the file is not needed to convert it
        for make, options in ((run.convert, {"to": "dcp"}), (run.reshard, {"world_size": 2})):
            with pytest.raises(CorruptCheckpointError):
                make(far / "out", **options)
    proxy.rule = PASS
    assert near.top() == {"run"}


@pytest.mark.parametrize("below", ["a b/\u00fc+%20#x?&=y/run", "k=v/run,1;'(2)!*@$", "trailing/"])
def test_any_valid_key_works(near, below):
    (near / below).save(1)
    (near / below).loads(1)
    two = near / "o\u00fc #1/two"
    (near / below).reshard(two, world_size=2)
    assert two.verify().ok


# --- a server that restarts while a job saves


def test_a_background_save_waits_longer_for_a_restart_than_other_calls(proxy, far, monkeypatch):
    monkeypatch.setattr(retry, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(retry, "_LEAST", 1)
    with far.manager() as manager:
        manager.save(1, state_of(1))
        proxy.rule = always("503")
        timer = threading.Timer(2.0, setattr, (proxy, "rule", PASS))
        timer.start()
        with pytest.raises(CkptkitError):
            manager.save(2, state_of(2))
        manager.save_async(3, state_of(3)).result()
        timer.join()
    far.loads(3)


def test_ctrl_c_ends_a_job_whose_save_waits_for_an_unreachable_store(proxy, far, monkeypatch):
    names = ("retry.BACKGROUND_S", "retry.WAIT_MAX_S", "retry.TIMEOUT_S", "lock.TTL_S")
    for name in (*(f"storage.{name}" for name in names), "checkpoint.manager.BACKGROUND_S"):
        monkeypatch.setattr(f"ckptkit.{name}", 1000.0)  # longer than a test may take
    with pytest.raises(KeyboardInterrupt), far.manager() as manager:
        manager.save(1, state_of(1))
        proxy.clear()
        proxy.rule = always("503")
        manager.save_async(2, state_of(2))
        while proxy.count < 5:
            threading.Event().wait(0.05)
        raise KeyboardInterrupt
    proxy.rule = PASS
    far.loads(1)
