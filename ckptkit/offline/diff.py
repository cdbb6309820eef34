"""Which tensors of two checkpoints differ, and by how much; streamed, in bounded memory."""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Catalog, Role, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.errors import UsageError
from ckptkit.formats.detect import Source
from ckptkit.offline.casts import cast_into
from ckptkit.offline.gather import Gatherer
from ckptkit.offline.jobs import prepare
from ckptkit.offline.plan import Placement, Plan
from ckptkit.offline.reading import open_pinned, reads_checkpoints
from ckptkit.offline.sources import SourceReader
from ckptkit.units import parse_size

__all__ = ["DiffReport", "LayerDiff", "TensorDiff", "diff"]

SCHEMA = "ckptkit.diff/1"
_TILE = 4 << 20  # bytes of one side
_FLOATS = frozenset({"bfloat16", "float16", "float32", "float64"})
_COMPLEX = {"complex32": np.float16, "complex64": np.float32, "complex128": np.float64}
_FLOAT8 = {  # mantissa bits, bias of the exponent
    "float8_e4m3fn": (3, 7),
    "float8_e4m3fnuz": (3, 8),
    "float8_e5m2": (2, 15),
    "float8_e5m2fnuz": (2, 16),
    "float8_e8m0fnu": (0, 127),
}

Progress = Callable[[int, int, str], None]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """How two tensors of one name compare.

    Attributes:
        name: The FQN for weights ("lm_head.weight"); "master: ...", "optimizer: ... exp_avg" or the key else.
        elements: How many elements differ: in their bits or, where the dtypes differ, in value.
        max_abs: max |a - b| (of complex numbers, of their parts); None where the dtype has no arithmetic here.
        max_rel: max |a - b| / max |a|.
        cosine: Of the two as vectors; None where one of them is all zeros.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    elements: int
    max_abs: float | None
    max_rel: float | None
    cosine: float | None
    sums: tuple[float, float, float] = (0.0, 0.0, 0.0)  # a.b, a.a, b.b: what the cosine of several is made of


@dataclass(frozen=True, slots=True)
class LayerDiff:
    """The tensors of a layer that differ, together: the largest differences, and the cosine of all as one vector."""

    tensors: int
    elements: int
    max_abs: float | None
    max_rel: float | None
    cosine: float | None


@dataclass(frozen=True, slots=True)
class DiffReport:
    """What `diff` found. `equal`: the same names, shapes, dtypes and bits."""

    a: str
    b: str
    same: int  # tensors that are bit-equal
    by_digest: int  # of those, told from recorded digests without reading
    different: tuple[TensorDiff, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    changes: Mapping[str, float] = field(default_factory=dict)  # relative, of every tensor compared; 0.0: equal

    @property
    def equal(self) -> bool:
        return not (self.different or self.only_a or self.only_b or self.shapes or self.dtypes)

    def summary(self) -> str:
        """Return one line."""
        if self.equal:
            told = (
                f" ({self.by_digest} of them told by recorded digests: verify reads the bytes)"
                if self.by_digest
                else ""
            )
            return f"equal: {self.same} tensors, names, shapes, dtypes and bits{told}"
        found = {
            "in value": len(self.different),
            "only in A": len(self.only_a),
            "only in B": len(self.only_b),
            "in shape": len(self.shapes),
            "in dtype": len(self.dtypes),
        }
        return f"different: {', '.join(f'{n} {what}' for what, n in found.items() if n)}; equal: {self.same}"

    def layers(self) -> dict[str, LayerDiff]:
        """Return what differs below each layer, in weights and in each state of the optimizer by itself: the model
        first, and the most changed first. What is in no layer stands for itself."""
        from ckptkit.offline.pictures.heat_map import layer_of

        found: dict[tuple[int, str], list[TensorDiff]] = {}
        for item in self.different:
            found.setdefault(layer_of(item.name), []).append(item)
        layers = {key: _together(items) for key, items in found.items()}
        ordered = sorted(layers.items(), key=lambda pair: (pair[0][0], -_order(pair[1].max_rel)))
        return {name: layer for (_, name), layer in ordered}

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values (schema "ckptkit.diff/1"); what is not finite is a string."""
        rows = [
            {
                "name": d.name,
                "shape": list(d.shape),
                "dtypes": list(d.dtypes),
                "elements": d.elements,
                "max_abs": _number(d.max_abs),
                "max_rel": _number(d.max_rel),
                "cosine": _number(d.cosine),
            }
            for d in self.different
        ]
        return {
            "schema": SCHEMA,
            "a": self.a,
            "b": self.b,
            "equal": self.equal,
            "same": self.same,
            "by_digest": self.by_digest,
            "different": rows,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "shapes": {name: [list(x), list(y)] for name, (x, y) in self.shapes.items()},
            "dtypes": {name: list(pair) for name, pair in self.dtypes.items()},
            "layers": {
                name: {
                    "tensors": layer.tensors,
                    "elements": layer.elements,
                    "max_abs": _number(layer.max_abs),
                    "max_rel": _number(layer.max_rel),
                    "cosine": _number(layer.cosine),
                }
                for name, layer in self.layers().items()
            },
        }


