"""What a key of our own SHARDED, FULL and LOCAL layouts is: a parameter, a master, a moment, or anything else."""

from __future__ import annotations

from ckptkit.catalog.entry import Role

__all__ = ["role_of"]


def role_of(name: str, path: tuple[str | int, ...] = ()) -> tuple[Role, str, str]:
    """Return (role, FQN, state name) of a key.

    `model.<fqn>`, `optimizer.state.<fqn>.<name>`, `optimizer.master.<fqn>`; with several by name, `model_<name>.<fqn>`
    has the FQN `<name>.<fqn>`. `path` tells the parts of a nested state apart, as names have dots of their own.
    """
    top, _, rest = name.partition(".")
    kind, _, label = top.partition("_")
    if kind == "model" and rest:
        return Role.MODEL, f"{label}.{rest}" if label else rest, ""
    if kind != "optimizer":
        return Role.OTHER, "", ""
    group, _, rest = rest.partition(".")
    if group == "master" and rest:
        return Role.MASTER, rest, ""
    if group == "state" and rest:
        if len(path) == 4:
            return Role.OPTIMIZER, str(path[2]), str(path[3])
        fqn, _, state = rest.rpartition(".")
        return Role.OPTIMIZER, fqn, state
    return Role.OPTIMIZER, "", ""
