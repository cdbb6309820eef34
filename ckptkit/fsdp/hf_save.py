"""A sharded model written as a Hugging Face directory: tensor by tensor, so that no host holds the model."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptkit.catalog.box import Box
from ckptkit.catalog.builtin_maps import choose_map
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.targets import Part, Target
from ckptkit.checkpoint.coordinator import Coordinator, Outcome
from ckptkit.checkpoint.hf_config import side_files
from ckptkit.checkpoint.state import TrainState, capture
from ckptkit.checkpoint.stream import FileTensor, open_stream
from ckptkit.errors import UsageError
from ckptkit.fsdp import meta
from ckptkit.storage.staging import stage
from ckptkit.storage.store import Store
from ckptkit.units import parse_size

__all__ = ["save_hf"]

_INDEX = "model.safetensors.index.json"
_DTYPES = {"keep": None, "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    targets: tuple[Target, ...]


def save_hf(
    model: nn.Module,
    url: str,
    *,
    tokenizer: Any = None,
    dtype: str = "keep",
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write `model` to `url` as `from_pretrained` reads it. All ranks must call it; rank 0 writes.

    Each rank holds one whole tensor at a time. Tied weights are written once, stacked experts as the hub has them;
    config.json, generation_config.json and the tokenizer's files come along. The directory appears whole or not at
    all.

    Args:
        model: Sharded or not.
        url: A path, or anything fsspec opens.
        tokenizer: Anything with `save_pretrained`, or None.
        dtype: "keep", or what floating tensors are cast to: "bf16", "fp16", "fp32".
        max_shard_size: The most that one file holds.
        overwrite: Replace what is at `url`.
        storage_options: For the file system.

    Raises:
        SaveError: Parts of the model have no values, or a rank failed (the same on every rank).
        CheckpointExistsError: `url` is taken.
    """
    meta.require_initialized(model)
    tensors, targets = _targets(model, dtype)
    files = _files(targets, parse_size(max_shard_size))
    coordinator = Coordinator()
    try:
        with contextlib.ExitStack() as stack:
            opened: list[Store] = []
            staged = stage(url, overwrite=overwrite, last=(_INDEX, "config.json"), storage_options=storage_options)
            coordinator.decide(lambda: opened.append(stack.enter_context(staged)), f"opening {url}")
            store = opened[0] if opened else None
            for file in files:
                outcome = Outcome.of(lambda file=file: _write_file(store, file, tensors))  # type: ignore[misc]
                coordinator.settle(outcome, f"writing {file.path}")
            coordinator.decide(lambda: _write_side_files(opened[0], model, files, tokenizer), "writing the config")
            coordinator.decide(stack.pop_all().close if opened else _nothing, f"publishing {url}")
    finally:
        coordinator.close()


def _nothing() -> None:
    """Do nothing: only rank 0 has a directory to publish."""


def _targets(model: nn.Module, dtype: str) -> tuple[dict[str, torch.Tensor], list[Target]]:
    if dtype not in _DTYPES:
        raise UsageError(f"dtype is {dtype!r}; it must be one of {', '.join(_DTYPES)}.")
    captured = capture(TrainState(model=model, rng=False))
    aliases = captured.aliases["model"]
    tensors = {name: tensor for name, tensor in captured.models["model"].items() if name not in aliases}
    sources = {}
    for name, tensor in tensors.items():
        box = Box.whole(tuple(tensor.shape))
        stored = str(tensor.dtype).removeprefix("torch.")
        sources[name] = Target(name, stored, box.sizes, (Part(box, name, box),), stored)
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    mapped = choose_map(sources, config=to_dict() if callable(to_dict) else {}).mapped.targets
    wanted = _DTYPES[dtype]
    return tensors, [
        replace(target, name=name, dtype=wanted if wanted and dtype_of(target.dtype).kind == "float" else target.dtype)
        for name, target in mapped.items()
    ]


def _nbytes(target: Target) -> int:
    return target.numel * dtype_of(target.dtype).itemsize


