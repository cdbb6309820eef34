"""Defines the built-in key maps, and chooses the map that a checkpoint needs.

Each map changes a training framework's tensor names to the names on the Hub. "inverse:NAME" does the opposite. How
experts are named and stacked on the Hub depends on the model type: the maps follow transformers 5, which converts
experts when it saves a model (see `conversion_mapping` in transformers).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptkit.catalog.targets import Target
from ckptkit.errors import CkptkitError, UsageError
from ckptkit.keymaps.keymap import Mapped, NameMap
from ckptkit.keymaps.patterns import NamePattern
from ckptkit.keymaps.rules import (
    Concat,
    Drop,
    Rename,
    RopePermute,
    Rule,
    Split,
    Unstack,
    inverse_rules,
    written_templates,
)

_p = NamePattern


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Return rules that split stacked experts, of shapes [E, 2I, H] and [E, H, I], into three tensors per expert."""
    at = f"{{p:*}}.{block}.experts"
    to = f"{{p}}.{block}.experts.{{i}}"
    return (
        Unstack(_p(f"{at}.gate_up_proj"), f"{to}.gate_up_proj"),
        Split(_p(f"{{p:*}}.{block}.experts.{{i:d}}.gate_up_proj"), (f"{to}.{gate}.weight", f"{to}.{up}.weight")),
        Unstack(_p(f"{at}.down_proj"), f"{to}.{down}.weight"),
    )


def _rename(*pairs: tuple[str, str]) -> tuple[Rule, ...]:
    return tuple(Rename(_p(source), to) for source, to in pairs)


_GATED = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_BLOCK = ("{p:*}.mlp.{rest:*}", "{p}.block_sparse_moe.{rest}")
_MIXTRAL = (*_experts("mlp", "w1", "w3", "w2"), *_rename(_MIXTRAL_BLOCK))
_PHIMOE = (
    *_experts("mlp", "w1", "w3", "w2"),
    *_rename(("{p:*}.mlp.router.weight", "{p}.mlp.gate.weight"), _MIXTRAL_BLOCK),
)
_GRANITE = _rename(
    ("{p:*}.block_sparse_moe.experts.gate_up_proj", "{p}.block_sparse_moe.input_linear.weight"),
    ("{p:*}.block_sparse_moe.experts.down_proj", "{p}.block_sparse_moe.output_linear.weight"),
    ("{p:*}.block_sparse_moe.router.weight", "{p}.block_sparse_moe.router.layer.weight"),
)
_NEMOTRON_H: tuple[Rule, ...] = (
    Unstack(_p("{p:*}.mixer.experts.up_proj"), "{p}.mixer.experts.{i}.up_proj.weight"),
    Unstack(_p("{p:*}.mixer.experts.down_proj"), "{p}.mixer.experts.{i}.down_proj.weight"),
    *_rename(("model.{rest:*}", "backbone.{rest}")),
)
_GPT_NEOX = _rename(("lm_head.{rest:*}", "embed_out.{rest}"))
_LLAVA = _rename(
    ("lm_head.{rest:*}", "language_model.lm_head.{rest}"),
    ("model.language_model.{rest:*}", "language_model.model.{rest}"),
    *(
        (f"model.{part}.{{rest:*}}", f"{part}.{{rest}}")
        for part in (
            "vision_tower",
            "image_tower",
            "video_tower",
            "audio_tower",
            "vision_model",
            "multi_modal_projector",
            "vision_embed_tokens",
        )
    ),
    ("model.image_newline", "image_newline"),
)
_ARIA = _rename(
    ("{p:*}.experts.gate_up_proj", "{p}.experts.fc1.weight"),
    ("{p:*}.experts.down_proj", "{p}.experts.fc2.weight"),
)


def _attention(at: str, to: str) -> tuple[tuple[str, str], ...]:
    """Return pairs (name, name on the Hub) for the four linear layers of a vision model's attention."""
    hub = {"q": "attention.query", "k": "attention.key", "v": "attention.value", "o": "output.dense"}
    return tuple((f"{at}.attention.{x}_proj.{{leaf}}", f"{to}.attention.{name}.{{leaf}}") for x, name in hub.items())


