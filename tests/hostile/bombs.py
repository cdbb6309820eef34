"""Checkpoints that are small on disk and ask for excessive memory or time."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

from ckptkit.formats.own.columns import pack, unpack
from tests.hostile.harness import Place
from tests.hostile.records import edit_json, edit_record, reseal
from tests.hostile.sources import Build, changed, changed_metadata, changed_steps, header, saved, written


def _many_members() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as new:
        for i in range(10_000):
            new.writestr(f"x/data/{i}", b"")
    return out.getvalue()


def _bin(make: Callable[[], bytes]) -> Build:
    return lambda place: (place.src / "pytorch_model.bin").write_bytes(make())


def _shape(*size: int) -> Build:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["weight"]
        entry.size = torch.Size(size)
        entry.chunks[0].sizes = torch.Size(size)

    return changed_metadata(change)


def _info(**fields: int) -> Build:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            for name, value in fields.items():
                setattr(info, name, value)

    return changed_metadata(change)


def _chunks(count: int, *, rows: int) -> Build:
    """Very many boxes of one tensor, of several rows each, that form no grid."""

    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["weight"]
        chunk = type(entry.chunks[0])
        entry.size = torch.Size((count + 4, 4))
        entry.chunks = [chunk(torch.Size((i, 0)), torch.Size((rows, 4))) for i in range(count)]

    return changed_metadata(change)


def _staircase(count: int) -> Build:
    """A manifest without overlaps for which a sweep over rows compares every pair: quadratic."""

    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["weight"]
        first = entry.chunks[0]
        entry.size = torch.Size((2 * count, 2 * count))
        corners = [torch.Size((i, 2 * i)) for i in range(count)]
        entry.chunks = [type(first)(at, torch.Size((count, 1 + at[0] % 2))) for at in corners]
        index, info = next((i, s) for i, s in metadata.storage_data.items() if i.fqn == "weight")
        del metadata.storage_data[index]
        metadata.storage_data |= {type(index)("weight", at, at[0]): info for at in corners}

    return changed_metadata(change)


def _record_text(change: Callable[[str], str]) -> Build:
    def edit(step: Path) -> None:
        path = step / "checkpoint.json"
        path.write_text(change(path.read_text()))

    return changed_steps(edit)


def _objects(value: Any) -> Build:
    def edit(step: Path) -> None:
        edit_json(step / "objects.json", lambda body: body["objects"].update(value))
        reseal(step)

    return changed_steps(edit)


def _manifest(name: str, row: int, value: int) -> Build:
    """One number of the manifest is false; record and digests match."""

    def edit(step: Path) -> None:
        path = step / "manifest.safetensors"
        columns = unpack(path.read_bytes(), file="x")
        arrays = {key: np.array(column) for key, column in columns.arrays.items()}
        arrays[name][row] = value
        path.write_bytes(pack(arrays, columns.header))
        reseal(step)

    return changed_steps(edit)


def _zstd(place: Place) -> None:
    """A shard whose zstd frame has a window of gigabytes and expands a thousandfold."""
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    bomb = zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(64 << 20))
    for path in place.src.rglob("*.distcp"):
        size = path.stat().st_size
        path.write_bytes((bomb * (size // len(bomb) + 1))[:size])


def _sizes_of_record(step: Path) -> None:
    """A sparse file of a terabyte, and a record that matches it."""
    with (step / "objects.json").open("r+b") as file:
        file.truncate(1 << 40)

    def change(body: dict[str, Any]) -> None:
        body["total_bytes"] += (1 << 40) - body["files"]["objects.json"]["nbytes"]
        body["files"]["objects.json"]["nbytes"] = 1 << 40

    edit_record(step, change)


BOMBS: dict[str, Build] = {
    "expanded_many": _bin(lambda: saved({f"w{i}": one.expand(2**20, 4) for one in [torch.zeros(4)] for i in range(64)})),
    "dcp_shape": _shape(2**40),
    "dcp_shape_product": _shape(2**31, 2**31, 2**31),
    "dcp_half": changed_metadata(lambda m: setattr(m.state_dict_metadata["weight"], "size", torch.Size((8, 4)))),
    "dcp_negative_offset": _info(offset=-1),
    "dcp_huge_offset": _info(offset=2**62),
    "dcp_overflowing_length": _info(length=2**63 - 1),
    "dcp_huge_integer": _info(length=2**400),
    "dcp_zero_length": _info(length=0),
    "dcp_overlapping": _chunks(2000, rows=4),
    "dcp_same_place": _chunks(2000, rows=1),
    "dcp_quadratic": _staircase(4000),
    "zstd_window": changed("zstd", _zstd),
    "header_dtype": written(
        "model.safetensors", header({"w": {"dtype": "F" * 100_000, "shape": [1], "data_offsets": [0, 4]}}) + bytes(4)
    ),
    "record_deep": _record_text(lambda text: "[" * 200_000),
    "record_duplicate": _record_text(lambda text: text.replace('"step"', '"step": 1, "step"', 1)),
    "record_binary": _record_text(lambda text: "\0" * 4096),
    "record_digits": _record_text(lambda text: text.replace('"step": ', '"step": ' + "9" * 5000, 1)),
    "record_terabyte": changed_steps(_sizes_of_record),
    "manifest_start": _manifest("slice.start", 0, 2**62),
    "manifest_negative": _manifest("slice.start", 0, -1),
    "manifest_nbytes": _manifest("slice.nbytes", 0, 2**62),
    "manifest_size": _manifest("slice.size", 0, 2**40),
    "manifest_offset": _manifest("slice.offset", 0, 2**62),
    "manifest_shape": _manifest("tensor.shape", 0, 2**40),
    "manifest_stop": _manifest("tensor.stop", -1, 2**40),
    "manifest_file": _manifest("slice.file", 0, 10**6),
    "manifest_names": _manifest("names.ends", 0, 2**40),
    "legacy_storage": written("pytorch_model.bin", pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
                           + pickle.dumps({}, 2) + pickle.dumps({"w": 1}, 2) + pickle.dumps(["0"], 2)
                           + (2**62).to_bytes(8, "little")),
}  # fmt: skip
# Allowed: unusual, and slow in a careless implementation.
_EMPTY = '"k%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
HEAVY: dict[str, Build] = {
    "many_keys": written("model.safetensors", header("{" + ",".join(_EMPTY % i for i in range(10_000)) + "}")),
    "many_members": _bin(_many_members),
    "many_steps": changed("own", lambda place: [(place.src / f"step_{i + 100:08d}").mkdir() for i in range(300)]),
    "objects_deep": _objects({"step": json.loads("[" * 300 + "]" * 300)}),
    "objects_wrong": _objects({"step": {"$torch_save": "AAAA"}, "optimizer": 7, "scheduler": [], "rng.0": "x"}),
    "objects_kinds": _objects({"step": {"$nothing": [1, 2]}, "optimizer": {"param_groups": [{"params": ["../x"]}]}}),
}
