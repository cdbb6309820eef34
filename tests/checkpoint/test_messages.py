"""The messages between ranks in a save: a plan is agreed on once, and the index of all slices stays on rank 0."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.state.train_state import TrainState


class Counter:
    """Counts this rank's messages to others, and the gathers that settle plans."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told = self.settled = self.messages = 0
        post, gather = Coordinator._post, Coordinator.all_gather

        def counted(coordinator: Any, value: Any, ranks: Any) -> Any:
            self.messages += len(ranks)
            self.told += len(ranks) * len(pickle.dumps(value))
            return post(coordinator, value, ranks)

        def settled(coordinator: Any, value: bytes) -> Any:
            self.settled += 1
            return gather(coordinator, value)

        monkeypatch.setattr(Coordinator, "_post", counted)
        monkeypatch.setattr(Coordinator, "all_gather", settled)

    def take(self) -> tuple[int, int, int]:
        found = self.settled, self.messages, self.told
        self.settled = self.messages = self.told = 0
        return found


def several_saves(url: str, background: bool) -> list[tuple[int, int, int]]:
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Module()
    for i in range(300):
        full = torch.full((8, 4), float(i))
        model.register_parameter(
            f"block_{i}_weight", torch.nn.Parameter(distribute_tensor(full, mesh, (Shard(0),), src_data_rank=None))
        )
    if dist.get_rank() == 1:
        model.register_buffer("own", torch.ones(3))  # so that plans have something to settle
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch, CheckpointManager(url) as manager:
        counter = Counter(monkeypatch)
        for step in range(1, 5):
            if step == 4:
                model.register_buffer("new", torch.ones(2))
            if background:
                manager.save_async(step, TrainState(model=model)).result()
            else:
                manager.save(step, TrainState(model=model))
            found.append(counter.take())
    return found


@pytest.mark.parametrize("background", [False, True])
def test_later_saves_exchange_no_plans(ranks: Any, tmp_path: Path, background: bool) -> None:
    main, other = ranks.run(several_saves, 2, str(tmp_path), background)
    for found in (main, other):
        settled, messages, _ = zip(*found, strict=True)
        assert settled == (2, 0, 0, 2)  # who writes what, and who has which plain tensors
        assert messages[0] > messages[1] == messages[2] < messages[3]
    # 300 tensors: rank 1 sends 60 bytes or more for each of its slices, and rank 0 forwards none of it.
    assert all(told > 300 * 44 for _, _, told in other)
    assert all(told < 4_000 for _, _, told in main[1:3])
