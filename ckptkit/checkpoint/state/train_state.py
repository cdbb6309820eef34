"""Defines `TrainState`, the objects that a training run saves, and checks its arguments."""

from __future__ import annotations

import enum
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptkit.arguments import check_flags, wrong
from ckptkit.checkpoint.state.layout import Layout, check_layout
from ckptkit.errors import UsageError

if TYPE_CHECKING:
    import torch


class StateDictType(str, enum.Enum):
    """Selects how a checkpoint stores tensors.

    Attributes:
        FULL: Full tensors in safetensors files; `from_pretrained` can load the model.
        SHARDED: Standard DCP. Loads on any number of ranks.
        LOCAL: Each rank's local tensors, one file per rank. Sends no tensors; loads only on the same mesh.
    """

    FULL = "full"
    SHARDED = "sharded"
    LOCAL = "local"

    @classmethod
    def parse(cls, value: StateDictType | str | enum.Enum) -> StateDictType:
        """Return the type for any common spelling: "full", "FULL_STATE_DICT", torch's enum, ...

        Raises:
            UsageError: The type is unknown.
        """
        if isinstance(value, cls):
            return value
        text = value.name if isinstance(value, enum.Enum) else str(value)
        word = text.rpartition(".")[2].lower().replace("-", "_").removesuffix("_state_dict")
        try:
            return cls(word)
        except ValueError:
            raise UsageError(f"unknown state-dict type {text!r}: expected full, sharded or local.") from None


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a value in `TrainState.extra` that differs between ranks. Each rank saves and restores its own value.

    If the value has a method `merge_ranks`, a load calls this method, as for a dataloader (see `TrainState`).
    """

    value: Any


Merge = Callable[[Sequence[Any], int, int], Any]
"""Returns a rank's state, given (states of all saved ranks, rank, world size)."""


