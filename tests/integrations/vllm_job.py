"""Loads each model of a folder into vLLM on the CPU, and writes its tokens, its logprobs and the weights it loaded.

    python vllm_job.py FOLDER   # in an environment with vLLM; tests/integrations/test_vllm.py starts it

vLLM has FP8 kernels only for CPUs with AMX. On other CPUs, this job replaces those kernels by matrix products with the
dequantized weights. The rest is vLLM's code: config, choice of layers, fused weights, loading, attention, sampling.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_BLOCK_KERNELS
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.platforms.interface import PlatformEnum


def dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return codes [..., rows, columns] times the scales of their blocks of 128 x 128, in float32."""
    wide = scales.float().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return codes.float() * wide[..., : codes.shape[-2], : codes.shape[-1]]


class TorchBlockKernel(Fp8BlockScaledMMLinearKernel):
    """Multiplies unquantized inputs with dequantized weights."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> torch.Tensor:
        return torch.nn.functional.linear(A, dequantized(B, Bs).to(A.dtype))


def torch_experts(
    output: Any, hidden: Any, w1: Any, w2: Any, weights: Any, ids: Any, method: Any, s1: Any, s2: Any, *rest: Any
) -> None:
    """Write the weighted sum of the outputs of each token's experts to `output`."""
    made = torch.zeros(hidden.shape, dtype=torch.float32)
    for token, slot in ((t, s) for t in range(ids.shape[0]) for s in range(ids.shape[1])):
        expert = int(ids[token, slot])
        gate, up = (hidden[token] @ dequantized(w1[expert], s1[expert]).to(hidden.dtype).T).chunk(2)
        act = torch.nn.functional.silu(gate) * up
        made[token] += weights[token, slot] * (act @ dequantized(w2[expert], s2[expert]).to(hidden.dtype).T).float()
    output.copy_(made)


def loaded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters under vLLM's names."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def main(folder: str) -> None:
    if not torch.cpu._is_amx_tile_supported():
        _POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [TorchBlockKernel]
        cpu_moe.CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)
        cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)
        cpu_moe.fused_experts_cpu = torch_experts
    prompts = json.loads(Path(folder, "prompts.json").read_text())
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, prompt_logprobs=0, detokenize=False)
    for model in sorted(path.parent for path in Path(folder).glob("*/config.json")):
        try:
            torch.save(run(model, prompts, params), model.with_suffix(".pt"))
        except Exception:
            model.with_suffix(".error").write_text(traceback.format_exc())
        cleanup_dist_env_and_memory()


def run(model: Path, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    dtype = json.loads((model / "config.json").read_text())["dtype"]  # vLLM would cast float32 to bfloat16
    # vLLM 0.32's own two versions of the rotary embedding differ for queries of shape [tokens, heads, size], which
    # DeepSeek has: the kernel for CPUs is wrong. Use the other version.
    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        dtype=dtype,
        compilation_config={"custom_ops": ["-rotary_embedding"]},
    )
    found = []
    for request in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False):
        scored = [next(iter(one.values())).logprob for one in (request.prompt_logprobs or [])[1:] if one]
        found.append({"tokens": list(request.outputs[0].token_ids), "logprobs": scored})
    (weights,) = llm.apply_model(loaded)
    return {"found": found, "weights": weights}


if __name__ == "__main__":
    main(*sys.argv[1:])
