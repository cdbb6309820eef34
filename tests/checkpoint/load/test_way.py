"""A load calls few of our functions; docs/internals/ways.md lists them. Each additional one needs a reason."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit import CheckpointManager, TrainState
from tests.checkpoint.save.test_way import EXPRESSIONS

PACKAGE = str(Path(ckptkit.__file__).parent)
MOST_FRAMES = 8
MOST_FUNCTIONS = 270


def state() -> TrainState:
    return TrainState(model=nn.Linear(4, 4, bias=False))


@pytest.fixture
def run(tmp_path: Path) -> str:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state())
        manager.load(state())  # one-time imports and allocations are not counted
    return str(tmp_path)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_load_has_at_most_eight_of_our_frames_above_each_read(
    run: str, atomic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, stacks = os.preadv, []

    def noted(fd: int, buffers: Sequence[Any], offset: int) -> int:
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
        stacks.append([f"{Path(frame.filename).name}: {frame.name}" for frame in frames])
        return preadv(fd, buffers, offset)

    with CheckpointManager(run) as manager:
        monkeypatch.setattr(os, "preadv", noted)
        manager.load(state(), atomic=atomic)
        monkeypatch.undo()
    assert stacks
    for stack in stacks:
        assert len(stack) <= MOST_FRAMES, "\n".join(stack)


def test_a_load_calls_few_of_our_functions(run: str) -> None:
    entered: set[Any] = set()

    def on_event(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name not in EXPRESSIONS:
            entered.add(frame.f_code)

    with CheckpointManager(run) as manager:
        loaded = state()
        sys.setprofile(on_event)
        try:
            manager.load(loaded)
        finally:
            sys.setprofile(None)
    assert len(entered) <= MOST_FUNCTIONS, len(entered)
    assert all(torch.isfinite(p).all() for p in loaded.model.parameters())  # type: ignore[union-attr]
