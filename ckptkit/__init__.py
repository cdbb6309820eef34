"""Checkpoint management and conversion for PyTorch.

The packages, from the lowest layer up (a package imports only from lower layers):

- `errors`: the exceptions. `units`: parsing of sizes and durations.
- `catalog`: which tensors a checkpoint contains, and where their bytes are. `storage`: bytes at a URL.
- `formats`: the readers and writers of each format. A reader returns a `Catalog`.
- `checkpoint`: saving, keeping and loading the checkpoints of one run (`CheckpointManager`).
- `fsdp`: the FSDP2 runtime of a training job. `offline`: convert, merge, reshard, copy, verify, diff, inspect, prune.
- `integrations`, `cli`: other frameworks, and the command line. `reports`: the classes of all reports.

Public names are imported when they are first used, so `import ckptkit` does not import torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from ckptkit.log import RankHandler
from ckptkit.version import __version__

logging.getLogger(__name__).addHandler(RankHandler())

_WHERE = {
    "CheckpointManager": "ckptkit.checkpoint.manager",
    "TrainState": "ckptkit.checkpoint.state.train_state",
    "StateDictType": "ckptkit.checkpoint.state.train_state",
    "PerRank": "ckptkit.checkpoint.state.train_state",
    "Shard": "ckptkit.checkpoint.state.layout",
    "RetentionPolicy": "ckptkit.checkpoint.retention",
    "LoadOptions": "ckptkit.checkpoint.load.options",
    "SaveHandle": "ckptkit.checkpoint.save.background",
    "DeferredOptimizer": "ckptkit.checkpoint.report",
    "CommitRecord": "ckptkit.formats.own.record",
    "FileRecord": "ckptkit.formats.own.record",
    "open_checkpoint": "ckptkit.checkpoint.mapping",
    "Checkpoint": "ckptkit.checkpoint.mapping",
    "TensorView": "ckptkit.checkpoint.mapping",
    "CatalogInfo": "ckptkit.catalog.entry",
    "MeshInfo": "ckptkit.catalog.entry",
    "ReadOptions": "ckptkit.formats.options",
    "DCPWriter": "ckptkit.formats.dcp.torch_api",
    "DCPReader": "ckptkit.formats.dcp.torch_api",
    "DCPSavePlanner": "ckptkit.formats.dcp.planners",
    "DCPLoadPlanner": "ckptkit.formats.dcp.planners",
    "convert": "ckptkit.offline.convert",
    "merge": "ckptkit.offline.merge",
    "reshard": "ckptkit.offline.reshard",
    "copy": "ckptkit.offline.copy",
    "verify": "ckptkit.offline.verify",
    "diff": "ckptkit.offline.diff",
    "inspect": "ckptkit.offline.inspect",
    "list_run": "ckptkit.offline.listing",
}

__all__ = [
    "__version__",
    "CheckpointManager",
    "TrainState",
    "StateDictType",
    "PerRank",
    "Shard",
    "RetentionPolicy",
    "LoadOptions",
    "SaveHandle",
    "DeferredOptimizer",
    "CommitRecord",
    "FileRecord",
    "open_checkpoint",
    "Checkpoint",
    "TensorView",
    "CatalogInfo",
    "MeshInfo",
    "ReadOptions",
    "DCPWriter",
    "DCPReader",
    "DCPSavePlanner",
    "DCPLoadPlanner",
    "convert",
    "merge",
    "reshard",
    "copy",
    "verify",
    "diff",
    "inspect",
    "list_run",
]

if TYPE_CHECKING:
    from ckptkit.catalog.entry import CatalogInfo, MeshInfo
    from ckptkit.checkpoint.load.options import LoadOptions
    from ckptkit.checkpoint.manager import CheckpointManager
    from ckptkit.checkpoint.mapping import Checkpoint, TensorView, open_checkpoint
    from ckptkit.checkpoint.report import DeferredOptimizer
    from ckptkit.checkpoint.retention import RetentionPolicy
    from ckptkit.checkpoint.save.background import SaveHandle
    from ckptkit.checkpoint.state.layout import Shard
    from ckptkit.checkpoint.state.train_state import PerRank, StateDictType, TrainState
    from ckptkit.formats.dcp.planners import DCPLoadPlanner, DCPSavePlanner
    from ckptkit.formats.dcp.torch_api import DCPReader, DCPWriter
    from ckptkit.formats.options import ReadOptions
    from ckptkit.formats.own.record import CommitRecord, FileRecord
    from ckptkit.offline.convert import convert
    from ckptkit.offline.copy import copy
    from ckptkit.offline.diff import diff
    from ckptkit.offline.inspect import inspect
    from ckptkit.offline.listing import list_run
    from ckptkit.offline.merge import merge
    from ckptkit.offline.reshard import reshard
    from ckptkit.offline.verify import verify


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ckptkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
