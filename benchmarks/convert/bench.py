"""Convert against cp, torch and accelerate, on the same bytes in one run; prints ratios.

    python benchmarks/convert/bench.py --size 2GB --ranks 4 --where /dev/shm [--peers] [--repeat 3]

Every command is a fresh process, start of Python included. The source is a DCP checkpoint of `--ranks` ranks
(zip records with CRC-32), bf16, shaped like a llama (or `--small`: many small tensors). Peak memory is the
kernel's ru_maxrss of that process. Everything is deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ckptkit.formats.safetensors_header import HeaderTensor, lay_out
from ckptkit.units import parse_size

RUN = "import sys; from ckptkit import convert; convert({src!r}, {dst!r}, {options})"
TORCH = "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as f; f({src!r}, {dst!r})"
MERGE = "from accelerate.utils import merge_fsdp_weights as f; f({src!r}, {dst!r}, safe_serialization=True)"


def make_model(folder: Path, nbytes: int, dtype: str, small: bool) -> None:
    """Write one safetensors file of random weights, in the shapes of a llama."""
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


def timed(command: list[str], *, clean: Path, repeat: int, sync: bool) -> tuple[float, int]:
    """Return (best wall seconds, peak resident bytes of that process)."""
    best, peak = float("inf"), 0
    for _ in range(repeat):
        shutil.rmtree(clean, ignore_errors=True)
        clean.unlink(missing_ok=True) if clean.is_file() else None
        os.sync()
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        error = process.stderr.read() if process.stderr else b""
        _, status, usage = os.wait4(process.pid, 0)
        if sync:
            subprocess.run(["sync", "-f", str(clean.parent)], check=True)
        best = min(best, time.perf_counter() - start)
        peak = max(peak, usage.ru_maxrss * 1024)
        if status:
            raise RuntimeError(f"{command}: {error.decode()[-2000:]}")
    return best, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2GB")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--where", default="/dev/shm")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--small", action="store_true", help="many small tensors")
    parser.add_argument("--peers", action="store_true", help="run torch's and accelerate's converters too")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    root = Path(options.where) / f"ckptkit-bench-{os.getpid()}"
    try:
        results = measure(root, options)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if options.json:
        print(json.dumps(results, indent=2))


def measure(root: Path, options: argparse.Namespace) -> dict[str, object]:
    from ckptkit import convert

    model, source, out = root / "hf", root / "pytorch_model_fsdp_0", root / "out"
    make_model(model, parse_size(options.size), options.dtype, options.small)
    convert(str(model), str(source), to="dcp", world_size=options.ranks)
    shutil.rmtree(model)
    total = sum(file.stat().st_size for file in source.iterdir())
    on_disk = not options.where.startswith("/dev/shm")
    cp, _ = timed(["cp", "-r", str(source), str(out)], clean=out, repeat=options.repeat, sync=on_disk)
    results: dict[str, object] = {"bytes": total, "ranks": options.ranks, "where": options.where, "cp_s": cp}
    print(f"{total / 1e9:.2f} GB, {options.ranks} ranks, {options.where}, {options.dtype}: cp -r {cp:.2f} s")

    def show(name: str, command: list[str]) -> None:
        seconds, peak = timed(command, clean=out, repeat=options.repeat, sync=False)
        results[name] = {"seconds": seconds, "of_cp": seconds / cp, "peak_mb": peak / 1e6}
        print(f"  {name:24s} {seconds:6.2f} s  {seconds / cp:5.2f} x cp  peak {peak / 1e6:6.0f} MB")

    def ours(extra: str = "") -> list[str]:
        code = RUN.format(src=str(source), dst=str(out), options=extra)
        return [sys.executable, "-c", code]

    show("convert --no-check", ours("check=False"))
    show("convert", ours())
    show("convert --verify", ours("verify=True"))
    show("convert --to torch", [*ours("to='torch'")])
    show("convert --to dcp (N+2)", ours(f"to='dcp', world_size={options.ranks + 2}"))
    other = "float32" if options.dtype == "bfloat16" else "bfloat16"
    show(f"convert --dtype {other}", ours(f"dtype={other!r}"))
    if options.peers:
        out.mkdir(exist_ok=True)
        show("dcp_to_torch_save", [sys.executable, "-c", TORCH.format(src=str(source), dst=str(root / "t.pt"))])
        show("accelerate merge", [sys.executable, "-c", MERGE.format(src=str(source), dst=str(out))])
    return results


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
