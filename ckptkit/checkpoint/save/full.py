"""Saves FULL checkpoints. The files are divided among the ranks, which write in parallel.

The rank that writes a file gathers the file's full tensors, one at a time. It gathers a tensor while it writes the
previous one. The other ranks hold only their own parts of the tensors. Every rank knows the whole plan: files, tensors,
writers, and which rank sends which region of a tensor.
"""

from __future__ import annotations

import json
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.checkpoint.save.stream import LocalSteps, SafetensorsStream, open_stream, phases_of
from ckptkit.checkpoint.state.capture import Captured
from ckptkit.checkpoint.state.local_part import (
    PartView,
    ShardLayout,
    boxes_of,
    check_safetensors,
    part_view,
    this_rank,
)
from ckptkit.digests import signature_of
from ckptkit.errors import SaveError
from ckptkit.formats.dcp.host_bytes import row_major
from ckptkit.formats.dcp.index import PlainSlice, PlannedKey, RankPart, plain_part
from ckptkit.formats.hf.header import INDEX, TensorToWrite, encode_index, split_into_shards
from ckptkit.formats.pickles.tensors import PlacementRecord
from ckptkit.storage.pool import WorkerPool

if TYPE_CHECKING:
    import torch

    from ckptkit.storage.store import Store

_CHUNK_BYTES = 16 << 20  # maximum size of one message


@dataclass(frozen=True, slots=True)
class _Piece:
    """A region of a tensor, and the rank that sends the region.

    `number` is the region's index among the parts that the sending rank has.
    """

    rank: int
    box: Box
    number: int


@dataclass(frozen=True, slots=True)
class _Item(TensorToWrite):
    """A tensor to write, and the pieces of which the tensor consists."""

    key: str
    pieces: tuple[_Piece, ...]


@dataclass(slots=True)
class _File:
    """One safetensors file, and the rank that writes it."""

    path: str
    items: list[_Item]
    writer: int = 0

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


@dataclass(slots=True)
class FullTensors:
    """This rank's plan: the parts of full tensors that it sends, and the files that it writes."""

    rank: int
    world_size: int
    views: dict[str, PartView]
    group: Any  # a gloo group for sending the pieces; None with a single rank
    max_shard_bytes: int
    signature: bytes = b""
    described: bytes = b""
    signatures: tuple[bytes, ...] = ()
    files: list[_File] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        captured: Captured,
        rank: int,
        world_size: int,
        previous: object,
        *,
        group: Any = None,
        max_shard_bytes: int,
    ) -> FullTensors:
        """Return the plan for a captured state. Does not communicate.

        `previous` is the plan of an earlier save. If this rank had the same tensors then, that plan's list of files
        is reused.
        """
        views = {key: part_view(key, tensor) for key, tensor in captured.tensors(aliases=False)}
        check_safetensors(views.values())
        plan = cls(rank, world_size, views, group, max_shard_bytes)
        plan.described = _describe(views.values(), captured)
        plan.signature = signature_of(plan.described)
        if isinstance(previous, FullTensors) and previous.signature == plan.signature:
            plan.signatures, plan.files = previous.signatures, previous.files
        return plan

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return [view.local for view in self.views.values()]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files if file.writer == self.rank)

    @property
    def file_names(self) -> str:
        return "|".join(map(re.escape, [*(file.path for file in self.files), *self.indexes]))

    @property
    def indexes(self) -> dict[str, bytes]:
        """The content of each model's `model.safetensors.index.json`, by path."""
        folders: dict[str, list[tuple[_Item, str]]] = {}
        for file in self.files:
            folder, _, name = file.path.rpartition("/")
            if name.startswith("model-"):
                folders.setdefault(folder, []).extend((item, name) for item in file.items)
        return {
            f"{folder}/{INDEX}".lstrip("/"): encode_index(
                {item.name: name for item, name in held},
                total_size=sum(item.nbytes for item, _ in held),
                total_parameters=sum(math.prod(item.shape) for item, _ in held),
            )
            for folder, held in folders.items()
        }

    def settle(self, signatures: Sequence[bytes], all_gather: Callable[[bytes], list[bytes]]) -> FullTensors:
        known = tuple(signatures)
        if known != self.signatures or not self.files:
            described = [json.loads(zlib.decompress(data)) for data in all_gather(zlib.compress(self.described, 1))]
            self.files = _plan(described, self.world_size, self.max_shard_bytes)
            self.signatures = known
        return self

    def write(self, store: Store, tensors: Sequence[torch.Tensor] | None, *, sync: bool) -> RankPart:
        memory = dict(zip(self.views, self.tensors if tensors is None else tensors, strict=True))
        started = time.perf_counter()
        streams: dict[str, SafetensorsStream] = {}
        attempt = LocalSteps()
        with ExitStack() as stack:
            pool = stack.enter_context(WorkerPool(1, thread_name_prefix="ckptkit-full"))
            for file in self.files:
                if file.writer == self.rank:
                    opening = open_stream(store, file.path, file.items, {"format": "pt"}, sync=sync)
                    if (stream := attempt(partial(stack.enter_context, opening))) is not None:
                        streams[file.path] = stream
            _Transfer(self, memory, streams, pool, attempt).run()
        written = {path: stream.written for path, stream in streams.items()}
        slices = [
            PlainSlice(
                PlannedKey(i.key, i.dtype, i.shape, (), None), Box.whole(i.shape), file.path,
                *written[file.path].tensors[i.name],
            )
            for file in self.files if file.writer == self.rank for i in file.items
        ]  # fmt: skip
        files = {path: found.record for path, found in written.items()}
        phases = phases_of(list(written.values()), time.perf_counter() - started)
        return plain_part(self.world_size, slices, files, phases)


