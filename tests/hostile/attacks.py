"""Attacks, and the good checkpoints that they change, if tests.hostile.sources does not make them."""

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.formats.damages import rezipped
from tests.hostile import sources
from tests.hostile.harness import Place
from tests.hostile.records import edit_json
from tests.hostile.sources import Build, changed, deepspeed_classes, header, sparse, written

# --- handwritten pickles


def _text(value: str) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def _glob(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def _zip_of(
    pkl: bytes, members: Mapping[str, bytes] | None = None, *, storage: bytes = bytes(64), out: io.BytesIO | None = None
) -> bytes:
    """Return an archive in torch.save's layout with this pickle."""
    out = out or io.BytesIO()
    content = {"data.pkl": pkl, "byteorder": b"little", "data/0": storage, "version": b"3\n", **(members or {})}
    with zipfile.ZipFile(out, "w") as new:
        for name, data in content.items():
            new.writestr(f"archive/{name}", data)
    return out.getvalue()


_STORAGE = b"(" + _text("storage") + b"ctorch\nFloatStorage\n" + _text("0") + _text("cpu") + b"K\x10tQ"


def _tensor(
    size: bytes = b"K\x10\x85", stride: bytes = b"K\x01\x85", offset: bytes = b"K\x00", storage: bytes = _STORAGE
) -> bytes:
    """Return the pickle of a tensor of 16 floats by default."""
    hooks = b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + size + stride + b"\x89" + hooks + b"tR"


def _state(*, w: bytes | None = None, x: bytes = b"N") -> bytes:
    """Return the pickle of {"w": a tensor, "x": ...}."""
    return b"\x80\x02}(" + _text("w") + (w or _tensor()) + _text("x") + x + b"u."


def _bin(data: bytes) -> Build:
    return written("pytorch_model.bin", data)


def _w(hostile: bytes) -> Build:
    """An attack in the construction of the tensor."""
    return _bin(_zip_of(_state(w=hostile)))


_SELF = b"}\x94(" + _text("a") + b"h\x00u"
PICKLES: dict[str, Build] = {
    "persistent_path": _w(_tensor(storage=_STORAGE.replace(_text("0"), _text("../../../etc/passwd"), 1))),
    "persistent_module": _w(_tensor(storage=b"(" + _text("module") + _glob("os.mkdir") + _text("x") + _text("y") + b"tQ")),
    "persistent_type": _w(_tensor(storage=_STORAGE.replace(b"ctorch\nFloatStorage\n", _glob("os.mkdir")))),
    "persistent_numel": _w(_tensor(storage=_STORAGE.replace(b"K\x10tQ", b"\x8a\x08" + (2**62).to_bytes(8, "little") + b"tQ"))),
    "persistent_negative": _w(_tensor(storage=_STORAGE.replace(b"K\x10tQ", b"J\xff\xff\xff\xfftQ"))),
    "self_dict": _bin(_zip_of(_state(x=_SELF))),
    "size_negative": _w(_tensor(size=b"J\xff\xff\xff\xff\x85")),
    "size_huge": _w(_tensor(size=b"\x8a\x08" + (2**62).to_bytes(8, "little") + b"\x85")),
    "size_digits": _w(_tensor(size=b"\x8a\xff" + b"\x7f" * 255 + b"\x85")),
    "size_float": _w(_tensor(size=b"G?\xf0\x00\x00\x00\x00\x00\x00\x85")),
    "size_many": _w(_tensor(size=b"(" + b"K\x01" * 100_000 + b"t", stride=b"(" + b"K\x01" * 100_000 + b"t")),
    "stride_negative": _w(_tensor(stride=b"J\xff\xff\xff\xff\x85")),
    "stride_huge": _w(_tensor(stride=b"\x8a\x08" + (2**62).to_bytes(8, "little") + b"\x85")),
    "offset_negative": _w(_tensor(offset=b"J\xff\xff\xff\xff")),
    "offset_huge": _w(_tensor(offset=b"\x8a\x08" + (2**62).to_bytes(8, "little"))),
    "wrapper_class": _w(
        b"ctorch._tensor\n_rebuild_from_type_v2\n(" + _glob("torch._utils._rebuild_wrapper_subclass") + _glob("os.mkdir")
        + b"(" + _glob("os.mkdir") + _glob("torch.float32") + b"K\x10\x85K\x01\x85K\x00N" + _text("cpu") + b"\x89tNtR"
    ),
}  # fmt: skip


# --- zip archives


def _zip(change: Callable[[bytearray], bytes | None]) -> Build:
    """A good archive whose bytes are changed."""
    data = bytearray(_zip_of(_state()))
    return _bin(bytes(change(data) or data))


def _entry(data: bytes, name: str) -> int:
    """Return where the entry of a member begins in the zip directory."""
    return data.rfind(f"archive/{name}".encode()) - 46


def _local(data: bytes, name: str) -> int:
    return data.find(f"archive/{name}".encode()) - 30


def _set(data: bytearray, at: int, form: str, value: int) -> None:
    struct.pack_into(form, data, at, value)


class _Stream(io.BytesIO):
    """For a streamed zip, in which sizes and checksums follow the data."""

    def tell(self) -> int:
        raise io.UnsupportedOperation


STREAMED = _zip_of(_state(), out=_Stream())


def _with_descriptor_lies(name: str) -> bytes:
    data = bytearray(STREAMED)
    for at in (_entry(data, name) + 20, _entry(data, name) + 24):
        _set(data, at, "<I", 0xFFFFFFF0)
    return bytes(data)


def _renamed(rename: Callable[[str], str]) -> Build:
    return _bin(rezipped(_zip_of(_state()), lambda name, data: [(rename(name), data)]))


def _zip64(data: bytearray) -> bytes:
    """A zip directory with enormous sizes in zip64 fields."""
    at = _entry(data, "data/0")
    name = b"archive/data/0"
    extra = struct.pack("<HHQQ", 1, 16, 2**62, 2**62)
    _set(data, at + 20, "<I", 0xFFFFFFFF)
    _set(data, at + 24, "<I", 0xFFFFFFFF)
    _set(data, at + 30, "<H", len(extra))
    changed = bytes(data[: at + 46 + len(name)]) + extra + bytes(data[at + 46 + len(name) :])
    end = bytearray(changed)
    tail = end.rfind(b"PK\x05\x06")
    _set(end, tail + 12, "<I", struct.unpack_from("<I", end, tail + 12)[0] + len(extra))
    return bytes(end)


ZIPS: dict[str, Build] = {
    "zip_descriptor_lies": _bin(_with_descriptor_lies("data/0")),
    "zip_zip64_lies": _zip(_zip64),
    "zip_local_name": _zip(lambda d: d.__setitem__(slice(_local(d, "data.pkl") + 30, _local(d, "data.pkl") + 46), b"archive/evil.pkl")),
    "zip_local_extra": _zip(lambda d: _set(d, _local(d, "data/0") + 28, "<H", 60_000)),
    "zip_local_method": _zip(lambda d: _set(d, _local(d, "data.pkl") + 8, "<H", 8)),
    "zip_no_storage": _renamed(lambda n: n.replace("data/0", "data/1")),
    "zip_lookalike": _renamed(lambda n: n.replace("data.pkl", "d\u0430ta.pkl")),
    "zip_two_roots": _renamed(lambda n: n.replace("archive/data/0", "other/data/0")),
    "zip_two_pickles": _bin(_zip_of(_state(), {"../other/data.pkl": _state(x=b"K\x01")})),
    "zip_in_front": _bin(b"x" * 100 + _zip_of(_state())),
    "zip_behind": _bin(_zip_of(_state()) + b"x" * 70_000),
    "zip_torchscript": _bin(_zip_of(_state(), {"constants.pkl": b"\x80\x02.", "code/x.py": b"import os"})),
}  # fmt: skip


# --- safetensors and indexes


def _hf(content: bytes) -> Build:
    return changed("hf", written("model.safetensors", content))


def _one(**fields: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}}


