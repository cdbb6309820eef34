"""Defines a CheckpointIO for any Lightning strategy, with ckptkit's storage, commit and rotation."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.core import saving

from ckptkit.catalog.entry import Role
from ckptkit.checkpoint.mapping import Checkpoint, open_checkpoint
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import UsageError
from ckptkit.formats.own.record import RECORD_NAME
from ckptkit.integrations.lightning_state import (
    LightningCheckpoints,
    StateView,
    lightning_extras,
    remove_checkpoint,
)


class CkptkitCheckpointIO(CheckpointIO):  # type: ignore[misc]  # Lightning's types are not followed
    """Saves the dictionary that a strategy gathers on rank 0. Each save is a committed checkpoint.

    Loads its own checkpoints and Lightning's. Use it with DDP and with single devices. Strategies that save shards on
    every rank (FSDPStrategy, ModelParallelStrategy) do not use a CheckpointIO: use `FSDP2Strategy` or the callback
    `ManagedCheckpoint` instead.

    Args:
        retention: The policy by which the checkpoints in a directory are rotated. It cannot have `keep_best`, because
            Lightning passes no metrics to a CheckpointIO. Lightning also removes checkpoints itself.
        state_dict_type: "full" (the model in safetensors files) or "sharded" (DCP).
        storage_options: Passed to fsspec.
    """

    def __init__(
        self,
        *,
        retention: RetentionPolicy | None = None,
        state_dict_type: str = "full",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if retention is not None and retention.keep_best is not None:
            raise UsageError(
                "CkptkitCheckpointIO: keep_best compares metrics, but Lightning passes none to a CheckpointIO. "
                "Use the callback ManagedCheckpoint."
            )
        self._retention = retention
        self._state_dict_type = state_dict_type
        self._storage_options = storage_options
        self._made: LightningCheckpoints | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Save, and return once the checkpoint is durable. Only rank 0 calls this.

        Raises:
            SaveError: Nothing was published.
        """
        rest = dict(checkpoint)
        rest["ckptkit_keys"] = list(rest.get("state_dict", ()))
        tensors = rest.pop("state_dict", {})
        state = TrainState(model=StateView(tensors), rng=False)
        self._checkpoints(storage_options).save(path, rest, state)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the dictionary that ckptkit or Lightning saved at `path`. One rank may call this alone."""
        text = str(path) if "://" in str(path) else os.path.abspath(path)
        if os.path.isfile(text):
            return dict(TorchCheckpointIO().load_checkpoint(text, map_location, weights_only=weights_only))
        source = open_checkpoint(text, storage_options=self._storage_options)
        models = source.catalog.by_role(Role.MODEL)
        tensors = {entry.fqn: source[entry.name].to_torch() for entry in models.values()}
        extras = {name[6:]: source[name] for name in source.catalog.objects if name.startswith("extra.")}
        checkpoint = lightning_extras(extras or ({"meta": source["meta"]} if "meta" in source else {}))
        keys = checkpoint.pop("ckptkit_keys", None) or list(tensors)
        aliases = dict(source.info.extra.get("aliases", {}).get("model", {}))
        extra_state = source.get("model.extra_state", {})
        found = {**extra_state, **tensors}
        checkpoint["state_dict"] = {key: found[key if key in found else aliases.get(key, key)] for key in keys}
        if checkpoint.pop("ckptkit_optimizers", 0):
            checkpoint["optimizer_states"] = _optimizer_states(source)
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the checkpoint at `path`. If `path` is a link, remove only the link."""
        remove_checkpoint(path, storage_options=self._storage_options)

    def teardown(self) -> None:
        """Release all resources."""
        if self._made is not None:
            self._made.close()
            self._made = None

    def _checkpoints(self, storage_options: Any) -> LightningCheckpoints:
        if self._made is None:
            group = None
            if dist.is_available() and dist.is_initialized():  # only this rank: Lightning does not call the others
                group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
            self._made = LightningCheckpoints(
                self._state_dict_type,
                retention=self._retention,
                group=group,
                storage_options=storage_options or self._storage_options,
            )
        return self._made


def extend_load_from_checkpoint() -> None:
    """Make `LightningModule.load_from_checkpoint` read directories, which Lightning's own function cannot open.

    Reads runs (their newest checkpoint) and checkpoints of ckptkit, and Lightning's sharded checkpoints.
    """
    theirs = saving.pl_load

    def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        name = str(path).removesuffix(f"/{RECORD_NAME}")
        is_path = isinstance(path, (str, os.PathLike)) and not name.startswith("http")
        if not is_path or not get_filesystem(name).isdir(name):
            return theirs(path, map_location=map_location, weights_only=weights_only)
        checkpoint = CkptkitCheckpointIO().load_checkpoint(name)
        if isinstance(map_location, (str, torch.device)):
            checkpoint["state_dict"] = {key: value.to(map_location) for key, value in checkpoint["state_dict"].items()}
        return checkpoint

    saving.pl_load = load


def _optimizer_states(source: Checkpoint) -> list[dict[str, Any]]:
    """Return the optimizers' states in the layout that torch's `load_state_dict` takes, with numbered parameters."""
    found = []
    names = [name for name in source.catalog.objects if re.fullmatch(r"optimizer(_\d+)?", name)]
    for key in sorted(names, key=lambda name: (len(name), name)):
        tree = source[key]
        numbers = {fqn: i for i, fqn in enumerate(fqn for group in tree["param_groups"] for fqn in group["params"])}
        groups = [{**group, "params": [numbers[fqn] for fqn in group["params"]]} for group in tree["param_groups"]]
        states: dict[int, dict[str, Any]] = {numbers[fqn]: dict(values) for fqn, values in tree["values"].items()}
        for entry in source.catalog.by_role(Role.OPTIMIZER).values():
            if entry.name.startswith(f"{key}.") and entry.fqn in numbers:
                states.setdefault(numbers[entry.fqn], {})[entry.state] = source[entry.name].to_torch()
        found.append({"state": dict(sorted(states.items())), "param_groups": groups})
    return found
