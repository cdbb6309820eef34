"""Encodes any training state as strict JSON plus tensors, and decodes it without running code.

JSON values represent themselves. Everything else is an object with one key that starts with "$":

    {"$float": "nan"}   {"$tuple": [...]}   {"$set": [...]}   {"$frozenset": [...]}   {"$bytes": base64}
    {"$dict": [[key, value], ...]}          any dict that is not a plain JSON object; {"$ordered": ...}: an OrderedDict
    {"$defaultdict": ["list", [[key, value], ...]]}  a defaultdict with that factory
    {"$tensor": {"dtype", "shape", "data"}} a small plain tensor, row-major bytes in base64
    {"$ref": "extra.ema.w"}                 a tensor of the checkpoint, stored like every other
    {"$order": [[1, 0], tensor]}            a tensor with its dimensions in this order in memory, slowest first
    {"$parameter": [requires_grad, tensor]} an nn.Parameter
    {"$leaf": tensor}                       a tensor that requires gradients
    {"$attributes": [{name: value}, tensor]} a tensor with these attributes
    {"$ndarray": tensor}  {"$npscalar": tensor}  a numpy array or scalar with the bytes of the tensor
    {"$dtype": "float32"}  {"$device": "cuda"}  {"$size": [2, 3]}
    {"$torch_save": base64}                 any value that torch.load(weights_only=True) reads
"""

from __future__ import annotations

import base64
import collections
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptkit.errors import CorruptCheckpointError, SaveError
from ckptkit.formats.dcp.host_bytes import holds_tensors, is_sparse_or_quantized, row_major, why_not_dense
from ckptkit.formats.pickles.objects import Inert, TensorValue

if TYPE_CHECKING:
    import torch

JSON = Any  # None | bool | int | float | str | list[JSON] | dict[str, JSON]

INLINE_BYTES = 1024
"""Plain tensors of up to this many bytes are stored in the JSON; larger ones are separate tensors in the checkpoint.

If a dict or list has a larger tensor, its small tensors are separate tensors, too. So the state dict of an EMA model
can be exported, although its biases are small.
"""

_MAX_DEPTH = 200
_MAX_BITS = 14_283  # integers of at most 4,300 digits, which is Python's limit for reading and writing JSON


@dataclass(frozen=True, slots=True)
class Reference:
    """Stands for a tensor that the checkpoint already stores under `key`."""

    key: str


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor] | None, *, inline: bool = True) -> JSON:
    """Return `value` as strict JSON. Large tensors are added to `tensors`, under keys that start with `path`.

    Tensors are not copied; copy them to keep the result beyond the next training step.

    Args:
        path: The path of the value in the state, for example "extra.ema". Error messages name it.
        tensors: None for a value that ckptkit's readers returned, such as numpy arrays and `TensorValue`s. All arrays
            become part of the JSON. Does not import torch.
        inline: Whether small tensors directly in `value`, a dict or list, may be stored in the JSON.

    Raises:
        SaveError: A value's type cannot be loaded safely. The message names the value's path.
    """
    return _Encoder(tensors).encode(value, path, 0, inline=inline)


