"""merge: the bits of the sums, the choice of checkpoints, and refusals."""

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptkit import CheckpointManager, TrainState, convert
from ckptkit.catalog.box import Box
from ckptkit.catalog.targets import Part, Target
from ckptkit.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IntegrityError,
    UsageError,
)
from ckptkit.offline import conversion
from ckptkit.offline.copying.gather import Gatherer
from ckptkit.offline.merge import _PIECE, _sum, merge, weights_of
from tests.cli.commands import ran
from tests.offline.export.test_dequantize import QUANTIZED, export
from tests.offline.exports import assert_same, converted, read_model, write_model
from tests.offline.folders import flip, names, refused
from tests.patches import failing

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "matrix": ((300, 257), torch.bfloat16), "cube": ((40, 7, 3), torch.float32), "scalar": ((), torch.float32),
    "empty": ((0, 4), torch.float32), "long": ((70_001,), torch.float16), "double": ((9,), torch.float64),
    "count": ((2,), torch.int64),
}  # fmt: skip
WEIGHTS = (0.2, 0.3, 0.5)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {n: torch.randn(shape, generator=generator) * 10 ** (seed - 1) for n, (shape, _) in SHAPES.items()}
    return {**{name: made[name].to(dtype) for name, (_, dtype) in SHAPES.items()}, "count": torch.full((2,), seed)}


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    return [write_model(tmp_path / f"m{i}", tensors(i)) for i in range(3)]


def summed(states: Sequence[dict[str, torch.Tensor]], weights: Sequence[float], dtype: torch.dtype) -> dict[str, Any]:
    found = {}
    for name, newest in states[-1].items():
        if not newest.is_floating_point():
            found[name] = newest
            continue
        kind = torch.promote_types(dtype, newest.dtype)
        parts = [state[name].to(kind) for state in states]
        if len(set(weights)) == 1:
            mean = functools.reduce(torch.add, parts) / len(parts)
            wide = (sum(part.double() for part in parts) / len(parts)).to(kind)  # where the sum overflows
            found[name] = torch.where(mean.isfinite(), mean, wide).to(newest.dtype)
            continue
        parts = [part * torch.tensor(weight, dtype=kind) for part, weight in zip(parts, weights, strict=True)]
        found[name] = functools.reduce(torch.add, parts).to(newest.dtype)
    return found


