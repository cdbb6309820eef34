"""Sharded states on a real S3 server, with our calls and with torch's planner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit.errors import CheckpointExistsError, StorageError
from ckptkit.formats.dcp.torch_api import DCPReader, DCPWriter
from ckptkit.storage import Store, open_store
from tests.formats.dcp_states import differences, state
from tests.formats.sharded import read_alone, write_alone
from tests.storage import servers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def options():
    with servers.moto() as found:
        open_store("s3://dcp-files", storage_options=found).fs.mkdir("dcp-files")
        yield found


def save_here(made: dict[str, Any], store: Store) -> None:
    write_alone(made, store, sync=True, workers=2)


def load_here(target: dict[str, Any], store: Store) -> None:
    read_alone(store, target)


def large() -> dict[str, Any]:
    made = state("plain@1")
    made["model"]["larger"] = torch.randn(5 << 20)
    return made


def test_a_state_round_trips_through_an_object_store(options):
    store = open_store("s3://dcp-files/sharded", storage_options=options)
    made = large()
    save_here(made, store)
    target = state("plain@1", zeros=True)
    target["model"]["larger"] = torch.zeros(5 << 20)
    load_here(target, store)
    assert differences(target, made) == []


def test_dcp_save_and_load_round_trip_through_an_object_store(options):
    url, made = "s3://dcp-files/dcp", large()
    dcp.save(made, storage_writer=DCPWriter(url, storage_options=options), no_dist=True)
    target = state("plain@1", zeros=True)
    target["model"]["larger"] = torch.zeros(5 << 20)
    dcp.load(target, storage_reader=DCPReader(url, storage_options=options), no_dist=True)
    assert differences(target, made) == []
    with pytest.raises(dcp.api.CheckpointException) as error:
        dcp.save(made, storage_writer=DCPWriter(url, storage_options=options), no_dist=True)
    assert isinstance(next(iter(error.value.failures.values()))[0], CheckpointExistsError)


class Failing:
    """A store whose writers fail after some bytes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def writer(self, path: str, *, sync: bool = True) -> Any:
        import contextlib

        @contextlib.contextmanager
        def opened() -> Iterator[Any]:
            with self._store.writer(path, sync=sync) as writer:
                writer.write(b"some")
                raise StorageError(5, "the connection broke")
                yield writer

        return opened()


def test_a_broken_upload_leaves_no_object(options):
    store = open_store("s3://dcp-files/broken", storage_options=options)
    with pytest.raises(StorageError, match="broke"):
        save_here(large(), Failing(store))  # type: ignore[arg-type]
    assert store.list() == []
