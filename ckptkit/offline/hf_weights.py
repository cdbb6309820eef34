"""Which tensors an export takes, model weights or fp32 masters, and their names without wrappers."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

from ckptkit.catalog.entry import Catalog, Role, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.catalog.wrappers import strip_infixes, strip_prefix
from ckptkit.errors import CheckpointMismatchError, CheckpointNotFoundError, UsageError
from ckptkit.offline.hf_options import ExportOptions

__all__ = ["Selection", "Weights", "choose_weights", "matches", "select_targets"]


@dataclass(slots=True)
class Selection:
    """The tensors to export by name, the weights they are of, and the sources left out with the reason."""

    weights: str
    targets: dict[str, Target] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Weights:
    """The entries to export by FQN, whether they are the "model" or "master" weights, and notes."""

    entries: dict[str, TensorEntry]
    weights: Literal["model", "master"]
    notes: tuple[str, ...] = ()


def select_targets(catalog: Catalog, options: ExportOptions, *, wanted: Collection[str] = ()) -> Selection:
    """Return the tensors of the role that was asked for, names without wrappers and prefix, chosen by globs.

    Args:
        wanted: The base model's names, by which a wrapper's prefix is told from one of the model's own.

    Raises:
        UsageError: Nothing is left.
    """
    chosen = choose_weights(catalog, options.weights)
    found = Selection(chosen.weights, notes=list(chosen.notes))
    names = strip_infixes(chosen.entries)
    if options.strip_prefix:
        kept = strip_prefix(names.values(), options.strip_prefix)
        for name, short in names.items():
            if short not in kept:
                found.dropped[chosen.entries[name].name] = f"lacks the prefix {options.strip_prefix!r}"
        names = {name: kept[short] for name, short in names.items() if short in kept}
    elif wanted and not set(wanted) <= set(names.values()):
        names = _without_wrapper(names, frozenset(wanted), found)
    for name, short in names.items():
        entry = chosen.entries[name]
        if options.include and not matches(options.include, short, entry.name):
            found.dropped[entry.name] = "not included"
        elif matches(options.exclude, short, entry.name):
            found.dropped[entry.name] = "excluded"
        else:
            found.targets[short] = Target.of(entry, short)
    if not found.targets:
        raise UsageError(
            f"nothing to export: none of {len(chosen.entries)} {chosen.weights} tensors is left after --include, "
            "--exclude and --strip-prefix."
        )
    return found


def _without_wrapper(names: dict[str, str], wanted: frozenset[str], found: Selection) -> dict[str, str]:
    """Strip a prefix that the base model's names prove to be none of the model's own."""
    probe = max(wanted, key=len)
    before = len(wanted - set(names.values()))
    for prefix in {short[: -len(probe)] for short in names.values() if short.endswith("." + probe)}:
        inside = {name: short.removeprefix(prefix) for name, short in names.items()}
        missing = len(wanted - set(inside.values()))
        if missing <= len(wanted) // 20 and missing < before and len(set(inside.values())) == len(inside):
            found.notes.append(f"the prefix {prefix!r} was stripped: {len(wanted) - missing} names are the base's")
            return inside
    return names


def matches(patterns: tuple[str, ...], *names: str) -> bool:
    """Tell whether one of the names matches one of the globs."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def choose_weights(catalog: Catalog, weights: Literal["auto", "model", "master"]) -> Weights:
    """Return the weights that were asked for. "auto" takes the model's, and masters where there is nothing else.

    Masters are taken for every parameter that has one; buffers and frozen parameters come from the model.
    """
    model = catalog.by_role(Role.MODEL)
    if weights == "model" or (weights == "auto" and model):
        if not model:
            raise CheckpointNotFoundError(f"the checkpoint holds no model weights: {_roles(catalog)}.")
        return Weights(model, "model")
    masters = catalog.by_role(Role.MASTER)
    if not masters:
        what = "no fp32 masters" if weights == "master" else "neither model weights nor fp32 masters"
        why = "".join(f"\n  {note}" for note in catalog.info.notes)
        raise CheckpointNotFoundError(f"the checkpoint holds {what}: {_roles(catalog)}.{why}")
    if not model:
        return Weights(masters, "master", ("the checkpoint holds only fp32 masters: they are exported",))
    strange = [name for name in masters if name not in model]
    shapes = [n for n, e in masters.items() if n in model and model[n].shape != e.shape]
    if strange or shapes:
        raise CheckpointMismatchError(
            "the fp32 masters do not belong to the model weights:\n  "
            + "\n  ".join([f"no model weight: {n}" for n in strange] + [f"another shape: {n}" for n in shapes])
        )
    chosen = {name: masters.get(name, entry) for name, entry in model.items()}
    chosen.update(_tied_masters(model, masters))
    alone = [name for name, entry in chosen.items() if entry.role is Role.MODEL]
    notes = [f"{len(alone)} tensors have no fp32 master (buffers, frozen): the model's are taken"] if alone else []
    return Weights(chosen, "master", tuple(notes))


def _tied_masters(model: dict[str, TensorEntry], masters: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """An optimizer knows a tied parameter under one name: the other name gets the same master.

    Tied are names whose model weights lie at the same bytes of the same files.
    """
    owners = {_place(model[name]): name for name in masters if len(model[name].slices)}
    found: dict[str, TensorEntry] = {}
    for name, entry in model.items():
        if name not in masters and len(entry.slices) and _place(entry) in owners:
            found[name] = replace(masters[owners[_place(entry)]], fqn=name)
    return found


def _place(entry: TensorEntry) -> tuple[tuple[str, int, int], ...]:
    slices = entry.slices
    if len(slices) > 4096:
        return ((entry.name, -1, len(slices)),)
    return tuple((row.path, row.start, row.nbytes) for row in slices)


def _roles(catalog: Catalog) -> str:
    counts: dict[str, int] = {}
    for entry in catalog.tensors.values():
        counts[entry.role.value] = counts.get(entry.role.value, 0) + 1
    return ", ".join(f"{n} {role} tensors" for role, n in counts.items()) or "it holds no tensors"
