"""The remote store on real servers: S3 twice (moto, rclone) and GCS."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import MissingExtraError, StorageError, UsageError
from ckptkit.redact import without_secrets
from ckptkit.storage import open_store
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.retry import is_transient
from tests.conformance.store_tests import StoreTests
from tests.storage import servers

_counter = itertools.count()


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "bucket").mkdir()
    with servers.rclone(folder) as options:
        yield options


class TestMoto(StoreTests):
    @pytest.fixture
    def store(self, moto: Mapping[str, Any]) -> RemoteStore:
        return RemoteStore(f"s3://bucket/objects{next(_counter)}", storage_options=moto)

    def test_two_writers_of_one_key_have_one_winner(self, store: RemoteStore) -> None:
        store.fs.pipe_file(store._full("record"), b"first", mode="create")
        with pytest.raises(FileExistsError):
            store.write("record", b"second")
        assert store.read("record") == b"first"

    def test_a_large_object_round_trips_in_parts(self, store: RemoteStore) -> None:
        data = uuid.uuid4().bytes * (2 << 20)  # 32 MiB
        with store.writer("big") as out:
            out.write(data)
        assert store.read("big") == data

    def test_an_upload_that_fails_in_the_middle_leaves_no_object(self, store: RemoteStore) -> None:
        with pytest.raises(RuntimeError), store.writer("big") as out:
            out.write(bytes(40 << 20))
            raise RuntimeError("on purpose")
        assert store.list(recursive=True) == []


class TestRclone(StoreTests):
    @pytest.fixture
    def store(self, rclone: Mapping[str, Any]) -> RemoteStore:
        return RemoteStore(f"s3://bucket/run{next(_counter)}", storage_options=rclone)


class TestGcs(StoreTests):
    @pytest.fixture
    def store(self, gcs: Mapping[str, Any]) -> RemoteStore:
        return RemoteStore(f"gs://bucket/objects{next(_counter)}", storage_options=gcs)


def test_secrets_never_reach_a_message() -> None:
    shown = without_secrets("s3://KEY:SECRET@bucket/x?X-Amz-Signature=abc&secret_key=hush token=t0k")
    assert not any(word in shown for word in ("SECRET", "abc", "hush", "t0k"))


def test_an_unknown_protocol_is_a_usage_error() -> None:
    with pytest.raises((UsageError, MissingExtraError)):
        open_store("nosuch://bucket/x").info("y")


def test_an_unreachable_server_is_a_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "200ms")
    port = servers.free_port()
    options = {
        "endpoint_url": f"http://127.0.0.1:{port}",
        "key": "k",
        "secret": "hush",
        "config_kwargs": {"retries": {"max_attempts": 0}},
    }
    with pytest.raises(StorageError) as caught:
        open_store("s3://bucket/x", storage_options=options).read("y")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "error", [ConnectionResetError(), TimeoutError(), OSError(16, "SlowDown"), OSError(121, "500")]
)
def test_transient_errors_are_retried(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error", [FileNotFoundError(), PermissionError(), FileExistsError(), OSError(22, "EINVAL"), ValueError()]
)
def test_permanent_errors_are_not_retried(error: Exception) -> None:
    assert not is_transient(error)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def plain_http(tmp_path: Path) -> Iterator[str]:
    """A server over `tmp_path` that does not support ranges."""
    handler = partial(_Quiet, directory=str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_http_server_without_ranges_is_read_or_refused_by_size(
    tmp_path: Path, plain_http: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * 100
    (tmp_path / "x").write_bytes(data)
    store = open_store(plain_http)
    assert store.read("x", 10, 20) == data[10:20] and store.read("x", len(data) - 1, len(data) + 9) == data[-1:]
    assert store.read("x", 100, len(data) + 200) == data[100:]
    view = memoryview(bytearray(700))
    store.read_into("x", 300, view)
    assert view == data[300:1000]
    monkeypatch.setattr("ckptkit.storage.requests.PART_BYTES", 1000)
    with pytest.raises(StorageError, match="ignores ranges: 10 bytes were requested, 25600 bytes came"):
        store.read("x", 10, 20)
