"""Calls an optimizer's own `state_dict`, `load_state_dict` and hooks, and finds state that a save would miss."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.state.optimizer.equal import same_values
from ckptkit.checkpoint.state.optimizer.tree import GROUP_NAMES
from ckptkit.errors import SaveError
from ckptkit.formats.dcp.host_bytes import after_load, before_state_dict, has_state_dict_hooks
from ckptkit.formats.dcp.subclasses import keeps_parts
from ckptkit.units import first_few

if TYPE_CHECKING:
    import torch


_ONLY_STATE = ("torch.optim.", "bitsandbytes.", "flashoptim.", "ckptkit.")
"""Prefixes of modules. A `load_state_dict` that is defined in them restores only state and groups.

So a load need not call it. bitsandbytes' method would even copy the whole state.
"""


def class_name(item: Any) -> str:
    """Return the class name of an optimizer or scheduler, without the module, because modules may be renamed.

    For an optimizer with master weights, returns the name of the wrapped optimizer. For a scheduler that combines other
    schedulers, the result also names these.
    """
    while type(item).__name__ == "MasterWeightOptimizer":
        item = item.base
    joined = getattr(item, "_schedulers", None) or ()
    inner = f"({', '.join(map(class_name, joined))})" if joined else ""
    return type(item).__name__ + inner


def called_before_save(optimizer: Any, parameters: Mapping[str, torch.Tensor], what: str) -> Any:
    """Run the hooks and methods with which an optimizer may update its state before a save.

    If the optimizer wraps or combines other optimizers, theirs are run, too. Returns the result of `own_state_dict`.

    Raises:
        SaveError: One of the wrapped or combined optimizers has state that would not be saved.
    """
    before_state_dict(optimizer)
    if getattr(optimizer, "master_state_name", None) is not None:
        optimizer.follow_weights()
    if inner := inner_optimizers(optimizer):
        fqns = {id(parameter): fqn for fqn, parameter in parameters.items()}
        with optimizer.lend_state() as lent:
            for one in inner:
                its = {fqns[id(lent.get(id(p), p))]: p for group in one.param_groups for p in group["params"]}
                check_whole(one, called_before_save(one, its, what), its, what)
                if len(inner) > 1 and (shared := [key for key in one.state if isinstance(key, str)]):
                    raise SaveError(
                        f"{what}: {type(one).__name__}, one of several optimizers that are saved as one, has the state "
                        f"{shared[0]!r}, which belongs to no parameter, so a load could not tell whose it is. Keep it "
                        "in the state of a parameter."
                    )
    return own_state_dict(optimizer, what)


def inner_optimizers(optimizer: Any) -> Sequence[Any]:
    """Return the optimizers that an optimizer class of ckptkit wraps or combines. Returns () for any other class.

    Access the state of the inner optimizers only inside `with optimizer.lend_state():`.
    """
    found: Sequence[Any] = optimizer.inner_optimizers if hasattr(optimizer, "lend_state") else ()
    return found


def with_inner(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and all optimizers that it wraps or combines."""
    yield optimizer
    for one in inner_optimizers(optimizer):
        yield from with_inner(one)


def own_state_dict(optimizer: Any, what: str) -> Any:
    """Return the result of the optimizer's `state_dict`.

    Returns None if the method is torch's or ckptkit's and has no hooks, because the result would then contain only the
    state and the groups. Call this function before you read the state, because an optimizer's `state_dict` may update
    the state.

    Raises:
        SaveError: The method does not return a dict like torch's.
    """
    import torch

    torchs = torch.optim.Optimizer.state_dict
    method = getattr(optimizer, "state_dict", torchs)
    method = getattr(method, "__func__", method)
    is_whole = method is torchs or getattr(method, "__module__", "").startswith("ckptkit.")
    if is_whole and not has_state_dict_hooks(optimizer):
        return None
    # For flashoptim, call torch's method, which calls the hooks, too. flashoptim's method fails for uneven shards.
    given: Any = torchs(optimizer) if keeps_parts(optimizer) else optimizer.state_dict()
    if isinstance(given, Mapping) and isinstance(given.get("state", {}), Mapping):
        groups = given.get("param_groups", ())
        if isinstance(groups, (list, tuple)) and all(isinstance(group, Mapping) for group in groups):
            return given
    raise SaveError(
        f"{what}: the state_dict of {type(optimizer).__name__} is {reprlib.repr(given)}, expected a dict with a dict "
        "'state' and a list 'param_groups' of dicts, like torch's. Fix the method or the hook that returns it."
    )


