"""From a catalog to the columns of a manifest, and from those to what is packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckptkit.catalog.entry import Catalog, CatalogInfo, ObjectEntry, Role, SliceArray, TensorEntry
from ckptkit.errors import UnsupportedFormatError, UsageError
from ckptkit.formats.columns import Column, pack_texts
from ckptkit.formats.manifest import DIGEST, PLACEMENTS, Manifest, Objects, Slices, Tensors

__all__ = ["encode", "manifest_of"]

_ROLES = {role: i for i, role in enumerate(Role)}
_ENCODINGS = {"torch_save": 0, "json": 1, "value": 2}


def manifest_of(catalog: Catalog) -> Manifest:
    """Return the columns of a catalog; the order of its tensors is kept."""
    entries = list(catalog.tensors.values())
    paths: dict[str, int] = {}
    slices = _slices(entries, paths)
    placements, chosen = _placements(entries, catalog.info.extra.get(PLACEMENTS, {}))
    tensors = Tensors(
        [e.name for e in entries],
        [e.dtype for e in entries],
        [tuple(e.shape) for e in entries],
        np.cumsum([len(e.slices) for e in entries], dtype=np.int64),
        [e.role for e in entries],
        [e.fqn for e in entries],
        [e.state for e in entries],
        [tuple(e.key) for e in entries],
        chosen,
    )
    for entry in catalog.objects.values():
        if entry.path:
            paths.setdefault(entry.path, len(paths))
    return Manifest(list(paths), tensors, slices, Objects(dict(catalog.objects)), catalog.info, placements)


def _slices(entries: Sequence[TensorEntry], paths: dict[str, int]) -> Slices:
    parts: dict[str, list[Column]] = {
        k: [] for k in ("files", "starts", "nbytes", "offsets", "sizes", "ranks", "digests")
    }
    strides: dict[int, tuple[int, ...]] = {}
    tables: dict[int, Column] = {}  # by identity of the table of paths: catalogs share one
    row, digested, total = 0, 0, 0
    for entry in entries:
        array = entry.slices
        _check_supported(entry)
        table = tables.get(id(array.paths))
        if table is None:
            table = np.array([paths.setdefault(p, len(paths)) for p in array.paths], np.int32)
            tables[id(array.paths)] = table
        count = len(array)
        parts["files"].append(table[array.files] if count else np.zeros(0, np.int32))
        parts["starts"].append(array.starts)
        parts["nbytes"].append(array.nbytes)
        parts["offsets"].append(array.offsets.reshape(-1))
        parts["sizes"].append(array.sizes.reshape(-1))
        parts["ranks"].append(np.full(count, -1, np.int32) if array.ranks is None else array.ranks)
        if array.digests is not None:
            parts["digests"].append(array.digests)
            digested += count
        strides.update({row + i: tuple(s) for i, s in array.strides.items()})
        row += count
        total += count
    if digested not in (0, total):
        raise UnsupportedFormatError(
            f"a manifest needs digests of all slices or of none; {digested} of {total} have one."
        )
    return Slices(
        _join(parts["files"], np.int32),
        _join(parts["starts"], np.int64),
        _join(parts["nbytes"], np.int64),
        _join(parts["offsets"], np.int64),
        _join(parts["sizes"], np.int64),
        _join(parts["ranks"], np.int32),
        _join(parts["digests"], np.uint64) if digested else None,
        strides,
    )


def _join(parts: list[Column], dtype: type[Any]) -> Any:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)


def _check_supported(entry: TensorEntry) -> None:
    array: SliceArray = entry.slices
    if array.codecs:
        raise UnsupportedFormatError(f"tensor {entry.name!r}: a manifest can't hold compressed slices.")
    if array.digests is None:
        return
    own = array.digest_starts is None or (
        np.array_equal(array.digest_starts, array.starts) and np.array_equal(array.digest_nbytes, array.nbytes)  # type: ignore[arg-type]
    )
    if array.algorithm != DIGEST or not own:
        raise UnsupportedFormatError(
            f"tensor {entry.name!r}: a manifest holds the {DIGEST} of each slice's own bytes, not {array.algorithm}."
        )


def _placements(
    entries: Sequence[TensorEntry], given: Mapping[str, Any]
) -> tuple[list[tuple[int, tuple[str, ...]]], Any]:
    distinct: dict[tuple[int, tuple[str, ...]], int] = {}
    chosen = np.full(len(entries), -1, np.int32)
    for row, entry in enumerate(entries):
        placed = given.get(entry.name)
        if placed is not None:
            mesh, texts = placed
            chosen[row] = distinct.setdefault((int(mesh), tuple(texts)), len(distinct))
    return list(distinct), chosen


# --- packing


def encode(manifest: Manifest) -> tuple[dict[str, Column], dict[str, Any]]:
    """Return the columns by name, and the header."""
    tensors, slices = manifest.tensors, manifest.slices
    dtypes, dtype_rows = _distinct(tensors.dtypes)
    states, state_rows = _distinct(tensors.states)
    arrays: dict[str, Column] = {
        **pack_texts(tensors.names, "names"),
        **pack_texts(manifest.paths, "paths"),
        "tensor.dtype": np.array(dtype_rows, np.uint8),
        "tensor.ndim": np.array([len(s) for s in tensors.shapes], np.uint8),
        "tensor.shape": np.array([n for s in tensors.shapes for n in s], np.int64),
        "tensor.stop": tensors.slice_stop,
        "tensor.role": np.array([_ROLES[r] for r in tensors.roles], np.uint8),
        "tensor.state": np.array(state_rows, np.int32),
        "tensor.fqn": _fqn_ranges(tensors.names, tensors.fqns),
        "tensor.placement": tensors.placements,
        **_pack_keys("tensor", tensors.names, tensors.keys),
        "slice.file": slices.files,
        "slice.start": slices.starts,
        "slice.nbytes": slices.nbytes,
        "slice.offset": slices.offsets,
        "slice.size": slices.sizes,
        "slice.rank": slices.ranks,
        "stride.row": np.array(sorted(slices.strides), np.int64),
        "stride.value": np.array([n for row in sorted(slices.strides) for n in slices.strides[row]], np.int64),
    }
    if slices.digests is not None:
        arrays["slice.xxh3_64"] = slices.digests
    objects, values = _pack_objects(manifest.objects.entries, manifest.paths)
    arrays.update(objects)
    header = {
        "dtypes": dtypes,
        "states": states,
        "placements": [[mesh, list(texts)] for mesh, texts in manifest.placements],
        "values": values,
        "info": _pack_info(manifest.info),
    }
    return arrays, header


def _distinct(values: Sequence[str]) -> tuple[list[str], list[int]]:
    table: dict[str, int] = {}
    rows = [table.setdefault(value, len(table)) for value in values]
    return list(table), rows


def _fqn_ranges(names: Sequence[str], fqns: Sequence[str]) -> Column:
    ranges = []
    for name, fqn in zip(names, fqns, strict=True):
        start = len(name) - len(fqn) if name.endswith(fqn) else name.find(fqn)
        if start < 0:
            raise UnsupportedFormatError(f"tensor {name!r}: a manifest needs its FQN {fqn!r} to be a part of its name.")
        ranges += [start, start + len(fqn)] if fqn else [0, 0]
    return np.array(ranges, np.int32)


def _pack_keys(prefix: str, names: Sequence[str], keys: Sequence[tuple[str | int, ...]]) -> dict[str, Column]:
    counts, parts = [], []
    for name, key in zip(names, keys, strict=True):
        if key and (".".join(map(str, key)) != name or len(key) > 255):
            raise UnsupportedFormatError(f"{name!r}: a manifest needs the path {key} to be the name cut at dots.")
        counts.append(len(key))
        parts += [-1 - part if isinstance(part, int) else len(part) for part in key]
    return {f"{prefix}.parts": np.array(counts, np.uint8), f"{prefix}.part": np.array(parts, np.int32)}


def _pack_objects(entries: Mapping[str, ObjectEntry], paths: list[str]) -> tuple[dict[str, Column], dict[str, Any]]:
    index = {path: i for i, path in enumerate(paths)}
    items = list(entries.values())
    for entry in items:
        if entry.codec is not None or (entry.digest is not None and entry.digest.algorithm != DIGEST):
            raise UnsupportedFormatError(f"object {entry.name!r}: a manifest can't hold its codec or its digest.")
    arrays = {
        **pack_texts([e.name for e in items], "objects"),
        "object.file": np.array([index[e.path] if e.path else -1 for e in items], np.int32),
        "object.start": np.array([e.start for e in items], np.int64),
        "object.nbytes": np.array([e.nbytes for e in items], np.int64),
        "object.xxh3_64": np.array([e.digest.value if e.digest else 0 for e in items], np.uint64),
        "object.digested": np.array([e.digest is not None for e in items], np.uint8),
        "object.role": np.array([_ROLES[e.role] for e in items], np.uint8),
        "object.encoding": np.array([_ENCODINGS[e.encoding] for e in items], np.uint8),
        **_pack_keys("object", [e.name for e in items], [tuple(e.key) for e in items]),
    }
    # What lies in a file of its own stays there: only values that are nowhere else are copied in.
    return arrays, {e.name: e.value for e in items if e.encoding != "torch_save" and not e.path}


def _pack_info(info: CatalogInfo) -> dict[str, Any]:
    fields: dict[str, Any] = {"format": info.format, "producer": info.producer}
    fields["step"], fields["world_size"] = info.step, info.world_size
    if info.mesh is not None:
        fields["mesh"] = {"shape": list(info.mesh.shape), "names": list(info.mesh.names)}
    fields["files"] = dict(info.files)
    fields["side_files"], fields["notes"] = list(info.side_files), list(info.notes)
    fields["extra"] = {key: value for key, value in info.extra.items() if key != PLACEMENTS}
    _check_json(fields)
    return fields


def _check_json(value: Any, path: str = "info") -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UsageError(f"{path}: the key {key!r} is no string; a manifest's header is JSON.")
            _check_json(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _check_json(item, f"{path}.{i}")
    elif value is not None and not isinstance(value, (str, int, float, bool)):
        raise UsageError(f"{path}: {type(value).__name__} is no JSON; a manifest's header is JSON.")
