"""Splits tensor subclasses into plain tensors by torch's `__tensor_flatten__` protocol, and rebuilds the subclasses.

A class with `__tensor_flatten__` names its inner tensors. Each inner tensor is stored as a plain tensor named
`<name>::<attribute>`. A recipe (JSON) records the class and everything else that rebuilding needs. A load fills the
inner tensors of a live tensor that has the same recipe. A load never imports the class that a checkpoint names.

bitsandbytes' 4-bit weights and flashoptim's optimizer states do not implement the protocol, but are split in the same
way (`_WITHOUT_PROTOCOL`). flashoptim's states are objects, not tensors.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.box import Box, row_major_strides
from ckptkit.catalog.entry import Catalog, Role, TensorEntry
from ckptkit.errors import SaveError
from ckptkit.formats.dcp.blocks import Blocks, blocks_of, cut_blocks
from ckptkit.formats.dcp.host_bytes import (
    dtype_name,
    local_part,
    placed_like,
    why_not_dense,
    without_subclass,
)

if TYPE_CHECKING:
    import torch

SEPARATOR = "::"
SUBCLASSES = "subclasses"
"""The key in objects.json whose value maps tensor keys to recipes."""

Recipe = Any  # JSON

STATES: Mapping[str, tuple[Mapping[str, str], Sequence[str]]] = {
    "torchao.optim.subclass_8bit.OptimState8bit": (
        {"codes": "like", "scale": "flat", "qmap": "whole"},
        ("signed", "dtype"),
    ),
    "torchao.optim.subclass_4bit.OptimState4bit": (
        {"codes": "flat", "scale": "flat", "qmap": "whole"},
        ("signed", "_shape", "dtype"),
    ),
    "torchao.optim.subclass_fp8.OptimStateFp8": ({"codes": "like", "scale": "flat"}, ("dtype",)),
}
"""torchao's optimizer states: for each class, a rule for each inner tensor, and the attributes of the context in order.

"like": the inner tensor has as many dimensions as the outer tensor, and one element per block. "flat": the inner tensor
has one dimension, and one element per run of the flattened outer tensor. "whole": the inner tensor is a table that
every shard has.
"""

_SCALED = ("qdata", "scale", "zero_point", "act_pre_scale")
WEIGHTS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "torchao.quantization.Float8Tensor": (
        ("qdata", "scale"),
        ("block_size", "mm_config", "act_quant_kwargs", "kernel_preference", "dtype"),
    ),
    "torchao.quantization.Int4PlainInt32Tensor": (_SCALED, ("block_size", "shape")),
    "torchao.quantization.Int4Tensor": (_SCALED, ("block_size", "shape", "activation_dtype")),
    "torchao.quantization.Int4TilePackedTo4dTensor": (
        ("qdata", "scale_and_zero", "act_pre_scale"),
        ("block_size", "shape"),
    ),
    "torchao.quantization.Int8Tensor": (
        ("qdata", "scale", "zero_point", "act_quant_scale", "act_quant_zero_point", "act_pre_scale"),
        ("block_size", "dtype", "act_quant_kwargs", "reduce_range"),
    ),
    "torchao.quantization.IntxUnpackedToInt8Tensor": (
        ("qdata", "scale", "zero_point"),
        ("target_dtype", "block_size", "dtype", "activation_quantization"),
    ),
    "torchao.prototype.mx_formats.mx_tensor.MXTensor": (
        ("qdata", "scale"),
        ("elem_dtype", "block_size", "orig_dtype", "kernel_preference", "act_quant_kwargs", "is_swizzled_scales"),
    ),
    "torchao.prototype.mx_formats.nvfp4_tensor.NVFP4Tensor": (
        ("qdata", "scale", "per_tensor_scale", "act_per_tensor_scale"),
        ("block_size", "orig_dtype", "is_swizzled_scales", "use_triton_kernel", "act_quant_kwargs"),
    ),
}
"""torchao's weights (0.18): for each class, the inner tensors (some optional), and the attributes of the context."""

