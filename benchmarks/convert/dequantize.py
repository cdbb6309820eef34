"""Compare `convert --dtype bf16` of block-FP8 weights with `cp` of the result, and with a plain loop in torch.

    python -m benchmarks.convert.dequantize --size 1GB --where /dev/shm [--repeat 3]

Every command runs in a fresh process, and its time includes the start of Python. The source is a Hugging Face directory
of square matrices in FP8 with one scale per block of 128 x 128 (DeepSeek-V3's scheme). Peak memory is ru_maxrss of the
process. All files are deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.convert.bench import compare, timed
from ckptkit.units import parse_size

SIDE = 4096

# The plain loop, tensor by tensor, as in DeepSeek's fp8_cast_bf16.py. The whole result is in memory.
LOOP = """
import os, sys, torch
from safetensors import safe_open
from safetensors.torch import save_file
source, out = sys.argv[1:]
file = safe_open(f"{source}/model.safetensors", "pt")
made = {}
for name in file.keys():
    if name.endswith("_scale_inv"):
        continue
    scale = file.get_tensor(name + "_scale_inv").repeat_interleave(128, 0).repeat_interleave(128, 1)
    made[name] = (file.get_tensor(name).float() * scale).to(torch.bfloat16)
os.makedirs(out)
save_file(made, f"{out}/model.safetensors", {"format": "pt"})
"""


def make(source: Path, nbytes: int) -> None:
    """Write a model with about `nbytes` bytes of bf16 after conversion."""
    random = np.random.default_rng(0)
    tensors = {}
    for i in range(max(1, nbytes // (2 * SIDE * SIDE))):
        codes = random.integers(0, 0x7E, (SIDE, SIDE), dtype=np.uint8)  # no NaN
        name = f"model.layers.{i}.mlp.up_proj.weight"
        tensors[name] = codes.view("V1")
        tensors[f"{name}_scale_inv"] = random.random((SIDE // 128, SIDE // 128), dtype=np.float32)
    source.mkdir(parents=True)
    write(source / "model.safetensors", tensors)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a safetensors file. Arrays of one-byte elements get the dtype FP8, which numpy lacks."""
    plain = {name: array.view(np.uint8) if array.dtype.itemsize == 1 else array for name, array in tensors.items()}
    save_file(plain, path, {"format": "pt"})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"U8"', b'"F8_E4M3"').replace(b" ", b"")
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header + data[8 + length :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1GB")
    parser.add_argument("--where", default="/dev/shm")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make is not None:
        return make(options.make, parse_size(options.size))
    root = Path(options.where) / f"ckptkit-bench-{os.getpid()}"
    try:
        measure(root, options)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return None


def measure(root: Path, options: argparse.Namespace) -> None:
    source, result, out = root / "source", root / "result", root / "out"
    module = [sys.executable, "-m", "benchmarks.convert.dequantize"]
    timed([*module, "--size", options.size, "--make", str(source)], clean=out, sync=False)
    convert = [sys.executable, "-m", "ckptkit", "convert", str(source)]
    timed([*convert, str(result), "--dtype", "bf16", "--max-shard-size", "1TB"], clean=out, sync=False)
    commands = {
        "cp of the result": ["cp", "-r", str(result), str(out)],
        "ckptkit convert": [*convert, str(out), "--dtype", "bf16", "--max-shard-size", "1TB"],
        "loop in torch": [sys.executable, "-c", LOOP, str(source), str(out)],
    }
    compare(commands, out, options.repeat, f"block FP8 to {options.size} of bf16, {options.where}")


if __name__ == "__main__":
    main()
