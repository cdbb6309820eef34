"""Hugging Face exports: names and bits, side files, config, model card, and refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckptkit.catalog.entry import Catalog, CatalogInfo, Role, TensorEntry
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
from ckptkit.offline.export.base import BaseModel, WantedTensor, open_base
from ckptkit.offline.export.check import check_export
from ckptkit.offline.export.hf import ExportOptions, HFExport, export_tensors, plan_export
from ckptkit.offline.export.model_card import CardFacts, model_card
from ckptkit.storage.open import open_store
from tests.offline.exports import bits_of, carried_out, same_bits, small_files


def write(path: Path, tensors: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: np.asarray(value) for name, value in tensors.items()}, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    return path


def plan(path: Path, base: Path | BaseModel | None = None, **options: Any) -> HFExport:
    store = open_store(str(path))
    model = open_base(str(base)) if isinstance(base, Path) else base
    return plan_export(store, safetensors.open_catalog(store), base=model, options=ExportOptions(**options))


def ones(*names: str, dtype: Any = np.float32) -> dict[str, Any]:
    return {name: np.ones(2, dtype) for name in names}


def config_of(found: HFExport) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(small_files(found)["config.json"])
    return config


# --- names and bits


def test_torchtitan_is_converted_to_the_hub_model_bit_for_bit(zoo: Path) -> None:
    case = zoo / "torchtitan_llama3_names_w2"
    store = open_store(str(case / "step-10"))
    catalog = dcp.open_catalog(store)
    export = plan_export(store, catalog, base=open_base(str(case / "EXPECTED_hf")))
    same_bits(carried_out(store, catalog, export), bits_of(case / "EXPECTED_hf" / "model.safetensors"))
    assert export.key_map == "torchtitan-llama3"


def test_a_hub_model_is_converted_to_torchtitan_bit_for_bit(zoo: Path) -> None:
    from tests.catalog.materialize import materialize

    case = zoo / "torchtitan_llama3_names_w2"
    catalog = safetensors.open_catalog(open_store(str(case / "EXPECTED_hf")))
    options = ExportOptions(key_map=builtin_map("inverse:torchtitan-llama3"))
    made, dropped, _ = export_tensors(catalog, options=options)
    sources = bits_of(case / "EXPECTED_hf" / "model.safetensors")
    same_bits({n: materialize(t, sources) for n, t in made.items()}, bits_of(case / "EXPECTED.safetensors"))
    assert dropped == {}


def test_stacked_experts_become_the_experts_of_the_base_bit_for_bit(zoo: Path) -> None:
    case = zoo / "accelerate_fsdp2_sharded_qwen3moe_w2"
    store = open_store(str(case / "checkpoint" / "pytorch_model_fsdp_0"))
    catalog = dcp.open_catalog(store)
    export = plan_export(store, catalog, base=open_base(str(zoo / "hf_ref_qwen3moe")))
    found = carried_out(store, catalog, export)
    stacked = load_file(case / "EXPECTED.safetensors")
    for name, bits in found.items():
        value = bits.view(np.float32)
        if ".experts." not in name:
            assert np.array_equal(value, stacked[name])
            continue
        module, number, part = name.rsplit(".", 4)[0], int(name.rsplit(".", 3)[1]), name.rsplit(".", 2)[1]
        gate_up = stacked[f"{module}.experts.gate_up_proj"][number] if part != "down_proj" else None
        want = {"gate_proj": lambda g: g[:24], "up_proj": lambda g: g[24:]}.get(part, lambda _: None)(gate_up)
        want = stacked[f"{module}.experts.down_proj"][number] if want is None else want
        assert np.array_equal(value, want), name
    assert len(found) == 45


def test_experts_without_a_base_stay_stacked_and_a_note_says_so(zoo: Path) -> None:
    store = open_store(str(zoo / "accelerate_fsdp2_sharded_qwen3moe_w2" / "checkpoint" / "pytorch_model_fsdp_0"))
    export = plan_export(store, dcp.open_catalog(store))
    assert any("stacked experts were kept" in note for note in export.notes)


def test_the_config_is_enough_to_give_a_vision_model_the_prefixes_of_the_hub(tmp_path: Path) -> None:
    write(tmp_path, ones("model.language_model.norm.weight", "lm_head.weight"), {"model_type": "llava"})
    assert {t.name for t in plan(tmp_path).tensors} == {
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    }


def test_a_stored_tied_head_is_omitted_for_a_tied_base(zoo: Path) -> None:
    store = open_store(str(zoo / "accelerate_fsdp2_sharded_llama_tied_w2" / "checkpoint" / "pytorch_model_fsdp_0"))
    catalog = dcp.open_catalog(store)
    export = plan_export(store, catalog, base=open_base(str(zoo / "hf_ref_llama_tied")))
    expected = bits_of(zoo / "accelerate_fsdp2_sharded_llama_tied_w2" / "EXPECTED.safetensors")
    del expected["lm_head.weight"]
    same_bits(carried_out(store, catalog, export), expected)


def test_wrapper_names_are_stripped(tmp_path: Path) -> None:
    write(tmp_path, ones("_orig_mod.a._checkpoint_wrapped_module.w", "_orig_mod.b"))
    assert {t.name for t in plan(tmp_path).tensors} == {"a.w", "b"}


def test_a_prefix_is_removed_automatically_only_if_the_base_proves_it(tmp_path: Path) -> None:
    write(tmp_path / "src", ones("net.model.a", "net.model.b", "net.lm_head.w"))
    base = write(tmp_path / "base", ones("model.a", "model.b", "lm_head.w"))
    assert {t.name for t in plan(tmp_path / "src", base).tensors} == {"model.a", "model.b", "lm_head.w"}
    assert {t.name for t in plan(tmp_path / "src").tensors} == {"net.model.a", "net.model.b", "net.lm_head.w"}


def test_strip_prefix_omits_and_reports_names_without_the_prefix(tmp_path: Path) -> None:
    write(tmp_path, ones("net.a", "loss.w"))
    export = plan(tmp_path, strip_prefix="net")
    assert [t.name for t in export.tensors] == ["a"]
    assert export.leftovers == (("loss.w", "lacks the prefix 'net'"),)


def test_include_and_exclude_select_by_glob(tmp_path: Path) -> None:
    write(tmp_path, ones("a.x", "a.y", "b.x"))
    export = plan(tmp_path, include=("a.*",), exclude=("*.y",))
    assert [t.name for t in export.tensors] == ["a.x"]
    assert dict(export.leftovers) == {"a.y": "excluded", "b.x": "not included"}


def test_a_glob_that_matches_nothing_is_noted(tmp_path: Path) -> None:
    write(tmp_path, ones("a.x", "a.y", "b.x"))
    export = plan(tmp_path, include=("a.*", "c.*"), exclude=("a.z",))
    assert "--include 'c.*' matches no tensor" in export.notes
    assert "--exclude 'a.z' matches no tensor" in export.notes
    assert not any("'a.*'" in note for note in export.notes)


def test_only_tensors_that_globs_exclude_may_be_missing(tmp_path: Path) -> None:
    write(tmp_path / "src", ones("a", "b"))
    base = write(tmp_path / "base", ones("a", "b", "c"))
    with pytest.raises(CheckpointMismatchError, match="missing: c") as caught:
        plan(tmp_path / "src", base, exclude=("b",))
    assert "missing: b" not in str(caught.value)
    assert [t.name for t in plan(tmp_path / "src", base, exclude=("b", "c")).tensors] == ["a"]


def test_an_empty_export_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, ones("a"))
    with pytest.raises(UsageError, match="nothing to export"):
        plan(tmp_path, include=("b",))
    with pytest.raises(UsageError, match="nothing to export: the key map mine drops all 1 tensors"):
        plan(tmp_path, key_map=NameMap("mine", (Drop(NamePattern("{x:*}")),)))


def test_an_explicit_key_map_is_applied_and_its_unused_rules_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"l.mlp.experts.down_proj": np.arange(8.0).reshape(2, 2, 2)})
    export = plan(tmp_path, key_map=builtin_map("hf5-experts"))
    assert {t.name for t in export.tensors} == {f"l.mlp.experts.{i}.down_proj.weight" for i in range(2)}
    assert sum("matched nothing" in note for note in export.notes) == 2


@pytest.mark.parametrize(("dtype", "written"), [("keep", "float16"), ("fp16", "float16"), ("bf16", "bfloat16")])
def test_a_dtype_that_overrides_a_cast_of_the_key_map_is_noted(tmp_path: Path, dtype: str, written: str) -> None:
    write(tmp_path, ones("norm", "w"))
    export = plan(tmp_path, dtype=dtype, key_map=NameMap("mine", (Cast(NamePattern("norm"), "float16"),)))
    assert next(t.dtype for t in export.tensors if t.name == "norm") == written
    noted = [note for note in export.notes if "overrides the casts of key map mine: norm" in note]
    assert len(noted) == (dtype == "bf16")


# --- compared with the base


def test_all_differences_from_the_base_are_listed_at_once(tmp_path: Path) -> None:
    write(tmp_path / "src", {**ones("a", "extra"), "b": np.ones((2, 3), np.float32)})
    base = write(tmp_path / "base", {**ones("a", "gone"), "b": np.ones((3, 2), np.float32)})
    with pytest.raises(CheckpointMismatchError) as caught:
        plan(tmp_path / "src", base)
    for said in ("missing: gone", "unexpected: extra [2]", "shape: b is [2, 3], but [3, 2] in the base"):
        assert said in str(caught.value)


@pytest.mark.parametrize("config", [{"num_hidden_layers": 3}, {"text_config": {"num_hidden_layers": 3}}])
def test_layers_that_the_config_counts_and_the_checkpoint_lacks_are_missing(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    source = write(tmp_path / "in", ones("model.layers.0.a.weight", "model.layers.1.a.weight", "model.norm.weight"))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    with pytest.raises(CheckpointMismatchError, match="missing: layers 2: the config has num_hidden_layers 3"):
        plan(source, tmp_path / "base")
    assert plan(source, tmp_path / "base", exclude=("*.norm.*",)).tensors
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    assert len(plan(source, tmp_path / "base").tensors) == 3


def test_without_strict_the_differences_are_returned(tmp_path: Path) -> None:
    write(tmp_path / "src", ones("a", "extra"))
    base = write(tmp_path / "base", ones("a", "gone"))
    export = plan(tmp_path / "src", base, strict=False)
    assert export.missing == ("gone",)
    assert export.faults == ("missing: gone", "unexpected: extra [2]")


def test_a_missing_head_of_an_untied_model_is_an_error(tmp_path: Path, zoo: Path) -> None:
    tensors = load_file(zoo / "hf_ref_llama_untied" / "model.safetensors")
    del tensors["lm_head.weight"]
    write(tmp_path, tensors)
    with pytest.raises(CheckpointMismatchError, match=r"missing: lm_head\.weight"):
        plan(tmp_path, zoo / "hf_ref_llama_untied")


def test_a_missing_head_of_a_tied_model_is_accepted_even_if_the_base_stores_it(tmp_path: Path) -> None:
    embed = {"model.embed_tokens.weight": np.ones((4, 2), np.float32)}
    write(tmp_path / "src", embed)
    both = {**embed, "lm_head.weight": embed["model.embed_tokens.weight"]}
    base = write(tmp_path / "base", both, {"tie_word_embeddings": True})
    assert [t.name for t in plan(tmp_path / "src", base).tensors] == ["model.embed_tokens.weight"]


def test_tensors_that_the_base_lacks_are_kept_and_named(tmp_path: Path) -> None:
    write(tmp_path / "src", {**ones("a"), "probe": np.ones(3, np.int64)})
    base = write(tmp_path / "base", ones("a"))
    export = plan(tmp_path / "src", base)
    assert {t.name for t in export.tensors} == {"a", "probe"}
    assert any("kept, although the base has no such tensors: probe." in note for note in export.notes)
    assert export.checked.endswith("(except 1 additional tensor)")


def test_buffers_that_are_computed_on_load_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "src", ones("a", "layers.0.self_attn.rotary_emb.inv_freq"))
    base = write(tmp_path / "base", ones("a"))
    export = plan(tmp_path / "src", base)
    assert [t.name for t in export.tensors] == ["a"]
    assert "computed on load" in dict(export.leftovers)["layers.0.self_attn.rotary_emb.inv_freq"]


def test_a_dtype_that_differs_from_the_base_is_kept_and_noted(tmp_path: Path) -> None:
    write(tmp_path / "src", ones("a"))
    base = write(tmp_path / "base", ones("a", dtype=np.float16), {"dtype": "float16"})
    export = plan(tmp_path / "src", base)
    assert export.tensors[0].dtype == "float32"
    assert config_of(export)["dtype"] == "float32"
    assert any("1 tensors are float32 in the checkpoint and float16 in the base" in note for note in export.notes)


def test_the_index_of_a_base_without_weights_gives_its_names(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors", "b": "x.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    write(tmp_path / "src", ones("a"))
    with pytest.raises(CheckpointMismatchError, match="missing: b"):
        plan(tmp_path / "src", base)


# --- dtypes and weights


def test_only_floats_are_cast(tmp_path: Path) -> None:
    write(tmp_path, {"w": np.ones(2, np.float32), "i": np.ones(2, np.int64), "b": np.ones(2, np.bool_)})
    export = plan(tmp_path, dtype="bf16")
    assert {t.name: t.dtype for t in export.tensors} == {"w": "bfloat16", "i": "int64", "b": "bool"}


def test_complex_tensors_are_refused_by_name(zoo: Path) -> None:
    store = open_store(str(zoo / "dcp_dtypes_w2" / "ckpt"))
    catalog = dcp.open_catalog(store)
    with pytest.raises(UnsupportedFormatError, match=r"c64 \(complex64\)\. Skip them with --exclude"):
        plan_export(store, catalog)
    export = plan_export(store, catalog, options=ExportOptions(exclude=("c64",)))
    same_bits(carried_out(store, catalog, export), bits_of(zoo / "dcp_dtypes_w2" / "EXPECTED.safetensors"))


def with_masters(path: Path, names: Mapping[str, str]) -> tuple[Any, Catalog]:
    """Return a catalog of a bf16 model and masters; `names`: FQN by key of the master."""
    write(path, {"a": np.ones(2, np.float16), "b": np.ones(2, np.float16), "n": np.ones(2, np.int32),
                 **{f"m.{key}": np.full(2, 3, np.float32) for key in names}})  # fmt: skip
    store = open_store(str(path))
    found = safetensors.open_catalog(store)
    tensors: dict[str, TensorEntry] = {}
    for name, e in found.tensors.items():
        fqn = names.get(name.removeprefix("m.")) if name.startswith("m.") else None
        role = Role.MODEL if fqn is None else Role.MASTER
        tensors[name] = TensorEntry(name, e.dtype, e.shape, e.slices, role, fqn or name)
    return store, Catalog(tensors, info=found.info)


def test_masters_are_exported_on_request(tmp_path: Path) -> None:
    store, catalog = with_masters(tmp_path, {"0": "a", "1": "b"})
    export = plan_export(store, catalog, options=ExportOptions(weights="master"))
    assert {t.name: (t.dtype, t.sources) for t in export.tensors} == {
        "a": ("float32", ("m.0",)),
        "b": ("float32", ("m.1",)),
        "n": ("int32", ("n",)),
    }
    assert "1 tensors have no fp32 master (buffers, frozen parameters): the model's values are used" in export.notes


def test_model_weights_and_not_masters_are_the_default(tmp_path: Path) -> None:
    store, catalog = with_masters(tmp_path, {"0": "a", "1": "b"})
    export = plan_export(store, catalog)
    assert {t.dtype for t in export.tensors} == {"float16", "int32"}
    assert dict(export.leftovers)["m.0"] == "master state, not part of the model weights"


@pytest.mark.parametrize(("dtype", "source"), [("fp32", "m.0"), ("bf16", "m.0"), ("fp16", "a"), ("keep", "a")])
def test_a_cast_starts_from_the_masters_and_not_from_rounded_weights(tmp_path: Path, dtype: str, source: str) -> None:
    store, catalog = with_masters(tmp_path, {"0": "a", "1": "b"})
    export = plan_export(store, catalog, options=ExportOptions(dtype=dtype))
    assert {t.name: t.sources for t in export.tensors}["a"] == (source,)
    model = plan_export(store, catalog, options=ExportOptions(dtype=dtype, weights="model"))
    assert {t.name: t.sources for t in model.tensors}["a"] == ("a",)


def test_the_other_name_of_a_tied_parameter_gets_the_same_master(tmp_path: Path) -> None:
    from dataclasses import replace

    store, catalog = with_masters(tmp_path, {"0": "a", "1": "b"})
    alias = replace(catalog.tensors["a"], name="alias", fqn="alias")
    tied = replace(catalog, tensors={**catalog.tensors, "alias": alias})
    export = plan_export(store, tied, options=ExportOptions(weights="master"))
    assert {t.name: t.sources for t in export.tensors}["alias"] == ("m.0",)


def test_masters_of_another_model_are_refused(tmp_path: Path) -> None:
    store, catalog = with_masters(tmp_path, {"0": "a", "1": "elsewhere"})
    with pytest.raises(CheckpointMismatchError, match="no model weight: elsewhere"):
        plan_export(store, catalog, options=ExportOptions(weights="master"))


def test_missing_masters_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, ones("a"))
    with pytest.raises(CheckpointNotFoundError, match="no fp32 masters: 1 model tensors"):
        plan(tmp_path, weights="master")


def test_a_note_says_why_masters_could_not_be_read(tmp_path: Path) -> None:
    write(tmp_path, ones("a"))
    store = open_store(str(tmp_path))
    info = CatalogInfo("lightrft", notes=("the optimizer was skipped: whose the masters are is not recorded",))
    catalog = Catalog(safetensors.open_catalog(store).tensors, info=info)
    with pytest.raises(CheckpointNotFoundError, match="whose the masters are is not recorded"):
        plan_export(store, catalog, options=ExportOptions(weights="master"))


# --- side files and config


def test_small_files_of_the_base_are_copied(zoo: Path) -> None:
    files = small_files(plan(zoo / "hf_ref_llama_untied", zoo / "hf_ref_llama_untied"))
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert files["tokenizer.json"] == (zoo / "hf_ref_llama_untied" / "tokenizer.json").read_bytes()


def test_weights_and_unrelated_files_of_the_base_are_not_copied(tmp_path: Path) -> None:
    base = write(tmp_path / "base", ones("a"), {"model_type": "llama"})
    for stray in ("model.gguf", "pytorch_model.bin", "tokenizer.bin", "tokenizer.safetensors.index.json", "notes.txt",
                  "README.md", "train.py", ".env", "tokenizer.pkl"):  # fmt: skip
        (base / stray).write_text("stray")
    write(tmp_path / "src", ones("a"))
    assert sorted(small_files(plan(tmp_path / "src", base))) == ["README.md", "config.json"]
    assert "stray" not in small_files(plan(tmp_path / "src", base))["README.md"].decode()


def test_custom_code_is_copied_if_the_config_needs_it(tmp_path: Path) -> None:
    base = write(tmp_path / "base", ones("a"), {"auto_map": {"AutoModel": "modeling_x.X"}})
    (base / "modeling_x.py").write_text("raise SystemExit('never run')")
    assert "modeling_x.py" in small_files(plan(base, base))


def test_symlinks_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    base = write(tmp_path / "base", ones("a"))
    (base / "tokenizer.json").symlink_to(secret)
    export = plan(base, base)
    assert "tokenizer.json" not in small_files(export)
    assert "tokenizer.json was not copied: it is a symlink" in export.notes


def hub_cache(root: Path) -> Path:
    """Return a snapshot in the layout of huggingface_hub: links into blobs/."""
    repo = root / "models--org--tiny"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    contents = {"config.json": json.dumps({"model_type": "llama"}), "tokenizer.json": "{}"}
    index = {"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    contents["model.safetensors.index.json"] = json.dumps(index)
    for number, (name, text) in enumerate(contents.items()):
        (repo / "blobs" / f"{number:040x}").write_text(text)
        (snapshot / name).symlink_to(os.path.join("..", "..", "blobs", f"{number:040x}"))
    return snapshot


def test_a_snapshot_in_the_hub_cache_is_accepted_as_base(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    write(tmp_path / "src", ones("a"))
    files = small_files(plan(tmp_path / "src", snapshot))
    assert files["tokenizer.json"] == b"{}"
    assert json.loads(files["config.json"])["model_type"] == "llama"


def test_a_repo_id_is_resolved_from_the_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    hub_cache(tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    base = open_base("org/tiny")
    assert base.repo == "org/tiny"
    assert base.wanted == {"a": WantedTensor()}
    assert base.config == {"model_type": "llama"}
    write(tmp_path / "src", ones("a"))
    assert '- "org/tiny"' in small_files(plan(tmp_path / "src", base))["README.md"].decode()


def test_a_base_that_is_neither_directory_nor_known_repo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointNotFoundError, match="cannot be read as a Hub repo"):
        open_base("nobody/nothing-here")
    with pytest.raises(CheckpointNotFoundError, match="is not a directory"):
        open_base("./nothing-here")


def test_side_files_of_the_checkpoint_are_used_without_a_base(tmp_path: Path) -> None:
    side = tmp_path / "huggingface"
    side.mkdir(parents=True)
    (side / "config.json").write_text('{"model_type": "llama", "torch_dtype": "bfloat16"}')
    (side / "tokenizer.json").write_text("{}")
    write(tmp_path, ones("a"))
    store = open_store(str(tmp_path))
    found = safetensors.open_catalog(store)
    info = CatalogInfo("verl", side_files=("huggingface/config.json", "huggingface/tokenizer.json"))
    export = plan_export(store, Catalog(found.tensors, info=info))
    assert sorted(small_files(export)) == ["README.md", "config.json", "tokenizer.json"]
    assert config_of(export) == {"model_type": "llama", "torch_dtype": "float32"}


def test_the_base_takes_precedence_over_side_files_of_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "src", ones("a"), {"model_type": "mine"})
    base = write(tmp_path / "base", ones("a"), {"model_type": "theirs"})
    assert config_of(plan(tmp_path / "src", base))["model_type"] == "theirs"


def test_the_config_gets_the_dtype_of_the_weights(tmp_path: Path) -> None:
    config = {"dtype": "float32", "text_config": {"dtype": "float32", "hidden_size": 2}, "vision_config": {"depth": 1}}
    write(tmp_path, ones("a"), config)
    assert config_of(plan(tmp_path, dtype="bf16")) == {
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "hidden_size": 2},
        "vision_config": {"depth": 1},
    }


def test_a_diffusers_config_changes_the_file_names(tmp_path: Path) -> None:
    write(tmp_path, ones("a"), {"_class_name": "UNet2DModel", "_diffusers_version": "0.42.1"})
    assert any("diffusion_pytorch_model*.safetensors" in note for note in plan(tmp_path).notes)


def test_the_architecture_loses_the_prefix_of_fully_shard(tmp_path: Path) -> None:
    write(tmp_path, ones("a"), {"architectures": ["FSDPLlamaForCausalLM"]})
    assert config_of(plan(tmp_path))["architectures"] == ["LlamaForCausalLM"]


def test_a_quantization_config_is_kept_only_with_quantized_weights(tmp_path: Path) -> None:
    write(tmp_path, ones("a.weight"), {"quantization_config": {"quant_method": "fp8"}})
    assert "quantization_config" not in config_of(plan(tmp_path))
    write(tmp_path, ones("a.weight", "a.weight_scale_inv"), {"quantization_config": {"quant_method": "fp8"}})
    assert "quantization_config" in config_of(plan(tmp_path))


def test_an_error_names_a_broken_config(tmp_path: Path) -> None:
    base = write(tmp_path, ones("a"))
    (base / "config.json").write_text("{")
    with pytest.raises(CorruptCheckpointError, match=r"config\.json is not JSON"):
        open_base(str(base))


# --- the card


def card(**facts: Any) -> str:
    plain: dict[str, Any] = {
        "source": "/runs/ckpt", "kind": "model", "parameters": 4, "nbytes": 8, "dtypes": {"bfloat16": 4},
        "weights": "model", "key_map": "hf", "base_repo": None, "notes": [],
    }  # fmt: skip
    return model_card(Catalog({}, info=CatalogInfo("dcp", step=7)), CardFacts(**{**plain, **facts}))


def test_the_card_shows_no_credentials() -> None:
    text = card(source="s3://user:hunter2@bucket/run/step_7?X-Amz-Signature=abcd#frag")
    assert "step\\_7" in text
    assert not any(secret in text for secret in ("hunter2", "abcd", "bucket", "user", "frag"))


def test_the_card_escapes_markdown() -> None:
    text = card(source="/x/a|b<script>\n# h", notes=["<img src=x>\n---\n[a](b)"])
    assert "<" not in text.split("---", 2)[2].replace("&lt;", "").replace("<!-- ckptkit: xxh3_64", "")
    assert "\n# h" not in text
    assert "a\\|b" in text
    assert "\\[a\\]\\(b\\)" in text


def test_an_invalid_repo_does_not_reach_the_front_matter() -> None:
    assert "base_model" not in card(base_repo="a/b\nlicense: mit")
    assert 'base_model:\n- "org/name"' in card(base_repo="org/name")


def test_the_fingerprint_changes_with_a_digest(zoo: Path) -> None:
    from dataclasses import replace

    from ckptkit.offline.export.model_card import source_fingerprint

    catalog = dcp.open_catalog(open_store(str(zoo / "dcp_hsdp_2x2" / "ckpt")))
    name, entry = next(iter(catalog.tensors.items()))
    before = source_fingerprint(catalog)
    assert before is not None and entry.slices.digests is not None
    entry.slices.digests[:] ^= np.uint64(1)
    assert source_fingerprint(replace(catalog, tensors={**catalog.tensors, name: entry})) != before


# --- a written export


def two_files(path: Path) -> dict[str, Any]:
    save_file(ones("a"), path / "model-00001-of-00002.safetensors")
    save_file(ones("b", "c"), path / "model-00002-of-00002.safetensors")
    where = {"a": 1, "b": 2, "c": 2}
    weight_map = {name: f"model-0000{n}-of-00002.safetensors" for name, n in where.items()}
    return {"metadata": {"total_size": 24, "total_parameters": 6}, "weight_map": weight_map}


def check(path: Path, **options: Any) -> Any:
    return check_export(open_store(str(path)), **options)


def test_an_exact_index_is_proved(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(two_files(tmp_path)))
    wanted = {name: WantedTensor(None, (2,)) for name in "abc"}
    proof = check(tmp_path, base=BaseModel("the base", None, {}, wanted))
    assert proof.phrases() == ("names and shapes match the base", "index matches the files")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("metadata", {"total_size": 23, "total_parameters": 6}, "total_size is 23, expected 24"),
        ("metadata", {"total_size": 24}, "total_parameters is None, expected 6"),
    ],
)
def test_an_index_with_wrong_totals_is_refused(tmp_path: Path, key: str, value: Any, said: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({**two_files(tmp_path), key: value}))
    with pytest.raises(CorruptCheckpointError, match=said):
        check(tmp_path)


def test_a_file_that_no_index_names_is_refused(tmp_path: Path) -> None:
    write(tmp_path, ones("a"))
    save_file(ones("x"), tmp_path / "consolidated.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"consolidated\.safetensors: loaders"):
        check(tmp_path)


@pytest.mark.parametrize("case", ["hf_ref_llama_tied", "hf_ref_llama_untied", "hf_ref_qwen3moe"])
def test_an_export_is_compared_with_the_model_of_its_config(zoo: Path, case: str) -> None:
    pytest.importorskip("transformers")
    assert check(zoo / case, use_config=True).matches == "the config"


def test_a_remaining_prefix_is_found_by_the_check_against_the_config(zoo: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tensors = load_file(zoo / "hf_ref_llama_untied" / "model.safetensors")
    config = json.loads((zoo / "hf_ref_llama_untied" / "config.json").read_text())
    write(tmp_path, {f"_orig_mod.{name}": value for name, value in tensors.items()}, config)
    with pytest.raises(CheckpointMismatchError, match=r"missing: model\.embed_tokens\.weight") as caught:
        check(tmp_path, use_config=True)
    assert "unexpected: _orig_mod.model.embed_tokens.weight" in str(caught.value)


@pytest.mark.parametrize("name", ["pipeline", "AutoModel", "NoSuchModel", "__class__"])
def test_only_model_classes_are_resolved_from_a_config(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    from ckptkit.offline.export.check import names_of_config

    write(tmp_path, ones("a"), {"architectures": [name], "model_type": "llama"})
    assert names_of_config(open_store(str(tmp_path)))[0] == {}


def test_module_extra_state_is_listed_as_unused(tmp_path: Path) -> None:
    place = write(tmp_path / "m", {**ones("layer.w"), "layer._extra_state": np.zeros(9, np.uint8)})
    export = plan(place)
    assert [tensor.name for tensor in export.tensors] == ["layer.w"]
    assert dict(export.leftovers) == {"layer._extra_state": "extra state of a module (get_extra_state), not a weight"}
    told, dropped, _ = export_tensors(safetensors.open_catalog(open_store(str(place))), options=ExportOptions())
    assert (list(told), list(dropped)) == (["layer.w"], ["layer._extra_state"])
