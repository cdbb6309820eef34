"""Reads the base model of an export: config, tokenizer and other small files, and tensor names, shapes and dtypes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.catalog.dtypes import from_safetensors
from ckptkit.catalog.entry import Catalog
from ckptkit.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafePathError, UnsupportedFormatError
from ckptkit.formats.hf import safetensors
from ckptkit.formats.hf.side_files import find_side_files, is_side_file
from ckptkit.formats.models import side_file_names
from ckptkit.formats.own.record import find_record
from ckptkit.storage.local import is_directory
from ckptkit.storage.open import open_store
from ckptkit.storage.store import Store, split_url
from ckptkit.units import format_size

_MAX_BYTES = 256 << 20  # maximum size of all side files together
# Files that are never copied: weights in any format, and files that run code when they are loaded.
_WEIGHTS = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|gguf|ggml|onnx|h5|msgpack|pkl|pickle|npz|distcp|metadata)$|\.index\.json$", re.I
)
_REPO = re.compile(r"[\w.-]+(?:/[\w.-]+)?(?:@[\w./-]+)?")
_REPO_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "LICENCE*", "NOTICE*", "*.py")
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """A tensor of the base model. `dtype` and `shape` are None if only `model.safetensors.index.json` could be read."""

    dtype: str | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model of an export, without the weights.

    Attributes:
        where: The path or repo, for messages.
        config: Contents of config.json. None if the file does not exist.
        files: Contents of the small files except config.json, by their names in the export.
        wanted: The names, shapes and dtypes of the base model's tensors. {} if there are no weights.
        adapter_config: Contents of adapter_config.json or peft_config.json. None if neither file exists.
        repo: The repo id, if --base is a repo.
        notes: Notes for the user on omitted files.
        folders: Files of one of several models or adapters, by names such as "actor/config.json".
    """

    where: str
    config: Mapping[str, Any] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    wanted: Mapping[str, WantedTensor] = field(default_factory=dict)
    adapter_config: Mapping[str, Any] | None = None
    repo: str | None = None
    notes: tuple[str, ...] = ()
    folders: Mapping[str, bytes] = field(default_factory=dict)

    def over(self, other: BaseModel) -> BaseModel:
        """Return this base, completed with files from `other`.

        If this base lacks a config, the config and all missing files come from `other`. If it has a config but no
        other files, such as a tokenizer, those of `other` are used.
        """
        return BaseModel(
            self.where if self.config is not None or self.wanted or not other.config else other.where,
            self.config if self.config is not None else other.config,
            {**other.files, **self.files} if self.config is None else (self.files or other.files),
            self.wanted or other.wanted,
            self.adapter_config if self.adapter_config is not None else other.adapter_config,
            self.repo,
            (*self.notes, *other.notes),
            {**other.folders, **self.folders},
        )

    def config_of_adapter(self, name: str) -> Mapping[str, Any] | None:
        """Return the config of one of several adapters, or None if it has none.

        An adapter without a folder of its own has `adapter_config`.
        """
        path = f"{name}/adapter_config.json"
        return _json_object(self.folders[path], path) if path in self.folders else self.adapter_config

    def contents(self) -> dict[str, bytes]:
        """Return the contents of the small files by name, including config.json and adapter_config.json."""
        configs = {"config.json": self.config, "adapter_config.json": self.adapter_config}
        written = {n: f"{json.dumps(dict(c), indent=2)}\n".encode() for n, c in configs.items() if c is not None}
        return {**self.files, **self.folders, **written}


def open_base(base: str, *, storage_options: Mapping[str, Any] | None = None) -> BaseModel:
    """Read `--base`: a directory, a directory's URL, or a Hugging Face Hub repo, "org/name[@revision]".

    An existing directory takes precedence. Reads small files and safetensors headers, but no tensors.

    Raises:
        CheckpointNotFoundError: `base` is neither a directory nor a repo, or the Hub is unreachable and the repo is not
            cached.
        CorruptCheckpointError: config.json is not a JSON object.
    """
    protocol, path = split_url(base)
    if protocol == "file" and not os.path.isdir(path):
        if "://" in base or base.startswith((".", "/", "~")) or not _REPO.fullmatch(base):
            raise CheckpointNotFoundError(f"--base {base!r} is not a directory.")
        return _from_hub(base)
    return _read_directory(open_store(base, storage_options=storage_options), base)


