"""vLLM loads exports, plain and in block FP8, and computes what transformers computes with the same weights.

`PYTHON_WITH_VLLM` names the Python of an environment that has vLLM for CPUs; `make test-vllm` makes one.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import CheckpointManager, TrainState, convert
from tests.lazy import LazyModule
from tests.offline.exports import read_model

transformers = LazyModule("transformers")

PYTHON = os.environ.get("PYTHON_WITH_VLLM", "")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs vLLM: make test-vllm"),
    pytest.mark.timeout(900),
]
SIZES = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.1,
         "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2, "head_dim": 64},
    # k and v have 64 rows, which is not a multiple of 128, so q keeps its dtype too.
    "Qwen3": {"num_key_value_heads": 1, "head_dim": 64, "tie_word_embeddings": True,
              "max_window_layers": 2},
    "Qwen3Moe": {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 128, "norm_topk_prob": True},
    # The attention of DeepSeek-V3: kv_a_proj_with_mqa has 576 rows, so q_a_proj keeps its dtype too.
    "DeepseekV3": {"num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                   "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
                   "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 128,
                   "first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}  # fmt: skip
PROMPTS = [[1, *((7 * i * i + 3 * i + seed) % 300 + 10 for i in range(24))] for seed in range(3)]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export each model plain (`KIND`) and in FP8 (`KIND-fp8`), and let vLLM run all of them in one process."""
    folder = tmp_path_factory.mktemp("exports")
    for kind, sizes in MODELS.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SIZES, **sizes)
        run = str(folder / "runs" / kind)
        with CheckpointManager(run) as manager:
            manager.save(1, TrainState(model=getattr(transformers, f"{kind}ForCausalLM")(config), step=1))
        convert(run, str(folder / kind), verify=True)
        convert(run, str(folder / f"{kind}-fp8"), dtype="bf16", quantize="fp8-block", verify=True)
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    subprocess.run([PYTHON, str(Path(__file__).with_name("vllm_job.py")), str(folder)], check=True)
    return folder


def in_vllm(model: Path) -> dict[str, Any]:
    error = model.with_suffix(".error")
    assert not error.exists(), error.read_text()
    made: dict[str, Any] = torch.load(model.with_suffix(".pt"), weights_only=True)
    return made


def check_outputs(found: dict[str, Any], model: Path, tolerance: float) -> None:
    """Compare the log probability of each token, and require that each greedy token is transformers' choice."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model)
    for prompt, request in zip(PROMPTS, found["found"], strict=True):
        every = [*prompt, *request["tokens"]]
        with torch.no_grad():
            scores = loaded(torch.tensor([every])).logits[0].float().log_softmax(-1)
        expected = scores[range(len(prompt) - 1), prompt[1:]]
        torch.testing.assert_close(torch.tensor(request["logprobs"]), expected, atol=tolerance, rtol=0)
        chosen = scores[len(prompt) - 1 : -1]
        lost = chosen.amax(-1) - chosen[range(len(request["tokens"])), request["tokens"]]
        assert lost.max() <= 2 * tolerance  # a tie may be decided either way


@pytest.mark.parametrize("kind", MODELS)
def test_vllm_computes_with_a_plain_export_what_transformers_computes(exports, kind):
    check_outputs(in_vllm(exports / kind), exports / kind, 1e-3)


def fused(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what vLLM's parameter should hold: the file's tensors, joined along their rows."""
    for whole, parts in {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    }.items():  # fmt: skip
        if f".{whole}." in name:
            return torch.cat([tensors[name.replace(whole, part)] for part in parts])
    for whole, parts in {"w13_": ("gate_proj", "up_proj"), "w2_": ("down_proj",)}.items():
        head, found, last = name.rpartition(f".{whole}")
        if found:
            head = head.removesuffix(".routed_experts")
            count = len({n for n in tensors if n.startswith(f"{head}.") and n.endswith(f".down_proj.{last}")})
            rows = [[tensors[f"{head}.{i}.{part}.{last}"] for part in parts] for i in range(count)]
            return torch.stack([torch.cat(one) for one in rows])
    return tensors[name]


@pytest.mark.parametrize("kind", MODELS)
def test_vllm_loads_each_code_and_scale_of_an_fp8_export(tmp_path, exports, kind):
    source = exports / f"{kind}-fp8"
    made, tensors = in_vllm(source), read_model(source)
    convert(str(source), str(tmp_path / "plain"), dtype="bf16", verify=True)
    scaled = {name for name in made["weights"] if name.endswith("weight_scale_inv")}
    assert scaled
    for name in scaled:
        for each in (name, name.removesuffix("_scale_inv")):
            expected = fused(each, tensors)
            assert made["weights"][each].dtype == expected.dtype, each
            assert torch.equal(made["weights"][each].float(), expected.float()), each
    check_outputs(made, tmp_path / "plain", 0.25)  # bf16 keeps 8 bits of logits up to 8, and rounds in each layer
