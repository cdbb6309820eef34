"""Which checkpoint of an object store a load will most likely take, told by a listing alone: its files are fetched
while the records that decide it are on their way."""

from __future__ import annotations

from ckptkit.formats.ckptkit import OBJECTS_NAME
from ckptkit.formats.layout import MANIFEST_NAME, record_path, step_name, step_of_name
from ckptkit.storage.ahead import ReadAhead, fetch_ahead
from ckptkit.storage.snapshot import Snapshot
from ckptkit.storage.store import FileInfo, Store

__all__ = ["fetch_likely"]

_MOST_INDEX = 16 << 20  # bytes; what a guess may cost where it is wrong
_MOST_DATA = 24 << 20
_NOT_LOADED = (".metadata",)  # what other programs read


def fetch_likely(root: Store, view: Store, which: str | int, *, data: bool) -> ReadAhead | None:
    """Begin to fetch the index of the checkpoint that `which` most likely means, and its data where that is little.

    Returns a view of `root` that has these files; None where nothing can be told, or looking costs nothing. Nothing is
    decided by it: a load asks it for what the commit record names, and checks that as ever.

    Args:
        view: What a listing of `root` has just shown.
        data: Whether all of the data is wanted by this process.
    """
    from ckptkit.storage.remote import RemoteStore

    if not isinstance(view, Snapshot) or not isinstance(root, RemoteStore):
        return None
    name = _guess(view, which)
    files = [] if name is None else [item for item in view.list(name, recursive=True) if item.kind == "file"]
    manifests = [item.path for item in files if item.path.rpartition("/")[2] == MANIFEST_NAME]
    if name is None or len(manifests) != 1 or record_path(name) not in (item.path for item in files):
        return None  # not committed, or what a killed save left lies beside it
    folder = manifests[0].removesuffix(MANIFEST_NAME)
    inside = [item for item in files if item.path.startswith(folder)]
    index = [item for item in inside if item.path.removeprefix(folder) in (MANIFEST_NAME, OBJECTS_NAME)]
    rest = [item for item in inside if item not in index and item.path.removeprefix(folder) not in _NOT_LOADED]
    if _size(index) > _MOST_INDEX:
        return None
    return fetch_ahead(root, [index, rest if data and _size(rest) <= _MOST_DATA else []])


def _guess(view: Store, which: str | int) -> str | None:
    text = str(which)
    if text == "latest":
        steps = [(step, item.path) for item in view.list() if (step := step_of_name(item.path)) is not None]
        return max(steps)[1] if steps else None
    if text.isdecimal() and text.isascii() and len(text) <= 18:
        return step_name(int(text))
    return text if step_of_name(text) is not None else None


def _size(items: list[FileInfo]) -> int:
    return sum(item.size for item in items)
