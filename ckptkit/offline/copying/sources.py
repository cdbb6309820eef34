"""Reads byte ranges of a checkpoint: from local files, in batches from remote files, and from compressed records."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ckptkit.catalog.entry import Codec
from ckptkit.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MissingExtraError,
    StorageError,
    UnsupportedFormatError,
)
from ckptkit.storage.coalesce import BlockReader
from ckptkit.storage.local import is_directory
from ckptkit.storage.store import FileInfo, ReadInto, Store

_PIECE = 1 << 20  # compressed bytes read at a time


@dataclass(frozen=True, slots=True)
class Origin:
    """The bytes in which a source's offsets count: a file, or the decoded bytes of a compressed record in a file."""

    path: str
    codec: Codec | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """A read of len(view) bytes from `start` of an origin into `view`. `record` is the digest record; -1 for none."""

    origin: int
    start: int
    view: memoryview
    record: int = -1


def identities(store: Store, paths: Collection[str]) -> dict[str, tuple[Any, ...] | None]:
    """Return each file's identity by path: size, modification time, and inode or ETag.

    A file's identity changes when the file is replaced. It is None if the store cannot tell.
    """
    if is_directory(store):
        known: dict[str, tuple[Any, ...] | None] = dict.fromkeys(paths)
        for path in known:
            with suppress(FileNotFoundError):
                stat = store.stat_file(path)
                known[path] = stat.st_size, stat.st_mtime_ns, stat.st_ino
        return known
    found: dict[str, FileInfo | None] = {}
    with suppress(FileNotFoundError, PermissionError, StorageError):
        if store.url.startswith("http"):
            found = {path: store.info(path) for path in paths}  # a web server's listing has no sizes
        else:
            for folder in {path.rpartition("/")[0] for path in paths}:
                found |= {item.path: item for item in store.list(folder)}
    infos = ((path, found.get(path)) for path in paths)
    return {path: None if item is None else (item.size, item.mtime, item.tag) for path, item in infos}


class Descriptors:
    """Open file descriptors, by path. If there are more than `limit`, unused ones are closed."""

    def __init__(self, opener: Callable[[str], int], limit: int = 256) -> None:
        self._opener = opener
        self._limit = limit
        self._open: dict[str, list[int]] = {}  # path -> [descriptor, users], least recently used first
        self._lock = threading.Lock()

    @contextmanager
    def using(self, path: str) -> Iterator[int]:
        """Yield a descriptor for the file at `path`."""
        with self._lock:
            held = self._open.pop(path, None) or [self._opener(path), 0]
            held[1] += 1
            self._open[path] = held
            if len(self._open) > self._limit:
                unused = [name for name, (_, users) in self._open.items() if not users]
                for name in unused[: len(self._open) - self._limit]:
                    os.close(self._open.pop(name)[0])
        try:
            yield held[0]
        finally:
            with self._lock:
                held[1] -= 1

    def close(self) -> None:
        with self._lock:
            for descriptor, _ in self._open.values():
                os.close(descriptor)
            self._open.clear()


class SourceReader:
    """Reads ranges of one checkpoint's origins. Thread-safe."""

    def __init__(self, store: Store, origins: Sequence[Origin]) -> None:
        self._store = store
        self._origins = origins
        self._local = store if is_directory(store) else None
        self.descriptors = Descriptors(self._local.open_file) if self._local is not None else None
        self._blocks = BlockReader(store, len({origin.path for origin in origins}))
        self._decoders: dict[int, _Decoder] = {}
        self._lock = threading.Lock()

    @property
    def is_local(self) -> bool:
        return self._local is not None

    def has_file(self, origin: int) -> bool:
        """Return whether an origin is a local file, of which small reads are cheap."""
        return self.is_local and self._origins[origin].codec is None

    def read(self, origin: int, start: int, view: memoryview) -> None:
        """Fill `view` with an origin's bytes from `start` on. Raises IncompleteCheckpointError if it ends early."""
        self.read_many([Range(origin, start, view)])

    def read_many(self, ranges: Sequence[Range]) -> None:
        """Fill several views. Reads of a remote store are batched."""
        batch: list[ReadInto] = []
        for item in ranges:
            where = self._origins[item.origin]
            if where.codec is not None:
                self._decode(item.origin, where.codec, item.start, item.view)
            elif self.descriptors is None:
                batch.append(ReadInto(where.path, item.start, item.view))
            else:
                with self.descriptors.using(where.path) as descriptor:
                    done = 0
                    while done < len(item.view):
                        got = os.preadv(descriptor, [item.view[done:] if done else item.view], item.start + done)
                        if got == 0:
                            raise IncompleteCheckpointError(
                                f"{where.path}: the file has {os.fstat(descriptor).st_size} bytes, but bytes up to "
                                f"{item.start + len(item.view)} are needed. It is truncated."
                            )
                        done += got
        if len(batch) == 1:
            self._blocks.read_into(batch[0].path, batch[0].start, batch[0].view)
        elif batch:
            self._blocks.read_many(batch)

    def _decode(self, origin: int, codec: Codec, start: int, view: memoryview) -> None:
        # A record is mostly read forwards. Its decoder is kept between reads, and replaced only to go back.
        with self._lock:
            decoder = self._decoders.pop(origin, None)
        if decoder is None or decoder.at > start:
            decoder = _Decoder(self._store, self._origins[origin].path, codec)
        decoder.read(start, view)
        with self._lock:
            self._decoders[origin] = decoder

    def forget(self, origin: int) -> None:
        """Drop the decoder of a compressed record."""
        with self._lock:
            self._decoders.pop(origin, None)

    def close(self) -> None:
        with self._lock:
            self._decoders.clear()
        if self.descriptors is not None:
            self.descriptors.close()


_MAX_WINDOW = 128 << 20  # bytes; zstd's default limit, because a damaged or hostile frame may ask for gigabytes


@dataclass(slots=True)
class _Compressed:
    """The bytes [start, stop) of a file as a stream, for the decompressor."""

    store: Store
    path: str
    start: int
    stop: int

    def read(self, nbytes: int) -> bytes:
        data = self.store.read(self.path, self.start, min(self.start + nbytes, self.stop))
        self.start += len(data)
        return data


class _Decoder:
    """Decodes one compressed record from start to end."""

    def __init__(self, store: Store, path: str, codec: Codec) -> None:
        if codec.name != "zstd":
            raise UnsupportedFormatError(f"{path}: codec {codec.name!r} is not supported; only zstd is.")
        try:
            import zstandard
        except ImportError as error:
            raise MissingExtraError(
                f"{path} is compressed with zstd. Install it from the checkout with: pip install -e '.[zstd]'"
            ) from error
        self._path = path
        self._error = zstandard.ZstdError
        source: Any = _Compressed(store, path, codec.start, codec.start + codec.nbytes)
        self._stream = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(
            source, read_size=_PIECE, read_across_frames=True
        )
        self.at = 0  # position in the decoded bytes

    def read(self, start: int, view: memoryview) -> None:
        while self.at < start:  # decode and discard
            self._fill(memoryview(bytearray(min(_PIECE, start - self.at))))
        self._fill(view)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            try:
                got = self._stream.readinto(view)
            except self._error as error:
                raise CorruptCheckpointError(f"{self._path}: its zstd data is damaged: {error}.") from error
            if not got:
                raise IncompleteCheckpointError(
                    f"{self._path}: a zstd record ends at byte {self.at}, but {len(view)} more are needed."
                )
            self.at += got
            view = view[got:]
