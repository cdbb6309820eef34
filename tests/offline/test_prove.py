"""--verify: the proof for each tensor, what it reads, the damage that it finds; fingerprints of any sharding."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit import convert, digests, reshard
from ckptkit.catalog.box import Box
from ckptkit.digests import Fingerprint
from ckptkit.errors import IntegrityError
from ckptkit.formats.detect import open_source
from ckptkit.formats.hf.header import read_header
from ckptkit.offline import prove
from ckptkit.offline.prove import fingerprint_of, prove_equal
from ckptkit.storage.local import LocalStore
from tests.catalog.boxes import index, partitions, shapes
from tests.offline.engine import bits
from tests.offline.folders import UNEVEN, copied, flip
from tests.patches import before

FILE = "model.safetensors"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    convert(str(copied(UNEVEN / "ckpt", tmp_path / "in")), str(tmp_path / "out"))
    return tmp_path


def proved(folder: Path) -> int:
    plan = convert(str(folder / "in"), str(folder / "again"), dry_run=True).plan
    return prove_equal(plan, LocalStore(str(folder / "in")), LocalStore(str(folder / "out")), max_memory=10**8)


def place(folder: Path, name: str) -> int:
    """Return where a tensor starts in the result."""
    return read_header(LocalStore(str(folder / "out")), FILE).tensors[name].start


@pytest.fixture
def fingerprinted(monkeypatch) -> list[str]:
    """Return the names of the tensors that were proved by fingerprints."""
    names: list[str] = []
    before(monkeypatch, prove._Prover, "_expected", lambda prover, tensor, *_: names.append(tensor.name))
    return names


def test_slices_with_digests_are_proved_without_reading_the_source(made, fingerprinted, monkeypatch):
    read = []

    def count(reader, origin, start, view):
        read.append((reader._origins[origin].path, len(view)))

    before(monkeypatch, prove.SourceReader, "read", count)
    assert proved(made) == 18
    assert max(nbytes for path, nbytes in read if path != FILE) <= 8 < max(nbytes for _, nbytes in read)
    assert all("scalar" in name or name in ("gain", "step_count") for name in fingerprinted)  # scalars


def test_slices_without_digests_are_compared_byte_by_byte(made, tmp_path, fingerprinted):
    assert reshard(str(made / "out"), str(tmp_path / "new"), world_size=3, check=False, verify=True).verified == 18
    assert not [name for name in fingerprinted if "weight" in name]


def test_column_shards_are_fingerprinted(made, tmp_path, fingerprinted):
    reshard(str(made / "in"), str(tmp_path / "n"), world_size=2, mesh="tp=2", tp_plan={"*.up.weight": 1}, verify=True)
    assert any(name.endswith("up.weight") for name in fingerprinted)
    assert not any(name.endswith("down.weight") for name in fingerprinted)


@pytest.mark.parametrize("name", ["embed.weight", "gain"])
def test_a_flipped_bit_of_the_result_is_found_and_its_tensor_named(made, name):
    flip(made / "out" / FILE, place(made, name))
    with pytest.raises(IntegrityError, match=f"1 of 18 tensors.*{name}"):
        proved(made)


def test_swapped_slices_are_found(made):
    data, start, rows = bytearray((made / "out" / FILE).read_bytes()), place(made, "embed.weight"), 10 * 4 * 10
    data[start : start + 2 * rows] = data[start + rows : start + 2 * rows] + data[start : start + rows]  # of two ranks
    (made / "out" / FILE).write_bytes(data)
    with pytest.raises(IntegrityError, match=r"embed\.weight"):
        proved(made)


def test_a_result_equal_to_a_damaged_source_is_equal(made):
    slices = open_source(str(made / "in")).catalog.tensors["model.head.weight"].slices
    first = next(row for row in range(len(slices)) if not slices.offsets[row].any())
    flip(made / "in" / slices.paths[int(slices.files[first])], int(slices.starts[first]))
    flip(made / "out" / FILE, place(made, "head.weight"))
    assert proved(made) == 18


full = shapes.filter(lambda shape: math.prod(shape) > 0)
cut = full.flatmap(lambda shape: st.tuples(st.just(shape), partitions(shape)))
itemsizes = st.sampled_from([1, 2, 4, 8])


def of(array: np.ndarray, box: Box) -> Fingerprint:
    data = np.ascontiguousarray(array[index(box)]).reshape(-1).view(np.uint8)
    return fingerprint_of(data, box, array.shape, array.itemsize)


@given(full, itemsizes)
def test_a_fingerprint_equals_the_two_sums_of_its_definition(shape, itemsize):
    array = bits(f"uint{8 * itemsize}", shape)
    values = [int(x) for x in array.ravel()]
    expected = (sum(values) % 2**64, sum(i * x for i, x in enumerate(values)) % 2**64)
    found = of(array, Box.whole(shape))
    assert (found.f1, found.f2) == expected


@given(cut, itemsizes, st.sampled_from([2, 1 << 14]))
def test_any_sharding_gives_the_same_fingerprint(case, itemsize, block):
    shape, boxes = case
    array = bits(f"uint{8 * itemsize}", shape)
    before = digests._BLOCK
    digests._BLOCK = block
    try:
        parts = sum((of(array, box) for box in boxes), Fingerprint())
    finally:
        digests._BLOCK = before
    assert parts == of(array, Box.whole(shape))


@pytest.mark.parametrize("shape", [(3, 5), ()])
def test_elements_of_sixteen_bytes_have_a_fingerprint(shape):
    array = np.random.default_rng(0).standard_normal((*shape, 2)).view(np.complex128).reshape(shape)
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    before = fingerprint_of(data, Box.whole(shape), shape, 16)
    data[9] ^= 1
    assert fingerprint_of(data, Box.whole(shape), shape, 16) != before
