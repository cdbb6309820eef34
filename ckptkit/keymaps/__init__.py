"""Key maps: rename one system's tensors to another system's names.

A package can provide key maps as entry points of the group `ckptkit.key_maps`. An entry point refers to a NameMap, or
to a function without arguments that returns a NameMap. `--key-map NAME` first looks for a built-in map, then for a
file. A package's code runs only if there is neither.

Public names are imported on first use, so a conversion without a key map does not import the submodules.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    if name not in __all__:
        raise AttributeError(f"module 'ckptkit.keymaps' has no attribute {name!r}")
    module = {"NameMap": "keymap", "NamePattern": "patterns", "parse_key_map": "file"}.get(name, "rules")
    return getattr(importlib.import_module(f"ckptkit.keymaps.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
