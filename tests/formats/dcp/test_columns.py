"""`.metadata` read in bulk is what it is one by one; the unusual is left to the latter, which says what is wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ckptkit.catalog.entry import Catalog
from ckptkit.formats.dcp import catalog as dcp
from ckptkit.formats.dcp import columns
from ckptkit.formats.dcp.columns import in_bulk
from ckptkit.formats.pickles.inert import Record, StorageInfo
from ckptkit.storage.local import LocalStore
from tests.conftest import ZOO

FOLDERS = sorted(
    path.parent
    for path in ZOO.rglob(".metadata")
    if not path.relative_to(ZOO).parts[0].startswith(("hostile", "broken"))
)


def part(folder: Path) -> Any:
    store = LocalStore(folder)
    listing = {info.path: info for info in store.list()}
    return dcp._Part(".metadata", dcp._load(store, listing[".metadata"]))


def rows(catalog: Catalog) -> Any:
    tensors = {n: (e.dtype, e.shape, e.role, e.fqn, e.key, list(e.slices)) for n, e in catalog.tensors.items()}
    return tensors, catalog.objects, catalog.info


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ZOO)))
def test_a_catalog_is_the_same_in_bulk_and_one_by_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = part(folder)
    assert in_bulk(only.entries, only.storage, lambda path: 0) is not None
    found = rows(dcp.open_catalog(LocalStore(folder)))
    monkeypatch.setattr(dcp, "in_bulk", lambda *_: None)
    assert rows(dcp.open_catalog(LocalStore(folder))) == found


def test_places_in_any_order_find_their_slices() -> None:
    only = part(ZOO / "dcp_hsdp_2x2/ckpt")
    usual = in_bulk(only.entries, only.storage, len)
    places = list(only.storage.items())
    random.Random(0).shuffle(places)
    shuffled = in_bulk(only.entries, dict(places), len)
    assert usual is not None and shuffled is not None
    for name in ("files", "starts", "lengths", "offsets", "sizes", "bounds"):
        assert (getattr(usual[0], name) == getattr(shuffled[0], name)).all(), name
    assert usual[1] == shuffled[1]


def swap(items: dict[Any, Any], key: Any, value: Any) -> None:
    items[key] = value


def first_tensor(only: Any) -> Any:
    return next(entry for entry in only.entries.values() if isinstance(entry, columns.TensorMetadata) and entry.size)


def first_place(only: Any) -> Any:
    return next((index, info) for index, info in only.storage.items() if index.offset)


UNUSUAL = {
    "a key that is no text": lambda p: swap(p.entries, 7, next(iter(p.entries.values()))),
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
    "a path that is no text": lambda p: setattr(first_place(p)[1], "relative_path", 3),
    "an unknown transform": lambda p: setattr(first_place(p)[1], "transforms", ["gzip"]),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_is_unusual_is_not_read_in_bulk(kind: str) -> None:
    only = part(ZOO / "dcp_dtensor_2d/ckpt")
    assert in_bulk(only.entries, only.storage, lambda _: 0) is not None
    UNUSUAL[kind](only)
    assert in_bulk(only.entries, only.storage, lambda _: 0) is None
