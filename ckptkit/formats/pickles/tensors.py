"""Describes the tensors in a torch pickle: positions of bytes, and placements of DTensors and ShardedTensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import DType
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.entry import Digest, TensorSlice, contiguous_strides
from ckptkit.digests import CRC
from ckptkit.errors import UnsupportedFormatError
from ckptkit.formats.pickles.inert import Function, Record, Stub, TorchDType

_MAX_NDIM = 64
_MAX_NUMEL = 1 << 62
_MAX_EXPANDED = 16 << 20  # bytes by which all tensors of a pickle together may exceed their storages


class OpaqueTensorError(UnsupportedFormatError):
    """Raised for a tensor whose values can't be read from its stored bytes alone.

    Attributes:
        kind: Class of the tensor, or kind of lazy view ("lazy conj view").
    """

    def __init__(self, kind: str, text: str = "") -> None:
        super().__init__(text or f"holds a tensor of class {kind}, which can't be read without loss.")
        self.kind = kind


@dataclass(slots=True, eq=False)
class Storage:
    """The bytes [start, start + nbytes) of a file, which several tensors may share. Compares by identity.

    Attributes:
        key: Key of the storage in the pickle. Tensors that share the storage have the same key.
        dtype: Dtype of the storage in the pickle, or None if the storage is untyped.
        crc32: CRC-32 of the storage's bytes, taken from the zip directory. None if the format has no CRC.
    """

    path: str
    key: str
    nbytes: int
    dtype: str | None
    start: int = -1
    crc32: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor(Stub):
    """A dense tensor, described as a strided view of a storage. Its bytes have not been read.

    Attributes:
        strides: Strides in elements.
        offset: Number of elements that precede the tensor's first element in the storage.
        marks: The operations "conj" and "neg" that torch has not yet applied to the stored values.
    """

    storage: Storage
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    marks: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        return self.storage.path

    @property
    def itemsize(self) -> int:
        return dtype_of(self.dtype).itemsize

    @property
    def start(self) -> int:
        """Byte offset of the first element in the file."""
        return self.storage.start + self.offset * self.itemsize

    @property
    def crc32(self) -> int | None:
        return self.storage.crc32

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        return contiguous_strides(self.shape, self.strides)

    @property
    def nbytes(self) -> int:
        """Number of bytes from the start of the first element to the end of the last element."""
        return _extent(self.shape, self.strides) * self.itemsize

    def same_storage(self, other: StoredTensor) -> bool:
        """Return whether the storages of two tensors have the same bytes, judging by their CRC-32s.

        Raises:
            UnsupportedFormatError: A file has no CRC-32s.
        """
        if self.storage.nbytes != other.storage.nbytes:
            return False
        for tensor in (self, other):
            if tensor.crc32 is None:
                raise UnsupportedFormatError(
                    f"{tensor.path} has no CRC-32s, by which ckptkit tells copies of a tensor from different tensors. "
                    "They are missing if torch.serialization.set_crc32_options(False) was called before the save, and "
                    "in the format that torch wrote before version 1.6."
                )
        return self.crc32 == other.crc32

    def slice(self, box: Box | None = None, *, rank: int = -1) -> TensorSlice:
        """Return this tensor as a catalog slice: the region `box` of a larger tensor or, by default, a full tensor."""
        digest = None
        if self.storage.crc32 is not None:
            digest = Digest(CRC, self.storage.crc32, self.storage.start, self.storage.nbytes)
        return TensorSlice(
            box or Box.whole(self.shape),
            self.path,
            self.start,
            self.nbytes,
            None if self.contiguous else self.strides,
            digest,
            rank=rank,
        )


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of elements that a strided view spans."""
    if 0 in shape:
        return 0
    return 1 + sum([(n - 1) * s for n, s in zip(shape, strides, strict=True)])


@dataclass(frozen=True, slots=True)
class PlacementRecord:
    """The placement of a DTensor on one mesh dimension.

    Attributes:
        kind: "shard", "strided_shard", "replicate" or "partial".
        dim: The tensor dimension that is sharded, or -1 for "replicate" and "partial".
        split_factor: Only for a strided shard: later mesh dimensions split the tensor dimension into this many parts.
    """

    kind: str
    dim: int = -1
    split_factor: int = 1


