"""Going on with what an interrupted run had copied: what its steps were steps of, and whether its files are there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import xxhash

from ckptkit.offline.jobs import Work
from ckptkit.offline.plan import ComputedTensor, OutputFile, OutputTensor, Plan
from ckptkit.storage.local import LocalStore
from ckptkit.storage.staging import leftover_of, staging_name
from ckptkit.storage.store import Store, split_url
from ckptkit.version import __version__

if TYPE_CHECKING:
    from ckptkit.storage.journal import Journal

__all__ = ["fingerprint", "held_bytes", "left_beside", "take_over"]


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


def take_over(store: LocalStore, files: tuple[OutputFile, ...], journal: Journal, plan: str) -> frozenset[int]:
    """Return the steps that need not be done again, and begin the journal of this run.

    Where there are none, the staging directory is empty afterwards; else it has just the files of the plan.
    """
    steps = journal.steps(plan)
    there = {item.path: item for item in store.list(recursive=True)}
    whole = all(file.path in there and there[file.path].size == file.nbytes for file in files)
    kept = {file.path for file in files} if steps and whole else set()
    for item in store.list():
        if item.kind == "directory" and any(path.startswith(f"{item.path}/") for path in kept):
            continue
        if item.path not in kept:
            store.delete_tree(item.path)
    journal.begin(plan, anew=not kept)
    return steps if kept else frozenset()


def held_bytes(store: LocalStore) -> int:
    """Return the bytes of the disk that the files in a staging directory hold already."""
    return sum(store.stat_file(item.path).st_blocks * 512 for item in store.list(recursive=True))


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
            return f"{head}/{item.path}", held_bytes(parent.child(item.path))
    return None
