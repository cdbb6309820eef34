"""Separate ranks for these tests, and the places to which runs are saved."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Pool
from tests.storage import servers


@pytest.fixture(scope="package")
def ranks() -> Iterator[Pool]:
    """The pool of these tests. Each rank imports a framework once, and its global state affects no other test."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(params=["disk", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The URL of a run and the options to reach it: on a disk, and on a server that checks signatures."""
    if request.param == "disk":
        yield str(tmp_path / "run"), {}
    else:
        with servers.rclone(tmp_path / "served") as options:
            yield "s3://bucket/run", {"storage_options": options}
