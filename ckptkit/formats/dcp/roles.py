"""Derives the `Role` of a DCP entry (such as weight or optimizer state) from the path that the planner recorded.

The flattened key does not show where a wrapper ends and the parameter's name begins. The first "model" is a wrapper in
accelerate's path ("model", "model.embed_tokens.weight"), but part of the name in LightRFT's path
("model.embed_tokens.weight",).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from ckptkit.catalog.entry import Role
from ckptkit.formats.state_names import MODEL_KEYS, OPTIMIZER_KEY, PARAM_GROUPS, is_other_key

Path = tuple[str | int, ...]

_MODEL_KEYS = frozenset(MODEL_KEYS)
_MASTER_STATES = frozenset(("master", "master_param", "master_weight", "fp32_master", "fp32_param", "fp32"))
_ACTORS, _CRITIC = frozenset(("actor", "policy")), "critic"  # beside an actor, a critic is a second model
_PARTS = ("state", "master", PARAM_GROUPS)


class EntryRole(NamedTuple):
    """An entry's `Role`, parameter name and state name, as in `TensorEntry`."""

    role: Role
    fqn: str = ""
    state: str = ""


class RoleTable:
    """Determines the `Role` of each entry of a checkpoint. An entry's role can depend on the keys of the other entries.

    Args:
        paths: The path that torch's planner recorded for each key. A key without a path is a path of one component.
        tensors: The keys that are tensors.
    """

    def __init__(self, paths: Mapping[str, Path], tensors: Iterable[str]) -> None:
        tops = {_top(path) for path in paths.values() if path}
        # An optimizer's state and param_groups may be at the top level, as in LightRFT's `optim_states/` or in a DCP
        # checkpoint of the result of get_optimizer_state_dict.
        alone = "state" in tops and tops <= {"state", PARAM_GROUPS}
        # If the key "state" holds a model and optimizers, it is not one optimizer's state.
        inner = {str(path[1]) for path in paths.values() if len(path) > 2 and path[0] == "state"}
        self._bare_optimizer = alone and not any(p in _MODEL_KEYS or OPTIMIZER_KEY.fullmatch(p) for p in inner)
        tensors = frozenset(tensors)
        self._optimizers = _optimizers(paths, tensors)
        self._depths = sorted({len(path) for path in self._optimizers})
        wrappers = {
            key: None if self._optimizer_at(path) is not None else _model_wrapper(path)
            for key in tensors
            if (path := paths.get(key) or (key,))
        }
        self._inner = _inner_wrappers(paths, wrappers)
        wrappers = {key: self._inner.get(wrapper, wrapper) for key, wrapper in wrappers.items()}
        named = {wrapper for wrapper in wrappers.values() if wrapper}
        known = {wrapper for wrapper in named if set(wrapper) & _MODEL_KEYS}
        if any(_ACTORS.intersection(wrapper) for wrapper in known):
            known |= {wrapper for wrapper in named if wrapper[-1] == _CRITIC}
        # The wrappers that begin with a known key. For example, ("ema", "module") does not.
        outer = {wrapper for wrapper in known if wrapper[0] in _MODEL_KEYS or wrapper[0] == _CRITIC}
        for some in (known, outer, set[Path]()):
            known = some
            if len(some) < 2:
                break
            names = [(paths.get(key) or (key,))[len(w) :] for key, w in wrappers.items() if w and w in some]
            if len(set(names)) == len(names):  # no two models have parameters with the same name
                break
        bare = any(wrapper == () for wrapper in wrappers.values())
        # Weights are at the top level or under a known key. A user's own key counts only if it is the only such key.
        self._wrappers = known or (set() if bare else named if len(named) == 1 else set())
        self._bare_model = not known
        self._many = not known and not bare and len(named) > 1
        self._paths = paths

    def of(self, key: str) -> EntryRole:
        """Return the `Role`, parameter name and state name of the entry `key`."""
        path = self._paths.get(key) or (key,)
        optimizer = self._optimizer(path)
        if optimizer is not None:
            return optimizer
        wrapper = _model_wrapper(path)
        wrapper = self._inner.get(wrapper, wrapper)
        if wrapper is None or any(str(part).rpartition(".")[2] == "_extra_state" for part in path[:-1]):
            return EntryRole(Role.OTHER)  # a tensor that a module's get_extra_state returned is not a weight
        if wrapper == ():
            return EntryRole(Role.MODEL, _joined(path)) if self._bare_model else EntryRole(Role.OTHER)
        if wrapper in self._wrappers:
            return EntryRole(Role.MODEL, _joined(path[len(wrapper) :]))
        # Either several models are stored under keys that the user chose (a GAN, a teacher and a student), or nested
        # dicts of weights are stored beside top-level weights. In both cases, the whole path is the name.
        return EntryRole(Role.MODEL, _joined(path)) if self._many or self._bare_model else EntryRole(Role.OTHER)

    def _optimizer(self, path: Path) -> EntryRole | None:
        if self._bare_optimizer:
            return optimizer_role(path)
        at = self._optimizer_at(path)
        if at is not None:
            return optimizer_role(path[at:])
        for i, part in enumerate(path[:-1]):
            if isinstance(part, str) and part in _MODEL_KEYS:
                return None
            if isinstance(part, str) and OPTIMIZER_KEY.fullmatch(part):
                return optimizer_role(path[i + 1 :])
        only = path[0]
        if len(path) == 1 and isinstance(only, str):
            head, _, rest = only.partition(".")
            if rest.startswith(("state.", "param_groups.", "master.")) and OPTIMIZER_KEY.fullmatch(head):
                return optimizer_role((rest,))
        return None

    def _optimizer_at(self, path: Path) -> int | None:
        """Return how many components of `path` lead to the optimizer with this entry, or None if there is none."""
        for depth in self._depths:
            if path[:depth] in self._optimizers and depth < len(path) and (depth or _head(path[0]) in _PARTS):
                return depth
        return None


