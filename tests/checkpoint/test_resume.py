"""A resumed run equals an uninterrupted one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import CheckpointManager, TrainState
from tests.checkpoint import jobs
from tests.checkpoint.states import different, load_all
from tests.ranks import run_ranks

STEPS = 3


def outcome(job: jobs.Job, losses: list[float]) -> dict[str, Any]:
    """Return every value of a job, what only this rank has, and the losses."""
    return {**jobs.everything(job), **jobs.alone(job), "losses": losses}


def straight(how: tuple[str, ...]) -> Any:
    """Train 2k steps without a stop."""
    job = jobs.make(*how)
    job.train(2 * STEPS)
    return outcome(job, job.losses[STEPS:])


def first_half(url: str, kind: str, how: tuple[str, ...]) -> None:
    job = jobs.make(*how)
    job.train(STEPS)
    with CheckpointManager(url, state_dict_type=kind) as manager:
        manager.save(STEPS, job.state())


def second_half(url: str, how: tuple[str, ...]) -> Any:
    job = jobs.make(*how, start=99)  # other weights, other random numbers
    job.train(1)
    state = job.state()
    load_all(url, state)
    assert (state.step, state.extra["losses"]) == (STEPS, STEPS)
    job.losses.clear()
    job.train(STEPS)
    return outcome(job, job.losses)


def check(ranks: Any, url: Path, size: int, kind: str, *how: str) -> None:
    """Compare a resumed run with an uninterrupted one; `how`: layout and precision of `jobs.make`."""
    expected = ranks.run(straight, size, how)
    ranks.run(first_half, size, str(url), kind, how)
    found = run_ranks(second_half, size, str(url), how)
    assert [different(*both) for both in zip(found, expected, strict=True)] == [[]] * size


@pytest.mark.parametrize("precision", ["fp32", "mixed", "master"])
def test_training_resumes_bit_exactly(ranks, tmp_path, kind, precision):
    check(ranks, tmp_path, 2, kind, "1d", precision)


@pytest.mark.parametrize("layout", ["hsdp", "tp"])
def test_every_mesh_resumes_bit_exactly(ranks, tmp_path, kind, layout):
    check(ranks, tmp_path, 4, kind, layout)


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
def test_a_torchdata_loader_resumes_with_the_same_batches(tmp_path, workers, position):
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