# --- the plan


def _describe(views: Any, captured: Captured) -> bytes:
    """Return a description of this rank's tensors for the other ranks, as JSON.

    Each layout is listed once, and each tensor has the index of its layout.
    """
    layouts: list[Any] = []
    rows = []
    index: dict[ShardLayout, int] = {}
    for view in views:
        layout = -1 if view.layout is None else index.setdefault(view.layout, len(index))
        if layout == len(layouts):
            fields = view.layout
            placements = [[p.kind, p.dim, p.split_factor] for p in fields.placements]
            layouts.append([fields.mesh_shape, fields.mesh_names, fields.mesh_ranks, placements])
        # The other ranks cannot compute the local shape of a strided shard.
        strided = view.layout is not None and any(p.kind == "strided_shard" for p in view.layout.placements)
        local = list(view.local.shape) if strided else None
        rows.append([view.key, view.dtype, view.shape, layout, local])
    models = sorted(captured.models)
    body = {"rank": this_rank(), "rows": rows, "layouts": layouts, "models": models}
    return json.dumps(body, separators=(",", ":")).encode()


def _plan(described: Sequence[Mapping[str, Any]], world_size: int, max_shard_bytes: int) -> list[_File]:
    holders: dict[str, list[tuple[int, list[Any], ShardLayout | None]]] = {}
    for rank, body in enumerate(described):
        layouts = [
            ShardLayout(tuple(shape), tuple(names), tuple(ranks), tuple(PlacementRecord(*p) for p in placements))
            for shape, names, ranks, placements in body["layouts"]
        ]
        for row in body["rows"]:
            holders.setdefault(row[0], []).append((rank, row, None if row[3] < 0 else layouts[row[3]]))
    models = sorted({name for body in described for name in body["models"]})
    groups: dict[str, list[_Item]] = {name: [] for name in [*models, "state"]}
    for key, held in holders.items():
        top = key.partition(".")[0]
        group = top if top in models else "state"
        name = key.partition(".")[2] if group == top else key
        first = held[0][1]
        pieces = _pieces(key, held, [body["rank"] for body in described])
        groups[group].append(_Item(name, first[1], tuple(first[2]), key, pieces))
    files = [file for group, items in groups.items() for file in _files(group, items, max_shard_bytes)]
    load = [0] * world_size
    for file in sorted(files, key=lambda f: (-f.nbytes, f.path)):  # largest first, to the rank with the least bytes
        file.writer = load.index(min(load))
        load[file.writer] += file.nbytes + 1
    return files


def _pieces(
    key: str, held: Sequence[tuple[int, list[Any], ShardLayout | None]], ranks: Sequence[int]
) -> tuple[_Piece, ...]:
    """Return the distinct regions of a tensor, each with the lowest rank that stores the region.

    Args:
        ranks: Each rank's number in the default process group. Layouts use these numbers.
    """
    found: dict[Box, _Piece] = {}
    for rank, (_, dtype, shape, _, local_shape), layout in held:
        first = held[0][1]
        if (dtype, shape) != (first[1], first[2]):
            raise SaveError(
                f"tensor {key!r} is {dtype} {shape} on rank {rank}, but {first[1]} {first[2]} on {held[0][0]}."
            )
        boxes = boxes_of(tuple(shape), layout, ranks[rank], None if local_shape is None else tuple(local_shape))
        for number, box in enumerate(boxes):
            if box.numel:
                found.setdefault(box, _Piece(rank, box, number))
    numel, needed = sum(box.numel for box in found), math.prod(held[0][1][2])
    if numel != needed:
        raise SaveError(
            f"tensor {key!r}: the ranks hold {numel} of {needed} elements. Do all ranks hold the same model, and "
            "optimizer states of the same parameters? Do all ranks of the tensor's mesh save (process_group=)?"
        )
    return tuple(found.values())


