"""Writes to Azure Blob Storage through the client of adlfs, with create-only puts and parallel block uploads."""

from __future__ import annotations

import base64
import contextlib
import secrets
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from ckptkit.errors import StorageError
from ckptkit.storage.body import Body, Content
from ckptkit.storage.requests import FsspecApi, Upload


class AzureApi(FsspecApi):
    """Makes create-only puts and block uploads through the client of adlfs. All other requests go through fsspec."""

    streams = True

    def put(self, name: str, data: bytes | Content, *, if_absent: bool, mark: str = "") -> str:
        content = Content.of(data)
        self.call(name, lambda blob: blob.upload_blob(content.joined(), overwrite=not if_absent))
        return ""

    def is_mine(self, name: str, data: bytes | Content, *, mark: str, tries: int) -> bool:
        # tries + 1: Azure's client retries by itself, so our first try may already find its own blob.
        return super().is_mine(name, data, mark=mark, tries=tries + 1)

    def upload(self, name: str) -> Upload:
        return AzureUpload(self, name)

    def is_conditional(self) -> bool:
        return True

    def call(self, name: str, request: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        """Make one request with the client of the blob `name`, and return the result.

        Raises:
            FileExistsError: The blob exists already.
            FileNotFoundError: The blob does not exist.
            PermissionError: Access is denied.
            StorageError: Azure no longer has the blocks of the upload.
        """
        from fsspec.asyn import sync

        container, path, _ = self.fs.split_path(name)

        async def ask() -> Any:
            async with self.fs.service_client.get_blob_client(container=container, blob=path) as blob:
                return await request(blob)

        with _translated(name):
            return sync(self.fs.loop, ask)


class AzureUpload:
    """An upload whose blocks may be sent in any order. Azure discards uncommitted blocks after a week."""

    in_order = False

    def __init__(self, api: AzureApi, name: str) -> None:
        self._api = api
        self._name = name
        self._own = secrets.token_hex(8)  # unique per upload, because all uploads to a blob share its block ids
        self._nbytes: dict[int, int] = {}

    def _block(self, number: int) -> str:
        return base64.b64encode(f"{self._own}-{number:08d}".encode()).decode()

    def part(self, number: int, content: Content, *, last: bool) -> None:
        block = self._block(number)
        self._api.call(self._name, lambda blob: blob.stage_block(block, Body(content), length=content.nbytes))
        self._nbytes[number] = content.nbytes

    def complete(self) -> str:
        from azure.storage.blob import BlobBlock

        blocks = [BlobBlock(self._block(number)) for number in sorted(self._nbytes)]
        absent = {"If-None-Match": "*"}
        try:
            self._api.call(self._name, lambda blob: blob.commit_block_list(blocks, headers=absent))
        except (FileExistsError, StorageError):
            # An earlier try, perhaps by Azure's client itself, may have succeeded although its response was lost.
            if not self._is_ours():
                raise
        return ""

    def _is_ours(self) -> bool:
        """Return whether the existing blob consists of exactly the blocks of this upload."""
        try:
            committed, _ = self._api.call(self._name, lambda blob: blob.get_block_list("committed"))
        except FileNotFoundError:
            return False
        return [item.id for item in committed] == [self._block(number) for number in sorted(self._nbytes)]

    def abort(self) -> None:
        """Do nothing: uncommitted blocks are invisible, and Azure discards them."""


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    from azure.core.exceptions import (
        ClientAuthenticationError,
        HttpResponseError,
        ResourceExistsError,
        ResourceNotFoundError,
    )

    try:
        yield
    except ResourceExistsError as error:
        raise FileExistsError(f"{name} exists already") from error
    except ResourceNotFoundError as error:
        raise FileNotFoundError(f"{name} does not exist") from error
    except ClientAuthenticationError as error:
        raise PermissionError(str(error)) from error
    except HttpResponseError as error:
        if error.error_code == "InvalidBlockList":
            raise StorageError(f"{name}: the store has lost the blocks of the upload") from error
        if error.status_code == 403:
            raise PermissionError(str(error)) from error
        raise