def _index(change: Callable[[dict[str, Any]], Any]) -> Build:
    return changed("hf_sharded", lambda place: edit_json(place.src / "model.safetensors.index.json", change))


def _true_but_sparse(place: Place) -> None:
    """A terabyte of a tensor, by shape and by size, with no data on the disk."""
    entries = {"w": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}
    with (place.src / "model.safetensors").open("wb") as file:
        file.write(header(entries))
        file.truncate(len(header(entries)) + 2**40)


HF: dict[str, Build] = {
    "header_bom": _hf(header("\ufeff" + json.dumps(_one())) + bytes(8)),
    "header_half_character": _hf(header('{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}') + bytes(8)),
    "true_but_sparse": changed("hf", _true_but_sparse),
    "index_many": _index(lambda body: body["weight_map"].update({f"g{i}": "model-00001-of-00002.safetensors" for i in range(50_000)})),
    "index_metadata": _index(lambda body: body.update(metadata={"total_size": 2**70, "x": [[]]})),
}  # fmt: skip


# --- systems with one file per rank


def _copy(control: str, change: Callable[[Path], Any]) -> Build:
    return changed(control, lambda place: change(place.src))


def _renames(pattern: str, old: str, new: str) -> Callable[[Path], Any]:
    return lambda folder: [
        path.rename(path.with_name(path.name.replace(old, new))) for path in sorted(folder.rglob(pattern))
    ]


