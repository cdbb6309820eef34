"""Which modules become units, decided from the structure of the model."""

from __future__ import annotations

import pytest
from torch import nn

from ckptkit.errors import UsageError
from ckptkit.fsdp.config import FSDPConfig
from ckptkit.fsdp.units import ROOT, blocks, by_class, by_size, plan_units, policy_of, tied_parameters
from tests.fsdp import models

LAYERS = ["layers.0", "layers.1", "layers.2"]


def names(units):
    return sorted(" + ".join(group) for group in units)


@pytest.mark.parametrize(
    "policy",
    [
        blocks,
        by_class("Block"),
        by_class(models.Block),
        by_class("tests.fsdp.models.Block"),
    ],
    ids=["blocks", "short", "type", "dotted"],
)
def test_wrap_policies_choose_the_blocks(policy):
    assert names(plan_units(models.untied(), policy)) == ["", *LAYERS]


def test_no_wrap_leaves_one_unit():
    model = models.untied()
    assert plan_units(model, policy_of(FSDPConfig(auto_wrap_policy="NO_WRAP"), model)) == [ROOT]


def test_a_dotted_name_is_imported():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert by_class("torch.nn.Linear")(model) == ["0"]
    assert by_class("torch.nn.modules.linear.Linear")(model) == ["0"]


def test_a_short_class_name_is_looked_up_in_transformers():
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = nn.Sequential(LlamaDecoderLayer(models.llama().config, 0), nn.Linear(2, 2))
    assert by_class("LlamaPreTrainedModel", "Linear", "LlamaDecoderLayer")(model)[0] == "0"


def test_wrap_classes_without_a_module_in_the_model_are_refused():
    with pytest.raises(UsageError, match=r"No module of TinyLM is a LlamaForCausalLM\. Its classes: Block"):
        by_class("LlamaForCausalLM")(models.untied())
    assert by_class("TinyLM")(models.untied()) == []  # the root is a unit anyway


def test_an_unknown_class_is_refused_with_those_that_exist():
    with pytest.raises(UsageError, match=r"'Blok'.*Block, Embedding"):
        by_class("Blok")(models.untied())


def test_size_based_wrapping_counts_only_parameters_outside_inner_units():
    block = sum(p.numel() for p in models.Block().parameters())
    model = models.untied()
    assert [n for n in by_size(block)(model) if n.startswith("layers")] == LAYERS
    assert [n for n in by_size(block + 1)(model) if n.startswith("layers")] == []
    nested = nn.Sequential(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 5)))  # 110 and 55 parameters
    assert by_size(55)(nested) == ["0.0", "0.1"]
    assert by_size(56)(nested) == ["0.0"]  # 55 parameters of "0" remain outside of it
    assert by_size(110)(nested) == ["0.0"]
    assert by_size(111)(nested) == ["0"]
    assert by_size(166)(nested) == []


def test_a_container_is_never_a_unit():
    assert all(not name.endswith("layers") for name in by_size(1)(models.untied()))
    with pytest.raises(UsageError, match=r"'layers' is a ModuleList"):
        plan_units(models.untied(), lambda model: ["layers"])


def test_an_unknown_module_name_is_refused():
    with pytest.raises(UsageError, match=r"'layers\.9', which is not a module"):
        plan_units(models.untied(), lambda model: ["layers.9"])


def test_excludes_by_class_and_by_name_take_precedence():
    assert names(plan_units(models.untied(), blocks, exclude=["layers.1"])) == ["", "layers.0", "layers.2"]
    assert names(plan_units(models.untied(), blocks, exclude=["Block"])) == [""]


def test_an_exclude_that_matches_nothing_is_refused():
    with pytest.raises(UsageError, match=r"exclude names 'layer\.\*', which is not a class or FQN of TinyLM"):
        plan_units(models.untied(), blocks, exclude=["layers.1", "layer.*"])


def test_heads_are_units_on_request():
    assert names(plan_units(models.untied(), blocks, heads=True)) == ["", *LAYERS, "lm_head"]


def test_tied_units_are_joined():
    model = models.llama(tie=True)
    units = plan_units(model, blocks, heads=True)
    assert ("model.embed_tokens", "lm_head") in units


def test_a_unit_tied_to_the_root_is_left_to_the_root():
    assert names(plan_units(models.tied(), blocks, heads=True)) == ["", *LAYERS]


def test_three_tied_blocks_become_one_unit():
    model = models.untied()
    model.layers[2].up.weight = model.layers[0].up.weight
    model.layers[1].down.weight = model.layers[2].down.weight
    assert plan_units(model, blocks) == [("layers.0", "layers.1", "layers.2"), ROOT]


def test_a_module_registered_twice_is_one_unit():
    model = models.untied()
    model.layers[2] = model.layers[0]
    assert names(plan_units(model, blocks)) == ["", "layers.0", "layers.1"]


def test_inner_units_come_before_outer_ones():
    units = plan_units(models.untied(), lambda model: ["layers.0", "layers.0.up"])
    assert units == [("layers.0.up",), ("layers.0",), ROOT]


def test_ties_are_found_by_identity():
    assert tied_parameters(models.tied()) == [("embed.weight", "lm_head.weight")]
    assert tied_parameters(models.untied()) == []


def test_auto_uses_the_no_split_classes_of_a_model_without_changing_them():
    model = models.llama()
    before = (type(model)._no_split_modules, str(type(model)._no_split_modules))
    for _ in range(2):
        assert policy_of(FSDPConfig(), model)(model) == ["model.layers.0", "model.layers.1"]
    assert (type(model)._no_split_modules, str(type(model)._no_split_modules)) == before


def test_transformer_wrap_without_classes_is_refused():
    with pytest.raises(UsageError, match="doesn't name its block classes"):
        policy_of(FSDPConfig(auto_wrap_policy="TRANSFORMER_BASED_WRAP"), models.untied())
