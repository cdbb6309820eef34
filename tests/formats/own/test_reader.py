"""Our own committed checkpoints as catalogs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import nn

import ckptkit
from ckptkit import CheckpointManager, StateDictType, TrainState, convert, open_checkpoint, reshard
from ckptkit.catalog.entry import Role
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, IntegrityError
from ckptkit.formats.own.manifest import Manifest
from ckptkit.formats.own.reader import open_catalog, open_manifest
from ckptkit.formats.own.record import CommitRecord, FileRecord
from ckptkit.storage.local import LocalStore
from tests.checkpoint import states
from tests.formats.own.test_manifest import catalog
from tests.offline.folders import flip

OBJECTS = {"format": 1, "objects": {"step": 12, "optimizer": {"param_groups": []}, "rng.0": {"$tuple": [1, 2]}}}


def commit(
    root: Path, *, kind="sharded", data="", objects: object = OBJECTS, listed=None, nbytes=1 << 30
) -> LocalStore:
    """Return a committed checkpoint whose data files are not needed to open it."""
    place = root / data
    place.mkdir(parents=True, exist_ok=True)
    contents = {"manifest.safetensors": Manifest.of(catalog()).to_bytes()}
    if objects is not None:
        contents["objects.json"] = json.dumps(objects).encode()
    for name, content in contents.items():
        (place / name).write_bytes(content)
    files = {name: FileRecord(len(c), xxhash.xxh3_64_hexdigest(c)) for name, c in contents.items()}
    paths = Manifest.of(catalog()).paths if listed is None else listed
    files.update(dict.fromkeys(paths, FileRecord(nbytes, "0" * 16)))
    record = CommitRecord(
        step=12, save_id="0123456789abcdef", data=data, state_dict_type=kind, world_size=2,
        mesh={"shape": [2], "names": ["dp"]}, files=files, manifest="manifest.safetensors",
        versions={"ckptkit": "0.1.0"},
    )  # fmt: skip
    (root / "checkpoint.json").write_bytes(record.to_json())
    return LocalStore(root)


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_every_state_dict_type_opens_with_its_record(tmp_path, kind):
    found = open_catalog(commit(tmp_path, kind=kind))
    assert (found.info.format, found.info.producer, found.info.step) == (f"ckptkit-{kind}", "ckptkit 0.1.0", 12)
    assert list(found.tensors) == list(catalog().tensors)
    assert {"manifest.safetensors", "objects.json"} <= set(found.info.files)


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"listed": []}, "which the commit record does not list"), ({"nbytes": 8}, "past the end of its file")],
)
def test_a_slice_outside_of_the_committed_files_is_refused_before_its_tensor_is_made(tmp_path, changes, text):
    with pytest.raises(IncompleteCheckpointError, match=text):
        open_catalog(commit(tmp_path, **changes))


def test_the_objects_next_to_the_manifest_are_entries(tmp_path):
    found = open_catalog(commit(tmp_path)).objects
    assert found["step"].value == 12
    assert found["rng.0"].value == {"$tuple": [1, 2]}
    assert (found["optimizer"].role, found["step"].role) == (Role.OPTIMIZER, Role.OTHER)
    assert "optimizer.param_groups.0.lr" in found


def test_paths_are_relative_to_the_store_for_every_data_directory(tmp_path):
    found = open_catalog(commit(tmp_path, data="0123456789abcdef"))
    assert found.tensors["step"].slices[0].path == "0123456789abcdef/__0_0.distcp"
    assert found.objects["optimizer.param_groups.0.lr"].path == "0123456789abcdef/__0_0.distcp"
    assert "0123456789abcdef/objects.json" in found.info.files


def saved_step(root: Path, kind: str, *without: str) -> Path:
    """Save a step that then loses these files."""
    states.save(root, TrainState(model=nn.Linear(2, 2)), state_dict_type=kind)
    for name in without:
        (root / "step_00000001" / name).unlink()
    return root / "step_00000001"


@pytest.mark.parametrize("kind", list(StateDictType))
def test_a_step_that_lost_its_record_is_not_read_as_something_else(tmp_path, kind):
    step = saved_step(tmp_path, kind, "checkpoint.json")
    expected = r"has a manifest but no checkpoint\.json: it is an incomplete copy"
    for read in (
        open_checkpoint,
        ckptkit.inspect,
        lambda url: CheckpointManager(url).load(TrainState(model=nn.Linear(2, 2)), url),
    ):
        for url in (tmp_path, step):
            with pytest.raises(IncompleteCheckpointError, match=expected):
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


def test_a_plain_dcp_is_not_mistaken_for_an_incomplete_copy(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "step_00000001"), no_dist=True)
    assert ckptkit.verify(str(tmp_path / "step_00000001")).doubt == ""
    convert(str(tmp_path / "step_00000001"), str(tmp_path / "out"), to="dcp")
    assert ckptkit.verify(str(tmp_path / "out")).doubt == ""


def test_a_reshard_that_lost_its_record_and_manifest_is_read_with_a_note(tmp_path):
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=str(tmp_path / "in"), no_dist=True)
    reshard(str(tmp_path / "in"), str(tmp_path / "out"), world_size=2)
    for name in ("checkpoint.json", "manifest.safetensors"):
        (tmp_path / "out" / name).unlink()
    assert "that this copy is complete" in ckptkit.verify(str(tmp_path / "out")).doubt


@pytest.mark.parametrize("objects", [[], {"format": 2, "objects": {}}, {"format": 1}, {"format": 1, "objects": []}])
def test_malformed_objects_are_refused(tmp_path, objects):
    with pytest.raises(CorruptCheckpointError, match=r"objects\.json"):
        open_catalog(commit(tmp_path, objects=objects))


def test_a_manifest_without_metadata_next_to_it_is_not_used(tmp_path):
    (tmp_path / "manifest.safetensors").write_bytes(Manifest.of(catalog()).to_bytes())
    assert open_manifest(LocalStore(tmp_path)) is None


@pytest.mark.parametrize("name", ["manifest.safetensors", "objects.json"])
@pytest.mark.parametrize(
    ("damage", "error"),
    [(Path.unlink, IncompleteCheckpointError), (lambda file: os.truncate(file, 100), IncompleteCheckpointError),
     (flip, IntegrityError)],
)  # fmt: skip
def test_an_error_names_a_damaged_file(tmp_path, name, damage, error):
    store = commit(tmp_path)
    damage(tmp_path / name)
    with pytest.raises(error, match=name):
        open_catalog(store)
