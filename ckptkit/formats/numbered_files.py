"""Names of files: -00001-of-0000N, which belong together without an index, and those that only a model has."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError

__all__ = ["MODEL_FILES", "numbered_files"]

MODEL_FILES = ("pytorch_model.bin", "model.pt", "model.pth", "model.bin", "model.ckpt")  # of torch.save

_NUMBERED = re.compile(r"(.+)-(\d{5,})-of-(\d{5,})\.(\w+)")


def numbered_files(names: Sequence[str], extension: str) -> list[str] | None:
    """Return the files named -0000i-of-0000n.`extension` in order; None where there are none.

    Raises:
        IncompleteCheckpointError: Not all n are there; it names those that are missing.
        CorruptCheckpointError: Those of two checkpoints lie together.
    """
    matches = [match for name in names if (match := _NUMBERED.fullmatch(name)) and match[4] == extension]
    if not matches:
        return None
    sets = {(match[1], match[3]) for match in matches}
    if len(sets) > 1:
        raise CorruptCheckpointError(f"numbered files of {len(sets)} checkpoints lie together: {sorted(sets)}.")
    stem, total = sets.pop()
    have = {int(match[2]) for match in matches}
    first = 0 if 0 in have else 1  # some tools count from 0
    wanted = range(first, first + int(total))
    if len(have) != len(wanted) or have != set(wanted):
        absent = itertools.islice((i for i in wanted if i not in have), 8)
        gone = [f"{stem}-{i:0{len(total)}d}-of-{total}.{extension}" for i in absent]
        there = f"{len(have)} of {int(total)} shards are there; "
        raise IncompleteCheckpointError(there + (f"missing: {', '.join(gone)}." if gone else "others are too many."))
    return sorted(match[0] for match in matches)
