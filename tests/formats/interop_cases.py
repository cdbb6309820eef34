"""Values that a training state may hold, with a factory each: every dtype, kind of tensor, and plain Python type."""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import pathlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

Case = tuple[str, Callable[[], Any]]
BYTES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
         "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
         *(f"{sign}int{bits}" for bits in range(1, 8) for sign in ("", "u")))  # fmt: skip
QUANTIZED = ("quint8", "qint8", "qint32")
NUMBERS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
           "uint64", "bool", "complex32", "complex64", "complex128")  # fmt: skip


def of_dtype(name: str) -> torch.Tensor:
    dtype = getattr(torch, name)
    count = 6 * dtype.itemsize
    bits = torch.arange(count, dtype=torch.uint8) % 2 if name == "bool" else torch.arange(count, dtype=torch.uint8) * 5
    made = torch.empty(6, dtype=dtype)
    made.untyped_storage().copy_(bits.untyped_storage())
    return made.reshape(2, 3)


def _real() -> torch.Tensor:
    return torch.arange(12, dtype=torch.float32).reshape(3, 4) - 5.5


def _complex() -> torch.Tensor:
    return torch.complex(_real(), _real().flip(0))


def _parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(_real())


def _frozen() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(3), requires_grad=False)


class Doubled(torch.Tensor):
    """A subclass that torch rebuilds by its class."""


def _per_channel(dtype: torch.dtype) -> torch.Tensor:
    of_scales, of_zeros = (torch.float32,) * 2 if dtype is torch.quint4x2 else (torch.float64, torch.int64)
    scales, zeros = torch.tensor([0.1, 0.2, 0.5], dtype=of_scales), torch.tensor([0, 1.5, 2]).to(of_zeros)
    return torch.quantize_per_channel(_real(), scales, zeros, 0, dtype)


