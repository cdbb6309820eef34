"""Replicas on load: the same bytes are read once, by one rank each, and sent to the others."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard

from ckptkit.checkpoint.load import checkpoint as load_module
from ckptkit.checkpoint.load import shared_reads
from ckptkit.checkpoint.load.shared_reads import groups_of
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CorruptCheckpointError, RankFailedError, UsageError
from tests.checkpoint import jobs
from tests.ranks import RankError, run_ranks
from tests.storage.servers import moto

KINDS = (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64, torch.uint8)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of every kind: small, large (two above the packing limit), empty, scalar, and column-major."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for number, dtype in enumerate(KINDS):
        for size in ((5, 3), (), (0, 2), (128, 129)):
            raw = torch.randint(0, 2, (*size, dtype.itemsize), dtype=torch.uint8, generator=generator)
            found[f"t{number}.{'x'.join(map(str, size))}"] = raw.view(dtype).squeeze(-1)
    found["large"] = torch.randn(700, 1000, generator=generator)
    found["larger"] = torch.randn(1400, 500, generator=generator).t()
    return found


def raw(found: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


def save_plain(url: str) -> None:
    with CheckpointManager(url) as manager:
        manager.save(1, TrainState(extra={"t": tensors(1)}, rng=False))


class Held(torch.nn.Module):
    """Buffers, which a load fills in place."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        for name, tensor in tensors(seed).items():
            self.register_buffer(name.replace(".", "_"), tensor)


def save_held(url: str) -> None:
    with CheckpointManager(url) as manager:
        manager.save(1, TrainState(model=Held(1), rng=False))


def load_held(url: str, options: dict[str, Any]) -> tuple[dict[str, bytes], int, int]:
    module = Held(2)
    with CheckpointManager(url) as manager:
        report = manager.load(TrainState(model=module, rng=False), **options)
    assert report is not None
    return raw(dict(module.named_buffers())), report.nbytes, report.received


@pytest.mark.parametrize("more", [{}, {"atomic": True}], ids=["in_place", "atomic"])
def test_shared_reads_restore_every_kind_of_tensor(ranks: Any, tmp_path: Path, more: dict[str, Any]) -> None:
    ranks.run(save_held, 1, str(tmp_path / "run"))
    expected = raw({name.replace(".", "_"): tensor for name, tensor in tensors(1).items()})
    for found, _, _ in ranks.run(load_held, 3, str(tmp_path / "run"), {"replicas": "broadcast", **more}):
        assert found == expected


def test_each_rank_reads_only_its_share(ranks: Any, tmp_path: Path) -> None:
    ranks.run(save_held, 1, str(tmp_path / "run"))
    shared = ranks.run(load_held, 3, str(tmp_path / "run"), {"replicas": "broadcast"})
    ((_, whole, received),) = ranks.run(load_held, 1, str(tmp_path / "run"), {"replicas": "broadcast"})
    assert received == 0
    assert sum(nbytes for _, nbytes, _ in shared) == whole
    assert all(nbytes < 0.7 * whole for _, nbytes, _ in shared)
    assert all(nbytes + received >= whole for _, nbytes, received in shared)


def test_every_rank_reads_local_files_itself(ranks: Any, tmp_path: Path) -> None:
    ranks.run(save_held, 1, str(tmp_path / "run"))
    for _, nbytes, received in ranks.run(load_held, 2, str(tmp_path / "run"), {}):
        assert nbytes > 4_000_000
        assert received == 0


def save_job(url: str, layout: str) -> Any:
    job = jobs.make(layout, "fp32")
    jobs.seed(5, 0)
    job.data.rank = 0
    job.train(2)
    with CheckpointManager(url) as manager:
        manager.save(2, job.state())
    return jobs.everything(job)


def load_job(url: str, layout: str, storage_options: dict[str, Any] | None, replicas: str) -> tuple[Any, int]:
    job = jobs.make(layout, "fp32", start=7)
    with CheckpointManager(url, storage_options=storage_options) as manager:
        report = manager.load(job.state(), per_rank_on_resize="keep", replicas=replicas)
    assert report is not None
    return jobs.everything(job), report.received


