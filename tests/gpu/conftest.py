"""The tests of this folder run on the CPU with all others, and on a CUDA device in `make gpu`."""

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
    """The device of the test's tensors."""
    yield request.param
    _forget_meshes()
