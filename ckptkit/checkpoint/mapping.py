"""Presents a checkpoint as a mapping whose values are read lazily. Imports torch only for values that need it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptkit.arguments import Location, location
from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, CatalogInfo, TensorEntry
from ckptkit.checkpoint.run.address import resolve_url
from ckptkit.checkpoint.state.values import decode, references
from ckptkit.errors import CorruptCheckpointError, LoadError, UnsupportedFormatError
from ckptkit.formats.detect import open_source
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.own.reader import OBJECTS_NAME
from ckptkit.formats.own.record import find_record
from ckptkit.formats.pickles.objects import read_object
from ckptkit.formats.sources import read_box
from ckptkit.storage.store import Store
from ckptkit.units import format_size

if TYPE_CHECKING:
    import torch

_NUMPY = frozenset(
    ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool",
     "complex64", "complex128")
)  # fmt: skip


def open_checkpoint(
    url: Location, *, storage_options: Mapping[str, Any] | None = None, options: ReadOptions | None = None
) -> Checkpoint:
    """Open the checkpoint at `url`, in any supported format. If `url` is a run, open its newest checkpoint.

    Opening reads only metadata. For example, `open_checkpoint(url)["model.embed.weight"][0:10]` reads only these ten
    rows. The checkpoint is not protected from rotation: if a job may delete it, pin it first (`ckptkit pin`).

    Args:
        url: May also be "run/latest", "run/latest~1", "run/best" or "run/1000".
        storage_options: Passed to fsspec.
        options: Options for the formats of other systems.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CorruptCheckpointError: The metadata is damaged.
        UnsupportedFormatError: The format or a part of the metadata cannot be read.
    """
    exact = resolve_url(location("url", url), storage_options=storage_options)
    source = open_source(exact, storage_options=storage_options, options=options or ReadOptions())
    return Checkpoint(source.url, source.store, source.catalog, source.note)


class Checkpoint(Mapping[str, Any]):
    """Maps a checkpoint's names to values. The value of a tensor is a `TensorView`. An object's value is the object.

    Attributes:
        url: The opened checkpoint.
        note: Why this checkpoint was chosen, if the caller passed the URL of a run.
    """

    def __init__(self, url: str, store: Store, catalog: Catalog, note: str = "") -> None:
        self.url = url
        self.note = note
        self.catalog = catalog  # not public: dtypes, shapes, slices and roles, and the names of the objects
        self._store = store

    @property
    def info(self) -> CatalogInfo:
        """The checkpoint's format, producer, world size, mesh, files and step."""
        return self.catalog.info

    @property
    def step(self) -> int | None:
        """The training step, or None if the checkpoint does not record it."""
        return self.catalog.info.step

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics in the commit record. Empty if there are none."""
        record = find_record(self._store)
        return dict(record.metrics) if record is not None else {}

    def __getitem__(self, name: str) -> Any:
        entry = self.catalog.tensors.get(name)
        if entry is not None:
            return TensorView(entry, self._store)
        item = self.catalog.objects[name]
        value = read_object(self._store, item)
        if item.path.rpartition("/")[2] != OBJECTS_NAME:
            return value
        wanted = references(value)
        missing = [key for key in wanted if key not in self.catalog.tensors]
        if missing:
            raise CorruptCheckpointError(
                f"{item.path}: {name!r} refers to {missing[0]!r:.200}, which is not a tensor of this checkpoint."
            )
        tensors = {key: self[key].to_torch() for key in wanted}
        return decode(value, tensors.__getitem__)

    def __iter__(self) -> Iterator[str]:
        yield from self.catalog.tensors
        yield from (name for name in self.catalog.objects if name not in self.catalog.tensors)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self.catalog.tensors or name in self.catalog.objects

    def __repr__(self) -> str:
        return f"Checkpoint({self.url!r}, {len(self.catalog.tensors)} tensors, step {self.step})"


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor, read lazily: `view[...]` reads only the selected part.

    Supports integers, "..." and slices with positive steps, like numpy. The result is a numpy array, or a torch tensor
    if numpy lacks the dtype (bfloat16, float8).
    """

    entry: TensorEntry
    store: Store

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.entry.shape

    @property
    def dtype(self) -> str:
        """torch's name for the dtype, without "torch."."""
        return self.entry.dtype

    def __getitem__(self, index: Any) -> Any:
        if self.dtype not in _NUMPY:
            return self.to_torch(index)
        raw, rest = self._read(index)
        return raw.view(np.dtype(self.dtype))[..., 0][rest]

    def numpy(self) -> npt.NDArray[Any]:
        """Return the whole tensor as a numpy array.

        Raises:
            UnsupportedFormatError: numpy lacks the dtype.
        """
        if self.dtype not in _NUMPY:
            raise UnsupportedFormatError(
                f"tensor {self.entry.name!r}: numpy has no {self.dtype}. Use to_torch() instead."
            )
        result: npt.NDArray[Any] = self[...]
        return result

    def to_torch(self, index: Any = ...) -> torch.Tensor:
        """Return the whole tensor, or the part that `index` selects, as a torch tensor on the CPU."""
        import torch

        raw, rest = self._read(index)
        shape = raw.shape[:-1]
        flat = torch.from_numpy(raw.reshape(-1)).view(getattr(torch, self.dtype))
        steps = tuple(slice(None, None, item.step) if isinstance(item, slice) else item for item in rest)
        result: torch.Tensor = flat.reshape(shape)[steps]
        return result

    def _read(self, index: Any) -> tuple[npt.NDArray[np.uint8], tuple[Any, ...]]:
        """Read the smallest rectangular region that contains the selected elements.

        Returns the region's bytes as an array [..., itemsize], and the index that selects the elements in the region.
        """
        box, rest = _box(index, self.shape)
        itemsize = dtype_of(self.dtype).itemsize
        if not box.numel:
            return np.empty((*box.sizes, itemsize), np.uint8), rest
        try:
            return read_box(self.store, self.entry, box), rest
        except MemoryError as error:
            size = format_size(box.numel * itemsize)
            raise LoadError(
                f"tensor {self.entry.name!r} of shape {list(self.shape)}: no memory for {size}. Read a part of "
                "it, as in view[:1000], or convert the checkpoint, which needs little memory."
            ) from error


def _box(index: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1 or len(items) - len(dots) > len(shape):
        raise IndexError(f"index {index!r} does not fit a tensor of shape {list(shape)}")
    at = dots[0] if dots else len(items)
    fill = len(shape) - (len(items) - len(dots))
    items[at : at + 1] = [slice(None)] * fill
    offsets: list[int] = []
    sizes: list[int] = []
    rest: list[Any] = []
    for item, extent in zip(items, shape, strict=True):
        if isinstance(item, slice):
            start, stop, step = item.indices(extent)
            if step < 0:
                raise IndexError("a negative step is not supported; reverse the result instead")
            offsets.append(min(start, extent))
            sizes.append(max(0, stop - start))
            rest.append(slice(None, None, step))
        else:
            position = int(item) + (extent if item < 0 else 0)
            if not 0 <= position < extent:
                raise IndexError(f"index {item} is out of range for a dimension of {extent}")
            offsets.append(position)
            sizes.append(1)
            rest.append(0)
    return Box(tuple(offsets), tuple(sizes)), tuple(rest)
