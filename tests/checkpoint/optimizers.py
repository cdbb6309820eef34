"""Optimizers with states of every shape, and a model with few parameters.

Most are those of libraries. The ones that are written here keep states of kinds that no library keeps under
fully_shard (factors of a rank's shard, per-row vectors); their arithmetic is simplified.
"""

from __future__ import annotations

import collections
import importlib
import types
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim import Optimizer

from ckptkit.fsdp.master_weights import MasterWeightOptimizer

LR = 0.01
needs_flashoptim = pytest.mark.skipif(find_spec("flashoptim") is None, reason="it needs a newer numpy than the lowest")


SIZES = {"uneven": (6, 14, 4, 8), "even": (6, 12, 6, 12), "runs": (32, 32, 32, 32)}


class Net(nn.Module):
    """Uneven shards are so on three ranks; on two, a shard of `square` has the shape of one of its factors.

    The weights of "runs" have rows of 32 elements, and there are no biases.
    """

    def __init__(self, sizes: str = "uneven") -> None:
        super().__init__()
        self.width, up, pre, square = SIZES[sizes]
        self.up = nn.Linear(self.width, up, bias=sizes != "runs")
        self.down = nn.Linear(up, self.width, bias=sizes != "runs")
        self.pre = nn.Linear(self.width, pre, bias=False)
        self.square = nn.Linear(pre, square, bias=False)
        self.post = nn.Linear(square, self.width, bias=False)
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) + self.post(self.square(self.pre(x)))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Written(Optimizer):
    """Updates each parameter that has a gradient with `update`."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": LR})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lamb(Written):
    """A trust ratio per tensor, kept as a 0-D DTensor."""

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        moment = state.setdefault("exp_avg", torch.zeros_like(p))
        state["step"] = state.get("step", 0) + 1
        moment.mul_(0.9).add_(grad, alpha=0.1)
        ratio = whole((p * p).sum()).sqrt() / (whole((moment * moment).sum()).sqrt() + 1e-6)
        if isinstance(p, DTensor):
            ratio = DTensor.from_local(ratio, p.device_mesh, [Replicate()], run_check=False)
        state["ratio"] = ratio
        p.sub_(moment * ratio, alpha=group["lr"])


class LocalMoments(Written):
    """Plain moments of this rank's shard, as kernels without DTensor support keep them."""

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        moment = state.setdefault("exp_avg", torch.zeros_like(local(p)))
        moment.mul_(0.9).add_(local(grad))
        state.setdefault("step", torch.zeros(())).add_(1)
        local(p).sub_(moment, alpha=group["lr"])


def factors(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = grad if grad.dim() == 2 else grad[:, None]
    return flat @ flat.T, flat.T @ flat


class LocalShampoo(Written):
    """Factors of this rank's shard, in a list. On two ranks those of `square` have the shape of its shard."""

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        made = factors(local(grad))
        kept = state.setdefault("factors", [torch.zeros_like(factor) for factor in made])
        for factor, new in zip(kept, made, strict=True):
            factor.add_(new)
        local(p).sub_(kept[0] @ local(grad), alpha=group["lr"])


class NamedLocalShampoo(Written):
    """The same factors, each as a separate state."""

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        for name, new in zip(("left", "right"), factors(local(grad)), strict=True):
            state.setdefault(name, torch.zeros_like(new).T).add_(new)  # column-major
        local(p).sub_(state["left"] @ local(grad), alpha=group["lr"])


class WholeShampoo(Written):
    """Factors of the whole gradient, equal on all ranks; the moment is a DTensor."""

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        moment = state.setdefault("momentum", torch.zeros_like(p))
        full = whole(grad)
        for name, new in zip(("left", "right"), factors(full), strict=True):
            state.setdefault(name, torch.zeros_like(new)).add_(new)
        shaped = state["left"] @ full
        if isinstance(p, DTensor):
            mesh = p.device_mesh
            shaped = DTensor.from_local(shaped, mesh, [Replicate()], run_check=False).redistribute(mesh, p.placements)
        moment.mul_(0.9).add_(shaped)
        p.sub_(moment, alpha=group["lr"])


class Soap(Written):
    """Plain moments, lists of factors and bases (None for a dimension without one), and nested dicts."""

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        mine = local(grad)
        state.setdefault("exp_avg", torch.zeros_like(mine)).mul_(0.9).add_(mine)
        left, right = factors(mine)
        kept = state.setdefault("GG", [torch.zeros_like(left), None])
        kept[0].add_(left)
        state["base"] = torch.linalg.qr(right)[0]  # column-major
        state["Q"] = {"basis": (right * 2, None), "at": {"step": len(state), "never": None, "sizes": mine.shape}}
        local(p).sub_(state["exp_avg"], alpha=group["lr"]).sub_(kept[0] @ mine, alpha=group["lr"])


class Factored(Written):
    """A vector of rows, sharded like them, and one of columns, whole on each rank: DTensors of other shapes than the
    parameter."""

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if grad.dim() != 2:
            p.sub_(grad, alpha=group["lr"])
            return
        row, column = local(grad).square().mean(1), local(grad).square().sum(0)
        if isinstance(p, DTensor):
            mesh = p.device_mesh
            row = DTensor.from_local(row, mesh, [Shard(0)], run_check=False, shape=p.shape[:1], stride=(1,))
            column = DTensor.from_local(column, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()])
        state.setdefault("row", torch.zeros_like(row)).add_(row)
        state.setdefault("column", torch.zeros_like(column)).add_(column)
        state["rms"] = whole(state["column"]).sum().item()
        p.sub_(grad, alpha=group["lr"] / (1 + state["rms"]))
        p.sub_(state["row"][:, None] * state["column"][None], alpha=group["lr"])


