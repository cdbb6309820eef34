"""A written export checked from its own files: the index, and names and shapes against a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ckptkit.catalog.box import Box
from ckptkit.catalog.builtin_maps import map_for_model_type
from ckptkit.catalog.entry import Catalog
from ckptkit.catalog.targets import Part, Target
from ckptkit.errors import CheckpointMismatchError, CorruptCheckpointError, MissingExtraError
from ckptkit.formats import safetensors
from ckptkit.offline.hf_base import BaseModel, WantedTensor
from ckptkit.offline.hf_compare import compare_with_base
from ckptkit.storage.store import Store

__all__ = ["ExportProof", "check_export", "names_of_config"]

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ExportProof:
    """What was proved of a written export.

    Attributes:
        tensors: How many there are.
        matches: What names and shapes are equal to: "the config", a base model; "" for not compared.
        indexed: There is an index, and it says exactly what the files hold.
    """

    tensors: int
    matches: str
    indexed: bool

    def phrases(self) -> tuple[str, ...]:
        """Return the parts of the closing line."""
        said = [f"names and shapes match {self.matches}"] if self.matches else ["names were compared with no model"]
        return (*said, "index exact" if self.indexed else "one file, no index needed")


def check_export(store: Store, *, base: BaseModel | None = None, use_config: bool = False) -> ExportProof:
    """Check the export at the store's root. Reads headers, the index and config.json.

    Args:
        base: Compare names and shapes with what it wants.
        use_config: Compare with the model that transformers builds of config.json, on the meta device
            (imports torch and transformers). Without transformers, `base` is what is left.

    Raises:
        CorruptCheckpointError: The index and the files differ, or a file lies there that no index names.
        CheckpointMismatchError: Names or shapes differ, all listed.
        MissingExtraError: `use_config` without transformers and without a base.
    """
    catalog = safetensors.open_catalog(store)
    indexed = _check_index(store, catalog)
    matches = ""
    if use_config:
        wanted, config = names_of_config(store) if _has_transformers() else ({}, {})
        if not wanted and (base is None or not base.wanted):
            raise MissingExtraError(
                "comparing with the config needs transformers. "
                "Install it from the checkout with: pip install -e '.[hf]'"
            )
        if wanted:
            _check_names(catalog, BaseModel("the config", config, {}, wanted))
            matches = "the config"
    if not matches and base is not None and base.wanted:
        _check_names(catalog, base)
        matches = base.where
    return ExportProof(len(catalog.tensors), matches, indexed)


def names_of_config(store: Store) -> tuple[dict[str, WantedTensor], dict[str, Any]]:
    """Return the names and shapes that transformers' model of config.json stores on the hub, and the config.

    Nothing of the export is executed: classes come from transformers alone. ({}, config) for a model that
    this transformers does not know.
    """
    import torch
    import transformers

    config = json.loads(store.read("config.json"))
    names = config.get("architectures") or []
    kind = getattr(transformers, str(names[0]), None) if names else None
    # Names in a config are anybody's: only classes of models are called.
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)) or "model_type" not in config:
        return {}, config
    settings = {key: value for key, value in config.items() if key != "quantization_config"}
    parsed = transformers.AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model = kind(parsed)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    key_map = map_for_model_type(config.get("model_type"))
    if key_map is not None:
        targets = {name: _target(name, shape) for name, shape in shapes.items()}
        mapped = key_map.apply(targets, config=config).targets
        shapes = {name: target.shape for name, target in mapped.items()}
    return {name: WantedTensor(None, shape) for name, shape in shapes.items()}, config


def _check_names(catalog: Catalog, base: BaseModel) -> None:
    targets = {name: Target.of(entry, name) for name, entry in catalog.tensors.items()}
    found = compare_with_base(targets, base, untied=False)
    faults = [f"missing: {name}" for name in found.missing]
    faults += [f"unexpected: {name}" for name in found.unexpected]
    faults += found.shapes
    if faults:
        raise CheckpointMismatchError(f"the export does not fit {base.where}:\n  " + "\n  ".join(faults))


def _check_index(store: Store, catalog: Catalog) -> bool:
    """Check that the index says what the headers say, and that no other file would be loaded beside it."""
    on_disk = {item.path for item in store.list() if item.path.endswith(".safetensors")}
    stray = sorted(on_disk - set(catalog.info.files))
    if stray:
        raise CorruptCheckpointError(
            f"{', '.join(stray)}: loaders that take every .safetensors file would load it too."
        )
    if store.info(_INDEX) is None:
        return False
    index = json.loads(store.read(_INDEX))
    held = {name: entry.slices[0].path for name, entry in catalog.tensors.items()}
    said = index.get("metadata") or {}
    wanted = {"total_size": sum(e.nbytes for e in catalog.tensors.values()),
              "total_parameters": sum(e.numel for e in catalog.tensors.values())}  # fmt: skip
    if index.get("weight_map") != held:
        raise CorruptCheckpointError(f"{_INDEX}: its weight_map is not what the files hold.")
    wrong = [f"{key} is {said.get(key)}, {value} expected" for key, value in wanted.items() if said.get(key) != value]
    if wrong:
        raise CorruptCheckpointError(f"{_INDEX}: {'; '.join(wrong)}.")
    return True


def _target(name: str, shape: tuple[int, ...]) -> Target:
    box = Box.whole(shape)
    return Target(name, "float32", shape, (Part(box, name, box),), "float32")


def _has_transformers() -> bool:
    import importlib.util

    return importlib.util.find_spec("transformers") is not None and importlib.util.find_spec("torch") is not None
