"""The repository me/model of a Hub on loopback: read through `hf://`, and written by the Hub's upload protocol."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.storage.servers import Handler, serving

_SHA = "1" * 40


@dataclass
class Hub:
    """The content of the server, and what it is to refuse."""

    files: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)  # uploaded by LFS
    ranges: list[str] = field(default_factory=list)  # names of the files that were read by ranges
    denied: bool = False
    busy: dict[str, int] = field(default_factory=dict)  # the response to the first request whose path contains this
    url: str = ""


class _Handler(Handler):
    hub: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if "/tree/" in path:
            inside = path.partition(f"/tree/{_SHA}")[2] or path.partition("/tree/main")[2]
            self.answer_json(200, [] if inside.strip("/") else [self._entry(name) for name in sorted(self.hub.files)])
        elif path.startswith("/api/models/me/model"):
            siblings = [{"rfilename": name} for name in sorted(self.hub.files)]
            self.answer_json(200, {"id": "me/model", "sha": _SHA, "siblings": siblings})
        elif path.startswith("/me/model/resolve/") and path.rpartition("/")[2] in self.hub.files:
            self._file(path.rpartition("/")[2])
        else:
            self.answer_json(404, {"error": "not found"}, X_Error_Code="EntryNotFound")

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        data = self.body()
        self.hub.blobs[hashlib.sha256(data).hexdigest()] = data
        self.answer_json(200, {})

    def do_POST(self) -> None:
        data, path, hub = self.body(), urlsplit(self.path).path, self.hub
        busy = next((part for part in hub.busy if part in path), None)
        if busy is not None:
            self.answer_json(hub.busy.pop(busy), {"error": "later"})
        elif "/paths-info/" in path:
            form = parse_qs(data.decode()) if not data.startswith(b"{") else json.loads(data)
            self.answer_json(200, [self._entry(name) for name in sorted(hub.files) if name in form["paths"]])
        elif hub.denied:
            self.answer_json(403, {"error": "Forbidden: no write access"})
        elif path == "/api/repos/create":
            self.answer_json(200, {"url": f"{hub.url}/me/model"})
        elif "/preupload/" in path:
            modes = {True: "lfs", False: "regular"}
            files = [
                {"path": path, "uploadMode": modes[path.endswith(".safetensors")], "shouldIgnore": False}
                for path in (file["path"] for file in json.loads(data)["files"])
            ]
            self.answer_json(200, {"files": files})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{hub.url}/blob/{o['oid']}"}}}
                for o in json.loads(data)["objects"]
            ]
            self.answer_json(200, {"transfer": "basic", "objects": objects})
        elif path == "/api/validate-yaml":
            self._validate(json.loads(data)["content"])
        elif "/commit/" in path:
            self._commit(data)
        else:
            self.answer_json(404, {"error": path})

    def _entry(self, name: str) -> dict[str, Any]:
        oid = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
        return {"type": "file", "path": name, "size": len(self.hub.files[name]), "oid": oid}

    def _file(self, name: str) -> None:
        data, headers = self.hub.files[name], {"X_Repo_Commit": _SHA, "ETag": f'"{self._entry(name)["oid"]}"'}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if match:
            self.hub.ranges.append(name)
            start, total = int(match[1]), len(data)
            data = data[start : int(match[2]) + 1 if match[2] else total]
            headers["Content_Range"] = f"bytes {start}-{start + len(data) - 1}/{total}"
        self.answer(206 if match else 200, data, **headers)

    def _validate(self, card: str) -> None:
        """Validate a README.md like the Hub: its front matter must be YAML, with a known library name."""
        head = yaml.safe_load(card.split("---")[1]) if card.startswith("---\n") else {}
        good = isinstance(head.get("library_name", ""), str) and isinstance(head.get("tags", []), list)
        self.answer_json(200 if good else 400, {"errors": [] if good else [{"message": str(head)}], "warnings": []})

    def _commit(self, data: bytes) -> None:
        for line in data.decode().splitlines():
            item = json.loads(line)
            if item["key"] == "file":
                self.hub.files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            elif item["key"] == "lfsFile":
                self.hub.files[item["value"]["path"]] = self.hub.blobs[item["value"]["oid"]]
        self.answer_json(200, {"commitUrl": f"{self.hub.url}/me/model/commit/{_SHA}", "commitOid": _SHA})


@contextmanager
def running_hub(**files: bytes) -> Iterator[Hub]:
    """Serve a repository that has these files."""
    hub = Hub(files)
    with serving(_Handler, hub=hub) as hub.url:
        yield hub
