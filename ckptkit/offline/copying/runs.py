"""Splits a plan into steps for workers: runs of bytes, and boxes that are not contiguous.

A plan says which boxes (rectangular regions) of which tensors are written to which offsets of which files. A run is a
range of bytes that is contiguous both in the source and in the target. Runs are ordered by tensor and element, so each
digest (of the source or of a written box) is computed in one pass. Runs are stored as columns of numbers, one row per
run. All other data (column shards, transposes, arithmetic) is handled by `BoxStep`s. A `BoxStep` assembles the tensor
tile by tile, and copies from each tile to the boxes. No I/O happens here.

The offsets of reads count from the start of an *origin*: a file, or a decoded record in a file. A digest *record* is a
byte range of an origin with its recorded digest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.casts import is_cast
from ckptkit.catalog.columns import distinct, distinct_boxes, is_dense, row_major
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, SliceArray, TensorEntry
from ckptkit.catalog.targets import Part, Target
from ckptkit.catalog.tiles import RowCuts, pieces, row_cuts
from ckptkit.digests import CRC, NAMES
from ckptkit.formats.checks import RecordTable, recorded
from ckptkit.formats.sources import EntryMap, Origin, Origins
from ckptkit.gc_pause import collector_paused
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor, Placement, Plan

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


# --- geometry: which bytes of the source slices a target's plain parts need


@dataclass(frozen=True, slots=True)
class PartPieces:
    """The pieces that are copied from one source tensor to the boxes of a result tensor, one row per piece.

    Covers one part of the result tensor: a region that is copied from one source tensor, in the same element order.
    A piece is the intersection of a source slice and a box.

    Attributes:
        rows: [n] index of the box in the placement.
        slices: [n] index of the slice in the source tensor.
        starts, nbytes: [n] byte offset of the piece's first element in the source, and the size of the piece.
        targets: [n] byte offset of the piece's first element in the target file.
        dense: [n] whether the piece is contiguous both in the source and in the target.
    """

    entry: TensorEntry
    rows: Int64
    slices: Int64
    starts: Int64
    nbytes: Int64
    targets: Int64
    dense: Bool

    @classmethod
    def of(cls, catalog: Catalog, placement: Placement, target: Target, part: Part) -> PartPieces:
        entry, into, out = catalog.tensors[part.source], part.target_box, part.source_box
        # The boxes that intersect the part, the intersections [lo, hi) in the target, and the same boxes in the source.
        lo = np.maximum(placement.offsets, np.array(into.offsets, np.int64))
        hi = np.minimum(placement.offsets + placement.sizes, np.array(into.stops, np.int64))
        rows = np.flatnonzero((hi > lo).all(axis=1))
        lo, hi = lo[rows], hi[rows]
        offsets, sizes = (np.tile(np.array(row, np.int64), (len(rows), 1)) for row in (out.offsets, out.sizes))
        dims = [(dim, source_dim) for dim, source_dim in enumerate(part.source_dims()) if source_dim is not None]
        for dim, source_dim in dims:
            offsets[:, source_dim] += lo[:, dim] - into.offsets[dim]
            sizes[:, source_dim] = hi[:, dim] - lo[:, dim]
        itemsize = dtype_of(entry.dtype).itemsize
        found = pieces(entry.slices, offsets, sizes, itemsize)
        rows = rows[found.boxes]
        # Where each piece goes in its box: the flat index of the piece's first element, and the stride in the box for
        # each source dimension.
        place, steps = row_major(placement.sizes[rows]), np.zeros_like(found.offsets)
        index = ((np.array(into.offsets, np.int64) - placement.offsets[rows]) * place).sum(axis=1)
        for dim, source_dim in dims:
            index += (found.offsets[:, source_dim] - out.offsets[source_dim]) * place[:, dim]
            steps[:, source_dim] = place[:, dim]
        return cls(
            entry, rows, found.rows, found.starts, found.numel() * itemsize,
            placement.starts[rows] + index * dtype_of(target.dtype).itemsize,
            is_dense(found.sizes, found.strides) & is_dense(found.sizes, steps),
        )  # fmt: skip


# --- steps

_STEP = 32 << 20  # bytes that a worker processes at a time
_ROW = 1 << 10  # bytes added to each run's size, which also limits the number of runs per step
_LONG = 128 << 20  # bytes; steps at least this long start first
LEAST = 64 << 10  # bytes; digests of smaller boxes are not computed while they are written
_Written: TypeAlias = tuple[Int64, Int64, Int64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of bytes, one row per run. Runs of the same box are consecutive.

    Attributes:
        origins, starts, nbytes: [n] the bytes to read: index of the origin, offset and size.
        files, targets: [n] the file and the offset at which to write. File -1 means that the bytes are only checked.
        casts: [n] index into `Work.casts`. 0 means a copy without a cast.
        records: [n] index of the source digest that covers these bytes. -1 means that there is no digest.
        ends: [n] the offset in the file at which the run's box ends, if a digest of the box is computed during the
            copy. Otherwise 0.
    """

    origins: Int64
    starts: Int64
    nbytes: Int64
    files: Int64
    targets: Int64
    casts: Int64
    records: Int64
    ends: Int64

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, rows: Int64 | slice) -> Runs:
        return Runs(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class RunStep:
    """A step that copies the runs [first, stop).

    `records` has the indices of the digest records whose bytes are all in this step.
    """

    first: int
    stop: int
    records: Int64


@dataclass(frozen=True, slots=True)
class BoxStep:
    """A step that writes boxes of a tensor.

    Attributes:
        boxes: (box, file, start): the box is written row-major to the file, at the offset `start`.
    """

    tensor: OutputTensor
    boxes: tuple[tuple[Box, int, int], ...]
    records: Int64


Step: TypeAlias = RunStep | BoxStep


@dataclass(frozen=True, slots=True)
class Work:
    """The steps of a plan.

    `maps` describes the source tensors that `BoxStep`s read, by key.
    """

    origins: Sequence[Origin]
    runs: Runs
    steps: Sequence[Step]
    records: RecordTable
    casts: Sequence[tuple[str, str]]
    maps: dict[str, EntryMap]
    names: Sequence[str]

    def describe(self, record: int) -> str:
        """Return text for messages: the file of a digest record, and one tensor whose bytes the record covers."""
        path = self.origins[int(self.records.sources[record])].path
        return f"{path}: tensor {self.names[int(self.records.owners[record])]!r}"

    def ratios(self) -> Int64:
        """Return the itemsizes before and after each cast, [n, 2]. A plain copy has the itemsizes 1 and 1."""
        return _ratios(self.casts)

    def written(self, step: Step) -> _Written:
        """Return the byte ranges that a step writes, as three columns: file, start and size."""
        if isinstance(step, RunStep):
            runs = self.runs.take(slice(step.first, step.stop))
            into, out = self.ratios()[runs.casts].T
            return runs.files, runs.targets, runs.nbytes // into * out
        itemsize = dtype_of(step.tensor.dtype).itemsize
        rows = [(file, start, box.numel * itemsize) for box, file, start in step.boxes]
        files, starts, nbytes = np.array(rows, np.int64).reshape(-1, 3).T
        return files, starts, nbytes


def checking(work: Work, records: Int64) -> Work:
    """Return work that only compares the digests `records`, and copies nothing."""
    table, nothing = work.records, np.zeros(len(records), np.int64)
    runs = Runs(
        table.sources[records], table.starts[records], table.nbytes[records], nothing - 1, nothing, nothing,
        records, nothing,
    )  # fmt: skip
    runs = _split(runs, work.origins, table, work.ratios())
    return replace(work, runs=runs, steps=_run_steps(runs, work.origins, table))


@collector_paused()
def prepare(plan: Plan, *, check: bool, by_boxes: bool = False, digests: bool = False) -> Work:
    """Split a plan into steps.

    Args:
        check: Compare the source bytes that are read with their recorded digests.
        by_boxes: Prepare only the sources and create no steps, because the caller assembles the boxes.
        digests: Compute digests of the boxes while they are written.
    """
    builder = _WorkBuilder(plan.catalog, check=check, digests=digests)
    for placement in plan.placements if by_boxes else builder.add_rows(plan.placements):
        if by_boxes:
            builder.look_up(placement.tensor)
        else:
            builder.add(placement)
    return builder.finish()


@dataclass(slots=True)
class _WorkBuilder:
    catalog: Catalog
    check: bool
    digests: bool
    _origins: Origins = field(default_factory=Origins)
    # The columns of Runs, but with each record's start and size in bytes instead of its index.
    _columns: list[list[Int64]] = field(default_factory=list)
    _records: list[list[npt.NDArray[np.generic]]] = field(default_factory=list)
    _casts: dict[tuple[str, str], int] = field(default_factory=lambda: {("", ""): 0})
    _names: dict[str, int] = field(default_factory=dict)
    _boxes: list[BoxStep] = field(default_factory=list)
    _by_row: dict[str, Int64] = field(default_factory=dict)

    # --- placements

    def add_rows(self, placements: Sequence[Placement]) -> list[Placement]:
        """Add the runs of tensors that are whole or split along dimension 0, both in the source and in the result.

        Returns the other placements. Handles thousands of tensors at once, because adding each tensor separately would
        be much slower.
        """
        copied = [_copied(self.catalog, placement) for placement in placements]
        some = [placement for placement, entry in zip(placements, copied, strict=True) if entry is not None]
        entries = [entry for entry in copied if entry is not None]
        shapes = [entry.shape for entry in entries]
        if sum(shape[0] if shape else 1 for shape in shapes) >= 1 << 62:
            return list(placements)  # the shapes are hostile: there are too many rows to number
        read_from, write_to = row_cuts(shapes, [entry.slices for entry in entries]), row_cuts(shapes, some)
        both = read_from.cut & write_to.cut
        taken = iter(both.tolist())
        rest = [item for item, entry in zip(placements, copied, strict=True) if entry is None or not next(taken)]
        if not both.any():
            return rest
        chosen = np.flatnonzero(both).tolist()
        entries, some = [entries[index] for index in chosen], [some[index] for index in chosen]
        slices = [entry.slices for entry in entries]
        heights = np.array([entry.shape[0] if entry.shape else 1 for entry in entries], np.int64)
        source, target = _Numbered.of(read_from, both, heights), _Numbered.of(write_to, both, heights)
        # Number the rows of all tensors consecutively. A run ends where a slice or a box ends.
        first = distinct(np.concatenate([source.first, target.first]))
        rows = np.diff(first, append=heights.sum())
        at_source, at_target = (np.searchsorted(side.first, first, side="right") - 1 for side in (source, target))
        owners = source.owners[at_source]  # the tensor of each run
        read, written = (
            np.array([math.prod(item.shape[1:]) * dtype_of(item.dtype).itemsize for item in items], np.int64)[owners]
            for items in (entries, [placement.tensor for placement in some])
        )
        casts = np.array(
            [self._cast(entry.dtype, placement.tensor.dtype) for entry, placement in zip(entries, some, strict=True)],
            np.int64,
        )
        files, places, nbytes = (column[target.kept] for column in Placement.joined(some))
        starts = SliceArray.joined(slices)[0][source.kept]
        origins = np.concatenate([self._origins.of_paths(item.paths)[item.files] for item in slices])[source.kept]
        if all(item.digests is None for item in slices):  # 300,000 tensors may have no digests
            first_bytes, record_bytes = (column[source.kept] for column in SliceArray.joined(slices))
            algorithms, values = np.full(len(first_bytes), -1), np.zeros(len(first_bytes), np.uint64)
        else:
            known = [recorded(item) for item in slices]
            algorithms = np.array([item[0] for item in known], np.int64)[source.owners]
            columns = zip(*(item[1:] for item in known), strict=True)
            first_bytes, record_bytes, values = (np.concatenate(column)[source.kept] for column in columns)
        checked = (algorithms >= 0) & self.check
        self._columns.append(
            [origins[at_source], starts[at_source] + (first - source.first[at_source]) * read, rows * read,
             files[at_target], places[at_target] + (first - target.first[at_target]) * written, casts[owners],
             np.where(checked, first_bytes, -1)[at_source], record_bytes[at_source],
             self._ends(places, nbytes)[at_target]]
        )  # fmt: skip
        keep = np.flatnonzero(checked)
        if len(keep):
            names = np.array([self._names.setdefault(entry.name, len(self._names)) for entry in entries], np.int64)
            self._records.append(
                [origins[keep], first_bytes[keep], record_bytes[keep], values[keep], algorithms[keep],
                 names[source.owners[keep]]]
            )  # fmt: skip
        return rest

    def add(self, placement: Placement) -> None:
        tensor = placement.tensor
        if isinstance(tensor, ComputedTensor) or not all(part.is_plain for part in tensor.parts):
            self._add_boxes(placement, np.arange(len(placement)))
            return
        found = [PartPieces.of(self.catalog, placement, tensor, part) for part in tensor.parts]
        strided = distinct(np.concatenate([np.zeros(0, np.int64), *(part.rows[~part.dense] for part in found)]))
        if len(strided) < len(placement):
            self._add_runs(found, placement, strided)
        if len(strided):
            self._add_boxes(placement, strided)

    def _add_runs(self, found: Sequence[PartPieces], placement: Placement, strided: Int64) -> None:
        """Add the runs of a placement's boxes, in the order of the tensor's elements. Skip the `strided` boxes."""
        taken: list[list[Int64]] = []
        rows_of: list[Int64] = []
        for part in found:
            kept = np.flatnonzero(~np.isin(part.rows, strided)) if len(strided) else slice(None)
            rows, slices = part.rows[kept], part.slices[kept]
            if not len(rows):
                continue
            algorithm, starts, nbytes, _ = recorded(part.entry.slices)
            checked = self.check and algorithm >= 0
            cast = self._cast(part.entry.dtype, placement.tensor.dtype)
            taken.append(
                [self._origins.of(part.entry.slices)[slices], part.starts[kept], part.nbytes[kept],
                 placement.files[rows].astype(np.int64), part.targets[kept], np.full(len(rows), cast, np.int64),
                 starts[slices] if checked else np.full(len(rows), -1, np.int64), nbytes[slices]]
            )  # fmt: skip
            rows_of.append(rows)
            self._add_records(part.entry, slices)
        if not taken:
            return
        rows = np.concatenate(rows_of)
        columns = [np.concatenate(column) for column in zip(*taken, strict=True)]
        columns.append(self._ends(placement.starts, placement.nbytes())[rows])
        strides = row_major(np.array([placement.tensor.shape], np.int64).reshape(1, -1))
        places = (placement.offsets * strides).sum(axis=1)
        order = np.lexsort((columns[4], rows, places[rows]))
        self._columns.append([column[order] for column in columns])

    def _ends(self, starts: Int64, nbytes: Int64) -> Int64:
        """Return the offset at which each box ends in its file, or 0 if no digest of the box is computed."""
        ends: Int64 = np.where((nbytes >= LEAST) & self.digests, starts + nbytes, 0)
        return ends

    def _add_boxes(self, placement: Placement, rows: Int64) -> None:
        tensor = placement.tensor
        self.look_up(tensor)
        boxes = [(placement.box(row), int(placement.files[row]), int(placement.starts[row])) for row in rows.tolist()]
        boxes = [item for item in boxes if item[0].numel]
        if boxes:
            self._boxes.append(BoxStep(tensor, tuple(boxes), np.zeros(0, np.int64)))

    def look_up(self, tensor: OutputTensor) -> None:
        """Prepare a tensor's sources for `BoxStep`s. Assumes that the `BoxStep`s read all slices of the sources."""
        for key in tensor.sources:
            if key not in self._by_row:
                entry = self.catalog.tensors[key]
                self._by_row[key] = self._origins.of(entry.slices)
                self._add_records(entry, distinct_boxes(entry.slices.offsets, entry.slices.sizes))
        for target in tensor.read if isinstance(tensor, ComputedTensor) else (tensor,):
            for key in target.sources:
                is_cast(self.catalog.tensors[key].dtype, target.dtype)

    # --- tables

    def _cast(self, source: str, target: str) -> int:
        if not is_cast(source, target):
            return 0
        return self._casts.setdefault((source, target), len(self._casts))

    def _add_records(self, entry: TensorEntry, rows: Int64) -> None:
        algorithm, starts, nbytes, values = recorded(entry.slices)
        if not self.check or algorithm < 0:
            return
        rows = distinct(rows)
        owner = self._names.setdefault(entry.name, len(self._names))
        count = len(rows)
        self._records.append(
            [self._origins.of(entry.slices)[rows], starts[rows], nbytes[rows], values[rows],
             np.full(count, algorithm, np.int64), np.full(count, owner, np.int64)]
        )  # fmt: skip

    # --- the finished work

    def finish(self) -> Work:
        records = RecordTable.of(self._records)
        maps: dict[str, EntryMap] = {}
        for name, origins in self._by_row.items():
            entry = self.catalog.tensors[name]
            maps[name] = EntryMap(entry, origins, records.find(origins, entry.slices.starts, entry.slices.nbytes))
        runs = Runs(*(np.zeros(0, np.int64) for _ in Runs.__slots__))
        if self._columns:
            columns = [np.concatenate(column) for column in zip(*self._columns, strict=True)]
            self._columns.clear()
            origins, starts, nbytes, files, targets, numbers, first, length, ends = columns
            inside = (starts >= first) & (starts + nbytes <= first + length)
            proves = np.where(inside & (first >= 0), records.find(origins, first, length), -1)
            runs = Runs(origins, starts, nbytes, files, targets, numbers, proves, ends)
        casts = list(self._casts)
        runs = _split(runs, self._origins.all, records, _ratios(casts))
        steps: list[Step] = [*self._boxes, *_run_steps(runs, self._origins.all, records)]
        return Work(self._origins.all, runs, steps, records, casts, maps, list(self._names))


@dataclass(frozen=True, slots=True)
class _Numbered:
    """The non-empty boxes of several tensors, which are split into blocks of rows.

    The rows of all tensors are numbered consecutively.

    Attributes:
        kept: [n] the index of each box among all boxes of these tensors, empty boxes included.
        owners: [n] the index of each box's tensor.
        first: [n] the first row of each box.
    """

    kept: Int64
    owners: Int64
    first: Int64

    @classmethod
    def of(cls, cuts: RowCuts, chosen: Bool, heights: Int64) -> _Numbered:
        counts = np.diff(cuts.bounds)
        inside = np.repeat(chosen, counts)
        offsets, sizes = cuts.offsets[inside], cuts.sizes[inside]
        owners = np.repeat(np.arange(len(heights)), counts[chosen])
        kept = np.flatnonzero(sizes)
        return cls(kept, owners[kept], ((np.cumsum(heights) - heights)[owners] + offsets)[kept])


def _copied(catalog: Catalog, placement: Placement) -> TensorEntry | None:
    """Return the source tensor if the placement's tensor is a copy of it (apart from a cast).

    Returns None for any other placement, and for an empty, strided or compressed source.
    """
    tensor = placement.tensor
    part = tensor.only_part if isinstance(tensor, Target) else None
    if part is None:
        return None
    entry = catalog.tensors[part.source]
    shape = entry.shape
    if not tensor.shape == part.source_box.sizes == shape or 0 in shape:
        return None
    return None if entry.slices.strides or entry.slices.codecs else entry


def _ratios(casts: Sequence[tuple[str, str]]) -> Int64:
    sizes = [(dtype_of(a).itemsize, dtype_of(b).itemsize) if a else (1, 1) for a, b in casts]
    return np.array(sizes, np.int64)


# --- steps


def _in_order(runs: Runs, origins: Sequence[Origin], records: RecordTable) -> tuple[Bool, Bool]:
    """Return two masks over the runs.

    The first selects runs that are read through a decoder. The second selects runs whose digest needs bytes in order.
    """
    decoded = np.array([origin.codec is not None for origin in origins], bool)
    forwards = np.zeros(len(runs), bool)
    checked = runs.records >= 0
    forwards[checked] = records.algorithms[runs.records[checked]] != NAMES.index(CRC)
    return (decoded[runs.origins] if len(origins) else np.zeros(len(runs), bool)), forwards


def _split(runs: Runs, origins: Sequence[Origin], records: RecordTable, ratios: Int64) -> Runs:
    """Split long runs, so that workers can share the work. Runs whose bytes must stay in order are not split."""
    decoded, forwards = _in_order(runs, origins, records)
    counts = np.where(decoded | forwards | (runs.ends > 0), 1, np.maximum(1, -(-runs.nbytes // _STEP)))
    return _cut(runs, counts, np.zeros(len(runs), np.int64), _STEP, ratios)


def cut_runs(runs: Runs, size: int, ratios: Int64) -> Runs:
    """Cut runs into pieces of at most `size` bytes that end at multiples of `size` in the target file.

    Cuts at other offsets would write pages of the file twice, which takes 20% longer on a disk. Runs with a cast are
    cut between elements.
    """
    before = np.where(runs.casts > 0, 0, runs.targets % size)
    return _cut(runs, np.maximum(1, -(-(runs.nbytes + before) // size)), before, size, ratios)


def _cut(runs: Runs, counts: Int64, before: Int64, size: int, ratios: Int64) -> Runs:
    """Cut each run into `counts` pieces of `size` bytes.

    The first piece is `before` bytes shorter, and the last piece has the rest.
    """
    if not len(runs) or counts.max() <= 1:
        return runs
    rows = np.repeat(np.arange(len(runs)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = np.maximum(within * size - before[rows], 0)
    ends = np.minimum((within + 1) * size - before[rows], runs.nbytes[rows])
    parts = runs.take(rows)
    into, out = ratios[parts.casts].T
    return replace(
        parts, starts=parts.starts + begins, nbytes=ends - begins, targets=parts.targets + begins // into * out
    )


def _run_steps(runs: Runs, origins: Sequence[Origin], records: RecordTable) -> list[RunStep]:
    """Group runs into steps and put long steps first, so that no worker starts a long step at the end.

    A step never ends inside a box whose digest is computed during the copy. A step also never ends inside a source
    range whose digest must be computed from bytes in order.
    """
    if not len(runs):
        return []
    decoded, forwards = _in_order(runs, origins, records)
    follows = np.zeros(len(runs), bool)
    follows[1:] = (runs.ends[1:] > 0) & (runs.ends[1:] == runs.ends[:-1]) & (runs.files[1:] == runs.files[:-1])
    follows[1:] |= forwards[1:] & (runs.records[1:] == runs.records[:-1])
    follows[1:] |= decoded[1:] & (runs.origins[1:] == runs.origins[:-1])
    at = np.flatnonzero(~follows)
    weight = runs.nbytes + _ROW
    turns = (np.cumsum(weight) - weight)[at] // _STEP
    begins: Int64 = at[np.append(True, turns[1:] != turns[:-1])]
    bounds = np.append(begins, len(runs))
    # Find the digest records whose bytes are all in one step: for each record, compare the first and the last step, and
    # add up the bytes.
    kept = np.flatnonzero(runs.records >= 0)
    which, of = runs.records[kept], np.repeat(np.arange(len(begins)), np.diff(bounds))[kept]
    first, last = np.full(len(records), len(bounds)), np.full(len(records), -1)
    np.minimum.at(first, which, of)
    np.maximum.at(last, which, of)
    total = np.zeros(len(records), np.int64)
    np.add.at(total, which, runs.nbytes[kept])
    alone = np.flatnonzero((first == last) & (total >= records.nbytes))
    order = np.argsort(first[alone], kind="stable")
    proved = np.split(alone[order], np.searchsorted(first[alone][order], np.arange(1, len(begins))))
    sizes = np.add.reduceat(runs.nbytes, begins)
    steps = [
        RunStep(start, stop, rows)
        for start, stop, rows in zip(bounds[:-1].tolist(), bounds[1:].tolist(), proved, strict=True)
    ]
    return [steps[i] for i in np.argsort(sizes < _LONG, kind="stable").tolist()]
