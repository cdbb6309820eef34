"""Plans the dequantization of FP8 weights: which tensors are scales, and what each weight becomes.

Formats: block FP8 (`weight_scale_inv`, DeepSeek-V3 and transformers' `fp8`), and FP8 with one scale for a tensor or a
row (`weight_scale`, compressed-tensors and fbgemm). The arithmetic is that of transformers: value times scale in
float32, rounded once to the wanted dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.targets import Target
from ckptkit.errors import CheckpointMismatchError, UnsupportedFormatError
from ckptkit.offline.copying.plan import OutputTensor
from ckptkit.offline.export.adapter_merge import Change, changed
from ckptkit.offline.export.merge_formulas import Formula

if TYPE_CHECKING:
    import torch

__all__ = ["Dequantized", "dequantize", "is_packed"]

_SCALES = ("_scale_inv", "_scale")
# Scales of activations, which only a quantized model has a use for.
_OF_INPUTS = re.compile(r".+\.(?:input_scale|input_scale_ub|input_global_scale|activation_scale)")
# Weights in integers: GPTQ, AWQ, compressed-tensors, MXFP4, bitsandbytes.
_PACKED = re.compile(r".+(?:\.qweight|\.weight_packed|\.weight_shape|_blocks|\.qzeros|\.absmax|\.quant_map|\.SCB)")
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Dequantized:
    """Targets without scales, whose quantized weights are still to be computed by `computed`.

    Attributes:
        changes: By source of a weight: its dequantization.
        whole: By source: the stored tensor.
        dropped: By source of a scale: what became of it.
    """

    targets: dict[str, Target]
    changes: dict[str, Change] = field(default_factory=dict)
    whole: dict[str, Target] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def computed(self, tensors: Mapping[str, OutputTensor]) -> dict[str, OutputTensor]:
        """Return the tensors with those of quantized sources computed."""
        return {
            name: changed(tensor, self.changes, self.whole)
            if isinstance(tensor, Target) and any(key in self.changes for key in tensor.sources)
            else tensor
            for name, tensor in tensors.items()
        }


def is_packed(name: str) -> bool:
    """Return whether this is the name of a weight that is packed into integers, or of a part of one."""
    return _PACKED.fullmatch(name) is not None


def dequantize(targets: Mapping[str, Target], dtype: str, config: Mapping[str, Any] | None) -> Dequantized:
    """Return the targets with FP8 weights in `dtype`. Does nothing for "keep", or if nothing is quantized.

    Args:
        config: config.json of the model, which states the size of blocks.

    Raises:
        CheckpointMismatchError: A weight lacks its scale, or the scale has another shape.
        UnsupportedFormatError: Weights are packed in a way that is not dequantized here.
    """
    settings = (config or {}).get("quantization_config")
    settings = settings if isinstance(settings, Mapping) else {}
    eight = [name for name, target in targets.items() if dtype_of(target.source_dtype).kind == "float8"]
    eight = [name for name in eight if not any(name.endswith(end) for end in _SCALES)]
    scales = {name: scale for name in eight if (scale := _scale_of(name, targets))}
    if dtype == "keep" or not (settings or scales):
        return Dequantized(dict(targets))
    packed = [name for name in targets if is_packed(name)]
    if packed:
        raise UnsupportedFormatError(
            f"--dtype {dtype}: {len(packed)} tensors are packed by quantization, which ckptkit does not undo: "
            f"{_listed(packed)}. Keep them with --dtype keep."
        )
    alone = [name for name in eight if name not in scales]
    if alone:
        raise CheckpointMismatchError(
            f"--dtype {dtype}: the scales of {len(alone)} FP8 tensors are missing: {_listed(alone)}. Without them the "
            "values are not known. Is the checkpoint complete? --dtype keep copies the tensors as they are."
        )
    wanted = dtype_of(dtype).name
    found = Dequantized({n: t for n, t in targets.items() if n not in scales.values() and not _OF_INPUTS.fullmatch(n)})
    found.whole.update((target.sources[0], target) for target in targets.values())
    for name in targets.keys() - found.targets.keys():
        why = "a scale, applied to its weight" if name in scales.values() else "a scale of activations in FP8"
        found.dropped.update(dict.fromkeys(targets[name].sources, why))
    for name, scale in scales.items():
        weight = targets[name]
        formula, label = _formula(weight, targets[scale], settings.get("weight_block_size"))
        source = weight.sources[0]
        found.targets[name] = replace(weight, dtype=wanted)
        stored = replace(targets[scale], dtype=targets[scale].source_dtype)
        found.changes[source] = Change((stored,), formula, label, bool(weight.shape), 12)
    return found


def _scale_of(name: str, targets: Mapping[str, Target]) -> str:
    return next((name + end for end in _SCALES if name + end in targets), "")


def _formula(weight: Target, scale: Target, blocks: Any) -> tuple[Formula, str]:
    """Return the formula of a weight, and what it is called in a plan."""
    if scale.numel == 1:
        return _scaled_whole, f"W * scale in {scale.dtype}"
    rows, columns = weight.shape[-2:] if len(weight.shape) > 1 else (weight.shape[0], 1)
    if scale.numel == weight.shape[0] and len(weight.shape) == 2:
        return _scaled_rows, f"W * scale of the row in {scale.dtype}"
    size = _block_size(weight, scale, blocks, rows, columns)
    if size is None or scale.shape[:-2] != weight.shape[:-2]:
        raise CheckpointMismatchError(
            f"{weight.name!r} {list(weight.shape)} has a scale {list(scale.shape)}: expected one for the tensor, for "
            f"each row, or for each block{f' of {blocks}' if blocks else ''}."
        )
    return _scaled_blocks(*size), f"W * scale of the block of {size[0]} x {size[1]} in {scale.dtype}"


def _block_size(weight: Target, scale: Target, blocks: Any, rows: int, columns: int) -> tuple[int, int] | None:
    """Return the size of a block: the config's where the scales match it, otherwise what divides the weight evenly."""
    if len(scale.shape) != len(weight.shape) or len(weight.shape) < 2 or not scale.numel:
        return None
    down, across = scale.shape[-2:]
    if isinstance(blocks, (list, tuple)) and len(blocks) == 2 and all(isinstance(n, int) and n > 0 for n in blocks):
        high, wide = blocks
        if (-(-rows // high), -(-columns // wide)) == (down, across):
            return high, wide
    return None if rows % down or columns % across else (rows // down, columns // across)


def _factors(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in float32; bytes are exponents of two (E8M0)."""
    import torch

    return (scale.to(torch.float32) - 127.0).exp2() if scale.dtype == torch.uint8 else scale.to(torch.float32)


def _scaled_whole(w: torch.Tensor, inputs: Any, first: int) -> torch.Tensor:
    return w.float() * _factors(inputs[0]).reshape(())


def _scaled_rows(w: torch.Tensor, inputs: Any, first: int) -> torch.Tensor:
    return w.float() * _factors(inputs[0]).reshape(-1, 1)[first : first + w.shape[0]]


def _scaled_blocks(high: int, wide: int) -> Formula:
    def scaled(w: torch.Tensor, inputs: Any, first: int) -> torch.Tensor:
        import torch

        scale = _factors(inputs[0])
        start = first if w.ndim == 2 else 0  # of more dimensions, the outermost is cut
        if w.ndim > 2:
            scale = scale[first : first + w.shape[0]]
        rows = torch.arange(start, start + w.shape[-2]) // high
        columns = torch.arange(w.shape[-1]) // wide
        return w.float() * scale[..., rows, :][..., columns]

    return scaled


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
