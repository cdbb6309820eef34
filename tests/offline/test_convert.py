"""convert, end to end: every source of the zoo, every target, and the files after a failure."""

import json
import socket
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

from ckptkit import convert
from ckptkit.errors import (
    CheckpointMismatchError,
    IntegrityError,
    RankFailedError,
    UsageError,
)
from ckptkit.formats.dcp.records import STREAMED
from ckptkit.formats.detect import open_source
from ckptkit.formats.pickles import zip as zips
from ckptkit.keymaps import builtin
from ckptkit.offline import publish
from ckptkit.offline.export import hf
from ckptkit.offline.publish import options_of_both
from tests.cli.commands import run
from tests.formats.test_zoo import CASES, url_of
from tests.offline.exports import assert_same, converted, read_model, write_model
from tests.offline.folders import UNEVEN, ZOO, names, refused
from tests.ranks import on_ranks

SOURCE = str(UNEVEN / "ckpt")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def source_of(name: str) -> str:
    return url_of(CASES[name])


def assert_expected(got: dict[str, torch.Tensor], *files: Path) -> None:
    """Assert that a result has the tensors of these files; a tied head may be written as the embedding alone."""
    expected = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if "lm_head.weight" in expected.keys() - got.keys():
        got = {**got, "lm_head.weight": got["model.embed_tokens.weight"]}
    assert_same(got, expected)


LAYOUT = ZOO / "fsdp1_local_state_dict_nomesh_w2" / "flat_param_layout_NOT_ON_DISK_NORMALLY.json"
OPTIONS: dict[str, dict[str, Any]] = {
    "dcp_dtypes_w2": {"exclude": ["c64"]},  # safetensors has no complex64
    "fsdp1_local_state_dict_nomesh_w2": {"layout": str(LAYOUT)},
    "torchtitan_llama3_names_w2": {"to": "torch"},  # keeps its own names: the default is Hugging Face's
    "peft_lora_dcp_full_w2": {"to": "torch"},  # everything: the default exports only the adapter
}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["outcome"] == "ok"])
def test_every_source_of_the_zoo_becomes_hugging_face_bit_for_bit(name, tmp_path):
    report = convert(source_of(name), str(tmp_path / "out"), verify=True, **OPTIONS.get(name, {}))
    assert f"{report.tensors}/{report.tensors} tensors equal to the source" in report.proof()
    single = tmp_path / "out" / "pytorch_model.bin"
    got = torch.load(single, weights_only=True) if single.exists() else read_model(tmp_path / "out")
    copied = list(Path(source_of(name)).glob("*.safetensors"))  # of a Hugging Face model
    assert_expected(got, *([ZOO / name / "EXPECTED.safetensors"] if CASES[name]["expected"] else copied))


@pytest.mark.parametrize(("name", "options", "files"), [
    ("torchtitan_llama3_names_w2", {"base": str(ZOO / "torchtitan_llama3_names_w2" / "EXPECTED_hf")},
     ["EXPECTED_hf/model.safetensors"]),
    # Tensors without a master (integers, frozen weights) are exported from the weight itself.
    ("lightrft_mp_optim_w2", {"weights": "master"}, ["EXPECTED.safetensors", "EXPECTED_fp32_master.safetensors"]),
    ("peft_lora_dcp_full_w2", {}, ["EXPECTED_adapter/adapter_model.safetensors"]),
    ("peft_lora_dcp_full_w2", {"merge_adapter": True}, ["EXPECTED_merged.safetensors"]),
])  # fmt: skip
def test_other_exports_of_a_source_are_bit_for_bit(name, options, files, tmp_path):
    convert(source_of(name), str(tmp_path / "out"), **options)
    assert_expected(read_model(tmp_path / "out"), *(ZOO / name / file for file in files))


@pytest.fixture(scope="module")
def expected():
    return load_file(UNEVEN / "EXPECTED.safetensors")


@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_torch_loads_the_dcp_result(world_size, tmp_path, expected):
    convert(SOURCE, str(tmp_path / "out"), to="dcp", world_size=world_size, verify=True)
    state: dict[str, Any] = {"model": {key: torch.zeros_like(value) for key, value in expected.items()}}
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert_same(state["model"], expected)


