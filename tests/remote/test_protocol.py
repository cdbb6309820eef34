"""What `prune` removes on S3: old uploads of a run, by the clock of the store, and nothing else."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from ckptkit.checkpoint.run import commit
from ckptkit.checkpoint.run.commit import clean_leftovers
from tests.checkpoint.saving import check, save
from tests.remote.runs import Place


@pytest.fixture
def root(near: Place) -> Any:
    """The store of a run with one checkpoint."""
    save(near.store, 1)
    return near.store


def test_prune_aborts_old_uploads_and_touches_no_foreign_object(root, monkeypatch):
    root.write("notes/readme.txt", b"mine")
    for name in ("step_00000009/0123456789abcdef/x", "datasets/tokens.bin"):
        root._api.upload(root._full(name))
    monkeypatch.setattr(commit, "UPLOAD_AGE_S", 1e11)
    clean_leftovers(root)
    assert len(root.unfinished_uploads()) == 2
    monkeypatch.setattr(commit, "UPLOAD_AGE_S", 0.0)
    assert len(clean_leftovers(root)) == 1
    (left,) = root.unfinished_uploads()
    assert left.name.endswith("/datasets/tokens.bin")
    assert root.read("notes/readme.txt") == b"mine" and check(root) == [1]


def test_the_age_of_an_upload_is_measured_by_the_clock_of_the_store(root, monkeypatch):
    root._api.upload(root._full("step_00000009/0123456789abcdef/x"))
    ahead = SimpleNamespace(time=lambda: time.time() + 1e10, monotonic=time.monotonic)
    monkeypatch.setattr("ckptkit.storage.objects.time", ahead)
    monkeypatch.setattr(commit, "UPLOAD_AGE_S", 1e10)  # moto's uploads are all of 2010
    assert clean_leftovers(root) == []
    assert len(root.unfinished_uploads()) == 1
