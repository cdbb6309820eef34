"""Writes a sharded model as a Hugging Face directory, tensor by tensor, so that no host holds the whole model."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import dtype as dtype_of
from ckptkit.catalog.dtypes import export_dtype
from ckptkit.catalog.targets import Part, Target
from ckptkit.checkpoint.run.coordinator import Coordinator, Outcome
from ckptkit.checkpoint.save.hf_config import adapter_configs, adapters_of, config_of, side_files
from ckptkit.checkpoint.save.stream import LocalSteps, open_stream
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import UsageError
from ckptkit.formats.dcp.fill import part_of
from ckptkit.formats.dcp.host_bytes import dtype_name
from ckptkit.formats.hf.header import INDEX, TensorToWrite, encode_index, shard_names, split_into_shards
from ckptkit.formats.replaceable import check_replaceable
from ckptkit.fsdp.hf_model import Exported, adapter_tensors, exported, prove
from ckptkit.keymaps.builtin import choose_map
from ckptkit.storage.publish import stage
from ckptkit.storage.store import Store
from ckptkit.units import parse_size

_LAST = (INDEX, "adapter_config.json", "config.json")
_DTYPES = ("keep", "bf16", "fp16", "fp32")

Files = dict[str, list[Target]]  # the tensors of each safetensors file


def save_hf(
    model: nn.Module,
    url: str,
    *,
    tokenizer: Any = None,
    dtype: str = "keep",
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
) -> None:
    """Write `model`, sharded or not, wrapped or not, to `url` for `from_pretrained`; see `FSDPStrategy.save_model`.

    Tied weights are written once. Stacked experts are written in the Hub's layout. The export includes config.json,
    generation_config.json and the tokenizer's files. If `model` is a PEFT model, only its adapters are written, for
    PEFT's `from_pretrained`. To export the whole model, first merge the adapters (`merge_and_unload`).

    Before anything is written, the names are checked with `from_pretrained` on the meta device. The directory appears
    complete or not at all.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype is {dtype!r}; it must be one of {', '.join(_DTYPES)}.")
    max_bytes = parse_size(max_shard_size, "max_shard_size")

    def collect() -> tuple[Exported, list[Target]]:
        source = exported(model)
        return source, [] if adapters_of(source.model) else _targets(source, dtype)

    with contextlib.closing(Coordinator()) as coordinator, contextlib.ExitStack() as stack:
        source, targets = coordinator.run_on_all(collect, f"exporting to {url}")
        if not adapters_of(source.model):
            coordinator.decide(lambda: prove(source, targets), "trying from_pretrained")
            tensors, files = source.tensors, _shards(targets, max_bytes)
        else:
            tensors, files = _adapters(source, dtype, coordinator)
        store: Store | None = None  # on rank 0
        small: dict[str, bytes] = {}

        def open_place() -> None:
            nonlocal store
            small.update(_small_files(source.model, files, tokenizer))
            names = dict.fromkeys([*small, *files], -1)
            staged = stage(url, replaceable=check_replaceable, overwrite=overwrite, last=_LAST, names=names)
            store = stack.enter_context(staged)

        coordinator.decide(open_place, f"opening {url}")
        for path, held in files.items():
            outcome = Outcome.of(functools.partial(_write_file, store, path, held, tensors))
            coordinator.settle(outcome, f"writing {path}")

        def finish() -> None:
            assert store is not None
            for path, data in small.items():
                store.write(path, data)
            stack.pop_all().close()

        coordinator.decide(finish, f"publishing {url}")


def _targets(source: Exported, dtype: str) -> list[Target]:
    """Return the tensors to write, in the Hub's layout and cast to `dtype`."""
    sources = {name: _whole(name, tensor) for name, tensor in source.tensors.items()}
    mapped = choose_map(sources, config=config_of(source.model)).mapped.targets
    return [replace(target, name=name, dtype=export_dtype(target.dtype, dtype)) for name, target in mapped.items()]


