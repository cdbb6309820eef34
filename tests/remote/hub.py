"""A read-only Hub repository on loopback, for `hf://`, over the files of a folder."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.storage.servers import Handler, serving

_SHA = "1" * 40


class _Handler(Handler):
    folder: Path
    ranges: list[str]

    def _entry(self, path: Path) -> dict[str, Any]:
        oid = hashlib.sha1(path.name.encode(), usedforsecurity=False).hexdigest()
        return {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": oid}

    def _any(self) -> None:
        body, path = self.body(), unquote(urlsplit(self.path).path)
        files = sorted(self.folder.iterdir())
        if "/tree/" in path:
            inside = path.partition(f"/tree/{_SHA}")[2] or path.partition("/tree/main")[2]
            self.answer_json(200, [] if inside.strip("/") else [self._entry(file) for file in files])
        elif "/paths-info/" in path:
            form = parse_qs(body.decode()) if not body.startswith(b"{") else json.loads(body)
            self.answer_json(200, [self._entry(file) for file in files if file.name in form["paths"]])
        elif path.startswith("/api/models/me/model"):
            self.answer_json(200, {"id": "me/model", "sha": _SHA, "siblings": [{"rfilename": f.name} for f in files]})
        elif path.startswith("/me/model/resolve/") and (file := self.folder / path.rpartition("/")[2]).is_file():
            self._file(file)
        else:
            self.answer_json(404, {"error": "not found"}, X_Error_Code="EntryNotFound")

    do_GET = do_POST = do_HEAD = _any

    def _file(self, path: Path) -> None:
        data, headers = path.read_bytes(), {"X_Repo_Commit": _SHA, "ETag": f'"{self._entry(path)["oid"]}"'}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if match:
            self.ranges.append(path.name)
            start, total = int(match[1]), len(data)
            data = data[start : int(match[2]) + 1 if match[2] else total]
            headers["Content_Range"] = f"bytes {start}-{start + len(data) - 1}/{total}"
        self.answer(206 if match else 200, data, **headers)


@contextmanager
def hub_of(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `folder` as the repository me/model; yields the endpoint, and the names of files read by ranges."""
    ranges: list[str] = []
    with serving(_Handler, folder=folder, ranges=ranges) as url:
        yield url, ranges