_VIT = _rename(
    *_attention("{p:*}layers.{n:d}", "{p}encoder.layer.{n}"),
    ("{p:*}layers.{n:d}.mlp.fc1.{leaf}", "{p}encoder.layer.{n}.intermediate.dense.{leaf}"),
    ("{p:*}layers.{n:d}.mlp.fc2.{leaf}", "{p}encoder.layer.{n}.output.dense.{leaf}"),
    ("{p:*}layers.{n:d}.layernorm_{at}.{leaf}", "{p}encoder.layer.{n}.layernorm_{at}.{leaf}"),
)
_DINOV2: tuple[Rule, ...] = (
    *_rename(*_attention("{p:*}encoder.layer.{n:d}", "{p}encoder.layer.{n}")),
    Concat(
        (_p("{p:*}.mlp.gate_proj.{leaf}"), _p("{p:*}.mlp.up_proj.{leaf}")),
        "{p}.mlp.weights_in.{leaf}",
        sizes="equal",
    ),
    *_rename(("{p:*}.mlp.down_proj.{leaf}", "{p}.mlp.weights_out.{leaf}")),
)
# On the Hub, the vision towers of CLIP and SigLIP are one module deeper than in transformers 5.
_VISION_MODEL = _rename(("{p:*}vision_tower.{rest:*}", "{p}vision_tower.vision_model.{rest}"))
_QWEN2_VL = _rename(
    ("model.visual.{rest:*}", "visual.{rest}"),
    ("model.language_model.{rest:*}", "model.{rest}"),
)
# These rules change the names in a live PEFT model to the names in an adapter file. An adapter file's names do not
# contain the adapter's name ("default"). Base weights lose the prefix "base_model.model.", and adapters keep it.
_PEFT: tuple[Rule, ...] = (
    *_rename(
        *(
            (f"base_model.model.{{m:*}}.{kind}.default.{leaf}", f"base_model.model.{{m}}.{kind}.{leaf}")
            for kind in ("lora_A", "lora_B")
            for leaf in ("weight", "bias")
        ),
        *(
            (f"base_model.model.{{m:*}}.{kind}.default", f"base_model.model.{{m}}.{kind}")
            for kind in ("lora_embedding_A", "lora_embedding_B")
        ),
        ("base_model.model.{m:*}.base_layer.{leaf}", "{m}.{leaf}"),
    ),
    Rename(NamePattern(regex=r"base_model\.model\.((?!.*\.lora_).+)"), "{1}"),
)
# torchtitan's names, from its state_dict_adapter modules. _TITAN_OLD* are names of older versions. The inverse maps
# write only current names.
_TITAN_DENSE = _rename(
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("lm_head.weight", "lm_head.weight"),
    ("layers.{n:d}.attention.wo.weight", "model.layers.{n}.self_attn.o_proj.weight"),
    ("layers.{n:d}.attention_norm.weight", "model.layers.{n}.input_layernorm.weight"),
    ("layers.{n:d}.ffn_norm.weight", "model.layers.{n}.post_attention_layernorm.weight"),
    ("layers.{n:d}.feed_forward.w1.weight", "model.layers.{n}.mlp.gate_proj.weight"),
    ("layers.{n:d}.feed_forward.w2.weight", "model.layers.{n}.mlp.down_proj.weight"),
    ("layers.{n:d}.feed_forward.w3.weight", "model.layers.{n}.mlp.up_proj.weight"),
    *(
        (f"layers.{{n:d}}.attention.qkv_linear.w{x}.weight", f"model.layers.{{n}}.self_attn.{x}_proj.weight")
        for x in "qkv"
    ),
)
_TITAN_OLD = _rename(
    ("output.weight", "lm_head.weight"),
    *((f"layers.{{n:d}}.attention.w{x}.weight", f"model.layers.{{n}}.self_attn.{x}_proj.weight") for x in "qkv"),
)
_TITAN_ROPE = (
    RopePermute(_p("model.layers.{n:d}.self_attn.q_proj.weight"), "num_attention_heads"),
    RopePermute(_p("model.layers.{n:d}.self_attn.k_proj.weight"), "num_key_value_heads"),
)
_TITAN_QWEN3 = (
    *_TITAN_DENSE,
    *_rename(
        ("layers.{n:d}.attention.q_norm.weight", "model.layers.{n}.self_attn.q_norm.weight"),
        ("layers.{n:d}.attention.k_norm.weight", "model.layers.{n}.self_attn.k_norm.weight"),
        ("layers.{n:d}.moe.router.gate.weight", "model.layers.{n}.mlp.gate.weight"),
    ),
)
_TITAN_EXPERTS = tuple(
    Unstack(_p(f"layers.{{n:d}}.moe.experts.{w}"), f"model.layers.{{n}}.mlp.experts.{{i}}.{to}_proj.weight")
    for w, to in (("w1_EFD", "gate"), ("w2_EDF", "down"), ("w3_EFD", "up"))
)
_TITAN_OLD_EXPERTS = tuple(
    Unstack(_p(f"layers.{{n:d}}.moe.experts.{w}"), f"model.layers.{{n}}.mlp.experts.{{i}}.{to}_proj.weight")
    for w, to in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
)
_TITAN_DROPS = (
    Drop(_p("{p:*}moe.expert_bias{rest:*}"), "load balancing state, which qwen3 does not have"),
    Drop(_p("{p:*}moe.tokens_per_expert{rest:*}"), "a counter of the training run"),
    Drop(_p("rope_cache"), "rotary frequencies are recomputed"),
    Drop(_p("freqs_cis"), "rotary frequencies are recomputed"),
)


