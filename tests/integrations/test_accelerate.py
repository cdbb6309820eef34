"""`AcceleratorCheckpoints` saves and resumes what a real Accelerator prepared."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate")
from ckptkit import open_checkpoint  # noqa: E402
from ckptkit.errors import UsageError  # noqa: E402
from ckptkit.integrations.accelerate import AcceleratorCheckpoints  # noqa: E402
from tests.checkpoint.states import Kept, check_resumed  # noqa: E402


class Run:
    """A model with dropout that an Accelerator prepared, with optimizer, scheduler, loader and a registered counter."""

    def __init__(self, *, stateful: bool = False) -> None:
        torch.manual_seed(0)
        loading = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=stateful)
        self.accelerator = accelerate.Accelerator(cpu=True, dataloader_config=loading)
        model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        data = torch.utils.data.DataLoader(
            torch.arange(16.0).reshape(16, 1), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(7)
        )
        parts = self.accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer), data)
        self.model, self.optimizer, self.scheduler, self.data = parts
        self.counter = Kept(0)
        self.accelerator.register_for_checkpointing(self.counter)

    def step(self, batch: torch.Tensor) -> list[float]:
        self.accelerator.backward(self.model(batch).pow(2).sum())
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.counter.value += 1
        return batch.flatten().tolist()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step(torch.ones(2, 1))

    def checkpoints(self, url: Any, **options: Any) -> Any:
        return closing(AcceleratorCheckpoints(self.accelerator, url, **options))


def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(place):
    url, options = place
    run, again = Run(), Run()
    saved: list[str] = []
    run.accelerator.register_save_state_pre_hook(lambda models, weights, folder: saved.append(folder))
    with run.checkpoints(url, **options) as checkpoints:
        run.train(3)
        checkpoints.save_state(3)
        run.train(3)
    with again.checkpoints(url, **options) as checkpoints:
        assert checkpoints.load_state().step == again.counter.value == 3
    again.train(3)
    assert again.scheduler.state_dict() == run.scheduler.state_dict()
    assert again.counter.value == 6 and saved == [url]
    check_resumed(again, run)


def test_a_checkpoint_written_by_accelerate_is_resumed_from_and_load_hooks_run(tmp_path):
    run, again, calls = Run(), Run(), []
    run.train(2)
    run.accelerator.save_state(str(tmp_path / "checkpoint_5"))
    again.accelerator.register_load_state_pre_hook(lambda models, folder: calls.append(folder))
    with again.checkpoints(tmp_path) as checkpoints:
        assert checkpoints.load_state(rng_on_resize="keep") is not None
    assert calls == [str(tmp_path)] and again.counter.value == 2
    check_resumed(again, run)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("stateful", "done"), [(False, 11), (True, 11), (True, 16)])
def test_a_shuffling_loader_with_a_generator_and_dropout_resume_in_the_middle_of_an_epoch(tmp_path, stateful, done):
    run, again, seen = Run(stateful=stateful), Run(stateful=stateful), []
    with run.checkpoints(tmp_path) as checkpoints:
        for _ in range(3):
            for batch in run.data:
                seen.append(run.step(batch))
                if len(seen) == done:
                    checkpoints.save_state(done)
    torch.manual_seed(5)
    with again.checkpoints(tmp_path) as checkpoints:
        assert checkpoints.load_state().step == done
    assert again.data.iteration == done // 8
    loader, rest = again.data, []
    if not stateful:
        loader = again.accelerator.skip_first_batches(again.data, 3)
        loader.set_epoch(1)
    while len(rest) < len(seen) - done:
        rest += [again.step(batch) for batch in loader]
        loader, again.data.iteration = again.data, 2
    assert rest == seen[done:]
    check_resumed(again, run)


def test_hooks_that_empty_their_lists_remove_nothing_from_the_checkpoint(tmp_path):
    """Diffusers' scripts save and load models themselves in such hooks."""
    run, again = Run(), Run()
    run.accelerator.register_save_state_pre_hook(lambda models, weights, folder: [models.pop(), weights.pop()])
    again.accelerator.register_load_state_pre_hook(lambda models, folder: [models.pop(), (tmp_path / "latest").stat()])
    with again.checkpoints(tmp_path) as checkpoints:
        assert checkpoints.load_state() is None  # a new run calls no hook
        with run.checkpoints(tmp_path) as other:
            run.train(1)
            other.save_state(1)
        assert checkpoints.load_state().step == 1
        check_resumed(again, run)
        checkpoints.save_state(2)
    assert open_checkpoint(str(tmp_path))["model.0.weight"] is not None


def test_objects_that_are_not_restored_are_named(tmp_path, caplog):
    run, again = Run(), Run()
    run.accelerator.register_for_checkpointing(Kept(5))
    with run.checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save_state(1)
    run.accelerator.save_state(str(tmp_path / "old"))
    with again.checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.load_state()
        checkpoints.load_state(str(tmp_path / "old"))
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["object_1.", "custom_checkpoint_1."]


def test_a_save_between_the_batches_of_one_step_is_warned_about(tmp_path, caplog):
    run = Run()
    with run.checkpoints(tmp_path) as checkpoints:
        run.accelerator.gradient_accumulation_steps = 2
        for step in (1, 2):
            with run.accelerator.accumulate(run.model):
                run.train(1)
            checkpoints.save_state(step)
    assert [record.message[:6] for record in caplog.records] == ["step 1"]


def test_the_total_limit_of_an_accelerator_with_automatic_names_is_the_default_retention(tmp_path):
    run = Run()
    run.accelerator.project_configuration.total_limit = 1
    for automatic, options, kept in [(False, {}, 2), (True, {}, 1), (True, {"retention": None}, 2)]:
        run.accelerator.project_configuration.automatic_checkpoint_naming = automatic
        with run.checkpoints(tmp_path / f"{automatic} {options}", **options) as checkpoints:
            for step in (1, 2):
                checkpoints.save_state(step)
            assert len(checkpoints.manager.list()) == kept


def test_an_accelerator_without_models_is_refused(tmp_path):
    run = Run()
    run.accelerator._models.clear()
    with run.checkpoints(tmp_path) as checkpoints:
        for call in (checkpoints.load_state, lambda: checkpoints.save_state(1)):
            with pytest.raises(UsageError, match=r"accelerator\.prepare"):
                call()
