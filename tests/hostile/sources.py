"""Good checkpoints, written by the real libraries, from which hostile ones are made; each is also the control."""

import contextlib
import io
import itertools
import json
import os
import pickle
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as torch_dcp

from ckptkit import TrainState
from tests.checkpoint.states import save_steps
from tests.hostile.harness import Place

Build = Callable[[Place], Any]
ZOO = Path(__file__).parents[1] / "zoo"


def written(name: str, data: bytes | str) -> Build:
    return lambda place: (place.src / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def sparse(path: Path) -> None:
    """Make a file of a terabyte without data."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


def saved(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


class Evil:
    """Creates a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def weights() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(16.0).reshape(4, 4), "bias": torch.arange(4.0)}


def header(entries: Mapping[str, Any] | str) -> bytes:
    text = entries if isinstance(entries, str) else json.dumps(entries)
    return len(text.encode()).to_bytes(8, "little") + text.encode()


def safetensors(names: Mapping[str, list[int]]) -> bytes:
    """Return a safetensors file of float32 zeros."""
    entries, end = {}, 0
    for name, shape in names.items():
        nbytes = 4 * int(torch.Size(shape).numel())
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    return header(entries) + bytes(end)


def hf(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(safetensors({"weight": [4, 4], "bias": [4]}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], "model_type": "x"}))
    (folder / "tokenizer.json").write_text("{}")


def hf_sharded(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(safetensors({"weight": [4, 4]}))
    (folder / "model-00002-of-00002.safetensors").write_bytes(safetensors({"bias": [4]}))
    write_index(folder, {})


def write_index(folder: Path, changes: Mapping[str, Any], name: str = "model.safetensors.index.json") -> None:
    table = {"weight": "model-00001-of-00002.safetensors", "bias": "model-00002-of-00002.safetensors"}
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 80}, "weight_map": {**table, **changes}}))


def dcp(folder: Path, state: Mapping[str, Any] | None = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(dict(state or {**weights(), "step": 7}), checkpoint_id=str(folder), no_dist=True)


def edit_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    """Unpickle a `.metadata` that the test wrote, change it, and write it again."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def own(folder: Path) -> None:
    """A run with two SHARDED checkpoints."""
    torch.manual_seed(0)
    save_steps(folder, 1, 2, make=lambda step: TrainState(model=torch.nn.Linear(4, 4), step=step))


def binary(folder: Path) -> None:
    torch.save(weights(), folder / "pytorch_model.bin")


def zoo(name: str) -> Callable[[Path], Any]:
    ignore = shutil.ignore_patterns("EXPECTED*")
    return lambda folder: shutil.copytree(ZOO / name, folder, dirs_exist_ok=True, ignore=ignore)


CONTROLS: dict[str, Callable[[Path], Any]] = {
    **{make.__name__: make for make in (hf, hf_sharded, dcp, own, binary)},
    "lightning_fsdp": zoo("lightning_trainer_fsdp_w2"),
    "deepspeed": zoo("deepspeed_zero2_bf16_w2/ckpt"),
    "deepspeed3": zoo("deepspeed_zero3_bf16_tied_w2/ckpt"),
    "verl": zoo("verl_fsdp2_w2"),
    "lightrft": zoo("lightrft_mp_optim_w2"),
    "hf_trainer": zoo("hf_trainer_fsdp2_sharded_w2/out"),
    "accelerate": zoo("accelerate_fsdp2_sharded_qwen3moe_w2/checkpoint"),
    "megatron": zoo("megatron_torch_dist_emulated"),
    "zstd": zoo("dcp_zstd_w2/ckpt"),
    "fsdp1_dcp": zoo("fsdp1_dcp_sharded_nomesh_w2"),
    "rank_shards": zoo("hf_dcp_sharded_w2/ckpt"),
}


@contextlib.contextmanager
def deepspeed_classes() -> Iterator[None]:
    """Provide the classes that files of DeepSpeed name, so that torch can load and save them."""
    modules: dict[str, types.ModuleType] = {}
    for full, name in (
        ("deepspeed.utils.tensor_fragment", "fragment_address"),
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ):
        modules |= {path: types.ModuleType(path) for path in itertools.accumulate(full.split("."), "{}.{}".format)}
        setattr(modules[full], name, int if name == "ZeroStageEnum" else type(name, (), {"__module__": full}))
    with mock.patch.dict(sys.modules, modules):
        yield


def changed(control: str, change: Callable[[Place], Any]) -> Build:
    def build(place: Place) -> None:
        CONTROLS[control](place.src)
        change(place)

    return build


def changed_steps(change: Callable[[Path], Any]) -> Build:
    return changed("own", lambda place: [change(step) for step in sorted(place.src.glob("step_*"))])


def changed_metadata(change: Callable[[Any], Any]) -> Build:
    return changed("dcp", lambda place: edit_metadata(place.src, change))
