"""Host memory for snapshots: allocated once, touched once, used again, and owned by one save at a time."""

from __future__ import annotations

import logging
import mmap
import operator
import os
from collections.abc import Sequence
from itertools import compress, count
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ckptkit.errors import SaveError

if TYPE_CHECKING:
    import torch

__all__ = ["StagingBuffers", "stand_ins"]

_ALIGNMENT = 64
_SMALL = 2048  # elements: of larger tensors, each may have a call
_PACK = 32767  # elements that torch.stack copies without handing them to threads, tensor by tensor
_shape_of, _dtype_of, _is_cuda = map(operator.attrgetter, ("shape", "dtype", "is_cuda"))
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
        self._views = _Views()
        self._looks: list[tuple[torch.Size, torch.dtype]] = []
        self._packs: list[_Pack] = []
        self._single: list[int] = []
        self._last: list[torch.Tensor] | None = None
        self._on_gpu = False

    @property
    def nbytes(self) -> int:
        """The bytes that are held."""
        return 0 if self._block is None else self._block.numel()

    def copy(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return copies of the tensors, all on the CPU and contiguous.

        Args:
            tensors: One that stood there in the call before, too, is taken to be of the dtype that it was.

        Raises:
            SaveError: Such a one is not of the shape that it was.
        """
        import torch

        with torch.no_grad():
            self._fit(tensors)
            views, single = self._views, self._single
            if self._on_gpu:
                self._check(tensors, range(len(tensors)))
                for view, tensor in zip(views, tensors, strict=True):
                    view.copy_(tensor, non_blocking=True)
                torch.cuda.current_stream().synchronize()
                return views
            for pack in self._packs:
                pack.copy(tensors)
            if single:
                self._check(tensors, single)
                torch._foreach_copy_([views[row] for row in single], [tensors[row] for row in single])
        return views

    def forget(self) -> None:
        """Have the next call look at every tensor anew: what else is known of them has changed."""
        self._last = None

    def release(self) -> None:
        """Give the memory back."""
        self._drop()
        self._views, self._looks, self.starts = _Views(), [], []
        self._packs, self._single, self._last = [], [], None

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

    def _fit(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have a place for each tensor."""
        last, self._last = self._last, None
        changed = None if last is None else _changed(tensors, last)
        if changed is None:
            self._on_gpu = any(map(_is_cuda, tensors))
            looks = list(zip(map(_shape_of, tensors), map(_dtype_of, tensors), strict=True))
        else:
            looks = self._looks.copy()
            for row in changed:
                looks[row] = (tensors[row].shape, tensors[row].dtype)
                self._on_gpu |= tensors[row].is_cuda
        if looks != self._looks:
            self._looks = []  # until there is memory for the new one
            self._lay_out(looks)
            self._looks = looks
        self._last = list(tensors)

    def _check(self, tensors: Sequence[torch.Tensor], rows: Sequence[int]) -> None:
        """Raise where a tensor is not of the shape that its place is for: a copy might stretch it."""
        for row in rows:
            if tensors[row].shape != self._looks[row][0]:
                raise _reshaped(self._looks[row][0], tensors[row].shape)

    def _lay_out(self, looks: list[tuple[torch.Size, torch.dtype]]) -> None:
        """Cut the block into one place a tensor."""
        starts, packs, self._single, total = _places(looks, pack=not self._on_gpu)
        if self._block is None or self._block.numel() < total:
            self._views = _Views()
            self._packs = []
            self._drop()  # the old block goes before the new one comes
            if self._shared and total:
                self.fd, self._block = _allocate_shared(total)
                self._registered = _register(self._block) if self._on_gpu else 0
            else:
                self._block = _allocate(total, pinned=self._on_gpu)
            self.generation += 1
        self.starts, self.staged = starts, total
        self._views = _Views(self._block, starts, looks)
        self._packs = [_Pack(rows, self._block[starts[rows[0]] :], *looks[rows[0]]) for rows in packs]


class _Views(Sequence["torch.Tensor"]):
    """The parts of a block, made when they are asked for: thousands of small ones take longer than to fill them."""

    def __init__(
        self,
        block: torch.Tensor | None = None,
        starts: Sequence[int] = (),
        looks: Sequence[tuple[torch.Size, torch.dtype]] = (),
    ) -> None:
        self._block, self._starts, self._looks = block, starts, looks
        self._made: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._looks)

    @overload
    def __getitem__(self, row: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, row: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(row, slice):
            return [self[at] for at in range(*row.indices(len(self)))]
        if row not in self._made:
            start, (shape, dtype) = self._starts[row], self._looks[row]  # IndexError ends an iteration
            assert self._block is not None
            self._made[row] = self._block[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        return self._made[row]


class _Pack:
    """Small tensors of one dtype and shape that lie side by side in the block: one call copies all.

    Attributes:
        rows: Which of the tensors.
    """

    def __init__(self, rows: list[int], block: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
        self.rows = rows
        self._shape = shape
        self._out = block[: len(rows) * shape.numel() * dtype.itemsize].view(dtype).view(len(rows), *shape)

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        import torch

        chosen = list(map(tensors.__getitem__, self.rows))
        if chosen[0].shape != self._shape:  # that the others are of the same, `stack` sees to itself
            raise _reshaped(self._shape, chosen[0].shape)
        try:
            torch.stack(chosen, out=self._out)
        except RuntimeError:
            for tensor in chosen:
                if tensor.shape != self._shape:
                    raise _reshaped(self._shape, tensor.shape) from None
            raise


def _reshaped(before: torch.Size, now: torch.Size) -> SaveError:
    return SaveError(
        f"a tensor of shape {list(before)} has become one of {list(now)} in place. Nothing was saved; replace it, or "
        "give it its shape again."
    )


def _changed(tensors: Sequence[torch.Tensor], last: Sequence[torch.Tensor]) -> list[int] | None:
    """Return which tensors are not the very ones of before; None where they are many, or others in number."""
    if len(tensors) != len(last):
        return None
    changed = list(compress(count(), map(operator.is_not, tensors, last)))
    return changed if 4 * len(changed) <= len(tensors) else None


def _places(
    looks: Sequence[tuple[torch.Size, torch.dtype]], *, pack: bool
) -> tuple[list[int], list[list[int]], list[int], int]:
    """Return where each of such tensors starts, which lie side by side, which alone, and where the last ends."""
    kinds: dict[tuple[torch.Size, torch.dtype], int] = {}
    kind_of = np.fromiter(map(kinds.setdefault, looks, count()), np.int64, len(looks))  # the first one of its kind
    order = np.argsort(kind_of, kind="stable")
    stops = np.searchsorted(kind_of[order], list(kinds.values()), side="right").tolist()
    starts = np.zeros(len(looks), np.int64)
    packs: list[list[int]] = []
    single: list[int] = []
    begin = total = 0
    packed = _packed_dtypes()
    for (shape, dtype), stop in zip(kinds, stops, strict=True):
        rows, begin, numel = order[begin:stop], stop, shape.numel()
        nbytes = numel * dtype.itemsize
        many = min(len(rows), _PACK // numel) if pack and 0 < numel <= _SMALL and dtype in packed else 1
        step = -(-many * nbytes // _ALIGNMENT) * _ALIGNMENT
        at = np.arange(len(rows))
        starts[rows] = total + at // many * step + at % many * nbytes
        total += -(-len(rows) // many) * step
        chosen = rows.tolist()
        if many > 1:
            packs += [chosen[first : first + many] for first in range(0, len(chosen), many)]
        else:
            single += chosen
    return starts.tolist(), packs, single, total


def _packed_dtypes() -> frozenset[Any]:
    import torch

    return frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32))


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
