"""Modules that take seconds to import, imported only by the worker that runs a test which needs them."""

from __future__ import annotations

from typing import Any

import pytest


class LazyModule:
    """A module that is imported at its first use; a test that uses it is skipped if it is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest asks each global of a test file for some of those while it collects
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self._name), attribute)