def _adapters(source: Exported, dtype: str, coordinator: Coordinator) -> tuple[dict[str, torch.Tensor], Files]:
    """Return the tensors of a PEFT model's adapters, and the files to write. Collective."""
    tensors = dict(source.tensors)
    computed: dict[str, torch.Tensor] = {}

    def name() -> tuple[dict[str, dict[str, str]], dict[str, tuple[tuple[int, ...], torch.dtype]]]:
        found = adapter_tensors(source, computed)
        return found, {name: (tuple(t.shape), t.dtype) for name, t in computed.items()}

    folders, shapes = coordinator.decide(name, "naming the tensors of the adapter")
    for made, (shape, stored) in shapes.items():
        tensors[made] = computed.get(made, torch.empty(shape, dtype=stored))
    return tensors, {
        f"{folder}adapter_model.safetensors": [
            replace(target := _whole(live, tensors[live]), name=name, dtype=export_dtype(target.dtype, dtype))
            for name, live in names.items()
        ]
        for folder, names in folders.items()
    }


def _whole(name: str, tensor: torch.Tensor) -> Target:
    box = Box.whole(tuple(tensor.shape))
    stored = dtype_name(tensor.dtype)
    return Target(name, stored, box.sizes, (Part(box, name, box),), stored)


def _nbytes(target: Target) -> int:
    return target.numel * dtype_of(target.dtype).itemsize


def _shards(targets: list[Target], max_bytes: int) -> Files:
    shards = split_into_shards(list(map(_nbytes, targets)), max_bytes)
    names = shard_names(len(shards))
    return {name: [targets[i] for i in members] for name, members in zip(names, shards, strict=True)}


@torch.no_grad()
def _write_file(store: Store | None, path: str, targets: Sequence[Target], tensors: Mapping[str, torch.Tensor]) -> None:
    """Gather the file's tensors one by one on all ranks, and write the tensors on rank 0.

    If writing fails, rank 0 still takes part in all gathers, because the other ranks wait for it.
    """
    attempt = LocalSteps()
    name, whole = "", torch.empty(0)
    with contextlib.ExitStack() as stack:
        stream = None
        if store is not None:
            head = [TensorToWrite(target.name, target.dtype, target.shape) for target in targets]
            stream = attempt(lambda: stack.enter_context(open_stream(store, path, head, {"format": "pt"})))
        for target in targets:
            made: torch.Tensor | None = None
            for part in target.parts:
                if part.source != name:  # several targets may be slices of one tensor (a layer's experts)
                    whole = torch.empty(0)  # free the tensor before the next one is gathered
                    name, live = part.source, tensors[part.source].detach()
                    whole = live.full_tensor() if isinstance(live, DTensor) else live
                if stream is not None:
                    made = attempt(functools.partial(_filled, made, target, part, whole))
            if stream is not None:
                attempt(functools.partial(stream.write, target.name, made))  # type: ignore[arg-type]
        attempt.check()  # inside the stack, so that the file is not finished


def _filled(made: torch.Tensor | None, target: Target, part: Part, whole: torch.Tensor) -> torch.Tensor:
    """Copy a part of `whole` into the host tensor for `target`. The first call for a target creates this tensor."""
    dtype = getattr(torch, target.dtype)
    value = part_of(whole, part.source_box.offsets, part.source_box.sizes)
    if len(target.parts) == 1 and part.is_plain:
        return value.reshape(target.shape).to("cpu", dtype)
    made = torch.empty(target.shape, dtype=dtype) if made is None else made
    value = value.reshape(part.unfold) if part.unfold else value
    value = value.permute(part.axes) if part.axes else value
    box = part.target_box
    part_of(made, box.offsets, box.sizes).copy_(value.reshape(box.sizes))
    return made


def _small_files(model: nn.Module, files: Files, tokenizer: Any) -> dict[str, bytes]:
    small = dict(_tokenizer_files(tokenizer))
    if adapters_of(model):
        return small | {f"{at}adapter_config.json": data for at, data in adapter_configs(model).items()}
    for path, data in side_files(TrainState(model=model, rng=False)).items():
        small[path] = _with_dtype(data, files) if path == "config.json" else data
    if len(files) > 1:
        targets = [target for held in files.values() for target in held]
        weight_map = {target.name: path for path, held in files.items() for target in held}
        size, numel = sum(map(_nbytes, targets)), sum(target.numel for target in targets)
        small[INDEX] = encode_index(weight_map, total_size=size, total_parameters=numel)
    return small


def _with_dtype(config: bytes, files: Files) -> bytes:
    """Return config.json with the dtype in which the model was written."""
    found = [t.dtype for held in files.values() for t in held if dtype_of(t.dtype).kind == "float"]
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