@pytest.mark.parametrize(("layout", "shares"), [("hsdp", True), ("1d", False)])
def test_ranks_with_the_same_shards_share_reads(ranks: Any, tmp_path: Path, layout: str, shares: bool) -> None:
    url = str(tmp_path / "run")
    saved = ranks.run(save_job, 4, url, "1d")[0]
    for loaded, received in ranks.run(load_job, 4, url, layout, None, "broadcast"):
        assert [key for key in saved if saved[key] != loaded.get(key)] == []
        assert bool(received) == shares


def copy_up(url: str, storage_options: dict[str, Any]) -> None:
    with CheckpointManager(url, storage_options=storage_options) as manager:
        manager.save(1, TrainState(model=Held(1), rng=False))


def load_remote(url: str, storage_options: dict[str, Any]) -> tuple[dict[str, bytes], int, int]:
    module = Held(2)
    with CheckpointManager(url, storage_options=storage_options) as manager:
        report = manager.load(TrainState(model=module, rng=False))
    assert report is not None
    return raw(dict(module.named_buffers())), report.nbytes, report.received


def test_from_an_object_store_replicas_are_read_once(ranks: Any) -> None:
    import s3fs

    with moto() as options:
        s3fs.S3FileSystem(**options, skip_instance_cache=True).makedirs("shared", exist_ok=True)
        ranks.run(copy_up, 1, "s3://shared/run", dict(options))
        found = ranks.run(load_remote, 2, "s3://shared/run", dict(options))
    expected = raw({name.replace(".", "_"): tensor for name, tensor in tensors(1).items()})
    assert all(loaded == expected for loaded, _, _ in found)
    assert all(received > 0 for _, _, received in found)


def load_damaged(url: str) -> tuple[str, bool]:
    module = Held(2)
    before = raw(dict(module.named_buffers()))
    try:
        with CheckpointManager(url) as manager:
            manager.load(TrainState(model=module, rng=False), replicas="broadcast", atomic=True)
    except CorruptCheckpointError as error:
        return str(error), raw(dict(module.named_buffers())) == before
    raise AssertionError("a damaged checkpoint was loaded")


def test_damage_in_one_share_fails_all_ranks_and_changes_nothing(ranks: Any, tmp_path: Path) -> None:
    ranks.run(save_held, 1, str(tmp_path / "run"))
    (data,) = (tmp_path / "run").rglob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    answers = ranks.run(load_damaged, 3, str(tmp_path / "run"))
    assert all("large" in text for text, _ in answers)
    assert all(same for _, same in answers)


def die_while_sending(url: str, said: str) -> None:
    if dist.get_rank() == 1:
        load_module.exchange = lambda *args: os._exit(0)  # type: ignore[assignment,misc]
    try:
        with CheckpointManager(url, timeout_s=20) as manager:
            manager.load(TrainState(model=Held(2), rng=False), replicas="broadcast")
    except RankFailedError as error:
        Path(said, str(dist.get_rank())).write_text(str(error))
    os._exit(0)


def test_a_rank_that_dies_while_it_sends_fails_the_others(tmp_path: Path) -> None:
    run_ranks(save_held, 1, str(tmp_path / "run"))
    with pytest.raises(RankError):
        run_ranks(die_while_sending, 3, str(tmp_path / "run"), str(tmp_path))
    assert all("rank 1" in (tmp_path / str(rank)).read_text() for rank in (0, 2))


def write_packed(folder: str) -> None:
    module = torch.nn.ModuleList([torch.nn.Linear(30, 40), torch.nn.Linear(30, 40)])
    writer = dcp.FileSystemWriter(folder, _extensions=[ZStandard()])
    dcp.save({"model": module.state_dict()}, storage_writer=writer)


