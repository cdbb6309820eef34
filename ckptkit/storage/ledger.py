"""Records which objects of a remote directory are finished, so that an interrupted command can continue.

If the tag (ETag, generation) of an object is unchanged, the object is unchanged. Without tags, nothing is recorded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.digests import hex_digest_of
from ckptkit.storage.owner import read_json
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.store import FileInfo, Store

logger = logging.getLogger(__name__)

FOLDER = ".ckptkit-done"
WORTH = 8 << 20  # smaller objects are not recorded, because a record costs two requests


@dataclass(frozen=True, slots=True)
class Finished:
    """The record of one finished object.

    Attributes:
        content: Fingerprint of the content.
        checked: Whether the whole content was compared with the source's digests.
    """

    path: str
    nbytes: int
    tag: str
    content: str
    checked: bool

    @classmethod
    def from_json(cls, body: Any) -> Finished | None:
        """Return the record that `body` describes, or None if `body` is damaged. Never raises."""
        if not isinstance(body, Mapping):
            return None
        path, nbytes, tag, content, checked = (body.get(name) for name in cls.__slots__)
        if not (isinstance(path, str) and type(nbytes) is int and isinstance(tag, str) and isinstance(content, str)):
            return None
        return cls(path, nbytes, tag, content, checked is True)

    def is_there(self, found: FileInfo | None) -> bool:
        """Return whether `found`, an entry of a listing, is still the recorded object."""
        return found is not None and found.size == self.nbytes and bool(self.tag) and found.tag == self.tag


class Ledger:
    """The objects of a directory that an interrupted attempt and this attempt finished, by path. Thread-safe."""

    def __init__(self, store: Store, earlier: Mapping[str, Finished] | None = None) -> None:
        self._store = store
        self.earlier = dict(earlier or {})
        self.done: dict[str, Finished] = {}

    def is_worth(self, nbytes: int) -> bool:
        """Return whether an object is large enough to be recorded."""
        return nbytes >= WORTH

    def finished(self, path: str, nbytes: int, content: str, *, checked: bool) -> None:
        """Record that an object is complete. An object without a record is written again by a later attempt."""
        try:
            # Listed, not looked up: some gateways return other ETags in headers than in listings.
            found = next((item for item in self._store.list(path.rpartition("/")[0]) if item.path == path), None)
            if found is None or not found.tag or found.size != nbytes:
                return
            record = Finished(path, nbytes, found.tag, content, checked)
            body = json.dumps({name: getattr(record, name) for name in Finished.__slots__}).encode()
            self._store.write(_record_path(path), body, overwrite=True)
            self.done[path] = record
        except OSError as error:
            logger.warning("%s/%s is complete, but a later run will write it again: %s", self._store.url, path, error)

    def keep(self, path: str) -> None:
        """Add an object of `earlier` to `done`, because this attempt keeps it."""
        self.done[path] = self.earlier[path]

    def drop(self, paths: Iterable[str]) -> None:
        """Delete objects of `earlier`. Their records are deleted first."""
        dropped = [path for path in paths if path in self.earlier]
        self._store.delete([_record_path(path) for path in dropped])
        self._store.delete(dropped)
        for path in dropped:
            del self.earlier[path]


def _record_path(path: str) -> str:
    return f"{FOLDER}/{hex_digest_of(path.encode('utf-8', 'surrogatepass'))}.json"


def read_ledger(store: Store, items: Mapping[str, FileInfo]) -> dict[str, Finished]:
    """Return the records of unchanged objects, by path. `items` is a listing of `store`, keyed by path."""

    def read(path: str) -> Finished | None:
        return Finished.from_json(read_json(store, path, 64 << 10))

    with WorkerPool(8, thread_name_prefix="ckptkit-ledger") as pool:
        found = pool.map(read, [path for path in items if path.startswith(f"{FOLDER}/")])
        records = [record for record in found if record is not None]
    return {
        record.path: record
        for record in records
        if record.is_there(items.get(record.path)) and not record.path.startswith(".")
    }
