"""Records finished objects of a directory on an object store, so that an interrupted command can continue.

An object appears whole or not at all. What is said of it once it is there is what it should hold, its size, and the tag
that the store gave it: while the tag is the same, it is that very object. A store that gives no tags tells nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.digests import hex_digest_of
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.store import FileInfo, Store

__all__ = ["FOLDER", "Finished", "Ledger", "read_ledger"]

logger = logging.getLogger(__name__)

FOLDER = ".ckptkit-done"
WORTH = 8 << 20  # bytes of an object from which on it is spoken of: that costs two requests


@dataclass(frozen=True, slots=True)
class Finished:
    """What was said of one object.

    Attributes:
        content: What it holds: another name for other bytes.
        checked: The digests that the source had of its bytes were compared, all of them.
    """

    path: str
    nbytes: int
    tag: str
    content: str
    checked: bool

    @classmethod
    def from_json(cls, body: Any) -> Finished | None:
        """Return what `body` says, None where it is damaged. Never raises."""
        if not isinstance(body, Mapping):
            return None
        path, nbytes, tag, content, checked = (body.get(name) for name in cls.__slots__)
        if not (isinstance(path, str) and type(nbytes) is int and isinstance(tag, str) and isinstance(content, str)):
            return None
        return cls(path, nbytes, tag, content, checked is True)

    def is_there(self, found: FileInfo | None) -> bool:
        """Tell whether a listing shows this very object."""
        return found is not None and found.size == self.nbytes and bool(self.tag) and found.tag == self.tag


class Ledger:
    """What is said of the objects of one directory. Safe for several threads.

    Attributes:
        earlier: What an interrupted run has finished, by path; all of it is there.
        said: What counts as finished in this run.
    """

    def __init__(self, store: Store, earlier: Mapping[str, Finished] | None = None) -> None:
        self._store = store
        self.earlier = dict(earlier or {})
        self.said: dict[str, Finished] = {}

    def is_worth(self, nbytes: int) -> bool:
        """Tell whether an object is so large that it is spoken of."""
        return nbytes >= WORTH

    def finished(self, path: str, nbytes: int, content: str, *, checked: bool) -> None:
        """Say that an object is there whole. Its loss is no loss: the object is then written again."""
        try:
            found = self._store.info(path)
            if found is None or not found.tag or found.size != nbytes:
                return
            said = Finished(path, nbytes, found.tag, content, checked)
            body = json.dumps({name: getattr(said, name) for name in Finished.__slots__}).encode()
            self._store.write(_record_of(path), body, overwrite=True)
            self.said[path] = said
        except OSError as error:
            logger.warning("%s/%s is written, and no later run will know: %s", self._store.url, path, error)

    def keep(self, path: str) -> None:
        """Take over an object that an interrupted run has finished."""
        self.said[path] = self.earlier[path]

    def drop(self, paths: Iterable[str]) -> None:
        """Delete objects that an interrupted run has finished, and what was said of them."""
        gone = [path for path in paths if path in self.earlier]
        # What was said first: what is there and not spoken of is written again.
        self._store.delete([_record_of(path) for path in gone])
        self._store.delete(gone)
        for path in gone:
            del self.earlier[path]


def _record_of(path: str) -> str:
    return f"{FOLDER}/{hex_digest_of(path.encode('utf-8', 'surrogatepass'))}.json"


def read_ledger(store: Store, items: Mapping[str, FileInfo]) -> dict[str, Finished]:
    """Return what was said of objects that are there, by path. `items`: what lies below `store`, by path."""
    records = [path for path in items if path.startswith(f"{FOLDER}/")]

    def one(path: str) -> Finished | None:
        try:
            return Finished.from_json(json.loads(store.read(path, 0, 64 << 10)))
        except (FileNotFoundError, ValueError, RecursionError):
            return None

    with WorkerPool(8, thread_name_prefix="ckptkit-ledger") as pool:
        found = [said for said in pool.map(one, records) if said is not None]
    return {said.path: said for said in found if said.is_there(items.get(said.path)) and not said.path.startswith(".")}
