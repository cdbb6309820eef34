"""Sharded states on a real S3 server, with our calls and with torch's planner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckptkit.errors import CheckpointExistsError, StorageError
from ckptkit.formats.dcp.torch_api import DCPReader, DCPWriter
from ckptkit.storage import Store, open_store
from tests.formats.dcp_states import assert_loads, failure, save, state
from tests.formats.sharded import assert_reads, write_alone
from tests.storage import servers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def options():
    with servers.moto() as found:
        open_store("s3://dcp-files", storage_options=found).fs.mkdir("dcp-files")
        yield found


def large() -> dict[str, Any]:
    made = state("plain@1")
    made["model"]["larger"] = torch.randn(5 << 20)
    return made


def test_a_state_round_trips_through_an_object_store(options):
    store, made = open_store("s3://dcp-files/sharded", storage_options=options), large()
    write_alone(made, store, sync=True, workers=2)
    assert_reads(store, made)


def test_dcp_save_and_load_round_trip_through_an_object_store(options):
    url, made = "s3://dcp-files/dcp", large()
    save(DCPWriter(url, storage_options=options), made)
    assert_loads(DCPReader(url, storage_options=options), made)
    error = failure(save, DCPWriter(url, storage_options=options), made)
    assert isinstance(error, CheckpointExistsError)


class Failing:
    """A store whose writers fail after some bytes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @contextlib.contextmanager
    def writer(self, path: str, *, sync: bool = True) -> Iterator[Any]:
        with self._store.writer(path, sync=sync) as writer:
            writer.write(b"some")
            raise StorageError(5, "the connection broke")
            yield writer


def test_a_broken_upload_leaves_no_object(options):
    store = open_store("s3://dcp-files/broken", storage_options=options)
    with pytest.raises(StorageError, match="broke"):
        write_alone(large(), Failing(store), sync=True, workers=2)  # type: ignore[arg-type]
    assert store.list() == []
