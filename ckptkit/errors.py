"""Defines ckptkit's exceptions, in one tree. Each class also derives from the matching built-in exception.

A message says what went wrong, in which file, tensor or rank, what was expected, what was found, and what to try next.
The command line prints the message as one paragraph and exits with `exit_code`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ckptkit.redact import MASK, masked, without_secrets

__all__ = [
    "CkptkitError",
    "UsageError",
    "CheckpointNotFoundError",
    "CheckpointExistsError",
    "UnsupportedFormatError",
    "CorruptCheckpointError",
    "IncompleteCheckpointError",
    "IntegrityError",
    "UnsafePickleError",
    "UnsafePathError",
    "CheckpointMismatchError",
    "SaveError",
    "LoadError",
    "RankFailedError",
    "NoSpaceError",
    "LeaseHeldError",
    "StorageError",
    "MissingExtraError",
    "NonFiniteGradientError",
]


def command_line(*words: str) -> str:
    """Return a ckptkit command line for a message.

    The words are quoted for the shell. The storage options of the URLs are added.

    Inside a sentence, put the command line in backticks, so that users do not copy the punctuation.
    """
    import shlex  # imported lazily, because only error messages need it

    given = [found for found in map(_options_of, words) if found is not None]
    if not given or all(options == given[0] for options in given):
        prefixes = ["--"] * len(given[:1])
    else:
        prefixes = ["--src-", "--dst-"]  # commands that take two URLs have both of these options
    options = [
        word
        for prefix, found in zip(prefixes, given, strict=False)
        for option in found
        for word in (f"{prefix}storage-option", option)
    ]
    return shlex.join(["ckptkit", *words, *options])


_opened: dict[str, list[str]] = {}  # URL -> its storage options; the most recently opened URL is last
_MAX_OPENED = 64


def remember_options(url: str, options: Mapping[str, Any]) -> None:
    """Remember the storage options of `url` for `command_line`. Secret values are replaced by "***"."""
    _opened.pop(url, None)
    _opened[url] = [f"{name}={_text(value)}" for name, value in masked(options).items()]
    for oldest in list(_opened)[:-_MAX_OPENED]:
        _opened.pop(oldest, None)


def _text(value: object) -> str:
    """Format a value for --storage-option. A str that is not valid JSON stays unchanged. Other values become JSON."""
    try:
        json.loads(str(value))
    except ValueError:
        if isinstance(value, str):
            return value
    return json.dumps(value, default=lambda _: MASK)


def _options_of(word: str) -> list[str] | None:
    """Return the storage options of the opened URL that has the longest path in common with `word`.

    Returns None if `word` is not a URL, or if no URL in its bucket was opened.
    """
    if "://" not in word:
        return None
    bucket = "/".join(word.split("/")[:3]) + "/"
    near = [(url, options) for url, options in list(_opened.items())[::-1] if f"{url}/".startswith(bucket)]
    return max(near, key=lambda pair: len(os.path.commonpath([pair[0], word])))[1] if near else None


_MAX_LINE = 1000


class CkptkitError(Exception):
    """Base class of all errors that ckptkit raises deliberately.

    Credentials are removed from the message. Lines longer than a thousand characters are shortened, because a name in
    a damaged file may be megabytes long.
    """

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(_fit(arg) if isinstance(arg, str) else arg for arg in args))


def _fit(text: str) -> str:
    return without_secrets(_cut(text) if len(text) > _MAX_LINE else text)


def _cut(text: str) -> str:
    lines = text.split("\n")
    half = _MAX_LINE // 2 - 5
    return "\n".join(line if len(line) <= _MAX_LINE else f"{line[:half]} [...] {line[-half:]}" for line in lines)


class UsageError(CkptkitError, ValueError):
    """An argument or option is wrong, or options contradict each other."""

    exit_code = 2


class CheckpointNotFoundError(CkptkitError, FileNotFoundError):
    """There is no checkpoint at the URL."""


class CheckpointExistsError(CkptkitError, FileExistsError):
    """The destination already exists, or another process is writing it. It was not changed.

    Attributes:
        reason: Why the existing files may not be replaced. "" if the files were not examined.
    """

    reason = ""


class UnsupportedFormatError(CkptkitError, ValueError):
    """The format is known, but something in the file cannot be read or written without loss."""


class CorruptCheckpointError(CkptkitError, ValueError):
    """A file of the checkpoint violates its format.

    Attributes:
        checkpoint: The URL of the checkpoint that contains the file. "" if unknown.
    """

    checkpoint = ""


class IncompleteCheckpointError(CorruptCheckpointError):
    """A file, a rank or a part of a tensor is missing."""


class IntegrityError(CorruptCheckpointError):
    """The bytes of a file do not match the digest that was recorded when the file was written."""


class UnsafePickleError(CorruptCheckpointError):
    """A pickle refers to a global that is not on the allow-list. No part of the pickle was executed."""


class UnsafePathError(CorruptCheckpointError):
    """A path is not valid, or leads out of the checkpoint or the store (by "..", or through a symbolic link)."""


class CheckpointMismatchError(CkptkitError, ValueError):
    """The names, shapes or dtypes in a checkpoint do not match the state into which it is loaded, or the base model.

    Nothing was changed.
    """


class SaveError(CkptkitError, RuntimeError):
    """A save failed, or may have failed: if rank 0 died or hung, the message says so."""


class LoadError(CkptkitError, RuntimeError):
    """A load failed."""


class RankFailedError(SaveError):
    """One or more ranks failed. Every rank raises this error. The message names the failed ranks.

    Attributes:
        causes: A mapping from each failed rank to the error that it reported.
        interrupted: Whether every failed rank died, hung or was stopped by Ctrl-C.
    """

    def __init__(self, message: str, causes: Mapping[int, str] | None = None, *, interrupted: bool = False) -> None:
        super().__init__(message)
        self.causes: dict[int, str] = dict(causes or {})
        self.interrupted = interrupted


class NoSpaceError(SaveError, OSError):
    """There is not enough free space for the data to write."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        if len(args) > 1 and isinstance(args[0], int):  # RuntimeError.__init__ runs instead of OSError.__init__
            self.errno, self.strerror = args[0], str(args[1])


class LeaseHeldError(SaveError):
    """Another running job holds the lease of this run. A lease is a lock that expires."""


class StorageError(CkptkitError, OSError):
    """The storage failed. Retries did not help, or the error is one that a retry cannot fix."""


class NonFiniteGradientError(CkptkitError, RuntimeError):
    """A gradient is inf or NaN, and the caller asked for an error in this case. No optimizer has stepped."""


class MissingExtraError(CkptkitError, ImportError):
    """A feature needs a package that is not installed. The message gives the command that installs it."""


# These errors mean that a part of a checkpoint is unreadable. Code that can continue without the part catches them. It
# must not catch StorageError, which means that the store did not answer: the part may be intact.
UNREADABLE = (UnsupportedFormatError, CorruptCheckpointError, CheckpointMismatchError, MissingExtraError)
