"""Large `.metadata` go through C's unpickler, and give what our own gives; what is unusual never gets there."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit.errors import CkptkitError, CorruptCheckpointError, UnsafePickleError
from ckptkit.formats.dcp.metadata import RecordColumns, encode_metadata
from ckptkit.formats.pickles import walk
from ckptkit.formats.pickles.walk import (
    _fetches_only_what_begins,
    _is_usual,
    _is_usual_archive,
    load_archived,
    load_metadata,
    loads,
)
from ckptkit.formats.pickles.zip import read_archive
from ckptkit.storage.local import LocalStore
from tests.formats.described import described, shown


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(walk, "_BULK_BYTES", 0)
    yield


@pytest.fixture
def c_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("went the slow way")

    monkeypatch.setattr(walk, "loads", refuse)


def metadata_files(zoo: Path) -> list[Path]:
    files = [p for p in zoo.rglob("*") if p.name.endswith("metadata") and p.is_file()]
    return [p for p in files if "hostile" not in str(p)]


def test_both_unpicklers_agree_on_all_metadata_of_the_zoo(zoo: Path, c_only: None) -> None:
    files = metadata_files(zoo)
    assert len(files) > 30
    for file in files:
        data = file.read_bytes()
        assert shown(load_metadata(data, file="m")) == shown(loads(data, file="m")), file


def test_old_homes_of_the_classes_are_read_too(zoo: Path, c_only: None) -> None:
    data = (zoo / "dcp_dtensor_2d/ckpt/.metadata").read_bytes()
    old = b"torch.distributed._shard.checkpoint.metadata"
    new = b"torch.distributed.checkpoint.metadata"
    moved = data.replace(b"\x8c" + bytes([len(new)]) + new, b"\x8c" + bytes([len(old)]) + old)
    moved = b"\x80\x04" + moved[11:]  # without the frame, whose length no longer fits
    assert moved != data
    assert shown(load_metadata(moved, file="m")) == shown(loads(data, file="m"))


def test_the_hostile_metadata_of_the_zoo_are_refused(zoo: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsafePickleError, match=r"builtins\.exec"):
        load_metadata((zoo / "hostile_metadata/ckpt/.metadata").read_bytes(), file="m")
    assert not list(tmp_path.iterdir())


UNUSUAL = {
    "a memo index of its own": b"\x80\x04]r\xff\xff\xff\x7f.",
    "an extension code": b"\x80\x04\x82\x01.",
    "a persistent id": b"\x80\x04K\x01Q.",
    "an old protocol": pickle.dumps({"a": 1}, 2),
    "no end": b"\x80\x04]",
    "a text past the end": b"\x80\x04X\xff\xff\xff\x7fa.",
    "a long integer": b"\x80\x04\x8b\x00\x00\x00\x10.",
    "a set": b"\x80\x04\x8f.",
    "nothing but containers": b"\x80\x04" + b"]" * 4096 + b".",
    "nothing but tuples": b"\x80\x04N" + b"\x85" * 4096 + b".",
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_opcodes_never_reach_the_c_unpickler(kind: str) -> None:
    assert not _is_usual(UNUSUAL[kind])


def test_usual_metadata_pass_the_walk() -> None:
    assert _is_usual(pickle.dumps({"a": [1, 70000, -5, 1 << 40], "b": ("x" * 300, None, True)}, 4))


def test_the_metadata_that_we_write_go_the_quick_way(c_only: None) -> None:
    offsets, sizes = np.array([[0, 0], [300, 0]]), np.array([[300, 7], [100, 7]])
    columns = RecordColumns(
        "model.w", "bfloat16", (400, 7), offsets, sizes, np.zeros(2, np.int32), np.array([0, 5000]), np.array([5000, 9])
    )
    data = b"".join(
        encode_metadata([columns], ["__0_0.distcp"], objects={"step": (0, 6000, 4)}, planner_data={"step": ("step",)})
    )
    assert shown(load_metadata(data, file="m")) == shown(loads(data, file="m"))


def test_a_damaged_pickle_is_an_error_that_names_the_file(zoo: Path) -> None:
    data = bytearray((zoo / "dcp_dtensor_2d/ckpt/.metadata").read_bytes())
    data[data.index(b"R\x94")] = ord("a")
    with pytest.raises(CorruptCheckpointError, match="m: its pickle is damaged"):
        load_metadata(bytes(data), file="m")


def test_garbage_collection_is_on_again_after_an_error(zoo: Path) -> None:
    import gc

    with pytest.raises(CorruptCheckpointError):
        load_metadata(b"\x80\x04" + b"N" * 64 + b"R.", file="m")
    assert gc.isenabled()


@pytest.mark.parametrize("name", ["dcp_threads2_w2/ckpt", "dcp_zstd_w2/ckpt", "dcp_torchtitan_like_w2/step-2"])
def test_a_catalog_is_the_same_either_way(zoo: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptkit.formats.dcp import locate
    from ckptkit.formats.dcp.catalog import open_catalog

    def rows() -> dict[str, Any]:
        catalog = open_catalog(LocalStore(zoo / name))
        return {n: (e.dtype, e.shape, e.role, e.fqn, e.state, list(e.slices)) for n, e in catalog.tensors.items()}

    in_bulk = rows()
    monkeypatch.setattr(walk, "_BULK_BYTES", 1 << 40)
    monkeypatch.setattr(locate, "_FEW", 1 << 40)  # every item parsed in full, none by a frame
    assert rows() == in_bulk


def test_both_unpicklers_agree_on_smaller_metadata_too(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "_BULK_BYTES", 1 << 40)
    monkeypatch.setattr(walk, "_LEAST_BYTES", 0)
    for file in metadata_files(zoo):
        data = file.read_bytes()
        assert _is_usual(data, strict=True) or not _is_usual(data), file
        assert shown(load_metadata(data, file="m")) == shown(loads(data, file="m")), file


def test_smaller_metadata_with_a_tuple_in_two_places_go_the_slow_way() -> None:
    inner: Any = (1,)
    for _ in range(3):
        inner = (inner, inner)
    data = pickle.dumps([{inner: 1}, "x" * 64], 4)
    assert _is_usual(data)
    assert not _is_usual(data, strict=True)
    start = b"\x80\x04" + b"N" * 64 + b"X\x01\x00\x00\x00a\x94K\x01\x85\x94"
    assert not _is_usual(start + b"j\x01\x00\x00\x00\x86.", strict=True)
    assert _is_usual(start + b"h\x00\x86.", strict=True)


# --- torch.save


def archives(zoo: Path) -> list[Path]:
    files = [path for pattern in ("*.pt", "*.bin", "*.ckpt") for path in zoo.rglob(pattern)]
    return sorted(path for path in files if path.is_file() and not path.relative_to(zoo).parts[0].startswith("hostile"))


def archived(path: Path) -> tuple[str, Any, int]:
    """What the archive holds, or how it is refused, and how many pickles C's unpickler read."""
    in_c: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        load = walk._load_in_c
        patch.setattr(walk, "_load_in_c", lambda *args: (in_c.append(1), load(*args))[1])
        try:
            return "read", described(read_archive(LocalStore(path.parent), path.name).value), len(in_c)
        except CkptkitError as error:
            return "refused", str(error), len(in_c)