ENUMS: Mapping[str, Mapping[Any, str]] = {
    "KernelPreference": {name.lower(): name for name in ("AUTO", "TORCH", "MSLK", "EMULATED", "TRITON")},
    "MappingType": {1: "SYMMETRIC", 2: "SYMMETRIC_NO_CLIPPING_ERR", 3: "ASYMMETRIC"},
    "ScaleCalculationMode": {name.lower(): name for name in ("FLOOR", "RCEIL", "CEIL", "EVEN")},
}
"""Member names of torchao's enums, by class and value. Pickles contain the values, and recipes the names."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The inner tensors of one tensor of a subclass, and the recipe for rebuilding the tensor from them.

    Attributes:
        parts: The inner tensors by attribute ("a::b" if an inner tensor itself belongs to a subclass). The inner
            tensors share the outer tensor's memory, and are DTensors if the outer tensor is sharded.
        recipe: JSON with the keys "class", "shape", "stride", "dtype", "context" and "inner".
    """

    parts: dict[str, torch.Tensor]
    recipe: Recipe


def outer_name(name: str, recipes: Mapping[str, Recipe], prefix: str = "") -> str:
    """Return the name of the outer tensor that contains the inner tensor `name` ("a.weight" for "a.weight::scale").

    Returns `name` itself if `recipes` has no such outer tensor.
    """
    head = name
    while SEPARATOR in head:
        head = head.rpartition(SEPARATOR)[0]
        if prefix + head in recipes:
            return head
    return name


def describe(recipe: Recipe, live: torch.Tensor | None = None) -> str:
    """Describe a tensor for error messages: its class and settings, or that it is not of a subclass.

    Args:
        recipe: The tensor's recipe. If it is None, the tensor is a plain tensor or an empty shard. (An optimizer that
            quantizes its states does not quantize empty shards.)
        live: The live optimizer state. Its size shows whether the tensor is an empty shard.
    """
    if not isinstance(recipe, Mapping):
        is_empty = live is not None and not local_part(live).numel()
        return "an empty shard (use fewer ranks)" if is_empty else "a plain tensor"
    name = str(recipe.get("class", "")).rpartition(".")[2]
    return f"{name} {json.dumps({key: value for key, value in recipe.items() if key != 'class'})}"


def same_recipe(one: Recipe | None, other: Recipe | None) -> bool:
    """Return whether two recipes (`Opened.recipe`) are equal.

    A tuple and a list with equal items count as equal, because torchao's own files store tuples as lists.
    """

    def listed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return listed(value["$tuple"]) if value.keys() == {"$tuple"} else {k: listed(v) for k, v in value.items()}
        return [listed(item) for item in value] if isinstance(value, list) else value

    return one == other or listed(one) == listed(other)


def open_all(
    tensors: Mapping[Any, Any], wholes: Mapping[Any, Any] | None = None
) -> tuple[dict[Any, Any], dict[Any, Recipe], dict[Any, str]]:
    """Replace each tensor subclass in a table by its inner tensors.

    Args:
        tensors: Tensors by name, or by (FQN, state name). Tensors that can't be split stay as they are.
        wholes: For each value that is a local part of a global tensor but not a DTensor: a tensor, such as the
            parameter, that has the global shape and placements.

    Returns:
        The new table, the recipes by name, and the reason for each tensor that could not be split.
    """
    table: dict[Any, Any] = {}
    recipes: dict[Any, Recipe] = {}
    reasons: dict[Any, str] = {}
    known: dict[int, Opened | None] = {}  # tied tensors have the same parts
    for name, tensor in tensors.items():
        if id(tensor) not in known:
            try:
                known[id(tensor)] = open_tensor(tensor, (wholes or {}).get(name))
            except SaveError as error:
                known[id(tensor)] = None
                reasons[name] = str(error)
        opened = known[id(tensor)]
        if opened is None:
            table[name] = tensor
            continue
        recipes[name] = opened.recipe
        for part, inner in opened.parts.items():
            full = (name[0], name[1] + SEPARATOR + part) if isinstance(name, tuple) else name + SEPARATOR + part
            if full in tensors:
                reasons[name] = f"is stored in parts, but another tensor has the name of its part {full!r}"
            table[full] = inner
    return table, recipes, reasons


