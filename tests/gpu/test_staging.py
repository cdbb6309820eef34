"""The host memory through which device tensors are copied to a file."""

from __future__ import annotations

import pytest
import torch

from ckptkit.checkpoint.save.staging import StagingBuffers
from ckptkit.formats.dcp import host_bytes
from ckptkit.formats.dcp.host_bytes import HostBytes
from ckptkit.storage import open_store
from tests.formats.sharded import read_alone, write_alone


def test_a_device_snapshot_reuses_pinned_memory(device):
    buffers = StagingBuffers()
    given = [torch.randn(1000, 70), torch.arange(5), torch.randn(64, 48).T, torch.randn(9, 9).bfloat16()]
    given = [tensor.to(device) for tensor in given]
    first = buffers.copy(given)
    places = [view.data_ptr() for view in first]
    assert all(view.is_pinned() for view in first) == (device == "cuda")
    for tensor in given:
        tensor.add_(1)
    second = buffers.copy(given)
    assert [view.data_ptr() for view in second] == places
    assert all(torch.equal(view, tensor.cpu()) for view, tensor in zip(second, given, strict=True))
    buffers.release()
    assert buffers.nbytes == 0


def test_snapshots_of_another_device_use_other_memory(device):
    buffers = StagingBuffers()
    buffers.copy([torch.ones(10)])
    (view,) = buffers.copy([torch.full((10,), 2.0, device=device)])
    assert view.is_pinned() == (device == "cuda")
    assert torch.equal(view, torch.full((10,), 2.0))
    (view,) = buffers.copy([torch.ones(10)])
    assert not view.is_pinned()


@pytest.mark.parametrize("rest", [-8, 0, 8])
def test_a_large_tensor_is_copied_through_two_alternating_buffers(device, rest):
    numel = (3 * host_bytes._STAGE + rest) // 4
    tensor = torch.arange(numel, dtype=torch.int32, device=device)
    tensor.mul_(2)  # on a device it is still running
    source, at, expected = HostBytes(), 0, memoryview(tensor.cpu().numpy()).cast("B")
    for piece in source.pieces(tensor):
        assert piece == expected[at : at + len(piece)]
        at += len(piece)
    assert at == 4 * numel
    pinned = [buffer.is_pinned() for buffers in source._stages.values() for buffer in buffers]
    assert pinned == ([True, True] if device == "cuda" else [])


def test_a_device_state_round_trips_through_a_disk(device, tmp_path):
    made = {
        "large": torch.randn(10 << 20, device=device),
        "columns": torch.randn(300, 5000, device=device).T,
        "bf16": torch.randn(1000, 1000, device=device).bfloat16(),
        "small": torch.arange(5, device=device),
        "scalar": torch.tensor(2.5, device=device),
        "host": torch.randn(1000),
    }
    made["large"].mul_(2)  # on a device it is still running
    store = open_store(str(tmp_path))
    write_alone(made, store, sync=True, workers=2)
    target = {name: torch.zeros_like(value) for name, value in made.items()}
    read_alone(store, target)
    assert all(torch.equal(target[name], made[name]) for name in made)
