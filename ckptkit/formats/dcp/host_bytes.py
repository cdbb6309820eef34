"""Reads the bytes of tensors, and tells which tensors are dense.

A row-major tensor on the host is read in place. Any other tensor is copied to a buffer first. In this module, a tensor
is dense if all its values are in its own memory.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.dtypes import DTYPES
from ckptkit.formats.pickles.tensors import ONE_TENSOR

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

PIECE = 512 << 10  # fits into the CPU cache while it is hashed and written; smaller pieces need more calls
_STAGE = 16 << 20
_TILE = 4 << 20  # buffer size for host tensors that are not row-major
_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object


def host_view(tensor: torch.Tensor, *, writable: bool = False) -> memoryview:
    """Return the memory of a contiguous CPU tensor. The caller must keep the tensor alive."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    found: memoryview = _view(tensor.data_ptr(), nbytes, _WRITE if writable else _READ)
    return found


def why_not_dense(tensor: Any) -> str:
    """Return why a tensor can't be saved as the bytes of its own memory, or "" if the tensor is dense.

    The reason completes the sentence "the tensor ...". For a DTensor or ShardedTensor, the local tensors are checked. A
    tensor subclass is not dense if it has tensors as attributes or defines `__torch_dispatch__`, because its values may
    then be elsewhere.
    """
    import torch

    kind = type(tensor)
    if kind not in (torch.Tensor, torch.nn.Parameter):
        found = _why_not_subclass(tensor)
        if found is not None:
            return found
    if tensor.is_meta:
        return "is on the meta device: it has no values to save"
    if tensor.is_nested:
        return "is a nested tensor; save its parts (unbind)"
    if tensor.is_quantized:
        return f"is quantized ({dtype_name(tensor.dtype)}); save its int_repr, scales and zero points"
    if tensor.layout is not torch.strided:
        return f"is sparse ({tensor.layout}); save its indices and values, or to_dense()"
    if dtype_name(tensor.dtype) not in DTYPES:
        return f"has dtype {dtype_name(tensor.dtype)}, which no checkpoint format supports; save it viewed as uint8"
    return ""


def _why_not_subclass(tensor: Any) -> str | None:
    """Return the result of `why_not_dense` for a tensor subclass, or None if the class does not decide it."""
    import torch
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.tensor import DTensor
    from torch.nn.parameter import is_lazy

    if isinstance(tensor, DTensor):
        local = why_not_dense(tensor._local_tensor)
        return local and f"is sharded, and its local part {local}"
    if isinstance(tensor, ShardedTensor):
        return next(filter(None, (why_not_dense(shard.tensor) for shard in tensor.local_shards())), "")
    if isinstance(tensor, AsyncCollectiveTensor):
        return why_not_dense(tensor.elem)
    kind = type(tensor)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in ONE_TENSOR:
        return why_not_dense(getattr(tensor, ONE_TENSOR[name][0]))
    if is_lazy(tensor):
        return f"is a {name}, which has no values before its module has run once"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return (
            f"is a {name}, whose values are not in its own memory. Save its inner tensors, or the tensor it "
            "was created from, and create it again after the load"
        )
    carried = [key for key, value in vars(tensor).items() if holds_tensors(value, 3)]
    if carried:
        return (
            f"is a {name} with tensors in its attributes ({', '.join(carried)}), which would be lost. Save "
            "the tensor it was created from, and create it again after the load"
        )
    return None


def holds_tensors(value: Any, depth: int) -> bool:
    """Return whether a value is a tensor or contains a tensor, at most `depth` levels deep."""
    import torch

    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, (torch.nn.Module, type)):
        return False
    if isinstance(value, (list, tuple, set, frozenset)):
        inner: Collection[Any] = value
    else:
        inner = (value if isinstance(value, Mapping) else getattr(value, "__dict__", {})).values()
    return any(holds_tensors(item, depth - 1) for item in inner)


def is_sparse_or_quantized(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of torch's own classes is sparse or quantized. `torch.save` stores such tensors exactly.

    Returns False for subclasses, and for meta and nested tensors.
    """
    import torch

    own = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta and not tensor.is_nested
    return own and (tensor.is_quantized or tensor.layout is not torch.strided)


def hidden_ones(tensors: Mapping[Any, Any]) -> dict[Any, str]:
    """Return, by key, the result of `why_not_dense` for each tensor that is not dense."""
    return {key: why for key, value in tensors.items() if (why := why_not_dense(value))}


def expanded_ones(tensors: Mapping[Any, Any]) -> dict[Any, str]:
    """Return, by key, why torch can't write to a tensor, for each tensor whose elements share memory."""
    why = "is an expanded view, whose elements share memory: copy it with .clone()"
    return {
        key: why
        for key, value in tensors.items()
        if any(not stride and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))
        and value.numel() > 0
        and not value.is_meta
    }


@functools.cache
def _plain_types() -> frozenset[type]:
    import torch

    return frozenset((torch.Tensor, torch.nn.Parameter))


@functools.lru_cache(maxsize=64)
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name for a dtype, without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")