def _files(group: str, items: Sequence[_Item], max_shard_bytes: int) -> list[_File]:
    """Split a group of tensors into files of at most `max_shard_bytes`. Keeps the order, as transformers does."""
    shards = split_into_shards([item.nbytes for item in items], max_shard_bytes) if items else []
    name = group.partition("_")[2]  # a single model's files are in the root
    stem = "state/state" if group == "state" else f"{name}/model" if name else "model"
    return [
        _File(f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors", [items[index] for index in members])
        for number, members in enumerate(shards, 1)
    ]


# --- moving the bytes


@dataclass(slots=True)
class _Transfer:
    """Gathers and writes every tensor. All ranks process the tensors in the same order, so messages need no names.

    A writer holds two tensors in memory: the one that is being gathered, and the one that is being written. If a rank
    fails (disk full, out of memory), it continues to send and receive, and raises the error at the end.
    """

    plan: FullTensors
    memory: Mapping[str, torch.Tensor]
    streams: Mapping[str, SafetensorsStream]
    pool: WorkerPool
    attempt: LocalSteps
    writing: Future[None] | None = None

    def run(self) -> None:
        """Gather and write all tensors. Raises this rank's first error."""
        for file, item in _order(self.plan.files):
            if file.writer == self.plan.rank:
                whole = self.attempt(partial(_target, self.plan, item, self.memory.get(item.key)))
                for piece in item.pieces:
                    if piece.rank != self.plan.rank:
                        _receive(self.plan, item, piece, whole)
                self.attempt(partial(self._write, file, item, whole))
            else:
                for piece in item.pieces:
                    if piece.rank == self.plan.rank:
                        self._send(item, piece, file.writer)
        self.attempt(self._written)
        self.attempt.check()

    def _write(self, file: _File, item: _Item, whole: Any) -> None:
        own = self.memory.get(item.key)
        for piece in item.pieces:
            if piece.rank == self.plan.rank and own is not None and whole is not own:
                _at(whole, piece.box).copy_(_part(self.plan, item.key, piece, own))
        self._written()
        self.writing = self.pool.submit(self.streams[file.path].write, item.name, whole)

    def _written(self) -> None:
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()

    def _send(self, item: _Item, piece: _Piece, writer: int) -> None:
        import torch
        import torch.distributed as dist

        def sendable(tile: Box) -> torch.Tensor:
            part = _at(_part(self.plan, item.key, piece, self.memory[item.key]), tile)
            return row_major(part).to("cpu").view(-1).view(torch.uint8)

        for tile in _tiles(piece.box, item):
            part = self.attempt(partial(sendable, tile))
            if part is None:
                part = torch.zeros(tile.numel * dtype_of(item.dtype).itemsize, dtype=torch.uint8)
            dist.send(part, group_dst=writer, group=self.plan.group)


def _order(files: Sequence[_File]) -> Iterator[tuple[_File, _Item]]:
    """Interleave the writers' tensors, so that one rank gathers while another writes."""
    writers: dict[int, list[tuple[_File, _Item]]] = {}
    for file in files:
        writers.setdefault(file.writer, []).extend((file, item) for item in file.items)
    for turn in zip_longest(*(writers[rank] for rank in sorted(writers))):
        yield from (entry for entry in turn if entry is not None)


def _target(plan: FullTensors, item: _Item, own: torch.Tensor | None) -> torch.Tensor:
    """Return new memory for a full tensor. If this rank already has the full tensor, return that tensor instead."""
    import torch

    if own is not None and len(item.pieces) == 1 and item.pieces[0].rank == plan.rank:
        return own
    return torch.empty(item.shape, dtype=getattr(torch, item.dtype))


def _part(plan: FullTensors, key: str, piece: _Piece, local: torch.Tensor) -> torch.Tensor:
    part = plan.views[key].parts[piece.number]
    return _at(local, Box(part.local_offsets, part.box.sizes))


def _at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]


def _tiles(box: Box, item: _Item) -> Iterator[Box]:
    return Box.whole(box.sizes).tiles(max(1, _CHUNK_BYTES // dtype_of(item.dtype).itemsize))


def _receive(plan: FullTensors, item: _Item, piece: _Piece, whole: torch.Tensor | None) -> None:
    """Receive a region of a tensor from another rank, and store it in `whole`. If `whole` is None, discard the data."""
    import torch
    import torch.distributed as dist

    for tile in _tiles(piece.box, item):
        part = None if whole is None else _at(_at(whole, piece.box), tile)
        if part is not None and part.is_contiguous():
            dist.recv(part.view(-1).view(torch.uint8), group_src=piece.rank, group=plan.group)
            continue
        buffer = torch.empty(tile.numel * dtype_of(item.dtype).itemsize, dtype=torch.uint8)
        dist.recv(buffer, group_src=piece.rank, group=plan.group)
        if part is not None:
            part.copy_(buffer.view(part.dtype).view(tile.sizes))
