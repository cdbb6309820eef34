"""Tied weights: omitted only if config and bytes agree, never lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Digest, SliceArray, TensorEntry, TensorSlice
from ckptkit.errors import CheckpointMismatchError
from ckptkit.formats.hf import safetensors
from ckptkit.offline.export.base import WantedTensor
from ckptkit.offline.export.hf import ExportOptions, HFExport, plan_export
from ckptkit.offline.export.tied import same_values, tied_pairs
from ckptkit.storage.open import open_store
from tests.offline.exports import small_files

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def export(path: Path, config: dict[str, Any] | None, *, head: float | None = 0.0, **options: Any) -> HFExport:
    """Export a checkpoint whose head differs from its embedding by `head`; None for no head."""
    path.mkdir(exist_ok=True)
    embed = np.arange(12, dtype=np.float32).reshape(4, 3)
    tensors = {EMBED: embed, "model.norm.weight": np.ones(3, np.float32)}
    if head is not None:
        tensors[HEAD] = embed.copy()
        tensors[HEAD][3, 2] += head
    save_file(tensors, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    store = open_store(str(path))
    return plan_export(store, safetensors.open_catalog(store), options=ExportOptions(**options))


def names(found: HFExport) -> set[str]:
    return {tensor.name for tensor in found.tensors}


def config_of(found: HFExport) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(small_files(found)["config.json"])
    return config


def test_an_equal_head_of_a_tied_config_is_written_once(tmp_path: Path) -> None:
    found = export(tmp_path, {"tie_word_embeddings": True})
    assert names(found) == {EMBED, "model.norm.weight"}
    assert found.leftovers == ((HEAD, f"tied: the same bytes as {EMBED!r}"),)
    assert config_of(found)["tie_word_embeddings"] is True


def test_a_head_that_differs_in_one_element_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match=r"'lm_head\.weight' differs.*--untie"):
        export(tmp_path, {"tie_word_embeddings": True}, head=1.0)


def test_untie_keeps_both_and_corrects_the_config(tmp_path: Path) -> None:
    found = export(tmp_path, {"tie_word_embeddings": True}, head=1.0, untie=True)
    assert names(found) == {EMBED, HEAD, "model.norm.weight"}
    assert config_of(found)["tie_word_embeddings"] is False


def test_untie_reaches_the_config_of_the_text_model(tmp_path: Path) -> None:
    tied = {"text_config": {"tie_word_embeddings": True, "hidden_size": 3}}
    config = config_of(export(tmp_path, tied, head=1.0, untie=True))
    assert config["tie_word_embeddings"] is False
    assert config["text_config"] == {"tie_word_embeddings": False, "hidden_size": 3}


def test_an_equal_head_of_an_untied_config_stays(tmp_path: Path) -> None:
    found = export(tmp_path, {"tie_word_embeddings": False})
    assert HEAD in names(found)
    assert found.notes == ()


def test_a_missing_head_under_a_tied_config_is_fine(tmp_path: Path) -> None:
    assert names(export(tmp_path, {"tie_word_embeddings": True}, head=None)) == {EMBED, "model.norm.weight"}


def test_without_a_tie_setting_head_and_embedding_are_both_kept(tmp_path: Path) -> None:
    assert HEAD in names(export(tmp_path, {}))


def test_without_a_tie_setting_a_different_head_sets_the_config(tmp_path: Path) -> None:
    found = export(tmp_path, {}, head=1.0)
    assert HEAD in names(found)
    assert config_of(found)["tie_word_embeddings"] is False


def test_without_a_config_nothing_is_left_out(tmp_path: Path) -> None:
    assert HEAD in names(export(tmp_path, None))


def test_heads_of_another_dtype_are_not_equal(tmp_path: Path) -> None:
    embed = np.zeros((4, 3), np.float32)
    save_file({EMBED: embed, HEAD: embed.astype(np.float16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    store = open_store(str(tmp_path))
    with pytest.raises(CheckpointMismatchError, match="differs"):
        plan_export(store, safetensors.open_catalog(store))


def test_a_head_is_paired_with_the_embedding_of_its_own_tower() -> None:
    shapes = {
        "model.language_model.embed_tokens.weight": (8, 4),
        "talker.model.embed_tokens.weight": (8, 4),
        "talker.lm_head.weight": (8, 4),
    }
    assert tied_pairs(shapes) == [("talker.lm_head.weight", "talker.model.embed_tokens.weight")]


def test_embeddings_of_another_shape_are_not_paired() -> None:
    assert tied_pairs({HEAD: (9, 4), EMBED: (8, 4)}) == []


def test_the_embedding_of_an_encoder_decoder_is_shared() -> None:
    shapes = dict.fromkeys(("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), (8, 4))
    assert set(tied_pairs(shapes)) == {
        ("encoder.embed_tokens.weight", "shared.weight"),
        ("decoder.embed_tokens.weight", "shared.weight"),
    }


def test_a_head_is_paired_with_the_embedding_of_the_decoder() -> None:
    halves = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    shapes = dict.fromkeys((*halves, "lm_head.out_proj.weight"), (8, 4))
    assert tied_pairs(shapes) == [("lm_head.out_proj.weight", halves[1])]


@pytest.mark.parametrize(
    ("second", "first"),
    [
        ("proj_out.weight", "model.decoder.embed_tokens.weight"),
        ("model.encoder.embed_tokens.weight", "model.shared.weight"),
        ("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
        ("lm_head.decoder.bias", "lm_head.bias"),
        ("lm_head.weight", "transformer.w.weight"),
        ("lm_loss.weight", "transformer.word_embedding.weight"),
        ("decoder.weight", "model.embeddings.tok_embeddings.weight"),
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ],
)
def test_names_that_transformers_ties_are_paired(second: str, first: str) -> None:
    assert tied_pairs({first: (8,), second: (8,)}) == [(second, first)]


def entry(name: str, slices: list[TensorSlice], shape: tuple[int, ...] = (4, 3)) -> TensorEntry:
    return TensorEntry(name, "float32", shape, SliceArray.of(slices, len(shape)))


def rows(path: str, digest: int | None, algorithm: str = "xxh3_64") -> list[TensorSlice]:
    made = None if digest is None else Digest(algorithm, digest, 0, 48)
    return [TensorSlice(Box((0, 0), (4, 3)), path, 0, 48, digest=made)]


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (rows("gone", 7), rows("lost", 7), True),  # the files do not exist: only digests decide
        (rows("gone", 7), rows("lost", 8), False),
        (rows("gone", 7, "crc32"), rows("lost", 8, "crc32"), False),
        (rows("gone", None), rows("gone", None), True),  # the same bytes of the same file
    ],
)
def test_recorded_digests_decide_equality_without_reading(
    tmp_path: Path, first: list[TensorSlice], second: list[TensorSlice], equal: bool
) -> None:
    assert same_values(open_store(str(tmp_path)), entry("a", first), entry("b", second)) is equal


def test_equal_crc32_is_not_enough_and_bytes_are_compared(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(48))
    (tmp_path / "b").write_bytes(bytes(47) + b"\1")
    store = open_store(str(tmp_path))
    assert not same_values(store, entry("a", rows("a", 7, "crc32")), entry("b", rows("b", 7, "crc32")))


@pytest.mark.parametrize("changed", [False, True])
def test_tensors_sharded_differently_are_compared_element_by_element(tmp_path: Path, changed: bool) -> None:
    values = np.arange(5000 * 600, dtype=np.float32).reshape(5000, 600)  # more than one tile
    (tmp_path / "rows").write_bytes(values.tobytes())
    other = values.copy()
    other[4999, 599] += float(changed)
    (tmp_path / "left").write_bytes(np.ascontiguousarray(other[:, :200]).tobytes())
    (tmp_path / "right").write_bytes(np.asfortranarray(other[:, 200:]).tobytes(order="F"))  # stored transposed
    first = entry("a", [TensorSlice(Box((0, 0), (5000, 600)), "rows", 0, values.nbytes)], (5000, 600))
    second = entry(
        "b",
        [
            TensorSlice(Box((0, 0), (5000, 200)), "left", 0, 5000 * 200 * 4),
            TensorSlice(Box((0, 200), (5000, 400)), "right", 0, 5000 * 400 * 4, strides=(1, 5000)),
        ],
        (5000, 600),
    )
    assert same_values(open_store(str(tmp_path)), first, second) is not changed


def test_an_embedding_stored_only_as_the_head_is_exported_under_its_own_name(tmp_path: Path) -> None:
    from ckptkit.offline.export.base import BaseModel

    save_file({HEAD: np.ones((4, 3), np.float32)}, tmp_path / "model.safetensors")
    store = open_store(str(tmp_path))
    base = BaseModel("base", {"tie_word_embeddings": True}, {}, {EMBED: WantedTensor("float32", (4, 3))})
    found = plan_export(store, safetensors.open_catalog(store), base=base)
    assert names(found) == {EMBED}
