"""A dry run refuses what the real run would refuse, and writes nothing."""

import os
from pathlib import Path
from typing import Any

import pytest

from ckptkit import RetentionPolicy, convert, reshard
from ckptkit.errors import CkptkitError
from ckptkit.offline.prune import prune
from ckptkit.storage.local import LocalStore
from ckptkit.storage.publish import open_staging
from ckptkit.storage.staging import new_nonce
from tests.checkpoint.saving import save
from tests.cli.commands import ran
from tests.offline.folders import largest, names

RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "hf": (convert, {"to": "hf"}), "torch": (convert, {"to": "torch"}), "dcp": (convert, {"to": "dcp"}),
    "local": (convert, {"to": "local"}), "reshard": (reshard, {"world_size": 2}),
}  # fmt: skip


def both_refuse(name: str, source: Path, dst: Path, match: str, **more: Any) -> None:
    """Assert that both runs refuse for the same reason, that the dry run names it, and that neither writes."""
    run, options = RUNS[name]
    before = sorted(dst.parent.rglob("*"))
    for dry_run in (True, False):
        with pytest.raises((CkptkitError, OSError), match=match if dry_run else None):
            found = run(str(source), str(dst), dry_run=dry_run, **options, **more)
            if found.faults:
                raise CkptkitError("; ".join(found.faults))
        assert sorted(dst.parent.rglob("*")) == before


@pytest.mark.parametrize("name", RUNS)
def test_a_dry_run_refuses_an_existing_destination(source, tmp_path, name):
    run, options = RUNS[name]
    run(str(source), str(tmp_path / "out"), **options)
    both_refuse(name, source, tmp_path / "out", "exists already")
    assert not run(str(source), str(tmp_path / "out"), **options, overwrite=True, dry_run=True).faults
    (tmp_path / "out" / "notes.txt").write_bytes(b"mine")
    both_refuse(name, source, tmp_path / "out", r"notes\.txt", overwrite=True)
    (tmp_path / "out.pt").write_bytes(b"mine")
    both_refuse("torch", source, tmp_path / "out.pt", "exists already")
    both_refuse("torch", source, tmp_path / "out.pt", "is not overwritten", overwrite=True)


@pytest.mark.parametrize("name", ["hf", "reshard"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_dry_run_finds_a_missing_or_truncated_source_file(source, tmp_path, name, damage):
    data = largest(source)
    data.unlink() if damage == "missing" else os.truncate(data, data.stat().st_size // 2)
    both_refuse(name, source, tmp_path / "out", data.name)


@pytest.mark.parametrize("name", RUNS)
def test_a_dry_run_finds_a_disk_that_is_too_small_and_a_file_above_the_destination(source, tmp_path, name, monkeypatch):
    (tmp_path / "file").write_bytes(b"1")
    both_refuse(name, source, tmp_path / "file" / "out", "is not a directory")
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self: 10)
    both_refuse(name, source, tmp_path / "out", "10 B free")


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("out", ["out", "deep/out"])
def test_both_runs_name_an_unwritable_directory(source, tmp_path, monkeypatch, name, out):
    run, options = RUNS[name]
    monkeypatch.setattr(os, "access", lambda path, mode, **_: False)  # root may write anywhere
    found = run(str(source), str(tmp_path / out), dry_run=True, **options)
    with pytest.raises(PermissionError) as caught:
        run(str(source), str(tmp_path / out), **options)
    assert found.faults == (str(caught.value),) and f"{tmp_path} is not writable" in str(caught.value)
    assert names(tmp_path) == ["in"]


def test_a_dry_prune_of_an_unwritable_run_reports_it(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    assert not prune(str(tmp_path), policy=RetentionPolicy(max_num=1), dry_run=True).failed
    monkeypatch.setattr(os, "access", lambda path, mode, **_: False)
    found = prune(str(tmp_path), policy=RetentionPolicy(max_num=1), dry_run=True)
    assert "is not writable" in found.failed["step_00000001"]
    assert "would FAIL to delete" in ran("prune", tmp_path, "--max-num", "1", "--dry-run", code=1)


@pytest.mark.parametrize("others", [(), ("notes.txt",)])
def test_a_dry_prune_names_the_leftovers_that_a_prune_removes(source, tmp_path, others):
    convert(str(source), str(tmp_path / "out"))
    assert (tmp_path / "out" / "README.md").exists()
    left = Path(open_staging(LocalStore(tmp_path), "export", new_nonce()).url)
    for path in (tmp_path / "out").iterdir():
        path.rename(left / path.name)
    for name in others:
        (left / name).write_text("mine")
    save(tmp_path, 1)
    left.with_name(f"{left.name}.owner").unlink()
    os.utime(left, (0, 0))
    dry, real = (prune(str(tmp_path), policy=RetentionPolicy(max_num=1), dry_run=dry) for dry in (True, False))
    assert dry.cleaned == real.cleaned == (() if others else (left.name,))
    assert [path.name for path in left.glob("*")] == list(others)


def test_a_push_from_a_remote_destination_is_refused_before_the_conversion(source):
    ran("convert", source, "memory://out", "--push", "me/model", "--dry-run", code=2)
