"""Plain torch.distributed.checkpoint and our reader and writer load each other's checkpoints to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter

import ckptkit
from ckptkit import verify
from ckptkit.errors import CheckpointMismatchError, UnsafePickleError, UnsupportedFormatError
from tests.formats import interop_cases as cases
from tests.formats.dcp_states import assert_loads, differences, failure, load, save
from tests.formats.interop_cases import blank
from tests.offline.folders import flip

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns about prototype and deprecated tensors
KEYS = ["a.b", "a/b", "ünïcödé 漢字", " ", "x" * 3000, "0", "a..b", ".", "/", "model.layers.0.weight", "__0_0.distcp"]


def saved_by_torch(url: str | Path, state: dict[str, Any]) -> None:
    save(FileSystemWriter(url), state)


def everything(url: Path) -> dict[str, Any]:
    """Return one state of all cases that torch itself can save and load, nested, with ordinary tensors."""
    keys = {key: torch.full((3,), float(i)) for i, key in enumerate(KEYS)}
    state: dict[str, Any] = {"tensors": {}, "objects": {}, "keys": keys}
    for name, make in cases.TENSORS:
        try:
            value = make()
            saved_by_torch(url, {"x": value})
            load(FileSystemReader(url), {"x": blank(value)})
        except (CheckpointException, RuntimeError, TypeError, NotImplementedError):
            continue
        state["tensors"][name] = value
    for name, make in cases.OBJECTS:
        value = make()  # a dict is not a leaf of the state
        state["objects"][name] = (value,) if isinstance(value, (dict, list)) else value
    return state


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory):
    """A checkpoint of plain torch, its state, and the lazy conj and neg views, which only our writer accepts."""
    folder = tmp_path_factory.mktemp("interop")
    state = everything(folder / "tried")
    lazy = {name: value for name, value in state["tensors"].items() if value.is_conj() or value.is_neg()}
    state["tensors"] = {name: value for name, value in state["tensors"].items() if name not in lazy}
    assert len(state["tensors"]) > 45 and len(lazy) == 10 and len(state["objects"]) == len(cases.OBJECTS)
    saved_by_torch(folder / "saved", state)
    return folder / "saved", state, lazy


@pytest.mark.parametrize("planner", [None, ckptkit.DCPLoadPlanner], ids=["torch's planner", "ours"])
@pytest.mark.parametrize("verify", ["read", "off"])
def test_dcp_reader_loads_what_torch_saved(of_torch, planner, verify):
    url, state, _ = of_torch
    assert_loads(ckptkit.DCPReader(url, verify=verify), state, planner and planner())


@pytest.mark.parametrize("planner", [None, ckptkit.DCPSavePlanner], ids=["torch's planner", "ours"])
def test_torch_loads_what_dcp_writer_wrote(of_torch, planner, tmp_path):
    _, plain, lazy = of_torch
    state = {**plain, "tensors": {**plain["tensors"], **lazy}}
    save(tmp_path, state, planner and planner())
    found = differences(load(FileSystemReader(tmp_path), blank(state)), state)
    # torch copies a quantized tensor into one with its own scale.
    assert [name for name in found if not name.startswith(".tensors.quantized")] == []
    assert_loads(tmp_path, state)


def test_a_load_fills_tensors_in_place(of_torch):
    url, state, _ = of_torch
    before = blank(state["tensors"])
    found = load(url, {"tensors": dict(before)})["tensors"]
    assert all(found[name] is before[name] for name in before)


@pytest.mark.parametrize("planner", [None, ckptkit.DCPLoadPlanner], ids=["torch's planner", "ours"])
def test_objects_that_need_code_are_all_named_before_anything_changes(tmp_path, planner):
    saved_by_torch(tmp_path, {"w": torch.ones(3), "a": cases.Colour.RED, "b": 1, "c": (cases.Settings(),)})
    state = {"w": torch.zeros(3), "a": None, "b": None, "c": None}
    with pytest.raises(CheckpointException, match=r"(?s)'a'.*Colour.*'c'.*Settings.*add_safe_globals") as caught:
        load(tmp_path, state, planner and planner())
    assert isinstance(caught.value.failures[0][0], UnsafePickleError)
    assert state["w"].sum() == 0 and state["b"] is None
    with torch.serialization.safe_globals([cases.Colour, cases.Settings]):
        load(tmp_path, state, planner and planner())
    assert (state["a"], state["c"]) == (cases.Colour.RED, (cases.Settings(),))


def test_a_quantized_tensor_of_another_shape_is_a_mismatch(tmp_path):
    saved_by_torch(tmp_path, {"q": torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)})
    state = {"q": torch.quantize_per_tensor(torch.randn(5), 0.1, 0, torch.qint8)}
    assert isinstance(failure(load, tmp_path, state), CheckpointMismatchError)


def test_a_lazy_conj_view_that_torch_saved_is_refused_by_name(tmp_path):
    value = torch.complex(torch.randn(700, 30), torch.randn(700, 30))
    saved_by_torch(tmp_path, {"model": {"z": value.conj(), "w": torch.ones(3)}})
    with pytest.raises(CheckpointException, match=r"'model\.z' is a lazy conj view.*resolve_conj") as caught:
        load(tmp_path, {"model": {"z": value.clone()}})
    assert isinstance(caught.value.failures[0][0], UnsupportedFormatError)
    assert_loads(tmp_path, {"model": {"w": torch.ones(3)}})
    assert verify(str(tmp_path)).ok
    flip(tmp_path / "__0_0.distcp")
    assert not verify(str(tmp_path)).ok
