"""Going on with what an interrupted run had copied: what its steps were steps of, and whether its files are there.

A run may have been of one process, or of any number of ranks. What it did is told by the bytes of files that its steps
wrote, and by the digests that they compared: so another number of ranks, which take other steps, goes on from it too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.catalog.columns import distinct
from ckptkit.catalog.targets import Part
from ckptkit.catalog.tiles import pieces
from ckptkit.offline.copying.jobs import EntryMap, Work
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor, Placement, Plan
from ckptkit.offline.copying.sources import Origin
from ckptkit.storage.local import LocalStore
from ckptkit.storage.staging import leftover_of, staging_name
from ckptkit.storage.store import Store, split_url
from ckptkit.version import __version__

if TYPE_CHECKING:
    from ckptkit.storage.journal import Journal, Section

__all__ = [
    "Share",
    "Step",
    "Taken",
    "clear_strays",
    "fingerprint",
    "left_beside",
    "take_over",
    "Contents",
    "records_of",
]

Int64 = npt.NDArray[np.int64]
Written = tuple[Int64, Int64, Int64]
_Record = tuple[Origin, int, int]
_MAX_RANKS = 100_000


class Step(Protocol):
    """A part of the work that is done as a whole; `records` are the digests that are proved then."""

    @property
    def records(self) -> Int64: ...

    @property
    def written(self) -> Callable[[], Written]:
        """Returns what of files is written: file, start, bytes, a row each."""


@dataclass(frozen=True, slots=True)
class Share:
    """The steps of one rank.

    Attributes:
        plan: Its fingerprint.
        files: The files that the rank writes, by their index in the whole plan.
    """

    plan: str
    files: Sequence[int]
    work: Work
    steps: Sequence[Step]


@dataclass(frozen=True, slots=True)
class Taken:
    """What need not be done again.

    Attributes:
        steps, records: Of the share, by index.
        files: Those of the share, by index, that are there; the rest is begun anew.
        held: Bytes of the disk that they hold.
    """

    steps: frozenset[int] = frozenset()
    records: frozenset[int] = frozenset()
    files: frozenset[int] = frozenset()
    held: int = 0


# --- what is the same work


def fingerprint(plan: Plan, work: Work, source: Store, *, check: bool) -> str:
    """Return 32 hex digits that differ where another source would be read, or other bytes written elsewhere.

    Steps are counted in the order in which this version of ckptkit makes them, so its number is in it. A file of the
    source counts as the same while its size, and the time of its last change, are (locally also its inode).
    """
    state = xxhash.xxh3_128()
    for value in (__version__, source.url, check, *_plan_values(plan), *_source_values(work, source)):
        state.update(repr(value).encode("utf-8", "backslashreplace"))
        state.update(b"\n")
    for table in (work.runs, work.chains, work.records):
        for name in _COLUMNS[type(table).__name__]:
            state.update(memoryview(getattr(table, name)).cast("B"))
    return state.hexdigest()


_COLUMNS = {
    "Chains": ("origins", "starts", "nbytes", "files", "targets", "records", "last", "steps"),
    "Runs": ("origins", "starts", "nbytes", "files", "targets", "casts"),
    "RecordTable": ("sources", "starts", "nbytes", "values", "algorithms"),
}


def _plan_values(plan: Plan) -> Iterator[Any]:
    yield from ((file.path, file.nbytes) for file in plan.files)


def _source_values(work: Work, source: Store) -> Iterator[Any]:
    yield work.casts
    for tile in work.tiles:
        yield (tile.box, tile.file, tile.start, *_tensor_values(tile.tensor))
    yield from ((band.key, band.targets) for band in work.bands)
    yield from work.origins
    paths = sorted({origin.path for origin in work.origins})
    if isinstance(source, LocalStore):
        for path in paths:
            descriptor = source.stat_file(path)
            yield path, descriptor.st_size, descriptor.st_mtime_ns, descriptor.st_ino
        return
    folders = sorted({path.rpartition("/")[0] for path in paths})
    yield from ((item.path, item.size, item.mtime) for folder in folders for item in source.list(folder))


def _tensor_values(tensor: OutputTensor) -> tuple[Any, ...]:
    what = (tensor.label, tensor.inputs) if isinstance(tensor, ComputedTensor) else tensor.parts
    return tensor.name, tensor.dtype, tensor.shape, what


# --- what was done


def take_over(
    store: LocalStore, whole: Plan, share: Share, journal: Journal, derive: Callable[[int, int], Share]
) -> Taken:
    """Return what of a share need not be done again, and begin the journal of this run.

    Args:
        whole: The plan that is shared out.
        derive: Returns the share of (world size, rank): what an earlier run had to do.
    """
    past = _Past(whole)
    earlier = [section for section in journal.earlier() if section.rank < section.world_size <= _MAX_RANKS]
    for section, found in _with_shares(earlier, share, derive):
        past.add(found, section)
    taken = past.of(share, store)
    files = whole.files
    anew = [files[index].path for at, index in enumerate(share.files) if at not in taken.files] if earlier else []
    journal.begin(share.plan, steps=taken.steps, anew=anew)
    return taken


def _with_shares(
    sections: Sequence[Section], own: Share, derive: Callable[[int, int], Share]
) -> Iterator[tuple[Section, Share]]:
    """Yield each section with its share, as it is now; those that were of another plan, or source, are left out."""
    shares = {own.plan: own}
    tried: set[tuple[int, int]] = set()
    for section in sections:
        key = (section.world_size, section.rank)
        if section.plan not in shares and key not in tried:
            tried.add(key)
            made = derive(*key)
            shares[made.plan] = made
        if section.plan in shares:
            yield section, shares[section.plan]


class _Past:
    """The bytes of files that earlier runs have written for good, and the digests that they have compared."""

    def __init__(self, whole: Plan) -> None:
        self._paths = [file.path for file in whole.files]
        sizes = np.array([file.nbytes for file in whole.files], np.int64)
        self._sizes = sizes
        # An address for each byte of each file; between two files is one that nobody writes.
        self._bases = np.concatenate([[0], np.cumsum(sizes + 1)[:-1]]) if len(sizes) else sizes
        self._ranges: list[tuple[Int64, Int64, Int64]] = []  # file, from, to
        self._records: set[_Record] = set()

    def add(self, share: Share, section: Section) -> None:
        void = np.array([path in section.void for path in self._paths], bool)
        steps = [share.steps[index] for index in sorted(section.steps) if index < len(share.steps)]
        for step in steps:
            files, lo, hi = self._placed(share, step)
            holds = ~void[files]
            self._ranges.append((files[holds], lo[holds], hi[holds]))
            if holds.all():
                self._records.update(_records(share.work, step.records))

    def _placed(self, share: Share, step: Step) -> tuple[Int64, Int64, Int64]:
        files, starts, nbytes = step.written()
        files = np.asarray(share.files, np.int64)[files]
        lo = self._bases[files] + starts
        return files[nbytes > 0], lo[nbytes > 0], (lo + nbytes)[nbytes > 0]

    def of(self, share: Share, store: LocalStore) -> Taken:
        """Return what of a share is done, of which the files are there."""
        if not self._ranges:
            return Taken()
        files, lo, hi = (np.concatenate(column) for column in zip(*self._ranges, strict=True))
        there = {item.path: item.size for item in store.list(recursive=True) if item.kind == "file"}
        whole = np.array([there.get(p) == n for p, n in zip(self._paths, self._sizes.tolist(), strict=True)], bool)
        begun = np.isin(np.arange(len(whole)), files)
        kept = frozenset(at for at, index in enumerate(share.files) if whole[index] and begun[index])
        starts, stops = _merged(lo[whole[files]], hi[whole[files]])
        known = {row for row, record in enumerate(_records(share.work)) if record in self._records}
        steps, records = set(), set()
        for index, step in enumerate(share.steps):
            _, first, end = self._placed(share, step)
            own = set(step.records.tolist())
            if not _covered(first, end, starts, stops) or (not len(first) and not (own and own <= known)):
                continue
            steps.add(index)
            records |= own & known
        held = sum(store.stat_file(self._paths[share.files[at]]).st_blocks * 512 for at in kept)
        return Taken(frozenset(steps), frozenset(records), kept, held)


def _records(work: Work, rows: Int64 | None = None) -> Iterator[_Record]:
    """What names a digest whoever reads it: the place of the bytes."""
    table = work.records
    columns = (table.sources, table.starts, table.nbytes)
    taken = columns if rows is None else tuple(column[rows] for column in columns)
    for source, start, nbytes in zip(*(column.tolist() for column in taken), strict=True):
        yield work.origins[source], start, nbytes


def _merged(lo: Int64, hi: Int64) -> tuple[Int64, Int64]:
    """Join ranges that touch or overlap."""
    if not len(lo):
        return lo, hi
    order = np.argsort(lo, kind="stable")
    lo, hi = lo[order], np.maximum.accumulate(hi[order])
    first = np.flatnonzero(np.append(True, lo[1:] > hi[:-1]))
    return lo[first], hi[np.append(first[1:], len(lo)) - 1]


def _covered(lo: Int64, hi: Int64, starts: Int64, stops: Int64) -> bool:
    """Tell whether each range lies in one of those that are merged."""
    if not len(lo):
        return True
    if not len(starts):
        return False
    at = np.searchsorted(starts, lo, side="right") - 1
    return bool(((at >= 0) & (stops[np.maximum(at, 0)] >= hi)).all())


# --- what lies there


def clear_strays(store: Store, plan: Plan) -> None:
    """Delete what lies in a staging directory and is no file of the plan: an interrupted run may have left it."""
    if not isinstance(store, LocalStore) or leftover_of(os.path.basename(store.url)) is None:
        return
    wanted = {file.path for file in plan.files}
    folders = {path[: i + 1] for path in wanted for i, char in enumerate(path) if char == "/"}
    pending = [""]
    for folder in pending:  # grows while we go
        for item in store.list(folder):
            if item.kind == "directory" and f"{item.path}/" in folders:
                pending.append(item.path)
            elif item.path not in wanted or item.kind != "file":
                store.delete_tree(item.path)


def left_beside(url: str) -> tuple[str, int] | None:
    """Return the staging directory that an interrupted process left beside its target, for the next to go on from, and
    the bytes that it holds; None where there is none. Only on a local disk is anything left."""
    protocol, rest = split_url(url)
    if protocol != "file":
        return None
    head, name = os.path.split(os.path.abspath(os.path.expanduser(rest)))
    parent = LocalStore(head)
    for item in parent.list():
        kept = leftover_of(item.path)
        if kept is not None and item.kind == "directory" and item.path == staging_name(name, kept.nonce):
            store = parent.child(item.path)
            held = sum(store.stat_file(inner.path).st_blocks * 512 for inner in store.list(recursive=True))
            return f"{head}/{item.path}", held
    return None


# What single files of a plan hold, in words, and which digests vouch for it: so an object store's are told apart.


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
