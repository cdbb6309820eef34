"""Defines MasterWeightOptimizer, which runs any torch optimizer on fp32 masters of low-precision parameters."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckptkit.checkpoint.state.optimizer.methods import finish_load, own_state_dict
from ckptkit.errors import CheckpointMismatchError, UsageError
from ckptkit.formats.dcp.host_bytes import placed_like
from ckptkit.fsdp.grad_scaler import DynamicGradScaler
from ckptkit.fsdp.gradients import (
    checked_max_norm,
    checked_norm_type,
    clip_grad_norm,
    inspect_gradients,
    named_parameters_of,
    refuse_nonfinite,
    scale_gradients,
    widened,
)
from ckptkit.units import first_few

_log = logging.getLogger(__name__)

MASTER = "master"
_TORCHS = ("state", "param_groups")  # the keys of torch's state dicts
# Optimizers that work elementwise, so they can step a shard without the rest of the parameter. Their subclasses are not
# included, because a subclass need not work elementwise.
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)


class MasterWeightOptimizer(Optimizer):
    """Steps fp32 copies of the parameters with `base`, then rounds the copies into the parameters.

    `state[p]` contains the state that `base` keeps for `p`, in fp32. Under the key "master", it contains the fp32 copy
    of `p`, with the same placement. After each step, `master.to(p.dtype)` is bit-identical to `p`. Parameters in fp32
    or wider are stepped directly and have no master. `param_groups` contain the model's parameters, so schedulers work
    as with any optimizer.

    Args:
        base: An optimizer over the model's parameters. Do not use it directly afterwards.
        grad_scaler: Scales the loss in `backward`, and is updated after every step. None means no scaling.
        max_norm: The maximum joint gradient norm in `step`. 0 or None means no clipping.
        norm_type: The p of the gradient norm.

    Raises:
        UsageError: `base` evaluates its closure several times (LBFGS) or is a MasterWeightOptimizer, `max_norm` is
            negative, or `norm_type` is invalid.
    """

    master_state_name = MASTER

    def __init__(
        self,
        base: Optimizer,
        *,
        grad_scaler: DynamicGradScaler | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
    ) -> None:
        if isinstance(base, (MasterWeightOptimizer, torch.optim.LBFGS)):
            raise UsageError(
                f"MasterWeightOptimizer can't run over {type(base).__name__}. Pass AdamW, SGD or the like."
            )
        self.base = base
        self.grad_scaler = grad_scaler
        self.max_norm = checked_max_norm(max_norm)
        self.norm_type = checked_norm_type(norm_type)
        self.last_grad_norm: torch.Tensor | None = None
        had: Mapping[Any, Any] = base.state
        super().__init__([{**group, "params": list(group["params"])} for group in base.param_groups], base.defaults)
        for parameter, state in had.items():  # if `base` has stepped before, convert its moments to fp32
            if isinstance(parameter, torch.Tensor):
                self.state[parameter].update({key: _widened(key, value) for key, value in state.items()})
            else:
                self.state[parameter] = state
        base.state = defaultdict(dict)

    @property
    def inner_optimizers(self) -> tuple[Optimizer]:
        """The wrapped optimizers: only `base`. It has state only inside a `with lend_state()` block."""
        return (self.base,)

    @contextlib.contextmanager
    def lend_state(self) -> Iterator[Mapping[int, torch.Tensor]]:
        """Lend this optimizer's state and settings to `base` during the block, and then take the changes back.

        Yield a mapping {id of a tensor that `base` updates: the model's parameter to which the tensor belongs}.
        """
        with self._lent(_unchanged) as loans:
            yield {id(loan.stepped): loan.parameter for loan in loans}

    @property
    def loss_scale(self) -> float:
        """The factor by which `backward` multiplies the loss."""
        return self.grad_scaler.scale if self.grad_scaler is not None else 1.0

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Multiply the loss by the loss scale, in at least fp32, and run backward. `retain_graph`: as in torch."""
        torch.autograd.backward(widened(loss) * self.loss_scale, retain_graph=retain_graph)

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Run backward from `tensor` with the gradient `grad`, which must already include the loss scale."""
        torch.autograd.backward(tensor, grad)

    def clip_grad_norm(self, max_norm: float | None, p: float = 2.0) -> torch.Tensor:
        """Clip the joint norm of the gradients of all groups. Return the norm before clipping.

        The gradients must already be unscaled. `max_norm` and `p` are as in `ckptkit.fsdp.clip_grad_norm`.
        """
        return clip_grad_norm(list(self._parameters()), max_norm, p)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        max_norm: float | None = None,
        norm_type: float | None = None,
        divisor: float | None = None,
        error_if_nonfinite: bool = False,
    ) -> bool:
        """Unscale and clip the gradients, step the masters and round them into the parameters. Return True.

        If a gradient on any rank is not finite, clear the gradients and return False. The loss scale may decrease, but
        no parameter, master or moment changes. All ranks must call this.

        Args:
            closure: Computes the gradients. Called once, before everything else. Its result is ignored.
            max_norm, norm_type: Override the values with which the optimizer was created.
            divisor: The gradients are divided by this number before clipping (default: the loss scale).

        Raises:
            NonFiniteGradientError: `error_if_nonfinite` is set, and a gradient on some rank is not finite. The error is
                raised on every rank, and the gradients are kept.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        parameters = [parameter for parameter in self._parameters() if parameter.requires_grad]
        report = inspect_gradients(
            parameters,
            scaler=self.grad_scaler,
            max_norm=self.max_norm if max_norm is None else max_norm,
            norm_type=self.norm_type if norm_type is None else norm_type,
            divisor=divisor,
        )
        self.last_grad_norm = report.norm
        if not report.finite:
            if error_if_nonfinite:
                refuse_nonfinite(named_parameters_of(self), report.norm)
            self.zero_grad()
            return False
        factor = report.factor
        if factor != 1.0 and not self._widens_everything(parameters):
            scale_gradients(parameters, factor)
            factor = 1.0
        self.step_masters(factor)
        return True

    @torch.no_grad()
    def step_masters(self, factor: float = 1.0) -> None:
        """Multiply gradients by `factor`, step the masters, and round them into the parameters.

        Does not check for infinite or NaN gradients. Does not communicate.
        """
        self.follow_weights()
        # An elementwise `base` gets local tensors instead of DTensors: the same result, without DTensor's overhead.
        part = _local if type(self.base) in _ELEMENTWISE else _unchanged
        with self._lent(part) as loans:
            _lend_gradients(loans, factor, part)
            self.base.step()
        held = [loan for loan in loans if MASTER in loan.state]
        _foreach_copy([loan.parameter for loan in held], [loan.state[MASTER] for loan in held])

    @contextlib.contextmanager
    def _lent(self, part: Callable[[Any], Any]) -> Iterator[list[_Loan]]:
        """Lend the state like `lend_state`, but give `base` only `part(t)` of each tensor t, such as its shard."""
        base = self.base
        lent = [[self._lend(parameter, part) for parameter in group["params"]] for group in self.param_groups]
        loans = [loan for group in lent for loan in group]
        own = {id(loan.parameter) for loan in loans}
        others = {key: state for key, state in self.state.items() if id(key) not in own}  # belongs to no parameter
        base.state = defaultdict(dict, others | {loan.stepped: loan.seen for loan in loans})
        base.param_groups[:] = [
            {**group, "params": [loan.stepped for loan in group_loans]}
            for group, group_loans in zip(self.param_groups, lent, strict=True)
        ]
        try:
            yield loans
        finally:
            for loan in loans:
                if loan.stepped is not loan.parameter:
                    loan.stepped.grad = None
                self._take_back(loan, base.state.pop(loan.stepped, {}), part)
            for key in others.keys() - base.state.keys():
                del self.state[key]
            self.state.update(base.state)
            for group, seen in zip(self.param_groups, base.param_groups, strict=True):
                # `base` may write values into its group, such as a step count.
                group.update({key: value for key, value in seen.items() if key != "params"})

    def _take_back(self, loan: _Loan, now: Mapping[str, Any], part: Callable[[Any], Any]) -> None:
        if MASTER in now:
            raise UsageError(
                f"{type(self.base).__name__} has a state named {MASTER!r}, which is the name of the fp32 copies here."
            )
        for key in loan.state.keys() - now.keys() - {MASTER}:
            del loan.state[key]
        for key, value in now.items():
            if key not in loan.state or part(loan.state[key]) is not value:  # `base` created or replaced it
                of_shard = part is _local and isinstance(value, torch.Tensor) and value.shape == loan.stepped.shape
                loan.state[key] = _like(value, loan.parameter) if of_shard else value

    def _lend(self, parameter: torch.Tensor, part: Callable[[Any], Any]) -> _Loan:
        state = self.state[parameter]
        if MASTER not in state and _needs_master(parameter):  # the state was cleared, so start again from the parameter
            state[MASTER] = parameter.detach().to(torch.float32)
        # Leave out the master, because `base` initializes a parameter's state only if this state is empty.
        seen = {key: part(value) for key, value in state.items() if key != MASTER}
        return _Loan(parameter, state, part(state.get(MASTER, parameter)), seen)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with a master for each low-precision parameter in it."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if _needs_master(parameter):
                self.state[parameter][MASTER] = parameter.detach().to(torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict in torch's layout. The masters are entries of "state", like moments.

        Includes the entries that the `state_dict` method of `base` adds. Does not include the scaler, which has its own
        `state_dict`.
        """
        self.follow_weights()
        with self.lend_state():
            added = own_state_dict(self.base, "optimizer") or {}
        return {key: value for key, value in added.items() if key not in _TORCHS} | super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state without casting it to lower precision, then round the masters into the parameters.

        Also calls the load hooks of `base`, and the `load_state_dict` of its class if the class overrides this method.

        Raises:
            CheckpointMismatchError: The number of groups, the number of parameters in a group, a shape or a master does
                not match. Nothing was loaded.
        """
        pairs = self._paired(state_dict)
        masters = {parameter: state.get(MASTER) for parameter, state in self.state.items()}
        super().load_state_dict(state_dict)
        # torch casts all floating-point state to the parameter's dtype; replace it with the saved values.
        for parameter, saved in pairs:
            state = self.state[parameter]
            for key, value in saved.items():
                if key == MASTER:
                    continue
                if isinstance(value, torch.Tensor) and value.is_floating_point() and key != "step":
                    state[key] = _moved(value, parameter)
            master = masters.get(parameter)
            if master is not None:
                state[MASTER] = master.copy_(_moved(saved[MASTER], parameter)) if MASTER in saved else master
        kept = {parameter for parameter, _ in pairs}
        for parameter, master in masters.items():  # keep the masters of parameters that are not in the state dict
            if master is not None and parameter not in kept:
                self.state[parameter][MASTER] = master
        with self.lend_state():
            finish_load(self.base, {key: value for key, value in state_dict.items() if key not in _TORCHS})
        held = [(parameter, self.state[parameter][MASTER]) for parameter in masters if masters[parameter] is not None]
        _foreach_copy([parameter for parameter, _ in held], [master for _, master in held])

    @torch.no_grad()
    def follow_weights(self) -> int:
        """Update the masters of weights that were changed outside this optimizer (a load, an edit).

        Return how many parameters were changed. If an element of a parameter differs from its rounded master, the
        element replaces the master's value. So code that writes weights need not know about masters. `step`,
        `state_dict` and every save call this first. Does not communicate.
        """
        held = [
            (index, _local(parameter).detach(), _local(self.state[parameter][MASTER]))
            for index, parameter in enumerate(self._parameters())
            if MASTER in self.state.get(parameter, {}) and not parameter.is_meta
        ]
        by_kind: dict[Any, list[tuple[int, torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for item in held:
            by_kind[item[1].dtype, item[2].device].append(item)
        followed = [index for group in by_kind.values() for index in _follow(group)]
        if followed:
            names = [name for name, _ in named_parameters_of(self)]
            shown = first_few([repr(names[index]) for index in sorted(followed)], 3)
            _log.info("weights were changed outside the optimizer, so their fp32 masters were updated: %s", shown)
        return len(followed)

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _widens_everything(self, parameters: list[torch.Tensor]) -> bool:
        return all(
            MASTER in self.state[parameter] and parameter.grad.dtype != torch.float32
            for parameter in parameters
            if parameter.grad is not None
        )

    def _paired(self, state_dict: dict[str, Any]) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """Check that a state dict fits the parameter groups. Return (parameter, its saved state) pairs."""
        groups = state_dict.get("param_groups")
        if groups is None or "state" not in state_dict:
            raise CheckpointMismatchError(
                f"An optimizer state has 'state' and 'param_groups'; this one has {', '.join(map(repr, state_dict))}."
            )
        if len(groups) != len(self.param_groups):
            raise CheckpointMismatchError(
                f"The optimizer state has {len(groups)} parameter groups, the optimizer has {len(self.param_groups)}."
            )
        pairs: list[tuple[torch.Tensor, dict[str, Any]]] = []
        problems: list[str] = []
        for index, (saved, group) in enumerate(zip(groups, self.param_groups, strict=True)):
            if len(saved["params"]) != len(group["params"]):
                raise CheckpointMismatchError(
                    f"Group {index} of the optimizer state has {len(saved['params'])} parameters, "
                    f"the optimizer's has {len(group['params'])}."
                )
        keys = [key for saved in groups for key in saved["params"]]
        for (name, parameter), key in zip(named_parameters_of(self), keys, strict=True):
            found = state_dict["state"].get(key)
            if found is not None:
                problems += _problems(name, parameter, found)
                pairs.append((parameter, found))
        if problems:
            raise CheckpointMismatchError("The optimizer state does not fit; nothing was loaded. " + " ".join(problems))
        return pairs


def _follow(held: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> list[int]:
    """Overwrite masters where the parameter differs from the rounded master. Return the changed parameters' indices.

    All items of `held` have the same dtype and device. If nothing has changed, this waits for the device only once.
    """
    dtype, device = held[0][1].dtype, held[0][2].device
    weights = [weight.to(device) for _, weight, _ in held]  # the masters may be on the host
    bits = {1: torch.int8, 2: torch.int16}[dtype.itemsize]
    flat = torch.empty(sum(weight.numel() for weight in weights), dtype=dtype, device=device)
    rounded = [
        part.view(weight.shape)
        for part, weight in zip(torch.split(flat, [w.numel() for w in weights]), weights, strict=True)
    ]
    torch._foreach_copy_(rounded, [master for *_, master in held])
    torch._foreach_sub_([part.view(bits) for part in rounded], [weight.view(bits) for weight in weights])
    if not flat.view(bits).any():
        return []
    followed = []
    for (index, _, master), weight, difference in zip(held, weights, rounded, strict=True):
        changed = difference.view(bits) != 0
        if changed.any():
            master.copy_(torch.where(changed, weight.to(master.dtype), master))
            followed.append(index)
    return followed


@dataclass(slots=True)
class _Loan:
    """Holds one parameter during a step: its state in this optimizer, and the tensor and state that `base` sees."""

    parameter: torch.Tensor
    state: dict[str, Any]
    stepped: torch.Tensor
    seen: dict[str, Any]


def _lend_gradients(loans: Sequence[_Loan], factor: float, part: Callable[[Any], Any]) -> None:
    """Give all masters their gradients in fp32. Gradients that are not in fp32 are cast together, in one buffer."""
    have = []
    for loan in loans:
        gradient = loan.parameter.grad
        if gradient is None or loan.stepped is loan.parameter:
            continue
        if MASTER not in loan.state:
            loan.stepped.grad = part(gradient)
        elif gradient.dtype == torch.float32:
            loan.stepped.grad = part(gradient) if factor == 1.0 else part(gradient) * factor
        else:
            have.append(loan)
    if not have:
        return
    narrow = [_local(loan.parameter.grad) for loan in have]
    flat = torch.empty(sum(local.numel() for local in narrow), dtype=torch.float32, device=narrow[0].device)
    parts = torch.split(flat, [local.numel() for local in narrow])
    wide = [piece.view(local.shape) for piece, local in zip(parts, narrow, strict=True)]
    torch._foreach_copy_(wide, narrow)
    if factor != 1.0:
        flat.mul_(factor)
    for loan, local in zip(have, wide, strict=True):
        loan.stepped.grad = local if part is _local else _like(local, loan.parameter.grad)


def _needs_master(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and parameter.dtype.itemsize < 4


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _unchanged(tensor: Any) -> Any:
    return tensor


def _like(local: torch.Tensor, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return local
    return placed_like(tensor, local)


def _foreach_copy(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    if targets:
        torch._foreach_copy_([_local(target) for target in targets], [_local(source) for source in sources])


def _widened(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and key != "step":
        return value.to(torch.float32)
    return value


def _moved(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return `value` on the device and with the placements of `parameter`. The dtype does not change."""
    if isinstance(parameter, DTensor) and isinstance(value, DTensor):
        if value.device_mesh == parameter.device_mesh and value.placements != parameter.placements:
            return value.redistribute(placements=parameter.placements)
        return value
    return value.to(_local(parameter).device)


def _problems(name: str, parameter: torch.Tensor, saved: dict[str, Any]) -> list[str]:
    found = []
    for key, value in saved.items():
        if key == MASTER and isinstance(value, torch.Tensor) and value.shape != parameter.shape:
            found.append(f"The master of {name!r} has shape {list(value.shape)}, expected {list(parameter.shape)}.")
        if isinstance(parameter, DTensor) and isinstance(value, DTensor) and value.device_mesh != parameter.device_mesh:
            found.append(
                f"{key!r} of {name!r} is on a mesh of {value.device_mesh.size()} ranks, the parameter on a mesh of "
                f"{parameter.device_mesh.size()}. Load it with CheckpointManager, which reshards."
            )
    if _needs_master(parameter) and MASTER not in saved:
        found.append(f"The state of {name!r} has no master; was it saved by a plain optimizer?")
    return found
