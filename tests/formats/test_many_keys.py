"""A header of many tensors needs a bounded number of calls per tensor: twice the keys, at most twice the calls."""

from __future__ import annotations

import cProfile
import json
import pstats
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.formats.detect import open_source
from ckptkit.offline.convert import convert
from ckptkit.offline.diff import diff
from ckptkit.offline.inspect import inspect
from ckptkit.offline.verify import verify

COMMANDS: dict[str, tuple[Callable[[str], Any], int]] = {  # calls per tensor
    "open": (open_source, 40),
    "verify": (verify, 90),
    "inspect": (inspect, 90),
    "diff": (lambda url: diff(url, url), 150),
    "convert --dry-run": (lambda url: convert(url, f"{url}-out", dry_run=True).plan_lines(), 220),
}


def _write(folder: Path, count: int) -> None:
    folder.mkdir()
    header = {
        f"model.layers.{i // 10}.experts.{i % 10}.weight": {
            "dtype": "F32",
            "shape": [2],
            "data_offsets": [8 * i, 8 * i + 8],
        }
        for i in range(count)
    }
    data = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(8 * count))


def _calls(run: Callable[[str], Any], url: str) -> int:
    profile = cProfile.Profile()
    profile.runcall(run, url)
    return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_twice_the_keys_need_at_most_twice_the_calls(tmp_path: Path, name: str) -> None:
    run, most = COMMANDS[name]
    for count in (1000, 2000):
        _write(tmp_path / str(count), count)
    run(str(tmp_path / "1000"))  # for the imports
    few, many = (_calls(run, str(tmp_path / str(count))) for count in (1000, 2000))
    assert many - few <= most * 1000
    assert many <= 2.1 * few
