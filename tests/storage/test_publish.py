"""`stage` publishes a directory completely and durably, or not at all."""

import errno
import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from ckptkit.errors import CheckpointExistsError, StorageError
from ckptkit.storage import Store, publish, staging
from ckptkit.storage.journal import Journal, Section, _parse, resumable
from ckptkit.storage.local import LocalStore
from ckptkit.storage.publish import stage
from ckptkit.storage.staging import Replaceable, owner_path, staging_name
from tests.checkpoint.saving import check, fork, killed_at, save
from tests.offline.folders import names, tree
from tests.patches import after, before, die, refuse


def anything(store: Store, path: str, known: Collection[str]) -> None:
    """Allow any replacement: which one is allowed is a question of formats."""


def no_notes(store: Store, path: str, known: Collection[str]) -> None:
    """Let anything be replaced that holds no notes.txt."""
    if store.info(f"{path}/notes.txt") is not None:
        error = CheckpointExistsError("notes.txt")
        error.reason = "it holds notes.txt."
        raise error


def put(path: Path, *, content: bytes = b"new", overwrite: bool = False, rule: Replaceable = anything) -> None:
    with stage(str(path), replaceable=rule, overwrite=overwrite) as store:
        store.write("a/model.bin", content, sync=False)
        store.write("index.json", b"{}" + content, sync=False)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A directory that was published before."""
    put(tmp_path / "out", content=b"old")
    return tmp_path / "out"


@pytest.fixture(params=[True, False], ids=["swap", "two steps"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system can exchange two directories, which NFS cannot."""
    if not request.param:
        monkeypatch.setattr(publish, "_exchange", lambda first, second: False)
    return request.param


@pytest.mark.parametrize("call", ["mkdir", "fsync", "write", "close"])
def test_a_failing_disk_leaves_nothing_and_the_error_names_the_path(tmp_path, call, monkeypatch):
    works = getattr(os, call)

    def fails(place: Any, *args: Any) -> None:
        if call == "fsync" and stat.S_ISDIR(os.fstat(place).st_mode):
            return works(place)
        if call == "close":
            works(place)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(StorageError, match=r"/\.tmp-out-.*: Input/output error"), stage(str(tmp_path / "out")) as store:
        store.write("model.bin", b"new", sync=False)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("target", "overwrite", "said"), [
    ("directory", False, "overwrite"), ("file", False, "overwrite"), ("link", True, "symbolic link"),
    ("current directory", True, "contains the current directory"),
])  # fmt: skip
def test_a_target_that_must_stay_is_refused_before_writing(tmp_path, old, monkeypatch, target, overwrite, said):
    out = {"file": old / "index.json", "link": tmp_path / "link"}.get(target, old)
    (tmp_path / "link").symlink_to(old)
    if target == "current directory":
        monkeypatch.chdir(old / "a")
    before = tree(tmp_path)
    with pytest.raises(CheckpointExistsError, match=said), stage(str(out), replaceable=anything, overwrite=overwrite):
        raise AssertionError("the block must not run")
    assert tree(tmp_path) == before and names(tmp_path) == ["link", "out"] and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("empty", [True, False])
def test_an_empty_directory_is_replaced_and_with_overwrite_any_whole_directory(tmp_path, old, swap, empty):
    (old / "stray").write_bytes(b"x")
    if empty:
        shutil.rmtree(old)
        old.mkdir()
    put(old, overwrite=not empty)
    assert tree(tmp_path) == {"out/a/model.bin": b"new", "out/index.json": b"{}new"} and names(tmp_path) == ["out"]


def test_replaceable_is_asked_before_writing_and_again_before_the_swap(tmp_path, old):
    ran = []
    for _ in range(2):
        with pytest.raises(CheckpointExistsError), stage(str(old), replaceable=no_notes, overwrite=True) as store:
            ran.append(store.write("x", b"1"))
            (old / "notes.txt").write_bytes(b"mine")
    assert len(ran) == 1 and tree(old)["notes.txt"] == b"mine" and names(tmp_path) == ["out"]


def test_a_file_created_between_the_last_check_and_the_swap_is_kept_and_named(tmp_path, old, swap, monkeypatch, caplog):
    before(monkeypatch, publish, "_put_in_place", lambda *_, **__: (tmp_path / "out/notes.txt").write_bytes(b"mine"))
    with stage(str(old), replaceable=no_notes, overwrite=True) as store:
        store.write("index.json", b"new")
    out, kept = names(tmp_path)
    assert (out, kept.partition("-")[0]) == ("out", "out.replaced") and tree(old) == {"index.json": b"new"}
    assert tree(tmp_path / kept) == {"a/model.bin": b"old", "index.json": b"{}old", "notes.txt": b"mine"}
    assert f"kept as {tmp_path / kept}: it holds notes.txt" in caplog.text


def test_a_target_that_appears_during_the_write_is_not_replaced(tmp_path):
    with pytest.raises(CheckpointExistsError, match="by another process"), stage(str(tmp_path / "out")) as store:
        store.write("x", b"1")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_bytes(b"2")
    assert tree(tmp_path) == {"out/theirs": b"2"} and names(tmp_path) == ["out"]


def _dies(say: Any, out: str, then: Callable[[str], object] = die) -> None:
    with stage(out, resume=then is not die) as store:
        store.write("x", b"1" * 9)
        then(store.url)
        die()


