"""Defines the interface of every store: read ranges, write files atomically, list, delete."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ckptkit.errors import UnsafePathError, UsageError


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry of a listing.

    Attributes:
        kind: "file", "directory", "symlink" or "other" (FIFO, device, socket). Symlinks are not followed.
        size: Size of a file in bytes. -1 if unknown, as for a symlink; 0 for the other kinds.
        mtime: Modification time in seconds since the epoch. 0.0 if the store records no times.
        tag: The store's tag of the content (ETag, generation), which changes with the content. "" without tags.
    """

    path: str
    kind: str
    size: int
    mtime: float
    tag: str = ""


@dataclass(frozen=True, slots=True)
class ReadInto:
    """One range to read: fills `view` with the bytes of `path` that start at `start`."""

    path: str
    start: int
    view: memoryview


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """A multipart upload that was neither completed nor aborted. Its parts cost money, but no listing shows them."""

    name: str
    upload_id: str
    started: float
    path: str = ""


Uploads = list[UnfinishedUpload]  # inside a Store, `list` is a method


class BlobWriter(Protocol):
    """A new file. It appears when the `with` block succeeds. If the block fails, no file appears."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of `data`."""


class Store(Protocol):
    """Files under one URL. Paths are relative, with "/" between components. "" is the root itself.

    Every method may be called from several threads, and retries transient failures.

    Raises (all methods):
        FileNotFoundError: The path does not exist.
        PermissionError: Access is denied.
        UnsafePathError: The path is not valid (see `checked_path`).
        StorageError: Any other failure of the storage.
    """

    url: str
    asking_costs: bool
    """Whether every lookup and every read is a request to a server. If so, callers combine lookups and reads."""
    sizes_are_free: bool
    """Whether looking up names and sizes costs nothing."""

    def child(self, path: str) -> Store:
        """Return the store of the directory at `path`."""

    def info(self, path: str) -> FileInfo | None:
        """Return the entry at `path`, or None. The result is never cached."""

    def exists(self, path: str) -> bool:
        """Return whether there is a file at `path`. Makes at most one request.

        On a file system, also returns True for a directory.
        """

    def list(self, path: str = "", *, recursive: bool = False) -> list[FileInfo]:
        """Return the entries of the directory `path`, sorted by path. [] if `path` is not a directory.

        The result is never cached. With `recursive`, returns all files under `path`, and no directories.
        """

    def free_bytes(self) -> int | None:
        """Return the free space in bytes. None if the store has no limit."""
        return None

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of a regular file. Returns fewer bytes if the file ends before `stop`."""

    def read_into(self, path: str, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `start` on. Raises IncompleteCheckpointError if the file is too short."""
        self.read_many([ReadInto(path, start, view)])

    def read_many(self, reads: Sequence[ReadInto], *, workers: int = 0) -> None:
        """Fill the views of many reads. Joins nearby ranges of the same file, and reads several ranges at a time."""

    def fetch(self, paths: Iterable[str]) -> None:
        """Download small files concurrently, if this makes it faster to read them later."""
        return

    def writer(self, path: str, *, sync: bool = True) -> AbstractContextManager[BlobWriter]:
        """Open a new file, which appears when the block succeeds. With `sync`, it is then durable.

        Raises FileExistsError if the path exists. Some stores can't tell.
        """

    def write(self, path: str, data: bytes | memoryview, *, overwrite: bool = False, sync: bool = True) -> None:
        """Write a whole file at once. Raises FileExistsError if the file exists and `overwrite` is False.

        The check and the write are one atomic step if the store has conditional writes (put-if-absent).
        """

    @property
    def has_conditional_writes(self) -> bool | None:
        """Whether the store itself can refuse to replace an existing file. None if this was not tested yet."""

    def try_conditional(self, path: str, data: bytes) -> None:
        """Test whether the store has conditional writes, if unknown. The file must exist and contain `data`."""
        return

    def settle(self) -> None:
        """Wait for all writes. If a write failed, raise the first error."""
        return

    def arrived(self) -> dict[str, int]:
        """Return {path: size} for files that the store has confirmed to be complete."""
        return {}

    def with_each_put(self, around: Callable[[Callable[[], str]], str]) -> Store:
        """Return a store for the same files that calls `around(put)` for each try of a put.

        Has no effect on a file system, because only remote stores make puts.
        """
        return self

    def unfinished_uploads(self, path: str = "", *, older_than_s: float = 0.0) -> Uploads:
        """Return the unfinished multipart uploads under `path` that began at least `older_than_s` seconds ago.

        Their parts cost money.
        """
        return []

    def end_uploads(self, found: Sequence[UnfinishedUpload]) -> None:
        """Abort the uploads `found`."""
        return

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files. Missing files are ignored."""

    def delete_tree(self, path: str) -> None:
        """Delete a directory and everything under it. Symlinks are deleted, not followed."""

    def existing(self) -> Store:
        """Return a store for the same directory whose writes fail if the directory does not exist."""
        return self

    def with_free_names(self) -> Store:
        """Return a store for the same files whose writes skip the request that checks whether the name is free."""
        return self

    def sync_directory(self, path: str = "") -> None:
        """Make the entries of a directory durable. Does nothing if the store always does so."""
        return


@dataclass(frozen=True, slots=True)
class Service:
    """An object store for which this package has a module.

    Attributes:
        api: Module and class of the store's `FsspecApi`, relative to ckptkit.storage.
        extra: Name of the ckptkit extra that installs the store's client.
        credentials: A text for error messages that says where the client finds credentials.
        environment: Prefixes of the environment variables that the client reads.
        transient: Names of the client's error classes after which a request is retried.
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
"""Object stores by URL protocol. All other stores use fsspec's generic interface."""


