"""Any region of any slice, in any file order, is read element for element."""

import contextlib
import os
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.catalog.box import Box, row_major_strides
from ckptkit.catalog.entry import Digest, SliceArray, TensorEntry, TensorSlice
from ckptkit.errors import IncompleteCheckpointError, IntegrityError
from ckptkit.formats import sources
from ckptkit.formats.dcp import fill
from ckptkit.formats.dcp.fill import Filler, Verify
from ckptkit.formats.dcp.host_bytes import host_view
from ckptkit.storage.local import LocalStore
from tests.offline.folders import flip

ROOT = tempfile.TemporaryDirectory(prefix="ckptkit-fill-")


@st.composite
def cases(draw):
    ndim = draw(st.integers(0, 4))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(ndim))
    order = draw(st.permutations(range(ndim)))
    starts = tuple(draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, starts, strict=True))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "int8", "float8_e5m2", "complex64"]))
    return shape, order, starts, sizes, dtype


def stored(shape, order, dtype):
    """Return a file with some bytes before a tensor whose memory has its dimensions in this order."""
    kind = getattr(torch, dtype)
    count = int(np.prod(shape)) * kind.itemsize
    raw = np.random.default_rng(0).integers(0, 100, count, dtype=np.uint8).tobytes()
    permuted = tuple(shape[d] for d in order)
    strides = [0] * len(shape)
    for dim, step in zip(order, row_major_strides(permuted), strict=True):
        strides[dim] = step
    whole = torch.frombuffer(bytearray(raw), dtype=kind).as_strided(shape, strides)
    Path(ROOT.name, "f").write_bytes(b"#" * 13 + raw)
    contiguous = tuple(strides) == row_major_strides(shape)
    digest = Digest("xxh3_64", xxhash.xxh3_64_intdigest(raw), 13, count)
    part = TensorSlice(Box.whole(shape), "f", 13, count, None if contiguous else tuple(strides), digest)
    return whole, TensorEntry("w", dtype, shape, SliceArray.of([part], len(shape)))


@pytest.mark.parametrize("limits", [
    {}, {"_TILE": 64, "_FAR": 8}, {"_TILE": 16, "_FAR": 1 << 30}, {"_SMALL": 1, "_PIECE": 7, "_GAP": 3}, {"_SPAN": 40},
])  # fmt: skip
@given(case=cases(), verify=st.sampled_from(list(Verify)), layout=st.sampled_from(["rows", "columns", "gaps"]))
def test_any_region_of_a_slice_is_read(limits, case, verify, layout):
    shape, order, starts, sizes, dtype = case
    whole, entry = stored(shape, order, dtype)
    expected = whole[tuple(slice(s, s + n) for s, n in zip(starts, sizes, strict=True))]
    target = torch.zeros(sizes, dtype=whole.dtype)
    if layout == "columns" and len(sizes) > 1:
        target = target.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "gaps" and sizes:
        target = torch.zeros(*sizes[:-1], 2 * sizes[-1], dtype=whole.dtype)[..., ::2]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(fill if hasattr(fill, name) else sources, name, value)
        filler = Filler(LocalStore(ROOT.name), verify=verify, workers=2)
        filler.add(entry, Box(starts, sizes), target)
        filler.run()
    assert bytes(host_view(target.contiguous())) == bytes(host_view(expected.contiguous()))


def vector(name: str, path: str, start: int, numel: int, digest: Digest | None = None) -> TensorEntry:
    part = TensorSlice(Box((0,), (numel,)), path, start, numel * 4, digest=digest)
    return TensorEntry(name, "float32", (numel,), SliceArray.of([part], 1))


def written(folder: Path, values: torch.Tensor) -> torch.Tensor:
    (folder / "f").write_bytes(values.numpy().tobytes())
    return values


def fill_all(filler: Filler, wanted: list[tuple[TensorEntry, Box, torch.Tensor]]) -> None:
    """Read these parts of tensors, and compare them with their values."""
    targets = [torch.zeros_like(value) for _, _, value in wanted]
    for (entry, box, _), target in zip(wanted, targets, strict=True):
        filler.add(entry, box, target)
    filler.run()
    assert all(torch.equal(target, value) for target, (_, _, value) in zip(targets, wanted, strict=True))


