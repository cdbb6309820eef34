"""What transformers and accelerate put beside an unsharded model: its optimizer, scheduler and random state."""

from __future__ import annotations

import re

from ckptkit.catalog.entry import Catalog, ObjectEntry, Role
from ckptkit.formats.merge import merged, renamed
from ckptkit.formats.torch_save import open_file
from ckptkit.storage.store import Store

__all__ = ["with_files_beside"]

_OPTIMIZER = ("optimizer.bin", "optimizer.pt")
_OBJECT = re.compile(r"(scheduler|random_states_\d+|rng_state(?:_\d+)?|trainer_state)\.(?:bin|pt|pth|pkl|json)")


def with_files_beside(catalog: Catalog, store: Store) -> Catalog:
    """Return the catalog of weights with what lies beside them; as it is where it has an optimizer already."""
    if not catalog.info.format.startswith("safetensors") and catalog.info.format not in ("torch", "hf"):
        return catalog
    if any(entry.role is Role.OPTIMIZER for entry in catalog.tensors.values()):
        return catalog
    files = {item.path: item.size for item in store.list() if item.kind == "file"}
    parts = [catalog]
    path = next((name for name in _OPTIMIZER if name in files), None)
    if path is not None:
        parts.append(renamed(open_file(store, path), "optimizer"))
    objects: dict[str, ObjectEntry] = {}
    for name, size in files.items():
        match = _OBJECT.fullmatch(name)
        if match is not None:
            kind = "rng_state_0" if match[1] == "rng_state" else match[1]
            encoding = "json" if name.endswith(".json") else "torch_save"
            objects[kind] = ObjectEntry(kind, name, 0, size, encoding=encoding)
    parts.append(Catalog({}, {k: v for k, v in objects.items() if k not in catalog.objects}, catalog.info))
    return merged(parts, catalog.info) if path is not None or objects else catalog
