"""--vocab-size: another number of rows in embedding and head, in exports and, with optimizer states, in reshards."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import ckptkit
from ckptkit import TrainState, open_checkpoint, verify
from ckptkit.errors import CheckpointMismatchError, UnsupportedFormatError, UsageError
from ckptkit.fsdp import MasterWeightOptimizer
from tests.checkpoint import states
from tests.checkpoint.states import load_all, save
from tests.offline.exports import assert_same, converted, write_model
from tests.offline.folders import refused

ROWS, WIDTH = 301, 24
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def weights(*, tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {
        EMBEDDING: torch.randn(ROWS, WIDTH, generator=generator),
        "model.layers.0.mlp.up_proj.weight": torch.randn(40, WIDTH, generator=generator),
    }
    if not tied:
        state |= {HEAD: torch.randn(ROWS, WIDTH, generator=generator), "lm_head.bias": torch.randn(ROWS)}
    return {name: tensor.to(dtype) for name, tensor in state.items()}


def model(path: Path, state: dict[str, torch.Tensor] | None = None, **config: Any) -> str:
    """Return a Hugging Face directory with these weights."""
    stated = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": ROWS, **config}
    return write_model(path, weights() if state is None else state, stated)


def mean(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean of the rows, summed in fp64 in order."""
    return (functools.reduce(torch.add, tensor.double()) / len(tensor)).to(tensor.dtype)


def padded(tensor: torch.Tensor, rows: int, row: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, row.expand(rows - len(tensor), *tensor.shape[1:])])


def convert(source: str, out: Path, **options: Any) -> Any:
    """Convert to 320 rows unless told otherwise."""
    return ckptkit.convert(source, str(out), **{"vocab_size": 320, **options})


def by_fqn(url: str) -> dict[str, torch.Tensor]:
    found = open_checkpoint(url)
    return {entry.fqn or name: found[name].to_torch() for name, entry in found.catalog.tensors.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 300, 301, 302, 384])
def test_an_export_gets_the_requested_number_of_rows(tmp_path, rows, dtype):
    state = weights(dtype=dtype)
    source = model(tmp_path / "in", state)
    found = converted(source, tmp_path / "out", vocab_size=rows, verify=True)
    for name in (EMBEDDING, HEAD, "lm_head.bias"):
        state[name] = padded(state[name], rows, mean(state[name])) if rows > ROWS else state[name][:rows]
    assert_same(found.tensors, state)
    assert found.config["vocab_size"] == rows
    assert any(note.startswith("vocabulary: ") and EMBEDDING in note for note in found.report.notes)
    cast = converted(source, tmp_path / "cast", vocab_size=rows, dtype="bf16").tensors
    assert_same(cast, {name: tensor.bfloat16() for name, tensor in state.items()})


def test_new_rows_are_the_same_for_any_workers_memory_and_sharding(tmp_path):
    generator = torch.Generator().manual_seed(1)
    state = {EMBEDDING: torch.randn(9001, 257, generator=generator), "model.norm.weight": torch.ones(257)}
    source = model(tmp_path / "in", state, vocab_size=9001)
    convert(source, tmp_path / "dcp", to="dcp", world_size=3, vocab_size=None)
    one = converted(source, tmp_path / "one", vocab_size=9099, workers=1, max_memory="512MB")
    two = converted(tmp_path / "dcp", tmp_path / "two", vocab_size=9099, workers=4, max_memory="16MB")
    assert_same(one.tensors, two.tensors)
    assert torch.equal(one.tensors[EMBEDDING][-1], mean(state[EMBEDDING]))


@pytest.mark.parametrize("to", ["hf", "dcp", "torch", "local"])
def test_every_format_gets_new_rows_and_zeros_on_request(tmp_path, to):
    state = weights()
    convert(model(tmp_path / "in", state), tmp_path / "out", to=to, new_rows="zeros", verify=True)
    made = by_fqn(str(tmp_path / "out"))
    for name in (EMBEDDING, HEAD, "lm_head.bias"):
        assert torch.equal(made[name], padded(state[name], 320, torch.zeros_like(state[name][0])))
    if to == "dcp":
        assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 320


