"""s3:// does what a path does: saves, rotation, resuming at another world size, and every command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from ckptkit import DCPReader, DCPWriter
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.formats.own.record import CommitRecord, record_path, step_name
from ckptkit.offline.convert import convert
from ckptkit.offline.diff import diff
from ckptkit.offline.reshard import reshard
from ckptkit.offline.verify import verify
from ckptkit.storage import open_store
from ckptkit.storage.listing import snapshot
from ckptkit.storage.store import ReadInto
from tests.checkpoint import states
from tests.remote.runs import Options, full, run_cli, same, state_of
from tests.storage import servers
from tests.storage.proxy import Proxy


def saved(url: str, options: Options) -> tuple[list[int], dict[str, torch.Tensor]]:
    state = state_of(3)
    with CheckpointManager(url, retention=RetentionPolicy(max_num=2), storage_options=options) as manager:
        manager.save(1, state)
        manager.save_async(2, state).result()
        manager.save(3, state, metrics={"loss": 0.5})
        steps = [record.step for record in manager.list()]
    return steps, full(state)


def loaded(url: str, options: Options) -> tuple[int | None, dict[str, torch.Tensor]]:
    state = state_of(99)
    with CheckpointManager(url, storage_options=options) as manager:
        report = manager.load(state)
        assert report is not None
        return manager.latest(), full(state)


def test_a_run_on_s3_saves_rotates_and_resumes_at_other_world_sizes(ranks: Any, url: str, s3: Options) -> None:
    answers = ranks.run(saved, 2, url, s3)
    assert answers[0][0] == [2, 3]
    for world_size in (3, 1):
        for latest, weights in ranks.run(loaded, world_size, url, s3):
            assert latest == 3 and same(weights, answers[0][1])
    assert open_store(url, storage_options=s3).unfinished_uploads() == []


@pytest.fixture(scope="module")
def source(zoo: Path) -> str:
    return str(zoo / "dcp_fsdp2_uneven_w4" / "ckpt")


def test_conversions_between_s3_and_s3_make_no_local_file(
    source: str, url: str, s3: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    convert(source, f"{url}/dcp", to="dcp", world_size=2, storage_options=s3)
    convert(f"{url}/dcp", f"{url}/hf", verify=True, storage_options=s3)
    reshard(f"{url}/dcp", f"{url}/three", world_size=3, storage_options=s3)
    assert verify(f"{url}/three", storage_options=s3).ok
    assert not diff(f"{url}/dcp", f"{url}/three", storage_options=s3).differs
    assert list(tmp_path.iterdir()) == []


def test_progress_names_the_uploaded_file_and_ends_at_the_total(source: str, url: str, s3: Options) -> None:
    seen: list[tuple[int, int, str]] = []
    there: list[set[str]] = []

    def progress(done: int, total: int, what: str) -> None:
        seen.append((done, total, what))
        if done == total and not there:
            there.append({item.path for item in open_store(f"{url}/dcp", storage_options=s3).list()})

    convert(source, f"{url}/dcp", to="dcp", world_size=2, storage_options=s3, progress=progress)
    shards = {path for path in there[0] if path.endswith(".distcp")}
    assert len(shards) == 2 and shards <= {what for _, _, what in seen}
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][0] == seen[-1][1]


def test_commands_take_storage_options_or_the_environment(
    url: str, s3: Options, monkeypatch: pytest.MonkeyPatch, ranks: Any, source: str
) -> None:
    ranks.run(saved, 1, url, s3)
    code, text = run_cli("ls", url, "--json", options=s3)
    assert code == 0 and [item["step"] for item in json.loads(text)["checkpoints"]] == [2, 3]
    for name, value in {**servers.CREDENTIALS, "AWS_ENDPOINT_URL": s3["endpoint_url"]}.items():
        monkeypatch.setenv(name, value)
    for command in (
        ["inspect", f"{url}/step_00000003"],
        ["verify", f"{url}/step_00000003"],
        ["convert", source, f"{url}/hf"],
        ["reshard", f"{url}/step_00000003", f"{url}/two", "--world-size", "2"],
        ["diff", f"{url}/step_00000003", f"{url}/two"],
        ["prune", url, "--max-num", "1"],
    ):
        code, text = run_cli(*command)
        assert code == 0, (command, text)
    code, text = run_cli("verify", f"{url}/step_00000002")
    assert code != 0 and s3["secret"] not in text


# --- how many requests


def elsewhere(options: Options) -> Options:
    """Return the same options for another connection, as in another process."""
    return {**options, "requester_pays": False}


# Upper bounds with a little slack; docs/internals/requests.md states what was counted.


@pytest.fixture
def count(proxy: Proxy) -> Callable[[Callable[[], object]], int]:
    """Returns the number of requests that a call makes."""

    def count(call: Callable[[], object]) -> int:
        proxy.clear()
        call()
        return proxy.count

    return count


Count = Callable[[Callable[[], object]], int]


def test_saves_loads_and_listings_make_few_requests(count: Count, options: Options, url: str) -> None:
    state = TrainState(model=nn.Sequential(*(nn.Linear(8, 8) for _ in range(100))))
    with CheckpointManager(url, retention=RetentionPolicy(max_num=2), storage_options=options) as manager:
        counts = {
            "first save": count(lambda: manager.save(1, state)),
            "save": count(lambda: manager.save(2, state)),
            "save that rotates": count(lambda: manager.save(3, state)),
            "load": count(lambda: manager.load(state)),
            "latest": count(manager.latest),
        }
    with CheckpointManager(url, storage_options=elsewhere(options)) as other:
        counts["latest of a new process"] = count(other.latest)
    most = {"first save": 11, "save": 7, "save that rotates": 18, "load": 11, "latest": 2, "latest of a new process": 4}
    assert all(counts[name] <= most[name] for name in most), counts


@pytest.mark.filterwarnings("ignore")  # torch's, of a process that is alone
def test_saves_make_no_more_requests_than_torchs_writer(count: Count, options: Options, url: str) -> None:
    def saves(writer: Any) -> int:
        return count(lambda: dcp.save(dict(tensors), storage_writer=writer))

    def one_save() -> None:
        states.save(f"{url}/one", state, storage_options=options)

    model = nn.ParameterList([nn.Parameter(torch.rand(1 << 19)) for _ in range(9)])  # 18 MiB: two files
    state, tensors = TrainState(model=model), model.state_dict()
    torchs = saves(FsspecWriter(f"{url}/torch", **options, skip_instance_cache=True))
    assert saves(DCPWriter(f"{url}/dcp", storage_options=options)) <= 5
    reader = DCPReader(f"{url}/dcp", storage_options=options)
    assert count(lambda: dcp.load(dict(tensors), storage_reader=reader)) <= 8
    assert count(one_save) <= torchs
    with CheckpointManager(f"{url}/run", storage_options=options) as manager:
        manager.save(1, state)
        assert count(lambda: manager.save(2, state)) <= 8
    with CheckpointManager(f"{url}/run", storage_options=elsewhere(options)) as manager:
        # A listing, two records, two of the index, the pin, a listing and the record once more (was the pin there
        # before a deletion began? Only then is anything read into the state), and six of the data: three connections
        # per file.
        assert count(lambda: manager.load(state)) <= 14


def test_commands_make_the_documented_number_of_requests(count: Count, options: Options, url: str) -> None:
    model = nn.ParameterList([nn.Parameter(torch.rand(833)) for _ in range(1200)])
    states.save(url, TrainState(model=model), storage_options=options)
    counts = {
        "verify": count(lambda: verify(url, storage_options=options)),
        "convert": count(lambda: convert(url, f"{url}-torch", to="torch", storage_options=options)),
        "reshard": count(lambda: reshard(url, f"{url}-3", world_size=3, storage_options=options)),
        "reshard --verify": count(lambda: reshard(url, f"{url}-4", world_size=3, verify=True, storage_options=options)),
        "diff": count(lambda: diff(url, f"{url}-3", storage_options=options)),
    }
    # The numbers of docs/internals/requests.md plus slack: thread timing decides how many blocks one request reads.
    most = {"verify": 32, "convert": 34, "reshard": 52, "reshard --verify": 54, "diff": 70}
    assert all(counts[name] <= most[name] for name in most), counts


def test_a_save_repeats_no_lookup(proxy: Proxy, options: Options, url: str) -> None:
    state = TrainState(model=nn.Linear(8, 8))
    with CheckpointManager(url, storage_options=options) as manager:
        manager.save(1, state)
        proxy.clear()
        manager.save(2, state)
        kinds = proxy.kinds()
    assert kinds["GET"] == 0, kinds  # nothing that this process has written is read again
    assert kinds["HEAD"] == 0 and kinds["GET uploads"] == 0, kinds
    # One file, three of the index, the record, the hint, and the lease: it says that the attempt has ended.
    assert kinds["LIST"] == 0 and kinds["PUT"] == 7, kinds


def saved_twice(url: str, options: Options) -> None:
    state = state_of(3)
    with CheckpointManager(url, storage_options=options) as manager:
        manager.save(1, state)
        manager.save(2, state)


def test_only_one_rank_lists_the_run(ranks: Any, proxy: Proxy, options: Options, url: str) -> None:
    ranks.run(saved_twice, 3, url, options)
    listed = [path for method, path in proxy.seen if method == "GET" and "list-type" in path]
    assert listed and not any("step_" in path for path in listed), listed
    files = [path for method, path in proxy.seen if method == "PUT" and path.endswith(".distcp")]
    assert len(files) == len(set(files)) == 6


def test_small_tensors_next_to_a_huge_one_make_no_extra_requests(proxy: Proxy, options: Options, url: str) -> None:
    state = TrainState(extra={"huge": torch.zeros(9 << 20)})  # 36 MiB; the states of random numbers are a few KB
    with CheckpointManager(url, storage_options=options) as manager:
        manager.save(1, state)
        files = [path for method, path in proxy.seen if method == "PUT" and path.endswith(".distcp")]
        assert len(files) == 1, files
        state.extra["huge"].fill_(1)
        manager.load(state)
    assert not state.extra["huge"].any()


def test_listing_a_hundred_checkpoints_makes_one_request_each(proxy: Proxy, options: Options, url: str) -> None:
    root = open_store(url, storage_options=options)

    def put(step: int) -> None:
        save_id = f"{step:016x}"
        record = CommitRecord(step=step, save_id=save_id, data=save_id, state_dict_type="sharded", files={})
        root.write(record_path(step_name(step)), record.to_json(), overwrite=True)
        root.write(f"{step_name(step)}/{save_id}/x", b"1", overwrite=True)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(100)))
    proxy.clear()
    assert len(list_checkpoints(root).committed) == 100 and proxy.count <= 2  # what it wrote itself it knows
    other = open_store(url, storage_options=elsewhere(options))
    proxy.clear()
    assert len(list_checkpoints(other).committed) == 100 and proxy.count <= 104
    proxy.clear()
    assert len(list_checkpoints(other).committed) == 100 and proxy.count <= 2


def test_an_object_replaced_by_another_process_is_read_again(s3: Options, url: str) -> None:
    mine, theirs = open_store(url, storage_options=s3), open_store(url, storage_options=elsewhere(s3))
    mine.write("a", b"1")
    assert snapshot(mine).read("a") == b"1"
    theirs.write("a", b"2", overwrite=True)
    assert snapshot(mine).read("a") == b"2"


def test_many_small_ranges_make_few_requests(proxy: Proxy, options: Options, url: str) -> None:
    store = open_store(url, storage_options=options)
    data = os.urandom(4 << 20)
    store.write("x", data)
    proxy.clear()
    views = [bytearray(100) for _ in range(1000)]
    store.read_many([ReadInto("x", i * 4000, memoryview(view)) for i, view in enumerate(views)])
    assert proxy.count == 1 and all(bytes(v) == data[i * 4000 :][:100] for i, v in enumerate(views))


def test_adjacent_views_share_requests(proxy: Proxy, options: Options, url: str) -> None:
    store = open_store(url, storage_options=options)
    data = os.urandom(40 << 20)
    with store.writer("x") as writer:
        writer.write(data)
    proxy.clear()
    views = [bytearray(10 << 20) for _ in range(4)]
    store.read_many([ReadInto("x", i * (10 << 20), memoryview(view)) for i, view in enumerate(views)])
    assert proxy.count == 2 and b"".join(views) == data  # of 36 MiB at most, wherever a view ends


def test_loading_a_thousand_tensors_makes_few_requests(proxy: Proxy, options: Options, url: str) -> None:
    model = nn.Module()
    for i in range(1000):
        model.register_parameter(f"p{i}", nn.Parameter(torch.full((16384,), float(i))))
    state = TrainState(model=model)
    with CheckpointManager(url, storage_options=options) as manager:
        manager.save(1, state)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        proxy.clear()
        manager.load(state)
        loading = proxy.kinds()
    assert all(bool((p == i).all()) for i, p in enumerate(model.parameters()))
    # 64 MiB of data; the record, the manifest and the pin around it
    assert sum(loading.values()) <= 20, loading
