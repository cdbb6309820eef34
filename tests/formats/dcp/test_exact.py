"""Small adjacent tensors in a file: read together, checked like all others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog, CatalogInfo, SliceArray, TensorEntry
from ckptkit.errors import CheckpointMismatchError, IntegrityError
from ckptkit.formats.dcp.read import Verify
from ckptkit.formats.own.manifest import Manifest
from ckptkit.storage.local import LocalStore
from tests.formats.dcp_states import LAYOUTS, differences, state
from tests.formats.sharded import all_gather, catalog_of, gather, read_alone, read_sharded, write_alone, write_sharded


def write(path, values) -> tuple[Catalog, LocalStore]:
    write_alone(values, path)
    return catalog_of(path), LocalStore(path)


def small() -> dict[str, torch.Tensor]:
    return {
        "scalar": torch.tensor(3.5),
        "step": torch.tensor(7, dtype=torch.int64),
        "flags": torch.tensor([True, False]),
        "half": torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4),
        **{f"w{i}": torch.full((5, 3), float(i)) for i in range(40)},
    }


def saved_and_loaded_alike(layout: str, url: str) -> list[str]:
    """Return the differences."""
    store = LocalStore(url)
    options = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "sync": False}
    write_sharded(state(layout), store, gather=gather, all_gather=all_gather, **options)
    dist.barrier()
    target = state(layout, zeros=True)
    read_alone(url, target)
    return differences(target, state(layout))


@pytest.mark.parametrize("layout", ["plain@1", "shard0@2", "shard1@2", "tp@4"])
def test_a_load_with_the_same_sharding_is_exact(ranks, tmp_path, layout):
    world_size = LAYOUTS[layout][0]
    assert ranks.run(saved_and_loaded_alike, world_size, layout, str(tmp_path)) == [[]] * world_size


@pytest.mark.parametrize("verify", [Verify.READ, Verify.FULL])
def test_a_flipped_byte_among_tensors_read_together_names_its_tensor(tmp_path, verify):
    catalog, store = write(tmp_path, small())
    found = catalog.tensors["w7"].slices[0]
    file = tmp_path / found.path
    data = bytearray(file.read_bytes())
    data[found.start + 3] ^= 1
    file.write_bytes(data)
    target = {name: torch.zeros_like(value) for name, value in small().items()}
    with pytest.raises(IntegrityError, match=f"{found.path}.*'w7'"):
        read_sharded(catalog, store, target, verify=verify)


def test_damage_is_loaded_without_verification(tmp_path):
    catalog, store = write(tmp_path, small())
    found = catalog.tensors["step"].slices[0]
    file = tmp_path / found.path
    data = bytearray(file.read_bytes())
    data[found.start] ^= 1
    file.write_bytes(data)
    target = {"step": torch.tensor(0)}
    read_sharded(catalog, store, target, verify=Verify.OFF)
    assert int(target["step"]) == 6


@pytest.mark.parametrize("wrong", [torch.zeros(5, 4), torch.zeros(5, 3, dtype=torch.float64)], ids=["shape", "dtype"])
def test_a_mismatch_of_one_tensor_leaves_all_others_unchanged(tmp_path, wrong):
    catalog, store = write(tmp_path, small())
    target = {name: torch.zeros_like(value) for name, value in small().items()} | {"w39": wrong}
    with pytest.raises(CheckpointMismatchError, match="w39"):
        read_sharded(catalog, store, target)
    assert not any(value.any() for value in target.values())


def test_targets_that_are_not_row_major_are_filled(tmp_path):
    catalog, store = write(tmp_path, small())
    target = {"half": torch.zeros(4, 3, 2, dtype=torch.bfloat16).permute(2, 1, 0), "w1": torch.zeros(5, 6)[:, ::2]}
    read_sharded(catalog, store, target)
    assert torch.equal(target["half"], small()["half"])
    assert torch.equal(target["w1"], small()["w1"])


def test_a_slice_with_strides_is_read(tmp_path):
    stored = torch.arange(12, dtype=torch.int64).reshape(3, 4)
    (tmp_path / "f").write_bytes(stored.numpy().tobytes())
    row = np.zeros(1, np.int64)
    array = SliceArray(
        ["f"],
        row.astype(np.int32),
        row,
        row + 96,
        np.array([[0, 0]]),
        np.array([[4, 3]]),
        strides={0: (1, 4)},
    )
    entry = TensorEntry("t", "int64", (4, 3), array)
    catalog = Manifest.of(Catalog({"t": entry}, {}, CatalogInfo("x"))).catalog()
    target = {"t": torch.zeros(4, 3, dtype=torch.int64)}
    read_sharded(catalog, LocalStore(tmp_path), target)
    assert torch.equal(target["t"], stored.t())


def test_tensors_that_share_bytes_of_a_file_are_loaded(tmp_path):
    stored = torch.arange(6, dtype=torch.int32)
    (tmp_path / "f").write_bytes(stored.numpy().tobytes())
    tensors = {}
    for name, (start, count) in {"all": (0, 6), "first": (0, 2), "middle": (2, 3)}.items():
        array = SliceArray(
            ["f"],
            np.zeros(1, np.int32),
            np.array([4 * start]),
            np.array([4 * count]),
            np.array([[0]]),
            np.array([[count]]),
        )
        tensors[name] = TensorEntry(name, "int32", Box.whole((count,)).sizes, array)
    catalog = Manifest.of(Catalog(tensors, {}, CatalogInfo("x"))).catalog()
    target = {name: torch.zeros(entry.shape, dtype=torch.int32) for name, entry in tensors.items()}
    read_sharded(catalog, LocalStore(tmp_path), target)
    assert target["all"].tolist() == [0, 1, 2, 3, 4, 5]
    assert target["first"].tolist() == [0, 1]
    assert target["middle"].tolist() == [2, 3, 4]
