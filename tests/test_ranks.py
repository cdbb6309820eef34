"""The pool of ranks gives each task the state of a fresh process."""

import math

import pytest

from tests.ranks import on_ranks


@pytest.mark.parametrize("turn", ["patched", "undone"])
@on_ranks(1)
def test_what_a_test_patches_on_a_rank_is_undone(turn, monkeypatch):
    assert not hasattr(math, "patched")
    monkeypatch.setattr(math, "patched", turn, raising=False)
