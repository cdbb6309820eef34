"""`convert --weights ema`: the moving average in a checkpoint, under the model's names."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit import TrainState
from ckptkit.errors import CheckpointMismatchError, CheckpointNotFoundError, UnsupportedFormatError, UsageError
from tests.checkpoint.states import save
from tests.offline.exports import Result, assert_same, converted


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))


def average(of: torch.nn.Module) -> torch.optim.swa_utils.AveragedModel:
    made = torch.optim.swa_utils.AveragedModel(of, use_buffers=True)
    with torch.no_grad():
        for tensor in made.module.state_dict().values():
            tensor.add_(1)
    return made


def exported(src: Path, **options: Any) -> Result:
    return converted(src, src.parent / "out", weights="ema", **{"verify": True, **options})


def linear(rows: int = 32) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, rows))


def test_an_average_saved_as_a_second_model_is_exported(tmp_path):
    net = model()
    ema = average(net)
    save(tmp_path / "run", TrainState(model={"a": net, "ema": ema}))
    expected = {f"a.{name}": tensor for name, tensor in ema.module.state_dict().items()}
    assert_same(exported(tmp_path / "run").tensors, expected)


@pytest.mark.parametrize(("saved", "picked"), [
    ("of one", "actor"), ("of each", "actor"), ("of each", "critic"), ("of a module", "actor."),
])  # fmt: skip
def test_the_average_of_the_picked_model_is_exported(tmp_path, saved, picked):
    models = {"actor": linear(), "critic": linear(1 if saved == "of one" else 32)}
    net = torch.nn.ModuleDict(models)
    whole = average(net)
    ema = {"of one": average(models["actor"]), "of each": whole.module.state_dict(), "of a module": whole}[saved]
    save(tmp_path / "run", TrainState(model=net if saved == "of a module" else models, extra={"ema": ema}))
    found = exported(tmp_path / "run", strip_prefix=picked)
    assert_same(found.tensors, whole.module[picked.rstrip(".")].state_dict())


@pytest.mark.parametrize(("key", "told"), [("ema", True), ("actor_ema", False)])
def test_an_average_without_a_models_name_that_fits_several_is_noted(tmp_path, key, told):
    models = {name: torch.nn.Linear(4, 3) for name in ("actor", "critic")}
    save(tmp_path / "run", TrainState(model=models, extra={key: average(models["actor"])}))
    found = exported(tmp_path / "run", strip_prefix="actor")
    assert (
        "extra.ema does not say whose average it is, and also fits critic. Is it that of actor?" in found.report.notes
    ) == told


@pytest.mark.parametrize("form", ["actor.", "actor.module."])
@pytest.mark.parametrize("key", ["ema", "actor_ema"])
def test_the_average_of_another_model_than_the_picked_one_is_refused(tmp_path, form, key):
    models = {name: linear() for name in ("actor", "critic")}
    ema = {f"{form}{name}": tensor for name, tensor in models["actor"].state_dict().items()}
    save(tmp_path / "run", TrainState(model=models, extra={key: ema}))
    with pytest.raises(CheckpointMismatchError, match="another model"):
        exported(tmp_path / "run", strip_prefix="critic")


def test_averages_stored_as_plain_values_are_refused_by_name(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 1))
    nested = {"0": net[0].state_dict(), "1": net[1].state_dict()}  # "1" has no large tensor
    save(tmp_path / "run", TrainState(model=net, extra={"ema": nested}))
    with pytest.raises(UnsupportedFormatError, match=r"1\.weight, 1\.bias.*so small"):
        exported(tmp_path / "run")


@pytest.mark.parametrize("form", ["timm", "wrapped", "lightning"])
def test_the_average_in_a_file_of_another_system_is_exported(tmp_path, form):
    net = model()
    averaged, weights = average(net), net.state_dict()
    ema = averaged.module.state_dict()
    content: dict[str, Any] = {
        "timm": {"state_dict": weights, "state_dict_ema": ema, "epoch": 1},
        "wrapped": {"model": weights, "model_ema": {"decay": 0.9, "module": ema}},
        "lightning": {"state_dict": weights, "pytorch-lightning_version": "2.6.0", "epoch": 1, "global_step": 1},
    }[form]
    if form == "lightning":
        callback = pytest.importorskip("lightning.pytorch.callbacks").WeightAveraging()
        callback._average_model = averaged
        callback.on_save_checkpoint(None, None, content)
    torch.save(content, tmp_path / "x.ckpt")
    found = exported(tmp_path / "x.ckpt").tensors
    assert_same({name.removeprefix("model.").removeprefix("state_dict."): t for name, t in found.items()}, ema)


def test_dotless_names_of_averages_are_matched_and_other_tensors_come_from_the_model(tmp_path):
    net = model()
    weights, parameters = net.state_dict(), dict(net.named_parameters())
    # The format of latent-diffusion: parameters only, names without dots, next to the model's.
    averages = {f"model_ema.{name.replace('.', '')}": tensor.detach() + 1 for name, tensor in parameters.items()}
    plain = {f"model.{name}": tensor for name, tensor in weights.items()}
    torch.save({"state_dict": {**plain, **averages}}, tmp_path / "x.ckpt")
    found = exported(tmp_path / "x.ckpt")
    assert any("3 tensors have no average" in note for note in found.report.notes)  # the buffers
    assert_same(found.tensors, {f"model.{name}": t + 1 if name in parameters else t for name, t in weights.items()})


@pytest.mark.parametrize(("content", "error", "said"), [
    ({}, CheckpointNotFoundError, "no tensors of an EMA"),
    ({"ema": {"a.w": torch.ones(2)}, "state_dict_ema": {"a.w": torch.ones(2)}}, UsageError, "several EMAs: ema"),
    ({"ema": {"a.w": torch.ones(3)}}, CheckpointMismatchError, r"'.*a.w' has shape \[3\]"),
    ({"ema": {"b.v": torch.ones(2)}}, CheckpointMismatchError, "none of the names under 'ema.'"),
    ({"ema": {"0": torch.ones(2), "1": torch.ones(2)}}, UnsupportedFormatError, "have numbers instead of names"),
])  # fmt: skip
def test_an_average_of_another_model_is_refused(tmp_path, content, error, said):
    torch.save({"state_dict": {"a.w": torch.ones(2)}, **content}, tmp_path / "x.pt")
    with pytest.raises(error, match=said):
        exported(tmp_path / "x.pt")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["sharded", "full", "local", "torch", "dcp"])
def test_tied_weights_share_the_average_that_is_stored_under_one_of_their_names(tmp_path, kind):
    net = torch.nn.ModuleDict({"shared": torch.nn.Embedding(30, 20), "lm_head": torch.nn.Linear(20, 30, bias=False)})
    net["lm_head"].weight = net["shared"].weight
    ema = {name: parameter.detach() + 1 for name, parameter in net.named_parameters()}  # one name
    if kind == "torch":
        torch.save({"model": net.state_dict(), "ema": ema}, tmp_path / "run")
    elif kind == "dcp":
        dcp.save({"model": net.state_dict(), "ema": ema}, checkpoint_id=tmp_path / "run", no_dist=True)
    else:
        save(tmp_path / "run", TrainState(model=net, extra={"ema": ema}), state_dict_type=kind)
    assert_same(exported(tmp_path / "run").tensors, dict.fromkeys(net.state_dict(), ema["shared.weight"]))
