"""Collects the files that transformers needs in addition to a model's weights."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ckptkit.checkpoint.state.model_tensors import without_wrappers
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import UsageError
from ckptkit.formats.hf.side_files import find_side_files
from ckptkit.storage.open import open_store


def read_side_files(url: str) -> dict[str, bytes]:
    """Return the contents of the config, tokenizer, chat template and licence files at `url`, by file name.

    Raises:
        UsageError: There is no such file.
    """
    store = open_store(url)
    found = find_side_files(store).carried
    if not found:
        raise UsageError(
            f"side_files={url!r} contains no config.json, tokenizer or other file that belongs in an export."
        )
    return {path: store.read(path) for path in found}


def side_files(state: TrainState) -> dict[str, bytes]:
    """Return the contents of each model's `config.json`, `generation_config.json` and `adapter_config.json`, by path.

    Wrappers such as DDP are removed. Of a model's pipeline stages, the first that has a config is used. Does not import
    transformers or peft: the code that made the model has already imported them.
    """
    from ckptkit.checkpoint.state.stages import stages_of

    files: dict[str, bytes] = {}
    for name, part in state.parts("model").items():
        folder = f"{name}/" if name else ""
        stages = [*map(without_wrappers, stages_of(part)), part]
        module = next((stage for stage in stages if hasattr(stage, "config")), stages[0])
        if "peft" in sys.modules:
            files |= {f"{folder}{at}adapter_config.json": data for at, data in adapter_configs(module).items()}
        config: Any = getattr(module, "config", None)
        if not callable(getattr(config, "to_json_string", None)):
            continue
        # As `save_pretrained` writes it, with the model's class and the weights' dtype.
        config = copy.deepcopy(config)
        base = module.get_base_model() if adapters_of(module) and hasattr(module, "get_base_model") else module
        config.architectures = [(pretrained_class(base) or type(base)).__name__]
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        if dtype is not None:
            config.dtype = str(dtype).removeprefix("torch.")
        files[f"{folder}config.json"] = str(config.to_json_string()).encode()
        generation: Any = getattr(module, "generation_config", None)
        if callable(getattr(generation, "to_json_string", None)):
            files[f"{folder}generation_config.json"] = generation.to_json_string().encode()
    return files


def config_of(module: Any) -> Mapping[str, Any]:
    """Return a transformers model's config as a dict. Returns {} for any other module."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    return to_dict() if callable(to_dict) else {}


def pretrained_class(module: Any) -> Any:
    """Return the class of a transformers model, for `from_pretrained`. Returns None for any other module."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(module, transformers.PreTrainedModel):
        return None
    # fully_shard replaces a module's class with a subclass called FSDP<class>.
    kinds = type(module).__mro__
    return kinds[1] if kinds[0].__name__ == f"FSDP{kinds[1].__name__}" else kinds[0]


def adapters_of(module: Any) -> dict[str, Any]:
    """Return the adapter configs of a PEFT model or a transformers model, by adapter name."""
    peft = sys.modules.get("peft")
    if peft is None:
        return {}
    if isinstance(module, (peft.PeftModel, peft.PeftMixedModel)):
        return dict(module.peft_config)
    if pretrained_class(module) is None:
        return {}
    return dict(vars(module).get("peft_config") or {})


def adapter_configs(module: Any) -> dict[str, bytes]:
    """Return the contents of each adapter's adapter_config.json by folder, as PEFT's `save_pretrained` writes them."""
    files: dict[str, bytes] = {}
    adapters = adapters_of(module)
    for name, live in adapters.items():
        config = copy.deepcopy(live)
        base = module.get_base_model() if hasattr(module, "get_base_model") else module
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = vars(base).get("name_or_path") or None
        config.inference_mode = True
        kind = pretrained_class(base) or type(base)
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder, auto_mapping_dict=mapping if config.task_type is None else None)
            files[adapter_folder(name, adapters)] = (Path(folder) / "adapter_config.json").read_bytes()
    return files


def adapter_folder(name: str, adapters: Collection[str]) -> str:
    """Return an adapter's folder, with a trailing slash.

    The result is "" for the adapter "default", and for a model's only adapter.
    """
    return "" if name == "default" or len(adapters) == 1 else f"{name}/"
