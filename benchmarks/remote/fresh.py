"""Compare the first and the next save and load in a fresh process: torch, DCPWriter and the manager.

    python benchmarks/remote/bench.py --fresh [the options of bench.py]

Each contestant is a forked process that has all modules and no connection. It creates its client, saves (or loads),
and does the same once more with another URL. All use one server and take turns; each round begins with another
contestant. Prints one JSON line per contestant: the best and the median of the seconds of all rounds, the ratio to
torch's best, the number of requests (counted by a proxy in a separate run), and the CPU seconds of client and server
(from /proc/PID/stat) of the best round.

Baselines: `floor` sends plain presigned puts of as many bytes; `puts` does the same with our client; `gets` gets the
saved objects with the client alone.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import s3fs  # noqa: F401  each process has these modules, as a job has
import torch
import torch.distributed.checkpoint as dcp
from fsspec.asyn import sync
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import ckptkit.checkpoint.load.choose
import ckptkit.checkpoint.save.background
import ckptkit.formats.dcp.index
import ckptkit.formats.dcp.planners  # noqa: F401
from ckptkit import DCPReader, DCPWriter
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.storage import open_store
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.private_keys import AttemptStore
from tests.storage.proxy import proxy_of

if TYPE_CHECKING:
    from benchmarks.remote.bench import Holder

Options = dict[str, Any]
Steps = Iterator[None]
"""A generator: the first `next` runs the first save or load, the second `next` the next one."""


# --- contestants: each works when it is advanced


def torch_saves(url: str, options: Options, model: Holder) -> Steps:
    for turn in range(2):
        dcp.save({"model": model.state_dict()}, storage_writer=FsspecWriter(f"{url}/torch{turn}", **options))
        yield


def dcp_saves(url: str, options: Options, model: Holder) -> Steps:
    for turn in range(2):
        writer = DCPWriter(f"{url}/dcp{turn}", storage_options=options)
        dcp.save({"model": model.state_dict()}, storage_writer=writer)
        yield


def signed_saves(url: str, options: Options, model: Holder) -> Steps:
    """Save through DCPWriter with a signed SHA-256 of each body, as over plain HTTP to another machine."""
    signed = {**options, "config_kwargs": {"s3": {"payload_signing_enabled": True}}}
    return dcp_saves(f"{url}/signed", signed, model)


def manager_saves(url: str, options: Options, model: Holder) -> Steps:
    state = TrainState(model=model)
    with CheckpointManager(f"{url}/run", storage_options=options) as manager:
        manager.save(0, state)
        yield
        manager.save(1, state)
        yield


def one_save(url: str, options: Options, model: Holder) -> Steps:
    """Save with a new manager each time. The measured time includes releasing the lease."""
    for turn in range(2):
        with CheckpointManager(f"{url}/one{turn}", storage_options=options) as manager:
            manager.save(0, TrainState(model=model))
        yield


def torch_loads(url: str, options: Options, model: Holder) -> Steps:
    for turn in range(2):
        dcp.load({"model": model.state_dict()}, storage_reader=FsspecReader(f"{url}/torch{turn}", **options))
        yield


def dcp_loads(url: str, options: Options, model: Holder) -> Steps:
    for turn in range(2):
        reader = DCPReader(f"{url}/dcp{turn}", storage_options=options)
        dcp.load({"model": model.state_dict()}, storage_reader=reader)
        yield


def manager_loads(url: str, options: Options, model: Holder) -> Steps:
    state = TrainState(model=model)
    with CheckpointManager(f"{url}/run", storage_options=options) as manager:
        for turn in range(2):
            manager.load(state, turn)
            yield


def floor(url: str, options: Options, model: Holder) -> Steps:
    from benchmarks.remote.bench import signed_puts

    send = signed_puts(options, max(6, sum(p.nbytes for p in model.parameters()) >> 20))
    for _ in range(2):
        send()
        yield


def our_puts(url: str, options: Options, model: Holder) -> Steps:
    """Put the bytes of the tensors as six objects with our client, without digests, index and commit."""
    data = [memoryview(p.detach().view(torch.uint8).numpy()).cast("B") for p in model.parameters()]
    root = open_store(url, storage_options=options)
    assert isinstance(root, RemoteStore)
    store = AttemptStore(root.child("puts"))
    for turn in range(2):
        for number in range(6):
            with store.writer(f"{turn}/{number}") as writer:
                for view in data[number::6]:
                    writer.lend(view, 0, len(view), owner=view)
        store.settle()
        yield


def bare_gets(url: str, options: Options, model: Holder) -> Steps:
    """Get the objects of `dcp_saves` with s3fs's client alone: one request for each object, all at once."""
    other = open_store(url, storage_options={**options, "requester_pays": False})  # creates another client
    listed = [[item.path for item in other.list(f"dcp{turn}") if item.path.endswith(".distcp")] for turn in range(2)]
    return _gets(url, options, listed, sum(p.nbytes for p in model.parameters()))


