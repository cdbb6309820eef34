"""Compares the tensors and other values of two checkpoints, streamed in bounded memory."""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.arguments import Location, globs, location
from ckptkit.catalog.box import Box
from ckptkit.catalog.casts import float_values
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import ObjectEntry, Role, TensorEntry
from ckptkit.checkpoint.state.values import references
from ckptkit.digests import proves_equality
from ckptkit.errors import CheckpointMismatchError, CkptkitError, IncompleteCheckpointError, UsageError, command_line
from ckptkit.formats.dcp.class_records import recipes_of
from ckptkit.formats.dcp.subclasses import SEPARATOR, SUBCLASSES, Recipe, describe, outer_name, same_recipe
from ckptkit.formats.detect import Source
from ckptkit.formats.models import tied_entries
from ckptkit.formats.pickles.objects import Inert, TensorValue, read_object
from ckptkit.formats.sources import EntryMap, Origins, SourceReader
from ckptkit.gc_pause import collector_paused
from ckptkit.keymaps.wrappers import strip_infixes
from ckptkit.offline.export.base import beside_source
from ckptkit.offline.export.tied import config_ties, tied_pairs
from ckptkit.offline.reading import open_pinned, reads_checkpoints, records_of
from ckptkit.offline.report import plain
from ckptkit.offline.verify import file_problems
from ckptkit.storage.store import ReadInto
from ckptkit.units import counted, parse_size

SCHEMA = "ckptkit.diff/1"
_TILE = 4 << 20  # bytes read at a time from each side
_SMALL = 256 << 10  # smaller tensors are read together
_SHOWN = 10  # maximum number of differing paths to list per value
_RANDOM = re.compile(r"(?:rng|random)(?:_states?)?(?:[._]\d+)?(?:\.\w+)?(?!\w)")  # "rng.0.torch", "random_states_0"
_COMPLEX = {"complex32": np.float16, "complex64": np.float32, "complex128": np.float64}

