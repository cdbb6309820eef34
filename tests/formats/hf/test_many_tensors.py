"""The work for a safetensors file of many tensors: counted in function calls per tensor, never in seconds."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit import convert, diff, inspect, reshard, verify
from ckptkit.formats.detect import open_source
from tests.formats.damages import lay

_FEW, _MANY = 100, 400


def _write(root: Path, count: int) -> Path:
    numbers = np.arange(2 * count, dtype=np.float32).reshape(count, 2)
    weights = {f"model.layers.{i // 10}.block.{i % 10}.weight": row for i, row in enumerate(numbers)}
    return lay(root, {"model.safetensors": weights})


def _calls(work: Callable[[], Any]) -> int:
    """Return the number of function calls in this thread, C functions included."""
    count = 0

    def on_event(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


_COMMANDS: dict[str, tuple[Callable[[str, str, str], Any], int]] = {  # and the maximum number of calls per tensor
    "open": (lambda a, b, out: open_source(a), 22),
    "verify --quick": (lambda a, b, out: verify(a, quick=True), 22),
    "inspect": (lambda a, b, out: inspect(a), 42),
    "verify": (lambda a, b, out: verify(a), 28),
    "diff": (lambda a, b, out: diff(a, b), 96),
    "convert --dry-run": (lambda a, b, out: convert(a, out, dry_run=True).plan_lines(), 178),
    "convert": (lambda a, b, out: convert(a, out), 212),
    "convert --to dcp": (lambda a, b, out: convert(a, out, to="dcp"), 280),
    "reshard": (lambda a, b, out: reshard(a, out, world_size=2), 675),
}


@pytest.mark.parametrize("command", _COMMANDS)
def test_each_additional_tensor_costs_a_bounded_number_of_calls(tmp_path, command):
    work, most = _COMMANDS[command]
    counts = []
    for count in (_FEW, _FEW, _MANY):  # the first time also imports
        root = tmp_path / str(len(counts))
        a, b = str(_write(root / "a", count)), str(_write(root / "b", count))
        counts.append(_calls(lambda a=a, b=b, root=root: work(a, b, str(root / "out"))))
    each = (counts[2] - counts[1]) / (_MANY - _FEW)
    assert round(each) <= most, f"{command}: {each:.2f} calls a tensor, at most {most} are allowed"  # timers add a few
