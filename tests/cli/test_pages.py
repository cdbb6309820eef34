"""--help names the documentation of the installed version."""

import json
from pathlib import Path
from typing import Any

import pytest

from ckptkit.cli import pages

COMMIT = "0123456789abcdef0123456789abcdef01234567"
BLOB = f"blob/{COMMIT}/docs/rotation.md"
PAGE = "docs/rotation.md in the repository"
CHECKOUT = Path(__file__).parents[2]


def git(url: str, commit: Any = COMMIT) -> str:
    return json.dumps({"url": url, "vcs_info": {"vcs": "git", "commit_id": commit}})


@pytest.mark.parametrize(
    ("record", "place"),
    [
        (git("https://github.com/me/ckptkit.git"), f"https://github.com/me/ckptkit/{BLOB}"),
        (git("https://me:secret@git.example.org:8443/a/b/c?token=secret#secret"), f"https://git.example.org:8443/a/b/c/{BLOB}"),
        (git("ssh://git@gitlab.com:22/me/ckptkit.git"), f"https://gitlab.com/me/ckptkit/{BLOB}"),
        (git("https://codeberg.org/me/ckptkit"), f"https://codeberg.org/me/ckptkit/src/commit/{COMMIT}/docs/rotation.md"),
        (json.dumps({"url": CHECKOUT.as_uri(), "dir_info": {"editable": True}}), str(CHECKOUT / "docs/rotation.md")),
        (json.dumps({"url": "file:///nowhere", "dir_info": {}}), PAGE),
        (git("file:///srv/git/ckptkit.git"), PAGE),
        (git("https://github.com/me/ckptkit", "main"), PAGE),
        (git("https://github.com/me/ckptkit", None), PAGE),
        (git("https://[bad/me/ckptkit"), PAGE),
        (git("https://github.com/me/\x1b[31m"), PAGE),
        ("[" * 100_000, PAGE),
        ("[]", PAGE),
        ('{"url": 3, "dir_info": null, "vcs_info": []}', PAGE),
        (None, PAGE),
    ],
    ids=lambda value: ascii(str(value)[:40]),
)  # fmt: skip
def test_the_place_of_a_page_follows_from_where_pip_installed(monkeypatch, record, place):
    class Installed:
        def read_text(self, name: str) -> Any:
            if record is None:
                raise FileNotFoundError(name)
            return record

    monkeypatch.setattr(pages, "distribution", lambda _: Installed())
    assert pages.place_of("rotation.md") == place
