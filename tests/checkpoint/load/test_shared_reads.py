"""Replicas on load: the same bytes are read once, by one rank each, and sent to the others."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

from ckptkit import CheckpointManager, TrainState
from ckptkit.checkpoint.load import checkpoint as load_module
from ckptkit.checkpoint.load import shared_reads
from ckptkit.checkpoint.load.shared_reads import groups_of
from ckptkit.errors import CorruptCheckpointError, RankFailedError
from tests.checkpoint import jobs, states
from tests.checkpoint.states import bits
from tests.patches import failing
from tests.ranks import RankError, on_ranks, run_ranks

KINDS = (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64, torch.uint8)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of every kind: small, large (three above the packing limit), empty, scalar, and column-major."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for number, dtype in enumerate(KINDS):
        for size in ((5, 3), (), (0, 2), (128, 129)):
            raw = torch.randint(0, 2, (*size, dtype.itemsize), dtype=torch.uint8, generator=generator)
            found[f"t{number}.{'x'.join(map(str, size))}"] = raw.view(dtype).squeeze(-1)
    found["large"] = torch.randn(700, 1000, generator=generator)
    found["larger"] = torch.randn(1400, 500, generator=generator).t()
    found["complex"] = torch.randn(400, 500, dtype=torch.complex64, generator=generator)
    return found


class Held(torch.nn.Module):
    """Buffers, which a load fills in place. `otherwise`, they are column-major or conjugate views."""

    def __init__(self, seed: int = 2, *, otherwise: bool = False) -> None:
        super().__init__()
        for name, tensor in tensors(seed).items():
            seen = (tensor.conj() if tensor.is_complex() else tensor.t().contiguous().t()) if otherwise else tensor
            self.register_buffer(name.replace(".", "_"), seen)


def values(module: torch.nn.Module) -> dict[str, Any]:
    return {name: bits(tensor.resolve_conj().contiguous()) for name, tensor in module.named_buffers()}


def save_held(url: Path | str, **options: Any) -> None:
    states.save(url, TrainState(model=Held(1), rng=False), **options)


def load(url: Path | str, module: torch.nn.Module, options: dict[str, Any] | None = None, **more: Any) -> Any:
    """Load into `module`; return the report."""
    with CheckpointManager(url, **{"timeout_s": 20, **(options or {})}) as manager:
        return manager.load(TrainState(model=module, rng=False), **more)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a checkpoint of `Held(1)`."""
    save_held(tmp_path / "run")
    return tmp_path / "run"


def numbers_read(url: Path, replicas: str | None) -> tuple[int, int]:
    report = load(url, Held(), **({"replicas": replicas} if replicas else {}))
    return report.nbytes, report.received


@pytest.mark.parametrize("more", [{}, {"atomic": True}], ids=["in_place", "atomic"])
@on_ranks(3)
def test_shared_reads_restore_every_kind_of_tensor(run, more):
    """In place, one of the ranks has its tensors in other memory layouts, and shares no reads."""
    module = Held(otherwise=dist.get_rank() == 1 and not more)
    load(run, module, replicas="broadcast", **more)
    assert values(module) == values(Held(1))


def test_each_rank_reads_only_its_share_on_request(ranks, run):
    shared = ranks.run(numbers_read, 3, run, "broadcast")
    whole, received = numbers_read(run, "broadcast")
    assert received == 0
    assert sum(nbytes for nbytes, _ in shared) == whole
    assert all(nbytes < 0.7 * whole for nbytes, _ in shared)
    assert all(nbytes + received >= whole for nbytes, received in shared)
    assert ranks.run(numbers_read, 2, run, None) == [(whole, 0)] * 2  # by default, ranks read local files themselves


def save_job(url: Path, layout: str) -> Any:
    job = jobs.make(layout, "fp32")
    jobs.seed(5, 0)
    job.data.rank = 0
    job.train(2)
    states.save(url, job.state(), 2)
    return jobs.everything(job)


def load_job(url: Path, layout: str) -> tuple[Any, int]:
    job = jobs.make(layout, "fp32", start=7)
    report = states.load(url, job.state(), per_rank_on_resize="keep", replicas="broadcast")
    return jobs.everything(job), report.received


