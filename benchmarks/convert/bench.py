"""Compare `convert` with `cp` and the converters of torch, accelerate and verl on the same bytes; print ratios.

    python -m benchmarks.convert.bench --size 2GB --ranks 4 --where /dev/shm [--peers] [--verl PYTHON] [--repeat 5]

Every command runs in a fresh process, and its time includes the start of Python. The source is a DCP checkpoint in
bf16 with the shapes of a llama (or many small tensors with `--small`), written by torch in `--ranks` processes (above
8 ranks, or with `--only-memory`: by `convert --to dcp`). Peak memory is ru_maxrss of the process. All files are
deleted at the end.

`--verl` names the Python of an environment that has verl: the same weights are then also written as rank files of
verl, for its merger and for `convert`. `--only-memory` writes sparse files of zeros and runs only `convert`, for
models too large for two copies.
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

from benchmarks.convert.sources import make_dcp, make_model, make_verl
from ckptkit.units import parse_size

RUN = "from ckptkit import convert; convert({src!r}, {dst!r}, {options})"
TORCH = "from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as f; f({src!r}, {dst!r})"
VERL = ["-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", "{src}", "--target_dir", "{dst}"]
PEERS = ("dcp_to_torch_save", "accelerate merge", "verl merger")
MERGE = "from accelerate.utils import merge_fsdp_weights as f; f({src!r}, {dst!r}, safe_serialization=True)"


def environment() -> dict[str, str]:
    """Return the environment for a command, with compiled modules kept between runs."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"} | {
        "PYTHONPYCACHEPREFIX": os.path.join(tempfile.gettempdir(), "ckptkit-bench-pyc")
    }


def timed(command: list[str], *, clean: Path, sync: bool) -> tuple[float, float, int]:
    """Run a fresh process and return (wall seconds, CPU seconds, peak resident bytes)."""
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


def compare(commands: dict[str, list[str]], out: Path, repeat: int, title: str) -> None:
    """Print the best time of each command, and its ratio to that of the first command. Each command writes `out`."""
    best = dict.fromkeys(commands, (float("inf"), float("inf"), 0))
    for _ in range(repeat):  # in turns, so that other load affects all commands; the best counts
        for name, command in commands.items():
            wall, cpu, peak = timed(command, clean=out, sync=False)
            best[name] = (min(best[name][0], wall), min(best[name][1], cpu), max(best[name][2], peak))
    first = next(iter(best.values()))
    print(title)
    for name, (wall, cpu, peak) in best.items():
        ratio = f"{wall / first[0]:5.2f} x  cpu {cpu:6.2f} s = {cpu / first[1]:5.2f} x"
        print(f"  {name:16s} {wall:6.2f} s = {ratio}  peak {peak / 1e6:6.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2GB")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--where", default="/dev/shm")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--small", action="store_true", help="many small tensors")
    parser.add_argument("--peers", action="store_true", help="run torch's and accelerate's converters too")
    parser.add_argument("--verl", metavar="PYTHON", help="Python of an environment that has verl: run its merger too")
    parser.add_argument("--only", metavar="NAME", action="append", help="run only this command and cp (repeatable)")
    parser.add_argument("--only-memory", action="store_true", help="convert once, from a source of zeros")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--make", nargs="+", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make and len(options.make) == 2:
        model, folder = options.make
        make = make_verl if folder.name == "actor" else make_dcp
        make(model, folder, options.ranks)
        return
    if options.make:
        size = parse_size(options.size)
        make_model(options.make[0], size, options.dtype, small=options.small, empty=options.only_memory)
        return
    root = Path(options.where) / f"ckptkit-bench-{os.getpid()}"
    try:
        results = measure(root, options)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if options.json:
        print(json.dumps(results, indent=2))


