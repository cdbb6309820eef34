"""Azure Blob Storage, on Azurite: needs adlfs and `npm install -g azurite`."""

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from ckptkit import CheckpointManager, RetentionPolicy, TrainState, list_run, verify
from ckptkit.errors import CheckpointExistsError, StorageError, UsageError
from ckptkit.offline.prune import prune
from ckptkit.storage import open_store
from ckptkit.storage.body import Content
from ckptkit.storage.objects import RemoteStore
from tests.conformance.store_tests import StoreTests
from tests.storage import servers

pytest.importorskip("adlfs")
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # aiohttp's, of what adlfs sends


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    if servers.azurite_binary() is None:
        pytest.skip("azurite-blob is not on PATH: npm install -g azurite")
    with servers.azurite(tmp_path_factory.mktemp("azurite")) as options:
        open_store("abfs://box", storage_options=options).fs.mkdir("box")
        yield options


@pytest.fixture
def url() -> str:
    return f"abfs://box/run-{uuid.uuid4().hex}"


@pytest.fixture
def store(options: Mapping[str, Any], url: str) -> RemoteStore:
    return RemoteStore(url, storage_options=options)


class TestAzure(StoreTests):
    def test_an_upload_in_parts_does_not_replace(self, store):
        data = uuid.uuid4().bytes * (7 << 20)  # 112 MiB
        with store.writer("big") as out:
            out.write(data)
        assert store.read("big") == data
        with pytest.raises(FileExistsError), store.writer("big") as out:
            out.write(bytes(len(data)))
        assert store.read("big", 0, 1000) == data[:1000]

    def test_a_put_whose_answer_was_lost_is_recognized_as_ours(self, store):
        store.write("x", b"mine")
        full = store._full("x")
        assert store._api.is_mine(full, b"mine", mark="", tries=1)
        assert not store._api.is_mine(full, b"theirs", mark="", tries=1)

    def test_completing_an_upload_twice_succeeds(self, store):
        upload = store._api.upload(store._full("x"))
        for number, piece in ((2, b"two"), (1, b"one")):
            upload.part(number, Content.of(piece), last=False)
        upload.complete()
        upload.complete()
        assert store.read("x") == b"onetwo"

    def test_an_upload_that_lost_its_blocks_is_an_error(self, store):
        first, second = store._api.upload(store._full("x")), store._api.upload(store._full("x"))
        first.part(1, Content.of(b"one"), last=True)
        second.part(1, Content.of(b"two"), last=True)
        second.complete()  # drops the blocks of all others
        store.delete(["x"])
        with pytest.raises(StorageError):
            first.complete()


def test_a_run_is_saved_loaded_listed_verified_and_pruned(options, url):
    model = torch.nn.Linear(30, 20)
    with CheckpointManager(url, storage_options=options, retention=RetentionPolicy(max_num=9)) as manager:
        for step in (1, 2):
            manager.save(step, TrainState(model=model))
        with pytest.raises(CheckpointExistsError):
            manager.save(2, TrainState(model=model))
        wanted = model.weight.detach().clone()
        torch.nn.init.zeros_(model.weight)
        manager.load(TrainState(model=model))
    assert torch.equal(model.weight, wanted)
    assert verify(f"{url}/step_00000002", storage_options=options).ok
    assert prune(url, policy=RetentionPolicy(max_num=1), storage_options=options).deleted == ("step_00000001",)
    assert [row.step for row in list_run(url, storage_options=options).checkpoints] == [2]


def test_a_missing_account_name_is_a_usage_error(monkeypatch):
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="storage options"):
        open_store("abfs://box/run").info("x")
