"""Checkpoints whose names and links point outside, or to something other than a file."""

import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.formats.damages import rezipped
from tests.hostile import sources
from tests.hostile.harness import Place
from tests.hostile.records import edit_json, edit_record, reseal
from tests.hostile.sources import Build, changed, changed_steps, header, safetensors, saved, sparse

NAMES = (
    "../../escape", "/tmp/escape", "a/../../b", "a\\..\\b", "C:\\x", "\\\\host\\share", "nul", "con.weight", "a\0b",
    "weight\u2215..\u2215x", "\uff0e\uff0e/x", "we\u0131ght", "w\u202eeight", "\x1b[31mred\x1b[0m", "a\nError: b", ".", "..", "~/x",
    "%2e%2e/x", "$(touch x)", "a" * 3000, "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
    "<script>alert(1)</script>",
)  # fmt: skip
POINTERS = (
    "../outside", "/etc", "{outside}", "..", ".", "", "\0", "a\\..\\b", "\uff0e\uff0e/outside", "~", "nul", "-1",
    "99999999999999999999", "step_00000009/../../outside", "file:///etc", "x" * 2000, "./../outside", "\n\n", "\x1b[2J",
)  # fmt: skip


def _relative_path(name: str) -> Build:
    def change(place: Place) -> None:
        (place.outside / "x.distcp").write_bytes((place.src / "__0_0.distcp").read_bytes())

        def rename(metadata: Any) -> None:
            for info in metadata.storage_data.values():
                info.relative_path = name.format(outside=place.outside)

        sources.edit_metadata(place.src, rename)

    return changed("dcp", change)


def _weight_map(value: Any) -> Build:
    def change(place: Place) -> None:
        (place.outside / "x.safetensors").write_bytes(safetensors({"weight": [4, 4]}))
        target = value.format(outside=place.outside) if isinstance(value, str) else value
        sources.write_index(place.src, {"weight": target})

    return changed("hf_sharded", change)


def _bin_weight_map(place: Place) -> None:
    sources.binary(place.outside)
    sources.write_index(place.src, {"weight": "../outside/pytorch_model.bin"}, "pytorch_model.bin.index.json")
    torch.save({"bias": torch.zeros(4)}, place.src / "model-00002-of-00002.safetensors")


def _link(control: str, name: str, target: str = "{outside}") -> Build:
    """A file of the checkpoint is a symbolic link, by default to a copy of it outside."""

    def change(place: Place) -> None:
        path = sorted(place.src.rglob(name))[0]
        path.rename(place.outside / path.name)
        path.symlink_to(target.format(outside=place.outside / path.name))

    return changed(control, change)


def _linked_blobs(place: Place) -> None:
    """Laid out like a snapshot of the hub cache; its blobs are a link to files of the host."""
    folder = place.src / "snapshots" / "1"
    folder.mkdir(parents=True)
    sources.hf(folder)
    (place.src / "blobs").symlink_to(place.outside)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("../../blobs/secret.txt")


def _special(control: str, name: str, make: Callable[[Path], None]) -> Build:
    """Something else is at the place of a file, of the newest step."""

    def change(place: Place) -> None:
        path = max(place.src.rglob(name), default=place.src / name)
        path.unlink(missing_ok=True)
        make(path)

    return changed(control, change)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # socket paths are limited in length
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
    except PermissionError:  # not root: use a link to it instead
        path.symlink_to("/dev/zero")


def _names(place: Place) -> None:
    entries = {n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(NAMES)}
    (place.src / "model.safetensors").write_bytes(header(entries) + bytes(4 * len(NAMES)))


def _members(place: Place) -> None:
    """A zip archive whose member names point outside; members are read by offset and never unpacked."""
    raw = rezipped(saved(sources.weights()), lambda name, data: [("../../" + name, data)])
    (place.src / "pytorch_model.bin").write_bytes(raw)


def _hostile_files(place: Place) -> None:
    for name in ("tokenizer\x1b[31m.json", "tokenizer\n.json", "tokenizer\\..\\x.json", "-rf", "tokenizer<b>.json"):
        (place.src / name).write_text("{}")


