"""The numbers of a difference, for every kind of dtype, in bounded memory."""

import math
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptkit import TrainState, convert
from ckptkit.errors import IncompleteCheckpointError
from ckptkit.offline.diff import DiffReport, diff
from tests.checkpoint.states import measures_memory, memory_of, optimized, save, trained
from tests.offline.folders import copied


def compare(tmp_path: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], **options: Any) -> DiffReport:
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    return diff(str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), **options)


def saved(path: Path, **values: Any) -> str:
    torch.save({"model": {"w": torch.ones(2)}, **values}, path)
    return str(path)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8]
)
def test_difference_measures_follow_their_definitions(tmp_path, dtype):
    torch.manual_seed(0)
    a = (torch.randn(50, 7) * 20).to(dtype)
    b = a.clone()
    b[3, 2] = a[3, 2] + 5
    found = compare(tmp_path, {"w": a}, {"w": b}).different[0]
    x, y = a.double().flatten(), b.double().flatten()
    assert found.elements == 1
    assert found.max_abs == pytest.approx((x - y).abs().max().item())
    assert found.max_rel == pytest.approx((x - y).abs().max().item() / x.abs().max().item())
    assert found.cosine == pytest.approx(torch.cosine_similarity(x, y, dim=0).item())


FP8 = torch.float8_e4m3fn
NAN, INF = math.nan, math.inf
U64 = torch.uint64
PAIRS: dict[str, tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = {  # that differ in one element
    "integers next to 2**53": (torch.tensor([2**53, 7]), torch.tensor([2**53 + 1, 7]), {"max_abs": 1.0}),
    "the ends of int64": (torch.tensor([-(2**63), 7]), torch.tensor([2**63 - 1, 7]), {"max_abs": 2.0**64}),
    "large negative integers": (torch.tensor([-(2**62) - 1, 7]), torch.tensor([-(2**62), 7]), {"max_abs": 1.0}),
    "uint64": (torch.tensor([2**64 - 1], dtype=U64), torch.tensor([2**64 - 2], dtype=U64), {"max_abs": 1.0}),
    "booleans": (torch.tensor([True, False]), torch.tensor([True, True]),
                 {"max_abs": 1.0, "cosine": pytest.approx(2**-0.5)}),
    "8-bit floats": (torch.tensor([1.0, 2.0]).to(FP8), torch.tensor([1.0, 2.5]).to(FP8),
                     {"max_abs": 0.5, "max_rel": 0.25}),
    "complex numbers": (torch.tensor([1 + 2j, 3 - 4j]), torch.tensor([1 + 2j, 3 - 3j]), {"max_abs": 1.0}),
    "NaN": (torch.tensor([NAN, 1.0]), torch.tensor([0.5, 1.0]), {"max_abs": INF}),
    "minus zero": (torch.tensor([0.0]), torch.tensor([-0.0]), {"max_abs": 0.0}),  # differs in bits
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_one_different_element_is_measured(tmp_path, pair):
    a, b, measures = PAIRS[pair]
    (found,) = diff(saved(tmp_path / "a.pt", w=a), saved(tmp_path / "b.pt", w=b)).different
    assert found.elements == 1
    assert {name: getattr(found, name) for name in measures} == measures


def test_nan_is_equal_to_nan_and_an_infinite_difference_is_text_in_json(tmp_path):
    report = compare(tmp_path, {"w": torch.tensor([NAN, 1.0])}, {"w": torch.tensor([NAN, INF])})
    (found,) = report.to_json()["different"]
    assert (found["elements"], found["max_abs"]) == (1, "inf")


def test_names_shapes_and_dtypes_are_listed(tmp_path):
    a = {"x": torch.ones(2), "s": torch.ones(2, 3), "d": torch.ones(2)}
    b = {"y": torch.ones(2), "s": torch.ones(3, 2), "d": torch.ones(2, dtype=torch.bfloat16)}
    report = compare(tmp_path, a, b)
    assert (report.only_a, report.only_b) == (("x",), ("y",))
    assert (report.shapes, report.dtypes) == ({"s": ((2, 3), (3, 2))}, {"d": ("float32", "bfloat16")})
    assert not report.equal


@pytest.mark.parametrize("name", ["module.0.weight", "0._orig_mod.weight", "_forward_module.0.weight"])
def test_names_are_compared_without_the_parts_of_wrappers(tmp_path, name):
    bias, weight = torch.ones(2), torch.ones(3)
    front = name.partition("0")[0]
    assert compare(tmp_path, {name: weight, f"{front}bias": bias}, {"0.weight": weight, "bias": bias}).equal
    assert compare(tmp_path, {name: weight, "bias": bias}, {name: weight, "more": bias}).only_b == ("more",)


def test_a_layer_shows_its_largest_change_and_the_cosine_of_its_tensors_as_one_vector(tmp_path):
    torch.manual_seed(0)
    a = {f"layers.{i}.{name}": torch.randn(5, 3) for i in range(3) for name in ("q", "k")}
    b = {name: value + 0.1 * torch.randn(5, 3) * ("layers.0" not in name) for name, value in a.items()}
    layers = compare(tmp_path, a, b).layers()
    layer = layers["layers.1"]
    x, y = (torch.cat([side[f"layers.1.{name}"].double().flatten() for name in ("q", "k")]) for side in (a, b))
    relative = max(((a[n] - b[n]).abs().max() / a[n].abs().max()).item() for n in ("layers.1.q", "layers.1.k"))
    assert layers.keys() == {"layers.1", "layers.2"} and (layer.tensors, layer.elements) == (2, 30)
    assert layer.cosine == pytest.approx(torch.cosine_similarity(x, y, dim=0).item())
    assert (layer.max_abs, layer.max_rel) == pytest.approx(((x - y).abs().max().item(), relative))


@measures_memory
def test_memory_does_not_grow_with_the_tensor(tmp_path):
    peaks = []
    for megabytes in (16, 128):
        for side in "ab":
            tensor = torch.zeros(megabytes << 18)
            tensor[-1] = float(side == "b")
            save_file({"w": tensor}, tmp_path / f"{side}{megabytes}.safetensors")
        files = (str(tmp_path / f"{side}{megabytes}.safetensors") for side in "ab")
        peaks.append(memory_of(partial(diff, *files, max_memory="64MB")))
    assert peaks[1] - peaks[0] < 40 << 20  # for 224 MiB more on both sides together


@pytest.mark.parametrize("name", ["dcp_serialization_safetensors_w2", "dcp_zstd_w2", "dcp_dtensor_2d"])
def test_records_of_every_kind_are_read_where_they_are(zoo, name):
    report = diff(str(zoo / name / "ckpt"), str(zoo / name / "EXPECTED.safetensors"))
    assert not report.differs and report.same


@pytest.mark.parametrize(("a", "b", "places"), [
    ({"epoch": 3}, {"epoch": 4}, {"epoch": ("3", "4")}),
    ({"epoch": 3}, {"epoch": 3.0}, {"epoch": ("3", "3.0")}),
    ({"epoch": True}, {"epoch": 1}, {"epoch": ("True", "1")}),
    ({"note": "x"}, {"note": "y"}, {"note": ("'x'", "'y'")}),
    ({"x": -0.0}, {"x": 0.0}, {"x": ("-0.0", "0.0")}),
    ({"x": math.nan}, {"x": math.nan}, {}),
    ({"args": {"lr": [1, 2]}}, {"args": {"lr": [1, 3]}}, {"args.lr[1]": ("2", "3")}),
    ({"args": {"lr": [1]}}, {"args": {"lr": [1, 3]}}, {"args.lr": ("1 items", "2 items")}),
    ({"args": {"a": 1}}, {"args": {"a": 1, "b": 2}}, {"args.b": ("nothing", "2")}),
])  # fmt: skip
def test_values_other_than_tensors_are_compared_and_named(tmp_path, a, b, places):
    report = diff(saved(tmp_path / "a.pt", **a), saved(tmp_path / "b.pt", **b))
    assert report.values == places
    assert report.equal == (not places)
    assert report.to_json()["values"] == {place: list(texts) for place, texts in places.items()}


@pytest.mark.parametrize("value", [INF, 1e308])
def test_a_layer_whose_sums_are_not_finite_is_reported(tmp_path, value):
    a = {f"layers.0.{name}": torch.tensor([value, 1.0], dtype=torch.float64) for name in "vw"}
    b = {name: torch.tensor([sign * value, 2.0], dtype=torch.float64) for name, sign in zip(a, (1, -1), strict=True)}
    found = compare(tmp_path, a, b)
    assert [layer.tensors for layer in found.layers().values()] == [2] and found.to_json()["layers"]


def test_a_head_is_compared_with_the_embedding_to_which_the_config_of_its_export_ties_it(zoo, tmp_path):
    source, out = str(zoo / "verl_fsdp2_w2"), tmp_path / "out"
    convert(source, str(out))
    for urls in ((source, str(out)), (str(out), source)):
        assert (report := diff(*urls)).same_weights == report.weights == 21 and not report.differs
    (out / "config.json").write_text('{"tie_word_embeddings": false}')
    assert diff(source, str(out)).only_a == ("lm_head.weight",)


def runs(tmp_path: Path, *made: TrainState, **options: Any) -> list[str]:
    """Save each state as a run; return the URLs of their steps."""
    return [f"{save(tmp_path / name, state, **options)}/step_00000001" for name, state in zip("ab", made, strict=False)]


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize(
    ("number", "shown"), [(float, ("0.5", "0.25")), (torch.tensor, ("0.5 (float32)", "0.25 (float32)"))]
)
def test_a_setting_of_an_optimizer_is_one_value_even_if_it_is_a_tensor(tmp_path, kind, number, shown):
    states = [optimized(torch.nn.Linear(2, 2), torch.optim.AdamW, lr=number(lr)) for lr in (0.5, 0.25)]
    report = diff(*runs(tmp_path, *states, state_dict_type=kind), include=["optimizer*"])
    assert report.values == {"optimizer.param_groups[0].lr": shown}
    assert not report.different


def test_large_tensors_in_lists_of_an_optimizers_state_are_compared(tmp_path):
    states = [optimized(torch.nn.Linear(3, 2)) for _ in range(2)]
    states[1].model.load_state_dict(states[0].model.state_dict())
    for state, value in zip(states, (1.0, 2.0), strict=True):
        for parameter in state.model.parameters():
            state.optimizer.state[parameter]["GG"] = [torch.full((40, 40), value)]  # as in SOAP
    found = diff(*runs(tmp_path, *states))
    assert [item.name.rpartition(".")[0].rpartition(".")[2] for item in found.different] == ["GG", "GG"]


def test_random_states_of_ours_and_of_trainers_are_compared_as_a_whole(tmp_path):
    state = TrainState(model=torch.nn.Linear(2, 2))
    urls = runs(tmp_path / "one", state)
    torch.rand(1), random.random()
    ours = diff(*urls, *runs(tmp_path / "other", state))
    assert ours.random == ("rng.0.python", "rng.0.torch") and ours.differs
    assert ours.summary().startswith("different: 2 random states differ; ")
    words = {"python": (3, tuple(range(625)), None), "cpu": torch.arange(9)}
    changed = {"python": (3, tuple(range(1, 626)), None), "cpu": torch.arange(1, 10)}
    theirs = diff(saved(tmp_path / "a.pt", rng_state=words), saved(tmp_path / "b.pt", rng_state=changed))
    assert theirs.random == ("rng_state.cpu", "rng_state.python")
    assert not any(report.different or report.values for report in (ours, theirs))


def test_tensors_and_values_are_counted_apart_and_those_of_one_side_are_named(tmp_path):
    a, b = ({"m": torch.tensor([x]), "n": torch.tensor([x])} for x in (1.0, 2.0))
    report = diff(saved(tmp_path / "a.pt", **a, epoch=1, run=4, note=2), saved(tmp_path / "b.pt", **b, epoch=2, run=4))
    assert report.summary().startswith("different: 2 tensors and 1 value differ")
    assert (report.only_a, report.only_b, report.same_values, report.same) == (("note",), (), 1, 1)


@pytest.mark.parametrize("to", ["hf", "local", "dcp", "torch"])
def test_the_summary_says_what_one_side_lacks_and_that_all_weights_are_equal(tmp_path, to):
    full = optimized(torch.nn.Linear(2, 2))
    urls = runs(tmp_path, full, TrainState(model=full.model))
    assert diff(*urls).summary().endswith("all 2 weights are equal; B has no optimizer")
    assert "A has no optimizer" in diff(*reversed(urls)).summary()
    assert diff(*urls, include=["model.*"]).equal
    convert(urls[0], str(tmp_path / "out"), to=to)
    report = diff(urls[0], str(tmp_path / "out"))
    assert not report.differs and report.lack == "B has only weights"
    assert report.weights == report.same_weights == 2
    assert "not compared" in report.summary() and any("optimizer" in name for name in report.left_out)
    assert report.to_json()["left_out"] == list(report.left_out)
    assert report.summary().startswith("equal weights: 2 tensors")


def tied(head: float | None = None) -> torch.nn.Module:
    """Return a model whose head has this value, or is tied."""
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(3, 2), "head": torch.nn.Linear(2, 3, bias=False)})
    torch.nn.init.constant_(model["embed"].weight, 0.5)
    model["head"].weight = model["embed"].weight if head is None else torch.nn.Parameter(torch.full((3, 2), head))
    return model


@pytest.mark.parametrize("kind", ["full", "local"])
def test_the_same_tied_weights_are_equal_in_every_checkpoint_type_and_untied_ones_are_not(tmp_path, kind):
    state = trained(tied())
    urls = [*runs(tmp_path / "1", state), *runs(tmp_path / "2", state, state_dict_type=kind)]
    assert diff(*urls, exclude=["rng*"]).equal and diff(*reversed(urls), exclude=["rng*"]).equal
    urls = [*runs(tmp_path / "3", optimized(tied(9.0))), *runs(tmp_path / "4", optimized(tied()), state_dict_type=kind)]
    report = diff(*urls)
    assert [item.name for item in report.different] == ["head.weight"] and not report.equal


@pytest.mark.parametrize("truncated", [False, True])
def test_a_checkpoint_that_lacks_a_file_is_not_equal_by_its_digests(tmp_path, truncated):
    (url,) = runs(tmp_path, TrainState(model=torch.nn.Linear(2, 2)))
    other = copied(Path(url), tmp_path / "other" / "step_00000001")
    data = other / "__0_0.distcp"
    os.truncate(data, data.stat().st_size - 1) if truncated else data.unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"__0_0\.distcp"):
        diff(url, str(other))
