"""Dtype names and sizes agree with torch, and casts touch plain floats only."""

import pytest

from ckptkit.catalog.dtypes import DTYPES, dtype, from_safetensors
from ckptkit.errors import UnsupportedFormatError


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_sizes_and_kinds_agree_with_torch(name):
    import torch

    if name.endswith("_bytes"):  # FP6, which torch does not have
        assert (DTYPES[name].itemsize, DTYPES[name].bits, hasattr(torch, name)) == (1, 6, False)
        return
    real = getattr(torch, name)
    assert real.itemsize == DTYPES[name].itemsize
    assert real.is_complex == (DTYPES[name].kind == "complex")
    assert real.is_floating_point == (DTYPES[name].kind in ("float", "float8"))


def test_dtype_names_are_accepted_with_prefix_and_as_aliases_and_unknown_ones_are_refused():
    assert dtype("torch.bfloat16") is dtype("bf16") is DTYPES["bfloat16"]
    with pytest.raises(UnsupportedFormatError, match="float7"):
        dtype("float7")
    with pytest.raises(UnsupportedFormatError, match="F7"):
        from_safetensors("F7")
