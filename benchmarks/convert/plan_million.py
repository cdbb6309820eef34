"""Plan 1,024 ranks x 1,000 tensors without data; print seconds and peak memory of each stage.

    python benchmarks/convert/plan_million.py [--ranks 1024] [--tensors 1000] [--to-ranks 24] [--vanilla]

The manifest is written to a temporary file first. Then a fresh process reads it, proves coverage, plans the
Hugging Face export and prepares the copy, and plans a DCP checkpoint for other ranks.

`--vanilla` reads a `.metadata` pickled by torch's own classes, next to empty data files of the right sizes: once with
ckptkit and once with torch, each in a separate process.
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
    from ckptkit.formats.own.manifest import Manifest
    from ckptkit.offline.resharding.mesh import Cut, TargetMesh

    names = [f"__{rank}_0.distcp" for rank in range(ranks)]
    cursors = np.zeros(ranks, np.int64)
    entries = {}
    for i in range(tensors):
        shape = (ranks * 8, 1024)
        boxes = TargetMesh(shard=ranks).boxes(shape, Cut())
        nbytes = boxes.sizes.prod(axis=1) * 2
        slices = SliceArray(
            names, boxes.ranks.astype(np.int32), cursors.copy(), nbytes, boxes.offsets, boxes.sizes,
            ranks=boxes.ranks.astype(np.int32), algorithm="xxh3_64", digests=np.arange(ranks, dtype=np.uint64),
        )  # fmt: skip
        cursors += nbytes + 1344
        name = f"model.layers.{i}.weight"
        entries[name] = TensorEntry(name, "bfloat16", shape, slices, fqn=name.removeprefix("model."))
    path.write_bytes(Manifest.of(Catalog(entries, {}, CatalogInfo("ckptkit-sharded"))).to_bytes())


def write_vanilla(folder: Path, ranks: int, tensors: int) -> None:
    """Write the `.metadata` that torch.distributed.checkpoint would write, and data files without data."""
    import pickle

    import torch
    from torch.distributed.checkpoint import metadata as md
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    rows, columns, length = 8, 1024, 8 * 1024 * 2 + 1344
    state: dict[str, md.STORAGE_TYPES] = {}
    storage: dict[md.MetadataIndex, _StorageInfo] = {}
    planner: dict[str, tuple[str, ...]] = {}
    sizes = torch.Size([rows, columns])
    for i in range(tensors):
        fqn = f"layers.{i}.weight"
        chunks = [md.ChunkStorageMetadata(torch.Size([rank * rows, 0]), sizes) for rank in range(ranks)]
        properties = md.TensorProperties(dtype=torch.bfloat16)
        shape = torch.Size([ranks * rows, columns])
        state[f"model.{fqn}"] = md.TensorStorageMetadata(properties, shape, chunks)
        planner[f"model.{fqn}"] = ("model", fqn)
        for rank, chunk in enumerate(chunks):
            index = md.MetadataIndex(f"model.{fqn}", chunk.offsets, rank)
            storage[index] = _StorageInfo(f"__{rank}_0.distcp", i * length, length)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(md.Metadata(state, planner, storage, md.StorageMeta(), "1.0.0"), file)
    for rank in range(ranks):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            file.truncate(tensors * length)


class Laps:
    """Prints the time since the last lap, and the peak memory so far."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    def __call__(self, what: str) -> None:
        now = time.perf_counter()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"  {what:36s} {now - self._started:6.2f} s  peak {peak:5.0f} MB", flush=True)
        self._started = time.perf_counter()


def read_vanilla(folder: Path) -> None:
    lap = Laps()
    from ckptkit.formats.dcp.catalog import open_catalog
    from ckptkit.storage.open import open_store

    lap("imports")
    open_catalog(open_store(str(folder)))
    lap("read .metadata, coverage included")


def unpickle(folder: Path) -> None:
    from ckptkit.formats.pickles.walk import loads

    lap = Laps()
    loads((folder / ".metadata").read_bytes(), file=".metadata", max_bytes=4 << 30)
    lap("of which unpickling")


def read_with_torch(folder: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    lap = Laps()
    FileSystemReader(str(folder)).read_metadata()
    lap("torch: read_metadata, without import")


def read(path: Path, to_ranks: int) -> None:
    lap = Laps()
    from ckptkit.catalog.targets import Target
    from ckptkit.formats.own.manifest import Manifest
    from ckptkit.offline.copying.coverage import check_plan
    from ckptkit.offline.copying.plan import Plan
    from ckptkit.offline.copying.runs import prepare
    from ckptkit.offline.export.files import hf_files
    from ckptkit.offline.resharding.rank_files import dcp_files

    lap("imports")
    catalog = Manifest.from_bytes(path.read_bytes()).catalog()
    lap("read the manifest")
    targets = [Target.of(entry) for entry in catalog.tensors.values()]
    files, placements, last = hf_files(catalog, targets, max_shard_size=5 * 10**9, metadata={})
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
    parser.add_argument("--vanilla", action="store_true", help="read torch's .metadata instead of our manifest")
    parser.add_argument("--run", nargs=2, metavar=("STEP", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        step, path = options.run[0], Path(options.run[1])
        steps = {
            "read": lambda: read(path, options.to_ranks),
            "write-vanilla": lambda: write_vanilla(path, options.ranks, options.tensors),
            "read-vanilla": lambda: read_vanilla(path),
            "unpickle": lambda: unpickle(path),
            "torch": lambda: read_with_torch(path),
        }
        steps[step]()
        return
    arguments = [sys.executable, __file__, "--to-ranks", str(options.to_ranks)]
    arguments += ["--ranks", str(options.ranks), "--tensors", str(options.tensors)]
    if options.vanilla:
        with tempfile.TemporaryDirectory() as folder:
            for step in ("write-vanilla", "read-vanilla", "unpickle", "torch"):
                subprocess.run([*arguments, "--run", step, folder], check=True)
                if step == "write-vanilla":
                    size = (Path(folder) / ".metadata").stat().st_size
                    print(f"{options.ranks * options.tensors} slices, .metadata {size / 1e6:.0f} MB", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "manifest.safetensors"
        write(path, options.ranks, options.tensors)
        print(f"{options.ranks * options.tensors} slices, manifest {path.stat().st_size / 1e6:.0f} MB", flush=True)
        subprocess.run([*arguments, "--run", "read", str(path)], check=True)


if __name__ == "__main__":
    main()
