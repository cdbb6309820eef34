"""`save_hf` writes what `from_pretrained` of PEFT and transformers reads, or refuses by name before it writes."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel

from ckptkit.errors import SaveError
from ckptkit.fsdp import FSDPConfig, FSDPStrategy
from ckptkit.fsdp.hf_save import save_hf
from tests.fsdp import models
from tests.lazy import LazyModule
from tests.ranks import on_ranks

peft, transformers = LazyModule("peft"), LazyModule("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
IDS = torch.arange(8)[None]


def llama() -> Any:
    return models.made(models.llama).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return getattr(model, "_orig_mod", model)(IDS).logits


def trained(model: nn.Module) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += torch.randn_like(p) / 10
    return model.eval()


def lora(**options: Any) -> Any:
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **options)
    return trained(peft.get_peft_model(llama(), config))


def two_adapters() -> Any:
    model = lora()
    model.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]))
    return model


def taken_by_transformers() -> Any:
    model = llama()
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    return trained(model)


def prompt() -> Any:
    return trained(peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)))


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ == "LlamaDecoderLayer")
    return model


class Critic(models.Actor):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.v_head = nn.Linear(16, 1)


ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoRA": lora,
    "LoRA with biases": lambda: lora(bias="all"),
    "DoRA": lambda: lora(use_dora=True),
    "modules_to_save": lambda: lora(modules_to_save=["lm_head"]),
    "several": two_adapters,
    "taken by a transformers model": taken_by_transformers,
    "prompt tuning": prompt,
    "IA3": lambda: trained(peft.get_peft_model(llama(), peft.IA3Config(task_type="CAUSAL_LM"))),
    "below activation checkpoints": lambda: checkpointed(lora(modules_to_save=["lm_head"])),
    "compiled": lambda: torch.compile(lora()),
    "in a module of its own": lambda: models.Actor(lora()),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_peft_reads_an_exported_adapter(tmp_path, kind):
    model = ADAPTERS[kind]()
    save_hf(model, str(tmp_path / "out"))
    assert not (tmp_path / "out" / "model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "out").eval()
    assert torch.equal(logits(again), logits(model))
    assert (tmp_path / "out" / "other").exists() == (kind == "several")
    save_hf(model, str(tmp_path / "out"), overwrite=True)


@pytest.mark.parametrize("wrapped", [torch.compile, checkpointed, models.Actor, lambda _: lora().merge_and_unload()],
                         ids=["compiled", "checkpointed", "in a module of its own", "merged adapter"])  # fmt: skip
def test_a_model_is_exported_without_the_names_of_wrappers(tmp_path, wrapped):
    model = wrapped(llama())
    save_hf(model, str(tmp_path / "out"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(again), logits(model))


def trained_beside_the_adapter() -> Any:
    model = lora()
    model.base_model.model.lm_head.weight.requires_grad_(True)
    return model


def pruned() -> Any:
    model = llama()
    del model.model.layers[1]
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a value head": (lambda: Critic(llama()), r"doesn't read: 'v_head\.weight', 'v_head\.bias'"),
    "a value head of an adapter": (lambda: Critic(lora()), r"v_head"),
    "a head trained beside the adapter": (trained_beside_the_adapter, r"belong to no adapter: .*lm_head\.weight"),
    "a layer that is gone": (pruned, r"missing: 'model\.layers\.1"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_export_that_from_pretrained_would_not_read_is_refused_by_name(tmp_path, kind):
    make, words = REFUSED[kind]
    with pytest.raises(SaveError, match=words):
        save_hf(make(), str(tmp_path / "out"))
    assert os.listdir(tmp_path) == []


@on_ranks(2)
def test_a_sharded_adapter_is_exported_whole(tmp_path):
    strategy = FSDPStrategy(FSDPConfig(activation_checkpointing=True))
    model = strategy.prepare_model(lora(modules_to_save=["lm_head"]))
    strategy.save_model(model, None, tmp_path / "out")
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "out").eval()
    assert torch.allclose(logits(again), logits(model), atol=1e-5)  # sums in another order


@on_ranks(2)
def test_a_refused_export_is_an_error_on_every_rank(tmp_path):
    with pytest.raises(SaveError, match=r"missing: 'model\.layers\.1"):
        save_hf(FSDPStrategy().prepare_model(pruned()), str(tmp_path / "out"))
    with pytest.raises(SaveError, match="wrapped by FSDP1"):
        save_hf(models.Actor(FullyShardedDataParallel(llama(), device_id=torch.device("cpu"))), str(tmp_path / "out"))


def test_an_adapter_config_names_its_base_model(tmp_path):
    model = lora()
    model.base_model.model.name_or_path = model.peft_config["default"].base_model_name_or_path = "some/base"
    save_hf(model, str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "some/base"
    assert config["inference_mode"] is True
    assert model.peft_config["default"].inference_mode is False
