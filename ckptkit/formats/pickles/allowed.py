"""Defines the allow-list for pickles: the permitted globals, and a harmless stand-in value for each global."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptkit.catalog.dtypes import DTYPES
from ckptkit.errors import UnsupportedFormatError
from ckptkit.formats.pickles import inert as stubs
from ckptkit.formats.pickles.inert import Function, Record, StateDict, StorageType, TorchDType, record_type

_MAX_KEY_NODES = 64
_INT_HASH_MODULUS = (1 << 61) - 1  # CPython's hash modulus for int; larger ints as keys can be made to collide


def checked_key(key: Any) -> Any:
    """Return `key` if it is cheap to hash, otherwise raise ValueError.

    Hashing nested tuples can take exponential time and exhaust the C stack.
    """
    pending, nodes = [key], 0
    while pending:
        item = pending.pop()
        nodes += 1
        if nodes > _MAX_KEY_NODES:
            raise ValueError("a key is a tuple nested too deeply")
        if type(item) is tuple:
            pending.extend(item[:_MAX_KEY_NODES])
        elif type(item) is int:
            if not -_INT_HASH_MODULUS < item < _INT_HASH_MODULUS:
                raise ValueError("a key is too large an integer")
        elif type(item).__hash__ is None:
            raise ValueError(f"a {type(item).__name__} can't be a key")
    return key


def _dict(*args: Any) -> StateDict:
    """Build the dict for a pickled OrderedDict, given its arguments: none (Python 3), or key-value pairs (Python 2)."""
    made = StateDict()
    if args and args[0] is not None:
        pairs = args[0].items() if isinstance(args[0], dict) else args[0]
        for key, value in pairs:
            made[checked_key(key)] = value
    return made


def _set(*args: Any) -> set[Any]:
    return {checked_key(item) for item in _sequence(args)}


def _sequence(args: tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    if not args:
        return ()
    if len(args) > 1 or not isinstance(args[0], (list, tuple)):
        raise ValueError("expected one list or tuple")
    return args[0]


def _bytearray(*args: Any) -> bytearray:
    if not args:
        return bytearray()
    if isinstance(args[0], (bytes, bytearray)):
        return bytearray(args[0])
    return bytearray(_encode(*args))


def _bytes(*args: Any) -> bytes:
    if not args:
        return b""
    if len(args) == 1 and isinstance(args[0], (bytes, bytearray)):
        return bytes(args[0])
    if len(args) == 1 and isinstance(args[0], list) and all(type(i) is int and 0 <= i < 256 for i in args[0]):
        return bytes(args[0])
    return _encode(*args)


def _encode(text: Any, encoding: Any = "latin1", *_: Any) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8", "utf8", "ascii"):
        raise ValueError("_codecs.encode is allowed only for text in latin1, utf-8 and ascii")
    return text.encode(encoding)


def _complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex:
    if type(real) not in (int, float) or type(imaginary) not in (int, float):
        raise ValueError("an argument of complex is not a number")
    return complex(real, imaginary)


def _reconstructor(cls: Any, base: Any = None, state: Any = None) -> Record:
    """Build an inert `Record` in place of the instance that copyreg._reconstructor would build.

    Pickles of protocols 0 and 1 call copyreg._reconstructor for instances of ordinary classes. `state` is None, unless
    the class derives from a built-in type, such as str.
    """
    if not (isinstance(cls, type) and issubclass(cls, Record)):
        raise ValueError("an object of a class that is not a record")
    return cls() if state is None else cls(state)


def _layout(name: Any) -> str:
    """Return a layout's name. Replaces torch.serialization._get_layout, which returns the layout itself."""
    if not isinstance(name, str):
        raise ValueError("a layout name is not a string")
    return name.removeprefix("torch.")


def _numpy_frombuffer(data: Any, dtype: Any, shape: Any, order: Any = "C", *_: Any) -> stubs.NDArray:
    """Build an inert array in place of the array that numpy._core.numeric._frombuffer (protocol 5) would build."""
    made = stubs.NDArray()
    made.state = (1, shape, dtype, order == "F", data)
    return made


