"""Loading a sharded state without torch's planners: each rank reads what its own tensors need. No communication."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.tensor import DTensor

from ckptkit.catalog.entry import Catalog, Digest, ObjectEntry, TensorEntry
from ckptkit.digests import DIGEST, digest_of
from ckptkit.errors import CheckpointMismatchError, UnsafePickleError
from ckptkit.formats.dcp.digests import check_bytes
from ckptkit.formats.dcp.fill import Filler, Verify, add_box
from ckptkit.formats.dcp.host_bytes import host_view
from ckptkit.formats.dcp.plan import flatten, local_boxes
from ckptkit.formats.dcp.shared_memory import Claim, check_claims, overlapping
from ckptkit.formats.own.manifest import Entries, Manifest
from ckptkit.formats.pickles.objects import load_object_torch
from ckptkit.formats.pickles.weights_only import parse_object
from ckptkit.storage.store import ReadInto, Store

__all__ = [
    "ReadPlan",
    "ReadReport",
    "Verify",
    "plan_read",
    "ExactReads",
    "check_fits",
    "check_shared_memory",
    "sharing",
    "filled_by",
    "load_objects",
]

# Small tensors whose local part is one slice of the checkpoint, as where the sharding has not changed: found and
# read as columns.
#
# A rank of a large model has thousands of them, and what a load costs them is Python, not bytes: so there is no
# object a tensor here, nor a read.


_SMALL = 1 << 20  # of a tensor: larger ones are read each for itself, straight into their memory
_BATCH = 4 << 20
_GAP = 64 << 10  # read and dropped rather than another read
_PLAIN = (torch.Tensor, torch.nn.Parameter)
Int64 = npt.NDArray[np.int64]
OffsetsAndSizes = tuple[tuple[int, ...], tuple[int, ...]]
BoxOf = Callable[[DTensor], "OffsetsAndSizes | None"]
Check = Callable[[Digest, memoryview, str, str], None]


class ExactReads:
    """The tensors of a state that are such, and the reads that fill them."""

    def __init__(self, manifest: Manifest, entries: Entries, box_of: BoxOf) -> None:
        self._manifest = manifest
        self._entries = entries
        self._box_of = box_of
        self._dtypes = {name: getattr(torch, name) for name in set(manifest.tensors.dtypes)}
        self._names: list[str] = []
        self._locals: list[torch.Tensor] = []
        self._tensors: list[int] = []
        self._boxes: list[tuple[int, ...]] = []  # offsets, then sizes
        self._rows: Int64 = np.zeros(0, np.int64)

    @classmethod
    def of(cls, catalog: Catalog, store: Store, box_of: BoxOf) -> ExactReads | None:
        """Return them for a catalog of columns on a local disk; None for any other, which has no rows to look in, or
        where requests cost more than Python.

        Args:
            box_of: (offsets, sizes) of what this rank holds of a DTensor; None where it is no part of its mesh.
        """
        entries = catalog.tensors
        if not isinstance(entries, Entries) or store.asking_costs:
            return None
        return cls(entries.manifest, entries, box_of)

    def take(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Take the tensors for which there is such a slice; return the others, and all that is no tensor."""
        for name, value in flat.items():
            row = self._entries.row(name)
            local = None if row is None else self._small(value)
            if row is None or local is None or not self._is_of(row, value, local):
                continue
            offsets: tuple[int, ...] = (0,) * local.dim()
            if local is not value:
                box = self._box_of(value)
                if box is None or box[1] != local.shape:
                    continue
                offsets = box[0]
            self._names.append(name)
            self._locals.append(local)
            self._tensors.append(row)
            self._boxes.append(offsets + local.shape)
        self._find()
        taken = set(self._names)
        return {name: value for name, value in flat.items() if name not in taken}

    def _is_of(self, row: int, value: torch.Tensor, local: torch.Tensor) -> bool:
        tensors = self._manifest.tensors
        return local.dtype is self._dtypes[tensors.dtypes[row]] and value.shape == tensors.shapes[row]

    def _small(self, value: Any) -> torch.Tensor | None:
        """The local part of a tensor, where its bytes lie row-major in the host's memory."""
        local = value._local_tensor if type(value) is DTensor else value
        if type(local) not in _PLAIN or not local.is_cpu or not 0 < local.nbytes < _SMALL:
            return None
        is_row_major = local.layout is torch.strided and local.is_contiguous() and not local.is_quantized
        return local if is_row_major and not (local.is_conj() or local.is_neg()) else None

    def _find(self) -> None:
        """Find the slice of each; those that have none are dropped."""
        slices, count = self._manifest.slices, len(self._names)
        rows = np.full(count, -1, np.int64)
        chosen = np.array(self._tensors, np.int64)
        starts, stops, elements = (column[chosen] for column in self._entries.columns)
        ndims = np.fromiter(map(len, self._boxes), np.int64, count) // 2
        for ndim in np.unique(ndims).tolist():
            which = np.flatnonzero(ndims == ndim)
            wanted = np.array([self._boxes[i] for i in which.tolist()], np.int64).reshape(len(which), 2 * ndim)
            lengths = stops[which] - starts[which]
            owner = np.repeat(np.arange(len(which)), lengths)
            at = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # in its tensor
            first = (elements[which][owner] + at * ndim)[:, None] + np.arange(ndim)
            same = (slices.offsets[first] == wanted[owner, :ndim]).all(axis=1)
            same &= (slices.sizes[first] == wanted[owner, ndim:]).all(axis=1)
            found = np.flatnonzero(same)[::-1]  # of equal ones the first is kept
            rows[which[owner[found]]] = starts[which][owner[found]] + at[found]
        nbytes = np.fromiter((local.nbytes for local in self._locals), np.int64, count)
        good = rows >= 0
        good[good] = slices.nbytes[rows[good]] == nbytes[good]
        if slices.strides:
            good &= ~np.isin(rows, np.fromiter(slices.strides, np.int64, len(slices.strides)))
        if not good.all():
            kept = np.flatnonzero(good).tolist()
            self._names = [self._names[i] for i in kept]
            self._locals = [self._locals[i] for i in kept]
        self._rows = rows[good]

    # --- reading

    def jobs(self, store: Store, check: Check | None) -> Iterator[tuple[int, Callable[[], int]]]:
        """Yield (bytes, what reads them and returns how many were of tensors), a few megabytes each.

        Args:
            check: Raises where bytes are not those of a digest; gets their file and tensor too. None: digests are not
                looked at.
        """
        if not len(self._rows):
            return
        slices = self._manifest.slices
        files, starts = slices.files[self._rows], slices.starts[self._rows]
        order = np.lexsort((starts, files))
        files, starts = files[order], starts[order]
        stops = starts + slices.nbytes[self._rows[order]]
        cut = np.ones(len(order), bool)  # where a read begins
        cut[1:] = (files[1:] != files[:-1]) | (starts[1:] - stops[:-1] > _GAP) | (starts[1:] < stops[:-1])
        cut[1:] |= np.diff(stops // _BATCH) > 0
        bounds = [*np.flatnonzero(cut).tolist(), len(order)]
        digests = None if check is None else slices.digests
        for first, last in itertools.pairwise(bounds):
            items = order[first:last]
            read = _Read(
                store,
                self._manifest.paths[int(files[first])],
                starts[first:last].tolist(),
                stops[first:last].tolist(),
                [self._locals[i] for i in items.tolist()],
                None if digests is None else digests[self._rows[items]].tolist(),
                [self._names[i] for i in items.tolist()],
                check,
            )
            yield int(stops[last - 1] - starts[first]), read


class _Read:
    """One read, dealt out to the tensors whose bytes it has."""

    def __init__(
        self,
        store: Store,
        path: str,
        starts: list[int],
        stops: list[int],
        targets: list[torch.Tensor],
        digests: list[int] | None,
        names: list[str],
        check: Check | None,
    ) -> None:
        self.store = store
        self.path = path
        self.starts = starts
        self.stops = stops
        self.targets = targets
        self.digests = digests
        self.names = names
        self.check = check

    def __call__(self) -> int:
        """Read, check, then fill: nothing arrives where anything is damaged. Raises what `check` does."""
        begin = self.starts[0]
        buffer = torch.empty(self.stops[-1] - begin, dtype=torch.uint8)
        view = host_view(buffer, writable=True)
        self.store.read_many([ReadInto(self.path, begin, view)], workers=1)
        if self.digests is not None:
            pieces = [view[a - begin : b - begin] for a, b in zip(self.starts, self.stops, strict=True)]
            if list(map(digest_of, pieces)) != self.digests:
                self._check_each(pieces, self.digests)
        move, source = ctypes.memmove, buffer.data_ptr() - begin
        for start, stop, target in zip(self.starts, self.stops, self.targets, strict=True):
            move(target.data_ptr(), source + start, stop - start)
        return sum(self.stops) - sum(self.starts)

    def _check_each(self, pieces: list[memoryview], digests: list[int]) -> None:
        assert self.check is not None
        for piece, digest, start, name in zip(pieces, digests, self.starts, self.names, strict=True):
            self.check(Digest(DIGEST, digest, start, len(piece)), piece, self.path, name)


# The objects of a load: all read, and refused together, before a tensor of the state is touched.


_LISTED = 20


def load_objects(store: Store, entries: Mapping[str, ObjectEntry]) -> dict[str, Any]:
    """Return the values of objects by key, checked against their digests. Plain data are loaded, nothing is run.

    Raises:
        UnsafePickleError: Some ask for classes that the caller has not allowed; each is named.
    """
    raw = _read(store, entries)
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
        lines = [*map(str, unsafe[:_LISTED]), *([f"and {len(unsafe) - _LISTED} more"] if len(unsafe) > _LISTED else [])]
        raise UnsafePickleError(f"{len(unsafe)} objects are not loaded:\n  " + "\n  ".join(lines))
    return values


def _read(store: Store, entries: Mapping[str, ObjectEntry]) -> dict[str, bytearray]:
    """The bytes of those that lie as torch.save wrote them: neighbours share a read."""
    raw = {
        name: bytearray(entry.nbytes)
        for name, entry in entries.items()
        if entry.encoding == "torch_save" and entry.codec is None and entry.nbytes
    }
    store.read_many([ReadInto(entries[name].path, entries[name].start, memoryview(data)) for name, data in raw.items()])
    for name, data in raw.items():
        entry = entries[name]
        digest = entry.digest
        if digest is not None and digest.start == entry.start and digest.nbytes == entry.nbytes:
            check_bytes(digest, memoryview(data), entry.path, name)
    return raw


def check_fits(current: Any, value: Any, name: str) -> None:
    """Check that a tensor among the objects is like the one that the state has there, if it has one.

    Raises:
        CheckpointMismatchError: Shapes or dtypes differ.
    """
    if not _is_filled(current, value):
        return
    if (current.shape, current.dtype, current.layout) != (value.shape, value.dtype, value.layout):
        raise CheckpointMismatchError(
            f"{name}: the checkpoint has {value.dtype} {list(value.shape)} ({value.layout}), the state has "
            f"{current.dtype} {list(current.shape)} ({current.layout})."
        )


def filled_by(current: Any, value: Any) -> Any:
    """Return what stands in the state once this value was loaded: the tensor that is there, filled, or the value."""
    if not _is_filled(current, value):
        return value
    with torch.no_grad():
        current.copy_(value)  # not of a detached alias: a quantized tensor would keep its own scale
    return current


def _is_filled(current: Any, value: Any) -> bool:
    both = isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor)
    return both and not isinstance(current, DTensor) and not current.is_meta


