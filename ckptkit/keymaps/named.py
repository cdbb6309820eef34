"""Finds the key map that the user asks for: a built-in map's name, a file, a package's entry point, or a map object."""

from __future__ import annotations

import os
from pathlib import Path

from ckptkit.arguments import wrong
from ckptkit.errors import UsageError
from ckptkit.keymaps.builtin import BUILTIN_MAPS, builtin_map
from ckptkit.keymaps.file import parse_key_map
from ckptkit.keymaps.keymap import NameMap

_MAX_FILE = 4 << 20
ENTRY_POINTS = "ckptkit.key_maps"  # an entry point is a NameMap, or a function without arguments that returns a NameMap


def resolve_key_map(key_map: object) -> NameMap | None:
    """Return the key map that the user chose with `--key-map`, or None if `key_map` is None.

    Built-in maps are tried first, then files, then the entry points of installed packages. A string is the name of a
    file if the file exists, or if the string ends in .toml or .json. Entry points come last, because loading an entry
    point runs the package's code.

    Raises:
        UsageError: There is no such map, or the file is invalid.
    """
    if key_map is None or isinstance(key_map, NameMap):
        return key_map
    if not isinstance(key_map, str):
        raise wrong("key_map", key_map, "a built-in name, a file, or a NameMap")
    if key_map.removeprefix("inverse:") in BUILTIN_MAPS:
        return builtin_map(key_map)
    if os.path.isfile(key_map) or key_map.endswith((".toml", ".json")):
        try:
            with Path(key_map).open(encoding="utf-8") as file:
                text = file.read(_MAX_FILE + 1)
        except (OSError, ValueError) as error:
            raise UsageError(f"--key-map {key_map} cannot be read: {error}.") from error
        if len(text) > _MAX_FILE:
            raise UsageError(f"--key-map {key_map}: more than {_MAX_FILE} characters, too large for a key map.")
        return parse_key_map(text, file=key_map)
    return _installed(key_map) or builtin_map(key_map)


def _installed(name: str) -> NameMap | None:
    from importlib.metadata import entry_points

    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            found = point.load()
            made = found if isinstance(found, NameMap) else found()
            if not isinstance(made, NameMap):
                raise UsageError(
                    f"the entry point {name!r} of {ENTRY_POINTS} returns {type(made).__name__}, expected a NameMap."
                )
            return made
    return None
