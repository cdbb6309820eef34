"""Determines, from an export's files, how to serve it with vLLM."""

from __future__ import annotations

import fnmatch
import json
import os
import shlex
from collections.abc import Collection, Mapping
from typing import Any

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_MULTIMODAL = "ForConditionalGeneration"  # some encoder-decoders end like this too, but vLLM does not run them
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "sentencepiece*.model", "*.tiktoken",
    "tekken.json",
)  # fmt: skip
# Names of embeddings in transformers' text models. If an export has none of them, a key map renamed its tensors.
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "model.embeddings.weight",
    "backbone.embeddings.weight",
    "gpt_neox.embed_in.weight",
    "transformer.wte.weight",
    "transformer.word_embeddings.weight",
)
_RANKS = (16, 32, 64, 128, 256, 320, 512)  # allowed values of --max-lora-rank; 16 is its default
# Adapter settings that vLLM refuses, or that it ignores so that its outputs are wrong.
_NOT_PLAIN = (
    "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "trainable_token_indices",
    "target_parameters", "layer_replication", "alora_invocation_tokens", "arrow_config", "use_qalora", "use_bdlora",
    "kasa_config", "velora_config", "monteclora_config",
)  # fmt: skip


def serving(files: Mapping[str, bytes], names: Collection[str], where: str, *, compared: bool) -> str:
    """Return one line on how to serve an export with vLLM.

    Returns "" if vLLM cannot serve the export, or if ckptkit cannot tell.

    Args:
        files: Contents of the export's small files, by name.
        names: Names of the export's tensors.
        where: The export's directory, quoted for a shell.
        compared: Whether names and shapes were checked against a base model.
    """
    if "adapter_config.json" in files:
        return _adapter(_json(files["adapter_config.json"]), names, where)
    config = _json(files.get("config.json", b""))
    encoder = any(name.endswith("embeddings.word_embeddings.weight") for name in names)  # BERT and similar models
    known = compared or any(name in names for name in _EMBEDDINGS)
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    generates = name.endswith(_CAUSAL) or (name.endswith(_MULTIMODAL) and isinstance(config.get("text_config"), dict))
    odd = encoder or config.get("is_encoder_decoder") or config.get("auto_map")  # auto_map needs --trust-remote-code
    if odd or not known or not generates:
        return ""
    if not any(fnmatch.fnmatchcase(name, pattern) for name in files for pattern in _TOKENIZERS):
        return f"vLLM also needs the tokenizer's files in {where}; the source has none"
    return f"serve it with: vllm serve {where}"


def _adapter(config: Mapping[str, Any], names: Collection[str], where: str) -> str:
    from ckptkit.offline.export.adapters import repo_of  # imported lazily, because only adapters need it

    plain = not any(config.get(key) for key in _NOT_PLAIN) and config.get("bias") in (None, "none")
    plain = plain and all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)
    fits = [rank for rank in _RANKS if isinstance(config.get("r"), int) and rank >= config["r"]]
    if config.get("peft_type") != "LORA" or not plain or not fits or config.get("task_type") not in (None, "CAUSAL_LM"):
        return ""
    named = str(config.get("base_model_name_or_path") or "")
    base = shlex.quote(named) if repo_of(config) or os.path.isdir(named) else "BASE_MODEL"
    rank = f" --max-lora-rank {fits[0]}" * (fits[0] != _RANKS[0])
    return f"serve it with: vllm serve {base} --enable-lora --lora-modules adapter={where}{rank}"


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