class _Encoder:
    def __init__(self, tensors: dict[str, torch.Tensor] | None) -> None:
        self._tensors = tensors
        # Don't import the module: that would take longer than the encoding. If it was not imported, there are no
        # DTensors.
        self._dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)

    def encode(self, value: Any, path: str, depth: int, *, inline: bool = True) -> JSON:
        if depth > _MAX_DEPTH:
            raise SaveError(f"{path[:200]}: nested more than {_MAX_DEPTH} deep, or contains itself.")
        kind = type(value)
        if kind is self._dtensor and not value.is_meta and not is_more(value):
            return self._apart(value, path)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return _number(value, path)
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind in _CONTAINERS:
            return self._container(value, path, depth, inline=inline or depth > 0)
        return self._leaf(value, path, inline=inline)

    def _container(self, value: Any, path: str, depth: int, *, inline: bool) -> JSON:
        kind = type(value)
        inline = inline and not any(map(_is_large, value.values() if kind in _DICTS else value))
        if kind in _DICTS:
            plain = kind is dict and _STRINGS.issuperset(map(type, value))
            plain = plain and not any(map(str.startswith, value, itertools.repeat("$")))
            if plain:
                return {k: self.encode(item, f"{path}.{k}", depth + 1, inline=inline) for k, item in value.items()}
            if any(hasattr(key, "untyped_storage") for key in value):
                raise SaveError(
                    f"{path}: a dict has tensors as keys. A load creates new tensors, so nothing would be found under "
                    "them. Use names as keys."
                )
            pairs = [
                [
                    self.encode(key, f"{path}.<key>", depth + 1),
                    self.encode(item, f"{path}.{key}", depth + 1, inline=inline),
                ]
                for key, item in value.items()
            ]
            if kind is collections.defaultdict:
                return {"$defaultdict": [_factory(value, path), pairs]}
            return {"$dict" if kind is dict else "$ordered": pairs}
        if kind in (set, frozenset):
            return {f"${kind.__name__}": [self.encode(item, path, depth + 1) for item in sorted(value, key=repr)]}
        if _WORDS.issuperset(map(type, value)):
            items = [_number(item, path) if type(item) is int else item for item in value]
        else:
            items = [self.encode(item, f"{path}.{i}", depth + 1, inline=inline) for i, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}

    def _leaf(self, value: Any, path: str, *, inline: bool) -> JSON:
        import numpy as np

        if type(value) is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, Reference):
            return {"$ref": value.key}
        if isinstance(value, TensorValue):
            return _inline(value.dtype, value.shape, value.data)
        if isinstance(value, np.generic) and _is_torchs(value):
            return {"$npscalar": _inline(value.dtype.name, (), value.tobytes())}
        is_array = type(value) is np.ndarray and _is_torchs(value)  # not subclasses, which may have a mask, for example
        if is_array and (self._tensors is None or value.nbytes <= INLINE_BYTES):
            return {"$ndarray": _inline(value.dtype.name, value.shape, value.tobytes())}
        if isinstance(value, Inert) or self._tensors is None:
            kind = value.kind if isinstance(value, Inert) else type(value).__name__
            raise SaveError(f"{path}: a {kind}, which cannot be loaded without running code.")
        import torch

        if isinstance(value, torch.Tensor):
            return self._tensor(value, path, inline=inline)
        if is_array:
            return {"$ndarray": self._apart(torch.from_numpy(np.array(value, order="C")), path)}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if isinstance(value, torch.Size):
            return {"$size": list(value)}
        return _torch_save(value, path)

    def _tensor(self, value: torch.Tensor, path: str, *, inline: bool = True) -> JSON:
        import torch
        from torch.distributed.tensor import DTensor

        if is_sparse_or_quantized(value):
            return _torch_save(value.detach(), path)  # several runs of bytes, so a load could not read a part
        why, plain = why_not_dense(value), type(value) in (torch.Tensor, torch.nn.Parameter)
        if why:
            raise SaveError(f"{path}: the tensor {why}.")
        if not plain and not isinstance(value, DTensor):
            raise SaveError(
                f"{path}: the tensor is a {type(value).__module__}.{type(value).__qualname__}, which would be "
                "loaded as a plain torch.Tensor. Save value.as_subclass(torch.Tensor) instead."
            )
        if is_more(value):
            return described(value, self._tensor(value.detach(), path, inline=inline), path)
        order = order_of(value) if plain else None
        if plain and inline and not _is_large(value):
            raw = row_major(value).to("cpu").reshape(-1).view(torch.uint8).numpy().tobytes()
            tree = _inline(str(value.dtype).removeprefix("torch."), value.shape, raw)
        else:
            tree = self._apart(value, path)
        return tree if order is None else {"$order": [order, tree]}

    def _apart(self, value: torch.Tensor, path: str) -> JSON:
        """Add the tensor to the tensors to store, under a unique key. Return the reference for the JSON tree."""
        assert self._tensors is not None  # otherwise there are no tensors of torch
        key, again = path, 0
        while key in self._tensors:  # for example, {"a.b": t, "a": {"b": t}}
            again += 1
            key = f"{path}~{again}"
        self._tensors[key] = value
        return {"$ref": key}


def _inline(dtype: str, shape: Sequence[int], data: bytes) -> JSON:
    return {"$tensor": {"dtype": dtype, "shape": list(shape), "data": base64.b64encode(data).decode()}}


def _is_large(value: Any) -> bool:
    if not hasattr(type(value), "untyped_storage"):  # the class torch.Tensor is a value, too
        return False
    from torch.nn.parameter import is_lazy

    return not is_lazy(value) and value.numel() * value.element_size() > INLINE_BYTES  # a lazy one is refused later


