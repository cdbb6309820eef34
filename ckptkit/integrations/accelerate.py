"""Replaces an Accelerator's `save_state` and `load_state` with a CheckpointManager."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ckptkit.integrations.extras import missing

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise missing("accelerate", "hf") from error

from ckptkit.arguments import wrong
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.report import LoadReport, SaveReport
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.checkpoint.state.train_state import PerRank, TrainState
from ckptkit.errors import UsageError

_log = logging.getLogger(__name__)


class AcceleratorCheckpoints:
    """Saves and loads everything that an Accelerator has prepared or registered.

    One committed checkpoint contains the models, optimizers, schedulers, stateful dataloaders, objects registered with
    `register_for_checkpointing`, and the random state of every rank. All ranks create this object and call its methods
    together. Hooks added with `register_save_state_pre_hook` and `register_load_state_pre_hook` run as in Accelerate,
    with the run's root as the directory. If a hook removes a model or its weights from the given list, ckptkit still
    saves and loads the model. Load hooks do not run in a new run.

    The epoch of each dataloader is saved and, with `use_seedable_sampler=True`, the sampler's seed. If a dataloader is
    not stateful, call `skip_first_batches` to skip the batches already seen, as in Accelerate. Without a seedable
    sampler, the shuffled order is lost, even with `use_stateful_dataloader`: if you resume inside an epoch, the data is
    shuffled again.

    Args:
        url: The root of the run's checkpoints.
        options: Passed to `CheckpointManager`: `retention`, `state_dict_type`, `storage_options`, ... Without
            `retention`, the `total_limit` of the Accelerator's `ProjectConfiguration` applies if
            `automatic_checkpoint_naming` is set, as in Accelerate.
    """

    def __init__(self, accelerator: Accelerator, url: str | Path, **options: Any) -> None:
        if not isinstance(accelerator, Accelerator):
            swapped = " Are accelerator and url swapped?" if isinstance(url, Accelerator) else ""
            raise UsageError(f"{wrong('accelerator', accelerator, 'an Accelerator')}{swapped}")
        if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise UsageError(
                f"AcceleratorCheckpoints cannot save a model that {accelerator.distributed_type.value} shards. Use "
                "Accelerator.save_state."
            )
        self.accelerator = accelerator
        project = accelerator.project_configuration
        if project.automatic_checkpoint_naming and project.total_limit:
            options = {"retention": RetentionPolicy(max_num=project.total_limit), **options}
        self.manager = CheckpointManager(url, **options)

    def save_state(self, step: int, **options: Any) -> SaveReport:
        """Save step `step`, and return once the checkpoint is durable. All ranks must call this.

        Args:
            options: Passed to `CheckpointManager.save`, such as `metrics` or `tag`.
        """
        mine = self.accelerator

        def collect() -> TrainState:
            models = list(mine._models)  # a hook may remove items from its lists
            weights = [model.state_dict() for model in models] if mine._save_model_state_pre_hook else []
            for hook in mine._save_model_state_pre_hook.values():
                hook(models, weights, self.manager.url)
            return self.state()

        if not mine.sync_gradients and mine.is_main_process:
            _log.warning(
                "step %d is saved between the batches of one optimizer step. The accumulated gradients are not saved, "
                "so a resumed run will not be equal to an uninterrupted one.", step,
            )  # fmt: skip

        return self.manager.save(step, self.manager.run_on_all(collect, "save_state"), **options)

    def load_state(self, which: str | int = "latest", **options: Any) -> LoadReport | None:
        """Restore the newest checkpoint, or the checkpoint `which`. Return None if the run has no checkpoint yet.

        Args:
            which: A step, a tag or a URL. The URL may also be that of a checkpoint saved with `Accelerator.save_state`.
            options: Passed to `CheckpointManager.load`.
        """
        is_new = which == "latest" and self.manager.run_on_all(self._is_new, "load_state")

        def collect() -> TrainState:
            models = list(self.accelerator._models)
            for hook in () if is_new else self.accelerator._load_model_state_pre_hook.values():
                hook(models, self.manager.url)
            return self.state()

        report = self.manager.load(self.manager.run_on_all(collect, "load_state"), which, **options)
        if report is not None:
            self.manager.run_on_all(lambda: self._restore_others(report), "load_state")
        return report

    def _is_new(self) -> bool:
        """Return whether the run has no checkpoint, and no files of another program."""
        inventory = list_checkpoints(self.manager._root)
        return not inventory.committed and not inventory.foreign

    def _restore_others(self, report: LoadReport) -> None:
        """Restore the objects and dataloaders that `Accelerator.save_state` saved. Warn about objects left out."""
        mine = self.accelerator
        files = {f"extra.object_{i}": (f"custom_checkpoint_{i}", item) for i, item in enumerate(mine._custom_objects)}
        stateful = (item for item in enumerate(mine._dataloaders) if _is_stateful(item[1]))
        for number, (i, item) in enumerate(stateful):
            files[f"dataloader_{number}"] = (f"dl_state_dict_{i}" if i else "dl_state_dict", item)
        for name, (file, item) in files.items():
            if name in report.skipped and file in report.extra:
                item.load_state_dict(report.extra.pop(file))
                del report.skipped[name]
                report.loaded.append(name)
        left = [name for name in report.extra if name.startswith(("object_", "custom_checkpoint_"))]
        lost = [name for name in report.skipped if name.startswith("extra.object_")]
        if (left or lost) and mine.is_main_process:
            _log.warning(
                "register_for_checkpointing: %d objects are registered, but the checkpoint has a different number. "
                "Not restored: %s.", len(mine._custom_objects), ", ".join([*left, *lost]),
            )  # fmt: skip

    def state(self) -> TrainState:
        """Return everything that a checkpoint contains, as a TrainState.

        Raises:
            UsageError: The Accelerator has not prepared a model yet.
        """
        mine = self.accelerator
        if not mine._models:
            raise UsageError("the Accelerator has prepared no model yet: call accelerator.prepare(model, ...) first.")
        optimizers = [getattr(item, "optimizer", item) for item in mine._optimizers]
        schedulers = list(mine._schedulers)
        # Accelerate adds `state_dict` and `load_state_dict` to all prepared loaders, but only torchdata's can use them.
        stateful = [item for item in mine._dataloaders if _is_stateful(item)]
        extra: dict[str, Any] = {f"object_{i}": item for i, item in enumerate(mine._custom_objects)}
        extra |= {f"loader_{i}": PerRank(_Epoch(item)) for i, item in enumerate(mine._dataloaders)}
        extra["accelerator"] = _Position(mine)
        return TrainState(
            model=_one_or_named([mine.unwrap_model(model) for model in mine._models]),
            optimizer=_one_or_named(optimizers),
            scheduler=_one_or_named(schedulers),
            grad_scaler=mine.scaler,
            dataloader={str(i): item for i, item in enumerate(stateful)} or None,
            extra=extra,
        )

    def close(self) -> None:
        """Wait for a running save, and release all resources. All ranks must call this."""
        self.manager.close()


def _one_or_named(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else {str(i): item for i, item in enumerate(items)} or None


def _is_stateful(loader: Any) -> bool:
    below = getattr(loader, "base_dataloader", loader)
    return callable(getattr(below, "state_dict", None)) and callable(getattr(below, "load_state_dict", None))


class _Epoch:
    """Saves and restores the epoch of a dataloader, and the seed of a `SeedableRandomSampler`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._sampler: Any = loader.get_sampler() if callable(getattr(loader, "get_sampler", None)) else None

    def state_dict(self) -> dict[str, int]:
        loader = self._loader
        state = {"iteration": int(getattr(loader, "iteration", 0))}
        if _is_stateful(loader) and loader.end_of_dataloader and loader in loader.gradient_state.dataloader_references:
            state["iteration"] += 1  # at an epoch's last batch: the loader continues with the next epoch
        if hasattr(self._sampler, "initial_seed"):
            state |= {"epoch": int(self._sampler.epoch), "initial_seed": int(self._sampler.initial_seed)}
        return state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._loader.iteration = state["iteration"]
        if self._sampler is not None and "initial_seed" in state and hasattr(self._sampler, "initial_seed"):
            self._sampler.epoch, self._sampler.initial_seed = state["epoch"], state["initial_seed"]


class _Position:
    """Saves and restores an Accelerator's position within gradient accumulation."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": int(self._accelerator.step)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]
