"""Saves and loads on a real S3 server, beside torch's FsspecWriter and FsspecReader in the same run.

    python benchmarks/remote/bench.py [--server rclone|moto] [--mb 256] [--tensors 200] [--rounds 3]

Prints one JSON line a round: seconds of both, ratios, requests (counted by a proxy in a run of its own) and the
growth of memory while saving.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed.checkpoint as dcp

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state import TrainState
from ckptkit.storage import open_store
from tests.storage import servers
from tests.storage.proxy import proxy_of


class Holder(torch.nn.Module):
    """Tensors of unequal sizes, as a model has them."""

    def __init__(self, megabytes: int, count: int) -> None:
        super().__init__()
        big = max(1, count // 10)
        small = 4096
        each = (megabytes * (1 << 20) // 4 - (count - big) * small) // big
        for i in range(count):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.randn(each if i < big else small)))


def rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@contextlib.contextmanager
def peak(result: list[int]) -> Any:
    """Append the growth of resident memory while the block ran."""
    stop, start, top = threading.Event(), rss(), [rss()]

    def watch() -> None:
        while not stop.wait(0.01):
            top[0] = max(top[0], rss())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        result.append(max(top[0], rss()) - start)


def timed(function: Any) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def fsspec_options(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "skip_instance_cache": True}


def theirs(url: str, options: dict[str, Any], model: Holder) -> tuple[Any, Any]:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    def save() -> None:
        dcp.save({"model": model.state_dict()}, storage_writer=FsspecWriter(url, **fsspec_options(options)))

    def load() -> None:
        dcp.load({"model": model.state_dict()}, storage_reader=FsspecReader(url, **fsspec_options(options)))

    return save, load


def ours(url: str, options: dict[str, Any], model: Holder) -> tuple[Any, Any]:
    state = TrainState(model=model)

    def save() -> None:
        with CheckpointManager(url, storage_options=options) as manager:
            manager.save(1, state)

    def load() -> None:
        with CheckpointManager(url, storage_options=options) as manager:
            manager.load(state)

    return save, load


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", choices=["rclone", "moto"], default="rclone")
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model = Holder(args.mb, args.tensors)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder, contextlib.ExitStack() as stack:
        (Path(folder) / "bench").mkdir()
        started = servers.rclone(Path(folder)) if args.server == "rclone" else servers.moto()
        options = dict(stack.enter_context(started))
        if args.server == "moto":
            open_store("s3://bench", storage_options=options).fs.mkdir("bench")
        for turn in range(args.rounds):
            print(json.dumps(one_round(turn, options, model)), flush=True)
        print(json.dumps(requests(options, model)), flush=True)


def one_round(turn: int, options: dict[str, Any], model: Holder) -> dict[str, Any]:
    their_save, their_load = theirs(f"s3://bench/torch{turn}", options, model)
    our_save, our_load = ours(f"s3://bench/ours{turn}", options, model)
    growth: list[int] = []
    row = {"torch_save_s": timed(their_save)}
    with peak(growth):
        row["save_s"] = timed(our_save)
    row["torch_load_s"] = timed(their_load)
    with peak(growth):
        row["load_s"] = timed(our_load)
    row["save_ratio"] = row["torch_save_s"] / row["save_s"]
    row["load_ratio"] = row["torch_load_s"] / row["load_s"]
    row["save_growth_mb"], row["load_growth_mb"] = (nbytes / 1e6 for nbytes in growth)
    return {name: round(value, 3) for name, value in row.items()}


def requests(options: dict[str, Any], model: Holder) -> dict[str, int]:
    counts = {}
    with proxy_of(options["endpoint_url"]) as proxy:
        via = {**options, "endpoint_url": proxy.url}
        for name, (save, load) in {
            "torch": theirs("s3://bench/counted-torch", via, model),
            "ckptkit": ours("s3://bench/counted-ours", via, model),
        }.items():
            for verb, function in (("save", save), ("load", load)):
                proxy.clear()
                function()
                counts[f"{name}_{verb}_requests"] = proxy.count
    return counts


if __name__ == "__main__":
    main()
