"""Separate ranks for these tests: each imports a framework once, and its global state affects no other test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Pool


@pytest.fixture(scope="package")
def framework_ranks() -> Iterator[Pool]:
    """The pool: `framework_ranks.run(fn, world_size, *args)`."""
    pool = Pool()
    yield pool
    pool.close()
