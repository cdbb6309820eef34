"""Chooses which modules become FSDP units. Only reads the model's structure and returns names."""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Callable, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ckptkit.errors import UsageError
from ckptkit.fsdp.config import FSDPConfig, WrapPolicy

Policy = Callable[[nn.Module], list[str]]
"""A function that returns the names of the modules to wrap. The root is always wrapped, and need not be named."""

DEFAULT_CLASSES = [
    "Qwen2VLDecoderLayer",
    "Qwen2VLVisionBlock",
    "Qwen2_5_VLVisionBlock",
    "Qwen2_5_VLDecoderLayer",
    "Qwen2DecoderLayer",
    "LlamaDecoderLayer",
    "DeepseekDecoderLayer",
]
"""Block classes that AUTO looks for, in addition to the classes that the model names. You can add your own classes."""

VISION_NAMES = ["visual", "vision_tower", "vision_model", "vision_encoder", "image_encoder", "vision_backbone"]
"""Names of modules that some ranks may skip in a mixed-modal batch."""

# A unit's hooks must run. But a container has no forward method to hook, and attention reads its children's weights
# without calling the children.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_LEAVES = (nn.MultiheadAttention,)


Units = list[tuple[str, ...]]
"""A model's units, innermost first. A unit is a tuple of module names. These modules are gathered together."""

ROOT = ("",)
"""The last unit: the root module. It contains all parameters that are in no other unit."""


def plan_units(model: nn.Module, policy: Policy, *, exclude: Sequence[str] = (), heads: bool = False) -> Units:
    """Return the units that `policy` chooses in `model`. Tied parameters are always in the same unit.

    Units that share a parameter are merged. If one of them is inside the other, only the outer unit remains.

    Args:
        exclude: Class names or FQN globs. Matching modules and their children never become units.
        heads: True also makes units of the embeddings and the output head.

    Raises:
        UsageError: The policy names a module that does not exist or cannot be wrapped.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen = dict.fromkeys(policy(model))
    if heads:
        chosen.update(dict.fromkeys(_head_names(model)))
    chosen.pop("", None)
    for name in chosen:
        if name not in modules:
            raise UsageError(f"The wrap policy names {name!r}, which is not a module of {type(model).__name__}.")
        if _is_container(modules[name]):
            raise UsageError(
                f"Module {name!r} is a {type(modules[name]).__name__}, which runs no forward of its own, so it "
                "can't be a unit. Wrap its elements."
            )
    shut = _excluded(modules, exclude)
    seen: set[int] = set()
    names = []
    for name in chosen:  # a module registered under two names is one unit
        if not _under(name, shut) and id(modules[name]) not in seen:
            seen.add(id(modules[name]))
            names.append(name)
    groups = _join_tied(modules, names)
    groups.sort(key=lambda group: -max(name.count(".") for name in group))  # fully_shard must go bottom-up
    return [*groups, ROOT]


def policy_of(config: FSDPConfig, model: nn.Module) -> Policy:
    """Return the policy that `config.auto_wrap_policy` names.

    Raises:
        UsageError: The policy is TRANSFORMER_BASED_WRAP, but the classes of the model's blocks are unknown.
    """
    kind = config.auto_wrap_policy
    if kind is WrapPolicy.NO_WRAP:
        return lambda model: []
    if kind is WrapPolicy.SIZE_BASED_WRAP:
        return by_size(config.min_num_params)
    if kind is WrapPolicy.BLOCKS:
        return blocks
    if config.transformer_layer_cls:
        return by_class(*config.transformer_layer_cls)
    modules = list(model.modules())
    # In transformers models, `_no_split_modules` is a list, a set or None.
    own = [name for module in modules for name in sorted(getattr(module, "_no_split_modules", None) or ())]
    present = {type(module).__name__ for module in modules}
    classes = [name for name in dict.fromkeys([*own, *DEFAULT_CLASSES]) if name in present]
    if classes:
        return by_class(*classes)
    if kind is WrapPolicy.TRANSFORMER_BASED_WRAP:
        raise UsageError(
            f"TRANSFORMER_BASED_WRAP: {type(model).__name__} doesn't name its block classes. "
            "Set transformer_layer_cls, or auto_wrap_policy='BLOCKS' to wrap the elements of its ModuleLists."
        )
    return blocks


def blocks(model: nn.Module) -> list[str]:
    """Return the names of all elements in the outermost ModuleLists."""
    names: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not _under(name, names):
            names += [f"{name}.{child}" if name else child for child, block in module.named_children() if _fits(block)]
    return names


def by_class(*classes: type[nn.Module] | str) -> Policy:
    """Return a policy that wraps every module that is an instance of one of `classes`.

    A class may be given as a type, a short name or a dotted name. A short name is looked up among the model's modules,
    and then in transformers. A dotted name is imported.
    """

    def policy(model: nn.Module) -> list[str]:
        wanted = tuple(kind if isinstance(kind, type) else _resolve(kind, model) for kind in classes)
        found = [name for name, module in model.named_modules() if name and isinstance(module, wanted)]
        if not found and not isinstance(model, wanted):  # without this, the whole model would silently be one unit
            raise UsageError(
                f"No module of {type(model).__name__} is a {' or '.join(kind.__name__ for kind in wanted)}. "
                "Its classes: " + ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            )
        return found

    return policy


def by_size(min_num_params: int) -> Policy:
    """Return a policy that wraps modules with at least `min_num_params` parameters, innermost modules first.

    Parameters that are already in a unit do not count.
    """

    def policy(model: nn.Module) -> list[str]:
        names: list[str] = []

        def visit(name: str, module: nn.Module) -> int:
            """Return how many of the module's parameters belong to units."""
            total = sum(parameter.numel() for parameter in module.parameters())
            if total < min_num_params:
                return 0
            taken = 0
            if not isinstance(module, _LEAVES):
                for child_name, child in module.named_children():
                    taken += visit(f"{name}.{child_name}" if name else child_name, child)
            if name and total - taken >= min_num_params and not _is_container(module):
                names.append(name)
                return total
            return taken

        visit("", model)
        return names

    return policy


