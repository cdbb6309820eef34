"""A model built on the meta device gets correct values, or an error names the tensors without values."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptkit.errors import CheckpointMismatchError, SaveError, UsageError
from ckptkit.fsdp import FSDPConfig, FSDPStrategy, meta
from ckptkit.fsdp.hf_load import load_hf
from tests.fsdp import models
from tests.ranks import on_ranks


class WithBuffers(nn.Module):
    """Buffers that are in no checkpoint, a running statistic, and a parameter next to a child module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 6, bias=False))
        self.register_buffer("frequencies", torch.arange(6.0) / 7, persistent=False)
        self.mix = nn.MultiheadAttention(6, 2)


def on_meta(build, config=None):
    strategy = FSDPStrategy(FSDPConfig.from_dict(config or {}))
    with strategy.init_model_context(meta_init=True):
        model = build()
    assert all(parameter.is_meta for parameter in model.parameters())
    return strategy, strategy.prepare_model(model)


@pytest.mark.parametrize("build", [models.untied, models.tied, WithBuffers, models.llama, models.tied_llama])
@pytest.mark.parametrize("config", [{}, {"sharding_strategy": "HYBRID_SHARD", "shard": 2}], ids=["1d", "hsdp"])
@on_ranks(4)
def test_reset_parameters_gives_the_values_of_a_single_process(build, config):
    torch.manual_seed(dist.get_rank())  # the ranks' own generators differ, which must not matter
    strategy, model = on_meta(build, config)
    state = torch.get_rng_state()
    strategy.reset_parameters(model, seed=11)
    assert torch.equal(torch.get_rng_state(), state)
    assert not meta.uninitialized(model)
    plain = models.made(build, seed=11)
    if hasattr(plain, "_init_weights"):  # transformers initializes again after the constructors, and ties after that
        tie = plain.config.tie_word_embeddings
        plain.lm_head.weight = nn.Parameter(plain.lm_head.weight.detach().clone())
        torch.manual_seed(11)
        plain.apply(plain._init_weights)
        if tie:
            plain.lm_head.weight = plain.get_input_embeddings().weight
    models.assert_equal(models.weights(model), models.weights(plain))
    models.assert_equal(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("wrapped_first", [True, False])
@on_ranks(2)
def test_a_model_in_a_wrapper_is_not_exported_without_values(tmp_path, wrapped_first):
    strategy = FSDPStrategy()
    with strategy.init_model_context(meta_init=True):
        model = models.llama()
    actor = models.Actor(model if wrapped_first else strategy.prepare_model(model))
    strategy.prepare_model(actor if wrapped_first else None)
    with pytest.raises(SaveError, match="never given values"):
        strategy.save_model(actor, None, tmp_path / "out")
    strategy.reset_parameters(model if not wrapped_first else actor)
    strategy.save_model(actor, None, tmp_path / "out")


@on_ranks(2)
def test_a_load_without_a_matching_name_leaves_a_model_without_values(zoo):
    strategy, model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4)))
    empty = meta.uninitialized(model)
    assert empty
    assert strategy.load_hf(model, zoo / "hf_ref_llama_untied", strict=False).loaded == ()
    assert meta.uninitialized(model) == empty


@on_ranks(2)
def test_a_meta_buffer_that_nothing_initializes_has_no_values():
    with torch.device("meta"):
        model = WithBuffers()
    strategy = FSDPStrategy()
    strategy.reset_parameters(strategy.prepare_model(model), seed=3)
    assert sorted(meta.uninitialized(model)) == ["frequencies"]


def test_a_buffer_that_takes_the_place_of_one_without_values_has_values():
    class Indices(nn.Module):
        def __init__(self):
            super().__init__()
            for name in "abcdef":
                self.register_buffer(name, torch.arange(4))

    with torch.device("meta"):
        model = Indices()
    meta.materialize(model, "cpu")
    assert meta.uninitialized(model) == {*"abcdef"}
    for name in "abcdef":  # the new tensors get the ids of deleted ones
        setattr(model, name, torch.arange(4))
    assert not meta.uninitialized(model)


def _from_directory(url, context):
    from transformers import AutoConfig, AutoModelForCausalLM

    strategy = FSDPStrategy()
    settings = AutoConfig.from_pretrained(url)
    with strategy.init_model_context(meta_init=True) if context == "ours" else torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    strategy.prepare_model(model)
    report = strategy.load_hf(model, str(url))
    assert not meta.uninitialized(model)
    plain = AutoModelForCausalLM.from_pretrained(url, dtype=torch.float32)
    models.assert_equal({name: value.float() for name, value in models.weights(model).items()}, plain.state_dict())
    models.assert_equal(dict(model.named_buffers()), dict(plain.named_buffers()))
    tokens = models.batch(0)
    assert torch.allclose(model(tokens).logits.float(), plain(tokens).logits, atol=1e-5)
    return report.nbytes


