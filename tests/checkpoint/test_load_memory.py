"""The memory of loads, and the state after a failed load: unchanged, or marked as half loaded."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.checkpoint.load import apply, read
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CkptkitError, CorruptCheckpointError, LoadError, RankFailedError, SaveError, UsageError
from ckptkit.fsdp.master_weights import MasterWeightOptimizer
from tests.checkpoint import jobs

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
    """Flip the last bit of the data of the largest tensor."""
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


# --- loads with and without a second copy give the same state


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_loads_with_and_without_a_second_copy_give_the_same_state(
    run: CheckpointManager, atomic: bool, trained: bool
) -> None:
    state = state_of(2, trained=trained)
    report = run.load(state, atomic=atomic)
    assert same(bits(state), bits(state_of(1)))
    weights = sum(tensor.nbytes for tensor in state.model.state_dict().values())  # type: ignore[union-attr]
    assert report is not None and report.held == atomic * weights * (3 if trained else 1)  # plus two moments of each


@pytest.mark.parametrize("atomic", [True, False])
def test_masters_and_casts_load_with_and_without_a_second_copy(tmp_path: Path, atomic: bool) -> None:
    def wide() -> Any:
        return state_of(1, dtype=torch.bfloat16, wrapped=True)

    with CheckpointManager(tmp_path) as manager:
        manager.save(1, wide())
        state = state_of(2, dtype=torch.bfloat16, wrapped=True)
        manager.load(state, atomic=atomic)
        assert same(bits(state), bits(wide()))
        cast = TrainState(model=state_of(2).model)
        report = manager.load(cast, atomic=atomic, convert_dtype=True)
        rounded = {name: tensor.bfloat16() for name, tensor in cast.model.state_dict().items()}  # type: ignore[union-attr]
        assert same(rounded, dict(wide().model.state_dict()))
        assert report is not None and any("were restored from the fp32 masters" in note for note in report.notes)


def test_a_load_reads_into_the_memory_of_live_tensors(sharded: CheckpointManager) -> None:
    state = state_of(2)
    moments = [state.optimizer.state[p]["exp_avg"] for p in state.model.parameters()]
    before = [tensor.data_ptr() for tensor in [*state.model.parameters(), *moments]]
    sharded.load(state)
    moments = [state.optimizer.state[p]["exp_avg"] for p in state.model.parameters()]
    assert [tensor.data_ptr() for tensor in [*state.model.parameters(), *moments]] == before
    assert same(bits(state), bits(state_of(1)))


# --- a load that fails


def test_damage_is_found_before_anything_changes_with_atomic(run: CheckpointManager) -> None:
    damage(run)
    state = state_of(2)
    before = bits(state)
    with pytest.raises(CorruptCheckpointError):
        run.load(state, atomic=True)
    assert same(bits(state), before) and not state.half_loaded
    run.save(2, state)


@pytest.mark.parametrize("verify", [True, "read", False])
def test_a_truncated_file_is_found_before_anything_changes(sharded: CheckpointManager, verify: Any) -> None:
    (file,) = Path(sharded.url).rglob("*.distcp")
    os.truncate(file, _size(file) // 2)
    state = state_of(2)
    before = bits(state)
    with pytest.raises(CorruptCheckpointError):
        sharded.load(state, verify=verify)
    assert same(bits(state), before) and not state.half_loaded


def test_a_missing_file_is_found_before_anything_changes(sharded: CheckpointManager) -> None:
    (file,) = Path(sharded.url).rglob("*.distcp")
    file.unlink()
    state = state_of(2)
    before = bits(state)
    with pytest.raises((CorruptCheckpointError, FileNotFoundError)):
        sharded.load(state)
    assert same(bits(state), before) and not state.half_loaded


def _save_is_refused(manager: CheckpointManager, state: TrainState) -> None:
    with pytest.raises(SaveError, match="half loaded"):
        manager.save(2, state)
    assert manager.latest() == 1


def test_damage_found_while_reading_leaves_a_state_that_save_refuses(sharded: CheckpointManager) -> None:
    good = Path(sharded.url, "step_00000001").rename(Path(sharded.url).parent / "good")
    Path(sharded.url, "step_00000001").mkdir()
    for path in good.rglob("*"):
        Path(sharded.url, "step_00000001", path.relative_to(good)).write_bytes(path.read_bytes())
    damage(sharded)
    state = state_of(2)
    with pytest.raises(CorruptCheckpointError, match="half loaded"):
        sharded.load(state)
    _save_is_refused(sharded, state)
    sharded.load(TrainState(model=state.model), optimizer="skip", which=str(good))  # another view of the same model
    _save_is_refused(sharded, state)
    assert sharded.load(state, str(good)) is not None
    assert same(bits(state), bits(state_of(1)))
    sharded.save(2, state)


def test_a_fallback_completes_a_half_loaded_state(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, state_of(7))
        manager.save(1, state_of(1))
        damage(manager)
        state = state_of(2)
        manager.load(state, fallback="previous")
        assert same(bits(state), bits(state_of(7))) and not state.half_loaded


def test_a_partial_load_that_falls_back_leaves_no_half_loaded_state(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, state_of(7))
        manager.save(1, state_of(1))
        damage(manager)
        state = state_of(2)
        manager.load(state, fallback="previous", optimizer="skip")
        assert not state.half_loaded
        manager.save(2, state)


def test_a_fallback_that_lacks_tensors_leaves_the_state_half_loaded(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        model = state_of(1).model
        manager.save(0, TrainState(model=nn.Sequential(model[0]), rng=False))
        manager.save(1, TrainState(model=model, rng=False))
        damage(manager)
        state = TrainState(model=model, rng=False)
        report = manager.load(state, fallback="previous", strict=False)
        assert report is not None and report.missing and report.step == 0
        assert state.half_loaded.endswith("step_00000001")


# --- a half-loaded model is refused in every TrainState


class Refuses:
    """Refuses every state."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("epochs")