def _gets(url: str, options: Options, listed: list[list[str]], nbytes: int) -> Steps:
    store = open_store(url, storage_options=options)
    assert isinstance(store, RemoteStore)
    fs = store.fs

    async def get(path: str) -> int:
        bucket, key, _ = fs.split_path(f"{url}/{path}")
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key)
        return len(await answer["Body"].read())

    async def gets(paths: list[str]) -> int:
        return sum(await asyncio.gather(*map(get, paths)))

    for paths in listed:
        assert sync(fs.loop, gets, paths) >= nbytes
        yield


SAVES: dict[str, Callable[[str, Options, Holder], Steps]] = {
    "floor": floor,
    "puts": our_puts,
    "torch_save": torch_saves,
    "dcp_save": dcp_saves,
    "dcp_save_signed": signed_saves,
    "manager_save": manager_saves,
    "one_save": one_save,
}
LOADS = {"gets": bare_gets, "torch_load": torch_loads, "dcp_load": dcp_loads, "manager_load": manager_loads}


# --- measuring


def server_pid(options: Options) -> int:
    """Return the ID of the process that was started with the server's port on its command line."""
    port = options["endpoint_url"].rpartition(":")[2]
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if f"127.0.0.1:{port}" in command or (port in command and "moto.server" in command):
                return int(entry.name)
    raise LookupError(f"nothing was started with port {port}")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def in_child(
    make: Callable[[], Steps], server: int, model: Holder, count: Callable[[], int] = lambda: 0
) -> dict[str, float]:
    """Run both steps in a child process; return the seconds, CPU seconds and requests of each."""
    context = multiprocessing.get_context("fork")
    tensors = [parameter.detach() for parameter in model.parameters()]
    mine, its = context.Pipe()

    def work() -> None:
        for tensor in tensors:
            tensor.mul_(1)  # write to all pages, so that none is shared with the parent
        steps, row = make(), dict[str, float]()
        for which in ("first", "next"):
            mine.send("ready")  # the parent waits for this and notes the count so far
            assert mine.recv() == "go"
            client, at_server, started = time.process_time(), cpu_seconds(server), time.perf_counter()
            next(steps)
            row[f"{which}_s"] = time.perf_counter() - started
            row[f"{which}_client_cpu"] = time.process_time() - client
            row[f"{which}_server_cpu"] = cpu_seconds(server) - at_server
        mine.send("ready")
        assert mine.recv() == "go"
        next(steps, None)  # releases the client
        mine.send(row)

    def worked() -> None:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    child = context.Process(target=worked)
    child.start()
    mine.close()
    counts = []
    while (said := its.recv()) == "ready":
        counts.append(count())
        its.send("go")
    child.join()
    found: dict[str, float] = said
    return found | {"first_requests": counts[1] - counts[0], "next_requests": counts[2] - counts[1]}


def run(near: Options, far: Options, model: Holder, rounds: int, show: Callable[[dict[str, Any]], Any]) -> None:
    """Measure all contestants; the loads read the checkpoints of the first round's saves."""
    server = server_pid(near)
    counted: dict[str, dict[str, float]] = {}
    with proxy_of(near["endpoint_url"]) as proxy:
        via = {**near, "endpoint_url": proxy.url}
        for name, make in {**SAVES, **LOADS}.items():
            if name != "floor":
                steps = in_child(partial(make, "s3://bench/counted", via, model), server, model, lambda: proxy.count)
                counted[name] = {key: value for key, value in steps.items() if key.endswith("requests")}
    for group in (SAVES, LOADS):
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in group}
        for turn in range(rounds):
            names = list(group)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                place = f"s3://bench/fresh{turn}" if group is SAVES else "s3://bench/fresh0"
                rows[name].append(in_child(partial(group[name], place, far, model), server, model))
        base = rows["torch_save" if group is SAVES else "torch_load"]
        for name, found in rows.items():
            line: dict[str, Any] = {"contestant": name, "rounds": rounds}
            for which in ("first", "next"):
                best = min(found, key=lambda row: row[f"{which}_s"])
                line |= {key: value for key, value in best.items() if key.startswith(which) and "requests" not in key}
                line[f"{which}_median_s"] = statistics.median(row[f"{which}_s"] for row in found)
                line[f"{which}_ratio"] = min(row[f"{which}_s"] for row in base) / best[f"{which}_s"]
            show(line | counted.get(name, {}))