def open_tensor(tensor: Any, whole: Any = None) -> Opened | None:
    """Return the inner tensors of a tensor subclass, and the recipe for rebuilding the tensor.

    Returns None if the tensor is dense, or if the class does not name its inner tensors.

    Args:
        whole: If `tensor` is a local part of a global tensor but not a DTensor: a tensor, such as the parameter, that
            has the global shape and placements.

    Raises:
        SaveError: The tensor can't be split. The message completes the sentence "the tensor ...".
    """
    from torch.distributed.tensor import DTensor

    local = tensor._local_tensor if type(tensor) is DTensor else tensor
    return _open(local, whole if isinstance(whole, DTensor) else tensor) if _is_made_of_parts(local) else None


def without_values(tensor: Any) -> Any:
    """Return a meta tensor with the shape and the placement of `tensor`, if a save would store only its inner tensors.

    Returns None for any other tensor.
    """
    import torch
    from torch.distributed.tensor import DTensor

    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not _is_made_of_parts(local):
        return None
    made = torch.empty(local.shape, dtype=tensor.dtype, device="meta")
    return placed_like(tensor, made) if isinstance(tensor, DTensor) else made


def _is_made_of_parts(tensor: Any) -> bool:
    import torch

    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    kind = type(tensor)
    if is_state_in_parts(tensor):
        return True
    if isinstance(tensor, (DTensor, AsyncCollectiveTensor, FakeTensor)):
        return False
    if not (hasattr(tensor, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")) and not _is_4bit(tensor):
        return False
    return not tensor.is_nested and not tensor.is_meta and bool(why_not_dense(tensor))


def _open(local: Any, whole: Any) -> Opened:
    """Return the inner tensors of `whole`. `local` is this rank's shard, or `whole` itself if it is not sharded."""
    kind = _class_of(local)
    shape = tuple(local.shape)
    parts: dict[str, torch.Tensor] = {}
    inner: dict[str, Any] = {}
    tensors, context = _flattened(local)
    again, _ = _flattened(local)
    for name, tensor in tensors.items():
        if not _is_kept(tensor, again[name]):
            raise SaveError(f"is a {kind}, whose {name} is computed on each access: a load could not fill it")
        rule = _rule(kind, name, shape, tuple(tensor.shape))
        stored, spec = _stored(whole, name, tensor, local, rule)
        deeper = open_tensor(stored)
        if deeper is not None:
            inner[name] = {**spec, "recipe": deeper.recipe}
            parts.update({f"{name}{SEPARATOR}{key}": value for key, value in deeper.parts.items()})
            continue
        why = why_not_dense(stored)
        if why:
            raise SaveError(f"is a {kind}, whose {name} {why}")
        inner[name] = spec
        parts[name] = stored.detach()
    recipe = {
        "class": kind,
        "shape": list(whole.shape),
        "stride": list(row_major_strides(tuple(whole.shape)) if kind == _FLASH else whole.stride()),
        "dtype": dtype_name(local._storage_dtype if kind == _FLASH else whole.dtype),
        "context": _context(context, shape, kind),
        "inner": inner,
    }
    return Opened(parts, recipe)


def _class_of(tensor: Any) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def _flattened(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Return a tensor's inner tensors by attribute, and the context, as `__tensor_flatten__` does."""
    known = _WITHOUT_PROTOCOL.get(_class_of(tensor))
    if known is not None:
        return known(tensor)
    names, context = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}, context


def _flattened_4bit(tensor: Any) -> tuple[dict[str, torch.Tensor], Any]:
    state = tensor.quant_state
    parts = {"data": without_subclass(tensor), "absmax": state.absmax, "quant_map": state.code}
    context = {name: getattr(state, name) for name in ("quant_type", "blocksize", "dtype", "shape", "nested")}
    if state.nested:
        parts |= {
            "nested_offset": state.offset,
            "nested_absmax": state.state2.absmax,
            "nested_quant_map": state.state2.code,
        }
        context |= {"nested_blocksize": state.state2.blocksize, "nested_dtype": state.state2.dtype}
    return parts, context


# bitsandbytes' 4-bit weights do not implement the protocol. A weight consists of packed values and a `quant_state` with
# scales and tables.
_4BIT = "bitsandbytes.nn.modules.Params4bit"
_4BIT_ENTRIES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")

# An optimizer state of flashoptim is an object with either plain values, or int8 codes and a scale for each run of 32
# elements of this rank's shard, where the last run may be shorter.
_FLASH = "flashoptim.optimizers._MaybeQuantizedTensor"
_FLASH_RUN = 32
ERROR_BITS = "error_bits"  # holds the lower bits of fp32 weights that the job keeps in bf16 or fp16
_FLASH_PLACED = {"quantized": "like", "scales": "flat", "data": "like"}
_FLASH_SETTINGS = ("try_quantize", "signed", "sqrt", "softsign")


def is_state_in_parts(value: Any) -> bool:
    """Return whether an optimizer state is an object of flashoptim, whose inner tensors are stored separately."""
    return type(value).__name__ == "_MaybeQuantizedTensor" and _class_of(value) == _FLASH


def keeps_parts(optimizer: Any) -> bool:
    """Return whether an optimizer is from flashoptim, whose states can consist of several tensors."""
    return isinstance(getattr(optimizer, "quantized_state_spec", None), Mapping)


def lower_bits_of(catalog: Catalog) -> dict[str, TensorEntry]:
    """Return, by the weight's FQN, the tensors in which flashoptim keeps the lower bits of bf16 and fp16 weights."""
    weights = catalog.by_role(Role.MODEL)
    found = [entry for entry in catalog.tensors.values() if entry.state == ERROR_BITS and entry.fqn in weights]
    return {
        entry.fqn: entry
        for entry in found
        if entry.role is Role.OPTIMIZER and entry.dtype in ("int8", "int16")
        if weights[entry.fqn].dtype in ("bfloat16", "float16") and weights[entry.fqn].shape == entry.shape
    }


def with_lower_bits(weight: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Combine a bf16 or fp16 weight and its lower bits into an fp32 weight.

    Follows `reconstruct_fp32_param` in flashoptim.
    """
    import torch

    digits, least = (7, -126) if weight.dtype == torch.bfloat16 else (10, -14)
    wide = weight.float()
    exponent = torch.where(wide == 0, least, torch.frexp(wide).exponent - 1).clamp(min=least) - digits - 1
    half = exponent // 2  # in two steps, because two to the power of `exponent` may be below the smallest float32
    part = bits.float() / torch.iinfo(bits.dtype).max
    return wide + torch.ldexp(torch.ldexp(part, half), exponent - half)


def _flattened_state(value: Any) -> tuple[dict[str, torch.Tensor], Any]:
    parts = {name: getattr(value, f"_{name}") for name in _FLASH_PLACED}
    settings = {name: getattr(value, f"_{name}") for name in _FLASH_SETTINGS}
    return {name: part for name, part in parts.items() if part is not None}, settings


_WITHOUT_PROTOCOL: Mapping[str, Callable[[Any], tuple[dict[str, torch.Tensor], Any]]] = {
    _4BIT: _flattened_4bit,
    _FLASH: _flattened_state,
}


def _is_4bit(tensor: Any) -> bool:
    return _class_of(tensor) == _4BIT and getattr(tensor, "quant_state", None) is not None


def repeated(tensors: Mapping[str, Any]) -> set[str]:
    """Return the names under which bitsandbytes' layers repeat the inner tensors of 4-bit weights in a state dict."""
    weights = [name for name, value in tensors.items() if type(value).__name__ == "Params4bit" and _is_4bit(value)]
    if not weights:
        return set()
    heads = {f"{name}.{entry}" for name in weights for entry in _4BIT_ENTRIES}
    packed = tuple(f"{name}.quant_state.bitsandbytes__" for name in weights)
    return {name for name in tensors if name in heads or name.startswith(packed)}


def left_behind(modules: Mapping[str, torch.nn.Module]) -> dict[str, str]:
    """Return the 4-bit weights of bitsandbytes that FSDP2 has sharded, each with the reason why it can't be saved.

    A sharded weight holds only the packed values. The scales remain in an attribute of the layer, and no state dict
    contains this attribute.
    """
    found = {}
    for name, module in modules.items():
        weight = module._parameters.get("weight")
        if weight is not None and module.__dict__.get("quant_state") is not None and not _is_4bit(weight):
            found[f"{name}.weight" if name else "weight"] = (
                "holds packed 4-bit values of bitsandbytes. Under FSDP2, their scales (quant_state) are an attribute "
                "of the layer that no state dict contains: a load could not restore them. Shard only the modules that "
                "are trained, such as the adapter"
            )
    return found


def _is_kept(one: Any, other: Any) -> bool:
    """Return whether reading an attribute twice gave the same tensor, or at least the same memory."""
    if one is other or not one.numel():
        return True
    return why_not_dense(one) == "" == why_not_dense(other) and one.data_ptr() == other.data_ptr()


def _rule(kind: str, name: str, shape: tuple[int, ...], inner: tuple[int, ...]) -> str:
    if kind == _4BIT:
        return "whole"
    known = _FLASH_PLACED if kind == _FLASH else STATES.get(kind, ({},))[0]
    return known.get(name) or ("whole" if blocks_of(shape, inner) is None else "like")


def _stored(whole: Any, name: str, inner: Any, local: Any, rule: str) -> tuple[Any, Any]:
    """Return the tensor to store and the recipe entry for an inner tensor of a tensor subclass.

    If the subclass is sharded, the inner tensor becomes a DTensor with the same placements, unless the rule is "whole":
    then all ranks have the same inner tensor. Some classes allow a run of elements that share a value to be split
    between ranks. Each rank then stores its own values, and the rule is "own".

    Raises:
        SaveError: Elements that share a value of the inner tensor, such as a scale, are on different ranks.
    """
    import torch
    from torch.distributed.tensor import DTensor, Replicate

    from ckptkit.formats.dcp.plan import local_box, placement_record

    is_flash, box = _class_of(local) == _FLASH, Box.whole(tuple(local.shape))
    mesh: Any = whole.device_mesh if isinstance(whole, DTensor) else None
    sharding = [] if mesh is None else list(zip(mesh.shape, whole.placements, strict=True))
    if mesh is not None:
        sizes, offsets = local_box(whole.shape, mesh, tuple(whole.placements))
        if sizes != tuple(local.shape) or not (local.numel() or is_flash):
            wanted = f"expected {list(sizes)}" if local.numel() else "which is empty: use fewer ranks"
            kind = type(local).__qualname__
            raise SaveError(f"is sharded, and its local part is a {kind} of shape {list(local.shape)}, {wanted}")
        box = Box(offsets, sizes)
    if rule == "flat" and is_flash and not _consists_of_runs(tuple(whole.shape), sharding, _FLASH_RUN):
        if all(size == 1 or placement.is_replicate() for size, placement in sharding):
            return inner, {"placed": "whole"}
        records = [list(dataclasses.astuple(placement_record(placement))) for _, placement in sharding]
        return inner, {"placed": "own", "layout": [list(mesh.shape), records]}
    if rule == "whole":
        if mesh is not None and name not in STATES.get(_class_of(local), ({},))[0]:
            raise SaveError(
                f"is sharded, and its local part is a {_class_of(local)}, whose {name} {list(inner.shape)} has no "
                f"known position in the whole tensor {list(whole.shape)}"
            )
        return inner, {"placed": rule}
    blocks = Blocks.of(name, rule, box.sizes, tuple(inner.shape), tuple(whole.shape))
    placements = tuple(Replicate() if size == 1 and hasattr(p, "dim") else p for size, p in sharding)
    strided = any(hasattr(placement, "split_factor") for placement in placements)
    if strided and any(blocks.steps[p.dim] != 1 for p in placements if hasattr(p, "dim")):
        raise blocks.split(f"{placements} interleaves its rows")
    part, spec = blocks.inner_box(box), {"placed": rule, "block": blocks.size}
    view = inner.view(part.sizes) if rule == "flat" else inner
    if mesh is None:
        return view, spec
    shape = torch.Size(blocks.inner_shape)
    if local_box(shape, mesh, placements) != (part.sizes, part.offsets):
        raise blocks.split(f"other ranks split it elsewhere ({placements})")
    stride = row_major_strides(shape)
    return DTensor.from_local(view, mesh, placements, run_check=False, shape=shape, stride=stride), spec


def _consists_of_runs(shape: tuple[int, ...], sharding: Sequence[tuple[int, Any]], run: int) -> bool:
    """Return whether each rank's shard consists of whole runs. All ranks get the same result.

    A run is a sequence of `run` elements of the flattened tensor that share a value, such as a scale.

    Args:
        sharding: The size and the placement of each mesh dimension.
    """
    steps, counts = cut_blocks(run, shape), dict[int, list[int]]()
    for size, placement in sharding:
        if hasattr(placement, "split_factor"):
            return False
        if hasattr(placement, "dim"):
            counts.setdefault(placement.dim, []).append(size)
    for dim, sizes in counts.items():
        length, ranks = shape[dim], math.prod(sizes)
        part = -(-length // ranks)  # as torch.chunk splits it
        is_even = length % ranks == 0
        if not steps[dim] or part % steps[dim] or part * (ranks - 1) >= length or not (is_even or len(sizes) == 1):
            return False
    numel = math.prod(shape)
    return numel > 0 and numel % run == 0


# --- a recipe's context


def _context(value: Any, shape: tuple[int, ...], kind: str) -> Any:
    """Return the context that `__tensor_flatten__` returned, or a value in it, as JSON.

    A tuple that equals the tensor's shape is stored as `$shape`, because other shards have other shapes.
    """
    import torch

    if isinstance(value, enum.Enum):
        return {"$enum": f"{type(value).__qualname__}.{value.name}"}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$device": value.type}
    if isinstance(value, (list, tuple)):
        if shape and tuple(value) == shape:
            return {"$shape": True}
        items = [_context(item, shape, kind) for item in value]
        if hasattr(value, "_fields"):
            return {"$object": [type(value).__qualname__, dict(zip(value._fields, items, strict=True))]}
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict) and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: _context(item, shape, kind) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _context(getattr(value, f.name), shape, kind) for f in dataclasses.fields(value)}
        return {"$object": [type(value).__qualname__, fields]}
    raise SaveError(f"is a {kind}; its context has a {type(value).__qualname__}, which cannot be stored as JSON")


def _value(tree: Any, shape: tuple[int, ...]) -> Any:
    """Rebuild the argument `context` of `__tensor_unflatten__` from a recipe's JSON, for a tensor of the given shape.

    Raises:
        ValueError: The context contains class instances, which only a live tensor can supply.
    """
    import torch

    if isinstance(tree, list):
        return [_value(item, shape) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1 or not next(iter(tree)).startswith("$"):
        return {key: _value(item, shape) for key, item in tree.items()}
    tag, body = next(iter(tree.items()))
    if tag == "$shape":
        return torch.Size(shape)
    if tag == "$tuple" and isinstance(body, list):
        return tuple(_value(item, shape) for item in body)
    if tag == "$dtype" and isinstance(getattr(torch, str(body), None), torch.dtype):
        return getattr(torch, body)
    if tag == "$float" and body in ("nan", "inf", "-inf"):
        return float(body)
    raise ValueError(f"{tag} {body!r}")


# --- creating tensors for a load


def new_tensor(recipe: Recipe, parameter: torch.Tensor, entries: Mapping[str, TensorEntry]) -> Any:
    """Create an uninitialized optimizer state from `Opened.recipe`, on the same device and mesh as the parameter.

    This is for an optimizer that has no state yet. Nothing is imported: this process must have allowed the class with
    `torch.serialization.add_safe_globals`. torchao does this for the classes of its optimizer states. For the class of
    flashoptim, it is enough that this process has imported the library.

    Args:
        entries: The inner tensors in the checkpoint, by attribute.

    Raises:
        SaveError: The tensor can't be created in this process. The message completes the sentence "the tensor ...".
    """
    import torch
    from torch.distributed.tensor import DTensor

    name = str(recipe.get("class"))
    if list(parameter.shape) != recipe.get("shape"):
        raise SaveError(f"has the shape {recipe.get('shape')}, but its parameter has {list(parameter.shape)}")
    allowed: list[Any] = [c for c in torch.serialization.get_safe_globals() if isinstance(c, type)]
    cls = next(
        (c for c in allowed if hasattr(c, "__tensor_unflatten__") and f"{c.__module__}.{c.__qualname__}" == name), None
    )
    if name == _FLASH:  # the library of the live optimizer has been imported
        cls = getattr(sys.modules.get(_FLASH.rpartition(".")[0]), _FLASH.rpartition(".")[2], None)
    if cls is None:
        raise SaveError(
            f"is a {name}, a class that this job has not allowed. Take an optimizer step before the load, or import "
            "its library (torch.serialization.add_safe_globals)"
        )
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    shape = tuple(local.shape)
    if not local.numel() and name != _FLASH:
        raise SaveError(f"is a {name}, whose shard on this rank would be empty: use fewer ranks")
    inner = {}
    for key, spec in recipe["inner"].items():
        if key not in entries or "recipe" in spec:
            raise SaveError(f"is a {name}, whose {key} is not stored as a tensor")
        sizes = _local_shape(key, spec, shape, entries[key].shape)
        inner[key] = torch.empty(sizes, dtype=getattr(torch, entries[key].dtype), device=local.device)
    try:
        context = _value(recipe["context"], shape)
    except ValueError as error:
        raise SaveError(
            f"is a {name}; its context has {error}, which only a live tensor can supply: take an optimizer step first"
        ) from error
    if name == _FLASH:
        return _new_state(cls, inner, context, str(recipe.get("dtype")))
    stride = row_major_strides(shape)
    made: torch.Tensor = cls.__tensor_unflatten__(inner, context, shape, stride)
    return placed_like(parameter, made) if isinstance(parameter, DTensor) else made


def _new_state(cls: Any, inner: Mapping[str, torch.Tensor], context: Any, dtype: str) -> Any:
    import torch

    storage = getattr(torch, dtype, None)
    if not isinstance(context, dict) or not isinstance(storage, torch.dtype):
        raise SaveError(f"is a {_FLASH} without valid settings")
    made = cls(None, storage_dtype=storage)
    for name in _FLASH_SETTINGS:
        setattr(made, f"_{name}", bool(context.get(name)))
    for name in _FLASH_PLACED:
        setattr(made, f"_{name}", inner.get(name))
    return made


def _local_shape(
    name: str, spec: Mapping[str, Any], shape: tuple[int, ...], stored: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the local shape of an inner tensor, given the shape of the outer tensor's shard."""
    block = spec.get("block")
    if spec.get("placed") in ("whole", "own"):
        return stored
    sizes = (math.prod(shape),) if spec.get("placed") == "flat" else shape
    blocks = block if isinstance(block, list) else [block]
    fits = len(blocks) == len(sizes) and all(isinstance(b, int) and b > 0 for b in blocks)
    if not fits or any(size % b for size, b in zip(sizes, blocks, strict=True)):
        raise SaveError(
            f"has a {name} with a value for each block of {block} elements, but this rank's part {list(shape)} does "
            "not consist of whole blocks"
        )
    return tuple(size // b for size, b in zip(sizes, blocks, strict=True))
