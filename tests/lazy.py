"""Modules that take seconds to import: imported only where a test needs them, and what a program imports."""

import subprocess
import sys
from typing import Any

import pytest


def modules_after(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after running `code`."""
    script = f"{code}\nimport sys\nprint('', *('module:' + name for name in sys.modules), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {line.removeprefix("module:") for line in done.stdout.splitlines() if line.startswith("module:")}


class LazyModule:
    """A module that is imported at its first use; a test that uses it is skipped if it is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks each global of a test file for some of those while it collects
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self._name), attribute)
