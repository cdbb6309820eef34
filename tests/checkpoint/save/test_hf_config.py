"""A checkpoint contains the config of a transformers model, also if the model is wrapped or divided into stages."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ckptkit import CheckpointManager, TrainState
from tests.ranks import on_ranks


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    ))  # fmt: skip


WRAPPED = {
    "torch.compile": lambda model: torch.compile(model),
    "DDP": lambda model: torch.nn.parallel.DistributedDataParallel(model),
    "both": lambda model: torch.nn.parallel.DistributedDataParallel(torch.compile(model)),
    "stages": lambda model: [torch.nn.Linear(2, 2), model],
}


@pytest.mark.parametrize("kind", WRAPPED)
@on_ranks(1)
def test_the_config_of_a_wrapped_model_names_the_models_own_class(tmp_path, kind):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainState(model=WRAPPED[kind](llama())))
    config = json.loads((tmp_path / "step_00000001" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
