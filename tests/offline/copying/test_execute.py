"""The copying engine: for all slices, targets and positions every element is copied, and damage is found."""

import math
import os
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Digest, SliceArray
from ckptkit.catalog.targets import Target, concatenated
from ckptkit.errors import CheckpointMismatchError, IncompleteCheckpointError, IntegrityError
from ckptkit.offline.copying import copier, runs, sinks
from ckptkit.offline.copying import execute as engine
from ckptkit.offline.copying.execute import execute
from ckptkit.offline.copying.plan import Plan
from ckptkit.offline.prove import prove_equal
from ckptkit.storage.local import LocalStore, start_writing
from tests.catalog.boxes import partitions, shapes
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
from tests.offline.folders import flip

ROWS = [Box((i * 2, 0), (2, 6)) for i in range(4)]
COLUMNS = [Box((0, i * 2), (8, 2)) for i in range(3)]


class ReadOnlyStore:
    """A store with only the common interface, without the fast path for local files."""

    def __init__(self, root: Path) -> None:
        self.inner = LocalStore(str(root))
        self.url = self.inner.url
        self.asking_costs, self.sizes_are_free = True, False

    def __getattr__(self, name: str):
        if name in ("open_file", "create", "path_of"):
            raise AttributeError(name)
        return getattr(self.inner, name)


def small(tmp_path: Path, boxes: list[Box] = ROWS, names: str = "w", **options) -> Made:
    """Return tensors of 8 x 6 bytes in slices."""
    return make_source(tmp_path / "in", {name: ("uint8", (8, 6), boxes) for name in names}, **options)


def one_file(made: Made, **changes) -> Plan:
    """Place all tensors, with changes such as another dtype, in one file."""
    targets = [Target.of(entry, name) for name, entry in made.catalog.tensors.items()]
    return plan_whole(made.catalog, [replace(target, **changes) for target in targets])


def out_store(tmp_path: Path, remote: bool) -> LocalStore | ReadOnlyStore:
    (tmp_path / "out").mkdir()
    return (ReadOnlyStore if remote else LocalStore)(tmp_path / "out")


def run(made: Made, plan: Plan, **options) -> dict[str, np.ndarray]:
    """Carry out a plan next to the source; return what was written."""
    out = made.folder.with_name("out")
    out.mkdir()
    execute(plan, LocalStore(str(made.folder)), LocalStore(str(out)), **options)
    return read_placed(out, plan)


@st.composite
def jobs(draw: st.DrawFn):
    """Draw a tensor, its source slices, its transformation, and its target boxes."""
    shape = draw(shapes.filter(lambda s: math.prod(s) > 0))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16", "int64", "uint8"]))
    source = draw(partitions(shape))
    floats = ["float32", "bfloat16", "float16"]
    into = draw(st.sampled_from(floats)) if dtype in floats else dtype
    change = draw(st.sampled_from(["copy", "split", "twice", "transpose", "rope"]))
    return shape, dtype, source, into, change


def derived(made: Made, shape: tuple[int, ...], into: str, change: str, draw) -> list[Target]:
    whole = Target.of(made.catalog.tensors["t"], "t")
    if change == "split" and shape and shape[0] > 1:
        cut = draw(st.integers(1, shape[0] - 1))
        made_of = [replace(t, name=f"t{i}") for i, t in enumerate(whole.split(0, [cut, shape[0] - cut]))]
    elif change == "twice" and shape:
        made_of = [concatenated("t", [whole, whole], draw(st.integers(0, len(shape) - 1)))]
    elif change == "transpose" and len(shape) > 1:
        made_of = [whole.transposed(tuple(draw(st.permutations(range(len(shape))))))]
    elif change == "rope" and shape and shape[0] % 2 == 0:
        made_of = [whole.rope_permuted(1, to_halves=draw(st.booleans()))]
    else:
        made_of = [whole]
    return [replace(target, dtype=into) for target in made_of]