def test_a_tied_head_stays_tied(tmp_path):
    state = weights(tied=True)
    source = model(tmp_path / "in", {**state, HEAD: state[EMBEDDING].clone()}, tie_word_embeddings=True)
    assert HEAD not in converted(source, tmp_path / "hf", vocab_size=310).tensors
    convert(source, tmp_path / "dcp", to="dcp", vocab_size=310)
    both = by_fqn(str(tmp_path / "dcp"))
    assert both[EMBEDDING].shape == (310, WIDTH) and torch.equal(both[EMBEDDING], both[HEAD])


def with_more(name: str, *shape: int) -> dict[str, torch.Tensor]:
    return {**weights(), name: torch.zeros(shape).bfloat16()}


REFUSED: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any], Any, str]] = {
    # The rule: the weights, the config, the options, and the error.
    "another tensor of that many rows": (
        with_more("model.layers.0.odd.weight", ROWS, 3), {}, {}, CheckpointMismatchError, "model.layers.0.odd.weight"),
    "another tensor of that many columns": (
        with_more("final_logits_bias", 1, ROWS), {}, {}, CheckpointMismatchError, "final_logits_bias"),
    "a second embedding": (
        with_more("mtp.embed_tokens.weight", ROWS, WIDTH), {}, {}, CheckpointMismatchError, "mtp.embed_tokens.weight"),
    "a second head": (with_more("mtp.lm_head.weight", ROWS, WIDTH), {}, {}, CheckpointMismatchError, "one output head"),
    "a second head of other rows": (
        with_more("mtp.lm_head.weight", ROWS + 1, WIDTH), {}, {}, CheckpointMismatchError, "one output head"),
    "two sizes in the config": (
        weights(), {"vocab_size": 7, "text_config": {"vocab_size": 8}}, {}, CheckpointMismatchError, "vocab_size 7, 8"),
    "no embedding": ({"a.weight": torch.zeros(4, 4)}, {}, {}, CheckpointMismatchError,
                     "cannot tell which tensor is the token embedding"),
    "an embedding in integers": (
        {**weights(), EMBEDDING: torch.zeros(ROWS, WIDTH, dtype=torch.int8)}, {}, {}, UnsupportedFormatError,
        r"embed_tokens\.weight' is int8"),
    "new rows without a size": (
        weights(), {}, {"vocab_size": None, "new_rows": "zeros"}, UsageError, "--vocab-size adds"),
    "a size of 0": (weights(), {}, {"vocab_size": 0}, UsageError, "vocab_size"),
    "unknown new rows": (weights(), {}, {"new_rows": "ones"}, UsageError, "new_rows"),
}  # fmt: skip


@pytest.mark.parametrize("rule", REFUSED)
def test_an_uncertain_vocabulary_or_an_option_without_effect_is_refused(tmp_path, rule):
    state, config, options, error, said = REFUSED[rule]
    refused(error, said, convert, model(tmp_path / "in", state, **config), tmp_path / "out", **options)


@pytest.mark.parametrize(("name", "content"), [
    ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 250}}, "added_tokens": []}),
    ("tokenizer.json", {"model": {"vocab": [["a", 0.0]] * 251}}),
    ("tokenizer.json", {"model": {}, "added_tokens": [{"id": 400, "content": "y"}, {"id": 299, "content": "x"}]}),
    ("added_tokens.json", {"x": 250}),
    ("vocab.json", {"x": 250}),
    ("generation_config.json", {"eos_token_id": [3, 250]}),
    ("config.json", {"vocab_size": ROWS, "text_config": {"pad_token_id": 250}}),
])  # fmt: skip
def test_rows_of_tokens_in_use_are_not_cut_off(tmp_path, name, content):
    source = model(tmp_path / "in")
    (tmp_path / "in" / name).write_text(json.dumps(content))
    said = rf"--vocab-size 250 would remove .* in {name}"
    refused(UsageError, said, convert, source, tmp_path / "out", vocab_size=250)
    if "299" not in json.dumps(content):
        convert(source, tmp_path / "out", vocab_size=251)


def test_rows_that_megatron_added_beyond_the_vocab_size_of_the_config_are_removed(tmp_path):
    found = converted(model(tmp_path / "in", vocab_size=290), tmp_path / "out", vocab_size=290)
    assert found.tensors[EMBEDDING].shape == (290, WIDTH)
    assert any("the last 11 rows were removed" in note for note in found.report.notes)


