"""Every optimizer resumes bit-exactly in every checkpoint type on every number of ranks, or is refused by name."""

import contextlib
import importlib
import types
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim import Optimizer

from ckptkit import TrainState, convert, reshard, verify
from ckptkit.errors import CheckpointMismatchError
from ckptkit.formats.dcp.subclasses import with_lower_bits as of_a_load
from ckptkit.fsdp import MasterWeightOptimizer
from ckptkit.offline.export.dequantize_formulas import Stored, with_lower_bits
from tests.checkpoint.states import KINDS, bits, check_misfit, different, load, load_all, refusal, save
from tests.dtensors import local, whole
from tests.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # libraries use deprecated functions of torch
LR = 0.01
needs_flashoptim = pytest.mark.skipif(find_spec("flashoptim") is None, reason="it needs a newer numpy than the lowest")
WIDTHS = {"uneven": (6, 14, 4, 8), "even": (6, 12, 6, 12), "runs": (32, 32, 32, 32)}


class Net(nn.Module):
    """With "uneven", shards are uneven on three ranks. On two, a shard of `square` has the shape of one of its factors.

    The weights of "runs" have rows of 32 elements, and there are no biases.
    """

    def __init__(self, sizes: str = "uneven") -> None:
        super().__init__()
        self.width, up, pre, square = WIDTHS[sizes]
        self.up = nn.Linear(self.width, up, bias=sizes != "runs")
        self.down = nn.Linear(up, self.width, bias=sizes != "runs")
        self.pre = nn.Linear(self.width, pre, bias=False)
        self.square = nn.Linear(pre, square, bias=False)
        self.post = nn.Linear(square, self.width, bias=False)
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) + self.post(self.square(self.pre(x)))


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
    """Plain moments, lists of factors and bases (None for a dimension without one), and nested dicts.

    On two ranks, a factor and the basis of `square` have the shape of its shard.
    """

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


def of_library(module: str, name: str, **settings: Any) -> Callable[[Any], Optimizer]:
    def made(parameters: Any) -> Optimizer:
        made: Optimizer = getattr(importlib.import_module(module), name)(parameters, **{"lr": LR, **settings})
        if "schedule" in module:
            made.train()  # type: ignore[attr-defined]
        return made

    return made


def galore(parameters: list[nn.Parameter]) -> Optimizer:
    low = {"rank": 2, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
    groups = [{"params": [p for p in parameters if p.dim() == 2], **low},
              {"params": [p for p in parameters if p.dim() != 2]}]  # fmt: skip
    return of_library("galore_torch", "GaLoreAdamW")(groups)


def of_flashoptim(name: str, bits: int | None, **settings: Any) -> Callable[[list[nn.Parameter]], Optimizer]:
    """With `bits`, states are quantized and the masters of bf16 parameters have that many bits, as on a GPU.

    The library's kernels then run in Triton's interpreter, and its checks for a GPU are disabled.
    """

    def made(parameters: list[nn.Parameter]) -> Optimizer:
        import flashoptim.optimizers as library

        if bits is not None and library.torch is torch:
            cuda = types.SimpleNamespace(is_available=lambda: True)
            library.torch = types.SimpleNamespace(**{**vars(torch), "cuda": cuda})
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


def made(name: str, seed: int, sharded: bool, steps: range = range(0)) -> TrainState:
    """Return a model and the optimizer of that name in `MAKERS`, after some steps."""
    torch.manual_seed(seed)
    model = Net(NETS.get(name, "uneven"))
    if name.startswith("masters") or name in LOW:
        model = model.to(torch.bfloat16)
    if sharded:
        for part in (model.up, model.square, model):
            fully_shard(part)
    return train(TrainState(model=model, optimizer=MAKERS[name](list(model.parameters()))), steps)


def train(state: TrainState, steps: range) -> TrainState:
    """Each rank has different data; gradients that FSDP does not reduce are averaged here."""
    model: Any = state.model
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(
            torch.randn(4, model.width, generator=generator).to(model.unused.dtype)
        ).float().square().mean().backward()
        for parameter in model.parameters():
            if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        state.optimizer.step()
        state.optimizer.zero_grad()
    return state


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
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=LR),
    "Adafactor of transformers": of_library(
        "transformers.optimization", "Adafactor", scale_parameter=False, relative_step=False, beta1=0.9
    ),
    "AdamW8bit of bitsandbytes": of_library("bitsandbytes.optim", "AdamW8bit", min_8bit_size=16),
    "LAMB8bit of bitsandbytes": of_library("bitsandbytes.optim", "LAMB8bit", min_8bit_size=16),
    "masters of AdamW": lambda parameters: MasterWeightOptimizer(torch.optim.AdamW(parameters, lr=LR)),
    "local moments": LocalMoments,
    "factored moments": Factored,
    "Shampoo": WholeShampoo,
    "SOAP of each rank": Soap,
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
    "TRAC": lambda parameters: importlib.import_module("pytorch_optimizer").TRAC(torch.optim.AdamW(parameters, lr=LR)),
    "Ranger21": of_library("pytorch_optimizer", "Ranger21", num_iterations=100),
}