@given(job=jobs(), data=st.data())
def test_any_source_slicing_is_copied_to_any_target_slicing_with_the_crcs_and_digests_of_its_bytes(
    tmp_path_factory, job, data
):
    shape, dtype, source, into, change = job
    folder = tmp_path_factory.mktemp("engine")
    digest = data.draw(st.sampled_from(["crc32", "xxh3_64", None]))
    codec, transposed = (data.draw(st.integers(0, 3)) == 0 for _ in range(2))
    tensors = {"t": (dtype, shape, source), **{name: (dtype, shape, data.draw(partitions(shape))) for name in "uv"}}
    made = make_source(folder / "in", tensors, digest=digest, codec=codec, transposed=transposed)
    targets = derived(made, shape, into, change, data.draw)
    targets += [Target.of(made.catalog.tensors[name], name) for name in "uv"]
    boxes = [data.draw(partitions(target.shape)) for target in targets]
    files = [[data.draw(st.integers(0, 1)) for _ in cut] for cut in boxes]
    plan = plan_boxes(
        made.catalog, list(zip(targets, boxes, files, strict=True)), files=2, crcs=data.draw(st.booleans())
    )
    check, digests = data.draw(st.booleans()), data.draw(st.booleans())
    origin = LocalStore(str(folder / "in")) if data.draw(st.booleans()) else ReadOnlyStore(folder / "in")
    out = out_store(folder, data.draw(st.booleans()))
    with pytest.MonkeyPatch.context() as patched:
        for module in (runs, copier):
            patched.setattr(module, "LEAST", data.draw(st.sampled_from([0, runs.LEAST])))
        report = execute(plan, origin, out, check=check, digests=digests, workers=3)
    check_copied(made, plan, read_placed(folder / "out", plan))
    if check and digest:
        slices = [part for entry in made.catalog.tensors.values() for part in entry.slices if part.nbytes]
        assert report.records == len({(part.path, part.codec, part.start) for part in slices})
    if digests:
        assert digests_of(folder / "out", plan, report).items() <= boxes_of(plan).items()
    for file in plan.files:
        written = (folder / "out" / file.path).read_bytes()
        for item in file.crcs:
            crc = zlib.crc32(written[item.start : item.start + item.nbytes])
            assert written[item.at[0] : item.at[0] + 4] == crc.to_bytes(4, "little")
    assert prove_equal(plan, origin, LocalStore(str(folder / "out")), max_memory=10**8, workers=1) == len(targets)


@pytest.mark.parametrize(("boxes", "into"), [(ROWS, COLUMNS), (COLUMNS, ROWS)], ids=["rows", "columns"])
@pytest.mark.parametrize("check", [True, False])
def test_large_tensors_are_copied_through_small_buffers(tmp_path, monkeypatch, boxes, into, check):
    monkeypatch.setattr(engine, "_CHUNK", 4096)
    monkeypatch.setattr(engine, "_TILE", 1)
    boxes, into = (
        [Box(tuple(o * 64 for o in b.offsets), tuple(s * 64 for s in b.sizes)) for b in cut] for cut in (boxes, into)
    )
    made = make_source(tmp_path / "in", {"t": ("float32", (512, 384), boxes)})
    target = replace(Target.of(made.catalog.tensors["t"], "t"), dtype="bfloat16")
    plan, out = plan_boxes(made.catalog, [(target, into, [0] * len(into))], files=1), out_store(tmp_path, remote=False)
    report = execute(plan, LocalStore(str(made.folder)), out, check=check, digests=True, max_memory=1 << 20)
    check_copied(made, plan, read_placed(tmp_path / "out", plan))
    assert digests_of(tmp_path / "out", plan, report) == boxes_of(plan)


