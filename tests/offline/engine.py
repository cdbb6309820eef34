"""Handmade checkpoints for the engine: slices in files of a folder, with digests, and their values."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
import zstandard

from ckptkit.catalog.box import Box
from ckptkit.catalog.casts import cast_into
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, Codec, Digest, SliceArray, TensorEntry, TensorSlice
from ckptkit.catalog.targets import Target
from ckptkit.offline.copying.execute import CopyReport
from ckptkit.offline.copying.plan import CrcField, Literal, OutputFile, OutputTensor, Placement, Plan
from tests.catalog.boxes import columns, index
from tests.catalog.materialize import materialize

UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
GAP = b"between"


@dataclass
class Made:
    """A source folder with its catalog, and the bits of every tensor."""

    folder: Path
    catalog: Catalog
    arrays: dict[str, np.ndarray]


def bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return random bits of a dtype; floats are finite, so that casts can be compared."""
    rng = np.random.default_rng(seed)
    if dtype in ("float64", "float32", "float16"):
        values = rng.standard_normal(shape).astype(dtype)
        return np.asarray(values).view(UNITS[dtype_of(dtype).itemsize])
    if dtype == "bfloat16":
        values = np.asarray(rng.standard_normal(shape).astype(np.float32))
        return np.asarray((values.view(np.uint32) >> 16).astype(np.uint16))
    size = dtype_of(dtype).itemsize
    return rng.integers(0, 256, (*shape, size), np.uint8).view(UNITS[size]).reshape(shape)


def make_source(
    folder: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...], Sequence[Box]]],
    *,
    digest: str | None = "crc32",
    files: int = 2,
    codec: bool = False,
    transposed: bool = False,
) -> Made:
    """Write tensors, name -> (dtype, shape, slices), into `files` files in turn."""
    folder.mkdir()
    blobs = [bytearray(b"head") for _ in range(files)]
    arrays: dict[str, np.ndarray] = {}
    entries: dict[str, TensorEntry] = {}
    turn = 0
    for seed, (name, (dtype, shape, boxes)) in enumerate(tensors.items()):
        arrays[name] = bits(dtype, shape, seed)
        slices = []
        for box in boxes:
            file, turn, part = turn % files, turn + 1, arrays[name][index(box)]
            slices.append(_append(blobs[file], f"data-{file}", part, box, digest, codec, transposed))
        entries[name] = TensorEntry(name, dtype, shape, SliceArray.of(slices, len(shape)), fqn=name)
    for i, blob in enumerate(blobs):
        (folder / f"data-{i}").write_bytes(blob)
    return Made(folder, Catalog(entries), arrays)


def _append(
    blob: bytearray, path: str, part: np.ndarray, box: Box, digest: str | None, codec: bool, transposed: bool
) -> TensorSlice:
    strides = None
    if transposed and part.ndim == 2:
        strides = (1, part.shape[0])
        part = part.T
    data = np.ascontiguousarray(part).tobytes()
    blob += GAP
    start = len(blob)
    packed = None
    if codec:
        record = zstandard.compress(b"decoded" + data)
        packed, start = Codec("zstd", len(blob), len(record)), 7
        blob += record
    else:
        blob += data
    value = zlib.crc32(data) if digest == "crc32" else xxhash.xxh3_64_intdigest(data)
    covered = digest and Digest(digest, value, start, len(data))
    return TensorSlice(box, path, start, len(data), strides, covered or None, packed)


def plan_whole(catalog: Catalog, tensors: Sequence[OutputTensor], *, path: str = "out") -> Plan:
    """Place tensors in one file, with a literal before each."""
    at, literals, placements = 0, [], []
    for tensor in tensors:
        literals.append(Literal(at, GAP))
        placements.append(Placement.whole(tensor, 0, at + len(GAP)))
        at += len(GAP) + math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize
    return Plan(catalog, (OutputFile(path, at, tuple(literals)),), tuple(placements))


def plan_boxes(
    catalog: Catalog, placed: Sequence[tuple[Target, list[Box], list[int]]], *, files: int, crcs: bool = False
) -> Plan:
    """Place boxes of tensors back to back in files of these numbers; with `crcs`, a CRC follows each box."""
    ends, fields, placements = [0] * files, [[] for _ in range(files)], []
    for target, boxes, numbers in placed:
        starts = []
        for box, file in zip(boxes, numbers, strict=True):
            starts.append(ends[file])
            ends[file] += box.numel * dtype_of(target.dtype).itemsize
            if crcs:
                fields[file].append(CrcField((ends[file],), starts[-1], ends[file] - starts[-1]))
                ends[file] += 4
        offsets, sizes = columns(boxes, len(target.shape))
        placements.append(Placement(target, np.array(numbers, np.int32), np.array(starts, np.int64), offsets, sizes))
    made = [
        OutputFile(f"out-{i}", end, tuple(Literal(crc.at[0], bytes(4)) for crc in of), tuple(of))
        for i, (end, of) in enumerate(zip(ends, fields, strict=True))
    ]
    return Plan(catalog, tuple(made), tuple(placements))


def read_placed(folder: Path, plan: Plan) -> dict[str, np.ndarray]:
    """Assemble the tensors from the boxes in the files of a result."""
    found = {}
    for placement in plan.placements:
        tensor = placement.tensor
        unit = UNITS[dtype_of(tensor.dtype).itemsize]
        whole = np.zeros(tensor.shape, unit)
        for row in range(len(placement)):
            box = placement.box(row)
            data = (folder / plan.files[int(placement.files[row])].path).read_bytes()
            start = int(placement.starts[row])
            part = np.frombuffer(data, unit, box.numel, start).reshape(box.sizes)
            whole[index(box)] = part
        found[tensor.name] = whole
    return found


def digests_of(out: Path, plan: Plan, report: CopyReport) -> dict[tuple[int, int], int]:
    """Return the sizes of the digested boxes by file and start; compare each digest with the written bytes."""
    assert report.digested is not None
    found = {}
    for file, start, nbytes, digest in report.digested.table().tolist():
        data = (out / plan.files[file].path).read_bytes()[start : start + nbytes]
        assert digest == xxhash.xxh3_64_intdigest(data)
        assert (file, start) not in found
        found[file, start] = nbytes
    return found


def boxes_of(plan: Plan) -> dict[tuple[int, int], int]:
    """Return the sizes of all boxes by file and start."""
    rows = [row for p in plan.placements for row in zip(p.files.tolist(), p.starts.tolist(), p.nbytes(), strict=True)]
    return {(file, start): int(nbytes) for file, start, nbytes in rows if nbytes}


def check_copied(made: Made, plan: Plan, found: Mapping[str, np.ndarray]) -> None:
    """Assert that each tensor of a plan has the elements that numpy puts there."""
    for target in (placement.tensor for placement in plan.placements):
        assert isinstance(target, Target)
        array = materialize(target, {key: made.arrays[key] for key in target.sources})
        if target.dtype != target.source_dtype:
            cast = np.empty(array.size * dtype_of(target.dtype).itemsize, np.uint8)
            cast_into(np.ascontiguousarray(array).reshape(-1).view(np.uint8), cast, target.source_dtype, target.dtype)
            array = cast.view(UNITS[dtype_of(target.dtype).itemsize]).reshape(array.shape)
        assert np.array_equal(found[target.name], array), target.name
