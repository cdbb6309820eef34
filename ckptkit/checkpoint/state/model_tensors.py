"""Lists a model's tensors by FQN, without the prefixes that wrappers add, and finds tied and computed tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.state.train_state import TrainState, section
from ckptkit.errors import SaveError
from ckptkit.formats.dcp.host_bytes import local_part
from ckptkit.formats.dcp.subclasses import SEPARATOR, Recipe, outer_name, repeated
from ckptkit.units import first_few

if TYPE_CHECKING:
    import torch


_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def refuse_added_entries(key: str, module: torch.nn.Module, live: Mapping[str, Any]) -> None:
    """Raise SaveError if a state_dict hook adds entries that no load would restore.

    A load restores an added tensor if it has the name of a parameter or buffer, or if an enclosing module overrides
    `load_state_dict` or has a pre-hook for it. A load restores no other added values. This function does not call
    overrides or hooks to see what they restore, because that could change the live module.
    """
    from torch import Tensor
    from torch.nn import Module, Parameter

    if type(module).state_dict is not Module.state_dict:
        return
    added = {name: value for name, value in live.items() if not isinstance(value, Parameter)}
    own = {id(value) for value in module.buffers()} if added else set()
    added = {name: v for name, v in added.items() if id(v) not in own and name.rpartition(".")[2] != "_extra_state"}
    if not added:
        return
    prefixes = _canonical_prefixes(module)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    known = {_canonical(name, prefixes) for name, _ in named}
    loading = [
        f"{path}." if path else ""
        for path, part in canonical_modules(module).items()
        if type(part)._load_from_state_dict is not Module._load_from_state_dict
        or type(part).load_state_dict is not Module.load_state_dict
        or part._load_state_dict_pre_hooks
    ]
    names = {raw: _canonical(raw, prefixes) for raw, value in added.items() if isinstance(value, Tensor)}
    lost = [raw for raw in added if raw not in names or not (names[raw] in known or names[raw].startswith((*loading,)))]
    if lost:
        raise SaveError(
            f"{key}: a state_dict hook adds {first_few(lost)}, which a load could not restore. Make the module's "
            "load_state_dict accept the same tensors; pass non-tensor state through get_extra_state and "
            "set_extra_state. Nothing was saved."
        )


def model_tensors(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a model's live parameters and persistent buffers by canonical FQN, and its state dict's other entries.

    The other entries are extra states (`get_extra_state`) and values that are not tensors. Under FSDP2 the tensors are
    sharded. Canonical names lack the prefixes that torch.compile, activation checkpointing, DDP, DataParallel and FSDP1
    add. If a state_dict hook removes an entry, the result does not contain it. If a hook computes an entry, the result
    contains it (see `computed_state`).
    """
    return by_canonical_name(module, live_state(module))


def live_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Return the `model_tensors` of all models. If there are several, names start with the model's name."""
    models = state.parts("model").items()
    return {f"{n}.{fqn}" if n else fqn: t for n, module in models for fqn, t in model_tensors(module)[0].items()}


def computed_state(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any], Mapping[str, Any] | None]:
    """Return the result of `model_tensors`, and the raw state dict if a hook computed any tensor (otherwise None).

    Computed tensors do not belong to the module. After a load has filled them, the raw state dict that contains them
    is passed to the module's `load_state_dict`.
    """
    raw = live_state(module)
    own = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    tensors, extra_state = by_canonical_name(module, raw)
    return tensors, extra_state, raw if any(id(tensor) not in own for tensor in tensors.values()) else None


