"""What a load reads and checks: every slice by default, or only what this rank needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import IncompleteCheckpointError, IntegrityError, UsageError
from ckptkit.formats.own.reader import open_catalog
from ckptkit.storage import open_store
from tests.checkpoint.states import check_misfit, flip, load, save

ROWS, COLUMNS = 3 << 10, 1 << 10


def of(weight: torch.Tensor) -> TrainState:
    return TrainState(model=torch.nn.ParameterDict({"weight": weight}), rng=False)


def whole() -> torch.Tensor:
    return torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)


def returned() -> int:
    """Return the bytes that read calls of this process have returned."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_a_save_does_not_read_its_own_files(tmp_path: Path, kind: str) -> None:
    saved = of(whole())
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        manager.save(1, saved)  # imports also read files
        before = returned()
        manager.save(2, saved)
        assert returned() - before < ROWS * COLUMNS * 4 / 50


def load_rows(url: str, verify: Any) -> tuple[float, bool]:
    """Return (bytes read divided by the bytes of this rank's rows, whether the rows are right)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = of(distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, (Shard(0),), src_data_rank=None))
    with CheckpointManager(url) as manager:
        manager.load(rows, verify=verify)  # imports also read files
        before = returned()
        manager.load(rows, verify=verify)
        read = returned() - before
    local = rows.model["weight"].to_local()
    expected = whole().tensor_split(mesh.size())[dist.get_rank()]
    return read / local.untyped_storage().nbytes(), torch.equal(local, expected)


@pytest.mark.parametrize("verify", ["read", False])
def test_verify_read_reads_only_the_rows_needed_by_a_row_reshard(ranks: Any, tmp_path: Path, verify: Any) -> None:
    save(tmp_path, of(whole()))
    for ratio, right in ranks.run(load_rows, 3, str(tmp_path), verify):
        assert right
        assert 1.0 <= ratio <= 1.05


def test_by_default_ranks_together_check_every_slice_once(ranks: Any, tmp_path: Path) -> None:
    save(tmp_path, of(whole()))
    ratios, right = zip(*ranks.run(load_rows, 3, str(tmp_path), True), strict=True)
    assert all(right)
    assert 3 + 3 <= sum(ratios) <= 1.05 * (3 + 3)  # the rows of all ranks, and the whole slice once by one of them


@pytest.mark.parametrize("verify", [True, "read"])
def test_damage_in_completely_read_slices_is_found(tmp_path: Path, verify: Any) -> None:
    flip(save(tmp_path, of(whole())), whole())
    live = of(torch.zeros(ROWS, COLUMNS))
    check_misfit(tmp_path, live, r"model\.weight", error=IntegrityError, verify=verify, atomic=True)


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("sizes", [(1 << 10, 3 << 19), (3 << 19, 1 << 10), (64, 32)])
def test_a_truncated_file_names_a_tensor_that_lacks_bytes(tmp_path: Path, sizes: tuple[int, int], atomic: bool) -> None:
    def state(value: float) -> TrainState:
        model = torch.nn.ParameterDict({f"of{size}": torch.full((size,), value) for size in sizes})
        return TrainState(model=model, rng=False)

    save(tmp_path, state(1.0))
    catalog = open_catalog(open_store(str(tmp_path / "step_00000001")))
    slices = {name: entry.slices[0] for name, entry in catalog.tensors.items()}
    last = max(slices, key=lambda name: slices[name].start)
    (file,) = tmp_path.glob("step_*/*.distcp")
    os.truncate(file, slices[last].start + 8)
    check_misfit(tmp_path, state(0.0), f"'{last}'", error=IncompleteCheckpointError, atomic=atomic)


def test_an_unknown_value_of_verify_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'full'"):
        load(tmp_path, of(torch.zeros(1)), verify="full")
