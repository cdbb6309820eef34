"""Finds the inner tensors of tensor subclasses in DCP checkpoints that torch wrote.

torch's `dcp.save` stores each shard of a tensor subclass as a pickled instance of the class, with the inner tensors in
the same record. This module adds the inner tensors to the catalog. Their names, and the recipes for rebuilding the
subclasses from them, are the same as in a save by ckptkit (see `subclasses`).

This module never imports a class. If this process has imported a class and allowed torch to load it, the class itself
may name its inner tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.catalog.box import Box, row_major_strides
from ckptkit.catalog.entry import Catalog, ObjectEntry, Role, SliceArray, TensorEntry, TensorSlice
from ckptkit.errors import CorruptCheckpointError, SaveError, UnsafePickleError, UnsupportedFormatError
from ckptkit.formats.dcp.blocks import Blocks, blocks_of
from ckptkit.formats.dcp.locate import LocatedSlices
from ckptkit.formats.dcp.subclasses import (
    ENUMS,
    SEPARATOR,
    STATES,
    SUBCLASSES,
    WEIGHTS,
    Recipe,
    open_tensor,
)
from ckptkit.formats.pickles.inert import Record, TorchDType
from ckptkit.formats.pickles.objects import load_object_torch
from ckptkit.formats.pickles.tensors import ClassRecord, StoredTensor
from ckptkit.formats.pickles.zip import read_archive
from ckptkit.storage.store import Store


def recipes_of(catalog: Catalog) -> Mapping[str, Recipe]:
    """Return, by tensor name, the recipe for rebuilding each tensor subclass from plain inner tensors.

    A catalog contains recipes only if ckptkit wrote the checkpoint, or if `in_parts` returned the catalog.
    """
    entry = catalog.objects.get(SUBCLASSES)
    found = entry.value if entry is not None and entry.encoding == "value" else None
    return found if isinstance(found, dict) else {}


def in_parts(store: Store, catalog: Catalog, *, optimizer: bool = True) -> Catalog:
    """Return a catalog with the inner tensors in place of each tensor subclass that torch's `dcp.save` stored.

    The object `SUBCLASSES` in the new catalog contains the recipes for rebuilding the subclasses. If the inner tensors
    of a subclass can't be read, its entry stays. If there is no entry to replace, returns `catalog` itself.

    Args:
        optimizer: Also replace optimizer states. To do so, reads the beginning and the end of every optimizer record.
    """
    if not catalog.in_parts() or catalog.info.format != "dcp":
        return catalog
    tensors: dict[str, TensorEntry] = {}
    recipes: dict[str, Recipe] = {}
    found = False
    for entry in catalog.in_parts():
        if (entry.role is not Role.OPTIMIZER or optimizer) and entry.slices.opaque:
            found = True
            try:
                parts, recipes[entry.name] = opened_entry(store, entry)
                tensors.update({part.name: part for part in parts.values()})
            except UnsupportedFormatError as error:
                tensors[entry.name] = entry
                if isinstance(entry.slices, LocatedSlices):
                    entry.slices.items.opaque[entry.slices.tensor] += f", and {error}"
        else:
            tensors[entry.name] = entry
    if not found:
        return catalog
    opaque = {name: why for name, why in catalog.info.extra.get("opaque", {}).items() if name not in recipes}
    info = replace(catalog.info, extra={**catalog.info.extra, "opaque": opaque})
    objects = dict(catalog.objects)
    if recipes:
        objects[SUBCLASSES] = ObjectEntry(SUBCLASSES, encoding="value", value=recipes)
    return Catalog(tensors, objects, info)


def renamed_recipes(catalog: Catalog, rename: Callable[[TensorEntry], str | None]) -> dict[str, Recipe]:
    """Return a catalog's recipes (see `recipes_of`) by the tensors' new names.

    Args:
        rename: Returns the new name of an inner tensor, or None to omit the recipe that contains it.
    """
    found = {}
    for name, recipe in recipes_of(catalog).items():
        part = SEPARATOR + next(iter(recipe["inner"]))
        new = rename(catalog.tensors[name + part])
        if new is not None:
            found[new.removesuffix(part)] = recipe
    return found


def saved_parts(store: Store, catalog: Catalog, name: str) -> tuple[dict[str, TensorEntry], Recipe] | None:
    """Return a tensor's inner tensors by attribute, and the recipe for rebuilding the tensor from them.

    Returns None if the tensor has no inner tensors.

    Raises:
        UnsupportedFormatError: See `opened_entry`.
        CorruptCheckpointError: A record is damaged.
    """
    recipe = recipes_of(catalog).get(name)
    if recipe is not None:
        head = name + SEPARATOR
        return {key[len(head) :]: entry for key, entry in catalog.tensors.items() if key.startswith(head)}, recipe
    entry = catalog.tensors.get(name)
    return opened_entry(store, entry) if entry is not None and entry.slices.opaque else None


def opened_entry(store: Store, entry: TensorEntry) -> tuple[dict[str, TensorEntry], Recipe]:
    """Return a stored tensor subclass's inner tensors (by attribute) and the recipe for rebuilding it.

    Raises:
        UnsupportedFormatError: The inner tensors cannot be read without the class. The message completes the sentence
            "the tensor ...".
        CorruptCheckpointError: A record is damaged.
    """
    offsets, sizes = entry.slices.offsets.tolist(), entry.slices.sizes.tolist()
    boxes = [Box(tuple(offset), tuple(size)) for offset, size in zip(offsets, sizes, strict=True)]
    shards = [_read(store, entry, *place) for place in entry.slices.records()]
    first = shards[0]
    if first.kind in STATES:
        placed, names = STATES[first.kind]
    elif first.kind in WEIGHTS:
        inner_names, names = WEIGHTS[first.kind]
        held = {name: _inner(first, name).shape for name in inner_names if first.fields.get(name) is not None}
        placed = {name: "whole" if blocks_of(first.shape, inner) is None else "like" for name, inner in held.items()}
        if len(shards) > 1 and "whole" in placed.values():
            raise UnsupportedFormatError(
                f"has {len(shards)} shards, and inner tensors that cannot be joined: each describes a whole shard"
            )
    else:
        return _by_its_class(store, entry, shards)
    for shard, box in zip(shards, boxes, strict=True):
        if (shard.kind, shard.dtype) != (first.kind, first.dtype):
            raise UnsupportedFormatError(f"has shards of the kinds {_kind(first)} and {_kind(shard)}")
        if shard.shape != box.sizes:
            raise CorruptCheckpointError(
                f"tensor {entry.name!r}: the shard at {list(box.offsets)} is {list(shard.shape)}, but .metadata says "
                f"{list(box.sizes)}."
            )
        if shard.strides != row_major_strides(shard.shape) and (len(shards) > 1 or first.kind in STATES):
            raise UnsupportedFormatError(f"has a shard with the strides {list(shard.strides)}")
    contexts: list[Any] = [{name: _context(shard, name) for name in names} for shard in shards]
    if first.kind in STATES:
        contexts = [list(context.values()) for context in contexts]
    if any(context != contexts[0] for context in contexts):
        raise UnsupportedFormatError(f"has shards with different settings ({', '.join(names)}): {contexts}")
    inner: dict[str, Any] = {}
    parts: dict[str, TensorEntry] = {}
    for name, rule in placed.items():
        tensors = [_inner(shard, name) for shard in shards]
        try:
            inner[name], shape, slices = _placed(entry, name, rule, tensors, boxes)
        except SaveError as error:
            raise UnsupportedFormatError(str(error)) from None
        parts[name] = _part(entry, name, tensors[0].dtype, shape, SliceArray.of(slices, len(shape)))
        parts[name].check_coverage()
    recipe = {
        "class": first.kind,
        "shape": list(entry.shape),
        "stride": list(first.strides if len(shards) == 1 else row_major_strides(entry.shape)),
        "dtype": first.dtype,
        "context": contexts[0],
        "inner": inner,
    }
    return parts, recipe


def _by_its_class(
    store: Store, entry: TensorEntry, shards: Sequence[ClassRecord]
) -> tuple[dict[str, TensorEntry], Recipe]:
    """Return the inner tensors and the recipe of a tensor subclass, as described by its class.

    The whole tensor must be in a single record. This process must have imported and allowed the class.
    """
    if "torch" not in sys.modules or len(shards) > 1 or shards[0].shape != entry.shape:
        raise UnsupportedFormatError("can be read only by its class")
    path, start, nbytes = entry.slices.records()[0]
    try:
        opened = open_tensor(load_object_torch(store, ObjectEntry(entry.name, path, start, nbytes)))
    except UnsafePickleError:
        raise UnsupportedFormatError(
            "can be read only by its class, which this job has not allowed (torch.serialization.add_safe_globals)"
        ) from None
    except SaveError as error:
        raise UnsupportedFormatError(str(error)) from None
    if opened is None:
        raise UnsupportedFormatError("can be read only by its class, which does not name its inner tensors")
    parts = {}
    for name in opened.parts:
        holder = shards[0]
        *outer, last = name.split(SEPARATOR)
        for attribute in outer:
            inner = holder.fields.get(attribute)
            if not isinstance(inner, ClassRecord):
                raise UnsupportedFormatError(f"has a shard without its inner tensor {name!r}")
            holder = inner
        found = _inner(holder, last)
        parts[name] = _part(entry, name, found.dtype, found.shape, SliceArray.of([found.slice()], len(found.shape)))
    return parts, opened.recipe


def _read(store: Store, entry: TensorEntry, path: str, start: int, nbytes: int) -> ClassRecord:
    value = read_archive(store, path, start, nbytes, unknown="record", classes=True)
    if not isinstance(value, ClassRecord):
        raise UnsupportedFormatError(f"has a shard that is a {type(value).__name__.removesuffix('Record')}")
    return value


def _kind(shard: ClassRecord) -> str:
    return f"{shard.kind} ({shard.dtype})"


def _context(shard: ClassRecord, name: str) -> Any:
    """Return the attribute `name` of a tensor subclass as JSON, for the recipe's "context" (see `subclasses`)."""
    if name == "dtype":
        return {"$dtype": shard.dtype}
    if name in shard.fields:
        return _context_value(shard, name, shard.fields[name])
    if name == "shape":
        return {"$shape": True}
    raise UnsupportedFormatError(f"has a shard without the attribute {name!r}")


