"""The manager as a run uses it: saving, keeping and loading."""

from __future__ import annotations

import errno
import logging
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptkit import CheckpointManager, RetentionPolicy, StateDictType, TrainState
from ckptkit.checkpoint import manager as manager_module
from ckptkit.errors import CheckpointExistsError, CheckpointNotFoundError, CkptkitError, UsageError
from tests.checkpoint import jobs
from tests.ranks import run_ranks


def state(value: float = 0.0) -> TrainState:
    torch.manual_seed(0)  # ranks have equal parameters
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return TrainState(model=model)


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("step_*"))


def test_an_empty_run_has_nothing_to_load(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.load(state()) is None
        assert manager.latest() is None
        assert manager.list() == []


@pytest.mark.parametrize(
    ("which", "value"), [("latest", 3.0), ("latest~1", 2.0), (1, 1.0), ("best", 2.0), ("final", 3.0)]
)
def test_a_checkpoint_can_be_named_by_step_tag_latest_and_best(tmp_path: Path, which: Any, value: float) -> None:
    retention = RetentionPolicy(keep_best=("loss", "min", 1))
    with CheckpointManager(tmp_path, retention=retention) as manager:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
            manager.save(step, state(float(step)), metrics={"loss": loss}, tag="final" if step == 3 else None)
        loaded = state()
        report = manager.load(loaded, which)
    assert loaded.model.weight[0, 0].item() == value
    assert report is not None
    assert loaded.step == report.step == int(value)


def test_loading_a_missing_checkpoint_is_an_error(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state())
        with pytest.raises(CheckpointNotFoundError):
            manager.load(state(), 2)


def test_saving_an_existing_step_needs_overwrite(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1.0))
        with pytest.raises(CheckpointExistsError):
            manager.save(1, state(2.0))
        manager.save(1, state(3.0), overwrite=True)
        loaded = state()
        manager.load(loaded)
    assert loaded.model.weight[0, 0].item() == 3.0


def test_a_save_logs_one_info_line_and_one_debug_line_with_phases(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, retention=RetentionPolicy(max_num=2)) as manager:
        for step in (100, 200, 300):
            caplog.clear()
            with caplog.at_level(logging.DEBUG, logger=manager_module.__name__):
                manager.save(step, state())
    line, phases = [r.getMessage() for r in caplog.records if r.name == manager_module.__name__]
    assert phases.startswith("step 300: plan ") and ", commit " in phases
    parts = line.split(" · ")
    assert parts[0] == "saved step 300"
    assert parts[2].startswith("stall ")
    assert parts[3].endswith("/s")
    assert parts[4].startswith("keeping 2/2, freed step 100 (")
    assert steps(tmp_path) == ["step_00000200", "step_00000300"]


def test_the_log_line_counts_newest_and_exempt_checkpoints(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=manager_module.__name__)
    with CheckpointManager(tmp_path, retention=RetentionPolicy(max_num=1, keep_every=2)) as manager:
        for step in (2, 4, 5):
            manager.save(step, state())
    assert "keeping 3 (1 newest, 2 exempt)" in caplog.text


def test_the_log_line_counts_checkpoints_that_could_not_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(root: Any, name: str, record: Any) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", name)

    monkeypatch.setattr("ckptkit.checkpoint.run.delete._delete_local", refuse)
    caplog.set_level(logging.INFO, logger=manager_module.__name__)
    with CheckpointManager(tmp_path, retention=RetentionPolicy(max_num=1)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state())
    assert "keeping 3 (1 newest, 0 exempt, 2 could not be deleted)" in caplog.text
    assert steps(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]


def test_the_checkpoint_that_a_run_was_resumed_from_is_never_deleted(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state())
    with CheckpointManager(tmp_path, retention=RetentionPolicy(max_num=1)) as manager:
        manager.load(state())
        for step in (2, 3):
            manager.save(step, state())
        assert steps(tmp_path) == ["step_00000001", "step_00000003"]
        with pytest.raises(UsageError, match="resumed from"):
            manager.delete(1)
        manager.save(4, state())
        with pytest.raises(CheckpointNotFoundError):
            manager.delete(3)


def test_a_closed_manager_raises_a_usage_error(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.close()
    manager.close()
    with pytest.raises(UsageError, match="closed"):
        manager.save(1, state())


def test_arguments_are_checked_when_the_manager_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="full, sharded or local"):
        CheckpointManager(tmp_path, state_dict_type="half")
    with pytest.raises(UsageError, match="wait"):
        CheckpointManager(tmp_path, async_policy="maybe")  # type: ignore[arg-type]
    assert CheckpointManager(tmp_path, state_dict_type="LOCAL").state_dict_type is StateDictType.LOCAL


