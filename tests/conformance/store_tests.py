"""Tests for every Store; each implementation runs them by subclassing."""

import pytest

from ckptkit.errors import IncompleteCheckpointError, UnsafePathError
from ckptkit.storage.store import ReadInto

BAD_PATHS = [
    "../x", "/etc/passwd", "a/../../b", "a/./b", "a//b", "a\0b", "..", ".", "a\\b", "a/", "a\nb", "a\x1b", "a\ud800b",
    "x" * 5000, "x/" * 4000,
]  # fmt: skip


class StoreTests:
    """Subclasses provide the fixture `store`, an empty store."""

    def test_written_bytes_are_read_back_and_a_range_is_half_open_and_cut_at_the_end(self, store):
        store.write("a/b.bin", b"0123456789")
        ranges = {(0, None): b"0123456789", (2, 5): b"234", (8, 50): b"89", (50, 60): b""}
        assert {wanted: store.read("a/b.bin", *wanted) for wanted in ranges} == ranges
        assert store.child("a").read("b.bin") == b"0123456789"
        with pytest.raises(FileNotFoundError):
            store.read("nothing")

    def test_read_into_fills_the_view_or_names_a_file_that_is_too_short(self, store):
        store.write("x.bin", b"0123456789")
        store.read_into("x.bin", 3, memoryview(buffer := bytearray(4)))
        assert buffer == b"3456"
        with pytest.raises(IncompleteCheckpointError, match=r"x\.bin"):
            store.read_into("x.bin", 8, memoryview(buffer))

    def test_read_many_fills_every_view(self, store):
        store.write("x", bytes(range(200)))
        store.write("y", bytes(range(100, 200)))
        buffers = [bytearray(7) for _ in range(20)]
        reads = [ReadInto("x" if i % 2 else "y", i * 3, memoryview(b)) for i, b in enumerate(buffers)]
        store.read_many(reads)
        for i, buffer in enumerate(buffers):
            first = i * 3 if i % 2 else 100 + i * 3
            assert bytes(buffer) == bytes(range(first, first + 7))

    def test_a_write_replaces_a_file_only_with_overwrite(self, store):
        store.write("x", b"old")
        with pytest.raises(FileExistsError):
            store.write("x", b"new")
        assert store.read("x") == b"old"
        store.write("x", b"new", overwrite=True)
        assert store.read("x") == b"new"

    def test_a_writer_publishes_all_of_its_writes_and_nothing_before_it_ends(self, store):
        with store.writer("d/x") as out:
            out.write(b"abc")
            out.write(memoryview(b"def"))
            assert store.info("d/x") is None
        assert store.read("d/x") == b"abcdef"

    def test_a_failed_writer_leaves_nothing(self, store):
        with pytest.raises(RuntimeError, match="on purpose"), store.writer("x") as out:
            out.write(b"abc" * 1000)
            raise RuntimeError("on purpose")
        assert store.info("x") is None
        assert store.list(recursive=True) == []

    def test_listing_gives_names_kinds_and_sizes_and_only_files_if_recursive(self, store):
        assert store.list("nothing") == store.child("d").list() == []
        store.write("a", b"12")
        store.write("d/e/b", b"345")
        store.write("d/empty", b"")
        assert [(f.path, f.kind, f.size) for f in store.list()] == [("a", "file", 2), ("d", "directory", 0)]
        assert [(f.path, f.size) for f in store.list(recursive=True)] == [("a", 2), ("d/e/b", 3), ("d/empty", 0)]
        assert [(f.path, f.kind) for f in store.child("d").list()] == [("e", "directory"), ("empty", "file")]
        found = store.info("d/empty")
        assert found is not None and (found.kind, found.size) == ("file", 0) and store.read("d/empty") == b""

    def test_deleting_is_idempotent(self, store):
        store.write("x", b"1")
        store.delete(["x", "y"])
        store.delete(["x"])
        assert store.info("x") is None

    def test_deleting_a_tree_leaves_its_neighbours(self, store):
        store.write("d/x", b"1")
        store.write("d/e/y", b"1")
        store.write("dd/z", b"1")
        store.write("file", b"1")
        for path in ("d", "file", "nothing"):
            store.delete_tree(path)
        assert [f.path for f in store.list(recursive=True)] == ["dd/z"]

    @pytest.mark.parametrize("path", BAD_PATHS, ids=lambda path: ascii(path[:10]))
    def test_unsafe_paths_are_refused(self, store, path):
        for call in (store.read, store.info, store.delete_tree, lambda path: store.write(path, b"x")):
            with pytest.raises(UnsafePathError, match="refused"):
                call(path)
