"""The files beside a model's weights that transformers needs to load them."""

from __future__ import annotations

import copy
from typing import Any

from ckptkit.checkpoint.state import TrainState
from ckptkit.errors import UsageError
from ckptkit.formats.side_files import find_side_files
from ckptkit.storage.store import open_store

__all__ = ["read_side_files", "side_files"]


def read_side_files(url: str) -> dict[str, bytes]:
    """Return the config, tokenizer, chat template and licence files at `url`, by name.

    Raises:
        UsageError: There is none.
    """
    store = open_store(url)
    found = find_side_files(store).carried
    if not found:
        raise UsageError(
            f"side_files={url!r} holds no config.json, tokenizer or other file that an export carries along."
        )
    return {path: store.read(path) for path in found}


def side_files(state: TrainState) -> dict[str, bytes]:
    """Return `config.json` and `generation_config.json` of each model that has them, by path. transformers is not
    imported: a model that has them brings it."""
    files: dict[str, bytes] = {}
    for name, module in state.parts("model").items():
        folder = f"{name}/" if name else ""
        config: Any = getattr(module, "config", None)
        if not callable(getattr(config, "to_json_string", None)):
            continue
        files[f"{folder}config.json"] = _config(module, config)
        generation: Any = getattr(module, "generation_config", None)
        if callable(getattr(generation, "to_json_string", None)):
            files[f"{folder}generation_config.json"] = generation.to_json_string().encode()
    return files


def _config(module: Any, config: Any) -> bytes:
    """Return config.json as `save_pretrained` writes it: with the class of the model and the dtype of its weights."""
    config = copy.deepcopy(config)
    # fully_shard puts the class below one of its own, called FSDP<class>.
    names = [cls.__name__ for cls in type(module).__mro__]
    name = names[1] if names[0].startswith("FSDP") and names[0][4:] == names[1] else names[0]
    config.architectures = [name]
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    return str(config.to_json_string()).encode()
