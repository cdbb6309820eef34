"""`convert --quantize fp8-block`: the bits of transformers, and the weights that its quantizer chooses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit import convert
from ckptkit.errors import CheckpointMismatchError, UsageError

LAYER = "model.layers.0.mlp.down_proj.weight"


def export(path: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None) -> str:
    path.mkdir()
    save_file(dict(tensors), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config or {"model_type": "unknown"}))
    return str(path)


def by_transformers(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    settings = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    made: dict[str, torch.Tensor] = fp8.Fp8Quantize(SimpleNamespace(quantization_config=settings))._quantize_one(
        LAYER, weight
    )
    return made


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))


def weights(dtype: torch.dtype) -> torch.Tensor:
    """Return every finite bfloat16 number whose block has a scale, a block of zeros, and normal numbers."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = torch.where(every.isfinite(), every, torch.zeros_like(every)).reshape(4 * 128, 128)
    torch.manual_seed(0)
    made = torch.cat((torch.zeros(128, 128), every.float(), torch.randn(7 * 128, 128) * 0.02))
    wide = torch.cat((made, made.flip(0)), 1)
    return wide.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_and_scales_have_the_bits_of_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = weights(dtype)
    weight = torch.where(weight.isfinite(), weight, torch.zeros_like(weight))  # float16 cannot hold these
    src = export(tmp_path / "src", {LAYER: weight, "model.norm.weight": torch.rand(4).to(dtype)})
    report = convert(src, str(tmp_path / "out"), quantize="fp8-block", verify=True, max_memory="16MB", workers=2)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {LAYER, f"{LAYER}_scale_inv", "model.norm.weight"}
    for name, tensor in by_transformers(weight).items():
        same(found[name], tensor)
    assert found["model.norm.weight"].dtype == dtype
    assert "1 weights quantized to FP8 in blocks of 128 x 128" in report.notes
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    assert config["dtype"] == str(dtype).removeprefix("torch.")


def test_the_bits_do_not_depend_on_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    src = export(tmp_path / "src", {LAYER: torch.randn(4096, 1024)})
    for name, memory in (("one", "512MB"), ("two", "16MB")):
        convert(src, str(tmp_path / name), quantize="fp8-block", max_memory=memory)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        same(two[name], tensor)


def test_values_too_small_for_a_scale_become_zeros(tmp_path: Path) -> None:
    src = export(tmp_path / "src", {LAYER: torch.full((128, 128), 1e-38)})
    convert(src, str(tmp_path / "out"), quantize="fp8-block")
    convert(str(tmp_path / "out"), str(tmp_path / "back"), dtype="fp32")
    assert not load_file(tmp_path / "back" / "model.safetensors")[LAYER].any()


