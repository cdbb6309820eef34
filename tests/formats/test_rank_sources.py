"""Checkpoints that real ranks write during the test: rank files, uneven, HSDP, tensor parallel."""

import shutil

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckptkit.catalog.entry import Role
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats.detect import open_source
from ckptkit.formats.trainers.master_check import check_masters
from tests.formats import rank_writers
from tests.formats.readback import contents, contents_of_state_dict


def opened_with(folder, expected):
    """Open a checkpoint that has these weights, masters and first moments."""
    source = open_source(str(folder))
    catalog = source.catalog
    moments = {e.fqn: e for e in catalog.by_role(Role.OPTIMIZER).values() if e.state == "exp_avg"}
    found = {"model": catalog.by_role(Role.MODEL), "masters": catalog.by_role(Role.MASTER), "moments": moments}
    for kind, tensors in expected.items():
        assert contents(source.store, found[kind]) == contents_of_state_dict(tensors), kind
    return source


@pytest.fixture
def verl(ranks, tmp_path):
    """Return a function that writes a checkpoint of verl, and returns what it must contain."""

    def write(kind, world=2, *, tied=False, dtype=torch.float32, trained=1, folder=tmp_path):
        return ranks.run(rank_writers.write_verl, world, str(folder), kind, tied, dtype, trained)[0]

    return write


@pytest.mark.parametrize(("kind", "world", "tied", "dtype"), [
    ("1d", 1, False, torch.float32), ("1d", 2, True, torch.bfloat16), ("1d", 3, False, torch.float32),
    ("1d", 4, True, torch.float32), ("hsdp", 4, True, torch.float32), ("tp", 4, False, torch.float32),
])  # fmt: skip
def test_verl_files_give_every_weight_and_moment(verl, tmp_path, kind, world, tied, dtype):
    expected = verl(kind, world, tied=tied, dtype=dtype, trained=kind != "tp")
    if kind == "tp":
        del expected["moments"]
    info = opened_with(tmp_path, expected).catalog.info
    assert (info.format, info.world_size) == ("verl", world)


def test_every_rank_of_hsdp_is_listed_as_a_replica_and_a_missing_one_is_refused(verl, tmp_path):
    verl("hsdp", 4)
    entry = open_source(str(tmp_path)).catalog.tensors["embed.weight"]
    assert sorted(part.rank for part in entry.slices) == [0, 1, 2, 3]
    assert len({part.box for part in entry.slices}) == 2
    (tmp_path / "model_world_size_4_rank_3.pt").unlink()
    with pytest.raises(IncompleteCheckpointError, match="model_world_size_4_rank_3"):
        open_source(str(tmp_path))


def test_an_error_names_a_rank_file_copied_from_another_rank(verl, tmp_path):
    verl("1d")
    shutil.copy(tmp_path / "model_world_size_2_rank_0.pt", tmp_path / "model_world_size_2_rank_1.pt")
    with pytest.raises(CorruptCheckpointError, match=r"rank_1\.pt and .*rank_0\.pt contain the same part"):
        open_source(str(tmp_path))


def test_rank_files_of_different_steps_are_refused(verl, tmp_path):
    for name, rounds in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        verl("1d", trained=rounds, folder=tmp_path / name)
    for kind in ("model", "optim"):
        shutil.copy(tmp_path / "b" / f"{kind}_world_size_2_rank_1.pt", tmp_path / "a")
    with pytest.raises(CorruptCheckpointError, match=r"optim_.*rank_1\.pt and optim_.* are from different saves"):
        open_source(str(tmp_path / "a"))


@pytest.mark.parametrize("is_there", [False, True])
def test_missing_or_foreign_optimizer_files_are_noted_and_the_weights_stay_readable(verl, tmp_path, is_there):
    weights = verl("1d")["model"]
    (file := tmp_path / "optim_world_size_2_rank_1.pt").unlink()
    if is_there:
        shutil.copy(tmp_path / "model_world_size_2_rank_1.pt", file)
    notes = opened_with(tmp_path, {"model": weights}).catalog.info.notes
    assert any("optimizer was skipped" in note and file.name in note for note in notes)


@pytest.mark.parametrize(("world", "lr"), [(2, 1e-3), (3, 1e-3), (2, 0.0)])  # 0.0: the weights of all norms are equal
def test_lightrft_masters_are_matched_with_groups_a_tied_head_and_a_frozen_parameter(ranks, tmp_path, world, lr):
    folder = tmp_path / "global_step12"
    folder.mkdir()
    source = opened_with(tmp_path, ranks.run(rank_writers.write_lightrft, world, str(folder), lr)[0])
    assert source.catalog.info.step == 12
    assert check_masters(source.store, source.catalog) == []
    (missing := folder / "optim_states" / f"_rank{world - 1}").unlink()
    with pytest.raises(IncompleteCheckpointError, match=missing.name):
        open_source(str(folder))


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_fsdp1_local_state_is_read_with_the_shapes_of_its_optimizer(ranks, tmp_path, use_orig_params, world):
    expected = ranks.run(rank_writers.write_fsdp1_local, world, str(tmp_path), use_orig_params, True)[0]
    opened_with(tmp_path, {"model": expected})


def test_fsdp1_local_state_names_a_frozen_parameter_whose_shape_its_optimizer_lacks(ranks, tmp_path):
    ranks.run(rank_writers.write_fsdp1_local, 2, str(tmp_path), True, True, True)
    text = r"'layers\.0\..*' is not known: the optimizer has only the shapes of trained parameters\. .*--layout"
    with pytest.raises(UnsupportedFormatError, match=text) as caught:
        open_source(str(tmp_path))
    assert "optimizer_0" not in str(caught.value)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_fsdp1_optimizer_state_is_cut_out_of_its_flat_parameters(ranks, tmp_path, use_orig_params, world, replicas):
    wanted = ranks.run(rank_writers.write_verl_fsdp1, world, str(tmp_path), use_orig_params, replicas)[0]
    source = opened_with(tmp_path, wanted)
    steps = {e.fqn for e in source.catalog.by_role(Role.OPTIMIZER).values() if e.state == "step"}
    assert steps == wanted["moments"].keys()  # also of parameters of which rank 0 has no part
    for path in tmp_path.iterdir():
        path.rename(tmp_path / path.name.replace(f"_world_size_{world}", ""))  # as an unknown system may call it
    assert opened_with(tmp_path, wanted).catalog.info.format == "rank-files"


def test_rank_files_in_the_format_before_the_zip_are_read(tmp_path):
    for rank in range(2):
        mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=rank)
        local, shape = torch.full((2,), float(rank)), torch.Size([4])
        part = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))
        path = tmp_path / f"model_world_size_2_rank_{rank}.pt"
        torch.save({"w": part}, path, _use_new_zipfile_serialization=False)
    opened_with(tmp_path, {"model": {"w": torch.tensor([0.0, 0.0, 1.0, 1.0])}})
