"""A real headless browser for the pages: their DOM, console messages, and printing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def dom(page: Path, tmp_path: Path) -> tuple[str, str]:
    """Return the page's DOM after rendering, and the browser's log (blocked requests, errors)."""
    done = _run(tmp_path, "--enable-logging=stderr", "--v=0", "--dump-dom", page.resolve().as_uri())
    return done.stdout, done.stderr


def printed(page: Path, tmp_path: Path) -> bytes:
    """Return the page as PDF."""
    target = tmp_path / "page.pdf"
    _run(tmp_path, f"--print-to-pdf={target}", "--no-pdf-header-footer", page.resolve().as_uri())
    return target.read_bytes()


def _run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if CHROMIUM is None:
        # Without a browser the pages are still parsed (test_pictures.py); CI installs one.
        assert not os.environ.get("CKPTKIT_REQUIRE_BROWSER"), "CI must have chromium: apt-get install chromium"
        pytest.skip("no chromium here: apt-get install chromium")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"]
    arguments = (*options, f"--user-data-dir={tmp_path}/p", *arguments)
    return subprocess.run([CHROMIUM, *arguments], capture_output=True, text=True, check=True, timeout=90)
