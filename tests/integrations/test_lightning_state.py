"""Lightning's strategies replace and remove only checkpoints on a disk, and scatter whole tensors."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit import CheckpointManager, RetentionPolicy
from ckptkit.checkpoint.run.pins import pin_forever
from ckptkit.errors import CheckpointMismatchError
from ckptkit.integrations import lightning_state
from ckptkit.integrations.lightning_full import scatter_model
from ckptkit.storage import open_store
from tests.checkpoint.states import linear, save
from tests.conftest import ZOO
from tests.patches import before
from tests.ranks import on_ranks


@pytest.mark.parametrize("late", [False, True])
def test_a_file_that_appears_during_a_removal_is_kept(tmp_path, late, monkeypatch, caplog):
    place = tmp_path / "last.ckpt"
    place.mkdir()
    for name in (".metadata", "meta.pt", "__0_0.distcp"):
        (place / name).write_bytes(b"x")
    before(monkeypatch, lightning_state, "_set_aside", lambda _: late and (place / "notes.txt").write_bytes(b"mine"))
    lightning_state.remove_checkpoint(place)
    kept: list[Any] = [path for path in tmp_path.rglob("*") if path.name == "notes.txt"]
    assert not place.exists() and len(kept) == late == ("belong to no checkpoint: notes.txt" in caplog.text)
    if not late:
        assert list(tmp_path.iterdir()) == []
        return
    assert kept[0].parent.name.startswith("last.ckpt.replaced-") and (kept[0].parent / ".metadata").exists()


def test_a_run_can_start_over_after_the_removal_of_its_only_checkpoint(tmp_path):
    lightning_state.remove_checkpoint(f"{save(tmp_path, linear(), 5)}/step_00000005")
    with CheckpointManager(tmp_path) as manager:
        assert manager.load(linear()) is None


def test_a_pinned_checkpoint_is_not_removed(tmp_path, caplog):
    url = f"{save(tmp_path, linear(), 5)}/step_00000005"
    pin_forever(url)
    lightning_state.remove_checkpoint(url)
    assert Path(url).exists() and f"{url} is pinned; it is not removed." in caplog.text


def managed(folder: Any = None, **options: Any) -> Any:
    pytest.importorskip("lightning")  # here, because it takes seconds
    from ckptkit.integrations.lightning_callback import ManagedCheckpoint

    return ManagedCheckpoint(dirpath=folder, **options)


def test_the_newest_checkpoint_is_found_if_no_name_has_a_step(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        for step, tag in ((1, "loss=0.5"), (2, "loss=0.4")):
            manager.save(step, linear(), tag=tag)
    (tmp_path / "latest").unlink()  # only a hint
    assert managed(tmp_path)._newest(str(tmp_path)) == {f"{tmp_path}/loss=0.4"}


def test_the_newest_file_of_lightning_in_an_object_store_is_found():
    root = "memory://lightning/run"
    open_store(root).write("epoch=0-step=3.ckpt", (ZOO / "lightning_trainer_full/epoch=0-step=3.ckpt").read_bytes())
    assert managed(root)._newest(root) == {f"{root}/epoch=0-step=3.ckpt"}


def test_a_failed_removal_is_logged_and_not_raised(caplog):
    lightning_state.remove_checkpoint("nosuch://bucket/run/step=1.ckpt")
    assert "nosuch://bucket/run/step=1.ckpt was not removed" in caplog.text


def test_managed_checkpoint_needs_a_monitor_or_a_policy_to_keep_several():
    with pytest.raises(Exception, match="save_top_k"):  # a class of Lightning
        managed(save_top_k=3)
    assert managed(save_top_k=1).retention == RetentionPolicy(max_num=1)
    assert managed(retention=RetentionPolicy(max_num=3)).retention == RetentionPolicy(max_num=3)
    best = managed(save_top_k=3, monitor="loss").retention
    assert best == RetentionPolicy(max_num=1, keep_best=("loss", "min", 3))


# --- whole tensors of rank 0 loaded into live models, as for a CheckpointIO


def test_a_cast_is_logged(caplog):
    model = nn.Linear(2, 2)
    whole = {name: value.to(torch.bfloat16) for name, value in nn.Linear(2, 2).state_dict().items()}
    with caplog.at_level(logging.WARNING):
        scatter_model(model, whole)
    assert "2 tensors" in caplog.text and "weight from torch.bfloat16 to torch.float32" in caplog.text
    assert torch.equal(model.weight, whole["weight"].float())
    caplog.clear()
    scatter_model(model, model.state_dict())
    assert not caplog.text


@on_ranks(2)
def test_different_weights_for_one_tied_tensor_are_refused_on_every_rank():
    model = nn.ModuleDict({"embed": nn.Embedding(6, 2), "head": nn.Linear(2, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    before = model["embed"].weight.clone()
    rank = torch.distributed.get_rank()
    whole = {"embed.weight": torch.zeros(6, 2), "head.weight": torch.ones(6, 2)} if rank == 0 else {}
    with pytest.raises(CheckpointMismatchError, match=r"embed\.weight and head\.weight"):
        scatter_model(model, whole)
    assert torch.equal(model["embed"].weight, before)
    scatter_model(model, {name: torch.full((6, 2), torch.nan) for name in whole})
    assert model["embed"].weight.isnan().all()
