"""A custom fsspec file system receives every byte of a save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from ckptkit.checkpoint.load.mapping import open_checkpoint
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import StateDictType, TrainState


class Shelf(MemoryFileSystem):  # type: ignore[misc]  # fsspec is not typed
    """An in-memory file system."""

    protocol = "shelf"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]


@pytest.fixture(autouse=True)
def shelf() -> Iterator[dict[str, Any]]:
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    yield Shelf.store
    Shelf.store.clear()


@pytest.mark.parametrize("kind", list(StateDictType))
def test_a_custom_storage_receives_all_writes(shelf: dict[str, Any], kind: StateDictType) -> None:
    model = torch.nn.Linear(3, 2)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with CheckpointManager("shelf://runs/a", state_dict_type=kind) as manager:
        manager.save(1, state)
        (record,) = manager.list()
    opened = open_checkpoint("shelf://runs/a/step_00000001")
    assert (opened["model.weight"].numpy() == model.weight.detach().numpy()).all()
    there = {path: file.getbuffer().nbytes for path, file in shelf.items()}
    assert sum(size for path, size in there.items() if f"/{record.save_id}/" in path) == record.total_bytes
    assert any(path.endswith("step_00000001/checkpoint.json") for path in there)
    fresh = torch.nn.Linear(3, 2)
    with CheckpointManager("shelf://runs/a") as manager:
        manager.load(TrainState(model=fresh))
    assert torch.equal(fresh.weight, model.weight)