def _texts(pattern: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: min(folder.rglob(pattern)).write_text(text)


def _values(pattern: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = min(folder.rglob(pattern))
        with deepspeed_classes():
            value = torch.load(path, weights_only=False)  # written by the test
            change(value)
            torch.save(value, path)

    return damage


def _rank_metadata(name: str) -> Build:
    return changed("dcp", lambda place: (place.src / ".metadata").rename(place.src / name))


RANKS: dict[str, Build] = {
    "verl_config": _copy("verl", _texts("fsdp_config.json", '{"FSDP_version": 2, "world_size": 1000000000000}')),
    "deepspeed_count": _copy("deepspeed", _values("*optim_states.pt", lambda v: v["optimizer_state_dict"].update(partition_count=10**12))),
    "deepspeed_stage": _copy("deepspeed", _values("*optim_states.pt", lambda v: v["optimizer_state_dict"].update(zero_stage="9"))),
    "deepspeed_shared": _copy("deepspeed3", _values("*model_states.pt", lambda v: v.update(shared_params={"a": "a", "b": "c"}))),
    "deepspeed_tag": _copy("deepspeed", _texts("latest", "../../outside")),
    "rank_metadata_rank": _rank_metadata("__99999999999999999999.metadata"),
    "rank_shards_count": _copy("rank_shards", _renames("shard-*", "-of-", "-of-9")),
}  # fmt: skip


# --- files of a run next to its checkpoints


def _run(change: Callable[[Path, Place], Any]) -> Build:
    def build(place: Place) -> None:
        for name in ("pins", "deleting"):
            (place.src / ".ckptkit" / name).mkdir(parents=True, exist_ok=True)
        change(place.src, place)

    return changed("own", build)


def _many(folder: Path, count: int, text: str) -> None:
    for i in range(count):
        (folder / f"read-{i:016x}.json").write_text(text)


NONCE = "0123456789abcdef"
RUNS: dict[str, Build] = {
    "pin_fifo": _run(lambda run, _: os.mkfifo(run / ".ckptkit/pins/keep-step_00000001.json")),
    "pin_sparse": _run(lambda run, _: sparse(run / f".ckptkit/pins/read-{NONCE}.json")),
    "pin_link": _run(lambda run, place: (run / ".ckptkit/pins/keep-step_00000001.json").symlink_to(place.outside / "secret.txt")),
    "pin_names": _run(lambda run, _: (run / f".ckptkit/pins/read-{NONCE}.json").write_text('{"name": "../../outside", "why": "\\u001b[2J", "owner": null}')),
    "pin_many": _run(lambda run, _: _many(run / ".ckptkit/pins", 3000, '{"name": "step_00000001", "owner": {"host": "x", "pid": 1}}')),
    "pin_deep": _run(lambda run, _: (run / f".ckptkit/pins/read-{NONCE}.json").write_text("[" * 60_000)),
    "lease_fifo": _run(lambda run, _: os.mkfifo(run / ".ckptkit/lease-00000009.json")),
    "lease_sparse": _run(lambda run, _: sparse(run / ".ckptkit/lease-00000009.json")),
    "lease_generation": _run(lambda run, _: (run / ".ckptkit/lease-999999999999999999.json").write_text("{}")),
    "lease_link": _run(lambda run, place: (run / ".ckptkit/lease-00000009.json").symlink_to(place.outside / "secret.txt")),
    "lease_directory": _run(lambda run, _: (run / ".ckptkit/lease-00000009.json").mkdir()),
    "state_is_a_file": _run(lambda run, _: (shutil.rmtree(run / ".ckptkit"), (run / ".ckptkit").write_text("x"))),
    "deleting_fifo": _run(lambda run, _: os.mkfifo(run / ".ckptkit/deleting/step_00000002.json")),
    "owner_fifo": _run(lambda run, _: ((run / f".tmp-step_00000003-{NONCE}").mkdir(), os.mkfifo(run / f".tmp-step_00000003-{NONCE}.owner"))),
    "owner_sparse": _run(lambda run, _: ((run / f".tmp-step_00000003-{NONCE}").mkdir(), sparse(run / f".tmp-step_00000003-{NONCE}.owner"))),
    "step_file": _run(lambda run, _: (run / "step_00000009").write_text("x")),
    "step_fifo": _run(lambda run, _: os.mkfifo(run / "step_00000009")),
    "step_names": _run(lambda run, _: [(run / name).mkdir() for name in ("step_00000003 ", "step_\u0660\u0661", "STEP_00000004", "step_-1", "step_1e5", "step_" + "9" * 200)]),
}  # fmt: skip

ATTACKS: dict[str, Build] = {**PICKLES, **ZIPS, **HF, **RANKS, **RUNS}
# Accepted by a conversion, because nobody reads the wrong part.
HARMLESS = {
    "self_dict", "zip_torchscript", "index_metadata", "deepspeed_stage", "deepspeed_shared", "deepspeed_tag",
    "rank_metadata_rank", "rank_shards_count", *RUNS,
}  # fmt: skip
CONTROLS: dict[str, Build] = {
    **{name: changed(name, lambda place: None) for name in sources.CONTROLS},
    "zip": _bin(_zip_of(_state())),
    "streamed zip": _bin(STREAMED),
    "rank_metadata": _rank_metadata("__0.metadata"),
}