def test_the_objects_of_a_half_loaded_state_are_not_saved_in_another_one(run: CheckpointManager) -> None:
    damage(run)
    state = state_of(2)
    with pytest.raises(CorruptCheckpointError, match="half loaded"):
        run.load(state)
    wrapped = torch.compile(state.model)
    for other in (
        TrainState(model=state.model),
        TrainState(model=wrapped),  # type: ignore[arg-type]
        TrainState(model={"a": nn.Linear(2, 2), "b": state.model[3]}),  # type: ignore[index]
        TrainState(model=state_of(3).model, optimizer=None, extra={"old": state.optimizer}),
    ):
        for save in (run.save, run.save_async):
            with pytest.raises(SaveError, match=r"half loaded from .*step_00000001"):
                save(2, other)
    run.save(2, state_of(3))
    run.load(TrainState(model=state.model, optimizer=state.optimizer), 2)
    run.save(3, TrainState(model=wrapped))  # type: ignore[arg-type]


def test_a_half_loaded_optimizer_is_refused_after_its_model_was_loaded(sharded: CheckpointManager) -> None:
    damage(sharded)
    state = state_of(2)
    with pytest.raises(CorruptCheckpointError):
        sharded.load(state)
    sharded.save(2, state_of(3))
    sharded.load(TrainState(model=state.model), 2, optimizer="skip")
    sharded.save(3, TrainState(model=state.model))
    with pytest.raises(SaveError, match="half loaded"):
        sharded.save(4, TrainState(model=state.model, optimizer=state.optimizer))
    TrainState(optimizer=state.optimizer, model=state.model).half_loaded = ""
    sharded.save(4, TrainState(model=state.model, optimizer=state.optimizer))


@pytest.mark.parametrize("atomic", [True, False])
def test_an_object_that_refuses_its_state_leaves_the_state_half_loaded(tmp_path: Path, atomic: bool) -> None:
    with CheckpointManager(tmp_path) as manager:
        state = state_of(1)
        state.extra = {"first": 1, "second": Refuses()}
        manager.save(1, state)
        state.extra["first"] = 2
        with pytest.raises(RankFailedError, match=r"(?s)epochs.*half loaded"):
            manager.load(state, atomic=atomic)
        assert state.extra["first"] == 1
        _save_is_refused(manager, state)


def test_a_damaged_optimizer_that_was_deferred_is_not_saved(sharded: CheckpointManager) -> None:
    state = state_of(2)
    report = sharded.load(state, optimizer="deferred")
    wanted = state_of(1).optimizer.state_dict()["state"][4]["exp_avg"].numpy().tobytes()
    (file,) = Path(sharded.url).rglob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(wanted)] ^= 1
    file.write_bytes(bytes(data))
    assert report is not None and report.deferred is not None
    with pytest.raises(CorruptCheckpointError, match="half loaded"):
        report.deferred.apply()
    with pytest.raises(SaveError, match="half loaded"):
        sharded.save(2, TrainState(model=state.model, optimizer=state.optimizer))


