"""Runs commands as a shell does, and saves the run that they read."""

from __future__ import annotations

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


def save_run(url: str, **options: Any) -> None:
    """Save steps 100, 200 and 300 with rising losses; the policy of the run keeps the best, which is the oldest."""
    import torch

    from ckptkit import CheckpointManager, RetentionPolicy, TrainState

    model = torch.nn.Linear(8, 8)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with CheckpointManager(url, retention=RetentionPolicy(max_num=5, keep_best=("loss", "min")), **options) as manager:
        for step in (100, 200, 300):
            manager.save(step, state, metrics={"loss": step / 100})
