"""Checks a written export: its index against the files, and its names and shapes against a model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog
from ckptkit.catalog.targets import Part, Target
from ckptkit.errors import CheckpointMismatchError, CorruptCheckpointError, MissingExtraError
from ckptkit.formats.hf import safetensors
from ckptkit.keymaps.builtin import map_for_model_type
from ckptkit.offline.export.base import BaseModel, WantedTensor
from ckptkit.offline.export.tied import config_ties, tied_pairs
from ckptkit.storage.store import Store
from ckptkit.units import counted

__all__ = [
    "ExportProof",
    "check_export",
    "names_of_config",
    "Comparison",
    "absent_layers",
    "compare_with_base",
    "shown",
    "unexpected_buffers",
]

_log = logging.getLogger(__name__)
_SHOWN = 5  # maximum number of faults to show per kind
# Buffers that old versions of transformers stored, but every version computes on load.
_LAYER = re.compile(r"(?:.*\.)?(?:layers?|blocks?|h)\.(\d+)\..*")
_COMPUTED = re.compile(r".*(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|\.attn\.(bias|masked_bias)|position_ids)")
# One model family's sinusoidal positions, which its save_pretrained omits (_keys_to_ignore_on_save).
_COMPUTED_BY = {"marian": re.compile(r"model\.(?:encoder|decoder)\.embed_positions\.weight")}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between an export and a model. Dtypes are only noted, because an export keeps its source's dtypes."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[str, ...]
    notes: tuple[str, ...]


def compare_with_base(targets: Mapping[str, Target], base: BaseModel, *, untied: bool) -> Comparison:
    """Return every name and shape that differs from the base model's.

    A tied head may be missing on either side. `untied`: whether the export has a separate head.
    """
    wanted = base.wanted
    shapes = {name: target.shape for name, target in targets.items()}
    missing = [name for name in wanted if name not in targets]
    unexpected = [name for name in targets if name not in wanted]
    if missing and config_ties(base.config):
        known = {**shapes, **{name: wanted[name].shape or () for name in missing}}
        tied = {head for head, embedding in tied_pairs(known) if embedding in targets}
        missing = [name for name in missing if name not in tied]
    if unexpected:
        heads = {head for head, _ in tied_pairs(shapes)}
        free = untied or config_ties(base.config) is not False
        unexpected = [name for name in unexpected if not (free and name in heads)]
    faults = [
        f"shape: {name} is {list(shapes[name])}, but {list(want.shape)} in the base{_vocabulary(name)}"
        for name, want in wanted.items()
        if name in shapes and want.shape is not None and want.shape != shapes[name]
    ]
    return Comparison(tuple(missing), tuple(unexpected), tuple(faults), _dtype_note(targets, wanted))


def unexpected_buffers(
    targets: Mapping[str, Target], wanted: Mapping[str, WantedTensor], model_type: str | None
) -> dict[str, str]:
    """Return the buffers that transformers computes on load and the base does not store, with the reason."""
    if not wanted:
        return {}
    kinds = [_COMPUTED, *([_COMPUTED_BY[model_type]] if model_type in _COMPUTED_BY else [])]
    return {
        name: "a buffer that is computed on load and not stored in the base"
        for name in targets
        if name not in wanted and any(kind.fullmatch(name) for kind in kinds)
    }


def absent_layers(names: Iterable[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a fault if layers are missing according to the config's layer count. Used if there is no base.

    transformers would initialize those layers randomly. Only numbered layers can be checked.
    """
    inner = config.get("text_config")
    count = config.get("num_hidden_layers", inner.get("num_hidden_layers") if isinstance(inner, Mapping) else None)
    found = {int(match[1]) for name in names if (match := _LAYER.fullmatch(name))}
    if type(count) is not int or not found or count > 100_000:
        return ()
    absent = [number for number in range(count) if number not in found]
    shown = ", ".join(map(str, absent[:4])) + (", ..." if len(absent) > 4 else "")
    return (f"missing: layers {shown}: the config has num_hidden_layers {count}",) if absent else ()


def _vocabulary(name: str) -> str:
    if not name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight")):
        return ""
    return ". Was the vocabulary resized? Then pass a copy of the model with the new config as --base"


