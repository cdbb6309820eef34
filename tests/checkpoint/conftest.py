"""Fixtures for the tests of checkpoints."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptkit.storage import staging
from tests.checkpoint.states import KINDS


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each type of checkpoint in turn."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """Storage options of an S3 server with a bucket called `bucket`."""
    import s3fs

    from tests.storage.servers import moto

    with moto() as options:
        # All moto servers of a process share their data.
        s3fs.S3FileSystem(**options, skip_instance_cache=True).makedirs("bucket", exist_ok=True)
        yield dict(options)


@pytest.fixture
def as_a_user() -> Iterator[Path]:
    """Yield a directory of a user who is not root, because root may read everything."""
    time.strptime("0", "%S")  # imports a module from Python's directory, which the user may be unable to read
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:  # above `tmp_path`, directories are root's own
        Path(folder).chmod(0o777)
        os.seteuid(65534 if user == 0 else user)
        try:
            yield Path(folder)
        finally:
            os.seteuid(user)
            for path in Path(folder).iterdir():
                path.chmod(0o700)


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a save remove what a writer left that was killed just after it had created its owner file."""
    monkeypatch.setattr(staging, "STARTING_S", -1.0)