@dataclass(slots=True, eq=False)
class MeshRecord:
    """A device mesh: the global rank at each coordinate, and the names of the mesh dimensions, if any.

    Attributes:
        ranks: Global ranks. Each array dimension is a mesh dimension.
        rank: The global rank that pickled the mesh, or None if the pickle does not tell.
        coordinate: Position of `rank` in the mesh, or None if `rank` is not in the mesh.
    """

    ranks: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0,), np.int64))
    names: tuple[str, ...] | None = None
    rank: int | None = None
    coordinate: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.ranks.shape)


@dataclass(frozen=True, slots=True, eq=False)
class DTensorRecord(Stub):
    """One rank's part of a DTensor. `shape` is the shape of the full tensor."""

    local: StoredTensor
    shape: tuple[int, ...]
    placements: tuple[PlacementRecord, ...]
    mesh: MeshRecord

    @property
    def dtype(self) -> str:
        return self.local.dtype

    @property
    def rank(self) -> int | None:
        return self.mesh.rank


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """A region of a ShardedTensor, and the local tensor that holds the region's values."""

    tensor: StoredTensor
    box: Box


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTensorRecord(Stub):
    """One rank's part of a ShardedTensor. `boxes` lists the regions of all ranks, in rank order."""

    shards: tuple[ShardRecord, ...]
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    rank: int | None = None
    world_size: int | None = None


def is_tensor(value: Any) -> bool:
    """Return whether a value in an archive is a tensor record."""
    return isinstance(value, (StoredTensor, DTensorRecord, ShardedTensorRecord))


@dataclass(frozen=True, slots=True, eq=False)
class ClassRecord(Stub):
    """A tensor of a subclass that stores its values in other tensors.

    Attributes:
        kind: Full name of the class.
        dtype, shape, strides: Properties of the outer tensor.
        fields: The object's attributes. Each tensor is replaced by a record.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Wrapper(Stub):
    """The arguments of `_rebuild_wrapper_subclass`."""

    dtype: Any
    shape: tuple[int, ...]
    strides: Any


_DTENSOR_KINDS = frozenset(
    f"torch.distributed.{home}.DTensor" for home in ("tensor", "tensor._api", "_tensor", "_tensor.api")
)
_PLAIN_KINDS = frozenset(
    ("torch.Tensor", "torch.nn.Parameter", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
)


ONE_TENSOR = {"torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": ("_tensor", "_precomputed_scale")}
"""Subclasses that keep all values in one attribute (float8 all-gathers of FSDP2).

