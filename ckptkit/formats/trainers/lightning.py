"""Reads Lightning's sharded checkpoints: a DCP with `meta.pt` (FSDPStrategy, ModelParallelStrategy, Fabric).

The weights are under the key "model" or "state_dict", with the names that they have in the user's LightningModule. The
network is usually an attribute of this module, so the attribute's name is a prefix of the weights' names. If all names
have the prefix, it is stripped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ckptkit.catalog.entry import Catalog, CatalogInfo, Role
from ckptkit.errors import UNREADABLE
from ckptkit.formats.dcp import catalog as dcp
from ckptkit.formats.models import AVERAGED_FROM
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.pickles.objects import read_pickled
from ckptkit.formats.trainers.merge import assembled
from ckptkit.storage import Store

META = "meta.pt"
_PEFT = "base_model"


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Return the catalog of the DCP checkpoint and the `meta.pt` at the store's root.

    Strips the prefix that all weights share, such as "model." (the network's attribute in the LightningModule). If
    `options.strip_prefix` is set, strips nothing: the caller then strips that prefix.
    """
    catalog = dcp.open_catalog(store, options=options)
    meta, notes = _meta(store)
    if AVERAGED_FROM in meta:
        notes = (
            *notes,
            f"the weights are a moving average; the trained weights are in {META}, which has one rank's part.",
        )
    step = meta.get("global_step", meta.get("step"))
    version = meta.get("pytorch-lightning_version")
    info = CatalogInfo(
        "lightning",
        producer=f"lightning {version}" if isinstance(version, str) else "lightning",
        step=step if type(step) is int else None,
        notes=notes,
    )
    whole = assembled(store, [catalog], info, {"meta": META})
    if options.strip_prefix is not None:
        return whole
    return without_prefix(whole, module_prefix(entry.fqn for entry in whole.by_role(Role.MODEL).values()))


def module_prefix(names: Iterable[str]) -> str:
    """Return the attribute path that all names begin with, such as "model.", or "" if there is none.

    If all names start with "model.model.", only the first "model." is the attribute, because the second "model."
    belongs to the network. PEFT's "base_model." is never an attribute.
    """
    split = [name.split(".")[:-1] for name in names]
    if not split:
        return ""
    shared: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1 or parts[0] == _PEFT or parts[0].isdigit():
            break
        shared.append(parts[0])
    while len(shared) > 1 and shared[-1] == shared[-2] == "model":
        shared.pop()
    return "".join(f"{part}." for part in shared)


def without_prefix(catalog: Catalog, prefix: str) -> Catalog:
    """Return the catalog with `prefix` removed from the FQNs that start with it, and with a note about the removal."""
    if not prefix:
        return catalog
    tensors = {name: replace(entry, fqn=entry.fqn.removeprefix(prefix)) for name, entry in catalog.tensors.items()}
    note = f"{prefix!r}, the LightningModule's attribute, was stripped from the names."
    info = replace(
        catalog.info, notes=(*catalog.info.notes, note), extra={**catalog.info.extra, "module_prefix": prefix}
    )
    return Catalog(tensors, catalog.objects, info)


def _meta(store: Store) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the contents of meta.pt, and notes. Instances of user classes are replaced by records."""
    try:
        value = read_pickled(store, META, file=META, unknown="record")
    except (*UNREADABLE, FileNotFoundError) as error:
        return {}, (f"{META} was not read: {error}",)
    return (value if isinstance(value, dict) else {}), ()
