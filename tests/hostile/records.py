"""False content in our own files with matching sizes and digests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from ckptkit.formats.own.record import _self_digest


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def edit_record(step: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change `checkpoint.json` and update its digest."""

    def sealed(body: dict[str, Any]) -> None:
        change(body)
        body.pop("self", None)
        body["self"] = _self_digest(body)

    edit_json(step / "checkpoint.json", sealed)


def reseal(step: Path) -> None:
    """Update the sizes and digests in the record to those of the files."""

    def change(body: dict[str, Any]) -> None:
        for name in body["files"]:
            data = (step / name).read_bytes()
            body["files"][name] = {"nbytes": len(data), "xxh3_64": xxhash.xxh3_64_hexdigest(data)}
        body["total_bytes"] = sum(item["nbytes"] for item in body["files"].values())

    edit_record(step, change)
