"""Parameter groups."""

from __future__ import annotations

import torch
from torch import nn

from ckptkit.fsdp import param_groups
from ckptkit.fsdp.config import FSDPConfig
from ckptkit.fsdp.groups import clean_fqn
from ckptkit.fsdp.strategy import FSDPStrategy
from tests.fsdp import models


def test_groups_are_disjoint_and_hold_every_trainable_parameter_under_its_name():
    for build in (models.untied, models.tied, models.frozen, models.lora):
        model = build()
        groups = param_groups(model, weight_decay=0.1)
        found = {name: p for g in groups for name, p in zip(g["param_names"], g["params"], strict=True)}
        assert sum(len(g["params"]) for g in groups) == len(found)
        assert found == {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_norms_and_biases_are_not_decayed():
    decay, no_decay = param_groups(models.untied(), weight_decay=0.1)
    assert decay["weight_decay"] == 0.1
    assert no_decay["weight_decay"] == 0.0
    assert all(name.endswith(("bias", "norm.weight")) for name in no_decay["param_names"])
    assert not any(name.endswith(("bias", "norm.weight")) for name in decay["param_names"])


def test_names_that_are_not_decayed_can_be_chosen():
    groups = param_groups(models.untied(), weight_decay=0.1, no_decay=["embed"])
    assert [g["param_names"] for g in groups if g["weight_decay"] == 0.0] == [["embed.weight"]]


def test_dtypes_are_kept_apart():
    model = models.untied()
    model.lm_head.to(torch.bfloat16)
    assert sorted(str({p.dtype for p in g["params"]}) for g in param_groups(model)) == [
        "{torch.bfloat16}",
        "{torch.float32}",
    ]


def test_wrappers_names_are_cleaned():
    assert clean_fqn("_orig_mod.layers.0._checkpoint_wrapped_module.w") == "layers.0.w"


def _sharded_groups(tp):
    strategy = FSDPStrategy(FSDPConfig(tp=tp))
    model = strategy.prepare_model(models.llama())
    model.extra = nn.Linear(2, 2)  # not sharded
    groups = param_groups(model, weight_decay=0.1)
    for group in groups:
        layouts = {(p.device_mesh, p.placements) if hasattr(p, "placements") else None for p in group["params"]}
        assert len(layouts) == 1
    torch.optim.AdamW(groups, fused=True)
    return [len(group["params"]) for group in groups]


def test_meshes_and_plain_tensors_are_kept_apart(ranks):
    assert len(ranks.run(_sharded_groups, 2, 1)[0]) == 4  # sharded and plain, decayed and not
    assert len(ranks.run(_sharded_groups, 2, 2)[0]) >= 5  # and on the tensor-parallel mesh