def beside_source(store: Store, catalog: Catalog, prefix: str | None = None) -> BaseModel:
    """Return the contents of the checkpoint's own side files.

    Args:
        prefix: The prefix of the names of the chosen tensors. If it is the name of one of several models, this model's
            files take precedence, and the files of other models are left out.
    """
    notes: list[str] = []
    contents: dict[str, bytes] = {}
    names, in_folders = side_file_names(store, catalog)
    model = f"{(prefix or '').partition('.')[0]}/"
    if chosen := {path: name.removeprefix(model) for path, name in in_folders.items() if name.startswith(model)}:
        names = {path: name for path, name in chosen.items() if is_side_file(name)} | names
        in_folders = {path: name for path, name in chosen.items() if not is_side_file(name)}
    for path, data in read_side_files(store, names, notes).items():
        contents.setdefault(names[path], data)
    folders = {in_folders[path]: data for path, data in read_side_files(store, in_folders, notes).items()}
    config = _json_object(contents.pop("config.json", None), "config.json")
    adapter = next(
        (_json_object(contents.pop(n), n) for n in ("adapter_config.json", "peft_config.json") if n in contents), None
    )
    if adapter is None and any(".lora_" in name for name in catalog.tensors):
        adapter = _adapter_config(store, notes)
    return BaseModel("its own config", config, contents, {}, adapter, None, tuple(notes), folders)


def export_config(
    config: Mapping[str, Any], *, dtype: str | None, untied: bool, quantized: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return `config` corrected to describe the exported weights, and notes about the corrections.

    Args:
        dtype: The dtype of most float weights. None if there are no float weights.
        untied: Whether the output head and the embedding differ.
        quantized: Whether the export contains quantized weights or their scales.
    """
    made = dict(config)
    notes: list[str] = []
    if dtype is not None:
        _set_dtype(made, dtype, notes)
    if untied and made.get("tie_word_embeddings") is not False:
        made["tie_word_embeddings"] = False
        text = made.get("text_config")
        if isinstance(text, Mapping) and text.get("tie_word_embeddings"):
            made["text_config"] = {**text, "tie_word_embeddings": False}
        notes.append("config.json: tie_word_embeddings is now false")
    names = made.get("architectures")
    if isinstance(names, list) and any(isinstance(name, str) and name.startswith("FSDP") for name in names):
        # fully_shard prepends "FSDP" to the class name of the module that it wraps.
        made["architectures"] = [n.removeprefix("FSDP") if isinstance(n, str) else n for n in names]
        notes.append("config.json: the FSDP prefix of the architecture was removed")
    if "quantization_config" in made and not quantized:
        del made["quantization_config"]
        notes.append("config.json: quantization_config was removed, because the weights are not quantized")
    return made, tuple(notes)


def _set_dtype(config: dict[str, Any], dtype: str, notes: list[str]) -> None:
    keys = [key for key in _DTYPE_KEYS if key in config] or ["dtype"]
    for key in keys:
        if config.get(key) != dtype:
            if config.get(key) is not None:
                notes.append(f"config.json: {key} {config[key]} is now {dtype}, the dtype of the weights")
            config[key] = dtype
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, Mapping):
            inner = {k: dtype for k in _DTYPE_KEYS if value.get(k) is not None}
            if inner:
                config[key] = {**value, **inner}


def _read_directory(store: Store, where: str, repo: str | None = None) -> BaseModel:
    side = find_side_files(store)
    notes: list[str] = list(side.notes)
    files = read_side_files(store, side.carried, notes)
    config = _json_object(files.pop("config.json", None), f"{where}/config.json")
    if config is not None and config.get("auto_map"):
        files.update(read_side_files(store, side.code, notes))
        notes.append(
            "the author's Python files are copied, because config.json names them in auto_map; they were not run"
        )
    adapters = read_side_files(store, ("adapter_config.json", "peft_config.json"), notes)
    adapter = next((_json_object(data, f"{where}/{name}") for name, data in adapters.items()), None)
    files.pop("adapter_config.json", None)
    return BaseModel(where, config, files, _wanted(store, notes), adapter, repo, tuple(notes))


def _wanted(store: Store, notes: list[str]) -> dict[str, WantedTensor]:
    """Return the base's tensors: names, shapes and dtypes from headers, or only names from the index file."""
    record = find_record(store)
    if record is not None and record.state_dict_type != "full":
        return {}  # its manifest is a safetensors file, but its model is not
    try:
        catalog = safetensors.open_catalog(store)
    except (CheckpointNotFoundError, UnsupportedFormatError):
        return {}
    except CorruptCheckpointError as error:
        index = _index_names(store)
        if not index:
            notes.append(f"the base model's weights could not be read, so names are not checked: {error}")
        return {name: WantedTensor() for name in index}
    if all(name == "adapter_model.safetensors" for name in catalog.info.files):
        return {}
    return {name: WantedTensor(entry.dtype, entry.shape) for name, entry in catalog.tensors.items()}


def _index_names(store: Store) -> list[str]:
    data = _read_regular(store, "model.safetensors.index.json", [])
    index = _json_object(data, "model.safetensors.index.json") if data is not None else None
    found = index.get("weight_map") if index else None
    return [name for name in found if isinstance(name, str)] if isinstance(found, Mapping) else []


def _from_hub(base: str) -> BaseModel:
    from huggingface_hub import get_safetensors_metadata, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError, SafetensorsParsingError

    # huggingface_hub's HTTP error is a subclass of an error of its HTTP library (requests or httpx). Connection errors
    # of that library are not OSErrors.
    unreachable: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, *HfHubHTTPError.__bases__)
    repo, _, revision = base.partition("@")
    try:
        folder = snapshot_download(repo, revision=revision or None, allow_patterns=list(_REPO_FILES))
    except unreachable as error:
        raise CheckpointNotFoundError(
            f"--base {base!r} is not a local directory, and cannot be read as a Hub repo: {_first_line(error)}"
        ) from error
    found = _read_directory(open_store(folder), base, repo)
    if found.wanted and all(tensor.shape is not None for tensor in found.wanted.values()):
        return found
    try:
        metadata = get_safetensors_metadata(repo, revision=revision or None)
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        note = f"the tensor names of {repo} could not be read: {_first_line(error)}"
    except unreachable:
        note = f"shapes of {repo} could not be read from the hub; only names are checked" if found.wanted else ""
    else:
        wanted = {
            name: WantedTensor(dtype.name, dtype.in_bytes(info.shape))
            for file in metadata.files_metadata.values()
            for name, info in file.tensors.items()
            for dtype in [from_safetensors(str(info.dtype))]
        }
        return BaseModel(base, found.config, found.files, wanted, found.adapter_config, repo, found.notes)
    notes = (*found.notes, note) if note else found.notes
    return BaseModel(base, found.config, found.files, found.wanted, found.adapter_config, repo, notes)


