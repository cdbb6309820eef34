"""Loads a sharded state without torch's planners. Each rank reads what its own tensors need, without communicating."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.tensor import DTensor

from ckptkit.catalog.entry import Catalog, ObjectEntry, TensorEntry
from ckptkit.errors import (
    CheckpointMismatchError,
    CorruptCheckpointError,
    SaveError,
    UnsafePickleError,
    UnsupportedFormatError,
)
from ckptkit.formats.dcp.class_records import saved_parts
from ckptkit.formats.dcp.digests import check_bytes
from ckptkit.formats.dcp.fill import Filler, Verify
from ckptkit.formats.dcp.host_bytes import dtype_name
from ckptkit.formats.dcp.plan import local_boxes
from ckptkit.formats.dcp.shared_memory import Claim, check_claims, overlapping
from ckptkit.formats.dcp.subclasses import describe, open_tensor
from ckptkit.formats.pickles.objects import load_object_torch
from ckptkit.formats.pickles.weights_only import parse_object
from ckptkit.formats.trainers.shards import LocalPart
from ckptkit.storage.store import ReadInto, Store

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_LISTED = 20  # an error lists at most this many keys

# Objects are loaded first, so that unsafe ones are all reported together before any tensor in the state is changed.


def load_objects(store: Store, entries: Mapping[str, ObjectEntry]) -> dict[str, Any]:
    """Load objects, check their digests, and return their values by key. Runs no code from the objects.

    Raises:
        UnsafePickleError: Objects need classes that the caller has not allowed. The message names each object.
        IntegrityError: Bytes differ from their digest.
    """
    raw = {  # the objects that torch.save wrote uncompressed are read in one batch
        name: bytearray(entry.nbytes)
        for name, entry in entries.items()
        if entry.encoding == "torch_save" and entry.codec is None and entry.nbytes
    }
    store.read_many([ReadInto(entries[name].path, entries[name].start, memoryview(data)) for name, data in raw.items()])
    for name, data in raw.items():
        entry, digest = entries[name], entries[name].digest
        if digest is not None and digest.start == entry.start and digest.nbytes == entry.nbytes:
            check_bytes(digest, memoryview(data), entry.path, name)
    values: dict[str, Any] = {}
    unsafe: list[UnsafePickleError] = []
    for name, entry in entries.items():
        try:
            values[name] = (
                parse_object(raw[name], file=entry.path, name=name) if name in raw else load_object_torch(store, entry)
            )
        except UnsafePickleError as error:
            unsafe.append(error)
    if len(unsafe) == 1:
        raise unsafe[0]
    if unsafe:
        raise UnsafePickleError(f"{len(unsafe)} objects cannot be loaded:{_listed(unsafe)}")
    return values


def check_fits(current: Any, value: Any, name: str) -> None:
    """Check that a loaded tensor fits the state's current tensor, which the load will fill.

    Checks nothing if either value is not a tensor, or if the state's tensor is a DTensor or on the meta device.

    Raises:
        CheckpointMismatchError: Shapes, dtypes or layouts differ.
    """
    if not _is_filled(current, value):
        return
    if (current.shape, current.dtype, current.layout) != (value.shape, value.dtype, value.layout):
        raise CheckpointMismatchError(
            f"{name}: the checkpoint has {value.dtype} {list(value.shape)} ({value.layout}), the state has "
            f"{current.dtype} {list(current.shape)} ({current.layout})."
        )


def filled_by(current: Any, value: Any) -> Any:
    """Fill the state's current tensor with a loaded tensor, and return the state's new value.

    Returns:
        `current` after it was filled. Returns `value` instead if one of the two is not a tensor, or if `current` is a
            DTensor or on the meta device.
    """
    if not _is_filled(current, value):
        return value
    with torch.no_grad():
        current.copy_(value)  # current.detach() would not do: a quantized tensor would keep its old scale
    return current


def _is_filled(current: Any, value: Any) -> bool:
    both = isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor)
    return both and not isinstance(current, DTensor) and not current.is_meta


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The reads that a load will perform on this rank. Nothing has been read or changed yet.

    Attributes:
        objects: Values that are not tensors, by key: the path in the nested state, and the current value.
        missing: Keys in the state that the checkpoint lacks. The values of these keys stay unchanged.
    """

    catalog: Catalog
    store: Store
    state_dict: dict[str, Any]
    filler: Filler
    objects: Mapping[str, tuple[tuple[str | int, ...], Any]]
    missing: list[str]

    def run(self) -> None:
        """Fill the tensors and replace the objects in the state.

        Raises:
            IntegrityError: Bytes differ from their digest. The message names the tensor and the file.
            IncompleteCheckpointError: A file is missing or too short.
            UnsafePickleError: Objects need classes that the caller has not allowed. Nothing was changed.
            CheckpointMismatchError: An object does not fit the current value. Nothing was changed.
        """
        values = load_objects(self.store, {name: self.catalog.objects[name] for name in self.objects})
        for name, (_, current) in self.objects.items():
            check_fits(current, values[name], name)
        self.filler.run()
        for name, (path, current) in self.objects.items():
            set_element(self.state_dict, path, filled_by(current, values[name]))


