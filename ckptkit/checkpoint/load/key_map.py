"""Applies a key map to a checkpoint's weights, so that a load finds them under the live model's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, Role, SliceArray, TensorEntry, TensorSlice, contiguous_strides
from ckptkit.catalog.targets import NO_SOURCE, Part, Target
from ckptkit.catalog.tiles import pieces
from ckptkit.errors import CheckpointMismatchError, CheckpointNotFoundError, UnsupportedFormatError
from ckptkit.formats.dcp.subclasses import lower_bits_of
from ckptkit.keymaps.keymap import NameMap
from ckptkit.keymaps.wrappers import strip_infixes

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class MappedWeights:
    """The weights of a checkpoint after a key map was applied to their names."""

    catalog: Catalog  # the weights under their new names, with their fp32 masters and lower bits, and nothing else
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)  # each weight's tensors in the checkpoint
    filled: dict[str, tuple[Box, ...]] = field(default_factory=dict)  # filled boxes of padded entries, by entry name
    dropped: Mapping[str, str] = field(default_factory=dict)  # tensors that the map drops, with the reason
    notes: tuple[str, ...] = ()  # rules that matched nothing


def map_weights(catalog: Catalog, key_map: NameMap, *, live: set[str], config: Mapping[str, Any]) -> MappedWeights:
    """Return the weights in `catalog` under the names that the map gives them.

    The optimizer's fp32 masters, and the lower bits that flashoptim stores for weights, are mapped in the same way.

    Args:
        live: The live models' tensor names. If the checkpoint stores a tied weight under only one of its names, the map
            is also applied to the weight's other names. Of these results, only names in `live` are kept.
        config: The model's config, from which the map's rules may take sizes.
    """
    weights = catalog.by_role(Role.MODEL)
    if not weights:
        raise CheckpointNotFoundError("the checkpoint has no model weights that a key map could rename.")
    targets = {name: Target.of(weights[fqn], name) for fqn, name in strip_infixes(weights).items()}
    mapped = key_map.apply(targets, config=config)
    if key_map.rules and len(mapped.unused) == len(key_map.rules):
        names = ", ".join(map(repr, list(targets)[:_SHOWN]))
        raise CheckpointMismatchError(
            f"key map {key_map.name!r} matches none of {len(targets)} weights; nothing was loaded. Examples "
            f"of their names: {names}."
        )
    found = dict(mapped.targets)
    if tied := _tied(catalog, targets):
        both = key_map.apply({**targets, **tied}, config=config).targets
        found.update({name: target for name, target in both.items() if name in live and name not in found})
    if casts := [name for name, target in found.items() if target.dtype != target.source_dtype]:
        raise UnsupportedFormatError(
            f"key map {key_map.name!r} casts {', '.join(casts[:_SHOWN])}, which a load does not support. Remove the "
            "rule. To cast to the live tensors' dtypes, pass convert_dtype=True."
        )
    made = [(entry_of(target, catalog.tensors), target) for target in found.values()]
    for kept in (catalog.by_role(Role.MASTER), lower_bits_of(catalog)):
        by_source = {
            weights[fqn].name: entry
            for fqn, entry in kept.items()
            if fqn in weights and entry.shape == weights[fqn].shape
        }
        beside = {name: _kept_of(target, by_source) for name, target in found.items()} if by_source else {}
        made += [(entry_of(target, catalog.tensors), target) for target in beside.values() if target is not None]
    tensors = {entry.name: entry for entry, _ in made}
    filled = {
        entry.name: tuple(part.target_box for part in target.parts if part.source != NO_SOURCE)
        for entry, target in made
        if target.is_padded
    }
    extra = {key: value for key, value in catalog.info.extra.items() if key != "aliases"}
    notes = tuple(f"key map {key_map.name}: {text} matched nothing" for text in mapped.unused)
    sources = {name: target.sources for name, target in found.items()}
    return MappedWeights(
        Catalog(tensors, {}, replace(catalog.info, extra=extra)), sources, filled, mapped.dropped, notes
    )


def _kept_of(target: Target, kept: Mapping[str, TensorEntry]) -> Target | None:
    """Return a target that is made from the weights' fp32 masters, or from their lower bits, and not from the weights.

    If a weight has no lower bits (flashoptim has none for an expert that was never updated), its region in the target
    is padding. Returns None if no weight is in `kept`, if the tensors in `kept` differ in dtype, or if only some of the
    weights have a master.

    Args:
        target: The tensor that a key map makes from one or several of the checkpoint's weights.
        kept: The fp32 masters, or the lower bits, by the name of the weight.
    """
    found = [kept[source] for source in target.sources if source in kept]
    if len({entry.dtype for entry in found}) != 1:
        return None
    if found[0].role is Role.MASTER and len(found) < len(target.sources):
        return None
    parts = [replace(p, source=kept[p.source].name if p.source in kept else NO_SOURCE) for p in target.parts]
    return replace(target, dtype=found[0].dtype, source_dtype=found[0].dtype, parts=tuple(parts))


def _tied(catalog: Catalog, targets: Mapping[str, Target]) -> dict[str, Target]:
    """Return copies of `targets` for tied weights, under those names that the checkpoint does not store.

    For example, a copy named "lm_head.weight" of the target "model.embed_tokens.weight".
    """
    found: dict[str, Target] = {}
    for section, table in catalog.info.extra.get("aliases", {}).items():
        prefix = f"{section.partition('_')[2]}." if "_" in section else ""
        for name, holder in table.items():
            if prefix + name not in targets and prefix + holder in targets:
                found[prefix + name] = targets[prefix + holder].renamed(prefix + name)
    return found


def entry_of(target: Target, sources: Mapping[str, TensorEntry]) -> TensorEntry:
    """Return a catalog entry for a tensor that a key map makes from parts of other tensors (`sources`).

    The entry's slices refer to the files of `sources`. Each slice has the digest of the stored slice that contains it.
    """
    named = target.sources
    listed = ", ".join(named[:_SHOWN]) + (f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else "")
    only = target.parts[0] if len(target.parts) == 1 else None
    whole = Box.whole(target.shape)
    if only is not None and only.is_plain and only.source_box == whole and sources[named[0]].shape == target.shape:
        slices = sources[named[0]].slices
    else:
        by_source: dict[str, list[Part]] = {}
        for part in target.parts:
            if part.source != NO_SOURCE:
                by_source.setdefault(part.source, []).extend(part.rows() if part.unfold else [part])
        for name in by_source:
            if why := sources[name].slices.opaque:
                raise UnsupportedFormatError(f"tensor {name!r} {why}; a key map can only rename it.")
        found = [piece for name, parts in by_source.items() for piece in _cut(sources[name], parts)]
        slices = SliceArray.of(found, len(target.shape))
    first = sources[named[0]]
    return TensorEntry(
        target.name if named == (target.name,) else f"{target.name} (from {listed})",
        target.source_dtype, target.shape, slices, first.role, target.name, first.state,
    )  # fmt: skip


def _cut(entry: TensorEntry, parts: list[Part]) -> list[TensorSlice]:
    """Return slices that read `parts` of a new tensor from the stored tensor `entry`."""
    ndim, itemsize = len(entry.shape), dtype_of(entry.dtype).itemsize
    offsets = np.array([part.source_box.offsets for part in parts], np.int64).reshape(len(parts), ndim)
    sizes = np.array([part.source_box.sizes for part in parts], np.int64).reshape(len(parts), ndim)
    cut = pieces(entry.slices, offsets, sizes, itemsize)
    found: list[TensorSlice] = []
    rows = zip(cut.boxes.tolist(), cut.rows.tolist(), cut.offsets.tolist(), cut.sizes.tolist(), strict=True)
    for (box, row, at, size), start, stride in zip(rows, cut.starts.tolist(), cut.strides.tolist(), strict=True):
        part, origin = parts[box], entry.slices[row]
        dims = part.source_dims()
        place = tuple(
            begin + (0 if d is None else at[d] - part.source_box.offsets[d])
            for begin, d in zip(part.target_box.offsets, dims, strict=True)
        )
        extent = tuple(1 if d is None else size[d] for d in dims)
        steps = tuple(1 if d is None else stride[d] for d in dims)
        span = 1 + sum((n - 1) * s for n, s in zip(extent, steps, strict=True))
        found.append(
            TensorSlice(
                Box(place, extent), origin.path, start, span * itemsize,
                None if contiguous_strides(extent, steps) else steps, origin.digest, origin.codec, origin.rank,
            )
        )  # fmt: skip
    return found
