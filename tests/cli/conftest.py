"""A run that the commands read, fresh for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.commands import save_run


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("commands") / "RUN"
    save_run(str(root))
    return root


@pytest.fixture
def root(saved_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_run, tmp_path / "RUN", symlinks=True))
