"""Google's answers, and the number of requests, on a real server behind a proxy that counts and fails."""

import os
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ckptkit.errors import StorageError
from ckptkit.storage import open_store
from ckptkit.storage.objects import RemoteStore
from tests.storage.conftest import Options
from tests.storage.proxy import PASS, Answer, Proxy, Reply, every_third, first_of_each, nth, only

pytestmark = pytest.mark.usefixtures("at_once")
PART = 1 << 20
_RANGE = re.compile(r"bytes (?:\*|(\d+)-(\d+))/(\*|\d+)")
_QUANTUM = 256 << 10  # Google keeps whole ones


@dataclass
class Sessions:
    """Upload sessions as Google documents them, between a proxy and a server that appends everything it receives.

    - What is asked of a session without bytes tells what it has; of one that is done, the object.
    - Bytes that the server has already are passed over.

    Attributes:
        cut: So many of the next parts arrive by half, and their connection breaks.
        queries: How often it was asked what there is.
    """

    cut: int = 0
    queries: int = 0
    _kept: dict[str, int] = field(default_factory=dict)
    _done: dict[str, Reply] = field(default_factory=dict)

    def __call__(self, handler: Any, body: bytes) -> Reply | None:
        session = parse_qs(urlsplit(handler.path).query).get("upload_id", [""])[0]
        match = _RANGE.fullmatch(handler.headers.get("Content-Range", ""))
        if not session or match is None:
            return handler.forward(body)
        kept = self._kept.get(session, 0)
        self.queries += match[1] is None
        if session in self._done:
            return self._done[session]
        if match[1] is None:
            return self._incomplete(kept)
        start, total = int(match[1]), match[3]
        if start > kept:
            return 400, [], b"there is a gap"
        new, last = body[kept - start :], total != "*"
        if self.cut:
            self.cut -= 1
            new, last = new[: len(new) // 2 // _QUANTUM * _QUANTUM], False
        stop = kept + len(new)
        if new:
            said = f"bytes {kept}-{stop - 1}/{total if last else '*'}"
            reply: Reply = handler.forward(new, Content_Range=said)
            self._kept[session] = stop
            if last:
                self._done[session] = reply
                return reply
        return self._incomplete(stop) if len(new) == len(body[kept - start :]) else None

    @staticmethod
    def _incomplete(kept: int) -> Reply:
        return 308, [("Range", f"bytes=0-{kept - 1}")] if kept else [], b""


@pytest.fixture(scope="module")
def server(gcs: Options) -> Options:
    return gcs


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", PART)


@pytest.fixture
def sessions(store: RemoteStore, proxy: Proxy, small_parts: None) -> Sessions:
    proxy.between = made = Sessions()
    return made


def filled(store: RemoteStore, count: int) -> list[str]:
    names = [f"d/{i} \u00fc%+#?.bin" for i in range(count)]
    store._connection.each(lambda name: store.write(name, b"x"), names)
    return names


def put(store: RemoteStore, name: str) -> bytes:
    data = os.urandom(5 * PART + 777)
    with store.writer(name) as out:
        out.write(data)
    return data


def test_only_failed_deletions_are_repeated(store, proxy):
    names = filled(store, 40)
    proxy.clear()
    proxy.rule = nth("503", *range(1, 41, 2))
    store.delete(names)
    assert store.list() == [] and proxy.kinds()["DELETE"] == 60


def test_a_denied_deletion_names_the_object(store, proxy):
    names = filled(store, 3)
    proxy.rule = only(Answer(403, "Forbidden"), lambda method, path: "d%2F1%20" in path)
    with pytest.raises(PermissionError, match=r"d/1 .*was not deleted: "):
        store.delete(names)
    proxy.rule = PASS
    assert [item.path for item in store.list("d")] == [names[1]]  # the others were


def test_a_lookup_of_a_missing_object_makes_two_requests(store, proxy):
    store.write("a/b", b"1")
    proxy.clear()
    assert store.info("nothing") is None and proxy.count == 2
    found = [store.info(path) for path in ("a", "a/b")]
    assert [(item.kind, item.size) for item in found if item] == [("directory", 0), ("file", 1)]


@pytest.mark.parametrize("fate", ["503", "cut", "lost"])
def test_lookups_and_deletions_survive_every_third_request_failing(store, proxy, fate):
    names = filled(store, 7)
    proxy.rule = every_third(fate)
    for _ in range(3):  # whichever is the third
        assert store.info("nothing") is None
        assert len(store.list(recursive=True)) == 7
        assert store.read(names[0]) == b"x"
    store.delete_tree("d")  # has no object of its own
    assert store.list(recursive=True) == []


def test_an_error_names_a_missing_bucket(gcs):
    store = open_store("gs://no-such-bucket/run", storage_options=gcs)
    for look in (store.list, lambda: store.list(recursive=True), store.list_at_once):
        with pytest.raises(FileNotFoundError, match="the bucket does not exist: no-such-bucket"):
            look()


@pytest.mark.parametrize("fate", ["503", "reset", "lost", "cut"])
def test_each_request_of_an_upload_may_fail_once(store, proxy, sessions, fate):
    for turn in range(1, 8):
        proxy.clear()
        proxy.rule = nth(fate, turn)
        data = put(store, f"x{turn}")
        proxy.rule = PASS
        assert store.read(f"x{turn}") == data
    # Of each part that failed, none of the request that begins; only the last answer has a body to be cut.
    assert sessions.queries == (1 if fate == "cut" else 6)
    proxy.rule = every_third(fate)
    assert put(store, "third") == store.read("third")


@pytest.mark.parametrize("cut", [1, 3])
def test_the_received_bytes_of_an_interrupted_part_are_not_sent_again(store, proxy, sessions, cut):
    sessions.cut = cut
    proxy.clear()
    data = put(store, "x")
    assert store.read("x") == data and sessions.queries == cut
    assert len(data) < proxy.sent <= len(data) + cut * PART


def test_create_only_puts_send_a_condition(store, proxy, small_parts):
    proxy.clear()
    put(store, "large")
    store.write("small", b"1")
    begun = [path for method, path in proxy.seen if "/upload/storage/" in path and "upload_id" not in path]
    assert len(begun) == 2 and all("ifGenerationMatch=0" in path for path in begun)


@pytest.mark.parametrize("lost", [(3,), (3, 4)], ids=["bytes arrive twice", "the question's answer is lost, too"])
def test_an_upload_that_ends_wrong_is_not_published(store, proxy, small_parts, lost):
    proxy.clear()
    proxy.rule = nth("lost", *lost)
    # Without Sessions, a question ends an upload.
    error = (StorageError, "ended the upload before it was complete") if lost == (3,) else (OSError, None)
    with pytest.raises(error[0], match=error[1]):
        put(store, "x")
    assert store.list() == []


def test_a_put_whose_answer_was_lost_is_not_a_conflict(store, proxy):
    proxy.rule = first_of_each("lost")
    store.write("record", b"mine")
    for content in (b"theirs", b"mine"):  # of the same bytes: it is another's all the same
        with pytest.raises(FileExistsError):
            store.write("record", content)
    assert store.read("record") == b"mine"
