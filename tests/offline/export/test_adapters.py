"""LoRA adapters: exported under PEFT's names with a given config, or merged as by PEFT."""

import json
from typing import Any

import numpy as np
import pytest

from ckptkit.catalog.targets import Target
from ckptkit.errors import CheckpointMismatchError, UnsupportedFormatError, UsageError
from ckptkit.keymaps.builtin import builtin_map
from ckptkit.offline.export.adapters import adapter_config, export_adapter, scaling, split_adapter
from ckptkit.offline.export.base import BaseModel
from tests.offline.export.test_adapter_merge import LINEAR_Q, of, quiet, trained
from tests.offline.exports import assert_same, planned, read_model, stored, write_model
from tests.offline.folders import copied

CASE = "peft_lora_dcp_full_w2"
CONFIG = "adapter_config.json"


def lora(**more: tuple[int, ...]) -> Any:
    """Return an adapter of one module, with more tensors."""
    split = split_adapter(stored(**LINEAR_Q, **more))
    assert split is not None
    return split


def exported(config: dict[str, Any], **more: tuple[int, ...]) -> dict[str, Target]:
    return export_adapter(lora(**more), config)[0]


@pytest.mark.parametrize("case", [
    {"target_modules": ["q"], "bias": "all"},
    {"target_modules": ["q"], "bias": "lora_only"},
    {"target_modules": ["q"], "lora_bias": True},
    {"target_modules": ["q"], "modules_to_save": ["k"]},
    {"target_modules": ["q"], "target_parameters": ["experts.gate_up", "experts.down"],
     "rank_pattern": {"experts.gate_up": 1}},
    {"target_modules": ["attention", "q"], "rank_pattern": {"attention": 1}},
    {"target_modules": ["q"], "use_dora": True},
    {"target_modules": ["q"], "trainable_token_indices": {"embed": [7, 2, 30]}},
    {"target_modules": ["q"], "kasa_config": "KasaConfig"},
    {"target_modules": ["q"], "monteclora_config": "MontecloraConfig"},
    {"target_modules": ["q"], "velora_config": "VeloraConfig"},
], ids=lambda case: "-".join(map(str, case)))  # fmt: skip
def test_an_adapter_file_equals_what_peft_saves(tmp_path, case):
    adapted = trained(of(**case), tmp_path / "run", dtype="float32")
    with quiet():
        adapted.save_pretrained(tmp_path / "adapter")
    found = planned(tmp_path / "run", adapter_config=of(**case))
    assert_same(found.tensors, read_model(tmp_path / "adapter"))
    assert_same(planned(tmp_path / "adapter").tensors, found.tensors)


def test_rows_that_head_and_embedding_share_are_stored_once():
    both = ("embed_tokens", "lm_head")
    rows = {f"{name}__token_adapter__trainable_tokens_delta__default": (2, 4) for name in both}
    for indices, stored_for in (([1, 2], ["embed_tokens"]), ({name: [1, 2] for name in both}, list(both))):
        made = exported({"r": 2, "lora_alpha": 1, "trainable_token_indices": indices}, **rows)
        assert sorted(name.split(".")[2] for name in made if "token_adapter" in name) == stored_for


