"""The transformers callback and the Accelerate hooks on object stores: moto, and rclone with real signatures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
from ckptkit import RetentionPolicy
from ckptkit.integrations.accelerate import AcceleratorCheckpoints
from ckptkit.integrations.transformers import CheckpointCallback
from ckptkit.storage import open_store
from tests.integrations import test_accelerate, test_transformers
from tests.storage import servers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def rclone(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Storage options of a server with real signatures, which has the bucket `frameworks`."""
    (tmp_path / "served" / "frameworks").mkdir(parents=True)
    with servers.rclone(tmp_path / "served") as options:
        yield dict(options)


@pytest.fixture
def moto() -> Iterator[dict[str, Any]]:
    """Storage options of a server with conditional writes, which has the bucket `frameworks`."""
    with servers.moto() as options:
        open_store("s3://frameworks", storage_options=options).fs.mkdir("frameworks")
        yield dict(options)


def kept(url: str, options: dict[str, Any]) -> list[str]:
    return sorted(item.path for item in open_store(url, storage_options=options).list() if item.path.startswith("step"))


def test_a_trainer_saves_rotates_and_resumes_bit_equal_on_s3(rclone: dict[str, Any], tmp_path: Path) -> None:
    url = "s3://frameworks/trainer"
    straight = test_transformers.trainer_of(tmp_path, CheckpointCallback(tmp_path / "straight"))
    straight.train()
    options: dict[str, Any] = {"storage_options": rclone, "retention": RetentionPolicy(max_num=2)}
    test_transformers.trainer_of(tmp_path, test_transformers.stopping(url, save_steps=1, **options)).train()
    assert kept(url, rclone) == ["step_00000002", "step_00000003"]
    callback = CheckpointCallback(url, **options)
    resumed = test_transformers.trainer_of(tmp_path, callback)
    resumed.train()
    assert callback.loaded is not None
    assert callback.loaded.step == 3
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), straight.model.parameters(), strict=True))
    assert not [path.name for path in Path.cwd().iterdir() if path.name.startswith("s3:")]


def test_an_accelerator_saves_and_resumes_bit_equal_on_s3(moto: dict[str, Any]) -> None:
    run = test_accelerate.prepared()
    checkpoints = AcceleratorCheckpoints(run[0], "s3://frameworks/accelerate", storage_options=moto)
    test_accelerate.train(run, 3)
    checkpoints.save_state(3)
    test_accelerate.train(run, 3)
    checkpoints.close()
    again = test_accelerate.prepared()
    checkpoints = AcceleratorCheckpoints(again[0], "s3://frameworks/accelerate", storage_options=moto)
    report = checkpoints.load_state()
    checkpoints.close()
    assert report is not None
    assert report.step == 3
    test_accelerate.train(again, 3)
    assert all(torch.equal(a, b) for a, b in zip(again[1].parameters(), run[1].parameters(), strict=True))
