"""The directory in which the commands of the docs run: a small RUN, a BASE model, runs of other systems."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

ZOO = Path(__file__).parents[1] / "zoo"
OTHERS = {  # name in the docs -> checkpoint that the real system wrote
    "deepspeed_run": "deepspeed_zero2_bf16_w2",
    "lightning_run": "lightning_real_mp_w2",
    "verl_run": "verl_fsdp2_w2",
    "accelerate_run": "accelerate_fsdp2_sharded_llama_tied_w2",
    "torchtitan_run": "torchtitan_llama3_names_w2",
    "flat_run": "fsdp1_dcp_sharded_nomesh_w2",
    "BASE": "hf_ref_llama_untied",
}

RULES = """[[rules]]
op = "rename"
from = "model.layers.{i:d}.{what}"
to = "transformer.h.{i}.{what}"
"""


def make_place(place: Path) -> None:
    """Fill `place`: train a small llama for three steps on one rank, and save after each."""
    for name, source in OTHERS.items():
        shutil.copytree(ZOO / source, place / name)
    (place / "rules.toml").write_text(RULES)
    _train(place / "RUN")


def _train(root: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from ckptkit import CheckpointManager, RetentionPolicy, TrainState

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(ZOO / "hf_ref_llama_untied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = TrainState(model=model, optimizer=optimizer)
    policy = RetentionPolicy(max_num=3, keep_best=("loss", "min"))
    with CheckpointManager(str(root), retention=policy, side_files=str(ZOO / "hf_ref_llama_untied")) as manager:
        for step in (100, 200, 300):
            tokens = torch.randint(0, 128, (2, 16))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            manager.save(step, state, metrics={"loss": 5.0 - step / 100})


class Output(NamedTuple):
    """A named tuple, as in transformers' outputs: FSDP finds the tensors in it and hooks their backward."""

    loss: Any


def namespace() -> dict[str, Any]:
    """Return the names that a training script defines before the lines of the docs: model, loader, steps."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return Output(self.lin(x).square().mean())

    return {"torch": torch, "model": Net(), "steps": 4, "batches": iter([{"x": torch.randn(2, 8)}] * 100)}


# Runs before a block that is a part of a script: it uses `strategy`, but does not create one.
BEGINNING = """
from ckptkit.fsdp import FSDPStrategy
strategy = FSDPStrategy()
strategy.setup_distributed()
model = strategy.prepare_model(model)
optimizer = strategy.create_optimizer(model, lr=3e-4)
"""


def run_python(block: str, place: str) -> None:
    """Run a block of the docs as the only rank of a job."""
    import os

    os.chdir(place)
    names = namespace()
    if "strategy." in block and "strategy = " not in block:
        exec(compile(BEGINNING, "<beginning>", "exec"), names)
    exec(compile(block, "<docs>", "exec"), names)
