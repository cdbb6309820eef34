"""Resumes an interrupted command: finds the finished steps whose files still exist.

The interrupted command may have had a different number of ranks, and so may have divided the work into different steps.
So the steps in its journals are converted to the byte ranges that they wrote and the digests that they checked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.columns import distinct, distinct_boxes
from ckptkit.catalog.tiles import pieces
from ckptkit.digests import new_signer
from ckptkit.errors import StorageError
from ckptkit.formats.checks import Verifier
from ckptkit.formats.sources import EntryMap, Origin
from ckptkit.offline.copying.plan import ComputedTensor, OutputTensor, Plan, restricted, share_out
from ckptkit.offline.copying.runs import RunStep, Step, Work, prepare
from ckptkit.storage.local import LocalStore, is_directory
from ckptkit.storage.staging import leftover_of, leftovers
from ckptkit.storage.store import FileInfo, Store, split_url
from ckptkit.version import __version__

if TYPE_CHECKING:
    from ckptkit.storage.journal import Journal, Section
    from ckptkit.storage.ledger import Ledger


Int64 = npt.NDArray[np.int64]
_Record = tuple[Origin, int, int]
_MAX_RANKS = 100_000


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a plan.

    Attributes:
        plan: Fingerprint of the source and of all bytes that this rank writes.
        files: Indices (in the whole plan) of the files that this rank writes.
    """

    plan: str
    files: Sequence[int]
    work: Work

    @classmethod
    def of(cls, whole: Plan, files: Sequence[int], work: Work, source: Store, *, check: bool) -> Share:
        """Return the share that consists of `files`.

        Its fingerprint `plan` includes ckptkit's version, because another version may divide the work into other steps.
        A source file is identified by its size and modification time and, if it is local, by its inode.
        """
        found = identities(source, sorted({origin.path for origin in work.origins}))
        if not is_directory(source):  # omit the ETag: some gateways return a new one for each request
            found = {path: item and item[:2] for path, item in found.items()}
        steps = [
            (step.first, step.stop) if isinstance(step, RunStep) else (step.boxes, *_made(step.tensor))
            for step in work.steps
        ]
        sizes = [(file.path, file.nbytes) for file in restricted(whole, files).files]
        state = new_signer()
        for value in (__version__, source.url, check, sizes, work.casts, *steps, *work.origins, found):
            state.update(_words(value) + b"\n")
        for table, names in ((work.runs, work.runs.__slots__), (work.records, _RECORDS)):
            for name in names:
                state.update(np.ascontiguousarray(getattr(table, name)).data.cast("B"))
        return cls(state.hexdigest(), files, work)


_RECORDS = ("sources", "starts", "nbytes", "values", "algorithms")


@dataclass(frozen=True, slots=True)
class Taken:
    """The part of a share that earlier commands finished.

    Attributes:
        steps, records: Indices of the finished steps, and of the checked digests.
        files: Indices of the files that exist with their full size. All other files are written again.
        held: Disk space that these files occupy, in bytes.
    """

    steps: frozenset[int] = frozenset()
    records: frozenset[int] = frozenset()
    files: frozenset[int] = frozenset()
    held: int = 0


# --- identities of source files


def identities(store: Store, paths: Collection[str]) -> dict[str, tuple[Any, ...] | None]:
    """Return each file's identity by path: size, modification time, and inode or ETag.

    A file's identity changes when the file is replaced. The identity is None if the store provides no such data.
    """
    if is_directory(store):
        known: dict[str, tuple[Any, ...] | None] = dict.fromkeys(paths)
        for path in known:
            with suppress(FileNotFoundError):
                stat = store.stat_file(path)
                known[path] = stat.st_size, stat.st_mtime_ns, stat.st_ino
        return known
    found: dict[str, FileInfo | None] = {}
    with suppress(FileNotFoundError, PermissionError, StorageError):
        if store.url.startswith("http"):
            found = {path: store.info(path) for path in paths}  # a web server's listing has no sizes
        else:
            for folder in {path.rpartition("/")[0] for path in paths}:
                found |= {item.path: item for item in store.list(folder)}
    infos = ((path, found.get(path)) for path in paths)
    return {path: None if item is None else (item.size, item.mtime, item.tag) for path, item in infos}


# --- local directories: a journal records the finished steps


