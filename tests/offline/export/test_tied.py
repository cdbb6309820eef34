"""Tied weights: omitted only if config and bytes agree, never lost."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ckptkit import CheckpointManager, TrainState
from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Digest, SliceArray, TensorEntry, TensorSlice
from ckptkit.errors import CheckpointMismatchError
from ckptkit.fsdp import MasterWeightOptimizer
from ckptkit.offline.export.base import BaseModel, WantedTensor
from ckptkit.offline.export.tied import same_values, tied_pairs
from ckptkit.storage import open_store
from tests.offline.exports import Planned, assert_same, converted, planned, write_model

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
TIED = {"tie_word_embeddings": True}


def export(path: Path, config: dict[str, Any] | None, *, head: Any = 0.0, **options: Any) -> Planned:
    """Export a checkpoint whose head differs from its embedding by a number, or only by its dtype; None for no head."""
    embed = np.arange(12, dtype=np.float32).reshape(4, 3)
    tensors = {EMBED: embed, NORM: np.ones(3, np.float32)}
    if isinstance(head, float):
        tensors[HEAD] = embed.copy()
        tensors[HEAD][3, 2] += head
    elif head is not None:
        tensors[EMBED], tensors[HEAD] = np.zeros((4, 3), np.float32), np.zeros((4, 3), head)
    return planned(write_model(path, tensors, config and {"model_type": "llama", **config}), **options)


TEXT = {"text_config": {**TIED, "hidden_size": 3}}
UNTIED = {"tie_word_embeddings": False}
SIZE = {"vocab_size": 4}


@pytest.mark.parametrize(("config", "head", "options", "kept", "settings"), [
    (TIED, 0.0, {}, False, TIED), (TIED, None, {}, False, TIED), (UNTIED, 0.0, {}, True, UNTIED),
    (None, 0.0, {}, True, {}), (SIZE, 0.0, {}, True, SIZE), (SIZE, 1.0, {}, True, {**SIZE, **UNTIED}),
    (TEXT, 1.0, {"untie": True}, True, {**UNTIED, "text_config": {**UNTIED, "hidden_size": 3}}),
])  # fmt: skip
def test_a_head_is_written_unless_it_is_equal_and_the_config_ties_it(tmp_path, config, head, options, kept, settings):
    found = export(tmp_path, config, head=head, **options)
    assert found.names == ({EMBED, HEAD, NORM} if kept else {EMBED, NORM})
    assert dict(found.export.leftovers).get(HEAD) == (
        None if kept or head is None else f"tied: the same bytes as {EMBED!r}"
    )
    assert config is None or settings.items() <= found.json().items()
    assert config is not UNTIED or found.export.notes == ()


@pytest.mark.parametrize("head", [1.0, np.float16])
def test_a_head_that_differs_in_one_element_or_dtype_is_an_error(tmp_path, head):
    with pytest.raises(CheckpointMismatchError, match=r"'lm_head\.weight' differs.*--untie"):
        export(tmp_path, TIED, head=head)


def test_an_embedding_stored_only_as_the_head_is_exported_under_its_own_name(tmp_path):
    write_model(tmp_path, {HEAD: np.ones((4, 3), np.float32)})
    base = BaseModel("base", TIED, {}, {EMBED: WantedTensor("float32", (4, 3))})
    assert planned(tmp_path, base).names == {EMBED}


TOWER = "model.language_model.embed_tokens.weight"
HALVES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


@pytest.mark.parametrize(("names", "pairs"), [
    ((TOWER, "talker.model.embed_tokens.weight", "talker.lm_head.weight"),  # the embedding of its own tower
     [("talker.lm_head.weight", "talker.model.embed_tokens.weight")]),
    (("shared.weight", *HALVES), [(half, "shared.weight") for half in HALVES]),  # an encoder and a decoder share
    ((*(f"model.{half}" for half in HALVES), "lm_head.out_proj.weight"),
     [("lm_head.out_proj.weight", "model.decoder.embed_tokens.weight")]),
    *((pair[::-1], [pair]) for pair in (
        ("proj_out.weight", "model.decoder.embed_tokens.weight"),
        ("model.encoder.embed_tokens.weight", "model.shared.weight"),
        ("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
        ("lm_head.decoder.bias", "lm_head.bias"),
        ("lm_head.weight", "transformer.w.weight"),
        ("lm_loss.weight", "transformer.word_embedding.weight"),
        ("decoder.weight", "model.embeddings.tok_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    )),
])  # fmt: skip
def test_the_names_that_transformers_ties_are_paired_if_their_shapes_are_equal(names, pairs):
    assert sorted(tied_pairs(dict.fromkeys(names, (8, 4)))) == sorted(pairs)
    assert tied_pairs({name: (8 + i, 4) for i, name in enumerate(names)}) == []


def entry(name: str, slices: list[TensorSlice], shape: tuple[int, ...] = (4, 3)) -> TensorEntry:
    return TensorEntry(name, "float32", shape, SliceArray.of(slices, len(shape)))


def rows(path: str, digest: int | None, algorithm: str = "xxh3_64") -> list[TensorSlice]:
    made = None if digest is None else Digest(algorithm, digest, 0, 48)
    return [TensorSlice(Box((0, 0), (4, 3)), path, 0, 48, digest=made)]


@pytest.mark.parametrize(("first", "second", "equal"), [
    (rows("gone", 7), rows("lost", 7), True),  # the files do not exist: only digests decide
    (rows("gone", 7), rows("lost", 8), False),
    (rows("gone", 7, "crc32"), rows("lost", 8, "crc32"), False),
    (rows("gone", None), rows("gone", None), True),  # the same bytes of the same file
    (rows("a", 7, "crc32"), rows("b", 7, "crc32"), False),  # equal CRC-32s are not enough
])  # fmt: skip
def test_recorded_digests_decide_equality_without_reading_except_equal_crc32s(tmp_path, first, second, equal):
    (tmp_path / "a").write_bytes(bytes(48))
    (tmp_path / "b").write_bytes(bytes(47) + b"\1")
    assert same_values(open_store(str(tmp_path)), entry("a", first), entry("b", second)) is equal


@pytest.mark.parametrize("changed", [False, True])
def test_tensors_sharded_differently_are_compared_element_by_element(tmp_path, changed):
    values = np.arange(5000 * 600, dtype=np.float32).reshape(5000, 600)  # more than one tile
    (tmp_path / "rows").write_bytes(values.tobytes())
    other = values.copy()
    other[4999, 599] += float(changed)
    (tmp_path / "left").write_bytes(np.ascontiguousarray(other[:, :200]).tobytes())
    (tmp_path / "right").write_bytes(np.asfortranarray(other[:, 200:]).tobytes(order="F"))  # stored transposed
    first = entry("a", [TensorSlice(Box((0, 0), (5000, 600)), "rows", 0, values.nbytes)], (5000, 600))
    halves = [
        TensorSlice(Box((0, 0), (5000, 200)), "left", 0, 5000 * 200 * 4),
        TensorSlice(Box((0, 200), (5000, 400)), "right", 0, 5000 * 400 * 4, strides=(1, 5000)),
    ]
    assert same_values(open_store(str(tmp_path)), first, entry("b", halves, (5000, 600))) is not changed


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_the_fp32_master_of_a_tied_weight_is_exported_once(tmp_path, kind):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 0, "vocab_size": 40}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **TIED, num_attention_heads=1)).to(torch.bfloat16)
    optimizer = MasterWeightOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.arange(9)[None]).logits.sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path / "run", state_dict_type=kind) as manager:
        # Only the optimizer's own JSON says which parameters are tied.
        other = {"param_groups": [], "tied": [1]}
        manager.save(1, TrainState(model=model, optimizer=optimizer, extra={"other": other}))
    masters = {name: optimizer.state[parameter]["master"] for name, parameter in model.named_parameters()}
    assert_same(converted(tmp_path / "run", tmp_path / "out", weights="master").tensors, masters)
