"""An S3 server for all these tests, and a proxy of it that counts requests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from ckptkit.storage import open_store
from tests.storage import servers
from tests.storage.proxy import Proxy, proxy_of

_counter = itertools.count()


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, Any]]:
    """Storage options of the server; its bucket is `remote`."""
    with servers.moto("remote") as options:
        yield options


@pytest.fixture(scope="session")
def gcs() -> Iterator[dict[str, Any]]:
    """Storage options of a GCS server; its bucket is `google`."""
    with servers.fake_gcs("google") as options:
        yield options


@pytest.fixture(scope="session")
def versioned(s3: dict[str, Any]) -> str:
    """The name of a versioned bucket."""
    fs = open_store("s3://versioned", storage_options=s3).fs
    fs.mkdir("versioned")
    fs.call_s3("put_bucket_versioning", Bucket="versioned", VersioningConfiguration={"Status": "Enabled"})
    return "versioned"


@pytest.fixture
def url() -> str:
    """An unused URL."""
    return f"s3://remote/run{next(_counter)}"


@pytest.fixture
def proxy(s3: dict[str, Any]) -> Iterator[Proxy]:
    with proxy_of(s3["endpoint_url"]) as made:
        yield made


@pytest.fixture
def options(s3: dict[str, Any], proxy: Proxy) -> dict[str, Any]:
    """Storage options that use the proxy."""
    return {**s3, "endpoint_url": proxy.url}
