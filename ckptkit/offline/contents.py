"""What single files of a plan hold, in words, and which digests vouch for it: so an object store's are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.catalog.columns import distinct
from ckptkit.catalog.targets import Part
from ckptkit.catalog.tiles import pieces
from ckptkit.offline.jobs import EntryMap
from ckptkit.offline.plan import ComputedTensor, OutputTensor, Placement, Plan
from ckptkit.storage.local import LocalStore
from ckptkit.storage.store import Store
from ckptkit.version import __version__

__all__ = ["Contents", "records_of"]

Int64 = npt.NDArray[np.int64]


class Contents:
    """Names of what the files of a plan hold. They do not depend on which rank writes them."""

    def __init__(self, plan: Plan, source: Store, *, check: bool) -> None:
        self._plan = plan
        self._source = source
        self._begin = (__version__, source.url, check)
        self._entries: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self._folders: set[str] = set()

    def of(self, index: int) -> str:
        """Return 32 hex digits that differ where a file would hold other bytes, or those of another source."""
        file, state = self._plan.files[index], xxhash.xxh3_128()
        state.update(_words((*self._begin, file.path, file.nbytes)))
        for literal in file.literals:
            state.update(f"{literal.start} {len(literal.data)}\n".encode())
            state.update(literal.data)
        for placement in self._plan.placements:
            rows = np.flatnonzero(placement.files == index)
            if not len(rows):
                continue
            tensor = placement.tensor
            state.update(_words((_made(tensor), [self._entry(key) for key in tensor.sources])))
            for column in (placement.starts, placement.offsets, placement.sizes):
                state.update(np.ascontiguousarray(column[rows]).tobytes())
        return state.hexdigest()

    def _entry(self, key: str) -> str:
        if key not in self._entries:
            entry, state = self._plan.catalog.tensors[key], xxhash.xxh3_128()
            slices = entry.slices
            paths = {index: slices.paths[index] for index in distinct(slices.files).tolist()}
            state.update(_words((key, entry.dtype, entry.shape, paths, [self._stat(path) for path in paths.values()])))
            state.update(_words((sorted(slices.strides.items()), sorted(slices.codecs.items()))))
            for column in (slices.files, slices.starts, slices.nbytes, slices.offsets, slices.sizes, slices.digests):
                if column is not None:
                    state.update(np.ascontiguousarray(column).tobytes())
            self._entries[key] = state.hexdigest()
        return self._entries[key]

    def _stat(self, path: str) -> Any:
        """A file of the source is the same while this is."""
        folder = path.rpartition("/")[0]
        if isinstance(self._source, LocalStore):
            if path not in self._files:
                found = self._source.stat_file(path)
                self._files[path] = (found.st_size, found.st_mtime_ns, found.st_ino)
        elif folder not in self._folders:
            self._folders.add(folder)
            self._files |= {item.path: (item.size, item.mtime, item.tag) for item in self._source.list(folder)}
        return self._files.get(path)


def _words(value: Any) -> bytes:
    return repr(value).encode("utf-8", "backslashreplace")


def _made(tensor: OutputTensor) -> tuple[Any, ...]:
    what = (tensor.label, tensor.inputs) if isinstance(tensor, ComputedTensor) else tensor.parts
    return tensor.name, tensor.dtype, tensor.shape, what


def records_of(plan: Plan, index: int, maps: Mapping[str, EntryMap]) -> Int64:
    """Return the digests of the source that vouch for the bytes of a file; -1 among them: some have none alone."""
    found: list[Int64] = [np.zeros(0, np.int64)]
    for placement in plan.placements:
        rows = np.flatnonzero(placement.files == index)
        tensor = placement.tensor
        if not len(rows):
            continue
        if isinstance(tensor, ComputedTensor) or not all(part.is_plain for part in tensor.parts):
            found += [maps[key].records[maps[key].entry.slices.distinct()] for key in tensor.sources]
        else:
            found += [_records_of_part(placement, rows, part, maps[part.source]) for part in tensor.parts]
    records: Int64 = np.unique(np.concatenate(found))
    return records


def _records_of_part(placement: Placement, rows: Int64, part: Part, where: EntryMap) -> Int64:
    boxes = [piece.source_box for row in rows.tolist() for piece in part.cut(placement.box(row))]
    ndim = len(where.entry.shape)
    offsets = np.array([box.offsets for box in boxes], np.int64).reshape(len(boxes), ndim)
    sizes = np.array([box.sizes for box in boxes], np.int64).reshape(len(boxes), ndim)
    records: Int64 = where.records[pieces(where.entry, offsets, sizes).rows]
    return records