def read_side_files(store: Store, paths: Iterable[str], notes: list[str]) -> dict[str, bytes]:
    """Return the contents of the files `paths`, by path.

    Files that an export must not copy, such as weights, are left out, each with a note.
    """
    found: dict[str, bytes] = {}
    left = _MAX_BYTES
    for path in dict.fromkeys(paths):
        if _WEIGHTS.search(path):
            notes.append(f"{path} was not copied: it looks like weights")
            continue
        data = _read_regular(store, path, notes, left)
        if data is not None:
            found[path] = data
            left -= len(data)
    return found


def _read_regular(store: Store, path: str, notes: list[str], limit: int = _MAX_BYTES) -> bytes | None:
    info = store.info(path)
    if info is None:
        return None
    if info.kind not in ("file", "symlink"):
        notes.append(f"{path} was not copied: it is a {info.kind}")
        return None
    try:
        data = store.read(path, 0, limit + 1) if info.size <= limit else None
    except UnsafePathError:  # the link leads out of the store, or to something other than a file
        notes.append(f"{path} was not copied: it is a symlink")
        return None
    if data is None or len(data) > limit:
        notes.append(f"{path} was not copied: more than {format_size(_MAX_BYTES)} is too large for side files")
        return None
    return data


def _adapter_config(store: Store, notes: list[str]) -> dict[str, Any] | None:
    """Return PEFT's config from the checkpoint, from verl's lora_adapter/ or from the parent directory.

    A directory without a config may have the values that verl recorded (rank, alpha, task). They are returned instead.
    Returns None if no directory has either.
    """
    places = [(store, ""), (store, "lora_adapter/")]
    if is_directory(store):
        places.append((open_store(os.path.dirname(store.url)), ""))
    listed = None
    if store.asking_costs:  # a listing makes fewer requests than a lookup of each name
        listed = {entry.path for entry in store.list()}
        if "lora_adapter" in listed:
            listed |= {entry.path for entry in store.list("lora_adapter")}
    for place, folder in places:
        for name in ("adapter_config.json", "peft_config.json", "lora_train_meta.json"):
            known = listed is None or folder + name in listed
            data = _read_regular(place, folder + name, []) if known else None
            if data is not None:
                notes.append(f"adapter config: {place.url.rstrip('/').rpartition('/')[2]}/{folder}{name}")
                return _json_object(data, folder + name)
    return None


def _json_object(data: bytes | None, where: str) -> dict[str, Any] | None:
    if data is None:
        return None
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{where} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{where} is not a JSON object.")
    return value


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].removeprefix("Got: ")[:300]  # by huggingface_hub
