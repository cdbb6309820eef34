"""Reads Megatron's torch_dist checkpoints: DCP and `metadata.json`, with layers stacked along dimension 0.

Names stay as they are. A key map can rename the tensors.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ckptkit.catalog.entry import Catalog, CatalogInfo, Role, TensorEntry
from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.dcp import catalog
from ckptkit.formats.hf.side_files import read_json
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.trainers.merge import assembled
from ckptkit.storage import Store

METADATA = "metadata.json"
_OPTIMIZER = re.compile(r"(?:.*\.)?optimizer\.(?:state\.([a-z0-9_]+)|distributed)\.(.+)")
_MASTER_STATES = frozenset(("fp32_param", "param", "master_param"))
_MAX_BYTES = 1 << 16  # of metadata.json, in which the key is searched
_OBJECTS = {"common": "common.pt", "modelopt_state": "modelopt_state.pt"}


def is_megatron(store: Store) -> bool:
    """Return whether metadata.json at the store's root is Megatron's, even if the file is damaged."""
    try:
        return b'"sharded_backend"' in store.read(METADATA, 0, _MAX_BYTES)
    except FileNotFoundError:
        return False


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Read the DCP checkpoint at the store's root. Optimizer states are recognized by Megatron's names."""
    content = read_json(store, METADATA)
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{METADATA} is damaged: it is not a JSON object. Copy it from the original.")
    backend = content.get("sharded_backend")
    if backend not in ("torch_dist", "torch_dcp", "fsdp_dtensor"):
        raise UnsupportedFormatError(
            f"{METADATA}: sharded_backend is {backend!r}; only 'torch_dist' is supported. Save again with "
            "--dist-ckpt-format torch_dist, or convert it with Megatron's own tools first."
        )
    part = catalog.open_catalog(store, options=options)
    part = replace(part, tensors={name: _with_role(entry) for name, entry in part.tensors.items()})
    size = info.size if (info := store.info(METADATA)) is not None else -1
    notes = ["names are Megatron's, with the layers stacked on dimension 0; a key map renames them."]
    if any(entry.role is Role.OPTIMIZER and not entry.fqn for entry in part.tensors.values()):
        notes.append(
            "the optimizer's state is in buckets of Megatron's distributed optimizer, without the parameters' names. "
            "Save with --dist-ckpt-optim-fully-reshardable to have it by parameter."
        )
    return assembled(
        store,
        [part],
        CatalogInfo("megatron", producer="megatron-core", files={METADATA: size}, notes=tuple(notes)),
        _OBJECTS,
    )


def _with_role(entry: TensorEntry) -> TensorEntry:
    """Return the entry with the role, parameter and state that its name shows.

    An optimizer state has the name `optimizer.state.exp_avg.<parameter>`. A bucket of the distributed optimizer has a
    name without a parameter (optimizer.distributed.dp_group_idx_0.gbuf_idx_0. ...).
    """
    match = _OPTIMIZER.fullmatch(entry.name)
    if match is None:
        return entry
    if match[1] is None:
        return replace(entry, role=Role.OPTIMIZER, fqn="", state="")
    role = Role.MASTER if match[1] in _MASTER_STATES else Role.OPTIMIZER
    return replace(entry, role=role, fqn=match[2], state=match[1])
