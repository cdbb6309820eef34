"""Opens ckptkit checkpoints: builds a catalog from the commit record, the manifest and the objects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ckptkit.catalog.entry import Catalog, CatalogInfo, MeshInfo, ObjectEntry, Role
from ckptkit.digests import hex_digest_of, new_hasher
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, IntegrityError, UnsafePathError
from ckptkit.formats.hf.side_files import is_inner_side_file, is_side_file
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.own.columns import fields_of
from ckptkit.formats.own.json import parse
from ckptkit.formats.own.manifest import Manifest
from ckptkit.formats.own.outline import spare_fields, spares_of
from ckptkit.formats.own.record import (
    MANIFEST_NAME,
    RECORD_NAME,
    CommitRecord,
    FileRecord,
    data_store,
    find_record,
    read_record,
    step_of_name,
)
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.staging import leftover_of
from ckptkit.storage.store import Store
from ckptkit.units import first_few

OBJECTS_NAME = "objects.json"
_STORED_AS_OBJECT = "was stored as an object of its class"
_OBJECTS_FORMAT = 1
_METADATA_NAME = ".metadata"
_DIGEST_PIECE = 8 << 20
_FIRST_HEADER = 64 << 10
_FIRST_READ = 16 << 20  # bytes to read first from a file whose size is unknown
_MAX_INDEX_BYTES = 8 << 30
_MAX_OBJECTS_BYTES = 256 << 20  # JSON takes up to twenty times its size in memory


def open_catalog(
    store: Store,
    *,
    options: ReadOptions = DEFAULTS,
    record: CommitRecord | None = None,
) -> Catalog:
    """Open the committed checkpoint (SHARDED, FULL or LOCAL) at the store's root.

    Reads and verifies the record, the manifest and `objects.json`, but no tensor bytes. Paths in the catalog are
    relative to `store`, even if the record says that the files are in a subdirectory.

    Args:
        record: The commit record, if the caller has just read it.

    Raises:
        CheckpointNotFoundError: There is neither a commit record nor a manifest.
        IncompleteCheckpointError: There is only a commit record or only a manifest.
        IntegrityError: The content of a file differs from what was committed.
        CorruptCheckpointError: A file is malformed.
        UnsafePathError: The directory's name and its record belong to different checkpoints.
    """
    if record is None:
        record = find_record(store)
    if record is None and is_of_a_save(store):
        raise IncompleteCheckpointError(
            f"{store.url} has a manifest but no {RECORD_NAME}: it is an incomplete copy (copy the rest), or a "
            "checkpoint that is being deleted."
        )
    record = record or read_record(store)
    notes = _check_name(store, record)
    place = data_store(store, record)
    prefix = f"{record.data}/" if record.data else ""
    if record.manifest is None:
        raise IncompleteCheckpointError(f"{store.url}: the commit record names no manifest.")
    data, objects_data = _index_files(place, record, record.manifest)
    manifest = Manifest.from_bytes(data, file=f"{prefix}{record.manifest}")
    _check_places(manifest, record, f"{store.url}/{prefix}{record.manifest}")
    if prefix:
        manifest = replace(manifest, paths=[prefix + path for path in manifest.paths])
    catalog = manifest.catalog()
    objects = {
        name: replace(entry, path=prefix + entry.path) if prefix and entry.path else entry
        for name, entry in catalog.objects.items()
    }
    info = _info(catalog.info, record, prefix)
    if objects_data is not None:
        trees = _json_objects(objects_data, prefix + OBJECTS_NAME)
        opaque = _opaque(objects, trees)
        objects.update(trees)
        info = replace(info, extra={**info.extra, "opaque": opaque}) if opaque else info
    notes += _differing(catalog.tensors)
    return Catalog(catalog.tensors, objects, replace(info, notes=(*info.notes, *notes)))


def _index_files(place: Store, record: CommitRecord, manifest: str) -> tuple[bytes, bytes | None]:
    """Return the contents of the manifest and of `objects.json` (None if there is no `objects.json`)."""
    expected, objects = record.files.get(manifest), record.files.get(OBJECTS_NAME)
    if objects is None:
        return _checked(place, manifest, expected), None
    read = partial(_checked, place, OBJECTS_NAME, objects, most=_MAX_OBJECTS_BYTES)
    if not place.asking_costs:
        return _checked(place, manifest, expected), read()
    with WorkerPool(1, thread_name_prefix="ckptkit-open") as pool:
        other = pool.submit(read)
        return _checked(place, manifest, expected), other.result()


def is_of_a_save(store: Store) -> bool:
    """Return whether the manifest at the store's root belongs to a save that must also have a commit record.

    Reads only the header of the manifest. Returns False if the manifest can't be read, or if `DCPWriter` wrote it,
    because `DCPWriter` writes no commit record.
    """
    try:
        data = store.read(MANIFEST_NAME, 0, _FIRST_HEADER)
        stop = 8 + int.from_bytes(data[:8], "little")
        if len(data) < stop <= _MAX_INDEX_BYTES:
            data += store.read(MANIFEST_NAME, len(data), stop)
        info = fields_of(data[8:stop], MANIFEST_NAME)[1].get("info")
        return isinstance(info, dict) and str(info.get("format", "")).startswith("ckptkit-")
    except (FileNotFoundError, CorruptCheckpointError):
        return False


def open_manifest(store: Store) -> Catalog | None:
    """Return the catalog of a DCP directory that `DCPWriter` wrote.

    Returns None if there is no manifest, or if another writer has replaced `.metadata` after the manifest was written.

    Raises:
        CorruptCheckpointError: The manifest is damaged.
    """
    data: bytes | bytearray
    stated: bytes | None = None
    if store.asking_costs:  # two requests in parallel, if both files are small (nearly always)
        with WorkerPool(1, thread_name_prefix="ckptkit-open") as pool:
            other = pool.submit(_read_all, store, _METADATA_NAME)
            try:
                data = _read_all(store, MANIFEST_NAME)
                stated = other.result()
            except FileNotFoundError:
                return None
        nbytes = len(stated)
    else:
        found, metadata = store.info(MANIFEST_NAME), store.info(_METADATA_NAME)
        if found is None or found.kind != "file" or metadata is None or found.size > _MAX_INDEX_BYTES:
            return None
        data, nbytes = bytearray(found.size), metadata.size
        store.read_into(MANIFEST_NAME, 0, memoryview(data))
    catalog = Manifest.from_bytes(data, file=MANIFEST_NAME).catalog()
    digests = catalog.info.extra.get("digests")
    expected = digests.get(_METADATA_NAME) if isinstance(digests, dict) else None
    if expected is None or catalog.info.files.get(_METADATA_NAME) != nbytes:
        return None
    digest = _digest(store, _METADATA_NAME, nbytes) if stated is None else hex_digest_of(stated)
    return catalog if digest == expected else None


def _read_all(store: Store, path: str) -> bytes:
    data = store.read(path, 0, _FIRST_READ)
    if len(data) < _FIRST_READ:
        return data
    found = store.info(path)
    if found is None or found.size > _MAX_INDEX_BYTES:
        raise FileNotFoundError
    return data + store.read(path, len(data), found.size)


def _check_name(store: Store, record: CommitRecord) -> tuple[str, ...]:
    """Compare a directory's name with the commit record. Return a note if the directory was copied or renamed.

    Raises:
        UnsafePathError: The directory has the name of a different step.
    """
    name = store.url.rstrip("/").rpartition("/")[2]
    if name in (record.name, f"{record.name}@{record.save_id}") or leftover_of(name) is not None:
        return ()
    if step_of_name(name) is not None:
        raise UnsafePathError(
            f"{store.url}: expected the commit record of {name}, found that of {record.name}. The directory was "
            f"renamed, or it replaced another. If you trust it, rename it to {record.name}, or to a name that is not "
            "a step."
        )
    return (f"copied or renamed: its commit record says {record.name}",)


def _digest(store: Store, path: str, size: int) -> str:
    state = new_hasher()
    buffer = memoryview(bytearray(min(size, _DIGEST_PIECE)))
    for start in range(0, size, _DIGEST_PIECE):
        piece = buffer[: min(size - start, _DIGEST_PIECE)]
        store.read_into(path, start, piece)
        state.update(piece)
    return state.hexdigest()


def _check_places(manifest: Manifest, record: CommitRecord, place: str) -> None:
    """Check that every slice lies inside a committed file.

    Without this check, a load could allocate memory for slices that no file contains.
    """
    sizes = []
    for path in manifest.paths:
        if path not in record.files:
            raise IncompleteCheckpointError(f"{place}: it names {path!r}, which the commit record does not list.")
        sizes.append(record.files[path].nbytes)
    slices = manifest.slices
    ends = np.array(sizes, np.int64)[slices.files] if len(slices.files) else slices.starts
    if len(ends) and bool((slices.starts > ends - slices.nbytes).any()):
        raise IncompleteCheckpointError(f"{place}: a slice is past the end of its file.")


def _checked(store: Store, path: str, expected: FileRecord | None, *, most: int = _MAX_INDEX_BYTES) -> bytes:
    if expected is None:
        raise CorruptCheckpointError(f"{store.url}: the commit record does not list {path!r}.")
    if expected.nbytes > most:
        raise CorruptCheckpointError(
            f"{store.url}/{path}: the commit record says {expected.nbytes} bytes; no such file has more than {most}."
        )
    try:
        data = store.read(path, 0, expected.nbytes + 1)  # a sparse file can claim any size
    except FileNotFoundError as error:
        raise IncompleteCheckpointError(f"{store.url}/{path} is missing, but the commit record lists it.") from error
    if len(data) != expected.nbytes:
        size = f"more than {expected.nbytes}" if len(data) > expected.nbytes else f"only {len(data)}"
        raise IncompleteCheckpointError(
            f"{store.url}/{path} has {size} bytes, expected {expected.nbytes}. It was replaced or truncated."
        )
    digest = hex_digest_of(data)
    if digest != expected.digest:
        raise IntegrityError(f"{store.url}/{path}: checksum mismatch: expected {expected.digest}, found {digest}.")
    return data


def _differing(names: Iterable[str]) -> tuple[str, ...]:
    """Return a note if ranks saved different values for a model tensor (under `per_rank.<rank>.<key>`)."""
    own = {name.split(".", 2)[2] for name in names if name.startswith("per_rank.") and name.count(".") > 2}
    found = sorted(key for key in own if role_of(key)[0] is Role.MODEL)
    if not found:
        return ()
    keys = first_few(found, 3)
    get = "exports, and loads on a different number of ranks, get one rank's values"
    return (f"the values of {keys} differ between ranks: {get}",)


def _json_objects(data: bytes, path: str) -> dict[str, ObjectEntry]:
    found = parse(data, file=path)
    if (
        not isinstance(found, dict)
        or found.get("format") != _OBJECTS_FORMAT
        or not isinstance(found.get("objects"), dict)
    ):
        raise CorruptCheckpointError(
            f"{path}: expected a JSON object whose format is {_OBJECTS_FORMAT} and which has a dict 'objects'."
        )
    objects: Mapping[str, Any] = found["objects"]
    roles = {"optimizer": Role.OPTIMIZER, "model": Role.MODEL}
    return {
        name: ObjectEntry(
            name, path, encoding="value", value=tree, role=roles.get(re.split(r"[._]", name)[0], Role.OTHER)
        )
        for name, tree in objects.items()
    }


def _opaque(records: Iterable[str], trees: Mapping[str, ObjectEntry]) -> dict[str, str]:
    """Return the tensors that an early version of ckptkit stored as objects, each with the reason why it is unreadable.

    Omits objects that are not tensors: `extra_state`, and values that the optimizer's tree in `objects.json` contains.

    Args:
        records: The names of all stored objects.
    """
    found = {}
    for name in records:
        role, fqn, state = role_of(name)
        if role is Role.MODEL and not name.endswith("extra_state"):
            found[name] = _STORED_AS_OBJECT
        elif role is Role.OPTIMIZER and state:
            tree = trees.get(name.partition(".")[0])
            values = tree.value.get("values") if tree is not None and isinstance(tree.value, dict) else None
            known = values if isinstance(values, dict) else {}
            keys = [f"{key}.{item}" for key, items in known.items() if isinstance(items, dict) for item in items]
            if not any(f"{fqn}.{state}.".startswith(f"{key}.") for key in keys):
                found[name] = _STORED_AS_OBJECT
    return found


def _info(info: CatalogInfo, record: CommitRecord, prefix: str) -> CatalogInfo:
    mesh = record.mesh
    version = record.versions.get("ckptkit", "")
    digests = {prefix + path: item.digest for path, item in record.files.items()}
    carried = tuple(prefix + path for path in record.files if is_side_file(path))
    return replace(
        info,
        side_files=carried,
        model_files={path: prefix + path for path in record.files if is_inner_side_file(path)},
        format=f"ckptkit-{record.state_dict_type}",
        producer=f"ckptkit {version}".strip(),
        step=record.step,
        world_size=record.world_size,
        mesh=info.mesh if mesh is None else MeshInfo(tuple(mesh["shape"]), tuple(mesh["names"])),
        files={prefix + path: item.nbytes for path, item in record.files.items()},
        extra={**info.extra, "digests": digests, **spare_fields(spares_of(info.extra, prefix))},
    )


# --- what a key stands for: parameter, master, moment or other


def role_of(name: str, path: tuple[str | int, ...] = ()) -> tuple[Role, str, str]:
    """Return the (`Role`, FQN, state name) of a key.

    Keys are `model.<fqn>`, `optimizer.state.<fqn>.<name>` and `optimizer.master.<fqn>`. If there are several models,
    the key `model_<name>.<fqn>` has the FQN `<name>.<fqn>`.

    Args:
        path: The components of a nested key, if known. `name` alone does not show them, because it contains dots.
    """
    top, _, rest = name.partition(".")
    kind, _, label = top.partition("_")
    if kind == "model" and rest:
        return Role.MODEL, f"{label}.{rest}" if label else rest, ""
    if kind != "optimizer":
        return Role.OTHER, "", ""
    group, _, rest = rest.partition(".")
    if group == "master" and rest:
        return Role.MASTER, rest, ""
    if group == "state" and rest:
        if len(path) == 4:
            return Role.OPTIMIZER, str(path[2]), str(path[3])
        fqn, _, state = rest.rpartition(".")
        return Role.OPTIMIZER, fqn, state
    return Role.OPTIMIZER, "", ""