def _torchtitan_map(name: str, note: str, lasting: tuple[Rule, ...], old: tuple[Rule, ...]) -> NameMap:
    """Return a torchtitan model's key map. Old names are renamed first, because later rules apply to the new names."""
    return NameMap(name, (*old, *lasting, *_TITAN_DROPS), "refuse", note, inverse_rules(name, lasting))


BUILTIN_MAPS: dict[str, NameMap] = {
    m.name: m
    for m in (
        NameMap("hf", note="names as they are"),
        NameMap("hf5-experts", _GATED, note="stacked experts to gate_proj/up_proj/down_proj (qwen2_moe and similar)"),
        NameMap("hf5-mixtral", _MIXTRAL, note="stacked experts to block_sparse_moe w1/w2/w3 (mixtral, minimax)"),
        NameMap("hf5-phimoe", _PHIMOE, note="stacked experts to block_sparse_moe w1/w2/w3 with phimoe's router"),
        NameMap(
            "hf5-jamba", _experts("feed_forward", "gate_proj", "up_proj", "down_proj"), note="stacked experts of jamba"
        ),
        NameMap("hf5-lfm2-moe", _experts("feed_forward", "w1", "w3", "w2"), note="stacked experts of lfm2_moe"),
        NameMap(
            "hf5-ernie4.5-moe",
            (*_GATED, *_rename(("{p:*}.mlp.gate.moe_statics.{x:*}", "{p}.mlp.moe_statics.{x}"))),
            note="stacked experts of ernie4_5_moe",
        ),
        NameMap(
            "hf5-exaone-moe",
            (*_GATED, *_rename(("{p:*}.mlp.gate.e_score_correction_bias", "{p}.mlp.e_score_correction_bias"))),
            note="stacked experts of exaone_moe",
        ),
        NameMap("hf5-granitemoe", _GRANITE, note="the hub's names for granitemoe's experts, which stay stacked"),
        NameMap("hf5-nemotron-h", _NEMOTRON_H, note="stacked experts and prefix of nemotron_h"),
        NameMap("hf5-gpt-neox", _GPT_NEOX, note="lm_head.* to embed_out.* (gpt_neox)"),
        NameMap("hf5-aria", _ARIA, note="the hub's names for aria's experts, which stay stacked"),
        NameMap("hf5-vit", _VIT, note="layers.N to encoder.layer.N, with the hub's names in it (vit, deit)"),
        NameMap("hf5-dinov2", _DINOV2, note="the hub's names for the layers of dinov2"),
        NameMap("vlm-llava", _LLAVA, note="model.language_model.* to language_model.model.* (llava and similar)"),
        NameMap("vlm-qwen2", _QWEN2_VL, note="model.language_model.* to model.*, model.visual.* to visual.*"),
        NameMap(
            "vlm-vision-model", _VISION_MODEL, note="vision_tower.* to vision_tower.vision_model.* (CLIP and SigLIP)"
        ),
        NameMap("peft", _PEFT, note="PEFT's names: adapters as in an adapter file, base weights without the wrapper"),
        _torchtitan_map(
            "torchtitan-llama3",
            "torchtitan llama3, with the rope permutation",
            (*_TITAN_DENSE, *_TITAN_ROPE),
            _TITAN_OLD,
        ),
        _torchtitan_map(
            "torchtitan-qwen3",
            "torchtitan qwen3, dense and MoE",
            (*_TITAN_QWEN3, *_TITAN_EXPERTS),
            (*_TITAN_OLD, *_TITAN_OLD_EXPERTS),
        ),
    )
}
_GATED_TYPES = (
    "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "flex_olmo", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "dots1", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "glm4v_moe", "longcat_flash", "solar_open", "mellum",
    "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_omni_moe_text", "hunyuan_v1_moe", "cohere2_moe", "afmoe",
    "qwen3_5_moe", "qwen3_5_moe_text",
)  # fmt: skip
_LLAVA_TYPES = (
    "llava", "llava_next", "llava_next_video", "llava_onevision", "video_llava", "vipllava", "aria", "paligemma",
    "aya_vision", "got_ocr2", "gemma3", "internvl", "mistral3", "pp_chart2table", "mllama", "qwen2_audio", "voxtral",
    "fuyu",
)  # fmt: skip
_VLM_BY_TYPE = {
    **dict.fromkeys(_LLAVA_TYPES, "vlm-llava"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), "vlm-qwen2"),
}
_BY_MODEL_TYPE: dict[str, str] = {
    **dict.fromkeys(_GATED_TYPES, "hf5-experts"),
    **dict.fromkeys(("mixtral", "minimax", "minimax_m2"), "hf5-mixtral"),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), "hf5-granitemoe"),
    "phimoe": "hf5-phimoe",
    "jamba": "hf5-jamba",
    "lfm2_moe": "hf5-lfm2-moe",
    "ernie4_5_moe": "hf5-ernie4.5-moe",
    "exaone_moe": "hf5-exaone-moe",
    "nemotron_h": "hf5-nemotron-h",
}
# Models whose experts are stacked on the Hub as well.
_STACKED_ON_HUB = ("gpt_oss", "llama4", "llama4_text")
_TITAN_DOUBT = (
    "the names are torchtitan's and were kept, because the checkpoint does not record its model. No loader of Hugging "
    "Face models knows these names. Give --base MODEL (its config.json has the model type and the number of heads). "
    "For model types other than llama and qwen3, also give --key-map torchtitan-llama3 or torchtitan-qwen3"
)
_EXPERTS_DOUBT = (
    "stacked experts were kept: loaders skip them if the Hub's layout of the model has one tensor per expert. Give "
    "--base MODEL, or --key-map hf5-experts (qwen, deepseek, olmoe) or hf5-mixtral"
)
_STACKED = (".experts.gate_up_proj", ".mixer.experts.up_proj")