@pytest.mark.parametrize(("layout", "shares"), [("hsdp", True), ("1d", False)])
def test_ranks_with_the_same_shards_share_reads(ranks, tmp_path, layout, shares):
    saved = ranks.run(save_job, 4, tmp_path, "1d")[0]
    for loaded, received in ranks.run(load_job, 4, tmp_path, layout):
        assert states.different(loaded, saved) == []
        assert bool(received) == shares


@pytest.fixture
def remote(s3: dict[str, Any]) -> dict[str, Any]:
    """Options of an S3 server with a checkpoint of `Held(1)`."""
    save_held("s3://bucket/replicas", storage_options=s3)
    return s3


@on_ranks(2)
def test_from_an_object_store_replicas_are_read_once(remote):
    module = Held()
    report = load("s3://bucket/replicas", module, {"storage_options": remote})
    assert bits(module) == bits(Held(1))
    assert report.received > 0


@pytest.fixture
def damaged(run: Path) -> Path:
    states.flip(run, tensors(1)["large"])
    return run


@on_ranks(3)
def test_damage_in_one_share_fails_all_ranks_and_changes_nothing(damaged):
    live, options = TrainState(model=Held(), rng=False), {"replicas": "broadcast", "atomic": True}
    states.check_misfit(damaged, live, "large", error=CorruptCheckpointError, **options)


def die_while_sending(url: Path, said: Path) -> None:
    if dist.get_rank() == 1:
        load_module.exchange = lambda *args: os._exit(0)  # type: ignore[assignment,misc]
    try:
        load(url, Held(), replicas="broadcast")
    except RankFailedError as error:
        (said / str(dist.get_rank())).write_text(str(error))
    os._exit(0)


def test_a_rank_that_dies_while_it_sends_fails_the_others(run, tmp_path):
    with pytest.raises(RankError):
        run_ranks(die_while_sending, 3, run, tmp_path)
    assert all("rank 1" in (tmp_path / str(rank)).read_text() for rank in (0, 2))


def two_layers() -> torch.nn.Module:
    return torch.nn.ModuleList([torch.nn.Linear(30, 40), torch.nn.Linear(30, 40)])


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    writer = dcp.FileSystemWriter(tmp_path / "theirs", _extensions=[ZStandard()])
    dcp.save({"model": two_layers().state_dict()}, storage_writer=writer, no_dist=True)
    return tmp_path / "theirs"


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_compressed_tensors_with_equal_beginnings_are_not_shared(packed, tmp_path):
    own, wanted = str(dist.get_rank()), dict(two_layers().state_dict())
    dcp.load({"model": wanted}, checkpoint_id=packed)
    expected = {name: tensor.clone() for name, tensor in wanted.items() if name.startswith(own)}
    stage = torch.nn.ModuleDict({own: torch.nn.Linear(30, 40)})
    load(tmp_path / "run", stage, which=str(packed), strict=False, replicas="broadcast")
    assert bits(dict(stage.state_dict())) == bits(expected)


def fail_while_others_send(url: Path) -> str:
    shared_reads.timedelta = lambda seconds: timedelta(seconds=0.5)  # does not wait long for missing messages
    if dist.get_rank() == 1:
        shared_reads._messages = failing(MemoryError("no room"))
    module = Held()
    with pytest.raises(RankFailedError, match="replicated data") as caught:
        load(url, module, {"timeout_s": 40}, replicas="broadcast", atomic=True)
    assert bits(module) == bits(Held())
    return str(caught.value)


def test_a_rank_that_fails_while_others_send_fails_all_and_ends_no_process(run):
    first, second = run_ranks(fail_while_others_send, 2, run)
    assert first == second


def test_a_share_is_sent_to_at_most_63_ranks_and_none_is_shared_without_a_signature():
    assert groups_of([b"a", b"b", b"a", b"", b""]) == [[0, 2], [1], [0, 2], [3], [4]]
    many = groups_of([b"a"] * 130)
    assert [many[0], many[64], many[129]] == [list(range(64)), list(range(64, 128)), [128, 129]]
