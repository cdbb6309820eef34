"""Each test here runs on the CPU with the others, and on a CUDA device in `make gpu`: one code for both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ranks import _forget_meshes

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the tensors of the test are."""
    yield request.param
    _forget_meshes()