def builtin_map(name: str) -> NameMap:
    """Return the built-in map NAME, or its inverse for "inverse:NAME".

    Raises:
        UsageError: The name is unknown, or the map has no inverse.
    """
    if name.startswith("inverse:"):
        return builtin_map(name.removeprefix("inverse:")).inverse()
    if name not in BUILTIN_MAPS:
        listed = "\n  ".join(f"{m.name}: {m.note}" for m in BUILTIN_MAPS.values())
        raise UsageError(f"there is no key map {name!r}. Give a file, or one of:\n  {listed}")
    return BUILTIN_MAPS[name]


def map_for_model_type(model_type: str | None) -> NameMap | None:
    """Return the map for the experts of this model type, or None if no map is needed.

    The map changes the names that transformers 5 uses in memory to the names on the Hub.
    """
    name = _BY_MODEL_TYPE.get(model_type or "")
    return BUILTIN_MAPS[name] if name else None


@dataclass(frozen=True, slots=True)
class Choice:
    """An automatically chosen key map, the renamed tensors, and the reason for the choice.

    Attributes:
        doubt: A warning to the user. Set if the names were kept, although they seem to need a map.
    """

    key_map: NameMap
    mapped: Mapped
    why: str
    doubt: str = ""


def choose_map(
    targets: Mapping[str, Target], *, wanted: Collection[str] = (), config: Mapping[str, Any] | None = None
) -> Choice:
    """Choose a key map for the names in `targets`, and apply it. Keeps the names if no map is clearly right.

    `wanted` are the names of a base model. If they are given, the function chooses the map that leaves the fewest of
    them missing. It keeps the names in `targets` if no map reduces the number of missing names.

    Without `wanted`, the model type in `config` decides. torchtitan's names are recognized by "tok_embeddings.weight".

    Raises:
        CheckpointMismatchError: The names belong to a known layout, but the layout's map does not match the tensors.
        UsageError: The chosen map needs a key that `config` lacks, such as the number of attention heads.
    """
    settings = dict(config or {})
    as_is = Choice(BUILTIN_MAPS["hf"], Mapped(dict(targets)), "names are kept")
    if wanted:
        return _nearest(targets, frozenset(wanted), settings, as_is)
    by_type = _map_by_type(targets, settings)
    if by_type is not None:
        mapped = by_type.apply(targets, config=settings)
        return Choice(by_type, mapped, f"config.json says model_type {settings.get('model_type')!r}")
    if "tok_embeddings.weight" in targets and any(".attention." in name for name in targets):  # torchtune has "attn"
        return _torchtitan(targets, settings, as_is)
    if _stacked(targets) and settings.get("model_type") not in _STACKED_ON_HUB:
        return replace(as_is, doubt=_EXPERTS_DOUBT)
    return as_is


