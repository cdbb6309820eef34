"""Host memory for snapshots: allocated once, touched once, used again, and owned by one save at a time."""

from __future__ import annotations

import logging
import mmap
import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import torch

__all__ = ["StagingBuffers", "stand_ins"]

_ALIGNMENT = 64
_SMALL = 2048  # elements: of larger tensors, each may have a call
_PACK = 32768  # elements that torch.cat copies without handing them to threads, tensor by tensor
_numel, _is_contiguous, _is_conj, _is_neg = map(operator.methodcaller, ("numel", "is_contiguous", "is_conj", "is_neg"))
_dtype_of = operator.attrgetter("dtype")
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

    def copy(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return copies of the tensors, all on the CPU and contiguous.

        Args:
            tensors: One that was among those of the call before is taken to be where it was, and as it was, but for
                its elements: views that nobody else has.
        """
        import torch

        with torch.no_grad():
            self._fit(tensors)
            views, single = self._views, self._single
            if self._on_gpu:
                for view, tensor in zip(views, tensors, strict=True):
                    view.copy_(tensor, non_blocking=True)
                torch.cuda.current_stream().synchronize()
                return views
            for pack in self._packs:
                pack.copy(tensors)
            if single:
                torch._foreach_copy_([views[row] for row in single], [tensors[row] for row in single])
        return views

    def get_ready(self) -> None:
        """Do beforehand what makes the next copy of the same tensors quicker. Their elements are not read."""
        import torch

        with torch.no_grad():
            for pack in self._packs:
                pack.get_ready(self._last)

    def release(self) -> None:
        """Give the memory back."""
        self._drop()
        self._views, self._layout, self.starts = _Views(), [], []
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

    def _fit(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have a place for each tensor."""
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

    def _lay_out(self, tensors: Sequence[torch.Tensor]) -> None:
        """Cut the block into one place a tensor."""
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
        self._views = _Views(self._block, starts, [(tensor.dtype, tensor.shape) for tensor in tensors])
        self._packs = []
        for rows in packed:
            dtype, last = tensors[rows[0]].dtype, tensors[rows[-1]]
            stop = starts[rows[-1]] + last.numel() * last.element_size()
            self._packs.append(_Pack(rows, self._block[starts[rows[0]] : stop].view(dtype)))
        self._pack_of = {row: pack for pack in self._packs for row in pack.rows}


class _Views(Sequence["torch.Tensor"]):
    """The parts of a block, made when they are asked for: thousands of small ones take longer than to fill them."""

    def __init__(
        self,
        block: torch.Tensor | None = None,
        starts: Sequence[int] = (),
        looks: Sequence[tuple[torch.dtype, torch.Size]] = (),
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
            start, (dtype, shape) = self._starts[row], self._looks[row]  # IndexError ends an iteration
            assert self._block is not None
            self._made[row] = self._block[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        return self._made[row]


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

    def get_ready(self, tensors: Sequence[torch.Tensor]) -> None:
        if not self.flat and tensors:
            mine = [tensors[row] for row in self.rows]
            self.flat = [tensor.view(-1) for tensor in mine] if _are_rows(mine) else []

    def put(self, row: int, tensor: torch.Tensor) -> None:
        """Take another tensor in the place of one."""
        if self.flat and _are_rows([tensor]):
            self.flat[self.rows.index(row)] = tensor.view(-1)
        else:
            self.flat = []

    def copy(self, tensors: Sequence[torch.Tensor]) -> None:
        import torch

        if self.flat:
            torch.cat(self.flat, out=self._out)
        else:
            self._out.copy_(torch._C._nn.flatten_dense_tensors([tensors[row] for row in self.rows]))


def _changed(tensors: Sequence[torch.Tensor], last: Sequence[torch.Tensor]) -> Sequence[int]:
    """Return which tensors are not the very ones of before."""
    if len(tensors) != len(last):
        return range(len(tensors))
    same = bytes(map(operator.is_, tensors, last))
    return [row for row, kept in enumerate(same) if not kept] if 0 in same else ()


def _packed(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return which tensors to lay side by side."""
    rows: dict[Any, list[int]] = {}
    numel: dict[Any, int] = {}
    found: list[list[int]] = []
    packed = _packed_dtypes()
    for row, (size, dtype) in enumerate(zip(map(_numel, tensors), map(_dtype_of, tensors), strict=True)):
        if not 0 < size <= _SMALL or dtype not in packed:
            continue
        if numel.get(dtype, _PACK) + size >= _PACK:
            numel[dtype], rows[dtype] = 0, []
            found.append(rows[dtype])
        rows[dtype].append(row)
        numel[dtype] += size
    return found


def _packed_dtypes() -> frozenset[Any]:
    import torch

    return frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32))


def _are_rows(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether each is one run of memory as it is."""
    return all(map(_is_contiguous, tensors)) and not any(map(_is_conj, tensors)) and not any(map(_is_neg, tensors))


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
