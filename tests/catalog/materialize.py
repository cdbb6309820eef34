"""Carries out plans with numpy on whole arrays: the reference for every plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ckptkit.catalog.box import Box
from ckptkit.catalog.targets import Target


def materialize(target: Target, sources: Mapping[str, Any]) -> Any:
    """Assemble the array from its parts. Fails if a target element is filled twice or never."""
    dtype = next(iter(sources.values())).dtype
    out = np.zeros(target.shape, dtype)
    filled = np.zeros(target.shape, np.int64)
    for part in target.parts:
        block = sources[part.source][_index(part.source_box)]
        block = block.reshape(part.unfold or block.shape)
        block = block.transpose(part.axes or tuple(range(block.ndim)))
        out[_index(part.target_box)] = block.reshape(part.target_box.sizes)
        filled[_index(part.target_box)] += 1
    assert (filled == 1).all(), f"{target.name}: some elements are filled {sorted(set(filled.ravel().tolist()))} times"
    return out


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
