"""Opens the store at a URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.redact import carries_credentials, without_secrets
from ckptkit.storage.store import Store, require_bucket, split_url

__all__ = ["open_store", "refuse_credentials"]


def open_store(url: str, *, storage_options: Mapping[str, Any] | None = None) -> Store:
    """Return the store at `url`: a path, "file://...", or anything fsspec opens ("s3://", "gs://", ...).

    Nothing is created or contacted until the store is used.

    Args:
        storage_options: Passed to the fsspec file system, as its users give them.

    Raises:
        UsageError: The URL itself holds a password, a token or a signature: process lists, histories and logs show it;
            or it is of a kind that begins with a bucket, and names none; or it is empty.
    """
    protocol, rest = split_url(url)
    refuse_credentials(url)
    require_bucket(url)
    if not rest:
        raise UsageError("The path is empty. Is a variable of the shell not set? The current directory is called '.'.")
    if protocol in ("file", "local"):
        from ckptkit.storage.local import LocalStore

        return LocalStore(rest)
    from ckptkit.storage.objects import RemoteStore

    return RemoteStore(url, storage_options=storage_options)


def refuse_credentials(url: str) -> None:
    """Raise UsageError where a URL itself holds a login, a token or a signature. Ask before a URL is taken apart."""
    if carries_credentials(url):
        raise UsageError(
            f"{without_secrets(url)} has a login or a signature in it, which process lists and shell histories show to "
            "others; it is not used. Give the plain URL, and the login in the environment or in storage options."
        )
