"""The memory and the reads of loads, and the state after a failed load: unchanged, or marked as half loaded."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptkit import CheckpointManager, TrainState
from ckptkit.checkpoint.load import apply, read
from ckptkit.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    IntegrityError,
    LoadError,
    RankFailedError,
    SaveError,
)
from ckptkit.formats.own.reader import open_catalog
from ckptkit.fsdp import MasterWeightOptimizer
from ckptkit.storage import open_store
from tests.checkpoint import jobs, states
from tests.checkpoint.states import (
    Kept,
    bits,
    check_misfit,
    check_round_trip,
    flip,
    measures_memory,
    memory_of,
    on_all,
    refusal,
    save,
)
from tests.ranks import on_ranks

WIDTHS = (40, 8, 64, 16)


def state_of(seed: int, *, trained: bool = True, masters: bool = False) -> TrainState:
    def make(parameters: Any) -> Any:
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        return MasterWeightOptimizer(optimizer) if masters else optimizer

    torch.manual_seed(seed)
    dtype = torch.bfloat16 if masters else torch.float32
    model = nn.Sequential(*(nn.Linear(32, width, dtype=dtype) for width in WIDTHS))
    state = states.trained(model, make, steps=int(trained))
    state.extra["epoch"] = seed
    return state


def saved(url: Path, kind: str) -> Iterator[CheckpointManager]:
    with CheckpointManager(url, state_dict_type=kind) as manager:
        manager.save(1, state_of(1))
        yield manager


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[CheckpointManager]:
    yield from saved(tmp_path / "run", "sharded")


@pytest.fixture
def run(kind: str, tmp_path: Path) -> Iterator[CheckpointManager]:
    yield from saved(tmp_path / "run", kind)


def damage(manager: CheckpointManager, step: int = 1) -> None:
    """Flip the last bit of the data of the largest tensor of `state_of(1)`."""
    flip(f"{manager.url}/step_{step:08d}", state_of(1).model[2].weight)


def half_loaded(manager: CheckpointManager) -> TrainState:
    """Damage the checkpoint, and return a state that it was partly loaded into."""
    damage(manager)
    state = state_of(2)
    with pytest.raises(CorruptCheckpointError, match="half loaded"):
        manager.load(state)
    return state


def save_is_refused(manager: CheckpointManager, state: TrainState, step: int = 2) -> None:
    latest = manager.latest()
    for call in (manager.save, manager.save_async):
        with pytest.raises(SaveError, match=r"half loaded from .*step_00000001"):
            call(step, state)
    assert manager.latest() == latest


# --- loads with and without a second copy give the same state


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_loads_with_and_without_a_second_copy_agree(tmp_path, kind, atomic, trained):
    state = state_of(2, trained=trained)
    report = check_round_trip(tmp_path, state_of(1), state, kind, atomic=atomic)
    weights = sum(tensor.nbytes for tensor in state.model.state_dict().values())
    assert report.held == atomic * weights * (3 if trained else 1)  # plus two moments of each


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_load_reads_into_the_memory_of_live_tensors(sharded, dtype):
    state = state_of(2)
    state.model.to(dtype)

    def places() -> list[int]:
        moments = [state.optimizer.state[p]["exp_avg"] for p in state.model.parameters()]
        return [tensor.data_ptr() for tensor in [*state.model.parameters(), *moments]]

    before = places()
    sharded.load(state, convert_dtype=dtype is torch.float64)
    assert places() == before
    state.model.float()
    assert bits(state) == bits(state_of(1))


# --- a load that fails


@pytest.mark.parametrize("verify", [True, "read"])
def test_damage_is_found_before_anything_changes_with_atomic(run, verify):
    damage(run)
    state = state_of(2)
    check_misfit(run.url, state, r"model\.2\.weight", error=IntegrityError, atomic=True, verify=verify)
    run.save(2, state)


@pytest.mark.parametrize("verify", [True, "read", False])
@pytest.mark.parametrize("harm", ["truncated", "missing"])
def test_a_short_or_missing_file_is_found_before_any_change(sharded, harm, verify):
    (file,) = Path(sharded.url).rglob("*.distcp")
    os.truncate(file, file.stat().st_size // 2) if harm == "truncated" else file.unlink()
    check_misfit(sharded.url, state_of(2), file.name, error=CorruptCheckpointError, verify=verify)


def test_damage_found_in_reading_leaves_a_state_that_save_refuses(sharded, tmp_path):
    good = save(tmp_path / "good", state_of(1)) + "/step_00000001"
    state = half_loaded(sharded)
    save_is_refused(sharded, state)
    sharded.load(TrainState(model=state.model), optimizer="skip", which=good)  # another view of the same model
    save_is_refused(sharded, state)
    assert sharded.load(state, good) is not None
    assert bits(state) == bits(state_of(1))
    sharded.save(2, state)


@pytest.mark.parametrize("options", [{}, {"optimizer": "skip"}])
def test_a_fallback_completes_a_half_loaded_state(sharded, options):
    sharded.save(2, state_of(1))
    damage(sharded, 2)
    state = state_of(2)
    report = sharded.load(state, fallback="previous", **options)
    assert report is not None and report.step == 1 and not state.half_loaded
    assert options or bits(state) == bits(state_of(1))
    sharded.save(3, state)


def test_a_fallback_that_lacks_tensors_leaves_the_state_half_loaded(tmp_path):
    model = state_of(1).model
    state = TrainState(model=model, rng=False)
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, TrainState(model=nn.Sequential(model[0]), rng=False))
        manager.save(1, state)
        damage(manager)
        report = manager.load(state, fallback="previous", strict=False)
        assert report is not None and report.missing and report.step == 0
        assert state.half_loaded.endswith("step_00000001")


# --- a half-loaded model is refused in every TrainState


class Refuses(Kept):
    """Refuses every state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("epochs")