TENSORS: list[Case] = [
    *((name, functools.partial(of_dtype, name)) for name in (*NUMBERS, *BYTES)),
    ("0-d", lambda: torch.tensor(2.5)),
    ("0-d complex", lambda: torch.tensor(2.5 + 1j)),
    ("empty", lambda: torch.empty(0)),
    ("no rows", lambda: torch.empty(0, 4, dtype=torch.bfloat16)),
    ("no columns", lambda: torch.empty(4, 0, 3)),
    ("expanded", lambda: torch.arange(3.0).expand(4, 3)),
    ("expanded scalar", lambda: torch.tensor(1.5).expand(2, 3)),
    ("strided", lambda: torch.arange(24.0).reshape(4, 6)[::2, 1::3]),
    ("transposed", lambda: _real().T),
    ("permuted", lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)),
    ("channels last", lambda: torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last)),
    ("with an offset", lambda: torch.arange(100.0)[37:41]),
    ("overlapping", lambda: torch.arange(8.0).as_strided((3, 3), (2, 1))),
    ("conj", lambda: _complex().conj()),
    ("conj transposed", lambda: _complex().T.conj()),
    ("conj of half", lambda: _complex().to(torch.complex32).conj()),
    ("conj of a slice", lambda: _complex().to(torch.complex128)[1:, ::2].conj()),
    ("conj 0-d", lambda: torch.tensor(1 + 2j).conj()),
    ("conj of nothing", lambda: torch.empty(0, 2, dtype=torch.complex64).conj()),
    ("neg", lambda: _complex().conj().imag),
    ("neg of double", lambda: _complex().to(torch.complex128).conj().imag),
    ("conj and neg", lambda: torch._neg_view(_complex().conj())),
    ("neg of complex", lambda: torch._neg_view(_complex())),
    ("parameter", _parameter),
    ("frozen parameter", _frozen),
    ("buffer", lambda: torch.nn.Buffer(_real())),
    ("requires grad", lambda: _real().requires_grad_()),
    ("not a leaf", lambda: _real().requires_grad_() * 2),
    ("subclass", lambda: _real().as_subclass(Doubled)),
    ("with an attribute", lambda: _attributed(_real())),
    ("sparse coo", lambda: _real().relu().to_sparse()),
    ("sparse coo not coalesced", lambda: torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 2]], [1.0, 2.0, 3.0], (2, 3))),
    ("sparse hybrid", lambda: torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 3), (4, 3)).coalesce()),
    ("sparse csr", lambda: _real().relu().to_sparse_csr()),
    ("sparse csc", lambda: _real().relu().to_sparse_csc()),
    ("sparse bsr", lambda: _real().relu().to_sparse_bsr((1, 2))),
    ("sparse bsc", lambda: _real().relu().to_sparse_bsc((1, 2))),
    ("nested", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ("jagged", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
    ("mkldnn", lambda: _real().to_mkldnn()),
    *((f"quantized {name}", functools.partial(torch.quantize_per_tensor, _real(), 0.1, 3, getattr(torch, name)))
      for name in QUANTIZED),
    ("quantized, transposed", lambda: torch.quantize_per_tensor(_real(), 0.1, 3, torch.qint8).T),
    *((f"quantized per channel {name}", functools.partial(_per_channel, getattr(torch, name)))
      for name in (*QUANTIZED, "quint4x2")),
]  # fmt: skip


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Point(NamedTuple):
    x: int = 1
    y: int = 2


class Plain:
    def __init__(self) -> None:
        self.a = 1

    def __eq__(self, other: object) -> bool:
        return type(other) is Plain and vars(other) == vars(self)


class Sized(dict):  # type: ignore[type-arg]
    pass


def _function() -> None:
    pass


def _attributed(value: Any) -> Any:
    value.note = [1]
    return value


def _default(factory: Any) -> Any:
    made = collections.defaultdict(factory)
    made["x"] = 3
    return made


def _shared(one: Any) -> Any:
    return (one, one, [one], {"a": one})


def _sharing(tensor: torch.Tensor) -> Any:
    return (tensor[:2], tensor, collections.deque([tensor[1:]]))


_ONE = datetime.timezone(datetime.timedelta(hours=1), "one")
VALUES: list[Any] = [
    7, -(1 << 40), 1 << 100, -(1 << 2000), True, None, 1.5, -0.0, float("inf"), float("nan"), 1 + 2j,
    complex("nan-infj"), "", "text", "ünïcödé 漢字 \U0001f600", "lone \ud800", "nul \0", b"", b"\x00\xff\n",
    bytearray(b"ab\x80"), (), (1,), (1, (2, "x")), [], [1, [2]], {1, 2}, set(), frozenset(),
    int, float, str, dict, list, complex,
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.datetime(2026, 1, 2, 3, fold=1),
    datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc), datetime.datetime(2026, 1, 2, tzinfo=_ONE),
    datetime.date(2026, 1, 2), datetime.time(3, 4, 5), datetime.time(3, 4, 5, tzinfo=datetime.timezone.utc),
    datetime.timedelta(-1, 2, 3), datetime.timezone.utc, _ONE,
    pathlib.Path("a/b"), pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("c:\\x\\y"), pathlib.Path(),
    torch.Size([2, 3]), torch.Size([]), torch.float32, torch.float8_e4m3fn, torch.uint4,
    torch.device("cpu"), torch.device("cuda", 1), torch.device("meta"),
    torch.strided, torch.sparse_coo, torch.per_tensor_affine, torch.__version__,
    collections.OrderedDict([(1, 2), ("b", [1])]), [collections.OrderedDict(b=1, a=2)], [collections.Counter("abca")],
    collections.deque([1, [2], "x"]), collections.deque([1, 2], maxlen=5),
    frozenset((1, "x", (2, b"y"))), {(1, "a"), (2, frozenset((3,)))},
    ({1: "a", None: 2, (1, 2): 3, False: 4, 1.5: 5, b"x": 6, frozenset((1,)): 7},),
    ({torch.float32: 1, pathlib.Path("x"): 2, datetime.date(2026, 1, 2): 3},),
    np.arange(6, dtype="<i4").reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(["a", "bc"]),
    np.array([b"a", b"bc"]), np.zeros((0, 3), bool), np.array(3j, "c8"), np.array([1.5], "f2"),
    np.array([1.5], np.longdouble), np.arange(10)[::3], np.dtype("f4"), np.float32, np.str_("ab"),
    *(np.array(3).astype(kind)[()] for kind in ("f4", "f8", "i8", "u1", "?", "c16", "f2")),
    np.random.RandomState(1).get_state(), np.random.default_rng(1).bit_generator.state, np.random.SeedSequence(5).state,
    torch.Generator().manual_seed(3).get_state(), random.Random(4).getstate(),
]  # fmt: skip
OBJECTS: list[Case] = [
    # Not the value's repr: the order of a set differs between the processes that run the tests.
    *((f"{type(value).__name__} {i}", functools.partial(lambda v: v, value)) for i, value in enumerate(VALUES)),
    ("OrderedDict with an attribute", lambda: [_attributed(collections.OrderedDict(b=1))]),
    ("defaultdict", lambda: [_default(int)]),
    ("defaultdict of lists", lambda: [_default(list)]),
    ("defaultdict of nothing", lambda: (_default(None),)),
    ("deque of tensors", lambda: collections.deque([torch.arange(3), torch.ones(2, 2).T])),
    ("shared list", lambda: _shared([1])),
    ("shared deque", lambda: _shared(collections.deque([1]))),
    ("tensors in a tuple", lambda: (torch.arange(3), torch.ones(2, requires_grad=True), _parameter())),
    ("tensors beside a deque", lambda: (torch.arange(6).reshape(2, 3).T, collections.deque(),
                                        torch.ones(2, requires_grad=True), _frozen())),
    ("tensors that share memory", lambda: _sharing(torch.arange(4))),
    ("every dtype beside a deque", lambda: (collections.deque(), *map(of_dtype, NUMBERS), *(
        of_dtype(name) for name in BYTES if name.startswith("float")))),
    ("conj beside a deque", lambda: (collections.deque(), _complex().conj(), _complex().conj().imag)),
    ("very long", lambda: ["x" * 100, *range(30000)]),
    ("deep", lambda: functools.reduce(lambda inner, _: (inner,), range(90), collections.deque())),
]  # fmt: skip

