"""An export computed in memory: every tensor as numpy bytes, from the source files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog
from ckptkit.catalog.targets import Target
from ckptkit.offline.copying.plan import ComputedTensor, Literal
from ckptkit.offline.export.hf import HFExport
from ckptkit.offline.export.tied import _read_box
from ckptkit.storage.store import Store
from tests.catalog.materialize import materialize

UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def carried_out(store: Store, catalog: Catalog, export: HFExport) -> dict[str, Any]:
    """Return the tensors of an export as arrays of unsigned integers (bits of any dtype), without casts."""
    return {tensor.name: _bits(store, catalog, tensor) for tensor in export.tensors}


def small_files(export: HFExport) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for file in export.files:
        (literal,) = file.literals
        assert isinstance(literal, Literal)
        found[file.path] = literal.data
    return found


def bits_of(path: Any) -> dict[str, Any]:
    """Return the tensors of a safetensors file, as bits."""
    from ckptkit.formats.hf import safetensors
    from ckptkit.storage.open import open_store

    store = open_store(str(path.parent))
    catalog = safetensors.open_file(store, path.name)
    return {name: _source(store, catalog, name) for name in catalog.tensors}


def same_bits(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


def _source(store: Store, catalog: Catalog, key: str) -> Any:
    entry = catalog.tensors[key]
    itemsize = dtype_of(entry.dtype).itemsize
    raw = _read_box(store, entry, Box.whole(entry.shape))
    return np.ascontiguousarray(raw).reshape(-1).view(UNITS[itemsize]).reshape(entry.shape)


def _bits(store: Store, catalog: Catalog, tensor: Target | ComputedTensor) -> Any:
    if isinstance(tensor, Target):
        return materialize(tensor, {key: _source(store, catalog, key) for key in tensor.sources})
    inputs = [np.ascontiguousarray(_bits(store, catalog, item)).reshape(-1).view(np.uint8) for item in tensor.inputs]
    made = np.asarray(tensor.compute(inputs)[0])
    return made.view(UNITS[dtype_of(tensor.dtype).itemsize]).reshape(tensor.shape)
