"""One S3 server and one GCS server for all these tests, and a proxy that counts requests and fails them."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from ckptkit.storage.objects import RemoteStore
from tests.storage import servers
from tests.storage.proxy import PASS, Proxy, proxy_of

Options = dict[str, Any]
_counter = itertools.count()


@pytest.fixture(scope="session")
def s3() -> Iterator[Options]:
    """Storage options of the S3 server; its bucket is `bucket`."""
    with servers.moto("bucket") as options:
        yield options


@pytest.fixture(scope="session")
def gcs() -> Iterator[Options]:
    """Storage options of the GCS server; its bucket is `bucket`."""
    with servers.fake_gcs("bucket") as options:
        yield options


@pytest.fixture(scope="module")
def server(s3: Options) -> Options:
    """Storage options of the server that the fixtures below use; a file may choose another one."""
    return s3


@pytest.fixture
def url(server: Options) -> str:
    """An unused URL on the server."""
    return f"{'gs' if 'token' in server else 's3'}://bucket/run{next(_counter)}"


@pytest.fixture(scope="module")
def proxy(server: Options) -> Iterator[Proxy]:
    """A proxy of the server. `options` resets its rule."""
    with proxy_of(server["endpoint_url"]) as made:
        yield made


@pytest.fixture
def options(server: Options, proxy: Proxy) -> Iterator[Options]:
    """Storage options that use the proxy."""
    proxy.clear()
    yield {**server, "endpoint_url": proxy.url}
    proxy.rule, proxy.between = PASS, None


@pytest.fixture
def store(options: Options, url: str) -> RemoteStore:
    return RemoteStore(url, storage_options=options)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload in parts of 5 MiB, the smallest that S3 accepts."""
    monkeypatch.setattr("ckptkit.storage.upload.UPLOAD_BYTES", 5 << 20)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an unreachable store an error after 200 ms."""
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "200ms")
