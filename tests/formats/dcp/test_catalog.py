"""The names and roles of DCP checkpoints; damaged and hostile ones are refused by file."""

import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from operator import setitem
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint import DefaultSavePlanner

from ckptkit.catalog.entry import Role
from ckptkit.errors import (
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MissingExtraError,
    UnsafePathError,
)
from ckptkit.formats.dcp.catalog import open_catalog
from ckptkit.formats.dcp.locate import LocatedSlices
from ckptkit.formats.pickles.objects import read_object
from ckptkit.storage.local import LocalStore
from tests.conftest import ZOO
from tests.formats.damages import Damage, edited, without, written
from tests.formats.readback import contents, contents_of_file, contents_of_state_dict
from tests.hostile.sources import edit_metadata
from tests.offline.folders import copied


def test_a_digest_is_set_once_so_that_no_thread_finds_it_missing(zoo, monkeypatch):
    found: list[Any] = []

    def noted(slices: LocatedSlices, name: str, value: Any) -> None:
        found.append(value if name == "digests" else ())
        object.__setattr__(slices, name, value)

    slices = next(iter(open_catalog(LocalStore(zoo / "dcp_dtensor_2d/ckpt")).tensors.values())).slices
    monkeypatch.setattr(LocatedSlices, "__setattr__", noted, raising=False)
    assert slices.digests is not None
    assert not any(value is None for value in found)


def test_opening_reads_no_data_file(tmp_path):
    folder = copied(ZOO / "dcp_threads2_w2/ckpt", tmp_path / "c")
    for file in folder.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    catalog = open_catalog(LocalStore(folder))
    with pytest.raises(CorruptCheckpointError, match=r"__\d_\d\.distcp: expected a torch.save zip .* found neither"):
        _ = catalog.tensors["embed.weight"].slices.starts


# --- damaged and hostile


def changed(edit: Callable[[Any], Any]) -> Damage:
    """Change what torch reads from `.metadata`."""
    return lambda folder: edit_metadata(folder, edit)


def first(metadata: Any, name: str = "col") -> tuple[Any, Any]:
    return next((k, v) for k, v in metadata.storage_data.items() if k.fqn == name)


def test_tensors_in_objects_that_the_planner_did_not_flatten_are_read(tmp_path):
    model = {"embed.weight": torch.randn(5, 3), "steps": torch.tensor(7), "cut": torch.arange(9.0)[2:5]}
    state = {"model": model, "optimizer": {"state": {"embed.weight": {"exp_avg": torch.ones(5, 3)}}}, "epoch": 3}
    torch.distributed.checkpoint.save(
        state, checkpoint_id=tmp_path, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True
    )
    store = LocalStore(str(tmp_path))
    catalog = open_catalog(store)
    found = {entry.fqn: entry for entry in catalog.by_role(Role.MODEL).values()}
    assert contents(store, found) == contents_of_state_dict(model)
    assert [entry.state for entry in catalog.by_role(Role.OPTIMIZER).values()] == ["exp_avg"]
    assert list(catalog.objects) == ["epoch"]


def test_an_optimizer_without_tensors_may_be_in_several_files(tmp_path):
    state = {"optimizer": {"state": {}, "param_groups": [{"params": ["w"], "lr": 0.1, "momentum": 0}]}}
    writer = torch.distributed.checkpoint.FileSystemWriter(tmp_path, thread_count=2)
    torch.distributed.checkpoint.save(state, storage_writer=writer, no_dist=True)
    store = LocalStore(str(tmp_path))
    objects = open_catalog(store).objects
    found = {name.rpartition(".")[2]: read_object(store, entry) for name, entry in objects.items()}
    assert found == {"params": ["w"], "lr": 0.1, "momentum": 0}
    assert len({entry.path for entry in objects.values()}) == 2


def test_metadata_rewritten_in_another_order_are_accepted(zoo, tmp_path):
    folder = copied(ZOO / "dcp_dtensor_2d/ckpt", tmp_path / "c")
    changed(lambda m: setattr(m, "storage_data", dict(reversed(m.storage_data.items()))))(folder)
    store = LocalStore(folder)
    weights = contents(store, open_catalog(store).by_role(Role.MODEL))
    assert weights == contents_of_file(zoo / "dcp_dtensor_2d/EXPECTED.safetensors")


def tensor(m: Any) -> Any:
    return m.state_dict_metadata["col"]


def drop_chunk(m: Any) -> None:
    chunk = tensor(m).chunks.pop()
    m.storage_data = {k: v for k, v in m.storage_data.items() if not (k.fqn == "col" and k.offset == chunk.offsets)}


def huge_chunk(m: Any) -> None:
    entry = m.state_dict_metadata["rep"]
    entry.size = torch.Size([1 << 40] * len(entry.size))
    entry.chunks = entry.chunks[:1]
    entry.chunks[0].sizes = entry.size


