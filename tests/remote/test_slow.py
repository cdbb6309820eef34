"""A server that is slow or loses data: identical bytes in the end, or one error."""

import asyncio
import http.client
import itertools
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from ckptkit.errors import CkptkitError, LeaseHeldError
from ckptkit.storage.connection import READS
from ckptkit.storage.lock import STATE_DIRECTORY, TTL_S, _held_leases
from ckptkit.storage.owner import owner_json
from ckptkit.storage.publish import stage
from ckptkit.storage.retry import Patience, SilenceError, call_with_retries, patiently, silences
from ckptkit.storage.s3 import S3Api
from ckptkit.storage.store import ReadInto
from tests.remote.runs import Place
from tests.storage.proxy import Answer, Late, Reply, Rule

# --- one request


def test_a_request_does_not_time_out_while_its_body_is_sent():
    async def ask() -> bool:
        answered, looks = asyncio.Event(), itertools.count(1)

        def tell() -> int:  # an upload that progresses at each of twenty looks
            at = next(looks)
            if at > 20:
                answered.set()
            return min(at, 20)

        return await patiently(answered.wait(), least_s=0.001, body=SimpleNamespace(tell=tell))

    assert asyncio.run(ask())


def test_a_slow_server_is_retried_with_longer_timeouts(monkeypatch):
    monkeypatch.setattr("ckptkit.storage.retry.TIMEOUT_S", 0.0)  # it is always over
    found: list[int] = []

    def slow() -> None:
        found.append(silences.get())
        raise SilenceError("nothing")

    with pytest.raises(SilenceError):
        call_with_retries(slow)
    assert found == [0, 1, 2] and silences.get() == 0
    with pytest.raises(SilenceError), Patience().entered() as patience:
        patience.hurry()
        call_with_retries(slow)
    assert found == [0, 1, 2, 0]


def test_ranges_wait_for_a_turn_before_their_timeout_starts(proxy, far):
    """The server answers only once READS ranges are requested at once, and then waits a little for one too many."""
    store, now, counts, changed = far.store, set[int](), [0], threading.Condition()
    for number in range(16):
        store.write(f"{number}", b"x" * 100)

    def rule(number: int, method: str, path: str) -> str:
        if method == "GET" and "list-type" not in path:
            with changed:
                now.add(number)
                counts.append(len(now))
                changed.notify_all()
                changed.wait_for(lambda: max(counts) >= READS, timeout=60)
                changed.wait_for(lambda: max(counts) > READS, timeout=0.3)
                now.remove(number)
        return "pass"

    def read(_: int) -> list[bytearray]:
        views = [bytearray(100) for _ in range(16)]
        store.read_many([ReadInto(f"{n}", 0, memoryview(view)) for n, view in enumerate(views)])
        return views

    proxy.rule = rule
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(read, range(3))) == [[b"x" * 100] * 16] * 3
    assert max(counts) == READS


# --- answers that arrive too late


def test_a_late_answer_to_any_request_is_harmless(proxy, far, monkeypatch):
    # Lent memory is sent in parts of 4.5 times this; S3 accepts no less than 5 MiB.
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", 2 << 20)
    data, store = os.urandom(20 << 20), far.by(config_kwargs={"read_timeout": 0.5}).store
    store._connection.conditional["bucket"] = True
    proxy.between = late = Late()
    store.write("record", b"mine")
    with pytest.raises(FileExistsError):
        store.write("record", b"theirs")
    with store.writer("big") as out:
        out.lend(memoryview(data), 0, len(data), owner=data)
    view = bytearray(len(data))
    store.read_many([ReadInto("big", 0, memoryview(view))])
    assert view == data and store.read("record") == b"mine"
    assert [(item.path, item.size) for item in store.list()] == [("big", len(data)), ("record", 4)]
    found = store.info("record")
    assert found is not None and found.size == 4
    store.delete(["record"])
    assert store.info("record") is None
    (left,) = store.unfinished_uploads()  # it was begun twice; only prune finds the first
    store.end_uploads([left])
    assert {"PUT", "GET", "LIST", "HEAD", "POST delete", "PUT partNumber", "POST uploadId"} <= set(late.kinds)


# --- the commit record


