"""Killed at any point and run again: the same bytes, no leftovers. `benchmarks/faults/resumed.py` runs many more."""

import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ckptkit import convert
from ckptkit.offline.copying import runs
from tests.checkpoint.crash import kill_at
from tests.offline.exports import write_model
from tests.offline.folders import names, tree
from tests.offline.resuming import went_on
from tests.ranks import RankError, run_ranks

Options = dict[str, Any]
DATED = ("README.md",)


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


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("kills"), tensors=24, rows=64, ranks=8)


@pytest.mark.parametrize(("first", "second", "seeds"), [(1, 1, range(8)), (3, 2, range(2)), (1, 3, range(2))])
def test_a_run_killed_at_any_file_operation_can_be_continued(source, tmp_path, first, second, seeds):
    for name in ("in", "m"):
        (tmp_path / name).symlink_to(source.parent / name)
    options = {"max_shard_size": "300kB", "workers": 1}
    found = kill_on_disk(tmp_path / "in", tmp_path, first, second, options, seeds)
    assert all(again is None or not again.taken or again.moved < again.whole for again in found)
    assert any(again is not None for again in found)
