"""Small runs and conversions on an object store, and what tests compare of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.offline.convert import convert
from ckptkit.offline.reshard import reshard
from ckptkit.storage import open_store
from tests.checkpoint import states
from tests.fsdp.models import whole

Options = dict[str, Any]
UNEVEN = Path(__file__).parents[1] / "zoo" / "dcp_fsdp2_uneven_w4" / "ckpt"
MANY: Options = {"max_shard_size": "1kB"}  # ten files
VARYING = ("README.md", "checkpoint.json", "manifest.safetensors", "SHA256SUMS")  # times, writers, and their digests


def state_of(seed: int) -> TrainState:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
    if torch.distributed.is_initialized():
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return TrainState(model=model, optimizer=optimizer)


def full(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in state.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())


def save(url: str, options: Options, step: int, **how: Any) -> None:
    states.save(url, state_of(step), step, storage_options=options, **how)


def loads(url: str, options: Options, step: int) -> None:
    """Check that the newest checkpoint is that of `step`, as `save` wrote it."""
    state = state_of(99)
    with CheckpointManager(url, storage_options=options) as manager:
        assert manager.load(state) is not None and manager.latest() == step
    assert same(full(state), full(state_of(step)))


def steps(url: str, options: Options) -> list[int]:
    return [item.step for item in list_checkpoints(open_store(url, storage_options=options)).committed]


def names(url: str, options: Options) -> set[str]:
    return {item.path for item in open_store(url, storage_options=options).list(recursive=True)}


def top_names(url: str, options: Options) -> set[str]:
    return {name.split("/")[0] for name in names(url, options)}


def objects(url: str, options: Options | None = None) -> dict[str, bytes]:
    store = open_store(url, storage_options=options)
    return {item.path: store.read(item.path) for item in store.list(recursive=True)}


def comparable(url: str, options: Options) -> dict[str, bytes]:
    """Return the objects, those with times or writers as empty ones."""
    return {path: b"" if path.endswith(VARYING) else data for path, data in objects(url, options).items()}


def command(source: str | Path, url: str, s3: Options, options: Options) -> Any:
    """Convert, or reshard if `options` has a number of ranks and no format."""
    run = reshard if "world_size" in options and "to" not in options else convert
    return run(str(source), url, dst_storage_options=s3, **{"workers": 1, **options})


def is_whole(source: str | Path, url: str, s3: Options, options: Options = MANY, **theirs: bytes) -> None:
    """Check that `url` holds what an uninterrupted command writes, and the objects of others."""
    command(source, f"{url}-whole", s3, options)
    assert comparable(url, s3) == {**comparable(f"{url}-whole", s3), **theirs}


def run_cli(*args: str, options: Options | None = None) -> tuple[int, str]:
    from click.testing import CliRunner

    from ckptkit.cli.main import cli

    given = [f"--storage-option={name}={value}" for name, value in (options or {}).items()]
    done = CliRunner().invoke(cli, [*args, *given])
    return done.exit_code, done.output
