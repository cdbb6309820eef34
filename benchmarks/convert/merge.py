"""Compare `merge` with reading and copying, with the bare sums in numpy, and with other tools, on the same bytes.

    python -m benchmarks.convert.merge --size 1GB --sources 8 --where /dev/shm [--repeat 3] [--mergekit PYTHON]
        [--adapter]

Every command runs in a fresh process, and its time includes the start of Python. The sources are Hugging Face
directories in bf16 with the shapes of a llama. The baseline reads all of them and copies one. Peak memory is ru_maxrss
of the process. All files are deleted at the end.

`--mergekit` names the Python of an environment that has mergekit: its linear method then runs too. `--adapter` also
merges a LoRA adapter of rank 16 on all matrices into one of the sources, and compares with PEFT.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from benchmarks.convert.bench import compare

# A plain loop that multiplies each source by its weight. All tensors of the result are in memory.
LOOP = """
import os, sys, torch
from safetensors import safe_open
from safetensors.torch import save_file
*sources, out = sys.argv[1:]
files = [safe_open(f"{source}/model.safetensors", "pt") for source in sources]
made = {}
for name in files[0].keys():
    total = sum(file.get_tensor(name).float() * (1 / len(files)) for file in files)
    made[name] = total.to(files[-1].get_tensor(name).dtype)
os.makedirs(out)
save_file(made, f"{out}/model.safetensors", {"format": "pt"})
"""

# What OLMo-core's src/scripts/average_hf_safetensors.py does, written anew: an in-place sum of each tensor, divided.
OLMO = """
import os, sys, torch
from safetensors import safe_open
from safetensors.torch import save_file
*sources, out = sys.argv[1:]
files = [safe_open(f"{source}/model.safetensors", "pt") for source in sources]
made = {}
for name in sorted(files[0].keys()):
    first = files[0].get_tensor(name)
    mean = first.float()
    for file in files[1:]:
        mean += file.get_tensor(name).float()
    mean /= len(files)
    made[name] = mean.to(first.dtype)
os.makedirs(out)
save_file(made, f"{out}/model.safetensors")
"""

PEFT = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
"""
RANK = 16

# The minimum that the same sums take in numpy: no plan, no names, no checks, two threads, and reused buffers.
BARE = """
import os, sys, threading
import numpy as np
*sources, out = sys.argv[1:]
files = [os.open(f"{source}/model.safetensors", os.O_RDONLY) for source in sources]
nbytes, tile, block = os.fstat(files[0]).st_size // 4 * 4, 1 << 20, 1 << 20
os.makedirs(out)
target = os.open(f"{out}/model.safetensors", os.O_RDWR | os.O_CREAT)
def work(first):
    raw, made = np.empty(tile, np.uint8), np.empty(tile, np.uint8)
    sums = np.empty(tile // 2, np.float32)
    bits, part = np.empty(block, np.uint32), np.empty(block, np.float32)
    for at in range(first * tile, nbytes, 2 * tile):
        n = min(tile, nbytes - at)
        for i, file in enumerate(files):
            os.preadv(file, [raw[:n].data], at)
            for b in range(0, n // 2, block):
                total = sums[: n // 2][b : b + block]
                m = len(total)
                bits[:m] = raw[:n].view(np.uint16)[b : b + block]
                bits[:m] <<= 16
                if i:
                    np.multiply(bits[:m].view(np.float32), np.float32(1 / len(files)), out=part[:m])
                    total += part[:m]
                else:
                    np.multiply(bits[:m].view(np.float32), np.float32(1 / len(files)), out=total)
        for b in range(0, n // 2, block):
            whole = sums[: n // 2][b : b + block].view(np.uint32)
            m = len(whole)
            np.right_shift(whole, 16, out=bits[:m])
            bits[:m] &= 1
            bits[:m] += 0x7FFF
            bits[:m] += whole
            bits[:m] >>= 16
            made[:n].view(np.uint16)[b : b + block] = bits[:m]
        os.pwritev(target, [made[:n].data], at)
np.seterr(all="ignore")
threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1GB")
    parser.add_argument("--sources", type=int, default=8)
    parser.add_argument("--where", default="/dev/shm")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--mergekit", metavar="PYTHON", help="Python of an environment that has mergekit")
    parser.add_argument("--adapter", action="store_true", help="merge an adapter too, and compare with PEFT")
    options = parser.parse_args()
    root = Path(options.where) / f"ckptkit-bench-{os.getpid()}"
    try:
        measure(root, options)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def measure(root: Path, options: argparse.Namespace) -> None:
    sources = [root / f"source_{i}" for i in range(options.sources)]
    make = [sys.executable, "-m", "benchmarks.convert.bench", "--size", options.size, "--make"]
    for source in sources:  # in separate processes: the memory of this one would count towards the peak of its children
        subprocess.run([*make, str(source)], check=True)
    out = root / "out"
    names = [str(source) for source in sources]
    copy = f"cat {' '.join(f'{name}/*' for name in names)} > /dev/null && cp -r {names[-1]} {out}"
    commands = {
        f"read {len(names)}, cp 1": ["bash", "-c", copy],
        "ckptkit merge": [sys.executable, "-m", "ckptkit", "merge", *names, str(out), "--max-shard-size", "1TB"],
        "bare numpy": [sys.executable, "-c", BARE, *names, str(out)],
        "loop in torch": [sys.executable, "-c", LOOP, *names, str(out)],
        "as OLMo-core": [sys.executable, "-c", OLMO, *names, str(out)],
    }
    if options.mergekit:
        recipe = root / "linear.yaml"
        models = [{"model": name, "parameters": {"weight": 1 / len(names)}} for name in names]
        recipe.write_text(json.dumps({"merge_method": "linear", "dtype": "bfloat16", "models": models}))  # also YAML
        run = [options.mergekit, "-m", "mergekit.scripts.run_yaml", str(recipe), str(out), "--no-copy-tokenizer"]
        commands["mergekit linear"] = run
    compare(commands, out, options.repeat, f"{len(names)} sources of {options.size} in bf16, {options.where}")
    if options.adapter:
        adapter = root / "adapter"
        make_adapter(sources[0], adapter)
        merge = [sys.executable, "-m", "ckptkit", "convert", str(adapter), str(out), "--merge-adapter"]
        merges = {
            "cp of the base": ["cp", "-r", names[0], str(out)],
            "ckptkit convert": [*merge, "--base", names[0], "--max-shard-size", "1TB"],
            "PEFT": [sys.executable, "-c", PEFT, names[0], str(adapter), str(out)],
        }
        compare(merges, out, options.repeat, f"LoRA of rank {RANK} on all matrices, base of {options.size} in bf16")


def make_adapter(base: Path, folder: Path) -> None:
    """Write a LoRA adapter in fp32 for all matrices in the base's layers, as PEFT would."""
    with safe_open(base / "model.safetensors", "np") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
    matrices = {
        name.removesuffix(".weight"): shape for name, shape in shapes.items() if ".layers." in name and len(shape) > 1
    }
    random = np.random.default_rng(0)
    factors = {}
    for name, (rows, columns) in matrices.items():
        factors[f"base_model.model.{name}.lora_A.weight"] = random.standard_normal((RANK, columns), np.float32)
        factors[f"base_model.model.{name}.lora_B.weight"] = random.standard_normal((rows, RANK), np.float32) * 1e-3
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors", {"format": "pt"})
    modules = sorted({name.rpartition(".")[2] for name in matrices})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main()
