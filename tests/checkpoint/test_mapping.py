"""Opened checkpoints: reading one value reads only its bytes."""

from typing import Any

import numpy as np
import pytest
import torch

from ckptkit import CheckpointManager, TrainState, open_checkpoint
from ckptkit.errors import CheckpointNotFoundError
from ckptkit.formats.sources import SourceReader
from tests.checkpoint import states
from tests.lazy import modules_after
from tests.patches import before


@pytest.fixture(scope="module", params=["sharded", "full", "local"])
def saved(request: Any, tmp_path_factory: Any) -> tuple[str, torch.nn.Module]:
    root = str(tmp_path_factory.mktemp("run"))
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 50)
    model.register_buffer("coarse", torch.randn(7, 3).bfloat16())
    model.register_buffer("scalar", torch.tensor(2.5))
    state = TrainState(model=model, extra={"best": {"loss": 0.5}, "table": torch.arange(1000)})
    with CheckpointManager(root, state_dict_type=request.param) as manager:
        manager.save(7, state, metrics={"val_loss": 1.25})
    return root, model


@pytest.mark.parametrize("name", ["latest", "7", "step_00000007", ""])
def test_a_checkpoint_of_a_run_is_opened_and_loaded_by_its_name(saved, name):
    root, model = saved
    assert open_checkpoint(f"{root}/{name}").step == 7
    fresh = TrainState(model=torch.nn.Linear(100, 50), rng=False)
    report = states.load(f"{root}-other", fresh, f"{root}/{name}", strict=False)
    assert report is not None and report.step == 7
    assert isinstance(fresh.model, torch.nn.Linear) and torch.equal(fresh.model.weight, model.weight)


@pytest.mark.parametrize(
    "index",
    [..., slice(0, 10), (slice(3, 5), slice(10, 20)), (4,), (4, 7), (slice(None, None, 3), -1), (..., slice(1, 99, 2)),
     (slice(9, 2), ...)],
)  # fmt: skip
def test_any_part_of_a_tensor_is_read(saved, index):
    root, model = saved
    part = open_checkpoint(root)["model.weight"][index]
    assert np.array_equal(part, model.weight.detach().numpy()[index])


def test_dtypes_that_numpy_lacks_are_returned_as_torch_tensors(saved):
    root, model = saved
    assert torch.equal(open_checkpoint(root)["model.coarse"][2:4], model.coarse[2:4])
    assert open_checkpoint(root)["model.scalar"][...] == 2.5


def test_an_opened_checkpoint_has_step_metrics_and_objects(saved):
    opened = open_checkpoint(saved[0])
    assert opened.step == 7
    assert opened.metrics == {"val_loss": 1.25}
    assert opened["extra.best"] == {"loss": 0.5}
    assert np.array_equal(opened["extra.table"][...], np.arange(1000))
    assert "model.bias" in opened
    assert set(opened) >= {"model.weight", "extra.best", "step"}


def test_a_slice_reads_only_its_bytes(saved, monkeypatch):
    opened = open_checkpoint(saved[0])
    read: list[int] = []
    before(monkeypatch, SourceReader, "read_many", lambda _, ranges: read.extend(len(item.view) for item in ranges))
    opened["model.weight"][10:12]
    assert sum(read) == 2 * 100 * 4


@pytest.mark.parametrize("index", [(50,), (0, 0, 0), (slice(None, None, -1),)])
def test_an_index_out_of_range_is_an_index_error(saved, index):
    with pytest.raises(IndexError):
        open_checkpoint(saved[0])["model.weight"][index]


def test_opening_a_directory_without_a_checkpoint_is_an_error(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(str(tmp_path))


def test_reading_a_float_tensor_does_not_import_torch(saved):
    read = f"import ckptkit\nassert ckptkit.open_checkpoint({saved[0]!r})['model.weight'][:2].shape == (2, 100)"
    assert "torch" not in modules_after(read)
