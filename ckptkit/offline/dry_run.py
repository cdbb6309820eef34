"""Finds what a real convert or reshard would refuse, without writing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from ckptkit.catalog.entry import TensorEntry
from ckptkit.errors import CkptkitError, IncompleteCheckpointError
from ckptkit.formats.detect import Source
from ckptkit.offline.copying.coverage import used_sources
from ckptkit.offline.copying.plan import Plan
from ckptkit.offline.publish import OutputPlace
from ckptkit.offline.verify import check_committed
from ckptkit.storage.store import Store

__all__ = ["check_source_files", "refusals"]


def refusals(plan: Plan, source: Source, place: OutputPlace, *, check: bool) -> Iterator[str]:
    """Yield the reasons why a real run would fail: DST exists, is not writable or has too little space, or source files
    are missing, truncated or not the committed ones (`check`). Whether an object store accepts writes is not tested."""
    used = [plan.catalog.tensors[key] for key in used_sources(plan)]
    checks: list[Callable[[], None]] = [partial(check_source_files, source.store, used), partial(place.check, plan)]
    if check:
        checks[1:1] = [partial(check_committed, item) for item in source.checkpoints]
    for refuse in checks:
        try:
            refuse()
        except (CkptkitError, OSError) as error:
            yield str(error)


def check_source_files(store: Store, entries: Iterable[TensorEntry]) -> None:
    """Raise if a file with slices is missing or truncated, before anything is written.

    Raises:
        IncompleteCheckpointError: Names the file, and the ranks that wrote it.
    """
    ranks: dict[str, set[int]] = {}
    ends: dict[str, int] = {}
    for entry in entries:
        slices = entry.slices
        if slices.opaque:  # already compared when the metadata were read
            continue
        records = slices.records()
        for path, start, nbytes in records:
            end = 0 if slices.codecs else start + nbytes
            if ends.setdefault(path, end) < end:
                ends[path] = end
        if slices.ranks is not None:
            for (path, _, _), rank in zip(records, slices.ranks.tolist(), strict=True):
                ranks.setdefault(path, set()).add(rank)
    folders = {path.rpartition("/")[0] for path in ends}
    there = {item.path: item.size for folder in folders for item in store.list(folder)}
    for path, end in ends.items():
        size = there.get(path, -1)
        if size < 0:  # a link, or missing in the listing
            info = store.info(path)
            size = -1 if info is None else info.size
        if size < end:
            whose = sorted(rank for rank in ranks.get(path, ()) if rank >= 0)
            owner = f", which rank {', '.join(map(str, whose))} wrote," if whose else ""
            what = "is missing" if size < 0 else f"has {size} bytes, {end} are needed"
            raise IncompleteCheckpointError(f"{store.url}/{path}{owner} {what}. Nothing was written.")
