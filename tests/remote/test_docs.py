"""The code blocks of docs/remote.md run, in their order, against a server."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.storage import open_store
from tests.remote.runs import run_cli, state_of
from tests.storage import servers

PAGE = Path(__file__).parents[2] / "docs" / "remote.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ENDPOINT = "http://127.0.0.1:9000"


def test_the_code_blocks_of_the_page_run(s3: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {**servers.CREDENTIALS, "AWS_ENDPOINT_URL": s3["endpoint_url"]}.items():
        monkeypatch.setenv(name, value)
    open_store("s3://bucket").fs.makedirs("bucket", exist_ok=True)
    state = state_of(3)
    with CheckpointManager("s3://bucket/run") as manager:
        for step in (100, 200, 300):
            manager.save(step, state)
    ran = 0
    for kind, block in BLOCK.findall(PAGE.read_text(encoding="utf-8").replace(ENDPOINT, s3["endpoint_url"])):
        if kind == "console":
            for line in block.splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                code, text = run_cli(*words[1:])
                assert words[0] == "ckptkit" and code == 0, f"{line}\n{text}"
                ran += 1
        elif block.startswith("from "):
            exec(compile(block, str(PAGE), "exec"), {"state": state, "step": 400})
            ran += 1
    assert ran >= 6
