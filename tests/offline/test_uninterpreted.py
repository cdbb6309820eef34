"""Tensors that only their own class can read (quantized, sparse, subclasses): no command calls them damaged, calls
them equal without comparing, or omits them silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit import CheckpointManager, TrainState, convert, reshard, verify
from ckptkit.errors import CkptkitError, UnsupportedFormatError
from ckptkit.offline.diff import diff
from ckptkit.offline.inspect import inspect
from tests.checkpoint.hidden import Scaled
from tests.cli.commands import document, ran
from tests.offline.folders import flip

pytestmark = pytest.mark.filterwarnings("ignore")


def small() -> Any:
    return Scaled(torch.arange(16, dtype=torch.int8).view(4, 4), torch.tensor(0.5))


def large() -> Any:
    """Return a tensor that declares four times the bytes stored for it."""
    return Scaled(torch.ones(128, 64, dtype=torch.int8), torch.tensor(0.5))


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8)


ODD = {"small": (small, "Scaled"), "large": (large, "Scaled"), "quantized": (quantized, "quantized")}


def saved(url: Path, odd: Any) -> str:
    dcp.save({"model": {"w": torch.arange(16.0).view(4, 4), "odd": odd}}, checkpoint_id=url, no_dist=True)
    return str(url)


def flipped(url: str, what: bytes) -> None:
    """Flip a bit in the stored bytes of the uninterpreted tensor."""
    path = Path(url) / "__0_0.distcp"
    flip(path, path.read_bytes().index(what))


@pytest.mark.parametrize("name", ODD)
def test_verify_reports_an_uninterpreted_tensor_as_intact_but_not_interpreted(tmp_path: Path, name: str) -> None:
    make, why = ODD[name]
    report = verify(saved(tmp_path / "c", make()))
    assert report.ok and "1 record could not be interpreted" in report.summary()
    assert list(report.uninterpreted) == ["model.odd"] and why in report.uninterpreted["model.odd"]
    assert report.summary().startswith("intact as far as it can be checked")
    assert report.to_json()["uninterpreted"] == report.uninterpreted


@pytest.mark.parametrize("name", ["small", "large"])
def test_verify_finds_a_flipped_bit_in_an_uninterpreted_tensor(tmp_path: Path, name: str) -> None:
    url = saved(tmp_path / "c", ODD[name][0]())
    flipped(url, bytes(range(16)) if name == "small" else b"\1" * 64)
    report = verify(url)
    assert [problem.tensor for problem in report.problems] == ["model.odd"]


def test_verify_refuses_a_plain_tensor_with_too_few_bytes(tmp_path: Path) -> None:
    url = saved(tmp_path / "c", torch.zeros(4, 4))
    file = Path(url) / ".metadata"
    file.write_bytes(file.read_bytes().replace(b"K\x04K\x04\x86", b"M\x00\x01K\x04\x86"))
    with pytest.raises(CkptkitError):
        verify(url)


def test_verify_of_uninterpreted_tensors_exits_with_0_and_proposes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, TrainState(model=torch.nn.Linear(2, 2)))
    url = saved(tmp_path / "single", large())
    assert "not interpreted: model.odd is a tests.checkpoint.hidden.Scaled" in ran("verify", url)
    flipped(url, b"\1" * 64)
    assert "step_00000001" not in ran("verify", url, code=1)
    assert document("verify", url, code=1)["ok"] is False


@pytest.mark.parametrize("name", ODD)
def test_inspect_names_an_uninterpreted_tensor_and_shows_the_others(tmp_path: Path, name: str) -> None:
    url = saved(tmp_path / "c", ODD[name][0]())
    report = inspect(url, tensors="*")
    assert "model.w" in [tensor.name for tensor in report.tensors] and list(report.uninterpreted) == ["model.odd"]
    ran("inspect", url, "--html", tmp_path / "page.html")


@pytest.mark.parametrize("name", ODD)
def test_diff_compares_records_of_uninterpreted_tensors_byte_for_byte(tmp_path: Path, name: str) -> None:
    a, b = (saved(tmp_path / key, ODD[name][0]()) for key in "ab")
    report = diff(a, b)
    assert report.equal and report.same == 2 and report.by_record == 1


@pytest.mark.parametrize("other", [torch.eye(4), Scaled(torch.ones(4, 4, dtype=torch.int8), torch.tensor(0.5))])
def test_diff_names_an_uninterpreted_tensor_that_differs(tmp_path: Path, other: Any) -> None:
    report = diff(saved(tmp_path / "a", small()), saved(tmp_path / "b", other))
    assert not report.equal and list(report.records) == ["model.odd"]
    assert "not interpreted: model.odd" in ran("diff", report.a, report.b, code=1)


@pytest.mark.parametrize("to", ["hf", "dcp", "torch"])
@pytest.mark.parametrize("name", ODD)
def test_convert_omits_an_uninterpreted_tensor_only_if_it_is_excluded(tmp_path: Path, name: str, to: Any) -> None:
    url = saved(tmp_path / "c", ODD[name][0]())
    with pytest.raises(UnsupportedFormatError, match=r"model\.odd is .*(?s:.*)--exclude"):
        convert(url, str(tmp_path / "out"), to=to)
    assert not (tmp_path / "out").exists()
    assert convert(url, str(tmp_path / "out"), to=to, exclude=["odd"]).tensors == 1


@pytest.mark.parametrize("name", ["small", "large"])
def test_reshard_refuses_an_uninterpreted_tensor_by_name(tmp_path: Path, name: str) -> None:
    url = saved(tmp_path / "c", ODD[name][0]())
    with pytest.raises(UnsupportedFormatError, match=r"model\.odd is a tests"):
        reshard(url, str(tmp_path / "out"), world_size=2)
    assert not (tmp_path / "out").exists()


def test_reshard_copies_a_quantized_tensor_unchanged(tmp_path: Path) -> None:
    url = saved(tmp_path / "c", quantized())
    reshard(url, str(tmp_path / "out"), world_size=2)
    state = {"model": {"w": torch.zeros(4, 4), "odd": torch.quantize_per_tensor(torch.zeros(4, 4), 1, 0, torch.qint8)}}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(state["model"]["odd"].int_repr(), quantized().int_repr())
