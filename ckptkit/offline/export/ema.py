"""Finds the exponential moving average (EMA) of the weights in a checkpoint, and maps it to the model's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from ckptkit.catalog.entry import Catalog, Role, TensorEntry
from ckptkit.errors import CheckpointMismatchError, CheckpointNotFoundError, UnsupportedFormatError, UsageError
from ckptkit.formats.models import (
    averages_of,
    is_averaged,
    model_names,
    names_average_of,
    place_of,
    weights_beside_averages,
)
from ckptkit.offline.export.tied import same_values, tied_pairs
from ckptkit.storage.store import Store
from ckptkit.units import counted, first_few

_WRAPPERS = 3  # maximum number of name components between the prefix and the model's names: "module.", "shadow."


def averaged(store: Store, catalog: Catalog, prefix: str = "") -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """Return the averaged weights, keyed by FQN, and notes for the user.

    Tensors without an average (integers, buffers, frozen parameters) come from the model. If there are several models,
    this is the one whose names start with `prefix`. Reads tensors only to find out whether two weights are tied.

    Raises:
        CheckpointNotFoundError: There is no EMA.
        UsageError: There are several EMAs.
        CheckpointMismatchError: The EMA does not belong to this model.
        UnsupportedFormatError: The EMA's tensors have no names, or are so small that they are stored in a JSON value.
    """
    if is_averaged(catalog):
        return catalog.by_role(Role.MODEL), ("the EMA is what Lightning's WeightAveraging stored as state_dict",)
    averages = averages_of(catalog)
    if not averages:
        raise CheckpointNotFoundError(
            "--weights ema: the checkpoint contains no tensors of an EMA (such as extra.ema..., state_dict_ema..., "
            "model_ema...). If the EMA has its own directory, as diffusers writes it, convert that directory."
        )
    if len(averages) > 1:
        raise UsageError(
            f"--weights ema: the checkpoint contains several EMAs: {', '.join(sorted(averages))}. "
            "Export one of them with --strip-prefix."
        )
    front, found = next(iter(averages.items()))
    every = weights_beside_averages(catalog)
    dotted = f"{prefix.removesuffix('.')}."
    own = {name: entry for name, entry in every.items() if name.startswith(dotted)}
    others = {name for name in model_names(every.values()) if own and not dotted.startswith(f"{name}.")} - {""}
    if names_average_of(front, others):
        raise CheckpointMismatchError(
            f"--weights ema: {front!r} is not the average of {prefix!r}, but of another model."
        )
    tensors, notes = _named(store, catalog, front, found, own or every, every, others)
    if own and not names_average_of(front, {dotted[:-1]}) and not any(dotted in name for name in found):
        fits = [other for other in sorted(others) if _alike(tensors, every, dotted, f"{other}.")]
        if fits:
            name = front.removesuffix(".")
            text = f"{name} does not say whose average it is, and also fits {first_few(fits)}. Is it that of {prefix}?"
            notes = (*notes, text)
    return tensors, notes


def _alike(tensors: Mapping[str, TensorEntry], every: Mapping[str, TensorEntry], own: str, other: str) -> bool:
    """Return whether the model with the prefix `other` has the names and shapes of `tensors`, whose prefix is `own`."""
    pairs = ((entry, every.get(other + name.removeprefix(own))) for name, entry in tensors.items())
    return all(found is not None and found.shape == entry.shape for entry, found in pairs)


def _named(
    store: Store,
    catalog: Catalog,
    front: str,
    found: Mapping[str, TensorEntry],
    model: Mapping[str, TensorEntry],
    every: Mapping[str, TensorEntry],
    others: Set[str],
) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """Return the averages whose keys start with `front`, under the model's names.

    Missing tensors are taken from the model.

    Args:
        every: The tensors of all models.
        others: The names of the other models.
    """
    if all(name.rpartition(".")[2].isdecimal() for name in found):
        raise UnsupportedFormatError(
            f"--weights ema: the tensors of {front!r} have numbers instead of names. NeMo and diffusers also write "
            "the same weights with names: in a file ending in -EMA, or a folder ending in _ema."
        )
    names, most = {name: name for name in found}, 0
    for known in _variants(every, model):
        joined = {name.replace(".", ""): name for name in known}  # LitEma removes the dots from names
        candidates = [{name: known[joined[name]] for name in found if name in joined}]
        for count in range(_WRAPPERS + 1):
            split = {name: name.split(".") for name in found}
            short = {name: ".".join(parts[count:]) for name, parts in split.items() if others.isdisjoint(parts[:count])}
            candidates.append({name: known[rest] for name, rest in short.items() if rest in known})
        for tried in candidates:
            if len(tried) > most and len(set(tried.values())) == len(tried):
                names, most = tried, len(tried)
    if model:
        names = {name: target for name, target in names.items() if target in model}
    if model and not names:
        raise CheckpointMismatchError(
            f"--weights ema: none of the names under {front!r} is in the model: {first_few(list(found), 3)}. Is "
            "it the average of another model?"
        )
    chosen = {target: replace(found[name], fqn=target, role=Role.MODEL) for name, target in names.items()}
    wrong = [name for name, entry in chosen.items() if name in model and model[name].shape != entry.shape]
    if wrong:
        name = wrong[0]
        raise CheckpointMismatchError(
            f"--weights ema: {name!r} has shape {list(chosen[name].shape)} in {front!r}, but "
            f"{list(model[name].shape)} in the model."
        )
    chosen |= _of_tied(store, model, chosen)
    missing = [name for name in model if name not in chosen]
    holder = catalog.objects.get(front.removesuffix("."))
    values = tuple(_inline_names(holder.value)) if holder is not None and holder.encoding == "value" else ()
    inline = [name for name in missing if any(value.endswith(f".{name}") for value in values)]
    if inline:
        raise UnsupportedFormatError(
            f"--weights ema: {first_few(inline, 3)}: averaged tensors are so small that they are "
            "stored as plain values, which are not exported. Load the checkpoint in a job and export from there."
        )
    notes = [f"the EMA was found under {front.removesuffix('.')}"]
    if missing:
        notes.append(
            f"{counted(len(missing), 'tensor', 'have')} no average (such as buffers and frozen parameters): "
            f"the model's are used: {first_few(missing, 3)}"
        )
    ordered = {name: chosen.get(name, entry) for name, entry in model.items()} if model else chosen
    return ordered, tuple(notes)


def _of_tied(
    store: Store, model: Mapping[str, TensorEntry], chosen: Mapping[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return averages for the weights that have none of their own, but are tied to a weight that has one."""
    pairs = dict(tied_pairs({name: entry.shape for name, entry in model.items()}))
    places = {place_of(entry): name for name, entry in model.items() if name in chosen and len(entry.slices)}
    found = {}
    for name in (name for name in model if name not in chosen):
        other = places.get(place_of(model[name])) or pairs.get(name, "")
        if other in chosen and same_values(store, model[name], model[other]):
            found[name] = replace(chosen[other], fqn=name)
    return found


def _variants(every: Mapping[str, TensorEntry], model: Mapping[str, TensorEntry]) -> list[dict[str, str]]:
    """Return mappings to FQNs from the names that an EMA may have: FQNs, or FQNs without the first component."""
    whole = {name: name for name in every}
    inner = {name.partition(".")[2]: name for name in model}
    return [whole, inner] if len(inner) == len(model) else [whole]


def _inline_names(tree: Any, name: str = "") -> Iterator[str]:
    """Yield the name of each tensor that is stored as a value inside an object's JSON (see `state/values`)."""
    if isinstance(tree, list):
        for item in tree:
            yield from _inline_names(item, name)
    elif isinstance(tree, dict):
        if "$tensor" in tree:
            yield name
        for key, item in tree.items():
            pairs = item if key in ("$dict", "$ordered") else [[key, item]]
            for inner, value in pairs:
                yield from _inline_names(value, name if str(inner).startswith("$") else f"{name}.{inner}")
