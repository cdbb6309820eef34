"""The meaning of the arguments of NeMo's and Lightning's strategies; Lightning is not needed."""

import pytest
import torch
from torch import nn

from ckptkit.errors import UsageError
from ckptkit.integrations.lightning_setup import fsdp_config, group_sizes, loose_parameters, roots, wrap_policy


def config(**changes):
    made = {"mesh": None, "dp": 2, "tp": 1, "cp": 1, "offload": False, "state_dict_type": "full", "device": "cpu"}
    made |= {"sharding_strategy": "FULL_SHARD", "precision": "32-true", "mp_policy": None}
    return fsdp_config(**{**made, **changes})


@pytest.mark.parametrize(("arguments", "sizes"), [
    ({"dp": "auto", "tp": "auto"}, (8, 1)), ({"dp": "auto", "tp": "auto", "has_plan": True, "nodes": 2}, (2, 4)),
    ({"dp": "auto", "tp": 2}, (4, 2)), ({"dp": 2, "tp": "auto", "cp": 2}, (2, 2)),
])  # fmt: skip
def test_an_auto_size_is_computed_from_the_other_sizes(arguments, sizes):
    assert group_sizes(8, **arguments) == sizes


@pytest.mark.parametrize("arguments", [{"dp": 3, "tp": 2}, {"dp": 3, "tp": "auto"}, {"dp": 16, "tp": "auto"}])
def test_sizes_that_do_not_multiply_to_the_world_size_are_refused(arguments):
    with pytest.raises(UsageError, match="does not fit a world size of 8"):
        group_sizes(8, **arguments)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("32-true", None), ("bf16-true", None), ("16-true", None), ("bf16-mixed", "bf16"), ("16-mixed", "fp16")],
)
def test_trainer_precisions_become_mixed_precision_policies(precision, expected):
    assert config(sharding_strategy="full_shard", precision=precision).mixed_precision == expected


def test_a_mixed_precision_policy_overrides_the_trainers_precision():
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    made = config(precision="16-mixed", mp_policy=policy)
    assert (made.mixed_precision, made.reduce_dtype) == ("bf16", "fp32")


def test_a_2d_mesh_replicates_over_its_first_dimension():
    made = config(mesh=(2, 2), dp=4)
    assert (made.sharding_strategy.name, made.replicate, made.shard) == ("HYBRID_SHARD", 2, 2)


def test_an_unknown_state_dict_type_and_sharding_strategy_are_refused():
    for changes in ({"state_dict_type": "half"}, {"sharding_strategy": "SOME_SHARD"}):
        with pytest.raises(UsageError, match="expected one of"):
            config(**changes)


def test_wrap_policies_are_classes_or_the_callable_of_fsdp1():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert wrap_policy({nn.Linear})(model) == ["0", "1.0"]

    def big(module, recurse, nonwrapped_numel):
        return nonwrapped_numel == 6 and isinstance(module, nn.Sequential)

    assert wrap_policy(big)(model) == ["1"]


def test_containers_are_not_roots_and_bare_parameters_are_found():
    module = nn.Module()
    module.parts = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)])
    module.net = nn.Linear(2, 2)
    module.scale = nn.Parameter(torch.ones(1))
    assert roots(module) == [module.parts[0], module.parts[2], module.net]
    assert loose_parameters(module, roots(module)) == ["scale"]
