"""Modules that take seconds to import, for the worker alone that runs a test which needs them."""

from __future__ import annotations

from typing import Any

import pytest


class LazyModule:
    """A module that is imported at its first use; a test that uses it without having it is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(pytest.importorskip(self._name), attribute)
