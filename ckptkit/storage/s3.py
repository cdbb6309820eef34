"""Accesses S3 through the client of s3fs, with as few requests as possible."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from ckptkit.errors import StorageError
from ckptkit.storage.body import Body, Content
from ckptkit.storage.connection import READS, Connection
from ckptkit.storage.requests import (
    Entries,
    Entry,
    FsspecApi,
    Got,
    NotConditionalError,
    Range,
    Sink,
    run_together,
)
from ckptkit.storage.retry import WHOLE_S, error_code, http_status, patiently
from ckptkit.storage.store import UnfinishedUpload, Uploads

_GONE = ("NoSuchKey", "NoSuchUpload")
_HEAD_BYTES = 16 << 20  # first range when a whole object is read; nearly all objects are smaller
_MARK = "ckptkit-put"  # metadata key: identifies the call that put an object
_PER_REQUEST = 1000  # keys to delete per request
_CHUNK = 1 << 20  # bytes of a response to read at a time


class S3Api(FsspecApi):
    """Makes S3 requests with the client of s3fs, where s3fs itself would make more requests."""

    read_bytes = 36 << 20  # large, because the bytes need no buffer: they go to their destination as they arrive
    paged = True
    streams = True

    @classmethod
    def open(cls, protocol: str, options: Mapping[str, Any]) -> Any:
        settings = dict(options)
        settings["config_kwargs"] = {
            # With a range, some servers send the checksum of the whole object, which never matches the range.
            "response_checksum_validation": "when_required",
            "max_pool_connections": READS + 4,  # a few more for the callers' threads
            "read_timeout": WHOLE_S,
            # retry.py retries for all stores. Nested retries would add up to minutes.
            "retries": {"max_attempts": 0, "mode": "standard"},
            **options.get("config_kwargs", {}),
        }
        _leave_unsigned(settings)
        fs = super().open(protocol, settings)
        fs.retries = 1
        return fs

    def endpoint(self) -> str:
        client = getattr(self.fs, "_s3", None)  # there is no client before the first call
        return str(client.meta.endpoint_url) if client is not None else str(self.fs.endpoint_url or "")

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._prepared: Any = None  # the client that `_prepare` has changed

    def _call(self, method: str, **kwargs: Any) -> Any:
        from fsspec.asyn import sync

        return sync(self.fs.loop, self._ask, method, kwargs)

    async def _ask(self, method: str, kwargs: dict[str, Any]) -> Any:
        fs, body, least_s = self.fs, kwargs.get("Body"), WHOLE_S if method == "complete_multipart_upload" else None
        self._prepare(await fs.set_session())  # outside the timeout: it may ask another service for credentials
        request = fs._call_s3(method, fs.req_kw, **kwargs)
        answer = await patiently(request, least_s=least_s, body=body, given_s=self._given_s())
        _refuse_page(answer, f"{kwargs.get('Bucket')}/{kwargs.get('Key', '')}", self.endpoint())
        return answer

    def _prepare(self, client: Any) -> None:
        """Make `client` send no "Expect: 100-continue". Over TLS, also make it use our CRC-32 as a body's checksum."""
        if client is not self._prepared and hasattr(client, "meta"):
            from botocore.handlers import add_expect_header  # type: ignore[import-untyped]

            client.meta.events.unregister("before-call.s3", add_expect_header)
            client.meta.events.register("before-call.s3", _sign_by_crc)
            self._prepared = client

    def _given_s(self) -> float | None:
        """Return the read timeout that the user has set, or None if no timeout is set."""
        found = self.connection.options.get("config_kwargs", {}).get("read_timeout")
        return float(found) if found else None

    def info(self, name: str) -> Entry:
        bucket, key = self._split(name)
        if key:
            with contextlib.suppress(FileNotFoundError):
                head = self._call("head_object", Bucket=bucket, Key=key)
                about = {field: head[field] for field in ("LastModified", "ETag") if field in head}
                return {**about, "name": name, "type": "file", "size": head["ContentLength"]}
        if not self._list(bucket, key, MaxKeys=1).get("Contents") and key:
            raise FileNotFoundError(errno.ENOENT, f"{name} does not exist")
        return {"name": name, "type": "directory", "size": 0}

    def _split(self, name: str) -> tuple[str, str]:
        bucket, key, _ = self.fs.split_path(name)
        return bucket, key

    def page(self, name: str, *, recursive: bool, after: str) -> tuple[Entries, str]:
        bucket, key = self._split(name)
        more = {"ContinuationToken": after} if after else {}
        more |= {} if recursive else {"Delimiter": "/"}
        page = self._list(bucket, key, **more)
        folders = [{"name": f"{bucket}/{p['Prefix']}", "type": "directory"} for p in page.get("CommonPrefixes", ())]
        return _files(bucket, page) + folders, page["NextContinuationToken"] if page.get("IsTruncated") else ""

    def _list(self, bucket: str, key: str, **more: Any) -> Any:
        page = self._call("list_objects_v2", Bucket=bucket, Prefix=f"{key}/" if key else "", **more)
        if "IsTruncated" not in page and "Name" not in page:  # it would look like an empty run
            raise _not_s3(bucket, self.endpoint(), "something that is not a listing of S3")
        return page

    def exists(self, name: str) -> bool:
        bucket, key = self._split(name)
        with contextlib.suppress(FileNotFoundError):
            self._call("head_object", Bucket=bucket, Key=key)
            return True
        return False

    def get(self, name: str, start: int, stop: int) -> bytes:
        return self._get(name, start, stop)[0]

    def get_whole(self, name: str) -> tuple[bytes, int]:
        return self._get(name, 0, _HEAD_BYTES)

    def _get(self, name: str, start: int, stop: int) -> tuple[bytes, int]:
        data = bytearray()
        # Not fsspec's `sync`, which would leave the read running after Ctrl-C.
        (answer,) = self.get_ranges([(name, start, stop, lambda _, piece: data.extend(piece))])
        if isinstance(answer, BaseException):
            raise answer
        return bytes(data), answer[1]

    def get_ranges(self, ranges: Sequence[Range]) -> list[Got]:
        return run_together(self.fs.loop, [partial(self._range, *item) for item in ranges])

    async def _range(self, name: str, start: int, stop: int, sink: Sink) -> tuple[int, int]:
        try:
            async with self.connection.turns:
                return await self._fetch(name, start, stop, sink)
        except OSError as error:
            # The range starts past the end of the object.
            if http_status(error) == 416 or error_code(error) in ("InvalidRange", "416"):
                return 0, 0
            raise

    async def _fetch(self, name: str, start: int, stop: int, sink: Sink) -> tuple[int, int]:
        """Read a range, and pass it to `sink` piece by piece. The whole range is never in memory."""
        bucket, key = self._split(name)
        where = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{stop - 1}"}
        answer, given_s = await self._ask("get_object", where), self._given_s()
        total = str(answer.get("ContentRange", "")).rpartition("/")[2]
        low = 0 if total.isdigit() else start  # a server without ranges sends the whole object
        download = _Download(answer["Body"], low, low + stop - start, sink)
        await patiently(download.run(), body=download, given_s=given_s)
        got, expected = download.got, answer.get("ContentLength", download.got)
        if got != expected:  # a dropped connection can look like a short response
            raise ConnectionError(f"the answer has {got} of {expected} bytes")
        return max(0, min(got, low + stop - start) - low), int(total) if total.isdigit() else got

    def is_mine(self, name: str, data: bytes | Content, *, mark: str, tries: int) -> bool:
        # Even the first try may find its own object: the HTTP client repeats a PUT if a reused connection breaks.
        bucket, key = self._split(name)
        with contextlib.suppress(FileNotFoundError):
            return bool(mark) and self._call("head_object", Bucket=bucket, Key=key)["Metadata"].get(_MARK) == mark
        return False

    def condition(self, name: str) -> dict[str, Any]:
        """Return the argument that makes a put create-only, or {} if the server is known to reject it."""
        return {} if self.connection.conditional.get(name.partition("/")[0]) is False else {"IfNoneMatch": "*"}

    def put(self, name: str, data: bytes | Content, *, if_absent: bool, mark: str = "") -> str:
        bucket, key = self._split(name)
        more = self.condition(name) if if_absent else {}
        if mark:
            more["Metadata"] = {_MARK: mark}
        more |= self._body(Content.of(data))
        with _taken(name):
            answer = self._call("put_object", Bucket=bucket, Key=key, **more)
        stored = answer.get("ChecksumCRC32", "")
        if stored and stored != more.get("ChecksumCRC32", stored):
            raise StorageError(
                errno.EBADMSG, f"{name}: checksum mismatch: the store received different bytes than were sent"
            )
        return str(answer.get("ETag", ""))

    def _body(self, content: Content) -> dict[str, Any]:
        """Return the arguments for sending `content`, with a CRC-32.

        Without it, the client would compute a checksum in the thread that all connections share.
        """
        checked = getattr(self.fs.s3.meta.config, "request_checksum_calculation", None) != "when_required"
        return {"Body": Body(content), **({"ChecksumCRC32": content.crc32_base64()} if checked else {})}

    def upload(self, name: str) -> S3Upload:
        bucket, key = self._split(name)
        upload_id = self._call("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
        return S3Upload(self, bucket, key, upload_id)

    def delete(self, names: list[str]) -> None:
        while names:
            some = names[:_PER_REQUEST]
            bucket = self._split(some[0])[0]
            keys = [{"Key": self._split(name)[1]} for name in some]
            answer = self._call("delete_objects", Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
            # s3fs's own rm ignores these errors, so an object that could not be deleted would count as deleted.
            failed = [item for item in answer.get("Errors", ()) if item.get("Code") not in _GONE]
            if failed:
                _raise_refused(bucket, failed[0])
            del names[: len(some)]

    def unfinished(self, name: str) -> Uploads:
        bucket, key = self._split(name)
        prefix = f"{key}/" if key else ""
        found, more = [], {"Prefix": prefix}
        while True:
            page = self._call("list_multipart_uploads", Bucket=bucket, **more)
            for item in page.get("Uploads", ()):
                if item["Key"].startswith(prefix):  # some servers ignore the prefix
                    started = item["Initiated"].timestamp()
                    found.append(UnfinishedUpload(f"{bucket}/{item['Key']}", item["UploadId"], started))
            if not page.get("IsTruncated") or not page.get("NextKeyMarker"):
                return found
            more |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page.get("NextUploadIdMarker", "")}

    def abort(self, upload: UnfinishedUpload) -> None:
        bucket, key = self._split(upload.name)
        with contextlib.suppress(FileNotFoundError):
            self._call("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload.upload_id)

    def is_conditional(self) -> bool:
        host = urlsplit(self.fs.s3.meta.endpoint_url).hostname or ""
        return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _leave_unsigned(settings: Mapping[str, Any]) -> None:
    """If the server is on this machine, turn off the signing of bodies, to save time. A CRC-32 protects them anyway."""
    given = settings["config_kwargs"]
    checksums = given.get("request_checksum_calculation", os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", ""))
    client = settings.get("client_kwargs") or {}
    url = settings.get("endpoint_url") or client.get("endpoint_url") or os.environ.get("AWS_ENDPOINT_URL", "")
    if checksums.lower() != "when_required" and _is_here(urlsplit(str(url)).hostname or ""):
        given["s3"] = {"payload_signing_enabled": False, **(given.get("s3") or {})}


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _sign_by_crc(params: Any, context: Any, **_: Any) -> None:
    """Tell botocore that the request has a CRC-32. Otherwise, botocore would sign the body's SHA-256 even over TLS."""
    name = "x-amz-checksum-crc32"
    if name in params["headers"] and not context.get("checksum", {}).get("request_algorithm"):
        algorithm = {"algorithm": "crc32", "in": "header", "name": name}
        context["checksum"] = {**context.get("checksum", {}), "request_algorithm": algorithm}


def _refuse_page(answer: Any, name: str, endpoint: str) -> None:
    """Raise StorageError if the response is a web page. Portals and proxies send such pages with a success status."""
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}) if isinstance(answer, dict) else {}
    is_page = str(headers.get("content-type", "")).startswith("text/html")
    if is_page and "etag" not in headers and not any(header.startswith("x-amz") for header in headers):
        raise _not_s3(name, endpoint, "a web page (text/html)")


def _not_s3(name: str, endpoint: str, answer: str) -> StorageError:
    return StorageError(
        errno.EBADMSG,
        f"s3://{name}: {endpoint} answered with {answer}. Is there a proxy or a login page in between? Try another "
        "endpoint: AWS_ENDPOINT_URL, --storage-option endpoint_url=...",
    )


class _Download:
    """Reads the body of a response, and passes its bytes [low, high) to a sink."""

    def __init__(self, body: Any, low: int, high: int, sink: Sink) -> None:
        self.got = 0
        self._body, self._low, self._high, self._sink = body, low, high, sink

    def tell(self) -> int:
        return self.got

    async def run(self) -> None:
        low, high = self._low, self._high
        try:
            while piece := await self._body.read(_CHUNK):
                wanted = memoryview(piece)[max(0, low - self.got) : max(0, high - self.got)]
                if wanted:
                    self._sink(max(low, self.got) - low, wanted)
                self.got += len(piece)
        finally:
            self._body.close()


class S3Upload:
    """A multipart upload. Its parts may be sent in any order."""

    in_order = False

    def __init__(self, api: S3Api, bucket: str, key: str, upload_id: str) -> None:
        self._api = api
        self._where = {"Bucket": bucket, "Key": key, "UploadId": upload_id}
        self._tags: dict[int, str] = {}
        self._lock = threading.Lock()
        self._completing = False

    def part(self, number: int, content: Content, *, last: bool) -> None:
        answer = self._api._call("upload_part", PartNumber=number, **self._api._body(content), **self._where)
        with self._lock:
            self._tags[number] = answer["ETag"]

    def complete(self) -> str:
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(self._tags.items())]
        again, self._completing = self._completing, True
        name = f"{self._where['Bucket']}/{self._where['Key']}"
        try:
            with _taken(name):
                answer = self._api._call(
                    "complete_multipart_upload",
                    MultipartUpload={"Parts": parts},
                    **self._api.condition(name),
                    **self._where,
                )
            return str(answer.get("ETag", ""))
        except NotConditionalError:
            self._api.connection.learn(self._where["Bucket"], conditional=False)
            return self.complete()
        except OSError as error:
            # An earlier try may have succeeded, but its response was lost.
            gone = isinstance(error, (FileExistsError, FileNotFoundError)) or error_code(error) == "InvalidPart"
            if again and gone and self._is_ours(name):
                return ""
            raise

    def _is_ours(self, name: str) -> bool:
        """Return whether the object `name` consists of exactly the parts of this upload."""
        try:
            tag = str(self._api.info(name).get("ETag", "")).strip('"')
        except FileNotFoundError:
            return False
        return tag == _combined_tag([self._tags[number] for number in sorted(self._tags)])

    def abort(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._api._call("abort_multipart_upload", **self._where)


def _files(bucket: str, page: Any) -> list[Entry]:
    return [
        {
            **{name: item[name] for name in ("LastModified", "ETag") if name in item},
            "name": f"{bucket}/{item['Key']}",
            "type": "file",
            "size": item["Size"],
        }
        for item in page.get("Contents", ())
        if not item["Key"].endswith("/")  # a marker object that consoles create for an empty folder
    ]


def _combined_tag(tags: Sequence[str]) -> str:
    """Return the ETag of an object of parts with these ETags, from their MD5s. "" if it can't be computed."""
    import hashlib

    try:
        digests = b"".join(bytes.fromhex(tag.strip('"')) for tag in tags)
    except ValueError:
        return ""  # encrypted with a customer's key, so the tags are not MD5s
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(tags)}"


@contextlib.contextmanager
def _taken(name: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        if http_status(error) == 412:  # s3fs does not recognize the wording of Ceph and others
            raise FileExistsError(errno.EEXIST, f"{name} exists already") from error
        if http_status(error) == 501:
            raise NotConditionalError(errno.ENOTSUP, f"{name}: the server does not support conditional puts") from error
        raise


def _raise_refused(bucket: str, item: Any) -> None:
    text = f"{bucket}/{item.get('Key')} was not deleted: {item.get('Code')}: {item.get('Message')}"
    if item.get("Code") == "AccessDenied":
        raise PermissionError(errno.EACCES, text)
    busy = item.get("Code") in ("InternalError", "SlowDown", "ServiceUnavailable")
    raise OSError(errno.EBUSY if busy else errno.EINVAL, text)
