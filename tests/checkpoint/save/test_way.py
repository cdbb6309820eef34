"""The path of a save is short: how many of our functions one tensor passes, and how many a save calls.

    python -m tests.checkpoint.save.test_way

prints the functions, most called first, and the frames above the write. docs/internals/ways.md gives their reasons.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import ckptkit
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState

ROOT = f"{Path(ckptkit.__file__).parent}/"
EXPRESSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")  # later Pythons inline some of them
MOST_FRAMES = 6
MOST_FUNCTIONS = 276


class Entered:
    """The calls of our functions in this thread, and the stack above each write of a data file."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()
        self.stacks: list[list[str]] = []

    def __enter__(self) -> Entered:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, what: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT) and frame.f_code.co_name not in EXPRESSIONS:
            self.functions[_name(frame)] += 1
        elif event == "c_call" and getattr(what, "__name__", "") in ("write", "pwrite"):
            stack, above = [], frame
            while above is not None:
                if above.f_code.co_filename.startswith(ROOT):
                    stack.append(_name(above))
                above = above.f_back  # type: ignore[assignment]
            self.stacks.append(stack[::-1])


def _name(frame: FrameType) -> str:
    code: Any = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
    return f"{code.co_filename.removeprefix(ROOT)} {name} {code.co_firstlineno}"


def save_one_tensor(url: str) -> Entered:
    """Save a 4x4 tensor, the first checkpoint of a run."""
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.arange(16.0).reshape(4, 4)))
    with CheckpointManager(url) as manager, Entered() as found:
        manager.save(1, TrainState(model=model, rng=False))
    return found


def test_a_save_has_at_most_six_of_our_frames_above_each_write(tmp_path: Path) -> None:
    stacks = save_one_tensor(str(tmp_path)).stacks
    (of_tensor,) = [stack for stack in stacks if any("formats/dcp/files.py" in name for name in stack)]
    assert len(of_tensor) <= MOST_FRAMES, of_tensor


def test_a_save_of_one_tensor_calls_few_functions(tmp_path: Path) -> None:
    functions = save_one_tensor(str(tmp_path)).functions
    assert 0 < len(functions) <= MOST_FUNCTIONS, len(functions)


def test_a_save_lists_the_run_once_and_reports_how_many_checkpoints_it_has(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainState(model=torch.nn.Linear(2, 2), rng=False))
        with Entered() as found:
            report = manager.save(2, TrainState(model=torch.nn.Linear(2, 2), rng=False))
    (times,) = [times for name, times in found.functions.items() if "inventory.py _list_once " in name]
    assert (times, report.kept) == (1, 2)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        way = save_one_tensor(place)
    for function, times in way.functions.most_common():
        print(f"{times:5d} {function}")
    for frames in way.stacks:
        print(f"\n{len(frames)} frames above a write\n  " + "\n  ".join(frames))
    print(f"\n{len(way.functions)} functions, {way.functions.total()} calls")
