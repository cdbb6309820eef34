"""Casts in numpy compared with torch's, over every 16-bit pattern and the difficult 32-bit ones."""

import numpy as np
import pytest
import torch

from ckptkit.catalog.casts import cast_into, float_values, is_cast
from ckptkit.errors import UnsupportedFormatError

FLOATS = ("float64", "float32", "float16", "bfloat16")
SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def patterns(dtype: str) -> np.ndarray:
    """Return bits of a dtype: all of them, or each upper half with the lower halves at rounding boundaries."""
    every = np.arange(1 << 16, dtype=np.uint32)
    if SIZES[dtype] == 2:
        return every.astype(np.uint16)
    lows = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    hard = (every[:, None] << 16 | lows).ravel()
    if dtype == "float32":
        return hard
    finite = hard.view(np.float32)[np.isfinite(hard.view(np.float32))].astype(np.float64)
    extremes = np.array([5e-324, 1e-310, 1e300, -1e300, np.inf, -np.inf, np.nan, 65519.999, 65520.0])
    return np.concatenate([finite, finite * (1 + 2.0**-40), extremes]).view(np.uint64)


def both(source: str, target: str) -> tuple[np.ndarray, torch.Tensor, torch.Tensor, int]:
    """Return our bits, torch's values before and after the cast, and our count of numbers that became infinite."""
    data = patterns(source).view(np.uint8)
    before = torch.from_numpy(data.copy()).view(getattr(torch, source))
    out = np.empty(before.numel() * SIZES[target], np.uint8)
    counted = cast_into(data, out, source, target)
    return out, before, before.to(getattr(torch, target)), counted


EXACT_NANS = [("float16", "float32"), ("float32", "float16"), ("bfloat16", "float32")]  # their payloads are torch's


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_a_cast_rounds_every_number_as_torch_does_and_a_nan_stays_a_nan(source, target):
    ours, before, torchs, counted = both(source, target)
    made, nan = torch.from_numpy(ours).view(torchs.dtype), torchs.isnan()
    assert torch.equal(made.isnan(), nan)
    unit = {2: torch.int16, 4: torch.int32, 8: torch.int64}[SIZES[target]]
    same = made.view(unit) == torchs.view(unit)
    assert same[~nan].all() and (same.all() or (source, target) not in EXACT_NANS)
    # Finite numbers that become infinite are counted.
    assert counted == int((before.isfinite() & torchs.isinf()).sum())
    assert (counted > 0) == (torch.finfo(before.dtype).max > torch.finfo(torchs.dtype).max)


def test_a_nan_in_bfloat16_has_the_bits_of_c10():
    ours, before, _, _ = both("float32", "bfloat16")
    assert set(ours.view(np.uint16)[before.isnan().numpy()].tolist()) == {0x7FC0}


@pytest.mark.parametrize("pair", [("int64", "float32"), ("float32", "float8_e4m3fn"), ("bool", "bfloat16")])
def test_only_plain_floats_are_cast(pair):
    with pytest.raises(UnsupportedFormatError, match="only floats"):
        is_cast(*pair)


@pytest.mark.parametrize("dtype", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu"])
def test_every_code_of_8_bits_has_the_value_that_torch_gives_it(dtype):
    every = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(every.copy()).view(getattr(torch, f"float8_{dtype}")).float()
    assert np.array_equal(float_values(every, f"float8_{dtype}"), expected.numpy(), equal_nan=True)
