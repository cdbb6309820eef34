"""Convert against cp, torch and accelerate, on the same bytes in one run; prints ratios.

    python benchmarks/convert/bench.py --size 2GB --ranks 4 --where /dev/shm [--peers] [--repeat 5]

Every command is a fresh process, start of Python included. The source is a DCP checkpoint of `--ranks` ranks
(zip records with CRC-32), bf16, shaped like a llama (or `--small`: many small tensors). Peak memory is the
kernel's ru_maxrss of that process. Everything is deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ckptkit.units import parse_size

RUN = "from ckptkit import convert; convert({src!r}, {dst!r}, {options})"
TORCH = "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as f; f({src!r}, {dst!r})"
MERGE = "from accelerate.utils import merge_fsdp_weights as f; f({src!r}, {dst!r}, safe_serialization=True)"


def make_model(folder: Path, nbytes: int, dtype: str, small: bool) -> None:
    """Write one safetensors file of random weights, in the shapes of a llama."""
    import numpy as np

    from ckptkit.formats.safetensors_header import HeaderTensor, lay_out

    itemsize = 2 if dtype == "bfloat16" else 4
    hidden = 512 if small else 4096
    shapes: list[tuple[str, tuple[int, ...]]] = []
    size = layer = 0
    while size < nbytes:
        for name, shape in (
            ("self_attn.q_proj.weight", (hidden, hidden)),
            ("self_attn.k_proj.weight", (hidden // 4, hidden)),
            ("mlp.up_proj.weight", (hidden * 3, hidden)),
            ("input_layernorm.weight", (hidden,)),
            ("post_attention_layernorm.weight", (hidden,)),
        ):
            shapes.append((f"model.layers.{layer}.{name}", shape if not small else tuple(n // 8 for n in shape)))
            size += int(np.prod(shapes[-1][1])) * itemsize
        layer += 1
    layout = lay_out([HeaderTensor(name, dtype, shape) for name, shape in shapes], {"format": "pt"})
    folder.mkdir(parents=True)
    values = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32) * 0.02
    block = values.tobytes() if itemsize == 4 else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(layout.header)
        left = layout.nbytes - len(layout.header)
        while left:
            left -= file.write(block[: min(left, len(block))])


def environment() -> dict[str, str]:
    """Return the environment of a user: modules are compiled once, not at every start."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPYCACHEPREFIX": os.path.join(tempfile.gettempdir(), "ckptkit-bench-pyc")
    }


def timed(command: list[str], *, clean: Path, sync: bool) -> tuple[float, float, int]:
    """Return (wall seconds, processor seconds, peak resident bytes) of one fresh process."""
    if clean.is_file():
        clean.unlink()
    shutil.rmtree(clean, ignore_errors=True)
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment())
    error = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    if sync:
        subprocess.run(["sync", "-f", str(clean.parent)], check=True)
    if status:
        raise RuntimeError(f"{command}: {error.decode()[-2000:]}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2GB")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--where", default="/dev/shm")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--small", action="store_true", help="many small tensors")
    parser.add_argument("--peers", action="store_true", help="run torch's and accelerate's converters too")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_model(options.make, parse_size(options.size), options.dtype, options.small)
        return
    root = Path(options.where) / f"ckptkit-bench-{os.getpid()}"
    try:
        results = measure(root, options)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if options.json:
        print(json.dumps(results, indent=2))


def measure(root: Path, options: argparse.Namespace) -> dict[str, object]:
    model, source, out = root / "hf", root / "pytorch_model_fsdp_0", root / "out"
    # In processes of their own: what this process holds would count as their children's peak.
    make = [sys.executable, __file__, "--size", options.size, "--dtype", options.dtype, "--make", str(model)]
    subprocess.run([*make, *(["--small"] if options.small else [])], check=True)
    to_dcp = RUN.format(src=str(model), dst=str(source), options=f"to='dcp', world_size={options.ranks}")
    subprocess.run([sys.executable, "-c", to_dcp], check=True, env=environment())
    shutil.rmtree(model)
    total = sum(file.stat().st_size for file in source.iterdir())

    def ours(extra: str = "") -> list[str]:
        return [sys.executable, "-c", RUN.format(src=str(source), dst=str(out), options=extra)]

    other = "float32" if options.dtype == "bfloat16" else "bfloat16"
    commands = {
        "cp -r": ["cp", "-r", str(source), str(out)],
        "convert --no-check": ours("check=False"),
        "convert": ours(),
        "convert --verify": ours("verify=True"),
        "convert --to torch": ours("to='torch'"),
        f"convert --to dcp ({options.ranks + 2})": ours(f"to='dcp', world_size={options.ranks + 2}"),
        f"convert --dtype {other}": ours(f"dtype={other!r}"),
    }
    if options.peers:
        into = f"import os; os.makedirs({str(out)!r}, exist_ok=True); "
        file = f"{out}/model.pt"
        commands["dcp_to_torch_save"] = [sys.executable, "-c", into + TORCH.format(src=str(source), dst=file)]
        commands["accelerate merge"] = [sys.executable, "-c", into + MERGE.format(src=str(source), dst=str(out))]
    # Turn by turn, so that a noisy machine is noisy to all; the best of each counts.
    on_disk = not options.where.startswith("/dev/shm")
    best = {name: (float("inf"), float("inf"), 0) for name in commands}
    for turn in range(options.repeat):
        for name, command in commands.items():
            if turn >= 2 and name in ("dcp_to_torch_save", "accelerate merge"):
                continue
            wall, cpu, peak = timed(command, clean=out, sync=on_disk and name == "cp -r")
            before = best[name]
            best[name] = (min(before[0], wall), min(before[1], cpu), max(before[2], peak))
    cp = best["cp -r"]
    kind = "small tensors" if options.small else "llama shapes"
    print(f"{total / 1e9:.2f} GB {options.dtype}, {kind}, {options.ranks} ranks, {options.where}")
    for name, (wall, cpu, peak) in best.items():
        ratio = f"{wall / cp[0]:5.2f} x cp  cpu {cpu:5.2f} s = {cpu / cp[1]:5.2f} x"
        print(f"  {name:24s} {wall:6.2f} s  {ratio}  peak {peak / 1e6:6.0f} MB", flush=True)
    measured = {name: dict(zip(("wall_s", "cpu_s", "peak"), value, strict=True)) for name, value in best.items()}
    return {"bytes": total, "ranks": options.ranks, "where": options.where, "best": measured}


if __name__ == "__main__":
    main()
