"""A server that ignores If-None-Match for some writes: what is still safe."""

import json
from dataclasses import replace
from typing import Any

import pytest

from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.errors import CheckpointExistsError, LeaseHeldError, StorageError
from ckptkit.storage.lock import STATE_DIRECTORY, acquire_lease
from ckptkit.storage.owner import owner_json
from ckptkit.storage.publish import stage
from tests.remote.runs import Place, on, state_of
from tests.storage.proxy import Proxy, Reply

pytestmark = on("versioned")


class Ceph16:
    """Goes between a proxy and its server: ignores conditions when uploads complete, and in versioned buckets."""

    def __init__(self) -> None:
        self.after: dict[str, Any] = {}  # what happens right after a put to a path that ends so, once

    def __call__(self, handler: Any, body: bytes) -> Reply | None:
        if "uploadId" in handler.path or handler.path.startswith("/versioned"):
            del handler.headers["If-None-Match"]
        reply: Reply = handler.forward(body)
        for ending in [ending for ending in self.after if handler.command == "PUT" and handler.path.endswith(ending)]:
            self.after.pop(ending)()
        return reply


@pytest.fixture(autouse=True)
def server(proxy: Proxy) -> Ceph16:
    proxy.between = made = Ceph16()
    return made


def test_conditional_writes_are_tested_per_bucket(far):
    for bucket, has_conditions in (("bucket", True), ("versioned", False)):
        store = Place(far.url.replace("versioned", bucket), far.options).store
        store.write("x", b"1")
        store.try_conditional("x", b"1")
        assert store.has_conditional_writes is has_conditions
    with pytest.raises(FileExistsError):
        store.write("x", b"2")
    assert store.read("x") == b"1"


def test_a_commit_record_replaced_at_once_is_not_reported_as_saved(server, far, near):
    near.save(1)
    root, path = near.store, "step_00000003/checkpoint.json"
    (first,) = list_checkpoints(root).committed
    theirs = replace(first.record, save_id="0" * 16, data="0" * 16, step=3).to_json()
    with far.manager() as manager:
        manager.save(2, state_of(2))
        server.after[path] = lambda: root.write(path, theirs, overwrite=True)
        with pytest.raises(CheckpointExistsError, match="another writer"):
            manager.save(3, state_of(3))
    assert (near / "step_00000003").names() == {"checkpoint.json"}
    assert list_checkpoints(root).find("step_00000002") is not None


def test_two_jobs_that_take_the_lease_at_once_get_an_error(far, near):
    lease, root = acquire_lease(far.store), near.store
    body = {"nonce": "0" * 16, "beat": 0, "released": False, **owner_json(root)}
    root.write(lease.path, json.dumps(body).encode(), overwrite=True)
    assert lease.path.startswith(STATE_DIRECTORY)
    with pytest.raises(LeaseHeldError, match="took the lease at the same time") as caught:
        lease.check()
    assert "did not renew" not in str(caught.value)


def test_the_first_of_two_writers_with_the_same_owner_file_publishes_nothing(far, near):
    names = {"data": 4, "index.json": -1}
    body = {"nonce": "0" * 16, "leased": False, **owner_json(near.store)}
    with (
        pytest.raises(StorageError, match="another process has taken it over"),
        stage(far.url, last=["index.json"], names=names, storage_options=far.options) as store,
    ):
        store.write("data", b"data")
        store.write("index.json", b"{}")
        near.store.write(".ckptkit-owner.json", json.dumps(body).encode(), overwrite=True)
    assert near.names() == {".ckptkit-owner.json", "data"}  # theirs, as far as anybody can tell