def _refused(what: str) -> Function:
    def call(*_: Any) -> Any:
        raise UnsupportedFormatError(f"holds a {what}, which can't be read without loss. Save dense tensors instead.")

    return Function(what, call)


_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "QInt8Storage": "qint8", "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
STORAGE_CLASSES = {dtype: name for name, dtype in _STORAGES.items()}
"""The storage class that torch.save uses for each dtype.

Tensors of other dtypes use UntypedStorage, and the pickle contains the dtype.
"""
_OTHER_DTYPES = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *("qint8", "quint8", "qint32", "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
)

_LAYOUTS = (
    "strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged",
    "contiguous_format", "channels_last", "channels_last_3d", "preserve_format",
)  # fmt: skip

_DCP = "torch.distributed.checkpoint"
_SHARD = "torch.distributed._shard"
_METADATA: dict[str, Any] = {
    "Metadata": record_type(f"{_DCP}.metadata.Metadata"),
    "TensorStorageMetadata": stubs.TensorMetadata,
    "BytesStorageMetadata": record_type(f"{_DCP}.metadata.BytesStorageMetadata"),
    "TensorProperties": record_type(f"{_DCP}.metadata.TensorProperties"),
    "ChunkStorageMetadata": stubs.ChunkMetadata,
    "MetadataIndex": stubs.Index,
    "StorageMeta": record_type(f"{_DCP}.metadata.StorageMeta"),
    "_MEM_FORMAT_ENCODING": record_type(f"{_DCP}.metadata._MEM_FORMAT_ENCODING"),
    "MEM_FORMAT_ENCODING": record_type(f"{_DCP}.metadata._MEM_FORMAT_ENCODING"),
    "_StorageInfo": stubs.StorageInfo,
    "_StoragePrefix": record_type(f"{_DCP}.filesystem._StoragePrefix"),
}
_METADATA_HOMES = (
    f"{_DCP}.metadata", f"{_DCP}.filesystem", f"{_SHARD}.checkpoint.metadata", f"{_SHARD}.checkpoint.filesystem",
    f"{_SHARD}.sharded_tensor.metadata",
)  # fmt: skip

# Modules that define only plain data classes: each of these classes becomes a record.
_FAMILIES = re.compile(
    r"torch\.distributed\.(?:_shard|_tensor|tensor|device_mesh|_mesh_layout|_pycute|remote_device|_remote_device)"
    r"(?:\.[A-Za-z_][A-Za-z0-9_]*)*"
)
_CLASS_NAME = re.compile(r"_{0,2}[A-Z][A-Za-z0-9_]{0,63}|_remote_device")

_RECORDS = (
    "torch.device", "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer",
    "torch.nn.Parameter", "torch.Generator", "torch.torch_version.TorchVersion",
    "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath", "pathlib.PureWindowsPath", "pathlib.Path",
    "pathlib._local.PosixPath", "pathlib._local.WindowsPath", "pathlib._local.PurePosixPath",
    "pathlib._local.PureWindowsPath", "pathlib._local.Path",
    "argparse.Namespace", "types.SimpleNamespace",
    "datetime.datetime", "datetime.date", "datetime.time", "datetime.timedelta", "datetime.timezone",
    "_io.BytesIO",
    "uuid.UUID", "decimal.Decimal", "fractions.Fraction",
    "builtins.slice", "__builtin__.slice", "builtins.range", "__builtin__.xrange",
    "builtins.int", "builtins.float", "builtins.str", "builtins.bool", "__builtin__.int", "__builtin__.float",
    "__builtin__.long", "__builtin__.str", "__builtin__.unicode", "__builtin__.bool", "builtins.object",
    "__builtin__.object",
    "numpy.ndarray", "numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar",
    "typing.Any", "omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig",
    *(f"omegaconf.base.{name}" for name in ("Metadata", "ContainerMetadata")),
    *(f"omegaconf.nodes.{kind}Node" for kind in ("Any", "String", "Integer", "Float", "Boolean", "Bytes", "Path")),
    "lightning.fabric.utilities.data.AttributeDict", "lightning_fabric.utilities.data.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict", "lightning.pytorch.utilities.parsing.AttributeDict",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum", "deepspeed.utils.tensor_fragment.fragment_address",
    stubs.HISTORY_BUFFER, "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor",
    *(f"torchao.float8.{home}.{name}" for home in ("float8_tensor", "float8_training_tensor")
      for name in ("LinearMMConfig", "ScaledMMConfig")),
)  # fmt: skip


