"""Background saves: the snapshot does not change, and no error is lost."""

import copy
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit import CheckpointManager, TrainState, log
from ckptkit.checkpoint.report import Phase
from ckptkit.checkpoint.save import background, staging
from ckptkit.checkpoint.save import saver as save_module
from ckptkit.errors import CkptkitError, RankFailedError, SaveError
from tests.checkpoint import jobs
from tests.checkpoint.saving import fork, steps
from tests.checkpoint.states import KINDS, bits, load, refusal
from tests.patches import before, failing
from tests.ranks import on_ranks


def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Block each save before it writes, until the result is set."""
    opened = threading.Event()
    before(monkeypatch, save_module.Saver, "publish", lambda *_: opened.wait(30) or 1 / 0)
    return opened


NO_SPACE = failing(OSError(28, "No space left on device"))


def test_changes_after_the_call_are_not_in_the_snapshot(tmp_path, monkeypatch, kind):
    def made() -> TrainState:
        model = nn.Linear(300, 20)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        return TrainState(model=model, optimizer=optimizer, extra={"of": {"list": [1], "table": torch.arange(2000)}})

    opened, state, loaded = gate(monkeypatch), made(), made()
    state.model(torch.ones(2, 300)).sum().backward()
    state.optimizer.step()
    expected, seen, metrics = bits(state), {"files": ["a"]}, {"loss": 1.0}
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        handle = manager.save_async(1, state, client_state=seen, metrics=metrics)
        assert not handle.done()
        seen["files"].append("b")
        metrics["loss"] = 2.0
        state.optimizer.step()
        state.extra["of"]["list"].append(2)
        state.extra["of"]["table"].zero_()
        torch.rand(1)
        opened.set()
        handle.result()
        loaded.extra["of"] = None
        report = manager.load(loaded)
    assert bits(loaded) == expected
    assert (report.client_state, report.metrics) == ({"files": ["a"]}, {"loss": 1.0})


def test_the_next_save_waits_for_the_running_one(tmp_path, monkeypatch):
    opened = gate(monkeypatch)
    state = TrainState(model=nn.Linear(4, 4))
    with CheckpointManager(tmp_path) as manager:
        first = manager.save_async(1, state)
        threading.Timer(0.2, opened.set).start()
        manager.save_async(2, state)
        assert first.done()
    assert steps(tmp_path) == [1, 2]


def test_a_running_save_refuses_the_next_one_with_async_policy_refuse(tmp_path, monkeypatch):
    opened = gate(monkeypatch)
    with CheckpointManager(tmp_path, async_policy="refuse") as manager:
        manager.save_async(1, TrainState(model=nn.Linear(4, 4)))
        with pytest.raises(SaveError, match="still running"):
            manager.save_async(2, TrainState(model=nn.Linear(4, 4)))
        opened.set()
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("ask", ["result", "save", "save_async", "load", "close", "wait"])
def test_an_error_in_the_background_reaches_the_caller(tmp_path, monkeypatch, ask):
    monkeypatch.setattr(save_module.Saver, "publish", NO_SPACE)
    state = TrainState(model=nn.Linear(4, 4))
    manager = CheckpointManager(tmp_path)
    handle = manager.save_async(1, state)
    calls = {
        "result": handle.result,
        "save": lambda: manager.save(2, state),
        "save_async": lambda: manager.save_async(2, state),
        "load": lambda: manager.load(state),
        "close": manager.close,
        "wait": manager.wait,
    }
    with pytest.raises(SaveError, match="No space left"):
        calls[ask]()
    manager.close()  # the error was raised already
    assert steps(tmp_path) == []


def run_script(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    script = f"""
import torch
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
manager = CheckpointManager({str(tmp_path)!r})
state = TrainState(model=torch.nn.Linear(1000, 1000))
{body}
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)


def test_a_process_that_ends_without_waiting_leaves_a_complete_checkpoint(tmp_path):
    done = run_script(tmp_path, "manager.save_async(1, state)")
    assert done.returncode == 0, done.stderr
    assert load(tmp_path, TrainState(model=nn.Linear(1000, 1000))).step == 1


