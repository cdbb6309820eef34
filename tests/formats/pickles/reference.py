"""C's unpickler with our allow-list, as a reference for `walk`."""

import io
import pickle
from collections.abc import Mapping
from typing import Any

from ckptkit.errors import CorruptCheckpointError
from ckptkit.formats.pickles.allowed import allowed_global
from ckptkit.formats.pickles.inert import unknown_type
from ckptkit.formats.pickles.walk import PersistentLoad, Unknown, guarded


class _Reference(pickle.Unpickler):
    functions: Mapping[tuple[str, str], Any]
    storage: PersistentLoad | None
    unknown: Unknown

    def find_class(self, module: str, name: str) -> Any:
        found = self.functions.get((module, name)) or allowed_global(module, name)
        if found is None and self.unknown == "record":
            return unknown_type(f"{module}.{name}"[:200])
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return found

    def persistent_load(self, identity: Any) -> Any:
        assert self.storage is not None
        return self.storage(identity)


def loads_in_c(
    data: bytes,
    *,
    file: str,
    functions: Mapping[tuple[str, str], Any] | None = None,
    persistent_load: PersistentLoad | None = None,
    unknown: Unknown = "refuse",
    max_bytes: int | None = None,
) -> Any:
    """Return what `walk.loads` must return, by C's unpickler."""
    reader = _Reference(io.BytesIO(data), encoding="latin1")
    reader.functions, reader.storage, reader.unknown = functions or {}, persistent_load, unknown
    try:
        return guarded(file, reader.load)
    except (pickle.UnpicklingError, AssertionError) as error:
        raise CorruptCheckpointError(f"{file}: {error}") from None