Report = Callable[[str, float, int], None]


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What a load did on this rank.

    Attributes:
        missing: Keys of the state that the checkpoint does not have; left as they were.
        unexpected: Keys of the checkpoint that the state does not have.
        nbytes: Bytes of tensor data read.
        seconds: All of it.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What a load will do on this rank. Nothing was read or touched yet.

    Attributes:
        objects: By key, where in the state its value goes, and what is there.
    """

    catalog: Catalog
    store: Store
    state_dict: dict[str, Any]
    filler: Filler
    objects: Mapping[str, tuple[tuple[str | int, ...], Any]]
    missing: list[str]
    unexpected: list[str]
    seconds: float

    def run(self, report: Report | None = None) -> ReadReport:
        """Fill the tensors and replace the objects.

        Raises:
            IntegrityError: Bytes differ from their digest; names tensor and file.
            UnsafePickleError: Objects ask for classes that the caller has not allowed: nothing was touched.
        """
        started = time.perf_counter()
        values = load_objects(self.store, {name: self.catalog.objects[name] for name in self.objects})
        for name, (_, current) in self.objects.items():
            check_fits(current, values[name], name)
        loaded = time.perf_counter()
        self.filler.run()
        finished = time.perf_counter()
        for name, (path, current) in self.objects.items():
            set_element(self.state_dict, path, filled_by(current, values[name]))
        if report is not None:
            report("plan", self.seconds, 0)
            report("objects", loaded - started, 0)
            report("read", finished - loaded, self.filler.nbytes)
        return ReadReport(self.missing, self.unexpected, self.filler.nbytes, self.seconds + finished - started)


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
    """Plan to fill the tensors of a nested or flat state in place, and to replace its objects. Nothing is touched.

    Each rank reads only the bytes that its own tensors need, whatever the sharding that wrote them.

    Args:
        verify: Which slices are checked against their digests.
        cast: Convert where a dtype differs; otherwise that is a mismatch.
        strict: A key that the checkpoint lacks is an error; otherwise it is left as it is and returned.

    Raises:
        CheckpointMismatchError: Keys are missing, or shapes, dtypes or kinds differ; lists all of them.
        IncompleteCheckpointError: A part of a tensor is not in the checkpoint.
    """
    started = time.perf_counter()
    flat, of_each = flatten(state_dict)
    paths = dict(zip(flat, of_each, strict=True))
    exact = ExactReads.of(catalog, store, _Boxes())
    check_shared_memory(
        store, {n: (v, catalog.tensors[n]) for n, v in sharing(flat) if n in catalog.tensors}, cast=cast
    )
    rest = flat if exact is None else exact.take(flat)
    found, missing = _matched(catalog, rest, cast=cast, strict=strict)
    filler = Filler(store, verify=verify, workers=workers, cast=cast)
    for name, entry in found.items():
        if entry is not None:
            for box, target in local_boxes(flat[name]):
                add_box(filler, entry, box, target)
    for nbytes, job in () if exact is None else exact.jobs(store, None if verify is Verify.OFF else check_bytes):
        filler.add_job(nbytes, job)
    objects = {name: (paths[name], flat[name]) for name, entry in found.items() if entry is None}
    unexpected = [name for name in (*catalog.tensors, *catalog.objects) if name not in flat]
    seconds = time.perf_counter() - started
    return ReadPlan(catalog, store, state_dict, filler, objects, missing, unexpected, seconds)


def check_shared_memory(store: Store, wanted: Mapping[str, tuple[torch.Tensor, TensorEntry]], *, cast: bool) -> None:
    """Check that the tensors of a state that share memory, as tied weights do, get the same values.

    Args:
        wanted: What fills which tensor of the state; those that do not fit are left for another check.

    Raises:
        CheckpointMismatchError: The checkpoint holds different values for them. Names them.
    """
    fitting = [
        (name, entry, value, part)
        for name, (value, entry) in wanted.items()
        if _difference(entry, value, cast) is None
        for part in local_boxes(value)
    ]
    groups = []
    for group in overlapping([local for *_, (_, local) in fitting]):
        first = fitting[group[0]][2]
        claims = [fitting[i] for i in group]
        if all(_is_placed_like(first, value) for _, _, value, _ in claims):  # the same question on every rank
            groups.append([Claim.whole(name, entry, value) for name, entry, value, _ in claims])
            continue
        groups.append([
            Claim(name, entry, tuple(value.shape), local, [(box, (0,) * len(box.sizes))])
            for name, entry, value, (box, local) in claims
        ])  # fmt: skip
    check_claims(store, groups)


def _is_placed_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        same = one._spec == other._spec
        return same and _is_placed_like(one._local_tensor, other._local_tensor)
    places = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (one, other) if type(t) in _PLAIN]
    return len(places) == 2 and places[0] == places[1]


def sharing(flat: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a flat state that share memory with others."""
    found = [
        (name, value, local)
        for name, value in flat.items()
        for local in _locals(value)
        if local.layout is torch.strided and not local.is_meta
    ]
    for group in overlapping([local for *_, local in found]):
        yield from (found[i][:2] for i in group)


