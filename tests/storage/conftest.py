"""One S3 server and one GCS server for all these tests; the bucket `bucket` exists on both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from ckptkit.storage.objects import RemoteStore
from tests.storage import servers
from tests.storage.proxy import Proxy, proxy_of


@pytest.fixture(scope="session")
def moto() -> Iterator[dict[str, Any]]:
    """Storage options of the S3 server."""
    with servers.moto() as options:
        RemoteStore("s3://bucket", storage_options=options).fs.makedirs(
            "bucket", exist_ok=True
        )  # other tests of this process share it
        yield dict(options)


@pytest.fixture(scope="session")
def gcs() -> Iterator[dict[str, Any]]:
    """Storage options of the GCS server."""
    with servers.fake_gcs() as options:
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read when gcsfs is imported
        RemoteStore("gs://bucket", storage_options=options).fs.mkdir("bucket")
        yield dict(options)


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
    proxy.rule = lambda number, method, path: "pass"
