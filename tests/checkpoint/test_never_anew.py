"""A manager never starts a run over next to something that may be an older run's checkpoint, nor refuses a new run."""

import json
import logging
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import CheckpointManager
from ckptkit.checkpoint.load import foreign_run
from ckptkit.errors import (
    CkptkitError,
    IncompleteCheckpointError,
    RankFailedError,
    StorageError,
    UnsupportedFormatError,
    UsageError,
)
from ckptkit.storage import open_store
from tests.checkpoint.states import Kept, check_misfit, linear, load, optimized, refusal, save, value_of
from tests.checkpoint.test_adoption import job, write
from tests.patches import after, before, refuse


def trainer_step(folder: Path, step: int, *, optimizer: bool = True) -> None:
    """Write a checkpoint as the Trainer of transformers does."""
    write(folder, {"model.safetensors": "m", **({"optimizer.pt": "o"} if optimizer else {})}, job())
    if optimizer:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def script_file(path: Path, step: int | None, *, zipped: bool = True, **more: Any) -> None:
    """Write a file as a training script does with torch.save; not `zipped`: as before torch 1.6."""
    state = job()
    values = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict(), **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    values |= {} if step is None else {"step": step}
    torch.save(values, path, _use_new_zipfile_serialization=zipped)


def put(path: Path, data: bytes = b"x" * 50) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def truncated(path: Path, nbytes: int = 500, **how: Any) -> None:
    script_file(path, 1, **how)
    path.write_bytes(path.read_bytes()[:nbytes])


