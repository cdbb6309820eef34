"""Opens the checkpoints that a command reads, and protects them from rotation until the command ends."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, ParamSpec, TypeVar

from ckptkit.catalog.entry import Catalog
from ckptkit.checkpoint.run.address import resolve_url
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.run.pins import pin_url, split_checkpoint_url
from ckptkit.errors import (
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafePathError,
    UnsafePickleError,
    command_line,
)
from ckptkit.formats.detect import Source, open_source
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.own.record import CommitRecord, find_record, step_of_name
from ckptkit.offline.copying.resume import identities
from ckptkit.offline.publish import is_one_of_many, process_group

# --- Detecting changes to source files during a command, because checkpoints in other formats cannot be pinned


Seen = Mapping[str, tuple[Any, ...] | None]
"""The identity of each file by path, as returned by `identities`."""


def look_at(source: Source) -> Seen:
    """Return the identities (size, modification time, and inode or ETag) of the source's tensor files."""
    return identities(source.store, sorted(source.catalog.paths()))


def _differs(now: Seen, seen: Seen, path: str, *, tags: bool = True) -> bool:
    """Return whether a file was replaced; False if unknown. If `tags` is False, its inode or ETag is not compared."""
    one, other = now.get(path), seen[path]
    if one is None or other is None:
        return False
    return bool(one != other if tags else one[:2] != other[:2])


P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)
_MAX_TRIES = 100  # a retry is needed only if a save rotated the checkpoint away after it was opened
_VANISHED = (FileNotFoundError, CorruptCheckpointError)


@dataclass(slots=True)
class _Reading:
    """The sources that a command reads.

    Attributes:
        why: The command's name, recorded in the pins.
        ours: The sources that are ckptkit checkpoints, each with the URL that was requested.
        seen: The sources that are not ckptkit checkpoints, each with the identities of its files.
    """

    why: str
    pins: ExitStack = field(default_factory=ExitStack)
    sources: list[Source] = field(default_factory=list)
    ours: list[tuple[str, Source]] = field(default_factory=list)
    seen: list[tuple[Source, Seen]] = field(default_factory=list)


_current: ContextVar[_Reading] = ContextVar("ckptkit-reading")


