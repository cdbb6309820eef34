"""Files of checkpoints and foreign files, distinguished by name if there is no record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit import CheckpointManager, TrainState
from ckptkit.formats.replaceable import may_be_saved


@pytest.mark.parametrize("models", [1, 2])
def test_every_file_that_a_save_writes_is_recognised(tmp_path: Path, kind: str, models: int) -> None:
    side = tmp_path / "side"
    (side / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "LICENSE", "additional_chat_templates/tool.jinja"):
        (side / name).write_text("{}")
    parts = {name: nn.Linear(9, 3) for name in ("actor", "critic")[:models]}
    optimizer = torch.optim.AdamW([p for part in parts.values() for p in part.parameters()])
    for part in parts.values():
        part(torch.ones(9)).sum().backward()
    optimizer.step()
    model: Any = parts if models > 1 else parts["actor"]
    with CheckpointManager(tmp_path / "run", state_dict_type=kind, side_files=side, max_shard_size="100B") as manager:
        manager.save(
            1, TrainState(model=model, optimizer=optimizer if models == 1 else None, extra={"x": torch.ones(3)})
        )
    step = tmp_path / "run" / "step_00000001"
    files = [str(path.relative_to(step)) for path in step.rglob("*") if path.is_file()]
    assert len(files) > 5 and [path for path in files if not may_be_saved(path)] == []


@pytest.mark.parametrize("name", ["notes.txt", "eval/results.json", "state.safetensors", "plots/loss.png", "run.sh"])
def test_files_that_no_save_writes_are_not_recognised(name: str) -> None:
    assert not may_be_saved(name)
