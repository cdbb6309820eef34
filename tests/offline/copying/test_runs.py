"""Runs of bytes: few calls, each byte is read once, and every digest matches its bytes."""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit import reshard, verify
from ckptkit.catalog.box import Box
from ckptkit.catalog.targets import Target
from ckptkit.errors import IntegrityError
from ckptkit.formats import sources
from ckptkit.formats.sources import SourceReader
from ckptkit.offline.copying import copier, runs
from ckptkit.offline.copying.execute import CopyReport, execute
from ckptkit.offline.copying.plan import Plan
from ckptkit.offline.copying.pool import Worker
from ckptkit.storage.local import LocalStore
from tests.offline.engine import (
    Made,
    boxes_of,
    check_copied,
    digests_of,
    make_source,
    plan_boxes,
    plan_whole,
    read_placed,
)
from tests.offline.folders import flip, tree
from tests.offline.resuming import STEP, killed, went_on
from tests.patches import before

NAMES = ("a", "b", "c")


@pytest.fixture
def all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (runs, copier):
        monkeypatch.setattr(module, "LEAST", 0)
    monkeypatch.setattr(sources, "_GAP", 0)  # no gaps are read, so that reads can be counted


@contextlib.contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Return the bytes of each read of the source and of the result."""
    counted: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        before(patched, SourceReader, "read_many", lambda _, ranges: counted.extend(len(item.view) for item in ranges))
        yield counted


@pytest.fixture
def read() -> Iterator[list[int]]:
    with counted_reads() as counted:
        yield counted


def run(made: Made, plan: Plan, out: Path, *, digests: bool = True, **options: Any) -> CopyReport:
    out.mkdir()
    return execute(plan, LocalStore(str(made.folder)), LocalStore(str(out)), digests=digests, **options)


def placed(made: Made, boxes: list[Box]) -> Plan:
    """Return a plan that cuts each source tensor into boxes, each in a file of its own, with a CRC after each box."""
    files = list(range(len(boxes)))
    targets = [(Target.of(entry, name), boxes, files) for name, entry in made.catalog.tensors.items()]
    return plan_boxes(made.catalog, targets, files=len(boxes), crcs=True)


def by_rows(parts: int, names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Return tensors of sixty rows, as `make_source` takes them, in so many row shards."""
    return {name: ("float32", (60, 5), rows(60, parts)) for name in names}


