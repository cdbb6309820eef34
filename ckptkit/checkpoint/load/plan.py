"""Defines the plan of a load: for each live tensor and object, what is restored into it, and all mismatches.

A *recipe* describes how a tensor subclass (such as torchao's) is split into plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.entry import Catalog, Role, TensorEntry
from ckptkit.checkpoint.load.differences import Mismatches
from ckptkit.checkpoint.load.options import LoadOptions
from ckptkit.checkpoint.save.replicas import OwnCopies
from ckptkit.checkpoint.state.layout import Shard, as_global
from ckptkit.checkpoint.state.optimizer.groups import GroupChanges
from ckptkit.checkpoint.state.optimizer.layout import Held
from ckptkit.checkpoint.state.optimizer.methods import class_name
from ckptkit.checkpoint.state.train_state import Merge, TrainState
from ckptkit.checkpoint.state.values import JSON, references
from ckptkit.checkpoint.state.views import View
from ckptkit.formats.dcp.subclasses import Recipe, describe
from ckptkit.units import first_few

if TYPE_CHECKING:
    import torch

    from ckptkit.catalog.box import Box

# Keys without which torch's schedulers and gradient scalers cannot load a state.
_NEEDED = frozenset(("lr_lambdas", "_schedulers", "_milestones", "growth_interval", "_growth_tracker"))


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A live parameter or buffer, and the saved tensor that fills it."""

    key: str
    live: torch.Tensor
    entry: TensorEntry
    shards: tuple[Shard, ...] = ()  # shards that the state's layout declares for the live tensor
    # flashoptim's lower bits of the weight, if `entry` is cast; together they are the fp32 weight
    lower_bits: TensorEntry | None = None


@dataclass(slots=True)
class OptimizerPlan:
    """The plan for restoring one optimizer."""

    key: str
    optimizer: Any
    parameters: dict[str, torch.nn.Parameter]
    groups: GroupChanges = field(default_factory=lambda: GroupChanges([]))
    states: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)  # saved tensors, by FQN and state name
    masters: dict[str, TensorEntry | None] = field(default_factory=dict)  # None: set the master from the loaded weight
    values: dict[str, dict[str, JSON]] = field(default_factory=dict)  # non-tensor state as JSON, by FQN and state name
    shared: dict[str, JSON] = field(default_factory=dict)  # state that belongs to no parameter, as JSON
    held: dict[str, Held] = field(default_factory=dict)  # how states are stored; see OptimizerTree
    orders: dict[str, list[int]] = field(default_factory=dict)  # memory orders; see OptimizerTree
    same: list[list[str]] = field(default_factory=list)  # states that are one tensor; see OptimizerTree
    views: list[list[View]] = field(default_factory=list)  # states that shared an allocation
    kinds: dict[str, dict[str, JSON]] = field(default_factory=dict)  # see OptimizerTree
    containers: dict[str, JSON] = field(default_factory=dict)  # see OptimizerTree
    keep: list[str] = field(default_factory=list)  # parameters that the checkpoint's optimizer lacks keep their state
    live: dict[str, dict[str, Any]] = field(default_factory=dict)  # live values; tensor subclasses as their parts
    wholes: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # tensor subclasses to fill
    casts: dict[tuple[str, str], torch.dtype] = field(default_factory=dict)  # live dtypes, by FQN and state name
    skip: bool = False  # whether to restore only master weights, which must follow the weights
    shards: dict[str, tuple[Shard, ...]] = field(default_factory=dict)  # declared by the layout, by FQN
    joined: set[tuple[str, str]] = field(default_factory=set)  # tensors in `live` that are parts of global ones

    def shape(self, fqn: str) -> tuple[int, ...]:
        """Return a parameter's global shape, which its saved weight and master have too."""
        return tuple(as_global(fqn, self.parameters[fqn], self.shards.get(fqn, ())).shape)

    @property
    def master_name(self) -> str | None:
        return getattr(self.optimizer, "master_state_name", None)


@dataclass(frozen=True, slots=True)
class ObjectTarget:
    """An object to restore, and its saved state as one JSON tree or, with `merge`, as one tree per saved rank."""

    kind: str  # "scheduler", "grad_scaler", "dataloader", "extra", "model"
    key: str
    item: Any
    trees: tuple[JSON, ...]
    merge: Merge | None = None


