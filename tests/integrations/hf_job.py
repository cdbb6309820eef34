"""The work of a rank under a real transformers Trainer and a real Accelerator, for `test_hf_ranks`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckptkit import RetentionPolicy
from ckptkit.integrations.accelerate import AcceleratorCheckpoints
from ckptkit.integrations.transformers import CheckpointCallback
from tests.integrations.lightning_job import whole

STEPS, STOP = 6, 3


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(6) * (index + 3)) % 32
        return {"input_ids": ids, "labels": ids}


def llama(dropout: float = 0.3) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, attention_dropout=dropout, max_position_embeddings=16, tie_word_embeddings=False,
        )
    )  # fmt: skip


def state_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    optimizer = getattr(optimizer, "optimizer", optimizer)
    names = {id(p): n for n, p in model.named_parameters()}
    found = {name: whole(p) for name, p in model.named_parameters()}
    for p, values in optimizer.state.items():
        found |= {f"{names[id(p)]}.{key}": whole(value) for key, value in values.items()}
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and len(one) > 30 and all(torch.equal(one[k], other[k]) for k in one)


@contextmanager
def fresh() -> Iterator[None]:
    """Reset Accelerate's globals, as in a new process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    try:
        yield
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def shard_on_cpu(accelerator: Any) -> None:
    """Enable its own FSDP2 code, which it offers only on accelerators."""
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )


def train(work: Path, callback: CheckpointCallback, steps: int, fsdp: bool, **options: Any) -> Trainer:
    with fresh():
        arguments = TrainingArguments(
            output_dir=str(work / "out"), per_device_train_batch_size=2, report_to=[], use_cpu=True, seed=3,
            logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False, max_steps=steps, save_strategy="no",
            lr_scheduler_type="constant", **options,
        )  # fmt: skip
        trainer = Trainer(llama(), arguments, train_dataset=Texts(), callbacks=[callback])
        if fsdp:
            shard_on_cpu(trainer.accelerator)
            trainer.is_fsdp_enabled = True
        callback.attach(trainer)
        trainer.train()
    return trainer


def trainer(work: Path, facts: dict[str, Any], fsdp: bool) -> None:
    """6 uninterrupted steps, and 3 + 3 steps, saved in the middle of an epoch of 4."""
    name = "fsdp2" if fsdp else "ddp"
    work = work / name
    straight = train(work, CheckpointCallback(work / "straight", resume=False), STEPS, fsdp)
    wrapped = type(straight.model_wrapped).__name__
    facts[f"{name}_wrapped"] = wrapped, type(next(straight.model.parameters())).__name__
    before = state_of(straight.model, straight.optimizer)
    train(work, CheckpointCallback(work / "run", save_steps=STOP), STOP, fsdp)
    callback = CheckpointCallback(work / "run", export=work / "export")
    resumed = train(work, callback, STEPS, fsdp)
    facts[f"{name}_step"] = callback.loaded.step
    facts[f"{name}_equal"] = same(before, state_of(resumed.model, resumed.optimizer))
    exported = LlamaForCausalLM.from_pretrained(work / "export").state_dict()
    facts[f"{name}_export"] = all(torch.equal(exported[k], v) for k, v in before.items() if k in exported)


def accelerator(work: Path, facts: dict[str, Any], fsdp: bool) -> None:
    """The same with Accelerator, a stateful dataloader and accumulation; saved and loaded by two ranks."""
    name = "accelerate_fsdp2" if fsdp else "accelerate_ddp"

    def run(url: Path, steps: int, save_at: int | None = None) -> tuple[dict[str, torch.Tensor], int | None, int]:
        with fresh():
            accelerator = Accelerator(
                cpu=True, gradient_accumulation_steps=2,
                dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
            )  # fmt: skip
            if fsdp:
                shard_on_cpu(accelerator)
            model = llama(dropout=0.0)  # a resumed iterator draws a number
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            batches = torch.utils.data.DataLoader(Texts(), batch_size=2)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
            model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
            checkpoints = AcceleratorCheckpoints(accelerator, url, retention=RetentionPolicy(max_num=1))
            torch.manual_seed(5 + dist.get_rank())
            report = checkpoints.load_state(per_rank_on_resize="keep")
            done = report.step if report is not None else 0
            began = accelerator.step
            while done < steps:
                for batch in batches:
                    with accelerator.accumulate(model):
                        accelerator.backward(model(**batch).loss)
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                    done += 1
                    if done == save_at:
                        checkpoints.save_state(done)
                    if done == steps:
                        break
            checkpoints.close()
            return state_of(accelerator.unwrap_model(model), optimizer), report.step if report else None, began

    straight, _, _ = run(work / name / "straight", 6)
    run(work / name / "run", 2, save_at=2)
    resumed, step, began = run(work / name / "run", 6)
    facts[f"{name}_step"] = step, began
    facts[f"{name}_moments"] = sum(key.endswith("exp_avg") for key in straight)
    facts[f"{name}_equal"] = same(straight, resumed)


def more(work: Path, facts: dict[str, Any]) -> None:
    """Resume the checkpoint of two ranks on another number of ranks."""
    callback = CheckpointCallback(work / "fsdp2" / "run")
    trained = train(work / "again", callback, 8, dist.get_world_size() > 1)
    facts["resized"] = callback.loaded.step, trained.state.global_step


def run(work: str, *parts: Any) -> dict[str, Any]:
    """Run the parts, each a name and its arguments, in turn on this rank."""
    warnings.filterwarnings("ignore")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    facts: dict[str, Any] = {}
    for name, *arguments in parts:
        globals()[name](Path(work), facts, *arguments)
    return facts
