"""Key maps: rename one system's tensors to another system's names.

Public names are imported on first use, so a conversion without a key map imports none of this.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "NameMap": "ckptkit.keymaps.keymap",
    "NamePattern": "ckptkit.keymaps.patterns",
    "Rename": "ckptkit.keymaps.rules",
    "Drop": "ckptkit.keymaps.rules",
    "Split": "ckptkit.keymaps.rules",
    "Concat": "ckptkit.keymaps.rules",
    "Stack": "ckptkit.keymaps.rules",
    "Unstack": "ckptkit.keymaps.rules",
    "Transpose": "ckptkit.keymaps.rules",
    "RopePermute": "ckptkit.keymaps.rules",
    "Cast": "ckptkit.keymaps.rules",
    "Pad": "ckptkit.keymaps.rules",
    "parse_key_map": "ckptkit.keymaps.file",
}

__all__ = [
    "NameMap",
    "NamePattern",
    "Rename",
    "Drop",
    "Split",
    "Concat",
    "Stack",
    "Unstack",
    "Transpose",
    "RopePermute",
    "Cast",
    "Pad",
    "parse_key_map",
]

if TYPE_CHECKING:
    from ckptkit.keymaps.file import parse_key_map
    from ckptkit.keymaps.keymap import NameMap
    from ckptkit.keymaps.patterns import NamePattern
    from ckptkit.keymaps.rules import Cast, Concat, Drop, Pad, Rename, RopePermute, Split, Stack, Transpose, Unstack


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ckptkit.keymaps' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
