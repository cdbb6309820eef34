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
    """An answer of the proxy itself; the server is not asked."""

    status: int
    code: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def body(self) -> bytes:
        return f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>on purpose</Message></Error>".encode()


@dataclass(frozen=True)
class Changed:
    """The server's answer with a changed body."""

    change: Callable[[bytes], bytes]


Reply = tuple[int, list[tuple[str, str]], bytes]
Rule = Callable[[int, str, str], "str | Answer | Changed"]
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


def every_third(fate: str) -> Rule:
    """Return the rule that applies `fate` to every third request."""
    return lambda number, method, path: fate if number % 3 == 0 else "pass"
