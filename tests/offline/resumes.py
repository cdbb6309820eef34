"""Conversions killed at any point and run again: the same bytes, no leftovers, fewer bytes moved."""

from __future__ import annotations

import os
import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.offline.convert import convert
from ckptkit.offline.copying import runs
from ckptkit.storage import upload
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.open import open_store
from tests.checkpoint.crash import kill_at
from tests.checkpoint.saving import fork
from tests.offline.exports import write_model
from tests.offline.folders import names, tree
from tests.ranks import RankError, run_ranks
from tests.storage.proxy import Proxy

Options = dict[str, Any]
DATED = ("README.md",)


@dataclass(frozen=True)
class Again:
    """The result of the run after a kill.

    Attributes:
        taken, steps: The steps that were already done, and all steps.
        moved, whole: The bytes that it wrote, and those that a run from scratch writes.
    """

    taken: int
    steps: int
    moved: int
    whole: int


def make_source(folder: Path, *, tensors: int, rows: int, ranks: int) -> Path:
    """Return a DCP checkpoint of many files, so that its conversion takes many steps."""
    rng = np.random.default_rng(0)
    model = write_model(folder / "m", {f"layers.{i}.w": rng.random((rows, 512), np.float32) for i in range(tensors)})
    convert(model, str(folder / "in"), to="dcp", world_size=ranks)
    return folder / "in"


def content(folder: Path) -> dict[str, bytes]:
    return tree(folder, *DATED)


def counted_writes() -> list[int]:
    """Count the bytes that this process writes into files."""
    found: list[int] = []
    real, real_vector = os.pwrite, os.pwritev

    def pwrite(fd: int, data: Any, at: int) -> int:
        found.append(len(data))
        return real(fd, data, at)

    def pwritev(fd: int, views: Any, at: int) -> int:
        found.append(sum(len(view) for view in views))
        return real_vector(fd, views, at)

    os.pwrite, os.pwritev = pwrite, pwritev
    return found


def _note(report: Any) -> tuple[int, int]:
    note = next(
        (note for note in report.notes if note.startswith("continued an interrupted run")), "stopped: 0 of 0 steps"
    )
    words = note.split(": ")[1].split()
    return int(words[0]), int(words[2])


# --- processes and ranks, on a disk


def _run(src: str, dst: str, options: Options, kills: dict[int, int]) -> tuple[int, ...]:
    """Return the reused steps, all steps, the bytes written and the file operations of this rank."""
    operations = kill_at(kills.get(int(os.environ.get("RANK", "0")), 0))
    moved = counted_writes()
    runs._STEP = 200_000
    report = convert(src, dst, **options)
    return (*_note(report), sum(moved), operations())


def _alone(say: Any, src: str, dst: str, options: Options, kills: dict[int, int]) -> None:
    os.environ["RANK"] = "0"
    say(repr(_run(src, dst, options, kills)).encode())


def run(source: Path, out: Path, ranks: int, options: Options, kills: dict[int, int]) -> tuple[int, ...] | None:
    """Return the reused steps, all steps, the bytes written, and the fewest operations of a rank; None if killed."""
    if ranks == 1:
        code, said = fork(_alone, str(source), str(out), options, kills, timeout=120)
        assert code in (0, -signal.SIGKILL), code
        return tuple(int(word) for word in said.decode().strip("()").split(",")) if code == 0 else None
    try:
        found = run_ranks(_run, ranks, str(source), str(out), options, kills)
    except RankError as error:
        assert "the rank died" in str(error), error
        return None
    return (*found[0][:2], sum(item[2] for item in found), min(item[3] for item in found))


def kill_on_disk(source: Path, place: Path, first: int, second: int, options: Options, seed: int) -> Again | None:
    """Kill a run of `first` ranks, all or one, and run it with `second`; None if the result was already published."""
    rng = random.Random(seed)
    out, whole, notes = place / "out", place / "whole", place / "notes"
    if not whole.exists():
        done, begun = run(source, whole, second, options, {}), run(source, out, first, options, {})
        assert done is not None and begun is not None
        shutil.rmtree(out)
        notes.write_text(f"{done[2]} {begun[3]}")
    nbytes, operations = map(int, notes.read_text().split())
    victims = rng.choice([list(range(first)), [rng.randrange(first)]])
    killed = run(source, out, first, options, {rank: rng.randrange(10, operations + 10) for rank in victims})
    there = out.exists()
    assert not there or content(out) == content(whole), "something that looks finished is not"
    again = None
    if killed is None and not there:
        again = run(source, out, second, options, {})
        assert again is not None
    if killed is None and there:  # killed after all work was done: the next run removes the leftovers
        assert run(source, out, second, {**options, "overwrite": True}, {}) is not None
    assert content(out) == content(whole)
    assert names(place) == ["in", "m", "notes", "out", "whole"]
    shutil.rmtree(out)
    return None if again is None else Again(again[0], again[1], again[2], nbytes)


# --- an object store


def _upload(say: Any, src: str, url: str, s3: Options, options: Options) -> None:
    upload.UPLOAD_BYTES = 5 << 20  # the minimum of S3, so that uploads have parts
    report = convert(src, url, dst_storage_options=s3, **options)
    say(repr(_note(report)).encode())


def run_remote(source: Path, url: str, s3: Options, options: Options) -> int:
    """Run it to its end, and return the number of reused objects."""
    code, said = fork(_upload, str(source), url, s3, options, timeout=120)
    assert code == 0
    return int(said.decode().strip("()").split(",")[0])


def kill_remote(
    source: Path, url: str, proxy: Proxy, through: Options, options: Options, nth: int, *, carried_out: bool
) -> tuple[int, int] | None:
    """Kill a run to an object store before or after its nth request is carried out; run it again.

    Returns:
        The number of objects that the second run reused and the bytes that it sent; None if the first run had ended.
    """
    pid = source.with_name("pid")
    killed: list[int] = []

    def stated(say: Any, *args: Any) -> None:
        pid.write_text(str(os.getpid()))
        _upload(say, *args)

    def rule(number: int, method: str, path: str) -> str:
        if number < nth or killed:
            return "pass"
        killed.append(int(pid.read_text()))
        os.kill(killed[0], signal.SIGKILL)
        return "pass" if carried_out else "reset"

    proxy.clear()
    proxy.rule = rule
    code, _ = fork(stated, str(source), url, through, options, timeout=120)
    proxy.rule = lambda number, method, path: "pass"
    if code == 0:
        return None
    assert code == -signal.SIGKILL, code
    store = open_store(url, storage_options=through)
    names = [item.path for item in store.list(recursive=True)]
    if "model.safetensors.index.json" in names and not any(name.startswith(".") for name in names):
        return None
    proxy.clear()
    taken = run_remote(source, url, through, options)
    assert isinstance(store, RemoteStore)
    assert store.unfinished_uploads() == []
    return taken, proxy.sent


def objects(url: str, options: Options) -> dict[str, bytes]:
    store = open_store(url, storage_options=options)
    return {item.path: store.read(item.path) for item in store.list(recursive=True) if item.path not in DATED}
