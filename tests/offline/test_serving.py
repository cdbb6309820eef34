"""The line that serves an export stands only where vLLM can serve it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptkit.offline.serving import serving

LLAMA = {"architectures": ["LlamaForCausalLM"]}
NAMES = {"model.embed_tokens.weight", "lm_head.weight"}
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(
    ("config", "names", "tokenizer", "compared", "found"),
    [
        (LLAMA, NAMES, "tokenizer.json", False, "model"),
        (LLAMA, NAMES, "tokenizer.model", False, "model"),
        (LLAMA, NAMES, "tokenizer_config.json", False, "no tokenizer"),
        (LLAMA, NAMES, "", False, "no tokenizer"),
        (LLAMA, {f"renamed.{name}" for name in NAMES}, "tokenizer.json", False, ""),
        (LLAMA, {"odd"}, "tokenizer.json", True, "model"),
        ({"architectures": ["GPT2LMHeadModel"]}, {"transformer.wte.weight"}, "vocab.json", False, "model"),
        ({"architectures": ["BertForMaskedLM"]}, NAMES, "tokenizer.json", True, ""),
        ({"architectures": ["LlamaForSequenceClassification"]}, NAMES, "tokenizer.json", True, ""),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            NAMES,
            "spiece.model",
            True,
            "",
        ),
        (
            {"architectures": ["LlavaForConditionalGeneration"], "text_config": {}},
            {"model.language_model.embed_tokens.weight"},
            "tokenizer.json",
            False,
            "model",
        ),
        ({}, NAMES, "tokenizer.json", True, ""),
    ],
)
def test_a_model_is_served_with_a_generating_architecture_known_names_and_a_tokenizer(
    config: dict[str, Any], names: set[str], tokenizer: str, compared: bool, found: str
) -> None:
    files = {"config.json": json.dumps(config).encode(), tokenizer or "README.md": b"{}"}
    assert serving(files, names, compared=compared) == found


@pytest.mark.parametrize(
    ("config", "found"),
    [(LORA, "adapter"), ({**LORA, "use_dora": True}, ""), ({"peft_type": "IA3"}, ""),
     ({**LORA, "modules_to_save": ["lm_head"]}, ""), ({**LORA, "task_type": "SEQ_CLS"}, "")],
)  # fmt: skip
def test_an_adapter_is_served_where_it_is_plain_lora(config: dict[str, Any], found: str) -> None:
    assert serving({"adapter_config.json": json.dumps(config).encode()}, set(), compared=False) == found