def _record(change: Callable[[dict[str, Any]], Any]) -> Build:
    return changed_steps(lambda step: edit_record(step, change))


def _file_of_record(name: str) -> Build:
    def change(place: Place) -> None:
        def add(body: dict[str, Any]) -> None:
            body["files"][name.format(outside=place.outside)] = {"nbytes": 18, "xxh3_64": "0" * 16}
            body["total_bytes"] += 18

        for step in place.src.glob("step_*"):
            edit_record(step, add)

    return changed("own", change)


def _object_path(step: Path) -> None:
    path = step / "manifest.safetensors"
    data = path.read_bytes()
    assert b"__0_0.distcp" in data
    path.write_bytes(data.replace(b"__0_0.distcp", b"../outside/x"))
    reseal(step)


def _reference(step: Path) -> None:
    edit_json(step / "objects.json", lambda body: body["objects"].update({"step": {"$ref": "../../etc/passwd"}}))
    reseal(step)


ESCAPES: dict[str, Build] = {
    **{f"relative_path {name!r:.30}": _relative_path(name) for name in (
        "../outside/x.distcp", "{outside}/x.distcp", "a/../../outside/x.distcp", "__0_0.distcp\0x", "..\\outside\\x.distcp",
        "", ".", "file://{outside}/x.distcp", "s3://bucket/x", "~/x", "\uff0e\uff0e/outside/x.distcp",
    )},
    **{f"weight_map {value!r:.30}": _weight_map(value) for value in (
        "../outside/x.safetensors", "{outside}/x.safetensors", "a/../x.safetensors", "x\0.safetensors", "..\\x.safetensors",
        "", "\uff0e\uff0e/outside/x.safetensors", "https://example.org/x.safetensors", ["x"], None, 7, {"a": 1},
        "tokenizer.json", "model.safetensors.index.json",
    )},
    "bin_weight_map": _bin_weight_map,
    "linked_shard": _link("dcp", "__0_0.distcp"),
    "linked_metadata": _link("dcp", ".metadata"),
    "linked_safetensors": _link("hf", "model.safetensors"),
    "linked_bin": _link("binary", "pytorch_model.bin"),
    "linked_config": _link("hf", "config.json"),
    "linked_tokenizer": _link("hf", "tokenizer.json"),
    "linked_to_passwd": _link("hf", "tokenizer.json", "/etc/passwd"),
    "linked_rank_file": _link("verl", "model_world_size_2_rank_0.pt"),
    "linked_blobs": _linked_blobs,
    "linked_folder": lambda place: (
        sources.own(place.outside), (place.src / "step_00000002").symlink_to(place.outside / "step_00000002")),
    "linked_to_zero": _link("hf", "model.safetensors", "/dev/zero"),
    "loop": _special("hf", "model.safetensors", lambda path: path.symlink_to(path.name)),
    "fifo_metadata": _special("dcp", ".metadata", os.mkfifo),
    "fifo_shard": _special("dcp", "__0_0.distcp", os.mkfifo),
    "fifo_safetensors": _special("hf", "model.safetensors", os.mkfifo),
    "fifo_index": _special("hf_sharded", "model.safetensors.index.json", os.mkfifo),
    "fifo_bin": _special("binary", "pytorch_model.bin", os.mkfifo),
    "fifo_record": _special("own", "checkpoint.json", os.mkfifo),
    "device_safetensors": _special("hf", "model.safetensors", _device),
    "device_metadata": _special("dcp", ".metadata", _device),
    "socket_shard": _special("dcp", "__0_0.distcp", _socket),
    "directory_shard": _special("hf", "model.safetensors", Path.mkdir),
    "sparse_metadata": _special("dcp", ".metadata", sparse),
    "sparse_safetensors": _special("hf", "model.safetensors", sparse),
    "sparse_index": _special("hf_sharded", "model.safetensors.index.json", sparse),
    "sparse_bin": _special("binary", "pytorch_model.bin", sparse),
    "sparse_record": _special("own", "checkpoint.json", sparse),
    "sparse_manifest": _special("own", "manifest.safetensors", sparse),
    "sparse_objects": _special("own", "objects.json", sparse),
    "record_parent": _file_of_record("../../outside/secret.txt"),
    "record_absolute": _file_of_record("{outside}/secret.txt"),
    "record_missing": _file_of_record("not-there.bin"),
    "record_control": _file_of_record("a\x1b[2Jb"),
    "record_data": _record(lambda body: body.update(data="../outside")),
    "record_tag": _record(lambda body: body.update(tag="../../outside")),
    "record_other_directory": _record(lambda body: body.update(tag="other")),
    "record_step": _record(lambda body: body.update(step=-1)),
    "record_huge_step": _record(lambda body: body.update(step=10**30)),
    "record_save_id": _record(lambda body: body.update(save_id="../../../outside")),
    "record_sizes": _record(lambda body: body["files"][".metadata"].update(nbytes=2**61)),
    "record_negative": _record(lambda body: body["files"][".metadata"].update(nbytes=-1)),
    "record_manifest": _record(lambda body: body.update(manifest="../x")),
    "manifest_path": changed_steps(_object_path),
    "object_reference": changed_steps(_reference),
}  # fmt: skip


