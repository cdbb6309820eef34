"""A real transformers Trainer and a real Accelerator on two ranks, under DDP and FSDP2."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate")
pytest.importorskip("torchdata")
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType
from transformers import LlamaForCausalLM, Trainer

from ckptkit import RetentionPolicy
from ckptkit.integrations.accelerate import AcceleratorCheckpoints
from ckptkit.integrations.transformers import CheckpointCallback
from tests.checkpoint.jobs import numbers, whole
from tests.checkpoint.states import different
from tests.integrations.test_transformers import Texts, arguments, llama
from tests.ranks import logged, on_ranks

pytestmark = pytest.mark.timeout(300)


@contextmanager
def fresh() -> Iterator[None]:
    """Reset Accelerate's globals, as in a new process."""

    def reset() -> None:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    os.environ["ACCELERATE_USE_CPU"] = "true"
    reset()
    try:
        yield
    finally:
        reset()


def shard_on_cpu(accelerator: Any) -> None:
    """Enable its own FSDP2 code, which it offers only on accelerators."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )


def train(work: Path, callback: CheckpointCallback, steps: int, *, fsdp: bool) -> Trainer:
    with fresh():
        options = arguments(work, max_steps=steps, lr_scheduler_type="constant")
        model = llama(tie_word_embeddings=False)
        trainer = Trainer(model, options, train_dataset=Texts(16), callbacks=[callback])
        if fsdp:
            shard_on_cpu(trainer.accelerator)
            trainer.is_fsdp_enabled = True
        callback.attach(trainer)
        trainer.train()
    return trainer


@pytest.mark.parametrize(("fsdp", "kind"), [(False, "Parameter"), (True, "DTensor")], ids=["ddp", "fsdp2"])
@on_ranks(2)
def test_a_trainers_resumed_run_is_bit_equal_and_its_export_is_whole(tmp_path, fsdp, kind):
    straight = train(tmp_path, CheckpointCallback(tmp_path / "straight", resume=False), 6, fsdp=fsdp)
    assert type(next(straight.model.parameters())).__name__ == kind
    expected = numbers(straight.model, straight.optimizer)
    assert len(expected) > 30
    with logged() as warnings:
        train(tmp_path, CheckpointCallback(tmp_path / "run", save_steps=3), 3, fsdp=fsdp)
    assert warnings == []
    callback = CheckpointCallback(tmp_path / "run", export=tmp_path / "export")
    resumed = train(tmp_path, callback, 6, fsdp=fsdp)
    assert callback.loaded.step == 3
    assert different(numbers(resumed.model, resumed.optimizer), expected) == []
    exported = LlamaForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    assert {f"model.{name}": whole(value) for name, value in exported.items()}.items() <= expected.items()


def accelerated(url: Path, steps: int, fsdp: bool) -> tuple[dict[str, Any], int | None]:
    """Train with a stateful dataloader and accumulation, saving each second step; return the state and where from."""
    with fresh():
        loading = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=loading)
        if fsdp:
            shard_on_cpu(accelerator)
        model = llama(attention_dropout=0.0, tie_word_embeddings=False)  # a resumed iterator draws a number
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        batches = torch.utils.data.DataLoader(Texts(16), batch_size=2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
        checkpoints = AcceleratorCheckpoints(accelerator, url, retention=RetentionPolicy(max_num=1))
        torch.manual_seed(5 + dist.get_rank())
        report = checkpoints.load_state(per_rank_on_resize="keep")
        done = report.step if report is not None else 0
        assert accelerator.step == done
        while done < steps:
            for batch in batches:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                done += 1
                if done == 2:
                    checkpoints.save_state(done)
                if done == steps:
                    break
        checkpoints.close()
        return numbers(accelerator.unwrap_model(model), optimizer), report and report.step


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
@on_ranks(2)
def test_an_accelerators_resumed_run_is_bit_equal_with_its_dataloader_and_accumulation(tmp_path, fsdp):
    straight, _ = accelerated(tmp_path / "straight", 6, fsdp)
    assert sum(key.endswith("exp_avg") for key in straight) == 21
    accelerated(tmp_path / "run", 2, fsdp)
    resumed, step = accelerated(tmp_path / "run", 6, fsdp)
    assert step == 2 and different(straight, resumed) == []


@pytest.mark.parametrize("size", [1, 3])
@on_ranks(2, "size")
def test_a_run_resumes_on_a_different_number_of_ranks(tmp_path, size):
    here = dist.get_world_size()
    callback = CheckpointCallback(tmp_path / "run", save_steps=3)
    with logged() as warnings:
        trained = train(tmp_path, callback, 3 if here == 2 else 8, fsdp=here > 1)
    assert here == 2 or (callback.loaded.step, trained.state.global_step) == (3, 8)
    samples = f"had {2 * 2} samples; now a step has {2 * here}"
    assert [samples in text for text in warnings] == [True] * (here != 2 and dist.get_rank() == 0), warnings
