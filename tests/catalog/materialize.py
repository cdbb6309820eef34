"""Carries out plans with numpy on whole arrays: the reference for every plan."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ckptkit.catalog.box import Box
from ckptkit.catalog.targets import Part, Target
from tests.catalog.boxes import index


def whole_target(name: str, shape: tuple[int, ...], dtype: str = "float32") -> Target:
    """Return the target that is a whole source of the same name."""
    box = Box.whole(shape)
    return Target(name, dtype, shape, (Part(box, name, box),), dtype)


def materialize(target: Target, sources: Mapping[str, Any]) -> Any:
    """Assemble the array from its parts. Fails if a target element is filled twice or never."""
    dtype = next(iter(sources.values())).dtype
    out = np.zeros(target.shape, dtype)
    filled = np.zeros(target.shape, np.int64)
    for part in target.parts:
        block = sources[part.source][index(part.source_box)]
        block = block.reshape(part.unfold or block.shape)
        block = block.transpose(part.axes or tuple(range(block.ndim)))
        out[index(part.target_box)] = block.reshape(part.target_box.sizes)
        filled[index(part.target_box)] += 1
    assert (filled == 1).all(), f"{target.name}: some elements are filled {sorted(set(filled.ravel().tolist()))} times"
    return out
