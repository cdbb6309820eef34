"""Random runs of several jobs: each job continues with the values of the last one, on another mesh.

Each seed draws meshes, types of checkpoints, precision, options of loads, saves in the background, rotation, damage,
and offline commands. The values of a step depend only on its number, so they are known without the checkpoint.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch.distributed as dist

from ckptkit import CheckpointManager, RetentionPolicy, TrainState, copy, reshard, verify
from tests.checkpoint.states import Kept, bits, different
from tests.checkpoint.test_meshes import MESHES, fill, filled, model_on, size_of

OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "atomic": {"atomic": True},
    "broadcast": {"replicas": "broadcast"},
    "partly": {"include": ["*.up.*", "*.experts.*"]},
    "no model": {"model": "skip"},
    "no optimizer": {"optimizer": "skip"},
    "deferred": {"optimizer": "deferred"},
}
SMALL = [name for name in MESHES if size_of(name) <= 4]
KINDS = ["sharded", "sharded", "full", "local"]


@dataclass(frozen=True)
class Job:
    """A job of a run: what it loads and saves, and what is done with its newest checkpoint afterwards."""

    mesh: str
    interleaved: bool
    low: bool
    kind: str
    option: str
    first: int  # the step of the first save
    saves: tuple[bool, ...]  # whether each is in the background
    overwrite: bool
    offline: str


def drawn(seed: int) -> list[Job]:
    random = Random(seed)
    low, jobs, step = random.random() < 0.5, [], 1
    for _ in range(3):
        saves = tuple(random.choices([True, False], k=random.choice([1, 2, 3])))
        jobs.append(Job(
            random.choice(SMALL), random.random() < 0.5, low, random.choice(KINDS), random.choice(["all", *OPTIONS]),
            step, saves, random.random() < 0.3, random.choice(["none", "copy", "reshard", "damage"]),
        ))  # fmt: skip
        step += len(saves)
    return jobs


class Data(Kept):
    """A dataloader whose ranks join what all of them read."""

    def merge_ranks(self, saved: list[dict[str, int]], rank: int, world_size: int) -> dict[str, int]:
        return {"value": sum(state["value"] for state in saved)}


def values(state: TrainState) -> dict[str, Any]:
    found = {}
    for name, parameter in state.parts("model")[""].named_parameters():
        found[f"model.{name}"] = bits(parameter)
        found |= {f"optimizer.{name}.{k}": bits(value) for k, value in state.optimizer.state[parameter].items()}
    return found


def is_loaded(option: str, key: str) -> bool:
    part, _, name = key.partition(".")
    if part == "optimizer":
        return option != "no optimizer"
    return option != "no model" and (
        option != "partly" or any(fnmatchcase(name, g) for g in OPTIONS["partly"]["include"])
    )


def run(job: Job, root: str, expected: int | None, seen: int) -> tuple[int, ...]:
    """Load step `expected`, and save; return the steps that are left."""
    state, experts = model_on(job.mesh, job.interleaved, job.low)
    data = state.dataloader = Data(0)
    fill(state, experts, 900)
    before = values(state)
    steps = [*range(job.first, job.first + len(job.saves))]
    with CheckpointManager(root, state_dict_type=job.kind, retention=RetentionPolicy(max_num=2)) as manager:
        report = manager.load(state, fallback="previous", **OPTIONS[job.option])
        assert (report.step if report else None) == expected
        if report is not None:
            if report.deferred is not None:
                report.deferred.apply()
            saved, found = values(filled(job.mesh, expected or 0, job.interleaved, job.low)), values(state)
            wanted = {key: (saved if is_loaded(job.option, key) else before)[key] for key in saved}
            names = [key for key in saved if job.option != "no optimizer" or not key.endswith(".master")]
            assert [key for key in different(found, wanted) if key in names] == []
            assert {key for key in report.loaded if key.startswith("model.")} == {
                key for key in saved if key.startswith("model.") and is_loaded(job.option, key)
            }
            assert (data.value, report.missing, report.unexpected) == (seen, [], [])
        for step, in_background in zip(steps, job.saves, strict=True):
            fill(state, experts, step)
            data.value = step + dist.get_rank()
            if in_background:
                handle = manager.save_async(step, state)
                fill(state, experts, 1000 + step)  # while it is written
                done = handle.result()
            else:
                done = manager.save(step, state)
        left = [record.step for record in manager.list()]
        if dist.get_rank() == 0:
            assert done.kept == len(left)
        if job.overwrite:
            fill(state, experts, steps[-1])
            data.value = steps[-1] + dist.get_rank()
            manager.save(steps[-1], state, overwrite=True)
        if left[0] in steps:
            manager.load(state, left[0])
            assert different(values(state), values(filled(job.mesh, left[0], job.interleaved, job.low))) == []
    return tuple(left)


def damage(folder: Path) -> None:
    """Cut a file of weights in half."""
    files = [*folder.rglob("*.distcp"), *folder.rglob("model*.safetensors")]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    assert not verify(str(folder)).ok


@pytest.mark.parametrize("seed", range(40))
def test_each_job_continues_with_the_values_of_the_last_one(ranks, tmp_path, seed):
    jobs, root, expected = drawn(seed), tmp_path / "0", None
    kept: dict[int, int] = {}  # what all ranks' data had seen, by step
    for number, job in enumerate(jobs):
        given = (str(root), expected, kept.get(expected or 0, 0))
        (left,) = set(ranks.run(run, size_of(job.mesh), job, *given))
        for step in range(job.first, job.first + len(job.saves)):
            kept[step] = sum(step + rank for rank in range(size_of(job.mesh)))
            kept = {s: seen for s, seen in kept.items() if s in sorted(kept)[-2:] or s == expected}
        assert left == tuple(kept)
        expected, following = left[-1], jobs[min(number + 1, 2)]
        place = root / f"step_{expected:08d}"
        assert verify(str(place)).ok
        moved = (following.mesh, following.interleaved) != (job.mesh, job.interleaved)
        if job.offline == "damage" and len(left) > 1 and job.kind != "local" and following.option in ("all", "atomic"):
            if left[-2] >= job.first:  # saved by this job
                damage(place)
                expected = left[-2]
        elif job.offline in ("copy", "reshard") or (job.kind == "local" and moved):
            root, kept = tmp_path / f"{number + 1}", {expected: kept[expected]}
            if job.offline == "copy" and not (job.kind == "local" and moved):
                copy(str(place), str(root / place.name))
            else:
                reshard(str(place), str(root / place.name), world_size=1 + seed % 3)
            assert verify(str(root / place.name)).ok
