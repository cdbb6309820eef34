"""Reads FSDP1 LOCAL_STATE_DICT: the flat parameter of each unit as a 1-D ShardedTensor, without the original shapes.

With use_orig_params=True, each rank also stores its 1-D piece of every parameter under the parameter's name, so only
the shapes are missing. With use_orig_params=False, names and order are missing as well. The missing information comes
from the first of these sources that exists:

- a layout (`ReadOptions.layout`)
- shapes in module order (`ReadOptions.shapes`)
- an optimizer saved as DCP in the same checkpoint
- with use_orig_params=True, a Hugging Face directory (`ReadOptions.base`)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    "FSDP1 LOCAL state has no parameter shapes on disk{and_names}. Give --layout FILE, a JSON of the units (unit -> "
    "fqns and shapes, in the order of the unit's parameters) or of all parameters in module order (name -> shape); "
    "{or_optimizer}or save again with FULL or SHARDED state."
)
_OR_OPTIMIZER = "or keep accelerate's optimizer_0/ next to it, "


@dataclass(frozen=True, slots=True)
class FlatParam:
    """The contents of one flat parameter: (name, shape, index of the first element) of each original parameter."""

    params: tuple[tuple[str, tuple[int, ...], int], ...]

    @property
    def numel(self) -> int:
        """The number of elements up to the end of the last parameter."""
        return max((start + math.prod(shape) for _, shape, start in self.params), default=0)


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
    options: ReadOptions | None,
) -> Catalog:
    """Return the catalog of FSDP1 LOCAL rank files.

    Args:
        names: Names of the files, in rank order.
        values: Contents of each file.
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
        if options is not None and options.layout is None and options.shapes is None and options.base is not None:
            base = safetensors.open_catalog(open_store(options.base))
            shapes = {**{name: entry.shape for name, entry in base.tensors.items()}, **shapes}
        for unit in layout.values():
            shapes.update({name: shape for name, shape, _ in unit.params})
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


def _described(
    optimizer: Catalog | None, options: ReadOptions | None
) -> tuple[dict[str, FlatParam], dict[str, tuple[int, ...]]]:
    """Return the flat parameters of the units, or the shapes of the parameters in module order.

    The flat parameters come from the user's layout file. If there is no layout file, the shapes come from the user's
    file of shapes, or from the optimizer.
    """
    given = (options.layout or options.shapes) if options is not None else None
    if given is None:
        shapes: dict[str, tuple[int, ...]] = {}
        for entry in optimizer.tensors.values() if optimizer is not None else ():
            if entry.role is Role.OPTIMIZER and entry.fqn and entry.state != "step":
                shapes.setdefault(entry.fqn, entry.shape)
        return {}, shapes
    content = _read_json(given)
    if not isinstance(content, dict) or not content or not all(isinstance(shape, list) for shape in content.values()):
        return parse_layout(content, given), {}
    if not all(len(shape) <= 64 and _are_sizes(shape) for shape in content.values()):
        raise UsageError(f"{given}: expected a JSON object of parameter names and lists of sizes, in module order.")
    return {}, {name: tuple(shape) for name, shape in content.items()}


def parse_layout(content: Any, where: str) -> dict[str, FlatParam]:
    """Return the flat parameters that a layout describes.

    A layout maps each unit's name to {"fqns", "shapes"[, "numels", "pad_mask"]}. `fqns` are relative to the unit.
    `numels` and `pad_mask` describe padding between parameters.
    """
    if not isinstance(content, dict):
        raise UsageError(f"{where}: expected a JSON object of units.")
    found = {}
    for unit, body in content.items():
        fqns, shapes = (body.get("fqns"), body.get("shapes")) if isinstance(body, dict) else (None, None)
        if not isinstance(fqns, list) or not isinstance(shapes, list) or len(fqns) != len(shapes):
            raise UsageError(f"{where}: unit {unit!r} must have 'fqns' and 'shapes' of the same length.")
        if not all(isinstance(shape, list) and len(shape) <= 64 and _are_sizes(shape) for shape in shapes):
            raise UsageError(f"{where}: unit {unit!r}: each of 'shapes' must be a list of sizes, such as [128, 64].")
        if not all(isinstance(fqn, str) for fqn in fqns):
            raise UsageError(f"{where}: unit {unit!r}: each of 'fqns' must be a name.")
        starts = _starts(body, [math.prod(shape) for shape in shapes], where)
        params = [
            (_prefix(unit) + fqn, tuple(shape), start) for fqn, shape, start in zip(fqns, shapes, starts, strict=True)
        ]
        found[unit if unit.endswith(_SUFFIX) else f"{unit}.{_SUFFIX}".lstrip(".")] = FlatParam(tuple(params))
    return found


def _are_sizes(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 for value in values)


def _starts(body: Mapping[str, Any], numels: Sequence[int], where: str) -> list[int]:
    mask = body.get("pad_mask") or [False] * len(numels)
    recorded = body.get("numels") or list(numels)
    if not isinstance(mask, list) or not isinstance(recorded, list) or not _are_sizes(recorded):
        raise UsageError(f"{where}: 'numels' must be a list of sizes, and 'pad_mask' a list of true and false.")
    if len(mask) != len(recorded) or [n for n, pad in zip(recorded, mask, strict=True) if not pad] != list(numels):
        raise UsageError(f"{where}: 'numels' and 'pad_mask' do not fit the shapes.")
    starts, position = [], 0
    for numel, pad in zip(recorded, mask, strict=True):
        if not pad:
            starts.append(position)
        position += numel
    return starts


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
    shapes: Mapping[str, tuple[int, ...]],
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


def _from_units(layout: Mapping[str, FlatParam], vectors: Mapping[str, FlatVector]) -> Iterator[tuple[str, Joined]]:
    for unit, vector in vectors.items():
        flat = layout.get(unit)
        if flat is None:
            raise UsageError(f"the layout has no unit {unit!r}; it has {', '.join(list(layout)[:6])}.")
        # FSDP1 pads a flat parameter to a multiple of the world size and, with use_orig_params, to 16 bytes.
        if flat.numel > vector.numel or vector.numel - flat.numel >= max(64, len(vector.pieces)):
            raise CorruptCheckpointError(
                f"{unit!r} has {vector.numel} elements on the ranks, but its parameters have {flat.numel}: "
                "the layout belongs to another model or another wrapping."
            )
        for name, shape, start in flat.params:
            yield name, vector.tensor(shape, start)


def _units_of(shapes: Mapping[str, tuple[int, ...]], vectors: Mapping[str, FlatVector]) -> dict[str, FlatParam]:
    """Assign the model's parameters to the flat parameters of the units.

    A parameter goes to the innermost unit that contains the parameter. Within a unit, the module order is kept.

    Args:
        shapes: Shapes of the parameters, in module order.
    """
    if not shapes:
        raise UnsupportedFormatError(
            _ADVICE.format(and_names=" and no names" if vectors else "", or_optimizer=_OR_OPTIMIZER)
        )
    members: dict[str, list[tuple[str, tuple[int, ...], int]]] = {unit: [] for unit in vectors}
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
    return {unit: FlatParam(tuple(params)) for unit, params in members.items()}


def _read_json(url: str) -> Any:
    folder, _, name = url.rpartition("/")
    try:
        return parse(open_store(folder or ".").read(name, 0, _MAX_JSON_BYTES), file=url)
    except FileNotFoundError as error:
        raise UsageError(f"{url} does not exist.") from error
    except CorruptCheckpointError as error:
        raise UsageError(str(error)) from error
