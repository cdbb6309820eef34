"""Folders that commands read and write: their bytes, their names, a damaged bit, and refusals that change nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ZOO = Path(__file__).parents[1] / "zoo"
UNEVEN = ZOO / "dcp_fsdp2_uneven_w4"


def tree(folder: Path, *without: str) -> dict[str, bytes]:
    """Return the content of every file by its path in the folder, except files and folders of these names."""
    files = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {str(name): path.read_bytes() for name, path in files.items() if not {*name.parts} & {*without}}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path, at: int | None = None, *, bit: int = 0) -> None:
    """Flip a bit of a file, in the middle unless a position is given; called again, it is undone."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1 << bit
    path.write_bytes(data)


def largest(folder: Path, pattern: str = "*.distcp") -> Path:
    return max(folder.glob(pattern), key=lambda path: path.stat().st_size)


def copied(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def hub_snapshot(folder: Path, cache: Path) -> Path:
    """Copy a folder into a cache as huggingface_hub does: a snapshot of links into blobs/."""
    repo = cache / "models--org--tiny"
    snapshot = repo / "snapshots" / ("0" * 40)
    for place in (snapshot, repo / "blobs", repo / "refs"):
        place.mkdir(parents=True)
    (repo / "refs" / "main").write_text(snapshot.name)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(path, repo / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def refused(error: Any, said: str, command: Callable[..., Any], source: Any, out: Path, **options: Any) -> None:
    """Assert that a command raises an error with these words, and adds nothing next to its destination."""
    before = names(out.parent)
    with pytest.raises(error, match=said or None):
        command(str(source) if isinstance(source, Path) else source, str(out), **options)
    assert names(out.parent) == before
