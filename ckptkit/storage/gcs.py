"""Accesses Google Cloud Storage through the session of gcsfs, with create-only puts and resumable uploads."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import quote

from ckptkit.errors import StorageError
from ckptkit.storage.body import Body, Content
from ckptkit.storage.requests import Entries, Entry, FsspecApi
from ckptkit.storage.retry import BODY_S, patiently

_MARK = "ckptkit-put"  # metadata key: identifies the call that put an object
_BOUNDARY = "ckptkit-7f3a9c51e8d24b06"
_FORM_START = f"--{_BOUNDARY}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n".encode()
_FORM_NEXT = f"\r\n--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
_FORM_END = f"\r\n--{_BOUNDARY}--\r\n".encode()


class GcsApi(FsspecApi):
    """Makes requests through gcsfs. Denied access raises PermissionError. A part of an upload can be sent again."""

    paged = True
    streams = True

    @classmethod
    def open(cls, protocol: str, options: Mapping[str, Any]) -> Any:
        settings = dict(options)
        if os.environ.get("STORAGE_EMULATOR_HOST") or str(options.get("endpoint_url", "")).startswith("http://"):
            # gcsfs queries the bucket's type over gRPC. Emulators don't respond, so gcsfs would wait for a minute.
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        with contextlib.suppress(ImportError):  # without aiohttp, there is no gcsfs either
            import aiohttp

            # By default gcsfs waits five minutes for a silent server.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=BODY_S)
            settings.setdefault("requests_timeout", timeout)
        fs = super().open(protocol, settings)
        _without_inner_retries(fs, given="requests_timeout" in options)
        return fs

    def info(self, name: str) -> Entry:
        """Return the entry at `name`. Makes one request for an object and two for a folder. gcsfs would make three."""
        bucket, key, _ = self.fs.split_path(name)
        with _denied():
            if key:
                with contextlib.suppress(FileNotFoundError):
                    found = self.fs.call("GET", "b/{}/o/{}", bucket, key, json_out=True)
                    return cast("Entry", self.fs._process_object(bucket, found))
            below = {"prefix": f"{key}/"} if key else {}
            page = self.fs.call("GET", "b/{}/o", bucket, json_out=True, maxResults=1, **below)
        if key and not page.get("items"):
            raise FileNotFoundError(errno.ENOENT, f"{name} does not exist")
        return {"name": name, "type": "directory", "size": 0}

    def get(self, name: str, start: int, stop: int) -> bytes:
        with _denied():
            return super().get(name, start, stop)

    def get_whole(self, name: str) -> tuple[bytes, int]:
        with _denied():
            return super().get_whole(name)

    def page(self, name: str, *, recursive: bool, after: str) -> tuple[Entries, str]:
        bucket, key, _ = self.fs.split_path(name)
        asked: dict[str, Any] = {"prefix": f"{key}/" if key else "", "maxResults": 1000}
        asked |= {} if recursive else {"delimiter": "/"}
        asked |= {"pageToken": after} if after else {}
        try:
            with _denied():
                page = self.fs.call("GET", "b/{}/o", bucket, json_out=True, **asked)
        except FileNotFoundError as error:  # gcsfs's message shows its request path instead of the bucket
            raise FileNotFoundError(errno.ENOENT, f"the bucket does not exist: {bucket}") from error
        if not isinstance(page, dict) or page.get("kind") != "storage#objects":
            raise StorageError(
                errno.EBADMSG,
                f"gs://{bucket}: {self.fs._location} did not answer with a listing of Google Cloud Storage",
            )
        items = [item for item in page.get("items", ()) if not item["name"].endswith("/")]  # no folder markers
        folders = [{"name": f"{bucket}/{prefix}", "type": "directory"} for prefix in page.get("prefixes", ())]
        return [self.fs._process_object(bucket, item) for item in items] + folders, page.get("nextPageToken", "")

    def endpoint(self) -> str:
        return str(self.fs._location)

    def put(self, name: str, data: bytes | Content, *, if_absent: bool, mark: str = "") -> str:
        bucket, key, _ = self.fs.split_path(name)
        place = f"{self.fs._location}/upload/storage/v1/b/{quote(bucket, safe='')}/o"
        condition = {"ifGenerationMatch": "0"} if if_absent else {}
        about = json.dumps({"name": key, "metadata": {_MARK: mark} if mark else {}}).encode()
        # Send the multipart body as a file object: gcsfs's own put passes bytes, which blocks the event loop.
        content = Content.of(data)
        form = Content([_FORM_START, about, _FORM_NEXT, *content.pieces, _FORM_END], copied=0, owners=[content])
        headers = {"Content-Type": f"multipart/related; boundary={_BOUNDARY}"}
        with _denied():
            _, answer = self.fs.call(
                "POST", place, headers=headers, data=Body(form), uploadType="multipart", **condition
            )
        return str(json.loads(answer).get("generation", "")) if answer else ""

    def is_mine(self, name: str, data: bytes | Content, *, mark: str, tries: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return bool(mark) and dict(self.info(name).get("metadata") or {}).get(_MARK) == mark
        return False

    def upload(self, name: str) -> GcsUpload:
        from fsspec.asyn import sync
        from gcsfs.core import initiate_upload

        bucket, key, _ = self.fs.split_path(name)
        mark = secrets.token_hex(8)
        with _denied():
            place = sync(self.fs.loop, initiate_upload, self.fs, bucket, key, metadata={_MARK: mark}, mode="create")
        return GcsUpload(self, name, place, mark)

    def delete_one(self, name: str) -> None:
        bucket, key, _ = self.fs.split_path(name)
        with _denied():
            self.fs.call("DELETE", "b/{}/o/{}", bucket, key)

    def is_conditional(self) -> bool:
        return True


def _without_inner_retries(fs: Any, *, given: bool) -> None:
    """Turn off the retries inside gcsfs. If no timeout is `given`, limit each request that is not a download."""
    once = getattr(type(fs)._request, "__wrapped__", None)
    if once is None:
        return

    async def request(method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        data, asked = kwargs.get("data"), once(fs, method, path, *args, **kwargs)
        if given or "alt=media" in path:
            return await asked  # the session's own timeout applies
        return await patiently(asked, body=data if hasattr(data, "tell") else None)

    fs._request = request


class GcsUpload:
    """A resumable upload, whose parts are sent in order.

    Before a part is sent again, the server is asked how much of it has arrived.
    """

    in_order = True

    def __init__(self, api: GcsApi, name: str, place: str, mark: str) -> None:
        self._api = api
        self._name = name
        self._place = place
        self._mark = mark
        self._tried = 0  # number of the last part that we tried to send
        self._nbytes = 0  # total size of the complete parts
        self._published: int | None = None

    def part(self, number: int, content: Content, *, last: bool) -> None:
        start, stop = self._nbytes, self._nbytes + content.nbytes
        at = self._received(start, stop, last=last) if number == self._tried else start
        self._tried = number
        if at < stop:
            left = content.between(at - start, content.nbytes)
            self._send(Content(left, copied=0, owners=[content]), at, stop, last=last)
        self._nbytes = stop

    def _send(self, content: Content, start: int, stop: int, *, last: bool) -> None:
        headers = {
            "Content-Range": f"bytes {start}-{stop - 1}/{stop if last else '*'}",
            "Content-Type": "application/octet-stream",
            "Content-Length": str(content.nbytes),
        }
        with _denied():
            answer, body = self._api.fs.call("POST", self._place, headers=headers, data=Body(content))
        if last and body:
            self._published = _size(body)
        if not last and _stop_of(answer) not in (None, stop):
            raise ConnectionError(f"{self._name}: the server received {_stop_of(answer)} of {stop} bytes")

    def _received(self, start: int, stop: int, *, last: bool) -> int:
        """Ask the server how much of a part has arrived. Return the offset in the object at which these bytes end."""
        with _denied():
            answer, body = self._api.fs.call("PUT", self._place, headers={"Content-Range": "bytes */*"})
        if body:
            self._published = _size(body)
            if last and self._published == stop:
                return stop
            raise StorageError(errno.EBADMSG, f"{self._name}: the server ended the upload before it was complete")
        received = _stop_of(answer) or 0
        if not start <= received <= stop:
            text = f"{self._name}: the server has {received} bytes; expected {start} to {stop}"
            raise StorageError(errno.EBADMSG, text)
        return received

    def complete(self) -> str:
        """Check the size of the published object. Return "<size> bytes", which the caller records as the tag."""
        size = self._published
        if size is None:
            size = int(self._api.info(self._name).get("size") or 0)
        if size != self._nbytes:
            raise OSError(errno.EINVAL, f"{self._name} has {size} bytes, not the {self._nbytes} sent")
        return f"{size} bytes"  # not empty: an empty tag would mean that the object is not confirmed

    def abort(self) -> None:
        # Google answers 499 to a cancelled upload, and gcsfs accepts this status.
        with contextlib.suppress(FileNotFoundError):  # the session has ended
            self._api.fs.call("DELETE", self._place)
        # The server may have published the object: the answer to the last part may be lost, and an emulator publishes
        # an incomplete upload when queried for its state.
        if self._api.is_mine(self._name, b"", mark=self._mark, tries=1):
            self._api.delete([self._name])


def _size(body: bytes) -> int:
    return int(json.loads(body).get("size", -1))


def _stop_of(answer: Any) -> int | None:
    """Return how many bytes the server has, according to the Range header. None if this header is missing."""
    kept = answer.get("Range")
    return int(kept.rpartition("-")[2]) + 1 if kept else None


@contextlib.contextmanager
def _denied() -> Iterator[None]:
    """Raise PermissionError for the HTTP statuses 401 and 403."""
    try:
        yield
    except OSError as error:
        if error.errno is None and str(error).startswith("Forbidden"):
            raise PermissionError(errno.EACCES, str(error).replace("\n", ": ")) from error
        raise
    except Exception as error:  # gcsfs's HttpError is not an OSError
        status: Any = getattr(error, "code", None)
        if str(status) in ("401", "403"):
            raise PermissionError(errno.EACCES, str(error)) from error
        raise