def tied_parameters(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the FQNs of each tied parameter, in the model's order. A parameter is tied if it has several FQNs."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def _join_tied(modules: dict[str, nn.Module], names: list[str]) -> Units:
    owner = {name: name for name in names}  # maps a unit to the unit that it is merged into; "" is the root
    first = {id(modules[name]): name for name in names}
    owner.update({name: first[id(module)] for name, module in modules.items() if id(module) in first})

    def unit_of(fqn: str) -> str:
        parts = fqn.split(".")[:-1]
        while parts and ".".join(parts) not in owner:
            parts.pop()
        found = ".".join(parts)
        while found and owner[found] != found:
            found = owner[found]
        return found

    for group in tied_parameters(modules[""]):
        units = sorted({unit_of(fqn) for fqn in group}, key=lambda name: name.count(".") if name else -1)
        keep = units[0]
        for other in units[1:]:
            owner[other] = keep
    members: dict[str, list[str]] = {}
    for name in names:
        kept = unit_of(name + ".")
        if kept and not (name != kept and name.startswith(kept + ".")):  # skip what is already inside that unit
            members.setdefault(kept, []).append(name)
    return [tuple(group) for group in members.values()]


def _excluded(modules: dict[str, nn.Module], exclude: Sequence[str]) -> list[str]:
    shut = []
    for pattern in exclude:
        found = [
            name
            for name, module in modules.items()
            if name and (fnmatch.fnmatchcase(name, pattern) or type(module).__name__ == pattern)
        ]
        if not found:
            raise UsageError(f"exclude names {pattern!r}, which is not a class or FQN of {type(modules['']).__name__}.")
        shut += found
    return shut


def _head_names(model: nn.Module) -> list[str]:
    heads = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        found = getattr(model, getter, lambda: None)()
        if isinstance(found, nn.Module):
            heads.append(found)
    return [
        name
        for name, module in model.named_modules()
        if any(module is head for head in heads) or name.rpartition(".")[2] == "lm_head"
    ]


def _resolve(name: str, model: nn.Module) -> type[nn.Module]:
    for module in model.modules():
        kind = type(module)
        if isinstance(module, FSDPModule):
            kind = kind.__mro__[2]
        if name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}"):
            return kind
    home, _, short = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(home or "transformers"), short, None)
    except ImportError:
        found = None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise UsageError(
            f"{name!r} is not the class of a module of {type(model).__name__}, "
            f"and {home or 'transformers'!r} has no such class. The model's classes: "
            + ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        )
    return found


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward


def _fits(module: nn.Module) -> bool:
    return not _is_container(module) and next(module.parameters(), None) is not None


def _under(name: str, roots: Sequence[str]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)
