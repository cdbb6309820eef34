"""Defines inert values for pickles. An inert value stores what a pickle passes to it, and does nothing else."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ckptkit.errors import UnsafePickleError

_NESTED = re.compile(r"[A-Z][A-Za-z0-9_]{0,63}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


class Stub:
    """Base class of inert values that replace other libraries' objects. Inert values compare and hash by identity."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise ValueError(f"{type(self).__name__} takes no state")


class Record(Stub):
    """Replaces an instance of a class on the allow-list. Stores the constructor arguments, the state and the items."""

    __slots__ = ("args", "entries", "items", "kwargs", "state")
    kind: ClassVar[str] = ""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: Any
    items: dict[Any, Any]
    entries: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Record:
        self = object.__new__(cls)
        self.args = args
        self.kwargs = kwargs
        self.state = None
        self.items = {}
        self.entries = []
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        self.entries.append(value)

    def extend(self, values: list[Any]) -> None:
        self.entries.extend(values)

    @property
    def fields(self) -> Mapping[str, Any]:
        """The object's attributes if the pickled state is `__dict__` or `(__dict__, slots)`, otherwise {}."""
        state = self.state
        if isinstance(state, dict):
            return state
        pair = isinstance(state, tuple) and len(state) == 2
        if pair and all(part is None or isinstance(part, dict) for part in state):
            return {**(state[0] or {}), **(state[1] or {})}
        return {}

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class UnknownGlobal(Record):
    """Replaces an instance of a class outside the allow-list, if the caller wants a `Record` instead of an error."""

    __slots__ = ()


@functools.lru_cache(maxsize=2048)
def record_type(kind: str) -> type[Record]:
    """Return the record class that replaces the class `kind`, given as "module.Name"."""
    return type("Record", (Record,), {"__slots__": (), "kind": kind})


@functools.lru_cache(maxsize=256)
def unknown_type(kind: str) -> type[UnknownGlobal]:
    return type("UnknownGlobal", (UnknownGlobal,), {"__slots__": (), "kind": kind})


class Function(Stub):
    """A harmless function that replaces a function on the allow-list."""

    __slots__ = ("_call", "name")

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        self.name = name
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


HISTORY_BUFFER = "mmengine.logging.history_buffer.HistoryBuffer"


def attribute_of(owner: object, name: object) -> type[Record]:
    """Return the record class that replaces the result of `getattr(Class, "Nested")`.

    Old pickles call `getattr` to refer to nested classes. This is allowed only for classes of torch.distributed, and
    for MMEngine's HistoryBuffer, whose pickles refer to its methods in this way.
    """
    if not (isinstance(owner, type) and issubclass(owner, Record)):
        raise UnsafePickleError("its pickle asks for getattr, which is allowed only on classes of torch.distributed")
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name) or name.startswith("__"):
        raise ValueError(f"getattr is not allowed for {name!r:.60}")
    kind = f"{owner.kind}.{name}"
    if issubclass(owner, UnknownGlobal):
        return unknown_type(kind[:256])
    if owner.kind == HISTORY_BUFFER:
        return record_type(kind)
    if not owner.kind.startswith("torch.distributed.") or not _NESTED.fullmatch(name) or owner.kind.count(".") > 8:
        raise UnsafePickleError(f"its pickle asks for {kind[:200]!r}, which is not on the allow-list; nothing was run")
    return record_type(kind)


class StateDict(dict[Any, Any], Stub):
    """Replaces OrderedDict and similar classes by a dict. Drops attributes, such as a state dict's `_metadata`."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class TorchDType(Stub):
    """A torch dtype. `name` is torch's name for the dtype, without "torch."."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class StorageType(Stub):
    """A torch storage class. `dtype` is None if the class is untyped."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: str | None) -> None:
        self.dtype = dtype


class NDArray(Record):
    """A numpy array. Its `state` is (version, shape, dtype, fortran order, raw bytes)."""

    __slots__ = ()
    kind = "numpy.ndarray"


# A `.metadata` may have millions of instances of these classes, so they use slots. `__setstate__` also empties the dict
# in the pickled state, because the unpickler's memo keeps that dict alive until the end.


class Index(Stub):
    """Replaces a MetadataIndex. `offset` is None for entries that are plain bytes."""

    __slots__ = ("fqn", "offset")

    def __setstate__(self, state: Any) -> None:
        self.fill(state.get("fqn"), state.get("offset"))
        state.clear()

    def fill(self, fqn: Any, offset: Any, index: Any = None) -> None:
        self.fqn, self.offset = fqn, offset


class StorageInfo(Stub):
    """Replaces a _StorageInfo, which describes the byte range of one item."""

    __slots__ = ("length", "offset", "relative_path", "transforms")

    def __setstate__(self, state: Any) -> None:
        self.fill(*map(state.get, ("relative_path", "offset", "length", "transform_descriptors")))
        state.clear()

    def fill(self, relative_path: Any, offset: Any, length: Any, transforms: Any = None) -> None:
        self.relative_path, self.offset, self.length, self.transforms = relative_path, offset, length, transforms


class ChunkMetadata(Stub):
    """Replaces a ChunkStorageMetadata, which describes a region of a tensor."""

    __slots__ = ("offsets", "sizes")

    def __setstate__(self, state: Any) -> None:
        self.fill(state.get("offsets"), state.get("sizes"))
        state.clear()

    def fill(self, offsets: Any, sizes: Any) -> None:
        self.offsets, self.sizes = offsets, sizes


class TensorMetadata(Stub):
    """Replaces a TensorStorageMetadata."""

    __slots__ = ("chunks", "properties", "size")

    def __setstate__(self, state: Any) -> None:
        self.properties = state.get("properties")
        self.size = state.get("size")
        self.chunks = state.get("chunks")
