"""Reads the tensors of a catalog into numpy in the simplest way, as a reference.

Independent of the copying engine: slices, strides, codecs and digests directly from the rows of the catalog.
"""

import hashlib
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.dtypes import from_safetensors
from ckptkit.catalog.entry import TensorEntry, TensorSlice
from ckptkit.storage import Store

Contents = dict[str, tuple[str, tuple[int, ...], str]]  # name -> dtype, shape, digest of the row-major bytes


def _slice_array(store: Store, part: TensorSlice, dtype: str) -> np.ndarray:
    """Return the slice as an array of raw elements (void of the item size), after checking its CRC-32."""
    record = None
    if part.codec is not None:
        import zstandard

        packed = store.read(part.path, part.codec.start, part.codec.start + part.codec.nbytes)
        record = zstandard.ZstdDecompressor().decompressobj().decompress(packed)

    def read(start: int, nbytes: int) -> bytes:
        data = store.read(part.path, start, start + nbytes) if record is None else record[start : start + nbytes]
        assert len(data) == nbytes
        return data

    if part.digest is not None and part.digest.algorithm == "crc32":
        found = zlib.crc32(read(part.digest.start, part.digest.nbytes))
        assert found == part.digest.value, f"{part.path}: CRC-32 of the bytes at {part.digest.start} differs"
    item = dtype_of(dtype).itemsize
    flat = np.frombuffer(read(part.start, part.nbytes), f"V{item}")
    if part.strides is None:
        return flat.reshape(part.box.sizes)
    return np.lib.stride_tricks.as_strided(flat, part.box.sizes, [s * item for s in part.strides])


def tensor_bytes(store: Store, entry: TensorEntry) -> bytes:
    """Return the whole tensor, row-major; every element must be covered, and replicas must agree."""
    entry.check_coverage()
    out = np.zeros(entry.shape, f"V{dtype_of(entry.dtype).itemsize}")
    filled = np.zeros(entry.shape, bool)
    for part in entry.slices:
        if part.box.numel == 0:
            continue
        where = tuple(slice(a, b) for a, b in zip(part.box.offsets, part.box.stops, strict=True))
        data = _slice_array(store, part, entry.dtype)
        if filled[where].all():
            assert out[where].tobytes() == data.tobytes(), "two replicas differ"
        out[where] = data
        filled[where] = True
    assert filled.all(), entry.name
    return out.tobytes()


def _content(dtype: str, shape: tuple[int, ...], raw: bytes) -> tuple[str, tuple[int, ...], str]:
    return dtype, tuple(shape), hashlib.sha256(raw).hexdigest()


def contents(store: Store, entries: Mapping[str, TensorEntry]) -> Contents:
    return {name: _content(entry.dtype, entry.shape, tensor_bytes(store, entry)) for name, entry in entries.items()}


def contents_of_file(path: Path) -> Contents:
    """Return the contents of a safetensors file, as its own library reads it."""
    found = safetensors.deserialize(path.read_bytes())
    return {name: _content(from_safetensors(t["dtype"]).name, t["shape"], t["data"]) for name, t in found}


def contents_of_state_dict(state_dict: Mapping[str, object]) -> Contents:
    import torch

    found = {}
    for name, tensor in state_dict.items():
        assert isinstance(tensor, torch.Tensor)
        plain = tensor.detach().cpu().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        found[name] = _content(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), raw)
    return found
