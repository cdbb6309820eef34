"""Reads pickles without running anything from them: an unpickler of our own, over an allow-list of inert stubs.

Not `pickle.Unpickler` with a `find_class`: that one sizes its memo by an index from the file, hashes nested
tuples without a limit, and builds cheaply what is costly to hold. Here every opcode is ours and bounded. Only
`.metadata` files too large for Python's speed go through the C unpickler, after `_pickle_scan` has walked them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Literal

from ckptkit.errors import CkptkitError, CorruptCheckpointError, UnsafePickleError
from ckptkit.formats._pickle_globals import allowed_global
from ckptkit.formats._pickle_machine import Machine, PersistentLoad
from ckptkit.formats._pickle_stubs import unknown_type

__all__ = ["loads", "load_prefix", "MAX_PICKLE_BYTES"]

MAX_PICKLE_BYTES = 256 << 20

Unknown = Literal["refuse", "record"]
Table = Mapping[tuple[str, str], Any]


def loads(
    data: bytes | memoryview,
    *,
    file: str,
    functions: Table | None = None,
    persistent_load: PersistentLoad | None = None,
    unknown: Unknown = "refuse",
) -> Any:
    """Return what the pickle in `data` describes, made of plain Python values and inert stubs.

    Args:
        file: What error messages name: a file, or an item of one.
        functions: More globals that are allowed, and what they become; looked up first.
        persistent_load: Makes a value of a persistent id (a torch storage); without it they are refused.
        unknown: "record" turns globals that are not allowed into `UnknownGlobal` records instead of an error.
            Nothing is run either way.

    Raises:
        UnsafePickleError: It names a global that is not on the allow-list.
        CorruptCheckpointError: It is no valid pickle, or larger or deeper than any checkpoint needs.
    """
    return load_prefix(
        data, file=file, functions=functions, persistent_load=persistent_load, unknown=unknown
    )[0]  # fmt: skip


def load_prefix(
    data: bytes | memoryview,
    start: int = 0,
    *,
    file: str,
    functions: Table | None = None,
    persistent_load: PersistentLoad | None = None,
    unknown: Unknown = "refuse",
) -> tuple[Any, int]:
    """Return the value of the pickle that begins at `start`, and where it ends. Raises as `loads` does."""
    if len(data) - start > MAX_PICKLE_BYTES:
        raise CorruptCheckpointError(
            f"{file}: a pickle of {len(data) - start} bytes is larger than any checkpoint needs."
        )
    resolve = resolver(file, functions, unknown)
    machine = Machine(bytes(data), start, resolve, persistent_load)
    return guarded(file, machine.run), machine.pos


def resolver(file: str, functions: Table | None, unknown: Unknown) -> Callable[[str, str], Any]:
    """Return the look-up of globals: module and name -> stub. It raises UnsafePickleError."""
    extra = functions or {}

    def resolve(module: str, name: str) -> Any:
        found = extra.get((module, name))
        if found is None:
            found = allowed_global(module, name)
        if found is not None:
            return found
        shown = f"{module}.{name}"[:200]
        if unknown == "record":
            return unknown_type(shown)
        raise UnsafePickleError(
            f"{file}: its pickle asks for {shown!r}, which is not on the allow-list; nothing of it was run. "
            "Do not open this file with torch.load or pickle unless you trust where it came from."
        )

    return resolve


def guarded(file: str, run: Callable[[], Any]) -> Any:
    """Return run(), with all that a malformed pickle can raise turned into our errors, which name `file`."""
    try:
        return run()
    except CkptkitError as error:
        if str(error).startswith(file):
            raise
        raise type(error)(f"{file}: {error}") from None
    except (ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError, TypeError,
            ValueError, struct.error) as error:  # fmt: skip
        text = str(error)[:200] or type(error).__name__
        raise CorruptCheckpointError(f"{file}: its pickle is damaged or was made to deceive: {text}.") from None