@pytest.mark.parametrize("rows", [5, STREAMED])  # a CRC before the payload, and one after it
def test_records_of_dcp_carry_the_crc_of_their_bytes(rows, tmp_path):
    source = write_model(tmp_path / "in", {"w": torch.arange(rows * 2, dtype=torch.float32)})
    convert(source, str(tmp_path / "out"), to="dcp", world_size=2)
    assert convert(str(tmp_path / "out"), str(tmp_path / "back")).checked == 2


@pytest.mark.parametrize(("mmap", "wide"), [(False, False), (True, False), (False, True)])
def test_torch_loads_the_single_file_with_weights_only(mmap, wide, tmp_path, monkeypatch, expected):
    if wide:
        monkeypatch.setattr(zips, "_WIDE", 200)  # forces zip64 for every field, as past 4 GiB
    convert(SOURCE, str(tmp_path / "model.pt"), to="torch", verify=True)
    assert_same(torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap), expected)
    assert names(tmp_path) == ["model.pt"]
    assert zipfile.ZipFile(tmp_path / "model.pt").testzip() is None


def test_every_dtype_is_converted_to_torch_save(tmp_path):
    convert(source_of("dcp_dtypes_w2"), str(tmp_path / "model.pt"), to="torch", verify=True)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state.pop("c64").dtype is torch.complex64
    assert_same(state, load_file(ZOO / "dcp_dtypes_w2" / "EXPECTED.safetensors"))


def test_a_small_limit_makes_shards_and_an_exact_index_and_one_shard_has_no_index(tmp_path):
    convert(SOURCE, str(tmp_path / "one"))
    assert [name for name in names(tmp_path / "one") if name.startswith("model")] == ["model.safetensors"]
    convert(SOURCE, str(tmp_path / "out"), max_shard_size="3kB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    got = read_model(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in got.values())
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in got.values())
    files = {path: tmp_path / "out" / path for path in index["weight_map"].values()}
    assert len(files) > 1 and index["weight_map"].keys() == got.keys()
    assert all(key in load_file(files[path]) for key, path in index["weight_map"].items())
    for path in files.values():
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_floats_are_cast_with_the_bits_of_torch(dtype, tmp_path, expected):
    convert(SOURCE, str(tmp_path / "out"), dtype=dtype, verify=True)
    cast = {name: t.to(DTYPES[dtype]) if t.is_floating_point() else t for name, t in expected.items()}
    assert_same(read_model(tmp_path / "out"), cast)


def test_a_failed_overwrite_keeps_the_old(tmp_path, expected):
    convert(SOURCE, str(tmp_path / "out"))
    refused(IntegrityError, "", convert, source_of("broken_bitflip_shard"), tmp_path / "out", overwrite=True)
    assert_same(read_model(tmp_path / "out"), expected)


@pytest.mark.parametrize("options", [
    {"to": "onnx"}, {"max_memory": "1MB"}, {"world_size": 2}, {"to": "dcp", "merge_adapter": True},
    {"to": "dcp", "sha256": True},
])  # fmt: skip
def test_invalid_combinations_of_options_are_refused(options, tmp_path):
    refused(UsageError, "--sha256" if "sha256" in options else "", convert, SOURCE, tmp_path / "out", **options)


def test_every_layout_with_a_map_is_recognized_by_name():
    layouts = (*builtin._STACKED, "tok_embeddings.weight")
    assert all(any(mark in name for mark in hf._MAPPED) for name in layouts)


@on_ranks(3)
def test_ranks_divide_the_files_and_publish_once(tmp_path):
    assert convert(SOURCE, str(tmp_path / "out"), max_shard_size="3kB", verify=True).verified == 18
    assert_same(read_model(tmp_path / "out"), load_file(UNEVEN / "EXPECTED.safetensors"))
    assert names(tmp_path) == ["out"]


def test_a_single_process_does_not_wait_for_the_ranks_of_a_batch_job(monkeypatch, tmp_path, expected):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert_same(converted(SOURCE, tmp_path / "out").tensors, expected)


