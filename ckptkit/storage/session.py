"""The session of botocore that a client of S3 is made of, made quickly: it is a third of a small first save."""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["quick_session"]

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
