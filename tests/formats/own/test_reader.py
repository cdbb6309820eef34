"""Our own committed checkpoints as catalogs."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptkit
from ckptkit import CheckpointManager, StateDictType, TrainState, convert, open_checkpoint, reshard
from ckptkit.catalog.entry import Catalog
from ckptkit.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompleteCheckpointError, IntegrityError
from ckptkit.formats.own.reader import open_catalog, open_manifest
from ckptkit.storage.local import LocalStore
from tests.checkpoint import states
from tests.hostile.records import edit_record, reseal
from tests.offline.folders import flip


def saved_step(root: Path, kind: str = "sharded", *without: str) -> Path:
    """Save a step that then loses these files."""
    model = nn.Linear(2, 2)
    states.save(root, TrainState(model=model, optimizer=torch.optim.SGD(model.parameters())), state_dict_type=kind)
    for name in without:
        (root / "step_00000001" / name).unlink()
    return root / "step_00000001"


def opened(step: Path) -> Catalog:
    return open_catalog(LocalStore(step))


@pytest.mark.parametrize(("nbytes", "text"), [(None, "the commit record does not list"), (8, "past the end of its")])
def test_a_slice_outside_of_the_committed_files_is_refused_before_its_tensor_is_made(tmp_path, nbytes, text):
    step = saved_step(tmp_path)

    def change(record: dict[str, Any]) -> None:
        data = record["files"].pop("__0_0.distcp")
        record["total_bytes"] += (nbytes or 0) - data["nbytes"]
        if nbytes is not None:
            record["files"]["__0_0.distcp"] = {**data, "nbytes": nbytes}

    edit_record(step, change)
    with pytest.raises(IncompleteCheckpointError, match=text):
        opened(step)


def test_a_directory_without_record_and_manifest_is_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        opened(tmp_path)


@pytest.mark.parametrize("kind", list(StateDictType))
def test_a_step_that_lost_its_record_is_not_read_as_something_else(tmp_path, kind):
    step = saved_step(tmp_path, kind, "checkpoint.json")
    reads = open_checkpoint, ckptkit.inspect, lambda url: states.load(url, TrainState(model=nn.Linear(2, 2)), url)
    for read, url in itertools.product(reads, (tmp_path, step)):
        with pytest.raises(IncompleteCheckpointError, match=r"has a manifest but no checkpoint\.json: it is an inc"):
            read(str(url))


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_files_of_a_step_without_record_and_manifest_are_read_with_a_warning(tmp_path, kind, caplog):
    step = saved_step(tmp_path, kind, "checkpoint.json", "manifest.safetensors", "objects.json")
    assert "that this copy is complete" in ckptkit.verify(str(step)).doubt
    assert any("commit record and the manifest" in note for note in ckptkit.inspect(str(step)).notes)
    with caplog.at_level("WARNING"):
        report = CheckpointManager(tmp_path / "new").load(TrainState(model=nn.Linear(2, 2)), str(step))
    assert any("that this copy is complete" in note for note in report.notes)
    assert "that this copy is complete" in caplog.text


def test_a_reshard_that_lost_its_record_and_manifest_is_noted_but_a_plain_dcp_is_not(tmp_path):
    plain, converted, resharded = (str(tmp_path / name) for name in ("step_00000001", "dcp", "out"))
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=plain, no_dist=True)
    convert(plain, converted, to="dcp")
    assert ckptkit.verify(plain).doubt == ckptkit.verify(converted).doubt == ""
    reshard(plain, resharded, world_size=2)
    for name in ("checkpoint.json", "manifest.safetensors"):
        Path(resharded, name).unlink()
    assert "that this copy is complete" in ckptkit.verify(resharded).doubt


@pytest.mark.parametrize("objects", [[], {"format": 2, "objects": {}}, {"format": 1}, {"format": 1, "objects": []}])
def test_malformed_objects_are_refused(tmp_path, objects):
    step = saved_step(tmp_path)
    (step / "objects.json").write_text(json.dumps(objects))
    reseal(step)
    with pytest.raises(CorruptCheckpointError, match=r"objects\.json"):
        opened(step)


def test_a_manifest_without_metadata_next_to_it_is_not_used(tmp_path):
    assert open_manifest(LocalStore(saved_step(tmp_path, "sharded", "checkpoint.json", ".metadata"))) is None


@pytest.mark.parametrize("name", ["manifest.safetensors", "objects.json"])
@pytest.mark.parametrize(("damage", "error"), [
    (Path.unlink, IncompleteCheckpointError), (lambda file: os.truncate(file, 100), IncompleteCheckpointError),
    (flip, IntegrityError),
])  # fmt: skip
def test_an_error_names_a_damaged_file(tmp_path, name, damage, error):
    step = saved_step(tmp_path)
    damage(step / name)
    with pytest.raises(error, match=name):
        opened(step)
