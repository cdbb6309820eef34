"""`--overwrite` on an object store: the old export stays until the new one is complete; nothing else is replaced."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.delete import rotate
from ckptkit.checkpoint.run.pins import _announced
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CheckpointExistsError, CorruptCheckpointError, IntegrityError
from ckptkit.offline.convert import convert
from ckptkit.offline.listing import list_run
from ckptkit.offline.verify import verify
from ckptkit.storage import open_store
from ckptkit.storage.objects import RemoteStore
from tests.checkpoint.saving import fork, save
from tests.remote.runs import MANY, UNEVEN, Options, command, is_whole, names, objects
from tests.storage.proxy import PASS, Answer, Proxy

OVER = {**MANY, "overwrite": True}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, MANY),
        (MANY, {"max_shard_size": "2kB"}),
        ({"to": "dcp", "world_size": 2}, {}),
        (MANY, {"world_size": 2}),
        ({"world_size": 2}, {"world_size": 1}),
        ({"to": "torch"}, {"to": "local"}),
    ],
)
def test_overwrite_replaces_the_export_of_another_command(url: str, s3: Options, old: Options, new: Options) -> None:
    command(UNEVEN, url, s3, old)
    command(UNEVEN, url, s3, {**new, "overwrite": True})
    command(UNEVEN, f"{url}-new", s3, new)
    assert names(url, s3) == names(f"{url}-new", s3)
    assert not verify(url, storage_options=s3).problems


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    shutil.copytree(UNEVEN, tmp_path / "in")
    data = max((tmp_path / "in").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-400])
    return tmp_path / "in"


@pytest.mark.parametrize("how", [MANY, {"world_size": 2}, {"to": "torch"}], ids=str)
def test_a_damaged_source_leaves_the_old_export(damaged: Path, url: str, s3: Options, how: Options) -> None:
    command(UNEVEN, url, s3, how)
    before = objects(url, s3)
    with pytest.raises((CorruptCheckpointError, IntegrityError)):
        command(damaged, url, s3, {**how, "overwrite": True})
    assert objects(url, s3) == before


@pytest.mark.parametrize("name", ["results.json", "eval/results.json", "checkpoint-500/model.safetensors"])
def test_overwrite_refuses_foreign_objects_by_name(url: str, s3: Options, name: str) -> None:
    command(UNEVEN, url, s3, {})
    open_store(url, storage_options=s3).write(name, b"mine")
    before = objects(url, s3)
    with pytest.raises(CheckpointExistsError, match=f"is not overwritten: .*{name.partition('/')[0]}"):
        command(UNEVEN, url, s3, OVER)
    assert objects(url, s3) == before


def test_a_single_object_stays_until_it_is_replaced(damaged: Path, url: str, s3: Options) -> None:
    file, over = f"{url}/model.pt", {"to": "torch", "overwrite": True}
    command(UNEVEN, file, s3, {"to": "torch"})
    before = objects(url, s3)
    with pytest.raises((CorruptCheckpointError, IntegrityError)):
        command(damaged, file, s3, over)
    assert objects(url, s3) == before
    command(UNEVEN, file, s3, {**over, "dtype": "bf16"})
    after = objects(url, s3)
    assert after.keys() == before.keys() and after != before
    open_store(url, storage_options=s3).write("notes.pt", b"mine")
    with pytest.raises(CheckpointExistsError, match=r"not a file that torch\.save"):
        command(UNEVEN, f"{url}/notes.pt", s3, over)


def _killed_after_copies(say: Any, url: str, s3: Options, copies: int) -> None:
    left, copy = [copies], RemoteStore.copy_to

    def counted(self: RemoteStore, *args: Any) -> None:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        copy(self, *args)

    RemoteStore.copy_to = counted
    command(UNEVEN, url, s3, OVER)


@pytest.mark.parametrize("copies", [0, 1, 5])
def test_a_kill_during_the_replacement_keeps_the_new_export_and_the_command_continues(
    url: str, s3: Options, copies: int
) -> None:
    command(UNEVEN, url, s3, {"max_shard_size": "2kB"})
    before = objects(url, s3)
    assert fork(_killed_after_copies, url, s3, copies)[0] == -signal.SIGKILL
    if not copies:  # nothing of the old was touched yet
        assert {name: data for name, data in objects(url, s3).items() if not name.startswith(".")} == before
    convert(f"{url}/.ckptkit-new", f"{url}-copy", src_storage_options=s3, dst_storage_options=s3)
    with pytest.raises(CheckpointExistsError):
        command(UNEVEN, url, s3, MANY)
    command(UNEVEN, url, s3, OVER)
    is_whole(UNEVEN, url, s3)


# --- files of others in a checkpoint's keys


def test_rotation_and_overwrite_keep_and_name_foreign_objects(
    url: str, s3: Options, caplog: pytest.LogCaptureFixture
) -> None:
    root = open_store(url, storage_options=s3)
    first, second = save(root, 1), save(root, 2)
    theirs = {
        "step_00000001/eval/results.json": b"1",
        f"step_00000001/{first.data}/results.json": b"2",
        "step_00000002/notes.txt": b"3",
        f"step_00000002/{second.data}/results.json": b"4",
    }
    for name, data in theirs.items():
        root.write(name, data)
    save(root, 2, overwrite=True)
    save(root, 3)
    done = rotate(root, RetentionPolicy(max_num=1), clean=True)
    assert "does not name" in caplog.text and not done.failed
    rotate(root, RetentionPolicy(max_num=1), clean=True)
    for step in (4, 5):  # its cleaning has the lease
        save(root, step)
    found = objects(url, s3)
    assert {name: found.get(name) for name in theirs} == theirs
    steps = ("step_00000001", "step_00000002")
    ours = [name for name in found if name.startswith(steps) and ".ckptkit-deleted-" not in name]
    assert sorted(ours) == sorted(theirs)
    rows = {row["name"]: row for row in list_run(url, storage_options=s3).to_json()["checkpoints"]}
    assert "eval/results.json" in rows["step_00000001"]["kept_files"]
    save(root, 1)
    assert {name: objects(url, s3).get(name) for name in theirs} == theirs


@pytest.mark.parametrize("refused", ["deletions", "listings"])
def test_a_denied_rotation_logs_one_line_and_saves_continue(
    proxy: Proxy, options: Options, url: str, refused: str, caplog: pytest.LogCaptureFixture
) -> None:

    def rule(number: int, method: str, path: str) -> str | Answer:
        listing, deletion = "list-type" in path, method == "DELETE" or path.endswith("?delete")
        denied = listing if refused == "listings" else deletion
        return Answer(403, "AccessDenied") if denied else "pass"

    state, policy = TrainState(extra={"value": 1}, rng=False), RetentionPolicy(max_num=1)
    with CheckpointManager(url, retention=policy, storage_options=options) as manager:
        manager.save(1, state)
        proxy.rule = rule
        caplog.clear()
        manager.save(2, state)
        lines = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
        assert len(lines) == 1 and "AccessDenied" in lines[0] and "next save" in lines[0]
        assert not any(record.exc_info for record in caplog.records)
        proxy.rule = PASS
        assert [record.step for record in manager.list()] == [1, 2]
        assert not _announced(manager._root, "step_00000001")  # readers would wait for a deletion that never happens
        manager.save(3, state)
        assert [record.step for record in manager.list()] == [3]
