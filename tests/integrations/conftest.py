"""Ranks of their own for these tests: a framework is imported once in each, and its globals leak into no other test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Pool


@pytest.fixture(scope="package")
def framework_ranks() -> Iterator[Pool]:
    """The pool: `framework_ranks.run(fn, world_size, *args)`."""
    pool = Pool(4)
    yield pool
    pool.close()
