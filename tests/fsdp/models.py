"""Small models, and training loops to compare sharded runs with."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptkit.fsdp import FSDPConfig, FSDPStrategy
from tests import dtensors

VOCAB, WIDTH, SAMPLES, LENGTH = 19, 12, 8, 5
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
# Sharding strategies, and what else their configs need on four ranks.
STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {},
    "HYBRID_SHARD": {"shard": 2},
    "HYBRID_SHARD_ZERO2": {"shard": 2},
    "NO_SHARD": {},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """Token embedding, two blocks, and a head that may be tied to the embedding. No size is divisible by 4."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Actor(nn.Module):
    """A trainer's own module around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(tokens)


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, 2, bias=False)
        self.lora_b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def untied() -> nn.Module:
    return TinyLM()


def tied() -> nn.Module:
    return TinyLM(tied=True)


def frozen() -> nn.Module:
    """The embedding and the first block are frozen."""
    model = TinyLM()
    model.embed.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


def lora() -> nn.Module:
    """Only the adapters inside each block are trained."""
    model = TinyLM().requires_grad_(False)
    for layer in model.layers:
        layer.up, layer.down = LoRALinear(layer.up), LoRALinear(layer.down)
    return model


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "max_position_embeddings": 32, **options}))


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True)


def qwen_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"moe_intermediate_size": 12, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, decoder_sparse_step=1))


def made(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def batch(step: int) -> torch.Tensor:
    """Return the whole batch of a step, the same on every rank."""
    return torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1000 + step))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    out = model(tokens)
    logits = getattr(out, "logits", out)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return dtensors.whole(tensor.detach()).cpu().clone()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters as whole tensors. All ranks must call it."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that both have the same names, and tensors that are equal bit for bit."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def difference(model: nn.Module, expected: nn.Module) -> float:
    """Return the largest difference of an element of the weights. All ranks must call it."""
    found = weights(model)
    return max((found[name].to(value.dtype) - value).abs().max().item() for name, value in weights(expected).items())


def prepared(
    config: Mapping[str, Any] | None = None,
    build: Callable[[], nn.Module] = untied,
    *,
    seed: int = 0,
    lr: float | None = None,
    weight_decay: float = 0.0,
    factory: Callable[..., torch.optim.Optimizer] | None = None,
    tp_plan: Any = None,
    **options: Any,
) -> tuple[FSDPStrategy, Any, Any]:
    """Return a strategy with these options, the model sharded by it, and its optimizer."""
    strategy = FSDPStrategy(FSDPConfig.from_dict(dict(config or {})), **options)
    model = strategy.prepare_model(made(build, seed), tp_plan=tp_plan)
    return strategy, model, strategy.create_optimizer(model, lr=lr, weight_decay=weight_decay, factory=factory)


def step(
    strategy: FSDPStrategy, model: nn.Module, optimizer: torch.optim.Optimizer, index: int = 0, factor: float = 1.0,
    *, device: str = "cpu",
) -> bool:  # fmt: skip
    """Run forward and backward on the whole batch of a step; return whether the optimizer stepped."""
    strategy.backward(loss_of(model, batch(index).to(device)) * factor, model, optimizer)
    return strategy.optimizer_step(optimizer, model)


def train_sharded(
    model: nn.Module,
    strategy: FSDPStrategy,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int] = range(3),
    *,
    device: str = "cpu",
) -> tuple[list[float], list[float]]:
    """Return losses over the whole batch and gradient norms of a sharded run, with a part per data-parallel rank."""
    micro = strategy.accumulated_gradient
    losses, norms = [], []
    for step in steps:
        mine = batch(step).chunk(strategy.data_parallel_size)[strategy.data_parallel_rank].to(device)
        total = torch.zeros(())
        for tokens in mine.chunk(micro):
            loss = loss_of(model, tokens)
            strategy.backward(loss, model, optimizer)
            stepped = strategy.optimizer_step(optimizer, model)
            total += loss.detach().cpu() / micro
        assert stepped
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        norms.append(strategy.last_grad_norm.item())
    return losses, norms


def run(
    config: dict[str, Any], build: Callable[[], nn.Module], *, device: str = "cpu", max_norm: float = 0.0,
    lr: float = 1e-2, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train `build()` in a single process on whole batches, and sharded; return losses, norms and weights of both."""
    plain = made(build).to(device)
    trainable = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    other = torch.optim.AdamW(trainable, lr=lr, weight_decay=0.0)
    plain_losses, plain_norms = [], []
    for index in range(3):
        loss = loss_of(plain, batch(index).to(device))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trainable, max_norm or float("inf"), options.get("norm_type", 2.0))
        other.step()
        other.zero_grad()
        plain_losses.append(loss.item())
        plain_norms.append(norm.item())
    seed = dist.get_rank()  # rank 0's values are broadcast
    strategy, model, optimizer = prepared(config, build, seed=seed, lr=lr, max_norm=max_norm, **options)
    losses, norms = train_sharded(model, strategy, optimizer, device=device)
    return {
        "plain": (plain_losses, plain_norms, weights(plain)),
        "sharded": (losses, norms, weights(model)),
        "meshes": {name: p.device_mesh.mesh_dim_names for name, p in model.named_parameters()},
    }
