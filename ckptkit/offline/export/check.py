"""Compares the names and shapes of an export with the base model, or with the config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.catalog.targets import Target
from ckptkit.offline.export.base import BaseModel, WantedTensor
from ckptkit.offline.export.tied import config_ties, tied_pairs
from ckptkit.units import counted, first_few

_LAYER = re.compile(r"(?:.*\.)?(?:layers?|blocks?|h)\.(\d+)\..*")
# Buffers that old versions of transformers stored, but every version computes on load.
_COMPUTED = re.compile(r".*(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|\.attn\.(bias|masked_bias)|position_ids)")
# One model family's sinusoidal positions, which its save_pretrained omits (_keys_to_ignore_on_save).
_COMPUTED_BY = {"marian": re.compile(r"model\.(?:encoder|decoder)\.embed_positions\.weight")}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences between an export and a model.

    A different dtype is only a note, not an error, because an export keeps the dtypes of its source.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[str, ...]
    notes: tuple[str, ...]


def compare_with_base(targets: Mapping[str, Target], base: BaseModel, *, untied: bool) -> Comparison:
    """Return every name and shape that differs from the base model's.

    A tied head may be missing in the export or in the base. `untied` says whether the export has a separate head.
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
        f"shape: {name} is {list(shapes[name])}, but {list(want.shape)} in the base{_vocabulary(name, want.shape)}"
        for name, want in wanted.items()
        if name in shapes and want.shape is not None and want.shape != shapes[name]
    ]
    return Comparison(tuple(missing), tuple(unexpected), tuple(faults), _dtype_note(targets, wanted))


def unexpected_buffers(
    targets: Mapping[str, Target], wanted: Mapping[str, WantedTensor], model_type: str | None
) -> dict[str, str]:
    """Return the export's buffers that the base lacks because transformers computes them on load: name -> reason."""
    if not wanted:
        return {}
    kinds = [_COMPUTED, *([_COMPUTED_BY[model_type]] if model_type in _COMPUTED_BY else [])]
    return {
        name: "a buffer that is computed on load and not stored in the base"
        for name in targets
        if name not in wanted and any(kind.fullmatch(name) for kind in kinds)
    }


def absent_layers(names: Iterable[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a message that lists the layers that the config counts but the export lacks; () if there are none.

    Used if there is no base model. Without this check, transformers would initialize the missing layers randomly. Only
    numbered layers can be checked.
    """
    inner = config.get("text_config")
    count = config.get("num_hidden_layers", inner.get("num_hidden_layers") if isinstance(inner, Mapping) else None)
    found = {int(match[1]) for name in names if (match := _LAYER.fullmatch(name))}
    if type(count) is not int or not found or count > 100_000:
        return ()
    absent = [number for number in range(count) if number not in found]
    shown = first_few(list(map(str, absent)), 4)
    return (f"missing: layers {shown}: the config has num_hidden_layers {count}",) if absent else ()


def _vocabulary(name: str, shape: tuple[int, ...]) -> str:
    if not name.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight")):
        return ""
    return (
        ". Was the vocabulary resized in training? Then pass a copy of the model with the trained size as --base. To "
        f"resize it now, pass --vocab-size {shape[0]}"
    )


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
