"""Kill conversions at any point, run them again, and compare the results; print a table.

python -m benchmarks.faults.resumed --rounds 30 --only alone team shrunk s3

Cases: one process; three ranks (all of them killed, or one); three ranks continued by two or by one; and uploads to S3
killed at each request, before or after the server carried it out. Each second run must give the same bytes and leave
no other files. The bytes that it writes are compared with those of a run from scratch.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckptkit import convert
from ckptkit.offline.copying import runs
from ckptkit.storage import upload
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.open import open_store
from tests.checkpoint.crash import kill_at
from tests.checkpoint.saving import fork
from tests.offline.exports import write_model
from tests.offline.folders import names, tree
from tests.offline.resuming import went_on
from tests.ranks import RankError, run_ranks
from tests.storage import servers
from tests.storage.proxy import Proxy, proxy_of

Options = dict[str, Any]
DATED = ("README.md",)
Row = tuple[int, int, int, int, float]  # rounds, killed, resumed, wrote less, bytes written as a share of a full run


class Again(NamedTuple):
    """The run after a kill: the reused steps, the bytes written, and those of a run from scratch."""

    taken: int
    moved: int
    whole: int


def make_source(folder: Path, *, tensors: int, rows: int, ranks: int) -> Path:
    """Return a DCP checkpoint of many files, so that its conversion takes many steps."""
    rng = np.random.default_rng(0)
    model = write_model(folder / "m", {f"layers.{i}.w": rng.random((rows, 512), np.float32) for i in range(tensors)})
    convert(model, str(folder / "in"), to="dcp", world_size=ranks)
    return folder / "in"


def reused(report: Any) -> int:
    """Return the number of reused parts that a report states, as in "...: 3 of 5 parts"."""
    words = went_on(report.notes).partition(": ")[2].split()
    return int(words[0]) if words else 0


def written() -> int:
    """Return the bytes that this process has written so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def _run(src: str, dst: str, options: Options, kills: dict[int, int]) -> tuple[int, int, int]:
    """Return the reused steps, the bytes written and the file operations of this rank."""
    operations = kill_at(kills.get(int(os.environ["RANK"]), 0))
    before, runs._STEP = written(), 200_000
    report = convert(src, dst, **options)
    return reused(report), written() - before, operations()


def run(source: Path, out: Path, ranks: int, options: Options, kills: dict[int, int]) -> tuple[int, int, int] | None:
    """Return the reused steps, the bytes written, and the fewest operations of a rank; None if killed."""
    try:
        found = run_ranks(_run, ranks, str(source), str(out), options, kills)
    except RankError as error:
        assert "the rank died" in str(error), error
        return None
    return found[0][0], sum(item[1] for item in found), min(item[2] for item in found)


def kill_on_disk(
    source: Path, place: Path, first: int, second: int, options: Options, seeds: Iterable[int]
) -> list[Again | None]:
    """Kill a run of `first` ranks, all or one, at an operation that depends on the seed, and run it with `second`.

    Returns a value for each seed: None if the result was already published.
    """
    out, whole, found = place / "out", place / "whole", list[Again | None]()
    done, begun = run(source, whole, second, options, {}), run(source, out, first, options, {})
    assert done is not None and begun is not None
    shutil.rmtree(out)
    for rng in map(random.Random, seeds):
        victims = rng.choice([list(range(first)), [rng.randrange(first)]])
        killed = run(source, out, first, options, {rank: rng.randrange(10, begun[2] + 10) for rank in victims})
        there = out.exists()
        assert not there or tree(out, *DATED) == tree(whole, *DATED), "something that looks finished is not"
        again = None
        if killed is None:  # after all work was done, if it is there: then the next run removes the leftovers
            again = run(source, out, second, {**options, "overwrite": there}, {})
            assert again is not None
        assert tree(out, *DATED) == tree(whole, *DATED)
        assert names(place) == ["in", "m", "out", "whole"]
        shutil.rmtree(out)
        found.append(Again(again[0], again[1], done[1]) if again is not None and not there else None)
    return found


