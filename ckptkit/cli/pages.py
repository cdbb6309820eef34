"""Finds the documentation of the installed version, for the last line of --help."""

from __future__ import annotations

import json
import re
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from ckptkit.redact import printable

_BLOB = {"bitbucket.org": "src", "codeberg.org": "src/commit"}  # other forges: "blob"


def place_of(page: str) -> str:
    """Return the address of docs/`page`: on the forge, in the installed directory, or else a description.

    pip records where it installed from in direct_url.json (PEP 610). Credentials in that URL are left out.
    """
    try:
        found = _recorded(distribution("ckptkit-torch").read_text("direct_url.json") or "", f"docs/{page}")
    except Exception:  # noqa: BLE001  the file is not ours: whatever it contains, --help must work
        found = ""
    return found or f"docs/{page} in the repository"


def _recorded(text: str, page: str) -> str:
    """Return the address of a page of the checkout from which pip installed. "" if there is none."""
    record = json.loads(text)
    url, commit = urlsplit(record["url"]), str(record.get("vcs_info", {}).get("commit_id", ""))
    if "dir_info" in record and url.scheme == "file" and url.netloc in ("", "localhost"):
        path = Path(url2pathname(url.path), page)
        return printable(str(path)) if path.is_file() else ""
    path_of_repo = url.path.rstrip("/").removesuffix(".git")
    is_forge = url.scheme in ("https", "http", "ssh") and re.fullmatch(r"[\w.-]+\.[a-z]+", url.hostname or "")
    if not (is_forge and re.fullmatch(r"(/[\w.~-]+){2,}", path_of_repo) and re.fullmatch("[0-9a-f]{40,64}", commit)):
        return ""
    port = f":{url.port}" if url.port and url.scheme != "ssh" else ""
    scheme = "http" if url.scheme == "http" else "https"
    return f"{scheme}://{url.hostname}{port}{path_of_repo}/{_BLOB.get(str(url.hostname), 'blob')}/{commit}/{page}"