def take_over(
    store: LocalStore, whole: Plan, share: Share, journal: Journal, source: Store, *, check: bool, digests: bool
) -> Taken:
    """Return the part of a share that earlier commands finished.

    Also deletes the share's unfinished files, and begins the journal.

    Args:
        whole: The plan for all ranks.
        check, digests: The arguments with which `prepare` was called for the share.
    """
    past, shares = _Past(whole), {share.plan: share}
    earlier = [section for section in journal.earlier() if section.rank < section.world_size <= _MAX_RANKS]
    tried: set[tuple[int, int]] = set()
    for section in earlier:
        key = (section.world_size, section.rank)
        # The earlier command may have had a different number of ranks, so compute the plans of its shares.
        if section.plan not in shares and key not in tried:
            tried.add(key)
            files = [index for index, rank in enumerate(share_out(whole, section.world_size)) if rank == section.rank]
            work = prepare(restricted(whole, files), check=check, digests=digests)
            made = Share.of(whole, files, work, source, check=check)
            shares[made.plan] = made
        if section.plan in shares:  # all other sections belong to a different plan or source
            past.add(shares[section.plan], section)
    taken = past.of(share, store)
    anew = [whole.files[index].path for at, index in enumerate(share.files) if at not in taken.files]
    journal.begin(share.plan, steps=taken.steps, anew=anew if earlier else [])
    store.delete(anew)
    return taken


class _Past:
    """The byte ranges that earlier commands wrote durably, and the digests that they checked."""

    def __init__(self, whole: Plan) -> None:
        self._paths = [file.path for file in whole.files]
        sizes = np.array([file.nbytes for file in whole.files], np.int64)
        self._sizes = sizes
        # Number the bytes of all files consecutively. One unused number between files keeps their ranges from touching.
        self._bases = np.concatenate([[0], np.cumsum(sizes + 1)[:-1]]) if len(sizes) else sizes
        self._ranges: list[tuple[Int64, Int64, Int64]] = []  # (file, start, stop)
        self._records: set[_Record] = set()

    def add(self, share: Share, section: Section) -> None:
        void = np.array([path in section.void for path in self._paths], bool)
        steps = [share.work.steps[index] for index in sorted(section.steps) if index < len(share.work.steps)]
        for step in steps:
            files, lo, hi = self._placed(share, step)
            holds = ~void[files]
            self._ranges.append((files[holds], lo[holds], hi[holds]))
            if holds.all():
                self._records.update(_records(share.work, step.records))

    def _placed(self, share: Share, step: Step) -> tuple[Int64, Int64, Int64]:
        files, starts, nbytes = share.work.written(step)
        files = np.asarray(share.files, np.int64)[files]
        lo = self._bases[files] + starts
        return files[nbytes > 0], lo[nbytes > 0], (lo + nbytes)[nbytes > 0]

    def of(self, share: Share, store: LocalStore) -> Taken:
        """Return the part of a share that earlier commands finished, if its files still exist."""
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
        for index, step in enumerate(share.work.steps):
            _, first, end = self._placed(share, step)
            own = set(step.records.tolist())
            at = np.searchsorted(starts, first, side="right") - 1  # the merged range that may contain the range
            inside = (at >= 0) & (stops[np.maximum(at, 0)] >= end) if len(starts) else np.zeros(len(first), bool)
            if not inside.all() or (not len(first) and not (own and own <= known)):
                continue
            steps.add(index)
            records |= own & known
        held = sum(store.stat_file(self._paths[share.files[at]]).st_blocks * 512 for at in kept)
        return Taken(frozenset(steps), frozenset(records), kept, held)


def _records(work: Work, rows: Int64 | None = None) -> Iterator[_Record]:
    """Yield, for each digest, the location of the bytes that it covers. This identifies the digest in all processes."""
    table = work.records
    columns = (table.sources, table.starts, table.nbytes)
    taken = columns if rows is None else tuple(column[rows] for column in columns)
    for source, start, nbytes in zip(*(column.tolist() for column in taken), strict=True):
        yield work.origins[source], start, nbytes


def _merged(lo: Int64, hi: Int64) -> tuple[Int64, Int64]:
    """Return the ranges, after merging those that touch or overlap."""
    if not len(lo):
        return lo, hi
    order = np.argsort(lo, kind="stable")
    lo, hi = lo[order], np.maximum.accumulate(hi[order])
    first = np.flatnonzero(np.append(True, lo[1:] > hi[:-1]))
    return lo[first], hi[np.append(first[1:], len(lo)) - 1]


# --- leftovers


def clear_strays(store: Store, plan: Plan) -> None:
    """Delete the files that an interrupted command left in a staging directory, unless they are in the plan."""
    if not is_directory(store) or leftover_of(os.path.basename(store.url)) is None:
        return
    wanted = {file.path for file in plan.files}
    folders = {path[: i + 1] for path in wanted for i, char in enumerate(path) if char == "/"}
    pending = [""]
    for folder in pending:  # the loop appends to the list
        for item in store.list(folder):
            if item.kind == "directory" and f"{item.path}/" in folders:
                pending.append(item.path)
            elif item.path not in wanted or item.kind != "file":
                store.delete_tree(item.path)


