"""Google Cloud Storage over the session of gcsfs: puts that must not replace, uploads that can be resumed."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from ckptkit.storage.content import Body, Content
from ckptkit.storage.object_api import Entries, Entry, FsspecApi

__all__ = ["GcsApi"]

_PAGES = 16  # of a listing, a thousand names each
_BOUNDARY = "ckptkit-7f3a9c51e8d24b06"
_FORM_START = f"--{_BOUNDARY}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n".encode()
_FORM_NEXT = f"\r\n--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
_FORM_END = f"\r\n--{_BOUNDARY}--\r\n".encode()


class GcsApi(FsspecApi):
    """gcsfs, with the errors of denied access told apart and uploads whose parts can be sent again."""

    def info(self, name: str) -> Entry:
        with _denied():
            return super().info(name)

    def list(self, name: str, *, recursive: bool) -> list[Entry]:
        with _denied():
            return super().list(name, recursive=recursive)

    def get(self, name: str, start: int, stop: int) -> bytes:
        with _denied():
            return super().get(name, start, stop)

    def get_whole(self, name: str) -> tuple[bytes, int]:
        with _denied():
            return super().get_whole(name)

    def list_at_once(self, name: str) -> Entries | None:
        bucket, key, _ = self.fs.split_path(name)
        found: list[Entry] = []
        more: dict[str, Any] = {"prefix": f"{key}/" if key else "", "maxResults": 1000}
        for _ in range(_PAGES):
            with _denied():
                page = self.fs.call("GET", "b/{}/o", bucket, json_out=True, **more)
            items = [item for item in page.get("items", ()) if not item["name"].endswith("/")]
            found += [self.fs._process_object(bucket, item) for item in items]
            if not page.get("nextPageToken"):
                return found
            more["pageToken"] = page["nextPageToken"]
        return None

    def held(self, content: Content) -> int:
        return content.copied

    def put(self, name: str, data: bytes | Content, *, if_absent: bool, mark: str = "") -> str:
        bucket, key, _ = self.fs.split_path(name)
        place = f"{self.fs._location}/upload/storage/v1/b/{quote(bucket, safe='')}/o"
        condition = {"ifGenerationMatch": "0"} if if_absent else {}
        about = json.dumps({"name": key, "metadata": {"ckptkit-put": mark} if mark else {}}).encode()
        # A form of two parts, as a file object: gcsfs's own put hands over bytes, which blocks the event loop.
        content = Content.of(data)
        form = Content([_FORM_START, about, _FORM_NEXT, *content.pieces, _FORM_END], copied=0, owners=[content])
        headers = {"Content-Type": f"multipart/related; boundary={_BOUNDARY}"}
        with _denied():
            _, answer = self.fs.call(
                "POST", place, headers=headers, data=Body(form), uploadType="multipart", **condition
            )
        return str(json.loads(answer).get("generation", "")) if answer else ""

    def upload(self, name: str) -> GcsUpload:
        from fsspec.asyn import sync
        from gcsfs.core import initiate_upload

        bucket, key, _ = self.fs.split_path(name)
        with _denied():
            place = sync(self.fs.loop, initiate_upload, self.fs, bucket, key, mode="create")
        return GcsUpload(self, name, place)

    def delete(self, names: Sequence[str], *, folder: str = "") -> None:
        from fsspec.asyn import sync

        with _denied():
            if len(names) == 1:
                with contextlib.suppress(FileNotFoundError):
                    self.fs.rm_file(names[0])
                return
            answers = sync(self.fs.loop, self.fs._delete_files, list(names), 100)  # what one batch takes
        for answer in answers or ():
            if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
                with _denied():
                    raise answer

    def is_conditional(self) -> bool | None:
        return True


class GcsUpload:
    """A resumable upload: parts in order, each of which may be sent again."""

    in_order = True

    def __init__(self, api: GcsApi, name: str, place: str) -> None:
        self._api = api
        self._name = name
        self._place = place
        self._starts = {1: 0}
        self._nbytes = 0
        self._published: int | None = None

    def part(self, number: int, content: Content, *, last: bool) -> None:
        start = self._starts[number]
        stop = start + content.nbytes
        headers = {
            "Content-Range": f"bytes {start}-{stop - 1}/{stop if last else '*'}",
            "Content-Type": "application/octet-stream",
            "Content-Length": str(content.nbytes),
        }
        with _denied():
            answer, body = self._api.fs.call("POST", self._place, headers=headers, data=Body(content))
        if last and body:
            self._published = int(json.loads(body).get("size", -1))
        kept = answer.get("Range")
        if not last and kept and int(kept.rpartition("-")[2]) + 1 < stop:
            raise ConnectionError(f"{self._name}: the server kept {kept} of bytes up to {stop}")
        self._starts[number + 1] = stop
        self._nbytes = stop

    def complete(self) -> str:
        """The last part has published the object, and its answer said so; else look."""
        size = self._published
        if size is None:
            size = int(self._api.info(self._name).get("size") or 0)
        if size != self._nbytes:
            raise OSError(errno.EINVAL, f"{self._name} has {size} bytes, not the {self._nbytes} sent")
        return f"{size} bytes"  # what it was told to have is its size

    def abort(self) -> None:
        # Google answers 499 to a cancelled upload, which gcsfs lets pass.
        self._api.fs.call("DELETE", self._place)


@contextlib.contextmanager
def _denied() -> Iterator[None]:
    """Give what Google means by 401 and 403 its own class."""
    try:
        yield
    except OSError as error:
        if error.errno is None and str(error).startswith("Forbidden"):
            raise PermissionError(errno.EACCES, str(error)) from error
        raise
    except Exception as error:  # the HttpError of gcsfs is none of the system's
        status: Any = getattr(error, "code", None)
        if str(status) in ("401", "403"):
            raise PermissionError(errno.EACCES, str(error)) from error
        raise
