"""Small runs and conversions at a place on an object store, and what tests compare of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit import CheckpointManager, RetentionPolicy, TrainState
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.offline import convert as converting
from ckptkit.offline import prune as pruning
from ckptkit.offline import reshard as resharding
from ckptkit.offline import verify as verifying
from ckptkit.storage import open_store
from tests.checkpoint import states
from tests.cli.commands import run
from tests.fsdp.models import whole

Options = dict[str, Any]
UNEVEN = Path(__file__).parents[1] / "zoo" / "dcp_fsdp2_uneven_w4" / "ckpt"
MANY: Options = {"max_shard_size": "1kB"}  # ten files
VARYING = ("README.md", "checkpoint.json", "manifest.safetensors", "SHA256SUMS")  # times, writers, and their digests
ONE, TWO = RetentionPolicy(max_num=1), RetentionPolicy(max_num=2)


def on(*kinds: str) -> Any:
    """Run a test on these servers: s3, gcs, rclone, or versioned, a bucket on s3."""
    return pytest.mark.parametrize("near", kinds, indirect=True)


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


def full(state: TrainState) -> Any:
    """Return the bytes of the whole weights, to be compared with `==`."""
    return states.bits({name: whole(parameter) for name, parameter in state.model.state_dict().items()})


def run_cli(*args: str, options: Options | None = None) -> tuple[int, str]:
    given = [f"--storage-option={name}={value}" for name, value in (options or {}).items()]
    done = run(*args, *given)
    return done.exit_code, done.output


@dataclass(frozen=True)
class Place:
    """A URL with the options to reach it: for a run, or for the result of a command."""

    url: str
    options: Options = field(default_factory=dict)

    def __truediv__(self, name: str) -> Place:
        return Place(f"{self.url}/{name}", self.options)

    def beside(self, name: str) -> Place:
        return Place(f"{self.url}-{name}", self.options)

    def by(self, **options: Any) -> Place:
        """Return the same place with more options, so over a connection of its own."""
        return Place(self.url, {**self.options, **options})

    def elsewhere(self) -> Place:
        """Return the same place over another connection, with an empty cache, as in another process."""
        return self.by(requester_pays=False)

    @property
    def store(self) -> Any:
        return open_store(self.url, storage_options=self.options)

    def names(self) -> set[str]:
        return {item.path for item in self.store.list(recursive=True)}

    def top(self) -> set[str]:
        return {name.split("/")[0] for name in self.names()}

    def objects(self) -> dict[str, bytes]:
        store = self.store
        return {item.path: store.read(item.path) for item in store.list(recursive=True)}

    def manager(self, **options: Any) -> CheckpointManager:
        return CheckpointManager(self.url, storage_options=self.options, **options)

    def save(self, *steps: int, **how: Any) -> None:
        """Save the state of each step, each with a manager of its own."""
        for step in steps:
            states.save(self.url, state_of(step), step, storage_options=self.options, **how)

    def loads(self, step: int) -> None:
        """Check that the newest checkpoint is that of `step`, as `save` wrote it."""
        state = state_of(99)
        with self.manager() as manager:
            assert manager.load(state) is not None and manager.latest() == step
        assert full(state) == full(state_of(step))

    def steps(self) -> list[int]:
        return [item.step for item in list_checkpoints(self.store).committed]

    def convert(self, target: Place, **options: Any) -> Any:
        return converting.convert(self.url, target.url, storage_options=self.options, **options)

    def reshard(self, target: Place, **options: Any) -> Any:
        return resharding.reshard(self.url, target.url, storage_options=self.options, **options)

    def verify(self) -> Any:
        return verifying.verify(self.url, storage_options=self.options)

    def prune(self, policy: RetentionPolicy = ONE) -> Any:
        return pruning.prune(self.url, policy=policy, storage_options=self.options)

    def cli(self, *args: str) -> tuple[int, str]:
        return run_cli(*args, options=self.options)

    def make(self, source: str | Path = UNEVEN, **options: Any) -> Any:
        """Convert `source` to this place, or reshard it if `options` has a number of ranks and no format."""
        reshards = "world_size" in options and "to" not in options
        command = resharding.reshard if reshards else converting.convert
        return command(str(source), self.url, dst_storage_options=self.options, **{"workers": 1, **options})

    def comparable(self) -> dict[str, bytes]:
        """Return the objects, those with times or writers as empty ones."""
        return {path: b"" if path.endswith(VARYING) else data for path, data in self.objects().items()}

    def is_made(self, source: str | Path = UNEVEN, options: Options = MANY, **theirs: bytes) -> None:
        """Check that the place holds what an uninterrupted command makes, and the objects of others."""
        whole = self.beside("whole")
        whole.make(source, **options)
        assert self.comparable() == {**whole.comparable(), **theirs}
