"""`copy` to and from an object store: identical bytes both ways, interrupted or not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ckptkit import copy
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.run.pins import list_pins, pin_forever
from ckptkit.errors import CheckpointExistsError, IntegrityError
from ckptkit.offline.verify import verify
from ckptkit.storage import open_store
from ckptkit.storage.objects import RemoteStore
from tests.checkpoint.killed import same_as_saved, state
from tests.checkpoint.saving import fork
from tests.remote.runs import Options, names, objects, steps

ZOO = Path(__file__).parents[1] / "zoo"


def checkpoints(url: str, s3: Options | None = None) -> dict[str, bytes]:
    """Return the files of a run's checkpoints."""
    return {path: data for path, data in objects(url, s3).items() if path.startswith("step_")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = str(tmp_path_factory.mktemp("copy") / "RUN")
    with CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    pin_forever(f"{root}/step_00000002", "table 2")
    return root


def loads(url: str, s3: Options | None = None) -> None:
    loaded = state(0)
    with CheckpointManager(url, storage_options=s3) as manager:
        manager.load(loaded)
        same_as_saved(loaded, 3)
        manager.save(4, state(4))


def test_a_run_is_copied_to_a_bucket_and_back(run: str, url: str, s3: Options, tmp_path: Path) -> None:
    copy(run, url, dst_storage_options=s3, verify=True)
    assert checkpoints(url, s3) == checkpoints(run)
    assert [pin.name for pin in list_pins(open_store(url, storage_options=s3))] == ["step_00000002"]
    assert objects(url, s3)["latest"] == b"step_00000003\n"
    copy(url, str(tmp_path / "back"), src_storage_options=s3)
    assert checkpoints(str(tmp_path / "back")) == checkpoints(run)
    copy(url, f"{url}-too", storage_options=s3)
    loads(url, s3)
    loads(str(tmp_path / "back"))
    assert checkpoints(f"{url}-too", s3) == checkpoints(run)


def test_a_run_that_was_saved_to_a_bucket_is_copied_to_a_disk(url: str, s3: Options, tmp_path: Path) -> None:
    with CheckpointManager(url, storage_options=s3) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
    copy(url, str(tmp_path / "disk"), src_storage_options=s3)
    assert checkpoints(str(tmp_path / "disk")) == checkpoints(url, s3)
    assert all(verify(f"{tmp_path}/disk/{step}").ok for step in (1, 2, 3))
    loads(str(tmp_path / "disk"))


@pytest.mark.parametrize("name", ["dcp_fsdp2_uneven_w4/ckpt", "hf_ref_llama_tied", "verl_fsdp2_w2"])
def test_a_foreign_checkpoint_is_copied_to_a_bucket_and_back(name: str, url: str, s3: Options, tmp_path: Path) -> None:
    copy(str(ZOO / name), url, dst_storage_options=s3)
    assert objects(url, s3) == objects(str(ZOO / name))
    copy(url, str(tmp_path / "back"), src_storage_options=s3)
    assert objects(str(tmp_path / "back")) == objects(str(ZOO / name))
    with pytest.raises(CheckpointExistsError):
        copy(str(ZOO / name), url, dst_storage_options=s3)
    if name.startswith("verl"):  # a directory of steps is never replaced
        with pytest.raises(CheckpointExistsError, match="is not overwritten"):
            copy(str(ZOO / name), url, dst_storage_options=s3, overwrite=True)
    else:
        copy(str(ZOO / name), url, dst_storage_options=s3, overwrite=True)
    assert objects(url, s3) == objects(str(ZOO / name))


def test_damage_in_a_bucket_is_named_and_nothing_is_published(run: str, url: str, s3: Options, tmp_path: Path) -> None:
    copy(f"{run}/3", f"{url}/step_00000003", dst_storage_options=s3)
    store = open_store(f"{url}/step_00000003", storage_options=s3)
    name = max((item for item in store.list() if item.path.endswith(".distcp")), key=lambda item: item.size).path
    data = bytearray(store.read(name))
    data[len(data) // 2] ^= 1
    store.write(name, bytes(data), overwrite=True)
    with pytest.raises(IntegrityError, match=name):
        copy(f"{url}/step_00000003", str(tmp_path / "out"), src_storage_options=s3)
    with pytest.raises(IntegrityError, match=name):
        copy(f"{url}/step_00000003", f"{url}-out", storage_options=s3)
    assert os.listdir(tmp_path) == [] and not names(f"{url}-out", s3)


def _killed(say: Any, run: str, url: str, s3: Options, nth: int) -> None:
    count = 0
    write = RemoteStore.writer

    def writer(self: RemoteStore, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, *args, **kwargs)

    RemoteStore.writer = writer
    copy(run, url, dst_storage_options=s3)


@pytest.mark.parametrize("nth", [1, 4, 8])
def test_a_killed_copy_to_a_bucket_is_a_shorter_run_and_continues(run: str, url: str, s3: Options, nth: int) -> None:
    code, _ = fork(_killed, run, url, s3, nth)
    assert code == -signal.SIGKILL
    done = steps(url, s3)
    assert done == [1, 2, 3][: len(done)] != [1, 2, 3]
    copy(run, url, dst_storage_options=s3)
    assert checkpoints(url, s3) == checkpoints(run)
