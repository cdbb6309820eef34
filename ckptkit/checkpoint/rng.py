"""The random number generators of one rank: python's, numpy's, torch's on the CPU and on this rank's GPU."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["capture_rng", "restore_rng", "reseed"]


def capture_rng() -> dict[str, Any]:
    """Return the state of every generator of this process, as tensors and plain values.

    numpy's is there only if numpy was imported, the GPU's only if CUDA was initialised: asking for it would
    initialise it.
    """
    import torch

    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        words = torch.from_numpy(keys.astype(numpy.int64))
        state["numpy"] = {
            "name": str(name),
            "words": words,
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any]) -> list[str]:
    """Set every generator that `state` has; return the names of those that this process does not have."""
    import torch

    left = []
    python = state["python"]
    random.setstate((int(python["version"]), tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"].cpu())
    saved = state.get("numpy")
    if saved is not None:
        import numpy as np

        words = saved["words"].numpy().astype(np.uint32)
        np.random.set_state((saved["name"], words, saved["position"], saved["has_gauss"], saved["gauss"]))
    if "cuda" in state:
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())
        else:
            left.append("cuda")
    return left


def reseed(*parts: object) -> int:
    """Seed every generator from these values, and return the seed: same values, same numbers."""
    import torch

    digest = hashlib.sha256(repr(parts).encode()).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    random.seed(seed)
    torch.manual_seed(seed)  # the GPUs' too, lazily
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    return seed
