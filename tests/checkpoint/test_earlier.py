"""The checkpoints of earlier versions in tests/checkpoint/kept_0.1 resume bit-exactly.

`python -m tests.checkpoint.test_earlier DIRECTORY` writes such checkpoints with the current code.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit import CheckpointManager, TrainState, reshard
from ckptkit.errors import CheckpointMismatchError
from ckptkit.fsdp import FSDPConfig, FSDPStrategy
from tests.checkpoint import states
from tests.dtensors import whole

SIZES = {"sharded": 2, "full": 2, "local": 2, "masters": 2, "remote": 1}
KEPT = Path(__file__).parent / "kept_0.1"
CASES = [(case, size) for case, written in SIZES.items() for size in sorted({1, 2, written})]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.register_buffer("scale", torch.tensor(2.0))
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        found: torch.Tensor = self.head(x)
        return found


class Counter:
    """A stateful object, like a dataloader."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def made(case: str) -> tuple[TrainState, Any]:
    """Return a state with fixed values, and a function that trains one step."""
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) / (number + 1))
    if case == "masters":
        strategy = FSDPStrategy(FSDPConfig(precision="master", mixed_precision="bf16"))
        wrapped = strategy.prepare_model(model)
        optimizer: Any = strategy.create_optimizer(wrapped)
    else:
        from torch.distributed.fsdp import fully_shard

        if torch.distributed.get_world_size() > 1:
            fully_shard(model)
        wrapped, optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    counter = Counter()
    state = TrainState(model=wrapped, optimizer=optimizer, scheduler=scheduler, extra={"counter": counter})

    def step() -> float:
        loss = wrapped(torch.arange(11)).float().logsumexp(-1).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        counter.seen += 11
        return float(loss)

    return state, step


def values(state: TrainState) -> dict[str, Any]:
    """Return all weights and moments as whole tensors, and the rest of the state unchanged."""
    model, optimizer = state.model, state.optimizer
    assert isinstance(model, nn.Module)
    found = {f"model.{name}": whole(value.detach()) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = whole(value)
    return {**found, "scheduler": state.scheduler.state_dict()["last_epoch"], "seen": state.extra["counter"].seen}


def _loaded(url: str, case: str) -> dict[str, Any]:
    state, _ = made(case)
    report = states.load_all(url, state)
    assert (state.step, report.metrics, report.client_state) == (3, {"loss": 1.5}, {"epoch": 1})
    return values(state)


@pytest.mark.parametrize(("case", "size"), CASES)
def test_checkpoints_of_an_earlier_version_load_bit_for_bit(case, size, ranks, tmp_path):
    kept = KEPT / case
    run = tmp_path / "run"
    shutil.copytree(kept / "run", run)
    if case == "local" and size != SIZES[case]:
        with pytest.raises(AssertionError, match=CheckpointMismatchError.__name__):
            ranks.run(_loaded, size, str(run), case)
        reshard(str(run), str(tmp_path / "resharded/step_00000003"), world_size=size, type="local")
        run = tmp_path / "resharded"
    expected = torch.load(kept / "expected.pt", weights_only=True)
    for found in ranks.run(_loaded, size, str(run), case):
        assert states.different(states.bits(found), states.bits(expected)) == []


def _write(folder: str, case: str, options: Any) -> dict[str, Any]:
    state, step = made(case)
    for _ in range(3):
        step()
    kind = {"full": "FULL", "local": "LOCAL"}.get(case, "SHARDED")
    with CheckpointManager(folder, state_dict_type=kind, storage_options=options) as manager:
        manager.save(3, state, metrics={"loss": 1.5}, client_state={"epoch": 1})
    return values(state)


def main() -> None:
    """Write each case and the values that a load must give."""
    from tests.ranks import run_ranks
    from tests.storage import servers

    for case, size in SIZES.items():
        target = Path(sys.argv[1], case)
        if case == "remote":
            with servers.moto() as options:
                import s3fs

                bucket = s3fs.S3FileSystem(**options)
                bucket.mkdir("runs")
                expected = run_ranks(_write, size, "s3://runs/run", case, dict(options))[0]
                bucket.get("runs/run", str(target / "run"), recursive=True)
        else:
            expected = run_ranks(_write, size, str(target / "run"), case, None)[0]
        torch.save(expected, target / "expected.pt")


if __name__ == "__main__":
    main()
