"""Plans the dequantization of weights: finds each weight's scale and the formula that applies it.

Formats: block FP8 (`weight_scale_inv`; DeepSeek-V3 and transformers' `fp8`), FP8 with one scale per tensor or row
(`weight_scale`; compressed-tensors and fbgemm), MXFP4 (`_blocks` and `_scales`; gpt-oss), and the packed formats of
compressed-tensors (integers, and FP4 with one scale per group). The arithmetic is in `dequantize_formulas`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import TensorEntry
from ckptkit.catalog.targets import Part, Target
from ckptkit.errors import CheckpointMismatchError, UnsupportedFormatError
from ckptkit.formats.dcp.subclasses import ERROR_BITS
from ckptkit.offline.copying.plan import Bytes, ComputedTensor, OutputTensor
from ckptkit.offline.export import dequantize_formulas as formulas
from ckptkit.offline.export.adapter_merge import assembled
from ckptkit.offline.export.dequantize_formulas import Stored
from ckptkit.units import counted, first_few

_SCALES = ("_scale_inv", "_scale")
# Scales of activations, which only a quantized model uses.
_OF_INPUTS = re.compile(r".+\.(?:input_scale|input_scale_ub|input_global_scale|activation_scale)")
# Weights stored as integers: GPTQ, AWQ, compressed-tensors, MXFP4, bitsandbytes.
_PACKED = re.compile(
    r".+(?:\.qweight|\.weight_packed|\.weight_shape|\.weight_zero_point|\.weight_g_idx|\.weight_global_scale|_blocks|\.qzeros|\.absmax|\.quant_map|\.SCB)"
)


@dataclass(frozen=True, slots=True)
class Dequantized:
    """The tensors to write after dequantization.

    Attributes:
        targets: All tensors to write, without scales.
        made: The dequantized weights, by the key of the quantized weight in the source.
        whole: The tensors that are not dequantized, by key in the source. Needed if an output tensor takes only a part
            of such a tensor.
        dropped: The reason why each scale was dropped, by the scale's key in the source.
        names: Maps the name of each stored tensor (quantized values, scale) to the name of its weight, or to "" if the
            tensor is a scale of activations.
    """

    targets: dict[str, Target]
    made: dict[str, ComputedTensor] = field(default_factory=dict)
    whole: dict[str, Target] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    dtype: str = ""

    def note(self) -> str:
        kinds = " and ".join(dict.fromkeys(weight.label.partition(" ")[0] for weight in self.made.values()))
        return f"{counted(len(self.made), f'{kinds} weight')} dequantized to {self.dtype}"

    def computed(self, tensors: Mapping[str, OutputTensor]) -> dict[str, OutputTensor]:
        """Return `tensors`, with copies of quantized weights replaced by dequantized tensors."""
        return assembled(tensors, {}, {**self.whole, **self.made})


# A dequantized weight in two forms: a target, which key maps can rename, and a tensor that is computed. The first input
# of the computed tensor is the codes. Scales and other inputs follow.
_Weight: TypeAlias = tuple[Target, ComputedTensor]


def dequantize(targets: Mapping[str, Target], dtype: str, config: Mapping[str, Any] | None) -> Dequantized:
    """Return the tensors to write (`targets`), with quantized weights dequantized to `dtype`.

    If `dtype` is "keep", returns the tensors unchanged.

    Args:
        config: The model's config.json, which contains the block size.

    Raises:
        CheckpointMismatchError: A weight's scale is missing or has the wrong shape.
        UnsupportedFormatError: ckptkit cannot dequantize the weights.
    """
    if dtype == "keep":
        return Dequantized(dict(targets))
    wanted = dtype_of(dtype).name
    settings = (config or {}).get("quantization_config")
    settings = settings if isinstance(settings, Mapping) else {}
    eight = [name for name, target in targets.items() if dtype_of(target.source_dtype).kind == "float8"]
    eight = [name for name in eight if not any(name.endswith(end) for end in _SCALES) and not _is_small(targets[name])]
    scaled = [name for name in eight if _scale_of(name, targets)]
    if not (settings or eight or any(_is_packed(name, targets) for name in targets)):
        return Dequantized(dict(targets))
    weights = [_mxfp4(name, targets, wanted) for name in targets if _is_mxfp4(name, targets)]
    weights += [_packed(n, targets, settings, wanted) for n in targets if _is_packed_weight(n, targets, settings)]
    read = {item.name for _, weight in weights for item in weight.read}
    packed = [name for name in targets if name not in read and _is_packed(name, targets)]
    if packed:
        raise UnsupportedFormatError(
            f"--dtype {dtype}: ckptkit cannot dequantize {len(packed)} packed tensors: {first_few(packed)}. Keep them "
            "with --dtype keep."
        )
    alone = [name for name in eight if name not in scaled]
    if alone:
        raise CheckpointMismatchError(
            f"--dtype {dtype}: the scales of {len(alone)} FP8 tensors are missing: {first_few(alone)}. Without them "
            "the values are not known. Is the checkpoint complete? --dtype keep copies the tensors as they are."
        )
    weights += [_eight(name, targets, settings.get("weight_block_size"), wanted) for name in scaled]
    return replace(_dequantized(targets, weights), dtype=dtype)


def with_lower_bits(targets: Mapping[str, Target], bits: Mapping[str, TensorEntry], dtype: str) -> Dequantized:
    """Return the tensors to write (`targets`), with exact weights in place of flashoptim's rounded weights.

    flashoptim stores an fp32 weight as a rounded weight (bf16 or fp16) and a second tensor with its lower bits. The
    exact weights have the dtype `dtype`, or fp32 if `dtype` is "keep".

    Args:
        bits: The tensors with lower bits, by the key of the rounded weight in the source. Each has the same shape as
            its rounded weight.
    """
    wanted = "float32" if dtype == "keep" else dtype_of(dtype).name
    formula, label = partial(formulas.with_lower_bits, dtype=wanted), "flashoptim weight + its lower bits"
    weights = []
    for name, target in targets.items():
        if target.sources[0] in bits:
            part = Target.of(bits[target.sources[0]], f"{name}.{ERROR_BITS}")
            made = replace(target, dtype=wanted)
            weights.append(_weight(target, [part], made, formula, label, 1, scratch=16))
    return replace(_dequantized(targets, weights), dtype=wanted)


def _dequantized(targets: Mapping[str, Target], weights: list[_Weight]) -> Dequantized:
    made = {computed.read[0].name: (weight, computed) for weight, computed in weights}
    scales = {part.name: weight.name for weight, computed in weights for part in computed.read[1:]}
    found = Dequantized({})
    for name, target in targets.items():
        if name in scales or _OF_INPUTS.fullmatch(name):
            found.names[name] = scales.get(name, "")
            why = "a scale, applied to its weight" if name in scales else "a scale of activations"
            found.dropped.update(dict.fromkeys(target.sources, why))
            continue
        if name not in made:
            found.targets[name] = target
            found.whole[target.sources[0]] = target
            continue
        weight, computed = made[name]
        if weight.name in targets and weight.name != name:
            raise CheckpointMismatchError(
                f"{name!r} is {weight.name!r} in packed form, but both are in the checkpoint."
            )
        found.names[name] = weight.name
        found.targets[weight.name] = weight
        found.made[target.sources[0]] = computed
    return found


def _whole_weight(name: str, dtype: str, codes: str, shape: tuple[int, ...]) -> Target:
    """Return the target of a dequantized weight. `codes` is the source's key of the quantized values."""
    return Target(name, dtype, shape, (Part(Box.whole(shape), codes, Box.whole(shape)),), dtype)


