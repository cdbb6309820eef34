"""Whatever a run saves, and however often it is resharded and converted, an export has the values of the live model."""

import copy
import json
from random import Random

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ckptkit import CheckpointManager, TrainState, convert, reshard, verify
from ckptkit.fsdp import MasterWeightOptimizer
from tests.offline.exports import assert_same, read_model

pytestmark = pytest.mark.filterwarnings("ignore")  # peft and transformers deprecate each other's names

ALPHAS = {"default": 16, "other": 64}


def llama(random, adapters):
    sizes = {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 4, "vocab_size": 64}
    options = {"tie_word_embeddings": random.random() < 0.5, "attention_bias": random.random() < 0.5}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **options, num_hidden_layers=random.choice([1, 2])))
    model.to(random.choice([torch.float32, torch.bfloat16]))
    if random.random() < 0.3:
        model.model.layers[0].requires_grad_(False)
    for name in adapters:
        options = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
        config = peft.LoraConfig(r=4, lora_alpha=ALPHAS[name], **options)
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    return model


def optimizer_of(random, model):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained) if random.random() < 0.5 else torch.optim.SGD(trained, momentum=0.9)
    if trained[0].dtype == torch.bfloat16 and random.random() < 0.5:
        optimizer = MasterWeightOptimizer(optimizer)
    for parameter in trained:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def with_masters(model, optimizer):
    """Return a copy of the model with the optimizer's fp32 masters as its weights."""
    found = copy.deepcopy(model)
    for live, copied in zip(model.parameters(), found.parameters(), strict=True):
        if live in optimizer.state:
            copied.data = optimizer.state[live]["master"].clone()
    return found


def expected_of(model, adapter, merged, folder):
    """Return the tensors of `save_pretrained`: of the model, the merged model or one adapter."""
    config = model.config
    if adapter and not merged:
        model.save_pretrained(folder, selected_adapters=[adapter])
        return read_model(folder if adapter == "default" else folder / adapter)
    if adapter:
        model.set_adapter(adapter)
        model = model.merge_and_unload(adapter_names=[adapter])
    tied = {"lm_head.weight"} if config.tie_word_embeddings else ()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


@pytest.mark.parametrize("seed", range(120))
def test_an_export_has_the_values_of_the_live_model(tmp_path, seed):
    random = Random(seed)
    torch.manual_seed(seed)
    names = random.choice([[""], ["actor", "critic"]])
    adapters = random.choice([[], [], ["default"], ["default", "other"]])
    models = {name: llama(random, adapters if name == names[0] else []) for name in names}
    optimizers = {name: optimizer_of(random, model) for name, model in models.items() if random.random() < 0.7}
    model, optimizer = models[names[0]], optimizers.get(names[0])
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.5)
    state = TrainState(
        model=models if names[0] else model,
        optimizer=(optimizers if names[0] else optimizer) or None,
        extra={"ema": average} if random.random() < 0.5 else {},
    )
    root = random.choice([str(tmp_path / "run"), f"memory://{tmp_path.name}{seed}"])
    with CheckpointManager(root, state_dict_type=random.choice(["sharded", "full", "local"])) as manager:
        manager.save(3, state)
    source = f"{root}/latest"
    for number in range(random.choice([0, 1, 2])):
        kind, ranks = random.choice([("sharded", 1), ("sharded", 3), ("local", 2)])
        source = reshard(source, f"{root}-{number}", world_size=ranks, type=kind).dst
        assert verify(source).ok

    adapter = random.choice(adapters) if adapters else None
    others = [f"*.{name}.*" for name in adapters if name != adapter]
    chosen = {"strip_prefix": names[0] or None, "exclude": others}
    kinds = {"model": model}
    if state.extra:
        kinds["ema"] = average
    if isinstance(optimizer, MasterWeightOptimizer):
        kinds["master"] = with_masters(model, optimizer)
    weights = random.choice([*kinds])
    if weights == "model" and random.random() < 0.5:
        source = convert(source, tmp_path / "between", to=random.choice(["dcp", "torch", "local"]), **chosen).dst
        chosen = {}
    merged = adapter is not None and random.random() < 0.5
    convert(source, tmp_path / "out", weights=weights, merge_adapter=merged, **chosen)
    expected = expected_of(kinds[weights], adapter, merged, tmp_path / "expected")
    assert_same(read_model(tmp_path / "out"), expected)
    if adapter and not merged:
        assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_alpha"] == ALPHAS[adapter]
    else:
        found = json.loads((tmp_path / "out" / "config.json").read_text())
        assert found["num_hidden_layers"] == model.config.num_hidden_layers