def load_own_layer(folder: str, run: str) -> bool:
    module = torch.nn.ModuleList([torch.nn.Linear(30, 40), torch.nn.Linear(30, 40)])
    own, wanted = str(dist.get_rank()), dict(module.state_dict())
    dcp.load({"model": wanted}, checkpoint_id=folder)
    expected = {name: tensor.clone() for name, tensor in wanted.items() if name.startswith(own)}
    stage = torch.nn.ModuleDict({own: torch.nn.Linear(30, 40)})
    with CheckpointManager(run) as manager:
        manager.load(TrainState(model=stage, rng=False), folder, strict=False, replicas="broadcast")
    return raw(dict(stage.state_dict())) == raw(expected)


@pytest.mark.filterwarnings("ignore")
def test_compressed_tensors_with_equal_beginnings_are_not_shared(ranks: Any, tmp_path: Path) -> None:
    ranks.run(write_packed, 1, str(tmp_path / "theirs"))
    assert ranks.run(load_own_layer, 2, str(tmp_path / "theirs"), str(tmp_path / "run")) == [True, True]


class Seen(torch.nn.Module):
    """Large tensors of one size; on some ranks the first is column-major, and the values are conjugate views."""

    def __init__(self, value: float, otherwise: bool) -> None:
        super().__init__()
        ones = torch.ones(600, 500, dtype=torch.complex64)
        for number in range(4):
            tensor = (value + number) * ones + 1j * number
            self.register_buffer(f"t{number}", tensor.t().contiguous().t() if otherwise and number % 2 else tensor)
        self.register_buffer("seen", (ones * (value + 1j)).conj() if otherwise else ones * (value + 1j))


def save_seen(url: str) -> None:
    with CheckpointManager(url) as manager:
        manager.save(1, TrainState(model=Seen(1.0, False), rng=False))


def load_seen(url: str) -> bool:
    module = Seen(9.0, dist.get_rank() == 1)
    with CheckpointManager(url, timeout_s=20) as manager:
        manager.load(TrainState(model=module, rng=False), replicas="broadcast")
    saved = dict(Seen(1.0, False).named_buffers())
    return all(torch.equal(tensor.resolve_conj(), saved[name]) for name, tensor in module.named_buffers())


def test_ranks_with_other_memory_layouts_get_the_same_values(ranks: Any, tmp_path: Path) -> None:
    ranks.run(save_seen, 1, str(tmp_path / "run"))
    assert ranks.run(load_seen, 3, str(tmp_path / "run")) == [True, True, True]


def fail_while_others_send(url: str) -> tuple[str, bool]:
    def fail(*args: Any, **more: Any) -> Any:
        raise MemoryError("no room")

    land = shared_reads._Flight.land
    shared_reads._Flight.land = lambda self, timeout_s: land(self, 0.5)  # does not wait long for missing messages
    if dist.get_rank() == 1:
        shared_reads._start = fail
    module = Held(2)
    before = raw(dict(module.named_buffers()))
    with contextlib.ExitStack() as stack:
        manager = CheckpointManager(url, timeout_s=40)
        stack.callback(manager.close)
        with pytest.raises(RankFailedError, match="replicated data") as caught:
            manager.load(TrainState(model=module, rng=False), replicas="broadcast", atomic=True)
    return str(caught.value), raw(dict(module.named_buffers())) == before


def test_a_rank_that_fails_while_others_send_fails_all_and_ends_no_process(tmp_path: Path) -> None:
    run_ranks(save_held, 1, str(tmp_path / "run"))
    found = run_ranks(fail_while_others_send, 2, str(tmp_path / "run"))
    assert all(same for _, same in found)
    assert found[0][0] == found[1][0]


def test_ranks_without_a_signature_do_not_share_reads() -> None:
    assert groups_of([b"a", b"b", b"a", b"", b""]) == [[0, 2], [1], [0, 2], [3], [4]]


def test_a_share_is_sent_to_at_most_63_ranks() -> None:
    found = groups_of([b"a"] * 130)
    assert found[0] == list(range(64))
    assert found[64] == list(range(64, 128))
    assert found[129] == [128, 129]


def test_an_unknown_value_of_replicas_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(str(tmp_path / "run")) as manager, pytest.raises(UsageError, match="replicas='all'"):
        manager.load(TrainState(model=torch.nn.Linear(1, 1)), replicas="all")
