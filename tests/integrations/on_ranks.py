"""Tests whose assertions are made on each rank, under a real framework."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.ranks import logged


def on_ranks(*world_sizes: int) -> Callable[[Any], Any]:
    """Make a test of a function that every rank runs with a directory; of several sizes, one after the other."""

    def made(rule: Any) -> Any:
        def test(framework_ranks: Any, tmp_path: Path, **cases: Any) -> None:
            for ranks in world_sizes:
                framework_ranks.run(_run, ranks, rule.__module__, rule.__name__, tmp_path, cases, timeout=240)

        names = ["framework_ranks", "tmp_path", *list(inspect.signature(rule).parameters)[1:]]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        test.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        test.__name__, test.__module__, test.rule = rule.__name__, rule.__module__, rule
        return test

    return made


def _run(module: str, name: str, work: Path, cases: dict[str, Any]) -> None:
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # tells Lightning that another launcher has started the ranks
    warnings.filterwarnings("ignore")
    getattr(importlib.import_module(module), name).rule(work, **cases)


@contextlib.contextmanager
def rank_0_warns(name: str, text: str) -> Iterator[None]:
    """Check that the block logs one warning, with this text, on rank 0 only."""
    with logged(name=name) as texts:
        yield
    assert [text in line for line in texts] == [True] * (os.environ["RANK"] == "0"), texts
