"""Training states for the tests of DCP, equal on every rank: saved, loaded, and compared byte for byte."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckptkit import DCPLoadPlanner, DCPReader, DCPSavePlanner, DCPWriter
from tests.formats.interop_cases import BYTES, NUMBERS, blank, of_dtype, same

LAYOUTS = {
    "plain@1": (1, (1,), ()),
    "shard0@2": (2, (2,), ((Shard(0),),)),
    "shard0@3": (3, (3,), ((Shard(0),),)),
    "shard1@2": (2, (2,), ((Shard(1),),)),
    "replicate@2": (2, (2,), ((Replicate(),),)),
    "hsdp@4": (4, (2, 2), ((Replicate(), Shard(0)),)),
    "tp@4": (4, (2, 2), ((Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0)))),
}
SHAPES = [(7, 6), (64, 48), (5, 3, 2), (1, 4), (0, 4)]
OBJECTS = {"lr": 1e-3, "betas": (0.9, 0.99), "names": ["a", "b"], "none": None, "set": {1, 2}, "bytes": b"\x00\xff"}


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def state(layout: str) -> dict[str, Any]:
    """Return a nested state: DTensors of every placement of the layout, plain tensors of every dtype, objects."""
    _, mesh_shape, placements = LAYOUTS[layout]
    made: dict[str, Any] = {"model": {}, "extra": {"objects": dict(OBJECTS)}}
    dtypes = {*NUMBERS, *BYTES[:2]} - {"complex32"}  # torch warns about it
    made["model"].update({f"plain.{dtype}": of_dtype(dtype) for dtype in sorted(dtypes)})
    made["model"]["scalar"] = torch.tensor(2.5)
    made["model"]["large"] = values((700, 1100), 99)
    made["extra"]["list"] = [torch.arange(3), {"deep": values((4, 4), 6)}]
    for i, placement in enumerate(placements or [()]):
        for j, shape in enumerate(SHAPES):
            full = values(shape, 10 * i + j, torch.bfloat16 if j % 2 else torch.float32)
            if placement:
                mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
                full = distribute_tensor(full, mesh, placement, src_data_rank=None)
            made["model"][f"d{i}.s{j}"] = full
    return made


def save(place: Any, made: dict[str, Any], planner: Any = None, **options: Any) -> Any:
    """Save with `dcp.save` and our writer, or the given one; `planner=True` is ours, False that of torch."""
    writer = place if isinstance(place, dcp.StorageWriter) else DCPWriter(place, sync=False)
    options.setdefault("no_dist", not dist.is_initialized())
    planner = DCPSavePlanner() if planner is True else planner or None
    return dcp.save(made, storage_writer=writer, planner=planner, **options)


def load(place: Any, target: dict[str, Any], planner: Any = None, **options: Any) -> dict[str, Any]:
    """Fill a state in place with `dcp.load` and our reader, or the given one, and a planner as in `save`."""
    reader = place if isinstance(place, dcp.StorageReader) else DCPReader(place)
    options.setdefault("no_dist", not dist.is_initialized())
    planner = DCPLoadPlanner() if planner is True else planner or None
    dcp.load(target, storage_reader=reader, planner=planner, **options)
    return target


def assert_loads(place: Any, made: dict[str, Any], planner: Any = None, **options: Any) -> None:
    """Load a checkpoint into a blank copy of a state, which must become equal to it on this rank."""
    assert differences(load(place, blank(made), planner, **options), made) == []


def failure(call: Callable[..., Any], *args: Any, **options: Any) -> BaseException | None:
    """Return the error of a step of torch on the lowest rank that failed."""
    try:
        call(*args, **options)
    except dcp.api.CheckpointException as error:
        found: BaseException = error.failures[min(error.failures)][0]
        return found
    return None


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Return where two states differ on this rank, comparing tensors byte for byte."""
    if isinstance(expected, dict):
        return [d for key in expected for d in differences(found[key], expected[key], f"{path}.{key}")]
    if isinstance(expected, list) and any(isinstance(v, (torch.Tensor, dict)) for v in expected):
        return [d for i, value in enumerate(expected) for d in differences(found[i], value, f"{path}.{i}")]
    if isinstance(expected, DTensor):
        return differences(found.to_local(), expected.to_local(), path)
    return [] if same(found, expected) else [f"{path}: {found!r}"]
