"""Commands that are killed after some steps and run again."""

import itertools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptkit import convert
from ckptkit.offline.copying import runs
from ckptkit.storage import journal
from tests.checkpoint.saving import fork
from tests.offline.folders import names, tree
from tests.patches import after, die

COLUMNS = {"tp_plan": {"*.up.weight": 1, "*.down.weight": 1}, "mesh": {"tp": 2}}
STEP = 16_000  # so that a small checkpoint takes several steps


def dying_after(steps: int) -> None:
    """Let this process kill itself after so many steps are recorded as done."""
    calls = itertools.count(1)
    after(pytest.MonkeyPatch(), journal.Journal, "done", lambda *_: next(calls) == steps and die())


def killed(command: Callable[..., Any], source: Path, out: Path, steps: int, **options: Any) -> None:
    """Run a command in a process that kills itself after so many steps."""

    def dies(say: Any) -> None:
        dying_after(steps)
        runs._STEP = STEP
        command(str(source), str(out), workers=1, **options)

    assert fork(dies)[0] == -signal.SIGKILL
    assert not out.exists()


def content(folder: Path, *without: str) -> dict[str, bytes]:
    """Return the files without timestamps."""
    return tree(folder, "checkpoint.json", "README.md", *without)


def went_on(notes: tuple[str, ...]) -> str:
    return next((note for note in notes if note.startswith("continued an interrupted command")), "")


def assert_whole(
    source: Path, tmp_path: Path, *without: str, command: Callable[..., Any] = convert, **options: Any
) -> Any:
    """Assert that the result equals that of an undisturbed run, and that nothing else is left; return that report."""
    report = command(str(source), str(tmp_path / "whole"), **options)
    assert content(tmp_path / "out", *without) == content(tmp_path / "whole", *without)
    assert names(tmp_path) == ["in", "out", "whole"]
    return report