@pytest.mark.parametrize("nested", [{}, {"text_config": {"vocab_size": 290}, "vocab_size": 7}])
def test_a_base_may_have_the_requested_number_of_rows(tmp_path, nested):
    state = weights()
    small = {name: tensor[:290] if len(tensor) == ROWS else tensor for name, tensor in state.items()}
    base = model(tmp_path / "base", small, **{"vocab_size": 290, **nested})
    source = tmp_path / "in.pt"
    torch.save(state, source)
    assert_same(converted(source, tmp_path / "out", base=base, vocab_size=290).tensors, small)
    said = "vocab.size 7, 290" if nested else "pass --vocab-size 290"
    refused(CheckpointMismatchError, said, convert, source, tmp_path / "no", base=base, vocab_size=280)


@pytest.mark.parametrize("kind", ["sharded", "local"])
@pytest.mark.parametrize("rows", [30, 48])
@pytest.mark.parametrize(("tied", "masters"), [(False, True), (True, True), (True, False)])
def test_a_reshard_changes_weights_masters_and_moments(tmp_path, kind, rows, tied, masters):
    save(tmp_path / "run", trained(FEW, tied=tied, masters=masters), 2, state_dict_type=kind)
    before, after = (str(tmp_path / name / "step_00000002") for name in ("before", "after"))
    ckptkit.reshard(str(tmp_path / "run"), before, world_size=3, type=kind)
    ckptkit.reshard(before, after, world_size=1, type=kind, vocab_size=rows, verify=True)
    assert verify(after).ok
    _check_state(open_checkpoint(before), open_checkpoint(after), rows)
    load_all(tmp_path / "after", trained(rows, tied=tied, masters=masters))


def _check_state(before: Any, after: Any, rows: int) -> None:
    assert set(before.catalog.tensors) == set(after.catalog.tensors)
    for name, entry in before.catalog.tensors.items():
        old, new = before[name].to_torch(), after[name].to_torch()
        if FEW not in entry.shape:
            assert torch.equal(old, new)
        elif rows < FEW:
            assert torch.equal(old[:rows], new)
        elif entry.state and entry.state != "master":
            assert torch.equal(padded(old, rows, torch.zeros_like(old[0])), new)
        else:
            tied = "optimizer.master.lm_head.weight" not in before.catalog.tensors
            fqn = "embed_tokens.weight" if entry.fqn.startswith("lm_head.weight") and tied else entry.fqn
            master = before.catalog.tensors.get(f"optimizer.master.{fqn}")
            row = mean(old if master is None else before[master.name].to_torch()).to(old.dtype)
            assert torch.equal(padded(old, rows, row), new), name


@pytest.mark.parametrize(
    "key", [f"optimizer.state.{EMBEDDING}.{name}" for name in ("exp_avg", "row_var")] + ["extra.counts"]
)
def test_states_of_other_programs_follow_their_parameter_or_are_refused(tmp_path, key):
    """Their weights are below a module named "model" that the optimizer's names lack."""
    state = torch.ones(ROWS, WIDTH if key.endswith("exp_avg") else 1)
    flat = {f"model.{name}": tensor for name, tensor in weights().items()}
    dcp.save({**flat, key: state}, checkpoint_id=tmp_path / "in", no_dist=True)
    options = {"world_size": 2, "vocab_size": 320}
    if not key.endswith("exp_avg"):  # of unknown rows
        said = key.rpartition(".")[2]
        refused(CheckpointMismatchError, said, ckptkit.reshard, tmp_path / "in", tmp_path / "out", **options)
        return
    ckptkit.reshard(str(tmp_path / "in"), str(tmp_path / "out"), **options)
    made = open_checkpoint(str(tmp_path / "out"))
    assert torch.equal(made[key].to_torch(), padded(state, 320, torch.zeros(WIDTH)))
    assert made[f"model.{EMBEDDING}"].shape == (320, WIDTH)


FEW, NARROW = 37, 6


def trained(rows: int, *, tied: bool, masters: bool) -> TrainState:
    torch.manual_seed(0)
    model: Any = nn.ModuleDict({"embed_tokens": nn.Embedding(rows, NARROW), "norm": nn.LayerNorm(NARROW)})
    model["lm_head"] = nn.Linear(NARROW, rows, bias=not tied)
    if tied:
        model["lm_head"].weight = model["embed_tokens"].weight
    if not masters:
        return states.trained(model, lr=0.05)
    return states.trained(model.bfloat16(), lambda params: MasterWeightOptimizer(torch.optim.AdamW(params, lr=0.05)))
