"""A foreign source that is replaced while it is read: no result combines two checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import CorruptCheckpointError
from ckptkit.offline import conversion
from ckptkit.offline.convert import convert
from ckptkit.offline.reshard import reshard

COMMANDS: dict[str, Callable[[str, str], Any]] = {
    "convert": convert,
    "reshard": lambda src, dst: reshard(src, dst, world_size=3),
}


def while_copying(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Run `act` once the source is open, before its tensors are read."""
    execute = conversion.execute

    def acting(*args: Any, **kwargs: Any) -> Any:
        act()
        return execute(*args, **kwargs)

    monkeypatch.setattr(conversion, "execute", acting)


@pytest.fixture
def source(zoo: Path, tmp_path: Path) -> Path:
    shutil.copytree(zoo / "verl_fsdp2_w2", tmp_path / "in")
    return tmp_path / "in"


def replaced(source: Path) -> None:
    path = max((path for path in source.rglob("model_*.pt")), key=lambda path: path.stat().st_size)
    shutil.copyfile(path, source / "new")
    os.replace(source / "new", path)  # of the same size


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_published_from_a_source_replaced_while_it_is_read(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    while_copying(monkeypatch, lambda: replaced(source))
    with pytest.raises(CorruptCheckpointError, match=r"model_\S+ was changed or replaced while it was read"):
        COMMANDS[command](str(source), str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_new_files_next_to_the_source_do_not_matter(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_copying(monkeypatch, lambda: (source / "train.log").write_text("step 5"))
    convert(str(source), str(tmp_path / "out"))
