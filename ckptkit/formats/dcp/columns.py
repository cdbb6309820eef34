"""Tensors and their slices as columns: a million slices are a few arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import distinct
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.errors import UnsupportedFormatError
from ckptkit.formats.pickles.inert import Record, TorchDType

__all__ = ["TensorColumns", "tensor_dtype"]

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """Tensors, and their slices as columns: rows [bounds[i], bounds[i + 1]) are those of tensor i.

    Attributes:
        ndims: [t]
        files: [n] number of the data file.
        starts, lengths: [n] bytes of the slice's item in its file.
        zstd: [n] whether the item is compressed.
        offsets, sizes: Of all slices, elements, end to end: as many numbers a slice as its tensor has dimensions.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    ndims: Int64
    bounds: Int64
    files: Int32
    starts: Int64
    lengths: Int64
    zstd: npt.NDArray[np.bool_]
    offsets: Int64
    sizes: Int64

    @property
    def owners(self) -> Int64:
        """[n] the tensor of each slice."""
        return np.repeat(np.arange(len(self.names)), np.diff(self.bounds))

    def elements(self) -> Int64:
        """Return where the numbers of each slice begin in `offsets` and `sizes`, and where the last end, [n + 1]."""
        result: Int64 = np.concatenate([[0], np.cumsum(self.ndims[self.owners])])
        return result

    def numels(self) -> npt.NDArray[np.float64]:
        """Return the elements of each slice, [n]: as floats, which no hostile size overflows."""
        result = np.ones(len(self.files), np.float64)
        for rows, at in _by_ndim(self.ndims[self.owners]):
            result[rows] = np.prod(self.sizes[at].astype(np.float64), axis=1)
        return result

    def take(self, keep: npt.NDArray[np.bool_]) -> TensorColumns:
        """Return the columns with some slices left out."""
        wide = np.repeat(keep, self.ndims[self.owners])
        counts = np.bincount(self.owners[keep], minlength=len(self.names))
        return TensorColumns(
            self.names, self.dtypes, self.shapes, self.ndims, np.concatenate([[0], np.cumsum(counts)]),
            self.files[keep], self.starts[keep], self.lengths[keep], self.zstd[keep],
            self.offsets[wide], self.sizes[wide],
        )  # fmt: skip


def _by_ndim(widths: Int64) -> Iterator[tuple[Int64, Int64]]:
    """Yield (rows, places of their numbers [n, ndim]) for the slices of each number of dimensions."""
    begins = np.cumsum(widths) - widths
    for ndim in distinct(widths).tolist():
        rows = np.flatnonzero(widths == ndim)
        yield rows, begins[rows][:, None] + np.arange(ndim)


def tensor_dtype(properties: Any) -> str:
    """Return the dtype of TensorProperties, whose state is (dtype, layout, requires_grad, memory format, pinned).

    Raises:
        AttributeError: They have none.
        UnsupportedFormatError: Their layout is not dense, or the dtype unknown.
    """
    state = properties.state if isinstance(properties, Record) else None
    found = state[0] if isinstance(state, tuple) and state else (properties.fields.get("dtype") if state else None)
    if not isinstance(found, TorchDType):
        raise AttributeError("dtype")
    layout = state[1] if isinstance(state, tuple) and len(state) > 1 else "strided"
    if layout != "strided":
        raise UnsupportedFormatError(f"its layout is {str(layout)[:40]}; only dense tensors are read.")
    return dtype_of(found.name).name