def plan_read(
    catalog: Catalog,
    store: Store,
    state_dict: dict[str, Any],
    *,
    verify: Verify = Verify.READ,
    cast: bool = False,
    strict: bool = True,
    workers: int = 0,
) -> ReadPlan:
    """Plan a load that fills the tensors of a nested or flat state in place and replaces the objects.

    Does not change the state: `ReadPlan.run` does.

    Each rank reads only the bytes that its own tensors need, however the checkpoint is sharded.

    Args:
        verify: Which slices to check against their digests.
        cast: Convert tensors whose dtype differs. If False, a different dtype is an error.
        strict: Raise an error if the checkpoint lacks a key of the state. If False, the key's value stays unchanged.

    Raises:
        CheckpointMismatchError: Keys are missing, shapes or dtypes differ, or the checkpoint has a tensor under a key
            whose value in the state is not a tensor. The message lists all mismatches. Also raised if tensors of the
            state share memory, but have different values in the checkpoint.
        IncompleteCheckpointError: The checkpoint lacks part of a tensor.
    """
    flat, paths = flatten_state_dict(state_dict)
    filler = Filler(store, verify=verify, workers=workers, cast=cast)
    classed = {name for name, value in flat.items() if add_class(filler, catalog, name, value)}
    flat = {name: value for name, value in flat.items() if name not in classed}
    check_shared_memory(store, flat, catalog.tensors, cast=cast)
    found, missing = _matched(catalog, flat, cast=cast, strict=strict)
    for name, entry in found.items():
        if entry is not None:
            for box, target in local_boxes(flat[name]):
                filler.add(entry, box, target)
    filler.plan()
    objects = {name: (paths[name], flat[name]) for name, entry in found.items() if entry is None}
    return ReadPlan(catalog, store, state_dict, filler, objects, missing)


def add_class(filler: Filler, catalog: Catalog, name: str, value: Any) -> bool:
    """Schedule reads into the inner tensors of a tensor subclass in the state, and return True.

    Returns False for any other value, and if the checkpoint lacks the tensor or stores the tensor as a single object.

    Raises:
        CheckpointMismatchError: The checkpoint has a different class or different settings, or its shards split a block
            of elements that share a scale.
        CorruptCheckpointError: The checkpoint lacks an inner tensor.
    """
    if not isinstance(value, torch.Tensor) or (name in catalog.objects and name not in catalog.tensors):
        return False
    try:
        here = open_tensor(value)
        saved = None if here is None else saved_parts(filler.store, catalog, name)
    except SaveError as error:
        raise CheckpointMismatchError(f"{name}: the tensor {error}.") from error
    except UnsupportedFormatError as error:
        raise CheckpointMismatchError(
            f"tensor {name!r} {catalog.tensors[name].slices.opaque}, and {error}. Load it with torch's "
            "FileSystemReader in a job that imports its class."
        ) from error
    if here is None or (saved is None and name not in catalog.tensors):
        return False
    entries, recipe = saved or ({}, None)
    if recipe != here.recipe:
        raise CheckpointMismatchError(
            f"{name} is {describe(here.recipe)} here, but {describe(recipe)} in the checkpoint: the classes and their "
            "settings must be equal."
        )
    for key, part in here.parts.items():
        if key not in entries:
            raise CorruptCheckpointError(f"tensor {name!r}: its part {key!r} is missing.")
        for box, target in local_boxes(part):
            filler.add(entries[key], box, target)
    return True


