"""Host memory for snapshots: allocated once, touched once, used again, and owned by one save at a time."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["StagingBuffers"]

_ALIGNMENT = 64


class StagingBuffers:
    """Copies of tensors in one block of host memory, pinned where the tensors are on a GPU.

    The block grows when more is asked for and never shrinks, so from the second save of a state on nothing is
    allocated. A snapshot stays as it is until the next `copy`: who calls it makes sure the last one is no longer read.
    """

    def __init__(self) -> None:
        self._block: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._layout: tuple[tuple[torch.Size, torch.dtype], ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes that are held."""
        return 0 if self._block is None else self._block.numel()

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the tensors, all on the CPU and contiguous."""
        import torch

        layout = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if layout != self._layout:
            self._lay_out(tensors)
            self._layout = layout
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        with torch.no_grad():
            if on_gpu:
                for view, tensor in zip(self._views, tensors, strict=True):
                    view.copy_(tensor, non_blocking=True)
                torch.cuda.current_stream().synchronize()
            elif tensors:
                torch._foreach_copy_(self._views, list(tensors))
        return self._views

    def release(self) -> None:
        """Give the memory back."""
        self._block, self._views, self._layout = None, [], ()

    def _lay_out(self, tensors: Sequence[torch.Tensor]) -> None:
        """Cut the block into one view a tensor."""
        self._views = []
        starts, total = [], 0
        for tensor in tensors:
            starts.append(total)
            nbytes = tensor.numel() * tensor.element_size()
            total += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._block is None or self._block.numel() < total:
            self._block = None  # the old block goes before the new one comes
            self._block = _allocate(total, pinned=any(tensor.is_cuda for tensor in tensors))
        for start, tensor in zip(starts, tensors, strict=True):
            flat = self._block[start : start + tensor.numel() * tensor.element_size()]
            self._views.append(flat.view(tensor.dtype).view(tensor.shape))


def _allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return memory whose pages are there already: faulting them one by one during the copy takes as long again."""
    import torch

    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    # Not huge pages: where memory is fragmented or new to a virtual machine, the first touch took five times longer.
    populate = getattr(mmap, "MAP_POPULATE", 0)
    return torch.frombuffer(
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate), dtype=torch.uint8
    )
