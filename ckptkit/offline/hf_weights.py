"""Which copy of the weights an export takes: the model's own, or the fp32 masters of its optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ckptkit.catalog.entry import Catalog, Role, TensorEntry
from ckptkit.errors import CheckpointMismatchError, CheckpointNotFoundError

__all__ = ["Weights", "choose_weights"]


@dataclass(frozen=True, slots=True)
class Weights:
    """The entries to export by FQN, whether they are the "model" or "master" weights, and notes."""

    entries: dict[str, TensorEntry]
    weights: Literal["model", "master"]
    notes: tuple[str, ...] = ()


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
