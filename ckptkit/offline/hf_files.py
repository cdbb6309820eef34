"""The files of a Hugging Face model: safetensors shards, and the index where there are several."""

from __future__ import annotations

from collections.abc import Sequence

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog
from ckptkit.formats.safetensors_header import (
    INDEX,
    HeaderTensor,
    encode_index,
    lay_out,
    shard_names,
    split_into_shards,
)
from ckptkit.offline.plan import Literal, OutputFile, OutputTensor, Placement

__all__ = ["adapter_files", "hf_files", "in_disk_order"]

METADATA = {"format": "pt"}
ADAPTER = "adapter_model.safetensors"


def hf_files(
    catalog: Catalog, tensors: Sequence[OutputTensor], *, max_shard_size: int
) -> tuple[list[OutputFile], list[Placement], tuple[str, ...]]:
    """Lay tensors out as `model*.safetensors`; returns (files, placements, what is published last)."""
    ordered = in_disk_order(catalog, tensors)
    headers = [HeaderTensor(t.name, t.dtype, t.shape) for t in ordered]
    shards = split_into_shards([header.nbytes for header in headers], max_shard_size)
    names = shard_names(len(shards))
    files: list[OutputFile] = []
    placements: list[Placement] = []
    weight_map: dict[str, str] = {}
    for index, (name, members) in enumerate(zip(names, shards, strict=True)):
        layout = lay_out([headers[i] for i in members], METADATA)
        files.append(OutputFile(name, layout.nbytes, (Literal(0, layout.header),)))
        for i, start in zip(members, layout.starts, strict=True):
            placements.append(Placement.whole(ordered[i], index, start))
            weight_map[ordered[i].name] = name
    if len(shards) == 1:
        return files, placements, (names[0],)
    total = sum(header.nbytes for header in headers)
    numel = sum(header.nbytes // dtype_of(header.dtype).itemsize for header in headers)
    files.append(OutputFile.of_bytes(INDEX, encode_index(weight_map, total_size=total, total_parameters=numel)))
    return files, placements, (INDEX,)


def in_disk_order(catalog: Catalog, tensors: Sequence[OutputTensor]) -> list[OutputTensor]:
    """Return tensors by where their first source lies on the disk, so that writing them reads forwards."""

    def place(tensor: OutputTensor) -> tuple[str, int]:
        for key in tensor.sources:
            slices = catalog.tensors[key].slices
            if len(slices):
                return slices.paths[int(slices.files[0])], int(slices.starts[0])
        return "", 0

    return sorted(tensors, key=place)


def adapter_files(
    catalog: Catalog, tensors: Sequence[OutputTensor]
) -> tuple[list[OutputFile], list[Placement], tuple[str, ...]]:
    """Lay tensors out as `adapter_model.safetensors`, the one file PEFT reads."""
    ordered = in_disk_order(catalog, tensors)
    layout = lay_out([HeaderTensor(t.name, t.dtype, t.shape) for t in ordered], METADATA)
    file = OutputFile(ADAPTER, layout.nbytes, (Literal(0, layout.header),))
    placements = [Placement.whole(tensor, 0, start) for tensor, start in zip(ordered, layout.starts, strict=True)]
    return [file], placements, (ADAPTER,)