def _context_value(shard: ClassRecord, name: str, value: Any) -> Any:
    if type(value) in (bool, int, str) or value is None:
        return value
    if isinstance(value, (list, tuple)) and tuple(value) == shard.shape:
        return {"$shape": True}
    if isinstance(value, (list, tuple)) and shard.kind not in STATES:
        items = [_context_value(shard, name, item) for item in value]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, TorchDType):
        return {"$dtype": value.name}
    if isinstance(value, Record):
        kind = value.kind.rpartition(".")[2]
        member = ENUMS.get(kind, {}).get(value.args[0]) if len(value.args) == 1 and not value.state else None
        if member is not None:
            return {"$enum": f"{kind}.{member}"}
        if not value.args and isinstance(value.state or {}, dict):
            fields = {str(key): _context_value(shard, name, item) for key, item in (value.state or {}).items()}
            return {"$object": [kind, fields]}
    raise UnsupportedFormatError(f"has a shard without a valid attribute {name!r}: {str(value)[:80]}")


def _inner(shard: ClassRecord, name: str) -> StoredTensor:
    found = shard.fields.get(name)
    if not isinstance(found, StoredTensor):
        raise UnsupportedFormatError(f"has a shard without its inner tensor {name!r}")
    if not found.contiguous:
        raise UnsupportedFormatError(f"has a shard whose {name} is not row-major")
    return found


