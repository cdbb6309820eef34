"""Plans as values: the layout of files, their printed form, and the work of each rank."""

import re
from dataclasses import replace

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.catalog.box import Box
from ckptkit.catalog.dtypes import DTYPES
from ckptkit.catalog.entry import Catalog, SliceArray, TensorEntry, TensorSlice
from ckptkit.catalog.targets import Target
from ckptkit.errors import UnsupportedFormatError, UsageError
from ckptkit.formats.hf.header import TensorToWrite, encode_header, lay_out, split_into_shards
from ckptkit.keymaps.named import resolve_key_map
from ckptkit.offline.copying.plan import ComputedTensor, OutputFile, Placement, Plan, share_out
from ckptkit.offline.export.files import hf_files, in_disk_order

STORABLE = [d.name for d in DTYPES.values() if d.safetensors and d.kind != "float8"]


def catalog_of(*names: str, shape: tuple[int, ...] = (4, 2), dtype: str = "float32") -> Catalog:
    """Return tensors stored in one file in reverse order."""
    entries = {}
    for i, name in enumerate(names):
        box = Box.whole(shape)
        nbytes = box.numel * DTYPES[dtype].itemsize
        slices = SliceArray.of([TensorSlice(box, "f", (len(names) - i) * nbytes, nbytes)], len(shape))
        entries[name] = TensorEntry(name, dtype, shape, slices, fqn=name)
    return Catalog(entries)


def targets_of(catalog: Catalog) -> list[Target]:
    return [Target.of(entry) for entry in catalog.tensors.values()]


@given(st.lists(st.tuples(st.sampled_from(STORABLE), st.lists(st.integers(0, 3), max_size=3)), max_size=8))
def test_safetensors_reads_planned_files_whose_tensors_are_aligned_to_their_elements(described):
    tensors = [TensorToWrite(f"t{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(described)]
    layout = lay_out(tensors, {"format": "pt"})
    ((_, header),) = layout.literals
    read = dict(safetensors.deserialize(header + bytes(layout.nbytes - len(header))))
    assert {name: tuple(value["shape"]) for name, value in read.items()} == {t.name: t.shape for t in tensors}
    assert len(header) % 8 == 0
    assert all(at % min(8, DTYPES[t.dtype].itemsize) == 0 for t, at in zip(tensors, layout.starts, strict=True))


@pytest.mark.parametrize(("names", "dtype", "said"), [
    (("a", "a"), "float32", "'a'"), (("__metadata__",), "float32", "'__metadata__'"),
    (("a", "half\ud800"), "float32", r"'half\ud800'"), (("a",), "complex32", "complex32"),
])  # fmt: skip
def test_a_name_or_dtype_that_a_header_cannot_hold_is_refused(names, dtype, said):
    with pytest.raises(UnsupportedFormatError, match=re.escape(said)):
        encode_header([TensorToWrite(name, dtype, ()) for name in names], [0] * len(names), {"format": "pt"})


@given(st.lists(st.integers(0, 10), min_size=1), st.integers(1, 20))
def test_shards_hold_all_tensors_in_order_and_respect_the_size_limit(sizes, limit):
    shards = split_into_shards(sizes, limit)
    assert [i for shard in shards for i in shard] == list(range(len(sizes)))
    assert all(len(shard) == 1 or sum(sizes[i] for i in shard) <= limit for shard in shards)


def test_tensors_are_planned_in_disk_order():
    catalog = catalog_of("a", "b", "c")
    assert [t.name for t in in_disk_order(catalog, targets_of(catalog))] == ["c", "b", "a"]


def test_a_plan_prints_each_source_with_its_target_missing_tensors_and_unused_ones_by_reason():
    catalog = catalog_of("a", "b", "rest")
    first, second = targets_of(catalog)[:2]
    targets = [first, replace(second, dtype="bfloat16")]
    files, placements, last = hf_files(catalog, targets, max_shard_size=10**9, metadata={})
    names = [f"optimizer.state.{i}" for i in range(300)]
    leftovers = (("rest", "no reason"), *((name, "optimizer state") for name in names))
    plan = Plan(catalog, tuple(files), tuple(placements), last, leftovers, ("gone",), ("a note",))
    lines = "\n".join(plan.lines())
    assert re.search(r"^a  float32 \[4, 2\] 32 B  model.safetensors @ \d+  from \S+$", lines, re.M)
    assert "b  float32 -> bfloat16 [4, 2] 16 B" in lines
    assert {"missing: gone", "note: a note"} <= set(lines.splitlines())
    said = ("rest (no reason)", f"{', '.join(names[:5])} and 295 more (optimizer state)")
    assert [line for line in lines.splitlines() if "left" in line] == [f"left over: {words}" for words in said]


def test_a_computed_tensor_prints_its_sources():
    catalog = catalog_of("a")
    made = ComputedTensor("c", "float32", (4, 2), tuple(targets_of(catalog)), lambda parts: (parts[0], 0), "2 * a")
    plan = Plan(catalog, (OutputFile("out", 32),), (Placement.whole(made, 0, 0),))
    assert next(plan.lines()).startswith("2 * a of (a) -> c ")
    assert plan.to_json()["tensors"][0]["computed"] == "2 * a"


def test_files_are_divided_evenly_and_the_last_goes_to_the_first_rank():
    files = tuple(OutputFile(f"f{i}", size) for i, size in enumerate([5, 9, 4, 4, 1]))
    plan = Plan(Catalog({}), (*files, OutputFile("index.json", 99)), (), ("index.json",))
    owners = share_out(plan, 2)
    loads = [sum(f.nbytes for f, rank in zip(files, owners, strict=False) if rank == r) for r in (0, 1)]
    assert max(loads) - min(loads) <= 4  # the last file
    assert owners[-1] == 0


def test_a_key_map_can_come_from_an_installed_package(tmp_path, monkeypatch):
    code = 'from ckptkit.keymaps.builtin import builtin_map\nMAP = builtin_map("torchtitan-llama3")\nNOTHING = 3\n'
    (tmp_path / "my_rules.py").write_text(f"{code}def made():\n    return MAP\n")
    info = tmp_path / "my_rules-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-rules\nVersion: 1.0\n")
    points = "mine = my_rules:MAP\nby-function = my_rules:made\nwrong = my_rules:NOTHING.real.__int__\n"
    (info / "entry_points.txt").write_text(f"[ckptkit.key_maps]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_rules

    assert resolve_key_map("mine") is my_rules.MAP
    assert resolve_key_map("by-function") is my_rules.MAP
    with pytest.raises(UsageError, match="returns int, expected a NameMap"):
        resolve_key_map("wrong")
