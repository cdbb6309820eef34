"""One S3 server and one GCS server for all these tests; the bucket `bucket` exists on both."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.storage import servers
from tests.storage.proxy import PASS, Proxy, proxy_of

_counter = itertools.count()


@pytest.fixture(scope="session")
def moto() -> Iterator[dict[str, Any]]:
    """Storage options of the S3 server."""
    with servers.moto("bucket") as options:
        yield options


@pytest.fixture(scope="session")
def gcs() -> Iterator[dict[str, Any]]:
    """Storage options of the GCS server."""
    with servers.fake_gcs("bucket") as options:
        yield options


@pytest.fixture
def path() -> str:
    """An unused place in a bucket."""
    return f"bucket/run{next(_counter)}"


@pytest.fixture(scope="module")
def proxy(moto: dict[str, Any]) -> Iterator[Proxy]:
    """A proxy of the S3 server. `through` resets its rule."""
    with proxy_of(moto["endpoint_url"]) as made:
        yield made


@pytest.fixture
def through(moto: dict[str, Any], proxy: Proxy) -> Iterator[dict[str, Any]]:
    """Storage options that use the proxy."""
    proxy.clear()
    yield {**moto, "endpoint_url": proxy.url}
    proxy.rule = PASS