For each class: the name of that attribute, and the name of an attribute that is computed from the values. An instance
in a pickle is read as the tensor in the first attribute.
"""


class TensorRebuilder:
    """Replaces the tensor functions that a torch pickle calls. Builds records instead of tensors.

    The ranks of a mesh are stored in a small tensor. Its position is known only when the whole pickle has been read.
    Call `finish(read)` then, to fill in the ranks.

    Args:
        lazy: Accept lazy views, to which torch has not yet applied a conj or neg. If False, they are refused.
        classes: Return tensor subclasses as `ClassRecord`. If False, they are refused.
    """

    def __init__(self, *, lazy: bool = False, classes: bool = False) -> None:
        self._lazy = lazy
        self._classes = classes
        self._spare = _MAX_EXPANDED
        self._meshes: dict[int, tuple[MeshRecord, Record]] = {}
        utils: dict[str, Callable[..., Any]] = {
            "_rebuild_tensor": self._tensor,
            "_rebuild_tensor_v2": self._tensor,
            "_rebuild_tensor_v3": self._tensor_v3,
            "_rebuild_parameter": _parameter,
            "_rebuild_parameter_with_state": _parameter,
            "_rebuild_device_tensor_from_cpu_tensor": _parameter,
            "_rebuild_wrapper_subclass": lambda cls, dtype, size, strides=(), *_: _Wrapper(
                dtype, _numbers(size), strides
            ),
            "_rebuild_meta_tensor_no_storage": _meta,
        }
        self.functions: Mapping[tuple[str, str], Any] = {
            **{("torch._utils", name): Function(name, call) for name, call in utils.items()},
            ("torch._tensor", "_rebuild_from_type_v2"): Function("_rebuild_from_type_v2", self._from_type),
        }

    def finish(self, read: Callable[[StoredTensor], bytes]) -> None:
        """Fill in the ranks of all meshes. `read` returns the bytes of a contiguous tensor."""
        for mesh, record in self._meshes.values():
            _fill_mesh(mesh, record, read)
        self._meshes.clear()

    # --- functions that the pickle calls

    def _tensor(self, *args: Any) -> StoredTensor:
        return self._stored(None, *args)

    def _tensor_v3(self, storage: Any, offset: Any, size: Any, strides: Any, *rest: Any) -> StoredTensor:
        grad, hooks, dtype, *meta = rest
        if not isinstance(dtype, TorchDType):
            raise ValueError("a tensor's dtype is not known")
        return self._stored(dtype.name, storage, offset, size, strides, grad, hooks, *meta)

    def _stored(
        self,
        dtype: str | None,
        storage: Any,
        offset: Any,
        size: Any,
        strides: Any,
        grad: Any = False,
        hooks: Any = None,
        meta: Any = None,
    ) -> StoredTensor:
        """Return a tensor record, after checking that the tensor is within its storage.

        With a stride of 0, a tensor repeats elements and is larger than its storage. All tensors together may exceed
        their storages by `_MAX_EXPANDED` bytes.
        """
        if not isinstance(storage, Storage):
            raise ValueError("a tensor's storage is not valid")
        name = dtype or storage.dtype or "uint8"
        itemsize = known_dtype(name).itemsize
        shape, steps = _numbers(size), _numbers(strides)
        if len(shape) != len(steps) or type(offset) is not int or offset < 0:
            raise ValueError("a tensor's strides do not fit its shape")
        nbytes = math.prod(shape) * itemsize
        self._spare -= max(0, nbytes - storage.nbytes)
        if self._spare < 0:
            raise ValueError(
                f"a tensor of shape {list(shape)} declares {nbytes} bytes, but its storage holds {storage.nbytes}"
            )
        if nbytes and (offset + _extent(shape, steps)) * itemsize > storage.nbytes:
            raise ValueError(f"a tensor of shape {list(shape)} reaches past its storage of {storage.nbytes} bytes")
        return self._marked(StoredTensor(storage, name, shape, steps, offset), meta)

    def _marked(self, tensor: StoredTensor, meta: Any) -> StoredTensor:
        marks = frozenset(mark for mark in ("conj", "neg") if isinstance(meta, dict) and meta.get(mark))
        for mark in () if self._lazy else sorted(marks):
            text = f"holds a lazy {mark} view of a tensor. Save tensor.resolve_{mark}()."
            raise OpaqueTensorError(f"lazy {mark} view", text)
        return replace(tensor, marks=marks) if marks else tensor

    def _from_type(self, function: Any, cls: Any, args: Any, state: Any) -> Any:
        kind = cls.kind if isinstance(cls, type) and issubclass(cls, Record) else ""
        if not isinstance(function, Function) or not isinstance(args, tuple):
            raise ValueError("the constructor of a tensor is not a function")
        if kind in _PLAIN_KINDS:
            return function(*args)
        if kind in _DTENSOR_KINDS:
            return self._dtensor(function(*args), state)
        if kind.endswith(".ShardedTensor"):
            return _sharded_tensor(state)
        if kind in ONE_TENSOR:
            return _held_by(kind, function(*args), state)
        if self._classes and function.name == "_rebuild_wrapper_subclass":
            made = function(*args)
            if not isinstance(made.dtype, TorchDType) or not isinstance(state, dict):
                raise ValueError("a tensor subclass has no dtype or no attributes")
            return ClassRecord(kind, made.dtype.name, made.shape, _numbers(made.strides), state)
        raise OpaqueTensorError(kind or "?")

    def _dtensor(self, wrapper: Any, state: Any) -> DTensorRecord:
        if isinstance(state, tuple) and len(state) == 2:
            state = {**(state[0] or {}), **(state[1] or {})}
        local, spec = state["_local_tensor"], state["_spec"]
        if not isinstance(wrapper, _Wrapper) or not isinstance(local, StoredTensor) or not isinstance(spec, Record):
            raise ValueError("a DTensor has no local tensor")
        placements = tuple(_placement(p) for p in spec.fields["placements"])
        return DTensorRecord(local, wrapper.shape, placements, self._mesh(spec.fields["mesh"]))

    def _mesh(self, record: Any) -> MeshRecord:
        if not isinstance(record, Record):
            raise ValueError("a DTensor has no mesh")
        if id(record) not in self._meshes:
            self._meshes[id(record)] = (MeshRecord(), record)
        return self._meshes[id(record)][0]


def _numbers(values: Any, limit: int = _MAX_NUMEL) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or len(values) > _MAX_NDIM:
        raise ValueError("a shape is not a short tuple")
    if set(map(type, values)) - {int} or (values and not 0 <= min(values) <= max(values) <= limit):
        raise ValueError("a shape or a stride is not a list of natural numbers")
    return tuple(values)


def known_dtype(name: str) -> DType:
    """Return the `DType` with this name. Raises UnsupportedFormatError if tensors of this dtype can't be read."""
    try:
        return dtype_of(name)
    except UnsupportedFormatError:
        raise UnsupportedFormatError(f"holds a tensor of dtype {name}, which can't be read without loss.") from None


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _held_by(kind: str, made: Any, state: Any) -> StoredTensor:
    """Return the inner tensor that holds all values of a tensor of the class `kind` (see `ONE_TENSOR`)."""
    held = state.get(ONE_TENSOR[kind][0]) if isinstance(state, dict) else None
    if not isinstance(held, StoredTensor) or not isinstance(made, _Wrapper) or not isinstance(made.dtype, TorchDType):
        raise ValueError(f"a {kind} has no inner tensor")
    if (held.dtype, held.shape) != (made.dtype.name, made.shape):
        raise ValueError(
            f"a {kind} is {made.dtype.name} {list(made.shape)}, but its inner tensor is {held.dtype} {list(held.shape)}"
        )
    return held