def test_reads_of_one_file_are_exact_whatever_the_gaps(tmp_path, monkeypatch):
    values, wanted, preadv = written(tmp_path, torch.randn(300_000)), [], os.preadv
    # adjacent, overlapping, the same twice, a small gap, a large one, longer than a piece
    for start, stop in [(0, 5), (5, 9), (7, 12), (7, 12), (40, 41), (100_000, 100_003), (100_003, 300_000)]:
        raw = values[start:stop].numpy().tobytes()
        digest = Digest("xxh3_64", xxhash.xxh3_64_intdigest(raw), start * 4, len(raw))
        entry = vector(f"{start}", "f", start * 4, stop - start, digest)
        wanted.append((entry, Box((0,), (stop - start,)), values[start:stop]))

    def short(fd: int, into: list[memoryview], at: int) -> int:  # as a signal or a network file system may cut it
        return preadv(fd, [into[0][: 11 if len(into[0]) < 99 else 1 << 17]], at)

    monkeypatch.setattr(os, "preadv", short)
    monkeypatch.setattr(sources, "_PIECE", 1 << 18)
    filler = Filler(LocalStore(tmp_path), workers=1)
    fill_all(filler, wanted)
    assert filler.nbytes == sum(value.nbytes for _, _, value in wanted)


def test_a_crc_is_checked_like_any_digest(tmp_path):
    raw = written(tmp_path, torch.randn(10_000)).numpy().tobytes()
    for crc, fails in ((zlib.crc32(raw), False), (zlib.crc32(raw) ^ 1, True)):
        filler = Filler(LocalStore(tmp_path))
        entry = vector("w", "f", 0, 10_000, Digest("crc32", crc, 0, 40_000))
        filler.add(entry, Box((0,), (10_000,)), torch.zeros(10_000))
        with pytest.raises(IntegrityError, match="crc32") if fails else contextlib.nullcontext():
            filler.run()


@pytest.mark.parametrize("size", [6, 3 << 18])
def test_a_lazy_conj_target_gets_the_values_and_not_the_bytes(size):
    whole, entry = stored((size,), (0,), "complex64")
    live = torch.zeros(size, dtype=torch.complex64)
    filler = Filler(LocalStore(Path(ROOT.name)))
    filler.add(entry, Box((0,), (size,)), live.conj())
    filler.run()
    assert torch.equal(live.conj().resolve_conj(), whole)


def test_a_box_that_the_slices_do_not_cover_is_refused_before_anything_is_read(tmp_path):
    parts = [TensorSlice(Box((start,), (2,)), "missing", 4 * start, 8) for start in (0, 4)]
    filler = Filler(LocalStore(tmp_path))
    for size in (2, 4):
        filler.add(TensorEntry("w", "float32", (6,), SliceArray.of(parts, 1)), Box((0,), (size,)), torch.zeros(size))
    with pytest.raises(IncompleteCheckpointError, match=r"'w': the checkpoint has only 2 of the 4 elements"):
        filler.plan()


@pytest.mark.parametrize("start", [0, 37, 99])
def test_a_part_of_a_tensor_with_many_slices_is_read_from_the_right_ones(tmp_path, start):
    values = written(tmp_path, torch.arange(200.0))
    parts = [TensorSlice(Box((2 * i,), (2,)), "f", 8 * i, 8) for i in range(100)]
    entry = TensorEntry("w", "float32", (200,), SliceArray.of(parts, 1))
    fill_all(Filler(LocalStore(tmp_path)), [(entry, Box((start,), (101,)), values[start : start + 101])])


def test_long_runs_of_columns_are_read_without_the_gaps(tmp_path):
    values = written(tmp_path, torch.arange(64.0 * 65536).reshape(64, 65536))
    part = TensorSlice(Box.whole((64, 65536)), "f", 0, values.nbytes)
    entry, wanted = TensorEntry("w", "float32", (64, 65536), SliceArray.of([part], 2)), values[:, 16384:32768]
    filler = Filler(LocalStore(tmp_path))
    fill_all(filler, [(entry, Box((0, 16384), (64, 16384)), wanted)])
    assert filler.nbytes == wanted.numel() * 4


def test_full_verification_finds_damage_outside_of_the_needed_bytes(tmp_path):
    raw = written(tmp_path, torch.ones(1_000_000)).numpy().tobytes()
    entry = vector("w", "f", 0, 1_000_000, Digest("xxh3_64", xxhash.xxh3_64_intdigest(raw), 0, len(raw)))
    flip(tmp_path / "f", 3_900_000)
    for verify, fails in ((Verify.READ, False), (Verify.FULL, True)):
        filler = Filler(LocalStore(tmp_path), verify=verify)
        with pytest.raises(IntegrityError) if fails else contextlib.nullcontext():
            fill_all(filler, [(entry, Box((0,), (10_000,)), torch.ones(10_000))])