def _locals(value: Any) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    local = value._local_tensor if isinstance(value, DTensor) else value
    return [local] if type(local) in _PLAIN else []


class _Boxes:
    """(offsets, sizes) of what this rank holds of a DTensor, worked out once for all that are cut alike."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[int, ...]] | None] = {}

    def __call__(self, value: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        spec = value._spec
        key = (value.shape, id(spec.mesh), spec.placements)
        if key not in self._known:
            boxes = local_boxes(value)
            self._known[key] = (boxes[0][0].offsets, boxes[0][0].sizes) if boxes else None
        return self._known[key]


def _matched(
    catalog: Catalog, flat: Mapping[str, Any], *, cast: bool, strict: bool
) -> tuple[dict[str, TensorEntry | None], list[str]]:
    """Return (keys to load, with their tensors; keys that are missing); raise one error with all that does not fit."""
    found: dict[str, TensorEntry | None] = {}
    missing, wrong = [], []
    for name, value in flat.items():
        tensor, entry = isinstance(value, (torch.Tensor, ShardedTensor)), catalog.tensors.get(name)
        if entry is None and name not in catalog.objects:
            missing.append(name)
        elif entry is None:
            found[name] = None  # a tensor among the objects is one that torch.save framed whole
        elif not tensor:
            wrong.append(f"{name}: the checkpoint has a tensor, the state has {type(value).__name__}")
        else:
            problem = _difference(entry, value, cast)
            if problem:
                wrong.append(f"{name}: {problem}")
            found[name] = entry
    if wrong or (missing and strict):
        lines = wrong + [f"{name}: not in the checkpoint" for name in (missing if strict else [])]
        listed = lines[:_LISTED] + ([f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else [])
        raise CheckpointMismatchError(
            f"{len(lines)} keys of the state do not fit the checkpoint; nothing was loaded:\n  " + "\n  ".join(listed)
        )
    return found, missing


def _difference(entry: TensorEntry, value: Any, cast: bool) -> str | None:
    shape = tuple(value.size())
    if shape != entry.shape:
        return f"the checkpoint has shape {list(entry.shape)}, the state has {list(shape)}"
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != entry.dtype and not cast:
        return f"the checkpoint has {entry.dtype}, the state has {dtype} (cast=True converts)"
    return None
