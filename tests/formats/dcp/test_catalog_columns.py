"""The content of `.metadata` becomes columns; impossible content is refused by name."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ckptkit.errors import CkptkitError
from ckptkit.formats.dcp import catalog as dcp
from ckptkit.formats.pickles.inert import Record, StorageInfo, TensorMetadata
from ckptkit.storage.local import LocalStore
from tests.conftest import ZOO

FOLDER = ZOO / "dcp_dtensor_2d/ckpt"


def part() -> Any:
    store = LocalStore(FOLDER)
    listing = {info.path: info for info in store.list()}
    return dcp._Part(listing[".metadata"], dcp._load(store, listing[".metadata"]))


def gathered(only: Any) -> Any:
    store = LocalStore(FOLDER)
    builder = dcp._Builder(store, [only], dcp._Files(store, {info.path: info for info in store.list()}))
    builder._gather(only)
    return builder._joined_rows(), builder.objects


def test_the_order_of_storage_entries_does_not_matter() -> None:
    usual, objects = gathered(part())
    only = part()
    places = list(only.storage.items())
    random.Random(0).shuffle(places)
    only.storage = dict(places)
    shuffled, others = gathered(only)
    for name in ("files", "starts", "lengths", "offsets", "sizes", "bounds"):
        assert (getattr(usual, name) == getattr(shuffled, name)).all(), name
    assert objects.keys() == others.keys()


def swap(items: dict[Any, Any], key: Any, value: Any) -> None:
    items[key] = value


def first_tensor(only: Any) -> Any:
    return next(entry for entry in only.entries.values() if isinstance(entry, TensorMetadata) and entry.size)


def first_place(only: Any) -> Any:
    return next((index, info) for index, info in only.storage.items() if index.offset)


UNUSUAL = {
    "a key that is not text": lambda p: swap(p.entries, 7, next(iter(p.entries.values()))),
    "an entry that is neither": lambda p: swap(p.entries, "x", Record()),
    "a shape that is a list": lambda p: setattr(first_tensor(p), "size", [4]),
    "a shape of bools": lambda p: setattr(first_tensor(p), "size", (True, True)),
    "a size below zero": lambda p: setattr(first_tensor(p), "size", (-1, 4)),
    "a huge size": lambda p: setattr(first_tensor(p), "size", (1 << 80, 4)),
    "chunks that are a tuple": lambda p: setattr(first_tensor(p), "chunks", ()),
    "a chunk less": lambda p: first_tensor(p).chunks.pop(),
    "a chunk that is something else": lambda p: first_tensor(p).chunks.__setitem__(0, StorageInfo()),
    "an offset of another length": lambda p: setattr(first_tensor(p).chunks[0], "offsets", (0, 0, 0, 0, 0)),
    "an offset that has no place": lambda p: setattr(first_tensor(p).chunks[0], "offsets", (1 << 40, 1 << 40)),
    "an offset of text": lambda p: setattr(first_tensor(p).chunks[0], "offsets", ("0", "0")),
    "no offsets": lambda p: delattr(first_tensor(p).chunks[0], "offsets"),
    "no properties": lambda p: setattr(first_tensor(p), "properties", None),
    "a place less": lambda p: p.storage.pop(first_place(p)[0]),
    "a place of another tensor": lambda p: setattr(first_place(p)[0], "fqn", "other"),
    "a place without offset": lambda p: setattr(first_place(p)[0], "offset", None),
    "a place twice": lambda p: first_place(p)[1] and swap(p.storage, type(first_place(p)[0])(), first_place(p)[1]),
    "a place that is something else": lambda p: swap(p.storage, first_place(p)[0], 5),
    "a negative start": lambda p: setattr(first_place(p)[1], "offset", -1),
    "a length that is a float": lambda p: setattr(first_place(p)[1], "length", 2.0),
    "a huge length": lambda p: setattr(first_place(p)[1], "length", 1 << 62),
    "a path that is not text": lambda p: setattr(first_place(p)[1], "relative_path", 3),
    "an unknown transform": lambda p: setattr(first_place(p)[1], "transforms", ["gzip"]),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_malformed_metadata_are_refused(kind: str) -> None:
    only = part()
    UNUSUAL[kind](only)
    with pytest.raises(CkptkitError, match=r"\.metadata"):
        gathered(only)
