"""Small tensors whose local part is one slice of the checkpoint, as where the sharding has not changed: found and
read as columns.

A rank of a large model has thousands of them, and what a load costs them is Python, not bytes: so there is no object a
tensor here, nor a read.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.distributed.tensor import DTensor

from ckptkit.catalog.entry import Catalog, Digest
from ckptkit.formats.dcp_bytes import host_view
from ckptkit.formats.manifest import DIGEST, Entries, Manifest
from ckptkit.storage.store import ReadInto, Store

__all__ = ["ExactReads"]

_SMALL = 1 << 20  # of a tensor: larger ones are read each for itself, straight into their memory
_BATCH = 4 << 20
_GAP = 64 << 10  # read and dropped rather than another read
_PLAIN = (torch.Tensor, torch.nn.Parameter)
Int64 = npt.NDArray[np.int64]
Box = tuple[tuple[int, ...], tuple[int, ...]]
BoxOf = Callable[[DTensor], "Box | None"]
Check = Callable[[Digest, memoryview, str, str], None]


class ExactReads:
    """The tensors of a state that are such, and the reads that fill them."""

    def __init__(self, manifest: Manifest, entries: Entries, box_of: BoxOf) -> None:
        self._manifest = manifest
        self._entries = entries
        self._box_of = box_of
        self._dtypes = {name: getattr(torch, name) for name in set(manifest.tensors.dtypes)}
        self._names: list[str] = []
        self._locals: list[torch.Tensor] = []
        self._tensors: list[int] = []
        self._boxes: list[tuple[int, ...]] = []  # offsets, then sizes
        self._rows: Int64 = np.zeros(0, np.int64)

    @classmethod
    def of(cls, catalog: Catalog, store: Store, box_of: BoxOf) -> ExactReads | None:
        """Return them for a catalog of columns on a local disk; None for any other, which has no rows to look in, or
        where requests cost more than Python.

        Args:
            box_of: (offsets, sizes) of what this rank holds of a DTensor; None where it is no part of its mesh.
        """
        entries = catalog.tensors
        if not isinstance(entries, Entries) or store.local_root is None:
            return None
        return cls(entries.manifest, entries, box_of)

    def take(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Take the tensors for which there is such a slice; return the others, and all that is no tensor."""
        for name, value in flat.items():
            row = self._entries.row(name)
            local = None if row is None else self._small(value)
            if row is None or local is None or not self._is_of(row, value, local):
                continue
            offsets: tuple[int, ...] = (0,) * local.dim()
            if local is not value:
                box = self._box_of(value)
                if box is None or box[1] != local.shape:
                    continue
                offsets = box[0]
            self._names.append(name)
            self._locals.append(local)
            self._tensors.append(row)
            self._boxes.append(offsets + local.shape)
        self._find()
        taken = set(self._names)
        return {name: value for name, value in flat.items() if name not in taken}

    def _is_of(self, row: int, value: torch.Tensor, local: torch.Tensor) -> bool:
        tensors = self._manifest.tensors
        return local.dtype is self._dtypes[tensors.dtypes[row]] and value.shape == tensors.shapes[row]

    def _small(self, value: Any) -> torch.Tensor | None:
        """The local part of a tensor, where its bytes lie row-major in the host's memory."""
        local = value._local_tensor if type(value) is DTensor else value
        if type(local) not in _PLAIN or not local.is_cpu or not 0 < local.nbytes < _SMALL:
            return None
        is_row_major = local.layout is torch.strided and local.is_contiguous() and not local.is_quantized
        return local if is_row_major and not (local.is_conj() or local.is_neg()) else None

    def _find(self) -> None:
        """Find the slice of each; those that have none are dropped."""
        slices, count = self._manifest.slices, len(self._names)
        rows = np.full(count, -1, np.int64)
        chosen = np.array(self._tensors, np.int64)
        starts, stops, elements = (column[chosen] for column in self._entries.columns)
        ndims = np.fromiter(map(len, self._boxes), np.int64, count) // 2
        for ndim in np.unique(ndims).tolist():
            which = np.flatnonzero(ndims == ndim)
            wanted = np.array([self._boxes[i] for i in which.tolist()], np.int64).reshape(len(which), 2 * ndim)
            lengths = stops[which] - starts[which]
            owner = np.repeat(np.arange(len(which)), lengths)
            at = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # in its tensor
            first = (elements[which][owner] + at * ndim)[:, None] + np.arange(ndim)
            same = (slices.offsets[first] == wanted[owner, :ndim]).all(axis=1)
            same &= (slices.sizes[first] == wanted[owner, ndim:]).all(axis=1)
            found = np.flatnonzero(same)[::-1]  # of equal ones the first is kept
            rows[which[owner[found]]] = starts[which][owner[found]] + at[found]
        nbytes = np.fromiter((local.nbytes for local in self._locals), np.int64, count)
        good = rows >= 0
        good[good] = slices.nbytes[rows[good]] == nbytes[good]
        if slices.strides:
            good &= ~np.isin(rows, np.fromiter(slices.strides, np.int64, len(slices.strides)))
        if not good.all():
            kept = np.flatnonzero(good).tolist()
            self._names = [self._names[i] for i in kept]
            self._locals = [self._locals[i] for i in kept]
        self._rows = rows[good]

    # --- reading

    def jobs(self, store: Store, check: Check | None) -> Iterator[tuple[int, Callable[[], int]]]:
        """Yield (bytes, what reads them and returns how many were of tensors), a few megabytes each.

        Args:
            check: Raises where bytes are not those of a digest; gets their file and tensor too. None: digests are not
                looked at.
        """
        if not len(self._rows):
            return
        slices = self._manifest.slices
        files, starts = slices.files[self._rows], slices.starts[self._rows]
        order = np.lexsort((starts, files))
        files, starts = files[order], starts[order]
        stops = starts + slices.nbytes[self._rows[order]]
        cut = np.ones(len(order), bool)  # where a read begins
        cut[1:] = (files[1:] != files[:-1]) | (starts[1:] - stops[:-1] > _GAP) | (starts[1:] < stops[:-1])
        cut[1:] |= np.diff(stops // _BATCH) > 0
        bounds = [*np.flatnonzero(cut).tolist(), len(order)]
        digests = None if check is None else slices.digests
        for first, last in itertools.pairwise(bounds):
            items = order[first:last]
            read = _Read(
                store,
                self._manifest.paths[int(files[first])],
                starts[first:last].tolist(),
                stops[first:last].tolist(),
                [self._locals[i] for i in items.tolist()],
                None if digests is None else digests[self._rows[items]].tolist(),
                [self._names[i] for i in items.tolist()],
                check,
            )
            yield int(stops[last - 1] - starts[first]), read


class _Read:
    """One read, dealt out to the tensors whose bytes it has."""

    def __init__(
        self,
        store: Store,
        path: str,
        starts: list[int],
        stops: list[int],
        targets: list[torch.Tensor],
        digests: list[int] | None,
        names: list[str],
        check: Check | None,
    ) -> None:
        self.store = store
        self.path = path
        self.starts = starts
        self.stops = stops
        self.targets = targets
        self.digests = digests
        self.names = names
        self.check = check

    def __call__(self) -> int:
        """Read, check, then fill: nothing arrives where anything is damaged. Raises what `check` does."""
        begin = self.starts[0]
        buffer = torch.empty(self.stops[-1] - begin, dtype=torch.uint8)
        view = host_view(buffer, writable=True)
        self.store.read_many([ReadInto(self.path, begin, view)], workers=1)
        if self.digests is not None:
            pieces = [view[a - begin : b - begin] for a, b in zip(self.starts, self.stops, strict=True)]
            if list(map(xxhash.xxh3_64_intdigest, pieces)) != self.digests:
                self._check_each(pieces, self.digests)
        move, source = ctypes.memmove, buffer.data_ptr() - begin
        for start, stop, target in zip(self.starts, self.stops, self.targets, strict=True):
            move(target.data_ptr(), source + start, stop - start)
        return sum(self.stops) - sum(self.starts)

    def _check_each(self, pieces: list[memoryview], digests: list[int]) -> None:
        assert self.check is not None
        for piece, digest, start, name in zip(pieces, digests, self.starts, self.names, strict=True):
            self.check(Digest(DIGEST, digest, start, len(piece)), piece, self.path, name)
