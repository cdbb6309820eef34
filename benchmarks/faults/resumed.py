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
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptkit import convert
from ckptkit.storage import upload
from ckptkit.storage.objects import RemoteStore
from ckptkit.storage.open import open_store
from tests.checkpoint.saving import fork
from tests.offline.test_resume_kills import DATED, Options, kill_on_disk, make_source, reused
from tests.storage import servers
from tests.storage.proxy import Proxy, proxy_of

Row = tuple[int, int, int, int, float]  # rounds, killed, resumed, wrote less, bytes written as a share of a full run


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
