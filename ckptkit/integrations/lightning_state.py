"""Converts Lightning's checkpoint dictionary to a ckptkit checkpoint and back."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import nn

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.report import LoadReport
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.checkpoint.run.delete import delete_any
from ckptkit.checkpoint.run.inventory import list_checkpoints
from ckptkit.checkpoint.state.model_tensors import model_tensors, same_memory
from ckptkit.checkpoint.state.train_state import PerRank, StateDictType, TrainState
from ckptkit.checkpoint.state.values import encode
from ckptkit.errors import CheckpointExistsError, CkptkitError, SaveError
from ckptkit.formats.own.record import RECORD_NAME, CommitRecord
from ckptkit.formats.replaceable import foreign_paths
from ckptkit.integrations.lightning_full import sharded_optimizer
from ckptkit.integrations.lightning_position import FitPosition
from ckptkit.storage.local import LocalStore
from ckptkit.storage.open import open_store
from ckptkit.storage.store import split_url
from ckptkit.units import first_few

_log = logging.getLogger(__name__)
_KEY = "lightning"
_LOADERS = "lightning_loaders"
_OWNER = "lightning_callback"
_HPARAMS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_type")
_ALIEN = ("meta.pt", ".metadata")  # either of these files identifies a directory as a Lightning checkpoint


def live_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's live tensors and other state, by FQN."""
    tensors, extra = model_tensors(module)
    return {**tensors, **extra}


class StateView(nn.Module):
    """Takes a module's place when the module's state is saved or loaded. Its state dict has only the given tensors."""

    def __init__(self, tensors: Mapping[str, Any], like: nn.Module | None = None) -> None:
        super().__init__()
        self._tensors = dict(tensors)
        self._like = (like,)  # in a tuple, so that it does not become a submodule
        self._tied_weights_keys = getattr(like, "_tied_weights_keys", None)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # of no use here
        """Return the given tensors."""
        return dict(self._tensors)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters of the module, because an optimizer may contain parameters that are not saved."""
        (like,) = self._like
        yield from like.named_parameters(*args, **kwargs) if like is not None else ()

    @classmethod
    def of(cls, module: nn.Module, wanted: Mapping[str, Any]) -> StateView:
        """Return a StateView of `module` that has the tensors in `wanted`.

        A tensor in `wanted` that shares the memory of a live tensor of the module is replaced by the live tensor. All
        others are used as they are: a state dict hook has created them.
        """
        live = live_state(module)
        return cls({k: live[k] if k in live and same_memory(live[k], v) else v for k, v in wanted.items()}, module)


def state_of(model: Any, optimizers: Sequence[Any], *, rng: bool = True) -> TrainState:
    """Return a Trainer's model and optimizers as a TrainState. Several optimizers get the names "0", "1", ..."""
    named = {str(i): optimizer for i, optimizer in enumerate(optimizers)}
    return TrainState(model=model, optimizer=named["0"] if len(named) == 1 else named or None, rng=rng)


