"""Checks that fp32 masters belong to their weights: casting a master must reproduce its weight."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, Role, TensorEntry, TensorSlice
from ckptkit.storage import Store

_SAMPLE = 4096  # how many elements are compared


def check_masters(store: Store, catalog: Catalog) -> list[str]:
    """Return the parameters whose fp32 master, cast to the weight's dtype, differs from the weight in any bit.

    An empty result proves that each master belongs to its weight. Reads all masters and weights, but holds only one
    parameter at a time in memory.
    """
    model = catalog.by_role(Role.MODEL)
    wrong = []
    for fqn, master in catalog.by_role(Role.MASTER).items():
        weight = model.get(fqn)
        same = weight is not None and weight.shape == master.shape
        if (
            weight is None
            or not same
            or not np.array_equal(_cast(_read(store, master), weight.dtype), _read(store, weight))
        ):
            wrong.append(fqn)
    return wrong


class MasterSampler:
    """Checks whether a master may belong to a parameter: a sample of it, once cast, must equal the weight's elements.

    Used when the shapes alone allow several assignments, because of frozen parameters. Reads a few kilobytes per check.
    """

    def __init__(self, store: Store, weights: Mapping[str, TensorEntry]) -> None:
        self.store = store
        self.weights = weights
        self._read = functools.cache(self._first)

    def fits(self, master: TensorEntry, fqn: str) -> bool:
        """Return whether the first elements of one of the master's slices, once cast, equal the weight's.

        Compares one slice that is contiguous in the weight. Returns True if there is no such slice.
        """
        weight = self.weights[fqn]
        itemsize = dtype_of(weight.dtype).itemsize
        for mine in master.slices:
            for part in weight.slices:
                start = _start_in(part, mine.box)
                if start is not None and mine.strides is None and mine.box.is_contiguous_in(part.box.sizes):
                    count = min(mine.box.numel, _SAMPLE)
                    cast = _cast(self._read(mine.path, mine.start, master.dtype, count), weight.dtype)
                    other = self._read(part.path, part.start + start * itemsize, weight.dtype, count)
                    return np.array_equal(cast, other)
        return True

    def _first(self, path: str, start: int, dtype: str, count: int) -> npt.NDArray[Any]:
        itemsize = dtype_of(dtype).itemsize
        return np.frombuffer(self.store.read(path, start, start + count * itemsize), f"<u{itemsize}")


def _read(store: Store, entry: TensorEntry) -> npt.NDArray[Any]:
    """Return the whole tensor's bits as unsigned integers of its item size."""
    kind = np.dtype(f"<u{dtype_of(entry.dtype).itemsize}")
    whole = np.empty(entry.shape, kind)
    for part in entry.slices:
        if part.box.numel == 0:
            continue
        raw = np.frombuffer(store.read(part.path, part.start, part.start + part.nbytes), kind)
        strides = None if part.strides is None else [step * kind.itemsize for step in part.strides]
        view = (
            raw.reshape(part.box.sizes)
            if strides is None
            else np.lib.stride_tricks.as_strided(raw, part.box.sizes, strides)
        )
        whole[tuple(slice(a, b) for a, b in zip(part.box.offsets, part.box.stops, strict=True))] = view
    return whole


def _cast(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Round fp32 bits to `dtype` as torch does: to the nearest value, ties to even."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return bits.view("<f4").astype("<f2").view("<u2")
    if dtype == "bfloat16":
        wide = bits.reshape(-1).astype(np.uint64)  # NumPy 1 turns a scalar and an int into a float
        rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
        nan = (wide & 0x7FFFFFFF) > 0x7F800000
        return np.where(nan, 0x7FC0, rounded).astype("<u2").reshape(bits.shape)
    return bits


def _start_in(part: TensorSlice, box: Box) -> int | None:
    """Return how many elements precede `box` in a row-major slice, or None if the slice does not contain the box."""
    inside = box.numel and part.strides is None and part.codec is None and part.box.intersect(box) == box
    return box.relative_to(part.box).flat_start(part.box.sizes) if inside else None
