"""Writing a sharded state without torch's collectives: each rank its part, rank 0 the index of all parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ckptkit.errors import SaveError
from ckptkit.formats.dcp.files import ROW, Report, Written, write_records
from ckptkit.formats.dcp.records import frame_tensor
from ckptkit.formats.own.columns import Column, pack, pack_texts, unpack, unpack_texts
from ckptkit.formats.own.record import MANIFEST_NAME, FileRecord
from ckptkit.storage.store import Store

if TYPE_CHECKING:
    import torch

    from ckptkit.formats.dcp.index import Kind
    from ckptkit.formats.dcp.plan import ShardedPlan

__all__ = [
    "METADATA_NAME",
    "WrittenFiles",
    "WrittenPart",
    "write_index",
    "write_part",
]

METADATA_NAME = ".metadata"
Gather = Callable[[bytes], "list[bytes] | None"]


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """What one rank wrote.

    Attributes:
        files: Size and digest of each of its files.
        nbytes: Bytes of all its files.
    """

    plan: ShardedPlan
    written: Written

    @property
    def files(self) -> Mapping[str, FileRecord]:
        return self.written.files

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.files.values())

    def to_bytes(self) -> bytes:
        """Return what rank 0 needs to know: no pickle, 40 bytes a slice and 16 for each of its dimensions.

        One table of rows of a fixed width, so that rank 0 joins those of all ranks at once. The names and shapes are
        sent by the lowest of the ranks that have the same.
        """
        plan, written = self.plan, self.written
        count, private = len(plan.slices), plan.keys[plan.shared :]
        rows = np.zeros(len(written.file), ROW)
        rows["key"][:count] = [s.key for s in plan.slices]
        rows["key"][count:] = -1
        rows["file"], rows["start"], rows["length"] = written.file, written.starts, written.lengths
        rows["payload"], rows["digest"] = written.payloads, written.digests
        arrays: dict[str, Column] = {
            **pack_texts([key.name for key in private], "names"),
            **pack_texts(written.paths, "paths"),
            **pack_texts([name for name, _ in plan.objects], "objects"),
            "rows": rows.view(np.uint8),
            "box": np.array([n for s in plan.slices for n in (*s.offsets, *s.sizes)], np.int64),
        }
        if plan.sends_table:
            arrays["table"] = np.frombuffer(plan.table, np.uint8)
        header = {
            "rank": plan.rank,
            "world_size": plan.world_size,
            "table": plan.digest.hex(),
            "private": [key.fields() for key in private],
            "objects": [path for _, path in plan.objects],
            "files": {path: [item.nbytes, item.xxh3_64, item.outlined] for path, item in self.files.items()},
        }
        return pack(arrays, header)


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """A complete sharded state on disk.

    Attributes:
        files: Every file of all ranks, `.metadata` and the manifest included.
        tensors, slices: How many.
        nbytes: Bytes of tensor data, each element once.
    """

    files: Mapping[str, FileRecord]
    tensors: int
    slices: int
    nbytes: int


def write_part(
    plan: ShardedPlan,
    store: Store,
    *,
    tensors: Sequence[torch.Tensor] | None = None,
    sync: bool = True,
    workers: int = 0,
    report: Report | None = None,
    write: Callable[..., Written] = write_records,
) -> WrittenPart:
    """Write this rank's files `__<rank>_<n>.distcp`. No communication.

    Args:
        tensors: Copies of `plan.tensors`, in its order, to write in their place.
        sync: The files and their names are durable on return.
        workers: Files written at once; 0: this rank's share of the cores.
        report: Gets (phase, seconds, bytes).
        write: Stands in for `write_records`: in another process, say.

    Raises:
        NoSpaceError: The storage is full.
        StorageError: A write failed.
        SaveError: `tensors` are not copies of what was planned.
    """
    chosen = plan.tensors if tensors is None else tensors
    if len(chosen) != len(plan.slices):
        raise SaveError(f"{len(chosen)} staged tensors for {len(plan.slices)} planned slices.")
    frames = [frame_tensor(plan.keys[s.key].dtype, s.sizes) for s in plan.slices]
    for frame, tensor, item in zip(frames, chosen, plan.slices, strict=True):
        if tensor.numel() * tensor.element_size() != frame.nbytes:
            raise SaveError(
                f"{plan.keys[item.key].name}: {tensor.numel() * tensor.element_size()} bytes were staged, the plan "
                f"says {frame.nbytes}."
            )
    prefix = f"__{plan.rank}_"
    written = write(store, prefix, frames, chosen, plan.records, workers=workers, sync=sync, report=report)
    return WrittenPart(plan, written)


def write_index(
    parts: Sequence[bytes],
    store: Store,
    *,
    save_id: str = "",
    sync: bool = True,
    extra: Mapping[str, Any] | None = None,
    report: Report | None = None,
    kind: Kind = "ckptkit-sharded",
) -> WrittenFiles:
    """Write `manifest.safetensors` and `.metadata` of what all ranks wrote. Rank 0 alone calls it.

    Args:
        parts: `WrittenPart.to_bytes()` of every rank.
        save_id: Recorded in both files.
        extra: JSON, into the manifest's `info.extra`.
        kind: What the manifest says that this is.

    Raises:
        SaveError: The parts disagree about a tensor, overlap, or leave elements of one uncovered.
    """
    from ckptkit.formats.dcp.index import Index

    started = time.perf_counter()
    index = Index.of(_unpacked(data, i) for i, data in enumerate(parts))
    index.check()
    state, size = xxhash.xxh3_64(), 0
    with store.writer(METADATA_NAME, sync=sync) as writer:  # it appears at the end of the block, after the manifest
        for chunk in index.metadata(store.url, save_id):
            state.update(chunk)
            size += len(chunk)
            writer.write(chunk)
        files = {**index.files, METADATA_NAME: FileRecord(size, state.hexdigest())}
        manifest = index.manifest(files, save_id, extra or {}, kind).to_bytes()
        store.write(MANIFEST_NAME, manifest, sync=sync)
    files[MANIFEST_NAME] = FileRecord(len(manifest), xxhash.xxh3_64_hexdigest(manifest))
    if report is not None:
        report("index", time.perf_counter() - started, size + len(manifest))
    return WrittenFiles(files, index.tensor_count, index.slice_count, index.nbytes)


def _unpacked(data: bytes, rank: int) -> Any:
    from ckptkit.formats.dcp.index import Part

    columns = unpack(data, file=f"the part of rank {rank}")
    texts = {name: unpack_texts(columns, name) for name in ("names", "paths", "objects")}
    return Part(columns, texts["names"], texts["paths"], texts["objects"])