@reads_checkpoints
def diff(
    a: str,
    b: str,
    *,
    include: Sequence[str] = (),
    max_memory: str | int = "512MB",
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> DiffReport:
    """Compare the checkpoints at `a` and `b`, of any formats and shardings, tensor by tensor.

    Weights are matched by FQN, moments by parameter and state, the rest by key. Where one side is an export of
    weights alone, only the weights are compared. Digests that both sides recorded are believed; everything else is
    read, in tiles.

    Args:
        include: Globs of names; none for all.
    """
    sides = [_Side.open(url, max_memory, storage_options) for url in (a, b)]
    try:
        return _compare(sides[0], sides[1], include, progress)
    finally:
        for side in sides:
            side.reader.close()


@dataclass(frozen=True, slots=True)
class _Side:
    """One checkpoint, its tensors by comparable name, and what reads them."""

    source: Source
    tensors: Mapping[str, TensorEntry]
    reader: SourceReader
    gatherer: Gatherer

    @classmethod
    def open(cls, url: str, max_memory: str | int, storage_options: Mapping[str, Any] | None) -> _Side:
        source = open_pinned(url, storage_options=storage_options)
        targets = [Target.of(entry) for entry in source.catalog.tensors.values()]
        plan = Plan(source.catalog, (), tuple(Placement.whole(target, 0, 0) for target in targets), (), (), (), ())
        work = prepare(plan, check=False, by_boxes=True)
        reader = SourceReader(source.store, work.origins)
        gatherer = Gatherer(reader, work.maps, None, max_bytes=parse_size(max_memory))
        return cls(source, _named(source.catalog), reader, gatherer)


def _named(catalog: Catalog) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for entry in catalog.tensors.values():
        name = entry.name
        if entry.role is Role.MODEL:
            name = entry.fqn
        elif entry.role is Role.MASTER:
            name = f"master: {entry.fqn}"
        elif entry.role is Role.OPTIMIZER and entry.fqn:
            name = f"optimizer: {entry.fqn} {entry.state}"
        found[name if name not in found else entry.name] = entry
    return found


def _compare(a: _Side, b: _Side, include: Sequence[str], progress: Progress | None) -> DiffReport:
    left, right = _chosen(a.tensors, include), _chosen(b.tensors, include)
    weights = [all(entry.role is Role.MODEL for entry in side.values()) for side in (left, right)]
    if any(weights):
        left, right = ({n: e for n, e in side.items() if e.role is Role.MODEL} for side in (left, right))
    if not left and not right:
        raise UsageError(
            f"no tensor matches {', '.join(include)}. See the names with: ckptkit inspect URL --tensors '*'"
        )
    both = [name for name in left if name in right]
    shapes = {n: (left[n].shape, right[n].shape) for n in both if left[n].shape != right[n].shape}
    dtypes = {n: (left[n].dtype, right[n].dtype) for n in both if left[n].dtype != right[n].dtype}
    total = sum(left[n].nbytes for n in both if n not in shapes)
    done = same = by_digest = 0
    different: list[TensorDiff] = []
    changes: dict[str, float] = {}
    for name in both:
        if name in shapes:
            continue
        x, y = left[name], right[name]
        changes[name] = 0.0
        if _same_digests(x, y):
            same, by_digest = same + 1, by_digest + 1
        else:
            found = _Comparison(name, x, y).run(a.gatherer, b.gatherer)
            if found is None:
                same += name not in dtypes
            else:
                different.append(found)
                changes[name] = math.inf if found.max_rel is None else found.max_rel
        done += x.nbytes
        if progress is not None:
            progress(done, total, name)
    return DiffReport(
        a.source.url,
        b.source.url,
        same,
        by_digest,
        tuple(different),
        tuple(n for n in left if n not in right),
        tuple(n for n in right if n not in left),
        shapes,
        dtypes,
        changes,
    )


def _chosen(tensors: Mapping[str, TensorEntry], include: Sequence[str]) -> dict[str, TensorEntry]:
    return {
        name: entry
        for name, entry in tensors.items()
        if not include or any(fnmatch.fnmatchcase(name, pattern) for pattern in include)
    }


def _same_digests(x: TensorEntry, y: TensorEntry) -> bool:
    """Whether both are cut alike and every slice has the same xxh3_64. A CRC-32 is too short to believe."""
    p, q = x.slices, y.slices
    if x.dtype != y.dtype or p.algorithm != "xxh3_64" or q.algorithm != "xxh3_64" or len(p) != len(q):
        return False
    if p.strides or q.strides or p.digests is None or q.digests is None or p.digest_starts is not None:
        return False
    rows = [np.lexsort(s.offsets.T) if s.offsets.shape[1] else np.arange(len(s)) for s in (p, q)]
    columns = [(p.offsets, q.offsets), (p.sizes, q.sizes), (p.digests, q.digests)]
    return all(np.array_equal(one[rows[0]], other[rows[1]]) for one, other in columns)


class _Comparison:
    """The sums over the tiles of one pair of tensors."""

    def __init__(self, name: str, a: TensorEntry, b: TensorEntry) -> None:
        self.name, self.a, self.b = name, a, b
        self.elements = 0
        self.max_abs = self.max_a = 0.0
        self.dot = self.norm_a = self.norm_b = 0.0
        self.counted = False

    def run(self, first: Gatherer, second: Gatherer) -> TensorDiff | None:
        """Return the difference, None where every bit is the same."""
        sizes = [dtype_of(entry.dtype).itemsize for entry in (self.a, self.b)]
        whole = Box.whole(self.a.shape)
        for box in whole.tiles(_TILE // max(sizes)) if whole.numel else ():
            x, y = (np.empty(box.numel * size, np.uint8) for size in sizes)
            first.read_box(self.a.name, box, x)
            second.read_box(self.b.name, box, y)
            self._add(x, y)
        if not self.elements:
            return None
        sums = (self.dot, self.norm_a, self.norm_b)
        return TensorDiff(
            self.name,
            self.a.shape,
            (self.a.dtype, self.b.dtype),
            self.elements,
            self.max_abs if self.counted else None,
            (self.max_abs / self.max_a if self.max_a else math.inf) if self.counted else None,
            _cosine(sums) if self.counted else None,
            sums,
        )

    def _add(self, x: Bytes, y: Bytes) -> None:
        u, v = _numbers(x, self.a.dtype), _numbers(y, self.b.dtype)
        if u is None or v is None or len(u) != len(v):
            size = dtype_of(self.a.dtype).itemsize
            unequal = (x.reshape(-1, size) != y.reshape(-1, size)).any(axis=1) if len(x) == len(y) else np.ones(1, bool)
            self.elements += int(np.count_nonzero(unequal))
            return
        self.counted = True
        if self.a.dtype == self.b.dtype:
            size = dtype_of(self.a.dtype).itemsize
            self.elements += int(np.count_nonzero((x.reshape(-1, size) != y.reshape(-1, size)).any(axis=1)))
        else:
            self.elements += int(np.count_nonzero(~((u == v) | (np.isnan(u) & np.isnan(v)))))
        with np.errstate(invalid="ignore", over="ignore"):
            gap = self._integer_gap(x, y)
            if gap is None:
                gap = np.abs(u - v)
                gap[(np.isnan(u) & np.isnan(v)) | (u == v)] = 0.0
            self.max_abs = max(self.max_abs, float(np.nan_to_num(gap, nan=math.inf, posinf=math.inf).max(initial=0.0)))
            self.max_a = max(self.max_a, float(np.nan_to_num(np.abs(u), nan=0.0, posinf=math.inf).max(initial=0.0)))
            self.dot += float(u @ v)
            self.norm_a += float(u @ u)
            self.norm_b += float(v @ v)

    def _integer_gap(self, x: Bytes, y: Bytes) -> npt.NDArray[np.float64] | None:
        """|a - b| of integers of 64 bits, of which float64 holds 53, before it is rounded; None for other dtypes."""
        if self.a.dtype != self.b.dtype or self.a.dtype not in ("int64", "uint64"):
            return None
        i, j = x.view(np.dtype(self.a.dtype)), y.view(np.dtype(self.b.dtype))
        gap: npt.NDArray[np.uint64] = np.maximum(i, j).view(np.uint64) - np.minimum(i, j).view(np.uint64)
        return gap.astype(np.float64)


def _cosine(sums: tuple[float, float, float]) -> float | None:
    norm = math.sqrt(sums[1]) * math.sqrt(sums[2])
    return sums[0] / norm if norm else None


def _together(items: Sequence[TensorDiff]) -> LayerDiff:
    def largest(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return max(known, key=_order) if known else None

    dot, norm_a, norm_b = (math.fsum(item.sums[i] for item in items) for i in range(3))
    return LayerDiff(
        len(items),
        sum(item.elements for item in items),
        largest(item.max_abs for item in items),
        largest(item.max_rel for item in items),
        _cosine((dot, norm_a, norm_b)),
    )


def _order(value: float | None) -> float:
    """Where a change stands among others: what has no number, or is none, is before all."""
    return math.inf if value is None or math.isnan(value) else value


def _numbers(data: Bytes, name: str) -> npt.NDArray[np.float64] | None:
    """Return the elements as float64, complex ones as pairs; None for dtypes without arithmetic here (4-bit floats)."""
    kind = dtype_of(name).kind
    if name in _COMPLEX:
        return data.view(_COMPLEX[name]).astype(np.float64)
    if name in _FLOAT8:
        return _float8_values(name)[data]
    if name in _FLOATS:
        wide = np.empty(len(data) // dtype_of(name).itemsize * 4, np.uint8)
        if name == "float64":
            return data.view(np.float64)
        cast_into(data, wide, name, "float32")
        return wide.view(np.float32).astype(np.float64)
    if kind in ("int", "bool"):
        return data.view(np.dtype(name)).astype(np.float64)
    return None


@functools.cache
def _float8_values(name: str) -> npt.NDArray[np.float64]:
    """The value of each of the 256 bit patterns (OCP 8-bit formats; the fnuz ones as torch documents them)."""
    bits = np.arange(256)
    if name == "float8_e8m0fnu":  # an exponent alone
        return np.where(bits == 255, np.nan, np.ldexp(1.0, bits - 127))
    mantissa_bits, bias = _FLOAT8[name]
    sign = np.where(bits & 0x80, -1.0, 1.0)
    exponent, mantissa = (bits & 0x7F) >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    values = sign * np.where(exponent, np.ldexp(1 + fraction, exponent - bias), np.ldexp(fraction, 1 - bias))
    if name.endswith("fnuz"):
        values[0x80] = np.nan
    elif name == "float8_e4m3fn":
        values[(bits & 0x7F) == 0x7F] = np.nan
    else:
        special = exponent == 31
        values[special] = np.where(mantissa[special], np.nan, sign[special] * np.inf)
    return values


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
