"""Lightning's checkpoint dictionary as a checkpoint of ours, and back. Imports no Lightning."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptkit.checkpoint.coordinator import Coordinator
from ckptkit.checkpoint.delete import delete_checkpoint
from ckptkit.checkpoint.inventory import list_checkpoints
from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.report import LoadReport
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.state import PerRank, StateDictType, TrainState, model_tensors
from ckptkit.errors import CheckpointExistsError
from ckptkit.storage.store import open_store, split_url

__all__ = ["LightningCheckpoints", "StateView", "lightning_extras", "remove_checkpoint"]

_log = logging.getLogger(__name__)
_KEY = "lightning"
_LOADERS = "lightning_loaders"
_ALIEN = ("meta.pt", ".metadata")  # a directory with one of these is a checkpoint of Lightning's


class StateView(nn.Module):
    """A model as a checkpoint holds it: these tensors, whatever the module they come from has besides."""

    def __init__(self, tensors: Mapping[str, Any], like: nn.Module | None = None) -> None:
        super().__init__()
        self._tensors = dict(tensors)
        self._tied_weights_keys = getattr(like, "_tied_weights_keys", None)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # of no use here
        """Return the tensors, as they live."""
        return dict(self._tensors)

    @classmethod
    def of(cls, module: nn.Module, wanted: Mapping[str, Any]) -> StateView:
        """Return the live tensors of `module` that `wanted` names, or what a hook put there in their place."""
        tensors, extra = model_tensors(module)
        live = {**tensors, **extra}
        return cls({k: live[k] if k in live and _same(live[k], v) else v for k, v in wanted.items()}, module)


def _same(live: Any, given: Any) -> bool:
    if not isinstance(live, torch.Tensor) or not isinstance(given, torch.Tensor):
        return live is given
    mine = live.to_local() if isinstance(live, DTensor) else live
    theirs = given.to_local() if isinstance(given, DTensor) else given
    return mine.shape == theirs.shape and mine.data_ptr() == theirs.data_ptr() and live.dtype == given.dtype


class LightningCheckpoints:
    """Saves and loads at the paths that Lightning names: the directory is the root of a run, the last part a tag.

    All ranks make it, and call its methods, together; or one rank for itself, with a group of its own.

    Args:
        retention: What rotation keeps in a directory, besides what Lightning removes itself.
        group: The ranks that take part; None for all.
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
        self._managers: dict[tuple[str, RetentionPolicy | None], CheckpointManager] = {}
        self._coordinator = Coordinator(group)

    # --- saving

    def save(
        self,
        filepath: str | Path,
        checkpoint: dict[str, Any],
        state: TrainState,
        *,
        metrics: Mapping[str, float] | None = None,
        retention: RetentionPolicy | None = None,
    ) -> None:
        """Save `state`, and beside it what is left of Lightning's `checkpoint`. Replaces a checkpoint of that name."""
        root, name = _split(filepath)
        extra: dict[str, Any] = {_KEY: checkpoint}
        loaders = _taken_loaders(checkpoint)
        if loaders:
            extra[_LOADERS] = PerRank(loaders)
        state.extra = {**state.extra, **extra}
        manager = self._manager(root, retention or self.retention)
        with self._room(root, name):
            manager.save(int(checkpoint.get("global_step", 0)), state, tag=name, metrics=metrics, overwrite=True)

    @contextlib.contextmanager
    def _room(self, root: str, name: str) -> Iterator[None]:
        """Move a checkpoint that Lightning wrote itself out of the way; it goes once the new one is committed."""

        def aside() -> str:
            place = Path(root) / name
            if split_url(root)[0] != "file" or not os.path.lexists(place):
                return ""
            if place.is_dir() and not place.is_symlink():
                if (place / "checkpoint.json").exists():
                    return ""
                if not any((place / mark).exists() for mark in _ALIEN):
                    raise CheckpointExistsError(
                        f"{place} is a directory that is no checkpoint; it is not replaced. Save under another name."
                    )
            other = place.with_name(f".{name}.replaced-{uuid.uuid4().hex[:8]}")
            place.rename(other)
            return str(other)

        moved = self._coordinator.decide(aside, "making room for the checkpoint")
        try:
            yield
        except BaseException:
            if moved and self._coordinator.is_main:
                Path(moved).rename(Path(root) / name)
            raise
        if moved and self._coordinator.is_main:
            _remove_path(Path(moved))

    # --- loading

    def load(self, filepath: str | Path, state: TrainState, **options: Any) -> tuple[dict[str, Any], LoadReport]:
        """Load `state` from any format; return Lightning's dictionary without the tensors that were loaded."""
        root, name = _split(filepath)
        manager = self._manager(root, self.retention)
        report = manager.load(state, f"{root}/{name}", **options)
        assert report is not None  # a URL is loaded, or raises
        checkpoint = lightning_extras(report.extra)
        loaders = report.extra.get(f"{_LOADERS}.{self._coordinator.rank}")
        if loaders and checkpoint.get("ckptkit_world_size") == self._coordinator.world_size:
            checkpoint["loops"]["fit_loop"]["state_dict"].update(loaders)
        elif loaders:
            _log.warning("The state of the dataloaders was not restored: another number of ranks saved it.")
        return checkpoint, report

    def close(self) -> None:
        """Give everything back."""
        for manager in self._managers.values():
            manager.close()
        self._managers.clear()
        self._coordinator.close()

    def _manager(self, root: str, retention: RetentionPolicy | None) -> CheckpointManager:
        key = (root, retention)
        if key not in self._managers:
            self._managers[key] = CheckpointManager(
                root,
                retention=retention,
                state_dict_type=self.state_dict_type,
                process_group=self._group,
                storage_options=self._storage_options,
            )
        return self._managers[key]


def remove_checkpoint(filepath: str | Path, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Remove what lies at a path, if that is a checkpoint. Of a link only the link goes. No communication."""
    root, name = _split(filepath)
    local = split_url(root)[0] == "file"
    place = Path(root) / name
    if local and (place.is_symlink() or place.is_file()):
        place.unlink()
        return
    store = open_store(root, storage_options=storage_options)
    if list_checkpoints(store).find(name) is not None:
        if not delete_checkpoint(store, name, reason="removed by Lightning"):
            _log.warning("%s/%s is pinned; it is not removed.", root, name)
    elif local and place.is_dir():
        if any((place / mark).exists() for mark in _ALIEN):
            shutil.rmtree(place)
        else:
            _log.warning("%s is no checkpoint; it is not removed.", place)


def lightning_extras(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return Lightning's dictionary from what a load found besides tensors: ours, `meta.pt`, or a file's own keys."""
    for key in (_KEY, "meta"):
        if isinstance(extra.get(key), Mapping):
            return dict(extra[key])
    return dict(extra)


def _taken_loaders(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Take the state of the dataloaders out of the loops: it is this rank's own, the rest is every rank's."""
    try:
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
    except (KeyError, TypeError):
        return {}
    return {key: state.pop(key) for key in ("combined_loader",) if state.get(key)}


def _split(filepath: str | Path) -> tuple[str, str]:
    """Return the directory and the last part of a path or URL."""
    text = str(filepath)
    if split_url(text)[0] == "file" and "://" not in text:
        text = os.path.abspath(text)
    root, _, name = text.rstrip("/").rpartition("/")
    return root, name


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
