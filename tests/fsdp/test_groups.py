"""Parameter groups: weight decay, dtypes and meshes."""

import pytest
import torch
from torch import nn

from ckptkit.fsdp import NO_DECAY, FSDPConfig, FSDPStrategy, param_groups
from tests.fsdp import models
from tests.ranks import on_ranks


def test_groups_are_disjoint_and_name_every_trainable_parameter():
    for build in (models.untied, models.tied, models.frozen, models.lora):
        model = build()
        groups = param_groups(model, weight_decay=0.1)
        found = {name: p for g in groups for name, p in zip(g["param_names"], g["params"], strict=True)}
        assert sum(len(g["params"]) for g in groups) == len(found)
        assert found == {name: p for name, p in model.named_parameters() if p.requires_grad}


class Scale(nn.Module):
    """A norm that only its name reveals."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.ones(4))


class LlamaRMSNorm(Scale):
    """A norm that its class reveals."""


class AdaNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.norm_weight = nn.Parameter(torch.ones(4))


class Zoo(nn.Module):
    """Names of norms and biases in real models, and names that only resemble them."""

    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(4)
        self.norm1 = nn.GroupNorm(2, 4)
        self.bn = nn.BatchNorm2d(4)
        self.post = nn.InstanceNorm1d(4, affine=True)
        self.input_layernorm = LlamaRMSNorm()
        self.stack = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4), LlamaRMSNorm())
        self.ln_f = Scale()
        self.q_norm = Scale()
        self.image = nn.LayerNorm((4, 4))
        self.ada_norm = AdaNorm()
        self.unbiased_proj = nn.Linear(4, 4, bias=False)
        self.ln = nn.Linear(4, 4, bias=False)
        self.normalizer = nn.Linear(4, 4)
        self.abnormal = Scale()
        self.rnn = nn.LSTM(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.gate = nn.Embedding(3, 4)


DECAYED = {
    "stack.0.weight", "ada_norm.linear.weight", "unbiased_proj.weight", "ln.weight", "normalizer.weight",
    "abnormal.weight", "abnormal.scale", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "attention.in_proj_weight",
    "attention.out_proj.weight", "gate.weight",
}  # fmt: skip


def decayed(groups):
    return {name for group in groups if group["weight_decay"] for name in group["param_names"]}


def test_norms_and_biases_are_found_by_class_and_name_component():
    model = Zoo()
    assert decayed(param_groups(model, weight_decay=0.1)) == DECAYED
    names = {name for name, _ in model.named_parameters()}
    assert not any(name.split(".")[0] in ("ln_1", "norm1", "bn", "q_norm", "image") for name in DECAYED)
    assert {"ln_1.weight", "norm1.weight", "bn.weight", "rnn.bias_ih_l0", "attention.in_proj_bias"} <= names - DECAYED


def test_no_decay_excludes_more_parameters():
    rules = (*NO_DECAY, "gate", Scale, lambda name, module, parameter: isinstance(module, nn.LSTM))
    found = decayed(param_groups(Zoo(), weight_decay=0.1, no_decay=rules))
    assert found == {n for n in DECAYED if n.split(".")[0] not in ("gate", "abnormal", "rnn")}


def test_no_decay_replaces_the_default_names():
    everything = {name for name, _ in Zoo().named_parameters()}
    assert decayed(param_groups(Zoo(), weight_decay=0.1, no_decay=["gate"])) == everything - {"gate.weight"}


@pytest.mark.parametrize(("rule", "expected"), [
    ("bias", False), ("unbiased_proj", True), ("proj.weight", True), ("PROJ", True), ("unbiased_proj.bias", False),
    ("roj.weight", False), ("weight", True),
])  # fmt: skip
def test_no_decay_matches_whole_name_components(rule, expected):
    model = nn.ModuleDict({"unbiased_proj": nn.Linear(2, 2, bias=False)})
    assert (not decayed(param_groups(model, weight_decay=0.1, no_decay=[rule]))) is expected


def test_parameters_of_different_dtypes_are_in_different_groups():
    model = models.untied()
    model.lm_head.to(torch.bfloat16)
    dtypes = [{p.dtype for p in group["params"]} for group in param_groups(model)]
    assert sorted(map(str, dtypes)) == ["{torch.bfloat16}", "{torch.float32}"]


def test_group_names_have_no_wrapper_prefixes():
    model = nn.ModuleDict({"layers": nn.ModuleDict({"_checkpoint_wrapped_module": nn.Linear(2, 2, bias=False)})})
    assert param_groups(torch.compile(model))[0]["param_names"] == ["layers.weight"]


@pytest.mark.parametrize(("tp", "least"), [(1, 4), (2, 5)])  # sharded and plain, with and without decay; tp's mesh
@on_ranks(2)
def test_parameters_of_different_meshes_are_in_different_groups(tp, least):
    model = FSDPStrategy(FSDPConfig(tp=tp)).prepare_model(models.llama())
    model.extra = nn.Linear(2, 2)  # not sharded
    groups = param_groups(model, weight_decay=0.1)
    for group in groups:
        layouts = {(p.device_mesh, p.placements) if hasattr(p, "placements") else None for p in group["params"]}
        assert len(layouts) == 1
    torch.optim.AdamW(groups, fused=True)
    assert len(groups) >= least
