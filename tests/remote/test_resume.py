"""A killed conversion to an object store continues with the finished objects, and with nothing else."""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit.errors import CheckpointExistsError, IntegrityError, StorageError
from ckptkit.formats.detect import open_source
from ckptkit.offline.convert import convert
from ckptkit.offline.verify import verify
from ckptkit.storage import ledger, open_store, owner, publish_remote, upload
from ckptkit.storage.ledger import FOLDER, Ledger
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.publish_remote import OWNER_NAME, _Place, stage_remote
from ckptkit.storage.requests import FsspecApi
from tests.checkpoint.saving import fork
from tests.offline.copying.test_resume import went_on
from tests.ranks import RankError, run_ranks
from tests.remote.runs import MANY, UNEVEN, Options, command, comparable, is_whole, names, objects
from tests.storage.proxy import Proxy


@pytest.fixture(autouse=True)
def small_objects_are_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "WORTH", 500)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    shutil.copytree(UNEVEN, tmp_path / "in")
    return tmp_path / "in"


def _dying(say: Any, source: str, url: str, s3: Options, options: Options, objects: int) -> None:
    _die_after(objects)
    command(source, url, s3, options)


def _die_after(objects: int) -> None:
    left, finished = [objects], Ledger.finished

    def counted(self: Ledger, path: str, nbytes: int, content: str, *, checked: bool) -> None:
        finished(self, path, nbytes, content, checked=checked)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    Ledger.finished = counted


def killed(source: Path, url: str, s3: Options, objects: int, **options: Any) -> None:
    assert fork(_dying, str(source), url, s3, options, objects)[0] == -signal.SIGKILL


def uploads(url: str, s3: Options) -> list[str]:
    store = open_store(url, storage_options=s3)
    assert isinstance(store, RemoteStore)
    return [found.name.rpartition("/")[2] for found in store.unfinished_uploads()]


def begin_upload(url: str, s3: Options, name: str) -> None:
    store = open_store(url, storage_options=s3)
    assert isinstance(store, RemoteStore)
    store._api.upload(store._full(name))


def moved(proxy: Proxy) -> int:
    """Count the puts of the export's objects."""
    return sum(method == "PUT" and "/model-" in path for method, path in proxy.seen)


@pytest.mark.parametrize("finished", [1, 4])
def test_a_killed_conversion_continues_with_finished_objects(
    source: Path, url: str, s3: Options, proxy: Proxy, options: Options, finished: int
) -> None:
    killed(source, url, s3, finished, **MANY)
    assert "model.safetensors.index.json" not in names(url, s3)
    report = command(source, url, options, MANY)
    assert f"{finished} of" in went_on(report.notes)
    again = moved(proxy)
    proxy.clear()
    whole = command(source, f"{url}-whole", options, MANY)
    assert again == moved(proxy) - finished
    assert report.nbytes_read < whole.nbytes_read and report.checked == whole.checked
    assert comparable(url, s3) == comparable(f"{url}-whole", s3)


def test_a_killed_reshard_continues_with_finished_objects(source: Path, url: str, s3: Options) -> None:
    options = {"world_size": 3}
    killed(source, url, s3, 2, **options)
    assert "2 of" in went_on(command(source, url, s3, options).notes)
    assert verify(url, storage_options=s3).ok
    is_whole(source, url, s3, options)


def test_uploads_of_a_killed_run_are_aborted_and_foreign_objects_stay(source: Path, url: str, s3: Options) -> None:
    killed(source, url, s3, 2, **MANY)
    open_store(url, storage_options=s3).write("notes.txt", b"of a person")
    begin_upload(url, s3, "model-00009-of-00010.safetensors")
    begin_upload(url, s3, "somebody-elses.bin")
    command(source, url, s3, MANY)
    assert uploads(url, s3) == ["somebody-elses.bin"]
    is_whole(source, url, s3, **{"notes.txt": b"of a person"})


def test_a_replaced_object_is_written_again(source: Path, url: str, s3: Options) -> None:
    killed(source, url, s3, 3, **MANY)
    store = open_store(url, storage_options=s3)
    name = next(name for name in sorted(names(url, s3)) if name.startswith("model-"))
    store.write(name, bytes(len(store.read(name))), overwrite=True)  # of the same size
    assert "2 of" in went_on(command(source, url, s3, MANY).notes)
    is_whole(source, url, s3)