def placed(**fields: Any) -> Damage:
    def edit(m: Any) -> None:
        for name, value in fields.items():
            setattr(first(m)[1], name, value)

    return changed(edit)


def is_of_another_save(file: Path) -> None:
    raw, size = (ZOO / "dcp_hsdp_2x2/ckpt/__0_0.distcp").read_bytes(), file.stat().st_size
    file.write_bytes((raw + bytes(size))[:size])


def split_experts(m: Any) -> None:
    """Cut a part in two that are stored at one place: in safetensors files torch kept only the last one."""
    entry = m.state_dict_metadata["experts"]
    chunk = entry.chunks[0]
    index, info = next((k, v) for k, v in m.storage_data.items() if k.fqn == "experts" and k.offset == chunk.offsets)
    half, (rows, *others) = chunk.sizes[0] // 2, chunk.sizes
    second = torch.Size([chunk.offsets[0] + half, *chunk.offsets[1:]])
    chunk.sizes = torch.Size([half, *others])
    entry.chunks.append(type(chunk)(second, torch.Size([rows - half, *others])))
    m.storage_data[type(index)("experts", second)] = info


def zstd_bomb(folder: Path) -> None:
    """Put an item before another one that decodes to more than its tensor."""
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    entry = open_catalog(LocalStore(folder)).tensors["model.embed.weight"]
    start = next(s.codec.start for s in entry.slices if s.path == "__0_0.distcp" and s.codec)
    edited("__0_0.distcp", lambda raw: raw[:start] + bomb + raw[start:])(folder)

    def lengthen(m: Any) -> None:
        for info in m.storage_data.values():
            if info.relative_path == "__0_0.distcp" and info.offset >= start:
                info.length = len(bomb) if info.offset == start else info.length
                info.offset += len(bomb) * (info.offset > start)

    changed(lengthen)(folder)


UNUSUAL: dict[str, Callable[[Any], Any]] = {
    "a key that is not text": lambda m: setitem(m.state_dict_metadata, 7, tensor(m)),
    "an entry that is neither": lambda m: setitem(m.state_dict_metadata, "x", torch.Size([1])),
    "a shape that is a list": lambda m: setattr(tensor(m), "size", [4]),
    "a shape of bools": lambda m: setattr(tensor(m), "size", (True, True)),
    "a size below zero": lambda m: setattr(tensor(m), "size", (-1, 4)),
    "a huge size": lambda m: setattr(tensor(m), "size", (1 << 80, 4)),
    "chunks that are a tuple": lambda m: setattr(tensor(m), "chunks", ()),
    "a chunk that is something else": lambda m: setitem(tensor(m).chunks, 0, first(m)[1]),
    "an offset of another length": lambda m: setattr(tensor(m).chunks[0], "offsets", (0, 0, 0, 0, 0)),
    "an offset that has no place": lambda m: setattr(tensor(m).chunks[0], "offsets", (1 << 40, 1 << 40)),
    "an offset of text": lambda m: setattr(tensor(m).chunks[0], "offsets", ("0", "0")),
    "no offsets": lambda m: delattr(tensor(m).chunks[0], "offsets"),
    "no properties": lambda m: setattr(tensor(m), "properties", None),
    "a place of another tensor": lambda m: setitem(m.storage_data, dataclasses.replace(first(m)[0], fqn="other"),
                                                m.storage_data.pop(first(m)[0])),
    "a place without offset": lambda m: setitem(m.storage_data, dataclasses.replace(first(m)[0], offset=None),
                                             m.storage_data.pop(first(m)[0])),
    "a place that is something else": lambda m: setitem(m.storage_data, first(m)[0], 5),
    "a length that is a float": lambda m: setattr(first(m)[1], "length", 2.0),
    "a huge length": lambda m: setattr(first(m)[1], "length", 1 << 62),
    "an unknown transform": lambda m: setattr(first(m)[1], "transform_descriptors", ["gzip"]),
}  # fmt: skip
FAULTS: list[tuple[str, Damage, type[CkptkitError], str]] = [
    ("a place is missing", changed(lambda m: m.storage_data.pop(first(m)[0])), IncompleteCheckpointError,
     r"\.metadata.*no location for the part of 'col'"),
    ("a part is missing", changed(drop_chunk), IncompleteCheckpointError, "'col'.* of .* elements"),
    ("a shape is larger than its parts",
     changed(lambda m: setattr(tensor(m), "size", torch.Size([1 << 40, 1 << 20]))), IncompleteCheckpointError,
     "'col'.* of .* elements"),
    ("a part declares more than is stored", changed(huge_chunk), CorruptCheckpointError, r"\.distcp.*stores"),
    ("an item begins elsewhere", changed(lambda m: setattr(first(m)[1], "offset", first(m)[1].offset + 1)),
     CorruptCheckpointError, r"\.distcp.*(found neither|overlaps)"),
    ("a range is negative", placed(offset=-5), CorruptCheckpointError, r"\.metadata.*not a byte range"),
    ("a range ends past the file", placed(length=1 << 50), IncompleteCheckpointError, r"\.distcp.*truncated"),
    ("a dtype is another than stored",
     changed(lambda m: setattr(tensor(m), "properties", dataclasses.replace(tensor(m).properties, dtype=torch.half))),
     CorruptCheckpointError, r"\.distcp.*Files of two saves"),
    ("a path is not text", placed(relative_path=None), CorruptCheckpointError, r"\.metadata.*not a string"),
    *((f"the path {path!r}", placed(relative_path=path), UnsafePathError, r"\.metadata.*outside the checkpoint")
      for path in ("/etc/passwd", "a/../../x", "__0_0.distcp\0", "..\\x", "")),
    ("a file is a link outside", lambda folder: (
        (folder / "__0_0.distcp").rename(folder.parent / "x"),
        (folder / "__0_0.distcp").symlink_to(folder.parent / "x")), UnsafePathError, r"__0_0\.distcp"),
    ("a file is a FIFO", lambda folder: (
        (folder / "__0_0.distcp").unlink(), os.mkfifo(folder / "__0_0.distcp")), CorruptCheckpointError,
     r"__0_0\.distcp: expected a file, found a FIFO"),
    ("a file lacks a byte", edited("__3_0.distcp", lambda raw: raw[:-1]), IncompleteCheckpointError, r"__3_0\.distcp"),
    ("a file is of another save", lambda folder: is_of_another_save(folder / "__0_0.distcp"), CkptkitError,
     r"__0_0\.distcp"),
    ("only a temporary metadata", lambda folder: (folder / ".metadata").rename(folder / ".metadata.tmp"),
     IncompleteCheckpointError, r"only \.metadata\.tmp is there"),
    ("empty metadata", written(".metadata", b""), IncompleteCheckpointError, "is empty"),
    ("an empty directory", without("*"), CheckpointNotFoundError, "not a DCP checkpoint"),
    *((fault, changed(edit), CkptkitError, r"\.metadata") for fault, edit in UNUSUAL.items()),
]  # fmt: skip
OTHER_FAULTS: list[tuple[str, Damage, type[CkptkitError], str]] = [
    ("dcp_no_collectives_w2", without("__0.metadata"), IncompleteCheckpointError, "__0.metadata is missing"),
    ("dcp_no_collectives_w2", without("__1.metadata"), IncompleteCheckpointError, "__1.metadata is missing"),
    ("dcp_serialization_safetensors_w2", changed(split_experts), IncompleteCheckpointError, "experts"),
    ("dcp_zstd_w2", zstd_bomb, CorruptCheckpointError, "decodes to more"),
]  # fmt: skip
CASES = [*((fault, "dcp_dtensor_2d", *rest) for fault, *rest in FAULTS), *(("", *row) for row in OTHER_FAULTS)]