@pytest.mark.parametrize("name", ["hf_ref_llama_tied", "hf_ref_llama_untied", "hf_ref_qwen3moe"])
@pytest.mark.parametrize("context", ["ours", "torch"])
def test_hugging_face_files_fill_a_model_and_each_rank_reads_only_its_slices(ranks, zoo, name, context):
    read = ranks.run(_from_directory, 2, zoo / name, context)
    size = sum(path.stat().st_size for path in (zoo / name).glob("*.safetensors"))
    assert 0.9 * size < sum(read) <= size and max(read) < 0.6 * size


def test_files_of_a_base_model_fill_a_model_with_a_head_and_the_reverse(tmp_path):
    headed = models.qwen_moe()  # experts are stacked in memory; in the files, they have the longest names
    base = copy.deepcopy(headed.model)
    for saved, live in ((base, headed), (headed, base)):
        saved.save_pretrained(tmp_path / type(saved).__name__)
        values = {name: value.clone() for name, value in live.state_dict().items()}
        with torch.no_grad():
            for name, parameter in live.named_parameters():
                if name != "lm_head.weight":
                    parameter.zero_()
        report = load_hf(live, tmp_path / type(saved).__name__, strict=False)
        assert {*report.missing, *report.unexpected} == {"lm_head.weight"}
        models.assert_equal(live.state_dict(), values)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@on_ranks(2)
def test_files_of_a_base_model_and_of_its_adapter_fill_a_sharded_peft_model(zoo, tmp_path):
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    url = zoo / "hf_ref_llama_untied"
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "init_lora_weights": False}
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options)
    torch.manual_seed(0)
    plain = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(url, dtype=torch.float32), config)
    head = plain.base_model.model.lm_head
    nn.init.ones_(head.modules_to_save["default"].weight)
    folder = tmp_path / str(dist.get_rank())
    plain.save_pretrained(folder)
    strategy = FSDPStrategy()
    with strategy.init_model_context(meta_init=True):
        model = peft.get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(url)), config)
    strategy.prepare_model(model)
    first = strategy.load_hf(model, url, strict=False)
    trained = "base_model.model.lm_head.modules_to_save.default.weight"
    assert torch.equal(models.weights(model)[trained].float(), head.original_module.weight)
    second = strategy.load_hf(model, folder, strict=False)
    assert {*first.missing, trained} == {*second.loaded} and not first.unexpected
    assert {*second.missing, trained} == {*first.loaded}
    assert not meta.uninitialized(model)
    models.assert_equal({name: value.float() for name, value in models.weights(model).items()}, plain.state_dict())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@on_ranks(2)
def test_reset_parameters_initializes_adapters_as_peft_does():
    import peft

    strategy = FSDPStrategy()
    with strategy.init_model_context(meta_init=True):
        model = peft.get_peft_model(models.llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]))
    strategy.prepare_model(model)
    strategy.reset_parameters(model, seed=0)
    found = {name: weight for name, weight in models.weights(model).items() if "lora_" in name}
    zeros = {name for name, weight in found.items() if not weight.any()}
    assert zeros == {name for name in found if "lora_B" in name or "lora_embedding_A" in name}
    assert not meta.uninitialized(model)
    for config in model.peft_config.values():
        config.init_lora_weights = "pissa"
    with pytest.raises(UsageError, match="init_lora_weights='pissa' computes"):
        strategy.reset_parameters(model)


@on_ranks(2)
def test_mismatches_are_counted_and_named_and_nothing_changes(zoo):
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(zoo / "hf_ref_llama_untied")
    settings.intermediate_size += 4
    settings.attention_bias = True
    model = FSDPStrategy().prepare_model(AutoModelForCausalLM.from_config(settings))
    before = models.weights(model)
    with pytest.raises(CheckpointMismatchError) as caught:
        load_hf(model, str(zoo / "hf_ref_llama_untied"))
    said = ("missing in", "self_attn.q_proj.bias", "mlp.up_proj.weight ([", ": 6 ")
    assert [words for words in said if words not in str(caught.value)] == []
    assert str(caught.value).endswith("\nOptions of load_hf: strict=False loads what matches.")
    models.assert_equal(models.weights(model), before)
