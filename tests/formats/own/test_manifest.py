"""The manifest keeps a catalog exactly, and refuses everything else."""

import dataclasses
import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import (
    Catalog,
    CatalogInfo,
    Codec,
    Digest,
    MeshInfo,
    ObjectEntry,
    Role,
    SliceArray,
    TensorEntry,
    TensorSlice,
)
from ckptkit.errors import CkptkitError, CorruptCheckpointError, UnsafePathError, UnsupportedFormatError, UsageError
from ckptkit.formats.own.columns import pack, unpack
from ckptkit.formats.own.manifest import MESHES, PLACEMENTS, Manifest


def read_manifest(data: bytes) -> Catalog:
    return Manifest.from_bytes(data).catalog()


def part(path, start, offsets, sizes, itemsize=4, digest=7, strides=None, rank=0) -> TensorSlice:
    nbytes = int(np.prod(sizes)) * itemsize
    if strides is not None:
        nbytes = itemsize * (1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)))
    found = None if digest is None else Digest("xxh3_64", digest, start, nbytes)
    return TensorSlice(Box(offsets, sizes), path, start, nbytes, strides, found, rank=rank)


def tensor(name, dtype, shape, slices, role=Role.MODEL, fqn="", state="", key=()) -> TensorEntry:
    return TensorEntry(name, dtype, shape, SliceArray.of(slices, len(shape)), role, fqn, state, key)


def catalog(**changes) -> Catalog:
    tensors = [
        tensor("model.layers.0.weight", "float32", (7, 6),
               [part("__0_0.distcp", 320, (0, 0), (4, 6)),
                part("__1_0.distcp", 64, (4, 0), (3, 6), digest=2**64 - 1, rank=1)],
               fqn="layers.0.weight", key=("model", "layers.0.weight")),
        tensor("model.empty", "bfloat16", (0, 4), [part("__0_0.distcp", 0, (0, 0), (0, 4), 2)], fqn="empty"),
        tensor("model.none", "float32", (0,), [], fqn="none"),
        tensor("optimizer.state.layers.0.weight.exp_avg", "float8_e4m3fn", (2, 3, 4),
               [part("__1_0.distcp", 4096, (0, 0, 0), (2, 3, 4), 1)],
               Role.OPTIMIZER, "layers.0.weight", "exp_avg", ("optimizer", "state", "layers.0.weight", "exp_avg")),
        tensor("step", "int64", (), [part("__0_0.distcp", 9000, (), (), 8)], Role.OTHER),
        tensor("list.0.é", "float32", (4, 3), [part("x/y.bin", 1, (0, 0), (4, 3), strides=(1, 4))], Role.OTHER,
               key=("list", 0, "é")),
    ]  # fmt: skip
    key, digest = ("optimizer", "param_groups", 0, "lr"), Digest("xxh3_64", 5, 100, 200)
    objects = [
        ObjectEntry(".".join(map(str, key)), "__0_0.distcp", 100, 200, digest=digest, role=Role.OPTIMIZER, key=key),
        ObjectEntry("note", encoding="value", value={"a": [1, 2.5, None]}),
    ]
    extra = {
        MESHES: [{"shape": [2], "names": ["dp"]}], PLACEMENTS: {"model.layers.0.weight": [0, ["S(0)"]]}, "more": 1
    }  # fmt: skip
    info = CatalogInfo(
        "ckptkit-sharded", producer="ckptkit", step=12, world_size=2, mesh=MeshInfo((2,), ("dp",)),
        files={"__0_0.distcp": 9999, "__1_0.distcp": 8888, "x/y.bin": 77}, side_files=("config.json",),
        notes=("a note",), extra=extra,
    )  # fmt: skip
    made = Catalog({t.name: t for t in tensors}, {o.name: o for o in objects}, info)
    return dataclasses.replace(made, **changes) if changes else made


def blob() -> bytes:
    return Manifest.of(catalog()).to_bytes()


CATALOGS = {
    "entries of every kind": catalog(),
    "no digests": Catalog({"w": tensor("w", "float32", (2,), [part("a", 0, (0,), (2,), digest=None)], fqn="w")}),
    "nothing": Catalog({}),
}  # fmt: skip


@pytest.mark.parametrize("expected", CATALOGS.values(), ids=CATALOGS)
def test_a_catalog_round_trips(expected):
    found = read_manifest(Manifest.of(expected).to_bytes())
    assert list(found.tensors) == list(expected.tensors) and found.objects == expected.objects
    for name, entry in expected.tensors.items():
        got = found.tensors[name]
        assert list(got.slices) == list(entry.slices)
        assert dataclasses.replace(got, slices=entry.slices) == entry
    extra = {k: dict(v) if k == PLACEMENTS else v for k, v in found.info.extra.items()}
    assert dataclasses.replace(found.info, extra=extra) == expected.info


def vector(name: str = "w", start: int = 0, *, fqn: str = "", key: tuple[str, ...] = (), **changes) -> TensorEntry:
    row = dataclasses.replace(part("a", start, (0,), (2,)), **changes)
    return tensor(name, "float32", (2,), [row], fqn=fqn, key=key)


UNSUITABLE = {
    "a codec": vector(codec=Codec("zstd", 0, 5)), "another digest": vector(digest=Digest("crc32", 1, 0, 8)),
    "a digest of other bytes": vector(start=4, digest=Digest("xxh3_64", 1, 0, 16)),
    "another FQN": vector(fqn="other"), "another key": vector("w.x", key=("w", "y")),
}  # fmt: skip