def _meta(dtype: Any, size: Any, strides: Any, *_: Any) -> Any:
    raise UnsupportedFormatError("holds a tensor on the meta device, which has no data. Was the model materialized?")


def _placement(record: Any) -> PlacementRecord:
    if not isinstance(record, Record):
        raise ValueError("a placement is not valid")
    name = record.kind.rpartition(".")[2]
    fields = dict(record.fields)
    if record.args:
        fields.setdefault("dim", record.args[0])
        if len(record.args) > 1:
            fields.setdefault("split_factor", record.args[1])
    fields = {**fields, **record.kwargs}
    if name == "Replicate":
        return PlacementRecord("replicate")
    if name in ("Partial", "_Partial"):
        return PlacementRecord("partial")
    dim, factor = fields.get("dim"), fields.get("split_factor", 1)
    if name not in ("Shard", "_StridedShard") or type(dim) is not int or type(factor) is not int or factor < 1:
        raise UnsupportedFormatError(f"holds a DTensor with the placement {name}, which is unknown.")
    return PlacementRecord("shard" if name == "Shard" else "strided_shard", dim, factor)


def _sharded_tensor(state: Any) -> ShardedTensorRecord:
    if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[1], Record):
        raise ValueError("a ShardedTensor has no metadata")
    metadata = state[1].fields
    shards = []
    for shard in state[0]:
        tensor, box = shard.fields["tensor"], _shard_box(shard.fields["metadata"])
        if not isinstance(tensor, StoredTensor) or tensor.shape != box.sizes:
            raise ValueError("the shape of a local shard is not the one in its metadata")
        shards.append(ShardRecord(tensor, box))
    group = state[2].fields if len(state) > 2 and isinstance(state[2], Record) else {}
    return ShardedTensorRecord(
        tuple(shards),
        _numbers(metadata["size"]),
        tuple(_shard_box(m) for m in metadata["shards_metadata"]),
        _count_or_none(group.get("global_rank")),
        _count_or_none(group.get("global_world_size")),
    )


