"""Joins several checkpoints into one source, so that one plan can read tensors from all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

from ckptkit.catalog.entry import Catalog, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.formats.detect import Source
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor
from ckptkit.storage.local import LocalStore, is_directory
from ckptkit.storage.store import FileInfo, ReadInto, Store

T = TypeVar("T")


def key_in(index: int, key: str) -> str:
    """Return the joined catalog's key for a tensor of source `index`. Messages show this key."""
    return f"source {index + 1}: {key}"


def taken_from(tensor: OutputTensor, index: int) -> OutputTensor:
    """Return a copy of `tensor` that reads from the joined catalog instead of source `index`."""
    if isinstance(tensor, Target):
        return replace(tensor, parts=tuple(replace(part, source=key_in(index, part.source)) for part in tensor.parts))

    def cut(start: int, stop: int) -> ComputedTensor:
        return cast(ComputedTensor, taken_from(tensor.rows(start, stop), index))

    inputs = tuple(taken_from(item, index) for item in tensor.inputs)
    return replace(tensor, inputs=inputs, cut=None if tensor.cut is None else cut)


def join(sources: Sequence[Source], used: Sequence[Iterable[TensorEntry]]) -> Source:
    """Return one read-only source that contains the `used` tensors of each source, under the keys from `key_in`.

    The joined catalog has the `info` of the last source.
    """
    store, prefixes = _place(sources)
    tensors: dict[str, TensorEntry] = {}
    for index, entries in enumerate(used):
        moved: dict[int, tuple[Sequence[str], Sequence[str]]] = {}  # by id of the path table, which most tensors share
        for entry in entries:
            paths = entry.slices.paths
            if id(paths) not in moved:
                moved[id(paths)] = paths, [f"{prefixes[index]}{path}" for path in paths]
            name = key_in(index, entry.name)
            tensors[name] = replace(entry, name=name, slices=entry.slices.under(moved[id(paths)][1]))
    catalog = Catalog(tensors, {}, sources[-1].catalog.info)
    return Source(store, catalog, " + ".join(source.url for source in sources), joined=tuple(sources))


def _place(sources: Sequence[Source]) -> tuple[Store, list[str]]:
    """Return a store that contains all sources' files, and the prefix of each source's paths in it."""
    folders = [os.path.realpath(source.store.url) for source in sources if is_directory(source.store)]
    if len(folders) < len(sources):
        return cast(Store, _SeveralStores([source.store for source in sources])), [f"{i}/" for i in range(len(sources))]
    top = os.path.commonpath(folders)
    return LocalStore(top), [f"{os.path.relpath(folder, top)}/".removeprefix("./") for folder in folders]


class _SeveralStores:
    """A store that reads from several stores. A path's first component is the index of its store."""

    sizes_are_free = False

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = stores
        self.url = " + ".join(store.url for store in stores)
        self.asking_costs = any(store.asking_costs for store in stores)

    def info(self, path: str) -> FileInfo | None:
        index, rest = _split(path)
        found = self._stores[index].info(rest)
        return None if found is None else replace(found, path=path)

    def list(self, path: str = "", *, recursive: bool = False) -> list[FileInfo]:
        index, rest = _split(path)
        found = self._stores[index].list(rest, recursive=recursive)
        return [replace(item, path=f"{index}/{item.path}") for item in found]

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        index, rest = _split(path)
        return self._stores[index].read(rest, start, stop)

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        index, rest = _split(path)
        self._stores[index].read_into(rest, start, view)

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        moved = ((index, replace(item, path=rest)) for item in reads for index, rest in [_split(item.path)])
        for index, batch in _grouped(moved).items():
            self._stores[index].read_many(batch, workers=workers)

    def fetch(self, paths: Iterable[str]) -> None:
        for index, batch in _grouped(map(_split, paths)).items():
            self._stores[index].fetch(batch)


def _grouped(pairs: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    found: dict[int, list[T]] = {}
    for index, item in pairs:
        found.setdefault(index, []).append(item)
    return found


def _split(path: str) -> tuple[int, str]:
    index, _, rest = path.partition("/")
    return int(index), rest