# Library objects that are neither accepted by torch's weights_only loader nor plain values, with their error names.
REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("builtins.range", lambda: range(3)),
    ("builtins.type", lambda: type(None)),
    ("decimal.Decimal", lambda: decimal.Decimal("1.50")),
    ("torch.return_types.max", lambda: torch.ones(2, 2).max(0)),
    ("argparse.Namespace", lambda: argparse.Namespace(a=1)),
    ("_io.BytesIO", lambda: io.BytesIO(b"abc")),
    ("functools.partial", lambda: functools.partial(int, base=2)),
    ("numpy array of dtype 'V12'", lambda: np.array([(1, 2.5)], [("a", "<i4"), ("b", "<f8")])),
    ("numpy array of dtype 'M8'", lambda: np.array(["2026-01-02"], "M8[D]")),
    ("numpy array of dtype 'O8'", lambda: np.array([1, "x", None], object)),
    ("numpy.ma.core._mareconstruct", lambda: np.ma.array([1, 2], mask=[0, 1])),
    ("numpy.random._pickle.__generator_ctor", lambda: np.random.default_rng(5)),
    ("torch._C.Generator", lambda: torch.Generator()),
    ("torch._utils._rebuild_qtensor", lambda: (collections.deque(), _per_channel(torch.qint8))),
    ("torch._utils._rebuild_sparse_tensor", lambda: (collections.deque(), _real().relu().to_sparse())),
]

# Objects that only their own code could restore.
CODE: list[Case] = [
    ("enum", lambda: Colour.RED),
    ("dataclass", Settings),
    ("namedtuple", Point),
    ("class", Plain),
    ("subclass of dict", lambda: [Sized(a=1)]),
    ("function", lambda: _function),
    ("defaultdict of code", lambda: [_default(_function)]),
]


def blank(value: Any) -> Any:
    """Return what a job holds before it loads: the same tensors without their values, None for objects."""
    if isinstance(value, dict) and type(value) in (dict, collections.OrderedDict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, (torch.Tensor, dict)) for item in value):
        return [blank(item) for item in value]
    if isinstance(value, DTensor):
        local = blank(value.to_local())
        return DTensor.from_local(local, value.device_mesh, value.placements, shape=value.shape, stride=value.stride())
    if not isinstance(value, torch.Tensor):
        return None
    if value.is_quantized:
        return _requantized(value)
    made = torch.zeros(value.numel() * value.element_size(), dtype=torch.uint8).view(value.dtype).reshape(value.shape)
    return torch.nn.Parameter(made, requires_grad=value.requires_grad) if type(value) is torch.nn.Parameter else made


def _requantized(value: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(value.shape)
    if value.qscheme() is torch.per_tensor_affine:
        return torch.quantize_per_tensor(zeros, 0.7, 1, value.dtype)
    count = value.shape[value.q_per_channel_axis()]
    scales, points = torch.full((count,), 0.7, dtype=torch.float64), torch.ones(count, dtype=torch.int64)
    return torch.quantize_per_channel(zeros, scales, points, value.q_per_channel_axis(), value.dtype)


# What a tensor without dense memory consists of, by layout or quantization.
PARTS: dict[Any, tuple[str, ...]] = {
    torch.sparse_coo: ("is_coalesced", "_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
    torch.per_tensor_affine: ("q_scale", "q_zero_point", "int_repr"),
    **dict.fromkeys(
        (torch.per_channel_affine, torch.per_channel_affine_float_qparams),
        ("q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis", "int_repr"),
    ),
}


def raw(tensor: torch.Tensor) -> Any:
    """Return a tensor in a form that can be compared to the bit."""
    tensor = tensor.detach()
    kind = tensor.qscheme() if tensor.is_quantized else tensor.layout
    if kind in PARTS:
        values = [getattr(tensor, part)() for part in PARTS[kind]]
        return kind, [raw(value) if isinstance(value, torch.Tensor) else value for value in values]
    if tensor.is_nested:
        return [raw(part) for part in tensor.unbind()]
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    if not tensor.numel():
        return b""
    flat = tensor.contiguous().as_subclass(torch.Tensor).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()  # bytes(storage) would take a second per megabyte


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal to the bit, with types and shared objects."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, np.ndarray):
        if not (a.dtype == b.dtype and a.shape == b.shape and a.flags.writeable == b.flags.writeable):
            return False
        ordered = not (a.size and a.flags.forc and b.flags.forc) or a.flags.f_contiguous == b.flags.f_contiguous
        return ordered and same(a.tolist(), b.tolist())
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue()
    if isinstance(a, dict):
        extras = [(getattr(x, "default_factory", None), getattr(x, "__dict__", None)) for x in (a, b)]
        alike = list(map(repr, a)) == list(map(repr, b)) and extras[0] == extras[1]
        return alike and all(map(same, a.values(), b.values()))
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and getattr(a, "maxlen", None) == getattr(b, "maxlen", None) and all(map(same, a, b))
    return bool(a == b)
