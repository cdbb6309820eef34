"""Allocates host memory for snapshots. The memory is reused, and belongs to one save at a time."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64
_log = logging.getLogger(__name__)


class StagingBuffers:
    """Copies tensors to one block of host memory, which is pinned if tensors are on a GPU.

    The block grows on demand and never shrinks, so only the first save of a state allocates. A snapshot is valid until
    the next `copy`; the caller must make sure that nobody still reads it then.

    Attributes:
        fd: With `shared`: a file descriptor for the memory, to send to another process. -1 if there is no memory.
        generation: Number of blocks allocated so far.
        starts: Offset of each copy in the block.
        staged: Size of the last snapshot in bytes.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.fd = -1
        self.generation = 0
        self.starts: list[int] = []
        self.staged = 0
        self._shared = shared
        self._owner = os.getpid()
        self._registered = 0
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
        """Release the memory."""
        self._drop()
        self._views, self._looks, self.starts = [], [], []

    def _drop(self) -> None:
        if self._registered:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self._registered)  # type: ignore[no-untyped-call]
            self._registered = 0
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._block = None

    def __del__(self) -> None:
        if self.fd >= 0 and self._owner == os.getpid():  # a forked process must not release the memory
            self._drop()

    def _lay_out(self, looks: Sequence[tuple[torch.Size, torch.dtype]], on_gpu: bool) -> None:
        """Assign a part of the block to each tensor."""
        self.starts, total = [], 0
        for shape, dtype in looks:
            self.starts.append(total)
            total += -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self._block is None or self._block.numel() < total or on_gpu != self._on_gpu:
            self._views = []
            self._drop()  # free the old block before allocating the new one
            if self._shared and total:
                self.fd, self._block = _allocate_shared(total)
                self._registered = _register(self._block) if on_gpu else 0
            else:
                self._block = _allocate(total, pinned=on_gpu)
            self.generation += 1
        self.staged = total
        self._views = [
            self._block[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for start, (shape, dtype) in zip(self.starts, looks, strict=True)
        ]


def stand_ins(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the same shapes and dtypes that use almost no memory.

    If a rank could not stage, it sends these to the ranks that wait for it, and then reports its failure.
    """
    import torch

    return [torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for tensor in tensors]


def _allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return memory whose pages are already mapped. Page faults during the copy would double the copy's time."""
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


def _allocate_shared(nbytes: int) -> tuple[int, torch.Tensor]:
    """Return anonymous memory and its file descriptor."""
    import torch

    fd = os.memfd_create("ckptkit-snapshot")
    try:
        os.ftruncate(fd, nbytes)
        block = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    except BaseException:
        os.close(fd)
        raise
    return fd, torch.frombuffer(block, dtype=torch.uint8)


def _register(block: torch.Tensor) -> int:
    """Pin existing memory. Return its address, or 0 if the driver refuses."""
    import torch

    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(block.data_ptr(), block.numel(), 0))
    if code:
        _log.warning("the shared staging memory could not be pinned (CUDA error %d): copies to it are slower", code)
        return 0
    return block.data_ptr()