def _optimizers(paths: Mapping[str, Path], tensors: Collection[str]) -> set[Path]:
    """Return the paths of dicts that have both "state" and "param_groups". Such a dict is an optimizer under any key.

    In flattened keys, "state." and "param_groups." are prefixes. () is the path of an optimizer at the top level. If
    the optimizer has no states, its flattened form has only settings.
    """
    found: dict[str, set[Path]] = {"state": set(), PARAM_GROUPS: set()}
    for key, path in paths.items():
        for i, part in enumerate(path):
            if (head := _head(part)) in found:
                found[head].add(path[:i])
                if head == PARAM_GROUPS != part and key not in tensors:
                    found["state"].add(path[:i])
    return found["state"] & found[PARAM_GROUPS]


def _head(part: str | int) -> str:
    return part.partition(".")[0] if isinstance(part, str) else ""


def optimizer_role(path: Path) -> EntryRole:
    """Return the `Role`, parameter and state of an optimizer entry, given the entry's path within the optimizer.

    The path is nested, as in ("state", fqn, "exp_avg"), or flattened: torch's `flatten_optimizer_state_dict` joins the
    three components with dots. State names contain no dots. If several optimizers are in a list or dict, the path
    starts with the optimizer's index or key.
    """
    while len(path) > 1 and path[0] not in _PARTS and not (isinstance(path[0], str) and path[0].startswith("state.")):
        path = path[1:]  # drop the index or key that selects one of several optimizers
    head = path[0] if path else ""
    if head == "master" and len(path) > 1:
        return EntryRole(Role.MASTER, _joined(path[1:]))
    if head == "state" and len(path) > 2:  # a state may be a list or a dict: ("state", fqn, "GG", 0)
        return _state(str(path[1]), _joined(path[2:]))
    if len(path) == 1 and isinstance(head, str):
        kind, _, rest = head.partition(".")
        if kind == "state" and "." in rest:
            fqn, _, state = rest.rpartition(".")
            return _state(fqn, state)
        if kind == "master" and rest:
            return EntryRole(Role.MASTER, rest)
    return EntryRole(Role.OPTIMIZER)


