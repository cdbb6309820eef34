"""A real transformers Trainer on the CPU saves, stops, resumes and exports through `CheckpointCallback`."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers  # only the package: its parts are loaded when needed, and a Trainer takes seconds

from ckptkit import CheckpointManager, RetentionPolicy, TrainState, open_checkpoint
from ckptkit.errors import CheckpointMismatchError, UsageError
from tests.checkpoint import states
from tests.checkpoint.saving import steps
from tests.fsdp import models
from tests.lazy import LazyModule

integration = LazyModule("ckptkit.integrations.transformers")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


class Texts(torch.utils.data.Dataset):
    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(6) * (index + 3)) % 32
        return {"input_ids": ids, "labels": ids}


def llama(**options: Any) -> Any:
    return models.made(partial(models.llama, **{"attention_dropout": 0.3, **options}))


def arguments(work: Path, **options: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=str(work / "out"), per_device_train_batch_size=2, report_to=[], use_cpu=True, seed=3,
        logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False,
        **{"max_steps": 8, "save_strategy": "no", **options},
    )  # fmt: skip


def trainer_of(work: Path, callback: Any, model: Any = None, **options: Any) -> transformers.Trainer:
    trainer = transformers.Trainer(
        model or llama(), arguments(work, **options), train_dataset=Texts(), eval_dataset=Texts(),
        callbacks=[callback] if callback else None,
    )  # fmt: skip
    if callback is not None:
        callback.attach(trainer)
    return trainer


def trained(work: Path, callback: Any, *model: Any, **options: Any) -> transformers.Trainer:
    trainer = trainer_of(work, callback, *model, **options)
    trainer.train()
    return trainer


def stopping(url: Any, at: int, **options: Any) -> Any:
    """A callback that ends training in the middle, like a job that is killed."""

    class Stop(integration.CheckpointCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_training_stop = state.global_step == at
            return super().on_step_end(args, state, control, **kwargs)

    return Stop(url, **options)


def same_weights(model: Any, other: Any) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("at", [3, 5])  # in the middle of an epoch of 5 steps, and at its end
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(place, at, tmp_path):
    url, options = place
    straight = trained(tmp_path, integration.CheckpointCallback(tmp_path / "straight", resume=False))
    trained(tmp_path, stopping(url, at, save_steps=at, **options))
    callback = integration.CheckpointCallback(url, export=tmp_path / "export", **options)
    resumed = trained(tmp_path, callback)
    assert (callback.loaded.step, resumed.state.global_step) == (at, 8)
    states.check_resumed(resumed, straight)
    assert resumed.lr_scheduler.state_dict() == straight.lr_scheduler.state_dict()
    losses = [[entry["loss"] for entry in t.state.log_history if "loss" in entry] for t in (resumed, straight)]
    assert losses[0] == losses[1]
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "export")
    assert same_weights(loaded, straight.model)
    assert not [path for path in Path.cwd().iterdir() if path.name.startswith("s3:")]


@pytest.mark.parametrize("policy", ["of the callback", "save_total_limit"])
def test_old_checkpoints_are_removed(tmp_path, policy):
    kept = {"retention": RetentionPolicy(max_num=2)} if policy == "of the callback" else {}
    callback = integration.CheckpointCallback(tmp_path / "run", save_steps=2, background=True, **kept)
    trained(tmp_path, callback, **({} if kept else {"save_total_limit": 2}))
    assert steps(tmp_path / "run") == [6, 8]
    assert open_checkpoint(str(tmp_path / "run")).step == 8
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def evaluated(work: Path, callback: Any, **options: Any) -> transformers.Trainer:
    return trained(work, callback, eval_strategy="steps", eval_steps=2, learning_rate=0.3, **options)


def test_the_best_model_is_kept_and_loaded_at_the_end(tmp_path):
    callback = integration.CheckpointCallback(tmp_path / "run")
    options = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
    options |= {"greater_is_better": True}  # the highest loss comes before the end
    trainer = evaluated(tmp_path, callback, **options)
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    best = max(losses, key=losses.get)
    assert best != max(losses), "the best must not be the newest here"
    assert steps(tmp_path / "run") == sorted({best, 8})
    assert trainer.evaluate()["eval_loss"] == losses[best]


SAVED_TWICE = {
    "evaluated after the first save": {"save_strategy": "epoch", "eval_strategy": "epoch"},
    "not evaluated": {"save_strategy": "epoch"},
    "best": {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 5, "metric_for_best_model": "loss"},
}


@pytest.mark.parametrize("case", SAVED_TWICE)
def test_a_step_is_saved_at_each_interval_and_again_at_the_end_of_an_epoch(tmp_path, case):
    options = {"max_steps": -1, "num_train_epochs": 2, "learning_rate": 0.0, **SAVED_TWICE[case]}
    trained(tmp_path, integration.CheckpointCallback(tmp_path / "run", save_steps=5), **options)
    with CheckpointManager(tmp_path / "run") as manager:
        assert [(record.step, "eval_loss" in record.metrics) for record in manager.list()] == [
            (5, case != "not evaluated"), (10, case != "not evaluated"),
        ]  # fmt: skip


def test_the_metrics_of_all_evaluated_datasets_are_stored(tmp_path):
    callback = integration.CheckpointCallback(tmp_path / "run", save_steps=2)
    trainer = trainer_of(tmp_path, callback, max_steps=2, eval_strategy="steps", eval_steps=2)
    trainer.eval_dataset = {"a": Texts(), "b": Texts()}
    trainer.train()
    with CheckpointManager(tmp_path / "run") as manager:
        assert {"eval_a_loss", "eval_b_loss"} <= manager.list()[0].metrics.keys()


def test_the_states_of_two_callbacks_of_one_class_are_restored(tmp_path):
    def run(steps: int) -> list[int]:
        trainer = trainer_of(tmp_path, integration.CheckpointCallback(tmp_path / "run", save_steps=2), max_steps=steps,
                             restore_callback_states_from_checkpoint=True)  # fmt: skip
        for k in (1, 10):
            trainer.add_callback(counting()(k))
        trainer.train()
        return [item.count for item in trainer.callback_handler.callbacks if type(item).__name__ == "Count"]

    assert run(2) == [2, 20]
    assert run(4) == [4, 40]


def counting() -> type:
    from transformers.trainer_callback import ExportableState

    class Count(transformers.TrainerCallback, ExportableState):
        def __init__(self, k: int) -> None:
            self.k, self.count = k, 0

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.count += self.k

        def state(self) -> dict[str, Any]:
            return {"args": {"k": self.k}, "attributes": {"count": self.count}}

    return Count


@pytest.mark.parametrize("place", ["out", "run"])  # the Trainer's directory, and another one
@pytest.mark.parametrize("lacking", [{}, {"best_global_step": None}], ids=["", "older"])  # older Trainers save no step
def test_the_best_checkpoint_may_be_one_that_a_trainer_saved(tmp_path, place, lacking):
    options = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    options |= {"save_total_limit": 1}
    old = evaluated(tmp_path, None, max_steps=2, **options)
    trainer = trainer_of(tmp_path, integration.CheckpointCallback(tmp_path / place), learning_rate=0.3,
                         eval_strategy="steps", eval_steps=2, **options)  # fmt: skip
    first, best = ({**old.state.log_history[1], "eval_loss": 99.0}, str(tmp_path / "out" / "checkpoint-2"))
    path = tmp_path / "out" / "checkpoint-2" / "trainer_state.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps({**saved, "best_metric": first["eval_loss"], "best_model_checkpoint": best} | lacking))
    trainer.train(resume_from_checkpoint=None if place == "out" else best)
    assert trainer.state.global_step == 8 and trainer.state.best_model_checkpoint == best
    assert same_weights(trainer.model, old.model)
    assert trainer.args.save_total_limit == 1 and Path(best).exists()


def test_save_only_model_saves_no_optimizer_and_a_finished_run_is_only_exported(tmp_path):
    first = integration.CheckpointCallback(tmp_path / "run", save_steps=2)
    old = trained(tmp_path, first, save_only_model=True, max_steps=2)
    assert not [key for key in open_checkpoint(str(tmp_path / "run")) if key.startswith(("optimizer", "rng"))]
    for only_model, said in [(False, "A Trainer has no options"), (True, "save_only_model=True have no optimizer")]:
        callback = integration.CheckpointCallback(tmp_path / "run", export=tmp_path / f"export-{only_model}")
        again = trained(tmp_path, callback, save_only_model=only_model, max_steps=2)
        assert same_weights(again.model, old.model)
        assert Path(callback.export, "model.safetensors").exists()
        with pytest.raises(CheckpointMismatchError, match=said):
            callback = integration.CheckpointCallback(tmp_path / "run")
            trained(tmp_path, callback, save_only_model=only_model, max_steps=3)


def test_what_the_callback_cannot_do_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, integration.CheckpointCallback(tmp_path / "run"))
    with pytest.raises(UsageError, match="hyperparameter_search"):
        trainer.train(trial={"learning_rate": 0.1})
    other = trainer_of(tmp_path, None)
    other.is_deepspeed_enabled = True
    with pytest.raises(UsageError, match="DeepSpeed"):
        integration.CheckpointCallback(tmp_path / "run").attach(other)
    callback = integration.CheckpointCallback(tmp_path / "run", retention=RetentionPolicy(max_num=2))
    with pytest.raises(UsageError, match=r"keep_best=\('eval_loss', 'min', 1\)"):  # it would delete the best model
        evaluated(tmp_path, callback, save_strategy="steps", save_steps=2, load_best_model_at_end=True)


def test_resume_from_checkpoint_is_respected(tmp_path):
    callback = integration.CheckpointCallback(tmp_path / "run", save_steps=4)
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer_of(tmp_path, callback).train(resume_from_checkpoint=True)
    trained(tmp_path, integration.CheckpointCallback(tmp_path / "run", save_steps=4))
    again = integration.CheckpointCallback(tmp_path / "run", resume=False)
    trainer_of(tmp_path, again).train(True)
    assert again.loaded.step == 8
    anew = integration.CheckpointCallback(tmp_path / "other", save_steps=8)
    trainer = trainer_of(tmp_path, anew)
    trainer.train(resume_from_checkpoint=False)
    assert anew.loaded is None
    assert trainer.state.global_step == 8
    trainer.train()  # a second time in one process: no steps remain
    assert anew.loaded.step == 8


def test_a_callback_without_attach_or_with_another_trainer_is_an_error(tmp_path):
    callback = integration.CheckpointCallback(tmp_path / "run")
    trainer = trainer_of(tmp_path, None)
    assert callback.attach(trainer) is callback.attach(trainer) is callback
    assert callback in trainer.callback_handler.callbacks
    with pytest.raises(UsageError, match="belongs to another Trainer"):
        trainer_of(tmp_path, callback)
    trainer.add_callback(integration.CheckpointCallback(tmp_path / "loose"))
    with pytest.raises(UsageError, match=r"callback\.attach\(trainer\)"):
        trainer.train()


def test_a_trainer_does_not_start_fresh_over_another_systems_checkpoint(zoo, tmp_path):
    shutil.copytree(zoo / "verl_fsdp2_w2", tmp_path / "run")
    with pytest.raises(UsageError, match=r"no trainer_state\.json"):
        trained(tmp_path, integration.CheckpointCallback(tmp_path / "run"))


def test_a_checkpoint_of_a_trainer_with_experts_is_restored_with_its_optimizer(tmp_path):
    """The file has one tensor for each expert, while the model and its optimizer have all of them in one tensor."""

    def made(seed: int, steps: int) -> TrainState:
        return states.trained(models.made(models.qwen_moe, seed), steps=steps)

    theirs, mine = made(0, 1), made(1, 0)
    folder = tmp_path / "out" / "checkpoint-5"
    theirs.model.save_pretrained(folder)
    torch.save(theirs.optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 5}')
    report = states.load(tmp_path / "run", mine, str(tmp_path / "out"))
    assert report.step == mine.step == 5 and not report.unexpected
    states.check_resumed(mine, theirs)
