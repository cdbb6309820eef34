"""The command keeps the buffers that it frees."""

import resource
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file


@pytest.mark.skipif(sys.platform != "linux", reason="counts the page faults of glibc's malloc")
def test_a_merge_does_not_get_its_buffers_from_the_kernel_again_for_each_piece(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_file({"w": np.ones((64, 1 << 18), np.float16)}, tmp_path / name / "model.safetensors", {"format": "pt"})
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
    sources = [tmp_path / "a", tmp_path / "b"]
    subprocess.run(
        [sys.executable, "-m", "ckptkit", "merge", *sources, tmp_path / "out", "-q"], check=True, capture_output=True
    )
    pages = (resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before) * resource.getpagesize()
    assert pages < 64 << 20
