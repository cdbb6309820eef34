"""Quantizes an export's weights to block FP8, which transformers, vLLM and SGLang can read.

    made = quantize(tensors, config)   # `--quantize fp8-block`

Each chosen weight becomes a tensor of codes (E4M3) and a tensor `weight_scale_inv`, which contains one float32 scale
for each block of 128 x 128.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.errors import CheckpointMismatchError, UsageError
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor
from ckptkit.units import counted, first_few

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
Formula = Callable[["torch.Tensor", str], Bytes]

BLOCK = 128
_CODES, _SCALES = "float8_e4m3fn", "float32"
# vLLM and SGLang fuse each group into one matrix, so either all weights in a group are quantized, or none.
_FUSED = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("c_fc_0", "c_fc_1"),
    ("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"),
)  # fmt: skip
# Used if transformers cannot tell: matrices in numbered layers, except expert routers and convolutions.
_IN_LAYER = re.compile(r".*\.(?:layers|h|blocks)\.\d+\..*\.weight")
_KEPT = re.compile(r".*(?:\.gate|router|_gate|norm|embed\w*|conv\w*)\.weight", re.I)
_STACKED = re.compile(r".*\.(?:layers|h|blocks)\.\d+\..*experts\..*")


@dataclass(frozen=True, slots=True)
class Quantized:
    """The tensors (codes and scales for quantized weights), the quantization_config to write, and notes."""

    tensors: dict[str, OutputTensor]
    config: dict[str, Any]
    notes: tuple[str, ...]


def quantize(tensors: Mapping[str, OutputTensor], config: Mapping[str, Any] | None) -> Quantized:
    """Put codes and scales in place of the weights that transformers' FP8 quantizer would quantize. Return all tensors.

    As with transformers, some weights keep their dtype: weights with a size that is not a multiple of 128, weights that
    inference servers fuse with such a weight, and experts stacked into one tensor. If the installed transformers does
    not know the model, weights are chosen by name, and a note says so.

    Raises:
        UsageError: No weight can be quantized.
    """
    from ckptkit.offline.export.transformers_names import quantized_by_transformers

    wanted = quantized_by_transformers(config, tensors)
    notes = []
    if wanted is None:
        wanted = {name for name in tensors if _IN_LAYER.fullmatch(name) and not _KEPT.fullmatch(name)}
        notes.append(
            "weights to quantize were chosen by name, because the installed transformers does not know the model"
        )
    stacked = [
        name for name, t in tensors.items() if len(t.shape) == 3 and (name in wanted or _STACKED.fullmatch(name))
    ]
    stacked = [name for name in stacked if dtype_of(tensors[name].dtype).kind == "float"]
    floats = {n for n in wanted if len(tensors[n].shape) == 2 and dtype_of(tensors[n].dtype).kind == "float"}
    chosen = {name for name in floats if not any(size % BLOCK or not size for size in tensors[name].shape)}
    fused = _joined_with_others(chosen, tensors)
    odd, chosen = floats - chosen, chosen - fused
    if not chosen:
        raise UsageError(
            f"--quantize fp8-block: none of {len(tensors)} tensors is a matrix of floats inside a layer, with sizes "
            f"that are multiples of {BLOCK}."
        )
    notes.append(f"{counted(len(chosen), 'weight')} quantized to FP8 in blocks of {BLOCK} x {BLOCK}")
    for noun, kept_names, why in (
        ("weight", odd, f": the sizes are not multiples of {BLOCK}"),
        ("weight", fused, ": fused by servers with a weight that is not quantized"),
        ("tensor", set(stacked), "; matrices of several experts are stacked"),
    ):
        if kept_names:
            listed = first_few([name for name in tensors if name in kept_names], 3)
            notes.append(f"{counted(len(kept_names), noun, 'are')} not quantized{why}: {listed}")
    made: dict[str, OutputTensor] = {}
    for name, tensor in tensors.items():
        if name not in chosen:
            made[name] = tensor
            continue
        made[name] = _codes(tensor)
        made[f"{name}_scale_inv"] = _scales(tensor)
    kept = {name.removesuffix(".weight") for name, tensor in tensors.items() if _is_kept_matrix(name, tensor, chosen)}
    # List the modules that have no codes and scales, because loaders expect them in all other modules.
    kept |= {name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0] for name in stacked}
    return Quantized(made, _config({*kept, "lm_head"}), tuple(notes))


def _config(kept: Collection[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(kept),
    }


def _is_kept_matrix(name: str, tensor: OutputTensor, chosen: Collection[str]) -> bool:
    return name not in chosen and name.endswith(".weight") and len(tensor.shape) == 2 and "embed" not in name


def _joined_with_others(chosen: Collection[str], names: Collection[str]) -> set[str]:
    """Return the chosen weights that inference servers fuse with a weight that is not chosen."""
    found = set()
    for name in chosen:
        head, _, last = name.removesuffix(".weight").rpartition(".")
        for group in _FUSED:
            others = [f"{head}.{other}.weight" for other in group]
            if last in group and any(other in names and other not in chosen for other in others):
                found.add(name)
    return found


# --- codes and scales as computed tensors


def _codes(tensor: OutputTensor) -> ComputedTensor:
    """Return the tensor of a weight's FP8 codes."""

    def cut(start: int, stop: int) -> ComputedTensor:
        # All rows of a block are needed to compute the block's scale.
        first = start // BLOCK * BLOCK
        last = min(-(-stop // BLOCK) * BLOCK, tensor.shape[0])
        whole = _codes(tensor.rows(first, last))
        wide = tensor.shape[1]

        def compute(data: Sequence[Bytes], out: Bytes) -> int:
            made = np.empty(whole.numel, np.uint8)
            whole.compute(data, made)
            out[:] = made[(start - first) * wide : (stop - first) * wide]
            return 0

        return replace(whole, shape=(stop - start, wide), compute=compute)

    return _made(tensor, tensor.name, _CODES, tensor.shape, "codes", _encoded, cut)


def _scales(tensor: OutputTensor) -> ComputedTensor:
    """Return a weight's scales: one per block of 128 x 128, so the shape is [rows / 128, columns / 128]."""

    def cut(start: int, stop: int) -> ComputedTensor:
        return _scales(tensor.rows(start * BLOCK, min(stop * BLOCK, tensor.shape[0])))

    shape = (tensor.shape[0] // BLOCK, tensor.shape[1] // BLOCK)
    return _made(tensor, f"{tensor.name}_scale_inv", _SCALES, shape, "scales", _inverse_scales, cut)


def _made(
    tensor: OutputTensor,
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    what: str,
    formula: Formula,
    cut: Callable[[int, int], ComputedTensor],
) -> ComputedTensor:
    label = f"{what} in FP8 by blocks of {BLOCK} x {BLOCK}"
    by_rows = few = True
    if isinstance(tensor, ComputedTensor):
        label = f"{tensor.label}; {label}"
        by_rows, few = tensor.cut is not None, tensor.cut is not None and tensor.by_element
    compute = partial(_computed, dtype=tensor.dtype, shape=tensor.shape, formula=formula, name=tensor.name)
    scratch = 9 * tensor.numel
    return ComputedTensor(name, dtype, shape, (tensor,), compute, label, scratch, cut if by_rows else None, few)


def _computed(
    data: Sequence[Bytes], out: Bytes, *, dtype: str, shape: tuple[int, ...], formula: Formula, name: str
) -> int:
    import torch

    raw = np.frombuffer(data[0], np.uint8)
    if not raw.flags.writeable:
        raw = raw.copy()
    out[:] = formula(torch.from_numpy(raw).view(getattr(torch, dtype)).reshape(shape), name)
    return 0


def _encoded(weight: torch.Tensor, name: str) -> Bytes:
    import torch

    blocks, scales = _blocks(weight, name)
    kind = getattr(torch, _CODES)
    most = torch.finfo(kind).max
    made = (blocks * scales.unsqueeze(-1).unsqueeze(-3)).clamp_(-most, most).to(kind)
    data: Bytes = made.reshape(-1).view(torch.uint8).numpy()
    return data


def _inverse_scales(weight: torch.Tensor, name: str) -> Bytes:
    import torch

    data: Bytes = (1.0 / _blocks(weight, name)[1]).reshape(-1).view(torch.uint8).numpy()
    return data


def _blocks(weight: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight as [blocks down, 128, blocks across, 128] in float32, and a factor for each block.

    To get the codes, each block is multiplied by its factor.

    Follows `Fp8Quantize` in transformers (integrations/finegrained_fp8.py), with one exception. If a block's numbers
    are so small that the factor would be infinite, this module turns them into zeros, but transformers turns them into
    NaN.
    """
    import torch

    rows, columns = weight.shape
    blocks = weight.to(torch.float32).reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(-3, -1))
    if not bool(torch.isfinite(largest).all()):
        raise CheckpointMismatchError(
            f"--quantize fp8-block: {name!r} has elements that are NaN or infinite, which FP8 cannot hold. Verify the "
            "checkpoint: it may be damaged."
        )
    scales = torch.finfo(getattr(torch, _CODES)).max / largest
    return blocks, torch.where(torch.isfinite(scales), scales, torch.ones_like(scales))
