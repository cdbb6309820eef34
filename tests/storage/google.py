"""Upload sessions as Google documents them, in front of a server that appends everything it receives."""

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.storage.proxy import Reply

_RANGE = re.compile(r"bytes (?:\*|(\d+)-(\d+))/(\*|\d+)")
_QUANTUM = 256 << 10  # Google keeps whole ones


@dataclass
class Sessions:
    """To be set between a proxy and its server.

    - What is asked of a session without bytes tells what it has; of one that is done, the object.
    - Bytes that the server has already are passed over.

    Attributes:
        cut: So many of the next parts arrive by half, and their connection breaks.
        queries: How often it was asked what there is.
    """

    cut: int = 0
    queries: int = 0
    _kept: dict[str, int] = field(default_factory=dict)
    _done: dict[str, Reply] = field(default_factory=dict)

    def __call__(self, handler: Any, body: bytes) -> Reply | None:
        session = parse_qs(urlsplit(handler.path).query).get("upload_id", [""])[0]
        match = _RANGE.fullmatch(handler.headers.get("Content-Range", ""))
        if not session or match is None:
            return handler.forward(body)
        kept = self._kept.get(session, 0)
        self.queries += match[1] is None
        if session in self._done:
            return self._done[session]
        if match[1] is None:
            return self._incomplete(kept)
        start, total = int(match[1]), match[3]
        if start > kept:
            return 400, [], b"there is a gap"
        new, last = body[kept - start :], total != "*"
        if self.cut:
            self.cut -= 1
            new, last = new[: len(new) // 2 // _QUANTUM * _QUANTUM], False
        stop = kept + len(new)
        if new:
            said = f"bytes {kept}-{stop - 1}/{total if last else '*'}"
            reply: Reply = handler.forward(new, Content_Range=said)
            self._kept[session] = stop
            if last:
                self._done[session] = reply
                return reply
        return self._incomplete(stop) if len(new) == len(body[kept - start :]) else None

    @staticmethod
    def _incomplete(kept: int) -> Reply:
        return 308, [("Range", f"bytes=0-{kept - 1}")] if kept else [], b""
