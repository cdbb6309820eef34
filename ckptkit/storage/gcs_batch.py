"""Many deletions on Google Cloud Storage in one request: how it is written, and what its answer says of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from email.parser import BytesParser
from urllib.parse import quote

__all__ = ["MOST", "batch_answers", "batch_of_deletions"]

MOST = 100  # what Google takes in one batch

_BOUNDARY = "ckptkit-batch-5d1e0c7ab39f4286"
_STATUS = re.compile(rb"HTTP/[0-9.]+ ([0-9]{3})")
_NUMBER = re.compile(r"\+([0-9]{1,3})>?$")


def batch_of_deletions(objects: Sequence[tuple[str, str]]) -> tuple[str, bytes]:
    """Return content type and body of a batch that deletes objects, each given by bucket and key."""
    body = b""
    for i, (bucket, key) in enumerate(objects):
        lines = (
            f"--{_BOUNDARY}",
            "Content-Type: application/http",
            "Content-Transfer-Encoding: binary",
            f"Content-ID: <{_BOUNDARY}+{i}>",
            "",
            f"DELETE /storage/v1/b/{quote(bucket, safe='')}/o/{quote(key, safe='')} HTTP/1.1",
            "Content-Length: 0",
            "",
            "",
        )
        body += "\r\n".join(lines).encode() + b"\r\n"
    return f"multipart/mixed; boundary={_BOUNDARY}", body + f"--{_BOUNDARY}--\r\n".encode()


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
