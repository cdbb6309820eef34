"""The checkpoints that a command reads, kept from rotation until the command has ended."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from ckptkit.checkpoint.address import resolve_url
from ckptkit.errors import (
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafePathError,
    UnsafePickleError,
)
from ckptkit.formats.detect import Source, open_source
from ckptkit.formats.layout import CommitRecord, find_record
from ckptkit.formats.options import ReadOptions
from ckptkit.offline.publish import is_one_of_many
from ckptkit.offline.unchanged import Seen, check_unchanged, look_at

__all__ = ["check_read_as_seen", "check_still_there", "open_pinned", "reads_checkpoints"]

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)
_MAX_TRIES = 100  # each needs another save that rotated away what was just opened: small ones, back to back
_VANISHED = (FileNotFoundError, CorruptCheckpointError)


@dataclass(slots=True)
class _Reading:
    """What the command called `why` reads: the pins, the sources, and those of our own checkpoints with the URL that
    each was asked for by; of sources of other formats, what was seen when they were opened."""

    why: str
    pins: ExitStack = field(default_factory=ExitStack)
    sources: list[Source] = field(default_factory=list)
    ours: list[tuple[str, Source]] = field(default_factory=list)
    seen: list[tuple[Source, Seen]] = field(default_factory=list)


_current: ContextVar[_Reading] = ContextVar("ckptkit-reading")


def reads_checkpoints(command: Callable[P, T]) -> Callable[P, T]:
    """Return `command` with its sources (`open_pinned`) pinned until it ends.

    A pin can't be written where the run may only be read. Such a source can vanish; where it was asked for as the
    newest of its run, the command is then run once more, on what is the newest now.
    """

    @functools.wraps(command)
    def reading(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return _run(command, *args, **kwargs)
        except _GoneError as gone:
            if not gone.replaced or is_one_of_many():  # ranks go together, or not at all
                raise gone.told from gone.__cause__
            _log.warning("%s Starting again with the newest that is there.", gone.told)
        try:
            return _run(command, *args, **kwargs)
        except _GoneError as gone:
            raise gone.told from gone.__cause__

    return reading


class _GoneError(Exception):
    """A source was deleted while it was read. `replaced`: it was the newest, another one may be that now."""

    def __init__(self, told: CheckpointNotFoundError, replaced: bool) -> None:
        super().__init__(told)
        self.told, self.replaced = told, replaced


def _run(command: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    reading = _Reading(command.__name__)
    token = _current.set(reading)
    with reading.pins:
        try:
            return command(*args, **kwargs)
        except _VANISHED as error:
            gone = next((pair for pair in reading.ours if not _is_there(pair[1])), None)
            if gone is None:
                placed = _placed(error, reading.sources)
                if placed is error:
                    raise
                raise placed from error
            asked, source = gone
            told = CheckpointNotFoundError(f"{source.url} was deleted or replaced while it was read: {error}")
            raise _GoneError(told, source.url.rstrip("/") != asked.rstrip("/")) from error
        finally:
            _current.reset(token)


def _placed(error: Exception, sources: Sequence[Source]) -> Exception:
    """The error with the checkpoint in which the damage is, and with what shows all of it."""
    words = f"{getattr(error, 'filename', None) or ''}: {error}"
    where = [source for source in sources if f"{source.store.local_root or source.url}/" in words]
    if isinstance(error, CorruptCheckpointError):
        if error.checkpoint or isinstance(error, (UnsafePathError, UnsafePickleError)):
            return error  # it can't be opened; or it was made like that
        told: CorruptCheckpointError = type(error)(str(error))
        where = where or [s for s in sources if str(error).partition(":")[0] in s.catalog.info.files]
    elif isinstance(error, FileNotFoundError) and not isinstance(error, CkptkitError):
        text = f"{error.filename}: the file is missing." if error.filename else error.strerror or str(error)
        told = IncompleteCheckpointError(text)
    else:
        return error
    if not where:
        return error
    urls = list(dict.fromkeys(source.url for source in where))
    told.checkpoint = urls[0] if len(urls) == 1 else ""
    told.args = (f"{told} It is a part of {' or of '.join(urls)}. To see all that is bad: ckptkit verify {urls[0]}",)
    return told


def open_pinned(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: ReadOptions | None = None,
    together: bool = False,
) -> Source:
    """Open the checkpoint that `url` names, pinned until the command of `reads_checkpoints` around it ends.

    Where it is deleted between the choice and the pin, the choice is made again.

    Args:
        together: Where several ranks write one result, all of them call this, and read what rank 0 has chosen:
            "latest" may mean another one a moment later.

    Raises:
        CheckpointNotFoundError: There is nothing, or nothing that is a checkpoint.
        CkptkitError: What the reader of the format raises.
    """
    reading = _current.get()
    if together and is_one_of_many():
        source = _opened_together(reading, url, storage_options, options)
    else:
        source = _opened(reading, url, storage_options, options)
    if together and not any(item is source for _, item in reading.ours):
        reading.seen.append((source, look_at(source)))
    return source


def _opened_together(
    reading: _Reading, url: str, storage_options: Mapping[str, Any] | None, options: ReadOptions | None
) -> Source:
    from ckptkit.checkpoint.coordinator import Coordinator
    from ckptkit.offline.team import process_group

    reading.pins.enter_context(process_group())
    coordinator = reading.pins.enter_context(closing(Coordinator()))
    opened: list[Source] = []

    def choose() -> str:
        opened.append(_opened(reading, url, storage_options, options))
        return opened[0].url

    def follow() -> None:
        if not opened:
            opened.append(_opened(reading, chosen, storage_options, options))

    chosen = coordinator.decide(choose, "choosing what to read")
    coordinator.all_ok(follow, "opening what is read")
    return opened[0]


def _opened(
    reading: _Reading, url: str, storage_options: Mapping[str, Any] | None, options: ReadOptions | None
) -> Source:
    before = ""
    for _ in range(_MAX_TRIES):
        try:
            source = open_source(
                resolve_url(url, storage_options=storage_options), storage_options=storage_options, options=options
            )
            if not source.catalog.info.format.startswith("ckptkit-"):
                reading.sources.append(source)
                return source  # foreign: nobody of ours deletes it
            from ckptkit.checkpoint.pins import pin_url

            pin = pin_url(source.url, why=reading.why, storage_options=storage_options)
            with ExitStack() as stack:
                record = stack.enter_context(pin)
                if record is None and _is_there(source):  # of no run
                    reading.sources.append(source)
                    return source
                if record is not None and _is_of(source, record):
                    reading.sources.append(source)
                    reading.pins.push(stack.pop_all())
                    reading.ours.append((url, source))
                    return source
            error: Exception = CheckpointNotFoundError(f"{source.url} was replaced while it was opened.")
        except _VANISHED as found:
            # The same words twice: nobody is deleting, it is like that.
            if str(found) == before:
                raise
            error = found
        before = str(error)
    raise error


def check_still_there(source: Source) -> None:
    """Raise where the source is one of ours that was deleted, or replaced, since `open_pinned`."""
    if any(item is source for _, item in _current.get().ours) and not _is_there(source):
        raise IncompleteCheckpointError("its files are gone, or are those of another save.")


def check_read_as_seen(source: Source) -> None:
    """Raise where files of a source of another format were replaced since `open_pinned`. Those of ours never are: they
    have names of their own, and digests."""
    for item, seen in _current.get().seen:
        if item is source:
            check_unchanged(source, seen)


def _is_there(source: Source) -> bool:
    try:
        record = find_record(source.store)
    except (CkptkitError, OSError):
        return False
    return record is not None and _is_of(source, record)


def _is_of(source: Source, record: CommitRecord) -> bool:
    """Whether the catalog was read from what the record committed."""
    prefix = f"{record.data}/" if record.data else ""
    committed = {prefix + path: item.digest for path, item in record.files.items()}
    return source.catalog.info.extra.get("digests") == committed
