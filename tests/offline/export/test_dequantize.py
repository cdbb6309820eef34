"""FP8 weights in another dtype: the bits of transformers, for all codes, kinds of scales and edge blocks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from ckptkit import convert
from ckptkit.errors import CheckpointMismatchError, UnsupportedFormatError
from tests.lazy import modules_after
from tests.offline.exports import Result, assert_same, converted, write_model
from tests.offline.folders import copied, refused

COMPRESSED = {"quant_method": "compressed-tensors"}
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def codes(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """Return a tensor with every code, including NaN and infinity."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel) % 256).to(torch.uint8).reshape(shape).view(dtype)


def export(path: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any] | None = BLOCKS) -> str:
    return write_model(
        path, tensors, {"model_type": "llama", **({"quantization_config": settings} if settings else {})}
    )


def dequantized(path: Path, tensors: Any, settings: Any = BLOCKS, *, note: str = "", **options: Any) -> Result:
    """Write an export to <path>/src and convert it to <path>/out; the report must have this note."""
    found = converted(export(path / "src", tensors, settings), path / "out", **{"dtype": "bf16", **options})
    assert "quantization_config" not in found.config
    assert not note or note in found.report.notes
    return found


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare tensors; NaN may have any payload."""
    assert found.dtype == expected.dtype and torch.equal(found.isnan(), expected.isnan())
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
def test_fp8_blocks_have_the_values_of_transformers(tmp_path, kind, code, dtype):
    torch.manual_seed(0)
    weight, scale, norm = codes(256, 384, dtype=code), SCALES[kind](2, 3), torch.rand(8).bfloat16()
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, "norm.weight": norm}
    found = dequantized(tmp_path, tensors, note=f"1 FP8 weight dequantized to {dtype}", dtype=dtype, verify=True)
    assert found.tensors.keys() == {"a.weight", "norm.weight"}
    plain = by_transformers(weight, scale, torch.float32)
    if kind == "e8m0" and plain[plain.isfinite()].max() > 100 * torch.finfo(code).max:
        pytest.skip("this transformers takes the exponents of e8m0 scales for values")
    same(found.tensors["a.weight"], by_transformers(weight, scale, DTYPES[dtype]))
    same(found.tensors["norm.weight"], norm.to(DTYPES[dtype]))


@pytest.mark.parametrize("shape", [(256, 256), (2, 2)])  # looked up in a table, and computed
def test_elements_that_become_infinite_are_counted(tmp_path, shape):
    weight = torch.full(shape, 400.0).to(E4M3)
    weight[0, 0] = 1.0
    tensors = {"a.weight": weight, "a.weight_scale": torch.tensor([200.0])}
    found = dequantized(tmp_path, tensors, COMPRESSED, dtype="fp16")
    assert found.report.infinite == {"a.weight": weight.numel() - 1}


@pytest.mark.parametrize("shape", [(300, 200), (128, 1), (1, 129), (129, 128), (5, 300, 130), (4096, 1024)])
def test_edge_blocks_and_pieces_that_fit_into_memory_have_the_block_size_of_the_config(tmp_path, shape):
    torch.manual_seed(0)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    weight, scale = codes(*shape), torch.rand(grid)
    found = dequantized(tmp_path, {"w.weight": weight, "w.weight_scale_inv": scale}, max_memory="16MB", workers=4)
    wide = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]]
    same(found.tensors["w.weight"], (weight.float() * wide).bfloat16())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (40,), (40, 1)])
def test_a_scale_may_belong_to_the_tensor_or_to_a_row(tmp_path, shape):
    torch.manual_seed(0)
    weight, scale = codes(40, 64), torch.rand(shape).bfloat16()
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.input_scale": torch.ones(1)}
    found = dequantized(tmp_path, tensors, COMPRESSED)
    assert found.tensors.keys() == {"a.weight"}
    factor = scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())
    same(found.tensors["a.weight"], (weight.float() * factor.float()).bfloat16())


@pytest.mark.parametrize("to", ["dcp", "torch"])
def test_checkpoints_of_other_formats_are_dequantized(tmp_path, to):
    tensors = {"a.weight": codes(128, 128), "a.weight_scale_inv": torch.full((1, 1), 0.5)}
    converted(export(tmp_path / "src", tensors), tmp_path / "out", dtype="bf16", to=to)
    assert to == "torch" or "quantization_config" not in (tmp_path / "out/config.json").read_text()
    back = converted(tmp_path / "out", tmp_path / "back")
    same(back.tensors["a.weight"], (tensors["a.weight"].float() * 0.5).bfloat16())


def test_a_parameter_called_scale_is_not_a_quantization_scale(tmp_path):
    tensors = {"logit_scale": torch.rand(()), "a.weight": torch.rand(2, 2)}
    found = converted(export(tmp_path / "src", tensors, None), tmp_path / "out", dtype="bf16")
    assert_same(found.tensors, {name: tensor.bfloat16() for name, tensor in tensors.items()})


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def mxfp4(name: str, experts: int = 3) -> dict[str, torch.Tensor]:
    """Return experts with each byte of two codes and each exponent."""
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(experts, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1).repeat(experts, 1, 16)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales.roll(1, 0)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_has_the_values_of_transformers(tmp_path, dtype):
    reference = pytest.importorskip("transformers.integrations.mxfp4")
    if Version(transformers.__version__) < Version("5.20"):
        pytest.skip("this transformers makes NaN of the largest exponents")
    tensors = {**mxfp4("experts.down_proj"), "experts.down_proj_bias": torch.rand(3, 256).bfloat16()}
    options = {"note": f"1 MXFP4 weight dequantized to {dtype}", "dtype": dtype, "max_memory": "16MB"}
    found = dequantized(tmp_path, tensors, MXFP4, verify=True, **options)
    weight = reference.convert_moe_packed_tensors(*list(tensors.values())[:2], dtype=DTYPES[dtype])
    bias = tensors["experts.down_proj_bias"].to(DTYPES[dtype])
    assert_same(found.tensors, {"experts.down_proj": weight, "experts.down_proj_bias": bias})


@pytest.mark.parametrize(
    "tensors", [mxfp4("m.gate_up_proj"), {"a.weight": codes(8, 8), "a.weight_scale": torch.ones(1)}]
)
def test_a_base_with_the_same_quantization_has_the_same_names(tmp_path, tensors):
    src = export(tmp_path / "src", tensors, {"quant_method": "any"})
    report = convert(src, str(tmp_path / "out"), dtype="bf16", base=src)
    assert any("names and shapes match" in fact for fact in report.proved)


def packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack signed integers: each row is one number in 32-bit words, the first integer lowest."""
    rows = []
    for row in numbers.tolist():
        value = sum(number + (1 << bits - 1) << i * bits for i, number in enumerate(row))
        words = -(-len(row) * bits // 32)
        rows.append([value >> 32 * i & 0xFFFFFFFF for i in range(words)])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def by_groups(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_integers_have_the_values_of_compressed_tensors(tmp_path, bits, strategy, symmetric, kind):
    torch.manual_seed(0)
    rows, columns = 36, 64
    low = -(1 << bits - 1)
    q = (torch.arange(rows * columns) % (1 << bits) + low).reshape(rows, columns)[torch.randperm(rows)]
    grid = {"group": (rows, 2), "channel": (rows, 1), "tensor": (1,)}[strategy]
    scale, zero = (torch.randn(grid) * 0.01).to(kind), torch.randint(low, -low, grid)
    tensors = {"a.weight_packed": packed(q, bits), "a.weight_scale": scale, "a.bias": torch.rand(rows)}
    tensors["a.weight_shape"] = torch.tensor([rows, columns])
    if not symmetric and strategy == "tensor":
        tensors["a.weight_zero_point"] = zero.to(torch.int8)
    elif not symmetric:
        tensors["a.weight_zero_point"] = packed(zero.T, bits).T.contiguous()
    settings = by_groups(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, group_size=32)
    note = f"1 INT{bits} weight dequantized to fp32"
    found = dequantized(tmp_path, tensors, settings, note=note, dtype="fp32", verify=True)
    wide = [t.repeat_interleave(columns // grid[-1], 1) if t.ndim > 1 else t for t in (scale, zero)]
    expected = (q.to(kind) - wide[1].to(kind) if not symmetric else q.to(kind)) * wide[0]
    assert_same(found.tensors, {"a.weight": expected.float(), "a.bias": tensors["a.bias"]})


def test_int8_weights_have_the_values_of_compressed_tensors(tmp_path):
    q, scale = torch.arange(-128, 128, dtype=torch.int8).reshape(4, 64), (torch.rand(4, 1) * 0.01).bfloat16()
    tensors, settings = {"a.weight": q, "a.weight_scale": scale}, by_groups(num_bits=8, strategy="channel")
    assert_same(dequantized(tmp_path, tensors, settings, verify=True).tensors, {"a.weight": q.bfloat16() * scale})


def nvfp4() -> dict[str, torch.Tensor]:
    """Return rows with each pair of codes, and each scale in FP8."""
    pairs = torch.arange(256, dtype=torch.uint8).repeat(32, 1)
    return {"a.weight_packed": pairs, "a.weight_scale": codes(32, 32), "a.weight_global_scale": torch.tensor([2731.0])}


FP4_WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def fp4_values(pairs: torch.Tensor) -> torch.Tensor:
    """Return the FP4 values: a sign, two bits of exponent and one of mantissa."""
    code = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2).int()
    exponent, mantissa = code >> 1 & 3, (code & 1).double()
    size = torch.where(exponent > 0, (1 + mantissa / 2) * 2.0 ** (exponent - 1), mantissa / 2)
    return torch.where(code > 7, -size, size)


@pytest.mark.parametrize(
    ("kind", "dtype"), [*(("NVFP4", dtype) for dtype in ("bf16", "fp16", "fp32")), ("MXFP4", "bf16")]
)
def test_fp4_weights_have_the_values_of_compressed_tensors(tmp_path, kind, dtype):
    tensors, settings = nvfp4(), FP4_WEIGHTS
    scale = tensors["a.weight_scale"].float() / tensors["a.weight_global_scale"]
    if kind == "MXFP4":
        exponents = (torch.arange(32 * 16) % 256).to(torch.uint8).reshape(32, 16)
        tensors = {"a.weight_packed": tensors["a.weight_packed"], "a.weight_scale": exponents}
        settings = {**FP4_WEIGHTS, "strategy": "group", "group_size": 32}
        scale = torch.pow(2.0, exponents.float() - 127)
    note = f"1 {kind} weight dequantized to {dtype}"
    found = dequantized(tmp_path, tensors, by_groups(**settings), note=note, dtype=dtype, verify=True)
    expected = fp4_values(tensors["a.weight_packed"]).float() * scale.repeat_interleave(512 // scale.shape[1], 1)
    same(found.tensors["a.weight"], expected.bfloat16().to(DTYPES[dtype]))


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


INT4 = {
    "a.weight_packed": torch.zeros(8, 8, dtype=torch.int32), "a.weight_scale": torch.ones(8, 2),
    "a.weight_shape": torch.tensor([8, 64]),
}  # fmt: skip
OF_INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
MISMATCH, UNKNOWN, OTHER = CheckpointMismatchError, UnsupportedFormatError, {"quant_method": "other"}


@pytest.mark.parametrize(("tensors", "settings", "error", "said"), [
    ({"a.weight": codes(8, 8)}, BLOCKS, MISMATCH, "the scales of 1 FP8 tensors are missing: a.weight"),
    ({"a.weight": codes(128, 128), "a.weight_scale_inv": torch.rand(3, 5)}, BLOCKS, MISMATCH,
     r"'a.weight' \[128, 128\] has a scale \[3, 5\]"),
    ({"a.qweight": torch.ones(4, 4).int()}, BLOCKS, UNKNOWN, "cannot dequantize 1 packed tensors.*a.qweight"),
    ({"a.gate_up_proj_blocks": torch.ones(4).byte()}, BLOCKS, UNKNOWN, "cannot dequantize 1 packed"),
    ({"a.down_proj_blocks": torch.ones(2, 4, 3, 16).byte(), "a.down_proj_scales": torch.ones(2, 4, 2).byte()},
     BLOCKS, MISMATCH, r"'a.down_proj_blocks' is uint8 \[2, 4, 3, 16\], and its scales uint8 \[2, 4, 2\]"),
    (without(INT4, "a.weight_scale"), by_groups(**OF_INT4), MISMATCH, "its scale a.weight_scale is missing"),
    ({**INT4, "a.weight_scale": torch.ones(8, 3)}, by_groups(**OF_INT4), MISMATCH, r"scale \[8, 3\] do not fit"),
    (INT4, by_groups(**{**OF_INT4, "symmetric": False}), MISMATCH, "zero points a.weight_zero_point are missing"),
    ({**INT4, "a.weight_g_idx": torch.ones(64)}, by_groups(**OF_INT4), UNKNOWN, "reordered by group"),
    (INT4, by_groups(**{**OF_INT4, "num_bits": 3}), UNKNOWN, "stores 3-bit integers as int32"),
    (INT4, by_groups(**{**OF_INT4, "strategy": "block"}), UNKNOWN, "its strategy is 'block'"),
    ({**INT4, "a.weight_shape": torch.tensor([8, 63])}, by_groups(**OF_INT4), UNKNOWN, r"the shape \[8, 63\]"),
    (without(nvfp4(), "a.weight_global_scale"), by_groups(**FP4_WEIGHTS), MISMATCH, "a.weight_global_scale is missing"),
    ({**nvfp4(), "a.weight_scale": codes(32, 16)}, by_groups(**FP4_WEIGHTS), MISMATCH, r"expected \[32, 32\]"),
    (nvfp4(), by_groups(**{**FP4_WEIGHTS, "group_size": 32}), UNKNOWN, "float8_e4m3fn scale for each"),
    # FP8 weights are never copied under a dtype, even if the config names no quantization.
    ({"a.weight": codes(4, 4), "b.weight": torch.ones(4)}, None, MISMATCH,
     r"the scales of 1 FP8 tensors are missing: a\.weight"),
    ({"a.weight": INT4["a.weight_packed"].char(), "a.weight_scale": torch.ones(8, 2)}, OTHER, UNKNOWN,
     "cannot dequantize 1 packed tensors.*a.weight"),
])  # fmt: skip
def test_what_cannot_be_dequantized_is_refused_by_name_and_can_be_copied(tmp_path, tensors, settings, error, said):
    src = export(tmp_path / "src", tensors, settings)
    refused(error, said, convert, src, tmp_path / "out", dtype="bf16")
    copied = converted(src, tmp_path / "out")
    assert_same(copied.tensors, tensors)
    assert copied.config.get("quantization_config") == settings


def test_a_quantization_group_that_names_a_module_is_preferred(tmp_path):
    settings = by_groups(num_bits=8, type="int", symmetric=True, strategy="channel")
    settings["config_groups"]["h"] = {"targets": ["re:.*mlp$"], "weights": OF_INT4}
    tensors = {**{f"x.mlp.{key[2:]}": tensor for key, tensor in INT4.items()}, "b.weight": torch.ones(2, 4).char()}
    tensors["b.weight_scale"] = torch.ones(2, 1)
    dequantized(tmp_path, tensors, settings, note="2 INT4 and INT8 weights dequantized to bf16")


QUANTIZED: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]] = {
    "fp8": ({"a.weight": codes(256, 256), "a.weight_scale_inv": torch.ones(2, 2)}, BLOCKS),
    "fp8 of rows": ({"a.weight": codes(8, 32), "a.weight_scale": torch.arange(8.0)[:, None]}, COMPRESSED),
    "mxfp4": (mxfp4("experts.down_proj"), MXFP4),
    "int4": (INT4, by_groups(**OF_INT4)),
    "nvfp4": (nvfp4(), by_groups(**FP4_WEIGHTS)),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_dequantizing_does_not_import_torch(tmp_path, kind):
    src = export(tmp_path / "src", *QUANTIZED[kind])
    other = str(copied(Path(src), tmp_path / "copy"))
    code = f"convert({src!r}, '{tmp_path}/a', dtype='bf16', verify=True); "
    code += f"merge([{src!r}, {other!r}], '{tmp_path}/b', verify=True)"
    assert "torch" not in modules_after(f"from ckptkit import convert, merge; {code}")
