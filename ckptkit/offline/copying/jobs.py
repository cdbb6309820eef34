"""A plan taken apart into what an executor does: runs of bytes in the order of the disk, and boxes by tiles.

A run is contiguous on both sides. Runs that fill whole boxes, to be digested on the way, become `Chains`. What is no
run (column shards, transposes, arithmetic) becomes a `BandJob`, which walks over the source once, or a `TileJob`, which
walks over one box of the target. Pure; columns of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.columns import distinct, first_of_equal, is_dense, row_major
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, SliceArray, TensorEntry
from ckptkit.catalog.targets import Part, Target
from ckptkit.catalog.tiles import pieces, row_cuts, source_layout
from ckptkit.gc_pause import collector_paused
from ckptkit.offline.copying.casts import is_cast
from ckptkit.offline.copying.chains import ChainRows, Chains, chained
from ckptkit.offline.copying.checks import RecordTable
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor, Placement, Plan
from ckptkit.offline.copying.sources import Origin

__all__ = [
    "BandJob",
    "BandTarget",
    "EntryMap",
    "Runs",
    "TileJob",
    "Work",
    "prepare",
    "Copies",
    "whole_copies",
    "PartPieces",
    "in_source",
]

# Whole tensors that become whole tensors, from slices of whole rows, taken apart by the thousand: what most are.


Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copies:
    """Runs, one a slice that is not empty, in the order of the tensors.

    Attributes:
        placements, entries: [t] each written whole, in one place, as it is or cast; `entries` is what it is read from.
        owners: [n] the tensor of each run.
        rows: [n] its slice, counted over the slices of all these tensors, end to end.
        starts, nbytes: [n] what is read.
        files, targets: [n] where it is written.
    """

    placements: Sequence[Placement]
    entries: Sequence[TensorEntry]
    owners: Int64
    rows: Int64
    starts: Int64
    nbytes: Int64
    files: Int64
    targets: Int64


def whole_copies(catalog: Catalog, placements: Sequence[Placement]) -> tuple[Copies | None, list[Placement]]:
    """Return the runs of all placements that are such copies, and the placements that are not."""
    entries = [_copied(catalog, placement) for placement in placements]
    simple = [entry for entry in entries if entry is not None]
    if not simple:
        return None, list(placements)
    cuts = row_cuts(simple)
    verdicts = iter(cuts.cut.tolist())
    taken = [entry is not None and next(verdicts) for entry in entries]
    chosen = [placement for placement, take in zip(placements, taken, strict=True) if take]
    rest = [placement for placement, take in zip(placements, taken, strict=True) if not take]
    if not chosen:
        return None, rest
    kept = np.flatnonzero(cuts.cut)
    members = [simple[index] for index in kept.tolist()]
    counts = np.diff(cuts.bounds)
    inside = np.repeat(cuts.cut, counts)
    offsets, sizes = cuts.offsets[inside], cuts.sizes[inside]
    owners = np.repeat(np.arange(len(kept)), counts[kept])
    read, written = (
        np.array([math.prod(item.shape[1:]) * dtype_of(item.dtype).itemsize for item in items], np.int64)
        for items in (members, [placement.tensor for placement in chosen])
    )
    starts = np.concatenate([entry.slices.starts for entry in members])
    nbytes = sizes * read[owners]
    rows = np.flatnonzero(nbytes)
    owners = owners[rows]
    places = np.concatenate([placement.starts for placement in chosen])
    files = np.concatenate([placement.files for placement in chosen]).astype(np.int64)
    targets = places[owners] + offsets[rows] * written[owners]
    return Copies(chosen, members, owners, rows, starts[rows], nbytes[rows], files[owners], targets), rest


def _copied(catalog: Catalog, placement: Placement) -> TensorEntry | None:
    """What a placement copies, where it is a whole tensor that becomes a whole one, in one place."""
    tensor = placement.tensor
    if not isinstance(tensor, Target) or len(tensor.parts) != 1 or len(placement.starts) != 1:
        return None
    part = tensor.parts[0]
    entry = catalog.tensors[part.source]
    shape = entry.shape
    if not part.is_plain or not tensor.shape == part.source_box.sizes == shape:
        return None
    if tuple(placement.sizes[0].tolist()) != shape or entry.slices.strides or entry.slices.codecs:
        return None
    return entry


# What plain parts of a target take from the slices of their sources, as columns. Pure geometry.


@dataclass(frozen=True, slots=True)
class PartPieces:
    """What one plain part of a target takes from slices, for all boxes of a placement. One row a piece."""

    entry: TensorEntry
    rows: Int64  # of the placement
    slices: Int64
    starts: Int64
    nbytes: Int64
    targets: Int64
    dense: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, catalog: Catalog, placement: Placement, target: Target, part: Part) -> PartPieces:
        entry = catalog.tensors[part.source]
        if entry.shape and target.shape == part.source_box.sizes == entry.shape and len(placement) == 1:
            copied = cls._copied(entry, placement, target)
            if copied is not None:
                return copied
        rows, lo, hi = _shared(placement, part.target_box)
        offsets, sizes = in_source(part, lo, hi)
        found = pieces(entry, offsets, sizes)
        rows = rows[found.boxes]
        starts, strides = source_layout(entry, found)
        # The same pieces in the target: their first element, and the stride each source dimension has there.
        place = row_major(placement.sizes[rows])
        index, steps = _in_target(part, found.offsets, placement.offsets[rows], place)
        itemsize = dtype_of(target.dtype).itemsize
        return cls(
            entry,
            rows,
            found.rows,
            starts,
            found.numel() * dtype_of(entry.dtype).itemsize,
            placement.starts[rows] + index * itemsize,
            is_dense(found.sizes, strides) & is_dense(found.sizes, steps),
        )

    @classmethod
    def _copied(cls, entry: TensorEntry, placement: Placement, target: Target) -> PartPieces | None:
        """The same where one whole tensor becomes another, from slices of whole rows: what most are, and there may be
        many thousands of them. None where it is otherwise."""
        shape, slices = entry.shape, entry.slices
        if tuple(placement.sizes[0].tolist()) != shape or slices.strides or (slices.sizes[:, 1:] != shape[1:]).any():
            return None
        found = slices.distinct()
        inner = math.prod(shape[1:])
        count = len(found)
        return cls(
            entry,
            np.zeros(count, np.int64),
            found,
            slices.starts[found],
            slices.sizes[found, 0] * (inner * dtype_of(entry.dtype).itemsize),
            placement.starts[0] + slices.offsets[found, 0] * (inner * dtype_of(target.dtype).itemsize),
            np.ones(count, bool),
        )


def _shared(placement: Placement, box: Box) -> tuple[Int64, Int64, Int64]:
    """The rows whose boxes share something with `box`, and what they share, as [lo, hi) in the target."""
    lo = np.maximum(placement.offsets, np.array(box.offsets, np.int64))
    hi = np.minimum(placement.offsets + placement.sizes, np.array(box.stops, np.int64))
    rows = np.flatnonzero((hi > lo).all(axis=1))
    return rows, lo[rows], hi[rows]


def in_source(part: Part, lo: Int64, hi: Int64) -> tuple[Int64, Int64]:
    """Boxes of the target, inside a plain part, as boxes of its source."""
    n = len(lo)
    offsets = np.tile(np.array(part.source_box.offsets, np.int64), (n, 1))
    sizes = np.tile(np.array(part.source_box.sizes, np.int64), (n, 1))
    for dim, source_dim in enumerate(part.source_dims()):
        if source_dim is not None:
            offsets[:, source_dim] += lo[:, dim] - part.target_box.offsets[dim]
            sizes[:, source_dim] = hi[:, dim] - lo[:, dim]
    return offsets, sizes


def _in_target(part: Part, offsets: Int64, origin: Int64, strides: Int64) -> tuple[Int64, Int64]:
    """Where source offsets fall in target boxes that start at `origin` with `strides`: index, stride by source dim."""
    steps = np.zeros_like(offsets)
    index = ((np.array(part.target_box.offsets, np.int64) - origin) * strides).sum(axis=1)
    for dim, source_dim in enumerate(part.source_dims()):
        if source_dim is not None:
            index += (offsets[:, source_dim] - part.source_box.offsets[source_dim]) * strides[:, dim]
            steps[:, source_dim] = strides[:, dim]
    return index, steps


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of bytes, sorted by origin and start. One row a run.

    Attributes:
        origins, starts, nbytes: [n] what is read.
        files, targets: [n] where it is written.
        casts: [n] index into `Work.casts`; 0 copies.
    """

    origins: Int64
    starts: Int64
    nbytes: Int64
    files: Int64
    targets: Int64
    casts: Int64

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, rows: Int64 | npt.NDArray[np.bool_]) -> Runs:
        return Runs(*(getattr(self, name)[rows] for name in _RUN_COLUMNS))


