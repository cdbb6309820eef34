"""Which tensors of a state are those of the save before, where they were. Told column by column, by calls that take all
tensors at once: one that looks at a tensor after the other takes longer than copying them."""

from __future__ import annotations

import operator
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, compress, count, repeat
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptkit.errors import SaveError
from ckptkit.formats.dcp.host_bytes import are_dense

__all__ = ["Flattened", "Kinds", "Places", "flat_values"]

Path = tuple[str | int, ...]
_FEW = 16  # to go through as many one by one is faster than to set up what takes all
_MOVED = 64  # so many may be such as move at every save
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_TENSORS = _PLAIN | {DTensor}
_local_of = operator.attrgetter("_local_tensor")
_is_contiguous = torch.Tensor.is_contiguous
_STRINGS = frozenset((str,))
_spec_of = operator.attrgetter("_spec")
_mesh_of = operator.attrgetter("mesh")
_placements_of = operator.attrgetter("placements")
_meta_of = operator.attrgetter("tensor_meta")
_shape_of = operator.attrgetter("shape")
_dtype_of = operator.attrgetter("dtype")
_is_cpu = operator.attrgetter("is_cpu")
_meta_shape, _meta_dtype = operator.itemgetter(0), operator.itemgetter(2)
Looks = tuple[Any, ...]
"""What must stay the same of a value for a plan to be reused, and is the same of all tensors that are cut alike: dtype
and shape; of a DTensor also mesh and placements; of a ShardedTensor dtype, shape and boxes; nothing of an object."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the tensors of a flat state were, and how they were cut.

    `p.data = ...`, `set_`, `resize_` and `t_` leave a tensor what it is, and put it elsewhere or otherwise; so do new
    `_local_tensor`s. Whoever keeps this keeps the memory of its tensors: no other tensor gets their addresses.

    Attributes:
        rows: Of each tensor that can be told to be the same, where it stands; DTensors first.
        anew: Where tensors stand that must be looked at anew at each save: subclasses, sparse ones, and such as moved
            before (generators give their state as a new tensor each time).
        specs: What says how the DTensors are cut.
        memory: The local part of each of `rows`.
        columns: What else must be the same.
        near: Of which of `memory` it matters where it lies, and in which order: others have views of it. What is taken
            from the tensor itself is where that is. `spots`: where these lay.
        on_host: All DTensors lay there.
        odd: Which of `memory` could be seen as negative, or conjugate, where it is; `bits`: which are.
    """

    names: list[str]
    values: list[Any]
    rows: list[int]
    anew: frozenset[int]
    dtensors: list[DTensor]
    specs: list[Any]
    memory: list[torch.Tensor]
    columns: tuple[Sequence[Any], ...]
    near: Sequence[int]
    spots: tuple[Sequence[Any], ...]
    on_host: bool
    odd: list[int]
    bits: list[tuple[bool, bool]]

    @classmethod
    def of(cls, flat: Mapping[str, Any], *, spots: bool = True) -> Places:
        """Return the places of a flat state's tensors as they are now.

        Args:
            spots: Without, `viewed` is called at once: it tells where they lie, of those of which it matters.
        """
        values = list(flat.values())
        kinds = list(map(type, values))
        every = range(len(kinds))
        cut = list(compress(every, map(operator.is_, kinds, repeat(DTensor))))
        plain = list(compress(every, map(_PLAIN.__contains__, kinds)))
        known = set(compress(every, map(_TENSORS.__contains__, kinds)))
        anew = {row for row in set(every) - known if isinstance(values[row], torch.Tensor)}
        memory = [*map(_local_of, _at(values, cut)), *_at(values, plain)]
        hidden: set[int] = set()
        if not are_dense(memory):
            hidden = {row for row, local in zip(cut + plain, memory, strict=True) if not are_dense([local])}
        if hidden:
            anew |= hidden
            cut, plain = ([row for row in rows if row not in hidden] for rows in (cut, plain))
            memory = [*map(_local_of, _at(values, cut)), *_at(values, plain)]
        dtensors = _at(values, cut)
        for row in anew:
            values[row] = None
        specs = list(map(_spec_of, dtensors))
        columns = (*_cuts(specs), _shared(list(map(_shape_of, memory))), list(map(_dtype_of, memory)))
        odd = _could_be_odd(memory, columns[-1])
        return cls(
            names=list(flat),
            values=values,
            rows=cut + plain,
            anew=frozenset(anew),
            dtensors=dtensors,
            specs=specs,
            memory=memory,
            columns=columns,
            near=range(len(memory)),
            spots=_spots(memory if spots else []),
            on_host=all(map(_is_cpu, memory[: len(dtensors)])),
            odd=odd,
            bits=_bits(memory, odd),
        )

    def viewed(self, memory: Sequence[torch.Tensor]) -> Places:
        """Return the places for one who holds these tensors: of DTensors, local parts as they are, or views of them."""
        held = set(map(id, memory))
        cut = len(self.dtensors)
        locals_ = list(map(id, self.memory[:cut]))
        if len(set(locals_)) < cut:
            held -= {local for local, number in Counter(locals_).items() if number > 1}  # it may be of the other
        near = [*compress(count(), map(operator.not_, map(held.__contains__, locals_))), *range(cut, len(self.memory))]
        if len(near) == len(self.near) == len(self.spots[0]):
            return self
        return replace(self, near=near, spots=_spots(_at(self.memory, near)))

    def moved(self, flat: Mapping[str, Any], *, copied: bool = False) -> list[int] | None:
        """Return the rows of a flat state whose tensors are not those of these places, or not there; None where its
        names, or their order, are others.

        Args:
            copied: They are copied at once, which fails where a shape is not what it was, and what was copied is not
                used before `confirm`: what these two notice is not looked at.
        """
        if list(flat) != self.names:
            return None
        values = list(flat.values())
        found = self._elsewhere(copied) | self.anew
        same = bytes(map(operator.is_, values, self.values))
        row = same.find(0)
        while row >= 0:  # few: settings, that are no tensors
            if isinstance(values[row], torch.Tensor) or isinstance(self.values[row], torch.Tensor):
                found = found | {row}
            row = same.find(0, row + 1)
        return sorted(found)

    def confirm(self) -> None:
        """Look at what `moved` has left out. Any thread may call it, while training goes on.

        Raises:
            SaveError: DTensors are cut otherwise than they were, without having been replaced.
        """
        found: set[int] = set()
        self._compare(_cuts(self.specs), self.columns[:3], self.rows, found)
        if found:
            raise SaveError(
                f"{self.names[min(found)]}: its mesh or placements were changed in place, in the spec it had at the "
                "save before. Nothing was saved; the next save takes it as it is then."
            )

    def after(self, flat: Mapping[str, Any], moved: Collection[int]) -> Places:
        """Return the places once these rows have moved, without what they were."""
        if len(moved) == len(self.anew):  # all of which are always among them
            return self
        if len(moved) > _MOVED:
            return Places.of(flat)
        rows = set(moved) - self.anew
        kept = [row not in rows for row in self.rows]
        places = list(accumulate(kept))
        left = [kept[place] for place in self.near]
        return replace(
            self,
            values=[None if row in rows else value for row, value in enumerate(self.values)],
            rows=list(compress(self.rows, kept)),
            anew=self.anew | rows,
            dtensors=list(compress(self.dtensors, kept)),
            specs=list(compress(self.specs, kept)),
            memory=list(compress(self.memory, kept)),
            columns=tuple(list(compress(column, kept)) for column in self.columns),
            near=[places[place] - 1 for place in compress(self.near, left)],
            spots=(array("Q", compress(self.spots[0], left)), list(compress(self.spots[1], left))),
            odd=[places[place] - 1 for place in self.odd if kept[place]],
            bits=[bits for place, bits in zip(self.odd, self.bits, strict=True) if kept[place]],
        )

    def _elsewhere(self, copied: bool) -> frozenset[int] | set[int]:
        """Return the rows whose tensors, though the same, are not what or where they were."""
        cut = len(self.dtensors)
        memory = [*map(_local_of, self.dtensors), *self.memory[cut:]]
        found: set[int] = set()
        if not all(map(operator.is_, memory, self.memory)):
            found.update(compress(self.rows, map(operator.is_not, memory, self.memory)))
        if self.on_host and not all(map(_is_cpu, self.memory[:cut])):
            found.update(compress(self.rows, map(operator.not_, map(_is_cpu, self.memory[:cut]))))
        copied = copied and self.on_host
        specs = list(map(_spec_of, self.dtensors))
        if not (copied and all(map(operator.is_, specs, self.specs))):
            self._compare(_cuts(specs), self.columns[:3], self.rows, found)
        *_, shapes, dtypes = self.columns
        self._compare((list(map(_dtype_of, self.memory)),), (dtypes,), self.rows, found)
        if not copied:
            self._compare((list(map(_shape_of, self.memory)),), (shapes,), self.rows, found)
        near = _at(self.memory, self.near) if len(self.near) < len(self.memory) else self.memory
        if near:
            rows = _at(self.rows, self.near)
            if copied:
                self._compare((list(map(_shape_of, near)),), (_at(shapes, self.near),), rows, found)
            self._compare(_spots(near), self.spots, rows, found)
        bits = _bits(self.memory, self.odd)
        if bits != self.bits:
            found.update(self.rows[place] for place in compress(self.odd, map(operator.ne, bits, self.bits)))
        return found

    def _compare(
        self, columns: tuple[Sequence[Any], ...], before: tuple[Sequence[Any], ...], rows: list[int], found: set[int]
    ) -> None:
        for now, then in zip(columns, before, strict=True):
            if now != then:
                found.update(compress(rows, map(operator.ne, now, then)))


