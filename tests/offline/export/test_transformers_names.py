"""Model families whose names only transformers knows: the export equals its save_pretrained."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit.errors import CheckpointMismatchError
from ckptkit.offline.export import transformers_names
from ckptkit.offline.export.transformers_names import live_model
from tests.offline.exports import assert_same, converted, read_model, write_model
from tests.patches import failing

transformers = pytest.importorskip("transformers", minversion="5.0")

SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 8, "vocab_size": 32,
}  # fmt: skip
SEQUENCES: dict[str, Any] = {
    "vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 16,
    "pad_token_id": 0,
}  # fmt: skip


def trained(kind: str, settings: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """Save a model as a run and as a release; return the tensors of the release."""
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings))
    model.save_pretrained(folder / "base")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "run", no_dist=True)
    return read_model(folder / "base")


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return converted(folder / "run", folder / "out", base=str(folder / "base")).tensors


GTE = ("GteForMaskedLM", {**SMALL, "max_position_embeddings": 16})


@pytest.mark.parametrize(("kind", "settings"), [
    ("ViTModel", SMALL),
    ("Dinov2Model", {**SMALL, "use_swiglu_ffn": True}),  # a fused gate
    ("HrmTextForCausalLM", {**SMALL, "num_key_value_heads": 2, "head_dim": 8}),  # rope that is turned
    GTE,  # queries, keys and values in one
    ("XLMWithLMHeadModel", {"vocab_size": 32, "emb_dim": 16, "n_layers": 1, "n_heads": 2}),  # shared modules
])  # fmt: skip
def test_live_names_become_those_that_transformers_saves(kind, settings, tmp_path):
    expected = trained(kind, settings, tmp_path)
    assert_same(exported(tmp_path), expected)


@pytest.mark.parametrize(("kind", "settings"), [
    ("ViTForImageClassification", SMALL), ("DeiTModel", SMALL), ("Dinov2Model", SMALL),
    ("Dinov2Model", {**SMALL, "use_swiglu_ffn": True}),
    ("AriaTextForCausalLM", {**SMALL, "num_key_value_heads": 2, "moe_num_experts": 4, "head_dim": 8}),
    ("FuyuForCausalLM", {**SMALL, "text_config": {**SMALL, "model_type": "persimmon"}}),
    ("MarianMTModel", SEQUENCES),
    ("MarianMTModel", {**SEQUENCES, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 24}),
    ("BigBirdPegasusForConditionalGeneration", SEQUENCES), ("BigBirdPegasusForSequenceClassification", SEQUENCES),
    ("Pop2PianoForConditionalGeneration",
     {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}),
])  # fmt: skip
def test_some_model_families_are_mapped_without_transformers(kind, settings, tmp_path, monkeypatch):
    expected = trained(kind, settings, tmp_path)
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    assert_same(exported(tmp_path), expected)


def test_fused_tensors_of_unequal_parts_are_split_by_the_shapes_of_the_base(tmp_path):
    settings = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 4, "linear_value_head_dim": 8,
    }  # fmt: skip
    released = trained("OlmoHybridForCausalLM", settings, tmp_path)
    front = "model.layers.0.linear_attn."
    names = [f"{front}{part}_conv1d.weight" for part in "qkv"]
    joined = torch.cat([released[name] for name in names])
    # transformers saves three almost equal parts of 8 + 8 + 16 rows; releases split them correctly.
    if [len(released[name]) for name in names] == [8, 8, 16]:
        pytest.skip(f"transformers {transformers.__version__} does not save equal parts")
    assert [len(released[name]) for name in names] == [11, 11, 10]
    released.update(zip(names, (part.contiguous() for part in joined.split([8, 8, 16])), strict=True))
    write_model(tmp_path / "base", released)
    assert_same(exported(tmp_path), released)


TEXT: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {**SMALL, "num_hidden_layers": 1, "patch_size": 4, "out_hidden_size": 16, "depth": 1, "num_heads": 2}
AUDIO = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
OF_SEVERAL_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cosmos3_edge": ("Cosmos3EdgeForConditionalGeneration", {
        "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        "vision_config": VISION, "projector_hidden_size": 24,
    }),
    "glm5_next": ("Glm5NextForConditionalGeneration", {
        "text_config": {
            **TEXT, "num_hidden_layers": 4, "head_dim": 0, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 0, "v_head_dim": 4, "linear_head_dim": 4, "linear_num_heads": 2, "index_head_dim": 4,
            "index_n_heads": 2, "index_topk": 16, "hc_mult": 2, "mlp_layer_types": ["dense", *["sparse"] * 3],
        },
        "vision_config": {**VISION, "projection_intermediate_size": 8},
    }),
    "nemo_speechlm": ("Nemotron3_5TranscribeForConditionalGeneration", {
        "audio_config": {
            "asr_config": AUDIO,
            "diarization_config": {"audio_config": AUDIO, "head_config": {"audio_hidden_size": 16}},
        },
        "text_config": {
            **TEXT, "model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M*-E",
            "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 4, "n_routed_experts": 4,
            "moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8,
        },
        "word_timestamp_config": {**AUDIO, "vocab_size": 12, "blank_token_id": 11},
    }),
}  # fmt: skip


@pytest.mark.parametrize("family", OF_SEVERAL_PARTS)
def test_models_of_several_parts_get_the_names_of_their_release(family, tmp_path):
    expected = trained(*OF_SEVERAL_PARTS[family], tmp_path)
    if family == "nemo_speechlm":  # transformers saves one tensor per expert, NVIDIA's releases stack them
        front = "llm.model.layers.3.mixer.experts."
        for ours, theirs in (("up_proj", "gate_and_up_projs"), ("down_proj", "down_projs")):
            experts = [expected.pop(f"{front}{i}.{ours}.weight") for i in range(4)]
            expected[f"{front}{theirs}"] = torch.stack(experts).transpose(1, 2).contiguous()
        write_model(tmp_path / "base", expected)
    assert_same(exported(tmp_path), expected)


def test_an_unknown_conversion_step_of_transformers_leaves_the_names_unchanged(tmp_path, monkeypatch):
    trained(*GTE, tmp_path)
    monkeypatch.delitem(transformers_names._STEPS, "Concatenate")
    with pytest.raises(CheckpointMismatchError, match="qkv_proj"):
        exported(tmp_path)


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}


@pytest.mark.parametrize(("config", "made"), [
    ({}, True), ({"num_hidden_layers": 10**9}, False),  # more layers than tensors
    *(({"architectures": [name]}, False) for name in ("Trainer", "load_tool", "pipeline", "nothing")),
])  # fmt: skip
def test_only_model_classes_of_plausible_size_are_instantiated(config, made):
    assert (live_model({**LLAMA, **config}, ["a", "b"]) is not None) is made


def test_an_error_of_transformers_is_noted_and_names_are_kept(monkeypatch, caplog):
    from transformers import conversion_mapping

    error = RuntimeError("an odd version")
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", failing(error))
    assert live_model(LLAMA, ["a", "b"]) is None
    assert "LlamaForCausalLM" in caplog.text and "an odd version" in caplog.text
