"""Reads and writes torchao's quantized weights in safetensors files, in the layout of torchao and transformers.

A weight `a.weight` of the class Int8Tensor is stored as plain tensors `a._weight_qdata`, `a._weight_scale` and so on.
The header's `__metadata__` describes the weight in JSON: {"_type": class, "_data": attributes, "_tensor_data_names":
inner tensors}. Every other tensor has the entry {"_type": "Tensor"}, and `tensor_names` lists all described tensors.
The layout is that of torchao.prototype.safetensors (0.18).

In a catalog, the plain tensors have the same names as in a save by ckptkit, such as `a.weight::qdata`. A recipe in the
catalog describes the weight (see `subclasses`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ckptkit.catalog.box import row_major_strides
from ckptkit.errors import CorruptCheckpointError, UnsupportedFormatError
from ckptkit.formats.dcp.blocks import blocks_of
from ckptkit.formats.dcp.subclasses import SEPARATOR, WEIGHTS, Recipe
from ckptkit.formats.hf.header import HeaderTensor
from ckptkit.formats.own.json import parse

DESCRIBED = "tensor_names"
"""The key in `__metadata__` that lists the described tensors."""

CLASSES: Mapping[str, str] = {name.rpartition(".")[2]: name for name in WEIGHTS}
"""The classes that the layout supports: names in `_type` -> full names."""


def stored_name(name: str) -> str:
    """Return the name of an inner tensor in safetensors files: "a._weight_qdata" for "a.weight::qdata"."""
    outer, _, attribute = name.partition(SEPARATOR)
    module, _, last = outer.rpartition(".")
    return f"{module}._{last}_{attribute}"


# --- reading


def found_recipes(
    headers: Iterable[Mapping[str, str]], tensors: Mapping[str, HeaderTensor], path: str
) -> tuple[dict[str, Recipe], dict[str, str]]:
    """Return a checkpoint's recipes of quantized weights, and the catalog names of these weights' stored tensors.

    Args:
        headers: The `__metadata__` of each file.
    """
    recipes: dict[str, Recipe] = {}
    names: dict[str, str] = {}
    for name, text in _descriptions(headers, path).items():
        what = f"{path}: the description of {name!r} in __metadata__"
        value = parse(text.encode(), file=what)
        if not isinstance(value, dict) or "_tensor_data_names" not in value:
            continue  # a plain tensor, or not torchao's layout
        kind, data, inner = value.get("_type"), value.get("_data"), value["_tensor_data_names"]
        if not isinstance(kind, str) or kind not in CLASSES:
            raise UnsupportedFormatError(
                f"{path}: {name} is of the class {kind!s:.100}, not one of {', '.join(CLASSES)}."
            )
        are_names = isinstance(inner, list) and all(isinstance(item, str) for item in inner)
        if not isinstance(data, dict) or not are_names or len(set(inner)) != len(inner) or "." not in name or not inner:
            raise CorruptCheckpointError(f"{what} is malformed.")
        stored = {attribute: stored_name(f"{name}{SEPARATOR}{attribute}") for attribute in inner}
        if missing := [part for part in stored.values() if part not in tensors]:
            raise CorruptCheckpointError(f"{path}: {name} is of the class {kind}, but {missing[0]} is missing.")
        named = {part: f"{name}{SEPARATOR}{attribute}" for attribute, part in stored.items()}
        for part, full in named.items():
            if part in names or full in tensors or name in tensors:
                other = names.get(part) or (full if full in tensors else name)
                raise CorruptCheckpointError(f"{what} names {part}, but the file also has {other!r}.")
        names.update(named)
        try:
            recipes[name] = _recipe(kind, data, {attribute: tensors[part] for attribute, part in stored.items()})
        except ValueError as error:
            raise CorruptCheckpointError(f"{what} is malformed: {error}.") from None
    return recipes, names


def _descriptions(headers: Iterable[Mapping[str, str]], path: str) -> dict[str, str]:
    """Return the description of each tensor in the headers' `tensor_names`. A file may list only its own tensors."""
    found: dict[str, str] = {}
    for header in headers:
        listed = (
            parse(header[DESCRIBED].encode(), file=f"{path}: {DESCRIBED} in __metadata__")
            if DESCRIBED in header
            else ()
        )
        for name in listed if isinstance(listed, list) else ():
            if isinstance(name, str) and name in header and found.setdefault(name, header[name]) != header[name]:
                raise CorruptCheckpointError(f"{path}: the files' descriptions of {name!r} in __metadata__ differ.")
    return found


