"""Checkpoints that are small on disk and ask for excessive memory or time."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zstandard

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


def _objects(value: Any) -> Build:
    def edit(step: Path) -> None:
        edit_json(step / "objects.json", lambda body: body["objects"].update(value))
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
    "dcp_half": changed_metadata(lambda m: setattr(m.state_dict_metadata["weight"], "size", torch.Size((8, 4)))),
    **{f"dcp_length {n:.3g}": changed_metadata(
        lambda m, n=n: [setattr(info, "length", n) for info in m.storage_data.values()]) for n in (0, 2**400)},
    "zstd_window": changed("zstd", _zstd),
    "header_dtype": written(
        "model.safetensors", header({"w": {"dtype": "F" * 100_000, "shape": [1], "data_offsets": [0, 4]}}) + bytes(4)
    ),
    "record_deep": changed_steps(lambda step: (step / "checkpoint.json").write_text("[" * 200_000)),
    "record_terabyte": changed_steps(_sizes_of_record),
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
