"""convert, end to end: every source of the zoo, every target, and the files after a failure."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckptkit.cli.convert import command
from ckptkit.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    IntegrityError,
    RankFailedError,
    UnsafePathError,
    UnsafePickleError,
    UsageError,
)
from ckptkit.formats.dcp.records import STREAMED
from ckptkit.formats.pickles import zip as zips
from ckptkit.keymaps import builtin
from ckptkit.offline import publish
from ckptkit.offline.convert import convert
from ckptkit.offline.export import hf
from ckptkit.offline.publish import options_of_both
from ckptkit.offline.reshard import reshard
from ckptkit.offline.verify import verify

ZOO = Path(__file__).parents[1] / "zoo"
CASES = {case["name"]: case for case in json.loads((ZOO / "MANIFEST.json").read_text())}
# Sources that need more arguments or have another outcome are tested in tests/offline/export.
ALONE = [
    name
    for name, case in CASES.items()
    if case["outcome"] == "ok"
    and (ZOO / name / "EXPECTED.safetensors").exists()
    and not name.startswith(("torchtitan_llama3", "peft", "fsdp1_local"))
    and name != "dcp_dtypes_w2"
]
UNEVEN = ZOO / "dcp_fsdp2_uneven_w4"


def source_of(name: str) -> str:
    return str(ZOO / name / CASES[name]["input"])


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def assert_expected(got: dict[str, torch.Tensor], name: str) -> None:
    expected = load_file(ZOO / name / "EXPECTED.safetensors")
    missing = {key for key in expected if key not in got}
    assert missing <= {"lm_head.weight"}, missing
    assert [key for key in expected if key not in missing and not same(got[key], expected[key])] == []
    if missing:  # a tied head equal to the embedding is written once
        assert same(expected["lm_head.weight"], got["model.embed_tokens.weight"])


# --- sources


@pytest.mark.parametrize("name", ALONE)
def test_every_source_of_the_zoo_becomes_hugging_face_bit_for_bit(name, tmp_path):
    report = convert(source_of(name), str(tmp_path / "out"), verify=True)
    assert_expected(tensors_in(tmp_path / "out"), name)
    assert f"{report.tensors}/{report.tensors} tensors equal to the source" in report.proof()


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("broken", "hostile"))])
def test_a_bad_source_is_refused_and_nothing_is_left(name, tmp_path):
    with pytest.raises((CorruptCheckpointError, UnsafePickleError, UnsafePathError)):
        convert(source_of(name), str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


# --- targets


@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_torch_loads_the_dcp_result(world_size, tmp_path):
    convert(str(UNEVEN / "ckpt"), str(tmp_path / "out"), to="dcp", world_size=world_size, verify=True)
    expected = load_file(UNEVEN / "EXPECTED.safetensors")
    state: dict[str, Any] = {"model": {key: torch.zeros_like(value) for key, value in expected.items()}}
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert all(same(state["model"][key], expected[key]) for key in expected)


@pytest.mark.parametrize("rows", [5, STREAMED])  # a CRC before the payload, and one after it
def test_records_of_dcp_carry_the_crc_of_their_bytes(rows, tmp_path):
    (tmp_path / "in").mkdir()
    save_file({"w": torch.arange(rows * 2, dtype=torch.float32)}, tmp_path / "in" / "model.safetensors")
    convert(str(tmp_path / "in"), str(tmp_path / "out"), to="dcp", world_size=2)
    report = convert(str(tmp_path / "out"), str(tmp_path / "back"))
    assert report.checked == 2


def test_hugging_face_to_dcp_and_back_gives_the_same_bytes(tmp_path):
    name = "hf_ref_qwen3moe"
    convert(source_of(name), str(tmp_path / "dcp"), to="dcp", world_size=3)
    convert(str(tmp_path / "dcp"), str(tmp_path / "back"))
    before, after = tensors_in(Path(source_of(name))), tensors_in(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(same(before[key], after[key]) for key in before)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_the_single_file_with_weights_only(mmap, tmp_path):
    convert(str(UNEVEN / "ckpt"), str(tmp_path / "model.pt"), to="torch", verify=True)
    state = torch.load(tmp_path / "model.pt", weights_only=True, mmap=mmap)
    expected = load_file(UNEVEN / "EXPECTED.safetensors")
    assert state.keys() == expected.keys()
    assert all(same(state[key], expected[key]) for key in expected)
    assert [item.name for item in tmp_path.iterdir()] == ["model.pt"]


def test_the_single_file_is_a_valid_zip(tmp_path):
    convert(str(UNEVEN / "ckpt"), str(tmp_path / "model.pt"), to="torch")
    assert zipfile.ZipFile(tmp_path / "model.pt").testzip() is None


def test_offsets_and_sizes_past_4_gib_use_zip64(monkeypatch, tmp_path):
    monkeypatch.setattr(zips, "_WIDE", 200)  # forces zip64 for every field
    convert(str(UNEVEN / "ckpt"), str(tmp_path / "model.pt"), to="torch")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    expected = load_file(UNEVEN / "EXPECTED.safetensors")
    assert all(same(state[key], expected[key]) for key in expected)


def test_every_dtype_is_converted_to_torch_save(tmp_path):
    source = str(ZOO / "dcp_dtypes_w2" / CASES["dcp_dtypes_w2"]["input"])
    convert(source, str(tmp_path / "model.pt"), to="torch", verify=True)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    expected = load_file(ZOO / "dcp_dtypes_w2" / "EXPECTED.safetensors")
    assert all(same(state[key], expected[key]) for key in expected)
    assert state["c64"].dtype is torch.complex64


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_local_result_is_a_committed_checkpoint_with_the_same_bits(world_size, tmp_path):
    out = tmp_path / "runs" / "export"
    convert(str(UNEVEN / "ckpt"), str(out), to="local", world_size=world_size, verify=True)
    assert (out / "checkpoint.json").exists()
    assert len(list(out.glob("local_*.safetensors"))) == world_size
    report = verify(str(out))
    assert report.ok and report.digests > 0
    assert convert(str(out), str(tmp_path / "hf")).format == "ckptkit-local"
    assert_expected(tensors_in(tmp_path / "hf"), UNEVEN.name)


def load_local_on_a_rank(root: str) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ckptkit import CheckpointManager, TrainState

    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("shard",))
    fully_shard(model, mesh=mesh)
    with CheckpointManager(root) as manager:
        manager.load(TrainState(model=model))
    expected = load_file(f"{root}/../in/model.safetensors")
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return all(same(found[name], value) for name, value in expected.items())


def test_a_manager_of_the_same_world_size_loads_a_local_result(ranks, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "run").mkdir()
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    save_file(model.state_dict(), tmp_path / "in" / "model.safetensors")
    convert(str(tmp_path / "in"), str(tmp_path / "run" / "start"), to="local", world_size=2)
    assert ranks.run(load_local_on_a_rank, 2, str(tmp_path / "run")) == [True, True]


# --- Hugging Face


def test_a_small_limit_makes_shards_and_an_exact_index(tmp_path):
    convert(str(UNEVEN / "ckpt"), str(tmp_path / "out"), max_shard_size="3kB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    got = tensors_in(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in got.values())
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in got.values())
    for key, path in index["weight_map"].items():
        with safe_open(tmp_path / "out" / path, "pt") as file:
            assert key in file.keys()  # noqa: SIM118 - no mapping
            assert file.metadata() == {"format": "pt"}
    assert set(index["weight_map"]) == set(got)
    assert len(set(index["weight_map"].values())) > 1


def test_one_shard_has_no_index(tmp_path):
    convert(str(UNEVEN / "ckpt"), str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


def test_file_modes_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        convert(str(UNEVEN / "ckpt"), str(tmp_path / "out"))
    finally:
        os.umask(before)
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_only_floats_are_cast_with_the_bits_of_torch(dtype, tmp_path):
    convert(str(UNEVEN / "ckpt"), str(tmp_path / "out"), dtype=dtype, verify=True)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    got = tensors_in(tmp_path / "out")
    for key, value in load_file(UNEVEN / "EXPECTED.safetensors").items():
        assert same(got[key], value.to(wanted) if value.is_floating_point() else value)


# --- publication


def test_an_existing_directory_is_not_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(CheckpointExistsError):
        convert(str(UNEVEN / "ckpt"), str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_existing_file_is_not_replaced(tmp_path):
    (tmp_path / "model.pt").write_text("mine")
    with pytest.raises(CheckpointExistsError):
        convert(str(UNEVEN / "ckpt"), str(tmp_path / "model.pt"), to="torch")
    assert (tmp_path / "model.pt").read_text() == "mine"


@pytest.mark.parametrize("name", ["out", "model.pt"])
def test_overwrite_replaces_an_existing_result(name, tmp_path):
    to = "torch" if name.endswith(".pt") else "hf"
    for _ in range(2):
        convert(str(UNEVEN / "ckpt"), str(tmp_path / name), to=to, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("dst", ["ckpt", "ckpt/", "link", "."])
def test_a_source_is_not_replaced_by_its_own_result(dst, tmp_path):
    shutil.copytree(UNEVEN / "ckpt", tmp_path / "ckpt")
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="Give another DST"):
        convert(str(tmp_path / "ckpt"), str(tmp_path / dst), overwrite=True)
    with pytest.raises(UsageError, match="Give another DST"):
        reshard(str(tmp_path / "ckpt"), str(tmp_path / dst), world_size=2, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failed_overwrite_keeps_the_old(tmp_path):
    convert(str(UNEVEN / "ckpt"), str(tmp_path / "out"))
    with pytest.raises(IntegrityError):
        convert(source_of("broken_bitflip_shard"), str(tmp_path / "out"), overwrite=True)
    assert_expected(tensors_in(tmp_path / "out"), "dcp_fsdp2_uneven_w4")


def test_a_dry_run_writes_nothing_and_names_every_tensor(tmp_path):
    report = convert(str(UNEVEN / "ckpt"), str(tmp_path / "out"), dry_run=True)
    assert list(tmp_path.iterdir()) == []
    lines = report.plan_lines()
    for key in load_file(UNEVEN / "EXPECTED.safetensors"):
        assert any(f"-> {key} " in line for line in lines)
    assert {t["name"] for t in report.to_json()["plan"]["tensors"]} == set(load_file(UNEVEN / "EXPECTED.safetensors"))


def test_a_report_is_json(tmp_path):
    report = convert(str(UNEVEN / "ckpt"), str(tmp_path / "out"))
    document = json.loads(json.dumps(report.to_json()))
    assert document["files"]["model.safetensors"] == (tmp_path / "out" / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    "options", [{"to": "onnx"}, {"max_memory": "1MB"}, {"world_size": 2}, {"to": "dcp", "merge_adapter": True}]
)
def test_invalid_combinations_of_options_are_refused(options, tmp_path):
    with pytest.raises(UsageError):
        convert(str(UNEVEN / "ckpt"), str(tmp_path / "out"), **options)
    assert list(tmp_path.iterdir()) == []


BIG = """
import sys
from ckptkit import convert
print("begun", flush=True)
while True:
    convert(sys.argv[1], sys.argv[2], overwrite=True, max_shard_size="2MB")
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_work_looks_unfinished_and_can_be_run_again(kind, tmp_path):
    (tmp_path / "in").mkdir()
    tensors = {f"w{i}": torch.full((1 << 18,), float(i)) for i in range(40)}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    process = subprocess.Popen(
        [sys.executable, "-c", BIG, str(tmp_path / "in"), str(tmp_path / "out")], stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline()
    time.sleep(0.35)
    process.send_signal(kind)
    try:
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    if (tmp_path / "out").exists():  # then it is complete
        got = tensors_in(tmp_path / "out")
        assert all(same(got[key], value) for key, value in tensors.items())
    convert(str(tmp_path / "in"), str(tmp_path / "out"), overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


# --- imports, and several ranks


def test_conversions_with_and_without_a_cast_do_not_import_torch(tmp_path):
    code = (
        "import sys; from ckptkit import convert;"
        "convert(sys.argv[1], sys.argv[2] + '/a', verify=True);"
        "convert(sys.argv[1], sys.argv[2] + '/b', dtype='bf16');"
        "convert(sys.argv[1], sys.argv[2] + '/c', to='dcp', world_size=3);"
        "convert(sys.argv[1], sys.argv[2] + '/d.pt', to='torch');"
        "heavy = {'torch', 'transformers', 'fsspec', 'safetensors', 'huggingface_hub'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(UNEVEN / "ckpt"), str(tmp_path)], check=True)


def test_a_plain_export_imports_no_unneeded_modules(tmp_path):
    code = (
        "import sys; from ckptkit import convert; convert(sys.argv[1], sys.argv[2]);"
        "names = ('numpy.ma', 'ckptkit.keymaps.rules', 'ckptkit.offline.export.adapters',"
        " 'ckptkit.formats.deepspeed.zero',"
        " 'ckptkit.formats.trainers.lightrft', 'ckptkit.checkpoint.run.inventory', 'ckptkit.offline.export.tied');"
        "sys.exit(' '.join(name for name in names if name in sys.modules) or 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(UNEVEN / "ckpt"), str(tmp_path / "out")], check=True)


def test_every_layout_with_a_map_is_recognised_by_name():
    layouts = (*builtin._STACKED, "tok_embeddings.weight")
    assert all(any(mark in name for mark in hf._MAPPED) for name in layouts)


def convert_on_a_rank(src: str, dst: str) -> int:
    return convert(src, dst, max_shard_size="3kB", verify=True).verified or 0


def test_ranks_divide_the_files_and_publish_once(ranks, tmp_path):
    verified = ranks.run(convert_on_a_rank, 3, str(UNEVEN / "ckpt"), str(tmp_path / "out"))
    assert verified == [18] * 3
    assert_expected(tensors_in(tmp_path / "out"), "dcp_fsdp2_uneven_w4")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_single_process_does_not_wait_for_the_ranks_of_a_batch_job(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    convert(str(UNEVEN / "ckpt"), str(tmp_path / "out"))
    assert_expected(tensors_in(tmp_path / "out"), UNEVEN.name)


def failure_on_a_rank(src: str, dst: str) -> str:
    try:
        convert(src, dst, max_shard_size="3kB")
    except (RankFailedError, IntegrityError) as error:
        return str(error)
    return "no error"


def test_damage_found_by_one_rank_stops_all_ranks(ranks, tmp_path):
    errors = ranks.run(failure_on_a_rank, 2, source_of("broken_bitflip_shard"), str(tmp_path / "out"))
    assert all("__1_0.distcp" in error for error in errors)
    assert list(tmp_path.iterdir()) == []


# --- object stores


@pytest.fixture(scope="module")
def bucket():
    pytest.importorskip("s3fs")
    from tests.storage.servers import moto

    with moto() as options:
        import s3fs

        s3fs.S3FileSystem(**options).mkdir("convert")
        yield "s3://convert", options


@pytest.mark.parametrize(("to", "back"), [("hf", "hf"), ("dcp", "hf"), ("torch", "hf")])
def test_from_disk_to_s3_and_back_gives_the_same_bytes(to, back, bucket, tmp_path):
    url, options = bucket
    place = f"{url}/{to}.pt" if to == "torch" else f"{url}/{to}"
    ranks = 2 if to == "dcp" else None
    convert(str(UNEVEN / "ckpt"), place, to=to, world_size=ranks, verify=True, storage_options=options)
    convert(place, str(tmp_path / "back"), to=back, storage_options=options)
    assert_expected(tensors_in(tmp_path / "back"), "dcp_fsdp2_uneven_w4")


def test_damage_leaves_nothing_on_s3(bucket):
    url, options = bucket
    with pytest.raises(IntegrityError):
        convert(source_of("broken_bitflip_shard"), f"{url}/bad", storage_options=options)
    import s3fs

    assert not s3fs.S3FileSystem(**options, use_listings_cache=False).exists("convert/bad")


# --- output and storage options


def test_source_and_destination_storage_options_override_common_ones():
    common, own = {"anon": True, "endpoint_url": "a"}, {"endpoint_url": "b"}
    assert options_of_both(common, None, own) == [common, {"anon": True, "endpoint_url": "b"}]
    assert options_of_both(None, own, None) == [own, None]


def test_the_command_line_passes_storage_options_to_each_side(monkeypatch, tmp_path):
    asked = {}

    def refused(src, dst, **options):
        asked.update(options)
        raise UsageError("enough")

    monkeypatch.setattr("ckptkit.offline.convert.convert", refused)
    both = ["--storage-option", "a=1", "--src-storage-option", "b=2", "--dst-storage-option", "c=x"]
    CliRunner().invoke(command, [str(UNEVEN / "ckpt"), str(tmp_path / "out"), *both])
    names = ("storage_options", "src_storage_options", "dst_storage_options")
    assert [asked[name] for name in names] == [{"a": 1}, {"b": 2}, {"c": "x"}]


def test_the_note_on_unused_tensors_names_their_groups(tmp_path):
    report = convert(str(UNEVEN / "ckpt"), str(tmp_path / "out"), include=["layers.*"], dry_run=True)
    note = next(note for note in report.notes if note.startswith("tensors skipped"))
    assert "42 (optimizer state, not part of the model weights)" in note
    assert ": model)" in note


def test_a_tensor_that_keeps_its_name_is_printed_once(tmp_path):
    report = reshard(str(UNEVEN / "ckpt"), str(tmp_path / "out"), world_size=2, dry_run=True)
    line = next(line for line in report.plan_lines() if line.startswith("model.embed.weight"))
    assert line.count("model.embed.weight") == 1
    assert " -> " not in line


def test_a_rank_that_waits_for_missing_ranks_fails_in_bounded_time(monkeypatch, tmp_path):
    monkeypatch.setattr(publish, "_MEET_S", 1)
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    started = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**started, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankFailedError, match="the 2 ranks that torchrun started did not connect within 1 s"):
        convert(str(UNEVEN / "ckpt"), str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_to_dcp_and_back_keeps_model_and_config(tmp_path: Path, zoo: Path) -> None:
    source = zoo / "hf_ref_llama_tied"
    convert(str(source), str(tmp_path / "dcp"), to="dcp", world_size=3)
    convert(str(tmp_path / "dcp"), str(tmp_path / "hf"))
    for path in source.glob("*.json"):
        assert json.loads((tmp_path / "hf" / path.name).read_text()) == json.loads(path.read_text()), path.name
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_config_next_to_a_plain_dcp_chooses_the_map(tmp_path: Path, zoo: Path) -> None:
    moe = zoo / "hf_ref_qwen3moe"
    convert(str(moe), str(tmp_path / "live"), to="dcp", key_map="inverse:hf5-experts")
    assert any(name.endswith(".experts.gate_up_proj") for name in names_of(tmp_path / "live"))
    report = convert(str(tmp_path / "live"), str(tmp_path / "hub"))
    assert any("hf5-experts: config.json says" in note for note in report.notes)
    got, expected = names_of(tmp_path / "hub"), names_of(moe)
    assert got == expected


def names_of(folder: Path) -> set[str]:
    from ckptkit.formats.detect import open_source

    return {entry.fqn or entry.name for entry in open_source(str(folder)).catalog.tensors.values()}
