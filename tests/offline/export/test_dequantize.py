"""FP8 weights in another dtype: the bits of transformers, over all codes, kinds of scales and edges of blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit import convert
from ckptkit.errors import CheckpointMismatchError, UnsupportedFormatError

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def codes(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """A tensor in which every code occurs, NaN and infinity included."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel) % 256).to(torch.uint8).reshape(shape).view(dtype)


def export(path: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any] | None = BLOCKS) -> str:
    path.mkdir()
    save_file(dict(tensors), path / "model.safetensors")
    config: dict[str, Any] = {"model_type": "llama"}
    if settings is not None:
        config["quantization_config"] = dict(settings)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN may have any payload."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def by_transformers(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    made: torch.Tensor = fp8.Fp8Dequantize(None)._dequantize_one(weight, scale, dtype)
    return made


SCALES = {
    "fp32": lambda *shape: torch.rand(shape) * 3e-3,
    "bf16": lambda *shape: (torch.rand(shape) * 3e-3).bfloat16(),
    "e8m0": lambda *shape: (torch.arange(torch.Size(shape).numel()) % 9 + 120).to(torch.uint8).reshape(shape),
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("code", [E4M3, E5M2])
def test_blocks_have_the_values_of_transformers(tmp_path: Path, kind: str, code: torch.dtype, dtype: str) -> None:
    torch.manual_seed(0)
    weight, scale = codes(256, 384, dtype=code), SCALES[kind](2, 3)
    norm = torch.rand(8).bfloat16()
    src = export(tmp_path / "src", {"a.weight": weight, "a.weight_scale_inv": scale, "norm.weight": norm})
    report = convert(src, str(tmp_path / "out"), dtype=dtype, verify=True)
    assert "1 FP8 weights dequantized to " + dtype in report.notes
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    assert found.keys() == {"a.weight", "norm.weight"}
    same(found["a.weight"], by_transformers(weight, scale, wanted))
    same(found["norm.weight"], norm.to(wanted))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("shape", [(300, 200), (128, 1), (1, 129), (129, 128), (5, 300, 130)])
def test_blocks_at_the_edge_are_of_the_size_that_the_config_states(tmp_path: Path, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    weight, scale = codes(*shape), torch.rand(grid)
    src = export(tmp_path / "src", {"w.weight": weight, "w.weight_scale_inv": scale})
    convert(src, str(tmp_path / "out"), dtype="bf16")
    wide = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]]
    same(load_file(tmp_path / "out" / "model.safetensors")["w.weight"], (weight.float() * wide).bfloat16())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (40,), (40, 1)])
def test_a_scale_may_be_of_the_tensor_or_of_a_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight, scale = codes(40, 64), torch.rand(shape).bfloat16()
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.input_scale": torch.ones(1)}
    src = export(tmp_path / "src", tensors, {"quant_method": "compressed-tensors"})
    convert(src, str(tmp_path / "out"), dtype="bf16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"a.weight"}
    factor = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
    same(found["a.weight"], (weight.float() * factor.float()).bfloat16())


def test_memory_and_workers_change_no_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {"a.weight": codes(4096, 1024), "a.weight_scale_inv": torch.rand(32, 8)}
    src = export(tmp_path / "src", tensors)
    convert(src, str(tmp_path / "one"), dtype="bf16", workers=1)
    convert(src, str(tmp_path / "two"), dtype="bf16", workers=4, max_memory="16MB")
    one, two = (load_file(tmp_path / name / "model.safetensors")["a.weight"] for name in ("one", "two"))
    assert torch.equal(one.view(torch.int16), two.view(torch.int16))


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_other_formats_are_dequantized_too(tmp_path: Path, to: Any) -> None:
    tensors = {"a.weight": codes(128, 128), "a.weight_scale_inv": torch.full((1, 1), 0.5)}
    src = export(tmp_path / "src", tensors)
    convert(src, str(tmp_path / "out"), to=to, dtype="bf16")
    convert(str(tmp_path / "out"), str(tmp_path / "back"))
    found = load_file(tmp_path / "back" / "model.safetensors")
    same(found["a.weight"], (tensors["a.weight"].float() * 0.5).bfloat16())


def test_kept_as_they_are_weights_and_scales_are_copied(tmp_path: Path) -> None:
    tensors = {"a.weight": codes(128, 128), "a.weight_scale_inv": torch.rand(1, 1)}
    src = export(tmp_path / "src", tensors)
    convert(src, str(tmp_path / "out"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["a.weight"].dtype == E4M3
    assert torch.equal(found["a.weight_scale_inv"], tensors["a.weight_scale_inv"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"] == BLOCKS


@pytest.mark.parametrize(
    ("tensors", "error", "said"),
    [
        ({"a.weight": codes(128, 128)}, CheckpointMismatchError, "the scales of 1 FP8 tensors are missing: a.weight"),
        (
            {"a.weight": codes(128, 128), "a.weight_scale_inv": torch.rand(3, 5)},
            CheckpointMismatchError,
            r"'a.weight' \[128, 128\] has a scale \[3, 5\]",
        ),
        (
            {"a.qweight": torch.ones(4, 4).int()},
            UnsupportedFormatError,
            "1 tensors are packed by quantization.*a.qweight",
        ),
        ({"a.gate_up_proj_blocks": torch.ones(4).byte()}, UnsupportedFormatError, "packed by quantization"),
    ],
)
def test_what_cannot_be_dequantized_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], error: type[Exception], said: str
) -> None:
    src = export(tmp_path / "src", tensors)
    with pytest.raises(error, match=said):
        convert(src, str(tmp_path / "out"), dtype="bf16")
    assert not (tmp_path / "out").exists()
    convert(src, str(tmp_path / "out"))


def test_a_parameter_called_scale_is_no_scale(tmp_path: Path) -> None:
    tensors = {"logit_scale": torch.rand(()), "a.weight": torch.rand(2, 2)}
    src = export(tmp_path / "src", tensors, None)
    convert(src, str(tmp_path / "out"), dtype="bf16")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["logit_scale"], tensors["logit_scale"].bfloat16())
