"""The geometry of DTensor placements, compared with torch."""

import itertools

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptkit.catalog.box import Box
from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.pickles.tensors import PlacementRecord as Placement
from ckptkit.formats.pickles.tensors import Storage, StoredTensor
from ckptkit.formats.trainers.shards import local_parts, mesh_coordinate, slices_of

S0, S1, R = Placement("shard", 0), Placement("shard", 1), Placement("replicate")


def strided(dim: int, split: int) -> Placement:
    return Placement("strided_shard", dim, split)


CASES = [
    *(((n,), (S0,), (7, 5)) for n in (1, 2, 3, 4, 8)),
    ((2, 2), (S0, S0), (7, 5)), ((2, 3), (S0, S1), (7, 5)), ((2, 2), (R, S0), (3, 2)), ((3, 2), (S0, R), (2, 9)),
    ((2, 2), (strided(0, 2), S0), (8, 3)), ((2, 2), (strided(0, 2), S0), (5, 3)),
    ((4, 2), (strided(0, 2), S0), (21, 3)), ((2, 2, 2), (R, strided(1, 2), S1), (3, 13)),
    ((2,), (strided(0, 3),), (11, 2)), ((2, 2), (S1, strided(1, 3)), (2, 17)),
]  # fmt: skip


@pytest.mark.parametrize(("mesh_shape", "placements", "shape"), CASES)
def test_each_element_is_where_torch_puts_it(mesh_shape, placements, shape):
    whole = np.arange(np.prod(shape)).reshape(shape)
    kinds = {
        "replicate": lambda _: Replicate(),
        "shard": lambda placement: Shard(placement.dim),
        "strided_shard": lambda placement: _StridedShard(placement.dim, split_factor=placement.split_factor),
    }
    theirs = [kinds[placement.kind](placement) for placement in placements]
    for coordinate in itertools.product(*map(range, mesh_shape)):
        local = torch.from_numpy(whole)
        for mesh_dim, placement in enumerate(theirs):
            if not isinstance(placement, Replicate):
                shards, _ = placement._split_tensor(local, mesh_shape[mesh_dim], with_padding=False)
                local = shards[coordinate[mesh_dim]]
        parts = local_parts(shape, mesh_shape, coordinate, placements)
        assert np.array_equal(_gather(whole, parts), local)
        assert local_parts(shape, mesh_shape, coordinate, placements, local_shape=tuple(local.shape)) == parts


def test_an_empty_part_may_have_any_shape_without_elements():
    parts = local_parts((7, 1), (2, 2), (0, 1), (S0, S1), local_shape=(0, 0))  # as FSDP2 shards it
    assert [part.box for part in parts] == [Box((0, 1), (4, 0))]
    with pytest.raises(CorruptCheckpointError):
        local_parts((7, 1), (2, 2), (0, 1), (S0, S1), local_shape=(4, 1))


@pytest.mark.parametrize(("placement", "local_shape", "error", "text"), [
    (Placement("partial"), None, UnsupportedFormatError, "summed"),
    (S0, (3,), CorruptCheckpointError, r"\[3\].*\[2\]"),
    (S1, None, CorruptCheckpointError, r"Shard\(1\)"),
    (strided(0, 2**40), None, UnsupportedFormatError, "unknown"),
], ids=["a partial placement", "another local shape", "a missing dimension", "an absurd split"])  # fmt: skip
def test_placements_that_do_not_fit_are_refused(placement, local_shape, error, text):
    with pytest.raises(error, match=text):
        local_parts((4,), (2,), (0,), (placement,), local_shape=local_shape)


def test_slices_point_to_the_bytes_of_their_box_and_keep_strides():
    storage = Storage("f", "0", 48, "float32", start=100)
    parts = local_parts((8, 3), (2,), (1,), (strided(0, 2),), local_shape=(4, 3))
    slices = slices_of(parts, StoredTensor(storage, "float32", (4, 3), (3, 1)), rank=1)
    assert [s.box for s in slices] == [Box((2, 0), (2, 3)), Box((6, 0), (2, 3))]
    assert [(s.start, s.nbytes, s.strides) for s in slices] == [(100, 24, None), (100 + 24, 24, None)]
    transposed = StoredTensor(storage, "float32", (2, 3), (1, 2))
    (found,) = slices_of(local_parts((4, 3), (2,), (0,), (S0,)), transposed, rank=0)
    assert (found.strides, found.nbytes) == ((1, 2), 24)


def test_mesh_coordinate_finds_a_rank_in_a_permuted_mesh():
    assert mesh_coordinate(5, (2, 3)) == (1, 2)
    assert mesh_coordinate(4, (2, 2), [0, 4, 2, 6]) == (0, 1)
    assert mesh_coordinate(1, (2, 2), [0, 4, 2, 6]) is None


def _gather(whole, parts):
    ends = [np.add(part.local_offsets, part.box.sizes) for part in parts]
    local = np.empty(np.max(ends, axis=0), whole.dtype)
    for part in parts:
        source = tuple(slice(a, b) for a, b in zip(part.box.offsets, part.box.stops, strict=True))
        target = tuple(slice(o, o + s) for o, s in zip(part.local_offsets, part.box.sizes, strict=True))
        local[target] = whole[source]
    return local


@pytest.mark.parametrize(("shape", "local", "placements"), [
    ((2**40,), (4,), [strided(0, 2**16)] * 4),
    ((2**20, 2**20, 0), (2**16, 2**16, 0), [strided(dim, 2**15) for dim in (0, 1)]),
], ids=["runs", "boxes"])  # fmt: skip
def test_placements_with_billions_of_shards_are_refused_at_once(shape, local, placements):
    mesh = (2,) * len(placements)
    with pytest.raises(CorruptCheckpointError):
        local_parts(shape, mesh, (0,) * len(mesh), placements, local_shape=local)


@pytest.mark.parametrize(("mesh", "placements", "order", "rows"), [
    ((3, 2), (strided(0, 2), S0), (1, 0), 7), ((3, 4), (strided(0, 4), S0), (1, 0), 27),
    ((2, 2, 3), (strided(0, 6), S0, S0), (1, 2, 0), 9),
    ((2, 3, 4), (S0, strided(0, 4), S0), (0, 2, 1), 54),
])  # fmt: skip
def test_uneven_strided_shards_have_the_rows_that_fsdp2_gave_them(mesh, placements, order, rows):
    """Some ranks' sizes fit torch's reading of the placements, too, but not their rows."""
    for at in itertools.product(*map(range, mesh)):
        held = torch.arange(rows)
        for dim in order:
            chunks = held.chunk(mesh[dim])
            held = chunks[at[dim]] if at[dim] < len(chunks) else held[:0]
        parts = local_parts((rows,), mesh, at, placements, local_shape=(len(held),))
        assert [i for p in parts for i in range(p.box.offsets[0], p.box.stops[0])] == held.tolist()
