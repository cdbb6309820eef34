"""Replicated state on load: each rank reads it, or one reads it and broadcasts it. Which is faster here?

    python -m benchmarks.save_load.replicas [--ranks 2 4] [--where /dev/shm /tmp] [--megabytes 256] [--repeat 4]

"read" is `read_sharded` of a plain tensor on every rank, digests on; "broadcast" the same on rank 0, then one
`dist.broadcast` over gloo into the others' tensors. The slowest rank counts; the files are in the page cache.
"""

from __future__ import annotations

import argparse
import shutil
import warnings

import torch
import torch.distributed as dist

from benchmarks.save_load.measure import timed
from tests.ranks import run_ranks


def measure(url: str, megabytes: int, repeat: int) -> tuple[float, float]:
    warnings.simplefilter("ignore")
    from ckptkit.formats.ckptkit import open_manifest
    from ckptkit.formats.dcp_read import read_sharded
    from ckptkit.formats.dcp_write import write_sharded
    from ckptkit.storage import open_store

    store = open_store(url)
    state = {"w": torch.ones(megabytes << 18)}
    if dist.get_rank() == 0:
        write_sharded(state, store, gather=lambda data: [data], all_gather=lambda data: [data], sync=False)
    dist.barrier()
    catalog = open_manifest(store)
    assert catalog is not None

    def broadcast() -> None:
        if dist.get_rank() == 0:
            read_sharded(catalog, store, state)
        dist.broadcast(state["w"], 0)

    both = [(timed(lambda: read_sharded(catalog, store, state))[0], timed(broadcast)[0]) for _ in range(repeat)]
    return min(read for read, _ in both), min(sent for _, sent in both)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.save_load.replicas", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--where", nargs="+", default=["/dev/shm", "/tmp"])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=4)
    options = parser.parse_args()
    for where in options.where:
        for ranks in options.ranks:
            url = f"{where}/ckptkit-replicas"
            read, sent = run_ranks(measure, ranks, url, options.megabytes, options.repeat, timeout=600)[0]
            shutil.rmtree(url, ignore_errors=True)
            print(f"{where}, {ranks} ranks: read {read:.3f} s, broadcast {sent:.3f} s (x{sent / read:.2f})", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