def check_shared_memory(
    store: Store, state: Mapping[str, Any], entries: Mapping[str, TensorEntry], *, cast: bool
) -> None:
    """Check that a load fills tensors that share memory (tied weights) with equal values.

    Args:
        entries: The checkpoint's tensors, by key in the flat state. Tensors that do not fit the state are ignored.

    Raises:
        CheckpointMismatchError: The checkpoint has different values for tensors that share memory. The message names
            the tensors.
    """
    found = [
        (name, local)
        for name, value in state.items()
        if name in entries
        for local in _locals(value)
        if local.layout is torch.strided and not local.is_meta
    ]
    # Most states share no memory, so boxes are computed only for the tensors that do.
    sharing = {found[i][0]: entries[found[i][0]] for group in overlapping([t for _, t in found]) for i in group}
    fitting = [
        (name, entry, state[name], part)
        for name, entry in sharing.items()
        if _difference(entry, state[name], cast) is None
        for part in local_boxes(state[name])
    ]
    groups = []
    for group in overlapping([local for *_, (_, local) in fitting]):
        first = fitting[group[0]][2]
        claims = [fitting[i] for i in group]
        # Compare whole tensors if possible, so that all ranks get the same result.
        if all(_is_placed_like(first, value) for _, _, value, _ in claims):
            groups.append([Claim.whole(name, entry, value) for name, entry, value, _ in claims])
            continue
        groups.append([
            Claim(name, entry, tuple(value.shape), local, [LocalPart(box, (0,) * len(box.sizes))])
            for name, entry, value, (box, local) in claims
        ])  # fmt: skip
    check_claims(store, groups)


def _is_placed_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        same = one._spec == other._spec
        return same and _is_placed_like(one._local_tensor, other._local_tensor)
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (one, other) if type(t) in _PLAIN]
    return len(places) == 2 and places[0] == places[1]


def _locals(value: Any) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    local = value._local_tensor if isinstance(value, DTensor) else value
    return [local] if type(local) in _PLAIN else []


def _matched(
    catalog: Catalog, flat: Mapping[str, Any], *, cast: bool, strict: bool
) -> tuple[dict[str, TensorEntry | None], list[str]]:
    """Return the keys to load, each with its tensor (None for an object), and the missing keys.

    Raises:
        CheckpointMismatchError: Keys do not fit the checkpoint. The message lists all mismatches.
    """
    found: dict[str, TensorEntry | None] = {}
    missing, wrong = [], []
    for name, value in flat.items():
        tensor, entry = isinstance(value, (torch.Tensor, ShardedTensor)), catalog.tensors.get(name)
        if entry is None and name not in catalog.objects:
            missing.append(name)
        elif entry is None:
            found[name] = None  # the entry may still be a tensor that is not dense
        elif not tensor:
            wrong.append(f"{name}: the checkpoint has a tensor, the state has {type(value).__name__}")
        else:
            problem = _difference(entry, value, cast)
            if problem:
                wrong.append(f"{name}: {problem}")
            found[name] = entry
    for name in missing if strict else ():
        heads = itertools.accumulate(name.split("."), "{}.{}".format)
        outer = next((head for head in heads if head in catalog.objects), None)
        wrong.append(f"{name}: not in the checkpoint")
        if outer is not None:
            wrong[-1] += f", which has {outer!r} as one object (torch < 2.4). Try: planner=DefaultLoadPlanner()"
    if wrong:
        raise CheckpointMismatchError(
            f"{len(wrong)} keys of the state do not fit the checkpoint; nothing was loaded:{_listed(wrong)}"
        )
    return found, missing


def _listed(items: Sequence[object]) -> str:
    """Return a line for each of the first `_LISTED` items, and a line that counts the others."""
    more = [f"and {len(items) - _LISTED} more"] if len(items) > _LISTED else []
    return "".join(f"\n  {item}" for item in [*items[:_LISTED], *more])


def _difference(entry: TensorEntry, value: Any, cast: bool) -> str | None:
    shape = tuple(value.size())
    if shape != entry.shape:
        return f"the checkpoint has shape {list(entry.shape)}, the state has {list(shape)}"
    dtype = dtype_name(value.dtype)
    if dtype != entry.dtype and not cast:
        return f"the checkpoint has {entry.dtype}, the state has {dtype} (cast=True converts)"
    return None