def test_client_state_and_metrics_are_kept(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(), metrics={"loss": 0.5}, client_state={"wandb": "id"})
        (record,) = manager.list()
        assert record.metrics == {"loss": 0.5}
        assert record.client_state == {"wandb": "id"}


def test_a_plain_hugging_face_directory_loads_into_a_model(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = nn.Linear(3, 2)
    save_file(dict(source.state_dict()), tmp_path / "model.safetensors")
    model = nn.Linear(3, 2)
    with CheckpointManager(tmp_path / "run") as manager:
        report = manager.load(TrainState(model=model), str(tmp_path))
    assert torch.equal(model.weight, source.weight)
    assert report is not None
    assert report.step is None


def test_a_dcp_checkpoint_of_torch_loads_model_and_optimizer(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def trained(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    source, optimizer = trained(1)
    model_state, optimizer_state = get_state_dict(source, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    model, other = trained(2)
    with CheckpointManager(tmp_path / "run") as manager:
        report = manager.load(TrainState(model=model, optimizer=other), str(tmp_path / "dcp"))
    assert report is not None
    assert other.param_groups[0]["lr"] == 0.1
    assert other.param_groups[0]["betas"] == (0.9, 0.999)
    assert torch.equal(model.weight, source.weight)
    for name, value in optimizer.state[source.weight].items():
        assert torch.equal(other.state[model.weight][name], value), name


# --- ranks


def signalled(url: str) -> list[bool]:
    seen = []
    before = signal.getsignal(signal.SIGUSR1)
    with CheckpointManager(url, on_signal=(signal.SIGUSR1,)) as manager:
        job = jobs.make("1d")
        manager.save_async(1, job.state())  # agreeing on signals works during a save
        for step in range(3):
            if step == 1 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            seen.append(manager.interrupted())
    assert signal.getsignal(signal.SIGUSR1) == before
    return seen


def test_a_signal_on_one_rank_is_seen_by_all_at_the_same_step(tmp_path: Path) -> None:
    assert run_ranks(signalled, 2, str(tmp_path)) == [[False, True, True]] * 2


def lone_capture_error(url: str) -> str:
    extra = {"bad": object()} if dist.get_rank() == 1 else {"bad": 1}
    with CheckpointManager(url) as manager:
        try:
            manager.save(1, TrainState(extra=extra))
        except CkptkitError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_state_that_one_rank_cannot_save_fails_on_all_before_anything_is_written(ranks: Any, tmp_path: Path) -> None:
    texts = ranks.run(lone_capture_error, 3, str(tmp_path / "run"))
    assert len(set(texts)) == 1
    assert "rank 1" in texts[0]
    assert "extra.bad" in texts[0]
    assert not (tmp_path / "run").exists()


def lone_load_error(url: str, half_loaded: bool) -> Any:
    job = jobs.make("1d")
    if half_loaded:  # left by another object of this process
        TrainState(model=(_kept := torch.nn.Linear(1, 1))).half_loaded = "file:///elsewhere"
    with CheckpointManager(url) as manager:
        manager.save(1, job.state())
        other = jobs.make("1d", start=5)
        before = jobs.everything(other)
        if dist.get_rank() == 1:
            other.state = lambda: TrainState(model=other.model, extra={"only here": 1})  # type: ignore[method-assign]
        try:
            manager.load(other.state())
        except CkptkitError as error:
            return f"{type(error).__name__}: {error}", jobs.everything(other) == before
    return "", False


@pytest.mark.parametrize("half_loaded", [False, True])
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(ranks: Any, tmp_path: Path, half_loaded: bool) -> None:
    found = ranks.run(lone_load_error, 2, str(tmp_path), half_loaded)
    assert len({text for text, _ in found}) == 1
    assert "rank [1]" in found[0][0]
    assert all(untouched for _, untouched in found)


def die(url: str) -> str:
    manager = CheckpointManager(url, timeout_s=20)
    original = manager._saver.publish

    def publish(*args: Any) -> Any:
        if dist.get_rank() == 1:
            os._exit(1)
        return original(*args)

    manager._saver.publish = publish  # type: ignore[method-assign]
    job = jobs.make("1d")
    try:
        manager.save(1, job.state())
    except CkptkitError as error:
        Path(url, f"seen-{dist.get_rank()}").write_text(str(error))
    return ""


def test_a_rank_that_dies_fails_all_others_in_bounded_time(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_ranks(die, 3, str(tmp_path), timeout=60)
    texts = {path.read_text() for path in tmp_path.glob("seen-*")}
    assert len(texts) == 1
    assert "rank 1" in texts.pop()
    assert steps(tmp_path) == []


CALLS: dict[str, Any] = {
    "latest": lambda manager: manager.latest(),
    "list": lambda manager: manager.list(),
    "wait": lambda manager: manager.wait(),
    "delete": lambda manager: manager.delete(1),
    "load": lambda manager: manager.load(state()),
    "save": lambda manager: manager.save(2, state()),
    "save_async": lambda manager: manager.save_async(2, state()),
    "interrupted": lambda manager: manager.interrupted(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_closed_manager_refuses_every_call(tmp_path: Path, call: Any) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state())
    with pytest.raises(UsageError, match="is closed"):
        call(manager)


def after_close(url: str) -> list[str]:
    job = jobs.make("1d")
    with CheckpointManager(url) as manager:
        manager.save(1, job.state())
        report = manager.load(job.state(), optimizer="deferred")
    assert report is not None and report.deferred is not None
    texts = []
    for call in (manager.latest, manager.list, manager.wait, report.deferred.apply):
        with pytest.raises(UsageError, match="is closed") as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_a_closed_manager_does_not_use_the_training_group(tmp_path: Path, ranks: Any) -> None:
    first, second = ranks.run(after_close, 2, str(tmp_path / "run"))
    assert first == second


@pytest.mark.parametrize("value", [None, "low", True, [1.0], torch.ones(2), 1j])
@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_a_metric_that_is_not_a_number_is_refused_before_anything_is_written(
    tmp_path: Path, value: Any, kind: str
) -> None:
    with CheckpointManager(tmp_path / "run", state_dict_type=kind) as manager:
        for save in (manager.save, manager.save_async):
            with pytest.raises(UsageError, match=r"metric 'val_loss' is .*expected a number"):
                save(1, state(), metrics={"loss": 1.0, "val_loss": value})
    assert [path for path in tmp_path.rglob("*") if "step" in path.name] == []


@pytest.mark.parametrize("value", [object(), {"x": math.nan}, {1: 2}, threading.Lock()])
def test_client_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path, value: Any) -> None:
    with CheckpointManager(tmp_path / "run") as manager, pytest.raises(UsageError, match="client_state"):
        manager.save_async(1, state(), client_state=value)
    assert [path for path in tmp_path.rglob("*") if "step" in path.name] == []


def odd_client_state(url: str) -> str:
    with CheckpointManager(url) as manager:
        try:
            manager.save(1, jobs.make("1d").state(), client_state=threading.Lock() if dist.get_rank() == 0 else None)
        except CkptkitError as error:
            return str(error)
    return ""


def test_unserializable_client_state_on_rank_0_fails_on_every_rank(tmp_path: Path, ranks: Any) -> None:
    first, second = ranks.run(odd_client_state, 2, str(tmp_path / "run"))
    assert first == second and "client_state" in first


def over_a_file_of_others(root: str, kind: str) -> str:
    with CheckpointManager(root, state_dict_type=kind, timeout_s=20) as manager:
        try:
            manager.save(1, state(), overwrite=True)
        except CheckpointExistsError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "name"),
    [("sharded", "__1_3.distcp"), ("full", "model-00001-of-00001.safetensors"), ("local", "local_00001.safetensors")],
)
def test_a_save_that_would_replace_a_foreign_file_is_refused_on_every_rank(
    tmp_path: Path, ranks: Any, kind: str, name: str
) -> None:
    with CheckpointManager(tmp_path, state_dict_type="local" if kind == "sharded" else "sharded") as manager:
        manager.save(1, state())
    (tmp_path / "step_00000001" / name).write_bytes(b"mine")
    before = os.stat(tmp_path).st_mtime_ns
    first, second = ranks.run(over_a_file_of_others, 2, str(tmp_path), kind)
    assert first == second and name in first and "Move that file away" in first
    assert os.stat(tmp_path).st_mtime_ns == before  # not even a directory was created
    assert (tmp_path / "step_00000001" / name).read_bytes() == b"mine"
    (tmp_path / "step_00000001" / name).rename(tmp_path / "step_00000001" / "theirs.bin")
    assert ranks.run(over_a_file_of_others, 2, str(tmp_path), kind) == ["", ""]
    assert (tmp_path / "step_00000001" / "theirs.bin").read_bytes() == b"mine"