@contextlib.contextmanager
def collecting_live(strategy: Any, live: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Make Lightning collect references to live tensors within this context, instead of gathering or copying."""
    model = strategy.lightning_module

    def tensors() -> dict[str, Any]:
        return {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in live().items()}

    def optimizer_state(optimizer: Any) -> dict[str, Any]:
        return sharded_optimizer(getattr(optimizer, "_optimizer", optimizer), TrainState(model=model, rng=False))

    vars(strategy).update(lightning_module_state_dict=tensors, optimizer_state=optimizer_state)
    try:
        yield
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state


class LightningCheckpoints:
    """Saves and loads at Lightning's paths: the parent directory is the root of a run, and the last component a tag.

    All ranks must create this object and call its methods together. A single rank can use the object alone if `group`
    contains only this rank.

    Args:
        retention: The policy by which the checkpoints in a directory are rotated. Lightning also removes checkpoints
            itself.
        group: The ranks that take part; None means all.
    """

    def __init__(
        self,
        state_dict_type: StateDictType | str = StateDictType.SHARDED,
        *,
        retention: RetentionPolicy | None = None,
        group: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.state_dict_type = StateDictType.parse(state_dict_type)
        self.retention = retention
        self._group = group
        self._storage_options = storage_options
        self._managers: dict[tuple[str, RetentionPolicy | None, str | None], CheckpointManager] = {}
        self._epoch: int | None = None  # the epoch in which the resumed run continues
        self._coordinator = Coordinator(group)
        self.run_on_all = self._coordinator.run_on_all
        self.decide = self._coordinator.decide

    # --- saving

    def save(
        self,
        filepath: str | Path,
        checkpoint: dict[str, Any],
        state: TrainState,
        *,
        metrics: Mapping[str, float] | None = None,
        retention: RetentionPolicy | None = None,
        owner: str | None = None,
    ) -> None:
        """Save `state`, and Lightning's `checkpoint` dictionary. Replaces an existing checkpoint of this name.

        Args:
            owner: Name of the callback that saves. `retention` applies only to this owner's checkpoints.
        """
        root, name = _split(filepath)

        def collect() -> int:
            extra: dict[str, Any] = {_KEY: _with_plain_hparams(checkpoint)}
            loaders = _taken_loaders(checkpoint)
            if loaders:
                extra[_LOADERS] = PerRank(loaders)
            state.extra = {**state.extra, **extra}
            return int(checkpoint.get("global_step", 0))

        step = self.run_on_all(collect, "collecting Lightning's state")
        manager = self._manager(root, retention or self.retention, owner)
        mark = None if owner is None else {_OWNER: owner}
        with self._room(root, name):
            manager.save(step, state, tag=name, metrics=metrics, client_state=mark, overwrite=True)

    def save_trainer(
        self,
        filepath: str,
        checkpoint: dict[str, Any],
        trainer: Any,
        *,
        retention: RetentionPolicy | None = None,
        owner: str | None = None,
    ) -> None:
        """Save a dictionary that a Trainer has collected within the context `collecting_live`."""
        with FitPosition.of(trainer).recorded(checkpoint):
            names = checkpoint.pop("state_dict", {})
            optimizers = trainer.optimizers if checkpoint.pop("optimizer_states", None) is not None else []
            checkpoint["ckptkit_keys"] = list(names)
            checkpoint["ckptkit_optimizers"] = len(optimizers)
            checkpoint["ckptkit_world_size"] = trainer.world_size

            def collect() -> tuple[TrainState, dict[str, float]]:
                state = state_of(StateView.of(trainer.lightning_module, names), optimizers)
                values = {k: v for k, v in trainer.callback_metrics.items() if getattr(v, "numel", lambda: 1)() == 1}
                return state, {key: float(value) for key, value in values.items()}

            state, metrics = self.run_on_all(collect, "collecting the checkpoint")
            self.save(filepath, checkpoint, state, metrics=metrics, retention=retention, owner=owner)

    @contextlib.contextmanager
    def _room(self, root: str, name: str) -> Iterator[None]:
        """Move aside a checkpoint that Lightning wrote as `name`. Delete it once the new checkpoint is committed."""

        def aside() -> str:
            place = Path(root) / name
            if split_url(root)[0] != "file" or not os.path.lexists(place):
                return ""
            if place.is_dir() and not place.is_symlink():
                if (place / RECORD_NAME).exists():
                    return ""
                if why := _why_kept(place):
                    raise CheckpointExistsError(
                        f"{place} was not replaced: {why}. Move it away, or save under another name."
                    )
            return str(_set_aside(place))

        moved = self._coordinator.decide(aside, "making room for the checkpoint")
        try:
            yield
        except BaseException:
            if moved and self._coordinator.is_main:
                Path(moved).rename(Path(root) / name)
            raise
        if moved and self._coordinator.is_main:
            try:
                _remove_aside(Path(moved))
            except OSError as error:  # the save is done, and the other ranks don't wait
                _log.warning("%s could not be removed: %s", moved, error)

    # --- loading

    def load(
        self, filepath: str | Path, state: TrainState, *, trainer: Any = None, **options: Any
    ) -> tuple[dict[str, Any], LoadReport]:
        """Load `state` from any format. Return Lightning's checkpoint dictionary without the tensors, and the report.

        Args:
            trainer: The Trainer that will continue the run.
        """
        root, name, url = self._coordinator.decide(lambda: self.find(filepath), "looking for the checkpoint")
        # Load a ckptkit checkpoint by name, because that protects it from rotation during this run.
        report = self._manager(root, self.retention).load(state, url or name, **options)
        assert report is not None  # loading from a URL either returns a report or raises
        left = state.dataloader is not None and any(name.startswith("dataloader") for name in report.skipped)
        if (report.missing or report.unexpected or left) and self._coordinator.is_main:
            _log.warning("%s: %s", filepath, report.line())  # Lightning does not pass the report on to the user
        checkpoint = _as_lightnings(lightning_extras(report.extra), report.step)
        if trainer is None:
            return checkpoint, report
        position = FitPosition.of(trainer)
        position.resume(checkpoint)
        if "rng" not in report.loaded:
            position.random = None
        fit = checkpoint.get("loops", {}).get("fit_loop", {})
        self._epoch = fit.get("epoch_progress", {}).get("current", {}).get("processed")
        loaders, ranks = report.extra.get(f"{_LOADERS}.{self._coordinator.rank}"), self._coordinator.world_size
        saved = checkpoint.get("ckptkit_world_size", ranks)
        if loaders and saved == ranks:
            if position.between_epochs:
                position.loaders = loaders["combined_loader"]
            else:
                fit["state_dict"].update(loaders)
        elif saved != ranks and position.left is not None and not position.between_epochs and self._coordinator.is_main:
            _log.warning(
                "The checkpoint was saved inside an epoch on %d ranks, and this job has %d. The epoch continues at the "
                "same batch number without the saved state of the dataloaders, so it repeats or skips samples.",
                saved, ranks,
            )  # fmt: skip
        return checkpoint, report

    def set_epoch(self, dataloader: Any) -> None:
        """Set the epoch of the resumed run in a dataloader's samplers, before the samplers are used.

        Lightning sets the epoch too late for a stateful dataloader, which would start with the data order of epoch 0.
        """
        if self._epoch is None:
            return
        batches = getattr(dataloader, "batch_sampler", None)
        for sampler in (getattr(dataloader, "sampler", None), getattr(batches, "sampler", None)):
            tell = getattr(sampler, "set_epoch", None)
            if callable(tell):
                tell(self._epoch)
            wrapped = (
                getattr(sampler.dataset, "_sampler", None) if isinstance(sampler, DistributedSamplerWrapper) else None
            )
            if getattr(wrapped, "generator", None) is not None and self._coordinator.is_main:
                _log.warning(
                    "%s draws the order of the data, and its state is not saved on several ranks: the resumed run may "
                    "use a different order. Pass a DistributedSampler(shuffle=True) to the dataloader.",
                    type(wrapped).__qualname__,
                )

    def find(self, filepath: str | Path) -> tuple[str, str, str]:
        """Return a checkpoint's parent directory, name and URL, with links resolved.

        The URL is "" if ckptkit saved the checkpoint, because such a checkpoint is loaded by its name. If `filepath` is
        a run, its newest checkpoint is found.
        """
        root, name = _split(str(filepath).removesuffix(f"/{RECORD_NAME}"))
        if split_url(root)[0] == "file" and "://" not in root:
            root, name = os.path.split(os.path.realpath(os.path.join(root, name)))
        if list_checkpoints(open_store(root, storage_options=self._storage_options)).find(name) is not None:
            return root, name, ""
        path = f"{root}/{name}"
        newest = newest_of(path, storage_options=self._storage_options)
        return (path, newest, "") if newest else (root, name, path)

    def close(self) -> None:
        """Release all resources."""
        # Close in reverse order, so that the manager that loaded a checkpoint is closed last. Until then, that manager
        # protects the checkpoint from the rotation of the other managers.
        for manager in reversed(self._managers.values()):
            manager.close()
        self._managers.clear()
        self._coordinator.close()

    def _manager(self, root: str, retention: RetentionPolicy | None, owner: str | None = None) -> CheckpointManager:
        key = (root, retention, owner)
        if key not in self._managers:
            made = self._managers[key] = CheckpointManager(
                root,
                retention=retention,
                state_dict_type=self.state_dict_type,
                process_group=self._group,
                storage_options=self._storage_options,
            )
            if owner is not None:
                made.rotates = lambda record: _owner(record) == owner
        return self._managers[key]


def _owner(record: CommitRecord) -> str | None:
    mark = record.client_state
    return mark.get(_OWNER) if isinstance(mark, Mapping) else None


def newest_of(root: str, *, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return the name of the newest checkpoint, even if it is damaged, in a run of ckptkit. "" if there is none."""
    if "://" not in root and not os.path.isdir(root):
        return ""
    run = list_checkpoints(open_store(root, storage_options=storage_options))
    found = run.newest_damaged or run.latest
    return found.path if found is not None else ""


def remove_checkpoint(filepath: str | Path, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Remove the checkpoint at a path, if it exists. If the path is a link, remove only the link.

    Does not communicate, because only rank 0 calls this. Errors are only logged: if rank 0 raised, the other ranks
    would wait for it.
    """
    try:
        _remove(filepath, storage_options)
    except (CkptkitError, OSError) as error:
        _log.error("%s was not removed: %s", filepath, error)


def _remove(filepath: str | Path, storage_options: Mapping[str, Any] | None) -> None:
    root, name = _split(filepath)
    local = split_url(root)[0] == "file"
    place = Path(root) / name
    if local and (place.is_symlink() or place.is_file()):
        place.unlink()
        return
    store = open_store(root, storage_options=storage_options)
    if list_checkpoints(store).find(name) is not None:
        if not delete_any(store, name, reason="removed by Lightning"):
            _log.warning("%s/%s is pinned; it is not removed.", root, name)
    elif local and place.is_dir():
        if why := _why_kept(place):
            _log.warning("%s was not removed: %s", place, why)
        else:
            _remove_aside(_set_aside(place))


def _why_kept(place: Path) -> str:
    """Return why a directory must not be deleted. Returns "" if it contains a Lightning checkpoint and nothing else."""
    if not any((place / mark).exists() for mark in _ALIEN):
        return "it is not a checkpoint"
    foreign = [path for path in foreign_paths(LocalStore(place)) if path != "meta.pt"]
    return f"it contains files that belong to no checkpoint: {first_few(foreign, 3)}" if foreign else ""


def lightning_extras(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return Lightning's checkpoint dictionary, given `extra`: all loaded values except tensors.

    In a ckptkit checkpoint, the dictionary is stored under a key of its own. In Lightning's sharded checkpoints, it is
    the content of `meta.pt`. In any other checkpoint, `extra` itself is the dictionary.
    """
    for key in (_KEY, "meta"):
        if isinstance(extra.get(key), Mapping):
            return dict(extra[key])
    return dict(extra)


def _as_lightnings(checkpoint: dict[str, Any], step: int | None) -> dict[str, Any]:
    """Add the keys that the Trainer needs to continue, if the checkpoint was not written by Lightning."""
    if "pytorch-lightning_version" in checkpoint:
        return checkpoint
    import lightning.pytorch

    found = {"pytorch-lightning_version": lightning.pytorch.__version__, "epoch": 0, "global_step": step or 0}
    return {**found, "lr_schedulers": [], **checkpoint}


def _with_plain_hparams(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the dictionary with all hyperparameters as plain values, which load without running code.

    Values that are not plain, such as paths and classes, become strings. They do not make the save fail, because a
    Trainer that resumes ignores hyperparameters.
    """
    texts: list[str] = []
    plain = {key: _plain(checkpoint[key], key, texts) for key in _HPARAMS if key in checkpoint}
    if not _told.issuperset(texts):
        _told.update(texts)
        _log.warning("Saved as text, because they are not plain values: %s.", ", ".join(texts))
    return {**checkpoint, **plain}


_told: set[str] = set()


def _plain(value: Any, path: str, texts: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{path}.{key}", texts) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_plain(item, f"{path}.{i}", texts) for i, item in enumerate(value))
    try:
        encode(value, path, {})
    except SaveError:
        texts.append(path)
        return str(value) if isinstance(value, os.PathLike) else repr(value)
    return value


def _taken_loaders(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Remove the dataloaders' state from the state of Lightning's loops, and return it.

    All other state of the loops is equal on all ranks.
    """
    try:
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
    except (KeyError, TypeError):
        return {}
    return {key: state.pop(key) for key in ("combined_loader",) if state.get(key)}


def _split(filepath: str | Path) -> tuple[str, str]:
    """Return the parent directory and the last component of a path or URL."""
    text = str(filepath)
    if split_url(text)[0] == "file" and "://" not in text:
        text = os.path.abspath(text)
    root, _, name = text.rstrip("/").rpartition("/")
    return root, name


def _set_aside(place: Path) -> Path:
    return place.rename(place.with_name(f".{place.name}.replaced-{uuid.uuid4().hex[:8]}"))


def _remove_aside(aside: Path) -> None:
    """Delete what was moved aside, unless another program has put a file into it in the meantime."""
    if not aside.is_dir() or aside.is_symlink():
        aside.unlink()
    elif why := _why_kept(aside):
        kept = aside.rename(aside.with_name(aside.name.removeprefix(".")))
        _log.warning("%s was kept: %s", kept, why)
    else:
        shutil.rmtree(aside)
