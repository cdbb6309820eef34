"""Provides the classes of the reports that the calls return, for annotations and `isinstance`.

Names are imported on first use, so `import ckptkit.reports` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "SaveReport": "ckptkit.checkpoint.report",
    "LoadReport": "ckptkit.checkpoint.report",
    "Phase": "ckptkit.checkpoint.report",
    "ConvertReport": "ckptkit.offline.conversion",
    "Copied": "ckptkit.offline.copy",
    "CopiedCheckpoint": "ckptkit.offline.copy",
    "VerifyReport": "ckptkit.offline.verify",
    "Problem": "ckptkit.offline.verify",
    "DiffReport": "ckptkit.offline.diff",
    "TensorDiff": "ckptkit.offline.diff",
    "LayerDiff": "ckptkit.offline.diff",
    "InspectReport": "ckptkit.offline.inspect",
    "RoleSummary": "ckptkit.offline.inspect",
    "TensorInfo": "ckptkit.offline.inspect",
    "SliceInfo": "ckptkit.offline.inspect",
    "TreeNode": "ckptkit.offline.inspect",
    "Listing": "ckptkit.offline.listing",
    "Listed": "ckptkit.offline.listing",
}

__all__ = [
    "SaveReport",
    "LoadReport",
    "Phase",
    "ConvertReport",
    "Copied",
    "CopiedCheckpoint",
    "VerifyReport",
    "Problem",
    "DiffReport",
    "TensorDiff",
    "LayerDiff",
    "InspectReport",
    "RoleSummary",
    "TensorInfo",
    "SliceInfo",
    "TreeNode",
    "Listing",
    "Listed",
]

if TYPE_CHECKING:
    from ckptkit.checkpoint.report import LoadReport, Phase, SaveReport
    from ckptkit.offline.conversion import ConvertReport
    from ckptkit.offline.copy import Copied, CopiedCheckpoint
    from ckptkit.offline.diff import DiffReport, LayerDiff, TensorDiff
    from ckptkit.offline.inspect import InspectReport, RoleSummary, SliceInfo, TensorInfo, TreeNode
    from ckptkit.offline.listing import Listed, Listing
    from ckptkit.offline.verify import Problem, VerifyReport


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ckptkit.reports' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
