"""The interface of every store: read ranges, write files atomically, list, delete."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ckptkit.errors import UnsafePathError, UsageError

__all__ = [
    "BlobWriter",
    "FileInfo",
    "ReadInto",
    "SERVICES",
    "Service",
    "Store",
    "UnfinishedUpload",
    "Uploads",
    "require_bucket",
    "split_url",
    "checked_path",
    "is_path",
    "is_safe_name",
]


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry of a listing.

    Attributes:
        path: Relative to the store, with "/" between parts.
        kind: "file", "directory", "symlink" or "other" (FIFO, device, socket). Symlinks are not followed.
        size: Bytes; 0 for what is no file.
        mtime: Seconds since the epoch; 0.0 where the store has none.
        tag: Changes whenever the content does (an ETag, a generation); "" where the store tells none.
    """

    path: str
    kind: str
    size: int
    mtime: float
    tag: str = ""


@dataclass(frozen=True, slots=True)
class ReadInto:
    """One range to read: len(view) bytes from `start` of `path` into `view`."""

    path: str
    start: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """A multipart upload that was begun and neither completed nor aborted. It costs, and nobody sees it.

    Attributes:
        path: Of its object, relative to the store that was asked.
    """

    name: str
    upload_id: str
    started: float
    path: str = ""


Uploads = list[UnfinishedUpload]  # a Store has a method called list


class BlobWriter(Protocol):
    """A file that becomes visible whole, when the `with` block ends well, or not at all."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`, all of it."""


@runtime_checkable
class Store(Protocol):
    """Files below one URL. Paths are relative, with "/" between parts; "" is the root itself.

    Every method may be called from several threads. Failures that are worth retrying are retried inside.

    Raises (all methods):
        FileNotFoundError: The path does not exist.
        PermissionError: Access is denied.
        UnsafePathError: The path is absolute, has "..", NUL or a backslash, or is empty where a file is meant.
        StorageError: Anything else that the storage reports.
    """

    url: str
    asking_costs: bool
    """Each look and each read is a request that waits for a server: ask for much, and several at once."""
    sizes_are_free: bool
    """To look at what has a name, and how large it is, costs nothing."""

    def child(self, path: str) -> Store:
        """Return the store of the directory at `path`."""

    def info(self, path: str) -> FileInfo | None:
        """Return what is at `path`, None where there is nothing. Never follows a symlink, never cached."""

    def list(self, path: str = "", *, recursive: bool = False) -> list[FileInfo]:
        """Return what lies below `path`, sorted by path, paths relative to the store; [] for no directory.

        Never cached, symlinks not followed. With `recursive`, files only.
        """

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of a regular file; fewer only at the end of the file."""

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        """Fill `view` from `start`. Raises IncompleteCheckpointError, naming the file, where it is too short."""

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        """Fill many views: near ranges of a file become one read, several reads are in flight."""

    def writer(self, path: str, *, sync: bool = True) -> AbstractContextManager[BlobWriter]:
        """Open a new file that appears whole or not at all. `sync`: durable once the block ends.

        Raises:
            FileExistsError: The path is taken (where the store can tell).
        """

    def write(self, path: str, data: bytes | memoryview, *, overwrite: bool = False, sync: bool = True) -> None:
        """Write a whole file at once. Without `overwrite` it must not exist: this is the put-if-absent
        of the commit protocol, atomic where the store can do it. Raises FileExistsError."""

    @property
    def has_conditional_writes(self) -> bool | None:
        """Whether a write without `overwrite` is known to be refused where something is; None: not tried yet."""

    def try_conditional(self, path: str, data: bytes) -> None:
        """Find out whether there are conditional writes, where that is not known, by a file that holds `data`."""

    def claim(self, path: str, data: bytes, *, looked: bool) -> None:
        """Write a file that one of several writers gets. Not synced: a machine that goes down takes its owner with it.

        Args:
            looked: The caller has just seen that nobody has it.

        Raises:
            FileExistsError: Another one was first, where the store can tell.
        """

    def exists(self, path: str) -> bool:
        """Tell whether there is a file at `path`; one request."""

    def fetch(self, paths: Iterable[str]) -> None:
        """Fetch small files that are about to be read, all at once, where that saves waiting."""

    def settle(self) -> None:
        """Wait for all that was written. Raises the first failure."""

    def arrived(self) -> dict[str, int]:
        """Return the size of each file of which the store has said, as it was written, that it is there whole."""

    def with_each_put(self, around: Callable[[Callable[[], str]], str]) -> Store:
        """Return the same place with each try of each put made by `around`, where writes are puts."""

    def unfinished_uploads(self, path: str = "", *, older_than_s: float = 0.0) -> Uploads:
        """Return uploads in parts below `path` that nobody finished: they cost, and no listing shows them."""

    def end_uploads(self, found: Sequence[UnfinishedUpload]) -> None:
        """Throw these away."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files; those that are gone already do not count as errors."""

    def delete_tree(self, path: str) -> None:
        """Delete a directory and all below it, never following a symlink."""

    def existing(self) -> Store:
        """Return the same place, to be written to only while it is there: a directory that is gone, with its mount or
        by hand, is never made anew."""

    def with_free_names(self) -> Store:
        """Return the same place for a writer that knows its names to be free: nobody is asked before a write. What may
        not be replaced is still not replaced, where the store can tell."""

    def sync_directory(self, path: str = "") -> None:
        """Make the names in a directory durable, where they are not so by themselves."""

    def free_bytes(self) -> int | None:
        """Return the free space; None where the store has no limit one can ask for."""


