"""One S3 server for all these tests, behind a proxy that counts requests."""

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
    with servers.moto() as options:
        open_store("s3://remote", storage_options=options).fs.mkdir("remote")
        yield dict(options)


@pytest.fixture
def url(s3: dict[str, Any]) -> str:
    """An unused URL."""
    return f"s3://remote/run{next(_counter)}"


@pytest.fixture
def counted(s3: dict[str, Any]) -> Iterator[tuple[Proxy, dict[str, Any]]]:
    """The proxy, and storage options that use it."""
    with proxy_of(s3["endpoint_url"]) as proxy:
        yield proxy, {**s3, "endpoint_url": proxy.url}
