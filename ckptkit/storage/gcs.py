"""Google Cloud Storage through gcsfs's session: create-only puts and resumable uploads."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from email.parser import BytesParser
from typing import Any, cast
from urllib.parse import quote

from ckptkit.errors import StorageError
from ckptkit.storage.body import Body, Content
from ckptkit.storage.requests import Entries, Entry, FsspecApi, LostUploadError

__all__ = ["GcsApi", "MOST", "batch_answers", "batch_of_deletions"]

# Many deletions on Google Cloud Storage in one request: how it is written, and what its answer says of each.


MOST = 100  # what Google takes in one batch

_BATCH_BOUNDARY = "ckptkit-batch-5d1e0c7ab39f4286"
_STATUS = re.compile(rb"HTTP/[0-9.]+ ([0-9]{3})")
_NUMBER = re.compile(r"\+([0-9]{1,3})>?$")


def batch_of_deletions(objects: Sequence[tuple[str, str]]) -> tuple[str, bytes]:
    """Return content type and body of a batch that deletes objects, each given by bucket and key."""
    body = b""
    for i, (bucket, key) in enumerate(objects):
        lines = (
            f"--{_BATCH_BOUNDARY}",
            "Content-Type: application/http",
            "Content-Transfer-Encoding: binary",
            f"Content-ID: <{_BATCH_BOUNDARY}+{i}>",
            "",
            f"DELETE /storage/v1/b/{quote(bucket, safe='')}/o/{quote(key, safe='')} HTTP/1.1",
            "Content-Length: 0",
            "",
            "",
        )
        body += "\r\n".join(lines).encode() + b"\r\n"
    return f"multipart/mixed; boundary={_BATCH_BOUNDARY}", body + f"--{_BATCH_BOUNDARY}--\r\n".encode()


def batch_answers(content_type: str, body: bytes) -> dict[int, tuple[int, str]]:
    """Return status and words of each answer of a batch, by the number of what was asked. What is missing was not
    answered."""
    message = BytesParser().parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    found = {}
    for i, part in enumerate(message.get_payload() if message.is_multipart() else ()):
        number = _NUMBER.search(str(part.get("Content-ID", "")).strip())
        said = part.get_payload(decode=True)
        status = _STATUS.match(said.lstrip()) if isinstance(said, bytes) else None
        if status and isinstance(said, bytes):
            text = said.replace(b"\r\n", b"\n").partition(b"\n\n")[2]
            found[int(number[1]) if number else i] = int(status[1]), text.decode(errors="replace").strip()
    return found


_MARK = "ckptkit-put"  # metadata of an object: which call has put it
_BOUNDARY = "ckptkit-7f3a9c51e8d24b06"
_FORM_START = f"--{_BOUNDARY}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n".encode()
_FORM_NEXT = f"\r\n--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
_FORM_END = f"\r\n--{_BOUNDARY}--\r\n".encode()


class GcsApi(FsspecApi):
    """gcsfs, with the errors of denied access told apart and uploads whose parts can be sent again."""

    paged = True

    def info(self, name: str) -> Entry:
        """One request for an object, one more where there is none. gcsfs makes three of it, of which each may fail."""
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
        except FileNotFoundError as error:  # gcsfs says which path it asked for
            raise FileNotFoundError(errno.ENOENT, f"the bucket does not exist: {bucket}") from error
        if not isinstance(page, dict) or page.get("kind") != "storage#objects":
            raise StorageError(
                errno.EBADMSG, f"gs://{bucket}: what {self.fs._location} answers is no listing of Google Cloud Storage"
            )
        items = [item for item in page.get("items", ()) if not item["name"].endswith("/")]  # markers of folders
        folders = [{"name": f"{bucket}/{prefix}", "type": "directory"} for prefix in page.get("prefixes", ())]
        return [self.fs._process_object(bucket, item) for item in items] + folders, page.get("nextPageToken", "")

    def endpoint(self) -> str:
        return str(self.fs._location)

    def held(self, content: Content) -> int:
        return content.copied

    def put(self, name: str, data: bytes | Content, *, if_absent: bool, mark: str = "") -> str:
        bucket, key, _ = self.fs.split_path(name)
        place = f"{self.fs._location}/upload/storage/v1/b/{quote(bucket, safe='')}/o"
        condition = {"ifGenerationMatch": "0"} if if_absent else {}
        about = json.dumps({"name": key, "metadata": {_MARK: mark} if mark else {}}).encode()
        # A form of two parts, as a file object: gcsfs's own put hands over bytes, which blocks the event loop.
        content = Content.of(data)
        form = Content([_FORM_START, about, _FORM_NEXT, *content.pieces, _FORM_END], copied=0, owners=[content])
        headers = {"Content-Type": f"multipart/related; boundary={_BOUNDARY}"}
        with _denied():
            _, answer = self.fs.call(
                "POST", place, headers=headers, data=Body(form), uploadType="multipart", **condition
            )
        return str(json.loads(answer).get("generation", "")) if answer else ""

    def is_mine(self, name: str, data: bytes | Content, *, mark: str, tries: int) -> bool:
        return self.has_mark(name, mark)

    def has_mark(self, name: str, mark: str, *, nbytes: int = -1) -> bool:
        """Tell whether what is at `name` was put with this mark; `nbytes`: and has that size."""
        with contextlib.suppress(FileNotFoundError):
            found = self.info(name)
            is_it = bool(mark) and dict(found.get("metadata") or {}).get(_MARK) == mark
            return is_it and nbytes in (-1, found.get("size"))
        return False

    def upload(self, name: str) -> GcsUpload:
        from fsspec.asyn import sync
        from gcsfs.core import initiate_upload

        bucket, key, _ = self.fs.split_path(name)
        mark = secrets.token_hex(8)
        with _denied():
            place = sync(self.fs.loop, initiate_upload, self.fs, bucket, key, metadata={_MARK: mark}, mode="create")
        return GcsUpload(self, name, place, mark)

    def delete(self, names: Sequence[str], *, folder: str = "") -> None:
        objects = [self.fs.split_path(name)[:2] for name in names]
        for i in range(0, len(objects), MOST):
            some = objects[i : i + MOST]
            if len(some) == 1 or not self._delete_together(some):
                for bucket, key in some:
                    with _denied(), contextlib.suppress(FileNotFoundError):
                        self.fs.call("DELETE", "b/{}/o/{}", bucket, key)

    def _delete_together(self, objects: Sequence[tuple[str, str]]) -> bool:
        """Delete objects in one request; False where the server has none for that, as emulators may not.

        Not gcsfs's own: it takes what is gone already for a failure, and waits between tries by itself.
        """
        kind, body = batch_of_deletions(objects)
        url = self.fs.base.removesuffix("/storage/v1/") + "/batch/storage/v1"  # older versions have no name for it
        try:
            with _denied():
                headers, answer = self.fs.call("POST", url, headers={"Content-Type": kind}, data=io.BytesIO(body))
        except FileNotFoundError:
            return False
        except Exception as error:  # the HttpError of gcsfs is none of the system's
            if str(getattr(error, "code", "")) in ("405", "501"):
                return False
            raise
        said = batch_answers(str(headers.get("Content-Type", "")), bytes(answer))
        for i, (bucket, key) in enumerate(objects):
            status, text = said.get(i, (503, "no answer"))
            if status >= 300 and status != 404:
                _raise_refused(f"{bucket}/{key}", status, text)
        return True

    def is_conditional(self) -> bool | None:
        return True


class GcsUpload:
    """A resumable upload: parts in order. What the session has of one that failed is asked, and not sent again."""

    in_order = True

    def __init__(self, api: GcsApi, name: str, place: str, mark: str) -> None:
        self._api = api
        self._name = name
        self._place = place
        self._mark = mark
        self._starts = {1: 0}
        self._tried: set[int] = set()
        self._nbytes = 0
        self._published: int | None = None

    def part(self, number: int, content: Content, *, last: bool) -> None:
        start = self._starts[number]
        stop = start + content.nbytes
        at = self._kept(start, stop, last=last) if number in self._tried else start
        self._tried.add(number)
        if at < stop:
            self._send(_after(content, at - start), at, stop, last=last)
        self._starts[number + 1] = stop
        self._nbytes = stop

    def _send(self, content: Content, start: int, stop: int, *, last: bool) -> None:
        headers = {
            "Content-Range": f"bytes {start}-{stop - 1}/{stop if last else '*'}",
            "Content-Type": "application/octet-stream",
            "Content-Length": str(content.nbytes),
        }
        with _denied(), self._lost():
            answer, body = self._api.fs.call("POST", self._place, headers=headers, data=Body(content))
        if last and body:
            self._published = _size(body)
        if not last and _stop_of(answer) not in (None, stop):
            raise ConnectionError(f"{self._name}: the server kept {_stop_of(answer)} of {stop} bytes")

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        """Tell a session that is over, which a new one has to take the place of, from what is wrong otherwise."""
        try:
            yield
        except Exception as error:  # the HttpError of gcsfs is none of the system's
            if isinstance(error, FileNotFoundError) or str(getattr(error, "code", "")) in ("404", "410"):
                raise LostUploadError(errno.ENOENT, f"{self._name}: the upload is over: {error}") from error
            raise

    def _kept(self, start: int, stop: int, *, last: bool) -> int:
        """Return up to where the session has the bytes of a part that failed, or may have."""
        try:
            with _denied():
                answer, body = self._api.fs.call("PUT", self._place, headers={"Content-Range": "bytes */*"})
        except FileNotFoundError:
            # Nothing tells of it once it is done, on some servers; others do not know the question.
            if last and self._api.has_mark(self._name, self._mark, nbytes=stop):
                self._published = stop
            return start if self._published is None else stop
        if body:
            self._published = _size(body)
            if last and self._published == stop:
                return stop
            self._take_back()
            raise StorageError(errno.EBADMSG, f"{self._name}: the server ended the upload before all was there")
        kept = _stop_of(answer) or 0
        if not start <= kept <= stop:
            raise StorageError(errno.EBADMSG, f"{self._name}: the server has {kept} bytes; expected {start} to {stop}")
        return kept

    def complete(self) -> str:
        """The last part has published the object, and its answer said so; else look."""
        size = self._published
        if size is None:
            size = int(self._api.info(self._name).get("size") or 0)
        if size != self._nbytes:
            self._take_back()
            raise OSError(errno.EINVAL, f"{self._name} has {size} bytes, not the {self._nbytes} sent")
        return f"{size} bytes"  # what it was told to have is its size

    def anew(self) -> GcsUpload:
        return self._api.upload(self._name)

    def _take_back(self) -> None:
        """Delete what this upload has published, and is not what was sent."""
        if self._api.has_mark(self._name, self._mark):
            self._api.delete([self._name])

    def abort(self) -> None:
        # Google answers 499 to a cancelled upload, which gcsfs lets pass.
        with contextlib.suppress(FileNotFoundError):  # it has ended by itself
            self._api.fs.call("DELETE", self._place)
        self._take_back()  # emulators publish what they have when they are asked what that is


def _after(content: Content, skipped: int) -> Content:
    """Return what follows the first bytes of a content."""
    pieces: list[memoryview] = []
    for piece in content.pieces:
        pieces.append(memoryview(piece)[min(skipped, len(piece)) :])
        skipped -= min(skipped, len(piece))
    return Content([piece for piece in pieces if piece], copied=0, owners=[content])


def _size(body: bytes) -> int:
    return int(json.loads(body).get("size", -1))


def _stop_of(answer: Any) -> int | None:
    """Return up to where the session has bytes, as the header says; None where there is none."""
    kept = answer.get("Range")
    return int(kept.rpartition("-")[2]) + 1 if kept else None


def _raise_refused(name: str, status: int, text: str) -> None:
    words = f"{name} was not deleted: {status}: {text}"
    if status in (401, 403):
        raise PermissionError(errno.EACCES, words)
    passing = status >= 500 or status in (408, 429)
    raise OSError(errno.EBUSY if passing else errno.EINVAL, words)


@contextlib.contextmanager
def _denied() -> Iterator[None]:
    """Give what Google means by 401 and 403 its own class."""
    try:
        yield
    except OSError as error:
        if error.errno is None and str(error).startswith("Forbidden"):
            raise PermissionError(errno.EACCES, str(error).replace("\n", ": ")) from error
        raise
    except Exception as error:  # the HttpError of gcsfs is none of the system's
        status: Any = getattr(error, "code", None)
        if str(status) in ("401", "403"):
            raise PermissionError(errno.EACCES, str(error)) from error
        raise
