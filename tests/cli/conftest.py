"""A run that the commands read, fresh for each test."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 100, 200 and 300 with rising losses; the policy of the run keeps the best, which is the oldest."""
    import torch

    from ckptkit import CheckpointManager, RetentionPolicy, TrainState

    root, model = tmp_path_factory.mktemp("commands") / "RUN", torch.nn.Linear(8, 8)
    state = TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    with CheckpointManager(root, retention=RetentionPolicy(max_num=5, keep_best=("loss", "min"))) as manager:
        for step in (100, 200, 300):
            manager.save(step, state, metrics={"loss": step / 100})
    return root


@pytest.fixture
def root(saved_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_run, tmp_path / "RUN", symlinks=True))