@pytest.mark.parametrize("threads", ["may start", "are refused"])
def test_a_queued_save_is_completed_after_the_main_thread_ends(tmp_path, threads):
    """At that point Python has closed its pools, and from 3.12 on it starts no thread."""
    body = f"""
import threading
from ckptkit.storage import pool as workers
state.model = torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(4)])
ended, start = threading.Event(), threading.Thread.start
def refuse(self): raise RuntimeError("can't create new thread at interpreter shutdown")
def end():
    if {threads == "are refused"}:
        workers._MAY_START, threading.Thread.start = False, refuse
    ended.set()
def hold_back(publish):
    def late(*args):
        assert ended.wait(60)
        return publish(*args)
    return late
threading._register_atexit(end)
for kind in ("sharded", "full", "local"):
    manager = CheckpointManager({str(tmp_path)!r} + "/" + kind, state_dict_type=kind)
    manager._saver.publish = hold_back(manager._saver.publish)
    manager.save_async(1, state)
"""
    done = run_script(tmp_path, body)
    assert (done.returncode, done.stderr) == (0, "")
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/step_*")}
    assert found == {f"{kind}/step_00000001" for kind in KINDS}


def test_an_unread_background_error_is_printed_at_exit(tmp_path):
    fail = 'def fail(*args): raise OSError(28, "No space left on device")\n'
    done = run_script(tmp_path, fail + "manager._saver.publish = fail\nmanager.save_async(1, state)")
    assert "the save of step 1 failed" in done.stderr and "No space left" in done.stderr


@pytest.mark.parametrize("heard", [True, False])
def test_a_failed_save_is_reported_even_if_the_training_fails(tmp_path, monkeypatch, capsys, heard):
    monkeypatch.setattr(save_module.Saver, "publish", NO_SPACE)
    monkeypatch.setattr(log, "_is_handled", lambda name: heard)
    with pytest.raises(ValueError, match="training"), CheckpointManager(tmp_path / "run") as manager:
        manager.save_async(1, TrainState(model=nn.Linear(2, 2)))
        raise ValueError("training")
    said = "the save of step 1 failed, and nothing was published" in capsys.readouterr().err
    assert said == (not heard)


def test_the_report_of_a_dead_rank_0_does_not_say_that_nothing_was_published(monkeypatch, capsys):
    monkeypatch.setattr(log, "_is_handled", lambda name: False)
    lost = RankFailedError("rank 0 died. The checkpoint may or may not be published", {0: "died"}, interrupted=True)
    background.report_failure(3, lost)
    assert capsys.readouterr().err == f"ckptkit: the save of step 3 failed: {lost}\n"


