"""Tensors that only their own class can read (quantized, sparse, subclasses): no command calls them damaged, calls
them equal without comparing, or omits them silently."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckptkit import convert, diff, inspect, reshard, verify
from ckptkit.errors import CkptkitError, UnsupportedFormatError
from tests.checkpoint.hidden import Scaled
from tests.checkpoint.states import linear, save
from tests.cli.commands import document, ran
from tests.offline.folders import flip, refused

pytestmark = pytest.mark.filterwarnings("ignore")


def scaled(values: torch.Tensor) -> Any:
    return Scaled(values.to(torch.int8), torch.tensor(0.5))


ODD: dict[str, Any] = {
    "small": lambda: scaled(torch.arange(16).view(4, 4)),
    "large": lambda: scaled(torch.ones(128, 64)),  # declares four times the bytes stored for it
    "quantized": lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
}


def saved(url: Path, odd: Any) -> str:
    """Save a tensor, one of ODD if it is a name, next to a plain one."""
    odd = ODD[odd]() if isinstance(odd, str) else odd
    dcp.save({"model": {"w": torch.arange(16.0).view(4, 4), "odd": odd}}, checkpoint_id=url, no_dist=True)
    return str(url)


@pytest.mark.parametrize("name", ODD)
def test_an_uninterpreted_tensor_is_named_by_inspect_and_verified_and_compared_byte_for_byte(tmp_path, name):
    url = saved(tmp_path / "a", name)
    shown = inspect(url, tensors="*")
    assert "model.w" in [tensor.name for tensor in shown.tensors] and list(shown.uninterpreted) == ["model.odd"]
    ran("inspect", url, "--html", tmp_path / "page.html")
    compared = diff(url, saved(tmp_path / "b", name))
    assert compared.equal and compared.same == 2 and compared.by_record == 1
    report, why = verify(url), "quantized" if name == "quantized" else "Scaled"
    assert report.ok and "1 record could not be interpreted" in report.summary()
    assert list(report.uninterpreted) == ["model.odd"] and why in report.uninterpreted["model.odd"]
    assert report.summary().startswith("intact as far as it can be checked")
    assert report.to_json()["uninterpreted"] == report.uninterpreted


@pytest.mark.parametrize("name", ["small", "large"])
def test_verify_finds_a_flipped_bit_in_an_uninterpreted_tensor(tmp_path, name):
    save(tmp_path, linear())
    url = saved(tmp_path / "single", name)
    assert "not interpreted: model.odd is a tests.checkpoint.hidden.Scaled" in ran("verify", url)
    path = Path(url) / "__0_0.distcp"
    flip(path, path.read_bytes().index(bytes(range(16)) if name == "small" else b"\1" * 64))
    assert [problem.tensor for problem in verify(url).problems] == ["model.odd"]
    assert "step_00000001" not in ran("verify", url, code=1)  # no other checkpoint is proposed
    assert document("verify", url, code=1)["ok"] is False


def test_verify_refuses_a_plain_tensor_with_too_few_bytes(tmp_path):
    url = saved(tmp_path / "c", torch.zeros(4, 4))
    file = Path(url) / ".metadata"
    file.write_bytes(file.read_bytes().replace(b"K\x04K\x04\x86", b"M\x00\x01K\x04\x86"))
    with pytest.raises(CkptkitError):
        verify(url)


@pytest.mark.parametrize("other", [torch.eye(4), scaled(torch.ones(4, 4))])
def test_diff_names_an_uninterpreted_tensor_that_differs(tmp_path, other):
    report = diff(saved(tmp_path / "a", "small"), saved(tmp_path / "b", other))
    assert not report.equal and list(report.records) == ["model.odd"]
    assert "not interpreted: model.odd" in ran("diff", report.a, report.b, code=1)


@pytest.mark.parametrize("to", ["hf", "dcp", "torch"])
@pytest.mark.parametrize("name", ODD)
def test_convert_omits_an_uninterpreted_tensor_only_if_it_is_excluded(tmp_path, name, to):
    url = saved(tmp_path / "c", name)
    refused(UnsupportedFormatError, r"model\.odd is .*(?s:.*)--exclude", convert, url, tmp_path / "out", to=to)
    assert convert(url, str(tmp_path / "out"), to=to, exclude=["odd"]).tensors == 1


@pytest.mark.parametrize("name", ODD)
def test_reshard_copies_a_quantized_tensor_unchanged_and_refuses_one_of_another_class_by_name(tmp_path, name):
    url = saved(tmp_path / "c", name)
    if name != "quantized":
        refused(UnsupportedFormatError, r"model\.odd is a tests", reshard, url, tmp_path / "out", world_size=2)
        return
    reshard(url, str(tmp_path / "out"), world_size=2)
    state = {"model": {"w": torch.zeros(4, 4), "odd": torch.quantize_per_tensor(torch.zeros(4, 4), 1, 0, torch.qint8)}}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(state["model"]["odd"].int_repr(), ODD["quantized"]().int_repr())
