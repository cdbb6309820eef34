"""Small adjacent tensors in a file: read together, checked like all others."""

from __future__ import annotations

import pytest
import torch

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Catalog, CatalogInfo, SliceArray, TensorEntry, TensorSlice
from ckptkit.errors import CheckpointMismatchError, IntegrityError
from ckptkit.formats.dcp.read import Verify
from ckptkit.formats.own.manifest import Manifest
from ckptkit.storage.local import LocalStore
from tests.formats.interop_cases import blank
from tests.formats.sharded import catalog_of, read_alone, read_sharded, write_alone
from tests.offline.folders import flip


def small() -> dict[str, torch.Tensor]:
    return {
        "scalar": torch.tensor(3.5),
        "step": torch.tensor(7, dtype=torch.int64),
        "flags": torch.tensor([True, False]),
        "half": torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4),
        **{f"w{i}": torch.full((5, 3), float(i)) for i in range(40)},
    }


@pytest.mark.parametrize("verify", [Verify.READ, Verify.FULL])
def test_a_flipped_byte_among_tensors_read_together_names_its_tensor(tmp_path, verify):
    write_alone(small(), tmp_path)
    found = catalog_of(tmp_path).tensors["w7"].slices[0]
    flip(tmp_path / found.path, found.start)
    with pytest.raises(IntegrityError, match=f"{found.path}.*'w7'"):
        read_alone(tmp_path, blank(small()), verify=verify)


def test_damage_is_loaded_without_verification(tmp_path):
    write_alone(small(), tmp_path)
    part = catalog_of(tmp_path).tensors["step"].slices[0]
    flip(tmp_path / part.path, part.start)
    target = {"step": torch.tensor(0)}
    read_alone(tmp_path, target, verify=Verify.OFF)
    assert int(target["step"]) == 6


@pytest.mark.parametrize("wrong", [torch.zeros(5, 4), torch.zeros(5, 3, dtype=torch.float64)], ids=["shape", "dtype"])
def test_a_mismatch_of_one_tensor_leaves_all_others_unchanged(tmp_path, wrong):
    write_alone(small(), tmp_path)
    target = blank(small()) | {"w39": wrong}
    with pytest.raises(CheckpointMismatchError, match="w39"):
        read_alone(tmp_path, target)
    assert not any(value.any() for value in target.values())


def test_targets_that_are_not_row_major_are_filled(tmp_path):
    write_alone(small(), tmp_path)
    target = {"half": torch.zeros(4, 3, 2, dtype=torch.bfloat16).permute(2, 1, 0), "w1": torch.zeros(5, 6)[:, ::2]}
    read_alone(tmp_path, target)
    assert all(torch.equal(target[name], small()[name]) for name in target)


def opened(tensors: dict[str, tuple[TensorSlice, str]]) -> Catalog:
    """Return the catalog of these slices, each a tensor, as a manifest holds it."""
    made = {
        name: TensorEntry(name, dtype, part.box.sizes, SliceArray.of([part], len(part.box.sizes)))
        for name, (part, dtype) in tensors.items()
    }
    return Manifest.of(Catalog(made, {}, CatalogInfo("x"))).catalog()


def test_a_slice_with_strides_is_read(tmp_path):
    stored = torch.arange(12, dtype=torch.int64).reshape(3, 4)
    (tmp_path / "f").write_bytes(stored.numpy().tobytes())
    catalog = opened({"t": (TensorSlice(Box.whole((4, 3)), "f", 0, 96, strides=(1, 4)), "int64")})
    target = {"t": torch.zeros(4, 3, dtype=torch.int64)}
    read_sharded(catalog, LocalStore(tmp_path), target)
    assert torch.equal(target["t"], stored.t())


def test_tensors_that_share_bytes_of_a_file_are_loaded(tmp_path):
    stored = torch.arange(6, dtype=torch.int32)
    (tmp_path / "f").write_bytes(stored.numpy().tobytes())
    parts = {"all": (0, 6), "first": (0, 2), "middle": (2, 5)}
    catalog = opened(
        {name: (TensorSlice(Box.whole((b - a,)), "f", 4 * a, 4 * (b - a)), "int32") for name, (a, b) in parts.items()}
    )
    target = {name: torch.zeros(b - a, dtype=torch.int32) for name, (a, b) in parts.items()}
    read_sharded(catalog, LocalStore(tmp_path), target)
    assert all(torch.equal(target[name], stored[a:b]) for name, (a, b) in parts.items())