def test_the_objects_of_a_half_loaded_state_are_not_saved_in_another_one(run):
    state = half_loaded(run)
    wrapped: Any = torch.compile(state.model)
    for other in (
        TrainState(model=state.model),
        TrainState(model=wrapped),
        TrainState(model={"a": nn.Linear(2, 2), "b": state.model[3]}),
        TrainState(model=state_of(3).model, optimizer=None, extra={"old": state.optimizer}),
    ):
        save_is_refused(run, other)
    run.save(2, state_of(3))
    run.load(TrainState(model=state.model), 2, optimizer="skip")
    run.save(3, TrainState(model=wrapped))
    save_is_refused(run, TrainState(model=state.model, optimizer=state.optimizer), 4)
    TrainState(model=state.model, optimizer=state.optimizer).half_loaded = ""  # the user's own decision
    run.save(4, TrainState(model=state.model, optimizer=state.optimizer))


@pytest.mark.parametrize("atomic", [True, False])
def test_an_object_that_refuses_its_state_leaves_the_state_half_loaded(tmp_path, atomic):
    source, state = state_of(1), state_of(2)
    source.extra, state.extra = ({"first": number, "second": Refuses(1)} for number in (1, 2))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, source)
        before = bits(state.model)
        with pytest.raises(RankFailedError, match=r"(?s)epochs.*half loaded"):
            manager.load(state, atomic=atomic)
        assert state.extra["first"] == 1
        assert (bits(state.model) == before) is atomic
        save_is_refused(manager, state)


def test_a_damaged_optimizer_that_was_deferred_is_not_saved(sharded):
    state = state_of(2)
    report = sharded.load(state, optimizer="deferred")
    flip(sharded.url, state_of(1).optimizer.state_dict()["state"][4]["exp_avg"])
    assert report is not None and report.deferred is not None
    with pytest.raises(CorruptCheckpointError, match="half loaded"):
        report.deferred.apply()
    save_is_refused(sharded, TrainState(model=state.model, optimizer=state.optimizer))


@pytest.mark.parametrize(
    ("kind", "fault"), [("sharded", "damage"), ("local", "damage"), ("sharded", "while tensors are set")]
)
@on_ranks(2)
def test_a_load_that_fails_halfway_on_one_rank_leaves_every_rank_half_loaded(tmp_path, kind, fault):
    job, damaged = jobs.make("1d"), fault == "damage"
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager, pytest.MonkeyPatch.context() as patch:
        manager.save(1, job.state())
        if dist.get_rank() == 1 and damaged:
            flip(tmp_path, next(p for n, p in job.model.named_parameters() if n.endswith("up.weight")).to_local())
        elif dist.get_rank() == 1:
            patch.setattr(apply, "apply_optimizer", Refuses(1).load_state_dict)
        dist.barrier()
        state = job.state()
        assert "half loaded" in on_all(refusal(lambda: manager.load(state, atomic=not damaged)))
        for refused in (state, job.state()):
            assert "half loaded" in on_all(refusal(lambda refused=refused: manager.save(2, refused)))


