"""Strips the prefixes that wrappers, such as DDP and torch.compile, add to tensor names. Needs no key map."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from ckptkit.errors import CheckpointMismatchError, UsageError

# Name components that torch.compile, activation checkpointing and FSDP1 insert anywhere in a name.
_INFIXES = re.compile(r"(?:^|(?<=\.))(?:(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.)+")
# Prefixes that DistributedDataParallel, DeepSpeed and Lightning add to all names.
_FRONTS = ("module.", "_forward_module.")


def strip_infixes(names: Iterable[str]) -> dict[str, str]:
    """Return a mapping from each name to the name without the components that wrappers add.

    Removes `_orig_mod.`, `_checkpoint_wrapped_module.` and `_fsdp_wrapped_module.` everywhere in a name. Removes the
    prefix `module.` or `_forward_module.` only if all names start with it.

    Raises:
        CheckpointMismatchError: Two names would become equal.
    """
    stripped = {name: _INFIXES.sub("", name) for name in names}  # there may be 300,000
    while (front := _common_front(stripped.values())) is not None:
        stripped = {name: short.removeprefix(front) for name, short in stripped.items()}
    _refuse_collisions(stripped, "wrapper names are stripped")
    return stripped


def without_infixes(name: str) -> str:
    """Return the name without `_orig_mod.`, `_checkpoint_wrapped_module.` and `_fsdp_wrapped_module.`."""
    return _INFIXES.sub("", name)


def _common_front(names: Collection[str]) -> str | None:
    whole = (front for front in _FRONTS if names and all(n.startswith(front) and n != front for n in names))
    return next(whole, None)


def strip_prefix(names: Iterable[str], prefix: str) -> dict[str, str]:
    """Return a mapping from each name that starts with `prefix` and a "." to the rest of that name.

    If `prefix` is empty, each name is mapped to itself.

    Raises:
        CheckpointMismatchError: Two names would become equal.
        UsageError: No name has the prefix.
    """
    listed = list(names)
    if not prefix:
        return {name: name for name in listed}
    dotted = prefix if prefix.endswith(".") else prefix + "."
    found = {name: name.removeprefix(dotted) for name in listed if name.startswith(dotted) and name != dotted}
    if not found:
        shown = ", ".join(repr(name) for name in listed[:3]) or "nothing"
        raise UsageError(f"no tensor's name starts with {dotted!r}; the names are like {shown}.")
    _refuse_collisions(found, f"the prefix {dotted!r} is stripped")
    return found


def _refuse_collisions(renamed: Mapping[str, str], when: str) -> None:
    owners: dict[str, list[str]] = {}
    for name, short in renamed.items():
        owners.setdefault(short, []).append(name)
    clashes = [f"{short!r} from {' and '.join(map(repr, names))}" for short, names in owners.items() if len(names) > 1]
    if clashes:
        raise CheckpointMismatchError(f"when {when}, names collide:\n  " + "\n  ".join(clashes))
