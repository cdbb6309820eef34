"""Reads the tensors of a catalog into numpy in the simplest way, as a reference.

Independent of the copying engine: slices, strides, codecs and digests directly from the rows of the catalog.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.dtypes import from_safetensors
from ckptkit.catalog.entry import Catalog, Role, TensorEntry, TensorSlice
from ckptkit.storage.store import Store

Raw = tuple[str, tuple[int, ...], bytes]  # dtype, shape, row-major bytes


def slice_array(store: Store, part: TensorSlice, dtype: str, *, check: bool = True) -> np.ndarray:
    """Return the slice as an array of raw elements (void of the item size), after checking its digest."""
    if part.codec is None:
        record, base = None, 0
    else:
        import zstandard

        packed = store.read(part.path, part.codec.start, part.codec.start + part.codec.nbytes)
        record, base = zstandard.ZstdDecompressor().decompressobj().decompress(packed), 0

    def read(start: int, stop: int) -> bytes:
        data = store.read(part.path, start, stop) if record is None else record[start - base : stop - base]
        assert len(data) == stop - start
        return data

    if check and part.digest is not None:
        assert part.digest.algorithm == "crc32"
        found = zlib.crc32(read(part.digest.start, part.digest.start + part.digest.nbytes))
        assert found == part.digest.value, f"{part.path}: CRC-32 of the bytes at {part.digest.start} differs"
    item = dtype_of(dtype).itemsize
    sizes = part.box.sizes
    flat = np.frombuffer(read(part.start, part.start + part.nbytes), f"V{item}")
    if part.strides is None:
        return flat.reshape(sizes)
    return np.lib.stride_tricks.as_strided(flat, sizes, [s * item for s in part.strides])


def tensor_bytes(store: Store, entry: TensorEntry, *, check: bool = True) -> Raw:
    """Return the whole tensor; every element must be covered, and replicas must agree."""
    entry.check_coverage()
    out = np.zeros(entry.shape, f"V{dtype_of(entry.dtype).itemsize}")
    filled = np.zeros(entry.shape, bool)
    for part in entry.slices:
        where = tuple(slice(o, o + s) for o, s in zip(part.box.offsets, part.box.sizes, strict=True))
        data = slice_array(store, part, entry.dtype, check=check)
        if filled[where].all() and filled[where].size:
            assert out[where].tobytes() == data.tobytes(), "two replicas differ"
        out[where] = data
        filled[where] = True
    assert filled.all()
    return entry.dtype, entry.shape, np.ascontiguousarray(out).tobytes()


def expected_bytes(path: Path) -> dict[str, Raw]:
    """Return the tensors of a safetensors file, parsed here."""
    raw = path.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + n])
    header.pop("__metadata__", None)
    return {
        name: (
            from_safetensors(t["dtype"]).name,
            tuple(t["shape"]),
            raw[8 + n + t["data_offsets"][0] : 8 + n + t["data_offsets"][1]],
        )
        for name, t in header.items()
    }


def assert_model_equals(store: Store, catalog: Catalog, expected: Path, prefix: str = "") -> None:
    """Assert that the model of the catalog has these tensors, bit by bit; each FQN starts with `prefix`."""
    wanted = expected_bytes(expected)
    model = catalog.by_role(Role.MODEL)
    missing = [name for name in wanted if prefix + name not in model]
    assert not missing, f"missing {missing[:5]}, there are {list(model)[:5]}"
    for name, raw in wanted.items():
        assert tensor_bytes(store, model[prefix + name]) == raw, name