def model(kind: str, **settings: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return tensors and config.json of a small model, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    common: dict[str, Any] = {
        "num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64,
        "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**common, **settings})
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16(), config


MODELS = {
    "Llama": {},
    "Qwen3Moe": {"num_experts": 2, "moe_intermediate_size": 128, "num_experts_per_tok": 1, "decoder_sparse_step": 1},
}


@pytest.mark.parametrize("kind", MODELS)
def test_transformers_loads_the_export_as_its_own_quantization(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    live, _ = model(kind, **MODELS[kind])
    live.save_pretrained(tmp_path / "src")
    report = convert(str(tmp_path / "src"), str(tmp_path / "out"), quantize="fp8-block", verify=True)
    assert not any("chosen by name" in note for note in report.notes)
    found = load_file(tmp_path / "out" / "model.safetensors")
    plain = load_file(tmp_path / "src" / "model.safetensors")
    eight = {name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn}
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert eight == {name for name in plain if name.split(".")[-2] in parts}
    assert found.keys() == plain.keys() | {f"{name}_scale_inv" for name in eight}
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    others = {name.removesuffix(".weight") for name in plain if name.endswith(("mlp.gate.weight", "lm_head.weight"))}
    assert set(settings["modules_to_not_convert"]) == {*others, "lm_head"}
    convert(str(tmp_path / "out"), str(tmp_path / "back"), dtype="bf16")
    ours, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16).state_dict()
        for name in ("back", "out")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_weights_that_servers_fuse_are_quantized_together_or_not_at_all(tmp_path: Path) -> None:
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
    tensors = {name: torch.rand(64 if "k_proj" in name else 128, 128) for name in names}
    src = export(tmp_path / "src", {**tensors, "model.layers.0.mlp.gate.weight": torch.rand(128, 128)})
    report = convert(src, str(tmp_path / "out"), quantize="fp8-block")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert [name for name in found if found[name].dtype == torch.float8_e4m3fn] == names[-1:]
    assert "1 weights are not quantized, because their sizes are not multiples of 128" in report.notes
    assert any("chosen by name" in note for note in report.notes)
    kept = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert kept == sorted([*(name.removesuffix(".weight") for name in names[:3]), "lm_head", "model.layers.0.mlp.gate"])


@pytest.mark.parametrize(
    ("tensors", "options", "error", "said"),
    [
        ({LAYER: torch.full((128, 128), torch.nan)}, {}, CheckpointMismatchError, "' has elements that are"),
        ({"a": torch.rand(128, 128)}, {}, UsageError, "none of 1 tensors is a matrix of floats"),
        ({LAYER: torch.rand(128, 128)}, {"to": "dcp"}, UsageError, "cannot be combined with --to dcp"),
        ({LAYER: torch.rand(128, 128)}, {"quantize": "int4"}, UsageError, "Known: fp8-block"),
        (
            {f"base_model.model.a.lora_{half}.weight": torch.rand(2, 2) for half in "AB"},
            {}, UsageError, "Add --merge-adapter",
        ),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_quantized_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], options: dict[str, Any], error: type[Exception], said: str
) -> None:
    src = export(tmp_path / "src", tensors)
    with pytest.raises(error, match=said):
        convert(src, str(tmp_path / "out"), **{"quantize": "fp8-block", **options})
    assert not (tmp_path / "out").exists()


def adapter(path: Path, module: str) -> str:
    path.mkdir()
    name = f"base_model.model.{module}"
    torch.manual_seed(1)
    factors = {f"{name}.lora_A.weight": torch.randn(4, 128), f"{name}.lora_B.weight": torch.randn(256, 4)}
    save_file(factors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [module.rpartition(".")[2]]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def test_stacked_experts_are_kept_and_named(tmp_path: Path) -> None:
    stacked = torch.randn(2, 128, 256).bfloat16()
    names = [f"model.layers.0.mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")]
    state = {LAYER: torch.randn(128, 128).bfloat16(), **dict.fromkeys(names, stacked)}
    state = {name: tensor.clone() for name, tensor in state.items()}
    report = convert(export(tmp_path / "src", state), str(tmp_path / "out"), quantize="fp8-block")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found[LAYER].dtype == torch.float8_e4m3fn
    assert all(torch.equal(found[name], stacked) for name in names)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == ["lm_head", "model.layers.0.mlp.experts"]
    assert any("2 tensors that stack" in note and all(name in note for name in names) for note in report.notes)


def test_an_adapter_is_merged_into_a_dequantized_fp8_base(tmp_path: Path) -> None:
    module = "model.layers.0.mlp.up_proj"
    torch.manual_seed(0)
    tensors = {f"{module}.weight": torch.randn(256, 128).bfloat16(), LAYER: torch.randn(128, 256).bfloat16()}
    bf16 = export(tmp_path / "bf16", tensors)
    base, plain = str(tmp_path / "base"), str(tmp_path / "plain")
    convert(bf16, base, quantize="fp8-block")
    convert(base, plain, dtype="bf16")
    lora = adapter(tmp_path / "lora", module)
    options: dict[str, Any] = {"merge_adapter": True, "verify": True}
    convert(lora, str(tmp_path / "want"), base=plain, **options)
    convert(lora, str(tmp_path / "found"), base=base, dtype="bf16", **options)
    want, found = (load_file(tmp_path / name / "model.safetensors") for name in ("want", "found"))
    assert found.keys() == want.keys() == tensors.keys()
    for name, tensor in want.items():
        same(found[name], tensor)
    assert "quantization_config" not in json.loads((tmp_path / "found" / "config.json").read_text())
    convert(str(tmp_path / "want"), str(tmp_path / "again"), quantize="fp8-block")
    convert(lora, str(tmp_path / "eight"), base=base, quantize="fp8-block", **options)
    again, eight = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "eight"))
    assert eight.keys() == again.keys() == {*tensors, *(f"{name}_scale_inv" for name in tensors)}
    for name, tensor in again.items():
        same(eight[name], tensor)


def test_merging_into_an_fp8_base_needs_dtype(tmp_path: Path) -> None:
    module = "model.layers.0.mlp.up_proj"
    base = str(tmp_path / "base")
    convert(export(tmp_path / "bf16", {f"{module}.weight": torch.randn(256, 128)}), base, quantize="fp8-block")
    with pytest.raises(Exception, match="--dtype bf16"):
        convert(adapter(tmp_path / "lora", module), str(tmp_path / "out"), base=base, merge_adapter=True)