def live_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the module's state dict with live tensors, even if its `state_dict` does not accept `keep_vars`."""
    import torch

    parameters = inspect.signature(module.state_dict).parameters.values()
    if any(p.name == "keep_vars" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        found = dict(module.state_dict(keep_vars=True))
        for name in repeated(found):
            del found[name]
        return found
    live = torch.nn.Module.state_dict(module, keep_vars=True)
    given = module.state_dict()
    return {name: live[name] if same_memory(live.get(name), value) else value for name, value in given.items()}


def same_memory(one: Any, other: Any) -> bool:
    """Return whether two values are the same object, or tensors that share all their memory."""
    import torch

    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other
    mine, theirs = local_part(one), local_part(other)
    return mine.shape == theirs.shape and mine.data_ptr() == theirs.data_ptr() and one.dtype == other.dtype


def by_canonical_name(
    module: torch.nn.Module, raw_state: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    import torch

    tensors: dict[str, torch.Tensor] = {}
    extra_state: dict[str, Any] = {}
    prefixes = _canonical_prefixes(module)
    for raw, value in raw_state.items():
        name = _canonical(raw, prefixes)
        if name in tensors or name in extra_state:
            raise SaveError(f"model: the keys of two modules become {name!r} once wrappers are removed.")
        if isinstance(value, torch.Tensor) and raw.rpartition(".")[2] != "_extra_state":
            tensors[name] = value
        else:
            extra_state[name] = value
    return tensors, extra_state


def canonical_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules by canonical name, which lacks the prefixes that wrappers add. Omits the wrappers."""
    prefixes = _canonical_prefixes(module)
    return {prefixes[raw]: child for raw, child in module.named_modules(remove_duplicate=False)}


def without_wrappers(module: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside the wrappers of DDP, torch.compile, FSDP1 and activation checkpointing."""
    while inner := [child for name, child in module.named_children() if _is_wrapped(name, module)]:
        module = inner[0]
    return module


def _canonical_prefixes(module: torch.nn.Module) -> dict[str, str]:
    """Return {name in `named_modules`: canonical name, which lacks the prefixes that wrappers add}."""
    found = {"": ""}
    modules = dict(module.named_modules(remove_duplicate=False))
    for raw in modules:
        if raw:
            parent, _, child = raw.rpartition(".")
            base = found[parent]
            found[raw] = base if _is_wrapped(child, modules[parent]) else f"{base}.{child}".lstrip(".")
    return found


def _is_wrapped(child: str, parent: torch.nn.Module) -> bool:
    """Return whether `parent` is a wrapper, and its child of this name is the wrapped module."""
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    return child in _WRAPPERS or (child == "module" and isinstance(parent, (DistributedDataParallel, DataParallel)))


def _canonical(key: str, prefixes: Mapping[str, str]) -> str:
    parent, _, leaf = key.rpartition(".")
    while parent and parent not in prefixes:  # a state-dict hook added a level, or removed the level of a wrapper
        parent, _, head = parent.rpartition(".")
        leaf = leaf if head in _WRAPPERS else f"{head}.{leaf}"
    return f"{prefixes[parent]}.{leaf}".lstrip(".")


def parameter_names(
    state: TrainState,
    models: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
    wanted: Iterable[Any] | None = None,
) -> dict[int, str]:
    """Return every parameter's FQN, by id. If there are several models, FQNs start with the model's name.

    Args:
        models: The results of `model_tensors` by section, if known.
        wanted: The parameters that need names. None: all.
    """
    import torch

    names: dict[int, str] = {}
    for name, module in state.parts("model").items():
        tensors = model_tensors(module)[0] if models is None else models[section("model", name)]
        for fqn, tensor in tensors.items():
            if isinstance(tensor, torch.nn.Parameter):
                names.setdefault(id(tensor), f"{name}.{fqn}" if name else fqn)
        if wanted is not None and all(map(names.__contains__, map(id, wanted))):
            continue
        prefixes = _canonical_prefixes(module)
        for raw, parameter in module.named_parameters():  # adds parameters that a state_dict hook removed or replaced
            fqn = _canonical(raw, prefixes)
            names.setdefault(id(parameter), f"{name}.{fqn}" if name else fqn)
    return names


def tied_names(
    module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], parts: Iterable[str], recipes: Mapping[str, Recipe]
) -> dict[str, str]:
    """Map all other names of each tied tensor to the name under which the tensor is stored.

    A tied tensor is stored under its first name that the model does not list as tied (transformers'
    `_tied_weights_keys`). A tensor of a subclass is stored as several plain tensors; the result then has one item for
    each of these plain tensors instead.
    """
    names: dict[int, list[str]] = {}
    for fqn, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(fqn)
    listed = set(getattr(module, "_tied_weights_keys", None) or ())
    aliases: dict[str, str] = {}
    for group in names.values():
        if len(group) > 1:
            holder = next((fqn for fqn in group if fqn not in listed), group[0])
            aliases.update({fqn: holder for fqn in group if fqn != holder})
    found = {name: holder for name, holder in aliases.items() if name not in recipes}
    for name in parts if recipes else ():
        outer = outer_name(name, recipes)
        if outer != name and outer in aliases:
            found[name] = aliases[outer] + SEPARATOR + name[len(outer) + len(SEPARATOR) :]
    return found
