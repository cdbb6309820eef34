"""Tensors whose values are not the elements of their own memory, which a save must refuse or handle."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree

__all__ = ["HIDDEN", "Labelled", "Opaque", "Scaled", "Tagged", "whole"]

aten = torch.ops.aten


class Scaled(torch.Tensor):
    """int8 values and a scale, as libraries quantize weights: a wrapper without memory of its own."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale  # type: ignore[method-assign, assignment]

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["values", "scale"], {}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], meta: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["values"], inner["scale"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Scaled({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(func(args[0].values), func(args[0].scale))
        if func is aten.copy_.default and all(isinstance(arg, Scaled) for arg in args[:2]):
            args[0].values.copy_(args[1].values)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        return func(*_pytree.tree_map(whole, args), **(kwargs or {}))


def whole(value: Any) -> Any:
    """Return the tensor that a `Scaled` represents, and anything else unchanged."""
    return value.values.float() * value.scale if isinstance(value, Scaled) else value


class Opaque(Scaled):
    """A wrapper without `__tensor_flatten__`; reading its memory ends the process."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__tensor_flatten__":
            raise AttributeError(name)
        return super().__getattribute__(name)


class Tagged(torch.Tensor):
    """A subclass without hidden values."""


class Labelled(torch.nn.Parameter):
    """A parameter with a tensor attribute that is needed to interpret its elements."""


def scaled(kind: type[Scaled] = Scaled) -> Scaled:
    return kind(torch.randint(-100, 100, (4, 4), dtype=torch.int8), torch.tensor(0.5))


def labelled() -> torch.Tensor:
    made = Labelled(torch.ones(4, 4))
    made.quant_state = type("State", (), {})()  # type: ignore[attr-defined]
    made.quant_state.absmax = torch.ones(2)  # type: ignore[attr-defined]
    return made


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(4, 4)


def masked() -> Any:
    from torch.masked import masked_tensor

    return masked_tensor(torch.ones(4, 4), torch.ones(4, 4, dtype=torch.bool))


def quiet(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return made


HIDDEN: dict[str, tuple[Callable[[], Any], str]] = {
    "wrapper": (scaled, "hidden.Scaled, whose values are not in its own memory"),
    "opaque wrapper": (lambda: scaled(Opaque), "hidden.Opaque, whose values"),
    "wrapper parameter": (lambda: torch.nn.Parameter(scaled(), requires_grad=False), "hidden.Scaled, whose values"),
    "with a state": (labelled, r"hidden.Labelled with tensors in its attributes \(quant_state\)"),
    "sparse": (lambda: torch.eye(4).to_sparse(), "is sparse"),
    "csr": (quiet(lambda: torch.eye(4).to_sparse_csr()), "is sparse"),
    "quantized": (quiet(lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8)), "is quantized"),
    "nested": (quiet(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), "is a nested tensor"),
    "jagged": (
        quiet(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
        "NestedTensor, whose values",
    ),
    "masked": (quiet(masked), "MaskedTensor, whose values"),
    "fake": (fake, "FakeTensor, whose values"),
    "meta": (lambda: torch.empty(4, 4, device="meta"), "is on the meta device"),
    "lazy": (lambda: torch.nn.UninitializedParameter(), "has no values before its module has run"),
    "bits": (lambda: torch.zeros(4, 4, dtype=torch.uint8).view(torch.bits8), "has dtype bits8"),
}
"""Name -> (factory, text of the refusal)."""