def reads_checkpoints(command: Callable[P, T]) -> Callable[P, T]:
    """Wrap `command`. Sources that the command opens with `open_pinned` stay pinned until the command ends.

    A source in a read-only run cannot be pinned, and so may be deleted during the command. If that happens to a source
    that was requested as the run's newest checkpoint, the command starts over once, with the newest checkpoint that
    still exists.
    """

    @functools.wraps(command)
    def reading(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return _run(command, *args, **kwargs)
        except _GoneError as gone:
            if not gone.replaced or is_one_of_many():  # either all ranks retry, or none
                raise gone.told from gone.__cause__
            _log.warning("%s Starting over with the newest checkpoint.", gone.told)
        try:
            return _run(command, *args, **kwargs)
        except _GoneError as gone:
            raise gone.told from gone.__cause__

    return reading


class _GoneError(Exception):
    """A source was deleted or replaced while it was read.

    `replaced` is set if the requested URL (such as RUN/latest) may now lead to a different checkpoint.
    """

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
    """Return the error with a message that also names the damaged checkpoint and the command that lists all damage."""
    words = f"{getattr(error, 'filename', None) or ''}: {error}"
    where = [source for source in sources if f"{source.store.url}/" in words]
    if isinstance(error, CorruptCheckpointError):
        if error.checkpoint or isinstance(error, (UnsafePathError, UnsafePickleError)):
            return error  # the checkpoint could not be opened, or the message already names it
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
    see = "; ".join(command_line("verify", url) for url in urls)
    told.args = (f"{told} It is part of {' or of '.join(urls)}. To see all damage: {see}",)
    return told


def open_pinned(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    options: ReadOptions | None = None,
    together: bool = False,
    inner: Literal["none", "weights", "all"] = "none",
) -> Source:
    """Open the checkpoint at `url`, and protect it from rotation until the enclosing `reads_checkpoints` command ends.

    If the checkpoint is deleted before it is protected, the URL (such as RUN/latest) is resolved again.

    Args:
        together: Whether several ranks write one result. If so, all ranks must call this, and read the checkpoint that
            rank 0 chose, because "latest" may change between the calls.
        inner: Which tensor subclasses that torch's `dcp.save` stored are replaced with their inner tensors: none, only
            weights, or all.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CkptkitError: The format's reader raised an error.
    """
    reading = _current.get()
    if together and is_one_of_many():
        source = _opened_together(reading, url, storage_options, options)
    else:
        source = _opened(reading, url, storage_options, options)
    if inner != "none":
        from ckptkit.formats.dcp.class_records import in_parts

        whole = source
        catalog = in_parts(whole.store, whole.catalog, optimizer=inner == "all")
        if catalog is not whole.catalog:  # not a ckptkit checkpoint, which already stores inner tensors
            source = replace(whole, catalog=catalog)
            reading.sources = [source if item is whole else item for item in reading.sources]
    if together and not any(item is source for _, item in reading.ours):
        reading.seen.append((source, look_at(source)))
    return source


def _opened_together(
    reading: _Reading, url: str, storage_options: Mapping[str, Any] | None, options: ReadOptions | None
) -> Source:
    reading.pins.enter_context(process_group())
    coordinator = reading.pins.enter_context(closing(Coordinator()))
    opened: list[Source] = []

    def choose() -> str:
        opened.append(_opened(reading, url, storage_options, options))
        return opened[0].url

    def follow() -> None:
        if not opened:
            opened.append(_opened(reading, chosen, storage_options, options))

    chosen = coordinator.decide(choose, "choosing the source")
    coordinator.all_ok(follow, "opening the source")
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
            info = source.catalog.info
            if not info.format.startswith("ckptkit-") or "digests" not in info.extra:
                reading.sources.append(source)
                return source  # ckptkit did not commit it, and therefore never deletes it
            pin = pin_url(source.url, why=reading.why, storage_options=storage_options)
            with ExitStack() as stack:
                record = stack.enter_context(pin)
                if record is None and _is_there(source):  # the checkpoint is not part of a run
                    reading.sources.append(source)
                    return source
                if record is not None and _is_of(source, record):
                    reading.sources.append(source)
                    reading.pins.push(stack.pop_all())
                    reading.ours.append((url, source))
                    return source
            error: Exception = CheckpointNotFoundError(f"{source.url} was replaced while it was opened.")
        except _VANISHED as found:
            # The same error twice means that the checkpoint is damaged rather than being deleted.
            if str(found) == before:
                raise
            error = found
        before = str(error)
    raise error


def watch(source: Source) -> Source:
    """Record the identities of a source's files for `check_read_as_seen`. Return the source."""
    _current.get().seen.append((source, look_at(source)))
    return source


def check_still_there(source: Source) -> None:
    """Raise IncompleteCheckpointError if `source`, a ckptkit checkpoint, has been deleted or replaced.

    Only changes since `open_pinned` count.
    """
    if any(item.store is source.store for _, item in _current.get().ours) and not _is_there(source):
        raise IncompleteCheckpointError("its files are missing, or belong to another save.")


def check_read_as_seen(source: Source) -> None:
    """Raise CorruptCheckpointError if any file of a source was replaced since `open_pinned`.

    After a replacement, the result might mix two checkpoints. ckptkit checkpoints are not checked, because their files
    have unique names and digests.
    """
    for seen in [seen for item, seen in _current.get().seen if item.store is source.store]:
        now = look_at(source)
        changed = [path for path in seen if _differs(now, seen, path)]
        if changed and source.store.asking_costs:
            # Some gateways return a new ETag for each request. Ignore the ETags of such files.
            one, other = (look_at(source) for _ in range(2))
            changed = [p for p in changed if not _differs(one, other, p) or _differs(one, seen, p, tags=False)]
        if changed:
            error = CorruptCheckpointError(
                f"{source.url}/{changed[0]} was changed or replaced while it was read, so the result could "
                "mix two checkpoints. Nothing was published. Run the command again when no program writes there."
            )
            error.checkpoint = source.url
            raise error


def _is_there(source: Source) -> bool:
    try:
        record = find_record(source.store)
    except (CkptkitError, OSError):
        return False
    return record is not None and _is_of(source, record)


def _is_of(source: Source, record: CommitRecord) -> bool:
    """Return whether the source's catalog was read from the files that `record` committed."""
    prefix = f"{record.data}/" if record.data else ""
    committed = {prefix + path: item.digest for path, item in record.files.items()}
    return source.catalog.info.extra.get("digests") == committed


def records_of(catalog: Catalog, name: str) -> list[tuple[str, int, int]]:
    """Return (path, start, nbytes) of each byte range in which a tensor is stored.

    This is for tensors of classes that ckptkit does not know, whose elements cannot be read.
    """
    if name in catalog.tensors:
        return catalog.tensors[name].slices.records()
    item = catalog.objects[name]
    if item.codec is not None:
        return [(item.path, item.codec.start, item.codec.nbytes)]
    return [(item.path, item.start, item.nbytes)]


# --- the run's previous checkpoint, which messages about damage suggest


def earlier_checkpoint(url: str, *, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return the URL of the run's last committed checkpoint before the checkpoint at `url`.

    Returns "" if there is no such checkpoint.
    """
    from ckptkit.checkpoint.run.inventory import list_checkpoints

    try:
        root, name = split_checkpoint_url(url, storage_options=storage_options)
        committed = [item.name for item in list_checkpoints(root).committed]
    except (CkptkitError, OSError):
        return ""
    if name in committed:
        older = committed[: committed.index(name)]
    else:  # the checkpoint is damaged or not part of this run
        step = step_of_name(name)
        older = [other for other in committed if step is not None and (step_of_name(other) or 0) < step]
    return f"{url.rstrip('/').rpartition('/')[0]}/{older[-1]}" if older else ""
