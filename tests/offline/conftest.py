"""A source that a test may change, and copies in short steps."""

from pathlib import Path

import pytest

from ckptkit.offline.copying import runs
from tests.offline.folders import UNEVEN, copied
from tests.offline.resuming import STEP


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return copied(UNEVEN / "ckpt", tmp_path / "in")


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_STEP", STEP)