def _recipe(kind: str, data: Mapping[str, Any], inner: Mapping[str, HeaderTensor]) -> Recipe:
    first = inner.get("qdata", next(iter(inner.values())))
    packed, held = first.dtype, first.shape
    shape = data.get("shape")
    if shape is None:
        shape = [*held[:-1], held[-1] * 2] if packed == "uint8" and held else list(held)
    elif not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"the shape {shape!r:.100}")
    context = {key: _from_json(value, shape) for key, value in data.items()}
    dtype = context.get("dtype") or context.get("orig_dtype")
    placed = {}
    for name, tensor in inner.items():
        block = blocks_of(shape, tensor.shape)
        placed[name] = {"placed": "whole"} if block is None else {"placed": "like", "block": block}
    return {
        "class": CLASSES[kind],
        "shape": shape,
        "stride": list(row_major_strides(tuple(held if kind == "MXTensor" else shape))),
        "dtype": dtype.get("$dtype", "") if isinstance(dtype, dict) else "",
        "context": context,
        "inner": placed,
    }


def _from_json(value: Any, shape: list[int]) -> Any:
    """Convert a value in a torchao description to its form in a `Recipe`. Raises ValueError if it is malformed."""
    if isinstance(value, list):
        return {"$shape": True} if shape and value == shape else [_from_json(item, shape) for item in value]
    if not isinstance(value, dict):
        return value
    if "_type" not in value:
        if any(key.startswith("$") for key in value):  # recipes use these names
            raise ValueError(f"the names {list(value)!r:.100}")
        return {key: _from_json(item, shape) for key, item in value.items()}
    kind, data = value["_type"], value.get("_data")
    if isinstance(kind, str) and kind != "torch.dtype" and isinstance(data, dict):
        return {"$object": [kind, {key: _from_json(item, shape) for key, item in data.items()}]}
    if not isinstance(kind, str) or not isinstance(data, str):
        raise ValueError(f"the value {value!r:.100}")
    return {"$dtype": data} if kind == "torch.dtype" else {"$enum": f"{kind}.{data}"}


# --- writing


def describe_tensors(names: Iterable[str], recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """Return the `__metadata__` that describes a model's tensors.

    Args:
        recipes: Describes how each quantized weight is split into plain tensors (see `subclasses`). The class of each
            weight must be one of `CLASSES`.

    Raises:
        UnsupportedFormatError: A recipe has a value that torchao's layout cannot store.
    """
    plain = json.dumps({"_type": "Tensor"})
    found = dict.fromkeys(names, plain)
    for name, recipe in recipes.items():
        value = {
            "_type": recipe["class"].rpartition(".")[2],
            "_data": {key: _to_json(item, recipe, name) for key, item in _context(recipe).items()},
            "_tensor_data_names": list(recipe["inner"]),
        }
        found[name] = json.dumps(value)
    return {**found, DESCRIBED: json.dumps(list(found))}


def _context(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe's context: what the class needs, besides the inner tensors, to rebuild a weight.

    If each shard of the weight has its own scale, the context's block size is the shape of a shard.
    """
    block = recipe["inner"].get("scale", {}).get("block")
    cut = recipe["context"].get("block_size") == {"$shape": True} and block is not None
    return {**recipe["context"], **({"block_size": block} if cut else {})}


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