@pytest.mark.parametrize("change", ["source", "plan", "check"])
def test_objects_of_another_source_or_plan_are_written_again(source: Path, url: str, s3: Options, change: str) -> None:
    killed(source, url, s3, 3, **MANY)
    options = {**MANY, **{"plan": {"max_shard_size": "1.1kB"}, "check": {"check": False}}.get(change, {})}
    if change == "source":
        os.utime(source / "__0_0.distcp", ns=(0, 0))
        os.utime(source / "__1_0.distcp", ns=(0, 0))
    report = command(source, url, s3, options)
    is_whole(source, url, s3, options)
    assert went_on(report.notes) == "" or change == "source"  # files of which nothing was changed are the same work


def test_damage_that_appears_after_the_kill_is_found(source: Path, url: str, s3: Options) -> None:
    killed(source, url, s3, 2, **MANY)
    for entry in open_source(str(source)).catalog.tensors.values():
        for piece in entry.slices:
            path = source / piece.path
            stat, data = path.stat(), bytearray(path.read_bytes())
            data[piece.start] ^= 1
            path.write_bytes(data)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(IntegrityError):
        command(source, url, s3, MANY)
    assert objects(url, s3) == {}


def once_finished(monkeypatch: pytest.MonkeyPatch, objects: int, call: Callable[[str], object]) -> None:
    """Call a function, once, with the path of the object that is finished as the `objects`-th."""
    paths, finished = list[str](), Ledger.finished

    def noticed(self: Ledger, path: str, *args: Any, **kwargs: Any) -> None:
        finished(self, path, *args, **kwargs)
        paths.append(path)
        if len(paths) == objects:
            call(path)

    monkeypatch.setattr(Ledger, "finished", noticed)


