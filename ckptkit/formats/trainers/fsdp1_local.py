"""Reads FSDP1 LOCAL_STATE_DICT: the flat parameter of each unit as a 1-D ShardedTensor, without the original shapes.

With use_orig_params=True, each rank also stores its 1-D piece of every parameter under the parameter's name, so only
the shapes are missing. With use_orig_params=False, names and order are missing as well. The missing information comes
from the first of these sources that exists:

- a layout, or shapes in module order (`ReadOptions.layout`)
- an optimizer saved as DCP in the same checkpoint
- with use_orig_params=True, a Hugging Face directory (`ReadOptions.base`)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ckptkit.catalog.entry import Catalog, CatalogInfo, Role
from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError, UsageError
from ckptkit.formats.hf import safetensors
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.own.json import parse
from ckptkit.formats.pickles.tensors import ShardedTensorRecord, StoredTensor
from ckptkit.formats.trainers.rank_files import FlatVector, Joined, Piece, join
from ckptkit.storage import Store, open_store

_SUFFIX = "_flat_param"
_MAX_JSON_BYTES = 64 << 20
_ADVICE = (
    "FSDP1 LOCAL state has no parameter shapes on disk{and_names}. Give --layout FILE (to convert, reshard, inspect "
    "or verify), a JSON of the units (unit -> fqns and shapes, in the order of the unit's parameters) or of all "
    "parameters in module order (name -> shape); "
    "{or_optimizer}or save again with FULL or SHARDED state."
)
_OR_OPTIMIZER = "or keep accelerate's optimizer_0/ next to it, "


Shape: TypeAlias = tuple[int, ...]
Unit: TypeAlias = list[tuple[str, Shape, int]]
"""The parameters in a flat parameter: name, shape, and index of the first element."""


def is_flat(values: Sequence[Any]) -> bool:
    """Return whether `values`, the contents of the rank files, are FSDP1 LOCAL state."""
    first = values[0] if values else None
    return isinstance(first, dict) and any(isinstance(name, str) and name.endswith(_SUFFIX) for name in first)


def read(
    store: Store,
    names: Sequence[str],
    values: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, int],
    optimizer: Catalog | None,
    options: ReadOptions,
) -> Catalog:
    """Return the catalog of FSDP1 LOCAL rank files.

    Args:
        optimizer: DCP catalog of the optimizer, from which the shapes of the trained parameters are taken.
    """
    units = [name for name in values[0] if name.endswith(_SUFFIX)]
    originals = [name for name in values[0] if not name.endswith(_SUFFIX)]
    vectors = {unit: _vector(unit, values) for unit in units}
    with_names = any(
        name.startswith(tuple(_prefix(unit) for unit in units)) and _is_piece(name, values) for name in originals
    )
    layout, shapes = _described(optimizer, options)
    notes: list[str] = []
    if with_names:
        if options.layout is None and options.base is not None:
            base = safetensors.open_catalog(open_store(options.base))
            shapes = {**{name: entry.shape for name, entry in base.tensors.items()}, **shapes}
        for unit in layout.values():
            shapes.update({name: shape for name, shape, _ in unit})
        joined = _from_pieces(originals, values, shapes, optimizer)
    else:
        joined = dict(_from_units(layout or _units_of(shapes, vectors), vectors))
        joined.update(join([{name: value[name] for name in originals} for value in values], what=names[0]))
        notes.append("FSDP1 LOCAL: the order of equal-sized parameters in a unit can't be checked against the files.")
    tensors = {name: tensor.entry(name, Role.MODEL, fqn=name) for name, tensor in joined.items()}
    info = CatalogInfo(
        "fsdp1-local",
        producer="torch FSDP1",
        world_size=len(values),
        files={name: sizes.get(name, -1) for name in names},
        notes=tuple(notes),
    )
    return Catalog(tensors, {}, info)


def _described(optimizer: Catalog | None, options: ReadOptions) -> tuple[dict[str, Unit], dict[str, Shape]]:
    """Return the flat parameters of the units, or the shapes of the parameters in module order.

    They come from the user's file or, if there is none, from the optimizer.
    """
    given = options.layout
    if given is None:
        shapes: dict[str, Shape] = {}
        for entry in optimizer.tensors.values() if optimizer is not None else ():
            if entry.role is Role.OPTIMIZER and entry.fqn and entry.state != "step":
                shapes.setdefault(entry.fqn, entry.shape)
        return {}, shapes
    content = _read_json(given)
    if not isinstance(content, dict) or not content or not all(isinstance(shape, list) for shape in content.values()):
        return parse_layout(content, given), {}
    if not all(map(_is_shape, content.values())):
        raise UsageError(f"{given}: expected a JSON object of parameter names and lists of sizes, in module order.")
    return {}, {name: tuple(shape) for name, shape in content.items()}


def parse_layout(content: Any, where: str) -> dict[str, Unit]:
    """Return the flat parameters that a layout describes.

    A layout maps each unit's name to {"fqns", "shapes"[, "numels", "pad_mask"]}. `fqns` are relative to the unit.
    `numels` and `pad_mask` describe padding between parameters.

    Args:
        where: Name of the layout's file, for the error message.

    Raises:
        UsageError: The layout does not have this form.
    """
    found = {}
    for unit, body in content.items() if isinstance(content, dict) else [("", content)]:
        given: dict[str, Any] = body if isinstance(body, dict) else {}
        fqns, shapes = given.get("fqns", ()), given.get("shapes", ())
        starts = None
        if _are(str, fqns) and isinstance(shapes, list) and len(fqns) == len(shapes) and all(map(_is_shape, shapes)):
            starts = _starts([math.prod(shape) for shape in shapes], given.get("numels"), given.get("pad_mask"))
        if starts is None:
            raise UsageError(
                f"{where}: unit {unit!r:.80} is {body!r:.80}; expected fqns (a list of names), shapes (a list of sizes "
                "for each name) and, if there is padding, numels and pad_mask that fit the shapes."
            )
        names = [_prefix(unit) + fqn for fqn in fqns]
        key = unit if unit.endswith(_SUFFIX) else f"{unit}.{_SUFFIX}".lstrip(".")
        found[key] = list(zip(names, map(tuple, shapes), starts, strict=True))
    return found


def _are(kind: type[Any], values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _are_sizes(values: Any) -> bool:
    return _are(int, values) and all(0 <= size < 1 << 63 for size in values)


def _is_shape(value: Any) -> bool:
    return _are_sizes(value) and len(value) <= 64


def _starts(numels: Sequence[int], recorded: Any, mask: Any) -> list[int] | None:
    """Return where each parameter starts, or None if the recorded sizes and padding do not fit `numels`."""
    recorded, mask = recorded or list(numels), mask or [False] * len(numels)
    if not _are_sizes(recorded) or not _are(bool, mask) or len(recorded) != len(mask):
        return None
    ends = itertools.accumulate(recorded)
    params = [(numel, end - numel) for numel, end, pad in zip(recorded, ends, mask, strict=True) if not pad]
    return [start for _, start in params] if [numel for numel, _ in params] == list(numels) else None


def _prefix(unit: str) -> str:
    return unit.removesuffix(_SUFFIX)


def _vector(unit: str, values: Sequence[Mapping[str, Any]]) -> FlatVector:
    pieces = []
    for rank, value in enumerate(values):
        tensor = value.get(unit)
        if not isinstance(tensor, ShardedTensorRecord) or len(tensor.shape) != 1:
            raise CorruptCheckpointError(f"rank {rank} has no 1-D ShardedTensor {unit!r}.")
        pieces += [Piece(shard.box.offsets[0], shard.tensor, rank) for shard in tensor.shards if shard.box.numel]
    return FlatVector(pieces)


# --- use_orig_params=True


def _is_piece(name: str, values: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the ranks' tensors of this name look like 1-D pieces of a parameter, and not like a buffer."""
    tensors = [value.get(name) for value in values]
    stored = [t for t in tensors if isinstance(t, StoredTensor)]
    if not stored or any(len(t.shape) != 1 for t in stored):
        return False
    same = all(t.shape == stored[0].shape and t.same_storage(stored[0]) for t in stored[1:])
    return not same or len(values) == 1


