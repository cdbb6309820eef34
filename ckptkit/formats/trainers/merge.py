"""Merges the catalogs of the directories of a checkpoint into one catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.catalog.entry import Catalog, CatalogInfo, ObjectEntry, TensorEntry
from ckptkit.errors import CkptkitError, CorruptCheckpointError
from ckptkit.formats.hf.side_files import read_json
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.pickles.zip import sizes_in
from ckptkit.formats.state_names import STATE_FILE
from ckptkit.storage import Store

Open = Callable[..., Catalog]


def open_part(open_catalog: Open, store: Store, directory: str, options: ReadOptions) -> Catalog:
    """Return the catalog of a subdirectory. Paths are relative to the store. Error messages name the directory."""
    try:
        return placed(open_catalog(store.child(directory), options=options), directory)
    except CkptkitError as error:
        raise type(error)(f"{directory}/: {error}") from error


def placed(catalog: Catalog, directory: str) -> Catalog:
    """Return the catalog with `directory` prepended to every path."""

    def move(path: str) -> str:
        return f"{directory}/{path}" if path else path

    tables: dict[int, tuple[Sequence[str], list[str]]] = {}

    def table(paths: Sequence[str]) -> list[str]:
        if id(paths) not in tables:  # all tensors in a catalog share one list of paths
            tables[id(paths)] = (paths, [move(path) for path in paths])
        return tables[id(paths)][1]

    info = catalog.info
    return Catalog(
        {name: replace(e, slices=e.slices.under(table(e.slices.paths))) for name, e in catalog.tensors.items()},
        {name: replace(item, path=move(item.path)) for name, item in catalog.objects.items()},
        replace(
            info,
            files={move(path): size for path, size in info.files.items()},
            side_files=tuple(move(path) for path in info.side_files),
        ),
    )


def assembled(store: Store, parts: Sequence[Catalog], info: CatalogInfo, files: Mapping[str, str]) -> Catalog:
    """Return the catalog of a checkpoint that consists of several parts and of files at the store's root.

    Args:
        info: The info of the whole checkpoint. Missing fields are taken from the parts. Files, notes and `extra` are
            combined with those of the parts.
        files: Files of additional objects, such as a scheduler, by the object's name. Missing files are left out.

    Raises:
        CorruptCheckpointError: A name occurs in two parts.
    """
    sizes = sizes_in(store)
    found = {
        name: ObjectEntry(
            name, path, 0, max(0, sizes[path]), encoding="json" if path.endswith(".json") else "torch_save"
        )
        for name, path in files.items()
        if path in sizes
    }
    info = replace(info, files={**info.files, **{item.path: sizes[item.path] for item in found.values()}})
    parts = [*parts, Catalog({}, found, info)]
    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    for part in parts:
        twice = sorted((part.tensors.keys() & tensors.keys()) | (part.objects.keys() & objects.keys()))
        if twice:
            first = next(one for one in parts if twice[0] in one.tensors or twice[0] in one.objects)
            names = " and ".join(next(iter(one.info.files), "") or one.info.format for one in (first, part))
            raise CorruptCheckpointError(f"{twice[0]!r} is in two parts of the checkpoint: {names}. Keep one of them.")
        tensors.update(part.tensors)
        objects.update(part.objects)
    infos = [part.info for part in parts]
    return Catalog(
        tensors,
        objects,
        replace(
            info,
            step=info.step if info.step is not None else _first(i.step for i in infos),
            world_size=info.world_size if info.world_size is not None else _first(i.world_size for i in infos),
            mesh=info.mesh or _first(i.mesh for i in infos),
            files={**info.files, **{path: size for i in infos for path, size in i.files.items()}},
            side_files=tuple(dict.fromkeys((*info.side_files, *(path for i in infos for path in i.side_files)))),
            notes=tuple(dict.fromkeys((*info.notes, *(note for i in infos for note in i.notes)))),
            extra={**{key: value for i in infos for key, value in i.extra.items()}, **info.extra},
        ),
    )


def state_files(names: Iterable[str]) -> dict[str, str]:
    """Return the Trainer's or accelerate's files of schedulers, random states and similar objects, by object name.

    If two names differ only in the ending, as `scheduler.bin` and `scheduler.pt`, the second keeps its ending.
    """
    found: dict[str, str] = {}
    for name in sorted(filter(STATE_FILE.fullmatch, names)):
        stem = name.rpartition(".")[0]
        found[name if stem in found else stem] = name
    return found


def recorded_step(store: Store, file: str, key: str = "global_step") -> int | None:
    """Return the step in a JSON file, or None if the file or the step is missing."""
    content = read_json(store, file)
    step = content.get(key) if isinstance(content, dict) else None
    return step if type(step) is int else None


def renamed(catalog: Catalog, prefix: str) -> Catalog:
    """Return the catalog with `prefix.` put before each name that does not begin with it. FQNs do not change."""

    def name_of(name: str) -> str:
        return name if name.startswith(f"{prefix}.") else f"{prefix}.{name}"

    tensors = {name_of(name): replace(entry, name=name_of(name)) for name, entry in catalog.tensors.items()}
    objects = {name_of(name): replace(item, name=name_of(name)) for name, item in catalog.objects.items()}
    return Catalog(tensors, objects, catalog.info)


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)