def _functions() -> dict[tuple[str, str], Any]:
    table: dict[tuple[str, str], Any] = {
        ("torch", "Size"): tuple,
        ("torch.serialization", "_get_layout"): Function("_get_layout", _layout),
        ("collections", "OrderedDict"): Function("OrderedDict", _dict),
        ("collections", "Counter"): Function("Counter", _dict),
        ("collections", "defaultdict"): Function("defaultdict", lambda *_: StateDict()),
        ("collections", "deque"): Function("deque", lambda *args: list(_sequence(args[:1]))),
        ("_codecs", "encode"): Function("encode", _encode),
        ("torch._utils", "_rebuild_sparse_tensor"): _refused("sparse tensor"),
        ("torch._utils", "_rebuild_qtensor"): _refused("quantized tensor"),
        ("torch._utils", "_rebuild_nested_tensor"): _refused("nested tensor"),
    }
    for home in ("copyreg", "copy_reg"):
        table[home, "_reconstructor"] = Function("_reconstructor", _reconstructor)
    for core in ("numpy.core", "numpy._core"):
        table[f"{core}.multiarray", "_reconstruct"] = Function("_reconstruct", stubs.NDArray)
        table[f"{core}.numeric", "_frombuffer"] = Function("_frombuffer", _numpy_frombuffer)
    for home in ("builtins", "__builtin__"):
        for name, call in (
            ("set", _set), ("frozenset", lambda *args: frozenset(_set(*args))),
            ("list", lambda *args: list(_sequence(args))), ("dict", _dict), ("complex", _complex),
            ("bytearray", _bytearray), ("bytes", _bytes), ("getattr", stubs.attribute_of),
        ):  # fmt: skip
            table[home, name] = Function(name, call)
        table[home, "tuple"] = tuple
    return table


def _names() -> dict[tuple[str, str], Any]:
    """Return the values that replace torch's dtypes, layouts, memory formats and storage classes in a pickle.

    The keys are (module, name).
    """
    table: dict[tuple[str, str], Any] = {("torch", name): TorchDType(name) for name in (*DTYPES, *_OTHER_DTYPES)}
    table.update((("torch", name), name) for name in _LAYOUTS)
    for home in ("torch", "torch.cuda", "torch.storage"):
        table.update(((home, name), StorageType(dtype)) for name, dtype in _STORAGES.items())
        table[home, "UntypedStorage"] = StorageType(None)
    return table


def _classes() -> dict[tuple[str, str], Any]:
    table = {(home, name): stub for home in _METADATA_HOMES for name, stub in _METADATA.items()}
    for name in ("MCoreMetadata", "MCoreSavePlan"):
        table["megatron.core.dist_checkpointing.strategies.torch", name] = _METADATA["Metadata"]
    for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"):
        # megatron-core stores all ranks' plans in .metadata, to reuse them in a later save.
        table[f"{_DCP}.planner", name] = record_type(f"{_DCP}.planner.{name}")
    for full in _RECORDS:
        module, _, name = full.rpartition(".")
        table[module, name] = record_type(full)
    return table


ALLOWED: Mapping[tuple[str, str], Any] = {**_functions(), **_names(), **_classes()}


def allowed_global(module: str, name: str) -> Any | None:
    """Return the stand-in value for the global `module.name`, or None if the global is not on the allow-list."""
    found = ALLOWED.get((module, name))
    if found is None and name == "_StorageInfo":
        return stubs.StorageInfo  # storage writers for DCP, such as OLMo-core's, have their own class with these fields
    if found is None and _FAMILIES.fullmatch(module) and _CLASS_NAME.fullmatch(name):
        return record_type(f"{module}.{name}")
    return found
