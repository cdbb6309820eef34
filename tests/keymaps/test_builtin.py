"""Built-in key maps, compared with what transformers saves and with torchtitan's layout."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckptkit.catalog.targets import Target
from ckptkit.errors import UsageError
from ckptkit.keymaps.builtin import BUILTIN_MAPS, builtin_map, choose_map, map_for_model_type
from tests.catalog.materialize import materialize, whole_target


def targets_of(arrays: dict[str, Any]) -> dict[str, Target]:
    return {name: whole_target(name, tuple(array.shape)) for name, array in arrays.items()}


def assert_same(found: dict[str, Target], sources: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, target in found.items():
        assert np.array_equal(materialize(target, sources), expected[name]), name


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "max_position_embeddings": 64,
    "shared_expert_intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "moe_shared_expert_intermediate_size": 24, "tie_word_embeddings": False,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
              "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
                         "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "minimax": {"layer_types": ["full_attention", "linear_attention"]},
    "exaone_moe": {"layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense", "sparse"]},
    "nemotron_h": {"hybrid_override_pattern": "ME", "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8,
                   "n_groups": 1},
}  # fmt: skip


def tiny_model(model_type: str) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = transformers.CONFIG_MAPPING[model_type]
        known = kind()
        sizes = {k: v for k, v in SIZES.items() if hasattr(known, k)}
        model = transformers.AutoModelForCausalLM.from_config(kind(**{**sizes, **MORE.get(model_type, {})}))
        for parameter in model.parameters():  # from_config leaves some experts uninitialized
            torch.nn.init.normal_(parameter)
    return model


def saved_by_transformers(model: Any, directory: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the tensors in memory, the tensors that save_pretrained writes, and its config.json."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory)
    memory = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    return memory, load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize(
    "model_type",
    ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "phimoe", "jamba", "lfm2_moe", "minimax",
     "minimax_m2", "ernie4_5_moe", "glm4_moe", "exaone_moe", "dots1", "nemotron_h", "granitemoe", "qwen3_5_moe_text"],
)  # fmt: skip
def test_the_map_of_a_model_type_gives_the_names_that_transformers_saves(model_type, tmp_path):
    memory, hub, config = saved_by_transformers(tiny_model(model_type), tmp_path)
    if model_type == "granitemoe" and set(memory) == set(hub):
        pytest.skip("this transformers saves granitemoe under the names in memory")
    key_map = map_for_model_type(model_type)
    assert key_map is not None
    there = key_map.apply(targets_of(memory), config=config)
    assert_same(dict(there.targets), memory, hub)
    back = key_map.inverse().apply(targets_of(hub), config=config)
    assert_same(dict(back.targets), hub, memory)
    # The names of a base model are enough to find the same map, whatever its config says.
    chosen = choose_map(targets_of(memory), wanted=hub, config={})
    assert_same(dict(chosen.mapped.targets), memory, hub)


@pytest.mark.parametrize("model_type", ["gpt_oss", "llama"])
def test_names_that_match_the_hub_are_kept(model_type, tmp_path):
    memory, hub, config = saved_by_transformers(tiny_model(model_type), tmp_path)
    assert set(memory) == set(hub)
    chosen = choose_map(targets_of(memory), config=config)
    assert chosen.key_map.name == "hf"
    assert_same(dict(chosen.mapped.targets), memory, hub)


@pytest.fixture
def titan(zoo):
    """The tensors of a torchtitan model, those of the same model on the hub, and its config."""
    case = zoo / "torchtitan_llama3_names_w2"
    config = json.loads((case / "EXPECTED_hf/config.json").read_text())
    return load_file(case / "EXPECTED.safetensors"), load_file(case / "EXPECTED_hf/model.safetensors"), config


def test_torchtitan_llama3_gives_the_hf_names_and_rotary_layout(titan):
    native, hub, config = titan
    for options in ({}, {"wanted": hub}):
        chosen = choose_map(targets_of(native), config=config, **options)
        assert chosen.key_map.name == "torchtitan-llama3"
        assert_same(dict(chosen.mapped.targets), native, hub)
    back = builtin_map("inverse:torchtitan-llama3").apply(targets_of(hub), config=config)
    assert_same(dict(back.targets), hub, native)


def test_torchtitan_without_a_config_keeps_its_names_and_asks_for_a_base(titan):
    native, _, _ = titan
    chosen = choose_map(targets_of(native))
    assert set(chosen.mapped.targets) == set(native)
    assert "Give --base MODEL" in chosen.doubt
    with pytest.raises(UsageError, match="Give --base"):  # the map alone does not help
        builtin_map("torchtitan-llama3").apply(targets_of(native))


def test_torchtunes_names_are_not_taken_for_torchtitans():
    names = ("tok_embeddings.weight", "layers.0.attn.q_proj.weight", "output.weight")
    chosen = choose_map(targets_of({name: np.zeros((2, 2), np.float32) for name in names}))
    assert list(chosen.mapped.targets) == list(names) and not chosen.doubt


def test_older_names_of_torchtitan_are_mapped(titan):
    native, hub, config = titan
    older = {n.replace("qkv_linear.", "").replace("lm_head", "output"): a for n, a in native.items()}
    mapped = builtin_map("torchtitan-llama3").apply(targets_of(older), config=config)
    assert_same(dict(mapped.targets), older, hub)


@pytest.mark.parametrize("name", [name for name in BUILTIN_MAPS if name != "peft"])
def test_every_layout_map_has_an_inverse(name):
    builtin_map(f"inverse:{name}")


@pytest.mark.parametrize("suffix", ["", "_EFD"])
def test_torchtitan_qwen3_experts_become_one_tensor_each(suffix):
    gate = np.arange(24.0).reshape(2, 3, 4)
    native = {f"layers.0.moe.experts.w1{suffix}": gate, "layers.0.moe.router.gate.weight": np.ones((2, 4)),
              "layers.0.moe.tokens_per_expert": np.ones(2)}  # fmt: skip
    mapped = builtin_map("torchtitan-qwen3").apply(targets_of(native))
    expected = {f"model.layers.0.mlp.experts.{i}.gate_proj.weight": gate[i] for i in range(2)}
    assert_same(dict(mapped.targets), native, {**expected, "model.layers.0.mlp.gate.weight": np.ones((2, 4))})
    assert list(mapped.dropped) == ["layers.0.moe.tokens_per_expert"]


@pytest.mark.parametrize(("name", "memory", "hub"), [
    ("vlm-llava", "model.language_model.layers.0.w", "language_model.model.layers.0.w"),
    ("vlm-llava", "lm_head.weight", "language_model.lm_head.weight"),
    ("vlm-llava", "model.vision_tower.w", "vision_tower.w"),
    ("vlm-vision-model", "vision_tower.encoder.w", "vision_tower.vision_model.encoder.w"),
    ("vlm-qwen2", "model.language_model.norm.weight", "model.norm.weight"),
    ("vlm-qwen2", "model.visual.blocks.0.w", "visual.blocks.0.w"),
    ("vlm-qwen2", "lm_head.weight", "lm_head.weight"),
])  # fmt: skip
def test_vlm_prefixes_are_mapped_in_both_directions(name, memory, hub):
    assert list(builtin_map(name).apply(targets_of({memory: np.ones(1)})).targets) == [hub]
    assert list(builtin_map(f"inverse:{name}").apply(targets_of({hub: np.ones(1)})).targets) == [memory]


@pytest.mark.parametrize(("model_type", "memory", "hub"), [
    ("gemma3", "model.language_model.norm.weight", "language_model.model.norm.weight"),
    ("qwen2_5_vl", "model.language_model.norm.weight", "model.norm.weight"),
    ("qwen3_vl", "model.language_model.norm.weight", "model.language_model.norm.weight"),
    ("llava", "language_model.norm.weight", "language_model.norm.weight"),
    ("gpt_neox", "lm_head.weight", "embed_out.weight"),
    ("gpt2", "lm_head.weight", "lm_head.weight"),
])  # fmt: skip
def test_the_model_type_is_enough_to_choose_the_prefixes_of_the_hub(model_type, memory, hub):
    chosen = choose_map(targets_of({memory: np.ones(1)}), config={"model_type": model_type})
    assert list(chosen.mapped.targets) == [hub]


def test_a_vision_tower_one_module_deeper_in_the_base_is_matched():
    memory = {"model.language_model.norm.weight": np.ones(1), "model.vision_tower.encoder.w": np.ones(1)}
    hub = ["language_model.model.norm.weight", "vision_tower.vision_model.encoder.w"]
    assert sorted(choose_map(targets_of(memory), wanted=hub).mapped.targets) == hub


def test_names_that_fit_the_base_are_never_mapped():
    names = {"model.layers.0.mlp.experts.gate_up_proj": np.ones((2, 4, 3)), "extra": np.ones(1)}
    chosen = choose_map(targets_of(names), wanted=["model.layers.0.mlp.experts.gate_up_proj"],
                        config={"model_type": "qwen3_moe"})  # fmt: skip
    assert chosen.key_map.name == "hf"


def test_two_maps_are_combined_if_one_is_not_enough():
    memory = {"model.language_model.layers.0.mlp.experts.gate_up_proj": np.arange(24.0).reshape(2, 4, 3),
              "model.visual.w": np.ones(1), "lm_head.weight": np.ones(1)}  # fmt: skip
    up_and_gate = [f"model.layers.0.mlp.experts.{i}.{x}_proj.weight" for i in range(2) for x in ("gate", "up")]
    chosen = choose_map(targets_of(memory), wanted=[*up_and_gate, "visual.w", "lm_head.weight"])
    assert set(chosen.mapped.targets) == {*up_and_gate, "visual.w", "lm_head.weight"}
    assert sorted(chosen.key_map.name.split(", then ")) == ["hf5-experts", "vlm-qwen2"]


def test_unknown_maps_are_refused_with_the_list():
    with pytest.raises(UsageError, match="there is no key map 'hf6'") as caught:
        builtin_map("hf6")
    assert all(name in str(caught.value) for name in BUILTIN_MAPS)
