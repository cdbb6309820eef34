"""Host memory for snapshots: allocated once, touched once, used again, and owned by one save at a time."""

from __future__ import annotations

import logging
import mmap
import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["StagingBuffers", "stand_ins"]

_ALIGNMENT = 64
_SMALL = 2048  # elements: of larger tensors, each may have a call
_PACK = 32768  # elements that torch.cat copies without handing them to threads, tensor by tensor
_PACKED = frozenset(f"torch.{name}" for name in ("float32", "float16", "bfloat16", "float64", "int64", "int32"))
_log = logging.getLogger(__name__)


class StagingBuffers:
    """Copies of tensors in one block of host memory, pinned where the tensors are on a GPU.

    The block grows when more is asked for and never shrinks, so from the second save of a state on nothing is
    allocated. A snapshot stays as it is until the next `copy`: who calls it makes sure the last one is no longer read.

    Attributes:
        fd: With `shared`: the memory, for another process to map; -1 while there is none.
        generation: Counts the blocks there have been.
        starts: Where in the block each copy lies.
        staged: The bytes of the last snapshot.
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
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._packs: list[_Pack] = []
        self._single: list[int] = []
        self._pack_of: dict[int, _Pack] = {}
        self._last: list[torch.Tensor] = []
        self._on_gpu = False

    @property
    def nbytes(self) -> int:
        """The bytes that are held."""
        return 0 if self._block is None else self._block.numel()

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the tensors, all on the CPU and contiguous.

        Args:
            tensors: One that was among those of the call before is taken to be where it was, and as it was, but for
                its elements: views that nobody else has.
        """
        import torch

        with torch.no_grad():
            fresh = self._fit(tensors)
            if self._on_gpu:
                for view, tensor in zip(self._views, tensors, strict=True):
                    view.copy_(tensor, non_blocking=True)
                torch.cuda.current_stream().synchronize()
                return self._views
            single = self._single
            for pack in self._packs:
                if not pack.flat and not fresh:  # worth it from the second time on
                    pack.flatten(tensors)
                if not pack.copy():
                    single = single + pack.rows
            if single:
                torch._foreach_copy_([self._views[row] for row in single], [tensors[row] for row in single])
        return self._views

    def release(self) -> None:
        """Give the memory back."""
        self._drop()
        self._views, self._layout, self.starts = [], [], []
        self._packs, self._pack_of, self._single, self._last = [], {}, [], []

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
        if self.fd >= 0 and self._owner == os.getpid():  # a forked process has no part in it
            self._drop()

    def _fit(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Have a view for each tensor. Returns whether most of them were not among those of the call before."""
        last, self._last = self._last, []
        changed = _changed(tensors, last)
        fresh = 4 * len(changed) > len(tensors)
        self._on_gpu = (self._on_gpu and not fresh) or any(tensors[row].is_cuda for row in changed)
        if len(tensors) != len(self._layout) or any(
            self._layout[row] != (tensors[row].shape, tensors[row].dtype) for row in changed
        ):
            self._layout = []  # until there is memory for the new one
            self._lay_out(tensors)
            self._layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        elif fresh:
            for pack in self._packs:
                pack.flat = []
        else:
            for row in changed:
                if row in self._pack_of:
                    self._pack_of[row].put(row, tensors[row])
        self._last = list(tensors)
        return fresh

    def _lay_out(self, tensors: Sequence[torch.Tensor]) -> None:
        """Cut the block into one view a tensor."""
        import torch

        self._views, self._packs = [], []
        packed = [] if self._on_gpu else _packed(tensors)
        inside = {row for rows in packed for row in rows}
        self._single = [row for row in range(len(tensors)) if row not in inside]
        starts = [0] * len(tensors)
        total = 0
        for rows in [*packed, *([row] for row in self._single)]:
            for row in rows:
                starts[row] = total
                total += tensors[row].numel() * tensors[row].element_size()
            total = -(-total // _ALIGNMENT) * _ALIGNMENT
        if self._block is None or self._block.numel() < total:
            self._drop()  # the old block goes before the new one comes
            if self._shared and total:
                self.fd, self._block = _allocate_shared(total)
                self._registered = _register(self._block) if self._on_gpu else 0
            else:
                self._block = _allocate(total, pinned=self._on_gpu)
            self.generation += 1
        self.starts, self.staged = starts, total
        views: dict[int, torch.Tensor] = {}
        for rows in packed:
            first, sizes = tensors[rows[0]], [tensors[row].numel() for row in rows]
            start, length = starts[rows[0]], sum(sizes) * first.element_size()
            out = self._block[start : start + length].view(first.dtype)
            self._packs.append(_Pack(rows, out))
            self._packs[-1].flatten(tensors)
            pieces: Sequence[torch.Tensor] = torch.split_with_sizes(out, sizes)
            for row, piece in zip(rows, pieces, strict=True):
                views[row] = piece.view(tensors[row].shape)
        for row in self._single:
            start, tensor = starts[row], tensors[row]
            flat = self._block[start : start + tensor.numel() * tensor.element_size()]
            views[row] = flat.view(tensor.dtype).view(tensor.shape)
        self._views = [views[row] for row in range(len(tensors))]
        self._pack_of = {row: pack for pack in self._packs for row in pack.rows}


class _Pack:
    """Small tensors of one dtype that lie side by side in the block: one call copies all.

    Attributes:
        rows: Which of the tensors.
        flat: Each of them as one row, of the same memory; empty while nobody has made them.
    """

    def __init__(self, rows: list[int], out: torch.Tensor) -> None:
        self.rows = rows
        self.flat: list[torch.Tensor] = []
        self._out = out

    def flatten(self, tensors: Sequence[torch.Tensor]) -> None:
        mine = [tensors[row] for row in self.rows]
        self.flat = [tensor.view(-1) for tensor in mine] if all(map(_is_row, mine)) else []

    def put(self, row: int, tensor: torch.Tensor) -> None:
        """Take another tensor in the place of one."""
        if self.flat and _is_row(tensor):
            self.flat[self.rows.index(row)] = tensor.view(-1)
        else:
            self.flat = []

    def copy(self) -> bool:
        """Copy all; False where that must be done one by one."""
        import torch

        if self.flat:
            torch.cat(self.flat, out=self._out)
        return bool(self.flat)


def _changed(tensors: Sequence[torch.Tensor], last: Sequence[torch.Tensor]) -> Sequence[int]:
    """Return which tensors are not the very ones of before."""
    if len(tensors) != len(last):
        return range(len(tensors))
    same = bytes(map(operator.is_, tensors, last))
    return [row for row, kept in enumerate(same) if not kept] if 0 in same else ()


def _packed(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return which tensors to lay side by side."""
    rows: dict[torch.dtype, list[int]] = {}
    found: list[list[int]] = []
    numel: dict[torch.dtype, int] = {}
    for row, tensor in enumerate(tensors):
        size, dtype = tensor.numel(), tensor.dtype
        if not 0 < size <= _SMALL or not _is_row(tensor) or str(dtype) not in _PACKED:
            continue
        if numel.get(dtype, _PACK) + size >= _PACK:
            numel[dtype], rows[dtype] = 0, []
            found.append(rows[dtype])
        rows[dtype].append(row)
        numel[dtype] += size
    return found


def _is_row(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def stand_ins(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the same shapes that take no memory: what a rank that could not stage gives ranks that wait
    for its part of a save, before it tells them that the save has failed."""
    import torch

    return [torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for tensor in tensors]


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


def _allocate_shared(nbytes: int) -> tuple[int, torch.Tensor]:
    """Return memory without a name: no kill leaves it behind."""
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
    """Pin memory that was not allocated pinned; return its address, 0 where the driver refuses."""
    import torch

    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(block.data_ptr(), block.numel(), 0))
    if code:
        _log.warning("the shared staging memory could not be pinned (CUDA error %d): copies to it are slower", code)
        return 0
    return block.data_ptr()
