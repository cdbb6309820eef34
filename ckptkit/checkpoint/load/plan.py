"""Plans a load without changing the training state: finds the saved tensor for each live one, and all mismatches.

A *recipe* describes how a tensor subclass (such as torchao's) is split into plain tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ckptkit.arguments import check_flags, wrong
from ckptkit.catalog.entry import Catalog, Role, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.checkpoint.load.differences import KeyFilter, Mismatches, match_tensors
from ckptkit.checkpoint.load.foreign import Adopted, adopt
from ckptkit.checkpoint.save.replicas import PER_RANK, OwnCopies, own_copies
from ckptkit.checkpoint.state.layout import Shard, as_global, matches, shards_of
from ckptkit.checkpoint.state.local_part import layout_of, this_rank
from ckptkit.checkpoint.state.optimizer import (
    GroupChanges,
    OptimizerTree,
    class_name,
    group_changes,
    inner_optimizers,
    joined,
    named_parameters,
    with_inner,
    with_new_head,
)
from ckptkit.checkpoint.state.optimizer_layout import SHARD, Held, cuts, layouts, placed_whole, places
from ckptkit.checkpoint.state.rng import shared_stream
from ckptkit.checkpoint.state.train_state import (
    Merge,
    PerRank,
    TrainState,
    computed_state,
    is_stateful,
    joined_weights,
    live_tensors,
    model_tensors,
    own_merge,
    parameter_names,
    section,
)
from ckptkit.checkpoint.state.values import JSON, decode, references
from ckptkit.checkpoint.state.views import View
from ckptkit.errors import CheckpointMismatchError, CorruptCheckpointError, SaveError, UsageError, command_line
from ckptkit.formats.dcp.host_bytes import (
    are_dense,
    dtype_name,
    expanded_ones,
    has_load_hooks,
    hidden_ones,
    local_part,
    placed_like,
)
from ckptkit.formats.dcp.subclasses import (
    SEPARATOR,
    STATES,
    SUBCLASSES,
    Recipe,
    describe,
    is_state_in_parts,
    keeps_parts,
    lower_bits_of,
    new_tensor,
    open_all,
    outer_name,
    same_recipe,
)
from ckptkit.formats.own.manifest import MESHES, PLACEMENTS
from ckptkit.formats.own.reader import OBJECTS_NAME
from ckptkit.storage.store import Store
from ckptkit.units import first_few, parse_size

if TYPE_CHECKING:
    import torch

    from ckptkit.catalog.box import Box
    from ckptkit.checkpoint.load.key_map import MappedWeights
    from ckptkit.keymaps.keymap import NameMap

_log = logging.getLogger(__name__)


_CHOICES: Mapping[str, tuple[object, ...]] = {
    "model": ("restore", "skip"),
    "optimizer": ("restore", "skip", "deferred"),
    "verify": (True, False, "read"),
    "replicas": ("auto", "broadcast", "read"),
    "rng_on_resize": ("reseed", "keep", "error"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of a load.

    Attributes:
        strict: Raise if keys are missing or unexpected. False: load the matching keys and report the others.
        include, exclude: Globs for the models' FQNs, or a predicate, to load only some parameters, such as adapters.
            With `strict`, a glob that matches nothing is an error.
        model: "restore" loads the models. "skip" leaves the models unchanged, for example to load only an optimizer.
        optimizer: "restore" loads the optimizer. "skip" leaves the optimizer unchanged. "deferred" lets you restore the
            optimizer later, with the handle in the report.
        key_map: A map from the checkpoint's names to the model's: a built-in name, a TOML or JSON file, or a NameMap.
            With a key map, only weights are loaded, and everything else is left unchanged. If the state has an
            optimizer, optimizer="skip" is required.
        convert_dtype: Cast model tensors whose dtype differs. If False, a different dtype is an error.
        atomic: Change nothing until everything is read and checked, for a job that continues after a failed load. Needs
            memory for a second copy. By default, only keys, shapes and dtypes are checked before anything is changed.
            Then tensors are read straight into model and optimizer, and damage found while reading leaves the state
            half loaded.
        max_memory: With `atomic`: the largest second copy allowed ("2GB"). The load raises if it needs more. None: this
            rank's share of the host's free memory.
        verify: True checks every slice against its digest. Slices that no rank reads completely are read once more, by
            one rank, so that damage is found on any world size. "read" checks only slices that are read completely
            anyway, without extra reads. False checks nothing.
        replicas: How to read data that several ranks need (HSDP, DDP). "broadcast": each rank reads a share and sends
            it to the others. "read": each rank reads everything. "auto": "broadcast" from object stores, where reads
            use the network; "read" from file systems, where reading is faster than sending.
        rng_on_resize: What to do with random number generators if the number of ranks changed. "reseed": seed each rank
            from the saved state and its rank. "keep": leave them unchanged. "error": raise.
        per_rank_on_resize: What to do with the states of dataloaders and `PerRank` values if the number of ranks
            changed. A function takes (states of all saved ranks, rank, world size) and returns this rank's state.
            "error" and "keep" restore a state on every rank if it is equal on all saved ranks. If the saved states
            differ, "error" raises, and "keep" leaves the live state unchanged. This option does not apply to objects
            that have a `merge_ranks` method (see `TrainState`).
    """

    strict: bool = True
    include: Sequence[str] | Callable[[str], bool] = ()
    exclude: Sequence[str] | Callable[[str], bool] = ()
    model: Literal["restore", "skip"] = "restore"
    optimizer: Literal["restore", "skip", "deferred"] = "restore"
    key_map: NameMap | str | None = None
    convert_dtype: bool = False
    atomic: bool = False
    max_memory: int | str | None = None
    verify: bool | Literal["read"] = True
    replicas: Literal["auto", "broadcast", "read"] = "auto"
    rng_on_resize: Literal["reseed", "keep", "error"] = "reseed"
    per_rank_on_resize: Literal["error", "keep"] | Merge = "error"

    def complete(self, missing: Sequence[str]) -> list[str]:
        """Return which of "model" and "optimizer" these options load completely.

        `missing`: keys not in the checkpoint.
        """
        if missing or self.include or self.exclude:
            return []
        return [kind for kind in ("model", "optimizer") if getattr(self, kind) == "restore"]

    def __post_init__(self) -> None:
        if self.max_memory is not None:
            parse_size(self.max_memory, "max_memory")
            if not self.atomic:
                raise UsageError("max_memory= limits the second copy that atomic=True makes. Pass both, or neither.")
        check_flags(strict=self.strict, convert_dtype=self.convert_dtype, atomic=self.atomic)
        for name in ("include", "exclude"):
            value = getattr(self, name)
            if not callable(value) and not isinstance(value, Iterable):
                raise wrong(name, value, "globs of FQNs, such as ['*.lora_*'], or a function of an FQN")
        for name, (*others, last) in _CHOICES.items():
            value = getattr(self, name)
            if value not in (*others, last):
                raise UsageError(f"{name}={value!r}: expected {', '.join(map(repr, others))} or {last!r}.")
        if self.key_map is not None and (self.model == "skip" or self.optimizer == "deferred"):
            raise UsageError("key_map= loads weights only: leave model='restore', and pass optimizer='skip'.")
        if self.per_rank_on_resize not in ("error", "keep") and not callable(self.per_rank_on_resize):
            raise UsageError(f"per_rank_on_resize={self.per_rank_on_resize!r}: expected 'error', 'keep' or a function.")


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
    keep: list[str] = field(
        default_factory=list
    )  # parameters that the checkpoint's optimizer lacks; they keep their state
    live: dict[str, dict[str, Any]] = field(default_factory=dict)  # live values; tensor subclasses as their parts
    wholes: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # tensor subclasses to fill
    skip: bool = False  # whether to restore only master weights, which must follow the weights
    shards: dict[str, tuple[Shard, ...]] = field(default_factory=dict)  # declared by the layout, by FQN
    joined: set[tuple[str, str]] = field(default_factory=set)  # tensors in `live` that are parts of global ones

    def shape(self, fqn: str) -> tuple[int, ...]:
        """Return the global shape of a parameter, in which its weight and its master weight are saved."""
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
class _Planner:
    """Builds the plan of a load, in the attribute `plan`."""

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
    live: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # each model's tensors
    declared: dict[int, tuple[Shard, ...]] = field(default_factory=dict)  # the layout's shards, by tensor id
    by_role: dict[Role, dict[str, TensorEntry]] = field(default_factory=dict)
    bits: dict[str, TensorEntry] | None = None  # flashoptim's lower bits of weights, by FQN; None before the first cast
    spent: set[str] = field(default_factory=set)  # names of lower bits that go into a weight, not into the optimizer
    recipes: Mapping[str, Recipe] = field(default_factory=dict)  # how the saved tensor subclasses are split, by key

    def entries(self, role: Role) -> dict[str, TensorEntry]:
        if role not in self.by_role:
            self.by_role[role] = self.plan.catalog.by_role(role)
        return self.by_role[role]

    def run(self) -> None:
        state, skipped = self.state, self.plan.skipped
        self.recipes = self.objects.get(SUBCLASSES, {})
        if not isinstance(self.recipes, dict) or not all(map(is_recipe, self.recipes.values())):
            raise CorruptCheckpointError(f"objects.json: the value of '{SUBCLASSES}' is malformed.")
        if self.options.model == "restore":
            self.models()
        else:
            skipped.update({section("model", name): 'model="skip"' for name in state.parts("model")})
        if self.from_masters:
            self.plan.notes.append(
                f"weights: {len(self.from_masters)} were restored from the fp32 masters, because the live dtype "
                "differs from the saved one."
            )
        self.spent = {target.lower_bits.name for target in self.plan.models if target.lower_bits is not None}
        if self.spent:
            text = "were restored exactly, with the lower bits that flashoptim keeps."
            self.plan.notes.append(f"weights: {len(self.spent)} {text}")
        self.optimizers()
        if self.options.key_map is not None:
            kinds = ("scheduler", "grad_scaler", "dataloader")
            kept = [section(kind, name) for kind in kinds for name in state.parts(kind)]
            kept += [f"extra.{name}" for name in state.extra] + ["rng"] * state.rng
            skipped.update(dict.fromkeys(kept, "key_map loads weights only"))
            return
        for kind in ("scheduler", "grad_scaler"):
            for name, item in state.parts(kind).items():
                self.object(kind, section(kind, name), item)
        for name, item in state.parts("dataloader").items():
            self.per_rank("dataloader", section("dataloader", name), item)
        for name, item in state.extra.items():
            plan_one = self.per_rank if isinstance(item, PerRank) else self.object
            plan_one("extra", f"extra.{name}", item)
        if state.rng:
            self.rng()
        self.left_out()

    # --- models

    def models(self) -> None:
        tables = self.plan.catalog.info.extra.get("aliases", {})
        for table in tables.values() if isinstance(tables, Mapping) else [tables]:
            if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table.values()):
                raise CorruptCheckpointError("the table of tied weights in the manifest is malformed.")
        chosen = KeyFilter(self.options.include, self.options.exclude)
        weights, mismatches = self.entries(Role.MODEL), self.plan.mismatches
        names: set[str] = set()
        fqns: list[str] = []
        for name, module in self.state.parts("model").items():
            key, prefix = section("model", name), f"{name}." if name else ""
            saved = {fqn[len(prefix) :]: entry for fqn, entry in weights.items() if fqn.startswith(prefix)}
            tensors, extra_state, handed = computed_state(module)
            self.live[key] = tensors
            fqns += [prefix + fqn for fqn in tensors]
            if handed is not None:
                self.plan.handed.append((module, handed))
                mismatches.add("unexpected", key, _not_taken(module, handed))
            live = dict(tensors)
            if not chosen.takes_all:
                outers = {fqn: outer_name(fqn, self.recipes, f"{key}.") for fqn in saved}
                names.update(tensors, (outer_name(f.removeprefix(prefix), self.recipes, f"{key}.") for f in weights))
                live = {fqn: tensor for fqn, tensor in tensors.items() if chosen(fqn)}
                saved = {fqn: entry for fqn, entry in saved.items() if chosen(outers[fqn])}
                left = [f"{key}.{fqn}" for fqn in outers if fqn not in saved]
                self.plan.skipped.update(dict.fromkeys(left, "not included"))
            joined_here = joined_weights(name, live, self.state.layout) if self.state.layout else {}
            live, recipes, reasons = open_all(live, joined_here)
            if recipes or self.recipes:
                live, saved = self.parts(key, live, saved, recipes)
            for fqn, tensor in live.items() if self.state.layout else ():
                if outer_name(fqn, recipes) == fqn:  # parts of a subclass come from a joined tensor
                    self.declared.setdefault(id(tensor), shards_of(self.state.layout, prefix + fqn))
            if hidden := {**hidden_ones(live), **reasons}:
                mismatches.add("others", key, [f"{fqn} here {why}" for fqn, why in hidden.items()])
                live = {fqn: tensor for fqn, tensor in live.items() if fqn not in hidden}
                saved = {fqn: entry for fqn, entry in saved.items() if fqn not in hidden}
            self.model(key, prefix, live, saved, tables.get(key, {}))
            if chosen.takes_all:
                self.extra_state(f"{key}.extra_state", module, extra_state)
        if self.state.layout:
            self.plan.globs.update(matches(self.state.layout, fqns))
        idle = [] if chosen.takes_all else chosen.idle(names)
        idle = [f"{rule} matches no tensor of the models or the checkpoint" for rule in idle]
        if self.options.strict:
            mismatches.add("others", "model", idle)
        else:
            self.plan.notes += idle

    def parts(
        self, key: str, live: dict[str, torch.Tensor], saved: dict[str, TensorEntry], recipes: Mapping[str, Recipe]
    ) -> tuple[dict[str, torch.Tensor], dict[str, TensorEntry]]:
        """Return `live` and `saved` without the tensor subclasses that are split differently in the two.

        Reports these as mismatches. `recipes` describes how the live tensor subclasses are split into the plain tensors
        in `live`.
        """
        head = f"{key}."
        stored = {name[len(head) :]: recipe for name, recipe in self.recipes.items() if name.startswith(head)}
        here = {fqn: outer_name(fqn, recipes) for fqn in live}
        there = {fqn: outer_name(fqn, stored) for fqn in saved}
        both = set(here.values()) & set(there.values()) | {here[fqn] for fqn in live if fqn in saved}
        differing = {fqn for fqn in both if not same_recipe(recipes.get(fqn), stored.get(fqn))}
        texts = [unlike(fqn, recipes.get(fqn), stored.get(fqn)) for fqn in sorted(differing)]
        self.plan.mismatches.add("others", key, texts)
        return (
            {fqn: tensor for fqn, tensor in live.items() if here[fqn] not in differing},
            {fqn: entry for fqn, entry in saved.items() if there[fqn] not in differing},
        )

    def extra_state(self, key: str, module: torch.nn.Module, live: Collection[str]) -> None:
        """Plan how to restore the extra state of modules (see `get_extra_state` in torch).

        Compares live and saved state module by module.
        """
        tree = self.objects.get(key, {})
        if self.foreign:
            if live:
                text = "values are left unchanged: ckptkit restores only those that it saved"
                self.plan.skipped[key] = f"{len(live)} {text}"
        elif isinstance(tree, dict):
            self.plan.mismatches.add("missing", key, [name for name in live if name not in tree])
            self.plan.mismatches.add("unexpected", key, [name for name in tree if name not in live])
            tree = {name: value for name, value in tree.items() if name in live}
        if tree:
            self.plan.objects.append(ObjectTarget("model", key, module, (tree,)))

    def model(
        self,
        key: str,
        prefix: str,
        live: Mapping[str, torch.Tensor],
        saved: dict[str, TensorEntry],
        aliases: Mapping[str, str],
    ) -> None:
        """Match one model's live and saved tensors."""
        mismatches, declared = self.plan.mismatches, self.declared

        def target(tensor: torch.Tensor, fqn: str, entry: TensorEntry) -> ModelTensor:
            bits = None
            if entry.role is Role.MODEL and entry.dtype != dtype_name(tensor.dtype):
                self.bits = lower_bits_of(self.plan.catalog) if self.bits is None else self.bits
                bits = self.bits.get(entry.fqn)
            return ModelTensor(f"{key}.{fqn}", tensor, entry, declared.get(id(tensor), ()), bits)

        names: dict[int, list[str]] = {}
        for fqn, tensor in live.items():
            names.setdefault(id(tensor), []).append(fqn)
        wanted: dict[str, torch.Tensor] = {}  # by the checkpoint's name
        claimed: set[str] = set()
        missing = []
        for group in names.values():
            candidates = [*group, *(aliases[fqn] for fqn in group if fqn in aliases)]
            found = [fqn for fqn in dict.fromkeys(candidates) if fqn in saved]
            if not found:
                missing.append(group[0])
                continue
            tensor, first = live[group[0]], found[0]
            if len(found) > 1:
                self.plan.twins.append([target(tensor, fqn, saved[fqn]) for fqn in found])
            claimed.update(found)
            saved[first] = self.exact(prefix, candidates, saved[first], tensor)
            wanted.setdefault(first, tensor)  # see below for weights that are tied only in the checkpoint
        mismatches.add("missing", key, missing)
        sides = {
            fqn: (dtype_name(t.dtype), tuple(as_global(f"{key}.{fqn}", t, declared.get(id(t), ())).shape))
            for fqn, t in wanted.items()
        }
        mine = {fqn: (e.dtype, e.shape) for fqn, e in saved.items() if fqn in sides or fqn not in claimed}
        good = match_tensors(mismatches, key, sides, mine, convert_dtype=self.options.convert_dtype)
        targets = [target(wanted[fqn], fqn, saved[fqn]) for fqn in good]
        for fqn, holder in aliases.items():
            # Let one saved tensor fill several live ones, if they are tied only in the checkpoint.
            if fqn not in live or fqn in saved or holder not in saved or wanted.get(holder) is live[fqn]:
                continue
            if not any(other.live is live[fqn] for other in [*self.plan.models, *targets]):
                entry = self.exact(prefix, [fqn, holder], saved[holder], live[fqn])
                targets.append(target(live[fqn], fqn, entry))
        self.plan.models += targets
        expanded = expanded_ones({one.key: one.live for one in targets})
        mismatches.add("others", key, [f"{name} {why}" for name, why in expanded.items()])

    def exact(self, prefix: str, names: Sequence[str], entry: TensorEntry, live: torch.Tensor) -> TensorEntry:
        """Return the saved tensor from which to load a weight.

        This is the saved weight, with one exception: if its dtype differs from the live weight's, and the checkpoint
        has an fp32 master weight, it is the master weight.
        """
        if entry.dtype == dtype_name(live.dtype):
            return entry
        masters = self.entries(Role.MASTER)
        master = next((masters[prefix + name] for name in names if prefix + name in masters), None)
        if master is None or master.shape != entry.shape or master.dtype == entry.dtype:
            return entry
        self.from_masters.add(master.fqn)
        return master

    # --- optimizers

    def optimizers(self) -> None:
        optimizers = self.state.parts("optimizer")
        if not optimizers:
            return
        if self.options.key_map is not None and self.options.optimizer == "restore":
            raise UsageError(
                "key_map= loads weights only, so the optimizer would not be restored. To start it without state, "
                "pass optimizer='skip'."
            )
        groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
        names = parameter_names(
            self.state,
            self.live if self.options.model == "restore" else None,
            [parameter for group in groups for parameter in group["params"]],
        )
        for name, optimizer in optimizers.items():
            key = section("optimizer", name)
            plan = OptimizerPlan(key, optimizer, named_parameters(optimizer, names, key))
            plan.shards = {fqn: found for fqn in plan.parameters if (found := shards_of(self.state.layout, fqn))}
            if self.options.optimizer != "restore":
                plan.skip = True
                self.plan.skipped[key] = f'optimizer="{self.options.optimizer}"'
                if plan.master_name is not None:
                    plan.masters = dict.fromkeys(plan.parameters)
                self.plan.optimizers.append(plan)
                continue
            # Master weights that neither an optimizer nor a weight uses count as unexpected, unless weights are skipped
            # or filtered, or another system wrote the checkpoint.
            left = [fqn for fqn in self.optimizer(plan, names) if fqn not in self.from_masters]
            whole = self.options.model == "restore" and not self.options.include and not self.options.exclude
            if whole and not self.foreign:
                self.plan.mismatches.add("unexpected", key, [f"master.{fqn}" for fqn in left])
            elif left:
                self.plan.notes.append(f"{key}: {len(left)} fp32 masters were skipped: no optimizer here uses masters.")
            self.plan.notes += plan.groups.notes
            self.plan.optimizers.append(plan)

    def optimizer(self, plan: OptimizerPlan, names: Mapping[int, str]) -> list[str]:
        """Complete one optimizer's plan. Return the FQNs of the saved master weights that the load does not use."""
        import torch

        found, catalog, objects = self.plan.mismatches, self.plan.catalog, self.objects
        tree = objects.get(plan.key)
        saved = None if tree is None else OptimizerTree.of(tree, plan.key)
        owners = {fqn for group in saved.param_groups for fqn in group["params"]} if saved else set()
        states: dict[str, dict[str, TensorEntry]] = {}
        masters: dict[str, TensorEntry] = {}
        for entry in catalog.tensors.values():
            if entry.role in (Role.OPTIMIZER, Role.MASTER) and entry.fqn and _owner(entry) == plan.key:
                if entry.role is Role.MASTER:
                    masters[entry.fqn] = entry
                elif entry.name not in self.spent:
                    fqn, name = _owner_and_state(entry, owners)
                    states.setdefault(fqn, {})[name] = entry
        # The checkpoint has the optimizer state of a tied weight under one of its names. A rank with only another name
        # (the last pipeline stage, for example, has `lm_head` but not the embedding) loads that state.
        for name, fqn in saved.tied.items() if saved is not None else ():
            if saved is not None and name in plan.parameters and fqn in owners and fqn not in plan.parameters:
                old, new = f"{plan.key}.state.{fqn}.", f"{plan.key}.state.{name}."
                saved = saved.renamed(fqn, name, old, new)
                self.recipes = with_new_head(self.recipes, old, new)
                owners = {*owners - {fqn}, name}
                states = {name if key == fqn else key: entries for key, entries in states.items()}
                masters = {name if key == fqn else key: entry for key, entry in masters.items()}
        other = of_another_class(plan.key, plan.optimizer, objects)
        if other or (tree is None and not states):
            found.add("missing", plan.key, [f"the whole optimizer{other and f' ({other})'}"])
            plan.groups = GroupChanges([{} for _ in plan.optimizer.param_groups])
            plan.keep = list(plan.parameters)  # with strict=False, the live state stays
            return list(masters)
        if saved is not None:
            plan.groups = group_changes(
                plan.optimizer, names, saved.param_groups, partial(self.setting, plan, saved), plan.key
            )
            plan.values, plan.shared, plan.held, plan.orders = saved.values, saved.shared, saved.held, saved.orders
            plan.same, plan.views, plan.kinds, plan.containers = saved.same, saved.views, saved.kinds, saved.containers
            plan.groups.unexpected += [f"{fqn}.{name}" for fqn in states if fqn not in owners for name in states[fqn]]
            if saved.states or self.own.bound:
                found.add("others", plan.key, self.of_other_ranks(plan, saved))
        else:
            plan.groups = GroupChanges(
                [{} for _ in plan.optimizer.param_groups], notes=[f"{plan.key}: no settings were saved"]
            )
            plan.groups.missing = [fqn for fqn in plan.parameters if fqn not in states]
            plan.groups.unexpected = [fqn for fqn in states if fqn not in plan.parameters]
        head = f"{plan.key}.state."
        opaque = catalog.info.extra.get("opaque", {})
        lost = {name.removeprefix(head): why for name, why in opaque.items() if name.startswith(head)}
        known = {f"{fqn}.{name}" for fqn, entries in states.items() for name in entries} if lost else ()
        found.add("unexpected", plan.key, [f"{name} ({why})" for name, why in lost.items() if name not in known])
        found.add("missing", plan.key, plan.groups.missing)
        found.add("unexpected", plan.key, plan.groups.unexpected)
        found.add("unexpected", plan.key, plan.groups.switches)
        found.add("others", plan.key, plan.groups.conflicts)
        plan.keep = [fqn for fqn in plan.groups.missing if fqn in plan.parameters]
        plan.states = {fqn: entries for fqn, entries in states.items() if fqn in plan.parameters}
        found.add("others", plan.key, [*self.of_their_state_dict(plan), *_of_no_parameter(plan)])
        if any(map(has_load_hooks, with_inner(plan.optimizer))):
            plan.groups.notes.append(
                f"{plan.key}: its load_state_dict pre-hooks change nothing: a load restores the saved values directly"
            )
        plan.live = {fqn: dict(plan.optimizer.state.get(item, {})) for fqn, item in plan.parameters.items()}
        values = [value for state in plan.live.values() for value in state.values()]
        tensors = [value for value in values if isinstance(value, torch.Tensor) or is_state_in_parts(value)]
        if self.recipes or not are_dense(list(map(local_part, tensors))):
            for fqn, parameter in plan.parameters.items():
                self.opened_states(plan, fqn, parameter)
        if self.foreign:  # ckptkit's own checkpoints record which states were saved
            found.add("missing", plan.key, _lacking_states(plan))
        weights = self.entries(Role.MODEL)
        _check_states(plan, weights, found)
        return _plan_masters(plan, masters, weights, found)

    def setting(self, plan: OptimizerPlan, saved: OptimizerTree, key: str) -> torch.Tensor:
        """Return a param group's tensor setting (such as lr). One saved as a DTensor becomes a DTensor if possible."""
        return placed_whole(plan.parameters.values(), saved.held.get(key), self.small(key))

    def opened_states(self, plan: OptimizerPlan, fqn: str, parameter: torch.Tensor) -> None:
        """Match those live and saved states of one parameter whose tensors are of a subclass, such as torchao's.

        If the live optimizer does not have such a state yet, creates its tensor.
        """
        import torch
        from torch.distributed.tensor import DTensor

        live, entries = dict(plan.live[fqn]), plan.states.get(fqn, {})
        head = f"{plan.key}.state.{fqn}."
        outers = dict.fromkeys(outer_name(name, self.recipes, head) for name in entries)
        stored = {name: self.recipes[head + name] for name in outers if name not in entries}
        tensors = {k: v for k, v in live.items() if isinstance(v, torch.Tensor) or is_state_in_parts(v)}
        shards = plan.shards.get(fqn, ())
        try:
            declared = joined(head.rstrip("."), tensors, parameter, shards)
        except SaveError as error:
            self.plan.mismatches.add("others", plan.key, [str(error)])
            return
        _, recipes, reasons = open_all(
            {**tensors, **declared}, {k: parameter for k, v in tensors.items() if is_state_in_parts(v)}
        )
        wholes = {name: live[name] for name in recipes}
        others = [f"{fqn}.{name} here {why}" for name, why in reasons.items()]
        for name, recipe in stored.items():
            try:
                if name not in live:
                    front = name + SEPARATOR
                    parts = {part.removeprefix(front): item for part, item in entries.items() if part.startswith(front)}
                    is_declared = bool(shards) and recipe.get("class") in STATES
                    place = as_global(fqn, parameter, shards) if is_declared else parameter
                    wholes[name] = new_tensor(recipe, place, parts)
                    if is_declared:
                        declared[name], local = wholes[name], local_part(wholes[name])
                        wholes[name] = placed_like(parameter, local) if isinstance(parameter, DTensor) else local
                tensor = declared.get(name, wholes.get(name, live.get(name)))
                opened, made, _ = open_all({name: tensor}, {name: parameter} if is_state_in_parts(tensor) else {})
                if not same_recipe(made.get(name), recipe):
                    others.append(unlike(f"{fqn}.{name}", made.get(name), recipe, tensor))
                elif opened.keys() - entries.keys():
                    raise CorruptCheckpointError(f"{head}{name}: not all of its parts are in the checkpoint.")
            except SaveError as error:
                others.append(f"{fqn}.{name} in the checkpoint {error}")
                continue
            plan.live[fqn].update(opened)
            plan.joined.update((fqn, part) for part in opened if name in declared)
            others += [
                f"{fqn}.{part} is {entries[part].dtype} in the checkpoint, {dtype_name(tensor.dtype)} here"
                for part, tensor in opened.items()
                if part in entries and entries[part].dtype != dtype_name(tensor.dtype)
            ]
        for name, recipe in recipes.items():  # a tensor subclass here, but a single tensor in the checkpoint
            if name in entries and (why := entries[name].slices.opaque):
                others.append(
                    f"{fqn}.{name} {why} in the checkpoint: torch's dcp.save pickled each shard as an object of its "
                    "class, which only the class can read. Load them with torch's dcp.load on as many ranks, and save "
                    "them again"
                )
            elif name in entries:
                others.append(unlike(f"{fqn}.{name}", recipe, None))
        plan.wholes[fqn] = {name: tensor for name, tensor in wholes.items() if name in stored}
        self.plan.mismatches.add("others", plan.key, others)

    def of_their_state_dict(self, plan: OptimizerPlan) -> list[str]:
        """Describe saved states that are not split into parts, although the live optimizer splits them.

        Only flashoptim's optimizers split their live states. Their `state_dict` returns the states unsplit. Checkpoints
        that other systems wrote, or that contain a different optimizer, therefore have unsplit states.
        """
        if not keeps_parts(plan.optimizer):
            return []
        spec, names = {*plan.optimizer.quantized_state_spec, *["error_bits"] * self.foreign}, list[str]()
        for fqn, entries in plan.states.items():
            plain = [name for name in entries if outer_name(name, self.recipes, f"{plan.key}.state.{fqn}.") == name]
            names += [f"{fqn}.{name}" for name in plain if name.partition(SEPARATOR)[0] in spec]
        if not names:
            return []
        more, kind = f" and {len(names) - 5} more" if len(names) > 5 else "", type(plan.optimizer).__name__
        text = f"{', '.join(names[:5])}{more}: {kind} keeps these states in another form. Load the checkpoint with"
        return [f"{text} dcp.load and {kind}.load_state_dict, and save it again"]

    def of_other_ranks(self, plan: OptimizerPlan, saved: OptimizerTree) -> list[str]:
        """Describe the saved states that were computed from shards which no rank of this job has.

        This job cannot use these states; see `checkpoint/state/optimizer_layout`.
        """
        cut = cuts(plan.parameters)
        here, place = layouts(cut), self.own.places.get(plan.key)
        # Earlier checkpoints do not contain the ranks' positions in the meshes.
        alike = here == saved.layouts if place is None else places(cut, this_rank()) == place
        own = [key[len(plan.key) + 1 :] for key in self.own.bound if key.startswith(f"{plan.key}.")]
        own = [key.removeprefix("state.").removeprefix("values.") for key in own]
        mine, others = ({fqn for key, fqn in found if key == plan.key} for found in (self.own.mine, self.own.others))
        # Whether this rank had other parameters than now, and other ranks had its parameters (pipeline stages).
        moved = mine - plan.parameters.keys() and others & plan.parameters.keys()
        if own and (moved or not (self.own.fits and alike)):
            names, whose = own, f"each of the {self.own.ranks} ranks that saved them has its own"
        elif here and saved.states and not saved.layouts:
            names, whose = saved.states, "they may have been computed from whole parameters"
        else:
            return []
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        order = ", in another order" if here == saved.layouts and self.own.fits else ""
        return [
            f"{', '.join(names[:5])}{more}: {whose}, so they load only where the parameters are sharded the same way "
            f"(saved by {self.own.ranks or self.plan.catalog.info.world_size} ranks: {_cuts(saved.layouts)}; here, on "
            f"{self.world_size} ranks: {_cuts(here)}{order}). Load them there, or pass "
            'optimizer="skip"'
        ]

    # --- other objects

    def object(self, kind: str, key: str, item: Any) -> None:
        if key not in self.objects:
            self.absent(kind, key)
            return
        tree = self.objects[key]
        other = ""
        if kind == "scheduler":
            other = of_another_class(key, item, self.objects) or self.by_position(item, tree)
        if kind == "grad_scaler" and tree == {} and item.state_dict():
            other = "the saved scaler was disabled, this one is enabled"
        if other:
            self.plan.mismatches.add("missing", kind, [f"the state of this object: {other}"])
        elif kind == "grad_scaler" and tree and not item.state_dict():
            self.plan.skipped[key] = "disabled in this job"
        else:
            if kind == "extra":
                self.module(key, item, tree)
            self.plan.objects.append(ObjectTarget(kind, key, item, (tree,)))

    def by_position(self, scheduler: Any, tree: JSON) -> str:
        """Describe values of a scheduler that would apply to the wrong param groups. Returns "" if there are none.

        A load matches param groups by their parameters, but a scheduler identifies a group only by its position.
        """
        optimizer = getattr(scheduler, "optimizer", None)
        plans = self.plan.optimizers
        for plan in plans if len(plans) == 1 else [p for p in plans if p.optimizer is optimizer]:
            groups = plan.groups
            moved = _moved_values(tree, groups.order, groups.saved) if groups.saved else []
            if moved:
                return (
                    f"it stores {', '.join(moved)} by the positions of the groups of {plan.key}, but the groups or "
                    "their order differ here. Create the groups as they were saved, or create a new scheduler"
                )
        return ""

    def module(self, key: str, item: Any, tree: JSON) -> None:
        """Compare a model in `TrainState.extra` with its saved state, as strictly as the models in `TrainState.model`.

        The model's own `load_state_dict` would cast tensors silently. If some tensors do not match, it would also load
        the others before it raises an error.
        """
        import torch

        def side(value: Any) -> tuple[str, tuple[int, ...]]:
            dtype = getattr(value, "dtype", "no tensor")
            return str(dtype).removeprefix("torch."), tuple(getattr(value, "shape", ()))

        if isinstance(item, torch.nn.Module):
            saved = decode(tree, self.small if self.foreign else self.without_values)
            if isinstance(saved, Mapping):
                live, found = ({name: side(value) for name, value in one.items()} for one in (item.state_dict(), saved))
                match_tensors(self.plan.mismatches, key, live, found, convert_dtype=self.options.convert_dtype)

    def without_values(self, key: str) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype of a saved tensor."""
        import torch

        entry = self.plan.catalog.tensors[key]
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")

    def absent(self, kind: str, key: str) -> None:
        """Report a missing key: as a mismatch if ckptkit wrote the checkpoint, otherwise only as skipped.

        Other systems do not save every key.
        """
        if self.foreign:
            self.plan.skipped[key] = "not in the checkpoint, which ckptkit did not write"
        else:
            self.plan.mismatches.add("missing", kind, [key])

    def saved_ranks(self, key: str) -> list[int]:
        """Return the ranks that saved a state under `key`, in ascending order."""
        ranks = [name[len(key) + 1 :] for name in self.objects if name.startswith(f"{key}.")]
        return sorted(int(rank) for rank in ranks if rank.isdigit())

    def per_rank(self, kind: str, key: str, item: Any) -> None:
        ranks = self.saved_ranks(key)
        if not ranks:
            self.absent(kind, key)
            return
        trees = [self.objects[f"{key}.{rank}"] for rank in ranks]
        policy = self.options.per_rank_on_resize
        resized = ranks != list(range(self.world_size))
        merge = own_merge(item) or (policy if resized and callable(policy) else None)
        if merge is not None:
            self.plan.objects.append(ObjectTarget(kind, key, item, tuple(trees), merge))
        elif not resized:
            self.plan.objects.append(ObjectTarget(kind, key, item, (trees[self.rank],)))
        elif all(tree == trees[0] for tree in trees) and not references(trees[0]):
            self.plan.objects.append(ObjectTarget(kind, key, item, (trees[0],)))
            if kind == "dataloader":
                note = (
                    f"{key}: all {len(ranks)} ranks saved the same state, and each of the {self.world_size} ranks "
                    "continues from it. If the state counts the samples of one rank, samples are repeated or left out; "
                    "to avoid that, pass per_rank_on_resize, a function that computes a state from the saved ones"
                )
                self.plan.notes.append(note)
                if self.rank == 0:
                    _log.warning("%s.", note)
        elif policy == "keep":
            self.plan.skipped[key] = f"saved at world size {len(ranks)}, now it is {self.world_size}"
        else:
            text = (
                f"{key} has one state per rank, saved at world size {len(ranks)}; the world size is now "
                f"{self.world_size}. Pass per_rank_on_resize='keep', or a function that computes a state from "
                "the saved ones"
            )
            self.plan.mismatches.add("others", kind, [text])

    def rng(self) -> None:
        ranks = self.saved_ranks("rng")
        if not ranks:
            note = "the checkpoint has no random number state"
            if self.random:
                note = f"not restored: random numbers, because the form of {first_few(self.random, 3)} is unknown"
            self.plan.notes.append(note)
            return
        _, streams = shared_stream(self.rank, self.world_size)
        first = self.objects[f"rng.{ranks[0]}"]
        saved = first.get("streams") if isinstance(first, Mapping) else None  # None: share_stream was not called
        changed = f"saved at world size {len(ranks)}, now it is {self.world_size}"
        if len(ranks) == self.world_size and saved is not None:
            changed = f"saved with {saved} independent random streams, now there are {streams}"
        if len(ranks) == self.world_size and ranks[-1] == self.world_size - 1 and saved in (None, streams):
            self.plan.rng = self.objects[f"rng.{self.rank}"]
        elif self.options.rng_on_resize == "error":
            self.plan.mismatches.add("others", "rng", [changed])
        elif self.options.rng_on_resize == "reseed":
            self.plan.reseed = True
            self.plan.rng = self.objects[f"rng.{ranks[0]}"]
            self.plan.notes.append(
                f"random numbers: {changed}; each rank is reseeded from the saved state and its rank"
            )
        else:
            self.plan.skipped["rng"] = changed

    def left_out(self) -> None:
        """Report the sections of the checkpoint, such as a scheduler's, that this job does not use."""
        live = {section(kind, name) for kind in ("model", "optimizer", "scheduler", "grad_scaler", "dataloader")
                for name in self.state.parts(kind)}  # fmt: skip
        for key, tree in self.objects.items():
            kind, _, rest = key.partition(".")
            name, _, rank = rest.partition(".")
            if kind == "extra" and name not in self.state.extra:
                if not rank:
                    self.plan.leftovers[name] = tree
                elif rank == str(self.rank):
                    self.plan.leftovers[f"{name}.{rank}"] = tree
            elif kind not in live and kind not in ("step", "rng", "extra", "classes", SUBCLASSES, PER_RANK):
                self.plan.skipped.setdefault(kind, "not in the training state")
            elif kind == "rng" and not self.state.rng:
                self.plan.skipped.setdefault(kind, "rng=False")
        models = self.state.parts("model")
        if not models and self.entries(Role.MODEL):
            self.plan.skipped.setdefault("model", "not in the training state")
        elif "" not in models:  # each saved name starts with its model's name
            saved = dict.fromkeys(fqn.partition(".")[0] for fqn in self.entries(Role.MODEL))
            for name in (name for name in saved if name not in models):
                self.plan.skipped.setdefault(section("model", name), "not in the training state")