@pytest.mark.parametrize("entry", UNSUITABLE.values(), ids=UNSUITABLE)
def test_values_that_a_manifest_cannot_hold_are_refused(entry):
    with pytest.raises(UnsupportedFormatError):
        Manifest.of(Catalog({entry.name: entry})).to_bytes()


def test_info_that_is_not_json_is_refused():
    with pytest.raises(UsageError, match=r"extra\.when"):
        Manifest.of(catalog(info=CatalogInfo("x", extra={"when": object()}))).to_bytes()


def changed(**edits) -> bytes:
    """Return the manifest with columns edited by a function, or without them; `header` edits the header."""
    columns = unpack(blob(), file="m")
    arrays, header = {k: v.copy() for k, v in columns.arrays.items()}, json.loads(json.dumps(columns.header))
    edits.pop("header", lambda _: None)(header)
    for name, edit in edits.items():
        column = arrays.pop(name.replace("__", "."))
        if edit is not None:
            arrays[name.replace("__", ".")] = edit(column)
    return pack(arrays, header)


def at(index: int, value: int):
    def edit(column):
        column[index] = value
        return column

    return edit


def texts(column: str, *values: str) -> dict[str, Callable[[Any], Any]]:
    """Return the edits that put these texts into a column."""
    data = [value.encode() for value in values]
    return {
        column: lambda _: np.frombuffer(b"".join(data), np.uint8),
        f"{column}__ends": lambda _: np.cumsum([len(text) for text in data]),
    }


DAMAGES = {
    "a column is gone": {"slice__start": None},
    "a column is too short": {"slice__nbytes": lambda c: c[:-1]},
    "a column has another dtype": {"slice__start": lambda c: c.astype(np.uint64)},
    "a file index is past the table": {"slice__file": at(0, 99)},
    "a file index is negative": {"slice__file": at(0, -1)},
    "a start is negative": {"slice__start": at(0, -8)},
    "a start is past any file": {"slice__start": at(0, 2**62 + 1)},
    "a length is not that of its box": {"slice__nbytes": at(0, 5)},
    "a slice lies outside of its shape": {"slice__offset": at(0, 5)},
    "an offset is negative": {"slice__offset": at(2, -1)},
    "a size wraps around": {"slice__size": at(0, 2**63 - 1)},
    "a shape is negative": {"tensor__shape": at(0, -7)},
    "a shape is too large": {"tensor__shape": at(0, 2**62)},
    "the pointers go back": {"tensor__stop": at(1, 1)},
    "the pointers go too far": {"tensor__stop": at(-1, 99)},
    "a dtype index is past the table": {"tensor__dtype": at(0, 200)},
    "a role is unknown": {"tensor__role": at(0, 9)},
    "a dimension too many": {"tensor__ndim": at(0, 3)},
    "a placement is past the table": {"tensor__placement": at(0, 4)},
    "a stride is of no slice": {"stride__row": at(0, 77)},
    "strides span other bytes": {"stride__value": at(0, 9)},
    "a text table is damaged": {"names__ends": at(0, 10**9)},
    "a path part count is wrong": {"tensor__parts": at(0, 9)},
    "an object's file is past the table": {"object__file": at(0, 50)},
    "an encoding is unknown": {"object__encoding": at(0, 7)},
    "the format is missing": {"header": lambda h: h.pop("format")},
    "a header field is of another type": {"header": lambda h: h.update(dtypes={"a": 1})},
    "a placement is malformed": {"header": lambda h: h.update(placements=[["x", []]])},
    "info is malformed": {"header": lambda h: h["info"].update(files=[1])},
    "a note is not text": {"header": lambda h: h["info"].update(notes=[["x"]])},
    "uninterpreted tensors are malformed": {"header": lambda h: h["info"].setdefault("extra", {}).update(opaque=[1])},
    "a mesh is malformed": {"header": lambda h: h["info"].update(mesh={"shape": "2"})},
}
REFUSED: dict[str, tuple[dict[str, Any], type[CkptkitError], str]] = {
    **{fault: (edits, CorruptCheckpointError, "") for fault, edits in DAMAGES.items()},
    **{f"the path {path!r}": (texts("paths", path, "__1_0.distcp", "x/y.bin"), UnsafePathError, "")
       for path in ("../x", "/etc/passwd", "a/../../b", "a\\b", "a\0b", "")},
    "a newer format": ({"header": lambda h: h.update(format=2)}, UnsupportedFormatError, "format is 2"),
    "a name listed twice": (
        {**texts("names", "model.empty", "model.empty", "model.none", "step", "step", "w"),
         "tensor__fqn": lambda c: np.zeros(12, np.int32), "tensor__parts": lambda c: np.zeros(6, np.uint8),
         "tensor__part": lambda c: np.zeros(0, np.int32)}, CorruptCheckpointError, "twice"),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_a_damaged_hostile_or_newer_manifest_is_refused(fault):
    edits, error, text = REFUSED[fault]
    with pytest.raises(error, match=text or None):
        read_manifest(changed(**edits))


def test_a_truncated_manifest_or_one_with_a_false_header_length_is_refused():
    data = blob()
    claiming = (struct.pack("<Q", claimed) + data[8:] for claimed in (2**63, 2**40, 10**6))
    for damaged in (*(data[:length] for length in (0, 5, 8, 100, -1)), *claiming):
        with pytest.raises(CorruptCheckpointError):
            read_manifest(damaged)
