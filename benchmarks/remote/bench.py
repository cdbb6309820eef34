"""Compare saves and loads on a real S3 server with torch's FsspecWriter and FsspecReader in the same run.

    python benchmarks/remote/bench.py [--server rclone|moto] [--mb 256] [--tensors 200] [--rounds 3] [--no-etags]
                                      [--latency MS] [--rate MB/S]

`--no-etags` stops rclone from computing ETags. By default rclone reads a whole file for each listing that contains it;
real stores keep the ETag from the put.

The server runs in a separate process, and so does the proxy that adds latency (each way) and limits the rate of each
connection. Prints one JSON line per round with the seconds of both sides and their ratios; the best of all rounds; the
number of requests, counted by another proxy in a separate run; and by how much the memory of a new process grows
during one save or load.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed.checkpoint as dcp

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.storage import open_store
from ckptkit.storage.store import ReadInto
from tests.storage import servers
from tests.storage.proxy import proxy_of

Options = dict[str, Any]
_PIECE = 8 << 20  # bytes that a bare get reads per request


class Holder(torch.nn.Module):
    """A model whose parameters have unequal sizes."""

    def __init__(self, megabytes: int, count: int) -> None:
        super().__init__()
        big = max(1, count // 10)
        small = 4096
        each = (megabytes * (1 << 20) // 4 - (count - big) * small) // big
        for i in range(count):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.randn(each if i < big else small)))


# --- servers


@contextlib.contextmanager
def moto() -> Iterator[Options]:
    """Run moto in a separate process."""
    port = servers.free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        servers.wait_for(f"http://127.0.0.1:{port}", process, 60.0)
        yield {"endpoint_url": f"http://127.0.0.1:{port}", "key": servers.KEY, "secret": servers.SECRET}
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def serve(folder: Path, server: str, *, etags: bool = True) -> Iterator[Options]:
    """Start a server and create a bucket."""
    (folder / "bench").mkdir()
    if server == "gcs":
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # read when gcsfs is imported
        started = servers.fake_gcs()
    else:
        started = servers.rclone(folder, *([] if etags else ["--etag-hash="])) if server == "rclone" else moto()
    with started as options:
        if server != "rclone":
            open_store(f"{'gs' if server == 'gcs' else 's3'}://bench", storage_options=options).fs.mkdir("bench")
        yield dict(options)


@contextlib.contextmanager
def far_away(options: Options, milliseconds: float, rate: float) -> Iterator[Options]:
    """Run a proxy in front of the server that adds latency and limits each connection to `rate` MB per second."""
    if not milliseconds and not rate:
        yield options
        return
    port = options["endpoint_url"].rpartition(":")[2]
    script = str(Path(__file__).with_name("latency.py"))
    command = [sys.executable, script, port, str(milliseconds), str(rate or 1e6)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield {**options, "endpoint_url": f"http://127.0.0.1:{process.stdout.readline().strip()}"}
    finally:
        process.kill()
        process.wait()


# --- contestants


def theirs(url: str, options: Options, model: Holder) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return torch's save and load, each with its own connection."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    fresh = {**options, "skip_instance_cache": True}

    def save() -> None:
        dcp.save({"model": model.state_dict()}, storage_writer=FsspecWriter(url, **fresh))

    def load() -> None:
        dcp.load({"model": model.state_dict()}, storage_reader=FsspecReader(url, **fresh))

    return save, load


def ours(url: str, options: Options, model: Holder, **how: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return our save and load, each with its own manager, lease and connection; `how`: options of load."""
    state = TrainState(model=model)

    def save() -> None:
        with CheckpointManager(url, storage_options=options) as manager:
            manager.save(1, state)

    def load() -> None:
        with CheckpointManager(url, storage_options=options) as manager:
            manager.load(state, **how)

    return save, load


# --- measuring


def rss() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@contextlib.contextmanager
def peak(result: list[float]) -> Iterator[None]:
    """Append the growth of resident memory during the block, in MB."""
    stop, start, top = threading.Event(), rss(), [rss()]

    def watch() -> None:
        while not stop.wait(0.005):
            top[0] = max(top[0], rss())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        result.append((max(top[0], rss()) - start) / 1e6)


