"""That the files of a source stay what they are while a result is made of them: of other formats, nobody keeps them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from ckptkit.catalog.entry import Catalog
from ckptkit.errors import CorruptCheckpointError, StorageError
from ckptkit.formats.detect import Source
from ckptkit.storage.local import LocalStore
from ckptkit.storage.store import FileInfo, Store

__all__ = ["Seen", "check_unchanged", "look_at"]

Seen = Mapping[str, Any]
"""What tells each file from another one in its place, by path; None where nothing does."""

_Found = dict[str, FileInfo | None]


def look_at(source: Source) -> Seen:
    """Return what tells the files that tensors of the source lie in from others."""
    store, paths = source.store, _paths(source.catalog)
    if isinstance(store, LocalStore):
        return {path: _stat(store, path) for path in paths}
    return {path: None if item is None else (item.size, item.mtime, item.tag) for path, item in _list(store, paths)}


def check_unchanged(source: Source, seen: Seen) -> None:
    """Compare the files of a source with what was seen of them.

    Raises:
        CorruptCheckpointError: One was changed or replaced: what was read is of two checkpoints, perhaps.
    """
    changed = _differing(look_at(source), seen)
    if changed and not isinstance(source.store, LocalStore):
        # Some gateways give another tag each time: that says nothing.
        looks = [look_at(source) for _ in range(2)]
        restless = _differing(*looks)
        changed = [path for path in changed if path not in restless or _differs(looks[0], seen, path, tags=False)]
    if changed:
        error = CorruptCheckpointError(
            f"{source.url}/{changed[0]} was changed or replaced while it was read: the result could be of two "
            "checkpoints. Nothing was published; run the command again once nobody writes there."
        )
        error.checkpoint = source.url
        raise error


def _differing(now: Seen, seen: Seen) -> list[str]:
    return [path for path in seen if _differs(now, seen, path)]


def _differs(now: Seen, seen: Seen, path: str, *, tags: bool = True) -> bool:
    """Tell whether a file is another one; what could not be looked at is none."""
    one, other = now.get(path), seen[path]
    if one is None or other is None:
        return False
    return bool(one != other if tags else one[:2] != other[:2])


def _paths(catalog: Catalog) -> list[str]:
    lists = {id(entry.slices.paths): entry.slices.paths for entry in catalog.tensors.values()}  # most share one
    return sorted({path for paths in lists.values() for path in paths})


def _stat(store: LocalStore, path: str) -> Any:
    with contextlib.suppress(FileNotFoundError):
        found = store.stat_file(path)
        return found.st_size, found.st_mtime_ns, found.st_ino
    return None


def _list(store: Store, paths: list[str]) -> list[tuple[str, FileInfo | None]]:
    found: _Found = {}
    with contextlib.suppress(FileNotFoundError, PermissionError, StorageError):  # who can't look is told nothing
        if store.url.startswith("http"):
            found = {path: store.info(path) for path in paths}  # what a page links to says nothing of it
        else:
            for folder in {path.rpartition("/")[0] for path in paths}:
                found |= {item.path: item for item in store.list(folder)}
    return [(path, found.get(path)) for path in paths]
