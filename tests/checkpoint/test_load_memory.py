"""A load holds as much beside the state as it may; a load that fails leaves the state as it was, or says what it is."""

from __future__ import annotations

import copy
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.checkpoint import load_stage, places
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state import TrainState
from ckptkit.errors import CorruptCheckpointError, SaveError, UsageError
from ckptkit.fsdp.master_weights import MasterWeightOptimizer

WIDTHS = (40, 8, 64, 16)


def state_of(seed: int, *, trained: bool = True, dtype: torch.dtype = torch.float32, wrapped: bool = False) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(32, width, dtype=dtype) for width in WIDTHS))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    if wrapped:
        optimizer = MasterWeightOptimizer(optimizer)
    if trained:
        for layer in model:
            layer(torch.ones(2, 32, dtype=dtype)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return TrainState(model=model, optimizer=optimizer, extra={"epoch": seed})


def bits(state: TrainState) -> Any:
    return copy.deepcopy((dict(state.model.state_dict()), state.optimizer.state_dict(), state.extra))  # type: ignore[union-attr]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture(params=["sharded", "full", "local"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run", state_dict_type=request.param) as manager:
        manager.save(1, state_of(1))
        yield manager


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state_of(1))
        yield manager


def damage(manager: CheckpointManager) -> None:
    """Flip the last bit of the largest tensor's data, wherever that lies."""
    step = Path(manager.url) / "step_00000001"
    file = max((path for path in step.rglob("*") if path.suffix in (".distcp", ".safetensors")), key=_size)
    wanted = state_of(1).model[2].weight.detach().numpy().tobytes()
    for path in sorted(step.rglob("*"), key=lambda path: path != file):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        at = data.find(wanted)
        if at >= 0:
            data[at + len(wanted) - 1] ^= 1
            path.write_bytes(bytes(data))
            return
    raise AssertionError("the tensor was not found")


def _size(path: Path) -> int:
    return path.stat().st_size


# --- what arrives is the same, however much is held


@pytest.mark.parametrize("limit", [0, 3000, 9000, "1GB", None])
@pytest.mark.parametrize("trained", [True, False])
def test_the_same_arrives_however_little_is_held(
    run: CheckpointManager, limit: int | str | None, trained: bool
) -> None:
    state = state_of(2, trained=trained)
    report = run.load(state, max_memory=limit)
    assert same(bits(state), bits(state_of(1)))
    assert report is not None
    assert any("read again" in note for note in report.notes) == (limit in (0, 3000, 9000))


@pytest.mark.parametrize("limit", [0, None])
def test_masters_and_casts_arrive_however_little_is_held(tmp_path: Path, limit: int | None) -> None:
    def wide() -> Any:
        return state_of(1, dtype=torch.bfloat16, wrapped=True)

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, wide())
        state = state_of(2, dtype=torch.bfloat16, wrapped=True)
        manager.load(state, max_memory=limit)
        assert same(bits(state), bits(wide()))
        cast = TrainState(model=state_of(2).model)
        report = manager.load(cast, max_memory=limit, convert_dtype=True)
        expected = wide().model.float().state_dict()
        assert same(dict(cast.model.state_dict()), dict(expected))  # type: ignore[union-attr]
        assert report is not None and "model.0.weight: cast from bfloat16 to float32" in report.notes


def test_live_tensors_stay_where_they_are_when_they_are_read_into(sharded: CheckpointManager) -> None:
    state = state_of(2)
    moments = [state.optimizer.state[p]["exp_avg"] for p in state.model.parameters()]
    before = [tensor.data_ptr() for tensor in [*state.model.parameters(), *moments]]
    sharded.load(state, in_place=True)
    moments = [state.optimizer.state[p]["exp_avg"] for p in state.model.parameters()]
    assert [tensor.data_ptr() for tensor in [*state.model.parameters(), *moments]] == before
    assert same(bits(state), bits(state_of(1)))


def test_the_largest_are_read_twice_and_the_small_ones_once(sharded: CheckpointManager) -> None:
    state = TrainState(model=state_of(2).model, rng=False)
    sizes = sorted(p.numel() * 4 for p in state.model.parameters())  # type: ignore[union-attr]
    report = sharded.load(state, optimizer="skip", max_memory=sum(sizes[:-1]) - 1)
    assert report is not None
    assert report.nbytes == sum(sizes)  # checked or read; what is read again is not counted again
    assert [note for note in report.notes if f"{sum(sizes[-2:]) / 1000:.1f} kB are checked first" in note]


# --- a load that fails


@pytest.mark.parametrize("limit", [0, 9000, None])
def test_damage_is_found_before_anything_is_touched_however_little_is_held(
    run: CheckpointManager, limit: int | None
) -> None:
    damage(run)
    state = state_of(2)
    before = bits(state)
    with pytest.raises(CorruptCheckpointError):
        run.load(state, max_memory=limit)
    assert same(bits(state), before) and not state.half_loaded
    run.save(2, state)


@pytest.mark.parametrize("verify", [True, "read", False])
def test_a_truncated_file_is_found_before_anything_is_touched(sharded: CheckpointManager, verify: Any) -> None:
    (file,) = Path(sharded.url).rglob("*.distcp")
    os.truncate(file, _size(file) - 3000)
    state = state_of(2)
    before = bits(state)
    with pytest.raises(CorruptCheckpointError):
        sharded.load(state, max_memory=0, verify=verify)
    assert same(bits(state), before) and not state.half_loaded