_RUN_COLUMNS = ("origins", "starts", "nbytes", "files", "targets", "casts")


@dataclass(frozen=True, slots=True)
class TileJob:
    """One box of a tensor, written row-major at `start` of a file, tile after tile."""

    tensor: OutputTensor
    box: Box
    file: int
    start: int


@dataclass(frozen=True, slots=True)
class BandTarget:
    """A box of a source that is written row-major at `start` of a file.

    Attributes:
        whole: It is all of a box of the target.
    """

    box: Box
    file: int
    start: int
    dtype: str
    whole: bool


@dataclass(frozen=True, slots=True)
class BandJob:
    """A source tensor walked over once, whose boxes go to several places."""

    key: str
    targets: tuple[BandTarget, ...]


@dataclass(frozen=True, slots=True)
class EntryMap:
    """Where the slices of one tensor lie: by row the origin, and the record its bytes prove (-1: none alone)."""

    entry: TensorEntry
    origins: Int64
    records: Int64


@dataclass(frozen=True, slots=True)
class Work:
    """All that is to be done for a plan."""

    origins: Sequence[Origin]
    runs: Runs
    chains: Chains
    records: RecordTable
    casts: Sequence[tuple[str, str]]
    tiles: Sequence[TileJob]
    bands: Sequence[BandJob]
    maps: dict[str, EntryMap]
    names: Sequence[str]

    def ratios(self) -> Int64:
        """Return the bytes of an element before and after each cast, [n, 2]; 1 and 1 for a copy."""
        return np.array([_ratio(*pair) for pair in self.casts], np.int64)