def test_a_late_put_of_a_zombie_is_never_published(
    source: Path, url: str, s3: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(path: str) -> None:
        store = open_store(url, storage_options=s3)
        data = store.read(path)
        store.write(path, data[:-1] + bytes([data[-1] ^ 1]), overwrite=True)

    once_finished(monkeypatch, 1, replace)
    with pytest.raises(StorageError, match=r"model-\S+ is not what was written"):
        command(source, url, s3, MANY)
    assert not names(url, s3)


def test_a_writer_that_lost_the_directory_publishes_and_deletes_nothing(
    source: Path, url: str, s3: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_over(path: str) -> None:  # as another machine that takes the writer for dead and overwrites
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner.Owner, "alive", lambda self: None)
            assert "3 of" in went_on(command(source, url, s3, {**MANY, "overwrite": True}).notes)

    once_finished(monkeypatch, 3, take_over)
    with pytest.raises((StorageError, FileExistsError)):
        command(source, url, s3, MANY)
    is_whole(source, url, s3)


def test_a_conversion_continues_on_another_machine_only_with_overwrite(
    source: Path, url: str, s3: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(source, url, s3, 3, **MANY)
    monkeypatch.setattr(owner, "_machine", lambda: "another/machine/altogether")
    with pytest.raises(CheckpointExistsError, match="overwrite"):
        command(source, url, s3, MANY)
    assert "3 of" in went_on(command(source, url, s3, {**MANY, "overwrite": True}).notes)
    assert not [name for name in names(url, s3) if name.startswith(".")]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no")], ids=["Ctrl-C", "error"])
def test_ctrl_c_keeps_finished_objects_and_an_error_does_not(
    source: Path, url: str, s3: Options, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def stop(path: str) -> None:
        raise error

    once_finished(monkeypatch, 1, stop)
    with pytest.raises(type(error)):
        command(source, url, s3, MANY)
    kept = isinstance(error, KeyboardInterrupt)
    assert any(name.startswith(FOLDER) for name in names(url, s3)) == bool(names(url, s3)) == kept
    assert ("1 of" in went_on(command(source, url, s3, MANY).notes)) == kept


def between(monkeypatch: pytest.MonkeyPatch, other: Callable[[], object]) -> None:
    """Run `other` once, between the next writer's listing and its owner file."""
    write_owner = _Place._write_owner

    def late(self: _Place, *args: Any) -> None:
        monkeypatch.setattr(_Place, "_write_owner", write_owner)
        other()
        write_owner(self, *args)

    monkeypatch.setattr(_Place, "_write_owner", late)


@pytest.mark.parametrize("before", ["nothing", "what a dead one left"])
def test_an_export_published_after_the_listing_is_kept(
    source: Path, url: str, s3: Options, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    if before != "nothing":
        killed(source, url, s3, 3, **MANY)
    between(monkeypatch, lambda: command(source, url, s3, MANY))
    with pytest.raises(CheckpointExistsError, match="exists already"):
        command(source, url, s3, MANY)
    is_whole(source, url, s3)


def test_the_later_of_two_overwrites_replaces_the_earlier(
    source: Path, url: str, s3: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(source, url, s3, {"max_shard_size": "2kB"})
    between(monkeypatch, lambda: command(source, url, s3, {**MANY, "overwrite": True}))
    command(source, url, s3, {"max_shard_size": "1.3kB", "overwrite": True})
    is_whole(source, url, s3, {"max_shard_size": "1.3kB"})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PermissionError("no")], ids=["Ctrl-C", "denied"])
def test_an_interrupted_takeover_can_be_repeated(
    source: Path, url: str, s3: Options, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    killed(source, url, s3, 3, **MANY)

    def stopped(*args: Any) -> None:
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(publish_remote, "_end_uploads", stopped)
        command(source, url, s3, MANY)
    assert "3 of" in went_on(command(source, url, s3, MANY).notes)


def _dying_in_an_upload(say: Any, source: str, url: str, s3: Options) -> None:
    from ckptkit.storage.s3 import S3Upload

    upload.UPLOAD_BYTES = 5 << 20
    S3Upload.part = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    convert(source, url, to="torch", dst_storage_options=s3)


def test_the_owner_file_of_a_failed_writer_stays_as_long_as_its_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    target, delete_one = RemoteStore(f"memory://exports/{uuid.uuid4().hex}"), FsspecApi.delete_one

    def refuse(self: FsspecApi, name: str) -> None:
        if name.endswith("data.bin"):
            raise PermissionError(f"{name} is locked")
        delete_one(self, name)

    monkeypatch.setattr(FsspecApi, "delete_one", refuse)
    names = {"data.bin": 3, "more.bin": 3, "config.json": -1}
    with (
        pytest.raises(RuntimeError, match="stop"),
        stage_remote(target, replaceable=None, last=frozenset({"config.json"}), names=names) as store,
    ):
        store.write("data.bin", b"abc")
        store.write("more.bin", b"abc")
        raise RuntimeError("stop")
    assert {item.path for item in target.list()} >= {"data.bin", OWNER_NAME}  # it is known to be unfinished


def test_an_unfinished_upload_of_a_single_file_is_aborted(tmp_path: Path, url: str, s3: Options) -> None:
    save_file({"w": np.zeros((12 << 20,), np.uint8)}, tmp_path / "m.safetensors")
    source, file = str(tmp_path / "m.safetensors"), f"{url}/model.pt"
    assert fork(_dying_in_an_upload, source, file, s3)[0] == -signal.SIGKILL
    begin_upload(url, s3, "other.pt")
    assert sorted(uploads(url, s3)) == ["model.pt", "other.pt"]
    convert(source, file, to="torch", dst_storage_options=s3)
    assert uploads(url, s3) == ["other.pt"]
    assert names(url, s3) == {"model.pt"}


def _team(source: str, url: str, s3: Options, kill: int) -> str:
    ledger.WORTH = 500
    if kill:
        _die_after(kill)
    return went_on(command(source, url, s3, MANY).notes)


def test_a_team_continues_the_work_of_another_team(source: Path, url: str, s3: Options) -> None:
    with pytest.raises(RankError):
        run_ranks(_team, 3, str(source), url, s3, 1)
    assert "of" in run_ranks(_team, 2, str(source), url, s3, 0)[0]
    is_whole(source, url, s3)
