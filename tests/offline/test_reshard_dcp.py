"""A reshard of a foreign DCP is a DCP: torch loads the same state from source and result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.dcp.torch_api import DCPReader
from ckptkit.formats.detect import open_source
from ckptkit.offline.reshard import reshard
from ckptkit.offline.verify import verify
from tests.formats.interop_cases import same
from tests.offline.folders import flip

SOURCES = (
    "dcp_appstate_w2", "dcp_dtensor_2d", "dcp_fsdp2_uneven_w4", "dcp_hsdp_2x2", "dcp_threads2_w2",
    "dcp_torchtitan_like_w2", "dcp_zstd_w2", "fsdp1_dcp_sharded_nomesh_w2", "lightning_real_mp_w2",
    "lightning_trainer_fsdp_w2", "megatron_torch_dist_emulated", "torchtitan_llama3_names_w2",
)  # fmt: skip


def _plain(url: str) -> dict[str, Any]:
    """Return everything that torch loads from a checkpoint, by key."""
    reader = dcp.FileSystemReader(url)
    state: dict[str, Any] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        state[key] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def _all_equal(source: str, made: str) -> None:
    a, b = _plain(source), _plain(made)
    assert a and {key for key in a if key not in b or not same(a[key], b[key])} == set()
    paths = [dcp.FileSystemReader(url).read_metadata().planner_data for url in (source, made)]
    assert {key: paths[0][key] for key in a} == {key: paths[1][key] for key in a}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_torch_loads_the_same_values_from_source_and_result(zoo: Path, tmp_path: Path, name: str, ranks: int) -> None:
    source, made, again = open_source(str(zoo / name)).url, str(tmp_path / "made"), str(tmp_path / "again")
    reshard(source, made, world_size=ranks, verify=True)
    _all_equal(source, made)
    assert verify(made).ok
    reshard(made, again, world_size=2)
    _all_equal(source, again)


BESIDE = {  # systems whose model and optimizer are two DCPs
    "accelerate_fsdp2_sharded_llama_tied_w2": ("pytorch_model_fsdp_0", "optimizer_0"),
    "lightrft_naive_optim_w2": ("",),
}


@pytest.mark.parametrize("name", BESIDE)
def test_torch_loads_a_result_whose_source_had_two_directories(zoo: Path, tmp_path: Path, name: str) -> None:
    source, made = open_source(str(zoo / name)).url, str(tmp_path / "made")
    reshard(source, made, world_size=3)
    found = _plain(made)
    for part in BESIDE[name]:
        wanted = _plain(f"{source}/{part}".rstrip("/"))
        assert {key for key in wanted if key not in found or not same(wanted[key], found[key])} == set()


def _state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "net": {"up.weight": torch.randn(7, 5), "up.bias": torch.randn(7).bfloat16(), "count": torch.tensor(seed)},
        "optim": {
            "state": {"up.weight": {"exp_avg": torch.randn(7, 5), "step": 3 + seed}},
            "param_groups": [{"lr": 0.1 + seed, "betas": (0.9, 0.99), "params": ["up.weight"], "note": None}],
        },
        "step": 40 + seed,
        "name": f"run {seed}",
        "raw": bytes([seed, 1, 2]),
        "ratio": float("nan") if seed else 0.5,
        "list": [1, torch.randn(3), {"deep": "text"}],
        "scheduler": {"last_epoch": 4, "_last_lr": [0.1]},
    }


@pytest.mark.parametrize("mesh", [None, "replicate=2,shard=2"])
def test_a_nested_state_keeps_its_values(tmp_path: Path, mesh: str | None) -> None:
    source, made = str(tmp_path / "any"), str(tmp_path / "made")
    dcp.save(_state(1), checkpoint_id=source, no_dist=True)
    reshard(source, made, world_size=4, mesh=mesh)
    for reader in (dcp.FileSystemReader(made), DCPReader(made)):
        state = _state(0)
        dcp.load(state, storage_reader=reader, no_dist=True)
        assert same(state, _state(1))


def test_the_step_comes_from_the_checkpoint_or_its_name_or_is_reported_unknown(tmp_path: Path) -> None:
    weights = {"w": torch.ones(4)}
    cases = {
        "any": ({**weights, "step": 12}, 12),
        "train": ({**weights, "train_state": {"step": torch.tensor(7)}}, 7),
        "step-31": (weights, 31),
        "unknown": (weights, 0),
    }
    for name, (state, step) in cases.items():
        dcp.save(state, checkpoint_id=str(tmp_path / name), no_dist=True)
        report = reshard(str(tmp_path / name), str(tmp_path / f"{name}_made"), world_size=1)
        assert f"committed as step {step} of 1 rank" in report.proof()
        assert any("does not record its step" in note for note in report.notes) is (name == "unknown")


def test_a_job_continues_from_a_state_with_custom_names(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments, "step": 9}, checkpoint_id=str(tmp_path / "src"), no_dist=True)
    reshard(str(tmp_path / "src"), str(tmp_path / "run" / "step_00000009"), world_size=2)
    reshard(str(tmp_path / "src"), str(tmp_path / "local" / "step_00000009"), world_size=1, type="local")
    local = open_source(str(tmp_path / "local")).catalog
    assert {"model.weight", "optimizer.state.weight.exp_avg"} <= local.tensors.keys()
    assert local.objects["optimizer"].value["param_groups"][0]["lr"] == 0.25
    fresh = torch.nn.Linear(3, 2)
    other = torch.optim.AdamW(fresh.parameters(), lr=9.0)
    with CheckpointManager(str(tmp_path / "run")) as manager:
        report = manager.load(TrainState(model=fresh, optimizer=other, rng=False))
    assert report is not None and report.step == 9
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))
    assert other.param_groups[0]["lr"] == 0.25
    assert same(list(other.state.values()), list(optimizer.state.values()))


def test_a_flipped_bit_in_a_value_is_found_before_the_commit(tmp_path: Path) -> None:
    source = tmp_path / "any"
    dcp.save({"w": torch.ones(4), "name": "a" * 400}, checkpoint_id=str(source), no_dist=True)
    (file,) = source.glob("*.distcp")
    flip(file, file.read_bytes().index(b"a" * 100) + 50)
    with pytest.raises(CorruptCheckpointError, match=r"'name': member .* does not match its CRC-32"):
        reshard(str(source), str(tmp_path / "made"), world_size=1)