# --- memory limits


@pytest.mark.parametrize(("limit", "free", "ranks", "refused"), [
    (9000, 1 << 30, 1, True), (None, 9000, 1, True), (None, 100_000, 16, True),
    ("51kB", 0, 1, False), (None, 51_000, 1, False), (None, None, 1, False),
])  # fmt: skip
def test_a_second_copy_above_the_memory_limit_is_refused_before_anything_is_read(
    sharded, monkeypatch, limit, free, ranks, refused
):
    monkeypatch.setattr(read, "free_memory", lambda: free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    state = state_of(2)
    if refused:
        damage(sharded)  # damage that is found while reading
        said = r"atomic=True needs 50\.7 kB .* this rank's state, .*nothing was loaded"
        check_misfit(sharded.url, state, said, error=LoadError, atomic=True, max_memory=limit)
    else:
        sharded.load(state, atomic=True, max_memory=limit)
        assert bits(state) == bits(state_of(1))


@measures_memory
def test_a_default_load_needs_no_second_copy(tmp_path):
    model = nn.Linear(4096, 12288, bias=False)  # 192 MiB
    nn.init.ones_(model.weight)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainState(model=model))
        nn.init.zeros_(model.weight)
        assert memory_of(lambda: manager.load(TrainState(model=model))) < 64 << 20
    assert bool((model.weight == 1).all())


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_limit_of_a_container_counts(version, tmp_path, monkeypatch):
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


# --- what a load reads and checks: every slice by default, or only what this rank needs

ROWS, COLUMNS = 3 << 10, 1 << 10


def weight_of(weight: torch.Tensor) -> TrainState:
    return TrainState(model=torch.nn.ParameterDict({"weight": weight}), rng=False)


def whole() -> torch.Tensor:
    return torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)


def returned() -> int:
    """Return the bytes that read calls of this process have returned."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_a_save_does_not_read_its_own_files(tmp_path, kind):
    saved = weight_of(whole())
    with CheckpointManager(tmp_path, state_dict_type=kind) as manager:
        manager.save(1, saved)  # imports also read files
        before = returned()
        manager.save(2, saved)
        assert returned() - before < ROWS * COLUMNS * 4 / 50


def load_rows(url: str, verify: Any) -> tuple[float, bool]:
    """Return (bytes read divided by the bytes of this rank's rows, whether the rows are right)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = weight_of(distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, (Shard(0),), src_data_rank=None))
    with CheckpointManager(url) as manager:
        manager.load(rows, verify=verify)  # imports also read files
        before = returned()
        manager.load(rows, verify=verify)
        read = returned() - before
    local = rows.model["weight"].to_local()
    expected = whole().tensor_split(mesh.size())[dist.get_rank()]
    return read / local.untyped_storage().nbytes(), torch.equal(local, expected)


@pytest.mark.parametrize("verify", ["read", False, True])
def test_ranks_read_only_their_rows_or_check_each_slice_once(ranks, tmp_path, verify):
    save(tmp_path, weight_of(whole()))
    ratios, right = zip(*ranks.run(load_rows, 3, str(tmp_path), verify), strict=True)
    assert all(right)
    if verify is True:
        assert 3 + 3 <= sum(ratios) <= 1.05 * (3 + 3)  # the rows of all ranks, and the whole slice once by one of them
    else:
        assert 1.0 <= min(ratios) <= max(ratios) <= 1.05


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("sizes", [(1 << 10, 3 << 19), (3 << 19, 1 << 10), (64, 32)])
def test_a_truncated_file_names_a_tensor_that_lacks_bytes(tmp_path, sizes, atomic):
    def state(value: float) -> TrainState:
        model = torch.nn.ParameterDict({f"of{size}": torch.full((size,), value) for size in sizes})
        return TrainState(model=model, rng=False)

    save(tmp_path, state(1.0))
    catalog = open_catalog(open_store(str(tmp_path / "step_00000001")))
    slices = {name: entry.slices[0] for name, entry in catalog.tensors.items()}
    last = max(slices, key=lambda name: slices[name].start)
    (file,) = tmp_path.glob("step_*/*.distcp")
    os.truncate(file, slices[last].start + 8)
    check_misfit(tmp_path, state(0.0), f"'{last}'", error=IncompleteCheckpointError, atomic=atomic)