def timed(function: Callable[[], None]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def one_round(turn: int, options: Options, model: Holder) -> dict[str, float]:
    their_save, their_load = theirs(f"s3://bench/torch{turn}", options, model)
    our_save, our_load = ours(f"s3://bench/ours{turn}", options, model)
    row = {"torch_save_s": timed(their_save), "save_s": timed(our_save)}
    with CheckpointManager(f"s3://bench/ours{turn}", storage_options=options) as manager:
        state = TrainState(model=model)
        manager.save(2, state)
        row["next_save_s"] = timed(lambda: manager.save(3, state) and None)
    row |= {"torch_load_s": timed(their_load), "load_s": timed(our_load)}
    with CheckpointManager(f"s3://bench/ours{turn}", storage_options=options) as manager:
        row["next_load_s"] = timed(lambda: manager.load(state) and None)
    row["bare_get_s"] = timed(bare_get(f"s3://bench/ours{turn}/step_00000003", options))
    return row


def bare_get(url: str, options: Options) -> Callable[[], None]:
    """Return a function that reads a checkpoint's tensors into memory, with the same client as a load."""
    store = open_store(url, storage_options=options)
    reads = []
    for file in store.list(recursive=True):
        if file.path.endswith(".distcp"):
            memory = memoryview(bytearray(os.urandom(1) * file.size))
            starts = range(0, file.size, _PIECE)
            reads += [ReadInto(file.path, start, memory[start : start + _PIECE]) for start in starts]
    return lambda: store.read_many(reads)


def memory(options: Options, model: Holder) -> dict[str, float]:
    """Return the memory growth of each save and load, each in a new child process."""
    jobs: dict[str, Callable[[], None]] = {}
    for name, make in (("torch", theirs), ("ckptkit", ours)):
        jobs[f"{name}_save"], jobs[f"{name}_load"] = make(f"s3://bench/memory-{name}", options, model)
    for verb, how in LOADS.items():
        jobs[f"ckptkit_{verb}"] = ours("s3://bench/memory-ckptkit", options, model, **how)[1]
    return {f"{name}_growth_mb": _growth(job) for name, job in jobs.items()}


def _growth(job: Callable[[], None]) -> float:
    import multiprocessing

    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def work() -> None:
        grown: list[float] = []
        with peak(grown):
            job()
        answers.put(grown[0])
        os._exit(0)

    child = context.Process(target=work)
    child.start()
    found: float = answers.get()
    child.join()
    return found


LOADS: dict[str, dict[str, Any]] = {"load_atomic": {"atomic": True}}


def requests(options: Options, model: Holder) -> dict[str, float]:
    """Return the number of requests of each save and load. "next" is a later save of the same manager."""
    counts: dict[str, float] = {}
    with proxy_of(options["endpoint_url"]) as proxy:
        via = {**options, "endpoint_url": proxy.url}
        for name, make in (("torch", theirs), ("ckptkit", ours)):
            for verb, function in zip(("save", "load"), make(f"s3://bench/counted-{name}", via, model), strict=True):
                proxy.clear()
                function()
                counts[f"{name}_{verb}_requests"] = proxy.count
        for verb, how in LOADS.items():
            proxy.clear()
            ours("s3://bench/counted-ckptkit", via, model, **how)[1]()
            counts[f"ckptkit_{verb}_requests"] = proxy.count
        state = TrainState(model=model)
        with CheckpointManager("s3://bench/counted-ckptkit", storage_options=via) as manager:
            manager.save(2, state)
            proxy.clear()
            manager.save(3, state)
            counts["ckptkit_next_save_requests"] = proxy.count
    return counts


def signed_puts(options: Options, megabytes: int) -> Callable[[], None]:
    """Return a function that sends plain presigned puts of as many bytes, six at once: the minimum for any client."""
    import http.client
    from concurrent.futures import ThreadPoolExecutor

    signing = {**options, "config_kwargs": {"signature_version": "s3v4"}}
    fs = open_store("s3://bench/floor", storage_options=signing).fs
    urls = [urlsplit(fs.url(f"bench/floor/{number}", client_method="put_object")) for number in range(6)]
    body = os.urandom((megabytes << 20) // 6)

    def put(url: SplitResult) -> None:
        connection = http.client.HTTPConnection(str(url.hostname), url.port)
        connection.request("PUT", f"{url.path}?{url.query}", body=body)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(answer.read())
        connection.close()

    def send() -> None:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(put, urls))

    return send


def floor(options: Options, megabytes: int) -> dict[str, float]:
    return {"floor_s": timed(signed_puts(options, megabytes))}


def ratios_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the best of all rounds, and our times divided by the peer's."""
    best = {name: min(row[name] for row in rows) for name in rows[0]}
    return {
        "best_of": len(rows),
        **best,
        "save_ratio": best["torch_save_s"] / best["save_s"],
        "next_save_ratio": best["torch_save_s"] / best["next_save_s"],
        "load_ratio": best["torch_load_s"] / best["load_s"],
        "load_over_bare_get": best["load_s"] / best["bare_get_s"],
        "next_load_over_bare_get": best["next_load_s"] / best["bare_get_s"],
    }


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the server, the network and the saved state."""
    parser.add_argument("--server", choices=["rclone", "moto"], default="rclone")
    parser.add_argument("--no-etags", dest="etags", action="store_false")
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.0, help="milliseconds, each way")
    parser.add_argument("--rate", type=float, default=0.0, help="maximum MB/s of one connection; 0: no limit")


def main() -> None:
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    parser.add_argument("--only-time", action="store_true")
    parser.add_argument(
        "--fresh", action="store_true", help="one save and one load in a fresh process, with CPU seconds"
    )
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model = Holder(args.mb, args.tensors)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder, contextlib.ExitStack() as stack:
        near = stack.enter_context(serve(Path(folder), args.server, etags=args.etags))
        if args.fresh:
            from benchmarks.remote.fresh import run

            far = stack.enter_context(far_away(near, args.latency, args.rate))
            run(near, far, model, args.rounds, show)
            return
        if not args.only_time:
            show(memory(near, model))
            show(requests(near, model))
        options = stack.enter_context(far_away(near, args.latency, args.rate))
        rows = [show(one_round(turn, options, model) | floor(options, args.mb)) for turn in range(args.rounds)]
    show(ratios_of(rows))


def show(row: dict[str, float]) -> dict[str, float]:
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    return row


if __name__ == "__main__":
    main()