@dataclass(slots=True)
class LoadPlan:
    """Lists everything that a load will restore, and all mismatches."""

    catalog: Catalog  # the checkpoint as this rank sees it: with its own per-rank copies, and under ckptkit's names
    tensors: Mapping[str, torch.Tensor]  # tensors in objects that have already been read
    models: list[ModelTensor] = field(default_factory=list)
    twins: list[list[ModelTensor]] = field(default_factory=list)  # each: one live tensor saved under several names
    handed: list[tuple[torch.nn.Module, Mapping[str, Any]]] = field(default_factory=list)  # for load_state_dict
    optimizers: list[OptimizerPlan] = field(default_factory=list)
    objects: list[ObjectTarget] = field(default_factory=list)
    rng: JSON = None
    reseed: bool = False
    mismatches: Mismatches = field(default_factory=Mismatches)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # more notes, which are logged if the load succeeds
    leftovers: dict[str, JSON] = field(default_factory=dict)
    padded: list[str] = field(default_factory=list)  # the keys of tensors that a key map fills only in part
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # saved tensors of each weight; with a key map
    globs: dict[str, bool] = field(default_factory=dict)  # layout glob -> whether it matches a tensor of this rank
    filled: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)  # boxes to fill, by entry name; if padded

    def weights(self, optimizer: OptimizerPlan) -> dict[str, torch.Tensor]:
        """Return, by FQN, the model tensors that the load fills and the parameters of the given optimizer."""
        return {**{target.entry.fqn or "": target.live for target in self.models}, **optimizer.parameters}

    def references(self) -> list[str]:
        """Return the keys of the tensors that the saved states of objects, such as those in `extra`, refer to."""
        trees = [tree for target in self.objects for tree in target.trees]
        for plan in self.optimizers:
            trees += [plan.values, plan.shared]
        return list(dict.fromkeys(key for tree in [*trees, self.rng, self.leftovers] for key in references(tree)))


@dataclass(slots=True)
class Planning:
    """A load that is being planned: what is known, and the plan so far."""

    state: TrainState
    objects: Mapping[str, JSON]  # JSON by key
    options: LoadOptions
    rank: int
    world_size: int
    small: Callable[[str], Any]  # reads one tensor
    foreign: bool  # whether ckptkit did not write the checkpoint
    plan: LoadPlan
    own: OwnCopies
    random: Sequence[str] = ()  # names of another program's random states of unknown form
    from_masters: set[str] = field(default_factory=set)  # FQNs of masters to load into weights
    live: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # the tensors of the models to restore
    by_role: dict[Role, dict[str, TensorEntry]] = field(default_factory=dict)
    # names of flashoptim's lower bits that are restored into weights, and therefore not into the optimizer
    spent: set[str] = field(default_factory=set)
    recipes: Mapping[str, Recipe] = field(default_factory=dict)  # how the saved tensor subclasses are split, by key

    def entries(self, role: Role) -> dict[str, TensorEntry]:
        if role not in self.by_role:
            self.by_role[role] = self.plan.catalog.by_role(role)
        return self.by_role[role]


def unlike(name: str, here: Recipe | None, saved: Recipe | None, live: torch.Tensor | None = None) -> str:
    """Return a message for a tensor that this job and the checkpoint split into different plain tensors.

    `here` (this job) and `saved` describe how it is split. None: it is a plain tensor.
    """
    return f"{name} is {describe(here, live)} here, but {describe(saved)} in the checkpoint"


def of_another_class(key: str, item: Any, objects: Mapping[str, JSON]) -> str:
    """Describe how the saved optimizer's or scheduler's class differs from `item`'s.

    Returns "" if the classes are equal, or if the saved class was not recorded.
    """
    classes, here = objects.get("classes"), class_name(item)
    saved = classes.get(key, here) if isinstance(classes, Mapping) else here
    return "" if saved == here else f"saved from {saved}, here it is {here}"


def is_class_known(key: str, objects: Mapping[str, JSON]) -> bool:
    """Return whether the checkpoint records the class of this optimizer or scheduler. Only a ckptkit job records it."""
    classes = objects.get("classes")
    return isinstance(classes, Mapping) and key in classes


def compare_keys(item: Any, saved: Any) -> tuple[str, bool]:
    """Compare a scheduler or a gradient scaler with a saved state whose class was not recorded.

    Returns the difference between their keys ("" if there is none), and whether the state can be of the same class.
    It can be if keys were only added (by another version of torch), or only left out (by the program). It cannot be if
    the state lacks some keys and has others instead, or if it lacks a key in `_NEEDED`. An encoded OrderedDict is not
    compared.
    """
    live = item.state_dict()
    if not live or not all(isinstance(one, Mapping) for one in (live, saved)) or any(k[:1] == "$" for k in saved):
        return "", True
    lacking, more = (
        sorted(name for name in one.keys() - other.keys() if name in _NEEDED or not name.startswith(("_", "verbose")))
        for one, other in ((live, saved), (saved, live))
    )
    parts = [f"lacks {first_few(lacking)}"] * bool(lacking) + [f"has {first_few(more)}"] * bool(more)
    said = f"the saved state {' and '.join(parts)}, unlike the state of {class_name(item)}" if parts else ""
    if len(parts) == 2 or not _NEEDED.isdisjoint(lacking):
        return said, False
    pairs = zip(getattr(item, "_schedulers", ()), saved.get("_schedulers", ()), strict=False)
    inner = [(said, True), *(compare_keys(*pair) for pair in pairs)]
    return min((one for one in inner if one[0]), key=lambda one: one[1], default=("", True))
