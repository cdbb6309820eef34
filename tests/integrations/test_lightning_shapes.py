"""Meshes, wrapping and storage under a real Lightning Trainer."""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

pytest.importorskip("lightning")
pytest.importorskip("torchdata")
import lightning.pytorch as pl

from ckptkit import open_checkpoint
from ckptkit.formats.own.record import read_record
from ckptkit.integrations.lightning import FSDP2Strategy, ManagedCheckpoint, fsdp2_strategy_parallelize
from ckptkit.storage import open_store
from tests.integrations.lightning_runs import (
    First,
    Lit,
    Net,
    Two,
    equal,
    evaluated,
    fit,
    loader,
    model_keys,
    raised,
    resumes,
    saving,
    snapshot,
    trainer_of,
)
from tests.ranks import on_ranks
from tests.storage import servers

pytestmark = pytest.mark.timeout(600)
DIMENSIONS = ["data_parallel", "context_parallel", "tensor_parallel"]


def planned(*sizes: int) -> FSDP2Strategy:
    plan = {"blocks.0.0": ColwiseParallel(), "blocks.1.0": RowwiseParallel()}
    return FSDP2Strategy(*sizes, custom_tp_plan=plan)


def group_seed() -> int:
    return dist.get_rank() // 2  # one for each tensor-parallel group of two, for equal dropout


@on_ranks(4, 2)
def test_a_run_with_tensor_parallel_ranks_is_resumed_bit_equal_also_on_two_ranks(tmp_path):
    if dist.get_world_size() == 2:
        saved, first = torch.load(tmp_path / "rank-0.pt", weights_only=False), First()
        _, trainer = fit(tmp_path, FSDP2Strategy(), first, steps=6, path=tmp_path / "tp.ckpt")
        assert equal(saved, first.state)
        assert (trainer.global_step, len(first.state["moments"])) == (6, 18)
        return
    module, trainer = resumes(tmp_path, lambda: planned(2, 2), fresh=lambda: {"seed": group_seed()})
    placed = {name: str(parameter.placements) for name, parameter in module.named_parameters()}
    assert placed["model.blocks.1.0.weight"] == "(Shard(dim=0), Shard(dim=1))"
    assert placed["model.blocks.1.0.bias"] == "(Shard(dim=0), Replicate())"
    mesh = trainer.strategy.device_mesh
    assert (list(mesh.mesh.shape), list(mesh.mesh_dim_names)) == ([2, 1, 2], DIMENSIONS)
    # Ranks of one tensor-parallel group draw the same part of a dataset.
    assert trainer.strategy.distributed_sampler_kwargs["num_replicas"] == 2
    trainer.save_checkpoint(tmp_path / "tp.ckpt")
    torch.save(snapshot(module, trainer), tmp_path / f"rank-{dist.get_rank()}.pt")


@on_ranks(4)
def test_tensor_parallel_ranks_without_a_plan_are_refused(tmp_path):
    assert raised(lambda: fit(tmp_path, FSDP2Strategy(2, 2), steps=1)).startswith("UsageError")
    error = raised(lambda: fit(tmp_path, FSDP2Strategy(2, 2, use_hf_tp_plan=False), steps=1))
    assert "custom_tp_plan" in error


