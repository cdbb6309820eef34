"""Whatever a job saves, and however it is resharded, a job of another shape continues with the same values.

Each seed draws models, optimizers, wrappers, ranks, a type of checkpoint, offline commands and options of the load.
"""

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from ckptkit import CheckpointManager, PerRank, RetentionPolicy, TrainState, reshard, verify
from ckptkit.fsdp import MasterWeightOptimizer
from ckptkit.offline.copy import copy as copy_checkpoint
from tests.checkpoint.jobs import whole
from tests.checkpoint.states import Kept, different

STEP = 20
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "atomic": {"atomic": True},
    "include": {"include": ["*up*"]},
    "exclude": {"exclude": ["*up*"]},
    "no model": {"model": "skip"},
    "no optimizer": {"optimizer": "skip"},
    "deferred": {"optimizer": "deferred"},
    "broadcast": {"replicas": "broadcast"},
}
OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
}


@dataclass(frozen=True)
class Case:
    """What a seed draws. Pairs belong to the job that saves and the job that loads."""

    seed: int
    ranks: tuple[int, int]
    wraps: tuple[str, str]
    kinds: dict[str, str]  # of the models, by name
    optimizer: str
    split: bool  # into two optimizers
    steps: tuple[int, int]
    type: str
    in_background: bool
    offline: tuple[str, ...]
    option: str

    @property
    def sharded(self) -> tuple[bool, bool]:
        return "fsdp" in self.wraps[0], "fsdp" in self.wraps[1]


def drawn(seed: int) -> Case:
    random = Random(seed)
    kinds = ["plain", "tied", "low", "frozen", "counted", "adapter", "adapters"]
    return Case(
        seed,
        random.choice([(1, 1), (1, 2), (2, 1), (2, 2)]),
        (random.choice(wraps := ["none", "compile", "ddp", "fsdp", "fsdp", "compiled fsdp"]), random.choice(wraps)),
        {name: random.choice(kinds) for name in random.choice([("",), ("actor", "critic")])},
        random.choice([*OPTIMIZERS]),
        random.random() < 0.3,
        (random.choice([1, 2]), random.choice([0, 1])),
        random.choice(["sharded", "sharded", "full", "local"]),
        random.random() < 0.5,
        tuple(random.choices(["copy", "sharded", "local"], k=random.choice([0, 0, 1, 2]))),
        random.choice(["all", "all", *OPTIONS]),
    )


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(5, 6), nn.Linear(6, 14), nn.BatchNorm1d(14)
        self.down, self.head = nn.Linear(14, 6), nn.Linear(6, 5, bias=False)
        self.unused = nn.Parameter(torch.randn(1))
        self.counts: list[int] = []
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "frozen":
            self.up.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.down(self.norm(self.up(self.embed(x)))))
        return found


class Counted(Net):
    def get_extra_state(self) -> list[int]:  # torch ignores one that is set on an object
        return self.counts

    def set_extra_state(self, state: list[int]) -> None:
        self.counts = state


def net(kind: str) -> nn.Module:
    model: Any = Counted(kind) if kind == "counted" else Net(kind)
    if kind.startswith("adapter"):
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["up"], init_lora_weights=False))
        if kind == "adapters":
            model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["down"], init_lora_weights=False))
    return model.to(torch.bfloat16) if kind in ("low", "adapter") else model


def wrapped(model: nn.Module, wrap: str) -> nn.Module:
    if "fsdp" in wrap:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model.get_submodule(n) for n, m in [*model.named_modules()] if isinstance(m, nn.BatchNorm1d)):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    return torch.compile(model) if "compile" in wrap else model  # type: ignore[return-value]


