"""Short runs are gathered by their target: few calls, the same bytes, every digest checked."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from ckptkit.catalog.box import Box
from ckptkit.catalog.targets import Target
from ckptkit.errors import IntegrityError
from ckptkit.offline.copying import windows
from ckptkit.offline.copying.execute import execute
from ckptkit.offline.copying.jobs import prepare
from ckptkit.offline.copying.plan import Plan
from ckptkit.offline.copying.windows import windowed
from ckptkit.storage.local import LocalStore
from tests.catalog.materialize import materialize
from tests.offline.engine import Made, make_source, plan_whole, read_placed

ROWS = [Box((i * 50, 0), (50, 20)) for i in range(4)]
COUNT = 300


def many(folder, digest: str | None = "crc32") -> Made:
    """Three hundred tensors of four slices of a thousand bytes, in four files."""
    tensors = {f"w{i:03}": ("uint8", (200, 20), ROWS) for i in range(COUNT)}
    return make_source(folder, tensors, digest=digest, files=4)


def plan_of(made: Made, names) -> Plan:
    return plan_whole(made.catalog, [Target.of(made.catalog.tensors[name], name) for name in names])


@pytest.mark.parametrize("digest", ["crc32", "xxh3_64", None])
def test_many_short_runs_are_read_and_written_in_few_calls(tmp_path, monkeypatch, digest):
    made = many(tmp_path / "in", digest)
    plan = plan_of(made, made.arrays)
    calls = {"preadv": 0, "pwritev": 0}
    for name in calls:
        call = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *a, name=name, call=call: (calls.__setitem__(name, calls[name] + 1), call(*a))[1]
        )
    (tmp_path / "out").mkdir()
    report = execute(plan, LocalStore(str(made.folder)), LocalStore(str(tmp_path / "out")))
    assert report.records == (4 * COUNT if digest else 0)
    got = read_placed(tmp_path / "out", plan)
    assert all((got[name] == array).all() for name, array in made.arrays.items())
    # A literal lies between two tensors, so each tensor is written by itself, and each literal; windows cut some.
    assert calls["preadv"] < 4 * COUNT // 10
    assert calls["pwritev"] <= 2 * COUNT + 20


@pytest.mark.parametrize("digest", ["crc32", "xxh3_64"])
def test_a_flipped_bit_in_a_short_run_names_the_file_and_the_tensor(tmp_path, digest):
    made = many(tmp_path / "in", digest)
    slices = made.catalog.tensors["w123"].slices
    path = made.folder / slices[2].path
    data = bytearray(path.read_bytes())
    data[slices[2].start + 999] ^= 1
    path.write_bytes(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(IntegrityError, match=rf"{slices[2].path}: tensor 'w123'"):
        execute(plan_of(made, made.arrays), LocalStore(str(made.folder)), LocalStore(str(tmp_path / "out")))


def test_a_window_is_of_one_file_and_of_bounded_size(tmp_path):
    work = prepare(plan_of(made := many(tmp_path / "in"), made.arrays), check=True)
    found, chosen = windowed(work.runs, work)
    assert chosen.all()
    sizes = [int(found.runs.nbytes[a:b].sum()) for a, b in zip(found.bounds, found.bounds[1:], strict=False)]
    assert sum(sizes) == sum(array.size for array in made.arrays.values())
    assert max(sizes) <= (256 << 10) + (32 << 10)
    assert max(b - a for a, b in zip(found.bounds, found.bounds[1:], strict=False)) <= 256


def test_what_is_used_twice_or_in_part_arrives_too(tmp_path):
    made = many(tmp_path / "in")
    twice = [Target.of(made.catalog.tensors[name], f"{name}.{i}") for name in made.arrays for i in range(2)]
    cut = [part for i, target in enumerate(twice) for part in (target.split(0, [70, 130]) if i % 7 == 0 else [target])]
    plan = plan_whole(made.catalog, [replace(target, name=str(i)) for i, target in enumerate(cut)])
    (tmp_path / "out").mkdir()
    report = execute(plan, LocalStore(str(made.folder)), LocalStore(str(tmp_path / "out")))
    assert report.records == 4 * COUNT
    got = read_placed(tmp_path / "out", plan)
    for i, target in enumerate(cut):
        whole = {key: made.arrays[key] for key in target.sources}
        assert (got[str(i)] == materialize(target, whole)).all()


def test_few_short_runs_are_read_in_the_order_of_the_disk(tmp_path):
    made = many(tmp_path / "in")
    work = prepare(plan_of(made, list(made.arrays)[:200]), check=True)
    assert not windowed(work.runs, work)[1].any()


def test_a_source_whose_parts_lie_far_apart_is_read_in_its_own_order(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "_GAP", 0)  # seven bytes lie between any two
    made = many(tmp_path / "in")
    work = prepare(plan_of(made, made.arrays), check=True)
    found, chosen = windowed(work.runs, work)
    assert not len(found)
    assert not chosen.any()
