"""A reverse proxy of a real server that counts requests, and fails, delays or truncates those that a rule selects."""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from tests.storage.servers import Handler, serving


@dataclass(frozen=True)
class Answer:
    """An answer of the proxy itself, by default an error of S3; the server is not asked."""

    status: int
    code: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    text: bytes | None = None

    @property
    def body(self) -> bytes:
        xml = f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>on purpose</Message></Error>"
        return xml.encode() if self.text is None else self.text


@dataclass(frozen=True)
class Changed:
    """The server's answer with a changed body."""

    change: Callable[[bytes], bytes]


Reply = tuple[int, list[tuple[str, str]], bytes]
Fate = str | Answer | Changed
Rule = Callable[[int, str, str], Fate]
"""(number of the request, method, path) -> "pass", "503", "reset", "lost", "cut", "slow", or an answer."""
PASS: Rule = lambda number, method, path: "pass"  # noqa: E731


@dataclass
class Proxy:
    """The requests so far, and the rule for the next ones."""

    url: str
    rule: Rule = PASS
    seen: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)  # of each that was seen, names in lower case
    sent: int = 0  # bytes of all bodies
    lock: threading.Lock = field(default_factory=threading.Lock)
    between: Callable[[_Handler, bytes], Reply | None] | None = None  # asks the server; None: the connection breaks

    def clear(self) -> None:
        self.seen.clear()
        self.headers.clear()
        self.sent = 0

    @property
    def count(self) -> int:
        return len(self.seen)

    def kinds(self) -> Counter[str]:
        """The requests, by kind."""
        return Counter(_kind(method, path) for method, path in self.seen)


def _kind(method: str, path: str) -> str:
    query = parse_qs(urlsplit(path).query, keep_blank_values=True)
    if "list-type" in query:
        return "LIST"
    for word in ("uploads", "delete", "partNumber", "uploadId"):
        if word in query:
            return f"{method} {word}"
    return method


class _Handler(Handler):
    proxy: Proxy
    target: tuple[str, int]

    def _any(self) -> None:
        body = self.body()
        with self.proxy.lock:
            self.proxy.seen.append((self.command, self.path))
            self.proxy.headers.append({name.lower(): value for name, value in self.headers.items()})
            self.proxy.sent += len(body)
            number = len(self.proxy.seen)
        fate = self.proxy.rule(number, self.command, self.path)
        if fate == "503":
            fate = Answer(503, "SlowDown")
        if isinstance(fate, Answer):
            return self._answer(fate.status, [("Content-Type", "application/xml"), *fate.headers], fate.body)
        if fate == "reset":
            return self._drop()
        if fate == "slow":
            time.sleep(0.3)
        reply = self.proxy.between(self, body) if self.proxy.between else self.forward(body)
        if fate == "lost" or reply is None:  # carried out, but the answer is lost
            return self._drop()
        status, headers, data = reply
        if isinstance(fate, Changed):
            data = fate.change(data)
        return self._answer(status, headers, data, cut=fate == "cut" and len(data) > 1)

    def _drop(self) -> None:
        self.close_connection = True
        self.connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return super().body()
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def forward(self, body: bytes, **changed: str) -> Reply:
        """Ask the server. `changed`: headers, with _ for -."""
        connection = http.client.HTTPConnection(*self.target, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("transfer-encoding", "expect")}
        headers |= {name.replace("_", "-"): value for name, value in changed.items()}
        headers["Content-Length"] = str(len(body))
        try:
            connection.request(self.command, self.path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        length = str(len(data))
        for name, value in headers:
            if self.command == "HEAD" and name.lower() == "content-length":
                length = value
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        try:
            if cut:
                self.wfile.write(data[: len(data) // 2])
                self._drop()
            elif self.command != "HEAD":
                self.wfile.write(data)
        except OSError:
            self.close_connection = True


@contextmanager
def proxy_of(url: str, *, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    """Run a proxy of the server at `url` on loopback; with `tls` over HTTPS."""
    parts, proxy = urlsplit(url), Proxy("")
    with serving(_Handler, tls=tls, target=(parts.hostname, parts.port), proxy=proxy) as proxy.url:
        yield proxy


def first_of_each(*fates: str | Answer) -> Rule:
    """Return the rule that applies these fates in turn, each to the first occurrence of a request."""
    seen: set[tuple[str, str]] = set()

    def rule(number: int, method: str, path: str) -> str | Answer:
        if (method, path) in seen:
            return "pass"
        seen.add((method, path))
        return fates[len(seen) % len(fates)]

    return rule


def only(fate: Fate, is_it: Callable[[str, str], bool]) -> Rule:
    """Return the rule that applies `fate` to the requests that `is_it(method, path)` selects."""
    return lambda number, method, path: fate if is_it(method, path) else "pass"


def first(fate: Fate, is_it: Callable[[str, str], bool], *, times: int = 1) -> Rule:
    """Return the rule that applies `fate` to the first `times` requests that `is_it(method, path)` selects."""
    left = iter(range(times))
    return lambda number, method, path: fate if is_it(method, path) and next(left, None) is not None else "pass"


def nth(fate: Fate, *numbers: int) -> Rule:
    """Return the rule that applies `fate` to the requests with these numbers."""
    return lambda number, method, path: fate if number in numbers else "pass"


def always(fate: Fate) -> Rule:
    return lambda number, method, path: fate


def every_third(fate: Fate) -> Rule:
    return lambda number, method, path: fate if number % 3 == 0 else "pass"


class Late:
    """Goes between a proxy and its server: answers the first request of each kind after the client has given up."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, handler: _Handler, body: bytes) -> Reply | None:
        kind = _kind(handler.command, handler.path)
        with self._lock:
            late = kind not in self.kinds
            if late:
                self.kinds.append(kind)
        reply = handler.forward(body)
        if not late:
            return reply
        handler.connection.settimeout(30)
        assert handler.connection.recv(1) == b"", "the client went on without an answer"
        return None