def _from_pieces(
    names: Sequence[str],
    values: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, Shape],
    optimizer: Catalog | None,
) -> dict[str, Joined]:
    found: dict[str, Joined] = {}
    for name in names:
        shape = shapes.get(name)
        if shape is None and _is_piece(name, values):
            why = "" if optimizer is None else ": the optimizer has only the shapes of trained parameters"
            advice = _ADVICE.format(and_names="", or_optimizer=_OR_OPTIMIZER if optimizer is None else "")
            raise UnsupportedFormatError(f"the shape of {name!r} is not known{why}. {advice}")
        if shape is None:
            found.update(join([{name: value[name]} for value in values if name in value], what="rank {rank}"))
            continue
        pieces = [(rank, value[name]) for rank, value in enumerate(values) if isinstance(value.get(name), StoredTensor)]
        vector = FlatVector.of_ranks(pieces)
        if vector.numel != math.prod(shape):
            raise CorruptCheckpointError(
                f"{name!r}: the ranks have {vector.numel} elements, but its shape {list(shape)} has {math.prod(shape)}."
            )
        found[name] = vector.tensor(shape)
    return found


# --- use_orig_params=False


def _from_units(layout: Mapping[str, Unit], vectors: Mapping[str, FlatVector]) -> Iterator[tuple[str, Joined]]:
    for unit, vector in vectors.items():
        flat = layout.get(unit)
        if flat is None:
            raise UsageError(f"the layout has no unit {unit!r}; it has {', '.join(list(layout)[:6])}.")
        # FSDP1 pads a flat parameter to a multiple of the world size and, with use_orig_params, to 16 bytes.
        numel = max((start + math.prod(shape) for _, shape, start in flat), default=0)
        if numel > vector.numel or vector.numel - numel >= max(64, len(vector.pieces)):
            raise CorruptCheckpointError(
                f"{unit!r} has {vector.numel} elements on the ranks, but its parameters have {numel}: "
                "the layout belongs to another model or another wrapping."
            )
        for name, shape, start in flat:
            yield name, vector.tensor(shape, start)


