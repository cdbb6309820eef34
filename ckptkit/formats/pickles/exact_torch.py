"""Tensors, storages and small types of torch, made again exactly from what a pickle says of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ckptkit.formats.pickles.exact_values import UNFOLDED, Builder, Maker, RefusedError, checked, set_attributes
from ckptkit.formats.pickles.inert import Record, Stub

__all__ = ["DTYPES", "QSCHEMES", "STORAGES", "TORCH_MAKERS", "StoredBytes", "storages"]

STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64, "QInt8": torch.qint8,
        "QUInt8": torch.quint8, "QInt32": torch.qint32, "QUInt4x2": torch.quint4x2, "QUInt2x4": torch.quint2x4,
    }.items()
}  # fmt: skip
DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
QSCHEMES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.qscheme)}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


class StoredBytes(Stub):
    """What stands for a storage: its kind, its name in the archive, its elements (bytes where it has no dtype)."""

    __slots__ = ("count", "dtype", "key")

    def __init__(self, identity: Any) -> None:
        tag, kind, key, _, count = identity
        name = getattr(kind, "kind", "")
        if tag != "storage" or type(key) is not str or type(count) is not int or count < 0:
            raise ValueError("no storage")
        if name not in STORAGES and name not in ("torch.storage.UntypedStorage", "torch.UntypedStorage"):
            raise ValueError("a storage of another kind")
        self.dtype = STORAGES.get(name)
        self.key = key
        self.count = count


class _Storages:
    """The storages of one archive, each made once."""

    def __init__(self, read: Callable[[str], bytes]) -> None:
        self._read = read
        self._made: dict[str, torch.UntypedStorage] = {}

    def bytes_of(self, stored: Any) -> torch.UntypedStorage:
        if type(stored) is not StoredBytes:
            raise ValueError("no storage")
        if stored.key not in self._made:
            data = self._read(stored.key)
            self._made[stored.key] = (
                torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage()
                if data
                else torch.empty(0, dtype=torch.uint8).untyped_storage()
            )
        made = self._made[stored.key]
        if stored.count * (1 if stored.dtype is None else stored.dtype.itemsize) > made.nbytes():
            raise ValueError("a storage longer than its bytes")
        return made

    def __call__(self, stored: Any) -> Any:
        return _typed(self.bytes_of(stored), stored.dtype or torch.uint8)


def _typed(memory: torch.UntypedStorage, dtype: torch.dtype) -> Any:
    made: Any = torch.storage.TypedStorage
    return made(wrap_storage=memory, dtype=dtype, _internal=True)


def storages(read: Callable[[str], bytes]) -> Any:
    """Return the maker of storages. `read`: the bytes of one by its name in the archive."""
    return _Storages(read)


# --- dense tensors


def _tensor(builder: Builder, record: Record, dtype: torch.dtype | None = None) -> torch.Tensor:
    """_rebuild_tensor(storage, offset, size, stride), and v2: (..., requires_grad, hooks, marks)."""
    storage, offset, size, stride = record.args[:4]
    rest: tuple[Any, ...] = (*record.args[4:7], *(False, None, None)[len(record.args[4:7]) :])
    grad, _, marks = rest
    made = _view(builder, storage, dtype or storage.dtype or torch.uint8, (offset, size, stride))
    for name, mark in builder.of(marks or {}).items():
        if mark:
            made = {"conj": torch.conj, "neg": torch._neg_view}[name](made)
    return made.requires_grad_() if grad else made


def _tensor_v3(builder: Builder, record: Record) -> torch.Tensor:
    """_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype, marks)."""
    dtype = builder.of(record.args[6])
    if not isinstance(dtype, torch.dtype):
        raise ValueError("no dtype")
    shorter = type(record)(*record.args[:6], *record.args[7:])
    return _tensor(builder, shorter, dtype)


def _view(builder: Builder, storage: Any, dtype: torch.dtype, place: tuple[Any, Any, Any]) -> torch.Tensor:
    assert isinstance(builder.storage, _Storages)
    memory = builder.storage.bytes_of(storage)
    offset, size, stride = _checked_place(place, memory.nbytes() // dtype.itemsize, dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(memory, offset, size, stride)


def _checked_place(
    place: tuple[Any, Any, Any], count: int, itemsize: int
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    offset, size, stride = place
    checked((offset, size, stride), int, tuple, tuple)
    for numbers in ((offset,), size, stride):
        checked(numbers, *(int for _ in numbers))
        if any(n < 0 or n >= 1 << 62 for n in numbers):
            raise ValueError("no shape")
    if len(size) != len(stride) or len(size) > 64:
        raise ValueError("strides that do not fit their shape")
    numel = math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1 if numel else 0
    if last > count or numel * itemsize > max(count * itemsize, UNFOLDED):
        raise ValueError("a tensor larger than what is stored")
    return offset, size, stride


def _parameter(builder: Builder, record: Record) -> torch.nn.Parameter:
    """_rebuild_parameter(data, requires_grad, hooks), and with the attributes of one."""
    data, grad = builder.of(record.args[0]), bool(record.args[1])
    if not isinstance(data, torch.Tensor):
        raise ValueError("a parameter of no tensor")
    made = torch.nn.Parameter(data, requires_grad=grad)
    if len(record.args) > 3:
        set_attributes(made, builder.of(record.args[3]))
    return made


def _of_type(builder: Builder, record: Record) -> Any:
    """_rebuild_from_type_v2(function, class, arguments, attributes)."""
    function, kind, args, state = record.args
    if builder.of(kind) not in (torch.Tensor, torch.nn.Parameter):
        raise RefusedError(kind.kind)
    inner = function(*args)
    if inner.kind not in _DENSE:
        raise RefusedError(inner.kind)
    made = builder.of(inner)
    set_attributes(made, builder.of(state))
    return made


# --- others


def _quantized(builder: Builder, record: Record) -> torch.Tensor:
    """_rebuild_qtensor(storage, offset, size, stride, (scheme, ...), requires_grad, hooks)."""
    storage, scheme = record.args[0], builder.of(record.args[4])
    assert isinstance(builder.storage, _Storages)
    if type(storage) is not StoredBytes or storage.dtype is None or type(scheme) is not tuple:
        raise ValueError("no quantized tensor")
    memory = builder.storage.bytes_of(storage)
    dtype = storage.dtype
    offset, size, stride = _checked_place(record.args[1:4], storage.count, dtype.itemsize)
    if scheme[0] is torch.per_tensor_affine:
        checked(scheme[1:], float, int)
    elif (
        not all(isinstance(part, torch.Tensor) and part.dim() == 1 for part in scheme[1:3])
        or type(scheme[3]) is not int
    ):
        raise ValueError("no quantized tensor")
    rebuild: Callable[..., torch.Tensor] = torch._utils._rebuild_qtensor
    return rebuild(_typed(memory, dtype), offset, size, stride, scheme, False, {})


def _sparse(builder: Builder, record: Record) -> torch.Tensor:
    """_rebuild_sparse_tensor(layout, parts): torch checks that the indices are within the shape."""
    layout, parts = builder.args(record)
    if layout is torch.sparse_coo:
        indices, values, size, *coalesced = parts
        return torch.sparse_coo_tensor(
            indices, values, size, check_invariants=True, is_coalesced=coalesced[0] if coalesced else None
        )
    compressed, plain, values, size = parts
    return torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=True)


def _layout(builder: Builder, record: Record) -> torch.layout:
    (name,) = checked(builder.args(record), str)
    return _LAYOUTS[name]


def _random(builder: Builder, record: Record) -> torch.Generator:
    (device,), (_, _, state) = builder.args(record), builder.of(record.state)
    made = torch.Generator(device)
    made.set_state(state)
    return made


def _result(builder: Builder, record: Record) -> Any:
    """A named tuple of torch.return_types."""
    kind = getattr(torch.return_types, record.kind.rpartition(".")[2])
    items, rest = checked(builder.args(record), (tuple, list), dict)
    if rest:
        raise ValueError("a named tuple with more than its items")
    return kind(items)


def _called(make: Callable[..., Any], *kinds: type[Any], least: int | None = None) -> Maker:
    return lambda builder, record: make(*checked(builder.args(record), *kinds, least=least))


TORCH_MAKERS: dict[str, Maker] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.serialization._get_layout": _layout,
    "torch.Size": lambda builder, record: torch.Size(*checked(builder.args(record), tuple)),
    "torch.device": _called(torch.device, str, int, least=1),
    "torch.torch_version.TorchVersion": _called(torch.torch_version.TorchVersion, str),
    "torch._C.Generator": _random,
    **{
        f"torch.return_types.{name}": _result
        for name, kind in vars(torch.return_types).items()
        if isinstance(kind, type) and issubclass(kind, tuple)
    },
}
_DENSE = frozenset(kind for kind in TORCH_MAKERS if kind.startswith("torch._utils._rebuild_tensor"))
