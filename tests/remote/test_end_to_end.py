"""s3:// does what a path does: saves, rotation, resuming at another world size, and every command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from ckptkit import DCPReader, DCPWriter, TrainState, copy, diff, inspect, reshard
from tests.checkpoint import states
from tests.formats.interop_cases import blank
from tests.offline.exports import write_model
from tests.remote.runs import TWO
from tests.storage.proxy import Proxy, Reply


@pytest.mark.parametrize("folder", ["", "lora_adapter/"])
def test_the_config_of_an_adapter_on_s3_is_found(near, zoo, folder):
    case = zoo / "peft_lora_dcp_full_w2"
    copy(str(case / "ckpt"), near.url, dst_storage_options=near.options)
    config = (case / "EXPECTED_adapter" / "adapter_config.json").read_bytes()
    near.store.write(f"{folder}adapter_config.json", config)
    near.convert(near.beside("hf"))
    assert json.loads(near.beside("hf").objects()["adapter_config.json"])["lora_alpha"] == 16


# --- how many requests
# Upper bounds with a little slack; docs/internals/requests.md states what was counted.


@pytest.fixture
def count(proxy: Proxy) -> Callable[[Callable[[], object]], int]:
    """Returns the number of requests that a call makes."""

    def count(call: Callable[[], object]) -> int:
        proxy.clear()
        call()
        return proxy.count

    return count


SOURCES: dict[str, Callable[[dict[str, Any], Path], object]] = {
    "safetensors": lambda state, place: write_model(place, state),
    "sharded": lambda state, place: reshard(
        write_model(place.with_name("base"), state), str(place / "step_00000001"), world_size=3
    ),
    "torch.pt": lambda state, place: torch.save({"model": state}, place),
    "dcp": lambda state, place: dcp.save(state, checkpoint_id=place, no_dist=True),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", SOURCES)
def test_inspect_reads_only_metadata(proxy, near, far, tmp_path, kind):
    place, answered = tmp_path / kind, list[int]()
    SOURCES[kind]({f"model.layers.{i}.w": torch.full((1024, 1024), float(i)) for i in range(4)}, place)
    near.store.fs.put(str(place), f"{near.url}/{kind}", recursive=place.is_dir())

    def between(handler: Any, body: bytes) -> Reply:
        reply: Reply = handler.forward(body)
        answered.append(len(reply[2]))
        return reply

    proxy.between = between
    found = inspect(f"{far.url}/{kind}", tensors="*", storage_options=far.options).to_json()
    assert sum(tensor["nbytes"] for tensor in found["tensors"]) == 16 << 20 > 20 * sum(answered)


def test_saves_loads_and_listings_make_few_requests(count, proxy, far):
    state = TrainState(model=nn.Sequential(*(nn.Linear(8, 8) for _ in range(100))))
    with far.manager(retention=TWO) as manager:
        counts = {"first save": count(lambda: manager.save(1, state))}
        count(lambda: manager.save(2, state))
        # One file, three of the index, the record, the hint, and the lease: it says that the attempt has ended. Nothing
        # that this process has written is read again.
        assert proxy.kinds() == {"PUT": 7}
        counts["save that rotates"] = count(lambda: manager.save(3, state))
        counts["load"] = count(lambda: manager.load(state))
        counts["latest"] = count(manager.latest)
    with far.elsewhere().manager() as other:
        counts["latest of a new process"] = count(other.latest)
        counts["load of a new process"] = count(lambda: other.load(state))
    most = {"first save": 11, "save that rotates": 18, "load": 11, "latest": 2, "latest of a new process": 4}
    most["load of a new process"] = 9
    assert all(counts[name] <= most[name] for name in most), counts


@pytest.mark.filterwarnings("ignore")  # torch's, of a process that is alone
def test_saves_make_no_more_requests_than_torchs_writer(count, far):
    def saves(writer: Any) -> int:
        return count(lambda: dcp.save(dict(tensors), storage_writer=writer))

    url, options = far.url, far.options
    model = nn.ParameterList([nn.Parameter(torch.rand(1 << 19)) for _ in range(9)])  # 18 MiB: two files
    state, tensors = TrainState(model=model), model.state_dict()
    torchs = saves(FsspecWriter(f"{url}/torch", **options, skip_instance_cache=True))
    assert saves(DCPWriter(f"{url}/dcp", storage_options=options)) <= 5
    with pytest.raises(CheckpointException, match="holds a checkpoint"):
        saves(DCPWriter(f"{url}/dcp", storage_options=options))
    reader, found = DCPReader(f"{url}/dcp", storage_options=options), blank(tensors)
    assert count(lambda: dcp.load(found, storage_reader=reader)) <= 8
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert count(lambda: states.save(f"{url}/one", state, storage_options=options)) <= torchs
    with (far / "run").manager() as manager:
        manager.save(1, state)
        assert count(lambda: manager.save(2, state)) <= 8
    with (far / "run").elsewhere().manager() as manager:
        assert count(lambda: manager.load(state)) <= 14  # eight as in the next test, and three of each data file


def test_commands_make_the_documented_number_of_requests(count, far):
    model = nn.ParameterList([nn.Parameter(torch.rand(833)) for _ in range(1200)])
    states.save(far.url, TrainState(model=model), storage_options=far.options)
    three, four = far.beside("3"), far.beside("4")
    counts = {
        "verify": count(far.verify),
        "convert": count(lambda: far.convert(far.beside("torch"), to="torch")),
        "reshard": count(lambda: far.reshard(three, world_size=3)),
        "reshard --verify": count(lambda: far.reshard(four, world_size=3, verify=True)),
        "diff": count(lambda: diff(far.url, three.url, storage_options=far.options)),
    }
    # The numbers of docs/internals/requests.md plus slack: thread timing decides how many blocks one request reads.
    most = {"verify": 32, "convert": 36, "reshard": 52, "reshard --verify": 54, "diff": 70}
    assert all(counts[name] <= most[name] for name in most), counts


def test_only_one_rank_lists_a_run_that_resumes_at_other_world_sizes(ranks, proxy, far):
    ranks.run(far.save, 2, 1, 2)
    listed = [path for method, path in proxy.seen if method == "GET" and "list-type" in path]
    assert listed and not any("step_" in path for path in listed), listed
    files = [path for method, path in proxy.seen if method == "PUT" and path.endswith(".distcp")]
    assert len(files) == len(set(files)) == 4
    for world_size in (4, 1):  # a mean over three ranks would be rounded
        ranks.run(far.loads, world_size, 2)