@dataclass(frozen=True, slots=True)
class Service:
    """An object store that has code of its own here.

    Attributes:
        api: Its `ObjectApi`: module and class, below ckptkit.storage.
        extra: The extra of this package that installs its client.
        credentials: Where its client finds them, in words.
        environment: How the variables begin that its client reads when it connects.
        transient: Class names of client errors that are worth a retry. Names, because the client may not be installed.
    """

    api: str
    extra: str
    credentials: str
    environment: tuple[str, ...]
    transient: tuple[str, ...] = ()


_S3 = Service(
    "s3.S3Api",
    "s3",
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE), storage_options={...}",
    ("AWS_",),
)
_GCS = Service(
    "gcs.GcsApi",
    "gcs",
    "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, storage_options={...}",
    ("GOOGLE_", "GCSFS_", "CLOUDSDK_", "STORAGE_EMULATOR"),
)
_AZURE = Service(
    "azure.AzureApi",
    "azure",
    "AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, storage_options={...}",
    ("AZURE_",),
    ("ServiceRequestError", "ServiceResponseError"),
)
SERVICES = {"s3": _S3, "s3a": _S3, "gs": _GCS, "gcs": _GCS, "abfs": _AZURE, "abfss": _AZURE, "az": _AZURE}
"""Object stores by the protocol of their URLs. Whatever else fsspec opens goes by its plain interface."""


def split_url(url: str) -> tuple[str, str]:
    """Return (protocol, rest): ("file", path) for a plain path, ("s3", "bucket/key") for "s3://bucket/key"."""
    protocol, separator, rest = url.partition("://")
    if not separator or "/" in protocol:
        return "file", url
    return protocol.lower(), rest


def require_bucket(url: str) -> None:
    """Raise UsageError if `url` needs a bucket and names none: "s3://", "gs:///run"."""
    protocol, rest = split_url(url)
    if protocol in SERVICES and not rest.partition("/")[0]:
        raise UsageError(f"{url} names no bucket. It is written {protocol}://BUCKET/{rest.strip('/') or 'PATH'}")


# Which relative paths a store accepts.


# A part that is empty, "." or "..", and characters that no path may have: halves of some, too, but for those that stand
# for a byte of a name that is not UTF-8.
_REFUSED = re.compile("(?:^|/)[.]{0,2}(?:/|\\Z)|[\\\\\\x00-\\x1f\\x7f\ud800-\udc7f\udd00-\udfff]")

# Names that Windows keeps for devices, whatever the extension: a checkpoint must be portable.
_DEVICES = frozenset(
    [
        "con",
        "prn",
        "aux",
        "nul",
        "conin$",
        "conout$",
        *(f"{port}{i}" for port in ("com", "lpt") for i in "123456789¹²³"),
    ]
)


def checked_path(path: str, *, root_allowed: bool = False) -> str:
    """Return `path` if it names something below a store.

    Raises:
        UnsafePathError: It is absolute, empty, or has "." or "..", an empty part, NUL, a control
            character or a backslash.
    """
    if not (is_path(path) or (path == "" and root_allowed)):
        raise UnsafePathError(
            f"path {path!r} is refused: it must be relative, with '/' between its parts, and may not have "
            "'.', '..', a backslash, a control character or half a character."
        )
    return path


def is_path(path: str) -> bool:
    """Tell whether `path` names something below a store; others' keys may be such as none can read or delete here."""
    return len(path) <= 4096 and not _REFUSED.search(path)


def is_safe_name(name: str) -> bool:
    """Tell whether `name` is one plain file name on any system: no separator, drive, device or trailing dot."""
    return (
        0 < len(name.encode("utf-8", "surrogatepass")) <= 255
        and name not in (".", "..")
        and not any(c in '/\\:*?"<>|' or ord(c) < 32 or ord(c) == 127 for c in name)
        and not name.endswith((" ", "."))
        and name.split(".", maxsplit=1)[0].lower() not in _DEVICES
    )
