"""Reads and writes torchao's quantized weights in safetensors files, as torchao and transformers lay them out.

A weight `a.weight` of the class Int8Tensor is stored as plain tensors `a._weight_qdata`, `a._weight_scale` and so on.
The header's `__metadata__` describes it: {"_type": class, "_data": attributes, "_tensor_data_names": inner tensors} in
JSON. Every other tensor has the entry {"_type": "Tensor"}, and `tensor_names` lists them all. The layout is that of
torchao.prototype.safetensors (0.18).

A catalog names these tensors as a save by ckptkit does: `a.weight::qdata`, with a recipe (see `subclasses`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.dcp.subclasses import SEPARATOR, Recipe
from ckptkit.formats.own.json import parse

__all__ = ["CLASSES", "DESCRIBED", "describe_tensors", "found_recipes", "stored_name"]

DESCRIBED = "tensor_names"
"""The key in `__metadata__` that lists the described tensors."""

_QUANTIZATION = "torchao.quantization."
_MX = "torchao.prototype.mx_formats."
CLASSES: Mapping[str, str] = {
    "Float8Tensor": _QUANTIZATION + "Float8Tensor",
    "Int4PlainInt32Tensor": _QUANTIZATION + "Int4PlainInt32Tensor",
    "Int4Tensor": _QUANTIZATION + "Int4Tensor",
    "Int4TilePackedTo4dTensor": _QUANTIZATION + "Int4TilePackedTo4dTensor",
    "Int8Tensor": _QUANTIZATION + "Int8Tensor",
    "IntxUnpackedToInt8Tensor": _QUANTIZATION + "IntxUnpackedToInt8Tensor",
    "MXTensor": _MX + "mx_tensor.MXTensor",
    "NVFP4Tensor": _MX + "nvfp4_tensor.NVFP4Tensor",
}
"""The classes that the layout supports: their names in `_type` -> their full names."""


def stored_name(name: str) -> str:
    """Return the name in safetensors files of the inner tensor `name`: "a._weight_qdata" for "a.weight::qdata"."""
    outer, _, attribute = name.partition(SEPARATOR)
    module, _, last = outer.rpartition(".")
    return f"{module}._{last}_{attribute}"


# --- reading


def found_recipes(
    metadata: Mapping[str, str], tensors: Mapping[str, tuple[str, tuple[int, ...]]], path: str
) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Return the recipes of a file's quantized weights, and the names of their tensors: stored -> in the catalog.

    Args:
        metadata: The `__metadata__` of the files, merged.
        tensors: dtype and shape of all stored tensors, by name.
        path: The file or directory, for messages.

    Raises:
        CorruptCheckpointError: A description is malformed, or names a tensor that does not exist.
        UnsupportedFormatError: A class is not one of `CLASSES`.
    """
    recipes: dict[str, Recipe] = {}
    names: dict[str, str] = {}
    if DESCRIBED not in metadata:
        return recipes, names
    listed = parse(metadata[DESCRIBED].encode(), file=f"{path}: {DESCRIBED} in __metadata__")
    for name in listed if isinstance(listed, list) else ():
        if not isinstance(name, str) or name not in metadata:
            continue
        value = parse(metadata[name].encode(), file=f"{path}: the description of {name!r} in __metadata__")
        if not isinstance(value, dict) or "_tensor_data_names" not in value:
            continue  # a plain tensor, or not torchao's layout
        kind, data, inner = value.get("_type"), value.get("_data"), value["_tensor_data_names"]
        if not isinstance(kind, str) or kind not in CLASSES:
            raise UnsupportedFormatError(
                f"{path}: {name} is of the class {kind!s:.100}, not one of {', '.join(CLASSES)}."
            )
        if not isinstance(data, dict) or not isinstance(inner, list) or "." not in name or not inner:
            raise CorruptCheckpointError(f"{path}: the description of {name!r} in __metadata__ is malformed.")
        stored = {attribute: stored_name(f"{name}{SEPARATOR}{attribute}") for attribute in inner}
        if missing := [text for text in stored.values() if text not in tensors]:
            raise CorruptCheckpointError(f"{path}: {name} is of the class {kind}, but {missing[0]} is missing.")
        names.update({text: f"{name}{SEPARATOR}{attribute}" for attribute, text in stored.items()})
        recipes[name] = _recipe(kind, data, {attribute: tensors[text] for attribute, text in stored.items()})
    return recipes, names