_WRAPPED = {"AcceleratedOptimizer": "optimizer", "AcceleratedScheduler": "scheduler"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_EXPECTED = {
    "model": "a module, or several by name. Pass the model itself, not its class or its state dict",
    "optimizer": "an optimizer with param_groups. Pass the optimizer itself, not its class or its state dict",
    "scheduler": "an object with state_dict(). Pass the scheduler itself, not its class or its state dict",
    "grad_scaler": "an object with state_dict(), such as torch.amp.GradScaler()",
    "dataloader": "an object with state_dict(), such as torchdata's StatefulDataLoader",
}

# Objects that a failed load has filled only partly, each with the URL of the checkpoint. They stay marked if they are
# put into a different `TrainState`. Keyed by id, because tensors compare element by element.
_half_loaded: dict[int, tuple[weakref.ref[object], str]] = {}


def mark_half_loaded(objects: Iterable[object], url: str) -> None:
    """Record that a load of the checkpoint at `url` failed while filling `objects`."""
    for item in objects:
        key = id(item)
        try:
            found = weakref.ref(item, lambda _, key=key: _half_loaded.pop(key, None))  # type: ignore[misc]
        except TypeError:
            continue  # it does not support weak references
        _half_loaded[key] = found, url


def clear_half_loaded(objects: Iterable[object]) -> None:
    """Record that `objects` were loaded completely."""
    if _half_loaded:
        for item in objects:
            _half_loaded.pop(id(item), None)


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Holds everything that a run needs to resume. A save reads the objects in the fields; a load fills them in place.

    Attributes:
        model: A module, or several by name: {"actor": a, "critic": c}. A list contains one model's pipeline stages on
            this rank.
        optimizer, scheduler, grad_scaler, dataloader: One object, or several by name. Each needs `state_dict` and
            `load_state_dict`; an optimizer needs `state` and `param_groups`. See below for an optimizer's hooks. A
            dataloader's state is saved per rank. If the dataloader has a method `merge_ranks(states of all saved ranks,
            rank, world size)`, every load calls it to get this rank's state. Without this method, each rank gets its
            own saved state. If the number of ranks has changed, `per_rank_on_resize` applies.
        extra: More state by name: objects with `state_dict` and `load_state_dict`, or plain values, which a load
            replaces in this dict. The tensors of a module may differ between ranks, as in `model`. Of anything else,
            only rank 0's values are saved. For a value that differs between ranks, use `PerRank(value)`.
        layout: Maps globs of FQNs to what a rank's tensors are. A `Shard`, or several (outermost first): parts of
            global tensors. For the experts of an expert-parallel rank:
            {"*.experts.*": ckptkit.Shard(0, mesh=device_mesh["ep"])}. The layout also applies to the tensors' optimizer
            states and fp32 master weights. "per_rank": each rank keeps its own plain tensor. "any_replica": the
            replicas of a DTensor may differ, and one of them is saved.
        step: The training step; a load sets it.
        rng: Whether to include each rank's random number generators.
        half_loaded: The URL of the checkpoint, if a failed load has only partly filled this state or one of its
            objects; otherwise "". Such a state cannot be saved. A successful load clears this field. Clear it yourself
            only after you have set all values in some other way.

    A save reads an optimizer's state directly. So a save raises if a hook or an override changes the values that
    `state_dict()` returns. A save runs `state_dict` pre-hooks, and a load runs `load_state_dict` post-hooks. If a class
    overrides `load_state_dict`, a load calls the override. If the override changes restored values (for example, by a
    cast), the load then sets these values again. All this also applies to the optimizer inside a
    `MasterWeightOptimizer`, and to each of torchtitan's optimizers (one per pipeline stage). A load fills tensors in
    parameter groups (`lr=torch.tensor(...)`) in place. It refuses a value that has another shape, or that the tensor's
    dtype can't hold.
    """

    model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module] | None = None
    optimizer: Any = None
    scheduler: Any = None
    grad_scaler: Any = None
    dataloader: Any = None
    extra: dict[str, Any] = field(default_factory=dict)
    layout: Layout = field(default_factory=dict)
    step: int = 0
    rng: bool = True
    _half: str = field(default="", init=False, repr=False, compare=False)  # set while a load fills this state

    def __post_init__(self) -> None:
        check_state(self, "TrainState")
        check_layout(self.layout)

    @property
    def half_loaded(self) -> str:
        """The URL of the checkpoint whose failed load has filled this state only partly; "" if there is none."""
        if self._half or not _half_loaded:
            return self._half
        marks = ((item, _half_loaded.get(id(item))) for item in self.objects())
        return next((known[1] for item, known in marks if known and known[0]() is item), "")

    @half_loaded.setter
    def half_loaded(self, url: str) -> None:
        self._half = url
        if url:
            mark_half_loaded(self.objects(), url)
        else:
            clear_half_loaded(self.objects())

    def objects(self, *kinds: str) -> Iterator[object]:
        """Yield the objects that a load fills: modules, their tensors, optimizers, schedulers, ...

        Args:
            kinds: Yield only objects of these kinds. If none are given, yield all.
        """
        for kind in kinds or ("model", "optimizer", "scheduler", "grad_scaler", "dataloader", "extra"):
            for item in self.parts(kind).values():
                if kind == "model" and hasattr(item, "modules"):
                    yield from (*item.modules(), *item.parameters(), *item.buffers())
                else:
                    yield item.value if isinstance(item, PerRank) else item

    def parts(self, kind: str) -> dict[str, Any]:
        """Return the objects of one kind ("model", "optimizer", ...) by name. A single object has the name "".

        If an object is one of accelerate's wrappers, the wrapped object is returned, because the wrapper hides its
        hooks.
        """
        value = getattr(self, kind)
        if value is None:
            return {}
        if kind == "model" and isinstance(value, (list, tuple)) and all(hasattr(x, "named_modules") for x in value):
            from ckptkit.checkpoint.state.stages import Stages

            return {"": Stages(value)}
        named = value.items() if isinstance(value, Mapping) else [("", value)]
        return {name: getattr(item, _WRAPPED.get(type(item).__name__, ""), item) for name, item in named}


def check_name(name: Any, kind: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{kind} name {name!r}: use letters, digits, '_' and '-' only, not starting with '_'.")


def section(kind: str, name: str) -> str:
    """Return the prefix of an object's keys: "model", or "model_actor" for a model with the name "actor"."""
    return f"{kind}_{name}" if name else kind


def check_state(state: object, call: str) -> None:
    """Check that `state` is a TrainState whose fields contain objects of the expected types.

    Args:
        call: The caller, for example "load(state)". Error messages name it.

    Raises:
        UsageError: `state` is not a TrainState. Or a field contains a class, a state dict or a plain value instead of
            an object. Or a name contains characters other than letters, digits, "_" and "-".
    """
    if not isinstance(state, TrainState):
        given = "model=model, optimizer=optimizer"
        if isinstance(state, Mapping) and not state.keys() - TrainState.__slots__:
            given = ", ".join(f"{name}=..." for name in state) or given
        hint = " The step comes first." if isinstance(state, int) else ""
        raise UsageError(f"{wrong(f'{call}: state', state, f'TrainState({given})')}{hint}")
    for kind, expected in _EXPECTED.items():
        named = isinstance(getattr(state, kind), Mapping)
        for name, item in state.parts(kind).items():
            bare = kind == "optimizer" and not hasattr(item, "param_groups")
            if bare or isinstance(item, type) or not callable(getattr(item, "state_dict", None)):
                where = kind if name == "" else f"{kind}[{name!r}]"
                raise wrong(f"TrainState: {where}", item, expected)
            if named:
                check_name(name, kind)
            if kind == "dataloader":
                own_merge(item)
    if not isinstance(state.extra, dict):
        raise wrong("TrainState: extra", state.extra, "a dict of objects or values by name")
    for item in state.extra.values():
        if isinstance(item, PerRank):
            own_merge(item)
    check_flags(rng=state.rng)


def own_merge(item: Any) -> Merge | None:
    """Return the `merge_ranks` method of a dataloader or `PerRank` value; None if there is no such method.

    Raises:
        UsageError: The attribute `merge_ranks` is not callable.
    """
    owner = item.value if isinstance(item, PerRank) else item
    found: object = getattr(owner, "merge_ranks", None)
    if found is None or callable(found):
        return found
    expected = "a function of (states of all saved ranks, rank, world size)"
    raise wrong(f"TrainState: {type(owner).__name__}.merge_ranks", found, expected)


def is_stateful(value: Any) -> bool:
    """Return whether a value has `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
