"""Promises of the local store beyond tests/conformance/store_tests.py."""

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptkit.errors import NoSpaceError, StorageError, UnsafePathError
from ckptkit.storage import local
from ckptkit.storage.local import LocalStore
from ckptkit.storage.store import ReadInto
from tests.conformance.store_tests import StoreTests
from tests.patches import before, failing


def test_a_symlink_out_of_the_root_and_a_fifo_are_refused_without_waiting(tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "root" / "pipe")
    for name, said in (("link", "outside"), ("pipe", "FIFO")):
        with pytest.raises(UnsafePathError, match=said):
            LocalStore(tmp_path / "root").read(name)


def test_a_store_at_the_root_of_the_file_system_reads_files(tmp_path):
    """A merge reads from the lowest directory that contains all sources, which may be the root."""
    (tmp_path / "file").write_bytes(b"x")
    path = str(tmp_path / "file").lstrip("/")
    assert LocalStore("/").read(path) == b"x" and LocalStore("/").path_of(path) == f"/{path}"


@pytest.mark.parametrize(("root", "target"), [("", "blobs/f00"), ("snapshots/main", "../../blobs/f00")])
def test_a_symlink_inside_the_root_or_to_the_blobs_of_a_hub_cache_is_read(tmp_path, root, target):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "f00").write_bytes(b"abc")
    (tmp_path / root).mkdir(parents=True, exist_ok=True)
    (tmp_path / root / "config.json").symlink_to(target)
    assert LocalStore(tmp_path / root).read("config.json") == b"abc"


def test_a_name_that_is_not_utf8_is_read(tmp_path):
    (tmp_path / os.fsdecode(b"a\xff")).write_bytes(b"1")
    store = LocalStore(str(tmp_path))
    assert store.read(store.list()[0].path) == b"1"


@pytest.mark.parametrize("tree", ["tree", "tree/link"])
def test_deleting_a_tree_leaves_the_target_of_a_symlink(tmp_path, tree):
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "x").write_bytes(b"x")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to("../keep")
    LocalStore(tmp_path).delete_tree(tree)
    assert (tmp_path / "keep" / "x").read_bytes() == b"x"
    assert not os.path.lexists(tmp_path / tree)


@pytest.mark.parametrize("simple", [False, True], ids=["any", "without renameat2 and hard links"])
def test_a_rename_on_a_mount_of_any_kind_replaces_nothing(tmp_path, monkeypatch, simple):
    if simple:
        monkeypatch.setattr(local, "_libc", lambda *_: None)
        monkeypatch.setattr(os, "link", failing(errno.EPERM))
    store = LocalStore(tmp_path)
    store.write("x", b"1")
    store.write("y", b"2")
    with pytest.raises(FileExistsError):
        store.rename("y", "x")
    if simple:
        monkeypatch.setattr(os, "rename", failing(errno.EPERM))  # now it fails after it has taken the name
        with pytest.raises(OSError, match="not permitted"):
            store.rename("y", "z")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"1", "y": b"2"}


def test_a_reservation_that_does_not_fit_leaves_nothing(tmp_path):
    with pytest.raises(NoSpaceError):
        LocalStore(tmp_path).create("huge", 1 << 60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", [
    lambda store: store.read("x"), lambda store: store.read_into("x", 0, memoryview(bytearray(1))),
    lambda store: store.write("x", b"2", overwrite=True),
])  # fmt: skip
def test_an_error_of_the_disk_names_the_whole_path_even_if_the_cleanup_fails_too(tmp_path, monkeypatch, call):
    """After an I/O error, the kernel may make the file system read-only."""
    (tmp_path / "x").write_bytes(b"1")
    for name in ("pread", "preadv", "fsync", "unlink"):
        monkeypatch.setattr(os, name, failing(errno.EROFS if name == "unlink" else errno.EIO))
    with pytest.raises(StorageError, match=re.escape(f"{tmp_path}/x: Input/output error")):
        call(LocalStore(tmp_path))


def test_an_error_raised_by_the_caller_of_a_writer_is_not_blamed_on_the_file(tmp_path):
    unreadable = OSError(errno.EIO, os.strerror(errno.EIO), "/swap/offloaded.bin")
    with pytest.raises(OSError) as error, LocalStore(tmp_path).writer("x"):
        raise unreadable
    assert error.value is unreadable and list(tmp_path.iterdir()) == []


class TestLocalStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "root")


def test_a_new_root_is_durable_in_the_directories_above_it(tmp_path, monkeypatch):
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    LocalStore(tmp_path / "team" / "run").write("x", b"1")
    assert {str(tmp_path), str(tmp_path / "team"), str(tmp_path / "team" / "run")} <= set(synced)
    synced.clear()
    LocalStore(tmp_path / "team" / "run").write("y/z", b"1")
    assert not {str(tmp_path), str(tmp_path / "team")} & set(synced)


@pytest.mark.parametrize("sync", [True, False])
def test_writeback_begins_before_the_final_sync(tmp_path, monkeypatch, sync):
    begun: list[int] = []
    monkeypatch.setattr("ckptkit.storage.local._DIRTY", 100)
    monkeypatch.setattr("ckptkit.storage.local.start_writing", lambda fd: begun.append(os.fstat(fd).st_size))
    with LocalStore(tmp_path).writer("file", sync=sync) as writer:
        for _ in range(10):
            writer.write(b"x" * 30)
    assert begun == ([120, 240] if sync else [])
    assert (tmp_path / "file").read_bytes() == b"x" * 300


@pytest.mark.parametrize("waits", [False, True])
def test_only_slow_reads_use_threads(tmp_path, monkeypatch, waits):
    data = os.urandom(64 << 20)
    (tmp_path / "file").write_bytes(data)
    clock = iter(range(1000))
    monkeypatch.setattr(local.time, "perf_counter", lambda: next(clock) * (1.0 if waits else 1e-6))
    done: list[threading.Thread] = []
    before(monkeypatch, LocalStore, "_read_exactly", lambda *_: done.append(threading.current_thread()))
    reads = [ReadInto("file", at, memoryview(bytearray(100))) for at in range(0, len(data), 1 << 20)]
    LocalStore(tmp_path).read_many(reads)
    assert all(read.view == data[read.start : read.start + 100] for read in reads)
    assert (done.count(threading.current_thread()), len(done)) == (9 if waits else 64, 64)


def test_an_error_names_the_file_that_stands_where_a_directory_should_be(tmp_path):
    (tmp_path / "file").write_text("")
    store = LocalStore(tmp_path)
    for call in (store.read, *(lambda path, more=more: store.write(path + more, b"") for more in ("", "/new"))):
        with pytest.raises(OSError, match=f"{re.escape(str(tmp_path))}/file is a file, not a directory") as caught:
            call("file/x")
        assert isinstance(caught.value, FileNotFoundError) or call != store.read


_REPLACE = """
import itertools, os, sys
os.chdir(sys.argv[1])
for step in itertools.count(1):
    os.close(os.open(str(step), os.O_CREAT))
    os.unlink(str(step - 1))
"""


def test_a_listing_is_never_empty_while_another_process_replaces_each_file_by_the_next(tmp_path):
    (tmp_path / "0").touch()
    process = subprocess.Popen([sys.executable, "-S", "-c", _REPLACE, str(tmp_path)])
    try:
        while os.path.exists(tmp_path / "0"):
            assert process.poll() is None
        assert all(LocalStore(tmp_path).list() for _ in range(12_000))
    finally:
        process.kill()
        process.wait()
