"""Fingerprints: equal for any sharding, different for any damage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit import digests
from ckptkit.catalog.box import Box
from ckptkit.digests import Fingerprint
from ckptkit.offline.prove import fingerprint_of
from tests.catalog.boxes import index, partitions, shapes
from tests.offline.engine import UNITS

full = shapes.filter(lambda shape: math.prod(shape) > 0)
cut = full.flatmap(lambda shape: st.tuples(st.just(shape), partitions(shape)))
itemsizes = st.sampled_from([1, 2, 4, 8])


def numbers(shape: tuple[int, ...], itemsize: int) -> np.ndarray:
    rng = np.random.default_rng(math.prod(shape))
    return rng.integers(0, 256, (*shape, itemsize), np.uint8).view(UNITS[itemsize]).reshape(shape)


def of(array: np.ndarray, box: Box) -> Fingerprint:
    data = np.ascontiguousarray(array[index(box)]).reshape(-1).view(np.uint8)
    return fingerprint_of(data, box, array.shape, array.itemsize)


@given(full, itemsizes)
def test_a_fingerprint_equals_the_two_sums_of_its_definition(shape, itemsize):
    array = numbers(shape, itemsize)
    values = [int(x) for x in array.ravel()]
    expected = (sum(values) % 2**64, sum(i * x for i, x in enumerate(values)) % 2**64)
    found = of(array, Box.whole(shape))
    assert (found.f1, found.f2) == expected


@given(cut, itemsizes, st.sampled_from([2, 1 << 14]))
def test_any_sharding_gives_the_same_fingerprint(case, itemsize, block):
    shape, boxes = case
    array = numbers(shape, itemsize)
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
