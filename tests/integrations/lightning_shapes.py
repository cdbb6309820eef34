"""Meshes, wrapping and storage under a real Trainer, for `test_lightning_shapes`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from ckptkit import open_checkpoint
from ckptkit.formats.own.record import read_record
from ckptkit.integrations.lightning import FSDP2Strategy, ManagedCheckpoint, fsdp2_strategy_parallelize
from ckptkit.storage import open_store
from tests.integrations.lightning_job import (
    Lit,
    Net,
    Probe,
    equal,
    fit,
    loader,
    raised,
    run_parts,
    snapshot,
    trainer_of,
)


def save_at(folder: Path, step: int = 2) -> ManagedCheckpoint:
    return ManagedCheckpoint(dirpath=folder, every_n_train_steps=step, save_top_k=-1, filename="{step}")


def resumes(work: Path, name: str, made: Any, **options: Any) -> tuple[bool, Any]:
    """Return whether 4 uninterrupted steps equal 2 + 2, and the module of the latter."""
    straight = snapshot(*fit(work, made(), save_at(work / name), steps=4, **options))
    module, trainer = fit(work, made(), steps=4, path=str(work / name / "step=2.ckpt"), **options)
    return equal(straight, snapshot(module, trainer)), trainer


# --- on four ranks


def tensor_parallel(work: Path, facts: dict[str, Any]) -> None:
    def made() -> FSDP2Strategy:
        return FSDP2Strategy(2, 2, custom_tp_plan={"blocks.0.0": ColwiseParallel(), "blocks.1.0": RowwiseParallel()})

    group = {"seed": dist.get_rank() // 2}  # one seed per tensor-parallel group, for equal dropout
    facts["tp_equal"], trainer = resumes(work, "tp", made, **group)
    mesh = trainer.strategy.device_mesh
    facts["tp_mesh"] = list(mesh.mesh.shape), list(mesh.mesh_dim_names)
    module = trainer.lightning_module
    placed = {n: str(p.placements) for n, p in module.named_parameters() if "blocks.1.0" in n}
    facts["tp_placed"] = placed
    trainer.save_checkpoint(work / "tp.ckpt")
    torch.save(snapshot(module, trainer), work / f"tp{dist.get_rank()}.pt")
    facts["tp_sampler"] = trainer.strategy.distributed_sampler_kwargs["num_replicas"]
    facts["tp_without_plan"] = raised(lambda: fit(work, FSDP2Strategy(2, 2), steps=1))
    facts["tp_plan_refused"] = raised(lambda: fit(work, FSDP2Strategy(2, 2, use_hf_tp_plan=False), steps=1))


def mesh_of_three(work: Path, facts: dict[str, Any]) -> None:
    """setup_environment creates (data_parallel, context_parallel, tensor_parallel), the last innermost."""
    plan = {"blocks.0.0": ColwiseParallel(), "blocks.1.0": RowwiseParallel()}
    strategy = FSDP2Strategy(1, 2, 2, custom_tp_plan=plan)
    _, trainer = fit(work, strategy, steps=1, seed=dist.get_rank() // 2)
    mesh = strategy.device_mesh
    facts["mesh"] = list(mesh.mesh.shape), mesh["tensor_parallel"].mesh.tolist(), list(mesh.mesh_dim_names)
    facts["mesh_steps"] = trainer.global_step


def hybrid(work: Path, facts: dict[str, Any]) -> None:
    facts["hsdp_equal"], trainer = resumes(
        work, "hsdp", lambda: FSDP2Strategy(device_mesh=(2, 2), sharding_strategy="HYBRID_SHARD")
    )
    parameter = next(p for p in trainer.lightning_module.parameters())
    facts["hsdp_placed"] = str(parameter.placements)
    trainer.save_checkpoint(work / "hsdp.ckpt")
    saved = read_record(open_store(str(work / "hsdp.ckpt"))).files
    facts["hsdp_bytes"] = [r.nbytes for path, r in sorted(saved.items()) if path.endswith(".distcp")]


# --- on two ranks


def arguments(work: Path, facts: dict[str, Any]) -> None:
    """Arguments that scripts pass to the strategy and the Trainer, and return values of the strategy."""
    calls: list[list[str]] = []

    def own(model: Any, device_mesh: Any, mp_policy: Any = None) -> None:
        calls.append([type(model).__name__, *device_mesh.mesh_dim_names])
        fsdp2_strategy_parallelize(model, device_mesh=device_mesh, mp_policy=mp_policy)

    class Sampler:
        def transform_dataloader(self, dataloader: Any) -> Any:
            calls.append([type(dataloader).__name__])
            return dataloader

    class Clipped(Lit):
        norms: ClassVar[list[float]] = []

        def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
            super().configure_gradient_clipping(*args, **options)
            self.norms.append(float(sum(p.grad.full_tensor().norm() ** 2 for p in self.parameters()) ** 0.5))

    module, trainer = fit(
        work,
        FSDP2Strategy(parallelize_fn=own, data_sampler=Sampler()),
        steps=2,
        module=Clipped(),
        gradient_clip_val=1e-3,
    )
    facts["own_calls"] = calls
    blocks = list(module.model.blocks)
    facts["last_block"] = [b._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info is None for b in blocks]
    facts["clipped"] = module.norms
    strategy = trainer.strategy
    facts["optimizer_keys"] = sorted(strategy.optimizer_state(trainer.optimizers[0])["state"])
    facts["reduced"] = float(strategy.reduce(torch.tensor(float(dist.get_rank()))))
    facts["broadcast"] = strategy.broadcast("from 0" if dist.get_rank() == 0 else None)
    facts["options_of_a_save"] = raised(lambda: trainer.save_checkpoint(work / "o.ckpt", storage_options={"a": 1}))
    straight = snapshot(*fit(work, FSDP2Strategy(), steps=2))
    for name in ("SHARD_GRAD_OP", "no_shard"):
        other = snapshot(*fit(work, FSDP2Strategy(sharding_strategy=name), steps=2))
        facts[name] = all(torch.allclose(other["weights"][k], v, atol=1e-6) for k, v in straight["weights"].items())


def refusals(work: Path, facts: dict[str, Any]) -> None:
    class Early(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.made = torch.optim.AdamW(self.model.parameters())

        def configure_optimizers(self) -> Any:
            return self.made

    class Fsdp1(Lit):
        def configure_model(self) -> None:
            if not isinstance(self.model, FullyShardedDataParallel):
                self.model = FullyShardedDataParallel(self.model, device_id=torch.device("cpu"))

    class Two(Lit):
        automatic_optimization = False

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            loss = super().training_step(batch, index)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.model.blocks, self.model.head)]

    facts["early_optimizer"] = raised(lambda: fit(work, FSDP2Strategy(), steps=1, module=Early()))
    facts["fsdp1_model"] = raised(lambda: fit(work, FSDP2Strategy(), steps=1, module=Fsdp1()))
    _, trainer = fit(work, FSDP2Strategy(), steps=1, module=Two())
    trainer.save_checkpoint(work / "two-optimizers.ckpt")
    path = str(work / "two-optimizers.ckpt")
    facts["two_into_one"] = raised(lambda: fit(work, FSDP2Strategy(), steps=2, path=path))


def offload(work: Path, facts: dict[str, Any]) -> None:
    facts["offload_equal"], trainer = resumes(work, "offload", lambda: "fsdp2_cpu_offload")
    facts["offload_on"] = {p.device.type for p in trainer.lightning_module.parameters()}
    strategy = FSDP2Strategy(cpu_offload=True, state_dict_type="full")
    _, trainer = fit(work, strategy, steps=1)
    trainer.save_checkpoint(work / "offload-full.ckpt")
    saved = open_checkpoint(str(work / "offload-full.ckpt"))
    facts["offload_saved"] = list(saved["model.model.head.weight"].shape)


def recompute(work: Path, facts: dict[str, Any]) -> None:
    calls: list[int] = []

    def made(policy: Any = frozenset({nn.Sequential})) -> FSDP2Strategy:
        return FSDP2Strategy(activation_checkpointing_policy=policy, auto_wrap_policy={nn.Sequential})

    for name, policy in (("with", {nn.Sequential}), ("without", None)):
        module = Lit()
        module.model.blocks[0][1].register_forward_pre_hook(lambda *_: calls.append(1))
        module, trainer = fit(work, made(policy), steps=2, module=module)
        trainer.save_checkpoint(work / f"{name}.ckpt")
        facts[f"calls_{name}"] = len(calls)
        calls.clear()
    before, first = snapshot(module, trainer), Probe()
    fit(work, made(None), first, steps=3, path=str(work / "with.ckpt"))
    facts["recompute_off"] = equal(before, first.first)
    facts["recompute_keys"] = sorted(open_checkpoint(str(work / "with.ckpt"))) == sorted(
        open_checkpoint(str(work / "without.ckpt"))
    )
    torch.save(before, work / "two.pt")


def compiled(work: Path, facts: dict[str, Any]) -> None:
    class Compiled(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.compile(self.model, backend="eager")

    module, trainer = fit(work, FSDP2Strategy(), steps=2, module=Compiled())
    trainer.save_checkpoint(work / "compiled.ckpt")
    before, first = snapshot(module, trainer), Probe()
    fit(work, FSDP2Strategy(), first, steps=3, path=str(work / "compiled.ckpt"))
    clean = {part: {k.replace("_orig_mod.", ""): v for k, v in before[part].items()} for part in ("weights", "moments")}
    facts["compiled_off"] = equal({**before, **clean}, first.first)


class Meta(Lit):
    """Creates its network in configure_model, as Lightning recommends, on the meta device."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.model = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = Net()


