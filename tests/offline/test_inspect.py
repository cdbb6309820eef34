"""inspect: every format of the zoo, metadata only, shards and shared bytes."""

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ckptkit import inspect
from ckptkit.formats.options import ReadOptions
from tests.offline.folders import ZOO
from tests.offline.test_reshard_foreign import loaded_by_torch

WHOLE = sorted(p.name for p in ZOO.iterdir() if p.is_dir() and not p.name.startswith(("broken", "hostile")))


@pytest.mark.parametrize("name", WHOLE)
def test_every_format_can_be_inspected(name):
    place = ZOO / name
    inner, layout = place / "ckpt", place / "flat_param_layout_NOT_ON_DISK_NORMALLY.json"
    options = ReadOptions(layout=str(layout) if layout.exists() else None)
    report = inspect(str(inner if inner.is_dir() else place), tensors="*", depth=3, options=options)
    assert report.format and report.sections
    assert sum(s.tensors for s in report.sections) == len(report.tensors)
    for section in report.sections:
        assert sum(section.placements.values()) == section.tensors
        assert sum(section.dtypes.values()) == section.nbytes
    if report.tree is not None:
        assert report.tree.nbytes == next(s.nbytes for s in report.sections if s.role == "model")


def test_inspect_reads_only_metadata_of_every_format(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a.w": np.ones((64, 64), np.float32)}, file)
    before = inspect(str(file)).to_json()
    data = file.read_bytes()
    with file.open("r+b") as stream:  # the tensor's bytes become a hole, so that a read would return zeros
        stream.truncate(len(data) - 64 * 64 * 4)
        stream.truncate(len(data))
    assert inspect(str(file)).to_json() == before


@pytest.mark.parametrize("name", ["dcp_dtensor_2d", "dcp_fsdp2_uneven_w4"])
def test_the_bytes_at_the_place_that_inspect_prints_are_the_elements_of_each_shard(zoo, name):
    place = zoo / name / "ckpt"
    expected = {key: value for key, value in loaded_by_torch(str(place)).items() if isinstance(value, torch.Tensor)}
    shown = inspect(str(place), tensors="*").to_json()["tensors"]
    assert {tensor["name"] for tensor in shown} == expected.keys()
    assert any(len(tensor["slices"]) > 1 for tensor in shown)
    for tensor in shown:
        whole = expected[tensor["name"]]
        for part in tensor["slices"]:
            assert part["path"].startswith(f"__{part['rank']}_")
            box = tuple(slice(o, o + n) for o, n in zip(part["offsets"], part["sizes"], strict=True))
            data = (place / part["path"]).read_bytes()[part["start"] : part["start"] + part["nbytes"]]
            assert data == whole[box].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), (tensor, part)


def test_names_that_share_bytes_of_a_file_are_shown_as_tied_and_compressed_tensors_are_not(zoo, tmp_path):
    weight = torch.ones(8, 4)
    torch.save({"embed.weight": weight, "head.weight": weight, "other": torch.ones(8, 4)}, tmp_path / "tied.pt")
    assert inspect(str(tmp_path / "tied.pt")).tied == {"head.weight": "embed.weight"}
    assert inspect(str(zoo / "dcp_zstd_w2")).tied == {}


def test_the_tree_is_limited_by_depth(zoo):
    tree = inspect(str(zoo / "hf_ref_llama_untied"), depth=1).tree
    assert tree is not None
    assert {child.name for child in tree.children} == {"model", "lm_head"}
    assert not any(child.children for child in tree.children)
