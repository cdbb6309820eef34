"""The ways of a save and a load are short: how many of our functions one tensor passes, and how many are called.

    python -m tests.checkpoint.test_ways

prints the functions of a save, most called first, and the frames above its writes. docs/internals/ways.md gives their
reasons.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptkit
from ckptkit import CheckpointManager, TrainState
from ckptkit.checkpoint.run.coordinator import Coordinator
from tests.checkpoint.states import linear, module_of
from tests.patches import before
from tests.ranks import on_ranks, run_script

ROOT = f"{Path(ckptkit.__file__).parent}/"
EXPRESSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")  # later Pythons inline some of them


class Entered:
    """The calls of our functions in this thread, and the stack above each of these calls of `os` in any thread."""

    def __init__(self, *operations: str) -> None:
        self.functions: Counter[str] = Counter()
        self.stacks: list[list[str]] = []
        self.patch, self.operations = pytest.MonkeyPatch(), operations

    def __enter__(self) -> Entered:
        for name in self.operations:
            self.patch.setattr(os, name, self._noted(getattr(os, name)))
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        self.patch.undo()

    def _noted(self, real: Any) -> Any:
        def operation(*args: Any) -> Any:
            stack, frame = [], sys._getframe()
            while (frame := frame.f_back) is not None:  # type: ignore[assignment]
                stack += [_name(frame)] if frame.f_code.co_filename.startswith(ROOT) else []
            self.stacks.append(stack[::-1])
            return real(*args)

        return operation

    def _note(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT) and frame.f_code.co_name not in EXPRESSIONS:
            self.functions[_name(frame)] += 1


def _name(frame: FrameType) -> str:
    code: Any = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
    return f"{code.co_filename.removeprefix(ROOT)} {name} {code.co_firstlineno}"


def save_one_tensor(url: str) -> Entered:
    """Save a 4x4 tensor, the first checkpoint of a run, but not the first of this process."""
    model = module_of({"w": torch.arange(16.0).reshape(4, 4)})
    for run in ("warm", "counted"):
        with CheckpointManager(f"{url}/{run}") as manager, Entered("write", "pwrite") as found:
            manager.save(1, TrainState(model=model, rng=False))
    return found


def test_a_save_of_one_tensor_has_few_of_our_frames_above_its_write_and_calls_few_functions():
    # In a process of its own, because the number depends on what ran before.
    code, told = run_script("from tests.checkpoint import test_ways; test_ways.main()")
    assert code == 0, told
    stacks = [text for text in told.split("\n\n") if " above a write" in text]
    (of_tensor,) = [text for text in stacks if "formats/dcp/files.py" in text]
    assert int(of_tensor.split()[0]) <= 6, of_tensor
    assert 0 < int(told.splitlines()[-1].split()[0]) <= 226, told


def test_a_save_lists_the_run_once_and_reports_how_many_checkpoints_it_has(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, linear())
        with Entered() as found:
            report = manager.save(2, linear())
    (times,) = [times for name, times in found.functions.items() if "inventory.py _list_once " in name]
    assert (times, report.kept) == (1, 2)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_load_has_few_of_our_frames_above_each_read_and_calls_few_functions(tmp_path, atomic):
    def state() -> TrainState:
        return TrainState(model=torch.nn.Linear(4, 4, bias=False))

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state())
        manager.load(state())  # one-time imports and allocations are not counted
    with CheckpointManager(tmp_path) as manager:
        loaded = state()
        with Entered("preadv") as found:
            manager.load(loaded, atomic=atomic)
    assert found.stacks and max(map(len, found.stacks)) <= 8, found.stacks
    assert atomic or len(found.functions) <= 256, len(found.functions)


class Messages:
    """Counts this rank's messages to others, and the gathers that settle plans."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told = self.settled = self.messages = 0

        def count(coordinator: Any, value: Any, ranks: Any) -> None:
            self.messages += len(ranks)
            self.told += len(ranks) * len(pickle.dumps(value))

        def settle(coordinator: Any, value: bytes) -> None:
            self.settled += 1

        before(monkeypatch, Coordinator, "_post", count)
        before(monkeypatch, Coordinator, "all_gather", settle)

    def take(self) -> tuple[int, int, int]:
        found = self.settled, self.messages, self.told
        self.settled = self.messages = self.told = 0
        return found


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_later_saves_exchange_no_plans(tmp_path, background):
    mesh = init_device_mesh("cpu", (2,))
    wholes = {f"block_{i}_weight": torch.full((8, 4), float(i)) for i in range(300)}
    sharded = {key: distribute_tensor(whole, mesh, (Shard(0),), src_data_rank=None) for key, whole in wholes.items()}
    model = module_of(sharded)
    if dist.get_rank() == 1:
        model.register_buffer("own", torch.ones(3))  # so that plans have something to settle
    found = []
    with pytest.MonkeyPatch.context() as monkeypatch, CheckpointManager(tmp_path) as manager:
        counter = Messages(monkeypatch)
        for step in range(1, 5):
            if step == 4:
                model.register_buffer("new", torch.ones(2))
            if background:
                manager.save_async(step, TrainState(model=model)).result()
            else:
                manager.save(step, TrainState(model=model))
            found.append(counter.take())
    settled, messages, told = zip(*found, strict=True)
    assert settled == (2, 0, 0, 1)  # who writes what; before, in the first save, who has which plain tensors
    assert messages[0] > messages[1] == messages[2] < messages[3]
    if dist.get_rank() == 0:
        assert max(told[1:3]) < 4_000
    else:  # 300 tensors: rank 1 sends 60 bytes or more for each of its slices, and rank 0 forwards none of it
        assert min(told) > 300 * 44


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        way = save_one_tensor(place)
    for function, times in way.functions.most_common():
        print(f"{times:5d} {function}")
    for frames in way.stacks:
        print(f"\n{len(frames)} frames above a write\n  " + "\n  ".join(frames))
    print(f"\n{len(way.functions)} functions, {way.functions.total()} calls")


if __name__ == "__main__":
    main()