def meta(work: Path, facts: dict[str, Any]) -> None:
    straight = snapshot(*fit(work, FSDP2Strategy(), save_at(work / "meta"), steps=4))
    module, trainer = fit(work, FSDP2Strategy(), steps=4, module=Meta(), path=str(work / "meta" / "step=2.ckpt"))
    facts["meta_equal"] = equal(straight, snapshot(module, trainer))
    trainer = trainer_of(work, FSDP2Strategy(), steps=1)
    with trainer.init_module(empty_init=True):
        module = Lit()
    facts["init_module_on"] = next(module.parameters()).device.type
    trainer.fit(module, loader())
    facts["init_module_finite"] = all(bool(p.full_tensor().isfinite().all()) for p in module.parameters())

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    class WithOdd(Meta):
        def configure_model(self) -> None:
            if self.model is None:
                super().configure_model()
                with torch.device("meta"):
                    self.model = nn.Sequential(Odd(), self.model)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trainer_of(work, FSDP2Strategy(), steps=1)
        trainer.fit(WithOdd(), loader())
    facts["odd_warned"] = [str(w.message) for w in caught if "reset_parameters" in str(w.message)]


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def remote(work: Path, facts: dict[str, Any], url: str, env: dict[str, str]) -> None:
    """The strategy and the callback on an object store."""

    def callback() -> ManagedCheckpoint:
        return ManagedCheckpoint(
            dirpath=url, monitor="loss_of_step", every_n_train_steps=1, save_top_k=1, filename="{step}", save_last=True
        )

    with environment(env):
        straight = snapshot(*fit(work, FSDP2Strategy(), steps=4))
        fit(work, FSDP2Strategy(), callback(), steps=3)
        save, first = callback(), Probe()
        module, trainer = fit(work, FSDP2Strategy(), save, first, steps=4, path="last")
        facts["remote_resumed_at"] = first.first["step"]
        facts["remote_equal"] = equal(straight, snapshot(module, trainer))
        facts["remote_best"] = (
            save.best_model_path,
            trainer.test(module, loader(), ckpt_path="best", verbose=False)[0]["test_loss"] > 0,
        )
        facts["remote_missing"] = raised(lambda: fit(work, FSDP2Strategy(), steps=1, path=f"{url}/nothing.ckpt"))
        store = open_store(url)
        facts["remote_dir"] = sorted({item.path for item in store.list() if item.path.endswith(".ckpt")})
        trainer.strategy.remove_checkpoint(f"{url}/last.ckpt")
        facts["remote_removed"] = not any(item.path.startswith("last.ckpt") for item in store.list())
        facts["remote_local_folder"] = [p.name for p in Path.cwd().iterdir() if p.name.startswith("s3:")]


# --- other numbers of ranks


def fewer(work: Path, facts: dict[str, Any]) -> None:
    """Resume a 2-D and a replicated checkpoint of four ranks."""
    saved = torch.load(work / "tp0.pt", weights_only=False)
    for name in ("tp", "hsdp"):
        first = Probe()
        _, trainer = fit(work, FSDP2Strategy(), first, steps=6, path=str(work / f"{name}.ckpt"))
        facts[f"{name}_step"] = first.first["step"], trainer.global_step, len(first.first["moments"])
        if name == "tp":
            facts["tp_into_two"] = equal(saved, first.first)


def more(work: Path, facts: dict[str, Any]) -> None:
    """Resume the checkpoint of two ranks on four."""
    saved, first = torch.load(work / "two.pt", weights_only=False), Probe()
    _, trainer = fit(work, FSDP2Strategy(), first, steps=3, path=str(work / "with.ckpt"))
    facts["more_equal"] = equal(saved, first.first)
    facts["more_step"] = trainer.global_step


def run(work: str, *parts: Any) -> dict[str, Any]:
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return run_parts(globals(), work, parts)
