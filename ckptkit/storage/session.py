"""The session of botocore that a client of S3 is made of, made quickly: it is a third of a small first save."""

from __future__ import annotations

import gzip
import json
import logging
import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["quick_session", "skip_unused_tls"]

logger = logging.getLogger(__name__)


def quick_session(options: Mapping[str, Any]) -> Any:
    """Return a session that reads what it has to of botocore's models, as it is, and looks through no others for it.

    By itself it looks into each of 400 folders, twice, whether there is an S3; and has Python, not the parser, make a
    dictionary of each of 30,000 objects. None where that fails: s3fs, which makes its own then, says why.
    """
    from aiobotocore.session import AioSession  # type: ignore[import-untyped]
    from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]

    try:
        session = AioSession(**options)
        loader = session.get_component("data_loader")
    except (BotoCoreError, TypeError, ValueError) as error:
        logger.debug("no session: %s", type(error).__name__)
        return None
    loader.file_loader = _Files()
    every = loader.list_available_services
    loader.list_available_services = lambda type_name: _Services(type_name, every)
    return session


def skip_unused_tls(client: Any) -> None:
    """Let a client that speaks plain HTTP not parse the certificates of all authorities before its first request: that
    takes as long as making the client. They are parsed, and verify as ever, once an answer sends it on to TLS."""
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    usual = getattr(session, "_build_ssl_contexts", None)
    if usual is None or urlsplit(str(client.meta.endpoint_url)).scheme != "http":
        return

    def contexts(proxy_url: str | None) -> tuple[ssl.SSLContext, ssl.SSLContext | None]:
        made: tuple[ssl.SSLContext, ssl.SSLContext | None] = (
            (_Later(usual), None) if proxy_url is None else usual(proxy_url)
        )
        return made

    session._build_ssl_contexts = contexts  # type: ignore[union-attr]


class _Later(ssl.SSLContext):
    """What botocore would have made, made when the first connection is to be wrapped."""

    _make: Callable[[None], tuple[ssl.SSLContext, Any]]
    _made: ssl.SSLContext | None = None

    def __new__(cls, make: Callable[[None], tuple[ssl.SSLContext, Any]]) -> _Later:
        context = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        context._make = make
        return context

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        if self._made is None:
            self._made = self._make(None)[0]
        return self._made.wrap_bio(*args, **kwargs)


class _Services:
    """The names of services; that of S3 is known."""

    def __init__(self, type_name: str, every: Callable[[str], list[str]]) -> None:
        self._every = partial(every, type_name)

    def __contains__(self, name: object) -> bool:
        return name == "s3" or name in self._every()

    def __iter__(self) -> Iterator[str]:
        return iter(self._every())


class _Files:
    """What botocore has as its loader of files, with the dictionaries of today, which keep their order."""

    def exists(self, path: str) -> bool:
        return any(os.path.isfile(path + ending) for ending in _ENDINGS)

    def load_file(self, path: str) -> Any:
        for ending, read in _ENDINGS.items():
            if os.path.isfile(path + ending):
                return json.loads(read(path + ending))
        return None


def _plain(path: str) -> bytes:
    return Path(path).read_bytes()


def _packed(path: str) -> bytes:
    return gzip.decompress(_plain(path))


_ENDINGS: dict[str, Callable[[str], bytes]] = {".json": _plain, ".json.gz": _packed}
