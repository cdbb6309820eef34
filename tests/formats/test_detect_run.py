"""The root of a ckptkit run stands for its newest committed checkpoint, whatever else is in the run."""

import shutil
import threading

import pytest

from ckptkit import CheckpointManager, RetentionPolicy
from ckptkit.checkpoint.run.address import resolve_url
from ckptkit.errors import StorageError
from ckptkit.formats import detect
from ckptkit.formats.detect import open_source
from tests.checkpoint.states import linear, save_steps
from tests.patches import refuse


def killed_save(root):
    """Leave a staging directory in which everything but the record was written."""
    shutil.copytree(root / "step_00000020", root / ".tmp-step_00000025-aaaaaaaaaaaaaaaa")
    (root / ".tmp-step_00000025-aaaaaaaaaaaaaaaa" / "checkpoint.json").unlink()


def killed_deletion(root):
    (root / "step_00000010").rename(root / ".trash-step_00000010-ba2936b17940113e")


def lost_record(root):
    shutil.copytree(root / "step_00000020", root / "step_00000030")
    (root / "step_00000030" / "checkpoint.json").unlink()


def rollback(root):
    with CheckpointManager(root) as manager:
        manager.load(linear(), 10)
        manager.save(15, linear())


def tag(root):
    with CheckpointManager(root) as manager:
        manager.load(linear())
        manager.save(30, linear(), tag="final")


@pytest.mark.parametrize("change", [killed_save, killed_deletion, lost_record, rollback, tag], ids=lambda f: f.__name__)
def test_the_root_of_a_run_is_opened_as_latest(tmp_path, change):
    save_steps(tmp_path, 10, 20)
    change(tmp_path)
    assert open_source(str(tmp_path)).url == resolve_url(f"{tmp_path}/latest")


def test_a_record_that_the_store_does_not_return_is_not_taken_for_a_damaged_one(tmp_path, monkeypatch):
    save_steps(tmp_path, 10, 20)
    error = StorageError("no answer")
    refuse(monkeypatch, detect, "find_record", error, when=lambda store, path: path.startswith("step_00000010"))
    with pytest.raises(StorageError, match="no answer"):
        open_source(str(tmp_path))


def test_the_root_of_a_run_can_always_be_opened_while_a_job_saves_with_max_num_1(tmp_path):
    stop = threading.Event()
    with CheckpointManager(tmp_path, retention=RetentionPolicy(max_num=1)) as manager:
        manager.save(1, linear())

        def reading():
            try:
                for _ in range(100):
                    seen.append(open_source(str(tmp_path)).catalog.info.step)
            finally:
                stop.set()

        seen = []
        thread = threading.Thread(target=reading)
        thread.start()
        step = 1
        while not stop.is_set():
            step += 1
            manager.save(step, linear())
        thread.join()
    assert len(seen) == 100 and seen == sorted(seen)
