"""Training states for the tests of DCP: equal on every rank, and compared byte for byte."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.formats.interop_cases import same

LAYOUTS = {
    "plain@1": (1, (1,), ()),
    "shard0@2": (2, (2,), ((Shard(0),),)),
    "shard0@3": (3, (3,), ((Shard(0),),)),
    "shard1@2": (2, (2,), ((Shard(1),),)),
    "replicate@2": (2, (2,), ((Replicate(),),)),
    "hsdp@4": (4, (2, 2), ((Replicate(), Shard(0)),)),
    "tp@4": (4, (2, 2), ((Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)))),
}
DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128",
]  # fmt: skip
SHAPES = [(7, 6), (64, 48), (5, 3, 2), (1, 4), (0, 4)]
OBJECTS = {"lr": 1e-3, "betas": (0.9, 0.99), "names": ["a", "b"], "none": None, "set": {1, 2}, "bytes": b"\x00\xff"}


def values(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Return random bytes of this dtype, each 0 or 1, so that they are valid for every dtype."""
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    count = int(torch.tensor(shape).prod()) if shape else 1
    raw = torch.randint(0, 2, (count * kind.itemsize,), dtype=torch.uint8, generator=generator)
    if dtype in ("float32", "bfloat16", "float64"):
        return torch.randn(shape, generator=generator).to(kind)
    return raw.view(kind).reshape(shape)


def state(layout: str, *, zeros: bool = False) -> dict[str, Any]:
    """Return a nested state: DTensors of every placement of the layout, plain tensors of every dtype, objects."""
    _, mesh_shape, placements = LAYOUTS[layout]
    made: dict[str, Any] = {"model": {}, "extra": {"objects": dict.fromkeys(OBJECTS) if zeros else dict(OBJECTS)}}
    for i, dtype in enumerate(DTYPES):
        made["model"][f"plain.{dtype}"] = values((5, 3), dtype, i)
    made["model"]["scalar"] = torch.tensor(2.5)
    made["model"]["large"] = values((700, 1100), "float32", 99)
    made["extra"]["list"] = [values((3,), "int64", 5), {"deep": values((4, 4), "float32", 6)}]
    if placements:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
        for i, placement in enumerate(placements):
            for j, shape in enumerate(SHAPES):
                full = values(shape, "bfloat16" if j % 2 else "float32", 10 * i + j)
                made["model"][f"d{i}.s{j}"] = distribute_tensor(full, mesh, placement, src_data_rank=None)
    else:
        for j, shape in enumerate(SHAPES):
            made["model"][f"d0.s{j}"] = values(shape, "bfloat16" if j % 2 else "float32", j)
    return _zeroed(made) if zeros else made


def _zeroed(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _zeroed(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_zeroed(value) for value in tree]
    if isinstance(tree, DTensor):
        local = torch.zeros_like(tree.to_local())
        return DTensor.from_local(local, tree.device_mesh, tree.placements, shape=tree.shape, stride=tree.stride())
    if isinstance(tree, torch.Tensor):
        return torch.zeros(tree.shape, dtype=torch.uint8).to(tree.dtype) if tree.dtype.itemsize > 1 else tree.clone()
    return tree


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Return where two states differ on this rank, comparing tensors byte for byte."""
    if isinstance(expected, dict):
        return [d for key in expected for d in differences(found[key], expected[key], f"{path}.{key}")]
    if isinstance(expected, list) and any(isinstance(v, (torch.Tensor, dict)) for v in expected):
        return [d for i, value in enumerate(expected) for d in differences(found[i], value, f"{path}.{i}")]
    if isinstance(expected, DTensor):
        return differences(found.to_local(), expected.to_local(), path)
    return [] if same(found, expected) else [f"{path}: {found!r}"]