SIZES = (2, 1, 3)
ELSEWHERE = {1: 2, 2: 3, 3: 1}

# By the number of ranks that saved: the text of the refusal on another number of ranks; all others load.
Refused = dict[int, str]

LIBRARIES: dict[str, Refused] = {
    "Lion": {},
    "schedule-free": {},
    "schedule-free SGD": {},
    "Prodigy": {2: "param_groups.0.d, ", 3: "param_groups.0.d, "},
    "GaLore": dict.fromkeys(SIZES, "up.weight.projector"),
    "FlashAdamW": {},
    "FlashAdamW of flashoptim": {},
    "FlashAdamW of flashoptim, split runs": dict.fromkeys(SIZES, "up.weight.exp_avg is _MaybeQuantizedTensor"),
    "FlashAdam of flashoptim, plain": {},
    "FlashLion of flashoptim": dict.fromkeys(SIZES, "up.weight.exp_avg is _MaybeQuantizedTensor"),
    "FlashSGD of flashoptim, no momentum": {},
    "FlashSGD of flashoptim": dict.fromkeys(SIZES, "up.weight.momentum_buffer is _MaybeQuantizedTensor"),
    **{name: {} for name in ("GaLore of pytorch_optimizer", "AdEMAMix", "AggMo", "APOLLO")},
}
"""Optimizers of libraries that can step DTensors; they run at night."""

