"""Determines from an export's files whether vLLM can serve it; returns "" if unknown."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection, Mapping
from typing import Any, Literal

__all__ = ["Serving", "serving"]

Serving = Literal["", "model", "adapter", "no tokenizer"]

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_MULTIMODAL = "ForConditionalGeneration"  # of encoder-decoders too, which vLLM does not run
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "sentencepiece*.model", "*.tiktoken",
    "tekken.json",
)  # fmt: skip
# Names of the embedding in transformers' text models; absent after a key map to other names.
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


def serving(files: Mapping[str, bytes], names: Collection[str], *, compared: bool) -> Serving:
    """Return how an export can be served.

    Args:
        files: The small files of the export, by name.
        names: Of its tensors.
        compared: Names and shapes were checked against a base model.
    """
    if "adapter_config.json" in files:
        return "adapter" if _is_lora(_json(files["adapter_config.json"])) else ""
    config = _json(files.get("config.json", b""))
    if not _generates(config) or not (compared or any(name in names for name in _EMBEDDINGS)):
        return ""
    has_tokenizer = any(fnmatch.fnmatchcase(name, pattern) for name in files for pattern in _TOKENIZERS)
    return "model" if has_tokenizer else "no tokenizer"


def _generates(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if config.get("is_encoder_decoder"):
        return False
    return name.endswith(_CAUSAL) or (name.endswith(_MULTIMODAL) and isinstance(config.get("text_config"), dict))


def _is_lora(config: Mapping[str, Any]) -> bool:
    """Whether it is an adapter of the kind that vLLM supports."""
    plain = not config.get("use_dora") and not config.get("modules_to_save")
    return config.get("peft_type") == "LORA" and plain and config.get("task_type") in (None, "CAUSAL_LM")


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