def _map_by_type(targets: Mapping[str, Target], config: Mapping[str, Any]) -> NameMap | None:
    """Return the map for the model type in `config`, or None if the names in `targets` need no map.

    For a multimodal model with stacked experts, the map first splits the experts, then renames the prefixes.
    """
    experts = map_for_model_type(_model_type(config)) if _stacked(targets) else None
    if config.get("model_type") == "gpt_neox" and "lm_head.weight" in targets:
        return BUILTIN_MAPS["hf5-gpt-neox"]
    prefixes = BUILTIN_MAPS.get(_VLM_BY_TYPE.get(str(config.get("model_type")), ""))
    if prefixes is None or not any(name.startswith("model.language_model.") for name in targets):
        return experts
    return prefixes if experts is None else experts.then(prefixes)


def _nearest(targets: Mapping[str, Target], wanted: frozenset[str], config: Mapping[str, Any], as_is: Choice) -> Choice:
    """Return the map, or the combination of two maps, that leaves the fewest wanted names missing.

    For example, a multimodal model with stacked experts needs two maps. Returns `as_is` if no map reduces the number of
    missing names.
    """
    first = _better(targets, wanted, config, as_is)
    lost = wanted - set(first.mapped.targets)
    if first is as_is or not lost:
        return first
    second = _better(first.mapped.targets, wanted, config, first)
    if second is first:
        return first
    both = first.key_map.then(second.key_map)
    return Choice(both, Mapped(second.mapped.targets, {**first.mapped.dropped, **second.mapped.dropped}), second.why)


def _better(targets: Mapping[str, Target], wanted: frozenset[str], config: Mapping[str, Any], best: Choice) -> Choice:
    lost = [name for name in wanted if name not in targets]
    fewest = len(lost)
    for key_map in _candidates(config) if lost else []:
        if not _may_give(key_map, lost):
            continue
        try:
            mapped = key_map.apply(targets, config=config)
        except CkptkitError:
            continue
        missing = len(wanted - set(mapped.targets))
        if missing < fewest:
            fit, before = len(wanted) - missing, len(wanted) - len(lost)
            why = f"{fit} of {len(wanted)} names match the base model, {before} without this map"
            best, fewest = Choice(key_map, mapped, why), missing
        if fewest == 0:
            break
    return best


def _may_give(key_map: NameMap, lost: list[str]) -> bool:
    """Return whether any rule of the map can produce one of the names in `lost`."""
    written = {re.sub(r"\{(\w+)\}", r"{\1:*}", to) for rule in key_map.rules for to in written_templates(rule)}
    looks = [NamePattern(template).matcher() for template in written]
    return any(match(name) is not None for name in lost for match in looks)


def _candidates(config: Mapping[str, Any]) -> list[NameMap]:
    """Return the maps to try: first the model type's own map, then the other built-in maps and their inverses.

    Maps that cannot fit, such as torchtitan's map for another model type, are left out. torchtitan's maps are not
    inverted.
    """
    by_type = map_for_model_type(_model_type(config))
    kind = str(config.get("model_type", ""))
    other = {"hf", "peft", "torchtitan-llama3" if kind == "qwen3" else ""}
    if not kind.startswith("qwen3"):
        other.add("torchtitan-qwen3")
    maps = [m for m in BUILTIN_MAPS.values() if m.name not in other]
    return ([by_type] if by_type else []) + maps + [m.inverse() for m in maps if not m.name.startswith("torchtitan")]


def _torchtitan(targets: Mapping[str, Target], config: Mapping[str, Any], as_is: Choice) -> Choice:
    kind = str(config.get("model_type", ""))
    name = {"llama": "torchtitan-llama3", "qwen3": "torchtitan-qwen3", "qwen3_moe": "torchtitan-qwen3"}.get(kind)
    if name is None:
        return replace(as_is, doubt=_TITAN_DOUBT)
    key_map = BUILTIN_MAPS[name]
    return Choice(key_map, key_map.apply(targets, config=config), f"torchtitan's names, model_type {kind!r}")


def _model_type(config: Mapping[str, Any]) -> str | None:
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    for found in (config.get("model_type"), inner):
        if isinstance(found, str) and found in _BY_MODEL_TYPE:
            return found
    return None


def _stacked(targets: Mapping[str, Target]) -> bool:
    return any(name.endswith(_STACKED) and len(target.shape) == 3 for name, target in targets.items())
