"""A real Lightning Trainer on CPU ranks with our strategy, callback and CheckpointIO, as user scripts run it."""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

pytest.importorskip("lightning")
pytest.importorskip("torchdata")
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from ckptkit import RetentionPolicy, TrainState, open_checkpoint
from ckptkit.formats.own.record import read_record
from ckptkit.integrations.lightning import (
    CkptkitCheckpointIO,
    FSDP2Strategy,
    ManagedCheckpoint,
    fsdp2_strategy_parallelize,
)
from ckptkit.storage import open_store
from tests import patches
from tests.checkpoint import states
from tests.integrations.lightning_runs import (
    First,
    Lit,
    Net,
    Sharded,
    Two,
    checkpoints,
    ddp,
    equal,
    evaluated,
    fit,
    loader,
    model_keys,
    pl,
    raised,
    restores,
    resumes,
    saving,
    snapshot,
    trainer_of,
)
from tests.ranks import on_ranks
from tests.storage import servers

pytestmark = pytest.mark.timeout(600)
STRATEGIES = {
    "fsdp2": (FSDP2Strategy, Lit),
    "mp_sharded": (lambda: ModelParallelStrategy(dist.get_world_size(), 1), Sharded),
    "mp_full": (lambda: ModelParallelStrategy(dist.get_world_size(), 1, save_distributed_checkpoint=False), Sharded),
    "ddp": (DDPStrategy, Lit),
}


class Watch(Callback):
    """Records when the optimizer state is restored: in the first training step, before its update."""

    seen: Any = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if self.seen is None:
            assert trainer.strategy._pending is not None and not trainer.optimizers[0].state

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if self.seen is None:
            assert trainer.strategy._pending is None
            self.seen = sum(len(values) for values in optimizer.state.values())


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
@on_ranks(2)
def test_a_resumed_run_is_bit_equal_and_its_optimizer_state_is_applied_at_the_first_step(tmp_path, kind):
    straight = snapshot(*fit(tmp_path, "fsdp2", steps=6))
    fit(tmp_path, FSDP2Strategy(state_dict_type=kind), saving(tmp_path, every=3, filename="{epoch}-{step}"), steps=3)
    watch = Watch()
    resumed = fit(tmp_path, FSDP2Strategy(), watch, steps=6, path=tmp_path / "epoch=0-step=3.ckpt")
    assert equal(straight, snapshot(*resumed))
    assert watch.seen == 18


@on_ranks(2)
def test_a_removed_checkpoint_is_deleted_and_links_are_not_followed(tmp_path):
    save = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=1, filename="{step}", save_last="link")
    _, trainer = fit(tmp_path, FSDP2Strategy(), save, steps=2)
    last, target = tmp_path / "last.ckpt", tmp_path / "step=2.ckpt"
    assert "step=1.ckpt" not in checkpoints(tmp_path)
    assert os.path.realpath(last) == str(target)
    dist.barrier()
    if dist.get_rank() == 0:
        trainer.strategy.remove_checkpoint(last)
    dist.barrier()
    assert target.is_dir() and not last.exists()


class Frozen(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.head.parameters(), lr=0.05)


@on_ranks(2)
def test_a_state_dict_filter_selects_what_is_saved(tmp_path):
    def strategy() -> FSDP2Strategy:
        return FSDP2Strategy(lightning_module_filter=lambda name: ".head." in name, optimizer_restore="immediate")

    class Restored(First):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            assert self.state is not None or trainer.optimizers[0].state
            super().on_train_batch_start(trainer, *args)

    _, trainer = restores(tmp_path, strategy, build=Frozen, first=Restored())
    assert model_keys(tmp_path / "saved.ckpt") == ["model.model.head.bias", "model.model.head.weight"]
    assert len(trainer.strategy.lightning_module_state_dict("full")) == (2 if dist.get_rank() == 0 else 0)