def rows(count: int, parts: int) -> list[Box]:
    cuts = [count * i // parts for i in range(parts + 1)]
    return [Box((a, 0), (b - a, 5)) for a, b in itertools.pairwise(cuts)]


HALVES = [Box((0, 0), (60, 3)), Box((0, 3), (60, 2))]


@pytest.mark.parametrize(("source", "boxes"), [
    *((source, rows(60, target)) for source, target in ((4, 6), (3, 1), (1, 5), (2, 2), (5, 4))), (1, HALVES),
])  # fmt: skip
def test_every_shard_gets_a_digest_and_every_byte_is_read_once(tmp_path, all_runs, read, source, boxes):
    made = make_source(tmp_path / "in", by_rows(source))
    plan = placed(made, boxes)
    report = run(made, plan, tmp_path / "out", workers=2)
    assert digests_of(tmp_path / "out", plan, report) == boxes_of(plan)
    assert report.records == source * len(NAMES)
    assert sum(read) == report.nbytes_read == len(NAMES) * 60 * 5 * 4


@pytest.mark.parametrize("kind", ["crc32", "xxh3_64"])
def test_slices_of_two_tensors_and_partly_needed_ones_are_checked_completely(tmp_path, all_runs, kind):
    made = make_source(tmp_path / "in", by_rows(4, ["a"]), digest=kind)
    entry = made.catalog.tensors["a"]
    made.catalog = replace(made.catalog, tensors={"a": entry, "b": replace(entry, name="b")})
    plan = placed(made, rows(60, 6))
    report = run(made, plan, tmp_path / "out")
    assert report.records == 4
    assert digests_of(tmp_path / "out", plan, report) == boxes_of(plan)
    report = run(made, plan, tmp_path / "part", files=[1])
    assert report.records == 2
    assert digests_of(tmp_path / "part", plan, report) == {k: n for k, n in boxes_of(plan).items() if k[0] == 1}
    flip(tmp_path / "in" / entry.slices[2].path, entry.slices[2].start + 7, bit=3)
    with pytest.raises(IntegrityError, match=r"'[ab]'"):
        run(made, plan, tmp_path / "bad")


@pytest.fixture
def large(tmp_path: Path) -> str:
    """A checkpoint of four ranks whose slices are large enough to be digested during the copy."""
    rng = np.random.default_rng(0)
    save_file({name: rng.random((600, 513), np.float32) for name in NAMES}, tmp_path / "m.safetensors")
    reshard(str(tmp_path / "m.safetensors"), str(tmp_path / "large"), world_size=4)
    return str(tmp_path / "large")


def same_content(one: Path, other: Path) -> bool:
    return tree(one, "checkpoint.json") == tree(other, "checkpoint.json")


@pytest.mark.parametrize("options", [{}, {"type": "local"}, {"check": False}], ids=["sharded", "local", "no-check"])
def test_a_reshard_reads_the_source_once_and_little_of_its_result(large, tmp_path, read, options):
    read.clear()
    report = reshard(large, str(tmp_path / "new"), world_size=6, **options)
    nbytes = sum(path.stat().st_size for path in (tmp_path / "new").iterdir())
    assert sum(read) <= nbytes + (64 << 10)
    assert report.nbytes_read <= nbytes
    assert verify(str(tmp_path / "new")).ok


def test_a_continued_reshard_digests_what_the_interrupted_one_wrote(large, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "_STEP", STEP)
    killed(reshard, Path(large), tmp_path / "new", 4, world_size=6)
    assert "4 of " in went_on(reshard(large, str(tmp_path / "new"), world_size=6).notes)
    reshard(large, str(tmp_path / "whole"), world_size=6)
    assert same_content(tmp_path / "new", tmp_path / "whole")
    assert verify(str(tmp_path / "new")).ok


def torchrun(source: str, target: str) -> int:
    """Reshard as one of several ranks, and return the bytes that this rank has read."""
    with counted_reads() as counted:
        reshard(source, target, world_size=6, check=False)
    return sum(counted)


def test_digests_computed_by_other_ranks_are_used(ranks, large, tmp_path):
    done = ranks.run(torchrun, 2, large, str(tmp_path / "new"))
    nbytes = sum(path.stat().st_size for path in (tmp_path / "new").iterdir())
    assert sum(done) <= nbytes + (64 << 10)
    reshard(large, str(tmp_path / "alone"), world_size=6)
    assert verify(str(tmp_path / "new")).ok
    assert same_content(tmp_path / "new", tmp_path / "alone")
    record = json.loads((tmp_path / "new" / "checkpoint.json").read_text())
    assert all("outline" in item for path, item in record["files"].items() if path.endswith(".distcp"))


QUARTERS = [Box((i * 50, 0), (50, 20)) for i in range(4)]
COUNT = 300


def many(folder, digest: str | None = "crc32") -> Made:
    """Return three hundred tensors of four slices of a thousand bytes, in four files."""
    tensors = {f"w{i:03}": ("uint8", (200, 20), QUARTERS) for i in range(COUNT)}
    return make_source(folder, tensors, digest=digest, files=4)


def plan_of(made: Made) -> Plan:
    return plan_whole(made.catalog, [Target.of(entry, name) for name, entry in made.catalog.tensors.items()])


@pytest.mark.parametrize("digest", ["crc32", "xxh3_64", None])
def test_many_short_runs_are_read_and_written_in_few_calls_and_damage_in_one_is_found(tmp_path, monkeypatch, digest):
    made = many(tmp_path / "in", digest)
    plan, calls = plan_of(made), []
    for name in ("preadv", "pwritev"):
        before(monkeypatch, os, name, lambda *_, name=name: calls.append(name))
    report = run(made, plan, tmp_path / "out", digests=False)
    assert report.records == (4 * COUNT if digest else 0)
    assert calls.count("preadv") < 4 * COUNT // 10
    # A literal is between two tensors, so each tensor and each literal is written separately; windows split some.
    assert calls.count("pwritev") <= 2 * COUNT + 20
    check_copied(made, plan, read_placed(tmp_path / "out", plan))
    if digest:
        part = made.catalog.tensors["w123"].slices[2]
        flip(made.folder / part.path, part.start + 999)
        with pytest.raises(IntegrityError, match=rf"{part.path}: tensor 'w123'"):
            run(made, plan, tmp_path / "bad", digests=False)


def test_runs_read_together_are_limited_in_number_and_size(tmp_path, monkeypatch):
    sizes: list[int] = []
    before(monkeypatch, Worker, "buffer", lambda worker, nbytes, **_: sizes.append(nbytes))
    made = many(tmp_path / "in")
    run(made, plan_of(made), tmp_path / "out", digests=False)
    assert sum(sizes) >= sum(array.size for array in made.arrays.values())
    assert max(sizes) <= (512 << 10) + (32 << 10)