def _recipe(kind: str, data: Mapping[str, Any], inner: Mapping[str, tuple[str, tuple[int, ...]]]) -> Recipe:
    packed, held = inner.get("qdata", next(iter(inner.values())))
    shape = data.get("shape")
    if not isinstance(shape, list):
        shape = [*held[:-1], held[-1] * 2] if packed == "uint8" and held else list(held)
    context = {key: _from_json(value, shape) for key, value in data.items()}
    dtype = context.get("dtype") or context.get("orig_dtype") or {}
    stride = [1] * len(held)
    for dim in range(len(held) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * (held if kind == "MXTensor" else shape)[dim + 1]
    placed = {}
    for name, (_, sizes) in inner.items():
        alike = len(sizes) == len(shape) and all(n and size % n == 0 for size, n in zip(shape, sizes, strict=True))
        block = [size // n for size, n in zip(shape, sizes, strict=True)] if alike else None
        placed[name] = {"placed": "like", "block": block} if alike else {"placed": "whole"}
    return {
        "class": CLASSES[kind],
        "shape": shape,
        "stride": stride,
        "dtype": dtype.get("$dtype", ""),
        "context": context,
        "inner": placed,
    }


def _from_json(value: Any, shape: list[int]) -> Any:
    if isinstance(value, list):
        return {"$shape": True} if shape and value == shape else [_from_json(item, shape) for item in value]
    if not isinstance(value, dict):
        return value
    kind, data = value.get("_type"), value.get("_data")
    if kind == "torch.dtype":
        return {"$dtype": data}
    if isinstance(data, dict):
        return {"$object": [kind, {key: _from_json(item, shape) for key, item in data.items()}]}
    return {"$enum": f"{kind}.{data}"} if kind else {key: _from_json(item, shape) for key, item in value.items()}


# --- writing


def describe_tensors(names: Iterable[str], recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """Return the `__metadata__` that describes a model's tensors.

    Args:
        names: The plain tensors.
        recipes: The quantized weights. Their classes are among `CLASSES`.

    Raises:
        UnsupportedFormatError: A recipe has a value that the layout cannot store.
    """
    plain = json.dumps({"_type": "Tensor"})
    found = dict.fromkeys(names, plain)
    for name, recipe in recipes.items():
        value = {
            "_type": recipe["class"].rpartition(".")[2],
            "_data": {key: _to_json(item, recipe, name) for key, item in recipe["context"].items()},
            "_tensor_data_names": list(recipe["inner"]),
        }
        found[name] = json.dumps(value)
    return {**found, DESCRIBED: json.dumps(list(found))}


def _to_json(value: Any, recipe: Recipe, name: str) -> Any:
    if isinstance(value, list):
        return [_to_json(item, recipe, name) for item in value]
    if not isinstance(value, dict):
        return value
    tag: str = next(iter(value), "")
    body: Any = value.get(tag)
    if not tag.startswith("$"):
        return {key: _to_json(item, recipe, name) for key, item in value.items()}
    if tag == "$shape":
        return list(recipe["shape"])
    if tag == "$tuple":
        return [_to_json(item, recipe, name) for item in body]
    if tag == "$dtype":
        return {"_type": "torch.dtype", "_data": body}
    if tag == "$enum":
        kind, _, member = body.rpartition(".")
        return {"_type": kind, "_data": member}
    if tag == "$object":
        return {"_type": body[0], "_data": {key: _to_json(item, recipe, name) for key, item in body[1].items()}}
    raise UnsupportedFormatError(f"{name} has the attribute {tag} {body!r}, which torchao's files cannot store.")
