"""Reads whole tensors of a catalog with numpy alone: slow and simple, as a reference."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from ckptkit.catalog.dtypes import dtype
from ckptkit.catalog.entry import TensorEntry
from ckptkit.storage import Store


def entry_bytes(store: Store, entry: TensorEntry) -> bytes:
    """Return the tensor row-major. Every element must be covered, and replicas must agree."""
    itemsize = dtype(entry.dtype).itemsize
    kind = np.dtype((np.void, itemsize))
    whole = np.zeros(entry.shape, kind)
    filled = np.zeros(entry.shape, bool)
    for part in entry.slices:
        if part.box.numel == 0:
            continue
        if part.codec is None:
            raw = store.read(part.path, part.start, part.start + part.nbytes)
        else:
            import zstandard

            record = store.read(part.path, part.codec.start, part.codec.start + part.codec.nbytes)
            raw = zstandard.ZstdDecompressor().decompressobj().decompress(record)[part.start : part.start + part.nbytes]
        assert len(raw) == part.nbytes
        flat = np.frombuffer(raw, kind)
        if part.strides is None:
            view = flat.reshape(part.box.sizes)
        else:
            view = np.lib.stride_tricks.as_strided(flat, part.box.sizes, [step * itemsize for step in part.strides])
        index = tuple(slice(a, b) for a, b in zip(part.box.offsets, part.box.stops, strict=True))
        if filled[index].any():
            assert filled[index].all()
            assert whole[index].tobytes() == np.ascontiguousarray(view).tobytes()
        whole[index] = view
        filled[index] = True
    assert filled.all(), entry.name
    return whole.tobytes()


def contents(store: Store, entries: Mapping[str, TensorEntry]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return name -> (dtype, shape, digest of the bytes)."""
    return {
        name: (entry.dtype, entry.shape, hashlib.sha256(entry_bytes(store, entry)).hexdigest())
        for name, entry in entries.items()
    }


def state_dict_contents(state_dict: Mapping[str, object]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return name -> (dtype, shape, digest of the bytes) of torch tensors."""
    import torch

    found = {}
    for name, tensor in state_dict.items():
        assert isinstance(tensor, torch.Tensor)
        plain = tensor.detach().cpu().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        found[name] = (str(plain.dtype).removeprefix("torch."), tuple(plain.shape), hashlib.sha256(raw).hexdigest())
    return found