def test_an_element_split_between_chunks_is_cast_correctly(tmp_path, monkeypatch):
    made = make_source(tmp_path / "in", {"t": ("float32", (40_000,), [Box((0,), (40_000,))])}, digest=None)
    entry = made.catalog.tensors["t"]
    data = (tmp_path / "in" / "data-0").read_bytes()
    begin = int(entry.slices.starts[0])
    record = replace(entry.slices[0], digest=None)
    # A digest that begins one byte before the tensor shifts the chunks relative to the elements.
    record = replace(record, digest=Digest("crc32", zlib.crc32(data[begin - 1 :]), begin - 1, len(data) - begin + 1))
    made.catalog = replace(made.catalog, tensors={"t": replace(entry, slices=SliceArray.of([record], 1))})
    plan = one_file(made, dtype="bfloat16")
    check_copied(made, plan, run(made, plan, max_memory=1 << 20, workers=4))


@pytest.mark.parametrize("digest", ["crc32", "xxh3_64"])
@pytest.mark.parametrize("boxes", [ROWS, COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize("remote", [False, True])
def test_a_flipped_bit_names_the_file_and_the_tensor(tmp_path, digest, boxes, remote):
    made = small(tmp_path, boxes, digest=digest)
    flip(tmp_path / "in" / "data-1", int(made.catalog.tensors["w"].slices.starts[1]))
    with pytest.raises(IntegrityError, match=r"data-1: tensor 'w'"):
        execute(one_file(made), LocalStore(str(made.folder)), out_store(tmp_path, remote))


@pytest.mark.parametrize(("damaged", "check", "changed"), [("v", True, 0), ("w", False, 1), ("w", True, None)])
def test_damage_in_the_unused_part_of_a_record_is_found_but_not_in_an_unused_tensor(tmp_path, damaged, check, changed):
    made = small(tmp_path, names="wv")
    flip(tmp_path / "in" / "data-0", int(made.catalog.tensors[damaged].slices.starts[0]))
    whole = Target.of(made.catalog.tensors["w"])
    if changed is None:  # in the first row; the second is in the same record
        with pytest.raises(IntegrityError):
            run(made, plan_whole(made.catalog, [whole.split(0, [1, 7])[1]]), check=check)
        return
    got = run(made, plan_whole(made.catalog, [whole]), check=check)
    assert (got["w"] != made.arrays["w"]).sum() == changed


def test_a_gap_in_the_source_stops_before_anything_is_written(tmp_path):
    made = small(tmp_path, ROWS[:3])
    with pytest.raises(IncompleteCheckpointError, match="'w'"):
        run(made, one_file(made))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_that_is_not_filled_exactly_and_a_target_with_an_unplaced_part_are_refused(tmp_path, more):
    made = small(tmp_path)
    plan = one_file(made)
    with pytest.raises(CheckpointMismatchError, match="gap or writes twice"):
        run(made, replace(plan, files=(replace(plan.files[0], nbytes=plan.files[0].nbytes + more),)))
    three = plan_boxes(made.catalog, [(Target.of(made.catalog.tensors["w"]), ROWS[:3], [0] * 3)], files=1)
    with pytest.raises(CheckpointMismatchError, match="do not cover"):
        execute(three, LocalStore(str(made.folder)), LocalStore(str(tmp_path / "out")))


def test_writeback_starts_during_the_copy(tmp_path, monkeypatch):
    begun: list[str] = []
    monkeypatch.setattr(sinks, "_DIRTY", 20)
    monkeypatch.setattr(sinks, "start_writing", lambda fd: begun.append(os.readlink(f"/proc/self/fd/{fd}")))
    made = make_source(tmp_path / "in", {f"w{i}": ("uint8", (8, 6), ROWS) for i in range(200)})
    plan = one_file(made)
    check_copied(made, plan, run(made, plan, workers=1))
    assert set(begun) == {str(tmp_path / "out" / "out")}
    assert 1 < len(begun) <= plan.nbytes // 20


def test_a_disk_that_refuses_early_writeback_is_no_error(tmp_path):
    start_writing(-1)
    with open(tmp_path / "file", "wb") as file:
        file.write(b"x")
        file.flush()
        start_writing(file.fileno())
    assert (tmp_path / "file").read_bytes() == b"x"