def placed_like(whole: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor around `local` with the shape, mesh and placements of `whole`. Does not communicate."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def without_subclass(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of torch's own class that shares the memory of `tensor`, which must be dense."""
    import torch

    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    tensor = own_memory(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor, or any other tensor unchanged.

    A plain local tensor is returned without the view that `to_local` would create.
    """
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    if local is None:
        return tensor
    return local if type(local) in _plain_types() else tensor.to_local()  # type: ignore[attr-defined]


def own_memory(tensor: Any) -> Any:
    """Return the inner tensor, if the tensor's class stores all values in a single inner tensor.

    Returns any other tensor unchanged.
    """
    known = ONE_TENSOR.get(f"{type(tensor).__module__}.{type(tensor).__qualname__}")
    return tensor if known is None else getattr(tensor, known[0])


def forget_computed(tensor: Any) -> None:
    """Clear the values that a tensor (or its local tensor) has cached. Call this after a load changes the tensor."""
    local = getattr(tensor, "_local_tensor", tensor)
    known = ONE_TENSOR.get(f"{type(local).__module__}.{type(local).__qualname__}")
    if known is not None:
        setattr(local, known[1], None)


class HostBytes:
    """Reads the bytes of tensors in pieces. Not thread-safe: each writing thread needs its own instance.

    On first use, allocates two pinned buffers for device tensors, and one buffer for host tensors that are not
    row-major.
    """

    def __init__(self) -> None:
        self._stages: dict[Any, list[torch.Tensor]] = {}
        self._streams: dict[Any, Any] = {}
        self._kept: torch.Tensor | None = None
        self._tile: torch.Tensor | None = None

    def pieces(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Yield the row-major bytes of a tensor. Each piece is valid until the next piece is requested."""
        for view in self._views(tensor):
            for start in range(0, len(view), PIECE):
                yield view[start : start + PIECE]

    def _views(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        whole = self.at_rest(tensor)
        if whole is not None:
            yield whole
            return
        import torch

        if tensor.device.type != "cpu":
            yield from self._staged(row_major(tensor))
            return
        if self._tile is None:  # reused, because a buffer for each part would fragment memory
            self._tile = torch.empty(_TILE, dtype=torch.uint8)
        for part in _parts(tensor.detach()):
            view = self._tile[: part.numel() * part.element_size()]
            view.view(part.dtype).view(part.shape).copy_(part)
            yield host_view(view)

    def at_rest(self, tensor: torch.Tensor) -> memoryview | None:
        """Return a tensor's row-major bytes without a copy, or None if the tensor is on a device or not row-major.

        The caller must keep the tensor alive.
        """
        return host_view(tensor) if lies_row_major(tensor) else None

    def whole(self, tensor: torch.Tensor) -> memoryview:
        """Return all bytes of a small tensor. The bytes are valid until the next call."""
        self._kept = row_major(tensor).cpu()
        return host_view(self._kept)

    def _staged(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Yield a tensor's bytes through two host buffers. One buffer is filled while the caller uses the other one."""
        import torch

        flat = tensor.reshape(-1).view(torch.uint8)
        device = torch.get_device_module(flat.device)
        if flat.device not in self._stages:
            pin = flat.device.type == "cuda"
            self._stages[flat.device] = [torch.empty(_STAGE, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        buffers = self._stages[flat.device]
        stream = self._streams.setdefault(flat.device, device.Stream(flat.device))
        stream.wait_stream(device.current_stream(flat.device))  # start after the kernels that compute the tensor
        starts = range(0, flat.numel(), _STAGE)
        events: list[Any] = []
        for turn in range(len(starts) + 1):
            if turn < len(starts):
                start = starts[turn]
                piece = flat[start : start + _STAGE]
                with device.stream(stream):
                    buffers[turn % 2][: piece.numel()].copy_(piece, non_blocking=True)
                    events.append(stream.record_event())
            if turn:
                events[turn - 1].synchronize()
                nbytes = min(_STAGE, flat.numel() - starts[turn - 1])
                yield host_view(buffers[(turn - 1) % 2][:nbytes])


def settle_device() -> None:
    """Wait until the accelerator has finished this thread's work. Other threads can then read the results."""
    if "torch" not in sys.modules:
        return
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached and contiguous. Copies only if necessary."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.contiguous()
    # torch calls a tensor of at most one element contiguous, whatever its strides. It can only be viewed as bytes after
    # its strides have been set to 1.
    return tensor if tensor.numel() > 1 else tensor.as_strided(tensor.shape, (1,) * tensor.dim())


def lies_row_major(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is on the host and its memory is exactly the bytes to write, in order."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of a tensor, each no larger than a tile, that together cover the tensor in row-major order."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes <= _TILE:
        yield tensor
        return
    rows = _TILE * len(tensor) // nbytes
    for start in range(0, len(tensor), max(1, rows)):
        if rows:
            yield tensor[start : start + rows]
        else:
            yield from _parts(tensor[start])


def has_state_dict_hooks(optimizer: Any) -> bool:
    """Return whether hooks may change the result of an optimizer's `state_dict`."""
    return bool(getattr(optimizer, "_optimizer_state_dict_post_hooks", None))


def has_load_hooks(optimizer: Any) -> bool:
    """Return whether hooks may change the argument of an optimizer's `load_state_dict`."""
    return bool(getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None))


def before_state_dict(optimizer: Any) -> None:
    """Run the optimizer's `state_dict` pre-hooks, which may change the optimizer's state."""
    for hook in list(getattr(optimizer, "_optimizer_state_dict_pre_hooks", {}).values()):
        hook(optimizer)


def after_load(optimizer: Any) -> None:
    """Run the optimizer's `load_state_dict` post-hooks."""
    for hook in list(getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {}).values()):
        hook(optimizer)
