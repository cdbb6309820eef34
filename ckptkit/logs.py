"""What the library logger does by itself: nothing, but it puts the rank into every record."""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["RankHandler"]


class RankHandler(logging.NullHandler):
    """Prints nothing, and gives each record of ckptkit a `rank`, which formats of handlers above it can name.

    A filter would not do: those of a logger see no record of its children, handlers do.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        record.rank = _rank()
        return True


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")  # never imported for this
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0
