"""Allocates host memory for snapshots. All saves use the same memory, one save at a time."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64


class StagingBuffers:
    """Copies tensors to one block of host memory, which is pinned if tensors are on a GPU.

    The block grows on demand and never shrinks, so usually only the first save allocates memory. A snapshot is valid
    until the next `copy`. The caller must not call `copy` while the previous snapshot is being read.

    Attributes:
        staged: Size of the last snapshot in bytes.
    """

    def __init__(self) -> None:
        self.staged = 0
        self._block: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._looks: list[tuple[torch.Size, torch.dtype]] = []
        self._on_gpu = False

    @property
    def nbytes(self) -> int:
        """Size of the allocated memory in bytes."""
        return 0 if self._block is None else self._block.numel()

    def copy(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Copy the tensors to the block, and return the copies: contiguous CPU tensors."""
        import torch

        looks = [(tensor.shape, tensor.dtype) for tensor in tensors]
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if (looks, on_gpu) != (self._looks, self._on_gpu):
            self._looks = []  # so that it is empty if the allocation fails
            self._lay_out(looks, on_gpu)
            self._looks, self._on_gpu = looks, on_gpu
        with torch.no_grad():
            if on_gpu:
                for view, tensor in zip(self._views, tensors, strict=True):
                    view.copy_(tensor, non_blocking=True)
                torch.cuda.current_stream().synchronize()
            elif looks:
                torch._foreach_copy_(self._views, list(tensors))
        return self._views

    def release(self) -> None:
        self._block, self._views, self._looks = None, [], []

    def _lay_out(self, looks: Sequence[tuple[torch.Size, torch.dtype]], on_gpu: bool) -> None:
        """Assign a part of the block to each tensor."""
        starts, total = [], 0
        for shape, dtype in looks:
            starts.append(total)
            total += -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self._block is None or self._block.numel() < total or on_gpu != self._on_gpu:
            self._block, self._views = None, []  # free the old block before allocating the new one
            self._block = _allocate(total, pinned=on_gpu)
        self.staged = total
        self._views = [
            self._block[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for start, (shape, dtype) in zip(starts, looks, strict=True)
        ]


def stand_ins(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors with the shapes and dtypes of `tensors` that use almost no memory.

    If a rank has no memory for a snapshot, it sends these tensors to the ranks that wait for its data, and then reports
    its failure.
    """
    import torch

    return [torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for tensor in tensors]


def _allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return memory whose pages are already mapped. With page faults, the copy would take twice as long."""
    import torch

    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    # Don't use huge pages: in fragmented memory, or memory new to a virtual machine, they made the first access five
    # times slower.
    populate = getattr(mmap, "MAP_POPULATE", 0)
    return torch.frombuffer(
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate), dtype=torch.uint8
    )
