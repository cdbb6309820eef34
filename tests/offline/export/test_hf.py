"""Hugging Face exports: names and bits, side files, config, model card, and refusals."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptkit import TrainState
from ckptkit.catalog.entry import Catalog, CatalogInfo, Role
from ckptkit.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
    UsageError,
)
from ckptkit.formats.dcp import catalog as dcp
from ckptkit.formats.hf import safetensors
from ckptkit.keymaps.builtin import builtin_map
from ckptkit.keymaps.keymap import NameMap
from ckptkit.keymaps.patterns import NamePattern
from ckptkit.keymaps.rules import Cast, Drop
from ckptkit.offline.export.base import WantedTensor, open_base
from ckptkit.offline.export.hf import HFExport, export_tensors, plan_export
from ckptkit.offline.export.model_card import CardFacts, model_card, source_fingerprint
from ckptkit.offline.export.weights import ExportOptions
from ckptkit.storage import open_store
from tests.checkpoint.states import save
from tests.formats.damages import lay
from tests.offline.exports import Planned, assert_same, planned, read_model, write_model
from tests.offline.folders import hub_snapshot

Names = tuple[str, ...]


def ones(*names: str, dtype: Any = np.float32) -> dict[str, Any]:
    return {name: np.ones(2, dtype) for name in names}


def export(
    place: Path, source: Mapping[str, Any] | Names, base: Mapping[str, Any] | Names | None = None, **options: Any
) -> Planned:
    """Write a source, and a base if there is one, each as tensors or as names of some; plan the export."""
    made = [ones(*tensors) if isinstance(tensors, tuple) else tensors for tensors in (source, base or ())]
    write_model(place / "src", made[0])
    if base is not None:
        write_model(place / "base", made[1])
    return planned(place / "src", place / "base" if (place / "base").exists() else None, **options)


def test_experts_without_a_base_stay_stacked_and_a_note_says_so(zoo):
    found = planned(zoo / "accelerate_fsdp2_sharded_qwen3moe_w2" / "checkpoint" / "pytorch_model_fsdp_0")
    assert any("stacked experts were kept" in note for note in found.export.notes)


@pytest.mark.parametrize(("source", "base", "options", "names", "leftovers"), [
    (("_orig_mod.a._checkpoint_wrapped_module.w", "_orig_mod.b"), None, {}, {"a.w", "b"}, {}),  # of wrappers
    # A prefix is removed automatically only if the base proves it.
    (("net.model.a", "net.lm_head.w"), ("model.a", "lm_head.w"), {}, {"model.a", "lm_head.w"}, {}),
    (("net.model.a", "net.lm_head.w"), None, {}, {"net.model.a", "net.lm_head.w"}, {}),
    (("net.a", "loss.w"), None, {"strip_prefix": "net"}, {"a"}, {"loss.w": "lacks the prefix 'net'"}),
    (("a.x", "a.y", "b.x"), None, {"include": ("a.*",), "exclude": ("*.y",)}, {"a.x"},
     {"a.y": "excluded", "b.x": "not included"}),
    (("a", "layers.0.self_attn.rotary_emb.inv_freq"), ("a",), {}, {"a"},
     {"layers.0.self_attn.rotary_emb.inv_freq": "a buffer that is computed on load and not stored in the base"}),
    (("layer.w", "layer._extra_state"), None, {}, {"layer.w"},
     {"layer._extra_state": "extra state of a module (get_extra_state), not a weight"}),
])  # fmt: skip
def test_names_are_cleaned_and_what_is_left_out_is_reported(tmp_path, source, base, options, names, leftovers):
    found = export(tmp_path, source, base, **options)
    assert found.names == names
    assert dict(found.export.leftovers) == leftovers
    if base is None and not options:
        told, dropped, _ = export_tensors(found.store, found.catalog, options=ExportOptions())
        assert (set(told), set(dropped)) == (names, set(leftovers))


def _models(*models: str) -> Names:
    return tuple(f"{model}.{name}" for model in models for name in ("model.a", "lm_head.w"))


_HUB = ("model.a", "lm_head.w")


@pytest.mark.parametrize(("others", "options", "chosen"), [
    ((*"abcdefgh", "model", "ema.module"), {}, "model"),  # the main model, and not another that fits as well
    (("actor", "ref"), {"include": ("actor.*",)}, "actor"),
    (("actor", "ref"), {"exclude": ("actor.*",)}, "ref"),
    (("model", "ref"), {"include": ("ref.*",)}, "ref"),
])  # fmt: skip
def test_if_several_models_match_the_base_the_main_or_selected_one_gets_its_names(tmp_path, others, options, chosen):
    found = export(tmp_path, _models(*others), _HUB, **options)
    sources = {tensor.name: tensor.sources for tensor in found.export.tensors if tensor.name in _HUB}
    assert sources == {name: (f"{chosen}.{name}",) for name in _HUB}
    assert any(f"the prefix '{chosen}.' was stripped" in note for note in found.export.notes)


def test_the_model_with_most_of_the_bases_names_gets_them(tmp_path):
    layers = tuple(f"l.{i}" for i in range(39))
    parts = {"b": layers, "a": (*layers, "head"), "c": layers}
    found = export(tmp_path, tuple(f"{m}.{n}" for m, names in parts.items() for n in names), parts["a"])
    sources = {tensor.name: tensor.sources for tensor in found.export.tensors}
    assert {name: sources[name] for name in parts["a"]} == {name: (f"a.{name}",) for name in parts["a"]}


def test_several_models_that_match_the_base_equally_are_refused_with_the_options_that_choose(tmp_path):
    with pytest.raises(UsageError, match=r"'actor\.', 'ref\.'.*--strip-prefix actor or --include 'actor\.\*'"):
        export(tmp_path, _models("actor", "ref"), _HUB)
    assert export(tmp_path, _models("actor", "ref"), _HUB, strip_prefix="ref").names == {*_HUB}


@pytest.mark.parametrize(("others", "options"), [
    ({}, {}),
    ({"critic": torch.nn.Linear(2, 2)}, {"include": ("actor.*",)}),
    ({"ema": torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))}, {"weights": "ema"}),
], ids=["alone", "included", "averaged"])  # fmt: skip
def test_a_note_says_how_to_remove_a_models_name_from_all_names(tmp_path, others, options):
    save(tmp_path / "run", TrainState(model={"actor": torch.nn.Linear(2, 2), **others}, rng=False))
    (note,) = (note for note in planned(tmp_path / "run", **options).export.notes if "'actor.'" in note)
    assert "--strip-prefix actor removes it" in note
    stripped = planned(tmp_path / "run", strip_prefix="actor", **options).export
    assert not any("'actor.'" in note for note in stripped.notes)
    assert {tensor.name for tensor in stripped.tensors} == {"weight", "bias"}


def test_one_of_several_models_must_be_chosen_without_a_base(tmp_path):
    def refused(source: Path) -> str:
        with pytest.raises(UsageError, match="there are 2 models") as caught:
            planned(source)
        return str(caught.value)

    def noted(source: Path, **options: Any) -> list[str]:
        return [note for note in planned(source, **options).export.notes if "2 models" in note]

    save(tmp_path / "run", TrainState(model={"actor": torch.nn.Linear(2, 2), "ref": torch.nn.Linear(2, 2)}, rng=False))
    torch.save({name: {"a.w": torch.ones(2), "cls": torch.ones(2)} for name in ("gan", "critic")}, tmp_path / "two.pt")
    (tmp_path / "state").mkdir()
    for name in ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"):
        torch.save({"a.w": torch.ones(2)}, tmp_path / "state" / name)
    assert "'actor.', 'ref.'" in refused(tmp_path / "run") and "--strip-prefix actor`" in refused(tmp_path / "run")
    assert "'gan.', 'critic.'" in refused(tmp_path / "two.pt")
    assert "no model's name, 'model_1.'" in refused(tmp_path / "state")
    assert "--exclude 'model_1.*'" in refused(tmp_path / "state")
    assert not noted(tmp_path / "run", strip_prefix="actor")
    assert not noted(tmp_path / "state", exclude=("model_1.*",))
    assert noted(tmp_path / "run", include=("*",))
    torch.save({"model": {"layer.a.w": torch.ones(2), "head.w": torch.ones(2)}}, tmp_path / "one.pt")
    assert not noted(tmp_path / "one.pt")


def test_a_glob_that_matches_nothing_is_noted(tmp_path):
    notes = export(tmp_path, ("a.x", "a.y", "b.x"), include=("a.*", "c.*"), exclude=("a.z",)).export.notes
    assert {"--include 'c.*' matches no tensor", "--exclude 'a.z' matches no tensor"} <= {*notes}
    assert not any("'a.*'" in note for note in notes)


def test_only_tensors_that_globs_exclude_may_be_missing(tmp_path):
    with pytest.raises(CheckpointMismatchError, match="missing: c") as caught:
        export(tmp_path, ("a", "b"), ("a", "b", "c"), exclude=("b",))
    assert "missing: b" not in str(caught.value)
    assert export(tmp_path, ("a", "b"), exclude=("b", "c")).names == {"a"}


def test_a_key_map_that_drops_everything_is_an_error(tmp_path):
    with pytest.raises(UsageError, match=r"nothing to export: the key map mine drops all tensors \(1\)"):
        export(tmp_path, ("a",), key_map=NameMap("mine", (Drop(NamePattern("{x:*}")),)))


def test_an_explicit_key_map_is_applied_and_its_unused_rules_are_named(tmp_path):
    experts = {"l.mlp.experts.down_proj": np.arange(8.0).reshape(2, 2, 2)}
    found = export(tmp_path, experts, key_map=builtin_map("hf5-experts"))
    assert found.names == {f"l.mlp.experts.{i}.down_proj.weight" for i in range(2)}
    assert sum("matched nothing" in note for note in found.export.notes) == 2


@pytest.mark.parametrize(("dtype", "written"), [("keep", "float16"), ("fp16", "float16"), ("bf16", "bfloat16")])
def test_a_dtype_that_overrides_a_cast_of_the_key_map_is_noted(tmp_path, dtype, written):
    cast = NameMap("mine", (Cast(NamePattern("norm"), "float16"),))
    made = export(tmp_path, ("norm", "w"), dtype=dtype, key_map=cast).export
    assert next(t.dtype for t in made.tensors if t.name == "norm") == written
    noted = [note for note in made.notes if "overrides the casts of key map mine: norm" in note]
    assert len(noted) == (dtype == "bf16")


def test_all_differences_from_the_base_are_listed_at_once(tmp_path):
    source = {**ones("a", "extra"), "b": np.ones((2, 3), np.float32)}
    with pytest.raises(CheckpointMismatchError) as caught:
        export(tmp_path, source, {**ones("a", "gone"), "b": np.ones((3, 2), np.float32)})
    faults = {"missing: gone", "unexpected: extra [2]", "shape: b is [2, 3], but [3, 2] in the base"}
    assert all(said in str(caught.value) for said in faults)
    found = export(tmp_path, source, strict=False).export
    assert (found.missing, {*found.faults}) == (("gone",), faults)


@pytest.mark.parametrize("config", [{"num_hidden_layers": 3}, {"text_config": {"num_hidden_layers": 3}}])
def test_layers_that_the_config_counts_and_the_checkpoint_lacks_are_missing(tmp_path, config):
    source, base = ("model.layers.0.a.w", "model.layers.1.a.w", "model.norm.w"), tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    with pytest.raises(CheckpointMismatchError, match="missing: layers 2: the config has num_hidden_layers 3"):
        export(tmp_path, source)
    assert export(tmp_path, source, exclude=("*.norm.*",)).names
    (base / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    assert len(export(tmp_path, source).names) == 3


def test_a_missing_head_is_accepted_only_if_the_model_is_tied_even_if_the_base_stores_it(tmp_path):
    embed = {"model.embed_tokens.weight": np.ones((4, 2), np.float32)}
    both = {**embed, "lm_head.weight": embed["model.embed_tokens.weight"]}
    write_model(tmp_path / "base", both, {"tie_word_embeddings": True})
    assert export(tmp_path, embed).names == {"model.embed_tokens.weight"}
    write_model(tmp_path / "base", both, {"tie_word_embeddings": False})
    with pytest.raises(CheckpointMismatchError, match=r"missing: lm_head\.weight"):
        export(tmp_path, embed)


def test_tensors_that_the_base_lacks_are_kept_and_named(tmp_path):
    found = export(tmp_path, {**ones("a"), "probe": np.ones(3, np.int64)}, ("a",))
    assert found.names == {"a", "probe"} and found.export.checked.endswith("(except 1 additional tensor)")
    assert any("kept, although the base has no such tensors: probe." in note for note in found.export.notes)


def test_complex_tensors_are_refused_by_name(zoo):
    with pytest.raises(UnsupportedFormatError, match=r"c64 \(complex64\)\. Skip them with --exclude"):
        planned(zoo / "dcp_dtypes_w2" / "ckpt")
    found = planned(zoo / "dcp_dtypes_w2" / "ckpt", exclude=("c64",))
    assert_same(found.tensors, read_model(zoo / "dcp_dtypes_w2" / "EXPECTED.safetensors"))


def with_masters(path: Path, names: Mapping[str, str], **options: Any) -> HFExport:
    """Plan the export of an fp16 model with masters; `names`: FQN by key of the master, "" for another name of `a`."""
    model = {"a": np.ones(2, np.float16), "b": np.ones(2, np.float16), "n": np.ones(2, np.int32)}
    write_model(path, {**model, **{f"m.{key}": np.full(2, 3, np.float32) for key in names if key != "alias"}})
    store = open_store(str(path))
    tensors = dict(safetensors.open_catalog(store).tensors)
    for key, fqn in names.items():
        if key == "alias":
            tensors[key] = replace(tensors["a"], name=key, fqn=key)
        else:
            tensors[f"m.{key}"] = replace(tensors[f"m.{key}"], role=Role.MASTER, fqn=fqn)
    return plan_export(store, Catalog(tensors, info=CatalogInfo("hf")), options=ExportOptions(**options))


def test_masters_are_exported_on_request(tmp_path):
    export = with_masters(tmp_path, {"0": "a", "1": "b", "alias": "a"}, weights="master")
    assert {t.name: (t.dtype, t.sources) for t in export.tensors} == {
        "a": ("float32", ("m.0",)), "alias": ("float32", ("m.0",)),  # another name of a tied parameter
        "b": ("float32", ("m.1",)), "n": ("int32", ("n",)),
    }  # fmt: skip
    assert "1 tensor has no fp32 master (buffers, frozen parameters): the model's values are used" in export.notes


@pytest.mark.parametrize(("option", "kept"), [("exclude", {"b", "n", "alias"}), ("include", {"a"})])
def test_patterns_do_not_match_the_key_of_a_tied_weights_master(tmp_path, option, kept):
    export = with_masters(tmp_path, {"0": "a", "1": "b", "alias": "a"}, weights="master", **{option: ("*.0",)})
    assert {tensor.name for tensor in export.tensors} == kept


@pytest.mark.parametrize(("dtype", "source"), [("fp32", "m.0"), ("bf16", "m.0"), ("fp16", "a"), ("keep", "a")])
def test_a_cast_starts_from_the_masters_and_not_from_rounded_weights(tmp_path, dtype, source):
    for options, wanted in (({}, source), ({"weights": "model"}, "a")):
        export = with_masters(tmp_path, {"0": "a", "1": "b"}, dtype=dtype, **options)
        assert {t.name: t.sources for t in export.tensors}["a"] == (wanted,)
    assert dict(export.leftovers)["m.0"] == "master state, not part of the model weights"


def test_masters_that_are_missing_or_of_another_model_are_refused_with_the_reason(tmp_path):
    with pytest.raises(CheckpointMismatchError, match="no model weight: elsewhere"):
        with_masters(tmp_path / "other", {"0": "a", "1": "elsewhere"}, weights="master")
    with pytest.raises(CheckpointNotFoundError, match="no fp32 masters: 1 model tensor"):
        export(tmp_path, ("a",), weights="master")
    store, said = open_store(str(tmp_path / "src")), "whose the masters are is not recorded"
    info = CatalogInfo("lightrft", notes=(f"the optimizer was skipped: {said}",))
    catalog = Catalog(safetensors.open_catalog(store).tensors, info=info)
    with pytest.raises(CheckpointNotFoundError, match=said):
        plan_export(store, catalog, options=ExportOptions(weights="master"))


def test_config_and_dtype_of_the_base_are_used_or_noted_and_unrelated_files_are_not_copied(tmp_path):
    write_model(tmp_path / "src", {}, {"model_type": "another"})
    write_model(tmp_path / "base", ones("a", dtype=np.float16), {"model_type": "llama", "dtype": "float16"})
    for stray in ("model.gguf", "pytorch_model.bin", "tokenizer.bin", "tokenizer.safetensors.index.json", "notes.txt",
                  "README.md", "train.py", ".env", "tokenizer.pkl"):  # fmt: skip
        (tmp_path / "base" / stray).write_text("stray")
    found = export(tmp_path, ("a",))
    assert sorted(found.files) == ["README.md", "config.json"] and b"stray" not in found.files["README.md"]
    assert found.json() == {"model_type": "llama", "dtype": "float32"} and found.export.tensors[0].dtype == "float32"
    assert any("1 tensor is float32 in the checkpoint and float16 in the base" in n for n in found.export.notes)


def test_a_repo_id_is_resolved_from_the_cache_without_a_network(tmp_path, monkeypatch):
    """The weights of the model were not downloaded."""
    import huggingface_hub.constants as constants

    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    contents = {"config.json": {"model_type": "llama"}, "tokenizer.json": {}, "model.safetensors.index.json": index}
    lay(tmp_path / "release", {name: json.dumps(content) for name, content in contents.items()})
    hub_snapshot(tmp_path / "release", tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    base = open_base("org/tiny")
    assert (base.repo, base.wanted, base.config) == ("org/tiny", {"a": WantedTensor()}, {"model_type": "llama"})
    files = planned(write_model(tmp_path / "src", ones("a")), base).files
    assert files["tokenizer.json"] == b"{}" and b'- "org/tiny"' in files["README.md"]
    for name, said in (("nobody/none", "cannot be read as a Hub repo"), ("./none", "is not a directory")):
        with pytest.raises(CheckpointNotFoundError, match=said):
            open_base(name)


@pytest.mark.parametrize(("names", "config", "written"), [
    (("a",),
     {"dtype": "float32", "text_config": {"dtype": "float32", "hidden_size": 2}, "vision_config": {"depth": 1}},
     {"dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "hidden_size": 2}, "vision_config": {"depth": 1}}),
    (("a",), {"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
    (("a",), {"architectures": ["FSDPLlamaForCausalLM"]}, {"architectures": ["LlamaForCausalLM"]}),
    (("a.weight",), {"quantization_config": {"quant_method": "fp8"}}, {}),
])  # fmt: skip
def test_the_config_describes_the_weights(tmp_path, names, config, written):
    found = planned(write_model(tmp_path, ones(*names), config), dtype="bf16").json()
    assert {key: value for key, value in found.items() if key in config} == written


def test_a_diffusers_config_changes_the_file_names(tmp_path):
    write_model(tmp_path, ones("a"), {"_class_name": "UNet2DModel", "_diffusers_version": "0.42.1"})
    assert any("diffusion_pytorch_model*.safetensors" in note for note in planned(tmp_path).export.notes)


def test_an_error_names_a_broken_config(tmp_path):
    base = write_model(tmp_path, ones("a"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match=r"config\.json is not JSON"):
        open_base(base)


def card(**facts: Any) -> str:
    plain: dict[str, Any] = {
        "source": "/runs/ckpt", "kind": "model", "parameters": 4, "nbytes": 8, "dtypes": {"bfloat16": 4},
        "weights": "model", "key_map": "hf", "base_repo": None, "notes": [],
    }  # fmt: skip
    return model_card(Catalog({}, info=CatalogInfo("dcp", step=7)), CardFacts(**{**plain, **facts}))


def test_the_card_shows_no_credentials_markdown_or_invalid_repo():
    text = card(source="s3://user:hunter2@bucket/run/step_7?X-Amz-Signature=abcd#frag")
    assert "step\\_7" in text
    assert not any(secret in text for secret in ("hunter2", "abcd", "bucket", "user", "frag"))
    text = card(source="/x/a|b<script>\n# h", notes=["<img src=x>\n---\n[a](b)"])
    assert "<" not in text.split("---", 2)[2].replace("&lt;", "").replace("<!-- ckptkit: xxh3_64", "")
    assert "\n# h" not in text and "a\\|b" in text and "\\[a\\]\\(b\\)" in text
    assert "base_model" not in card(base_repo="a/b\nlicense: mit")
    assert 'base_model:\n- "org/name"' in card(base_repo="org/name")


def test_the_fingerprint_changes_with_a_digest(zoo):
    catalog = dcp.open_catalog(open_store(str(zoo / "dcp_hsdp_2x2" / "ckpt")))
    name, entry = next(iter(catalog.tensors.items()))
    before = source_fingerprint(catalog)
    assert before is not None and entry.slices.digests is not None
    entry.slices.digests[:] ^= np.uint64(1)
    assert source_fingerprint(replace(catalog, tensors={**catalog.tensors, name: entry})) != before
