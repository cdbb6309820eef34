"""Safetensors sources: headers that must be refused, and directories of Hugging Face and torch's DCP."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from ckptkit import convert
from ckptkit.catalog.entry import Role
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsafePathError, UnsupportedFormatError
from ckptkit.formats.detect import open_source
from ckptkit.formats.hf import safetensors
from ckptkit.formats.hf.header import read_header
from ckptkit.formats.hf.side_files import find_side_files
from ckptkit.storage import open_store
from tests.formats.damages import Damage, lay, without, written


def _write(path: Path, header: bytes | dict, data: bytes = b"", *, length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def _read(tmp_path: Path):
    return read_header(open_store(str(tmp_path)), "x.safetensors")


def _f32(shape, begin, end):
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


BAD = {
    "header longer than 100 MB": (b"{}", b"", 100_000_001, CorruptCheckpointError),
    "header longer than the file": (b"{}", b"", 99_000_000, IncompleteCheckpointError),
    "truncated data": ({"a": _f32([4], 0, 16)}, b"0" * 15, None, IncompleteCheckpointError),
    **{fault: (header, data, None, CorruptCheckpointError) for fault, (header, data) in {
        "no JSON": (b"{nonsense", b""),
        "no object": (b"[1]", b""),
        "no UTF-8": (b'{"\xff": 1}', b""),
        "NaN": (b'{"a": NaN}', b""),
        "nested without end": (b'{"a":' + b"[" * 200_000, b""),
        "a huge integer": (b'{"a": {"shape": [' + b"9" * 9999 + b"]}}", b""),
        "duplicate tensor": (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                             b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"0"),
        "duplicate field": (b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"0"),
        "metadata that are not strings": ({"__metadata__": {"a": 1}}, b""),
        "unknown field": ({"a": {**_f32([1], 0, 4), "x": 1}}, b"0000"),
        "missing field": ({"a": {"dtype": "F32", "shape": [1]}}, b"0000"),
        "a shape that its bytes do not match": ({"a": _f32([2], 0, 4)}, b"0000"),
        "a negative extent": ({"a": _f32([-1], 0, 4)}, b"0000"),
        "true for 1": ({"a": _f32([True], 0, 4)}, b"0000"),
        "an extent that overflows": ({"a": _f32([2**63, 2], 0, 4)}, b"0000"),
        "a million dimensions": ({"a": _f32([2**62] * 10**6, 0, 4)}, b"0000"),
        "offsets that run backwards": ({"a": _f32([0], 4, 0)}, b"0000"),
        "a hole": ({"a": _f32([1], 0, 4), "b": _f32([1], 8, 12)}, b"0" * 12),
        "an overlap": ({"a": _f32([2], 0, 8), "b": _f32([2], 4, 12)}, b"0" * 12),
        "data that does not start at 0": ({"a": _f32([1], 4, 8)}, b"0" * 8),
        "bytes after the data": ({"a": _f32([1], 0, 4)}, b"0" * 5),
        "data that would end past 2^63 of the file": ({"a": _f32([1], 2**63 - 5, 2**63 - 1)}, b"0000"),
        "64 dimensions whose product no float holds": ({"a": _f32([2**63 - 1] * 64, 0, 4)}, b"0"),
        "6 bits with too many bytes": ({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 4]}}, b"0000"),
    }.items()},
    **{fault: ({"a": header}, b"0" * header["data_offsets"][1], None, UnsupportedFormatError) for fault, header in {
        "numbers of 4 bits that end inside a byte": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]},
        "a single number of 4 bits": {"dtype": "F4", "shape": [], "data_offsets": [0, 1]},
        "an unknown dtype": {"dtype": "F5", "shape": [2], "data_offsets": [0, 1]},
    }.items()},
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_a_malformed_header_is_refused_by_name(tmp_path, fault):
    header, data, length, error = BAD[fault]
    _write(tmp_path / "x.safetensors", header, data, length=length)
    with pytest.raises(error, match=r"x\.safetensors"):
        _read(tmp_path)


ODD = {
    "fields in another order": {"data_offsets": [0, 4], "dtype": "F32", "shape": [1]},
    "a product that overflows before a zero": {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]},
    "no dimensions": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
}


@pytest.mark.parametrize("oddity", ODD)
def test_an_unusual_valid_header_is_read(tmp_path, oddity):
    begin, end = ODD[oddity]["data_offsets"]
    _write(tmp_path / "x.safetensors", {"a": ODD[oddity]}, b"0" * (end - begin))
    found = _read(tmp_path).tensors["a"]
    assert (list(found.shape), found.nbytes, found.dtype) == (ODD[oddity]["shape"], end - begin, "float32")


def test_a_file_without_a_header_is_refused(tmp_path):
    for size in (0, 7):
        (tmp_path / "x.safetensors").write_bytes(b"\0" * size)
        with pytest.raises(IncompleteCheckpointError, match=r"x\.safetensors"):
            _read(tmp_path)


def test_headers_with_padding_or_larger_than_the_first_read_are_accepted(tmp_path):
    names = [f"layers.{i}.a_rather_long_name_of_a_tensor.weight" for i in range(2000)]
    save_file({name: np.zeros(1, np.uint8) for name in names}, tmp_path / "x.safetensors")
    assert set(_read(tmp_path).tensors) == set(names)


def test_the_size_of_a_symlinked_file_is_that_of_its_target(tmp_path):
    (tmp_path / "snap").mkdir()
    _write(tmp_path / "snap" / "blob", {"a": _f32([4], 0, 16)}, b"0" * 15)
    (tmp_path / "snap" / "x.safetensors").symlink_to("blob")
    with pytest.raises(IncompleteCheckpointError, match=r"x\.safetensors"):
        read_header(open_store(str(tmp_path / "snap")), "x.safetensors")


# --- directories


INDEX = "model.safetensors.index.json"
SHARDS = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def _listing(**changes: object) -> Damage:
    return written(INDEX, json.dumps({"metadata": {"total_size": 24}, "weight_map": SHARDS | changes}))


ONES = np.ones(3, np.float32)


@pytest.fixture
def sharded(tmp_path):
    lay(tmp_path, {shard: {name: ONES} for name, shard in SHARDS.items()})
    _listing()(tmp_path)
    return tmp_path


def _open(folder: Path):
    return safetensors.open_catalog(open_store(str(folder)))


def test_all_shards_are_read_with_and_without_an_index(sharded):
    for has_index in (True, False):
        catalog = _open(sharded)
        assert set(catalog.by_role(Role.MODEL)) == {"a", "b"}
        assert catalog.tensors["b"].slices[0].path == SHARDS["b"]
        assert ["no index" in note for note in catalog.info.notes] == ([] if has_index else [True])
        (sharded / INDEX).unlink(missing_ok=True)


FAULTS = [
    ("a missing shard", without(SHARDS["b"]), IncompleteCheckpointError, "model-00002-of-00002"),
    ("a missing numbered shard", lambda folder: [(folder / name).unlink() for name in (INDEX, SHARDS["a"])],
     IncompleteCheckpointError, "model-00001-of-00002"),
    ("unrelated files", lambda folder: [(folder / INDEX).unlink(), *(
        (folder / shard).rename(folder / f"{name}.safetensors") for name, shard in SHARDS.items())],
     CorruptCheckpointError, "Give one of the files"),
    ("a tensor that its shard lacks", _listing(c=SHARDS["a"]), IncompleteCheckpointError, "'c'"),
    ("a tensor that is not listed", lambda folder: lay(folder, {SHARDS["b"]: {"b": ONES, "z": ONES}}),
     CorruptCheckpointError, "'z'"),
    *((f"the path {path!r}", _listing(a=path), UnsafePathError, "index")
      for path in ("../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "a\\b", "", "..", "x\0", "c:x")),
    *((f"the index {text:.40}", written(INDEX, text), CorruptCheckpointError, "index")
      for text in ("", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{}", "[" * 100_000)),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "damage", "error", "text"), FAULTS, ids=[row[0] for row in FAULTS])
def test_a_damaged_index_is_refused_by_name(sharded, fault, damage, error, text):
    damage(sharded)
    with pytest.raises(error, match=text):
        _open(sharded)


def test_side_files_and_code_are_listed_separately(zoo):
    info = _open(zoo / "hf_ref_llama_untied").info
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= set(info.side_files)
    assert info.extra["code_files"] == ["modeling_custom.py"]
    assert info.extra["config"]["tie_word_embeddings"] is False
    assert not {"README.md", "model.safetensors", "modeling_custom.py"} & set(info.side_files)


# --- shards of torch's DCP


def _rank_file(tmp_path: Path, rank: int, tensors: dict, offsets: dict, *, of: int = 1) -> None:
    info = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
    path = tmp_path / f"shard-{rank:05}-model-00001-of-{of:05}.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "DCP_SHARDING_INFO": json.dumps(info)})


def test_rank_shards_are_joined_by_their_offsets(tmp_path):
    for rank, rows, first in ((1, 3, 0), (2, 2, 3)):
        _rank_file(tmp_path, rank, {"w": np.ones((rows, 2)), "b": np.ones(2)}, {"w": (first, 0), "b": (0,)})
    catalog = _open(tmp_path)
    assert catalog.tensors["w"].shape == (5, 2) and catalog.info.world_size == 2
    # Each rank has a replica of b.
    assert {name: [s.rank for s in entry.slices] for name, entry in catalog.tensors.items()} == {
        "w": [0, 1],
        "b": [0, 1],
    }


EMBED = "model.embed_tokens.weight"
INCOMPLETE_RANKS = {  # rank, tensor, rows and first row of each file
    "a missing rank": ([(1, "w", 2, 0), (3, "w", 2, 4)], IncompleteCheckpointError, "shard-00002"),
    "a missing first chunk": ([(1, "w", 2, 2)], IncompleteCheckpointError, "'w'"),  # the rank overwrote it
    "an overlap": ([(1, "w", 3, 0), (2, "w", 3, 2)], CorruptCheckpointError, "overlap"),
    "two saves": ([(1, "w", 2, 0), (2, "v", 2, 0)], CorruptCheckpointError, "2 saves"),
    "missing last ranks, by the config": ([(1, EMBED, 4, 0)], IncompleteCheckpointError, "vocab_size 8"),
}


@pytest.mark.parametrize("fault", INCOMPLETE_RANKS)
def test_shards_of_ranks_that_do_not_make_a_whole_are_refused(tmp_path, fault):
    shards, error, text = INCOMPLETE_RANKS[fault]
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    for rank, name, rows, first in shards:
        _rank_file(tmp_path, rank, {name: np.ones((rows, 2))}, {name: (first, 0)}, of=1 + (name == "v"))
    with pytest.raises(error, match=text):
        _open(tmp_path)


def test_damaged_sharding_info_and_a_single_rank_shard_are_refused(tmp_path):
    path = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    for info in ("[]", "{", '{"w": {"saved_offsets": [0]}}', '{"w": {"saved_offsets": [-1, 0]}}', '{"w": 1}'):
        save_file({"w": np.ones((2, 2))}, path, metadata={"DCP_SHARDING_INFO": info})
        with pytest.raises(CorruptCheckpointError, match="shard-00001"):
            _open(tmp_path)
    _rank_file(tmp_path, 1, {"w": np.ones((2, 2))}, {"w": (0, 0)})
    with pytest.raises(IncompleteCheckpointError, match="directory"):
        safetensors.open_file(open_store(str(tmp_path)), path.name)


def test_shards_numbered_from_0_are_complete_without_an_index(tmp_path):
    lay(tmp_path, {f"model-0000{i}-of-00002.safetensors": {f"w{i}": ONES} for i in range(2)})
    assert sorted(_open(tmp_path).tensors) == ["w0", "w1"]
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"missing: model-00001-of-00002\.safetensors\.$"):
        _open(tmp_path)


def test_a_note_names_sentence_transformers_modules_with_weights(tmp_path):
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "../x"}, {"path": 3}, 7]
    lay(tmp_path, {
        "model.safetensors": {"w": ONES}, "1_Pooling/config.json": "{}", "2_Dense/config.json": "{}",
        "2_Dense/model.safetensors": {"linear.weight": ONES}, "modules.json": json.dumps(modules),
    })  # fmt: skip
    assert _open(tmp_path).info.notes == ("modules.json: 2_Dense has weights too, which are not read.",)
    (tmp_path / "modules.json").write_text('{"no": "list"}')
    assert _open(tmp_path).info.notes == ()


SMALL = {  # shapes in the file, and the dtypes and shapes of the catalog: in bytes, as torch shows F4
    "F4": ([2, 16], "float4_e2m1fn_x2", (2, 8)), "F6_E2M3": ([2, 8], "float6_e2m3fn_bytes", (2, 6)),
    "F6_E3M2": ([1, 4], "float6_e3m2fn_bytes", (1, 3)), "F8_E8M0": ([3, 5], "float8_e8m0fnu", (3, 5)),
}  # fmt: skip


@pytest.fixture
def small(tmp_path):
    """The header and the data of a file `src/model.safetensors` of dtypes below a byte, and one of exponents."""
    header, at = {}, 0
    for name, (shape, _, in_bytes) in SMALL.items():
        end = at + math.prod(in_bytes)
        header[name], at = {"dtype": name, "shape": shape, "data_offsets": [at, end]}, end
    (tmp_path / "src").mkdir()
    _write(tmp_path / "src" / "model.safetensors", header, bytes(range(at)))
    return header, bytes(range(at))


def test_shapes_of_dtypes_below_a_byte_count_bytes_but_a_copy_keeps_the_header_shapes(small, tmp_path):
    header, data = small
    found = _open(tmp_path / "src").tensors
    assert {name: (entry.dtype, entry.shape) for name, entry in found.items()} == {n: SMALL[n][1:] for n in SMALL}
    convert(str(tmp_path / "src"), str(tmp_path / "out"), verify=True)
    copy = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert copy.endswith(data) and json.loads(copy[8 : -len(data)]).items() >= header.items()


@pytest.mark.usefixtures("small")
def test_dtypes_below_a_byte_are_not_cast(tmp_path):
    with pytest.raises(UnsupportedFormatError, match=r"F6_E2M3.*torch has no FP6"):
        convert(str(tmp_path / "src"), str(tmp_path / "out"), to="dcp")
    (tmp_path / "src" / "config.json").write_text('{"quantization_config": {"quant_method": "other"}}')
    with pytest.raises(UnsupportedFormatError, match=r"cannot dequantize 3 packed tensors.*F4"):
        convert(str(tmp_path / "src"), str(tmp_path / "out"), dtype="bf16")


# --- side files


def test_a_side_file_with_an_unsafe_name_is_skipped_and_named(tmp_path):
    names = ("tokenizer.json", "tokenizer\x1b[31m.json", "tokenizer\\x.json", "NOTICE.", "nobody\nasked")
    lay(tmp_path, {"model.safetensors": {"a": ONES}, **dict.fromkeys(names, "{}")})
    found = find_side_files(open_store(str(tmp_path)))
    assert found.carried == ("tokenizer.json",)
    note = " ".join(found.notes)
    assert all(name in note for name in ("\\x1b[31m", "tokenizer\\\\x.json", "NOTICE."))
    assert "nobody" not in note  # the name does not make it a side file
    assert note in open_source(str(tmp_path)).catalog.info.notes


def test_convert_keeps_the_headers_metadata_and_names_what_differs_between_files(sharded, tmp_path):
    for name, file in SHARDS.items():
        save_file({name: ONES}, sharded / file, {"format": "np", "license": "mit", "hash": name})
    report = convert(str(sharded), str(tmp_path / "out"), verify=True)
    with safe_open(tmp_path / "out/model.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "pt", "license": "mit"}
    assert "the files' __metadata__ differs in hash, which is not read." in report.notes
