"""The remote store on real servers: S3 twice (moto, rclone) and GCS."""

from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler

import pytest

from ckptkit.errors import StorageError, UsageError
from ckptkit.storage import open_store
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.retry import is_transient
from tests.conformance.store_tests import StoreTests
from tests.storage import servers
from tests.storage.conftest import Options
from tests.storage.proxy import Answer, first


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Options]:
    with servers.rclone(tmp_path_factory.mktemp("rclone")) as options:
        yield options


class TestMoto(StoreTests):
    @pytest.fixture
    def store(self, s3: Options, url: str) -> RemoteStore:
        return RemoteStore(url, storage_options=s3)


class TestRclone(StoreTests):
    @pytest.fixture
    def store(self, rclone: Options, url: str) -> RemoteStore:
        return RemoteStore(url, storage_options=rclone)


class TestGcs(StoreTests):
    @pytest.fixture
    def store(self, gcs: Options, url: str) -> RemoteStore:
        return RemoteStore(url.replace("s3:", "gs:"), storage_options=gcs)


def test_a_conflict_of_two_conditional_puts_is_tried_again(store, proxy):
    proxy.rule = first(Answer(409, "ConditionalRequestConflict"), lambda method, path: method == "PUT")
    store.write("x", b"1")
    assert store.read("x") == b"1"


def test_a_requester_who_pays_says_so_in_every_request(options, proxy, url):
    store = RemoteStore(url, storage_options={**options, "requester_pays": True})
    proxy.clear()
    store.write("x", b"1")
    assert store.read("x") == b"1" and store.exists("x") and store.info("nothing") is None
    store.delete(["x"])
    assert store.list() == []
    assert {headers.get("x-amz-request-payer") for headers in proxy.headers} == {"requester"}


@pytest.mark.parametrize("url", ["dbfs://host/run", "nosuch://host/run"])
def test_an_error_names_an_unsupported_protocol_and_the_supported_ones(url):
    with pytest.raises(UsageError, match=f"{url[:4]}.*Use a path, s3://, gs://"):
        open_store(url).list()


def test_only_transient_errors_are_retried():
    transient = [ConnectionResetError(), TimeoutError(), OSError(16, "SlowDown"), OSError(121, "500")]
    permanent = [FileNotFoundError(), PermissionError(), FileExistsError(), OSError(22, "EINVAL"), ValueError()]
    assert [error for error in (*permanent, *transient) if is_transient(error)] == transient


def test_an_http_server_without_ranges_is_read_or_refused_by_size(tmp_path, monkeypatch):
    data = bytes(range(256)) * 100
    (tmp_path / "x").write_bytes(data)
    monkeypatch.chdir(tmp_path)
    with servers.serving(SimpleHTTPRequestHandler) as url:
        store = open_store(url)
        assert store.read("x", 10, 20) == data[10:20] and store.read("x", len(data) - 1, len(data) + 9) == data[-1:]
        assert store.read("x", 100, len(data) + 200) == data[100:]
        view = memoryview(bytearray(700))
        store.read_into("x", 300, view)
        assert view == data[300:1000]
        monkeypatch.setattr("ckptkit.storage.requests.PART_BYTES", 1000)
        with pytest.raises(StorageError, match="ignores ranges: 10 bytes were requested, 25600 bytes came"):
            store.read("x", 10, 20)
