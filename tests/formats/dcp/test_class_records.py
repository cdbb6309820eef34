"""Shards of torchao's optimizer states in checkpoints of torch's `dcp.save`: read without the class, or refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckptkit import reshard, verify
from ckptkit.catalog.entry import Catalog
from ckptkit.errors import CkptkitError
from ckptkit.formats.dcp.catalog import open_catalog
from ckptkit.formats.dcp.class_records import in_parts
from ckptkit.storage import open_store
from tests.formats.dcp_states import load
from tests.offline.folders import flip
from tests.patches import before

KEY = "optimizer.state.w.exp_avg"


def state_8bit(rows: int = 8, *, columns: int = 64, block: int = 64, signed: bool = True) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.optim.subclass_8bit import OptimState8bit

    made = OptimState8bit.zeros((rows, columns), signed=signed, block_size=block)
    made.codes.copy_(torch.arange(rows * columns).reshape(rows, columns) % 251)
    made.scale.copy_(torch.arange(made.scale.numel()) + 1)
    return made


def moment(tensor: Any) -> dict[str, Any]:
    return {"optimizer": {"state": {"w": {"exp_avg": tensor}}}}


def saved(url: Path, tensor: Any) -> str:
    dcp.save({"model": {"w": torch.zeros(8, 64)}, **moment(tensor)}, checkpoint_id=url)
    return str(url)


def opened(url: str) -> Catalog:
    store = open_store(url)
    return in_parts(store, open_catalog(store))


def save_shards(url: str, changes: list[dict[str, Any]], dim: int = 0) -> None:
    local = state_8bit(**changes[dist.get_rank()])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, local.shape[dim])
    shape = torch.Size((sum(sizes), local.shape[1]) if dim == 0 else (local.shape[0], sum(sizes)))
    saved(Path(url), DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=(shape[1], 1)))


@pytest.mark.parametrize(("attribute", "value"), [
    *((name, None) for name in ("codes", "scale", "qmap", "signed")), ("signed", [True]),
    *(("codes", made.byte()) for made in (torch.zeros(8, 63), torch.zeros(64, 8).T)),
    *(("scale", value) for value in (torch.zeros(7), torch.zeros(0), torch.zeros(8, 1), "no tensor")),
])  # fmt: skip
def test_a_record_whose_parts_do_not_fit_is_refused_by_name(tmp_path, monkeypatch, attribute, value):
    def tamper(item: Any, *_: Any, **__: Any) -> None:
        if hasattr(item, "qmap"):
            item.__dict__.pop(attribute)
            item.__dict__.update({} if value is None else {attribute: value})

    with monkeypatch.context() as patch:
        before(patch, torch, "save", tamper)
        url = saved(tmp_path / "theirs", state_8bit())
    with pytest.raises(CkptkitError, match=rf"{KEY} is a torchao.*{attribute}"):
        reshard(url, str(tmp_path / "resharded"), world_size=2)
    assert not (tmp_path / "resharded").exists()
    with pytest.raises(CheckpointException, match=rf"{KEY}' is a torchao.*has a shard.*{attribute}"):
        load(url, moment(state_8bit()))


NARROW = {"columns": 32}  # a block of 64 elements is two rows of such a shard, but one row of the tensor


@pytest.mark.parametrize(("shards", "dim", "reason"), [
    ([{}, {"block": 128}], 0, r"blocks for scale differ in size: \[64, 128\]"),
    ([{}, {"signed": False}], 0, "different settings"),
    ([NARROW, NARROW], 1, r"\[8, 64\] and a scale with .* of 64 .* holds \[0, 32\) of dimension 1"),
])  # fmt: skip
def test_shards_that_do_not_belong_together_or_split_a_block_are_refused_by_name(ranks, tmp_path, shards, dim, reason):
    url = str(tmp_path / "theirs")
    ranks.run(save_shards, 2, url, shards, dim)
    with pytest.raises(CkptkitError, match=rf"{KEY} .*{reason}"):
        reshard(url, str(tmp_path / "resharded"), world_size=3)


def test_no_flipped_bit_of_a_record_is_read_as_good(tmp_path):
    tensor = state_8bit(rows=256)
    url = saved(tmp_path / "theirs", tensor)
    catalog = opened(url)
    for name in ("codes", "scale", "qmap"):
        slices = catalog.tensors[f"{KEY}::{name}"].slices
        path, start, nbytes = slices.byte_range(0)
        for at in (start, start + nbytes // 2, start + nbytes - 1):
            flip(tmp_path / "theirs" / path, at, bit=2)
            with pytest.raises(CkptkitError, match=KEY):
                reshard(url, str(tmp_path / "resharded"), world_size=2)
            assert not verify(url).ok
            with pytest.raises(CheckpointException, match=KEY):
                load(url, moment(state_8bit(rows=256)))
            flip(tmp_path / "theirs" / path, at, bit=2)
    assert not (tmp_path / "resharded").exists()
    assert verify(url).ok
