"""Checkpoints whose names and links point outside, or to something other than a file."""

import json
import os
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


FILES = {  # and the checkpoint in which it is
    ".metadata": "dcp", "__0_0.distcp": "dcp", "model.safetensors": "hf", "model.safetensors.index.json": "hf_sharded",
    "pytorch_model.bin": "binary", "checkpoint.json": "own", "manifest.safetensors": "own", "objects.json": "own",
}  # fmt: skip
SPECIAL: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "loop": (lambda path: path.symlink_to(path.name), ["model.safetensors"]),
    "fifo": (os.mkfifo, list(FILES)[:6]),
    "device": (_device, [".metadata", "model.safetensors"]),
    "directory": (Path.mkdir, ["model.safetensors"]),
    "sparse": (sparse, [file for file in FILES if file != "__0_0.distcp"]),
}
ESCAPES: dict[str, Build] = {
    **{f"relative_path {name!r:.30}": _relative_path(name) for name in (
        "../outside/x.distcp", "{outside}/x.distcp", "a/../../outside/x.distcp", "__0_0.distcp\0x", "..\\outside\\x.distcp",
        "", ".", "file://{outside}/x.distcp", "s3://bucket/x", "~/x", "\uff0e\uff0e/outside/x.distcp",
    )},
    **{f"weight_map {value!r:.30}": _weight_map(value) for value in (
        "../outside/x.safetensors", "{outside}/x.safetensors", "a/../x.safetensors", "x\0.safetensors", "..\\x.safetensors",
        "", "\uff0e\uff0e/outside/x.safetensors", "https://example.org/x.safetensors", ["x"], None, 7, {"a": 1},
        "tokenizer.json", "model.safetensors.index.json", "x.safetensors.", "x.safetensors ", "x.safetensors:evil",
        "mod\u0435l-00001-of-00002.safetensors", ".", "%2e%2e%2foutside%2fsecret.txt",
    )},
    "bin_weight_map": _bin_weight_map,
    **{f"linked {file}": _link(FILES[file], file) for file in (".metadata", "__0_0.distcp", "model.safetensors", "pytorch_model.bin")},
    "linked_config": _link("hf", "config.json"),
    "linked_tokenizer": _link("hf", "tokenizer.json"),
    "linked_to_passwd": _link("hf", "tokenizer.json", "/etc/passwd"),
    "linked_rank_file": _link("verl", "model_world_size_2_rank_0.pt"),
    "linked_blobs": _linked_blobs,
    "linked_folder": lambda place: (
        sources.own(place.outside), (place.src / "step_00000002").symlink_to(place.outside / "step_00000002")),
    "linked_to_zero": _link("hf", "model.safetensors", "/dev/zero"),
    **{f"{kind} {file}": _special(FILES[file], file, make) for kind, (make, files) in SPECIAL.items() for file in files},
    "record_missing": _file_of_record("not-there.bin"),
    **{f"record with {name!r}": _file_of_record(name) for name in ("../../outside/secret.txt", "a\x1b[2Jb")},
    **{f"record nbytes={n}": changed_steps(lambda step, n=n: edit_record(
        step, lambda body: body["files"][".metadata"].update(nbytes=n))) for n in (2**61, -1)},
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
    "latest_link": _special("own", "latest", lambda path: path.symlink_to("../outside")),
    **{f"latest_{kind}": _special("own", "latest", SPECIAL[kind][0]) for kind in ("fifo", "directory", "sparse")},
    **{f"{kind} beside, {file}": _special("hf", file, SPECIAL[kind][0]) for kind, file in (
        ("fifo", "tokenizer.json"), ("fifo", "config.json"), ("device", "tokenizer.model"), ("loop", "tokenizer.model"),
        ("sparse", "tokenizer.json"), ("sparse", "config.json"), ("sparse", "checkpoint.json"),
    )},
    **{f"{name} beside: {text:.9}": _beside(name, text) for name, text in (
        ("checkpoint.json", "{}"), ("config.json", "null"), ("config.json", "[" * 10**6), ("config.json", json.dumps(LIES)),
    )},
}  # fmt: skip