def _units_of(shapes: Mapping[str, Shape], vectors: Mapping[str, FlatVector]) -> dict[str, Unit]:
    """Assign the model's parameters, given in module order, to the flat parameters of the units.

    A parameter goes to the innermost unit that contains the parameter. Within a unit, the module order is kept.
    """
    if not shapes:
        raise UnsupportedFormatError(
            _ADVICE.format(and_names=" and no names" if vectors else "", or_optimizer=_OR_OPTIMIZER)
        )
    members: dict[str, Unit] = {unit: [] for unit in vectors}
    ends = dict.fromkeys(vectors, 0)
    for name, shape in shapes.items():
        units = [unit for unit in vectors if name.startswith(_prefix(unit))]
        if units:
            innermost = max(units, key=len)
            members[innermost].append((name, shape, ends[innermost]))
            ends[innermost] += math.prod(shape)
    for unit, end in ends.items():
        if end != vectors[unit].numel:
            raise CorruptCheckpointError(
                f"FSDP unit {unit!r}: the ranks store {vectors[unit].numel} elements, but the known shapes of its "
                f"{len(members[unit])} parameters add up to {end}. The rest may be frozen parameters, "
                "which have no optimizer state. Pass a layout that lists them."
            )
    return members


def _read_json(url: str) -> Any:
    folder, _, name = url.rpartition("/")
    try:
        return parse(open_store(folder or ".").read(name, 0, _MAX_JSON_BYTES), file=url)
    except FileNotFoundError as error:
        raise UsageError(f"{url} does not exist.") from error
    except CorruptCheckpointError as error:
        raise UsageError(str(error)) from error