def is_flattened(key: Path) -> bool:
    """Return whether the last component of the key is a path within an optimizer, such as "state.w.exp_avg"."""
    last = key[-1] if key else ""
    return _head(last) in _PARTS and "." in str(last) and key[-2:-1] != ("master",)


def state_place(key: Path) -> tuple[str, Path] | None:
    """Split the key of an optimizer state into the parameter and the path below it. Returns None for any other key.

    For example, ("optimizer", "state", fqn, "GG", 0) gives (fqn, ("GG", 0)). A flattened key gives None.
    """
    at = max((i for i, part in enumerate(key[:-2]) if part == "state"), default=-1)
    return (str(key[at + 1]), key[at + 2 :]) if at >= 0 and not is_flattened(key) else None


def setting_place(key: Path) -> tuple[str, Path]:
    """Return the group and the path of a setting within the group, given the key of an entry in `param_groups`.

    The group is given by its number or, in the flattened form, by the name of its only parameter. For example,
    ("optimizer", "param_groups", 0, "betas", 1) gives ("0", ("betas", 1)), and ("optimizer.param_groups.w.lr",) gives
    ("w", ("lr",)). The key of a whole group, ("optimizer", "param_groups", 0), gives ("0", ()).
    """
    for i, part in enumerate(key):
        _, found, tail = f".{part}.".partition(f".{PARAM_GROUPS}.")
        if found and tail:
            group, _, setting = tail[:-1].rpartition(".")
            return group, (setting, *key[i + 1 :])
        if found and i + 1 < len(key):
            return str(key[i + 1]), key[i + 2 :]
    return "", ()


def _state(fqn: str, state: str) -> EntryRole:
    if state in _MASTER_STATES:
        return EntryRole(Role.MASTER, fqn)
    return EntryRole(Role.OPTIMIZER, fqn, state)


def _top(path: Path) -> str:
    head = _head(path[0])
    return head if len(path) == 1 and head in ("state", PARAM_GROUPS) else str(path[0])


def _model_wrapper(path: Path) -> tuple[str | int, ...] | None:
    """Return the part of a tensor's path that precedes the parameter's name.

    Returns () if the parameter is at the top level, or None if the tensor is not in a model.
    """
    for i, part in enumerate(path[:-1]):
        if not isinstance(part, str):
            continue
        if part in _MODEL_KEYS:
            stop = i + 1
            while stop < len(path) - 1 and path[stop] in ("state_dict", "module"):
                stop += 1
            return path[:stop]
        if is_other_key(part) or OPTIMIZER_KEY.fullmatch(part):
            return None
    if len(path) == 1:
        return None if is_other_key(str(path[0])) else ()
    return path[:-1] if isinstance(path[-1], str) else path[:1]


def _inner_wrappers(paths: Mapping[str, Path], wrappers: Mapping[str, Path | None]) -> dict[Path | None, Path]:
    """Return a longer wrapper for each wrapper whose tensors all have the same next path component.

    A wrapper is the part of a path that precedes the parameter's name. For example, {"model": {"model": state_dict}}
    gives ("model", "model") for ("model",), and {"models": [state_dict]} gives ("models", 0) for ("models",). Only list
    indices and known keys (`MODEL_KEYS`) can make a wrapper longer.
    """
    members: dict[Path, list[Path]] = {}
    for key, wrapper in wrappers.items():
        if wrapper:
            members.setdefault(wrapper, []).append(paths.get(key) or (key,))
    found: dict[Path | None, Path] = {}
    for wrapper, below in members.items():
        inner = wrapper
        while min(map(len, below)) > len(inner) + 1:
            parts = {path[len(inner)] for path in below}
            part = parts.pop()
            if parts or not (isinstance(part, int) or part in _MODEL_KEYS):
                break
            inner = (*inner, part)
        if inner != wrapper and set(wrapper) & _MODEL_KEYS:
            found[wrapper] = inner
    return found


def _joined(path: Path) -> str:
    return ".".join(str(part) for part in path)
