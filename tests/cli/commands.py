"""Runs commands as a shell does."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from ckptkit.cli.main import cli


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


def ran(*words: str | Path, code: int = 0) -> str:
    """Run a command that must end with `code`; return everything that it prints."""
    result = run(*words)
    assert result.exit_code == code, result.output
    return result.output


def document(*words: str | Path, code: int = 0) -> dict[str, Any]:
    """Run a command with `--json` that must end with `code`; return the document that it prints."""
    result = run(*words, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found
