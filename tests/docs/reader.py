"""A reader of SHARDED, FULL and LOCAL checkpoints, written from docs/format.md with the standard library and numpy."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

# The dtypes of the header; numpy has no bfloat16 or float8, so these are read as bits.
DTYPES = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "int64": "<i8", "int32": "<i4",
    "int16": "<i2", "int8": "<i1", "uint8": "<u1", "bool": "|b1", "complex64": "<c8",
}  # fmt: skip
COLUMNS = {"U8": "<u1", "I32": "<i4", "I64": "<i8", "U64": "<u8"}


def read_safetensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the columns of a safetensors file and its metadata."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    found = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        found[name] = np.frombuffer(data[8 + size + start : 8 + size + stop], COLUMNS[entry["dtype"]])
    return found, metadata


def texts(columns: dict[str, np.ndarray], name: str) -> list[str]:
    """Return a column of strings."""
    data, ends = columns[name].tobytes(), columns[f"{name}.ends"].tolist()
    return [data[start:stop].decode() for start, stop in zip([0, *ends], ends, strict=False)]


def read_tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """Return every tensor of the checkpoint by name."""
    record = json.loads((checkpoint / "checkpoint.json").read_text(encoding="utf-8"))
    assert record["format"] == "ckptkit/1"
    root = checkpoint / record["data"]
    columns, metadata = read_safetensors(root / record["manifest"])
    header = json.loads(metadata["ckptkit"])
    names, paths = texts(columns, "names"), texts(columns, "paths")
    files: dict[str, bytes] = {}
    found: dict[str, np.ndarray] = {}
    first_dim = first_slice = first_extent = 0
    for i, ndim in enumerate(columns["tensor.ndim"].tolist()):
        shape = columns["tensor.shape"][first_dim : first_dim + ndim].tolist()
        dtype = np.dtype(DTYPES[header["dtypes"][columns["tensor.dtype"][i]]])
        whole = np.zeros(shape, dtype)
        covered = np.zeros(shape, bool)
        stop = int(columns["tensor.stop"][i])
        for row in range(first_slice, stop):
            extent = slice(first_extent, first_extent + ndim)
            offsets, sizes = columns["slice.offset"][extent].tolist(), columns["slice.size"][extent].tolist()
            path = paths[columns["slice.file"][row]]
            if path not in files:
                files[path] = (root / path).read_bytes()
                assert len(files[path]) == record["files"][path]["nbytes"]
            start, nbytes = int(columns["slice.start"][row]), int(columns["slice.nbytes"][row])
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            whole[box] = np.frombuffer(files[path][start : start + nbytes], dtype).reshape(sizes)
            covered[box] = True
            first_extent += ndim
        assert covered.all(), names[i]
        found[names[i]] = whole
        first_dim, first_slice = first_dim + ndim, stop
    return found


def outlines(checkpoint: Path) -> dict[str, tuple[bytes, str]]:
    """Return for each file the bytes that its digest covers, and the recorded digest."""
    record = json.loads((checkpoint / "checkpoint.json").read_text(encoding="utf-8"))
    root = checkpoint / record["data"]
    columns, metadata = read_safetensors(root / record["manifest"])
    paths = texts(columns, "paths")
    parts: dict[str, list[tuple[int, int, int]]] = {path: [] for path in record["files"]}
    for path, start, nbytes, digest in json.loads(metadata["ckptkit"])["info"]["extra"].get("spares", []):
        parts[path].append((start, nbytes, int(digest, 16)))
    for row, file in enumerate(columns["slice.file"].tolist()):
        names = ("slice.start", "slice.nbytes", "slice.xxh3_64")
        start, nbytes, digest = (int(columns[name][row]) for name in names)
        parts[paths[file]].append((start, nbytes, digest))
    found = {}
    for path, item in record["files"].items():
        data, whole, at = (root / path).read_bytes(), b"", 0
        for start, nbytes, digest in sorted(parts[path]) if "outline" in item else ():
            if nbytes >= 65536:
                whole += data[at:start] + digest.to_bytes(8, "little")
                at = start + nbytes
        found[path] = (whole + data[at:], item.get("outline") or item["xxh3_64"])
    return found


def read_objects(checkpoint: Path) -> dict[str, Any]:
    """Return the non-tensor objects by key; a tensor inside an object is represented by its key."""
    record = json.loads((checkpoint / "checkpoint.json").read_text(encoding="utf-8"))
    document = json.loads((checkpoint / record["data"] / "objects.json").read_text(encoding="utf-8"))
    assert document["format"] == 1
    return {key: plain(tree) for key, tree in document["objects"].items()}


def plain(tree: Any) -> Any:
    """Return the value of a JSON tree."""
    if isinstance(tree, list):
        return [plain(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1 or not next(iter(tree)).startswith("$"):
        return {key: plain(item) for key, item in tree.items()}
    ((tag, value),) = tree.items()
    if tag in ("$tuple", "$set", "$frozenset"):
        return {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag](plain(value))
    if tag in ("$dict", "$ordered"):
        return {plain(key): plain(item) for key, item in value}
    if tag == "$defaultdict":
        return {plain(key): plain(item) for key, item in value[1]}
    if tag == "$float":
        return float(value)
    if tag == "$bytes":
        return base64.b64decode(value)
    if tag == "$tensor":
        data = base64.b64decode(value["data"])
        return np.frombuffer(data, DTYPES[value["dtype"]]).reshape(value["shape"])
    return {tag: value}
