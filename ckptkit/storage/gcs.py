"""Google Cloud Storage over the session of gcsfs: puts that must not replace, uploads that can be resumed."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from typing import Any

from ckptkit.storage.object_api import Entry, FsspecApi

__all__ = ["GcsApi"]


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

    def put(self, name: str, data: bytes, *, if_absent: bool) -> None:
        with _denied():
            super().put(name, data, if_absent=if_absent)

    def upload(self, name: str) -> GcsUpload:
        from fsspec.asyn import sync
        from gcsfs.core import initiate_upload

        bucket, key, _ = self.fs.split_path(name)
        with _denied():
            place = sync(self.fs.loop, initiate_upload, self.fs, bucket, key, mode="create")
        return GcsUpload(self, name, place)

    def delete(self, names: Sequence[str]) -> None:
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

    def part(self, number: int, data: bytes, *, last: bool) -> None:
        start = self._starts[number]
        stop = start + len(data)
        headers = {
            "Content-Range": f"bytes {start}-{stop - 1}/{stop if last else '*'}",
            "Content-Type": "application/octet-stream",
            "Content-Length": str(len(data)),
        }
        with _denied():
            answer, _ = self._api.fs.call("POST", self._place, headers=headers, data=data)
        kept = answer.get("Range")
        if not last and kept and int(kept.rpartition("-")[2]) + 1 < stop:
            raise ConnectionError(f"{self._name}: the server kept {kept} of bytes up to {stop}")
        self._starts[number + 1] = stop
        self._nbytes = stop

    def complete(self) -> None:
        """The last part has published the object; look whether it did."""
        found = self._api.info(self._name)
        if int(found.get("size") or 0) != self._nbytes:
            raise OSError(errno.EINVAL, f"{self._name} has {found.get('size')} bytes, not the {self._nbytes} sent")

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
    except Exception as error:
        status: Any = getattr(error, "code", None)
        if str(status) in ("401", "403"):
            raise PermissionError(errno.EACCES, str(error)) from error
        raise