SHARDED: dict[str, Refused] = {
    "factored moments": {},  # the first one runs by day
    **{name: {} for name in ("AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "ASGD", "Muon", "masters of AdamW")},
    "local moments": {},
    "Shampoo": {1: "up.weight.left"},
    "SOAP of each rank": {1: "up.weight.GG", 2: "down.weight.exp_avg", 3: "down.weight.exp_avg"},
    **LIBRARIES,
}
"""Parameters sharded by fully_shard."""

REPLICATED: dict[str, Refused] = {
    **{name: {} for name in ("Adafactor", "AdamW", "Muon", "Rprop", "Adafactor of transformers")},  # the first by day
    **{name: {} for name in ("AdamW8bit of bitsandbytes", "LAMB8bit of bitsandbytes", "masters of AdamW")},
    "SOAP of each rank": {},
    "ZeRO": {2: "up.weight, ", 3: "up.weight, "},
    **{name: {} for name in LIBRARIES},
    **{name: {} for name in ("SOAP", "SPlus", "Shampoo of pytorch_optimizer")},
    **{name: {} for name in ("Adafactor of pytorch_optimizer", "CAME", "Kron")},
}
"""Parameters whole on each rank, as under DDP; some of these optimizers support no others."""

NOT_SAVED = {
    "TRAC": "optimizer.shared.trac: a dict has tensors as keys",
    "Ranger21": "the state_dict of Ranger21 has 'lookahead_step', 'starting_lr', 'current_lr', but only 'state' ",
    "scalable Shampoo": "up.weight.pre_conditioner: a value of type pytorch_optimizer.optimizer.utils.preconditioner",
}
"""By optimizer: the text of the refusal to save its state."""


def joined(value: Any, shard_of: Any = None) -> Any:
    """Return a value with DTensors joined, and a plain tensor that is a shard of `shard_of`. All ranks must call it."""
    if type(value).__name__ == "_MaybeQuantizedTensor":  # of flashoptim: codes of this rank's shard, and their scales
        scales: list[Any] = [value._scales]
        if isinstance(shard_of, DTensor):
            scales = [None] * dist.get_world_size()
            dist.all_gather_object(scales, value._scales)
        codes = [joined(part, shard_of) for part in (value._quantized, value._data) if part is not None]
        return codes, scales[0] if scales[0] is None else bits(torch.cat(scales))
    if isinstance(value, torch.Tensor):
        value = value.int() if value.dtype is torch.int16 else value  # gloo does not send int16
        if isinstance(shard_of, DTensor) and not isinstance(value, DTensor):
            mesh, placements, stride = shard_of.device_mesh, shard_of.placements, shard_of.stride()
            value = DTensor.from_local(value, mesh, placements, run_check=False, shape=shard_of.shape, stride=stride)
        return bits(whole(value))
    if isinstance(value, dict):
        return {key: joined(item) for key, item in value.items()}
    return [joined(item) for item in value] if isinstance(value, (list, tuple)) else bits(value)


def everything(state: TrainState, *, join: bool = False) -> dict[str, Any]:
    found, optimizer = dict[str, Any](), state.optimizer
    for name, parameter in state.model.named_parameters():
        found[name] = joined(parameter) if join else bits(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            of_shard = key in ("exp_avg", "error_bits") or type(value).__name__ == "_MaybeQuantizedTensor"
            found[f"{name}.{key}"] = joined(value, parameter if of_shard else None) if join else bits(value)
    for index, group in enumerate(optimizer.param_groups):
        found |= {f"{index}.{key}": bits(value) for key, value in group.items() if "param" not in key}
    return found


@contextlib.contextmanager
def allowed(name: str) -> Iterator[None]:
    """Allow torch to load the class of GaLore's projectors, as its jobs must."""
    classes: list[Any] = []
    if name == "GaLore":
        from galore_torch.galore_projector import GaLoreProjector

        classes = [GaLoreProjector]
    with torch.serialization.safe_globals(classes):
        yield


def run(name: str, url: str, sharded: bool) -> tuple[dict[str, Any], str]:
    """Save and continue, then resume in a fresh job, in each type; return the saved values, joined, or the refusal."""
    state = made(name, 0, sharded, range(3))
    at, whole = everything(state), everything(state, join=sharded)
    with allowed(name):
        for kind in KINDS:
            if text := refusal(lambda kind=kind: save(f"{url}/{kind}", state, 3, state_dict_type=kind)):
                dist.barrier()
                assert not list(Path(url).rglob("step_*"))
                return {}, text
        end = everything(train(state, range(3, 6)))
        for kind in KINDS:
            # SHARDED loads into an optimizer without a state.
            again = made(name, 1, sharded, range(0) if kind == "sharded" else range(50, 51))
            load_all(f"{url}/{kind}", again)
            assert different(everything(again), at) == [], kind
            assert different(everything(train(again, range(3, 6))), end) == [], kind
    return whole, ""


def elsewhere(name: str, url: str, sharded: bool) -> list[Any]:
    """Return the loaded values of each type, or the refusal."""
    found: list[Any] = []
    for kind in KINDS[:2]:
        again = made(name, 1, sharded)
        before = everything(again)
        try:
            with allowed(name):
                load(f"{url}/{kind}", again)
        except CheckpointMismatchError as error:
            assert different(everything(again), before) == []
            found.append(str(error))
        else:
            found.append(everything(again, join=sharded))
            train(again, range(3, 5))
    return found


def check(ranks: Any, tmp_path: Path, name: str, size: int, sharded: bool, named: str) -> None:
    saved = ranks.run(run, size, name, str(tmp_path), sharded)
    assert {text for _, text in saved} == {""}
    for loaded in ranks.run(elsewhere, ELSEWHERE[size], name, str(tmp_path), sharded):
        for found in loaded:
            if named:
                assert isinstance(found, str), f"loaded, but {named} should be refused"
                assert named in found
                in_parts = "_MaybeQuantizedTensor" in named  # the message shows both placements
                assert in_parts or "load only where the parameters are sharded the same way" in found
            else:
                assert not isinstance(found, str), found
                assert different(found, saved[0][0]) == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SHARDED)
def test_an_optimizer_under_fully_shard_resumes_bit_exactly(ranks, tmp_path, name, size):
    check(ranks, tmp_path, name, size, True, SHARDED[name].get(size, ""))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", REPLICATED)
def test_an_optimizer_on_replicas_resumes_bit_exactly(ranks, tmp_path, name, size):
    check(ranks, tmp_path, name, size, False, REPLICATED[name].get(size, ""))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NOT_SAVED)
def test_state_that_no_load_could_restore_is_refused_by_all(ranks, tmp_path, name, size):
    for _, text in ranks.run(run, size, name, str(tmp_path), False):
        assert NOT_SAVED[name] in text


@on_ranks(1, 2)
def test_moments_of_whole_parameters_load_as_the_shards_that_the_optimizer_has(tmp_path):
    if dist.get_world_size() == 1:
        save(tmp_path, made("local moments", 0, False, range(3)))
        return
    plain, sharded = (made("local moments", 1, sharded, range(50, 51)) for sharded in (False, True))
    for state in (plain, sharded):
        load_all(tmp_path, state)
    assert different(everything(sharded, join=True), everything(plain)) == []
    train(sharded, range(3, 5))  # fails if a moment became a DTensor


@needs_flashoptim
def test_reshard_keeps_the_quantized_states_of_flashoptim(ranks, tmp_path):
    name, url = "FlashAdamW of flashoptim", str(tmp_path / "run")
    (saved, text), _ = ranks.run(run, 2, name, url, True)
    assert text == ""
    for kind in KINDS[:2]:
        reshard(f"{url}/{kind}/step_00000003", f"{tmp_path}/again/{kind}/step_00000003", world_size=3)
        assert verify(f"{tmp_path}/again/{kind}/step_00000003").ok
    for loaded in ranks.run(elsewhere, 3, name, str(tmp_path / "again"), True):
        assert [different(found, saved) for found in loaded] == [[], []]


def exact_weights(name: str, url: str) -> dict[str, torch.Tensor]:
    """Save; return the fp32 weights as flashoptim computes them."""
    state = made(name, 0, True, range(3))
    save(url, state)
    found = {}
    for key, value in state.optimizer.get_fp32_model_state_dict(state.model).items():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, local(value))
        found[key] = torch.cat(parts)
    return found