@collector_paused()
def prepare(plan: Plan, *, check: bool, by_boxes: bool = False, digests: bool = False) -> Work:
    """Take a plan apart.

    Args:
        check: The digests of all source bytes that are touched become records.
        by_boxes: Only look the sources up: the executor makes one box after the other by itself.
        digests: Boxes are to be digested: what can be is chained.
    """
    builder = _Builder(plan.catalog, check=check, digests=digests)
    placements: Sequence[Placement] = plan.placements
    if not by_boxes and not digests:
        copies, placements = whole_copies(plan.catalog, placements)
        if copies is not None:
            builder.add_copies(copies)
    for placement in placements:
        if by_boxes:
            builder.look_up(placement.tensor)
        else:
            builder.add(placement)
    return builder.finish()


@dataclass(slots=True)
class _Builder:
    catalog: Catalog
    check: bool
    digests: bool = False
    origins: list[Origin] = field(default_factory=list)
    _index: dict[Origin, int] = field(default_factory=dict)
    _tables: dict[int, tuple[Sequence[str], Int64]] = field(default_factory=dict)
    _columns: list[list[Int64]] = field(default_factory=list)
    _chains: list[ChainRows] = field(default_factory=list)
    _records: list[list[npt.NDArray[np.generic]]] = field(default_factory=list)
    _casts: dict[tuple[str, str], int] = field(default_factory=lambda: {("", ""): 0})
    _names: dict[str, int] = field(default_factory=dict)
    _tiles: list[TileJob] = field(default_factory=list)
    _bands: dict[str, list[BandTarget]] = field(default_factory=dict)
    _by_row: dict[str, Int64] = field(default_factory=dict)

    # --- placements

    def add_copies(self, copies: Copies) -> None:
        """Add the runs of many whole tensors at once."""
        entries, owners = copies.entries, copies.owners
        casts = np.array(
            [self._cast(entry.dtype, placement.tensor.dtype)
             for entry, placement in zip(entries, copies.placements, strict=True)], np.int64,
        )  # fmt: skip
        all_slices = [entry.slices for entry in entries]
        origins = np.concatenate([self._path_origins(slices.paths)[slices.files] for slices in all_slices])[copies.rows]
        self._columns.append([origins, copies.starts, copies.nbytes, copies.files, copies.targets, casts[owners]])
        checked = np.array([slices.algorithm is not None and slices.digests is not None for slices in all_slices], bool)
        keep = np.flatnonzero(checked[owners]) if self.check else owners[:0]
        if len(keep):
            algorithms = [RecordTable.names.index(s.algorithm) if s.algorithm else 0 for s in all_slices]
            names = np.array([self._names.setdefault(entry.name, len(self._names)) for entry in entries], np.int64)
            columns = [
                np.concatenate(column)[copies.rows[keep]] for column in zip(*map(_digests, all_slices), strict=True)
            ]
            owners = owners[keep]
            self._records.append(
                [origins[keep], *columns[:2], np.array(algorithms, np.int64)[owners], names[owners], columns[2]]
            )

    def add(self, placement: Placement) -> None:
        tensor = placement.tensor
        if isinstance(tensor, ComputedTensor) or not all(part.is_plain for part in tensor.parts):
            self._tile_rows(placement, np.arange(len(placement)))
            return
        strided: set[int] = set()
        pending = []
        for part in tensor.parts:
            found = PartPieces.of(self.catalog, placement, tensor, part)
            strided.update(found.rows[~found.dense].tolist())
            pending.append(found)
        if not strided and self.digests and self._chain(placement, pending):
            return
        bad = np.array(sorted(strided), np.int64)
        for found in pending:
            self._add_runs(found, placement, ~np.isin(found.rows, bad) if len(bad) else None)
        if len(bad):
            self._add_strided(placement, tensor, bad)

    def _chain(self, placement: Placement, found: Sequence[PartPieces]) -> bool:
        """Add the runs of a tensor to the chains; False where they are none."""
        if not found or any(
            part.entry.slices.codecs or is_cast(part.entry.dtype, placement.tensor.dtype) for part in found
        ):
            return False
        columns: list[list[Any]] = []
        for number, part in enumerate(found):
            slices, rows = part.entry.slices, part.rows
            columns.append(
                [
                    self._origins(part.entry)[part.slices], part.starts, part.nbytes,
                    placement.files[rows].astype(np.int64), part.targets, rows, part.targets - placement.starts[rows],
                    part.slices * len(found) + number, slices.starts[part.slices], slices.nbytes[part.slices],
                    np.zeros(len(rows), bool),
                ]
            )  # fmt: skip
        joined = ChainRows(*(np.concatenate(column) for column in zip(*columns, strict=True)))
        strides = row_major(np.array([placement.tensor.shape], np.int64).reshape(1, -1))
        rows_in_order = chained(joined, (placement.offsets * strides).sum(axis=1), placement.nbytes())
        if rows_in_order is None:
            return False
        self._chains.append(rows_in_order)
        for part in found:
            self._add_records(part.entry, part.slices)
        return True

    def _add_runs(self, found: PartPieces, placement: Placement, keep: npt.NDArray[np.bool_] | None) -> None:
        entry, slices = found.entry, found.slices
        columns = [found.rows, slices, found.starts, found.nbytes, found.targets]
        if keep is not None:
            columns = [column[keep] for column in columns]
        rows, slices, starts, nbytes, targets = columns
        if not len(rows):
            return
        cast = self._cast(entry.dtype, placement.tensor.dtype)
        files = placement.files[rows].astype(np.int64)
        self._columns.append(
            [self._origins(entry)[slices], starts, nbytes, files, targets, np.full(len(rows), cast, np.int64)]
        )
        self._add_records(entry, slices)

    def _add_strided(self, placement: Placement, tensor: Target, rows: Int64) -> None:
        """Boxes that are no runs: over the source once where each part is dense in its box, else by tiles."""
        for row in rows.tolist():
            box = placement.box(row)
            bands = [_band_target(placement, row, box, part) for part in tensor.parts]
            if any(band is False for band in bands):
                self._tile_rows(placement, np.array([row]))
                continue
            for part, band in zip(tensor.parts, bands, strict=True):
                if isinstance(band, BandTarget):
                    self._touch(part.source)
                    self._bands.setdefault(part.source, []).append(band)

    def look_up(self, tensor: OutputTensor) -> None:
        """Take note of all slices of what a tensor is made from."""
        for key in tensor.sources:
            self._touch(key)
        for target in tensor.inputs if isinstance(tensor, ComputedTensor) else (tensor,):
            for key in target.sources:
                is_cast(self.catalog.tensors[key].dtype, target.dtype)

    def _tile_rows(self, placement: Placement, rows: Int64) -> None:
        tensor = placement.tensor
        self.look_up(tensor)
        for row in rows.tolist():
            if placement.box(row).numel:
                box = placement.box(row)
                self._tiles.append(TileJob(tensor, box, int(placement.files[row]), int(placement.starts[row])))

    def _touch(self, key: str) -> None:
        """Take all slices of a tensor as read."""
        if key not in self._by_row:
            entry = self.catalog.tensors[key]
            self._by_row[key] = self._origins(entry)
            self._add_records(entry, entry.slices.distinct())

    # --- tables

    def _cast(self, source: str, target: str) -> int:
        if not is_cast(source, target):
            return 0
        return self._casts.setdefault((source, target), len(self._casts))

    def _origin(self, origin: Origin) -> int:
        found = self._index.get(origin)
        if found is None:
            found = self._index[origin] = len(self.origins)
            self.origins.append(origin)
        return found

    def _origins(self, entry: TensorEntry) -> Int64:
        """The origin of each slice of a tensor."""
        slices = entry.slices
        result: Int64 = self._path_origins(slices.paths)[slices.files]
        for row, codec in slices.codecs.items():
            result[row] = self._origin(Origin(slices.paths[int(slices.files[row])], codec))
        return result

    def _path_origins(self, paths: Sequence[str]) -> Int64:
        """The origin of each path of a table."""
        known = self._tables.get(id(paths))
        if known is None:  # the table is kept beside its id, so that the id stays its own
            known = self._tables[id(paths)] = (paths, np.array([self._origin(Origin(p)) for p in paths], np.int64))
        return known[1]

    def _add_records(self, entry: TensorEntry, rows: Int64) -> None:
        slices = entry.slices
        if not self.check or slices.digests is None or slices.algorithm is None:
            return
        rows = distinct(rows)
        starts, nbytes, digests = _digests(slices)
        algorithm = RecordTable.names.index(slices.algorithm)
        owner = self._names.setdefault(entry.name, len(self._names))
        count = len(rows)
        self._records.append(
            [
                self._origins(entry)[rows],
                starts[rows],
                nbytes[rows],
                np.full(count, algorithm, np.int64),
                np.full(count, owner, np.int64),
                digests[rows],
            ]
        )

    # --- the end

    def finish(self) -> Work:
        records = self._record_table()
        maps: dict[str, EntryMap] = {}
        for key, origins in self._by_row.items():
            slices = self.catalog.tensors[key].slices
            proves = records.find(origins, slices.starts, slices.nbytes)
            maps[key] = EntryMap(self.catalog.tensors[key], origins, proves)
        return Work(
            self.origins,
            _merged(self._sorted_runs(), [_ratio(*pair) for pair in self._casts]),
            Chains.of(self._chains, records),
            records,
            list(self._casts),
            self._tiles,
            [BandJob(key, tuple(targets)) for key, targets in self._bands.items()],
            maps,
            list(self._names),
        )

    def _sorted_runs(self) -> Runs:
        if not self._columns:
            return Runs(*(np.zeros(0, np.int64) for _ in _RUN_COLUMNS))
        runs = Runs(*(np.concatenate(column) for column in zip(*self._columns, strict=True)))
        self._columns.clear()
        return runs.take(np.lexsort((runs.targets, runs.starts, runs.origins)))

    def _record_table(self) -> RecordTable:
        if not self._records:
            empty = np.zeros(0, np.int64)
            return RecordTable(empty, empty, empty, empty.astype(np.uint64), empty, empty)
        columns = [np.concatenate(column) for column in zip(*self._records, strict=True)]
        self._records.clear()
        origins, starts, nbytes, algorithms, owners, values = columns
        table = np.stack([origins, starts, nbytes, algorithms, values.view(np.int64)], axis=1)
        first = first_of_equal(table)
        order = np.lexsort((starts, origins)) if first is None else first[np.lexsort((starts[first], origins[first]))]
        return RecordTable(
            origins[order],
            starts[order],
            nbytes[order],
            values[order].astype(np.uint64),
            algorithms[order],
            owners[order],
        )