def make_sources(root: Path, options: argparse.Namespace) -> tuple[Path, Path | None]:
    """Write the DCP source, and the verl source if requested; return both."""
    # Use separate processes, because the memory of this process would count towards the peak of its children.
    model, source, verl = root / "hf", root / "pytorch_model_fsdp_0", root / "global_step_1" / "actor"
    make = [sys.executable, "-m", "benchmarks.convert.bench", "--size", options.size, "--dtype", options.dtype]
    flags = [name for name, on in (("--small", options.small), ("--only-memory", options.only_memory)) if on]
    subprocess.run([*make, *flags, "--make", str(model)], check=True)
    if options.ranks > 8 or options.only_memory:  # the machine has too few cores or too little memory for torch
        to_dcp = RUN.format(src=str(model), dst=str(source), options=f"to='dcp', world_size={options.ranks}")
        subprocess.run([sys.executable, "-c", to_dcp], check=True, env=environment())
    else:
        subprocess.run([*make, "--ranks", str(options.ranks), "--make", str(model), str(source)], check=True)
    if options.verl:
        subprocess.run([*make, "--ranks", str(options.ranks), "--make", str(model), str(verl)], check=True)
    if options.only_memory:
        for path in source.iterdir():
            subprocess.run(["fallocate", "--dig-holes", str(path)], check=True)
    shutil.rmtree(model)
    return source, verl if options.verl else None


def commands_of(source: Path, verl: Path | None, out: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    def ours(extra: str = "", of: Path = source) -> list[str]:
        return [sys.executable, "-c", RUN.format(src=str(of), dst=str(out), options=extra)]

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
    if verl is not None:
        commands["convert, from verl"] = ours(of=verl)
        commands["verl merger"] = [options.verl, *(part.format(src=verl, dst=out) for part in VERL)]
    if options.peers:
        into = f"import os; os.makedirs({str(out)!r}, exist_ok=True); "
        file = f"{out}/model.pt"
        commands["dcp_to_torch_save"] = [sys.executable, "-c", into + TORCH.format(src=str(source), dst=file)]
        commands["accelerate merge"] = [sys.executable, "-c", into + MERGE.format(src=str(source), dst=str(out))]
    if options.only_memory:
        return {"convert --no-check": commands["convert --no-check"], "convert": commands["convert"]}
    wanted = {"cp -r", *(options.only or commands)}
    return {name: command for name, command in commands.items() if name in wanted}


def measure(root: Path, options: argparse.Namespace) -> dict[str, object]:
    source, verl = make_sources(root, options)
    out = root / "out"
    total = sum(file.stat().st_size for file in source.iterdir())
    commands = commands_of(source, verl, out, options)
    # The commands take turns, so that other load on the machine affects all of them; the best time of each counts.
    on_disk = not options.where.startswith("/dev/shm")
    best = {name: (float("inf"), float("inf"), 0) for name in commands}
    for turn in range(-1, options.repeat):
        for name, command in commands.items():
            if name in PEERS and not 0 <= turn < 2:
                continue
            wall, cpu, peak = timed(command, clean=out, sync=on_disk and name == "cp -r")
            if turn < 0:  # the first turn compiles the modules that a command imports
                continue
            before = best[name]
            best[name] = (min(before[0], wall), min(before[1], cpu), max(before[2], peak))
    kind = "small tensors" if options.small else "llama shapes"
    print(f"{total / 1e9:.2f} GB {options.dtype}, {kind}, {options.ranks} ranks, {options.where}")
    cp = best.get("cp -r")
    for name, (wall, cpu, peak) in best.items():
        ratio = f"{wall / cp[0]:5.2f} x cp  cpu {cpu:5.2f} s = {cpu / cp[1]:5.2f} x" if cp else ""
        print(f"  {name:24s} {wall:6.2f} s  {ratio}  peak {peak / 1e6:6.0f} MB", flush=True)
    measured = {name: dict(zip(("wall_s", "cpu_s", "peak"), value, strict=True)) for name, value in best.items()}
    return {"bytes": total, "ranks": options.ranks, "where": options.where, "best": measured}


if __name__ == "__main__":
    main()
