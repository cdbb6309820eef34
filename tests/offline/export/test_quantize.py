"""`convert --quantize fp8-block`: the bits of transformers, and the weights that its quantizer chooses."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptkit import convert
from ckptkit.errors import CheckpointMismatchError, UnsupportedFormatError, UsageError
from tests.offline.exports import Result, assert_same, converted, read_model, write_model
from tests.offline.folders import names

LAYER = "model.layers.0.mlp.down_proj.weight"


def quantized(path: Path, tensors: Mapping[str, torch.Tensor], **options: Any) -> Result:
    """Write a model to <path>/src and quantize it to <path>/out."""
    src = write_model(path / "src", tensors, {"model_type": "unknown"})
    return converted(src, path / "out", **{"quantize": "fp8-block", **options})


def kept(found: Result) -> Any:
    return found.config["quantization_config"]["modules_to_not_convert"]


def by_transformers(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    settings = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    quantizer = fp8.Fp8Quantize(SimpleNamespace(quantization_config=settings))
    made: dict[str, torch.Tensor] = quantizer._quantize_one(LAYER, weight)
    return made


def weights(dtype: torch.dtype) -> torch.Tensor:
    """Return every finite bfloat16 number whose block has a scale, zeros, and normal numbers: 16 MB in fp32."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float().reshape(4 * 128, 128)
    torch.manual_seed(0)
    made = torch.cat((torch.zeros(128, 128), every, torch.randn(27 * 128, 128) * 0.02))
    wide = torch.cat((made, made.flip(0)), 1).repeat(1, 4).to(dtype)
    return torch.where(wide.isfinite(), wide, torch.zeros_like(wide))  # float16 cannot hold all of them


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_and_scales_have_the_bits_of_transformers(tmp_path, dtype):
    weight, norm = weights(dtype), torch.rand(4).to(dtype)
    tensors = {LAYER: weight, "model.norm.weight": norm}
    found = quantized(tmp_path, tensors, verify=True, max_memory="16MB", workers=2)
    assert_same(found.tensors, {**by_transformers(weight), "model.norm.weight": norm})
    assert "1 weight quantized to FP8 in blocks of 128 x 128" in found.report.notes
    assert found.config["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    assert found.config["dtype"] == str(dtype).removeprefix("torch.")


def test_values_too_small_for_a_scale_become_zeros(tmp_path):
    quantized(tmp_path, {LAYER: torch.full((128, 128), 1e-38)})
    assert not converted(tmp_path / "out", tmp_path / "back", dtype="fp32").tensors[LAYER].any()


MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3Moe": {"num_experts": 2, "moe_intermediate_size": 128, "num_experts_per_tok": 1, "decoder_sparse_step": 1},
}


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_loads_the_export_as_its_own_quantization(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=1, vocab_size=64, hidden_size=128, intermediate_size=256, head_dim=64, num_attention_heads=2,
        num_key_value_heads=2, **MODELS[kind],
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().save_pretrained(tmp_path / "src")
    found = converted(tmp_path / "src", tmp_path / "out", quantize="fp8-block", verify=True)
    assert not any("chosen by name" in note for note in found.report.notes)
    plain = read_model(tmp_path / "src")
    eight = {name for name, tensor in found.tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert eight == {name for name in plain if name.split(".")[-2] in parts}
    assert found.tensors.keys() == plain.keys() | {f"{name}_scale_inv" for name in eight}
    others = {name.removesuffix(".weight") for name in plain if name.endswith(("mlp.gate.weight", "lm_head.weight"))}
    assert set(kept(found)) == {*others, "lm_head"}
    convert(str(tmp_path / "out"), str(tmp_path / "back"), dtype="bf16")
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.bfloat16)
    assert_same(*(load(tmp_path / name).state_dict() for name in ("back", "out")))


@pytest.mark.parametrize("parts", [
    ("k_proj", "q_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("c_fc_0", "c_fc_1"),
    ("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"),
])  # fmt: skip
def test_weights_that_servers_fuse_are_quantized_together_or_not_at_all(tmp_path, parts):
    fused, router = [f"model.layers.0.part.{part}.weight" for part in parts], "model.layers.0.mlp.gate.weight"
    tensors = {name: torch.rand(128, 128) for name in (*fused, LAYER, router)}
    found = quantized(tmp_path, {**tensors, fused[0]: torch.rand(64, 128)})
    assert [name for name, t in found.tensors.items() if t.dtype == torch.float8_e4m3fn] == [LAYER]
    assert kept(found) == sorted(["lm_head", *(name.removesuffix(".weight") for name in (*fused, router))])
    notes = " ".join(found.report.notes)
    assert f"1 weight is not quantized: the sizes are not multiples of 128: {fused[0]}" in notes
    said = f"not quantized: fused by servers with a weight that is not quantized: {', '.join(fused[1:])}"
    assert said in notes and "chosen by name" in notes


@pytest.mark.parametrize(("tensors", "options", "error", "said"), [
    ({LAYER: torch.full((128, 128), torch.nan)}, {}, CheckpointMismatchError, "' has elements that are"),
    ({"a": torch.rand(128, 128)}, {}, UsageError, "none of 1 tensors is a matrix of floats"),
    ({LAYER: torch.rand(128, 128)}, {"to": "dcp"}, UsageError, "cannot be combined with --to dcp"),
    ({LAYER: torch.rand(128, 128)}, {"quantize": "int4"}, UsageError, "Known: fp8-block"),
    ({f"base_model.model.a.lora_{half}.weight": torch.rand(2, 2) for half in "AB"}, {}, UsageError, "Add --merge-"),
])  # fmt: skip
def test_weights_that_cannot_be_quantized_are_refused(tmp_path, tensors, options, error, said):
    with pytest.raises(error, match=said):
        quantized(tmp_path, tensors, **options)
    assert names(tmp_path) == ["src"]


def test_stacked_experts_are_kept_and_named(tmp_path):
    stacked = torch.randn(2, 128, 256).bfloat16()
    experts = [f"model.layers.0.mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")]
    found = quantized(tmp_path, {LAYER: torch.randn(128, 128).bfloat16(), **dict.fromkeys(experts, stacked)})
    assert found.tensors[LAYER].dtype == torch.float8_e4m3fn
    assert all(torch.equal(found.tensors[name], stacked) for name in experts)
    assert kept(found) == ["lm_head", "model.layers.0.mlp.experts"]
    (note,) = (
        note for note in found.report.notes if "2 tensors are not quantized; matrices of several experts" in note
    )
    assert all(name in note for name in experts)


def test_an_adapter_is_merged_into_an_fp8_base_only_if_it_is_dequantized(tmp_path):
    module = "model.layers.0.mlp.up_proj"
    torch.manual_seed(0)
    tensors = {f"{module}.weight": torch.randn(256, 128).bfloat16(), LAYER: torch.randn(128, 256).bfloat16()}
    quantized(tmp_path, tensors)
    base, plain, lora = (str(tmp_path / name) for name in ("out", "plain", "lora"))
    factors = {"A": torch.randn(4, 128), "B": torch.randn(256, 4)}
    write_model(Path(lora), {f"base_model.model.{module}.lora_{x}.weight": t for x, t in factors.items()})
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"]}
    Path(lora, "adapter_config.json").write_text(json.dumps(config))
    convert(base, plain, dtype="bf16")

    def merged(name: str, base: str, **options: Any) -> Result:
        return converted(lora, tmp_path / name, base=base, merge_adapter=True, verify=True, **options)

    with pytest.raises(UnsupportedFormatError, match="--dtype bf16"):
        merged("refused", base)
    found = merged("found", base, dtype="bf16")
    assert_same(found.tensors, merged("want", plain).tensors)
    assert found.tensors.keys() == tensors.keys() and "quantization_config" not in found.config
    eight = merged("eight", base, quantize="fp8-block").tensors
    assert eight.keys() == {*tensors, *(f"{name}_scale_inv" for name in tensors)}
    assert_same(eight, converted(tmp_path / "want", tmp_path / "again", quantize="fp8-block").tensors)