def on_disk(first: int, second: int, rounds: int, seed: int) -> Row:
    """Kill conversions at random file operations; return a row of the table."""
    place = Path(tempfile.mkdtemp(prefix="resumed-"))
    source = make_source(place, tensors=48, rows=128, ranks=16)
    options = {"max_shard_size": "1MB", "workers": 1}
    found = kill_on_disk(source, place, first, second, options, range(seed, seed + rounds))
    shutil.rmtree(place)
    killed = [item for item in found if item is not None]
    on = [item for item in killed if item.taken]
    less = [item for item in on if item.moved < item.whole]
    return rounds, len(killed), len(on), len(less), sum(i.moved for i in on) / max(1, sum(i.whole for i in on))


def _upload(say: Any, src: str, url: str, s3: Options, options: Options) -> None:
    upload.UPLOAD_BYTES = 5 << 20  # the minimum of S3, so that uploads have parts
    report = convert(src, url, dst_storage_options=s3, **options)
    say(str(reused(report)).encode())


def run_remote(source: Path, url: str, s3: Options, options: Options) -> int:
    """Run a conversion to an object store to its end, and return the number of reused objects."""
    code, said = fork(_upload, str(source), url, s3, options, timeout=120)
    assert code == 0
    return int(said)


def kill_remote(
    source: Path, url: str, proxy: Proxy, through: Options, options: Options, nth: int, *, carried_out: bool
) -> tuple[int, int] | None:
    """Kill a conversion to an object store before or after the server carries out its nth request; run it again.

    Returns the number of objects that the second run reused, and the bytes that it sent. Returns None if the first run
    had already ended.
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


def remote(rounds: int, seed: int) -> Row:
    """Kill conversions to S3 at each request in turn; return a row of the table."""
    place = Path(tempfile.mkdtemp(prefix="resumed-"))
    source = make_source(place, tensors=48, rows=512, ranks=4)
    options = {"max_shard_size": "12.6MB", "workers": 1}
    with servers.moto() as s3, proxy_of(s3["endpoint_url"]) as proxy:
        through = {**s3, "endpoint_url": proxy.url}
        open_store("s3://resumed", storage_options=through).fs.mkdir("resumed")
        run_remote(source, "s3://resumed/whole", through, options)
        proxy.clear()
        run_remote(source, "s3://resumed/whole2", through, options)
        whole, requests, expected = proxy.sent, proxy.count, objects("s3://resumed/whole", through)
        taken, less, sent, killed = 0, 0, 0, 0
        for i in range(rounds):
            url, nth = f"s3://resumed/{seed + i}", 1 + (seed + i * 7) % requests
            found = kill_remote(source, url, proxy, through, options, nth, carried_out=bool(i % 2))
            assert objects(url, through) == expected, nth
            if found is None:
                continue
            killed += 1
            if found[0]:
                taken, less, sent = taken + 1, less + (found[1] < whole), sent + found[1]
    shutil.rmtree(place)
    return rounds, killed, taken, less, sent / max(1, taken * whole)


WHAT: dict[str, Callable[[int, int], Row]] = {
    "alone": lambda rounds, seed: on_disk(1, 1, rounds, seed),
    "team": lambda rounds, seed: on_disk(3, 3, rounds, seed),
    "shrunk": lambda rounds, seed: on_disk(3, 2, rounds, seed),
    "one": lambda rounds, seed: on_disk(3, 1, rounds, seed),
    "s3": remote,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", choices=list(WHAT), default=list(WHAT))
    arguments = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    print("| case | rounds | killed | resumed | wrote less | share of a full run |\n|---|---|---|---|---|---|")
    for name in arguments.only:
        rounds, killed, on, less, share = WHAT[name](arguments.rounds, arguments.seed)
        print(f"| {name} | {rounds} | {killed} | {on} | {less} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