class Queued(Written):
    """State that no load could restore without running code."""

    def update(self, p: Any, grad: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("queue", collections.deque(maxlen=2)).append(1.0)


class Owning(Written):
    """Like ZeRO: each rank has the states of some parameters only, and sends their new weights to the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for index, p in enumerate(parameters):
            owner = index % dist.get_world_size()
            if owner == dist.get_rank():
                moment = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
                moment.mul_(0.9).add_(p.grad)
                p.sub_(moment, alpha=LR / self.state[p]["steps"])
            dist.broadcast(p, owner)


def muon(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=LR)


def of_library(module: str, name: str, **settings: Any) -> Callable[[list[nn.Parameter]], Optimizer]:
    def made(parameters: list[nn.Parameter]) -> Optimizer:
        made: Optimizer = getattr(importlib.import_module(module), name)(parameters, **{"lr": LR, **settings})
        if "schedule" in module:
            made.train()  # type: ignore[attr-defined]
        return made

    return made


def galore(parameters: list[nn.Parameter]) -> Optimizer:
    from galore_torch import GaLoreAdamW

    low = {"rank": 2, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
    groups = [{"params": [p for p in parameters if p.dim() == 2], **low},
              {"params": [p for p in parameters if p.dim() != 2]}]  # fmt: skip
    made: Optimizer = GaLoreAdamW(groups, lr=LR)
    return made


def trac(parameters: list[nn.Parameter]) -> Optimizer:
    from pytorch_optimizer import TRAC

    made: Optimizer = TRAC(torch.optim.AdamW(parameters, lr=LR))
    return made


def masters(parameters: list[nn.Parameter]) -> Optimizer:
    return MasterWeightOptimizer(torch.optim.AdamW(parameters, lr=LR))


def of_flashoptim(name: str, bits: int | None, **settings: Any) -> Callable[[list[nn.Parameter]], Optimizer]:
    """With `bits`, states are quantized and the masters of bf16 parameters have that many bits, as on a GPU.

    The library's kernels then run in Triton's interpreter, and its checks for a GPU are disabled.
    """

    def made(parameters: list[nn.Parameter]) -> Optimizer:
        import flashoptim.optimizers as library

        if bits is not None and library.torch is torch:
            cuda = types.SimpleNamespace(is_available=lambda: True)
            library.torch = Replaced(torch, cuda=cuda, Tensor=torch.Tensor)
            library.libdevice = types.SimpleNamespace(
                copysign=lambda a, b: library.tl.where(b < 0, -library.tl.abs(a), library.tl.abs(a))
            )
            library._get_sm_count = lambda device=None: 4
            library._MaybeQuantizedTensor.set_data = set_data
            for kernel in (library._triton_quantize_kernel, library._triton_dequantize_kernel):
                kernel.configs = kernel.configs[:1]  # more than one would be compared on a GPU
        options = {"quantize": bits is not None, "master_weight_bits": bits, "fused": False, **settings}
        kept: Optimizer = getattr(library, name)(parameters, lr=LR, **options)
        return kept

    return made


class Replaced(types.ModuleType):
    """A module with other values of some attributes."""

    def __init__(self, module: Any, **attributes: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(attributes)
        self.replaced = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replaced, name)


def set_data(self: Any, data: torch.Tensor) -> None:
    """The library's method without its check for a GPU."""
    import flashoptim.optimizers as library

    self._data = self._quantized = self._scales = None
    if self._try_quantize:
        self._quantized, self._scales = library.quantize(
            data, signed=self._signed, sqrt=self._sqrt, softsign=self._softsign
        )
    else:
        self._data = data.to(dtype=self._storage_dtype)


NETS = {
    **dict.fromkeys(("Prodigy", "FlashAdamW"), "even"),  # they flatten, which DTensor allows only for even shards
    "FlashAdamW of flashoptim": "runs",
}


def made(name: str, seed: int, sharded: bool) -> tuple[Net, Any]:
    """Return a model and the optimizer of that name in `MAKERS`."""
    torch.manual_seed(seed)
    model = Net(NETS.get(name, "uneven"))
    if name.startswith("masters") or name in LOW:
        model = model.to(torch.bfloat16)
    if sharded:
        for part in (model.up, model.square, model):
            fully_shard(part)
    return model, MAKERS[name](list(model.parameters()))


def train(model: Net, optimizer: Any, steps: range) -> None:
    """Each rank has different data; gradients that FSDP does not reduce are averaged here."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(
            torch.randn(4, model.width, generator=generator).to(model.unused.dtype)
        ).float().square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


LOW = [
    f"Flash{name} of flashoptim{more}"
    for name in ("AdamW", "Lion", "SGD")
    for more in ("", ", split runs", ", no momentum")
]
"""Optimizers of bf16 parameters."""

MAKERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    **{name: of_library("torch.optim", name) for name in ("Adafactor", "Adagrad", "ASGD", "NAdam", "Rprop")},
    "AdamW": of_library("torch.optim", "AdamW", amsgrad=True),
    "SGD": of_library("torch.optim", "SGD", momentum=0.9),
    "RMSprop": of_library("torch.optim", "RMSprop", momentum=0.9, centered=True),
    "Muon": muon,
    "Adafactor of transformers": of_library(
        "transformers.optimization", "Adafactor", scale_parameter=False, relative_step=False, beta1=0.9
    ),
    "AdamW8bit of bitsandbytes": of_library("bitsandbytes.optim", "AdamW8bit", min_8bit_size=16),
    "LAMB8bit of bitsandbytes": of_library("bitsandbytes.optim", "LAMB8bit", min_8bit_size=16),
    "masters of AdamW": masters,
    "LAMB": Lamb,
    "local moments": LocalMoments,
    "factored moments": Factored,
    "Shampoo": WholeShampoo,
    "Shampoo of each rank": LocalShampoo,
    "Shampoo of each rank, by name": NamedLocalShampoo,
    "SOAP of each rank": Soap,
    "queue": Queued,
    "ZeRO": Owning,
    "Lion": of_library("lion_pytorch", "Lion"),
    "schedule-free": of_library("schedulefree", "AdamWScheduleFree"),
    "schedule-free SGD": of_library("schedulefree", "SGDScheduleFree"),
    "Prodigy": of_library("prodigyopt", "Prodigy", lr=1.0),
    "GaLore": galore,
    **{
        name: of_library("pytorch_optimizer", name)
        for name in ("AdEMAMix", "AggMo", "APOLLO", "CAME", "FlashAdamW", "Kron", "SPlus")
    },
    "SOAP": of_library("pytorch_optimizer", "SOAP", precondition_frequency=2),
    "Shampoo of pytorch_optimizer": of_library("pytorch_optimizer", "Shampoo"),
    "scalable Shampoo": of_library("pytorch_optimizer", "ScalableShampoo"),
    "FlashAdamW of flashoptim": of_flashoptim("FlashAdamW", 24),
    "FlashAdamW of flashoptim, split runs": of_flashoptim("FlashAdamW", 32),
    "FlashAdam of flashoptim, plain": of_flashoptim("FlashAdam", None),
    "FlashLion of flashoptim": of_flashoptim("FlashLion", 24),
    "FlashSGD of flashoptim": of_flashoptim("FlashSGD", 24, momentum=0.9),
    "FlashSGD of flashoptim, no momentum": of_flashoptim("FlashSGD", 32),
    "GaLore of pytorch_optimizer": of_library("pytorch_optimizer", "GaLore"),
    "Adafactor of pytorch_optimizer": of_library("pytorch_optimizer", "AdaFactor"),
    "TRAC": trac,
    "Ranger21": of_library("pytorch_optimizer", "Ranger21", num_iterations=100),
}