def is_recipe(recipe: JSON) -> bool:
    """Return whether a JSON value has the fields of a recipe, which describes how a tensor subclass is split."""
    inner = recipe.get("inner") if isinstance(recipe, dict) else None
    return isinstance(inner, dict) and "context" in recipe and all(isinstance(spec, dict) for spec in inner.values())


def unlike(name: str, here: Recipe | None, saved: Recipe | None, live: torch.Tensor | None = None) -> str:
    """Return a message for a tensor that this job and the checkpoint split into different plain tensors.

    `here` (this job) and `saved` describe how it is split. None: it is a plain tensor.
    """
    return f"{name} is {describe(here, live)} here, but {describe(saved)} in the checkpoint"


def _not_taken(module: torch.nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Return the entries of a module's state dict that the module's `load_state_dict` does not accept.

    Such entries were added by a hook. They are found by loading the module's own state dict back into it.
    """
    import torch

    with torch.no_grad():
        left = module.load_state_dict(dict(state), strict=False).unexpected_keys
    return [f"{name} (the module's state_dict has it, but its load_state_dict does not accept it)" for name in left]


def _moved_values(tree: JSON, order: Sequence[int | None], saved: int, name: str = "") -> list[str]:
    """Return the names of a scheduler's lists whose values would apply to the wrong param groups.

    A list is returned if it has one value per saved group, and would change if it were put into the order of the live
    groups.

    Args:
        tree: The saved state of a scheduler.
        order: For each live group, the index of the matching saved group.
        saved: The number of saved groups.
    """
    if isinstance(tree, dict):
        inner = [(key if not key.startswith("$") else name, value) for key, value in tree.items()]
        found = [text for key, value in inner for text in _moved_values(value, order, saved, key)]
        return list(dict.fromkeys(found))
    if not isinstance(tree, list):
        return []
    if len(tree) == saved and [None if i is None else tree[i] for i in order] != tree:
        return [name]
    return list(dict.fromkeys(text for value in tree for text in _moved_values(value, order, saved, name)))


def of_another_class(key: str, item: Any, objects: Mapping[str, JSON]) -> str:
    """Describe how the saved optimizer's or scheduler's class differs from `item`'s.

    Returns "" if the classes are equal, or if the saved class was not recorded.
    """
    classes, here = objects.get("classes"), class_name(item)
    saved = classes.get(key, here) if isinstance(classes, Mapping) else here
    return "" if saved == here else f"saved from {saved}, here it is {here}"


def _owner(entry: TensorEntry) -> str:
    first = entry.name.partition(".")[0]
    return first if first.startswith("optimizer_") else "optimizer"


def _owner_and_state(entry: TensorEntry, owners: Collection[str]) -> tuple[str, str]:
    """Return the (FQN, state name) of an optimizer state.

    Some formats store both as a single string. If the state's name contains dots, only `owners`, the FQNs of the saved
    parameters, shows where the name begins.
    """
    if entry.fqn in owners or not owners:
        return entry.fqn, entry.state
    parts = entry.fqn.split(".")
    heads = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
    fqn = next((head for head in heads if head in owners), entry.fqn)
    return fqn, f"{entry.fqn}.{entry.state}".removeprefix(f"{fqn}.")


def _of_no_parameter(plan: OptimizerPlan) -> list[str]:
    """Describe saved states that belong to no parameter, if several live optimizers could own them."""
    several = len(inner_optimizers(plan.optimizer)) > 1
    why = "belongs to no parameter, and several optimizers are loaded as one here"
    return [f"{name} {why}" for name in plan.shared] if several else []


def _check_states(plan: OptimizerPlan, weights: Mapping[str, TensorEntry], found: Mismatches) -> None:
    for fqn, entries in plan.states.items():
        parameter = plan.parameters[fqn]
        live = plan.live.get(fqn, {})
        wanted, weight = plan.shape(fqn), weights.get(fqn)
        # If the saved weight has the parameter's shape, accept a state of another shape, such as a lookup table.
        same_weight = weight is not None and weight.shape == wanted
        for name, entry in entries.items():
            shape = entry.shape
            if plan.held and plan.held.get(f"{plan.key}.state.{fqn}.{name}") == SHARD:
                shape = wanted  # the live state is only a shard: take the shape of the whole parameter
            elif name in live:
                shape = tuple(getattr(live[name], "shape", shape))
                shape = wanted if shape == tuple(parameter.shape) and (fqn, name) not in plan.joined else shape
            elif not same_weight and len(shape) == len(wanted) and entry.numel > 1:
                # Factored moments have one row or one column.
                fits = all(size in (1, whole) for size, whole in zip(shape, wanted, strict=True))
                shape = shape if fits else wanted
            if shape != entry.shape:
                text = f"{fqn}.{name} ({list(entry.shape)} in the checkpoint, expected {list(shape)})"
                found.add("shapes", plan.key, [text])


def _lacking_states(plan: OptimizerPlan) -> list[str]:
    """Return the missing states ("FQN.state") of parameters for which the checkpoint has at least one state.

    A live state that has its parameter's shape is missing if it is not saved. If a parameter has no live states yet, or
    if any of its live states is not saved, its saved states are also compared with those of the other parameters in the
    group. If another parameter has all of these states and more, the additional states are missing, too. For example,
    exp_avg_sq is missing if one parameter has only exp_avg, and another has both.
    """
    lacking: list[str] = []
    names = {id(parameter): fqn for fqn, parameter in plan.parameters.items()}
    for group in plan.optimizer.param_groups:
        fqns = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
        states = {fqn: frozenset(plan.states.get(fqn, ())) | frozenset(plan.values.get(fqn, ())) for fqn in fqns}
        kinds = dict.fromkeys(states.values())
        for fqn, own in states.items():
            if not own:
                continue  # the optimizer never updated this parameter
            shape = plan.parameters[fqn].shape
            live = {name for name, value in plan.live[fqn].items() if getattr(value, "shape", None) == shape}
            live -= plan.wholes.get(fqn, {}).keys()  # their parts are listed
            is_complete = bool(plan.live[fqn]) and plan.live[fqn].keys() <= own | {plan.master_name}
            wider = own if is_complete else next((kind for kind in kinds if own < kind), own)
            lacking += [f"{fqn}.{name}" for name in sorted((live | wider) - own - {plan.master_name})]
    return lacking


def _cuts(found: Sequence[Any]) -> str:
    """Describe how parameters are sharded. `found` is the result of `layouts`."""
    return " and ".join(f"{', '.join(map(str, texts))} on {list(shape)}" for shape, texts in found) or "not sharded"


def _plan_masters(
    plan: OptimizerPlan, masters: Mapping[str, TensorEntry], weights: Mapping[str, TensorEntry], found: Mismatches
) -> list[str]:
    """Find the saved tensor for each live fp32 master weight.

    This is the saved master weight. If there is none, it is the saved weight, provided that it is fp32 or fp64.
    Returns the FQNs of the saved master weights that match no live one.
    """
    if plan.master_name is None:
        return list(masters)
    for fqn, parameter in plan.parameters.items():
        if fqn in masters:
            if masters[fqn].shape != plan.shape(fqn):
                shapes = f"{list(masters[fqn].shape)} in the checkpoint, expected {list(plan.shape(fqn))}"
                found.add("shapes", plan.key, [f"master.{fqn} ({shapes})"])
            plan.masters[fqn] = masters[fqn]
        elif plan.master_name in plan.optimizer.state.get(parameter, {}):
            weight = weights.get(fqn)
            wide = weight is not None and weight.dtype in ("float32", "float64") and weight.shape == plan.shape(fqn)
            plan.masters[fqn] = weight if wide else None
            if not wide and fqn not in plan.keep:
                found.add("missing", plan.key, [f"master.{fqn}"])
    return [fqn for fqn in masters if fqn not in plan.parameters]


def plan_load(
    state: TrainState, catalog: Catalog, store: Store, options: LoadOptions, *, rank: int, world_size: int
) -> LoadPlan:
    """Plan a load without changing anything.

    Reads all saved values that are not tensors, and only those tensors that optimizer settings or `extra` need.

    Mismatches are collected in the plan's `mismatches`, with one exception: if a LOCAL checkpoint was saved on a
    different mesh, this raises an error.
    """
    for item in state.extra.values():
        if isinstance(item, type) and is_stateful(item):
            raise UsageError("TrainState.extra holds a class; it must hold objects.")
    if catalog.info.format == "ckptkit-local":
        _check_local(state, catalog, store.url, world_size=world_size)
    objects = _json_objects(catalog)
    own = own_copies(catalog, objects, rank=rank, world_size=world_size)
    catalog = own.catalog
    adopted = Adopted(catalog, own.objects)
    if options.key_map is not None:
        return _plan_mapped(state, catalog, options, rank=rank, world_size=world_size)
    stacked: MappedWeights | None = None
    if catalog.info.format == "safetensors" and options.model == "restore":
        stacked = _stacked(state, catalog)
    if stacked is not None:  # files beside the weights, such as optimizer.pt, are those of the live model
        catalog = replace(stacked.catalog, objects=catalog.objects)
    if not objects:
        adopted = adopt(catalog, store, state, optimizer=options.optimizer == "restore")
    catalog = replace(adopted.catalog, tensors=dict(adopted.catalog.tensors))  # creates each lazy entry only once

    def small(key: str) -> torch.Tensor:  # rarely called, for example if a learning rate is a large tensor
        from ckptkit.formats.dcp.fill import read_whole

        return adopted.tensors[key] if key in adopted.tensors else read_whole(catalog, store, [key])[key]

    plan = LoadPlan(catalog, adopted.tensors)
    if stacked is not None:
        plan.sources, plan.filled = stacked.sources, stacked.filled
        plan.skipped.update(stacked.dropped)
    _Planner(state, adopted.objects, options, rank, world_size, small, not objects, plan, own, adopted.random).run()
    plan.notes += [*adopted.notes, *(stacked.notes if stacked is not None else ())]
    if own.note:
        plan.notes.append(own.note)
        if rank == 0:
            _log.warning("%s: %s.", store.url, own.note)
    return plan


def _plan_mapped(state: TrainState, catalog: Catalog, options: LoadOptions, *, rank: int, world_size: int) -> LoadPlan:
    from ckptkit.checkpoint.load.key_map import map_weights
    from ckptkit.keymaps.named import resolve_key_map

    key_map = resolve_key_map(options.key_map)
    assert key_map is not None
    live, config = _names_and_config(state)
    mapped = map_weights(catalog, key_map, live=live, config=config)
    plan = LoadPlan(mapped.catalog, {}, sources=mapped.sources, filled=mapped.filled)
    plan.skipped.update(mapped.dropped)
    own = OwnCopies(mapped.catalog, {})
    _Planner(state, {}, options, rank, world_size, dict[str, Any]().__getitem__, True, plan, own).run()
    plan.notes += mapped.notes
    for target in plan.models:
        if (filled := plan.filled.get(target.entry.name)) is not None:
            boxes = ", ".join(f"{list(box.sizes)} at {list(box.offsets)}" for box in filled[:3])
            plan.padded.append(target.key)
            plan.notes.append(f"{target.key} {list(target.entry.shape)}: filled {boxes}; the rest is left unchanged")
    return plan


def _names_and_config(state: TrainState) -> tuple[set[str], Mapping[str, Any]]:
    """Return the live models' tensor names, and the config of the first model that has one."""
    models = state.parts("model").values()
    configs = (getattr(getattr(module, "config", None), "to_dict", None) for module in models)
    return set(live_tensors(state)), next((to_dict() for to_dict in configs if callable(to_dict)), {})


def _stacked(state: TrainState, catalog: Catalog) -> MappedWeights | None:
    """Return the weights of Hugging Face files under the live model's names.

    The names in the files may differ because transformers stacks experts in memory. Returns None if the names agree, or
    if no key map for the model is known.
    """
    from ckptkit.checkpoint.load.key_map import map_weights
    from ckptkit.keymaps.builtin import choose_map

    live, config = _names_and_config(state)
    if not config or live <= catalog.tensors.keys() or catalog.tensors.keys() <= live:
        return None
    targets = {name: Target.of(entry, name) for name, entry in catalog.tensors.items()}
    chosen = choose_map(targets, wanted=live, config=config).key_map
    return map_weights(catalog, chosen, live=live, config=config) if chosen.rules else None


def _json_objects(catalog: Catalog) -> dict[str, JSON]:
    """Return the objects other than tensors in a ckptkit checkpoint. Returns {} for a checkpoint of another system."""
    found = catalog.objects.values()
    return {entry.name: entry.value for entry in found if entry.path.rpartition("/")[2] == OBJECTS_NAME}


def _check_local(state: TrainState, catalog: Catalog, url: str, *, world_size: int) -> None:
    """Raise if a LOCAL checkpoint was saved on a different number of ranks, or with a different mesh or placements."""
    from torch.distributed.tensor import DTensor

    saved = catalog.info.world_size
    why = f"it was saved at world size {saved}, this job has {world_size}" if saved != world_size else ""
    why = why or _moved(state, catalog)
    if not why:
        return
    found = [layout_of(tensor) for tensor in live_tensors(state).values() if isinstance(tensor, DTensor)]
    wide = next((layout for layout in found if len(layout.mesh_shape) > 1), None)
    mesh = f"replicate={world_size}" if not found and world_size > 1 else ""  # the default is a mesh that only shards
    if wide is not None:
        mesh = ",".join(f"{n}={s}" for n, s in zip(wide.mesh_names, wide.mesh_shape, strict=True))
    flag = ("--mesh", mesh) if mesh else ()
    line = command_line("reshard", url, "DST", "--world-size", str(world_size), *flag, "--type", "local")
    raise CheckpointMismatchError(
        f"{url} is a LOCAL checkpoint, which loads only on the mesh that wrote it: {why}. Reshard it "
        f"for this job:\n  {line}"
    )


def _placed(mesh_shape: Sequence[int], placements: Sequence[str]) -> str:
    wide = [(size, text) for size, text in zip(mesh_shape, placements, strict=True) if size > 1]
    if all(text == "R" for _, text in wide):
        return "whole on each rank"
    return str(tuple(zip(*wide, strict=True)))


def _moved(state: TrainState, catalog: Catalog) -> str:
    """Describe the first parameter whose live placement differs from its saved placement. Returns "" if all agree."""
    from torch.distributed.tensor import DTensor

    meshes, placements = catalog.info.extra.get(MESHES, []), catalog.info.extra.get(PLACEMENTS, {})
    for name, module in state.parts("model").items():
        for fqn, tensor in model_tensors(module)[0].items():
            key = f"{section('model', name)}.{fqn}"
            if key not in catalog.tensors:
                continue
            saved = placements.get(key)
            was = ((), ()) if saved is None else (tuple(meshes[saved[0]]["shape"]), tuple(saved[1]))
            view = as_global(key, tensor, shards_of(state.layout, f"{name}.{fqn}" if name else fqn))
            layout = layout_of(view) if isinstance(view, DTensor) else None
            now = ((), ()) if layout is None else (layout.mesh_shape, layout.texts())
            placed = [_placed(*one) for one in (was, now)]
            if placed[0] != placed[1]:
                return f"{key} was placed {placed[0]}, but is {placed[1]} here"
    return ""
