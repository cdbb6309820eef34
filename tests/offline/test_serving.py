"""The command that serves an export is printed only if vLLM can serve the export."""

import json
from typing import Any

import pytest
import torch

from ckptkit import convert
from ckptkit.offline.serving import serving
from tests.offline.exports import read_model, write_model

LLAMA = {"architectures": ["LlamaForCausalLM"]}
NAMES = {"model.embed_tokens.weight", "lm_head.weight"}
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "bias": "none", "rank_pattern": {}}
LORA_OPTIONS = "--enable-lora --lora-modules adapter=OUT"
LINES = {
    "": "",
    "model": "serve it with: vllm serve OUT",
    "no tokenizer": "vLLM also needs the tokenizer's files in OUT; the source has none",
}


OTHER = [("BertLMHeadModel", "bert"), ("RobertaForCausalLM", "roberta")]


def of(architecture: str, **config: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **config}


@pytest.mark.parametrize(("config", "names", "tokenizer", "compared", "found"), [
    (LLAMA, NAMES, "tokenizer.json", False, "model"),
    (LLAMA, NAMES, "tokenizer.model", False, "model"),
    (LLAMA, NAMES, "tokenizer_config.json", False, "no tokenizer"),
    (LLAMA, NAMES, "", False, "no tokenizer"),
    (LLAMA, {f"renamed.{name}" for name in NAMES}, "tokenizer.json", False, ""),
    (LLAMA, {"odd"}, "tokenizer.json", True, "model"),
    (of("GPT2LMHeadModel"), {"transformer.wte.weight"}, "vocab.json", False, "model"),
    (of("BertForMaskedLM"), NAMES, "tokenizer.json", True, ""),
    *((of(kind), {f"{name}.embeddings.word_embeddings.weight"}, "tokenizer.json", True, "") for kind, name in OTHER),
    (of("LlamaForSequenceClassification"), NAMES, "tokenizer.json", True, ""),
    (of("T5ForConditionalGeneration", is_encoder_decoder=True), NAMES, "spiece.model", True, ""),
    (of("LlavaForConditionalGeneration", text_config={}), {"model.language_model.embed_tokens.weight"},
     "tokenizer.json", False, "model"),
    ({}, NAMES, "tokenizer.json", True, ""),
    (of("LlamaForCausalLM", auto_map={"AutoModel": "modeling_x.X"}), NAMES, "tokenizer.json", True, ""),
])  # fmt: skip
def test_a_model_that_generates_is_servable_with_known_names_and_a_tokenizer(config, names, tokenizer, compared, found):
    files = {"config.json": json.dumps(config).encode(), tokenizer or "README.md": b"{}"}
    assert serving(files, names, "OUT", compared=compared) == LINES[found]


@pytest.mark.parametrize(("skipped", "difference"), [("ema.*", "5 missing tensors"), ("", "1 additional tensor")])
def test_a_model_whose_names_differ_from_the_base_is_not_servable(skipped, difference, zoo, tmp_path):
    base = zoo / "hf_ref_llama_tied"
    source = write_model(tmp_path / "source", {**read_model(base), "ema.weight": torch.ones(2)})
    exclude = [skipped, "*norm*"] if skipped else []
    report = convert(source, str(tmp_path / "out"), base=str(base), exclude=exclude)
    assert not report.serving and any(f"(except {difference})" in line for line in report.proved)


@pytest.mark.parametrize(("config", "found"), [
    ({}, f"BASE_MODEL {LORA_OPTIONS}"),
    ({"base_model_name_or_path": "/home/me/llama"}, f"BASE_MODEL {LORA_OPTIONS}"),
    ({"base_model_name_or_path": "org/llama"}, f"org/llama {LORA_OPTIONS}"),
    ({"r": 17}, f"BASE_MODEL {LORA_OPTIONS} --max-lora-rank 32"),
    ({"r": 512}, f"BASE_MODEL {LORA_OPTIONS} --max-lora-rank 512"),
    ({"r": 1024}, ""), ({"r": None}, ""), ({"bias": "lora_only"}, ""), ({"use_dora": True}, ""),
    ({"peft_type": "IA3"}, ""), ({"modules_to_save": ["lm_head"]}, ""), ({"task_type": "SEQ_CLS"}, ""),
    ({"rank_pattern": {"q_proj": 4}}, ""), ({"alpha_pattern": {"q_proj": 4}}, ""),
    ({"alora_invocation_tokens": [1]}, ""),
])  # fmt: skip
def test_an_adapter_is_servable_if_it_is_plain_lora_with_rank_and_base(config, found):
    files = {"adapter_config.json": json.dumps({**LORA, **config}).encode()}
    line = f"serve it with: vllm serve {found}" if found else ""
    assert serving(files, {"base_model.model.q_proj.lora_A.weight"}, "OUT", compared=False) == line
    assert serving(files, {"base_model.model.embed_tokens.lora_embedding_A"}, "OUT", compared=False) == ""
