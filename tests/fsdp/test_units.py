"""Which modules become units, decided from the structure of the model."""

import pytest
from torch import nn

from ckptkit.errors import UsageError
from ckptkit.fsdp import FSDPConfig
from ckptkit.fsdp.units import blocks, by_class, by_size, plan_units, policy_of
from tests.fsdp import models

LAYERS = ["layers.0", "layers.1", "layers.2"]
LINEARS = [*(f"{layer}.{name}" for layer in LAYERS for name in ("down", "up")), "lm_head"]


def names(units):
    return sorted(" + ".join(group) for group in units)


@pytest.mark.parametrize(("policy", "expected"), [
    (blocks, LAYERS),
    (policy_of(FSDPConfig(auto_wrap_policy="NO_WRAP"), models.untied()), []),
    (by_class("Block"), LAYERS),
    (by_class(models.Block), LAYERS),
    (by_class("tests.fsdp.models.Block"), LAYERS),
    (by_class("torch.nn.Linear"), LINEARS),
    (by_class("torch.nn.modules.linear.Linear"), LINEARS),
], ids=["blocks", "none", "short name", "class", "dotted name", "re-exported class", "class of torch"])  # fmt: skip
def test_wrap_policies_choose_the_units(policy, expected):
    assert names(plan_units(models.untied(), policy)) == ["", *expected]


def test_a_short_class_name_is_looked_up_in_transformers():
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = nn.Sequential(LlamaDecoderLayer(models.llama().config, 0), nn.Linear(2, 2))
    assert by_class("LlamaPreTrainedModel", "Linear", "LlamaDecoderLayer")(model)[0] == "0"


REFUSED = [
    (lambda: by_class("LlamaForCausalLM")(models.untied()), r"TinyLM is a LlamaForCausalLM\. Its classes: Block"),
    (lambda: by_class("Blok")(models.untied()), r"'Blok'.*Block, Embedding"),
    (lambda: plan_units(models.untied(), lambda model: ["layers"]), r"'layers' is a ModuleList"),
    (lambda: plan_units(models.untied(), lambda model: ["layers.9"]), r"'layers\.9', which is not a module"),
    (lambda: plan_units(models.untied(), blocks, exclude=["layers.1", "layer.*"]), r"exclude names 'layer\.\*', which"),
    (
        lambda: policy_of(FSDPConfig(auto_wrap_policy="TRANSFORMER_BASED_WRAP"), models.untied()),
        "doesn't name its block classes",
    ),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_names_without_a_module_are_refused_with_those_that_exist(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_size_based_wrapping_counts_only_parameters_outside_inner_units():
    block = sum(p.numel() for p in models.Block().parameters())
    for least, layers in ((block, LAYERS), (block + 1, [])):
        found = by_size(least)(models.untied())
        assert [name for name in found if name in LAYERS] == layers
    assert "layers" not in by_size(1)(models.untied())  # a container is never a unit
    nested = nn.Sequential(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5)))  # 110 and 55 parameters
    assert by_size(55)(nested) == ["0.0", "0.1"]
    assert by_size(56)(nested) == by_size(110)(nested) == ["0.0"]  # 55 parameters of "0" remain outside of it
    assert by_size(111)(nested) == ["0"]
    assert by_size(166)(nested) == by_class("TinyLM")(models.untied()) == []  # the root is a unit anyway


def three_tied():
    model = models.untied()
    model.layers[2].up.weight = model.layers[0].up.weight
    model.layers[1].down.weight = model.layers[2].down.weight
    return model


def registered_twice():
    model = models.untied()
    model.layers[2] = model.layers[0]
    return model


UNITS = {
    "heads": (models.untied, {"heads": True}, ["", *LAYERS, "lm_head"]),
    "excluded by name": (models.untied, {"exclude": ["layers.1"]}, ["", "layers.0", "layers.2"]),
    "excluded by class": (models.untied, {"exclude": ["Block"]}, [""]),
    "tied to each other": (
        models.tied_llama,
        {"heads": True},
        ["", "model.embed_tokens + lm_head", "model.layers.0", "model.layers.1"],
    ),
    "tied to the root": (models.tied, {"heads": True}, ["", *LAYERS]),
    "three tied": (three_tied, {}, ["", "layers.0 + layers.1 + layers.2"]),
    "registered twice": (registered_twice, {}, ["", "layers.0", "layers.1"]),
}


@pytest.mark.parametrize("case", UNITS)
def test_blocks_heads_excludes_and_ties_decide_the_units(case):
    build, options, expected = UNITS[case]
    assert names(plan_units(build(), blocks, **options)) == expected


def test_auto_uses_the_no_split_classes_of_a_model_without_changing_them():
    model = models.llama()
    before = (type(model)._no_split_modules, str(type(model)._no_split_modules))
    for _ in range(2):
        assert policy_of(FSDPConfig(), model)(model) == ["model.layers.0", "model.layers.1"]
    assert (type(model)._no_split_modules, str(type(model)._no_split_modules)) == before
