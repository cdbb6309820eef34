"""Defines the handler of ckptkit's logger. It adds the rank to each record, and removes credentials."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

from ckptkit.redact import without_secrets

_warned: set[tuple[str, str]] = set()


def warn_once(logger: logging.Logger, what: str, text: str, *args: object) -> None:
    """Log a warning, but only once per process for each pair of `what` and `text`.

    Use this for faults that last, such as a file that cannot be deleted.
    """
    if (what, text) not in _warned:
        _warned.add((what, text))
        logger.warning(f"%s {text}", what, *args)


class RankHandler(logging.NullHandler):
    """Adds the attribute `rank` to each record that ckptkit logs, and removes credentials from the record.

    The program's own handlers run later, and can show the rank with "%(rank)s". If the program has not configured
    logging, this handler writes warnings and errors to stderr, as Python does for a logger without handlers.

    This class is a handler, not a filter, because a logger's filters do not see the records of its child loggers.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        record.rank = _rank()
        said = record.getMessage()
        clean = without_secrets(said)
        if clean != said:
            record.msg, record.args = clean, None
        if record.exc_info:  # formatters print exc_text if it is set, instead of formatting exc_info
            record.exc_text = without_secrets(record.exc_text or logging.Formatter().formatException(record.exc_info))
        if record.levelno >= logging.WARNING and not _is_handled(record.name) and sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # a closed stderr must not end a save
                sys.stderr.write(f"ckptkit: {clean}\n" + (f"{record.exc_text}\n" if record.exc_text else ""))
        return True


def _is_handled(name: str) -> bool:
    """Return whether the program has added a handler to the logger `name` or to one of its parents."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _rank() -> int:
    distributed = sys.modules.get("torch.distributed")  # never import it just for the rank
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0