Progress = Callable[[int, int, str], None]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """The difference between two tensors of the same name.

    Attributes:
        name: "lm_head.weight" (a weight's FQN), "master: <fqn>", "optimizer: <fqn> exp_avg", or the catalog key.
        elements: Number of elements whose bits differ. If the dtypes differ, the number of elements whose values
            differ.
        max_abs: The maximum of |a - b|. Complex numbers are compared by component. None if ckptkit cannot compute with
            the dtype.
        max_rel: `max_abs` divided by the maximum of |a|. Infinite if this maximum is 0.
        cosine: Cosine similarity of the two tensors as vectors. None if all elements of a tensor are zero.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    elements: int
    max_abs: float | None
    max_rel: float | None
    cosine: float | None
    sums: tuple[float, float, float] = (0.0, 0.0, 0.0)  # a.b, a.a, b.b, from which a layer's cosine is computed


@dataclass(frozen=True, slots=True)
class LayerDiff:
    """The differences in one layer or optimizer state, over all its tensors that differ.

    `max_abs` and `max_rel` are the largest values of these tensors. For `cosine`, the tensors are concatenated to one
    vector.
    """

    tensors: int
    elements: int
    max_abs: float | None
    max_rel: float | None
    cosine: float | None


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The result of `diff`. docs/json.md explains more fields.

    Attributes:
        values: The differing values that are not tensors. Maps a path ("optimizer.param_groups[0].lr") to both values
            as text.
        random: The random number generators whose states differ ("rng.0.torch").
        left_out: The names that were not compared, because one of the checkpoints contains only weights.
        lack: What one of the checkpoints lacks, in words: "B has only weights" or "B has no optimizer". "" if neither
            applies.
        notes: Hints for the user, for example that a glob matches nothing.
    """

    a: str
    b: str
    same: int  # tensors that are bit-equal
    by_digest: int  # how many of `same` were compared only by their recorded digests
    different: tuple[TensorDiff, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    changes: Mapping[str, float] = field(default_factory=dict)  # relative change of each compared tensor; 0.0 if equal
    values: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    same_values: int = 0  # equal objects, such as a step or optimizer settings
    random: tuple[str, ...] = ()
    weights: int = 0  # weights of either checkpoint
    same_weights: int = 0  # how many of `weights` are in both checkpoints and bit-equal
    left_out: tuple[str, ...] = ()
    lack: str = ""
    records: Mapping[str, str] = field(default_factory=dict)  # tensors of unknown classes -> how they differ
    by_record: int = 0  # how many of `same` have unknown classes and were compared byte for byte
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether any difference was found."""
        of_both = (self.different, self.shapes, self.dtypes, self.values, self.random, self.records)
        return any(of_both) or bool(self.only_a or self.only_b)

    @property
    def equal(self) -> bool:
        """Whether all names, shapes, dtypes, bits and values were compared and are equal."""
        return not self.differs and not self.left_out

    def summary(self) -> str:
        """Return one line that summarizes the result."""
        values = f" and {counted(self.same_values, 'value')}" if self.same_values else ""
        entries = "1 other entry" if len(self.left_out) == 1 else f"{len(self.left_out)} other entries"
        skipped = f"not compared: {entries}, because {self.lack}"
        if not self.differs:
            digests = f" ({self.by_digest} of them by recorded digest only; `verify` reads the bytes)"
            records = f" ({self.by_record} of them of unknown classes, compared byte for byte)"
            told = digests * bool(self.by_digest) + records * bool(self.by_record)
            what = f"{counted(self.same, 'tensor')}{values}, names, shapes, dtypes and bits{told}"
            return f"equal weights: {what}; {skipped}" if self.left_out else f"equal: {what}"
        counts = {"tensor": len(self.different), "value": len(self.values), "random state": len(self.random)}
        differ = [counted(n, what) for what, n in counts.items() if n]
        verb = "differs" if sum(counts.values()) == 1 else "differ"
        found = {
            "only in A": len(self.only_a),
            "only in B": len(self.only_b),
            "in shape": len(self.shapes),
            "in dtype": len(self.dtypes),
            "in the bytes of tensors of unknown classes": len(self.records),
        }
        different = [f"{' and '.join(', '.join(differ).rsplit(', ', 1))} {verb}"] if differ else []
        different += [f"{n} {what}" for what, n in found.items() if n]
        parts = [f"different: {', '.join(different)}", f"equal: {counted(self.same, 'tensor')}{values}"]
        if self.weights and self.weights == self.same_weights and not self.records:
            parts.append(f"all {self.weights} weights are equal" if self.weights > 1 else "the only weight is equal")
        if self.lack:
            parts.append(skipped if self.left_out else self.lack)
        return "; ".join(parts)

    def layers(self) -> dict[str, LayerDiff]:
        """Return the differences by model layer and by optimizer state.

        The model's layers come before the optimizer's states. In both groups, the largest change comes first. A model
        tensor outside of the layers has its own entry.
        """
        from ckptkit.offline.pictures.heat_map import layer_of

        def largest(values: Iterable[float | None]) -> float | None:
            return max((value for value in values if value is not None), key=_order, default=None)

        found: dict[tuple[int, str], list[TensorDiff]] = {}
        for item in self.different:
            found.setdefault(layer_of(item.name), []).append(item)
        layers: dict[tuple[int, str], LayerDiff] = {}
        for key, items in found.items():
            elements = sum(item.elements for item in items)
            max_abs, max_rel = largest(item.max_abs for item in items), largest(item.max_rel for item in items)
            dot, norm_a, norm_b = (_sum([item.sums[i] for item in items]) for i in range(3))
            layers[key] = LayerDiff(len(items), elements, max_abs, max_rel, _cosine((dot, norm_a, norm_b)))
        ordered = sorted(layers.items(), key=lambda pair: (pair[0][0], -_order(pair[1].max_rel)))
        return {name: layer for (_, name), layer in ordered}

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values (schema "ckptkit.diff/1"). NaN and infinity become strings."""
        document = {**plain(self), "equal": self.equal, "layers": plain(self.layers())}
        del document["changes"]
        for row in document["different"]:
            del row["sums"]
        return {"schema": SCHEMA, **document}


@reads_checkpoints
def diff(
    a: Location,
    b: Location,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    max_memory: str | int = "512MB",
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> DiffReport:
    """Compare the checkpoints at `a` and `b`, tensor by tensor and value by value. Formats and shardings may differ.

    Weights are matched by FQN (with or without the parts that wrappers such as DDP add), optimizer states by parameter
    and state name, and all other entries by key. If one checkpoint contains only weights, only weights are compared,
    and `left_out` lists the other entries. If both checkpoints record digests of a tensor, the digests are compared.
    Otherwise, the tensor is read and compared piece by piece.

    Args:
        include: Globs of the names to compare. Empty means all names.
        exclude: Globs of the names to skip.
        max_memory: Maximum tensor data in memory: bytes, or a string such as "512MB".
        storage_options: Options for the fsspec file systems of both URLs.
        progress: Called with (bytes compared, bytes in all, name of the last tensor).

    Raises:
        UsageError: `include` and `exclude` leave nothing to compare.
        CheckpointNotFoundError: A URL contains no checkpoint.
        IncompleteCheckpointError: A file is missing or does not have its recorded size.
    """
    names = NameFilter(globs("include", include), globs("exclude", exclude))
    urls = (location("a", a), location("b", b))
    sides = _unwrapped([_Side.open(url, max_memory, storage_options) for url in urls])
    try:
        return _compare(sides[0], sides[1], names, progress)
    finally:
        for side in sides:
            side.reader.close()


@dataclass(frozen=True, slots=True)
class NameFilter:
    """Accepts names that match a glob in `include` (any name if `include` is empty) and no glob in `exclude`."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    _used: set[str] = field(default_factory=set)  # the globs that have matched a name

    def __call__(self, *names: str) -> bool:
        """Return whether to compare a tensor that has the names `names` (such as the FQN and the key)."""

        def matches(patterns: Sequence[str]) -> bool:
            found = {pattern for pattern in patterns if any(fnmatch.fnmatchcase(name, pattern) for name in names)}
            self._used.update(found)
            return bool(found)

        excluded = matches(self.exclude)
        return (not self.include or matches(self.include)) and not excluded

    def notes(self) -> tuple[str, ...]:
        """Return a note for each glob that has matched no name."""
        options = {"--include": self.include, "--exclude": self.exclude}
        return tuple(
            f"{option} {glob!r} matches no tensor or value"
            for option, globs in options.items() for glob in globs if glob not in self._used
        )  # fmt: skip

    def __str__(self) -> str:
        given = [*(f"--include {x!r}" for x in self.include), *(f"--exclude {x!r}" for x in self.exclude)]
        return " and ".join(given)


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two compared checkpoints. `tensors` is keyed by the names under which tensors are compared."""

    source: Source
    tensors: Mapping[str, TensorEntry]
    opaque: Mapping[str, str]  # tensors that can only be read with their class: key -> the reason
    small: Mapping[str, Sequence[tuple[str, int, int]] | None]  # the `_pieces` of small tensors
    reader: SourceReader
    maps: Mapping[str, EntryMap]  # of the tensors without `_pieces`

    @classmethod
    @collector_paused()
    def open(cls, url: str, max_memory: str | int, storage_options: Mapping[str, Any] | None) -> _Side:
        source = open_pinned(url, storage_options=storage_options)
        committed = "digests" in source.catalog.info.extra  # in other formats, reading detects a missing file
        for problem in file_problems(source.store, source.catalog) if committed else ():
            raise IncompleteCheckpointError(problem.message)
        opaque = source.catalog.opaque()
        readable = [entry for name, entry in source.catalog.tensors.items() if name not in opaque]
        small = {entry.name: _pieces(entry) for entry in readable if entry.nbytes <= _SMALL}
        origins = Origins()
        maps = {
            entry.name: EntryMap(entry, origins.of(entry.slices), np.full(len(entry.slices), -1, np.int64))
            for entry in readable
            if small.get(entry.name) is None
        }
        memory = parse_size(max_memory, "max_memory")
        reader = SourceReader(source.store, origins.all, span=max(1 << 20, memory // 4))
        return cls(source, _named(readable), opaque, small, reader, maps)

    def read(self, entries: Sequence[TensorEntry]) -> tuple[Bytes, list[int]]:
        """Return the concatenated bytes of small tensors, and the offsets at which the tensors end.

        Tensors that are adjacent in a file are read together, because there may be 300,000 tensors of a few bytes.
        """
        sizes = [entry.nbytes for entry in entries]
        ends = list(itertools.accumulate(sizes))
        data = np.empty(ends[-1] if ends else 0, np.uint8)
        runs: list[tuple[str, int, int, int]] = []  # (file, offset in the file, start and end in `data`)
        path, at, first, last = "", 0, 0, 0
        for entry, size, end in zip(entries, sizes, ends, strict=True):
            parts, stop = self.small[entry.name], end - size
            if parts is None:
                self.reader.read_box(self.maps[entry.name], Box.whole(entry.shape), data[end - size : end])
                continue
            for file, start, nbytes in parts:
                if (file, start) == (path, at + last - first) and last == stop:
                    last = stop = stop + nbytes
                else:
                    runs.append((path, at, first, last))
                    path, at, first = file, start, stop
                    last = stop = stop + nbytes
        runs.append((path, at, first, last))
        reads = [ReadInto(path, at, data[first:last].data) for path, at, first, last in runs if last > first]
        if reads:
            self.source.store.read_many(reads)
        return data, ends


def _pieces(entry: TensorEntry) -> Sequence[tuple[str, int, int]] | None:
    """Return a tensor's bytes as consecutive ranges (file, offset, size).

    Returns ranges for a contiguous tensor, and for a tensor that is split along dimension 0 into slices that are listed
    in order. Returns None for any other tensor.
    """
    slices, shape, at = entry.slices, entry.shape, 0
    if slices.strides or slices.codecs:
        return None
    if slices.is_all_of(shape) or len(slices) == 1:
        record = slices.byte_range(0)
        return [record] if record[2] == entry.nbytes else None
    records = slices.byte_ranges()
    for offsets, sizes, (_, _, nbytes) in zip(slices.offsets.tolist(), slices.sizes.tolist(), records, strict=True):
        if not shape or offsets != [at, *[0] * (len(shape) - 1)] or tuple(sizes[1:]) != shape[1:]:
            return None
        at += sizes[0]
        if nbytes * shape[0] != entry.nbytes * sizes[0]:
            return None
    return records if records and at == shape[0] else None


def _named(entries: Iterable[TensorEntry], short: Mapping[str, str] = {}) -> dict[str, TensorEntry]:
    """Return the tensors by the name under which they are compared. `short` maps FQNs to FQNs without wrappers."""
    found: dict[str, TensorEntry] = {}
    for entry in entries:
        name, fqn = entry.name, short.get(entry.fqn, entry.fqn)
        if entry.role is Role.MODEL:
            name = fqn
        elif entry.role is Role.MASTER:
            name = f"master: {fqn}"
        elif entry.role is Role.OPTIMIZER and fqn:
            name = f"optimizer: {fqn} {entry.state}"
        found[name if name not in found else entry.name] = entry
    return found


def _unwrapped(sides: Sequence[_Side]) -> Sequence[_Side]:
    """Name the tensors of both sides without the parts that wrappers add, if then more weights have the same names."""
    weights = [{e.fqn for e in side.tensors.values() if e.role is Role.MODEL} for side in sides]
    if weights[0] <= weights[1] or weights[1] <= weights[0]:
        return sides
    try:
        short = [strip_infixes(names) for names in weights]
    except CheckpointMismatchError:  # two names would become equal
        return sides
    if len({*short[0].values()} & {*short[1].values()}) <= len(weights[0] & weights[1]):
        return sides
    return [
        replace(side, tensors=_named(side.tensors.values(), names)) for side, names in zip(sides, short, strict=True)
    ]


def _compare(a: _Side, b: _Side, wanted: NameFilter, progress: Progress | None) -> DiffReport:
    opaque = {*a.opaque, *b.opaque}
    recipes, other_recipes = (recipes_of(side.source.catalog) for side in (a, b))
    apart = {*opaque, SUBCLASSES} if recipes or other_recipes else opaque  # recipes are compared with their tensors
    left, right = _with_tied(a, b), _with_tied(b, a)
    chosen = left.keys() | right.keys()
    if wanted.include or wanted.exclude:
        # Globs may match the names that are compared, or the names that `inspect` shows for either side.
        shown = {name: [name] for name in chosen}
        for name, entry in (*left.items(), *right.items()):
            if entry.role is not Role.MODEL or entry.name.endswith(name):  # not the other name of a tied tensor
                shown[name].append(entry.name)
        chosen = {name for name, known in shown.items() if wanted(*known)}
    left, right = ({n: e for n, e in side.items() if n in chosen and e.name not in opaque} for side in (left, right))
    values, others = (
        {n: e for n, e in side.source.catalog.objects.items() if wanted(n) and n not in apart} for side in (a, b)
    )
    trees = {n for n, e in values.items() if e.role is Role.OPTIMIZER and n in others and "." not in n}
    held = {key for name in trees for side in (values, others) for key in references(side[name].value)}
    left, right = (
        {n: e for n, e in side.items() if e.fqn or e.name in held or not _is_part(n, trees)} for side in (left, right)
    )
    values, others = ({n: e for n, e in side.items() if not _is_part(n, trees)} for side in (values, others))
    records, by_record = _compare_records(a, b, wanted)
    left_out: tuple[str, ...] = ()
    lack = _lack((left, values), (right, others))
    if _weights_alone(left, values) or _weights_alone(right, others):
        named = [n for side in (left, right) for n, entry in side.items() if entry.role is not _WEIGHTS]
        named += [n for side in (values, others) for n, item in side.items() if item.role is not _WEIGHTS]
        left, right = ({n: e for n, e in side.items() if e.role is _WEIGHTS} for side in (left, right))
        kept = {n for n, e in (*values.items(), *others.items()) if e.role is _WEIGHTS} | (
            values.keys() & others.keys()
        )
        left_out = tuple(n for n in dict.fromkeys(named) if n not in kept)
        lack = lack if left_out else ""
        values, others = ({n: e for n, e in side.items() if n in kept} for side in (values, others))
    if not (left or right or values or others or records or by_record):
        line = command_line("inspect", a.source.url, "--tensors", "*")
        raise UsageError(f"nothing to compare: no tensor is left after {wanted}. See the names with: {line}")
    weights = {name for side in (left, right) for name, entry in side.items() if entry.role is _WEIGHTS}
    both = [name for name in left if name in right]
    shapes = {n: (left[n].shape, right[n].shape) for n in both if left[n].shape != right[n].shape}
    dtypes = {n: (left[n].dtype, right[n].dtype) for n in both if left[n].dtype != right[n].dtype}
    both = [name for name in both if name not in shapes]
    sizes = {n: max(left[n].nbytes, right[n].nbytes) for n in both}  # computed once, because there may be 300,000
    total = sum(sizes.values())
    done = same = by_digest = 0
    different: list[TensorDiff] = []
    changes: dict[str, float] = {}
    for names in _batches(sizes):
        known = {name for name in names if _same_digests(left[name], right[name])}
        rest = {name: sizes[name] for name in names if name not in known}
        for name, found in _compared(rest, (a, left), (b, right)):
            if found is not None:
                different.append(found)
                changes[name] = math.inf if found.max_rel is None else found.max_rel
            else:
                changes[name] = 0.0
                same += name not in dtypes
        same, by_digest = same + len(known), by_digest + len(known)
        changes.update(dict.fromkeys(known, 0.0))
        done += sum(sizes[name] for name in names)
        if progress is not None:
            progress(done, total, names[-1])
    shared = [name for name in values if name in others]
    unequal = {name: _value_differences(name, (a, values[name]), (b, others[name])) for name in shared}
    same_values = sum(not found for found in unequal.values())
    random = [state for item in different if (state := _random_state(item.name, left[item.name]))]
    random += [state for name in shared if _random_state(name, values[name]) for state in unequal.pop(name)]
    pairs = {name: (left[name].name, right[name].name) for name in both}
    unequal[SUBCLASSES] = _recipe_differences(pairs, recipes, other_recipes)
    return DiffReport(
        a.source.url, b.source.url, same + by_record, by_digest,
        tuple(item for item in different if not _random_state(item.name, left[item.name])),
        only_a=_only_in((left, right), (values, others)), only_b=_only_in((right, left), (others, values)),
        shapes=shapes, dtypes=dtypes,
        changes={name: changes[name] for name in both if not _random_state(name, left[name])},
        values={place: texts for found in unequal.values() for place, texts in found.items()},
        random=tuple(dict.fromkeys(random)), same_values=same_values, weights=len(weights),
        same_weights=sum(changes.get(name) == 0.0 and name not in dtypes for name in weights),
        left_out=left_out, lack=lack, records=records, by_record=by_record, notes=wanted.notes(),
    )  # fmt: skip


def _random_state(name: str, entry: TensorEntry | ObjectEntry) -> str:
    """Return the generator, such as "rng.0.torch", whose state contains this tensor or value.

    Returns "" if the tensor or value does not belong to a random state.
    """
    match = _RANDOM.match(name) if entry.role is Role.OTHER else None
    return match[0] if match else ""


def _with_tied(side: _Side, other: _Side) -> dict[str, TensorEntry]:
    """Return the tensors of `side`. Each tensor is returned under all names that it has in `other`.

    FULL and LOCAL checkpoints store tied tensors only once, under one name. Hugging Face models have no head if their
    config ties it to the embedding.
    """
    recorded = {entry.fqn: entry for entry in tied_entries(side.source.catalog).values()}
    found = dict(side.tensors) | {n: e for n, e in recorded.items() if n in other.tensors and n not in side.tensors}
    if all(map(found.__contains__, other.tensors)):
        return found
    shapes = {name: entry.shape for name, entry in other.tensors.items() if entry.role is Role.MODEL}
    pairs = [(head, kept) for head, kept in tied_pairs(shapes) if head not in found and kept in found]
    config = beside_source(side.source.store, side.source.catalog).config if pairs else None
    if config and config_ties(config) is not False:
        found |= {head: replace(found[kept], fqn=head) for head, kept in pairs}
    return found


def _is_part(name: str, trees: Collection[str]) -> bool:
    """Return whether the name starts with the name of an object in `trees` and a ".", like a value in this object.

    SHARDED checkpoints store an optimizer's settings twice: as one object, and as separate values for torch.
    """
    tree, dot, _ = name.partition(".")
    return bool(dot) and tree in trees


def _only_in(*sides: tuple[Mapping[str, Any], Mapping[str, Any]]) -> tuple[str, ...]:
    """Return, for each pair of mappings, the names that only the first mapping contains."""
    return tuple(name for one, other in sides for name in one if name not in other)


def _compare_records(a: _Side, b: _Side, wanted: NameFilter) -> tuple[dict[str, str], int]:
    """Compare tensors of unknown Python classes by their stored bytes.

    Returns the differences, and the number of equal tensors.
    """
    differ, same = {}, 0
    for name in dict.fromkeys([*a.opaque, *b.opaque]):
        if not wanted(name, name.partition(".")[2]):
            continue
        kinds = [side.opaque.get(name, "") for side in (a, b)]
        if "" in kinds:
            where = "AB"[kinds.index("")]
            there = name in (a, b)[kinds.index("")].source.catalog.tensors
            differ[name] = f"{max(kinds)}; in {where} it {'is not' if there else 'is missing'}"
        elif kinds[0] != kinds[1]:
            differ[name] = f"{kinds[0]} in A, {kinds[1]} in B"
        elif any(x != y for x, y in itertools.zip_longest(_stored(a, name), _stored(b, name))):
            differ[name] = f"{kinds[0]}, and the bytes of its records differ"
        else:
            same += 1
    return differ, same


def _stored(side: _Side, name: str) -> Iterator[Any]:
    """Yield a tensor's dtype, shape and slices, then the sizes of its records, and then their bytes, tile by tile."""
    entry = side.source.catalog.tensors.get(name)
    yield None if entry is None else (entry.dtype, entry.shape, entry.slices.offsets.tolist())
    records = records_of(side.source.catalog, name)
    yield [nbytes for _, _, nbytes in records]
    for path, start, nbytes in records:
        for at in range(start, start + nbytes, _TILE):
            yield side.source.store.read(path, at, min(at + _TILE, start + nbytes))


_WEIGHTS = Role.MODEL


def _weights_alone(tensors: Mapping[str, TensorEntry], objects: Mapping[str, ObjectEntry]) -> bool:
    """Return whether a checkpoint has only weights. Ignores the step, which an export may have, too."""
    return _roles(tensors, {name: item for name, item in objects.items() if name != "step"}) <= {_WEIGHTS}


def _roles(tensors: Mapping[str, TensorEntry], objects: Mapping[str, ObjectEntry]) -> set[Role]:
    return {entry.role for entry in tensors.values()} | {item.role for item in objects.values()}


def _lack(*sides: tuple[Mapping[str, TensorEntry], Mapping[str, ObjectEntry]]) -> str:
    """Return what one of the checkpoints lacks, in words, such as "B has only weights" or "B has no optimizer".

    If both have only weights, the result names B if B has no step, and otherwise A. If both have more than weights, but
    only one has an optimizer, the result names the one without an optimizer. In all other cases, returns "".
    """
    alone = [_weights_alone(*side) for side in sides]
    if any(alone):  # if both have only weights, name the one without a step
        return f"{'AB'[alone[1] and (not alone[0] or 'step' not in sides[1][1])]} has only weights"
    lacking = [Role.OPTIMIZER not in _roles(*side) for side in sides]
    return f"{'AB'[lacking[1]]} has no optimizer" if any(lacking) and not all(lacking) else ""


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield batches of names, in order. Small tensors share a batch. `sizes` maps names to sizes in bytes."""
    batch: list[str] = []
    held = 0
    for name, nbytes in sizes.items():
        if batch and (nbytes > _SMALL or held + nbytes > _TILE):
            yield batch
            batch, held = [], 0
        batch.append(name)
        held += nbytes
    if batch:
        yield batch


def _compared(
    sizes: Mapping[str, int], a: tuple[_Side, Mapping[str, TensorEntry]], b: tuple[_Side, Mapping[str, TensorEntry]]
) -> Iterator[tuple[str, TensorDiff | None]]:
    """Yield (name, difference) for each tensor of a batch. The difference is None if the tensors are equal."""
    (first, left), (second, right) = a, b
    small = [name for name, nbytes in sizes.items() if nbytes <= _SMALL]
    for name in sizes.keys() - set(small):  # at most one, which is alone in its batch (see _batches)
        found = _Comparison(name, left[name], right[name])
        found.read(first, second)
        yield name, found.result()
    mine, theirs = [left[name] for name in small], [right[name] for name in small]
    (x, ends), (y, other_ends) = first.read(mine), second.read(theirs)
    if [entry.dtype for entry in mine] == [entry.dtype for entry in theirs] and np.array_equal(x, y):
        yield from zip(small, itertools.repeat(None))
    else:
        cuts = itertools.pairwise([0, *ends]), itertools.pairwise([0, *other_ends])
        for name, (start, stop), (begin, end) in zip(small, *cuts, strict=True):
            found = _Comparison(name, left[name], right[name])
            if left[name].dtype != right[name].dtype or not np.array_equal(x[start:stop], y[begin:end]):
                found.add(x[start:stop], y[begin:end])
            yield name, found.result()


# --- objects other than tensors


def _value_differences(
    name: str, a: tuple[_Side, ObjectEntry], b: tuple[_Side, ObjectEntry]
) -> dict[str, tuple[str, str]]:
    """Return the paths at which two objects of the same name differ, each with both values as text.

    Runs no code from the checkpoints.
    """
    told = [
        (e.encoding, e.codec, e.digest.value, e.digest.nbytes)
        for _, e in (a, b)
        if e.digest is not None and proves_equality(e.digest.algorithm)
    ]
    if len(told) == 2 and told[0] == told[1]:
        return {}
    one, other = (read_object(side.source.store, entry, allow_pickle=True) for side, entry in (a, b))
    places = list(_differing(name, one, other))
    if _random_state(name, a[1]):  # the numbers of a random state would tell the user nothing
        return {_random_state(place, a[1]) or name: ("", "") for place, _ in places}
    found = {place: (x, y if x != y else "another value") for place, (x, y) in places[:_SHOWN]}
    if len(places) > _SHOWN:
        found[f"{name} ({len(places) - _SHOWN} more places)"] = ("...", "...")
    return found


def _recipe_differences(
    names: Mapping[str, tuple[str, str]], ours: Mapping[str, Recipe], theirs: Mapping[str, Recipe]
) -> dict[str, tuple[str, str]]:
    """Compare how the two checkpoints build tensors of subclasses from inner tensors. Return the differences.

    A recipe says how an outer tensor consists of its inner tensors. Returns outer name -> both recipes as text.

    Args:
        names: Maps each compared name to the tensor's names in the two catalogs.
    """
    if not ours and not theirs:
        return {}
    found = {}
    for name, (one, other) in names.items():
        a, b = ours.get(outer_name(one, ours)), theirs.get(outer_name(other, theirs))
        if not same_recipe(a, b):
            found[name.rpartition(SEPARATOR)[0] or name] = (describe(a), describe(b))
    return found


def _differing(place: str, x: Any, y: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the paths at which two decoded values differ. Numbers differ if their types or bits differ."""
    if type(x) is not type(y):
        yield place, (_text(x), _text(y))
    elif isinstance(x, dict) and (x.keys() | y.keys()) == {"$tensor"}:
        if x != y:
            yield place, (_text(x), _text(y))
    elif isinstance(x, dict):
        for key in dict.fromkeys((*x, *y)):
            inside = place if str(key).startswith("$") else f"{place}.{key}"  # "$tuple" says how a value is encoded
            if key in x and key in y:
                yield from _differing(inside, x[key], y[key])
            else:
                yield inside, (_text(x[key]) if key in x else "nothing", _text(y[key]) if key in y else "nothing")
    elif isinstance(x, (list, tuple)):
        if len(x) != len(y):
            yield place, (f"{len(x)} items", f"{len(y)} items")
        for index, (one, other) in enumerate(zip(x, y, strict=False)):
            yield from _differing(f"{place}[{index}]", one, other)
    elif isinstance(x, Inert):
        yield from _differing(
            place, (x.kind, x.args, dict(x.fields), list(x.items)), (y.kind, y.args, dict(y.fields), list(y.items))
        )
    elif isinstance(x, np.ndarray):
        if (x.dtype, x.shape) != (y.dtype, y.shape) or x.tobytes() != y.tobytes():
            yield place, (_text(x), _text(y))
    elif repr(x) != repr(y) if isinstance(x, (float, complex)) else x != y:  # repr: NaN equals NaN, -0.0 is not 0.0
        yield place, (_text(x), _text(y))


def _text(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {"$tensor"}:  # a small tensor in one of ckptkit's JSON files
        with contextlib.suppress(CkptkitError, LookupError, TypeError, ValueError):
            body = value["$tensor"]
            value = TensorValue(body["dtype"], tuple(body["shape"]), base64.b64decode(body["data"]))
    if isinstance(value, np.ndarray):
        value = TensorValue(value.dtype.name, value.shape, value.tobytes())
    if isinstance(value, TensorValue):
        with contextlib.suppress(CkptkitError, LookupError, TypeError, ValueError):
            numbers = _numbers(np.frombuffer(value.data, np.uint8), value.dtype) if not value.shape else None
            if numbers is not None:
                return f"{' '.join(f'{number:.9g}' for number in numbers)} ({value.dtype})"
        return f"{value.dtype} of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _same_digests(x: TensorEntry, y: TensorEntry) -> bool:
    """Return whether both tensors have the same slices, with equal digests."""
    p, q = x.slices, y.slices
    if x.dtype != y.dtype or p.algorithm != q.algorithm or not proves_equality(p.algorithm) or len(p) != len(q):
        return False
    if p.strides or q.strides or p.digests is None or q.digests is None or p.digest_starts is not None:
        return False
    rows = [np.lexsort(s.offsets.T) if s.offsets.shape[1] else np.arange(len(s)) for s in (p, q)]
    columns = [(p.offsets, q.offsets), (p.sizes, q.sizes), (p.digests, q.digests)]
    return all(np.array_equal(one[rows[0]], other[rows[1]]) for one, other in columns)


class _Comparison:
    """Compares two tensors tile by tile, and accumulates the result."""

    def __init__(self, name: str, a: TensorEntry, b: TensorEntry) -> None:
        self.name, self.a, self.b = name, a, b
        self.elements = 0
        self.max_abs = self.max_a = 0.0
        self.dot = self.norm_a = self.norm_b = 0.0
        self.counted = False

    def read(self, first: _Side, second: _Side) -> None:
        """Compare the two tensors completely, tile by tile."""
        sizes = [dtype_of(entry.dtype).itemsize for entry in (self.a, self.b)]
        for box in Box.whole(self.a.shape).tiles(_TILE // max(sizes)):
            x, y = (np.empty(box.numel * size, np.uint8) for size in sizes)
            first.reader.read_box(first.maps[self.a.name], box, x)
            second.reader.read_box(second.maps[self.b.name], box, y)
            self.add(x, y)

    def result(self) -> TensorDiff | None:
        """Return the difference, or None if all bits are equal."""
        if not self.elements:
            return None
        sums, dtypes = (self.dot, self.norm_a, self.norm_b), (self.a.dtype, self.b.dtype)
        if not self.counted:
            return TensorDiff(self.name, self.a.shape, dtypes, self.elements, None, None, None, sums)
        max_rel = self.max_abs / self.max_a if self.max_a else math.inf
        return TensorDiff(self.name, self.a.shape, dtypes, self.elements, self.max_abs, max_rel, _cosine(sums), sums)

    def add(self, x: Bytes, y: Bytes) -> None:
        """Compare a non-empty tile of the first tensor with the same tile of the second."""
        u, v = _numbers(x, self.a.dtype), _numbers(y, self.b.dtype)
        self.counted = u is not None and v is not None and len(u) == len(v)
        if u is not None and v is not None and self.counted and self.a.dtype != self.b.dtype:
            unequal = ~((u == v) | (np.isnan(u) & np.isnan(v)))
        elif len(x) == len(y):
            size = dtype_of(self.a.dtype).itemsize
            unequal = (x.reshape(-1, size) != y.reshape(-1, size)).any(axis=1)
        else:
            unequal = np.ones(1, bool)
        self.elements += int(np.count_nonzero(unequal))
        if u is None or v is None or not self.counted:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            if self.a.dtype == self.b.dtype and self.a.dtype in ("int64", "uint64"):  # float64 would round them
                i, j = (data.view(np.dtype(self.a.dtype)) for data in (x, y))
                gap = (np.maximum(i, j).view(np.uint64) - np.minimum(i, j).view(np.uint64)).astype(np.float64)
            else:
                gap = np.abs(u - v)
                gap[(np.isnan(u) & np.isnan(v)) | (u == v)] = 0.0
            largest = float(gap.max(initial=0.0))
            self.max_abs = max(self.max_abs, math.inf if math.isnan(largest) else largest)
            self.max_a = max(self.max_a, float(np.fmax.reduce(np.abs(u), initial=0.0)))
            self.dot += float(u @ v)
            self.norm_a += float(u @ u)
            self.norm_b += float(v @ v)


def _sum(values: Sequence[float]) -> float:
    """Return the exact sum. Also accepts infinities, and sums that are too large for a float."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # of infinities with different signs
        return sum(values)


def _cosine(sums: tuple[float, float, float]) -> float | None:
    norm = math.sqrt(sums[1]) * math.sqrt(sums[2])
    return sums[0] / norm if norm else None


def _order(value: float | None) -> float:
    """Return the sort key of a change. None and NaN are larger than any number."""
    return math.inf if value is None or math.isnan(value) else value


def _numbers(data: Bytes, name: str) -> npt.NDArray[np.float64] | None:
    """Return the elements as float64 (two per complex number). Returns None for unsupported dtypes (4-bit floats)."""
    if name in _COMPLEX:
        return data.view(_COMPLEX[name]).astype(np.float64)
    if dtype_of(name).kind in ("int", "bool"):
        return data.view(np.dtype(name)).astype(np.float64)
    return float_values(data, name).astype(np.float64, copy=False) if dtype_of(name).bits >= 8 else None
