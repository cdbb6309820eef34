"""`AcceleratorCheckpoints` saves and resumes what a real Accelerator prepared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate")
from ckptkit.errors import CorruptCheckpointError, SaveError  # noqa: E402
from ckptkit.integrations.accelerate import AcceleratorCheckpoints  # noqa: E402


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def prepared() -> tuple[Any, Any, Any, Any, Counter]:
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, model, optimizer, scheduler, counter


def train(run: Any, steps: int) -> None:
    accelerator, model, optimizer, scheduler, counter = run
    for _ in range(steps):
        accelerator.backward(model(torch.ones(2, 4)).pow(2).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.count += 1


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(tmp_path):
    run = prepared()
    saved: list[str] = []
    run[0].register_save_state_pre_hook(lambda models, weights, folder: saved.append(folder))
    checkpoints = AcceleratorCheckpoints(run[0], tmp_path)
    train(run, 3)
    checkpoints.save_state(3)
    train(run, 3)
    checkpoints.close()
    again = prepared()
    checkpoints = AcceleratorCheckpoints(again[0], tmp_path)
    assert checkpoints.load_state().step == 3
    checkpoints.close()
    assert again[4].count == 3
    train(again, 3)
    assert again[4].count == 6
    assert again[3].state_dict() == run[3].state_dict()
    assert all(torch.equal(a, b) for a, b in zip(again[1].parameters(), run[1].parameters(), strict=True))
    assert saved == [str(tmp_path)]


def test_a_checkpoint_written_by_accelerate_is_resumed_from(tmp_path):
    run = prepared()
    train(run, 2)
    run[0].save_state(str(tmp_path / "old"))
    again = prepared()
    checkpoints = AcceleratorCheckpoints(again[0], tmp_path / "new")
    checkpoints.load_state(str(tmp_path / "old"), rng_on_resize="keep")
    checkpoints.close()
    assert all(torch.equal(a, b) for a, b in zip(again[1].parameters(), run[1].parameters(), strict=True))
    states = zip(again[2].optimizer.state.values(), run[2].optimizer.state.values(), strict=True)
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in states)


def loaded(stateful: bool) -> tuple[Any, Any]:
    """Return an accelerator with a prepared loader of 4 batches."""
    torch.manual_seed(0)
    options = {"use_stateful_dataloader": True} if stateful else {"use_seedable_sampler": True}
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**options))
    data = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, shuffle=not stateful)
    return accelerator, accelerator.prepare(data)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("stateful", [False, True])
def test_a_prepared_loader_resumes_in_the_middle_of_an_epoch(tmp_path, stateful):
    accelerator, data = loaded(stateful)
    list(data)
    checkpoints = AcceleratorCheckpoints(accelerator, tmp_path)
    batches = []
    for batch in data:
        batches.append(batch.tolist())
        if len(batches) == 2:
            checkpoints.save_state(6)
    checkpoints.close()
    accelerator, data = loaded(stateful)
    torch.manual_seed(1)
    checkpoints = AcceleratorCheckpoints(accelerator, tmp_path)
    checkpoints.load_state()
    checkpoints.close()
    if not stateful:
        assert data.iteration == 1
        data = accelerator.skip_first_batches(data, 2)
        data.set_epoch(1)
    assert [batch.tolist() for batch in data] == batches[2:]


def with_generator() -> tuple[Any, Any, Any, Any]:
    """A model with dropout, and a shuffling loader with a generator of its own."""
    torch.manual_seed(0)
    seedable = accelerate.DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=seedable)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(
        torch.arange(16.0).reshape(16, 1), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(7)
    )
    return (accelerator, *accelerator.prepare(model, optimizer, data))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loader_with_a_generator_and_dropout_resume_in_the_middle_of_an_epoch(tmp_path):
    def step(run: Any, batch: torch.Tensor) -> list[float]:
        accelerator, model, optimizer, _ = run
        accelerator.backward(model(batch).pow(2).sum())
        optimizer.step()
        optimizer.zero_grad()
        return list(batch.flatten().tolist())

    run = with_generator()
    checkpoints = AcceleratorCheckpoints(run[0], tmp_path)
    seen = []
    for epoch in range(3):
        for number, batch in enumerate(run[3]):
            seen.append(step(run, batch))
            if (epoch, number) == (1, 2):
                checkpoints.save_state(11)
    checkpoints.close()
    again = with_generator()
    torch.manual_seed(5)
    checkpoints = AcceleratorCheckpoints(again[0], tmp_path)
    assert checkpoints.load_state().step == 11
    checkpoints.close()
    rest_of_epoch = again[0].skip_first_batches(again[3], 3)
    rest_of_epoch.set_epoch(1)
    rest = [step(again, batch) for batch in rest_of_epoch]
    again[3].iteration = 2
    rest += [step(again, batch) for batch in again[3]]
    assert rest == seen[11:]
    assert all(torch.equal(a, b) for a, b in zip(again[1].parameters(), run[1].parameters(), strict=True))


def test_a_run_whose_load_failed_half_way_is_not_saved(tmp_path):
    run = prepared()
    checkpoints = AcceleratorCheckpoints(run[0], tmp_path)
    train(run, 1)
    checkpoints.save_state(1)
    (file,) = tmp_path.rglob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(run[1][0].weight.detach().numpy().tobytes())] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CorruptCheckpointError, match="half loaded"):
        checkpoints.load_state()
    with pytest.raises(SaveError, match="half loaded"):
        checkpoints.save_state(2)
    checkpoints.close()
