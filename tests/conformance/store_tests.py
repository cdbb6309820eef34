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

    def test_what_is_written_is_read_back(self, store):
        store.write("a/b.bin", b"0123456789")
        assert store.read("a/b.bin") == b"0123456789"

    def test_a_range_is_half_open(self, store):
        store.write("x", b"0123456789")
        assert store.read("x", 2, 5) == b"234"

    def test_a_range_past_the_end_is_truncated(self, store):
        store.write("x", b"0123")
        assert store.read("x", 2, 50) == b"23"
        assert store.read("x", 50, 60) == b""

    def test_reading_a_missing_file_raises(self, store):
        with pytest.raises(FileNotFoundError):
            store.read("nothing")

    def test_read_into_fills_the_view(self, store):
        store.write("x", b"0123456789")
        buffer = bytearray(4)
        store.read_into("x", 3, memoryview(buffer))
        assert bytes(buffer) == b"3456"

    def test_read_into_names_a_file_that_is_too_short(self, store):
        store.write("short.bin", b"0123")
        with pytest.raises(IncompleteCheckpointError, match=r"short\.bin"):
            store.read_into("short.bin", 2, memoryview(bytearray(10)))

    def test_read_many_fills_every_view(self, store):
        store.write("x", bytes(range(200)))
        store.write("y", bytes(range(100, 200)))
        buffers = [bytearray(7) for _ in range(20)]
        reads = [ReadInto("x" if i % 2 else "y", i * 3, memoryview(b)) for i, b in enumerate(buffers)]
        store.read_many(reads)
        for i, buffer in enumerate(buffers):
            first = i * 3 if i % 2 else 100 + i * 3
            assert bytes(buffer) == bytes(range(first, first + 7))

    def test_a_write_does_not_replace_a_file(self, store):
        store.write("x", b"old")
        with pytest.raises(FileExistsError):
            store.write("x", b"new")
        assert store.read("x") == b"old"

    def test_overwrite_replaces_a_file(self, store):
        store.write("x", b"old")
        store.write("x", b"new", overwrite=True)
        assert store.read("x") == b"new"

    def test_a_writer_publishes_all_of_its_writes(self, store):
        with store.writer("d/x") as out:
            out.write(b"abc")
            out.write(memoryview(b"def"))
        assert store.read("d/x") == b"abcdef"

    def test_a_failed_writer_leaves_nothing(self, store):
        with pytest.raises(RuntimeError, match="on purpose"), store.writer("x") as out:
            out.write(b"abc" * 1000)
            raise RuntimeError("on purpose")
        assert store.info("x") is None
        assert store.list(recursive=True) == []

    def test_nothing_is_visible_before_the_writer_ends(self, store):
        with store.writer("x") as out:
            out.write(b"abc")
            assert store.info("x") is None

    def test_listing_gives_names_kinds_and_sizes(self, store):
        store.write("a", b"12")
        store.write("d/b", b"345")
        assert [(f.path, f.kind, f.size) for f in store.list()] == [("a", "file", 2), ("d", "directory", 0)]
        assert [(f.path, f.size) for f in store.list("d")] == [("d/b", 3)]

    def test_a_recursive_listing_contains_only_files(self, store):
        store.write("a", b"12")
        store.write("d/e/b", b"345")
        assert [f.path for f in store.list(recursive=True)] == ["a", "d/e/b"]

    def test_a_listing_sees_the_files_of_another_store_object(self, store):
        assert store.child("d").list() == []
        store.write("d/x", b"1")
        assert [f.path for f in store.child("d").list()] == ["x"]

    def test_a_listing_of_a_missing_directory_is_empty(self, store):
        assert store.list("nothing") == []

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

    def test_a_child_sees_the_same_files(self, store):
        store.write("d/x", b"1")
        assert store.child("d").read("x") == b"1"

    @pytest.mark.parametrize("path", BAD_PATHS, ids=lambda path: ascii(path[:10]))
    def test_unsafe_paths_are_refused(self, store, path):
        for call in (store.read, store.info, store.delete_tree, lambda path: store.write(path, b"x")):
            with pytest.raises(UnsafePathError, match="refused"):
                call(path)

    def test_an_empty_file_is_a_file(self, store):
        store.write("x", b"")
        found = store.info("x")
        assert found is not None
        assert (found.kind, found.size) == ("file", 0)
        assert store.read("x") == b""
