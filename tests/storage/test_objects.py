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
def moto_options() -> Iterator[Mapping[str, Any]]:
    with servers.moto() as options:
        open_store("s3://store", storage_options=options).fs.mkdir("store")
        yield options


@pytest.fixture(scope="session")
def rclone_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "bucket").mkdir()
    with servers.rclone(folder) as options:
        yield options


@pytest.fixture(scope="session")
def gcs_options() -> Iterator[Mapping[str, Any]]:
    with servers.fake_gcs() as options:
        import os

        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read when gcsfs is imported
        open_store("gs://bucket", storage_options=options).fs.mkdir("bucket")
        yield options


class TestMoto(StoreTests):
    @pytest.fixture
    def store(self, moto_options: Mapping[str, Any]) -> RemoteStore:
        return RemoteStore(f"s3://store/run{next(_counter)}", storage_options=moto_options)

    def test_two_writers_of_one_key_have_one_winner(self, store: RemoteStore) -> None:
        store.fs.pipe_file(store._full("record"), b"first", mode="create")
        with pytest.raises(FileExistsError):
            store.write("record", b"second")
        assert store.read("record") == b"first"

    def test_a_large_object_goes_in_parts_and_comes_back_equal(self, store: RemoteStore) -> None:
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
    def store(self, rclone_options: Mapping[str, Any]) -> RemoteStore:
        return RemoteStore(f"s3://bucket/run{next(_counter)}", storage_options=rclone_options)


class TestGcs(StoreTests):
    @pytest.fixture
    def store(self, gcs_options: Mapping[str, Any]) -> RemoteStore:
        return RemoteStore(f"gs://bucket/run{next(_counter)}", storage_options=gcs_options)


def test_secrets_never_reach_a_message() -> None:
    shown = without_secrets("s3://KEY:SECRET@bucket/x?X-Amz-Signature=abc&secret_key=hush token=t0k")
    assert not any(word in shown for word in ("SECRET", "abc", "hush", "t0k"))


def test_an_unknown_protocol_is_wrong_usage() -> None:
    with pytest.raises((UsageError, MissingExtraError)):
        open_store("nosuch://bucket/x").info("y")


def test_a_server_that_is_down_is_one_storage_error(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_passing_faults_are_retried(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error", [FileNotFoundError(), PermissionError(), FileExistsError(), OSError(22, "EINVAL"), ValueError()]
)
def test_lasting_faults_are_not_retried(error: Exception) -> None:
    assert not is_transient(error)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def plain_http(tmp_path: Path) -> Iterator[str]:
    """A server over `tmp_path` that knows no ranges."""
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


def test_a_server_of_http_that_gives_the_whole_file_for_a_range_is_cut_from_or_refused(
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
    with pytest.raises(StorageError, match="does not serve ranges of a file: 25600 bytes came where 10"):
        store.read("x", 10, 20)