def test_both_unpicklers_agree_on_all_archives_of_the_zoo(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = archives(zoo)
    in_bulk = [archived(file) for file in files]
    assert sum(count for _, _, count in in_bulk) > 40
    monkeypatch.setattr(walk, "_BULK_BYTES", 1 << 40)
    for file, found in zip(files, in_bulk, strict=True):
        alone = archived(file)
        assert alone[2] == 0
        assert found[:2] == alone[:2], file


def usual(*opcodes: bytes) -> bool:
    padding = b"K\x00" * (1 << 18)  # a memo index may be a quarter of the length
    return _is_usual_archive(b"\x80\x02" + b"".join(opcodes) + padding + b".")


def test_a_pickle_of_torch_save_passes_the_walk() -> None:
    shared = ["a"]
    value = {"a": (1, 70000, 1 << 40, -0.5), "b": [shared, shared, "x" * 300, None, True], "c": ((1, 2), (1, 2, 3, 4))}
    assert _is_usual_archive(pickle.dumps(value, 2))
    assert usual(b"K\x01\x85r\x05\x00\x00\x00", b"K\x02q\x06h\x06")


def test_a_tuple_in_two_places_goes_the_slow_way() -> None:
    """Tuples of the same tuple, thirty deep: hashing them would take minutes."""
    inner: Any = (1,)
    for _ in range(3):
        inner = (inner, inner)
    assert _is_usual_archive(pickle.dumps([{(1, (2, 3)): 1}, "x" * 64], 2))
    assert not _is_usual_archive(pickle.dumps([{inner: 1}, "x" * 64], 2))
    assert not usual(b"K\x01\x85r\x05\x00\x00\x00", b"h\x05\x85")
    assert not usual(b"K\x01\x85q\x05", b"j\x05\x00\x00\x00\x85")
    assert not usual(b"(K\x01tq\x05", b"X\x01\x00\x00\x00h", b"h\x05")


@pytest.mark.parametrize("where", ["at the end", "fetched at the end", "nowhere", "a list"])
def test_a_tuple_in_two_places_is_found_far_from_the_beginning(where: str) -> None:
    """What is fetched at the beginning is known; what is fetched later for the first time is looked for."""
    shared: Any = [7] if where == "a list" else (7, [8])
    filler = [[str(i), "x" * (i % 100), i, (i, i)] for i in range(5000)]
    ends = {"at the end": [shared, shared], "fetched at the end": [shared]}.get(where, [shared, [shared[0]]])
    data = pickle.dumps([[shared] if where in ("fetched at the end", "a list") else [], filler, ends], 2)
    assert _is_usual_archive(data) is (where in ("nowhere", "a list"))
    assert _fetches_only_what_begins(data) is (where == "nowhere")


@pytest.mark.parametrize(
    "opcodes",
    [
        b"K\x01r\x00\x00\x00\x7f", b"\x82\x01", b"K\x01P1\n", b"]2", b"\x8b\x00\x00\x00\x10", b"\x8f",
        b"\x95" + bytes(8), b"X\xff\xff\xff\x7fa", b"\x94", b"cos\nsy stem\n",
    ],
)  # fmt: skip
def test_what_torch_save_never_writes_goes_the_slow_way(opcodes: bytes) -> None:
    assert usual(b"K\x01")
    assert not usual(opcodes)


def test_a_hostile_archive_is_refused_by_either_unpickler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (exec, ("open('ran', 'w')",))

    monkeypatch.chdir(tmp_path)
    data = pickle.dumps({"a": [1, 2], "w": Evil()}, 2)
    assert _is_usual_archive(data)
    with pytest.raises(UnsafePickleError, match=r"x: its pickle asks for '__builtin__\.exec'|builtins"):
        load_archived(data, file="x", functions={}, persistent_load=lambda _: None, unknown="refuse")
    assert not list(tmp_path.iterdir())


def test_a_tuple_of_what_are_no_integers_is_read_by_our_own() -> None:
    data = b"\x80\x02c__builtin__\ntuple\nq\x00]q\x01(X\x01\x00\x00\x00aK\x01e\x85q\x02Rq\x03."
    assert _is_usual_archive(data)
    found = load_archived(data, file="x", functions={}, persistent_load=lambda _: None, unknown="refuse")
    assert found == ("a", 1)