def split_url(url: str) -> tuple[str, str]:
    """Return (protocol, rest): ("file", path) for a path, ("s3", "bucket/key") for "s3://bucket/key"."""
    protocol, separator, rest = url.partition("://")
    if not separator or "/" in protocol:
        protocol, rest = "file", url
    elif protocol.lower() == "file" and rest.startswith("localhost/"):
        rest = rest.removeprefix("localhost")
    if not rest and protocol in ("file", "local"):
        raise UsageError("The path is empty. Is a shell variable not set? For the current directory write '.'.")
    return protocol.lower(), rest


_HALF_PROTOCOL = re.compile(r"(s3|gs|gcs|az|abfs|hf|http|https|memory|file):/([^/].*)")
_VARIABLE = re.compile(r"\$(?:[A-Z_][A-Z0-9_]*(?![\w$])|\{\w+\})")


def check_url(url: str) -> None:
    """Raise UsageError if a URL is malformed. It would count as a path, and a job would start a new run there."""
    protocol, rest = split_url(url)
    if protocol in SERVICES and not rest.partition("/")[0]:
        raise UsageError(f"{url} has no bucket. Write {protocol}://BUCKET/{rest.strip('/') or 'PATH'}")
    if protocol == "file" and os.path.lexists(os.path.expanduser(rest)):
        return
    half = _HALF_PROTOCOL.fullmatch(url)
    if half:
        meant = f"{half[1]}://{'/' * (half[1] == 'file')}{half[2]}"
        raise UsageError(f"{url} has only one slash after the protocol. Did you mean {meant}?")
    if url != url.strip():
        raise UsageError(f"{url!r} begins or ends with white space.")
    variable = _VARIABLE.search(url)
    if variable:
        raise UsageError(f"{url}: {variable[0]} is not expanded. Pass the value of the variable (os.path.expandvars).")


FILE_SYSTEM_FOLDERS = ("lost+found", ".snapshot", ".snapshots", ".zfs")
"""Directories that file systems add to a mount's root. They may be unreadable, or contain copies of deleted runs."""

# Matches empty components, ".", "..", and characters that no path may contain. Lone surrogates must not occur, except
# those with which Python represents the bytes of a file name that is not UTF-8.
_REFUSED = re.compile("(?:^|/)[.]{0,2}(?:/|\\Z)|[\\\\\\x00-\\x1f\\x7f\ud800-\udc7f\udd00-\udfff]")

# Windows reserves these names, with any extension. Checkpoints must be portable.
_DEVICES = frozenset(["con", "prn", "aux", "nul", "conin$", "conout$"]) | frozenset(
    f"{port}{i}" for port in ("com", "lpt") for i in "123456789¹²³"
)


def checked_path(path: str, *, root_allowed: bool = False) -> str:
    """Return `path`. Raise UnsafePathError if it is not a valid path under a store."""
    if not (is_path(path) or (path == "" and root_allowed)):
        raise UnsafePathError(
            f"path {path!r} is refused: it must be relative, with '/' between its parts, and may not have "
            "'.', '..', a backslash, a control character or a lone surrogate."
        )
    return path


def is_path(path: str) -> bool:
    """Return whether `path` is a valid path under a store. Other programs may write keys that are not valid."""
    return len(path) <= 4096 and not _REFUSED.search(path)


def is_safe_name(name: str) -> bool:
    """Return whether `name` is a plain file name on every system, without separator, drive, device or trailing dot."""
    return (
        0 < len(name.encode("utf-8", "surrogatepass")) <= 255
        and name not in (".", "..")
        and not any(c in '/\\:*?"<>|' or ord(c) < 32 or ord(c) == 127 for c in name)
        and not name.endswith((" ", "."))
        and name.split(".", maxsplit=1)[0].lower() not in _DEVICES
    )
