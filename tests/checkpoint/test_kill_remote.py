"""A job that saves to an object store, killed before each request: no checkpoint is lost, no leftovers stay."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from ckptkit import CheckpointManager, RetentionPolicy
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.offline.verify import verify
from ckptkit.storage.open import open_store
from ckptkit.storage.store import Store
from tests.checkpoint.crash import kill_at_request
from tests.checkpoint.saving import fork
from tests.checkpoint.states import linear, save, value_of

Options = dict[str, Any]
MOST = 80  # requests of `job`
THEIRS = {
    "notes/run.txt": b"mine",
    "step_00000001/eval/results.json": b"mine",
    "step_00000002/0123456789abcdef/__0_0.distcp": b"copied here",  # no save of this run has recorded this id
    "step_00000009/fedcba9876543210/.metadata": b"a half copy",
}


def job(say: Any, url: str, options: Options, nth: int) -> None:
    """Save two steps, which rotates, and the second one again; report after each what was saved."""
    torch.set_num_threads(1)
    kill_at_request(nth)
    with CheckpointManager(url, retention=RetentionPolicy(max_num=2), storage_options=options) as manager:
        for step, value in ((2, 2), (3, 3), (3, 30)):
            manager.save(step, linear(value), overwrite=value == 30)
            say(b"%d %d\n" % (step, value))


def strays(root: Store) -> set[str]:
    """Return the objects and uploads that belong to no checkpoint and were not put there by the test."""
    known = {"latest", *THEIRS}
    for item in list_checkpoints(root).committed:
        known |= {f"{item.name}/checkpoint.json", *(f"{item.name}/{item.record.data}/{p}" for p in item.record.files)}
    there = {item.path for item in root.list(recursive=True)} - known
    return {
        path
        for path in there
        if ".ckptkit-deleted-" not in path and not path.startswith((".ckptkit/lease-", ".ckptkit/deleting/"))
    } | {found.path for found in root.unfinished_uploads()}


@pytest.mark.parametrize("nth", range(1, MOST + 1))
@pytest.mark.usefixtures("no_grace")
def test_a_kill_at_any_request_loses_nothing_and_leaves_nothing(s3: Options, nth: int) -> None:
    url = f"s3://bucket/killed/{nth}"
    root = open_store(url, storage_options=s3)
    save(url, linear(1), storage_options=s3)
    for path, data in THEIRS.items():
        root.write(path, data)
    code, said = fork(job, url, s3, nth)
    assert code in (0, -signal.SIGKILL) and (code == 0 or nth < MOST), (code, said)
    returned = [tuple(map(int, line.split())) for line in said.splitlines()]
    found = list_checkpoints(root).committed
    assert found and found[-1].step >= max((step for step, _ in returned), default=1)
    with CheckpointManager(url, storage_options=s3) as manager:
        loaded = linear()
        report = manager.load(loaded)
        assert report is not None and report.step == found[-1].step
        value = value_of(loaded)
        assert value in ({1: (1,), 2: (2,), 3: (3, 30)}[report.step])
        assert not returned or value >= returned[-1][1]
        manager.save(4, linear(4))
        assert manager.latest() == 4
    assert strays(root) == set()
    assert {path: root.read(path) for path in THEIRS} == THEIRS
    for item in list_checkpoints(root).committed:
        assert not verify(f"{url}/{item.name}", storage_options=s3).problems