@pytest.mark.parametrize(("fault", "name", "damage", "error", "text"), CASES, ids=[row[0] or row[1] for row in CASES])
def test_what_contradicts_itself_is_refused_by_file(tmp_path, fault, name, damage, error, text):
    folder = copied(ZOO / name / "ckpt", tmp_path / "c")
    damage(folder)
    with pytest.raises(error, match=text):
        for entry in open_catalog(LocalStore(folder)).tensors.values():
            _ = entry.slices.starts


def test_reading_zstd_items_without_the_package_names_the_extra(zoo, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    catalog = open_catalog(LocalStore(zoo / "dcp_zstd_w2/ckpt"))
    with pytest.raises(MissingExtraError, match="zstd"):
        _ = catalog.tensors["model.gain"].slices.starts


def test_a_checkpoint_with_more_files_than_may_be_open_is_read(tmp_path, monkeypatch):
    """One file per item, with a low limit on descriptors."""
    state = {f"w{i}": torch.full((4,), float(i)) for i in range(80)}
    writer = torch.distributed.checkpoint.FileSystemWriter(tmp_path, single_file_per_rank=False)
    torch.distributed.checkpoint.save(state, storage_writer=writer, no_dist=True)
    store = LocalStore(tmp_path)
    monkeypatch.setattr("ckptkit.formats.dcp.locate._BLOCK_FILES", 8)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, limits[1]))
    try:
        catalog = open_catalog(store)
        assert {part.path for entry in catalog.tensors.values() for part in entry.slices} == {
            path.name for path in tmp_path.glob("*.distcp")
        }
        assert contents(store, catalog.tensors) == contents_of_state_dict(state)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_hundred_thousand_slices_open_without_an_object_for_each():
    command = [sys.executable, "-m", "benchmarks.save_load.scale", "--cases", "334:300", "--torch-up-to", "0", "--json"]
    done = subprocess.run(command, cwd=ZOO.parents[1], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["slices"] >= 100_000
    # 24 MB, most of it independent of the number of slices; the whole `.metadata` in memory would take as much again.
    assert 0 < found["held"] < 40_000_000