def described(value: torch.Tensor, tree: JSON, path: str) -> JSON:
    """Return `tree` (the encoded values of the tensor `value`) wrapped in additional tags.

    The tags say whether the tensor is a parameter, whether it requires gradients, and which attributes it has.

    Args:
        path: The path of the tensor in the state. Error messages name it.
    """
    import torch

    if isinstance(value, torch.nn.Parameter):
        tree = {"$parameter": [value.requires_grad, tree]}
    elif value.requires_grad and value.is_leaf:
        tree = {"$leaf": tree}
    attributes = attributes_of(value)
    if refused := [name for name, item in attributes.items() if holds_tensors(item, 3) or hasattr(torch.Tensor, name)]:
        raise SaveError(
            f"{path}: the tensor's attribute {refused[0]!r} contains tensors or replaces one of torch's, and a load "
            "could not restore it. Delete it, or save the value under a name of its own."
        )
    return {"$attributes": [encode(attributes, path, {}), tree]} if attributes else tree


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that a user's code has set on a plain tensor or a DTensor.

    Omits private attributes, and the attributes with which bitsandbytes marks its paged memory.
    """
    import torch
    from torch.distributed.tensor import DTensor

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, DTensor):
        return {}
    return {name: value for name, value in vars(tensor).items() if not name.startswith("_") and name not in _PAGED}


def order_of(tensor: torch.Tensor) -> list[int] | None:
    """Return the order of a tensor's dimensions in memory, slowest first, or None if it is row-major.

    For example, the factors of a matrix are often column-major. If a load made them row-major, products would be
    rounded differently, and the resumed run would not be bit-exact. A tensor with gaps or repeated elements counts as
    row-major.
    """
    if tensor.dim() < 2 or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return order if tensor.permute(order).is_contiguous() else None


def is_order(order: JSON) -> bool:
    """Return whether a JSON value is an order of dimensions."""
    return isinstance(order, list) and all(type(dim) is int for dim in order) and sorted(order) == [*range(len(order))]


def in_order(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return a copy of a tensor whose dimensions have the given order in memory."""
    if tensor.dim() != len(order):
        raise ValueError(f"{order} is not an order of {tensor.dim()} dimensions")
    return tensor.permute(order).contiguous().permute(sorted(range(len(order)), key=order.__getitem__))


def _is_torchs(value: Any) -> bool:
    """Return whether torch supports the dtype of a numpy value: no long doubles, and no swapped byte order."""
    return value.dtype.kind in "biufc" and value.dtype.isnative and value.dtype.char not in "gG"


def is_more(value: torch.Tensor) -> bool:
    """Return whether `described` would add any tags to the encoded values of a tensor."""
    from torch.nn import Parameter

    return value.requires_grad or isinstance(value, Parameter) or (bool(vars(value)) and bool(attributes_of(value)))


_STRINGS = frozenset((str,))
_WORDS = frozenset((str, int, bool, type(None)))  # represent themselves in JSON
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_CONTAINERS = (*_DICTS, list, tuple, set, frozenset)
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}
_PAGED = frozenset(("is_paged", "page_deviceid"))


def _factory(value: collections.defaultdict[Any, Any], path: str) -> str | None:
    """Return the name of the function that creates a defaultdict's values."""
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise SaveError(
            f"{path}: a defaultdict with the factory {factory!r:.80} cannot be saved so that it loads without running "
            f"code. Use one of {', '.join(_FACTORIES)}, or save a dict."
        )
    return name


def _number(value: int, path: str) -> int:
    if value.bit_length() > _MAX_BITS:
        raise SaveError(
            f"{path}: the integer has {value.bit_length()} bits; JSON readers accept at most {_MAX_BITS}. "
            "Save it as text (hex(value)) or bytes."
        )
    return value


def _torch_save(value: Any, path: str) -> JSON:
    """Encode the value as the bytes that torch.save writes. Checks that torch.load(weights_only=True) reads them."""
    from ckptkit.formats.pickles.weights_only import dump_object  # imports torch, which `reshard` does not need

    advice = "give its class state_dict and load_state_dict, or allow it with torch.serialization.add_safe_globals."
    return {"$torch_save": base64.b64encode(dump_object(value, name=path, advice=advice)).decode()}


