"""Checks that fp32 master weights, cast to the dtype of the model's weights, equal these weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from ckptkit.catalog.box import Box
from ckptkit.catalog.casts import cast
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, Role, TensorEntry, TensorSlice
from ckptkit.formats.sources import Bytes, read_box
from ckptkit.storage import Store

SAMPLE = 4096  # how many elements are compared


def check_masters(store: Store, catalog: Catalog) -> list[str]:
    """Return the parameters whose fp32 master weight, cast to the weight's dtype, is not bit-identical to the weight.

    An empty result proves that all master weights belong to the model's weights. Reads all weights and master weights,
    but holds only one parameter at a time in memory.
    """
    model = catalog.by_role(Role.MODEL)
    wrong = []
    for fqn, master in catalog.by_role(Role.MASTER).items():
        weight = model.get(fqn)
        if weight is not None and weight.shape == master.shape:
            made = _rounded(_whole(store, master), master.dtype, weight.dtype)
            if np.array_equal(made, _whole(store, weight)):
                continue
        wrong.append(fqn)
    return wrong


class MasterSampler:
    """Checks whether a master weight may belong to a parameter, by comparing some elements of both.

    Needed if the shapes alone do not show which parameter a master weight belongs to. For example, frozen parameters
    have no master weight, but may have the same shape as other parameters. Reads a few kilobytes per check.
    """

    def __init__(self, store: Store, weights: Mapping[str, TensorEntry]) -> None:
        self.store = store
        self.weights = weights
        self._read = functools.cache(self._first)

    def fits(self, master: TensorEntry, fqn: str, *, rank: int | None = None) -> bool:
        """Return whether a sample of the master weight, cast to the weight's dtype, equals the weight's elements.

        Compares the first elements of one slice that is contiguous in the weight. Returns True if no slice is
        contiguous in the weight.

        Args:
            rank: Compare a slice of this rank. None: of any rank.
        """
        weight = self.weights[fqn]
        itemsize = dtype_of(weight.dtype).itemsize
        for mine in (one for one in master.slices if rank in (None, one.rank)):
            for part in weight.slices:
                start = _start_in(part, mine.box)
                if start is not None and mine.strides is None and mine.box.is_contiguous_in(part.box.sizes):
                    count = min(mine.box.numel, SAMPLE)
                    made = self._read(mine.path, mine.start, count * dtype_of(master.dtype).itemsize)
                    other = self._read(part.path, part.start + start * itemsize, count * itemsize)
                    return np.array_equal(_rounded(made, master.dtype, weight.dtype), other)
        return True

    def _first(self, path: str, start: int, nbytes: int) -> Bytes:
        return np.frombuffer(self.store.read(path, start, start + nbytes), np.uint8)


def _whole(store: Store, entry: TensorEntry) -> Bytes:
    return read_box(store, entry, Box.whole(entry.shape)).reshape(-1)


def _rounded(data: Bytes, source: str, target: str) -> Bytes:
    """Round a master weight's elements to a 16-bit dtype. For any other target dtype, return `data` itself."""
    return cast(data, source, target)[0] if target in ("float16", "bfloat16") else data


def _start_in(part: TensorSlice, box: Box) -> int | None:
    """Return how many elements precede `box` in a row-major slice, or None if the slice does not contain `box`."""
    inside = box.numel and part.strides is None and part.codec is None and part.box.intersect(box) == box
    return box.relative_to(part.box).flat_start(part.box.sizes) if inside else None
