"""A server that ignores If-None-Match for some writes: what is still safe."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from ckptkit import CheckpointManager
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.errors import CheckpointExistsError, LeaseHeldError, StorageError
from ckptkit.offline.verify import verify
from ckptkit.storage import open_store
from ckptkit.storage.lock import STATE_DIRECTORY, acquire_lease
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.owner import owner_json
from ckptkit.storage.publish import stage
from tests.remote.runs import Options, loads, save, state_of
from tests.storage.proxy import Proxy, Reply

_counter = itertools.count()


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


@pytest.fixture
def url(versioned: str) -> str:
    return f"s3://{versioned}/ignored{next(_counter)}"


def test_conditional_writes_are_tested_per_bucket(options: Options, url: str) -> None:
    plain = RemoteStore(f"s3://remote/conditions{next(_counter)}", storage_options=options)
    plain.write("x", b"1")
    plain.try_conditional("x", b"1")
    assert plain.has_conditional_writes is True
    kept = RemoteStore(url, storage_options=options)
    kept.write("x", b"1")
    kept.try_conditional("x", b"1")
    assert kept.has_conditional_writes is False
    with pytest.raises(FileExistsError):
        kept.write("x", b"2")
    assert kept.read("x") == b"1"


def test_a_run_is_saved_and_loaded_where_conditions_are_ignored(options: Options, url: str) -> None:
    save(url, options, 1)
    save(url, options, 2)
    with pytest.raises(CheckpointExistsError):
        save(url, options, 2)
    loads(url, options, 2)
    assert verify(f"{url}/step_00000002", storage_options=options).ok


def test_a_commit_record_replaced_at_once_is_not_reported_as_saved(
    server: Ceph16, options: Options, s3: Options, url: str
) -> None:
    root = open_store(url, storage_options=s3)
    save(url, s3, 1)
    (first,) = list_checkpoints(root).committed
    theirs = replace(first.record, save_id="0" * 16, data="0" * 16, step=3).to_json()
    with CheckpointManager(url, storage_options=options) as manager:
        manager.save(2, state_of(2))
        server.after["step_00000003/checkpoint.json"] = lambda: root.write(
            "step_00000003/checkpoint.json", theirs, overwrite=True
        )
        with pytest.raises(CheckpointExistsError, match="another writer"):
            manager.save(3, state_of(3))
    assert [item.path for item in root.list("step_00000003", recursive=True)] == ["step_00000003/checkpoint.json"]
    assert list_checkpoints(root).find("step_00000002") is not None


def test_two_jobs_that_take_the_lease_at_once_get_an_error(options: Options, s3: Options, url: str) -> None:
    lease, root = acquire_lease(open_store(url, storage_options=options)), open_store(url, storage_options=s3)
    body = {"nonce": "0" * 16, "beat": 0, "released": False, **owner_json(root)}
    root.write(lease.path, json.dumps(body).encode(), overwrite=True)
    assert lease.path.startswith(STATE_DIRECTORY)
    with pytest.raises(LeaseHeldError, match="took the lease at the same time") as caught:
        lease.check()
    assert "did not renew" not in str(caught.value)


def test_the_first_of_two_writers_with_the_same_owner_file_publishes_nothing(
    options: Options, s3: Options, url: str
) -> None:
    root = open_store(url, storage_options=s3)
    names = {"data": 4, "index.json": -1}
    body = {"nonce": "0" * 16, "leased": False, **owner_json(root)}
    with (
        pytest.raises(StorageError, match="another process has taken it over"),
        stage(url, last=["index.json"], names=names, storage_options=options) as store,
    ):
        store.write("data", b"data")
        store.write("index.json", b"{}")
        root.write(".ckptkit-owner.json", json.dumps(body).encode(), overwrite=True)
    assert {item.path for item in root.list()} == {".ckptkit-owner.json", "data"}  # theirs, as far as anybody can tell