def _dtype_note(targets: Mapping[str, Target], wanted: Mapping[str, WantedTensor]) -> tuple[str, ...]:
    changed: dict[tuple[str, str], int] = {}
    for name, want in wanted.items():
        if name in targets and want.dtype is not None and want.dtype != targets[name].dtype:
            pair = (want.dtype, targets[name].dtype)
            changed[pair] = changed.get(pair, 0) + 1
    return tuple(
        f"{counted(count, 'tensor', 'are')} {found} in the checkpoint and {base} in the base model: the checkpoint's "
        "dtype is kept unless --dtype says otherwise"
        for (base, found), count in changed.items()
    )


_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ExportProof:
    """The checks that a written export passed.

    Attributes:
        tensors: Number of tensors.
        matches: What names and shapes were compared with: "the config", a base model, or "" for nothing.
        indexed: Whether there is an index. It matches the files exactly.
    """

    tensors: int
    matches: str
    indexed: bool

    def phrases(self) -> tuple[str, ...]:
        """Return the phrases for the summary line."""
        said = [f"names and shapes match {self.matches}"] if self.matches else ["names were not compared with a model"]
        return (*said, "index matches the files" if self.indexed else "single file, no index needed")


def check_export(store: Store, *, base: BaseModel | None = None, use_config: bool = False) -> ExportProof:
    """Check the export at the store's root. Reads headers, the index and config.json.

    Args:
        base: Compare names and shapes with this base.
        use_config: Compare with the model that transformers builds from config.json on the meta device (imports torch
            and transformers). Without transformers, compare with `base`.

    Raises:
        CorruptCheckpointError: The index and the files differ, or a file is not in the index.
        CheckpointMismatchError: Names or shapes differ. The message lists the first ones of each kind.
        MissingExtraError: `use_config` is set, but there is neither transformers nor a base.
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
    """Return the Hub names and shapes of the model that transformers builds from config.json, and the config itself.

    None of the export's code is executed, because only classes of transformers are used. Returns ({}, config) for an
    unknown model.
    """
    import torch
    import transformers

    config = json.loads(store.read("config.json"))
    names = config.get("architectures") or []
    kind = getattr(transformers, str(names[0]), None) if names else None
    # Config values are untrusted, so only model classes are called.
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
        raise CheckpointMismatchError(f"the export does not fit {base.where}:\n  " + "\n  ".join(shown(faults)))


def shown(faults: Sequence[str]) -> list[str]:
    """Return the first five faults of each kind, and how many more there are. The debug log (-v) lists all."""
    kinds: dict[str, list[str]] = {}
    for fault in faults:
        kinds.setdefault(fault.partition(":")[0], []).append(fault)
    lines = []
    for kind, items in kinds.items():
        lines += items[:_SHOWN]
        if len(items) > _SHOWN:
            lines.append(f"... and {len(items) - _SHOWN} more of {len(items)} ({kind}); --verbose lists them")
            _log.debug("%s", "\n  ".join(items))
    return lines


def _check_index(store: Store, catalog: Catalog) -> bool:
    """Check that the index matches the headers, and that loaders would not read any other file."""
    on_disk = {item.path for item in store.list() if item.path.endswith(".safetensors")}
    stray = sorted(on_disk - set(catalog.info.files))
    if stray:
        raise CorruptCheckpointError(
            f"{', '.join(stray)}: loaders that read every .safetensors file would load it too."
        )
    if store.info(_INDEX) is None:
        return False
    index = json.loads(store.read(_INDEX))
    held = {name: entry.slices[0].path for name, entry in catalog.tensors.items()}
    said = index.get("metadata") or {}
    wanted = {"total_size": sum(e.nbytes for e in catalog.tensors.values()),
              "total_parameters": sum(e.numel for e in catalog.tensors.values())}  # fmt: skip
    if index.get("weight_map") != held:
        raise CorruptCheckpointError(f"{_INDEX}: its weight_map does not match the files.")
    wrong = [f"{key} is {said.get(key)}, expected {value}" for key, value in wanted.items() if said.get(key) != value]
    if wrong:
        raise CorruptCheckpointError(f"{_INDEX}: {'; '.join(wrong)}.")
    return True


def _target(name: str, shape: tuple[int, ...]) -> Target:
    box = Box.whole(shape)
    return Target(name, "float32", shape, (Part(box, name, box),), "float32")


def _has_transformers() -> bool:
    import importlib.util

    return importlib.util.find_spec("transformers") is not None and importlib.util.find_spec("torch") is not None