def drawn_like(tensor: torch.Tensor, *key: Any) -> torch.Tensor:
    """Return numbers that depend only on `key`, placed like a tensor, so that steps are equal on any ranks."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")
    new = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)).to(tensor.dtype)
    if isinstance(tensor, DTensor):
        return distribute_tensor(new, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return new


class Job:
    def __init__(self, case: Case, side: int) -> None:
        torch.manual_seed(2 * case.seed + side)
        self.models = {name: net(kind) for name, kind in case.kinds.items()}
        average = copy.deepcopy(next(iter(self.models.values())))
        models = {name: wrapped(model, case.wraps[side]) for name, model in self.models.items()}
        wrapped(average, "fsdp" if case.sharded[side] else "none")
        self.names = {p: f"{name}.{k}" for name, m in self.models.items() for k, p in m.named_parameters()}
        trained = [parameter for parameter in self.names if parameter.requires_grad]
        small, large = [p for p in trained if p.ndim < 2], [p for p in trained if p.ndim > 1]
        parts = {"": trained}
        if case.split and small:
            parts = {"small": small, "large": large}
        self.optimizers = {name: self.optimizer(case, part) for name, part in parts.items()}
        kind = OneCycleLR if case.seed % 2 else CosineAnnealingLR
        settings: Any = {"max_lr": 0.05, "total_steps": 30} if case.seed % 2 else {"T_max": 9}
        self.schedulers = {name: kind(item, **settings) for name, item in self.optimizers.items()}
        self.rank = dist.get_rank()
        self.state = TrainState(
            model=models.get("", models),
            optimizer=self.optimizers.get("", self.optimizers),
            scheduler=self.schedulers.get("", self.schedulers),
            extra={
                "ema": average,
                "kept": Kept(torch.rand(2, 3)),
                "note": {"a": [1, (2.5, None)], "b": torch.rand(2).bfloat16()},
                "own": PerRank(torch.full((2,), 10.0 * side + self.rank)),
            },
        )

    def optimizer(self, case: Case, parameters: list[torch.Tensor]) -> Any:
        groups: list[Any] = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2]}]
        made = OPTIMIZERS[case.optimizer]([group for group in groups if group["params"]])
        return MasterWeightOptimizer(made) if any(p.dtype is torch.bfloat16 for p in parameters) else made

    def train(self, number: int) -> None:
        """Make a step whose gradients and buffers depend only on the names and the number of the step."""
        owned = [p for optimizer in self.optimizers.values() for g in optimizer.param_groups for p in g["params"]]
        for parameter in owned:
            if not self.names[parameter].endswith("unused"):
                parameter.grad = drawn_like(parameter, self.names[parameter], number)
        for name, model in self.models.items():
            for path, buffer in model.named_buffers():
                buffer.copy_(drawn_like(buffer, name, path, number) if buffer.is_floating_point() else buffer + number)
            for module in (module for module in model.modules() if isinstance(module, Net)):
                module.counts = [*module.counts, number]
        for step in (*self.optimizers.values(), *self.schedulers.values()):
            step.step()

    def values(self) -> dict[str, Any]:
        found = {f"model {n}.{k}": whole(v) for n, m in self.models.items() for k, v in m.state_dict().items()}
        for name, optimizer in self.optimizers.items():
            for parameter, state in optimizer.state.items():
                found |= {f"optimizer {self.names[parameter]} {k}": whole(v) for k, v in state.items()}
            for number, group in enumerate(optimizer.param_groups):
                found |= {f"optimizer {name} {number} {k}": v for k, v in group.items() if k != "params"}
        found |= {f"scheduler {name}": repr(item.state_dict()) for name, item in self.schedulers.items()}
        extra = self.state.extra
        found |= {f"ema {name}": whole(value) for name, value in extra["ema"].state_dict().items()}
        found |= {"kept": whole(extra["kept"].value), "note": (extra["note"]["a"], whole(extra["note"]["b"]))}
        return found

    def own(self) -> dict[str, Any]:
        """Return what each rank has for itself."""
        return {"own": whole(self.state.extra["own"].value), "rng": whole(torch.get_rng_state())}


def save(case: Case, root: str) -> tuple[Any, ...]:
    job = Job(case, 0)
    torch.manual_seed(case.seed + job.rank)
    policy = RetentionPolicy(max_num=1)
    with CheckpointManager(root, state_dict_type=case.type, retention=policy) as manager:
        write = manager.save_async if case.in_background else manager.save
        for number in range(case.steps[0]):
            job.train(number)
            write(STEP - case.steps[0] + 1 + number, job.state)
        job.train(STEP)
        saved = job.values(), job.own()
        write(STEP, job.state, overwrite=True)
        job.train(STEP + 1)
    return *saved, job.values()


def resume(case: Case, root: str) -> tuple[Any, ...]:
    job = Job(case, 1)
    torch.manual_seed(case.seed + 100 + job.rank)
    for number in range(case.steps[1]):
        job.train(number + 50)
    before = job.values(), job.own()
    with CheckpointManager(root) as manager:
        report = manager.load(job.state, **OPTIONS[case.option], per_rank_on_resize="keep")
        assert report is not None and report.step == job.state.step == STEP
        if report.deferred is not None:
            report.deferred.apply()
    after = job.values(), job.own()
    job.train(STEP + 1)
    return *before, *after, job.values()


def offline(case: Case, root: Path) -> Path:
    """Run the offline commands, and return the root of a run that the second job can load."""
    alike = case.ranks[0] == case.ranks[1] and case.sharded[0] == case.sharded[1]
    commands, is_local = list(case.offline), case.type == "local"
    for command in case.offline:
        is_local = command == "local" or (is_local and command == "copy")
    if is_local and not (alike and set(commands) <= {"copy"}):
        commands.append("sharded")
    for number, command in enumerate(commands):
        source, root = root / f"step_{STEP:08d}", root.parent / str(number)
        if command == "copy":
            copy_checkpoint(str(source), str(root / source.name))
        else:
            reshard(str(source), str(root / source.name), world_size=1 + case.seed % 2, type=command)
        assert verify(str(root / source.name)).ok
    return root


def unchanged(option: str, name: str) -> bool:
    """Return whether a load with these options leaves a value as it is."""
    part, _, path = name.partition(" ")
    if part == "model":
        return option == "no model" or option == ("exclude" if "up" in path else "include")
    return part == "optimizer" and option == "no optimizer"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(80))
def test_another_job_continues_with_the_values_of_the_saved_one(ranks, tmp_path, seed):
    case = drawn(seed)
    saved = ranks.run(save, case.ranks[0], case, str(tmp_path / "run"))
    root = offline(case, tmp_path / "run")
    resumed = ranks.run(resume, case.ranks[1], case, str(root))
    values, _, following = saved[0]
    for rank, (before, own_before, after, own_after, then) in enumerate(resumed):
        names = [
            name for name in values.keys() | before.keys() if case.option != "no optimizer" or "master" not in name
        ]
        expected = {name: (before if unchanged(case.option, name) else values).get(name, "none") for name in names}
        assert different({name: after.get(name, "none") for name in names}, expected) == []
        if case.ranks[0] == case.ranks[1]:
            assert own_after == saved[rank][1]
            if case.sharded[0] == case.sharded[1] and case.option in ("all", "atomic", "deferred", "broadcast"):
                assert different(then, following) == []
        elif case.ranks[0] > 1:
            assert own_after["own"] == own_before["own"]
