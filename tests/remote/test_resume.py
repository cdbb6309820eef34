"""A killed conversion to an object store continues with the finished objects, and with nothing else."""

import itertools
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

from ckptkit import convert
from ckptkit.errors import CheckpointExistsError, StorageError
from ckptkit.storage import ledger, owner, publish_remote, upload
from ckptkit.storage.ledger import Ledger
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.publish_remote import OWNER_NAME, _Place, stage_remote
from ckptkit.storage.requests import FsspecApi
from tests.checkpoint.saving import fork
from tests.offline.resuming import went_on
from tests.patches import after, before, die, failing, refuse
from tests.ranks import RankError, run_ranks
from tests.remote.runs import MANY, UNEVEN, Options, Place, on

OVER = {**MANY, "overwrite": True}


@pytest.fixture(autouse=True)
def small_objects_are_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "WORTH", 500)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    shutil.copytree(UNEVEN, tmp_path / "in")
    return tmp_path / "in"


def once_finished(objects: int, call: Callable[[str], object], patch: pytest.MonkeyPatch) -> None:
    """Call a function, once, with the path of the object that is finished as the `objects`-th."""
    number = itertools.count(1)
    after(patch, Ledger, "finished", lambda _, ledger, path, *__, **___: next(number) == objects and call(path))


def _dying(say: Any, place: Place, source: Path, options: Options, objects: int) -> None:
    once_finished(objects, die, pytest.MonkeyPatch())
    place.make(source, **options)


def killed(place: Place, objects: int, source: Path = UNEVEN, **options: Any) -> None:
    assert fork(_dying, place, source, options, objects)[0] == -signal.SIGKILL


def goes_on(place: Place, source: Path, **options: Any) -> str:
    """Run the command; return what it says about the work that was done before."""
    return went_on(place.make(source, **options).notes)


def uploads(place: Place) -> list[str]:
    return [found.name.rpartition("/")[2] for found in place.store.unfinished_uploads()]


def begin_upload(place: Place, name: str) -> None:
    place.store._api.upload(place.store._full(name))


@on("s3", "gcs")
@pytest.mark.parametrize("how", [{"world_size": 3}, MANY], ids=str)
def test_a_killed_command_continues_with_finished_objects(source, near, how):
    killed(near, 2, source, **how)
    assert not {"model.safetensors.index.json", "checkpoint.json"} & near.names()
    report, whole = near.make(source, **how), near.beside("whole").make(source, **how)
    assert "2 of" in went_on(report.notes)
    assert report.nbytes_read < whole.nbytes_read and report.checked == whole.checked
    assert near.verify().ok and near.comparable() == near.beside("whole").comparable()


def test_uploads_of_a_killed_run_are_aborted_and_foreign_objects_stay(source, near):
    killed(near, 2, source, **MANY)
    near.store.write("notes.txt", b"of a person")
    begin_upload(near, "model-00009-of-00010.safetensors")
    begin_upload(near, "somebody-elses.bin")
    near.make(source, **MANY)
    assert uploads(near) == ["somebody-elses.bin"]
    near.is_made(source, **{"notes.txt": b"of a person"})


@pytest.mark.parametrize("change", ["object", "source", "plan", "check"])
def test_replaced_objects_and_those_of_another_source_or_plan_are_written_again(source, near, change):
    killed(near, 3, source, **MANY)
    options = {**MANY, **{"plan": {"max_shard_size": "1.1kB"}, "check": {"check": False}}.get(change, {})}
    if change == "object":
        name = min(name for name in near.names() if name.startswith("model-"))
        near.store.write(name, bytes(len(near.store.read(name))), overwrite=True)  # of the same size
    for rank in (0, 1) if change == "source" else ():
        os.utime(source / f"__{rank}_0.distcp", ns=(0, 0))
    said = goes_on(near, source, **options)
    near.is_made(source, options)
    # Files of which nothing was changed are the same work.
    assert "2 of" in said if change == "object" else said == "" or change == "source"


def test_a_late_put_of_a_zombie_is_never_published(near, monkeypatch):
    def replace(path: str) -> None:
        data = near.store.read(path)
        near.store.write(path, data[:-1] + bytes([data[-1] ^ 1]), overwrite=True)

    once_finished(1, replace, monkeypatch)
    with pytest.raises(StorageError, match=r"model-\S+ is not what was written"):
        near.make(**MANY)
    assert not near.names()


def test_a_writer_that_lost_the_directory_publishes_and_deletes_nothing(near, monkeypatch):
    def take_over(path: str) -> None:  # as another machine that takes the writer for dead and overwrites
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner.Owner, "alive", lambda self: None)
            assert "3 of" in goes_on(near, UNEVEN, **OVER)

    once_finished(3, take_over, monkeypatch)
    with pytest.raises((StorageError, FileExistsError)):
        near.make(**MANY)
    near.is_made()