def test_leftovers_without_delete_permission_do_not_block_writers(tmp_path, monkeypatch, caplog):
    fork(_dies, str(tmp_path / "out"))
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "model.bin")
    refuse(monkeypatch, shutil, "rmtree", error, when=lambda path: Path(path, "x").exists())
    put(tmp_path / "out")
    left, *others = names(tmp_path)
    assert (tmp_path / left / "x").exists() and others == ["out"]
    assert caplog.text.count(f"{tmp_path / 'out'}: leftovers of a dead process could not be removed") == 1
    monkeypatch.undo()
    put(tmp_path / "out", overwrite=True)
    assert names(tmp_path) == ["out"]


def _step(url: str) -> None:
    journal = Journal(url)
    journal.begin("a" * 32)
    journal.done(1)


def test_a_staging_directory_is_never_continued_while_it_is_deleted(tmp_path, monkeypatch):
    fork(_dies, str(tmp_path / "out"), _step)
    parent, seen = LocalStore(tmp_path), list[Any]()
    assert resumable(parent, "out") is not None
    before(monkeypatch, LocalStore, "delete_tree", lambda *_: seen.append(resumable(parent, "out")))
    put(tmp_path / "out")
    assert seen == [None] and names(tmp_path) == ["out"]


def test_leftovers_of_a_writer_on_another_machine_are_kept(tmp_path):
    path = staging_name("out", "0123456789abcdef")
    (tmp_path / path).mkdir()
    owner = {"nonce": "0123456789abcdef", "host": "far", "pid": 1, "started": "1", "machine": "m/n/o"}
    (tmp_path / owner_path(path)).write_text(json.dumps(owner))
    put(tmp_path / "out")
    assert names(tmp_path) == sorted([path, owner_path(path), "out"])


def test_short_writes_complete_the_owner_file_and_leave_no_torn_step(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:1]))
    publish.write_owner(LocalStore(tmp_path), "x.owner", "0" * 16)
    journal = Journal(str(tmp_path / "x"))
    journal.begin("a" * 32)
    journal.done(12)  # half of the line is written
    monkeypatch.undo()
    journal.done(34)
    journal.close()
    writer = staging.read_owner(LocalStore(tmp_path), "x.owner")
    assert writer is not None and writer.owner.pid == os.getpid()
    assert _parse((tmp_path / "x.owner").read_bytes())[1] == [Section("a" * 32, steps=frozenset({34}))]


# --- killed at every file operation


def test_a_kill_at_any_operation_leaves_the_old_or_the_new(tmp_path, swap, monkeypatch):
    monkeypatch.setattr(staging, "STARTING_S", -1.0)
    old = {"a/model.bin": b"old", "index.json": b"{}old"}
    new = {"a/model.bin": b"new", "index.json": b"{}new"}
    gaps = 0
    for nth in range(1, 1000):
        root = tmp_path / str(nth)
        put(root / "out", content=b"old")
        killed = killed_at(nth, put, root / "out", overwrite=True)
        there = tree(root / "out") if (root / "out").exists() else {}
        # Without an atomic swap (NFS) the target may be absent for a moment, but its old content stays beside it.
        gaps += not there
        publish.clean_siblings(LocalStore(root), "out")
        aside = [tree(path) for path in root.glob("out.replaced-*")]
        assert there in (old, new) or (not swap and not there and aside == [old]), f"operation {nth}"
        put(root / "out", overwrite=True)
        assert tree(root / "out") == new and (not swap or names(root) == ["out"]), f"operation {nth}"
        if not killed:
            break
    assert nth > 20
    assert (gaps > 0) == (not swap)


@pytest.mark.parametrize("fails", ["rename", "sync_directory"])
def test_a_failed_two_step_replacement_restores_the_old_directory(tmp_path, old, monkeypatch, fails):
    before = tree(tmp_path)
    monkeypatch.setattr(publish, "_exchange", lambda first, second: False)
    targets, calls = list[str](), itertools.count()
    conditions: dict[str, Any] = {
        "rename": lambda store, source, target: target == "out" and not next(calls),
        "sync_directory": lambda *_: "out" in targets and not next(calls),
    }
    after(monkeypatch, LocalStore, "rename", lambda _, store, source, target: targets.append(target))
    refuse(monkeypatch, LocalStore, fails, errno.EIO, when=conditions[fails])
    with pytest.raises(OSError, match="Input/output"):
        put(old, overwrite=True)
    monkeypatch.undo()
    publish.clean_siblings(LocalStore(tmp_path), "out")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("error", [FileNotFoundError, FileExistsError])
def test_a_repeated_rename_whose_answer_was_lost_succeeds(tmp_path, error, monkeypatch):
    def repeat(_: None, store: LocalStore, source: str, target: str) -> None:
        if source.startswith(".tmp-"):
            raise error(target)  # the retry of NFS

    after(monkeypatch, LocalStore, "rename", repeat)
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", 1)
    with stage(str(tmp_path / "out")) as store:
        store.write("x", b"1")
    monkeypatch.undo()
    assert check(tmp_path / "run") == [1] and (tmp_path / "out" / "x").read_bytes() == b"1"


def test_published_directories_and_files_have_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        put(tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "out" / "index.json").stat().st_mode & 0o777 == 0o640
    assert LocalStore(tmp_path / "out").info("index.json") is not None
