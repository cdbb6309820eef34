"""The planner's paths tell weights, masters, optimizer states and other tensors apart, and where the wrapper ends."""

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


OTHER = EntryRole(Role.OTHER)
CHECKPOINTS: dict[str, dict[Path, EntryRole]] = {
    "a custom key is a wrapper if it is the only one": {
        ("generator", HF): model(HF), ("optimizer", "state", HF, "exp_avg"): state(HF, "exp_avg")},
    "several custom keys are kept in the names": {("g", "w"): model("g.w"), ("d", "w"): model("d.w")},
    "models that share names keep their keys": {("actor", "w"): model("actor.w"), ("model", "w"): model("model.w")},
    "a critic beside an actor is a second model": {
        ("actor", "w"): model("actor.w"), ("critic", "w"): model("critic.w"), ("step",): OTHER},
    "a critic beside another model": {("model", "w"): model("w"), ("critic", "w"): OTHER},
    "a critic in a dict": {("x", "actor", "w"): model("x.actor.w"), ("x", "critic", "w"): model("x.critic.w")},
    "a model and an optimizer for each role": {path: role for name in ("actor", "critic") for path, role in {
        (name, "model", "w"): model(f"{name}.model.w"), (name, "optim", "state", 0, "exp_avg"): state("0", "exp_avg"),
        (name, "optim", "param_groups", 0, "lr"): EntryRole(Role.OPTIMIZER)}.items()},
    "other tensors next to a model are not weights": {
        ("model", HF): model(HF), ("ema", HF): OTHER, ("step",): OTHER, ("lr_scheduler", "x"): OTHER},
    "a wrapped copy below a custom key is not a second model": {
        ("model", HF): model(HF), ("ema", "module", HF): OTHER, ("ema", "updates"): OTHER},
    "an optimizer alone has no weights": {
        ("state", HF, "exp_avg"): state(HF, "exp_avg"), ("param_groups", 0, "lr"): EntryRole(Role.OPTIMIZER)},
    "an optimizer alone with flat names has no weights": {
        (f"state.{HF}.exp_avg",): state(HF, "exp_avg"), ("param_groups.0.lr",): EntryRole(Role.OPTIMIZER)},
    "model and optimizer below the key state": {
        ("state", "model", HF): model(HF), ("state", "optim", "state", HF, "exp_avg"): state(HF, "exp_avg")},
    "a flattened optimizer beside the weights": {
        (HF,): model(HF), (f"state.{HF}.exp_avg",): state(HF, "exp_avg"),
        (f"param_groups.{HF}.lr",): EntryRole(Role.OPTIMIZER)},
    "optimizers of any name": {
        ("g", HF): model(f"g.{HF}"), ("d", HF): model(f"d.{HF}"), ("opt", "state", HF, "exp_avg"): state(HF, "exp_avg"),
        ("opt", "param_groups", 0, "lr"): EntryRole(Role.OPTIMIZER), ("x", "D", "state", 0, "m"): state("0", "m"),
        ("x", "D", "param_groups", 0, "lr"): EntryRole(Role.OPTIMIZER)},
    "a module's extra state that holds tensors": {
        ("model", HF): model(HF), ("model", "fc1._extra_state", "amax"): OTHER, ("model", "_extra_state", 0): OTHER},
    "an optimizer's state that is a list or a dict": {
        ("optimizer", "state", HF, "GG", 0): state(HF, "GG.0"),
        ("optimizer", "state", "0", "d", "a"): state("0", "d.a")},
    "a module's extra state below top-level weights": {(HF,): model(HF), ("fc1._extra_state", "amax"): OTHER},
    "a weight called state is a weight": {
        ("state.weight",): model("state.weight"), ("head.weight",): model("head.weight")},
    "a weight below the model may be called optimizer": {("model", "optimizer.weight"): model("optimizer.weight")},
    "a submodule named model is no wrapper": {
        ("model", "model", "embed"): model("model.embed"), ("model", "head"): model("head")},
    **{f"the wrapper {wrapper}": {(*wrapper, HF): model(HF)}
       for wrapper in ((), ("model",), ("app", "model"), ("state_dict",), ("model", "state_dict"))},
    **{f"the nested wrapper {wrapper}": {
        (*wrapper, "model.embed"): model("model.embed"), (*wrapper, "head"): model("head")}
       for wrapper in (("model", "model"), ("models", 0), ("model", "module", "model"), ("app", "model"))},
}  # fmt: skip


@pytest.mark.parametrize("rule", CHECKPOINTS)
def test_wrappers_are_removed_from_names_and_roles_are_known(rule):
    assert roles(*CHECKPOINTS[rule]) == list(CHECKPOINTS[rule].values())


OPTIMIZER_PATHS: dict[Path, EntryRole] = {
    ("optimizer", "state", HF, "exp_avg"): state(HF, "exp_avg"),
    ("optim", "state", HF, "step"): state(HF, "step"),
    ("app", "optim", "state", HF, "step"): state(HF, "step"),
    ("optimizer_0", "state", HF, "exp_avg"): state(HF, "exp_avg"),
    ("optimizers", 0, "state", HF, "exp_avg"): state(HF, "exp_avg"),
    ("optimizers", "adam", "state", HF, "exp_avg"): state(HF, "exp_avg"),
    ("optimizer", f"state.{HF}.exp_avg"): state(HF, "exp_avg"),
    (f"optimizer.state.{HF}.exp_avg",): state(HF, "exp_avg"),
    ("optimizer.state.step.exp_avg.w.exp_avg",): state("step.exp_avg.w", "exp_avg"),
    ("optimizer.state.master.exp_avg.w.sum",): state("master.exp_avg.w", "sum"),
    ("optimizer", "master", HF): EntryRole(Role.MASTER, HF),
    (f"optimizer.master.{HF}",): EntryRole(Role.MASTER, HF),
    ("optimizer", "state", HF, "master"): EntryRole(Role.MASTER, HF),
    ("optimizer", "param_groups", 0, "lr"): EntryRole(Role.OPTIMIZER),
    ("optimizer", f"param_groups.{HF}.lr"): EntryRole(Role.OPTIMIZER),
}


@pytest.mark.parametrize("path", OPTIMIZER_PATHS)
def test_optimizer_states_know_their_parameter(path):
    assert roles((HF,), path)[1] == OPTIMIZER_PATHS[path]


def test_a_key_without_a_path_is_a_name():
    assert RoleTable({}, ["w"]).of("w") == model("w")
