"""The bytes of a tensor, on the host, without a copy where it lies there and row-major; pinned pieces otherwise."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["PIECE", "HostBytes", "host_view", "is_dense", "lies_row_major", "row_major", "settle_device"]

PIECE = 512 << 10  # digest, CRC and write of a piece run while it is in the cache; smaller ones cost more calls
_STAGE = 16 << 20
_TILE = 4 << 20  # of what lies on the host in another order
_READ, _WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object


def host_view(tensor: torch.Tensor, *, writable: bool = False) -> memoryview:
    """Return the memory of a contiguous CPU tensor; whoever uses it must keep the tensor alive."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    found: memoryview = _view(tensor.data_ptr(), nbytes, _WRITE if writable else _READ)
    return found


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is plain memory: strided, and no subclass that hides what it holds."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        return False
    return tensor.layout is torch.strided and not tensor.is_quantized


class HostBytes:
    """Gives the bytes of tensors in pieces. Owns two pinned buffers for tensors on a device, and one for those that lie
    in another order, made when first needed.

    Bytes that are known to lie row-major come as a memoryview: a process without torch writes those.

    One for each writing thread: it is not thread-safe.
    """

    def __init__(self) -> None:
        self._stages: dict[Any, list[torch.Tensor]] = {}
        self._streams: dict[Any, Any] = {}
        self._kept: torch.Tensor | None = None
        self._tile: torch.Tensor | None = None

    def pieces(self, tensor: torch.Tensor | memoryview) -> Iterator[memoryview]:
        """Yield the row-major bytes of a tensor; each piece is valid until the next one is asked for."""
        for view in self._views(tensor):
            for start in range(0, len(view), PIECE):
                yield view[start : start + PIECE]

    def _views(self, tensor: torch.Tensor | memoryview) -> Iterator[memoryview]:
        if isinstance(tensor, memoryview):
            yield tensor
        elif tensor.device.type != "cpu":
            yield from self._staged(row_major(tensor))
        elif lies_row_major(tensor):
            yield host_view(tensor)
        else:
            for part in _parts(tensor.detach()):
                yield self._copy(part)

    def _copy(self, part: torch.Tensor) -> memoryview:
        """Copy a part of a tensor to the tile: memory that is taken and given back for each would leave holes."""
        import torch

        if self._tile is None:
            self._tile = torch.empty(_TILE, dtype=torch.uint8)
        view = self._tile[: part.numel() * part.element_size()]
        view.view(part.dtype).view(part.shape).copy_(part)
        return host_view(view)

    def at_rest(self, tensor: torch.Tensor | memoryview) -> memoryview | None:
        """Return the row-major bytes of a tensor where they lie, None where they don't: on a device, or in another
        order. Whoever uses them must keep the tensor alive."""
        if isinstance(tensor, memoryview):
            return tensor
        return host_view(tensor) if lies_row_major(tensor) else None

    def whole(self, tensor: torch.Tensor | memoryview) -> memoryview:
        """Return all bytes of a small tensor, valid until the next call."""
        if isinstance(tensor, memoryview):
            return tensor
        self._kept = row_major(tensor).cpu()
        return host_view(self._kept)

    def _staged(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Copy to the host by two buffers in turn: one is filled while the other is written."""
        import torch

        flat = tensor.reshape(-1).view(torch.uint8)
        device = torch.get_device_module(flat.device)
        buffers = self._buffers(flat.device)
        stream = self._streams.setdefault(flat.device, device.Stream(flat.device))
        stream.wait_stream(device.current_stream(flat.device))  # what computes the tensor comes first
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

    def _buffers(self, device: torch.device) -> list[torch.Tensor]:
        import torch

        if device not in self._stages:
            pin = device.type == "cuda"
            self._stages[device] = [torch.empty(_STAGE, dtype=torch.uint8, pin_memory=pin) for _ in range(2)]
        return self._stages[device]


def settle_device() -> None:
    """Wait for what this thread has queued on the accelerator: other threads read the memory next."""
    if "torch" not in sys.modules:
        return
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached and contiguous: itself where it is, else a copy of it alone."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def lies_row_major(tensor: torch.Tensor) -> bool:
    """Tell whether the bytes of a tensor lie on the host as they are to be written."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of a tensor in row-major order, none of them larger than a tile."""
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
