"""The one place where torch unpickles objects: no code runs, and no value expands without limit."""

import ast
import re
import zipfile
from collections import deque
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import ckptkit
from ckptkit.errors import CkptkitError, CorruptCheckpointError, LoadError, SaveError, UnsafePickleError
from ckptkit.formats.pickles.weights_only import dump_object, dump_plain, parse_object
from tests.formats import interop_cases as interop
from tests.formats.damages import rezipped
from tests.formats.interop_cases import CODE, OBJECTS, REFUSED, same
from tests.hostile.sources import Evil, saved
from tests.patches import failing


@pytest.mark.parametrize("value", [{"a": 1, "t": torch.arange(3)}, [], torch.zeros(0, 2), (1.5, "x", None)])
@pytest.mark.parametrize("modern", [True, False])
def test_values_that_torch_saved_are_read(value, modern):
    found = parse_object(saved(value, _use_new_zipfile_serialization=modern), file="f")
    assert str(found) == str(value)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_lack_of_memory_is_not_called_damage(monkeypatch, error):
    monkeypatch.setattr(torch, "load", Mock(side_effect=error))
    with pytest.raises(LoadError, match="not enough memory"):
        parse_object(saved({"a": 1}), file="f")
    with pytest.raises(SaveError, match="x: not enough memory to save it"):
        dump_plain({"a": 1}, name="x", advice="or else")


def test_a_compressed_archive_is_refused_before_decompression():
    data = saved({"t": torch.zeros(4)})
    assert parse_object(rezipped(data, lambda name, raw: [(name, raw)]), file="f")["t"].tolist() == [0, 0, 0, 0]
    padded = rezipped(data, lambda n, raw: [(n, raw + bytes(64 << 20 if "/data/" in n else 0))], zipfile.ZIP_DEFLATED)
    assert len(padded) < 1 << 20
    with pytest.raises(CorruptCheckpointError, match=r"f: the object 'x'.*compressed"):
        parse_object(padded, file="f", name="x")


def test_a_view_larger_than_its_storage_is_refused():
    with pytest.raises(CorruptCheckpointError, match="stored"):
        parse_object(saved({"a": [{"w": torch.zeros(1).expand(2**40)}]}), file="f")


@pytest.mark.parametrize("modern", [True, False])
def test_a_payload_is_named_and_not_run(modern, tmp_path):
    data = saved(Evil(tmp_path / "PWNED"), _use_new_zipfile_serialization=modern)
    with pytest.raises(UnsafePickleError, match=r"f: the object 'x'.*mkdir.*none of it was run.*add_safe_globals"):
        parse_object(data, file="f", name="x")
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.filterwarnings("ignore")  # torch warns about prototype and deprecated tensors
@pytest.mark.parametrize("make", [make for _, make in OBJECTS], ids=[name for name, _ in OBJECTS])
def test_plain_data_round_trips(make):
    data = saved({"of": [make()] * 2})
    found, again = parse_object(data, file="f")["of"]
    assert same(found, make())
    assert found is again or isinstance(found, (int, float, complex, str, bytes, tuple, frozenset, range, slice))


@pytest.mark.parametrize("make", [make for _, make in CODE], ids=[name for name, _ in CODE])
def test_an_object_that_needs_its_own_code_is_refused_by_the_name_of_the_class(make):
    with pytest.raises(UnsafePickleError, match=r"asks for '.*interop_cases\..*none of it was run.*add_safe_globals"):
        parse_object(saved({"of": [deque([make()])]}), file="f")


@pytest.mark.filterwarnings("ignore")  # torch deprecates quantized tensors
@pytest.mark.parametrize(("name", "make"), REFUSED, ids=[name for name, _ in REFUSED])
def test_an_object_of_a_library_is_refused_with_advice(name, make):
    with pytest.raises(CkptkitError, match=rf"f.*{re.escape(name)}.*never runs code.*weights_only=False.*plain values"):
        parse_object(saved({"of": [make()] * 2}), file="f")


def test_a_big_endian_array_is_read_as_by_pickle():
    found = parse_object(saved([np.array([1, 2], ">u2")]), file="f")[0]
    assert found.dtype == np.dtype("u2")
    assert found.tolist() == [1, 2]


def test_a_container_that_holds_itself_round_trips():
    circle: Any = deque([1])
    circle.append([circle])
    found = parse_object(saved(circle), file="f")
    assert found[1][0] is found and len(found) == 2


@pytest.mark.parametrize("data", [
    b"", b"PK", b"PK\x03\x04" + bytes(200), b"\x80\x02.", b"\x80\x02K\x01.", b"\t" * 72, b"PK\x05\x06" + bytes(18),
])  # fmt: skip
def test_bytes_that_torch_did_not_write_raise_a_ckptkit_error(data):
    with pytest.raises(CkptkitError, match="f"):
        parse_object(data, file="f")


@pytest.mark.parametrize(("error", "said"), [
    (MemoryError("no room"), "no room"),
    (torch.OutOfMemoryError("CUDA out of memory"), "x: not enough memory to save it: CUDA out"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "x: not enough memory to save it: Default"),
])  # fmt: skip
def test_a_save_that_runs_out_of_memory_does_not_blame_the_type(error, said):
    value = type("TooLarge", (), {"__reduce__": failing(error)})()
    with pytest.raises((MemoryError, SaveError), match=said):
        dump_object(value, name="x", advice="or else")


class Outer:
    def __init__(self) -> None:
        self.inner = interop.Colour.RED


def test_a_value_that_needs_code_to_load_is_not_saved_and_all_classes_in_it_that_are_not_allowed_are_named():
    outer, inner = rf"{__name__}\.Outer", r"tests\.formats\.interop_cases\.Colour"
    with pytest.raises(SaveError, match=rf"type {outer} .*It contains ({outer}, {inner}|{inner}, {outer}).*or else"):
        dump_object(Outer(), name="x", advice="or else")
    with torch.serialization.safe_globals([Outer]), pytest.raises(SaveError, match=rf"It contains {inner}\."):
        dump_object({"a": Outer()}, name="x", advice="")
    with torch.serialization.safe_globals([Outer, interop.Colour]):
        dump_object(Outer(), name="x", advice="")


# Allowed: pickles between the ranks of one job, over their own connections.
OF_ONE_JOB = {"checkpoint/run/coordinator.py"}


def test_torch_load_is_called_in_one_place_and_with_weights_only():
    top = Path(ckptkit.__file__).parent
    found: dict[str, list[str]] = {}
    texts = {path: path.read_text() for path in top.rglob("*.py")}
    for path in (path for path, text in texts.items() if re.search(r"\b(torch|pickle)\s*\.\s*load", text)):
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "pickle.loads"):
                found.setdefault(path.relative_to(top).as_posix(), []).append(ast.unparse(node))
    assert set(found) == {"formats/pickles/weights_only.py"} | OF_ONE_JOB
    assert all("weights_only=True" in call for call in found["formats/pickles/weights_only.py"])


def test_a_flipped_bit_in_a_tensor_of_an_object_is_found():
    tensor = torch.arange(100.0)
    data = bytearray(saved({"x": tensor, "words": ["a"]}))
    assert torch.equal(parse_object(data, file="f", name="o")["x"], tensor)
    data[data.index(tensor.numpy().tobytes()) + 7] ^= 1
    with pytest.raises(CorruptCheckpointError, match=r"f: the object 'o'.*data/0' does not match its CRC-32"):
        parse_object(data, file="f", name="o")