class _Held:
    """Goes between a proxy and its server: holds back commit records of this name, unanswered, until `carry_out`."""

    def __init__(self, name: str = "checkpoint.json") -> None:
        self.name = name
        self.puts: list[tuple[tuple[str, int], str, dict[str, str], bytes]] = []

    def __call__(self, handler: Any, body: bytes) -> Reply | None:
        if handler.command != "PUT" or not handler.path.endswith(f"/{self.name}"):
            return handler.forward(body)
        self.puts.append((handler.target, handler.path, dict(handler.headers.items()), body))
        return None

    def carry_out(self) -> int:
        """Carry out the first of them."""
        target, path, headers, body = self.puts[0]
        connection = http.client.HTTPConnection(*target, timeout=30)
        connection.request("PUT", path, body=body, headers=headers)
        status = connection.getresponse().status
        connection.close()
        return status

    def rule(self, then: str, *, allowed: int) -> Rule:
        """Return the rule that fails a record that was sent so often. The HTTP client itself sends one again."""

        def rule(number: int, method: str, path: str) -> str | Answer:
            if len(self.puts) <= allowed or method != "PUT" or not path.endswith(f"/{self.name}"):
                return "pass"
            return Answer(403, "AccessDenied") if then == "denied" else "503"

        return rule


@pytest.mark.parametrize("then", ["lost", "never", "503", "denied", "interrupted"])
def test_a_late_commit_record_names_existing_files(proxy, far, near, monkeypatch, request, then):
    """A record whose answer was lost arrives late or never, perhaps after another failure of its save."""
    request.getfixturevalue("impatient" if then in ("lost", "never") else "at_once")
    held, real = _Held(), S3Api.put

    def put(api: S3Api, name: str, *args: Any, **kwargs: Any) -> str:
        try:
            return real(api, name, *args, **kwargs)
        except OSError:
            if then == "interrupted" and name.endswith("/checkpoint.json"):
                raise KeyboardInterrupt from None  # while the answer was waited for
            raise

    monkeypatch.setattr(S3Api, "put", put)
    proxy.between = held
    if then not in ("lost", "never"):
        proxy.rule = held.rule(then, allowed=then == "denied")
    with pytest.raises(KeyboardInterrupt if then == "interrupted" else CkptkitError):
        far.save(1)
    if then == "never":
        assert near.steps() == []
        near.save(2)
        near.loads(2)
        assert "step_00000001" not in near.top()
    else:
        assert held.carry_out() == 200
        near.loads(1)
        assert (near / "step_00000001").verify().ok


def test_a_commit_record_is_not_retried_after_the_lease_is_lost(proxy, far, near, at_once):
    root, tries = near.store, 0

    def rule(number: int, method: str, path: str) -> str:
        nonlocal tries
        if method != "PUT" or not path.endswith("/checkpoint.json"):
            return "pass"
        tries += 1
        if tries == 1:  # the store was out of reach for so long that another job took over, and cleaned up
            (ours,) = (lease for lease in list(_held_leases.values()) if lease.root.url == far.url)
            ours._renewed -= TTL_S
            theirs = {"nonce": "0" * 16, "beat": 0, "released": True, **owner_json(root)}
            root.write(f"{STATE_DIRECTORY}/lease-00000002.json", json.dumps(theirs).encode())
            root.delete_tree("step_00000001")
        return "503" if tries == 1 else "pass"

    proxy.rule = rule
    with pytest.raises(LeaseHeldError):
        far.save(1)
    assert near.steps() == []


@pytest.mark.parametrize("then", ["503", "denied"])
def test_an_index_that_arrives_after_a_failed_export_names_existing_files(proxy, far, near, at_once, then):
    def export(place: Place) -> None:
        names = {"data": 4, "index.json": -1}
        with stage(place.url, last=["index.json"], names=names, storage_options=place.options) as store:
            store.write("data", b"data")
            store.write("index.json", b"{}")

    held = _Held("index.json")
    proxy.between, proxy.rule = held, held.rule(then, allowed=1)
    with pytest.raises((CkptkitError, PermissionError)):
        export(far)
    assert held.carry_out() == 200
    assert near.objects().items() >= {"data": b"data", "index.json": b"{}"}.items()
    near.store.delete(["index.json"])  # or it never arrives: then the next starts as usual
    export(near)
    assert near.names() == {"data", "index.json"}
