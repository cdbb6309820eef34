"""Local tensors filled from the slices of a checkpoint, of whatever format: only the bytes needed, each checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog
from ckptkit.errors import IncompleteCheckpointError
from ckptkit.formats.shards import LocalPart
from ckptkit.storage.store import Store

if TYPE_CHECKING:
    import torch

__all__ = ["Fill", "fill", "read_whole"]


@dataclass(frozen=True, slots=True)
class Fill:
    """A tensor to be filled with parts of a checkpoint's tensor, in its dtype.

    Attributes:
        entry: The name in the catalog.
        local: Its elements are uninitialised.
        parts: Which boxes of the whole tensor lie where in `local`; together they fill it.
    """

    entry: str
    local: torch.Tensor
    parts: Sequence[LocalPart]


def fill(catalog: Catalog, store: Store, fills: Iterable[Fill], *, workers: int = 0) -> int:
    """Fill the tensors and return the bytes read. The digest of every slice that is read whole is checked.

    Raises:
        IntegrityError: Bytes are not those that were written; names tensor and file.
        IncompleteCheckpointError: The slices do not hold every element that is wanted.
    """
    from ckptkit.formats.dcp_fill import Filler
    from ckptkit.formats.dcp_read import add_box

    filler = Filler(store, workers=workers)
    for item in fills:
        entry = catalog.tensors[item.entry]
        for part in item.parts:
            target = item.local
            if len(item.parts) > 1:
                for dim, (start, length) in enumerate(zip(part.local_offsets, part.box.sizes, strict=True)):
                    target = target.narrow(dim, start, length)
            add_box(filler, entry, part.box, target)
    filler.run()
    return filler.nbytes


def read_whole(catalog: Catalog, store: Store, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return whole tensors on the CPU, read now."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    fills = []
    for name in names:
        entry = catalog.tensors.get(name)
        if entry is None:
            raise IncompleteCheckpointError(f"{store.url}: objects.json refers to a tensor {name!r} that is not there.")
        tensors[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        fills.append(Fill(name, tensors[name], (LocalPart(Box.whole(entry.shape), (0,) * len(entry.shape)),)))
    fill(catalog, store, fills)
    return tensors
