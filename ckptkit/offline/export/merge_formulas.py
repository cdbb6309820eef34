"""Computes merged LoRA weights as PEFT's `merge_and_unload` does on a CPU, operation by operation.

`functools.partial` binds the keyword arguments of each formula. The result is a function (weight, inputs, first row)
that returns the new weight. If the formula handles rows independently, the weight may be only some rows, starting at
`first`. Inputs are always complete. The formulas follow `get_delta_weight`, `merge` and `merge_unsafe` in
peft/tuners/lora/{layer,variants,dora}.py, version 0.21.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Formula: TypeAlias = "Callable[[Tensor, Sequence[Tensor], int], Tensor]"


def linear(w: Tensor, inputs: Sequence[Tensor], first: int, *, scale: float, transposed: bool = False) -> Tensor:
    """Return W + scale * (B @ A), added in the wider of W's and the product's dtype. Inputs: A, B."""
    a, b = inputs
    return _added(w, _delta(a, b, scale, transposed, _rows(w, first)))


def rounded(
    w: Tensor, inputs: Sequence[Tensor], first: int, *, scale: float, transposed: bool = False, times: int = 1
) -> Tensor:
    """Return W + scale * (B @ A), where the product is rounded to W's dtype before the addition. Inputs: A, B.

    PEFT rounds the product for embeddings, parameters and attention. `times` is the number of additions. It is 2 for
    MultiheadAttention's out_proj, to which PEFT adds the product twice, both in training and in `merge`. Only the first
    addition rounds the product.
    """
    a, b = inputs
    delta = _delta(a, b, scale, transposed, _rows(w, first))
    w += delta.to(w.dtype)
    for _ in range(times - 1):
        w += delta
    return w


def diagonal(w: Tensor, inputs: Sequence[Tensor], first: int, *, scale: float) -> Tensor:
    """Return W + scale * ((B * diag) @ A), as in KaSA. Inputs: A, B, diag."""
    a, b, diag = inputs
    dtype, half = b.dtype, _is_half(b)
    b = b[_rows(w, first)]
    delta = (b.float() * diag.float()) @ a.float() if half else (b * diag) @ a
    delta = delta * scale
    w += (delta.to(dtype) if half else delta).to(w.dtype)
    return w


def block_diagonal(w: Tensor, inputs: Sequence[Tensor], first: int, *, scale: float, blocks: tuple[int, int]) -> Tensor:
    """Return W + scale * (B @ A), where A or B is stored as its diagonal blocks. Inputs: A, B.

    Args:
        blocks: The number of blocks of A and of B. 1 means a full matrix.
    """
    import torch

    whole: Any = torch.block_diag  # typed as Any, because torch does not annotate it
    a, b = (
        whole(*torch.chunk(factor, n, dim=0)) if n > 1 else factor for factor, n in zip(inputs, blocks, strict=True)
    )
    if _is_half(w):
        a, b = a.float(), b.float()
    w += ((b[_rows(w, first)] @ a) * scale).to(w.dtype)
    return w


def dora(w: Tensor, inputs: Sequence[Tensor], first: int, *, scale: float, transposed: bool = False) -> Tensor:
    """Return magnitude / |W + delta| * (W + delta), with one norm per output. Inputs: A, B, magnitude.

    With `transposed`, rows cannot be computed separately, because the norms are per column.
    """
    import torch

    a, b, magnitude = inputs
    rows = _rows(w, first)
    delta = _delta(a, b, scale, transposed, rows)
    # Use the same views as PEFT, because the summation order of a norm depends on the strides.
    changed = (w.T if transposed else w) + 1 * (delta.T if transposed else delta)
    norm = torch.linalg.norm(changed, dim=1).to(changed.dtype)
    factor = (magnitude.reshape(-1) if transposed else magnitude.reshape(-1)[rows]) / norm
    factor = factor.view(-1, 1)
    made: Tensor = ((factor.T if transposed else factor) * (w + delta)).to(w.dtype)
    return made


def conv(w: Tensor, inputs: Sequence[Tensor], first: int, *, scale: float) -> Tensor:
    """Compute `linear` (or `dora`, if there is a magnitude) for 1-D to 3-D convolutions. Inputs: A, B[, magnitude]."""
    delta = _conv_delta(w, inputs[0], inputs[1], scale)
    if len(inputs) == 2:
        w += delta
        return w
    changed = w + 1 * delta
    norm = changed.norm(p=2, dim=tuple(range(1, w.dim())), keepdim=True).transpose(1, 0)
    factor = inputs[2] / norm
    made: Tensor = (factor.view(-1, *(1,) * (w.dim() - 1)) * (w + delta)).to(w.dtype)
    return made


def experts(w: Tensor, inputs: Sequence[Tensor], first: int, *, scale: float, count: int, in_first: bool) -> Tensor:
    """Return W + scale * (B @ A) for each of the `count` experts in one parameter. Inputs: A, B.

    The parameter's element [i] is the matrix of expert i. `in_first` is True for [experts, in, out], and False for
    [experts, out, in].
    """
    import torch

    a, b = inputs
    if count == 1:  # PEFT treats a single expert as a matrix
        w += _delta(a, b, scale, False, slice(None)).to(w.dtype)
        return w
    rows = _rows(w, first)
    a = a.reshape(count, -1, a.shape[-1])[rows]
    b = b.reshape(b.shape[0], -1, count)[..., rows]
    order = "o r e, e r i -> e i o" if in_first else "o r e, e r i -> e o i"
    w += (torch.einsum(order, b, a) * scale).to(w.dtype)
    return w


def bias(w: Tensor, inputs: Sequence[Tensor], first: int, *, scale: float) -> Tensor:
    """Return W + scale * bias of B, where W is a layer's bias. Inputs: the bias of B."""
    w += inputs[0][_rows(w, first)] * scale
    return w