@on_ranks(2)
def test_damage_found_by_one_rank_stops_all_ranks(tmp_path):
    with pytest.raises((RankFailedError, IntegrityError), match=r"__1_0\.distcp"):
        convert(source_of("broken_bitflip_shard"), str(tmp_path / "out"), max_shard_size="3kB")
    torch.distributed.barrier()
    assert list(tmp_path.iterdir()) == []


def test_each_side_gets_its_own_storage_options_from_the_command_line_over_common_ones(monkeypatch, tmp_path):
    common, own, asked = {"anon": True, "endpoint_url": "a"}, {"endpoint_url": "b"}, {}
    assert options_of_both(common, None, own) == [common, {"anon": True, "endpoint_url": "b"}]
    assert options_of_both(None, own, None) == [own, None]

    def stopped(src, dst, **options):
        asked.update(options)
        raise UsageError("enough")

    monkeypatch.setattr("ckptkit.offline.convert.convert", stopped)
    both = ["--storage-option", "a=1", "--src-storage-option", "b=2", "--dst-storage-option", "c=x"]
    run("convert", SOURCE, tmp_path / "out", *both)
    sides = ("storage_options", "src_storage_options", "dst_storage_options")
    assert [asked[side] for side in sides] == [{"a": 1}, {"b": 2}, {"c": "x"}]


def test_the_note_on_unused_tensors_names_their_groups(tmp_path):
    notes = convert(SOURCE, str(tmp_path / "out"), include=["layers.*"], dry_run=True).notes
    (note,) = (note for note in notes if note.startswith("tensors skipped"))
    assert "42 (optimizer state, not part of the model weights)" in note
    assert ", in model)" in note


def test_a_rank_that_waits_for_missing_ranks_fails_in_bounded_time(monkeypatch, tmp_path):
    monkeypatch.setattr(publish, "_MEET_S", 1)
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    for setting in f"TORCHELASTIC_RUN_ID=x RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}".split():
        monkeypatch.setenv(*setting.split("="))
    said = "the 2 ranks that torchrun started did not connect within 1 s"
    refused(RankFailedError, said, convert, SOURCE, tmp_path / "out")


def test_a_config_next_to_a_plain_dcp_chooses_the_map(tmp_path):
    moe = ZOO / "hf_ref_qwen3moe"
    convert(str(moe), str(tmp_path / "live"), to="dcp", key_map="inverse:hf5-experts")
    assert any(name.endswith(".experts.gate_up_proj") for name in fqns_of(tmp_path / "live"))
    report = convert(str(tmp_path / "live"), str(tmp_path / "hub"))
    assert any("hf5-experts: config.json says" in note for note in report.notes)
    assert fqns_of(tmp_path / "hub") == fqns_of(moe)


def fqns_of(folder: Path) -> set[str]:
    return {entry.fqn or entry.name for entry in open_source(str(folder)).catalog.tensors.values()}


@pytest.mark.parametrize("options", [{"weights": "master"}, {"dtype": "fp32"}])
def test_masters_that_an_optimizer_numbers_are_exported_if_order_and_shapes_prove_which_is_which(tmp_path, options):
    masters = {"a.weight": torch.randn(3, 2), "a.bias": torch.randn(3), "b.weight": torch.randn(2, 3)}
    states = {i: {"exp_avg": torch.zeros_like(t), "master": t} for i, t in enumerate(masters.values())}
    model = {name: tensor.bfloat16() for name, tensor in masters.items()}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "all.pt")
    assert_same(converted(tmp_path / "all.pt", tmp_path / "out", **options).tensors, masters)
    optimizer["param_groups"] = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    model["c.weight"] = torch.ones(3, 2, dtype=torch.bfloat16)
    del states[2]
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "some.pt")
    if "dtype" in options:
        found = converted(tmp_path / "some.pt", tmp_path / "out2", **options)
        assert_same(found.tensors, {name: tensor.float() for name, tensor in model.items()})
        assert any("fp32 masters are not used: their optimizer numbers" in note for note in found.report.notes)
    else:
        refused(CheckpointMismatchError, "do not prove which", convert, tmp_path / "some.pt", tmp_path / "x", **options)
