"""Captures and restores one rank's random number generators: Python's, numpy's, and torch's for the CPU and the GPU."""

from __future__ import annotations

import random
import sys
import weakref
from array import array
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.digests import sha256_of
from ckptkit.errors import CorruptCheckpointError

if TYPE_CHECKING:
    import torch

# When `share_stream` was called: the process group, this process's random stream, and the number of streams.
_shared: tuple[weakref.ref[Any], int, int] | None = None


def share_stream(index: int, count: int) -> None:
    """Declare that all ranks with the same `index` seed their generators with the same seed.

    Ranks that compute together (tensor-parallel ranks) must draw the same numbers. A save records `count`, the number
    of streams, so that a load on a different layout can again give such ranks equal seeds. The call applies to the
    current process group.
    """
    import torch.distributed as dist

    global _shared
    _shared = (weakref.ref(dist.group.WORLD), index, count)


def shared_stream(rank: int, world_size: int) -> tuple[int, int]:
    """Return the (index, count) passed to `share_stream`, or (rank, world_size) if it was not called."""
    if _shared is not None:
        import torch.distributed as dist

        group, index, count = _shared
        if dist.is_initialized() and group() is dist.group.WORLD:
            return index, count
    return rank, world_size


def capture_rng() -> dict[str, Any]:
    """Return the states of this process's generators, as tensors and plain values.

    numpy is included only if it has been imported. The GPU is included only if CUDA has been initialized, because
    reading its state would initialize CUDA.
    """
    import torch

    version, words, gauss = random.getstate()
    numbers = torch.frombuffer(array("q", words), dtype=torch.int64)
    state: dict[str, Any] = {
        "python": {"version": version, "words": numbers, "gauss": gauss},
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
    if (streams := shared_stream(0, 0)[1]) > 0:
        state["streams"] = streams
    return state


def restore_rng(state: Mapping[str, Any]) -> list[str]:
    """Set every generator in `state`. Return the names of generators that this process lacks.

    Raises:
        CorruptCheckpointError: A saved state is invalid. No generator was changed.
    """
    settings = rng_settings(state)
    for setting in settings.values():
        if setting is not None:
            setting()
    return [name for name, setting in settings.items() if setting is None]


def rng_settings(state: Any) -> dict[str, Callable[[], None] | None]:
    """Return functions that set the generators, by name; None for a generator that this process lacks.

    Each state is first tested on a temporary generator.

    Raises:
        CorruptCheckpointError: A saved state is invalid.
    """
    makers: dict[str, Callable[[Any], Callable[[], None] | None]]
    makers = {"python": _python, "torch": _torch, "numpy": _numpy, "cuda": _cuda}
    settings = {}
    for name, maker in makers.items():
        try:
            if name in ("python", "torch") or state.get(name) is not None:
                settings[name] = maker(state[name])
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise CorruptCheckpointError(
                f"rng: the saved state of {name}'s generator is invalid ({reason})."
            ) from error
    return settings


def _python(saved: Any) -> Callable[[], None]:
    gauss = saved["gauss"]
    if gauss is not None and not isinstance(gauss, float):
        raise TypeError(f"gauss is a {type(gauss).__name__}")
    state = (int(saved["version"]), tuple(saved["words"].tolist()), gauss)
    random.Random().setstate(state)
    return partial(random.setstate, state)


def _torch(saved: Any) -> Callable[[], None]:
    import torch

    state = _bytes(saved)
    torch.Generator().set_state(state)
    return partial(torch.set_rng_state, state)


def _numpy(saved: Any) -> Callable[[], None]:
    import numpy as np

    words = saved["words"].numpy()
    if words.shape != (624,) or words.dtype.kind not in "iu" or words.min() < 0 or words.max() >= 2**32:
        raise ValueError("its words are not 624 numbers of 32 bits")
    position = int(saved["position"])
    if not 0 <= position <= 624:  # numpy does not check this
        raise ValueError(f"its position is {position}")
    words = words.astype(np.uint32)
    state = (str(saved["name"]), words, position, int(saved["has_gauss"]), float(saved["gauss"]))
    np.random.RandomState().set_state(state)
    return partial(np.random.set_state, state)


def _cuda(saved: Any) -> Callable[[], None] | None:
    import torch

    state = _bytes(saved)
    if not torch.cuda.is_available():
        return None
    torch.Generator(device="cuda").set_state(state)
    return partial(torch.cuda.set_rng_state, state)


def _bytes(saved: torch.Tensor) -> torch.Tensor:
    import torch

    state = saved.cpu()
    if state.dtype != torch.uint8 or state.dim() != 1:
        raise TypeError(f"a tensor of {state.dtype} with {state.dim()} dimensions")
    return state


def reseed(*parts: object) -> int:
    """Seed every generator from `parts`, and return the seed. Equal parts give equal random numbers."""
    import torch

    digest = sha256_of(repr(parts).encode())
    seed = int.from_bytes(digest[:8], "little") >> 1
    random.seed(seed)
    torch.manual_seed(seed)  # also seeds the GPUs, once they are initialized
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)
    return seed
