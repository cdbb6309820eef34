"""Killed at any point and run again: the same bytes, no leftovers. `benchmarks/faults/resumed.py` runs many more."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

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


class Again(NamedTuple):
    """The run after a kill: the reused steps and all steps, the bytes written and those of a run from scratch."""

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
    """Return the reused and all parts that a report states, as in "...: 3 of 5 parts"."""
    words = went_on(report.notes).partition(": ")[2].split()
    return (int(words[0]), int(words[2])) if words else (0, 0)


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
    assert not there or tree(out, *DATED) == tree(whole, *DATED), "something that looks finished is not"
    if killed is None:  # after all work was done, if it is there: then the next run removes the leftovers
        again = run(source, out, second, {**options, "overwrite": there}, {})
        assert again is not None
    assert tree(out, *DATED) == tree(whole, *DATED)
    assert names(place) == ["in", "m", "notes", "out", "whole"]
    shutil.rmtree(out)
    return Again(again[0], again[1], again[2], nbytes) if killed is None and not there else None


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

    Returns the number of objects that the second run reused and the bytes that it sent; None if the first had ended.
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


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("kills"), tensors=24, rows=64, ranks=8)


@pytest.mark.parametrize(("first", "second", "seeds"), [(1, 1, range(8)), (3, 2, range(2))])
def test_a_run_killed_at_any_file_operation_can_be_continued(source, tmp_path, first, second, seeds):
    for name in ("in", "m"):
        (tmp_path / name).symlink_to(source.parent / name)
    options = {"max_shard_size": "300kB", "workers": 1}
    found = [kill_on_disk(tmp_path / "in", tmp_path, first, second, options, seed) for seed in seeds]
    assert all(again is None or not again.taken or again.moved < again.whole for again in found)
    assert any(again is not None for again in found)


def test_an_upload_killed_at_any_request_can_be_continued(tmp_path):
    source = make_source(tmp_path, tensors=10, rows=1536, ranks=2)
    options = {"max_shard_size": "16MB", "workers": 1}
    with servers.moto() as s3, proxy_of(s3["endpoint_url"]) as proxy:
        through = {**s3, "endpoint_url": proxy.url}
        open_store("s3://resumed", storage_options=through).fs.mkdir("resumed")
        run_remote(source, "s3://resumed/whole", through, options)
        whole, expected = proxy.sent, objects("s3://resumed/whole", through)
        for nth in (12, 18):
            found = kill_remote(source, f"s3://resumed/{nth}", proxy, through, options, nth, carried_out=nth == 12)
            assert found is not None and (not found[0] or found[1] < whole)
            assert objects(f"s3://resumed/{nth}", through) == expected
