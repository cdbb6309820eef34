"""The planner's paths tell weights, masters, optimizer states and other tensors apart, and where the wrapper ends."""

from __future__ import annotations

import pytest

from ckptkit.catalog.entry import Role
from ckptkit.formats.dcp.roles import EntryRole, Path, RoleTable


def roles(*paths: Path) -> list[EntryRole]:
    """Return the roles of tensors at these paths of one checkpoint."""
    keys = {".".join(map(str, path)): path for path in paths}
    table = RoleTable(keys, keys)
    return [table.of(key) for key in keys]


def model(fqn: str) -> EntryRole:
    return EntryRole(Role.MODEL, fqn)


def state(fqn: str, name: str) -> EntryRole:
    return EntryRole(Role.OPTIMIZER, fqn, name)


HF = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("wrapper", [(), ("model",), ("app", "model"), ("state_dict",), ("model", "state_dict")])
def test_wrapper_keys_are_removed_and_the_models_own_prefix_is_kept(wrapper: Path) -> None:
    assert roles((*wrapper, HF)) == [model(HF)]


def test_a_custom_key_is_a_wrapper_if_it_is_the_only_one() -> None:
    assert roles(("generator", HF), ("optimizer", "state", HF, "exp_avg"))[0] == model(HF)


def test_several_custom_keys_are_kept_in_the_names() -> None:
    assert roles(("g", "w"), ("d", "w")) == [model("g.w"), model("d.w")]


def test_models_that_share_names_keep_their_keys() -> None:
    assert roles(("actor", "w"), ("model", "w")) == [model("actor.w"), model("model.w")]


def test_other_tensors_next_to_a_model_are_not_weights() -> None:
    assert roles(("model", HF), ("ema", HF), ("step",), ("lr_scheduler", "x")) == [
        model(HF),
        *[EntryRole(Role.OTHER)] * 3,
    ]


OPTIMIZER_PATHS: dict[Path, EntryRole] = {
    ("optimizer", "state", HF, "exp_avg"): state(HF, "exp_avg"),
    ("optim", "state", HF, "step"): state(HF, "step"),
    ("app", "optim", "state", HF, "step"): state(HF, "step"),
    ("optimizer_0", "state", HF, "exp_avg"): state(HF, "exp_avg"),
    ("optimizers", 0, "state", HF, "exp_avg"): state(HF, "exp_avg"),
    ("optimizers", "adam", "state", HF, "exp_avg"): state(HF, "exp_avg"),
    ("optimizer", f"state.{HF}.exp_avg"): state(HF, "exp_avg"),
    (f"optimizer.state.{HF}.exp_avg",): state(HF, "exp_avg"),
    (f"optimizer.state.exp_avg.{HF}",): state(HF, "exp_avg"),
    (f"optimizer.state.fp32_param.{HF}",): EntryRole(Role.MASTER, HF),
    ("optimizer", "master", HF): EntryRole(Role.MASTER, HF),
    (f"optimizer.master.{HF}",): EntryRole(Role.MASTER, HF),
    ("optimizer", "state", HF, "master"): EntryRole(Role.MASTER, HF),
    ("optimizer", "param_groups", 0, "lr"): EntryRole(Role.OPTIMIZER),
    ("optimizer", f"param_groups.{HF}.lr"): EntryRole(Role.OPTIMIZER),
}


@pytest.mark.parametrize("path", OPTIMIZER_PATHS)
def test_optimizer_states_know_their_parameter(path: Path) -> None:
    assert roles((HF,), path)[1] == OPTIMIZER_PATHS[path]


def test_a_checkpoint_of_an_optimizer_alone_has_no_weights() -> None:
    paths: list[Path] = [("state", HF, "exp_avg"), ("param_groups", 0, "lr")]
    assert roles(*paths) == [state(HF, "exp_avg"), EntryRole(Role.OPTIMIZER)]
    assert roles((f"state.{HF}.exp_avg",), ("param_groups.0.lr",))[0] == state(HF, "exp_avg")


def test_model_and_optimizer_below_the_key_state_are_recognised() -> None:
    paths: list[Path] = [("state", "model", HF), ("state", "optim", "state", HF, "exp_avg")]
    assert roles(*paths) == [model(HF), state(HF, "exp_avg")]


def test_a_weight_called_state_is_a_weight() -> None:
    assert roles(("state.weight",), ("head.weight",)) == [model("state.weight"), model("head.weight")]


def test_a_weight_below_the_model_may_be_called_optimizer() -> None:
    assert roles(("model", "optimizer.weight"))[0] == model("optimizer.weight")


def test_a_key_without_a_path_is_a_name() -> None:
    assert RoleTable({}, ["w"]).of("w") == model("w")


@pytest.mark.parametrize("wrapper", [("model", "model"), ("models", 0), ("model", "module", "model"), ("app", "model")])
def test_nested_model_keys_are_wrappers(wrapper: Path) -> None:
    paths = {"a": (*wrapper, "model.embed.weight"), "b": (*wrapper, "head.weight")}
    table = RoleTable(paths, paths)
    assert [table.of(key) for key in paths] == [model("model.embed.weight"), model("head.weight")]


def test_a_submodule_named_model_is_not_removed_as_a_wrapper() -> None:
    paths = {"a": ("model", "model", "embed"), "b": ("model", "head")}
    table = RoleTable(paths, paths)
    assert [table.of(key) for key in paths] == [model("model.embed"), model("head")]