def test_a_missing_file_is_found_before_anything_is_touched(sharded: CheckpointManager) -> None:
    (file,) = Path(sharded.url).rglob("*.distcp")
    file.unlink()
    state = state_of(2)
    before = bits(state)
    with pytest.raises((CorruptCheckpointError, FileNotFoundError)):
        sharded.load(state, max_memory=0)
    assert same(bits(state), before)


def _save_is_refused(manager: CheckpointManager, state: TrainState) -> None:
    with pytest.raises(SaveError, match="half loaded"):
        manager.save(2, state)
    assert manager.latest() == 1


def test_damage_that_is_found_in_place_is_said_and_the_state_is_not_saved(sharded: CheckpointManager) -> None:
    good = Path(sharded.url, "step_00000001").rename(Path(sharded.url).parent / "good")
    Path(sharded.url, "step_00000001").mkdir()
    for path in good.rglob("*"):
        Path(sharded.url, "step_00000001", path.relative_to(good)).write_bytes(path.read_bytes())
    damage(sharded)
    state = state_of(2)
    with pytest.raises(CorruptCheckpointError, match="half loaded"):
        sharded.load(state, in_place=True)
    _save_is_refused(sharded, state)
    sharded.load(TrainState(model=state.model), optimizer="skip", which=str(good))  # another view of it
    _save_is_refused(sharded, state)
    assert sharded.load(state, str(good)) is not None
    assert same(bits(state), bits(state_of(1)))
    sharded.save(2, state)


def test_what_is_lost_between_the_check_and_the_second_reading_is_said(
    sharded: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = load_stage.check_ahead

    def check_and_lose(*args: Any) -> int:
        nbytes = check(*args)
        damage(sharded)
        return nbytes

    monkeypatch.setattr(load_stage, "check_ahead", check_and_lose)
    state = state_of(2)
    with pytest.raises(CorruptCheckpointError, match="half loaded"):
        sharded.load(state, max_memory=0)
    _save_is_refused(sharded, state)


def test_falling_back_makes_a_half_loaded_state_whole(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, state_of(7))
        manager.save(1, state_of(1))
        damage(manager)
        state = state_of(2)
        manager.load(state, in_place=True, fallback="previous")
        assert same(bits(state), bits(state_of(7))) and not state.half_loaded


# --- how much there is


def test_half_of_the_free_memory_is_the_limit_shared_by_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "free_memory", lambda: 800)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert places.own_budget(None) == 100
    assert places.own_budget(7) == 7
    monkeypatch.setattr(places, "free_memory", lambda: None)
    assert places.own_budget(None) == (4 << 30) // 4  # never without a limit


@pytest.mark.parametrize("free", [0, 3000, 20_000, 1 << 30])
def test_a_load_by_itself_holds_no_more_than_that_and_says_how_much(
    free: int, sharded: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "free_memory", lambda: free)
    state = state_of(2)
    report = sharded.load(state)
    assert report is not None and report.held <= free // 2
    weights = sum(tensor.nbytes for tensor in state.model.state_dict().values())  # type: ignore[union-attr]
    assert report.held + report.read_twice >= 3 * weights  # of each its two moments
    assert (report.read_twice == 0) == (free == 1 << 30)
    assert same(bits(state), bits(state_of(1)))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the most memory in use cannot be reset")
def test_memory_grows_by_no_more_than_a_load_may_hold(tmp_path: Path) -> None:
    def status(name: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) << 10

    model = nn.Linear(4096, 12288, bias=False)  # 192 MiB
    nn.init.ones_(model.weight)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainState(model=model))
        nn.init.zeros_(model.weight)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        report = manager.load(TrainState(model=model), max_memory="16MB")
        grown = status("VmHWM") - before
    assert report is not None and report.read_twice == model.weight.nbytes
    assert bool((model.weight == 1).all())
    assert grown < 1.25 * (16e6 + (32 << 20) + (16 << 20))  # what one check reads, and buffers


def test_where_memory_is_short_a_load_checks_first(sharded: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "free_memory", lambda: 0)
    state = state_of(2)
    report = sharded.load(state)
    assert report is not None and any("read again" in note for note in report.notes)
    assert same(bits(state), bits(state_of(1)))


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n",
        "/proc/self/cgroup": "0::/job/step\n" if version == 2 else "4:memory:/job/step\n3:cpu:/x\n",
    }
    top = "/sys/fs/cgroup" if version == 2 else "/sys/fs/cgroup/memory"
    files |= {f"{top}/job/step/{names[0]}": "max\n", f"{top}/job/step/{names[1]}": "900000\n"}
    files |= {f"{top}/job/{names[0]}": "2000000\n", f"{top}/job/{names[1]}": "900000\n"}
    files |= {f"{top}/job/memory.stat": f"anon 1\n{names[2]} 100000\n"}
    monkeypatch.setattr(places, "_text", lambda path: files.get(str(path), ""))
    assert places.free_memory() == 2000000 - 900000 + 100000
    files[f"{top}/job/{names[0]}"] = "9223372036854771712\n"
    assert places.free_memory() == 5000 << 10
    files.clear()
    assert places.free_memory() is None


def test_a_limit_that_is_no_size_is_wrong_usage(sharded: CheckpointManager) -> None:
    with pytest.raises(UsageError):
        sharded.load(state_of(2), max_memory="much")


def test_a_check_holds_little(tmp_path: Path) -> None:
    model = nn.Linear(2048, 6400, bias=False)  # 50 MiB
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainState(model=model))
        manager.load(TrainState(model=model), max_memory=0)
        tracemalloc.start()  # of Python alone: buffers are its own here
        try:
            manager.load(TrainState(model=model), max_memory=0)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < 1.25 * (4 << 20)
