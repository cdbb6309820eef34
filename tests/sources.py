"""The package's modules, parsed once for all tests that look into them: parsing takes seconds."""

import ast
import functools
import gc
from collections.abc import Mapping
from pathlib import Path

import ckptkit

PACKAGE = Path(ckptkit.__file__).parent


@functools.cache
def sources() -> Mapping[str, ast.Module]:
    """Return the parsed modules of the package by their dotted names."""
    found = {}
    gc.disable()  # no node is garbage
    try:
        for path in sorted(PACKAGE.rglob("*.py")):
            parts = ("ckptkit", *path.relative_to(PACKAGE).with_suffix("").parts)
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.freeze()
        gc.enable()
    return found