def same_weights(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether the found weights are the exact ones, rounded once; "unused" may have another dtype."""
    pairs = {key: (found[key].to(dtype), value.to(dtype)) for key, value in exact.items()}
    dtypes = {value.dtype for key, value in found.items() if key != "unused"}
    return found.keys() == exact.keys() and dtypes == {dtype} and all(torch.equal(*pair) for pair in pairs.values())


of_both_forms = pytest.mark.parametrize("name", ["FlashAdamW of flashoptim", "FlashAdamW of flashoptim, split runs"])


@needs_flashoptim
@of_both_forms
def test_an_export_has_the_exact_weights_of_flashoptim(ranks, tmp_path, name):
    exact = ranks.run(exact_weights, 2, name, str(tmp_path / "run"))[0]
    float32 = torch.float32
    for index, (options, dtype, same) in enumerate((
        ({"weights": "master"}, float32, True), ({"dtype": "fp32"}, float32, True),
        ({"dtype": "fp16"}, torch.float16, True), ({"weights": "model", "dtype": "fp32"}, float32, False),
    )):  # fmt: skip
        convert(f"{tmp_path}/run/step_00000001", str(tmp_path / f"{index}"), **options)
        assert same_weights(load_file(tmp_path / f"{index}/model.safetensors"), exact, dtype) is same, options


def load_as(name: str, url: str, dtype: torch.dtype, option: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Load as another dtype; return the weights, gathered, and the report's notes."""
    model = made(name, 1, True).model.to(dtype)
    bits = None if dtype is torch.float32 else 24  # fp32 weights have no lower bits
    optimizer = of_flashoptim("FlashAdamW", bits, quantize=True)(list(model.parameters()))
    state = TrainState(model=model, optimizer=optimizer, rng=False)
    report = load(url, state, convert_dtype=True, optimizer=option)
    assert not any("error_bits" in kept for kept in state.optimizer.state.values())  # the weights have them
    return {key: value.full_tensor() for key, value in model.state_dict().items()}, report.notes


@needs_flashoptim
@of_both_forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_load_into_another_dtype_has_exact_weights(ranks, tmp_path, name, dtype):
    exact = ranks.run(exact_weights, 2, name, str(tmp_path / "run"))[0]
    for size, optimizer in ((2, "restore"), (3, "skip")):
        found, notes = ranks.run(load_as, size, name, str(tmp_path / "run"), dtype, optimizer)[0]
        assert same_weights(found, exact, dtype)
        assert any("restored exactly, with the lower bits that flashoptim keeps" in note for note in notes)
        assert [note.partition(":")[0] for note in notes if "cast from" in note] == ["model.unused"]


@needs_flashoptim
@pytest.mark.parametrize("held", [torch.int8, torch.int16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_ranks(1)
def test_every_weight_gets_the_lower_bits_of_flashoptim(dtype, held):
    made("FlashAdamW of flashoptim", 0, False)  # lets the library's kernels run here
    from flashoptim import reconstruct_fp32_param

    weights = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    weights = weights[weights.isfinite()]
    if dtype is torch.bfloat16:  # Triton's interpreter takes its subnormal numbers for zeros
        weights = weights[(weights == 0) | (weights.abs() >= torch.finfo(dtype).tiny)]
    largest = torch.iinfo(held).max
    lower = torch.randint(-largest, largest + 1, weights.shape, dtype=held, generator=torch.Generator().manual_seed(0))
    names = [str(kind).removeprefix("torch.") for kind in (dtype, held)]
    stored = [
        Stored(tensor.view(torch.uint8).numpy(), name, tuple(tensor.shape))
        for tensor, name in zip((weights, lower), names, strict=True)
    ]
    computed = torch.empty(len(weights))
    with_lower_bits(stored[0], stored[1:], 0, computed.view(torch.uint8).numpy(), dtype="float32")
    expected = reconstruct_fp32_param(weights, lower)
    assert torch.equal(computed, expected)
    assert torch.equal(of_a_load(weights, lower), expected)


@needs_flashoptim
@on_ranks(2)
def test_states_in_the_form_of_flashoptims_state_dict_are_refused_by_name(tmp_path):
    """A new optimizer would take them for other states, and start without moments."""
    first, live = made("FlashAdamW of flashoptim", 0, True, range(2)), made("FlashAdamW of flashoptim", 1, True)
    url, states = str(tmp_path / "theirs"), get_optimizer_state_dict(first.model, first.optimizer)
    dcp.save({"model": first.model.state_dict(), "optimizer": states}, checkpoint_id=url)
    said = r"up\.weight\.exp_avg::.*FlashAdamW keeps these states in a different form"
    check_misfit(tmp_path / "run", live, f"(?s){said}", which=url)


@needs_flashoptim
@on_ranks(2)
def test_masters_of_flashoptim_take_the_values_of_weights_that_are_loaded_alone(tmp_path):
    first, again = (made("FlashAdamW of flashoptim", seed, True, range(2)) for seed in (0, 1))
    before = everything(again)
    load(save(tmp_path, first), again, optimizer="skip")
    changed = different(everything(again), before)
    assert {name.rpartition(".")[2] for name in changed} == {"weight", "error_bits"}
