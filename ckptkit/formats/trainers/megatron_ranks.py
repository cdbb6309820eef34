"""Reads Megatron's `torch` checkpoints, which have a directory `mp_rank_<TP>[_<PP>][_<EP>]` per model-parallel rank."""

from __future__ import annotations

from ckptkit.catalog.entry import Catalog
from ckptkit.errors import UnsupportedFormatError
from ckptkit.formats import torch_save
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.trainers.merge import open_part
from ckptkit.storage import Store


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Return the catalog of a checkpoint that a single model-parallel rank wrote.

    If the rank's directory also contains `distrib_optim.pt` (from the distributed optimizer), a note names this file.

    Raises:
        UnsupportedFormatError: Several ranks wrote the checkpoint. No file says along which dimension to join tensors.
    """
    ranks = sorted(item.path for item in store.list() if item.kind == "directory" and item.path.startswith("mp_rank_"))
    if len(ranks) > 1:
        raise UnsupportedFormatError(
            f"{store.url}: {ranks[0]} and {len(ranks) - 1} more: the model is split over Megatron's tensor-, pipeline- "
            "or expert-parallel ranks, and the files do not say how to join them. Load it in Megatron and save it with "
            "--ckpt-format torch_dist, or convert it with Megatron's tools/checkpoint/convert.py."
        )
    return open_part(torch_save.open_catalog, store, ranks[0], options)