def test_the_adapter_config_may_be_above_the_checkpoint_in_the_base_or_recorded_by_verl(zoo, tmp_path):
    found = planned(zoo / CASE / "ckpt")
    assert found.json(CONFIG)["lora_alpha"] == 16
    assert f"adapter config: {CASE}/peft_config.json" in found.export.notes
    bare = copied(zoo / CASE / "ckpt", tmp_path / "ckpt")
    assert planned(bare, zoo / CASE / "EXPECTED_adapter").json(CONFIG)["lora_alpha"] == 16
    with pytest.raises(UsageError, match=r"rank 4, on down_proj, q_proj, v_proj\).*but not its alpha"):
        planned(bare)
    with pytest.raises(UsageError, match="has no lora_alpha"):
        planned(bare, adapter_config={"r": 4})
    meta = {"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
    (bare / "lora_train_meta.json").write_text(json.dumps(meta))
    config = planned(bare).json(CONFIG)
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert {key: config[key] for key in meta} == meta


@pytest.mark.parametrize(("named", "repo", "made", "note"), [
    ("/home/me/llama", None, "/home/me/llama", "names /home/me/llama, a path on the machine that trained it, as"),
    (None, None, None, "the adapter config names nothing as the base model; --base ORG/NAME"),
    ("/home/me/llama", "org/llama", "org/llama", "names org/llama as the base model instead of /home/me/llama"),
    ("org/llama", "org/other", "org/llama", ""), (None, "org/llama", "org/llama", ""),
])  # fmt: skip
def test_a_local_base_path_is_noted_and_can_be_replaced_by_a_repo(zoo, named, repo, made, note):
    given = {"r": 4, "lora_alpha": 16, "base_model_name_or_path": named}
    found = planned(zoo / CASE / "ckpt", BaseModel("the base", repo=repo), adapter_config=given)
    assert found.json(CONFIG)["base_model_name_or_path"] == made
    on_card = f'base_model:\n- "{made}"' in found.files["README.md"].decode()
    assert on_card == (made is not None and made.startswith("org"))
    noted = [text for text in found.export.notes if "as the base model" in text]
    assert len(noted) == bool(note) and all(note in text for text in noted)


def test_an_attribute_before_the_prefix_of_peft_is_removed_from_names():
    split = split_adapter({f"actor.base_model.model.{name}": target for name, target in stored(**LINEAR_Q).items()})
    assert split is not None and list(split.base) == ["q.weight"]
    names = [f"base_model.model.q.lora_{half}.weight" for half in "AB"]
    assert sorted(export_adapter(split, {})[0]) == names


@pytest.mark.parametrize(("config", "more", "error", "said"), [
    ({"r": 2, "lora_alpha": 0}, {}, UsageError, "lora_alpha 0, which some tools write"),
    ({"r": 8, "lora_alpha": 1}, {}, CheckpointMismatchError, "has rank 8 for 'q', but its tensors have rank 2"),
    ({}, {"k__lora_A__default__weight": (2, 4)}, CheckpointMismatchError, "lora_A or lora_B is missing for: k"),
    ({}, {"q__lora_A__other__weight": (2, 4), "q__lora_B__other__weight": (6, 2)}, UnsupportedFormatError,
     "several adapters: default, other"),
])  # fmt: skip
def test_factors_that_do_not_fit_each_other_or_the_config_are_refused(config, more, error, said):
    with pytest.raises(error, match=said):
        adapter_config(config, lora(**more), base=None)


def test_names_without_adapters_are_not_split_and_their_merge_is_refused(zoo):
    assert split_adapter(stored(model__lora_head__weight=(2, 2))) is None
    with pytest.raises(UsageError, match="contains no adapter"):
        planned(zoo / "hf_ref_llama_tied", merge_adapter=True)


def test_rank_and_alpha_patterns_match_as_in_peft():
    config = {"r": 8, "lora_alpha": 16, "alpha_pattern": {"mlp.down_proj": 32}, "rank_pattern": {"q_proj": 4}}
    assert scaling(config, "model.layers.0.mlp.down_proj") == 4.0
    assert scaling(config, "model.layers.0.self_attn.q_proj") == 4.0
    assert scaling(config, "model.layers.0.xq_proj") == 2.0


def test_initializations_that_change_the_base_are_noted():
    (note,) = export_adapter(lora(), {"init_lora_weights": "pissa_niter_16"})[1]
    assert "only fits the changed weights" in note


@pytest.mark.parametrize("state", ["ia3_l.default", "vera_lambda_b.default", "hada_w1_a.default", "base_layer.bias"])
def test_an_adapter_of_another_kind_is_refused_and_its_base_is_exported_on_request(state, tmp_path):
    module = "base_model.model.layers.0.q_proj"
    tensors = {f"{module}.{name}": np.zeros((6, 4), np.float32) for name in ("base_layer.weight", state)}
    write_model(tmp_path, tensors)
    with pytest.raises(UnsupportedFormatError, match=r"other than LoRA: 'base_model.model.layers.0.q_proj'"):
        planned(tmp_path)
    found = planned(tmp_path, key_map=builtin_map("peft"), exclude=(f"*{state}",))
    assert found.names == {"layers.0.q_proj.weight"}