def _placed(
    entry: TensorEntry, name: str, rule: str, tensors: Sequence[StoredTensor], boxes: Sequence[Box]
) -> tuple[Any, tuple[int, ...], list[TensorSlice]]:
    """Join the shards of an inner tensor. Return its entry in the recipe, its shape and its slices."""
    first = tensors[0]
    if any(tensor.dtype != first.dtype for tensor in tensors):
        raise UnsupportedFormatError(f"has shards whose {name} differ in dtype")
    if rule == "whole":
        if any(t.shape != first.shape or not t.same_storage(first) for t in tensors[1:]):
            raise UnsupportedFormatError(f"has shards with different tables {name}")
        return {"placed": rule}, first.shape, [first.slice()]
    blocks = [Blocks.of(name, rule, box.sizes, t.shape, entry.shape) for t, box in zip(tensors, boxes, strict=True)]
    if any(other != blocks[0] for other in blocks):
        sizes = [other.size for other in blocks]
        raise SaveError(f"has shards whose blocks for {name} differ in size: {sizes} elements")
    slices = [tensor.slice(blocks[0].inner_box(box)) for tensor, box in zip(tensors, boxes, strict=True)]
    return {"placed": rule, "block": blocks[0].size}, blocks[0].inner_shape, slices


def _part(entry: TensorEntry, name: str, dtype: str, shape: tuple[int, ...], slices: SliceArray) -> TensorEntry:
    def named(text: str) -> str:
        return f"{text}{SEPARATOR}{name}" if text else ""

    key = (*entry.key[:-1], named(str(entry.key[-1]))) if entry.key else ()
    is_state = bool(entry.state)
    return TensorEntry(
        named(entry.name), dtype, shape, slices, entry.role,
        entry.fqn if is_state else named(entry.fqn), named(entry.state), key,
    )  # fmt: skip