def _cuts(specs: list[Any]) -> tuple[Sequence[Any], ...]:
    """Return how DTensors are cut, as columns."""
    return list(map(_mesh_of, specs)), list(map(_placements_of, specs)), list(map(_meta_of, specs))


def _spots(memory: list[torch.Tensor]) -> tuple[Sequence[Any], ...]:
    """Return where tensors lie, and in which order, as columns."""
    return array("Q", map(torch.Tensor.data_ptr, memory)), _shared(list(map(torch.Tensor.stride, memory)))


def _could_be_odd(memory: list[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[int]:
    strided = map(operator.not_, map(_is_contiguous, memory))
    if not any(dtype.is_complex for dtype in set(dtypes)):
        return list(compress(count(), strided))
    return [place for place, odd in enumerate(strided) if odd or dtypes[place].is_complex]


def _bits(memory: list[torch.Tensor], odd: list[int]) -> list[tuple[bool, bool]]:
    return [(memory[place].is_conj(), memory[place].is_neg()) for place in odd]


def _shared(column: list[Any]) -> list[Any]:
    """Let what is equal be one: what is kept is compared at each save, and is read from memory then."""
    known: dict[Any, Any] = {}
    return [known.setdefault(item, item) for item in column]


def _at(values: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    return list(map(values.__getitem__, rows))


@dataclass(frozen=True, slots=True)
class Kinds:
    """What the values of a flat state are.

    Attributes:
        numbers: Of each value: the same for two of the same looks.
        looks: Of each number.
    """

    numbers: list[int]
    looks: dict[int, Looks]

    @classmethod
    def of(cls, places: Places, values: Sequence[Any], look: Callable[[Any], Looks]) -> Kinds:
        """Return the kinds of a state that has these places. `look` gives the looks of one value."""
        meshes, placements, metas, shapes, dtypes = places.columns
        cut, known = len(places.dtensors), dict[Any, int]()
        mesh_of, placed = _numbered(meshes, operator.is_), _numbered(placements, operator.eq)
        of_cut = zip(map(_meta_dtype, metas), map(_meta_shape, metas), mesh_of, placed, strict=True)
        found = list(map(known.setdefault, of_cut, count()))
        found += map(known.setdefault, zip(dtypes[cut:], shapes[cut:], strict=True), count(cut))
        looks: dict[int, Looks] = {
            number: (*key[:2], meshes[number], placements[number]) if number < cut else key
            for key, number in known.items()
        }
        by_row = dict(zip(places.rows, found, strict=True))
        rest: dict[Looks, int] = {}
        for row in [row for row in range(len(values)) if row not in by_row]:
            by_row[row] = rest.setdefault(look(values[row]), len(values) + len(rest))
        looks.update((number, key) for key, number in rest.items())
        return cls(list(map(by_row.__getitem__, range(len(values)))), looks)

    def look(self, row: int) -> Looks:
        """Return the looks of one value."""
        return self.looks[self.numbers[row]]


def _numbered(column: Sequence[Any], is_same: Callable[[Any, Any], bool]) -> list[int]:
    """Return a number for each item, equal ones the same. What is the same as the item before it is not hashed: meshes
    and placements take a microsecond each."""
    same = bytes(map(is_same, column, chain(column[:1], column)))
    known: dict[Any, int] = {}
    found: list[int] = []
    while len(found) < len(column):
        start = len(found)
        stop = same.find(0, start + 1)
        found += repeat(known.setdefault(column[start], start), (len(column) if stop < 0 else stop) - start)
    return found


@dataclass(frozen=True, slots=True)
class Flattened:
    """A nested state as one table: what torch's `flatten_state_dict` returns."""

    values: dict[str, Any]
    paths: list[Path]

    @classmethod
    def of(cls, nested: Mapping[str, Any]) -> Flattened | None:
        """Return the table; None where two values would have one name."""
        paths: list[Path] = []
        values = flat_values(nested, paths)
        return None if values is None else cls(values, paths)


def flat_values(nested: Mapping[str, Any], paths: list[Path] | None = None) -> dict[str, Any] | None:
    """Return the values of a nested state by the names that torch gives them; None where two would have one name.

    Args:
        paths: Gets the path of each.
    """
    if _is_flat(nested):
        if paths is not None:
            paths.extend(zip(nested, strict=True))
        return dict(nested)
    found = _Flattening(paths)
    found.descend("", (), list(map(str, nested)), nested.values())
    return found.values if len(found.values) == found.count else None


class _Flattening:
    """Values by name, as they are met; containers of nothing but tensors are met at once."""

    def __init__(self, paths: list[Path] | None) -> None:
        self.values: dict[str, Any] = {}
        self.count = 0
        self._paths = paths

    def descend(self, prefix: str, path: Path, keys: Collection[Any], items: Collection[Any]) -> None:
        if _TENSORS.issuperset(map(type, items)):
            self._add(prefix, path, keys, items)
            return
        for key, item in zip(keys, items, strict=True):
            if type(item) not in _TENSORS:
                if type(item) is dict or isinstance(item, Mapping):  # the former is known at once
                    self.descend(f"{prefix}{key}.", (*path, key), list(map(str, item)), item.values())
                    continue
                if isinstance(item, list) and not _is_leaf(item):
                    self.descend(f"{prefix}{key}.", (*path, key), range(len(item)), item)
                    continue
            self._add(prefix, path, (key,), (item,))

    def _add(self, prefix: str, path: Path, keys: Collection[Any], items: Collection[Any]) -> None:
        if len(keys) < _FEW:
            for key, item in zip(keys, items, strict=True):
                self.values[prefix + str(key)] = item
        else:
            self.values.update(zip(map(prefix.__add__, map(str, keys)), items, strict=True))
        self.count += len(keys)
        if self._paths is not None:
            self._paths.extend(zip(*map(repeat, path), keys, strict=False))


def _is_flat(nested: Mapping[str, Any]) -> bool:
    return (
        type(nested) is dict
        and _STRINGS.issuperset(map(type, nested))
        and _TENSORS.issuperset(map(type, nested.values()))
    )


def _is_leaf(items: list[Any]) -> bool:
    """Whether a list is one value: no tensors, dicts or lists of such are in it."""
    return not any(
        isinstance(item, (Mapping, torch.Tensor)) or (isinstance(item, list) and not _is_leaf(item)) for item in items
    )