def _stored(target: Target) -> Target:
    return replace(target, dtype=target.source_dtype)


def _weight(
    codes: Target,
    parts: Sequence[Target],
    made: Target,
    formula: formulas.Dequantization,
    label: str,
    aligned: int,
    *,
    scratch: int,
) -> _Weight:
    """Return the weight `made`, and its computation from the quantized values `codes` and the scales or zero points.

    Args:
        parts: The scales and zero points.
        aligned: Number of `parts`, counted from the first, that have one row per row of the weight. If only some rows
            of the weight are computed, only the same rows of these parts are read.
        scratch: Temporary memory that the formula needs, in bytes per element of the weight.
    """
    whole = tuple(map(_stored, (codes, *parts)))

    def rows(start: int, stop: int) -> ComputedTensor:
        shape = (stop - start, *made.shape[1:]) if made.shape else ()
        inputs = whole
        if shape != made.shape:
            inputs = (*(item.rows(start, stop) for item in whole[: 1 + aligned]), *whole[1 + aligned :])

        def compute(data: Sequence[Bytes], out: Bytes) -> int:
            stored = [Stored(raw, item.dtype, item.shape) for raw, item in zip(data, inputs, strict=True)]
            return formula(stored[0], stored[1:], start, out)

        return ComputedTensor(
            made.name, made.dtype, shape, inputs, compute, label, Box.whole(shape).numel * scratch,
            (lambda a, b: rows(start + a, start + b)) if shape else None, by_element=True,
        )  # fmt: skip

    return made, rows(0, made.shape[0] if made.shape else 1)


