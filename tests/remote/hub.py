"""A read-only Hub repository on loopback, for `hf://`, over the files of a folder."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_SHA = "1" * 40


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    ranges: list[str]

    def log_message(self, *args: Any) -> None:
        pass

    def _json(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _entry(self, path: Path) -> dict[str, Any]:
        oid = hashlib.sha1(path.name.encode(), usedforsecurity=False).hexdigest()
        return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": oid}

    def _any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        files = sorted(self.folder.iterdir())
        if "/tree/" in path:
            inside = path.partition(f"/tree/{_SHA}")[2] or path.partition("/tree/main")[2]
            self._json([] if inside.strip("/") else [self._entry(file) for file in files])
        elif "/paths-info/" in path:
            form = parse_qs(body.decode()) if not body.startswith(b"{") else json.loads(body)
            self._json([self._entry(file) for file in files if file.name in form["paths"]])
        elif path.startswith("/api/models/me/model"):
            self._json({"id": "me/model", "sha": _SHA, "siblings": [{"rfilename": f.name} for f in files]})
        elif path.startswith("/me/model/resolve/"):
            self._file(self.folder / path.rpartition("/")[2])
        else:
            self._json({"error": "not found"}, 404)

    do_GET = do_POST = do_HEAD = _any

    def _file(self, path: Path) -> None:
        if not path.is_file():
            self._json({"error": "not found"}, 404)
            return
        data, wanted = path.read_bytes(), self.headers.get("Range")
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
        self.send_response(206 if match else 200)
        if match:
            self.ranges.append(path.name)
            start, total = int(match[1]), len(data)
            data = data[start : int(match[2]) + 1 if match[2] else total]
            self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{total}")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", _SHA)
        self.send_header("ETag", f'"{self._entry(path)["oid"]}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def hub_of(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `folder` as the repository me/model; yields the endpoint, and the names of files read by ranges."""
    ranges: list[str] = []
    handler = type("Handler", (_Handler,), {"folder": folder, "ranges": ranges})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", ranges
    finally:
        server.shutdown()
        server.server_close()