def _digests(slices: SliceArray) -> tuple[Int64, Int64, npt.NDArray[np.uint64]]:
    """What the digests of slices cover, start and bytes, and their values: zeros where there are none."""
    values = slices.digests if slices.digests is not None else np.zeros(len(slices), np.uint64)
    if slices.digest_starts is None or slices.digest_nbytes is None:
        return slices.starts, slices.nbytes, values
    return slices.digest_starts, slices.digest_nbytes, values


def _band_target(placement: Placement, row: int, box: Box, part: Part) -> BandTarget | bool | None:
    """The part's share of a placed box as a box of the source; None: no share; False: it is not dense there."""
    shared = box.intersect(part.target_box)
    if shared is None:
        return None
    inside = shared.relative_to(box)
    if not inside.is_contiguous_in(box.sizes):
        return False
    lo, hi = np.array([shared.offsets], np.int64), np.array([shared.stops], np.int64)
    offsets, sizes = in_source(part, lo, hi)
    start = int(placement.starts[row]) + inside.flat_start(box.sizes) * dtype_of(placement.tensor.dtype).itemsize
    source = Box(tuple(offsets[0].tolist()), tuple(sizes[0].tolist()))
    return BandTarget(source, int(placement.files[row]), start, placement.tensor.dtype, shared == box)


def _ratio(source: str, target: str) -> tuple[int, int]:
    return (dtype_of(source).itemsize, dtype_of(target).itemsize) if source else (1, 1)


def _merged(runs: Runs, ratios: list[tuple[int, int]]) -> Runs:
    """Join runs that continue one another on both sides."""
    if len(runs) < 2:
        return runs
    into, out = np.array(ratios, np.int64).T
    ends = runs.targets + runs.nbytes // into[runs.casts] * out[runs.casts]
    joined = (
        (runs.origins[1:] == runs.origins[:-1])
        & (runs.files[1:] == runs.files[:-1])
        & (runs.casts[1:] == runs.casts[:-1])
        & (runs.starts[1:] == runs.starts[:-1] + runs.nbytes[:-1])
        & (runs.targets[1:] == ends[:-1])
    )
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    merged = runs.take(first)
    return Runs(
        merged.origins, merged.starts, np.add.reduceat(runs.nbytes, first), merged.files, merged.targets, merged.casts
    )