# --- FP8


def _is_packed(name: str, targets: Mapping[str, Target]) -> bool:
    """Return whether a tensor contains packed weights, or their scales, zero points or shapes."""
    coded = targets[name].source_dtype in ("int8", "uint8") and bool(_scale_of(name, targets))
    return coded or _is_small(targets[name]) or _PACKED.fullmatch(name) is not None


def _is_small(target: Target) -> bool:
    return dtype_of(target.source_dtype).bits < 8


def _scale_of(name: str, targets: Mapping[str, Target]) -> str:
    return next((name + end for end in _SCALES if name + end in targets), "")


def _eight(name: str, targets: Mapping[str, Target], blocks: Any, dtype: str) -> _Weight:
    scale, weight = _scale_of(name, targets), targets[name]
    formula, label, aligned = _formula(weight, targets[scale], blocks, dtype)
    return _weight(weight, [targets[scale]], replace(weight, dtype=dtype), formula, label, aligned, scratch=4)


def _formula(weight: Target, scale: Target, blocks: Any, dtype: str) -> tuple[formulas.Dequantization, str, int]:
    """Return a weight's formula, its label in a plan, and how many of its inputs are sliced like the weight."""
    if scale.numel == 1:
        return partial(formulas.whole, dtype=dtype), f"FP8 weight * scale in {scale.dtype}", 0
    rows, columns = weight.shape[-2:] if len(weight.shape) > 1 else (weight.shape[0], 1)
    if scale.numel == weight.shape[0] and len(weight.shape) == 2:
        return partial(formulas.by_row, dtype=dtype), f"FP8 weight * scale of the row in {scale.dtype}", 0
    size = _block_size(weight, scale, blocks, rows, columns)
    if size is None or scale.shape[:-2] != weight.shape[:-2]:
        raise CheckpointMismatchError(
            f"{weight.name!r} {list(weight.shape)} has a scale {list(scale.shape)}: expected one for the tensor, for "
            f"each row, or for each block{f' of {blocks}' if blocks else ''}."
        )
    label = f"FP8 weight * scale of the block of {size[0]} x {size[1]} in {scale.dtype}"
    formula = partial(formulas.by_block, high=size[0], wide=size[1], dtype=dtype)
    return formula, label, int(len(weight.shape) > 2 or size[0] == 1)