def tokens(w: Tensor, inputs: Sequence[Tensor], first: int, *, indices: Sequence[int]) -> Tensor:
    """Return an embedding after replacing the rows `indices` by trained rows. Inputs: the trained rows."""
    import torch

    there = [i for i, index in enumerate(indices) if first <= index < first + len(w)]
    places = torch.tensor([indices[i] - first for i in there], dtype=torch.int64)
    return w.index_copy(0, places, inputs[0][there].to(w))


def _added(w: Tensor, delta: Tensor) -> Tensor:
    """Return W + delta, computed in the wider of the two dtypes. Overwrites W, and may overwrite delta.

    `w += delta` returns the same bits, but is seven times as slow if the dtypes differ.
    """
    import torch

    if w.dtype == delta.dtype:
        w += delta
        return w
    wide = w.to(torch.promote_types(w.dtype, delta.dtype))
    return w.copy_(wide.add_(delta))


def _rows(w: Tensor, first: int) -> slice:
    return slice(first, first + w.shape[0])


def _is_half(tensor: Tensor) -> bool:
    return tensor.element_size() == 2


def _delta(a: Tensor, b: Tensor, scale: float, transposed: bool, rows: slice) -> Tensor:
    """Return scale * (B @ A). 16-bit factors are multiplied in float32, as PEFT does on a CPU."""
    dtype, half = b.dtype, _is_half(b)
    if transposed:
        a = a[:, rows]
    else:
        b = b[rows]
    product = b.float() @ a.float() if half else b @ a
    delta = (product.T if transposed else product).mul_(scale)
    return delta.to(dtype) if half else delta


def _conv_delta(w: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    from torch.nn import functional

    dtype, half = a.dtype, _is_half(a)
    if half:
        a, b = a.float(), b.float()
    if w.dim() == 4 and w.shape[2:4] == (1, 1):
        delta = (b.squeeze(3).squeeze(2) @ a.squeeze(3).squeeze(2)).unsqueeze(2).unsqueeze(3) * scale
    else:
        convolved = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}[w.dim()]
        delta = convolved(a.transpose(0, 1), b).transpose(0, 1) * scale
    return delta.to(dtype) if half else delta