@on_ranks(2)
def test_a_second_parallelize_only_warns(tmp_path):
    _, trainer = fit(tmp_path, FSDP2Strategy(), steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.strategy.parallelize()
    assert dist.get_rank() or any("before" in str(item.message) for item in caught)


class Tied(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[1][0].weight = self.model.blocks[0][0].weight


@on_ranks(2)
def test_a_checkpoint_io_finds_every_name_of_a_tied_weight_in_a_sharded_checkpoint(tmp_path):
    module, trainer = fit(tmp_path, FSDP2Strategy(), steps=1, module=Tied())
    trainer.save_checkpoint(tmp_path / "tied.ckpt")
    found = CkptkitCheckpointIO().load_checkpoint(tmp_path / "tied.ckpt")["state_dict"]
    assert list(found) == list(module.state_dict())


@on_ranks(2)
def test_a_logger_that_fails_on_rank_0_fails_all_ranks(tmp_path):
    logger = DummyLogger()
    logger.after_save_checkpoint = patches.failing(ConnectionError("the tracking server is down"))
    trainer = trainer_of(tmp_path, FSDP2Strategy(), saving(tmp_path), steps=2, logger=logger)
    both = ["", ""]
    dist.all_gather_object(both, raised(lambda: trainer.fit(Lit(), loader())))
    assert both[0] == both[1]
    assert "telling the loggers" in both[0] and "the tracking server is down" in both[0]


@pytest.mark.parametrize("source", ["mp_sharded", "mp_full", "ddp"])
@on_ranks(2)
def test_checkpoints_written_by_lightning_are_resumed_from(tmp_path, source):
    strategy, build = STRATEGIES[source]
    restores(tmp_path, strategy, build=build, by=FSDP2Strategy, into=Lit)


@on_ranks(2)
def test_a_lightning_file_is_replaced_after_the_new_checkpoint_is_committed(tmp_path):
    fit(tmp_path, DDPStrategy(), steps=1)[1].save_checkpoint(tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").is_file()
    fit(tmp_path, FSDP2Strategy(), steps=2)[1].save_checkpoint(tmp_path / "last.ckpt")
    assert checkpoints(tmp_path) == ["last.ckpt"] and (tmp_path / "last.ckpt").is_dir()
    assert not [path for path in tmp_path.iterdir() if "replaced" in path.name]


@on_ranks(2)
def test_a_custom_checkpoint_io_receives_whole_tensors_and_resumes(tmp_path, monkeypatch):
    paths: list[Any] = []
    patches.before(
        monkeypatch, TorchCheckpointIO, "save_checkpoint", lambda io, checkpoint, path, *_, **__: paths.append(path)
    )
    weights = snapshot(*restores(tmp_path, lambda: FSDP2Strategy(checkpoint_io=TorchCheckpointIO())))["weights"]
    if dist.get_rank() == 0:
        assert [Path(path).name for path in paths] == ["saved.ckpt"]
        held = torch.load(tmp_path / "saved.ckpt", weights_only=False)["state_dict"]
        assert all(torch.equal(value, weights[name]) for name, value in held.items())


@on_ranks(2)
def test_ckptkit_checkpoint_io_rotates_and_resumes_under_ddp(tmp_path):
    save = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    restores(tmp_path, lambda: ddp(retention=RetentionPolicy(max_num=1)), save, steps=3, path="step=3.ckpt", by=ddp)
    kept = checkpoints(tmp_path)
    assert "step=3.ckpt" in kept and "step=2.ckpt" not in kept


@on_ranks(2)
def test_a_fitted_module_can_be_fitted_and_tested_again_and_its_trainer_fits_another_one(tmp_path):
    (module, _), second = fit(tmp_path, FSDP2Strategy(), steps=2), Lit()
    again = trainer_of(tmp_path, FSDP2Strategy(), steps=2)
    again.fit(module, loader())
    again.save_checkpoint(tmp_path / "again.ckpt")
    assert again.global_step == 2
    assert evaluated(again, module, tmp_path / "again.ckpt") > 0
    again.fit_loop.epoch_loop.max_steps = 4
    again.fit(second, loader())
    assert any(isinstance(module, FSDPModule) for module in second.modules())


@pytest.mark.parametrize("name", ["{step}", "{step}/x"])
@on_ranks(2)
def test_all_but_the_checkpoint_resumed_from_are_rotated_away(tmp_path, name):
    def kept() -> list[str]:
        dist.barrier()
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.ckpt"))

    first, last = (f"{name.format(step=f'step={step}')}.ckpt" for step in (3, 6))
    fit(tmp_path, FSDP2Strategy(), saving(tmp_path, filename=name), steps=3)
    assert kept() == [first]
    fit(tmp_path, FSDP2Strategy(), saving(tmp_path, filename=name), steps=6, path=tmp_path / first)
    assert kept() == [first, last]


@on_ranks(2)
def test_two_callbacks_keep_each_others_checkpoints(tmp_path):
    best = saving(tmp_path, monitor="loss_of_step", mode="max", filename="best-{step}")
    recent = saving(tmp_path, filename="recent-{step}", save_last=True)
    fit(tmp_path, FSDP2Strategy(), best, recent, steps=5)
    assert checkpoints(tmp_path) == ["best-step=1.ckpt", "last.ckpt", "recent-step=5.ckpt"]
    assert best.best_model_path == str(tmp_path / "best-step=1.ckpt")


class Partly(Lit):
    """Omits frozen weights from its state dict, as Lightning's documentation shows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.encoder.requires_grad_(False)
        self.strict_loading = False

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(self.encoder(batch), index)

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in super().state_dict().items() if "encoder" not in k}


@on_ranks(2)
def test_a_module_is_saved_and_restored_with_the_entries_of_its_own_state_dict(tmp_path):
    module, _ = restores(tmp_path, FSDP2Strategy, build=Partly)
    keys = model_keys(tmp_path / "saved.ckpt")
    assert keys == sorted(f"model.{name}" for name in module.state_dict()) and len(keys) == 6


@on_ranks(2)
def test_a_save_during_accumulation_does_not_change_training(tmp_path):
    class Mid(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if index == 2:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    options = {"steps": 4, "accumulate_grad_batches": 2}
    straight = snapshot(*fit(tmp_path, FSDP2Strategy(), **options))
    disturbed = fit(tmp_path, FSDP2Strategy(), Mid(), saving(tmp_path, every=2), **options)
    assert equal(straight, snapshot(*disturbed))
    assert fit(tmp_path, FSDP2Strategy(), path=tmp_path / "mid.ckpt", **options)[1].global_step == 4


PRECISIONS = {
    "bf16-mixed": (torch.float32, lambda: {"precision": "bf16-mixed"}),
    "bf16-true": (torch.bfloat16, lambda: {"precision": "bf16-true"}),
    "scaler": (torch.float32, lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", scaler())]}),
}


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


@pytest.mark.parametrize("precision", PRECISIONS)
@on_ranks(2)
def test_each_precision_is_resumed_bit_equal(tmp_path, precision):
    dtype, options = PRECISIONS[precision]
    module, trainer = resumes(tmp_path, steps=5, at=3, fresh=options)
    assert next(module.parameters()).dtype == dtype
    assert precision != "scaler" or trainer.precision_plugin.scaler.get_scale() == 4096.0


@on_ranks(2)
def test_callbacks_that_average_an_unsharded_copy_are_refused(tmp_path):
    error = raised(lambda: fit(tmp_path, FSDP2Strategy(), EMAWeightAveraging(decay=0.5), steps=2))
    assert error.startswith("UsageError: EMAWeightAveraging averages an unsharded copy")


@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_ckpt_path_accepts_last_and_best_and_the_run_under_any_strategy(tmp_path, name):
    def run(steps: int, *callbacks: Any) -> tuple[Any, Any]:
        save = saving(tmp_path, save_last=True)
        return fit(tmp_path, strategy(), save, *callbacks, steps=steps, path="last", module=build())

    (strategy, build), first = STRATEGIES[name], First()
    before = snapshot(*run(3))  # of a new run, because there is no checkpoint yet
    module, trainer = run(5, first)
    after = snapshot(module, trainer)["weights"]
    assert equal(before, first.state)
    assert {"last.ckpt", "step=5.ckpt"} <= set(checkpoints(tmp_path))
    assert evaluated(trainer, module, "best") > 0
    assert len(trainer.predict(module, loader(), ckpt_path="last")) == 4
    assert evaluated(trainer, module, tmp_path) == evaluated(trainer, module, tmp_path / "step=5.ckpt")
    assert states.bits(Lit.load_from_checkpoint(tmp_path).state_dict()) == states.bits(after)


@on_ranks(2)
def test_the_link_to_the_last_checkpoint_does_not_replace_the_one_resumed_from(tmp_path):
    for steps in (3, 5):
        save = saving(tmp_path, monitor="loss_of_step", save_last=True)
        fit(tmp_path, FSDP2Strategy(), save, steps=steps, path="last")
    assert checkpoints(tmp_path) == ["last-v1.ckpt", "last.ckpt", "step=4.ckpt"]


@on_ranks(2)
def test_type_full_gathers_nothing_before_the_save_and_gives_rank_0_whole_tensors_on_request(tmp_path):  # NB4
    class Looking(Lit):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.saw = {type(v).__name__ for v in checkpoint["state_dict"].values()}

    module, trainer = fit(tmp_path, FSDP2Strategy(state_dict_type="full"), steps=1, module=Looking())
    trainer.save_checkpoint(tmp_path / "streamed.ckpt")
    assert module.saw == {"DTensor"}
    given = len(trainer.strategy.lightning_module_state_dict())
    moments = len(trainer.strategy.optimizer_state(trainer.optimizers[0]).get("state", {}))
    assert (given, moments) == ((6, 6) if dist.get_rank() == 0 else (0, 0))


@on_ranks(2)
def test_a_checkpoint_not_written_by_lightning_is_resumed_from(tmp_path):
    module, trainer = fit(tmp_path, FSDP2Strategy(), steps=2)
    states.save(tmp_path / "run", TrainState(model=module, optimizer=trainer.optimizers[0], step=2), 2)
    before, first = snapshot(module, trainer), First()
    fit(tmp_path, FSDP2Strategy(), first, steps=2, path=tmp_path / "run" / "step_00000002")
    assert equal({**before, "step": 0}, {**first.state, "lrs": before["lrs"]})


class Hooked(Lit):
    """Has hooks, and hyperparameters that are not plain values."""

    def __init__(self, where: Path, dtype: torch.dtype, kind: type, size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"tokens": 17, "names": ("a", "b"), "table": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]
        self.had = sorted(checkpoint["state_dict"])


@on_ranks(2)
def test_module_hooks_get_their_saved_values_and_hyperparameters_are_saved_as_text(tmp_path):
    def module() -> Hooked:
        return Hooked(Path("/data"), torch.bfloat16, nn.GELU)

    path = tmp_path / "hooked.ckpt"
    fit(tmp_path, FSDP2Strategy(), steps=2, module=module())[1].save_checkpoint(path)
    saved = repr(open_checkpoint(str(path))["extra.lightning"]["hyper_parameters"])
    assert "'where': '/data'" in saved and "torch.bfloat16" in saved
    again, _ = fit(tmp_path, FSDP2Strategy(), steps=3, module=module(), path=path)
    assert states.bits(again.mine) == states.bits({"tokens": 17, "names": ("a", "b"), "table": torch.arange(3)})
    assert len(again.had) == 6


@on_ranks(2)
def test_two_callbacks_and_the_end_of_training_may_save_the_same_step(tmp_path):
    class AtEnd(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "step=4.ckpt")

    epoch = ManagedCheckpoint(dirpath=tmp_path, every_n_epochs=1, save_top_k=-1, filename="{step}")
    fit(tmp_path, FSDP2Strategy(), saving(tmp_path, every=2, keep=-1), epoch, AtEnd(), steps=4)
    assert checkpoints(tmp_path) == ["step=2.ckpt", "step=4-v1.ckpt", "step=4.ckpt"]
    assert fit(tmp_path, FSDP2Strategy(), steps=5, path=tmp_path / "step=4.ckpt")[1].global_step == 5


@on_ranks(2)
def test_save_weights_only_checkpoints_validate_and_do_not_resume(tmp_path):
    path = tmp_path / "step=2.ckpt"
    fit(tmp_path, FSDP2Strategy(), saving(tmp_path, every=2, save_weights_only=True), steps=2)
    assert not any(key.startswith("optimizer") for key in open_checkpoint(str(path)))
    validated = trainer_of(tmp_path, FSDP2Strategy()).validate(Lit(), loader(), ckpt_path=str(path), verbose=False)
    assert validated[0]["val_loss"] > 0
    assert "contains only the model" in raised(lambda: fit(tmp_path, FSDP2Strategy(), steps=3, path=path))


@on_ranks(2)
def test_paths_that_are_not_checkpoints_are_refused_by_name_and_not_overwritten(tmp_path):  # P6
    def error_of(name: str) -> str:
        return raised(lambda: fit(tmp_path, FSDP2Strategy(), steps=1, path=tmp_path / name))

    if dist.get_rank() == 0:
        (tmp_path / "folder.ckpt").mkdir()
        (tmp_path / "folder.ckpt" / "notes.txt").write_text("mine")
        (tmp_path / "junk.ckpt").write_bytes(b"junk" * 100)
    dist.barrier()
    assert error_of("nothing.ckpt").startswith("CheckpointNotFoundError")
    assert "notes.txt" in error_of("folder.ckpt")
    assert error_of("junk.ckpt").startswith("CorruptCheckpointError")
    _, trainer = fit(tmp_path, FSDP2Strategy(), steps=1)
    over = raised(lambda: trainer.save_checkpoint(tmp_path / "folder.ckpt"))
    assert over.startswith("CheckpointExistsError") and (tmp_path / "folder.ckpt" / "notes.txt").exists()


# --- meshes, wrapping and storage

DIMENSIONS = ["data_parallel", "context_parallel", "tensor_parallel"]


def planned(*sizes: int) -> FSDP2Strategy:
    plan = {"blocks.0.0": ColwiseParallel(), "blocks.1.0": RowwiseParallel()}
    return FSDP2Strategy(*sizes, custom_tp_plan=plan)


def group_seed() -> int:
    return dist.get_rank() // 2  # one for each tensor-parallel group of two, for equal dropout


@on_ranks(4, 2)
def test_a_run_with_tensor_parallel_ranks_is_resumed_bit_equal_even_on_two_ranks(tmp_path):
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