def _block_size(weight: Target, scale: Target, blocks: Any, rows: int, columns: int) -> tuple[int, int] | None:
    """Return the config's block size if the scales match it. Otherwise, derive a block size from the shapes.

    Returns None if no block size fits the shapes.
    """
    if len(scale.shape) != len(weight.shape) or len(weight.shape) < 2 or not scale.numel:
        return None
    down, across = scale.shape[-2:]
    if isinstance(blocks, (list, tuple)) and len(blocks) == 2 and all(isinstance(n, int) and n > 0 for n in blocks):
        high, wide = blocks
        if (-(-rows // high), -(-columns // wide)) == (down, across):
            return high, wide
    return None if rows % down or columns % across else (rows // down, columns // across)


# --- MXFP4


def _is_mxfp4(name: str, targets: Mapping[str, Target]) -> bool:
    return name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" in targets


def _mxfp4(name: str, targets: Mapping[str, Target], dtype: str) -> _Weight:
    """Return dequantized experts: blocks [experts, out, groups, 16] become [experts, in, out], as in transformers."""
    weight = name.removesuffix("_blocks")
    blocks, scales = targets[name], targets[f"{weight}_scales"]
    if (
        (blocks.source_dtype, scales.source_dtype) != ("uint8", "uint8")
        or len(blocks.shape) != 4
        or blocks.shape != (*scales.shape, 16)
    ):
        raise CheckpointMismatchError(
            f"{name!r} is {blocks.source_dtype} {list(blocks.shape)}, and its scales {scales.source_dtype} "
            f"{list(scales.shape)}: expected bytes [experts, out, groups, 16] and [experts, out, groups] of MXFP4."
        )
    made = _whole_weight(weight, dtype, blocks.sources[0], (blocks.shape[0], blocks.shape[2] * 32, blocks.shape[1]))
    label = "MXFP4 weight * 2 ** (scale of the group - 127), transposed"
    scratch = dtype_of(dtype).itemsize + 2
    return _weight(blocks, [scales], made, partial(formulas.mxfp4, dtype=dtype), label, 1, scratch=scratch)


# --- compressed-tensors


# Every version packs these bit widths into whole bytes. For 3, 5, 6 and 7 bits, the padding depends on the version.
_BITS = (2, 4, 8)


def _is_packed_weight(name: str, targets: Mapping[str, Target], settings: Mapping[str, Any]) -> bool:
    """Return whether a tensor contains a weight's codes (integers or FP4) as compressed-tensors writes them."""
    if settings.get("quant_method") != "compressed-tensors":
        return False
    return name.endswith(".weight_packed") or (name.endswith(".weight") and targets[name].source_dtype == "int8")


def _packed(name: str, targets: Mapping[str, Target], settings: Mapping[str, Any], dtype: str) -> _Weight:
    weight = name.removesuffix("_packed")
    codes = targets[name]
    scale = targets.get(f"{weight}_scale")
    if scale is None:
        raise CheckpointMismatchError(f"{name!r}: its scale {weight}_scale is missing. Is the checkpoint complete?")
    scheme = _scheme(weight.removesuffix(".weight"), settings)
    if f"{weight}_g_idx" in targets:
        raise _unsupported(
            name, "its columns are reordered by group (actorder), which current compressed-tensors does not support"
        )
    if len(codes.shape) != 2 or len(scale.shape) > 2:
        raise _unsupported(name, f"it has the shape {list(codes.shape)}, and its scale {list(scale.shape)}")
    if scheme.get("type", "int") == "float":
        return _fp4(weight, codes, scale, scheme, targets, dtype)
    return _integers(weight, codes, scale, scheme, targets, dtype)


def _scheme(module: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a module's quantization settings.

    These are the settings of the config group that names the module. If no group names the module, the group that names
    a class of modules applies.
    """
    groups = settings.get("config_groups")
    found: dict[bool, dict[str, Mapping[str, Any]]] = {True: {}, False: {}}
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights, targets = (group.get("weights"), group.get("targets")) if isinstance(group, Mapping) else (None, None)
        if not isinstance(weights, Mapping) or not isinstance(targets, list):
            continue
        for target in map(str, targets):
            named = re.match(target[3:], module) is not None if target.startswith("re:") else target == module
            if named or re.fullmatch(r"[A-Z]\w*", target):  # a class name
                found[named][json.dumps(weights, sort_keys=True)] = weights
    chosen = list((found[True] or found[False]).values())
    if len(chosen) != 1:
        raise _unsupported(module, f"{len(chosen)} config_groups of its quantization_config match; expected one")
    return chosen[0]


def _integers(
    weight: str, codes: Target, scale: Target, scheme: Mapping[str, Any], targets: Mapping[str, Target], dtype: str
) -> _Weight:
    bits, group = scheme.get("num_bits", 8), scheme.get("group_size")
    usual = "tensor" if group is None else "channel" if group == -1 else "group"
    strategy = scheme.get("strategy") or usual
    packed = codes.name.endswith("_packed")
    if bits not in _BITS or codes.source_dtype != ("int32" if packed else "int8") or (bits != 8 and not packed):
        raise _unsupported(codes.name, f"it stores {bits}-bit integers as {codes.source_dtype}")
    rows, columns = codes.shape[0], codes.shape[1] * (32 // bits if packed else 1)
    if strategy == "group" and isinstance(group, int) and group > 0:
        columns = scale.shape[-1] * group
        fits = len(scale.shape) == 2 and scale.shape[0] == rows
        fits = fits and codes.shape[1] == (-(-columns * bits // 32) if packed else columns)
    elif strategy in ("channel", "tensor"):
        fits = scale.numel == (rows if strategy == "channel" else 1)
        group = 0
    else:
        raise _unsupported(codes.name, f"its strategy is {strategy!r}, with group_size {group}")
    zero = targets.get(f"{weight}_zero_point")
    packed_zero = packed and scheme.get("symmetric") is False and strategy != "tensor"
    if zero is not None:
        wide = scale.shape[-1] if len(scale.shape) == 2 else 1
        fits = fits and zero.shape == ((-(-rows * bits // 32), wide) if packed_zero else scale.shape)
    elif scheme.get("symmetric") is False:
        raise CheckpointMismatchError(f"{codes.name!r}: its zero points {weight}_zero_point are missing.")
    if not fits:
        zeros = "" if zero is None else f", and zero points {list(zero.shape)}"
        raise CheckpointMismatchError(
            f"{codes.name!r}: codes {list(codes.shape)}, scale {list(scale.shape)}{zeros} do not fit {bits}-bit "
            f"quantization by {strategy}{f' of {group}' if group else ''}."
        )
    shape = targets.get(f"{weight}_shape")
    parts = [part for part in (scale, zero, shape) if part is not None]
    formula = partial(
        formulas.integers, name=codes.name, bits=bits, shape=(rows, columns), group=group, by_rows=strategy != "tensor",
        packed=packed, packed_zero=packed_zero, has_zero=zero is not None, has_shape=shape is not None, dtype=dtype,
    )  # fmt: skip
    zeros = "" if zero is None else " - zero point"
    label = f"INT{bits} (weight{zeros}) * scale of the {strategy} in {scale.source_dtype}"
    made = _whole_weight(weight, dtype, codes.sources[0], (rows, columns))
    return _weight(codes, parts, made, formula, label, int(strategy != "tensor"), scratch=8)


def _fp4(
    weight: str, codes: Target, scale: Target, scheme: Mapping[str, Any], targets: Mapping[str, Target], dtype: str
) -> _Weight:
    rows, columns = codes.shape[0], codes.shape[1] * 2
    group = scheme.get("group_size")
    kinds = {"float8_e4m3fn": (16, "NVFP4"), "uint8": (32, "MXFP4")}
    if (
        codes.source_dtype != "uint8"
        or scheme.get("num_bits") != 4
        or kinds.get(scale.source_dtype, (0, ""))[0] != group
        or f"{weight}_zero_point" in targets
    ):
        raise _unsupported(
            codes.name,
            f"it stores {scheme.get('num_bits')}-bit floats as {codes.source_dtype}, with a {scale.source_dtype} scale "
            f"for each group of {group}",
        )
    if scale.shape != (rows, columns // group) or columns % group:
        raise CheckpointMismatchError(
            f"{codes.name!r} {list(codes.shape)} has a scale {list(scale.shape)}: expected {[rows, columns // group]}."
        )
    overall = targets.get(f"{weight}_global_scale")
    if (overall is None) != (group == 32) or (overall is not None and overall.numel != 1):
        what = "is missing" if overall is None else "is not a single number" if group == 16 else "is not allowed"
        raise CheckpointMismatchError(
            f"{codes.name!r}: {weight}_global_scale {what}. NVFP4 needs this number, and MXFP4 does not have it."
        )
    kind = kinds[scale.source_dtype][1]
    label = f"{kind} weight * scale of the group" + (" / global scale" if overall is not None else "")
    parts = [part for part in (scale, overall) if part is not None]
    made = _whole_weight(weight, dtype, codes.sources[0], (rows, columns))
    return _weight(codes, parts, made, partial(formulas.fp4, group=group, dtype=dtype), label, 1, scratch=8)


def _unsupported(name: str, what: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{name!r} is packed in a way that ckptkit cannot unpack: {what}. Keep it with --dtype keep."
    )
