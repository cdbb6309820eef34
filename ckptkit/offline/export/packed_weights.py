"""Plans the dequantization of weights that compressed-tensors packed: integers, and FP4 with one scale per group."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.catalog.targets import Target
from ckptkit.errors import CheckpointMismatchError, UnsupportedFormatError
from ckptkit.offline.export import dequantize_formulas as formulas

__all__ = ["Unpacking", "is_packed_weight", "unpacking"]

# Every version packs these bit widths into whole bytes. For 3, 5, 6 and 7 bits, the padding depends on the version.
_BITS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Unpacking:
    """The computation of a weight from its packed codes.

    Attributes:
        parts: Names of the formula's other inputs, in order.
        by_rows: Whether the first of these inputs has one row per row of the weight.
    """

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    formula: formulas.Dequantization
    label: str
    by_rows: bool


def is_packed_weight(name: str, targets: Mapping[str, Target], settings: Mapping[str, Any]) -> bool:
    """Return whether a tensor contains a weight's codes (integers or FP4) as compressed-tensors writes them."""
    if settings.get("quant_method") != "compressed-tensors":
        return False
    return name.endswith(".weight_packed") or (name.endswith(".weight") and targets[name].source_dtype == "int8")


def unpacking(name: str, targets: Mapping[str, Target], settings: Mapping[str, Any], dtype: str) -> Unpacking:
    """Return how to compute the weight in `dtype` from the codes in tensor `name`.

    Raises:
        CheckpointMismatchError: The scale is missing, or does not have the shape that the config implies.
        UnsupportedFormatError: ckptkit cannot unpack the codes.
    """
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
    """Return a module's quantization settings: those of the group that names it, or else of the group for its class."""
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
) -> Unpacking:
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
    parts = [scale.name, *([zero.name] if zero is not None else [])]
    shape = targets.get(f"{weight}_shape")
    if shape is not None:
        parts.append(shape.name)
    formula = formulas.integers(
        codes.name, bits, (rows, columns), group=group, by_rows=strategy != "tensor", packed=packed,
        packed_zero=packed_zero,
        has_zero=zero is not None, has_shape=shape is not None, dtype=dtype,
    )  # fmt: skip
    zeros = "" if zero is None else " - zero point"
    label = f"INT{bits} (weight{zeros}) * scale of the {strategy} in {scale.source_dtype}"
    return Unpacking((rows, columns), tuple(parts), formula, label, strategy != "tensor")


def _fp4(
    weight: str, codes: Target, scale: Target, scheme: Mapping[str, Any], targets: Mapping[str, Target], dtype: str
) -> Unpacking:
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
        raise CheckpointMismatchError(
            f"{codes.name!r}: expected one number {weight}_global_scale"
            f"{' for NVFP4' if overall is None else '' if group == 16 else ' for NVFP4 only'}."
        )
    kind = kinds[scale.source_dtype][1]
    label = f"{kind} weight * scale of the group" + (" / global scale" if overall is not None else "")
    parts = (scale.name, *([overall.name] if overall is not None else []))
    return Unpacking((rows, columns), parts, formulas.fp4(group, dtype), label, True)


def _unsupported(name: str, what: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{name!r} is packed in a way that ckptkit cannot unpack: {what}. Keep it with --dtype keep."
    )