def _pointer(name: str, content: str) -> Build:
    def build(place: Place) -> None:
        for folder in (place.src / "model_a", place.outside):
            folder.mkdir(exist_ok=True)
            sources.dcp(folder)
        (place.src / name).write_bytes(_pointing(place, content))

    return build


def _pointer_of_run(content: str) -> Build:
    return changed("own", lambda place: (place.src / "latest").write_bytes(_pointing(place, content)))


def _pointing(place: Place, content: str) -> bytes:
    return content.format(outside=place.outside).encode("utf-8", "replace")


def _beside(name: str, text: str) -> Build:
    """A good export with an unusual file next to it that nobody needs."""
    return changed("hf", lambda place: (place.src / name).write_text(text))


LIES = {
    "architectures": 7, "model_type": ["x"], "tie_word_embeddings": "yes", "vocab_size": -1, "dtype": {}, "hidden_size": 1e308,
    "num_hidden_layers": 2**70,
}  # fmt: skip
# Unusual, but nothing must be refused: the checkpoint itself is good.
ALLOWED: dict[str, Build] = {
    "names": _names,
    "names_in_dcp": lambda place: sources.dcp(place.src, {name: torch.zeros(2) for name in NAMES}),
    "names_in_bin": lambda place: torch.save({name: torch.zeros(2) for name in NAMES}, place.src / "pytorch_model.bin"),
    "members": _members,
    "hostile_files": changed("hf", _hostile_files),
    **{f"latest {content!r:.30}": _pointer_of_run(content) for content in POINTERS},
    **{f"pointer {content!r:.30}": _pointer("latest", content) for content in POINTERS[:6]},
    "iteration": _pointer("latest_checkpointed_iteration.txt", "../outside"),
    "latest_fifo": _special("own", "latest", os.mkfifo),
    "latest_link": _special("own", "latest", lambda path: path.symlink_to("../outside")),
    "latest_directory": _special("own", "latest", Path.mkdir),
    "latest_sparse": _special("own", "latest", sparse),
    "fifo_tokenizer": _special("hf", "tokenizer.json", os.mkfifo),
    "fifo_config": _special("hf", "config.json", os.mkfifo),
    "device_beside": _special("hf", "tokenizer.model", _device),
    "sparse_tokenizer": _special("hf", "tokenizer.json", sparse),
    "sparse_config": _special("hf", "config.json", sparse),
    "sparse_record_beside": _special("hf", "checkpoint.json", sparse),
    "loop_beside": _special("hf", "tokenizer.model", lambda path: path.symlink_to(path.name)),
    "record_beside": _beside("checkpoint.json", "{}"),
    "config_null": _beside("config.json", "null"),
    "config_deep": _beside("config.json", "[" * 10**6),
    "config_lies": _beside("config.json", json.dumps(LIES)),
}  # fmt: skip
