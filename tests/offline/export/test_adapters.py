"""LoRA adapters: exported under PEFT's names with a given config, or merged as by PEFT."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit.catalog.box import Box
from ckptkit.catalog.targets import Part, Target
from ckptkit.errors import CheckpointMismatchError, UnsupportedFormatError, UsageError
from ckptkit.formats.dcp import catalog as dcp
from ckptkit.formats.hf import safetensors
from ckptkit.keymaps.builtin import builtin_map
from ckptkit.offline.export.adapters import adapter_config, export_adapter, scaling, split_adapter
from ckptkit.offline.export.base import BaseModel, open_base
from ckptkit.offline.export.hf import ExportOptions, plan_export
from ckptkit.storage.open import open_store
from tests.offline.exports import bits_of, carried_out, same_bits, small_files


def targets(**shapes: tuple[int, ...]) -> dict[str, Target]:
    made = {}
    for key, shape in shapes.items():
        name = key.replace("__", ".")
        made[name] = Target(name, "float32", shape, (Part(Box.whole(shape), name, Box.whole(shape)),), "float32")
    return made


def lora(**more: tuple[int, ...]) -> dict[str, Target]:
    return targets(
        q__base_layer__weight=(6, 4), q__lora_A__default__weight=(2, 4), q__lora_B__default__weight=(6, 2), **more
    )


def test_the_zoos_adapter_is_exported_as_peft_stores_it(zoo: Path) -> None:
    case = zoo / "peft_lora_dcp_full_w2"
    store = open_store(str(case / "ckpt"))
    catalog = dcp.open_catalog(store)
    given = json.loads((case / "peft_config.json").read_text())
    export = plan_export(store, catalog, options=ExportOptions(adapter_config=given))
    assert export.kind == "adapter"
    same_bits(carried_out(store, catalog, export), bits_of(case / "EXPECTED_adapter" / "adapter_model.safetensors"))
    config = json.loads(small_files(export)["adapter_config.json"])
    expected = json.loads((case / "EXPECTED_adapter" / "adapter_config.json").read_text())
    for key in ("peft_type", "r", "lora_alpha", "task_type", "inference_mode"):
        assert config[key] == expected[key]
    assert sorted(config["target_modules"]) == sorted(expected["target_modules"])


def test_the_zoos_adapter_merges_bit_for_bit(zoo: Path) -> None:
    pytest.importorskip("torch")
    case = zoo / "peft_lora_dcp_full_w2"
    store = open_store(str(case / "ckpt"))
    catalog = dcp.open_catalog(store)
    given = json.loads((case / "peft_config.json").read_text())
    export = plan_export(store, catalog, options=ExportOptions(adapter_config=given, merge_adapter=True))
    same_bits(carried_out(store, catalog, export), bits_of(case / "EXPECTED_merged.safetensors"))
    assert export.leftovers == ()


@pytest.mark.parametrize("case", [
    {"target_modules": ["q"], "bias": "all"},
    {"target_modules": ["q"], "bias": "lora_only"},
    {"target_modules": ["q"], "lora_bias": True},
    {"target_modules": ["q"], "modules_to_save": ["k"]},
    {"target_modules": ["q"], "target_parameters": ["experts.up", "experts.down"], "rank_pattern": {"experts.up": 1}},
    {"target_modules": ["attention", "q"], "rank_pattern": {"attention": 1}},
    {"target_modules": ["q"], "kasa_config": "KasaConfig"},
    {"target_modules": ["q"], "monteclora_config": "MontecloraConfig"},
    {"target_modules": ["q"], "velora_config": "VeloraConfig"},
], ids=lambda case: "-".join(map(str, case)))  # fmt: skip
def test_an_adapter_file_equals_what_peft_saves(tmp_path: Path, case: dict[str, Any]) -> None:
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from peft.tuners.lora import config as lora_config
    from safetensors.torch import save_file

    class Experts(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.randn(3, 6, 4))
            self.down = torch.nn.Parameter(torch.randn(3, 4, 6))

    base = torch.nn.ModuleDict({
        "q": torch.nn.Linear(6, 4), "k": torch.nn.Linear(6, 5), "experts": Experts(),
        "attention": torch.nn.MultiheadAttention(4, 2),
    })  # fmt: skip
    config = {"r": 2, "lora_alpha": 6, **case}
    made = {key: getattr(lora_config, v)() if str(v).endswith("Config") else v for key, v in config.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, peft.LoraConfig(**made))
        model.save_pretrained(tmp_path / "adapter")
        (tmp_path / "run").mkdir()
        state = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
        save_file(state, tmp_path / "run" / "model.safetensors")
    store = open_store(str(tmp_path / "run"))
    catalog = safetensors.open_catalog(store)
    export = plan_export(store, catalog, options=ExportOptions(adapter_config=config))
    same_bits(carried_out(store, catalog, export), bits_of(tmp_path / "adapter" / "adapter_model.safetensors"))


def test_rows_that_head_and_embedding_share_are_stored_once() -> None:
    rows = {f"{module}.token_adapter.trainable_tokens_delta.default": (2, 4) for module in ("embed_tokens", "lm_head")}
    split = split_adapter(lora(**{name.replace(".", "__"): shape for name, shape in rows.items()}))
    assert split is not None
    config = {"r": 2, "lora_alpha": 1}
    shared, _ = export_adapter(split, {**config, "trainable_token_indices": [1, 2]})
    assert sum("token_adapter" in name for name in shared) == 1 and not any("lm_head" in name for name in shared)
    named = {"embed_tokens": [1, 2], "lm_head": [1, 2]}
    assert (
        sum("token_adapter" in n for n in export_adapter(split, {**config, "trainable_token_indices": named})[0]) == 2
    )


def test_a_config_above_the_checkpoint_is_found_and_named(zoo: Path) -> None:
    store = open_store(str(zoo / "peft_lora_dcp_full_w2" / "ckpt"))
    export = plan_export(store, dcp.open_catalog(store))
    assert json.loads(small_files(export)["adapter_config.json"])["lora_alpha"] == 16
    assert "adapter config: peft_lora_dcp_full_w2/peft_config.json" in export.notes


def test_the_adapter_settings_that_verl_records_are_enough(zoo: Path, tmp_path: Path) -> None:
    shutil.copytree(zoo / "peft_lora_dcp_full_w2" / "ckpt", tmp_path / "ckpt")
    meta = {"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
    (tmp_path / "ckpt" / "lora_train_meta.json").write_text(json.dumps(meta))
    store = open_store(str(tmp_path / "ckpt"))
    config = json.loads(small_files(plan_export(store, dcp.open_catalog(store)))["adapter_config.json"])
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 16, "CAUSAL_LM")


@pytest.mark.parametrize(
    ("named", "repo", "made", "note"),
    [
        ("/home/me/llama", None, "/home/me/llama", "names /home/me/llama, a path on the machine that trained it, as"),
        (None, None, None, "the adapter config names nothing as the base model; --base ORG/NAME"),
        ("/home/me/llama", "org/llama", "org/llama", "names org/llama as the base model instead of /home/me/llama"),
        ("org/llama", "org/other", "org/llama", ""),
        (None, "org/llama", "org/llama", ""),
    ],
)
def test_a_local_base_path_is_noted_and_can_be_replaced_by_a_repo(
    zoo: Path, named: str | None, repo: str | None, made: str | None, note: str
) -> None:
    store = open_store(str(zoo / "peft_lora_dcp_full_w2" / "ckpt"))
    given = {"r": 4, "lora_alpha": 16, "base_model_name_or_path": named}
    base = BaseModel("the base", repo=repo)
    export = plan_export(store, dcp.open_catalog(store), base=base, options=ExportOptions(adapter_config=given))
    files = small_files(export)
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == made
    assert (f'base_model:\n- "{made}"' in files["README.md"].decode()) == (made is not None and made.startswith("org"))
    assert [text for text in export.notes if "as the base model" in text and note in text] or not note
    assert note or not any("as the base model" in text for text in export.notes)


def test_an_alpha_of_0_counts_as_unknown() -> None:
    split = split_adapter(lora())
    assert split is not None
    with pytest.raises(UsageError, match="lora_alpha 0, which some tools write"):
        adapter_config({"r": 2, "lora_alpha": 0}, split, base=None)


def test_an_unknown_alpha_is_refused(zoo: Path, tmp_path: Path) -> None:
    shutil.copytree(zoo / "peft_lora_dcp_full_w2" / "ckpt", tmp_path / "ckpt")
    store = open_store(str(tmp_path / "ckpt"))
    catalog = dcp.open_catalog(store)
    with pytest.raises(UsageError, match=r"rank 4, on down_proj, q_proj, v_proj\).*but not its alpha"):
        plan_export(store, catalog)
    with pytest.raises(UsageError, match="has no lora_alpha"):
        plan_export(store, catalog, options=ExportOptions(adapter_config={"r": 4}))


def test_the_adapter_config_may_be_in_the_base(zoo: Path) -> None:
    store = open_store(str(zoo / "peft_lora_dcp_full_w2" / "ckpt"))
    base = open_base(str(zoo / "peft_lora_dcp_full_w2" / "EXPECTED_adapter"))
    export = plan_export(store, dcp.open_catalog(store), base=base)
    assert json.loads(small_files(export)["adapter_config.json"])["lora_alpha"] == 16


def test_a_lora_rank_that_contradicts_the_tensors_is_refused() -> None:
    split = split_adapter(lora())
    assert split is not None
    with pytest.raises(CheckpointMismatchError, match=r"has rank 8 for 'q', but its tensors have rank 2"):
        adapter_config({"r": 8, "lora_alpha": 1}, split, base=None)


def test_dora_magnitudes_keep_their_name_in_an_adapter() -> None:
    split = split_adapter(lora(q__lora_magnitude_vector__default__weight=(6,)))
    assert split is not None
    made, _ = export_adapter(split, {})
    assert "base_model.model.q.lora_magnitude_vector" in made


def test_trained_tokens_keep_their_name_in_an_adapter() -> None:
    more = {"e__token_adapter__base_layer__weight": (9, 4), "e__token_adapter__trainable_tokens_delta__default": (2, 4)}
    split = split_adapter(lora(**more))
    assert split is not None
    made, _ = export_adapter(split, {})
    assert "base_model.model.e.token_adapter.trainable_tokens_delta" in made
    assert "e.weight" in split.base


def test_fully_trained_modules_are_exported_with_the_lora_factors() -> None:
    more = {"head__original_module__weight": (3, 4), "head__modules_to_save__default__weight": (3, 4)}
    split = split_adapter(lora(**more))
    assert split is not None
    made, _ = export_adapter(split, {})
    assert sorted(made) == ["base_model.model.head.weight", "base_model.model.q.lora_A.weight",
                            "base_model.model.q.lora_B.weight"]  # fmt: skip
    assert made["base_model.model.head.weight"].sources == ("head.modules_to_save.default.weight",)
    assert list(split.dropped) == ["head.original_module.weight"]


def test_an_attribute_before_the_prefix_of_peft_is_removed_from_names() -> None:
    names = {f"actor.base_model.model.{name}": target for name, target in lora().items()}
    split = split_adapter(names)
    assert split is not None
    assert list(split.base) == ["q.weight"]
    assert sorted(export_adapter(split, {})[0]) == [
        "base_model.model.q.lora_A.weight",
        "base_model.model.q.lora_B.weight",
    ]


def test_a_lora_factor_without_its_partner_is_refused() -> None:
    with pytest.raises(CheckpointMismatchError, match="lora_A or lora_B is missing for: k"):
        split_adapter(lora(k__lora_A__default__weight=(2, 4)))


def test_several_adapters_are_refused_by_name() -> None:
    more = {"q__lora_A__other__weight": (2, 4), "q__lora_B__other__weight": (6, 2)}
    with pytest.raises(UnsupportedFormatError, match="several adapters: default, other"):
        split_adapter(lora(**more))


def test_splitting_names_without_adapters_returns_none() -> None:
    assert split_adapter(targets(model__lora_head__weight=(2, 2))) is None


def test_merging_without_an_adapter_is_refused(zoo: Path) -> None:
    store = open_store(str(zoo / "hf_ref_llama_tied"))
    with pytest.raises(UsageError, match="contains no adapter"):
        plan_export(store, safetensors.open_catalog(store), options=ExportOptions(merge_adapter=True))


def test_rank_and_alpha_patterns_match_as_in_peft() -> None:
    config = {"r": 8, "lora_alpha": 16, "alpha_pattern": {"mlp.down_proj": 32}, "rank_pattern": {"q_proj": 4}}
    assert scaling(config, "model.layers.0.mlp.down_proj") == 4.0
    assert scaling(config, "model.layers.0.self_attn.q_proj") == 4.0
    assert scaling(config, "model.layers.0.xq_proj") == 2.0


def test_initializations_that_change_the_base_are_noted() -> None:
    split = split_adapter(lora())
    assert split is not None
    _, notes = export_adapter(split, {"init_lora_weights": "pissa_niter_16"})
    assert "only fits the changed weights" in notes[0]
    assert np.ndim(notes) == 1


@pytest.mark.parametrize("state", ["ia3_l.default", "vera_lambda_b.default", "hada_w1_a.default", "base_layer.bias"])
def test_an_adapter_of_another_kind_is_refused_and_not_exported_as_a_model(state: str, tmp_path: Path) -> None:
    module = "base_model.model.layers.0.q_proj"
    tensors = {
        f"{module}.base_layer.weight": np.zeros((6, 4), np.float32),
        f"{module}.{state}": np.zeros(4, np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    store = open_store(str(tmp_path))
    with pytest.raises(UnsupportedFormatError, match=r"other than LoRA: 'base_model.model.layers.0.q_proj'"):
        plan_export(store, safetensors.open_catalog(store))


def test_the_base_under_an_adapter_of_another_kind_is_exported_on_request(tmp_path: Path) -> None:
    module = "base_model.model.layers.0.q_proj"
    names = (f"{module}.base_layer.weight", f"{module}.ia3_l.default")
    save_file({name: np.zeros((6, 4), np.float32) for name in names}, tmp_path / "model.safetensors")
    store = open_store(str(tmp_path))
    options = ExportOptions(key_map=builtin_map("peft"), exclude=("*.ia3_l*",))
    export = plan_export(store, safetensors.open_catalog(store), options=options)
    assert [tensor.name for tensor in export.tensors] == ["layers.0.q_proj.weight"]
