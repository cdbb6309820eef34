"""Answers that arrive after their client has given up."""

from __future__ import annotations

import threading
from typing import Any

from tests.storage.proxy import Proxy, Reply


class Late:
    """Goes between a proxy and its server: answers the first request of each kind after the client has given up."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, handler: Any, body: bytes) -> Reply | None:
        kind = next(iter(_kinds(handler)))
        with self._lock:
            late = kind not in self.kinds
            if late:
                self.kinds.append(kind)
        reply: Reply = handler.forward(body)
        if not late:
            return reply
        handler.connection.settimeout(30)
        assert handler.connection.recv(1) == b"", "the client went on without an answer"
        return None


def _kinds(handler: Any) -> dict[str, int]:
    one = Proxy("")
    one.seen.append((handler.command, handler.path))
    return dict(one.kinds())
