"""Numbers beyond the range of a dtype become infinite, as in torch; every command that casts counts and names them."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import convert, merge
from ckptkit.offline.copying import runs
from ckptkit.offline.copying.streams import StreamWriter
from ckptkit.storage import ledger
from tests.cli.commands import document, ran
from tests.offline.exports import converted, write_model
from tests.offline.resuming import STEP, killed, went_on
from tests.patches import refuse
from tests.storage import servers

MOST = 65504.0  # of float16; numbers from 65520 on are rounded to infinity


def weights(*beyond: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return one matrix per number in `beyond`, with so many elements beyond float16."""
    made = {}
    for number, count in enumerate(beyond):
        values = torch.linspace(-3, 3, 60_000, dtype=torch.float64)
        values[:count] = 65520.0
        values[1:count:2] = -1e9
        values[-1], values[-2], values[-3] = 65519.0, float("inf"), float("nan")
        made[f"w{number}"] = values.reshape(200, 300).to(dtype)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("to", ["hf", "dcp", "local", "torch"])
def test_elements_that_a_cast_makes_infinite_are_counted_by_tensor(tmp_path, to, dtype):
    source = write_model(tmp_path / "in", {**weights(5, 0, 3, dtype=dtype), "scalar": torch.tensor(7e4, dtype=dtype)})
    ranks = {"world_size": 3} if to in ("dcp", "local") else {}
    report = convert(source, str(tmp_path / "out"), to=to, dtype="fp16", **ranks)
    last = 1 if dtype == torch.bfloat16 else 0  # there 65519 is 65536
    front = "model." if to == "local" else ""
    counts = {f"{front}w0": 5 + last, f"{front}w1": last, f"{front}w2": 3 + last, f"{front}scalar": 1}
    assert report.infinite == {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(("dtype", "wanted", "beyond", "instead"), [
    (torch.float32, "bf16", 3.3961776e38, "fp32"), (torch.float64, "bf16", 1e300, "fp32"),
    (torch.float64, "fp32", 1e300, "fp64"), (torch.float64, "fp16", 7e4, "bf16"),
])  # fmt: skip
def test_the_overflow_warning_gives_count_tensor_and_a_sufficient_dtype(tmp_path, dtype, wanted, beyond, instead):
    tensor = torch.tensor([1.0, beyond, -beyond, torch.inf, torch.nan], dtype=dtype)
    source = write_model(tmp_path / "in", {"w": tensor})
    found = converted(source, tmp_path / "out", dtype=wanted)
    name = str(found.tensors["w"].dtype).removeprefix("torch.")
    assert found.report.warnings == (
        f"2 elements are beyond the range of {name} and became infinite: w (2). Use --dtype {instead} to keep them "
        "finite.",
    )


def test_the_command_prints_the_overflow_warning(tmp_path):
    line = ("convert", write_model(tmp_path / "in", weights(0, 1)), tmp_path / "out", "--dtype", "fp16", "--overwrite")
    words = "1 element is beyond the range of float16 and became infinite: w1 (1). Use --dtype bf16"
    assert all(f"warning: {words}" in ran(*line, *quiet) for quiet in ((), ("--quiet",)))
    assert words in document(*line)["warnings"][0]


def test_a_sum_beyond_the_range_of_the_dtype_is_counted(tmp_path):
    most = (MOST, MOST, -MOST)
    sources = [write_model(tmp_path / f"m{i}", {"w": torch.tensor([x, 1.0]).half()}) for i, x in enumerate(most)]
    assert merge(sources[:2], str(tmp_path / "out"), weights=[2.0, -1.0]).infinite == {}
    assert merge(sources[1:], str(tmp_path / "far"), weights=[2.0, -1.0]).infinite == {"w": 1}


EMBEDDING = "model.embed_tokens.weight"


def test_elements_beyond_the_range_are_counted_in_an_embedding_with_added_rows(tmp_path):
    source = write_model(tmp_path / "in", {EMBEDDING: weights(4)["w0"]})
    options = {"dtype": "fp16", "vocab_size": 220, "new_rows": "zeros"}
    assert convert(source, str(tmp_path / "out"), **options).infinite == {EMBEDDING: 4}
    fine = convert(source, str(tmp_path / "fine"), dtype="bf16")
    assert fine.infinite == {} and not fine.warnings


@pytest.mark.parametrize("steps", [1, 3])
def test_a_continued_conversion_counts_the_elements_of_the_interrupted_one(tmp_path, monkeypatch, steps):
    monkeypatch.setattr(runs, "_STEP", STEP)
    source = write_model(tmp_path / "in", weights(5, 0, 0, 7))
    killed(convert, Path(source), tmp_path / "out", steps, dtype="fp16")
    report = convert(source, str(tmp_path / "out"), dtype="fp16", workers=1)
    assert went_on(report.notes)
    assert report.infinite == {"w0": 5, "w3": 7}


def test_a_continued_upload_counts_the_elements_of_the_interrupted_one(tmp_path, monkeypatch):
    source, writes = write_model(tmp_path / "in", weights(5, 0, 0, 7)), itertools.count()
    monkeypatch.setattr(ledger, "WORTH", 1)
    with servers.moto("far") as s3:
        options: dict[str, Any] = {"dtype": "fp16", "workers": 1, "max_shard_size": "150kB", "dst_storage_options": s3}
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            refuse(patched, StreamWriter, "write", KeyboardInterrupt(), when=lambda *_: next(writes) == 2)
            convert(source, "s3://far/out", **options)
        report = convert(source, "s3://far/out", **options)
    assert went_on(report.notes)
    assert report.infinite == {"w0": 5, "w3": 7}