@pytest.mark.parametrize(
    ("kind", "mode"), [("sharded", "sync"), ("sharded", "async"), ("local", "async"), ("full", "async")]
)
def test_the_report_has_the_time_of_each_phase(tmp_path, kind, mode):
    reports: list[Any] = []
    trace = tmp_path / "traces"
    state = TrainState(model=nn.Linear(500, 500))
    size = 501 * 500 * 4
    options = {"on_commit": reports.append, "trace": trace, "state_dict_type": kind}
    with CheckpointManager(tmp_path / "run", **options) as manager:
        report = manager.save(3, state) if mode == "sync" else manager.save_async(3, state).result()
        loaded = manager.load(state)
    assert reports == [report]
    totals = report.totals()
    moved = {"write", "digest", "sync", "index"} | ({"stage"} if mode != "sync" else set())
    assert set(totals) == moved | {"plan", "agree", "begin", "commit", "rotate"}
    assert all(entry["seconds"] > 0 for entry in totals.values())
    assert all(size <= totals[name]["bytes"] < 2 * size for name in moved - {"index"})
    assert totals["index"]["bytes"] > 1000
    assert 0 < report.stall_seconds <= report.seconds
    assert sum(entry["seconds"] for entry in totals.values()) <= report.seconds
    sizes = {path.name: path.stat().st_size for path in Path(report.url).rglob("*") if path.is_file()}
    assert sum(sizes.values()) - sizes["checkpoint.json"] == report.total_bytes
    assert all(f"{name} 0." in report.phase_line() for name in totals)
    assert loaded is not None
    assert set(loaded.totals()) == {"plan", "read", "apply"}
    assert size <= loaded.totals()["read"]["bytes"] < 2 * size
    for name, phases in (("save", report.phases), ("load", loaded.phases)):
        events = json.loads((trace / f"{name}-00000003-rank00000.json").read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        assert [event["name"] for event in spans] == [phase.name for phase in phases]
        assert [event["args"]["bytes"] for event in spans] == [phase.nbytes for phase in phases]
        assert not [(one.name, other.name) for one in phases for other in phases if overlap(one, other)]
        assert {event["tid"] for event in spans} == {event["tid"] for event in events if event["ph"] == "M"}


def overlap(one: Phase, other: Phase) -> bool:
    """Whether the second span starts within the first in one thread but ends after it, which no trace can show."""
    stop, end = one.start + one.seconds, other.start + other.seconds
    return one.thread == other.thread and one.start < other.start < stop - 1e-9 and end > stop + 1e-9


def test_a_callback_that_fails_does_not_undo_the_save(tmp_path):
    with CheckpointManager(tmp_path, on_commit=failing(ValueError("no network"))) as manager:
        manager.save(1, TrainState(model=nn.Linear(2, 2)))
        assert manager.latest() == 1


# --- host memory


def small_and_large() -> list[torch.Tensor]:
    """Return tensors that are staged together or not: by size, dtype, strides and the negative bit."""
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    made = [torch.randn(4, 5).mul(9).to(dtype) for dtype in dtypes for _ in range(40)]
    negative = torch.randn(6, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    odd = [torch.randn(6, 4).t(), torch.randn(9)[::2], torch.randn(8, 4)[::2, ::2], torch.randn(()), torch.zeros(0, 3)]
    odd += [negative.clone(), negative, torch._neg_view(torch.randn(4)), torch.randn(4, dtype=torch.complex64).conj()]
    return [*made, *odd, torch.randn(70, 70), *(torch.full((2000,), float(i)) for i in range(40))]


def test_a_save_follows_tensors_whose_memory_was_replaced(tmp_path, kind):
    model = nn.Module()
    for number, tensor in enumerate(small_and_large()):
        model.register_buffer(f"t{number}", tensor)
    extra = {"table": {str(i): torch.full((300,), float(i)) for i in range(4)}}
    changes: list[Any] = [
        lambda: None,
        lambda: [tensor.copy_(tensor.roll(1, 0)) for tensor in model.buffers() if tensor.dim()],
        lambda: [setattr(model, name, tensor.clone()) for name, tensor in list(model.named_buffers())],
        lambda: setattr(model.t0, "data", torch.randn(5, 4).t()),  # the same shape in another order
        lambda: setattr(model.t1, "data", torch.randn(4, 5).to(torch.bfloat16)),
        lambda: delattr(model, "t2"),
        lambda: extra["table"].update({"1": torch.randn(300)}),
        lambda: extra["table"].update({"new": torch.randn(300)}),
        lambda: setattr(extra["table"]["2"], "data", torch.randn(2, 150)),
    ]
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        for step, change in enumerate(changes):
            change()
            again = nn.Module()
            for name, tensor in model.named_buffers():
                again.register_buffer(name, torch.zeros(tensor.shape, dtype=tensor.dtype))
            expected = {name: tensor.clone() for name, tensor in model.named_buffers()}, copy.deepcopy(extra)
            manager.save_async(step, TrainState(model=model, extra=extra))
            for tensor in [*model.buffers(), *extra["table"].values()]:
                tensor.zero_()
            loaded = TrainState(model=again, extra={"table": None})
            manager.load(loaded)
            torch.testing.assert_close((dict(again.named_buffers()), loaded.extra), expected, rtol=0, atol=0)


def test_a_closed_manager_holds_no_buffers(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save_async(1, TrainState(model=nn.Linear(30, 30)))
        assert manager._buffers.nbytes >= 31 * 30 * 4
    assert manager._buffers.nbytes == 0


# --- ranks


@on_ranks(2)
def test_an_in_place_change_of_memory_is_saved_or_fails_the_save_on_all_ranks(tmp_path):
    """Change the memory of DTensors in place, on one rank only."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(64.0).reshape(8, 8)
    parts = [distribute_tensor(whole, mesh, (Shard(0),), src_data_rank=None) for _ in range(30)]
    model = nn.ParameterList([nn.Parameter(part, requires_grad=False) for part in parts])
    state = TrainState(model=model)
    local, model[3]._spec = model[3]._local_tensor, copy.copy(model[3]._spec)  # torch's own caches have the old spec
    with CheckpointManager(tmp_path, timeout_s=30) as manager:
        for step in (1, 2):
            manager.save_async(step, state).result()
        if dist.get_rank() == 1:
            local.data = torch.full((8, 4), 7.0).t()
        manager.save_async(3, state)
        saved = [jobs.whole(parameter) for parameter in model]
        with torch.no_grad():
            for parameter in model:
                parameter.zero_()
        manager.load(state, 3)
        assert [jobs.whole(parameter) for parameter in model] == saved
        held = local.data
        for step in (4, 5):
            if dist.get_rank() == 1:
                local.data = torch.zeros(2, 16)
            wrong = r"rank 1: model\.3: this rank should hold \[4, 8\], found \[2, 16\]"
            with pytest.raises(CkptkitError, match=wrong):
                manager.save_async(step, state).result()
        local.data = held
        manager.save_async(6, state).result()
        model[3]._spec.placements = (Shard(1),)
        with pytest.raises(CkptkitError, match=r"model\.3: this rank should hold \[8, 4\], found \[4, 8\]"):
            manager.save_async(7, state).result()
        model[3]._spec.placements = (Shard(0),)
        manager.save_async(8, state).result()
    assert steps(tmp_path) == [1, 2, 3, 6, 8]


@on_ranks(2)
def test_a_rank_without_memory_for_its_snapshot_fails_the_save_on_all_ranks(tmp_path, kind):
    job, again = jobs.make("1d"), jobs.make("1d", start=7)
    with CheckpointManager(tmp_path, timeout_s=30, state_dict_type=kind) as manager:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(staging, "_allocate", failing(MemoryError("no host memory for the snapshot")))
            handle = manager.save_async(1, job.state())
        with pytest.raises(CkptkitError, match=r"rank 1.*no host memory"):
            handle.result()
        manager.save_async(2, job.state()).result()
        manager.load(again.state())
    assert jobs.whole(job.model.up.weight) == jobs.whole(again.model.up.weight)
    assert steps(tmp_path) == [2]


def test_a_forked_process_is_refused_every_call_and_exits_without_waiting(tmp_path, monkeypatch):
    opened = gate(monkeypatch)
    state = TrainState(model=nn.Linear(4, 3), rng=False)
    manager = CheckpointManager(tmp_path, on_signal="save", async_policy="refuse")
    handle = manager.save_async(1, state)

    calls: list[Any] = [
        lambda: manager.save(2, state), lambda: manager.save_async(2, state), manager.wait, manager.interrupted,
        lambda: manager.save_on_signal(2, state), lambda: manager.load(state), manager.latest, manager.list,
        lambda: manager.delete(1), handle.result,
    ]  # fmt: skip

    def child(say: Any) -> None:
        refused = [text for text in map(refusal, calls) if "UsageError" in text and f"process {os.getppid()}" in text]
        say(f"{len(refused)} refused, ".encode())
        manager.close()
        with pytest.raises(ZeroDivisionError), manager:
            raise ZeroDivisionError
        with manager:
            pass
        say(b"closed")

    assert fork(child, timeout=20) == (0, b"10 refused, closed")
    opened.set()
    assert handle.result().step == 1
    manager.save(2, state)
    manager.close()