def _shard_box(metadata: Any) -> Box:
    if not isinstance(metadata, Record):
        raise ValueError("a shard has no metadata")
    return Box(_numbers(metadata.fields["shard_offsets"]), _numbers(metadata.fields["shard_sizes"]))


def _count_or_none(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


# --- meshes: torch <= 2.8 pickles `mesh`; later versions pickle `_rank_map`, and a layout with strides in `_rank_map`


def _fill_mesh(mesh: MeshRecord, record: Record, read: Callable[[StoredTensor], bytes]) -> None:
    fields = record.fields
    names = fields.get("mesh_dim_names", fields.get("_mesh_dim_names"))
    coordinate = fields.get("_coordinate_on_dim")
    mesh.names = tuple(str(n)[:64] for n in names) if isinstance(names, (tuple, list)) and names else None
    mesh.coordinate = _numbers(coordinate) if isinstance(coordinate, (tuple, list)) else None
    mesh.rank = _count_or_none(fields.get("_rank"))
    old = fields.get("mesh", fields.get("_mesh"))
    if isinstance(old, StoredTensor):
        mesh.ranks = _read_ranks(old, read)
    else:
        rank_map = fields.get("_rank_map")
        if not isinstance(rank_map, StoredTensor):
            raise ValueError("a device mesh has no ranks")
        mesh.ranks = _laid_out(_read_ranks(rank_map, read).reshape(-1), fields.get("_layout"), mesh)
    if mesh.rank is None and mesh.coordinate is not None:
        if len(mesh.coordinate) != mesh.ranks.ndim:
            raise ValueError("a rank's coordinate does not fit its mesh")
        mesh.rank = int(mesh.ranks[mesh.coordinate])


def _read_ranks(tensor: StoredTensor, read: Callable[[StoredTensor], bytes]) -> npt.NDArray[np.int64]:
    if tensor.dtype not in ("int32", "int64") or not tensor.contiguous or tensor.numel > 1 << 20:
        raise ValueError("the ranks of a device mesh are not plain integers")
    return np.frombuffer(read(tensor), tensor.dtype).astype(np.int64).reshape(tensor.shape)


def _laid_out(ranks: npt.NDArray[np.int64], layout: Any, mesh: MeshRecord) -> npt.NDArray[np.int64]:
    if not isinstance(layout, Record):
        raise ValueError("a device mesh has no layout")
    offsets: npt.NDArray[np.int64] = np.zeros((), np.int64)
    own = 0
    for dim, (sizes, strides) in enumerate(_axes(layout)):
        axis: npt.NDArray[np.int64] = np.zeros((), np.int64)
        for size, stride in zip(sizes, strides, strict=True):
            axis = axis[..., None] + np.arange(min(size, len(ranks) + 1)) * stride
            if axis.size > len(ranks):  # check at each step: forty dimensions of size 2 would take a terabyte
                raise ValueError("a device mesh is larger than its world")
        axis = axis.reshape(-1)
        offsets = offsets[..., None] + axis
        if offsets.size > len(ranks):
            raise ValueError("a device mesh is larger than its world")
        if mesh.coordinate is not None:
            own += int(axis[mesh.coordinate[dim]])
    if offsets.size < len(ranks) and mesh.coordinate is not None and mesh.rank is not None:
        # This is a sub-mesh, such as one dimension of a larger mesh. Choose the sub-mesh that contains this rank.
        offsets = offsets + (int(np.flatnonzero(ranks == mesh.rank)[0]) - own)
    if offsets.size and offsets.min() < 0:
        raise ValueError("a device mesh contains a negative rank index")
    return ranks[offsets]


def _axes(layout: Record) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    axes = layout.fields.get("axes")
    if isinstance(axes, (tuple, list)):
        for axis in axes:
            yield _flat(axis.fields["shape"]), _flat(axis.fields["stride"])
        return
    shape, stride = layout.fields["shape"], layout.fields["stride"]
    if type(shape) is int:
        shape, stride = (shape,), (stride,)
    for size, step in zip(shape, stride, strict=True):
        yield _flat(size), _flat(step)


def _flat(value: Any) -> tuple[int, ...]:
    return _numbers((value,) if type(value) is int else value, 1 << 31)
