"""A resumed run equals an uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
from tests.checkpoint import jobs
from tests.ranks import run_ranks

STEPS = 3


def straight(layout: str, precision: str, optimizer: str) -> Any:
    """Train 2k steps without a stop."""
    job = jobs.make(layout, precision, optimizer)
    job.train(2 * STEPS)
    return jobs.everything(job), jobs.alone(job), job.losses[STEPS:]


def first_half(url: str, kind: str, layout: str, precision: str, optimizer: str, background: bool) -> Any:
    job = jobs.make(layout, precision, optimizer)
    job.train(STEPS)
    with CheckpointManager(url, state_dict_type=kind) as manager:
        if background:
            manager.save_async(STEPS, job.state())
        else:
            manager.save(STEPS, job.state())
        job.train(2)  # training after the save must not be in it
    return job.losses


def second_half(url: str, layout: str, precision: str, optimizer: str) -> Any:
    job = jobs.make(layout, precision, optimizer, start=99)  # other weights, other random numbers
    job.train(1)
    state = job.state()
    with CheckpointManager(url) as manager:
        report = manager.load(state)
    assert report is not None
    assert state.step == STEPS
    assert state.extra["losses"] == STEPS
    assert not report.missing
    assert not report.unexpected
    assert not report.skipped
    job.losses.clear()
    job.train(STEPS)
    return jobs.everything(job), jobs.alone(job), job.losses


def check(
    ranks: Any, url: Path, world_size: int, kind: str, layout: str, precision: str, optimizer: str, background: bool
) -> None:
    expected = ranks.run(straight, world_size, layout, precision, optimizer)
    ranks.run(first_half, world_size, str(url), kind, layout, precision, optimizer, background)
    found = run_ranks(second_half, world_size, str(url), layout, precision, optimizer)
    for rank, (want, got) in enumerate(zip(expected, found, strict=True)):
        for part, name in zip(range(2), ("state", "own"), strict=True):
            different = [key for key in want[part] if want[part][key] != got[part].get(key)]
            assert not different, (rank, name, different)
            assert set(want[part]) == set(got[part])
        assert want[2] == got[2], rank


@pytest.mark.parametrize("precision", ["fp32", "mixed", "master"])
@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_training_resumes_bit_exactly(ranks: Any, tmp_path: Path, kind: str, precision: str) -> None:
    check(ranks, tmp_path, 2, kind, "1d", precision, "adamw", background=False)


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_a_save_in_the_background_resumes_bit_exactly(ranks: Any, tmp_path: Path, kind: str) -> None:
    check(ranks, tmp_path, 2, kind, "1d", "master", "adamw", background=True)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "amsgrad", "muon"])
def test_every_optimizer_resumes_bit_exactly(ranks: Any, tmp_path: Path, optimizer: str) -> None:
    check(ranks, tmp_path, 2, "sharded", "1d", "fp32", optimizer, background=False)


@pytest.mark.parametrize("layout", ["hsdp", "tp"])
@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_every_mesh_resumes_bit_exactly(ranks: Any, tmp_path: Path, kind: str, layout: str) -> None:
    check(ranks, tmp_path, 4, kind, layout, "fp32", "adamw", background=False)


def test_factored_moments_of_a_single_process_are_restored(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(5, 3)
        return model, torch.optim.Adafactor(model.parameters(), lr=0.1)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    train(model, optimizer)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainState(model=model, optimizer=optimizer))
        train(model, optimizer)
        other, resumed = made()
        manager.load(TrainState(model=other, optimizer=resumed))
    train(other, resumed)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


class Noisy(torch.utils.data.Dataset):
    """Draws from the same generator as training."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index)) + torch.rand(2)


def epochs(loader: Any, count: int) -> list[Any]:
    """Return the batches of that many epochs, and the numbers that training draws."""
    return [(batch.tolist(), torch.rand(()).item()) for _ in range(count) for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("position", [0, 2, 6])
def test_a_torchdata_loader_resumes_with_the_same_batches(tmp_path: Path, workers: int, position: int) -> None:
    """Positions at the start, in the middle and at the end of an epoch."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def made() -> Any:
        data = Noisy() if workers == 0 else torch.arange(12.0)  # the dataset must save a worker's own generator
        return loaders.StatefulDataLoader(data, batch_size=2, shuffle=True, num_workers=workers)

    torch.manual_seed(1)
    loader = made()
    batches = iter(loader)
    for _ in range(position):
        next(batches)
        torch.rand(())
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainState(dataloader=loader))
        rest = [(batch.tolist(), torch.rand(()).item()) for batch in batches]
        expected = rest + epochs(loader, 1)
        torch.manual_seed(77)
        torch.rand(5)
        fresh = made()
        manager.load(TrainState(dataloader=fresh))
    found = epochs(fresh, 2)  # the rest of the first epoch, possibly empty, and the next
    assert found == expected