def check_whole(optimizer: Any, given: Any, parameters: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise SaveError if the optimizer has state that is neither in its groups nor in the `state` of its parameters.

    Args:
        given: The result of `own_state_dict`.
    """
    import torch

    known = set(map(id, parameters.values()))
    others = [key for key in optimizer.state if not isinstance(key, str) and id(key) not in known]
    if others:
        shown = f"a tensor of shape {list(others[0].shape)}" if isinstance(others[0], torch.Tensor) else repr(others[0])
        raise SaveError(
            f"{what}: it has state for {shown}, which is in none of its groups, so a load could not "
            "restore it. Delete it from optimizer.state, or use a string as the key of state that "
            "belongs to no parameter."
        )
    if given is None:
        return
    name, groups = type(optimizer).__name__, given.get("param_groups", ())
    more = [key for key in given if key not in ("state", "param_groups")]
    if not more:
        for group, live in zip(groups, optimizer.param_groups, strict=False):
            more += [key for key in group if key not in live and key not in GROUP_NAMES]
        strings = [key for key in given.get("state", ()) if isinstance(key, str)]
        more += [key for key in strings if key not in optimizer.state and key not in parameters]
    if more:
        raise SaveError(
            f"{what}: the state_dict of {name} has {', '.join(map(repr, more))}, but only 'state' "
            "and 'param_groups' of an optimizer are saved. Pass the inner optimizer as TrainState(optimizer=), or this "
            "one as TrainState(extra={...})."
        )
    if changed := [f"{key!r} of {where}" for where, key in _changed(given, optimizer, parameters)]:
        raise SaveError(
            f"{what}: the state_dict of {name} returns values that differ from the optimizer's: {first_few(changed)}. "
            "Only the optimizer's own state and groups are saved. Remove the hook, or apply its change to the "
            "optimizer."
        )


def _changed(given: Any, optimizer: Any, parameters: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the (parameter or group, name) of each value in the state dict `given` that differs from the live value.

    Live values that `given` lacks do not count, because it is harmless to save them.
    """
    names = {id(parameter): fqn for fqn, parameter in parameters.items()}
    # If a parameter is twice in a group, torch numbers it by its last position.
    fqns = dict(enumerate(names[id(p)] for group in optimizer.param_groups for p in group["params"]))
    found = []
    for key, state in given.get("state", {}).items():
        fqn = fqns.get(key, key)
        live = optimizer.state.get(parameters.get(fqn, key))
        if not isinstance(state, Mapping) or not isinstance(live, Mapping):
            found += [] if same_values(live, state) else [(str(fqn), "state")]
            continue
        for name, value in state.items():
            # bitsandbytes puts states into an inner dict.
            packed = {name: value} if name in live or not isinstance(value, Mapping) else value
            if any(key not in live or not same_values(live[key], item) for key, item in packed.items()):
                found.append((str(fqn), str(name)))
    groups = given.get("param_groups", optimizer.param_groups)
    if len(groups) != len(optimizer.param_groups):
        return [*found, ("all groups", "param_groups")]
    for index, (group, live) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        shared = [name for name in group if name in live and name not in GROUP_NAMES]
        found += [(f"group {index}", name) for name in shared if not same_values(live[name], group[name])]
    return found


def finish_load(optimizer: Any, added: Mapping[str, Any] | None = None) -> None:
    """Call the optimizer's own `load_state_dict` or its hooks, so that the optimizer updates its derived values.

    For example, an optimizer class may clear a cache in its `load_state_dict`. Such a method also calls torch's
    `load_state_dict`, which casts states and replaces the tensors in groups. So the restored values are put back
    afterwards. If `optimizer` wraps or combines other optimizers, this is first done for them.

    Args:
        added: Entries other than "state" and "param_groups" to pass to the optimizer's own `load_state_dict`.
    """
    if inner := inner_optimizers(optimizer):
        with optimizer.lend_state():
            for one in inner:
                finish_load(one)
    own = getattr(optimizer, "load_state_dict", None)
    if own is None or getattr(own, "__module__", "").startswith(_ONLY_STATE):
        after_load(optimizer)
        return
    groups = [dict(group) for group in optimizer.param_groups]
    states = {key: dict(state) for key, state in optimizer.state.items() if isinstance(state, Mapping)}
    own({**optimizer.state_dict(), **(added or {})})
    for group, restored in zip(optimizer.param_groups, groups, strict=True):
        group.update(restored)
    for key, state in states.items():
        optimizer.state.setdefault(key, {}).update(state)
