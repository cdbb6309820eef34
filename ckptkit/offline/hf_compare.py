"""An export held against the model it should be: names, shapes, dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.catalog.targets import Target
from ckptkit.offline.hf_base import BaseModel, WantedTensor
from ckptkit.offline.tied import config_ties, tied_pairs

__all__ = ["Comparison", "absent_layers", "compare_with_base", "unexpected_buffers"]

# Buffers that old versions of transformers stored and that every version computes.
_LAYER = re.compile(r"(?:.*\.)?(?:layers?|blocks?|h)\.(\d+)\..*")
_COMPUTED = re.compile(r".*(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|\.attn\.(bias|masked_bias)|position_ids)")
# Of one family: positions that are sines, which its save_pretrained leaves out (_keys_to_ignore_on_save).
_COMPUTED_BY = {"marian": re.compile(r"model\.(?:encoder|decoder)\.embed_positions\.weight")}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs; dtypes that differ are notes, for an export keeps the checkpoint's."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[str, ...]
    notes: tuple[str, ...]


def compare_with_base(targets: Mapping[str, Target], base: BaseModel, *, untied: bool) -> Comparison:
    """Return all names and shapes in which the targets differ from the base model.

    A head that is tied may be in one and not in the other. `untied`: a head of its own was found.
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
        f"shape: {name} is {list(shapes[name])}, the base has {list(want.shape)}{_vocabulary(name)}"
        for name, want in wanted.items()
        if name in shapes and want.shape is not None and want.shape != shapes[name]
    ]
    return Comparison(tuple(missing), tuple(unexpected), tuple(faults), _dtype_note(targets, wanted))


def unexpected_buffers(
    targets: Mapping[str, Target], wanted: Mapping[str, WantedTensor], model_type: str | None
) -> dict[str, str]:
    """Return the buffers that every transformers computes itself and that the base does not store."""
    if not wanted:
        return {}
    kinds = [_COMPUTED, *([_COMPUTED_BY[model_type]] if model_type in _COMPUTED_BY else [])]
    return {
        name: "a buffer that is computed on load, and that the base does not store"
        for name in targets
        if name not in wanted and any(kind.fullmatch(name) for kind in kinds)
    }


def absent_layers(names: Iterable[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what is missing where all that there is to compare with is a config: the layers that it counts.

    transformers would fill them with random numbers. Names that don't number layers tell nothing.
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
    return ". Was the vocabulary resized? Then give --base a copy of the model with the new config"


def _dtype_note(targets: Mapping[str, Target], wanted: Mapping[str, WantedTensor]) -> tuple[str, ...]:
    changed: dict[tuple[str, str], int] = {}
    for name, want in wanted.items():
        if name in targets and want.dtype is not None and want.dtype != targets[name].dtype:
            pair = (want.dtype, targets[name].dtype)
            changed[pair] = changed.get(pair, 0) + 1
    return tuple(
        f"{count} tensors are {found} in the checkpoint and {base} in the base model: the checkpoint's dtype is kept "
        "unless --dtype says otherwise"
        for (base, found), count in changed.items()
    )