def left_beside(url: str) -> tuple[str, int] | None:
    """Return the staging directory that an interrupted command left next to `url`, and its size in bytes.

    Returns None if there is no staging directory, or if `url` is remote. The next command continues from the
    staging directory.
    """
    protocol, rest = split_url(url)
    if protocol != "file":
        return None
    head, name = os.path.split(os.path.abspath(os.path.expanduser(rest)))
    parent = LocalStore(head)
    for left in leftovers(parent, name):
        if left.kind == "tmp" and os.path.isdir(parent.path_of(left.path)):
            store = parent.child(left.path)
            held = sum(store.stat_file(inner.path).st_blocks * 512 for inner in store.list(recursive=True))
            return f"{head}/{left.path}", held
    return None


# --- object stores: an object is complete or does not exist


class FinishedObjects:
    """Records the objects that this command has finished, and finds those that an interrupted command finished."""

    def __init__(self, plan: Plan, work: Work, source: Store, verifier: Verifier | None, ledger: Ledger) -> None:
        self._plan = plan
        self._maps = work.maps
        self._verifier = verifier
        self._ledger = ledger
        self._begin = (__version__, source.url, verifier is not None)
        self._entries: dict[str, str] = {}
        self._files = identities(source, plan.catalog.paths())
        worth = [index for index, file in enumerate(plan.files) if ledger.is_worth(file.nbytes)]
        self._contents = {index: self._content(index) for index in worth}

    def take_over(self) -> frozenset[int]:
        """Return the indices of the files that an interrupted command finished, and delete its other files."""
        earlier = self._ledger.earlier
        paths = {file.path: index for index, file in enumerate(self._plan.files) if file.path in earlier}
        taken = {index for path, index in paths.items() if earlier[path].content == self._contents.get(index)}
        for index in taken:
            path = self._plan.files[index].path
            self._ledger.keep(path)
            if self._verifier is not None and earlier[path].checked:
                self._verifier.proved[_records_of(self._plan, index, self._maps)] = True
        self._ledger.drop(path for path, index in paths.items() if index not in taken)
        return frozenset(taken)

    def finished(self, index: int) -> None:
        """Record that a file is complete."""
        content, file, checked = self._contents.get(index), self._plan.files[index], False
        if content is None:
            return
        if self._verifier is not None:
            records = _records_of(self._plan, index, self._maps)
            checked = bool((records >= 0).all() and self._verifier.proved[records].all())
        self._ledger.finished(file.path, file.nbytes, content, checked=checked)

    def _content(self, index: int) -> str:
        """Return a fingerprint (32 hex digits) of a file's planned contents and of the source files that it needs.

        The fingerprint does not depend on which rank writes the file.
        """
        file, state = self._plan.files[index], new_signer()
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
            entry, state = self._plan.catalog.tensors[key], new_signer()
            slices = entry.slices
            paths = {index: slices.paths[index] for index in distinct(slices.files).tolist()}
            state.update(_words((key, entry.dtype, entry.shape, paths, [self._files[path] for path in paths.values()])))
            state.update(_words((sorted(slices.strides.items()), sorted(slices.codecs.items()))))
            for column in (slices.files, slices.starts, slices.nbytes, slices.offsets, slices.sizes, slices.digests):
                if column is not None:
                    state.update(np.ascontiguousarray(column).tobytes())
            self._entries[key] = state.hexdigest()
        return self._entries[key]


def _words(value: Any) -> bytes:
    return repr(value).encode("utf-8", "backslashreplace")


def _made(tensor: OutputTensor) -> tuple[Any, ...]:
    what = (tensor.label, tensor.read) if isinstance(tensor, ComputedTensor) else tensor.parts
    return tensor.name, tensor.dtype, tensor.shape, what


def _records_of(plan: Plan, index: int, maps: Mapping[str, EntryMap]) -> Int64:
    """Return the indices of the digests that cover the source bytes of a file in the result.

    The result also contains -1 if some of these bytes have no digest.
    """
    found: list[Int64] = [np.zeros(0, np.int64)]
    for placement in plan.placements:
        rows = np.flatnonzero(placement.files == index)
        tensor = placement.tensor
        if not len(rows):
            continue
        if isinstance(tensor, ComputedTensor) or not all(part.is_plain for part in tensor.parts):
            for where in (maps[key] for key in tensor.sources):
                found.append(where.records[distinct_boxes(where.entry.slices.offsets, where.entry.slices.sizes)])
        else:
            for part in tensor.parts:
                where = maps[part.source]
                boxes = [piece.source_box for row in rows.tolist() for piece in part.cut(placement.box(row))]
                shape = len(boxes), len(where.entry.shape)
                offsets = np.array([box.offsets for box in boxes], np.int64).reshape(shape)
                sizes = np.array([box.sizes for box in boxes], np.int64).reshape(shape)
                found.append(where.records[pieces(where.entry.slices, offsets, sizes, 1).rows])
    records: Int64 = np.unique(np.concatenate(found))
    return records
