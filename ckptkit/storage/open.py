"""Opens the store at a URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.arguments import check_storage_options
from ckptkit.errors import UsageError, remember_options
from ckptkit.redact import carries_credentials, without_secrets
from ckptkit.storage.store import check_url, split_url

if TYPE_CHECKING:
    from ckptkit.storage.local import LocalStore
    from ckptkit.storage.objects import RemoteStore


def open_store(url: str, *, storage_options: Mapping[str, Any] | None = None) -> LocalStore | RemoteStore:
    """Return the store at `url`: a path, "file://...", or anything else that fsspec opens. Contacts nothing.

    Raises:
        UsageError: The URL is malformed, or contains a login or a signature, which process lists and logs would show.
    """
    check_storage_options(storage_options=storage_options)
    protocol, rest = split_url(url)
    refuse_credentials(url)
    check_url(url)
    if protocol in ("file", "local"):
        from ckptkit.storage.local import LocalStore

        return LocalStore(rest)
    from ckptkit.storage.objects import RemoteStore

    remember_options(without_secrets(url.rstrip("/")), storage_options or {})
    return RemoteStore(url, storage_options=storage_options)


def refuse_credentials(url: str) -> None:
    """Raise UsageError if a URL contains a login, a token or a signature. Call this before parsing the URL."""
    if carries_credentials(url):
        raise UsageError(
            f"{without_secrets(url)} contains a login or a signature, which others can see in process lists and shell "
            "histories. Give the URL without it, and put the login into the environment or storage options."
        )