def sum_of_three(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return summed([tensors(i) for i in range(3)], WEIGHTS, dtype)


@pytest.mark.parametrize("options", [{}, {"workers": 1, "max_memory": "16MB"}, {"workers": 5, "max_shard_size": "1GB"}])
def test_a_sum_has_the_bits_of_torch_for_any_workers_and_memory(sources, tmp_path, options):
    found = converted(sources, tmp_path / "out", command=merge, weights=WEIGHTS, verify=True, **options)
    assert found.report.verified == len(SHAPES)
    floats, counts = 3 * sum(n.nbytes for n in tensors(0).values()), tensors(0)["count"].nbytes
    assert found.report.nbytes_read == floats - 2 * counts  # counts: only of the last source
    assert_same(found.tensors, sum_of_three())


def test_sums_are_rounded_and_cast_once(sources, tmp_path):
    merge(sources, str(tmp_path / "wide"), weights=WEIGHTS, sum_dtype="fp64", include=["cube", "double"])
    expected = sum_of_three(torch.float64)
    assert_same(read_model(tmp_path / "wide"), {name: expected[name] for name in ("cube", "double")})
    merge(sources, str(tmp_path / "out"), weights=WEIGHTS, dtype="bf16", include=["cube"])
    assert_same(read_model(tmp_path / "out"), {"cube": sum_of_three()["cube"].bfloat16()})


_LARGE = {  # everything after the first is at an odd element; a long row is one tile of three blocks
    "before": (1,), "one-less": (2 * _PIECE - 1,), "one-more": (2 * _PIECE + 1,), "long-row": (1, 2 * _PIECE + 1),
    "odd-rows": (5, 300_001),
}  # fmt: skip


def any_bits(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of random bits: small and large numbers, subnormals, infinities, NaNs."""
    generator, integer = torch.Generator().manual_seed(seed), INTEGERS[dtype.itemsize]
    least, most = torch.iinfo(integer).min, torch.iinfo(integer).max + 1
    return {
        name: torch.randint(least, most, shape, dtype=integer, generator=generator).view(dtype)
        for name, shape in _LARGE.items()
    }


def bits(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the elements' bits, with the same bits for every NaN, because those of torch depend on the alignment."""
    return {k: x.view(INTEGERS[x.itemsize]).masked_fill(x.isnan(), -1) for k, x in state.items()}


@pytest.mark.parametrize("weights", ["uniform", "minus-sqrt", "ema:0.9", (0.2, 0.3, 0.5)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_of_any_bits_across_blocks_are_those_of_torch(tmp_path, dtype, weights):
    states = [any_bits(seed, dtype) for seed in range(3)]
    sources = [write_model(tmp_path / f"m{i}", state) for i, state in enumerate(states)]
    merge(sources, str(tmp_path / "out"), weights=weights)
    expected = summed(states, weights_of(weights, 3), torch.float32)
    assert_same(bits(read_model(tmp_path / "out")), bits(expected))


@pytest.mark.parametrize("count", [2, 14, 40])
def test_a_tile_of_many_sources_fits_into_a_workers_share_of_the_memory(count):
    shape, share = (8192, 4096), 64 << 20
    parts = [(Part(Box.whole(shape), f"s{i}", Box.whole(shape)),) for i in range(count)]
    terms = [Target("w", "bfloat16", shape, part, "bfloat16") for part in parts]
    total = _sum(terms, (1 / count,) * count, "bfloat16", "float32")
    reader: Any = None
    gatherer = Gatherer(reader, {}, max_bytes=8 * share, small=4 << 20, big=share)
    rows = gatherer.tile_numel(total) // shape[1]
    nbytes = 2 * shape[1] * rows
    taken = nbytes * (count + 1) + total.rows(0, rows).scratch
    assert taken <= share
    assert 2 * nbytes > gatherer.small or 2 * taken > share  # no smaller than necessary


@pytest.mark.parametrize("to", ["hf", "dcp", "torch", "local"])
def test_sources_of_several_formats_world_sizes_and_stores_give_the_same_sum(sources, tmp_path, to):
    convert(sources[1], "memory://merge/dcp", to="dcp", world_size=3, overwrite=True)
    convert(sources[2], str(tmp_path / "weights.pt"), to="torch")
    mixed = [sources[0], "memory://merge/dcp", str(tmp_path / "weights.pt")]
    merge(mixed, str(tmp_path / "out"), to=to, weights=WEIGHTS, world_size=2 if to in ("dcp", "local") else None)  # type: ignore[arg-type]
    assert_same(converted(str(tmp_path / "out"), tmp_path / "flat").tensors, sum_of_three())


@pytest.fixture
def run(tmp_path: Path) -> str:
    url = str(tmp_path / "run")
    with CheckpointManager(url) as manager:
        for step in range(1, 5):
            torch.manual_seed(step)
            manager.save(10 * step, TrainState(model=torch.nn.Linear(4, 3)), metrics={"loss": 1.0})
    return url


def weights_at(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {name: tensor.detach() for name, tensor in torch.nn.Linear(4, 3).state_dict().items()}


@pytest.mark.parametrize(("which", "steps"), [({"last": 2}, (3, 4)), ({"steps": "10:30"}, (1, 2, 3))])
def test_the_checkpoints_of_a_run_are_chosen_by_number_or_by_step(run, tmp_path, which, steps):
    merge([run], str(tmp_path / "out"), **which)
    expected = summed([weights_at(step) for step in steps], [1 / len(steps)] * len(steps), torch.float32)
    assert_same(read_model(tmp_path / "out"), expected)
    merge([run], str(tmp_path / "own"), to="local", **which)
    assert json.loads((tmp_path / "own" / "checkpoint.json").read_text())["metrics"] == {}


def test_a_damaged_source_is_an_error_and_not_skipped(run, tmp_path):
    data = next(Path(run, "step_00000030").glob("*.distcp"))
    flip(data, data.read_bytes().index(weights_at(3)["weight"].numpy().tobytes()))
    refused(IntegrityError, "weight", merge, [run], tmp_path / "out", last=2)
    Path(run, "step_00000030", "checkpoint.json").write_text("{")
    refused(CorruptCheckpointError, "step_00000030", merge, [run], tmp_path / "out", last=2)


@pytest.mark.parametrize(("given", "expected"), [
    ("uniform", (0.25, 0.25, 0.25, 0.25)),
    ("0.1,0.2,0.3,0.4", (0.1, 0.2, 0.3, 0.4)),
    ((1.5, -0.5, 0, 0), (1.5, -0.5, 0, 0)),
    # From Megatron-LM, tools/checkpoint/weighted_merge.py: coefficients of "minus-sqrt" for four checkpoints.
    ("minus-sqrt", (0.5, 0.20710678118654757, 0.1589186225978911, 0.1339745962155614)),
    ("ema:0.5", (0.125, 0.125, 0.25, 0.5)),
])  # fmt: skip
def test_weights_are_given_by_rule_or_by_numbers(given, expected):
    assert weights_of(given, 4) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("given", "said"), [
    ("0.5,0.5", "2 weights are given for 4"),
    ("1", "1 weight is given for 4"),
    ("1,1,1,1", "add up to 4; expected 1. Scaled, they are 0.25,0.25,0.25,0.25"),
    ("nan,0,0,0", "add up to nan"),
    ("1,-1,1,-1", "add up to 0"),
    ("inf,-inf,1,0", "add up to nan"),
    ("mean", "expected uniform, minus-sqrt, ema:DECAY, or numbers"),
    ("ema:1", "between 0 and 1"),
])  # fmt: skip
def test_wrong_weights_are_refused(given, said):
    with pytest.raises(UsageError, match=said):
        weights_of(given, 4)


def _changed(name: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    state = tensors(7)
    state.pop(name, None)
    return state if tensor is None else {**state, name: tensor}


@pytest.mark.parametrize(("state", "said"), [
    (_changed("cube", None), ".*m2 has 1 tensor that .*other does not have: cube"),
    (_changed("more", torch.ones(2)), ".*other has 1 tensor that .*m2 does not have: more"),
    (_changed("cube", torch.ones(40, 7, 4)),
     r"'cube' is float32 \[40, 7, 4\] in .*other, but float32 \[40, 7, 3\] in .*m2\. Skip it"),
    (_changed("cube", torch.ones(40, 7, 3).half()), "'cube' is float16 .* in .*other, but float32 .*to one dtype"),
    (_changed("cube", torch.ones(40, 7, 3).to(torch.float8_e4m3fn)), "'cube' is float8_e4m3fn, which cannot be av"),
])  # fmt: skip
def test_checkpoints_that_differ_are_refused(sources, tmp_path, state, said):
    other = write_model(tmp_path / "other", state)
    refused(CkptkitError, said, merge, [other, sources[2]], tmp_path / "out")


@pytest.mark.parametrize(("place", "which", "error", "said"), [
    ("", {}, UsageError, "one checkpoint cannot be merged"),
    ("", {"steps": "90"}, UsageError, "expected FIRST:LAST"),
    ("", {"last": 2, "steps": "1:2"}, UsageError, "use one of them"),
    ("", {"last": 9}, CheckpointNotFoundError, "has 4 committed checkpoints"),
    ("", {"steps": "90:99"}, CheckpointNotFoundError, "has 0 committed checkpoints in this range. Steps: 10, 20"),
    ("/nope", {"last": 2}, CheckpointNotFoundError, "has no checkpoint 'nope'"),
])  # fmt: skip
def test_a_choice_that_cannot_name_two_checkpoints_is_refused(run, tmp_path, place, which, error, said):
    refused(error, said, merge, [run + place], tmp_path / "out", **which)


def test_a_head_in_only_one_source_is_refused_with_a_command_that_keeps_it(tmp_path):
    tied = {"model.embed_tokens.weight": torch.ones(2, 2), "lm_head.weight": torch.ones(2, 2)}
    own = {**tied, "lm_head.weight": torch.zeros(2, 2)}
    config = {"model_type": "llama", "tie_word_embeddings": True}
    sources = [write_model(tmp_path / "tied", tied, config), write_model(tmp_path / "own", own, config)]
    refused(CheckpointMismatchError, "`convert --untie` keeps both", merge, sources, tmp_path / "out")


@pytest.mark.parametrize("head", [1.0, 0.0], ids=["tied", "own"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_tied_model_without_a_head_is_merged_with_one_that_has_both_names(tmp_path, order, head):
    config = {"model_type": "llama", "tie_word_embeddings": True}
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    both = {embedding: torch.ones(2, 2), output: torch.full((2, 2), head)}
    sources = [write_model(tmp_path / "tied", {embedding: torch.full((2, 2), 3.0)}, config)]
    sources.append(write_model(tmp_path / "both", both))
    if order < 0 and not head:  # the result would be tied
        refused(CheckpointMismatchError, "have: lm_head.weight.*both last", merge, sources[::-1], tmp_path / "out")
        return
    report = merge(sources[::order], str(tmp_path / "out"))
    assert any("lm_head.weight" in note and "config ties" in note for note in report.notes)
    skipped = merge(sources[::order], str(tmp_path / "without"), exclude=[output])  # which only one source has
    assert not any("matches no tensor" in note for note in skipped.notes)
    expected = {embedding: torch.full((2, 2), 2.0), output: torch.full((2, 2), (head + 3) / 2)}
    assert_same(read_model(tmp_path / "out"), expected if order > 0 else {embedding: expected[embedding]})


def test_a_source_is_neither_given_twice_nor_replaced(sources, tmp_path):
    refused(UsageError, "is given twice.*sum of its weights", merge, [*sources, sources[0]], tmp_path / "out")
    said = "is the source: the result would replace it"
    refused(UsageError, said, merge, sources, Path(sources[0]), overwrite=True)


def test_an_interrupted_merge_is_not_continued_with_other_weights(sources, tmp_path, monkeypatch):
    many = [str(shutil.copytree(sources[i % 3], tmp_path / f"copy_{i}")) for i in range(6)]

    def merged(weights: Any) -> str:  # DCP has no file that names the weights
        return " ".join(merge(many, str(tmp_path / "out"), to="dcp", weights=weights).notes)

    weights = (0.5, 0.1, 0.1, 0.1, 0.1, 0.1)
    for then in (weights, "uniform"):
        with monkeypatch.context() as patched:
            patched.setattr(conversion, "check_read_as_seen", failing(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                merged("uniform")
        assert ("continued an interrupted command" in merged(then)) is (then == "uniform")
        convert(str(tmp_path / "out"), str(tmp_path / "flat"), overwrite=True)
        factors = (1 / 6,) * 6 if then == "uniform" else weights
        assert_same(read_model(tmp_path / "flat"), summed([tensors(i % 3) for i in range(6)], factors, torch.float32))
        shutil.rmtree(tmp_path / "out")


def test_the_command_lists_its_sources_and_refuses_what_does_not_fit(sources, tmp_path):
    said = ran("merge", *sources, tmp_path / "out", "--weights", "0.2,0.3,0.5")
    assert "merged from 0.2 * m0, 0.3 * m1, 0.5 * m2" in said
    assert "1 tensor is not floating point and copied from the last source: count" in said
    assert "merged from" in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "out" / "mine.txt").write_text("")
    before = names(tmp_path / "out")
    said = ran("merge", *sources, tmp_path / "out", "--dry-run", code=1)
    assert "exists already" in said and "W1 + " in said and names(tmp_path / "out") == before
    base = write_model(tmp_path / "base", {**tensors(0), "absent": torch.ones(1)})
    refused(CheckpointMismatchError, "missing: absent", merge, sources, tmp_path / "new", base=base)


def quantized_sources(tmp_path: Path, kind: str) -> tuple[list[str], list[dict[str, torch.Tensor]]]:
    """Return three quantized checkpoints, and the fp32 values of each as a conversion gives them."""
    state, settings = QUANTIZED[kind]
    made, exact = [], []
    for i, dims in enumerate(((), (0,), (-1,))):
        turned = {n: t if n.endswith("_shape") or not dims else turned_over(t, dims[0]) for n, t in state.items()}
        norm = torch.randn(70, generator=torch.Generator().manual_seed(i))
        made.append(export(tmp_path / f"q{i}", {**turned, "norm.weight": norm}, settings))
        exact.append(converted(made[-1], tmp_path / f"x{i}", dtype="fp32").tensors)
    return made, exact


def turned_over(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.itemsize]).flip(dim if tensor.ndim else ()).view(tensor.dtype)


@pytest.mark.parametrize(
    ("dtype", "wanted"), [("keep", torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)]
)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_are_dequantized_summed_and_rounded_once(tmp_path, kind, dtype, wanted):
    made, exact = quantized_sources(tmp_path, kind)
    report = merge(made, str(tmp_path / "out"), weights=WEIGHTS, dtype=dtype, verify=True, max_memory="16MB")
    expected = summed(exact, WEIGHTS, torch.float32)
    expected = {n: t.to(wanted) if dtype != "keep" or n != "norm.weight" else t for n, t in expected.items()}
    assert_same(bits(read_model(tmp_path / "out")), bits(expected))
    assert "quantized weights were dequantized to fp32, summed, and rounded once" in report.notes
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_quantized_checkpoint_merges_with_one_that_is_not_but_not_without_its_scale(tmp_path):
    made, exact = quantized_sources(tmp_path, "fp8")
    plain = {**exact[2], "a.weight": exact[2]["a.weight"].bfloat16()}
    made[2], exact[2] = write_model(tmp_path / "plain", plain), {n: t.float() for n, t in plain.items()}
    for turn in (1, -1):
        out = tmp_path / f"out{turn}"
        merge(made[::turn], str(out), weights=WEIGHTS)
        expected = summed(exact[::turn], WEIGHTS, torch.float32)
        expected["a.weight"] = expected["a.weight"].bfloat16()
        assert_same(bits(read_model(out)), bits(expected))
    state = read_model(made[1])
    del state["a.weight_scale_inv"]
    write_model(Path(made[1]), state)
    refused(CheckpointMismatchError, rf"^{made[1]}: .*a\.weight", merge, made, tmp_path / "out")


def adapter(folder: Path, **config: Any) -> str:
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{factor}.weight" for factor in "AB"]
    folder.mkdir()
    save_file({names[0]: torch.ones(2, 8), names[1]: torch.ones(8, 2)}, folder / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return str(folder)


def test_adapters_are_merged_if_they_scale_their_factors_equally(tmp_path):
    modules = ["q_proj", "v_proj"]
    first, second = adapter(tmp_path / "a", target_modules=modules), adapter(tmp_path / "b", lora_dropout=0.5)
    notes = merge([first, second], tmp_path / "out").notes
    assert any("lora_A and lora_B are averaged separately" in note for note in notes)
    said = f"adapter_config.json is from the last source; {first} has another "
    assert any(f"{said}lora_dropout" in note for note in notes)
    newer = adapter(  # of a newer PEFT
        tmp_path / "newer", use_dora=False, rank_pattern={}, target_modules=modules[::-1], peft_version="9"
    )
    assert not any("another" in note for note in merge([first, newer], tmp_path / "same").notes)
    with pytest.raises(CheckpointMismatchError, match=r"different lora_alpha, use_rslora, so.*--merge-adapter"):
        merge([first, adapter(tmp_path / "c", lora_alpha=8, use_rslora=True)], tmp_path / "refused")
