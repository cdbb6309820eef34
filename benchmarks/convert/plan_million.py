"""Planning 1,024 ranks x 1,000 tensors without the data: seconds and peak memory, stage by stage.

    python benchmarks/convert/plan_million.py [--ranks 1024] [--tensors 1000] [--to-ranks 24]

The manifest is written to a temporary file first, then a fresh process reads it, proves coverage, plans the
Hugging Face export and prepares the copy; then it plans a DCP checkpoint for other ranks.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def write(path: Path, ranks: int, tensors: int) -> None:
    from ckptkit.catalog.entry import Catalog, CatalogInfo, SliceArray, TensorEntry
    from ckptkit.formats.manifest import Manifest
    from ckptkit.offline.rank_files import chunked

    names = [f"__{rank}_0.distcp" for rank in range(ranks)]
    cursors = np.zeros(ranks, np.int64)
    entries = {}
    for i in range(tensors):
        shape = (ranks * 8, 1024)
        boxes = chunked(shape, ranks)
        nbytes = boxes.sizes.prod(axis=1) * 2
        slices = SliceArray(
            names, boxes.ranks.astype(np.int32), cursors.copy(), nbytes, boxes.offsets, boxes.sizes,
            ranks=boxes.ranks.astype(np.int32), algorithm="xxh3_64", digests=np.arange(ranks, dtype=np.uint64),
        )  # fmt: skip
        cursors += nbytes + 1344
        name = f"model.layers.{i}.weight"
        entries[name] = TensorEntry(name, "bfloat16", shape, slices, fqn=name.removeprefix("model."))
    path.write_bytes(Manifest.of(Catalog(entries, {}, CatalogInfo("ckptkit-sharded"))).to_bytes())


def read(path: Path, to_ranks: int) -> None:
    started = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal started
        now = time.perf_counter()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"  {what:36s} {now - started:6.2f} s  peak {peak:5.0f} MB", flush=True)
        started = time.perf_counter()

    from ckptkit.catalog.targets import Target
    from ckptkit.formats.manifest import read_manifest
    from ckptkit.offline.coverage import check_plan
    from ckptkit.offline.hf_files import hf_files
    from ckptkit.offline.jobs import prepare
    from ckptkit.offline.plan import Plan
    from ckptkit.offline.rank_files import dcp_files

    lap("imports")
    catalog = read_manifest(path.read_bytes())
    lap("read the manifest")
    targets = [Target.of(entry) for entry in catalog.tensors.values()]
    files, placements, last = hf_files(catalog, targets, max_shard_size=5 * 10**9)
    plan = Plan(catalog, tuple(files), tuple(placements), last)
    lap("lay out Hugging Face files")
    check_plan(plan)
    lap("prove coverage")
    work = prepare(plan, check=True)
    lap(f"prepare {len(work.runs)} runs, {len(work.records)} digests")
    del work
    files, placements, last = dcp_files(catalog, targets, world_size=to_ranks)
    lap(f"lay out DCP for {to_ranks} ranks")
    check_plan(Plan(catalog, tuple(files), tuple(placements), last))
    lap("prove coverage")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=1000)
    parser.add_argument("--to-ranks", type=int, default=24)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read(options.read, options.to_ranks)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "manifest.safetensors"
        write(path, options.ranks, options.tensors)
        print(f"{options.ranks * options.tensors} slices, manifest {path.stat().st_size / 1e6:.0f} MB", flush=True)
        arguments = [sys.executable, __file__, "--read", str(path), "--to-ranks", str(options.to_ranks)]
        subprocess.run(arguments, check=True)


if __name__ == "__main__":
    main()