@pytest.mark.parametrize("options", [MANY, {"world_size": 2}, OVER], ids=str)
def test_a_command_is_refused_while_another_writes_to_the_same_place(near, monkeypatch, options):
    def second(path: str) -> None:
        with pytest.raises(CheckpointExistsError):
            near.make(**options)

    once_finished(1, second, monkeypatch)
    near.make(**MANY)
    near.is_made()


def test_a_conversion_continues_on_another_machine_only_with_overwrite(near, monkeypatch):
    killed(near, 3, **MANY)
    monkeypatch.setattr(owner, "_machine", lambda: "another/machine/altogether")
    with pytest.raises(CheckpointExistsError, match="overwrite"):
        near.make(**MANY)
    assert "3 of" in goes_on(near, UNEVEN, **OVER)
    assert not [name for name in near.names() if name.startswith(".")]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no")], ids=["Ctrl-C", "error"])
@pytest.mark.parametrize("options", [MANY, OVER], ids=["new", "overwrite"])
def test_ctrl_c_keeps_finished_objects_and_an_error_does_not(near, monkeypatch, error, options):
    def stop(path: str) -> None:
        raise error

    if options is OVER:
        near.make(max_shard_size="2kB")
    before = near.objects()
    once_finished(1, stop, monkeypatch)
    with pytest.raises(type(error)):
        near.make(**options)
    kept, after = isinstance(error, KeyboardInterrupt), near.objects()
    assert (after != before) == kept and before.items() <= after.items()
    assert ("1 of" in goes_on(near, UNEVEN, **options)) == kept


def between(monkeypatch: pytest.MonkeyPatch, other: Callable[[], object]) -> None:
    """Run `other` once, between the next writer's listing and its owner file."""
    calls = itertools.count()
    before(monkeypatch, _Place, "_write_owner", lambda *_: next(calls) == 0 and other())


@pytest.mark.parametrize("there", ["nothing", "what a dead one left"])
def test_an_export_published_after_the_listing_is_kept(near, monkeypatch, there):
    if there != "nothing":
        killed(near, 3, **MANY)
    between(monkeypatch, lambda: near.make(**MANY))
    with pytest.raises(CheckpointExistsError, match="exists already"):
        near.make(**MANY)
    near.is_made()


def test_the_later_of_two_overwrites_replaces_the_earlier(near, monkeypatch):
    near.make(max_shard_size="2kB")
    between(monkeypatch, lambda: near.make(**OVER))
    near.make(max_shard_size="1.3kB", overwrite=True)
    near.is_made(options={"max_shard_size": "1.3kB"})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PermissionError("no")], ids=["Ctrl-C", "denied"])
def test_an_interrupted_takeover_can_be_repeated(near, monkeypatch, error):
    killed(near, 3, **MANY)
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(publish_remote, "_end_uploads", failing(error))
        near.make(**MANY)
    assert "3 of" in goes_on(near, UNEVEN, **MANY)


def _dying_in_an_upload(say: Any, source: str, file: Place) -> None:
    from ckptkit.storage.s3 import S3Upload

    upload.UPLOAD_BYTES = 5 << 20
    S3Upload.part = die
    convert(source, file.url, to="torch", dst_storage_options=file.options)


def test_the_owner_file_of_a_failed_writer_stays_as_long_as_its_objects(monkeypatch):
    target, error = RemoteStore(f"memory://exports/{uuid.uuid4().hex}"), PermissionError("it is locked")
    refuse(monkeypatch, FsspecApi, "delete_one", error, when=lambda api, name: name.endswith("data.bin"))
    names = {"data.bin": 3, "more.bin": 3, "config.json": -1}
    with (
        pytest.raises(RuntimeError, match="stop"),
        stage_remote(target, replaceable=None, last=frozenset({"config.json"}), names=names) as store,
    ):
        store.write("data.bin", b"abc")
        store.write("more.bin", b"abc")
        raise RuntimeError("stop")
    assert {item.path for item in target.list()} >= {"data.bin", OWNER_NAME}  # it is known to be unfinished


def test_an_unfinished_upload_of_a_single_file_is_aborted(tmp_path, near):
    source, file = str(tmp_path / "m.safetensors"), near / "model.pt"
    save_file({"w": np.zeros((12 << 20,), np.uint8)}, source)
    assert fork(_dying_in_an_upload, source, file)[0] == -signal.SIGKILL
    begin_upload(near, "other.pt")
    assert sorted(uploads(near)) == ["model.pt", "other.pt"]
    file.make(source, to="torch")
    assert uploads(near) == ["other.pt"]
    assert near.names() == {"model.pt"}


def _team(place: Place, kill: int) -> str:
    ledger.WORTH = 500
    if kill:
        once_finished(kill, die, pytest.MonkeyPatch())
    return goes_on(place, UNEVEN, **MANY)


def test_a_team_continues_the_work_of_another_team(near):
    with pytest.raises(RankError):
        run_ranks(_team, 3, near, 1)
    assert "of" in run_ranks(_team, 2, near, 0)[0]
    near.is_made()
