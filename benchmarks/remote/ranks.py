"""Compare saves and loads of several ranks on a real S3 server with torch's FsspecWriter and FsspecReader.

    python benchmarks/remote/ranks.py [--ranks 2] [--server rclone|moto] [--mb 256] [--tensors 200] [--rounds 3]
                                      [--latency MS] [--rate MB/S] [--no-etags] [--replicated]

Each tensor is sharded over all ranks. With --replicated every rank has and loads all tensors: twice by default, and
once with replicas="read" (`load_read_s`, to be compared with `next_load_s`). Times are taken on rank 0 between two
barriers. Prints one JSON line per round, and the best and the median with the ratios.

The first load after a save includes work of the server: if rclone reports ETags, it reads a whole file for each range
request until it knows the file's MD5. torch's saves end with requests after which rclone knows it. `next_load` does
not include this, on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.remote.bench import add_server_options, far_away, serve, show
from tests.ranks import run_ranks

Row = dict[str, float]


def work(options: dict[str, Any], megabytes: int, count: int, rounds: int, replicated: bool) -> list[Row]:
    """Measure all rounds. Every rank must call this."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from ckptkit import DCPReader, DCPWriter
    from ckptkit.checkpoint.manager import CheckpointManager
    from ckptkit.checkpoint.state.train_state import TrainState

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    big = max(1, count // 10)
    each = (megabytes * (1 << 20) // 4 - (count - big) * 4096) // big
    torch.manual_seed(0)
    placed = [Replicate()] if replicated else [Shard(0)]
    tensors = {f"p{i}": distribute_tensor(torch.randn(each if i < big else 4096), mesh, placed) for i in range(count)}
    fresh = {**options, "skip_instance_cache": True}

    def timed(function: Callable[[], Any]) -> float:
        dist.barrier()
        started = time.perf_counter()
        function()
        dist.barrier()
        return time.perf_counter() - started

    def once(turn: int) -> Row:
        url, state = f"s3://bench/ranks{turn}", TrainState(extra={"t": tensors})
        theirs, sharded = f"s3://bench/torch-ranks{turn}", {"t": tensors}
        row = {"torch_save_s": timed(lambda: dcp.save(sharded, storage_writer=FsspecWriter(theirs, **fresh)))}
        manager = CheckpointManager(url, storage_options=options)
        row["save_s"] = timed(lambda: manager.save(1, state))
        row["next_save_s"] = timed(lambda: manager.save(2, state))
        for name, number in (("dcp_save_s", 1), ("dcp_next_save_s", 2)):
            writer = DCPWriter(f"s3://bench/dcp{turn}-{number}", storage_options=options)
            row[name] = timed(lambda writer=writer: dcp.save(sharded, storage_writer=writer))
        for name in ("", "next_"):
            row[f"torch_{name}load_s"] = timed(lambda: dcp.load(sharded, storage_reader=FsspecReader(theirs, **fresh)))
            row[f"{name}load_s"] = timed(lambda: manager.load(state))
            reader = DCPReader(f"s3://bench/dcp{turn}-1", storage_options=options)
            row[f"dcp_{name}load_s"] = timed(lambda reader=reader: dcp.load(sharded, storage_reader=reader))
        if replicated:
            row["load_read_s"] = timed(lambda: manager.load(state, replicas="read"))
        manager.close()
        return row

    return [once(turn) for turn in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replicated", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        near = stack.enter_context(serve(Path(folder), args.server, etags=args.etags))
        options = stack.enter_context(far_away(near, args.latency, args.rate))
        found = run_ranks(work, args.ranks, options, args.mb, args.tensors, args.rounds, args.replicated)
        rows = [show(row) for row in found[0]]
    for name, of_all in (("best", min), ("median", statistics.median)):
        spent = {key: of_all([row[key] for row in rows]) for key in rows[0]}
        show({"ranks": args.ranks, "of": name, "rounds": len(rows), **spent, **_ratios(spent)})


def _ratios(spent: Row) -> Row:
    """Return the ratios of torch's seconds to ours for first and next saves and loads."""
    of_saves = {key: spent["torch_save_s"] / spent[key] for key in spent if key.endswith("save_s")}
    of_loads = {key: spent["torch_load_s"] / spent[key] for key in ("load_s", "dcp_load_s")}
    of_next = {key: spent["torch_next_load_s"] / spent[key] for key in ("next_load_s", "dcp_next_load_s")}
    ratios = {**of_saves, **of_loads, **of_next}
    return {f"{key.removesuffix('_s')}_ratio": ratio for key, ratio in ratios.items() if not key.startswith("torch")}


if __name__ == "__main__":
    main()
