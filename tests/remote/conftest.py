"""Places on real servers for these tests, and a proxy that counts requests and fails them."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.storage import open_store
from tests.remote.runs import Options, Place
from tests.storage import servers
from tests.storage.conftest import gcs, impatient, s3, small_parts  # noqa: F401
from tests.storage.proxy import Proxy, proxy_of

_counter = itertools.count()


@pytest.fixture(scope="session")
def versioned(s3: Options) -> Options:  # noqa: F811
    """Storage options of the S3 server, with a bucket `versioned`."""
    fs = open_store("s3://versioned", storage_options=s3).fs
    fs.mkdir("versioned")
    fs.call_s3("put_bucket_versioning", Bucket="versioned", VersioningConfiguration={"Status": "Enabled"})
    return s3


@pytest.fixture
def rclone(tmp_path: Path) -> Iterator[Options]:
    """Storage options of an S3 server in a process of its own, without conditional writes."""
    with servers.rclone(tmp_path / "served") as options:
        yield options


@pytest.fixture
def near(request: pytest.FixtureRequest) -> Place:
    """An unused place on S3; `on` chooses another server."""
    kind = getattr(request, "param", "s3")
    bucket = {"gcs": "gs://bucket", "versioned": "s3://versioned"}.get(kind, "s3://bucket")
    return Place(f"{bucket}/remote{next(_counter)}", request.getfixturevalue(kind))


@pytest.fixture
def proxy(near: Place) -> Iterator[Proxy]:
    with proxy_of(near.options["endpoint_url"]) as made:
        yield made


@pytest.fixture
def far(near: Place, proxy: Proxy) -> Place:
    """The same place as `near`, through the proxy."""
    return near.by(endpoint_url=proxy.url)