def _files(targets: list[Target], max_bytes: int) -> list[_File]:
    groups: list[list[Target]] = [[]]
    filled = 0
    for target in targets:
        if groups[-1] and filled + _nbytes(target) > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(target)
        filled += _nbytes(target)
    if len(groups) == 1:
        return [_File("model.safetensors", tuple(groups[0]))]
    total = len(groups)
    return [_File(f"model-{i:05d}-of-{total:05d}.safetensors", tuple(group)) for i, group in enumerate(groups, 1)]


def _write_file(store: Store | None, file: _File, tensors: Mapping[str, torch.Tensor]) -> None:
    """Gather the file's tensors one after the other on all ranks; rank 0, which has the store, writes them."""
    error: Exception | None = None
    with contextlib.ExitStack() as stack:
        stream = None
        if store is not None:
            head = [FileTensor(target.name, target.dtype, target.shape) for target in file.targets]
            try:
                stream = stack.enter_context(open_stream(store, file.path, head, {"format": "pt"}))
            except Exception as caught:  # noqa: BLE001  the other ranks are gathering: fail after that, together
                error = caught
        gathered = _Gathered(tensors)
        for target in file.targets:
            value = gathered.make(target)
            if stream is None or error is not None:
                continue
            try:
                stream.write(target.name, [_bytes(value)])
            except Exception as caught:  # noqa: BLE001  as above
                error = caught
        if error is not None:
            raise error  # inside of the stack: the file must not be finished


class _Gathered:
    """The last whole tensor: several targets may be cut from one (the experts of a layer)."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._name: str | None = None
        self._whole: torch.Tensor | None = None

    def make(self, target: Target) -> torch.Tensor:
        """Return the tensor of `target` in host memory. All ranks must call it."""
        with torch.no_grad():
            only = target.parts[0] if len(target.parts) == 1 and target.parts[0].is_plain else None
            if only is not None:
                return self._cut(only).reshape(target.shape).to("cpu", getattr(torch, target.dtype))
            made = torch.empty(target.shape, dtype=getattr(torch, target.dtype))
            for part in target.parts:
                value = self._cut(part)
                value = value.reshape(part.unfold) if part.unfold else value
                value = value.permute(part.axes) if part.axes else value
                made[_slices(part.target_box)].copy_(value.reshape(part.target_box.sizes))
            return made

    def _cut(self, part: Part) -> torch.Tensor:
        if self._whole is None or self._name != part.source:
            self._whole = None  # before the next one is made
            live = self._tensors[part.source].detach()
            self._whole = live.full_tensor() if isinstance(live, DTensor) else live
            self._name = part.source
        return self._whole[_slices(part.source_box)]


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))


def _bytes(value: torch.Tensor) -> memoryview:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write_side_files(store: Store, model: nn.Module, files: list[_File], tokenizer: Any) -> None:
    for path, data in _tokenizer_files(tokenizer):
        store.write(path, data)
    for path, data in side_files(TrainState(model=model, rng=False)).items():
        store.write(path, _with_dtype(data, files) if path == "config.json" else data)
    if len(files) > 1:
        weight_map = {target.name: file.path for file in files for target in file.targets}
        targets = [target for file in files for target in file.targets]
        metadata = {"total_parameters": sum(t.numel for t in targets), "total_size": sum(map(_nbytes, targets))}
        text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True)
        store.write(_INDEX, (text + "\n").encode())


def _with_dtype(config: bytes, files: list[_File]) -> bytes:
    """Return config.json with the dtype that was written."""
    found = [t.dtype for file in files for t in file.targets if dtype_of(t.dtype).kind == "float"]
    fields = json.loads(config)
    if found:
        fields["dtype"] = found[0]
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def _tokenizer_files(tokenizer: Any) -> Iterator[tuple[str, bytes]]:
    if tokenizer is None:
        return
    save: Callable[[str], object] | None = getattr(tokenizer, "save_pretrained", None)
    if save is None:
        raise UsageError(f"tokenizer is a {type(tokenizer).__name__}, which has no save_pretrained.")
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                yield path.relative_to(folder).as_posix(), path.read_bytes()
