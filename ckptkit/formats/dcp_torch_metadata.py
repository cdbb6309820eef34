"""`Metadata` as torch's planners ask for it, over a catalog: objects are made only for what is asked about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptkit.catalog.entry import Catalog
from ckptkit.formats.dcp_read import ReadPlan, plan_read
from ckptkit.formats.manifest import Entries

if TYPE_CHECKING:
    from ckptkit.formats.dcp_storage import DCPReader

__all__ = ["CatalogMetadata", "CatalogPaths", "PlannableMetadata"]


class CatalogMetadata(Mapping[str, Any]):
    """`Metadata.state_dict_metadata` that makes chunk objects only for the tensors a planner asks about.

    Travels as an address: of a save, the other ranks open it when somebody asks.
    """

    def __init__(self, reader: DCPReader) -> None:
        self._reader = reader

    @property
    def _catalog(self) -> Catalog:
        return self._reader.catalog

    def __len__(self) -> int:
        return len(self._catalog.tensors) + len(self._catalog.objects)

    def __iter__(self) -> Iterator[str]:
        yield from self._catalog.tensors
        yield from self._catalog.objects

    def __contains__(self, name: object) -> bool:
        return name in self._catalog.tensors or name in self._catalog.objects

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        entry = self._catalog.tensors.get(name)
        if entry is None:
            self._catalog.objects[name]
            return BytesStorageMetadata()
        boxes = zip(entry.slices.offsets.tolist(), entry.slices.sizes.tolist(), strict=True)
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        return TensorStorageMetadata(TensorProperties(getattr(torch, entry.dtype)), torch.Size(entry.shape), chunks)


class PlannableMetadata(CatalogMetadata):
    """The same, of a reader that also reads what `DCPLoadPlanner` has planned."""

    @property
    def is_foreign(self) -> bool:
        return not isinstance(self._catalog.tensors, Entries)

    def plan(self, state_dict: dict[str, Any], *, strict: bool) -> ReadPlan:
        reader = self._reader
        return plan_read(
            reader.catalog,
            reader.store,
            state_dict,
            verify=reader.verify,
            cast=reader.cast,
            strict=strict,
            workers=reader.workers,
        )


class CatalogPaths(Mapping[str, "tuple[str | int, ...]"]):
    """`Metadata.planner_data`: the path of each key that has one, without an entry a tensor."""

    def __init__(self, reader: DCPReader) -> None:
        self._reader = reader
        self._known: dict[str, tuple[str | int, ...]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_reader": self._reader, "_known": None}

    @property
    def _paths(self) -> dict[str, tuple[str | int, ...]]:
        if self._known is None:
            tensors, objects = self._reader.catalog.tensors, self._reader.catalog.objects
            if isinstance(tensors, Entries):
                found = dict(zip(tensors.manifest.tensors.names, tensors.manifest.tensors.keys, strict=True))
            else:
                found = {name: entry.key for name, entry in tensors.items()}
            found.update({name: entry.key for name, entry in objects.items()})
            self._known = {name: path for name, path in found.items() if path}
        return self._known

    def __len__(self) -> int:
        return len(self._paths)

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __getitem__(self, name: str) -> tuple[str | int, ...]:
        return self._paths[name]
