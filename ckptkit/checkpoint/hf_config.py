"""The files beside a model's weights that transformers needs to load them."""

from __future__ import annotations

import copy
from typing import Any

from ckptkit.checkpoint.state import TrainState

__all__ = ["side_files"]


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