def decode(tree: JSON, tensor: Callable[[str], Any]) -> Any:
    """Return the value that was encoded as `tree`. `tensor(key)` must return the tensor that was stored as `key`.

    Raises:
        CorruptCheckpointError: `encode` did not write the tree.
    """
    if isinstance(tree, list):
        return [decode(item, tensor) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        tag, body = next(iter(tree.items()))
        if tag.startswith("$"):
            if tag not in _TAGS:
                raise CorruptCheckpointError(f"saved state: unknown tag {tag!r}. Was it written by a newer ckptkit?")
            try:
                return _TAGS[tag](body, tensor)
            except CorruptCheckpointError:
                raise
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
                text = f"saved state: the value of {tag!r} is malformed ({str(error)[:300]})."
                raise CorruptCheckpointError(text) from error
    return {key: decode(item, tensor) for key, item in tree.items()}


def references(tree: JSON) -> list[str]:
    """Return the keys of the tensors that `decode` will request, in order."""
    if isinstance(tree, list):
        return [key for item in tree for key in references(item)]
    if not isinstance(tree, dict):
        return []
    if len(tree) == 1 and isinstance(tree.get("$ref"), str):
        return [tree["$ref"]]
    return [key for item in tree.values() for key in references(item)]


def _items(body: JSON, tensor: Callable[[str], Any]) -> list[Any]:
    if not isinstance(body, list):
        raise TypeError("expected a list")
    return [decode(item, tensor) for item in body]


def _pairs(body: JSON, tensor: Callable[[str], Any]) -> list[tuple[Any, Any]]:
    return [(decode(key, tensor), decode(value, tensor)) for key, value in body]


def _decode_tensor(body: JSON, _: Callable[[str], Any]) -> torch.Tensor:
    import torch

    dtype = _torch_dtype(body["dtype"])
    raw = base64.b64decode(body["data"], validate=True)
    shape = tuple(body["shape"])
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for shape {list(shape)} of {body['dtype']}")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)


def _decode_order(body: JSON, tensor: Callable[[str], Any]) -> torch.Tensor:
    order, tree = body
    if not is_order(order):
        raise ValueError(f"{order} is not an order of dimensions")
    return in_order(decode(tree, tensor), order)


def _decode_parameter(body: JSON, tensor: Callable[[str], Any]) -> torch.nn.Parameter:
    from torch.nn import Parameter

    requires_grad, tree = body
    return Parameter(decode(tree, tensor), requires_grad=bool(requires_grad))


def _decode_defaultdict(body: JSON, tensor: Callable[[str], Any]) -> collections.defaultdict[Any, Any]:
    name, pairs = body
    return collections.defaultdict(None if name is None else _FACTORIES[name], _pairs(pairs, tensor))


def _decode_attributes(body: JSON, tensor: Callable[[str], Any]) -> torch.Tensor:
    import torch

    attributes, tree = (decode(item, tensor) for item in body)
    for name, value in attributes.items():
        if name.startswith("_") or hasattr(torch.Tensor, name):
            raise ValueError(f"a tensor's attribute must not have the name {name!r}")
        setattr(tree, name, value)
    found: torch.Tensor = tree
    return found


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    from ckptkit.catalog.dtypes import dtype

    found = getattr(torch, dtype(name).name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return found


def _decode_torch_save(body: JSON, _: Callable[[str], Any]) -> Any:
    from ckptkit.formats.pickles.weights_only import parse_object

    return parse_object(base64.b64decode(body, validate=True), file="saved state", name="$torch_save")


def _torch(name: str, *arguments: Any) -> Any:
    import torch

    return getattr(torch, name)(*arguments)


_TAGS: Mapping[str, Callable[[JSON, Callable[[str], Any]], Any]] = {
    "$float": lambda body, _: float(body),
    "$tuple": lambda body, tensor: tuple(_items(body, tensor)),
    "$set": lambda body, tensor: set(_items(body, tensor)),
    "$frozenset": lambda body, tensor: frozenset(_items(body, tensor)),
    "$bytes": lambda body, _: base64.b64decode(body, validate=True),
    "$dict": lambda body, tensor: dict(_pairs(body, tensor)),
    "$ordered": lambda body, tensor: collections.OrderedDict(_pairs(body, tensor)),
    "$defaultdict": _decode_defaultdict,
    "$tensor": _decode_tensor,
    "$ref": lambda body, tensor: tensor(body),
    "$order": _decode_order,
    "$parameter": _decode_parameter,
    "$leaf": lambda body, tensor: decode(body, tensor).requires_grad_(),
    "$attributes": _decode_attributes,
    "$ndarray": lambda body, tensor: decode(body, tensor).numpy(),
    "$npscalar": lambda body, tensor: decode(body, tensor).numpy()[()],
    "$dtype": lambda body, _: _torch_dtype(body),
    "$device": lambda body, _: _torch("device", body),
    "$size": lambda body, _: _torch("Size", body),
    "$torch_save": _decode_torch_save,
}
