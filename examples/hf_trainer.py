"""transformers' Trainer with ckptkit checkpoints: one callback saves, resumes and exports.

python examples/hf_trainer.py      # needs: pip install -e '.[hf]'
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckptkit import RetentionPolicy
from ckptkit.integrations.transformers import CheckpointCallback


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) * (index % 4 + 1)) % 64
        return {"input_ids": ids, "labels": ids}


def train(work: Path, steps: int) -> CheckpointCallback:
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    arguments = TrainingArguments(output_dir=str(work / "out"), max_steps=steps, save_strategy="no", report_to=[],
                                  use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False)  # fmt: skip
    policy = RetentionPolicy(max_num=2)
    callback = CheckpointCallback(work / "run", save_steps=2, retention=policy, export=work / "export")
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Texts(), callbacks=[callback])
    callback.attach(trainer)
    trainer.train()
    return callback


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        train(work, 4)
        resumed = train(work, 8)
        kept = sorted(path.name for path in (work / "run").glob("step_*"))
        model = AutoModelForCausalLM.from_pretrained(work / "export")
    step = resumed.loaded.step if resumed.loaded is not None else None
    print(f"resumed at step {step}; exported {type(model).__name__}")
    print(f"kept {kept}: the newest two, and the one that was resumed from")
    return 0 if step == 4 else 1


if __name__ == "__main__":
    sys.exit(main())
