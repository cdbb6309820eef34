"""Lays out exported files: safetensors shards, with an index if there are several, or a single `torch.save` file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog
from ckptkit.errors import IntegrityError
from ckptkit.formats.hf.header import (
    INDEX,
    TensorToWrite,
    encode_index,
    lay_out,
    read_header,
    shard_names,
    split_into_shards,
)
from ckptkit.formats.pickles.encode import encode_torch_file
from ckptkit.offline.copying.plan import OutputFile, OutputTensor, Placement, Plan
from ckptkit.storage.store import Store

Placed: TypeAlias = tuple[str, tuple[int, ...], int]  # dtype, shape, byte offset in the file

METADATA = {"format": "pt"}
ADAPTER = "adapter_model.safetensors"


def hf_files(
    catalog: Catalog,
    tensors: Sequence[OutputTensor],
    *,
    max_shard_size: int,
    metadata: Mapping[str, str],
    adapter: bool = False,
) -> tuple[list[OutputFile], list[Placement], tuple[str, ...]]:
    """Lay out tensors as `model*.safetensors`. Return (files, placements, paths to publish last).

    Args:
        metadata: The entries of each header's `__metadata__`, in addition to "format".
        adapter: Whether to write a single file `adapter_model.safetensors`, the only file that PEFT loads.
    """
    ordered = in_disk_order(catalog, tensors)
    headers = [TensorToWrite(t.name, t.dtype, t.shape) for t in ordered]
    sizes = [header.nbytes for header in headers]
    shards = [list(range(len(sizes)))] if adapter else split_into_shards(sizes, max_shard_size)
    names = [ADAPTER] if adapter else shard_names(len(shards))
    files: list[OutputFile] = []
    placements: list[Placement] = []
    weight_map: dict[str, str] = {}
    for index, (name, members) in enumerate(zip(names, shards, strict=True)):
        layout = lay_out([headers[i] for i in members], {**METADATA, **metadata})
        files.append(OutputFile.of_layout(name, layout))
        for i, start in zip(members, layout.starts, strict=True):
            placements.append(Placement.whole(ordered[i], index, start))
            weight_map[ordered[i].name] = name
    if len(shards) == 1:
        return files, placements, (names[0],)
    numel = sum(header.nbytes // dtype_of(header.dtype).itemsize for header in headers)
    files.append(OutputFile.of_bytes(INDEX, encode_index(weight_map, total_size=sum(sizes), total_parameters=numel)))
    return files, placements, (INDEX,)


def in_disk_order(catalog: Catalog, tensors: Sequence[OutputTensor]) -> list[OutputTensor]:
    """Return the tensors in the order of their first sources on disk, so that reads are sequential."""

    def place(tensor: OutputTensor) -> tuple[str, int]:
        for key in tensor.sources:
            slices = catalog.tensors[key].slices
            if len(slices):
                return slices.byte_range(0)[:2]
        return "", 0

    return sorted(tensors, key=place)


def torch_file(
    catalog: Catalog, tensors: Sequence[OutputTensor], *, path: str
) -> tuple[list[OutputFile], list[Placement], tuple[str, ...]]:
    """Lay out tensors in one `torch.save` file at `path`. Return (files, placements, paths to publish last)."""
    ordered = in_disk_order(catalog, tensors)
    layout = encode_torch_file([TensorToWrite(t.name, t.dtype, t.shape) for t in ordered])
    placements = [Placement.whole(tensor, 0, start) for tensor, start in zip(ordered, layout.starts, strict=True)]
    return [OutputFile.of_layout(path, layout)], placements, ()


def check_headers(plan: Plan, store: Store) -> int:
    """Read the headers and the index of a written export, and compare them with the plan by name.

    Returns:
        The number of compared entries, including the entries of the index.

    Raises:
        IntegrityError: A header or the index differs from the plan.
    """
    planned: dict[str, dict[str, Placed]] = {file.path: {} for file in plan.files if file.path.endswith(".safetensors")}
    for item in plan.placements:
        path = plan.files[int(item.files[0])].path
        planned[path][item.tensor.name] = (item.tensor.dtype, tuple(item.tensor.shape), int(item.starts[0]))
    compared = 0
    heads = {file.path: next(iter(file.literals)).data[8:] for file in plan.files if file.path in planned}
    for path, tensors in planned.items():
        header = read_header(store, path)
        compared += len(header.tensors)
        found = {name: (t.dtype, tuple(t.shape), t.start) for name, t in header.tensors.items()}
        if found != tensors or header.metadata != json.loads(heads[path]).get("__metadata__", {}):
            raise IntegrityError(f"{path}: its header does not match the plan. This is a bug, or a faulty disk.")
    if INDEX in plan.last:
        weight_map = json.loads(store.read(INDEX))["weight_map"]
        if weight_map != {name: path for path, tensors in planned.items() for name in tensors}:
            raise IntegrityError(
                f"{INDEX}: it does not list the tensors of the files. This is a bug, or a faulty disk."
            )
        compared += len(weight_map)
    return compared