def damage_of_rank_1(url: str, kind: str) -> list[str]:
    job = jobs.make("1d")
    rank = torch.distributed.get_rank()
    with CheckpointManager(url, state_dict_type=kind) as manager:
        manager.save(1, job.state())
        if rank == 1:
            local = next(p for n, p in job.model.named_parameters() if n.endswith("up.weight")).to_local()
            wanted = local.detach().numpy().tobytes()
            for file in Path(url).rglob("*"):
                data = bytearray(file.read_bytes()) if file.is_file() else bytearray()
                if (at := data.find(wanted)) >= 0:
                    data[at] ^= 1
                    file.write_bytes(bytes(data))
        torch.distributed.barrier()
        state = job.state()
        said = []
        for call in (lambda: manager.load(state), lambda: manager.save(2, state), lambda: manager.save(2, job.state())):
            with pytest.raises(CkptkitError, match="half loaded") as caught:
                call()
            said.append(str(caught.value))
    return said


@pytest.mark.parametrize("kind", ["sharded", "local"])
def test_damage_in_one_ranks_file_leaves_every_rank_half_loaded(tmp_path: Path, ranks: Any, kind: str) -> None:
    first, second = ranks.run(damage_of_rank_1, 2, str(tmp_path / "run"), kind)
    assert first == second


def fails_late_on_rank_1(url: str) -> list[str]:
    job = jobs.make("1d")
    with CheckpointManager(url) as manager:
        manager.save(1, job.state())
        state = job.state()
        with pytest.MonkeyPatch.context() as patch:
            if torch.distributed.get_rank() == 1:
                patch.setattr(apply, "apply_optimizer", Refuses().load_state_dict)
            said = []
            for call in (lambda: manager.load(state, atomic=True), lambda: manager.save(2, job.state())):
                with pytest.raises(CkptkitError, match="half loaded") as caught:
                    call()
                said.append(str(caught.value))
    return said


def test_a_rank_that_fails_while_tensors_are_set_leaves_every_rank_half_loaded(tmp_path: Path, ranks: Any) -> None:
    first, second = ranks.run(fails_late_on_rank_1, 2, str(tmp_path / "run"))
    assert first == second


# --- memory limits


@pytest.mark.parametrize(("limit", "free", "ranks"), [(9000, 1 << 30, 1), (None, 9000, 1), (None, 100_000, 16)])
def test_a_second_copy_above_the_memory_limit_is_refused_before_anything_is_read(
    limit: int | None, free: int, ranks: int, sharded: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "free_memory", lambda: free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    damage(sharded)  # damage that is found while reading
    state = state_of(2)
    before = bits(state)
    with pytest.raises(LoadError, match=r"atomic=True needs 50\.7 kB .* this rank's state, .*nothing was loaded"):
        sharded.load(state, atomic=True, max_memory=limit)
    assert same(bits(state), before) and not state.half_loaded


@pytest.mark.parametrize(("limit", "free"), [("51kB", 0), (None, 51_000), (None, None)])
def test_a_second_copy_within_the_memory_limit_is_made(
    limit: str | None, free: int | None, sharded: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "free_memory", lambda: free)
    state = state_of(2)
    sharded.load(state, atomic=True, max_memory=limit)
    assert same(bits(state), bits(state_of(1)))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the most memory in use cannot be reset")
def test_a_default_load_needs_no_second_copy(tmp_path: Path) -> None:
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
        report = manager.load(TrainState(model=model))
        grown = status("VmHWM") - before
    assert report is not None and report.held == 0
    assert bool((model.weight == 1).all())
    assert grown < 64 << 20


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_limit_of_a_container_is_respected(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(read, "_text", lambda path: files.get(str(path), ""))
    assert read.free_memory() == 2000000 - 900000 + 100000
    files[f"{top}/job/{names[0]}"] = "9223372036854771712\n"
    assert read.free_memory() == 5000 << 10
    files.clear()
    assert read.free_memory() is None


def test_an_invalid_max_memory_is_wrong_usage(sharded: CheckpointManager) -> None:
    with pytest.raises(UsageError):
        sharded.load(state_of(2), atomic=True, max_memory="much")