@on_ranks(4)
def test_the_mesh_has_three_dimensions_with_tensor_parallel_innermost(tmp_path):
    strategy = planned(1, 2, 2)
    assert fit(tmp_path, strategy, steps=1, seed=group_seed())[1].global_step == 1
    mesh = strategy.device_mesh
    assert (list(mesh.mesh.shape), list(mesh.mesh_dim_names)) == ([1, 2, 2], DIMENSIONS)
    first = 2 * (dist.get_rank() // 2)
    assert mesh["tensor_parallel"].mesh.tolist() == [first, first + 1]


@on_ranks(4, 2)
def test_a_run_with_replicas_is_resumed_bit_equal_and_each_shard_is_written_once(tmp_path):
    if dist.get_world_size() == 2:
        first = First()
        _, trainer = fit(tmp_path, FSDP2Strategy(), first, steps=6, path=tmp_path / "hsdp.ckpt")
        assert (first.state["step"], trainer.global_step, len(first.state["moments"])) == (4, 6, 18)
        return
    made = {"device_mesh": (2, 2), "sharding_strategy": "HYBRID_SHARD"}
    module, trainer = resumes(tmp_path, lambda: FSDP2Strategy(**made))
    assert str(next(module.parameters()).placements) == "(Replicate(), Shard(dim=0))"
    trainer.save_checkpoint(tmp_path / "hsdp.ckpt")
    files = read_record(open_store(str(tmp_path / "hsdp.ckpt"))).files
    sizes = [file.nbytes for path, file in files.items() if path.endswith(".distcp")]
    assert len(sizes) == 4 and max(sizes) < 0.4 * sum(sizes)  # divided among the replicas


class Clipped(Lit):
    norms: ClassVar[list[float]] = []

    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
        super().configure_gradient_clipping(*args, **options)
        self.norms.append(float(sum(p.grad.full_tensor().norm() ** 2 for p in self.parameters()) ** 0.5))


@on_ranks(2)
def test_arguments_of_nemo_are_accepted_and_its_function_keeps_the_last_block_gathered(tmp_path):
    calls: list[list[str]] = []

    def own(model: Any, device_mesh: Any, mp_policy: Any = None) -> None:
        calls.append([type(model).__name__, *device_mesh.mesh_dim_names])
        fsdp2_strategy_parallelize(model, device_mesh=device_mesh, mp_policy=mp_policy)

    class Sampler:
        def transform_dataloader(self, dataloader: Any) -> Any:
            calls.append([type(dataloader).__name__])
            return dataloader

    module, _ = fit(tmp_path, FSDP2Strategy(parallelize_fn=own, data_sampler=Sampler()), steps=2)
    assert calls.count(["Net", *DIMENSIONS]) == 1
    assert ["StatefulDataLoader"] in calls
    groups = [block._get_fsdp_state()._fsdp_param_group for block in module.model.blocks]
    assert [group.post_forward_mesh_info is None for group in groups] == [False, True]


@on_ranks(2)
def test_the_trainer_clips_by_the_norm_over_all_ranks(tmp_path):
    module, _ = fit(tmp_path, FSDP2Strategy(), steps=2, module=Clipped(), gradient_clip_val=1e-3)
    assert module.norms == pytest.approx([1e-3, 1e-3], rel=1e-3)


@on_ranks(2)
def test_the_strategy_matches_optimizer_state_by_name_reduces_and_broadcasts_values(tmp_path):
    _, trainer = fit(tmp_path, FSDP2Strategy(), steps=2)
    strategy, rank = trainer.strategy, dist.get_rank()
    keys = strategy.optimizer_state(trainer.optimizers[0])["state"]
    assert len(keys) == 6 and "model.blocks.0.0.weight" in keys
    assert strategy.reduce(torch.tensor(float(rank))) == 0.5
    assert strategy.broadcast("from 0" if rank == 0 else None) == "from 0"
    error = raised(lambda: trainer.save_checkpoint(tmp_path / "o.ckpt", storage_options={"a": 1}))
    assert error.startswith("UsageError: A save takes no storage_options")


class Early(Lit):
    """Makes its optimizer before its model is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.AdamW(self.model.parameters())

    def configure_optimizers(self) -> Any:
        return self.made


@on_ranks(2)
def test_impossible_settings_are_refused_with_a_hint(tmp_path):
    assert "sharded" in raised(lambda: fit(tmp_path, FSDP2Strategy(), steps=1, module=Early()))
    fit(tmp_path, FSDP2Strategy(), steps=1, module=Two())[1].save_checkpoint(tmp_path / "two.ckpt")
    assert "optimizer" in raised(lambda: fit(tmp_path, FSDP2Strategy(), steps=2, path=tmp_path / "two.ckpt"))


@on_ranks(2)
def test_offloaded_weights_are_resumed_bit_equal_and_saved_whole(tmp_path):  # NB3
    module, _ = resumes(tmp_path, lambda: "fsdp2_cpu_offload")
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    _, trainer = fit(tmp_path, FSDP2Strategy(cpu_offload=True, state_dict_type="full"), steps=1)
    trainer.save_checkpoint(tmp_path / "full.ckpt")
    assert list(open_checkpoint(str(tmp_path / "full.ckpt"))["model.model.head.weight"].shape) == [3, 8]


@on_ranks(2)
def test_checkpointed_activations_are_computed_again_and_do_not_change_names(tmp_path):
    module, calls = Lit(), []
    module.model.blocks[0][1].register_forward_pre_hook(lambda *_: calls.append(1))
    strategy = FSDP2Strategy(activation_checkpointing_policy={nn.Sequential}, auto_wrap_policy={nn.Sequential})
    fit(tmp_path, strategy, steps=2, module=module)[1].save_checkpoint(tmp_path / "saved.ckpt")
    assert len(calls) == 2 * 2
    assert model_keys(tmp_path / "saved.ckpt") == sorted(f"model.{name}" for name in Lit().state_dict())


class Meta(Lit):
    """Creates its network in configure_model, as Lightning recommends, on the meta device."""

    def __init__(self, make: Callable[[], nn.Module] = Net) -> None:
        pl.LightningModule.__init__(self)
        self.make, self.model = make, None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = self.make()


class Scale(nn.Module):
    """Has no reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@on_ranks(2)
def test_a_model_made_on_the_meta_device_is_resumed_bit_equal(tmp_path):
    straight = snapshot(*fit(tmp_path, FSDP2Strategy(), saving(tmp_path, every=2, keep=-1), steps=4))
    resumed = fit(tmp_path, FSDP2Strategy(), steps=4, module=Meta(), path=tmp_path / "step=2.ckpt")
    assert equal(straight, snapshot(*resumed))


@on_ranks(2)
def test_a_model_created_under_init_module_gets_its_values(tmp_path):
    trainer = trainer_of(tmp_path, FSDP2Strategy())
    with trainer.init_module(empty_init=True):
        module = Lit()
    assert next(module.parameters()).device.type == "meta"
    trainer.fit(module, loader())
    assert all(bool(parameter.full_tensor().isfinite().all()) for parameter in module.parameters())


@on_ranks(2)
def test_modules_without_reset_parameters_are_listed_in_a_warning(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = Meta(lambda: nn.Sequential(Scale(), Net()))
        trainer_of(tmp_path, FSDP2Strategy()).fit(module, loader())
    warned = [str(item.message) for item in caught if "reset_parameters" in str(item.message)]
    if dist.get_rank() == 0:
        assert len(warned) == 1 and "Scale (0.scale)" in warned[0]


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    """The environment for an S3 server, which has the bucket `lightning`."""
    with servers.moto(bucket="lightning") as options:
        yield {**servers.CREDENTIALS, "AWS_ENDPOINT_URL": options["endpoint_url"]}


@on_ranks(2)
def test_a_run_on_s3_is_saved_rotated_resumed_tested_and_removed(tmp_path, s3):
    def callback() -> ManagedCheckpoint:
        return saving(url, monitor="loss_of_step", save_last=True)

    url = "s3://lightning/run"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.items():
            patch.setenv(name, value)
        straight = snapshot(*fit(tmp_path, FSDP2Strategy(), steps=4))
        fit(tmp_path, FSDP2Strategy(), callback(), steps=3)
        save, first = callback(), First()
        module, trainer = fit(tmp_path, FSDP2Strategy(), save, first, steps=4, path="last")
        assert first.state["step"] == 3
        assert equal(straight, snapshot(module, trainer))
        assert save.best_model_path.startswith(f"{url}/") and evaluated(trainer, module, "best") > 0
        missing = raised(lambda: fit(tmp_path, FSDP2Strategy(), steps=1, path=f"{url}/nothing.ckpt"))
        assert missing.startswith("CheckpointNotFoundError") and f"{url}/nothing.ckpt" in missing
        store = open_store(url)
        kept = sorted({item.path for item in store.list() if item.path.endswith(".ckpt")})
        assert kept == ["last.ckpt", "step=4.ckpt"]
        dist.barrier()
        trainer.strategy.remove_checkpoint(f"{url}/last.ckpt")
        dist.barrier()
        assert not any(item.path.startswith("last.ckpt") for item in store.list())
        assert not [path for path in Path(os.getcwd()).iterdir() if path.name.startswith("s3:")]