def archive(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as made:
        made.addfile(tarfile.TarInfo("model.pt"))


def link(root: Path, name: str, target: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / name).symlink_to(target)


def linked_step(root: Path, name: str) -> None:
    trainer_step(root.parent / "elsewhere" / "checkpoint-5", 5)
    link(root, name, root.parent / "elsewhere" / "checkpoint-5")


TWO = ("last.pt", "best.pt")
LOST: dict[str, Callable[[Path], Any]] = {
    "steps deep below": lambda root: trainer_step(root / "a/b/c/d/checkpoint-5", 5),
    "a file deep below": lambda root: script_file(root / "my/lightning_logs/version_0/checkpoints/epoch=1.ckpt", 1),
    "a hidden folder": lambda root: trainer_step(root / ".checkpoints" / "checkpoint-5", 5),
    "steps below final weights": lambda root: (
        trainer_step(root, 0, optimizer=False),
        trainer_step(root / "checkpoints" / "checkpoint-5", 5),
    ),
    "steps after 100 folders": lambda root: (
        [put(root / f"a{at:03}" / "x.txt") for at in range(100)],
        trainer_step(root / "checkpoints" / "checkpoint-5", 5),
    ),
    "an unfinished DCP save below": lambda root: put(root / "a" / "foo" / "__0_0.distcp"),
    "an empty step": lambda root: (root / "checkpoint-5").mkdir(parents=True),
    "a step without its record": lambda root: Path(save(root, linear(), 5), "step_00000005/checkpoint.json").unlink(),
    "a step with only a config": lambda root: put(root / "runs" / "global_step5" / "config.json"),
    "truncated files": lambda root: [truncated(root / name) for name in ("last.ckpt", "best.ckpt")],
    "old files that are truncated": lambda root: [truncated(root / name, 700, zipped=False) for name in TWO],
    "old files that have an object of an unknown class": lambda root: [
        script_file(root / name, None, zipped=False, settings=Kept(1)) for name in TWO
    ],
    "files that have a sparse tensor": lambda root: [
        script_file(root / name, 1, mask=torch.eye(3).to_sparse()) for name in TWO
    ],
    "a file without ending": lambda root: script_file(root / "snapshot", 1),
    "a file without ending that has an object of an unknown class": lambda root: script_file(
        root / "snapshot", 1, settings=Kept(1)
    ),
    "a pickle": lambda root: script_file(root / "state.pkl", 1),
    "a NeMo archive below": lambda root: put(root / "checkpoints" / "m-step=5-last.nemo"),
    "an archive of a step": lambda root: archive(root / "checkpoint-5.tar.gz"),
    "an archive without a number": lambda root: archive(root / "checkpoint.tar"),
    "Orbax": lambda root: put(root / "5" / "default" / "manifest.ocdbt"),
    "TensorFlow": lambda root: put(root / "model.ckpt-500.index"),
    "numpy": lambda root: put(root / "step_500.npz"),
    "a link called latest": lambda root: linked_step(root, "latest"),
    "a link to a step": lambda root: linked_step(root, "checkpoint-5"),
    "a link to a run": lambda root: (save(root.parent / "real", linear(), 5), link(root, "run", root.parent / "real")),
    "a lost link": lambda root: link(root, "latest", root / "checkpoint-5"),
    "a pointer to a lost step": lambda root: put(root / "latest", b"global_step500"),
    "Megatron's pointer to a lost step": lambda root: put(root / "latest_checkpointed_iteration.txt", b"500"),
}


@pytest.mark.parametrize("case", LOST)
def test_what_may_be_a_checkpoint_is_refused_and_not_ignored(tmp_path, case):
    LOST[case](tmp_path / "run")
    check_misfit(tmp_path / "run", job(), r"(?s)To start (a|over)|metadata is missing", error=CkptkitError)


NEW: dict[str, Callable[[Path], Any]] = {
    "logs": lambda root: [put(root / name) for name in ("logs/x.log", "events.out.tfevents.1", "slurm-12.out")],
    "side files": lambda root: [put(root / name, b"{}") for name in ("config.json", "tokenizer.json", "hparams.yaml")],
    "wandb": lambda root: (put(root / "wandb" / "run-1" / "x"), link(root / "wandb", "latest-run", Path("run-1"))),
    "pictures of steps": lambda root: put(root / "samples" / "step_500" / "x.png"),
    "profiles of steps": lambda root: put(root / "profile" / "iteration_500" / "rank0_trace.json"),
    "a date": lambda root: put(root / "2024" / "11" / "x.log"),
    "archives of code": lambda root: [put(root / name) for name in ("code.tar.gz", "src.zip")],
    "tokens": lambda root: put(root / "data" / "train.bin"),
    "arrays": lambda root: put(root / "evaluations.npz"),
    "a link to data": lambda root: (put(root.parent / "set" / "x.txt"), link(root, "data", root.parent / "set")),
    "a lost link to data": lambda root: link(root, "data", root.parent / "set"),
    "a lost link to a log": lambda root: link(root, "latest.log", root / "gone.log"),
    "an empty folder": lambda root: (root / "checkpoints").mkdir(parents=True),
    "snapshots of the file system": lambda root: trainer_step(root / ".snapshot" / "hourly" / "checkpoint-5", 5),
    "another run": lambda root: trainer_step(root.parent / "other" / "checkpoint-5", 5),
}


@pytest.mark.parametrize("case", NEW)
def test_other_files_do_not_prevent_a_new_run(tmp_path, case):
    NEW[case](tmp_path / "run")
    with CheckpointManager(tmp_path / "run") as manager:
        assert (manager.load(job()), manager.latest(), manager.list()) == (None, None, [])


def test_an_unreadable_folder_is_refused_unless_it_is_lost_and_found(as_a_user):
    (as_a_user / "lost+found").mkdir(0)
    with CheckpointManager(as_a_user) as manager:
        assert manager.load(linear()) is None
    (as_a_user / "checkpoints").mkdir(0)
    check_misfit(as_a_user, linear(), "checkpoints", error=(StorageError, RankFailedError))


def test_a_lost_hint_is_refused_unless_the_manager_deleted_its_checkpoint(tmp_path):
    root = Path(save(tmp_path / "run", linear(), 5))
    with CheckpointManager(root) as manager:
        manager.delete(5)
        assert manager.load(linear()) is None
        manager.save(6, linear())
    shutil.rmtree(root / "step_00000006")
    for _ in range(2):
        said = r"latest says .*step_00000006.*start_fresh="
        check_misfit(root, linear(), said, error=IncompleteCheckpointError)
        with CheckpointManager(root, start_fresh="if_none_committed") as manager:
            assert manager.load(linear()) is None
        put(root / "logs" / "train.log")  # a directory that is searched for other systems' checkpoints


NEWEST: dict[str, tuple[Callable[[Path], Any], int]] = {
    "a directory called latest": (lambda r: script_file(r / "latest" / "state.pt", 5), 5),
    "last.ckpt is newer": (lambda r: (script_file(r / "step=90.ckpt", 90), script_file(r / "last.ckpt", 100)), 100),
    "last.ckpt is older": (lambda r: (script_file(r / "step=90.ckpt", 90), script_file(r / "last.ckpt", 80)), 90),
    "an epoch is newer": (lambda r: (script_file(r / "step_5.pt", 5), script_file(r / "epoch_1.pt", 9)), 9),
    "a file of another ending": (lambda r: (script_file(r / "step_5.ckpt", 5), script_file(r / "step_9.pt", 9)), 9),
    "a file is newer": (lambda r: (trainer_step(r / "checkpoint-5", 5), script_file(r / "step_9.pt", 9)), 9),
    "1e4": (lambda r: (trainer_step(r / "checkpoint-9999", 9999), trainer_step(r / "checkpoint-1e4", 10000)), 10000),
    "1,000": (lambda r: (trainer_step(r / "checkpoint-999", 999), trainer_step(r / "checkpoint-1,000", 1000)), 1000),
    "last.pt is newer, after many files": (
        lambda r: (
            [script_file(r / name, 5) for name in ("step_5.pt", *(f"a{n}.pt" for n in range(3)))],
            [put(r / f"a{n}.png") for n in range(300)],
            script_file(r / "last.pt", 9),
        ),
        9,
    ),
    "10, beside final weights": (
        lambda r: (
            [trainer_step(r / f"checkpoint-{step}", step) for step in (9, 10)],
            trainer_step(r, 0, optimizer=False),
        ),
        10,
    ),
    "a link to an older step": (
        lambda r: (
            trainer_step(r / "checkpoint-5", 5),
            trainer_step(r / "checkpoint-9", 9),
            link(r, "latest", Path("checkpoint-5")),
        ),
        9,
    ),
}


@pytest.mark.parametrize("case", NEWEST)
def test_the_newest_checkpoint_is_loaded_and_named_in_the_log(tmp_path, caplog, case):
    caplog.set_level(logging.INFO)
    make, step = NEWEST[case]
    make(tmp_path)
    assert load(tmp_path, job()).step == step
    assert any("continuing from" in text for text in caplog.messages)


def test_the_newest_checkpoint_is_loaded_from_a_relative_path(tmp_path, monkeypatch):
    (tmp_path / "step_3").mkdir()
    monkeypatch.chdir(tmp_path / "step_3")
    script_file(Path("run") / "step_5.pt", 5)
    script_file(Path("run") / "last.pt", 9)
    for url in ("run", "./run/", f"file://{Path.cwd()}/run"):
        assert load(url, job()).step == 9


def test_weights_without_an_optimizer_are_compared_too_if_none_is_wanted(tmp_path):
    for name, step in (("step=5.ckpt", 5), ("last.ckpt", 9)):
        torch.save({"model": linear(step).model.state_dict(), "step": step}, tmp_path / name)
    load(tmp_path, live := linear())
    assert (live.step, value_of(live)) == (9, 9)


UNCLEAR: dict[str, Callable[[Path], Any]] = {
    "last without a step": lambda root: script_file(root / "last.pth.tar", None),
    "a link to a newer step": lambda root: linked_step(root, "checkpoint-50"),
    "an epoch without a step": lambda root: script_file(root / "epoch_9.pt", None),
    "a damaged last": lambda root: truncated(root / "last.ckpt"),
    "a damaged epoch": lambda root: truncated(root / "epoch_9.pt"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_a_checkpoint_that_may_be_newer_than_the_newest_step_is_refused(tmp_path, case):
    script_file(tmp_path / "run" / "step_5.pt", 5)
    UNCLEAR[case](tmp_path / "run")
    check_misfit(tmp_path / "run", job(), "not clear which is newer", error=UsageError)


def test_an_epoch_without_a_step_is_not_older_than_any_step(tmp_path):
    for name, step in (("epoch_1.pt", None), ("epoch_3.pt", None), ("start.pt", 0)):
        script_file(tmp_path / name, step)
    check_misfit(tmp_path, job(), "not clear which is newer", error=UsageError)


def test_a_step_in_the_name_of_a_parent_directory_is_compared(tmp_path):
    script_file(tmp_path / "step_90" / "model" / "checkpoint.pt", None)
    script_file(tmp_path / "best.pt", 80)
    report = load(tmp_path, job())
    assert report.url == str(tmp_path / "step_90" / "model")


def test_a_file_that_is_deleted_while_a_run_begins_is_ignored(tmp_path, monkeypatch):
    put(tmp_path / "x.log")
    before(monkeypatch, foreign_run, "list_checkpoints", lambda root: put(tmp_path / "gone.tmp"))
    after(monkeypatch, foreign_run, "list_checkpoints", lambda found, root: (tmp_path / "gone.tmp").unlink())
    with CheckpointManager(tmp_path) as manager:
        assert manager.load(job()) is None


@pytest.mark.parametrize("name", ["last.ckpt", "a.pt"])
def test_a_file_that_the_store_does_not_return_is_not_ignored(tmp_path, monkeypatch, name):
    script_file(tmp_path / "run" / name, 9)
    script_file(tmp_path / "run" / ("step=5.ckpt" if name == "last.ckpt" else "b.pt"), 5)
    error = StorageError("no answer")
    refuse(monkeypatch, foreign_run, "open_source", error, when=lambda url, **_: url.endswith(name))
    check_misfit(tmp_path / "run", job(), "no answer", error=StorageError)


@pytest.mark.parametrize("files", [(), ("a.pt", "b.pt")], ids=["empty", "of several files, beside an unfinished save"])
def test_a_skipped_newer_step_is_named_in_a_warning(tmp_path, caplog, files):
    trainer_step(tmp_path / "checkpoint-5", 5)
    (tmp_path / "checkpoint-9").mkdir()
    for name in files:
        script_file(tmp_path / "checkpoint-9" / name, 9)
        (tmp_path / ".tmp-step_00000001-0123456789abcdef").mkdir(exist_ok=True)
    assert load(tmp_path, job()).step == 5
    assert any("checkpoint-9" in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)


@pytest.mark.parametrize(
    "url", ["$SCRATCH/run", "${SCRATCH}/run", "x/run-$JOB_ID", "file:/run", "s3:/b/run", "run\n", " run"]
)
def test_a_url_that_is_not_what_the_user_meant_is_refused(url):
    with pytest.raises(UsageError, match=r"not expanded|one slash|white space"):
        CheckpointManager(url)


def test_file_urls_may_name_the_host(tmp_path):
    save(tmp_path, linear(), 5)
    assert load(f"file://localhost{tmp_path}", linear()).step == 5


def asked(root: str) -> str:
    return refusal(lambda: load(root, job()))


@pytest.mark.parametrize("case", ["an empty step", "steps deep below", "a lost link", "a step without its record"])
def test_all_ranks_refuse(ranks, tmp_path, case):
    LOST[case](tmp_path / "run")
    first, second = ranks.run(asked, 2, str(tmp_path / "run"))
    assert first == second != ""


@pytest.mark.parametrize(
    "case", ["steps deep below", "truncated files", "an archive of a step", "a pointer to a lost step"]
)
def test_an_object_store_refuses_like_a_disk(s3, tmp_path, case):
    LOST[case](tmp_path / "run")
    url = f"s3://bucket/{case.replace(' ', '-')}"
    store = open_store(url, storage_options=s3)
    for item in open_store(str(tmp_path / "run")).list(recursive=True):
        store.write(item.path, (tmp_path / "run" / item.path).read_bytes())
    with CheckpointManager(url, storage_options=s3) as manager, pytest.raises((CkptkitError, UnsupportedFormatError)):
        manager.load(optimized(torch.nn.Linear(2, 2)))
