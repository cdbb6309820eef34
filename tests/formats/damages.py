"""Damages to a copy of a checkpoint, for tables of what must be refused."""

import io
import shutil
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import save_file

from ckptkit.errors import CkptkitError
from ckptkit.formats.detect import open_source


def lay(folder: Path, files: Mapping[str, Any]) -> Path:
    """Write text, bytes, a copy of a path, arrays, or else a value for torch.save to each file; "x/" is a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            (shutil.copytree if content.is_dir() else shutil.copy)(content, path)
        elif name.endswith("/"):
            path.mkdir(exist_ok=True)
        elif isinstance(content, (str, bytes)):
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        elif name.endswith(".safetensors"):
            save_file(content, path)
        else:
            torch.save(content, path)
    return folder


Damage = Callable[[Path], object]
Refusal = tuple[str, str, Damage, type[CkptkitError], str]  # the fault, a checkpoint, what is done to a copy, the error


def without(pattern: str) -> Damage:
    def damage(folder: Path) -> None:
        paths = list(folder.glob(pattern))
        assert paths
        for path in paths:
            path.unlink()

    return damage


def replaced(name: str, by: str | Path) -> Damage:
    """Copy another file, of the folder or of anywhere, over one."""
    return lambda folder: shutil.copy(folder / by, folder / name)


def written(name: str, data: bytes | str) -> Damage:
    return lambda folder: (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def edited(name: str, edit: Callable[[bytes], bytes]) -> Damage:
    def damage(folder: Path) -> None:
        before = (folder / name).read_bytes()
        after = edit(before)
        assert after != before
        (folder / name).write_bytes(after)

    return damage


def rezipped(
    raw: bytes, change: Callable[[str, bytes], Iterable[tuple[str, bytes]]], method: int = zipfile.ZIP_STORED
) -> bytes:
    """Return the archive with each (name, data) passed through `change`, which returns pairs to write."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(out, "w", method) as target:
        for name in source.namelist():
            for new, data in change(name, source.read(name)):
                target.writestr(new, data)
    return out.getvalue()


def each(refusals: list[Refusal]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("refusal", refusals, ids=[fault for fault, *_ in refusals])


def assert_refused(source: Path, refusal: Refusal, tmp_path: Path) -> None:
    _, name, damage, error, match = refusal
    shutil.copytree(source / name, tmp_path / "x")
    damage(tmp_path / "x")
    with pytest.raises(error, match=match):
        open_source(str(tmp_path / "x"))
