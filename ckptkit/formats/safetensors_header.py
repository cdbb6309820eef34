"""What comes before the data of a safetensors file, and how tensors fall into the shards of a Hugging Face model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.errors import UnsupportedFormatError

__all__ = ["HeaderTensor", "Layout", "encode_header", "encode_index", "lay_out", "shard_names", "split_into_shards"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One tensor of a file, as its header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        result = dtype_of(self.dtype).itemsize
        for size in self.shape:
            result *= size
        return result


@dataclass(frozen=True, slots=True)
class Layout:
    """A file laid out.

    Attributes:
        header: The bytes before the data: length, JSON, padding to a multiple of 8.
        starts: Byte offset in the file, of each tensor in the order it was given.
        nbytes: Of the whole file.
    """

    header: bytes
    starts: tuple[int, ...]
    nbytes: int


def encode_header(
    tensors: Sequence[HeaderTensor], starts: Sequence[int], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header for tensors that start at these bytes of the data section.

    Raises:
        UnsupportedFormatError: A dtype has no name in safetensors, or a name is not allowed or there twice.
    """
    fields: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for tensor, start in zip(tensors, starts, strict=True):
        if tensor.name in fields or tensor.name == "__metadata__":
            raise UnsupportedFormatError(f"tensor name {tensor.name!r} is there twice, or not allowed in safetensors.")
        name = dtype_of(tensor.dtype).safetensors
        if name is None:
            raise UnsupportedFormatError(f"tensor {tensor.name!r}: safetensors has no dtype {tensor.dtype}.")
        span = [start, start + tensor.nbytes]
        fields[tensor.name] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": span}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)  # data starts 8-aligned, as the format's own writer pads
    return len(text).to_bytes(8, "little") + text


def lay_out(tensors: Sequence[HeaderTensor], metadata: Mapping[str, str] | None = None) -> Layout:
    """Lay a file out: widest elements first, so that each tensor is aligned to its own; else in the given order."""
    order = sorted(range(len(tensors)), key=lambda i: -_alignment(tensors[i].dtype))
    starts = [0] * len(tensors)
    at = 0
    for i in order:
        starts[i] = at
        at += tensors[i].nbytes
    header = encode_header([tensors[i] for i in order], [starts[i] for i in order], metadata)
    return Layout(header, tuple(len(header) + start for start in starts), len(header) + at)


def _alignment(name: str) -> int:
    return min(8, dtype_of(name).itemsize)


def split_into_shards(nbytes: Sequence[int], max_shard_size: int) -> list[list[int]]:
    """Return the tensors of each shard, in the given order: a shard is closed before it would be too large.

    A tensor larger than a shard gets one of its own.
    """
    shards: list[list[int]] = [[]]
    size = 0
    for i, count in enumerate(nbytes):
        if shards[-1] and size + count > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(i)
        size += count
    return shards


def shard_names(count: int) -> list[str]:
    """Return the file names of `count` shards: "model.safetensors", or "model-00001-of-00002.safetensors", ..."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def encode_index(weight_map: Mapping[str, str], *, total_size: int, total_parameters: int) -> bytes:
    """Return the text of `model.safetensors.index.json`."""
    metadata = {"total_parameters": total_parameters, "total_size": total_size}
    document = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
