"""At most six of our functions are between a worker and the read or write of a conversion: docs/internals/ways.md."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit import convert, reshard
from ckptkit.offline.copying.copier import Copier
from tests.offline.folders import UNEVEN
from tests.offline.resuming import COLUMNS

PACKAGE = str(Path(ckptkit.__file__).parent)
MOST = 6


def frames() -> Iterator[str]:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            yield frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bf16"}, {"check": False}, {"world_size": 3}, {"world_size": 6, **COLUMNS}]
)
def test_a_worker_reads_and_writes_at_most_six_functions_deep(tmp_path, monkeypatch, options):
    found: dict[str, list[str]] = {"preadv": [], "pwritev": []}

    def watched(name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any) -> int:
            stack = list(frames())
            if Copier.do.__name__ in stack and len(stack) > len(found[name]):
                found[name] = stack
            return int(real(*args))

        return call

    for name in found:
        monkeypatch.setattr(os, name, watched(name))
    command = reshard if "world_size" in options else convert
    command(str(UNEVEN / "ckpt"), str(tmp_path / "out"), **options)
    assert all(0 < len(stack) <= MOST for stack in found.values()), found
