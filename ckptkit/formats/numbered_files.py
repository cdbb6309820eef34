"""Files named -00001-of-0000N, which belong together without an index that says so."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError

__all__ = ["numbered_files"]

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
    if len(have) != int(total) or have != set(range(1, int(total) + 1)):
        absent = itertools.islice((i for i in itertools.count(1) if i not in have), 8)
        gone = [f"{stem}-{i:0{len(total)}d}-of-{total}.{extension}" for i in absent if i <= int(total)]
        raise IncompleteCheckpointError(f"{len(have)} of {int(total)} shards are there; missing: {', '.join(gone)}.")
    return sorted(match[0] for match in matches)
