"""Plans how a load restores everything that is not a weight or an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.entry import Role
from ckptkit.checkpoint.load.differences import match_tensors
from ckptkit.checkpoint.load.options import LoadOptions
from ckptkit.checkpoint.load.plan import (
    LoadPlan,
    ObjectTarget,
    Planning,
    compare_keys,
    is_class_known,
    of_another_class,
)
from ckptkit.checkpoint.save.replicas import PER_RANK
from ckptkit.checkpoint.state.rng import shared_stream
from ckptkit.checkpoint.state.train_state import PerRank, own_merge, section
from ckptkit.checkpoint.state.values import JSON, decode, references
from ckptkit.formats.dcp.subclasses import SUBCLASSES
from ckptkit.units import first_few

if TYPE_CHECKING:
    import torch


def plan_objects(load: Planning) -> None:
    """Plan how to restore schedulers, gradient scalers, dataloaders, `extra` values and random number generators."""
    state = load.state
    if load.options.key_map is not None:
        kinds = ("scheduler", "grad_scaler", "dataloader")
        kept = [section(kind, name) for kind in kinds for name in state.parts(kind)]
        kept += [f"extra.{name}" for name in state.extra] + ["rng"] * state.rng
        load.plan.skipped.update(dict.fromkeys(kept, "key_map loads weights only"))
        return
    for kind in ("scheduler", "grad_scaler"):
        for name, item in state.parts(kind).items():
            _object(load, kind, section(kind, name), item)
    for name, item in state.parts("dataloader").items():
        _per_rank(load, "dataloader", section("dataloader", name), item)
    for name, item in state.extra.items():
        plan_one = _per_rank if isinstance(item, PerRank) else _object
        plan_one(load, "extra", f"extra.{name}", item)
    if state.rng:
        _rng(load)
    _left_out(load)


def _object(load: Planning, kind: str, key: str, item: Any) -> None:
    if key not in load.objects:
        _absent(load, kind, key)
        return
    tree = load.objects[key]
    other = ""
    if kind == "scheduler":
        other = _unlike(load, key, item, tree) or _by_position(load, item, tree)
    if kind == "grad_scaler" and item.state_dict():
        other = _unlike(load, key, item, tree) if tree != {} else "the saved scaler was disabled, this one is enabled"
    if other:
        load.plan.mismatches.add("missing", kind, [f"the state of this object: {other}"])
    elif kind == "grad_scaler" and tree and not item.state_dict():
        load.plan.skipped[key] = "disabled in this job"
    else:
        if kind == "extra":
            _module(load, key, item, tree)
        load.plan.objects.append(ObjectTarget(kind, key, item, (tree,)))


def _unlike(load: Planning, key: str, item: Any, tree: JSON) -> str:
    """Describe why a saved scheduler or gradient scaler is not of the live one's class. Returns "" if it may be."""
    if is_class_known(key, load.objects):
        return of_another_class(key, item, load.objects)
    unlike, fits = compare_keys(item, tree)
    if fits and unlike:
        load.plan.warnings.append(f"{key}: {unlike}; check that the same class was saved")
    return "" if fits else unlike


def _by_position(load: Planning, scheduler: Any, tree: JSON) -> str:
    """Describe values of a scheduler that would apply to the wrong param groups. Returns "" if there are none.

    A load matches param groups by their parameters, but a scheduler identifies a group only by its position.
    """
    optimizer = getattr(scheduler, "optimizer", None)
    plans = load.plan.optimizers
    for plan in plans if len(plans) == 1 else [p for p in plans if p.optimizer is optimizer]:
        groups = plan.groups
        moved = _moved_values(tree, groups.order, groups.saved) if groups.saved else []
        if moved:
            return (
                f"it stores {', '.join(moved)} by the positions of the groups of {plan.key}, but the groups or "
                "their order differ here. Create the groups as they were saved, or create a new scheduler"
            )
    return ""


def _module(load: Planning, key: str, item: Any, tree: JSON, *, where: str = "") -> None:
    """Compare a model in `TrainState.extra` with its saved state, as strictly as the models in `TrainState.model`.

    The model's own `load_state_dict` would cast tensors silently. If some tensors do not match, it would also load
    the others before it raises an error.
    """
    import torch

    if isinstance(item, torch.nn.Module):
        saved = decode(tree, load.small if load.foreign else partial(_without_values, load))
        _compare(load.plan, key, item, saved, load.options, where)


def check_merged(plan: LoadPlan, values: Sequence[Any], options: LoadOptions, rank: int, url: str) -> None:
    """Compare the modules in `extra` with the states that `merge_ranks` or `per_rank_on_resize` returned for them.

    Args:
        values: The new state of each of `plan.objects`.
        url: The checkpoint, for the error message.

    Raises:
        CheckpointMismatchError: A state does not fit its module.
    """
    for target, value in zip(plan.objects, values, strict=True):
        if target.merge is not None and isinstance(target.item, PerRank):
            _compare(plan, target.key, target.item.value, value, options, f" (rank {rank})")
    plan.mismatches.check(url, strict=options.strict, elsewhere=True)


def _compare(plan: LoadPlan, key: str, item: Any, saved: Any, options: LoadOptions, where: str) -> None:
    import torch

    def side(value: Any) -> tuple[str, tuple[int, ...]]:
        dtype = getattr(value, "dtype", "no tensor")
        return str(dtype).removeprefix("torch."), tuple(getattr(value, "shape", ()))

    if isinstance(item, torch.nn.Module) and isinstance(saved, Mapping):
        live, found = ({name: side(value) for name, value in one.items()} for one in (item.state_dict(), saved))
        match_tensors(plan.mismatches, key, live, found, convert_dtype=options.convert_dtype, where=where)


def _without_values(load: Planning, key: str) -> torch.Tensor:
    """Return a meta tensor with the shape and dtype of a saved tensor."""
    import torch

    entry = load.plan.catalog.tensors[key]
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")


def _absent(load: Planning, kind: str, key: str) -> None:
    """Report a missing key: as a mismatch if ckptkit wrote the checkpoint, otherwise only as skipped.

    Other systems do not save every key.
    """
    if load.foreign:
        load.plan.skipped[key] = "not in the checkpoint, which ckptkit did not write"
    else:
        load.plan.mismatches.add("missing", kind, [key])


def _saved_ranks(load: Planning, key: str) -> list[int]:
    """Return the ranks that saved a state under `key`, in ascending order."""
    ranks = [name[len(key) + 1 :] for name in load.objects if name.startswith(f"{key}.")]
    return sorted(int(rank) for rank in ranks if rank.isdigit())


def _per_rank(load: Planning, kind: str, key: str, item: Any) -> None:
    ranks = _saved_ranks(load, key)
    if not ranks:
        _absent(load, kind, key)
        return
    trees = [load.objects[f"{key}.{rank}"] for rank in ranks]
    policy = load.options.per_rank_on_resize
    resized = ranks != list(range(load.world_size))
    merge = own_merge(item) or (policy if resized and callable(policy) else None)
    if merge is not None:
        load.plan.objects.append(ObjectTarget(kind, key, item, tuple(trees), merge))
    elif not resized:
        _own(load, kind, key, item, trees[load.rank])
    elif all(tree == trees[0] for tree in trees) and not references(trees[0]):
        _own(load, kind, key, item, trees[0])
        if kind == "dataloader":
            note = (
                f"{key}: all {len(ranks)} ranks saved the same state, and each of the {load.world_size} ranks "
                "continues from it. If the state counts the samples of one rank, samples are repeated or left out; "
                "to avoid that, give the dataloader a method merge_ranks that computes a state from the saved ones, or "
                "pass such a function to CheckpointManager.load as per_rank_on_resize"
            )
            load.plan.warnings.append(note)
    elif policy == "keep":
        load.plan.skipped[key] = f"saved at world size {len(ranks)}, now it is {load.world_size}"
    else:
        text = (
            f"{key} has one state per rank, saved at world size {len(ranks)}; the world size is now "
            f"{load.world_size}. Pass per_rank_on_resize='keep', or a function that computes a state from "
            "the saved ones"
        )
        load.plan.mismatches.add("others", kind, [text])


def _own(load: Planning, kind: str, key: str, item: Any, tree: JSON) -> None:
    """Plan how to restore a per-rank state from one rank's saved state."""
    if isinstance(item, PerRank):
        _module(load, key, item.value, tree, where=f" (rank {load.rank})")
    load.plan.objects.append(ObjectTarget(kind, key, item, (tree,)))


def _rng(load: Planning) -> None:
    ranks = _saved_ranks(load, "rng")
    if not ranks:
        note = "the checkpoint has no random number state"
        if load.random:
            note = f"not restored: random numbers, because the form of {first_few(load.random, 3)} is unknown"
        load.plan.notes.append(note)
        return
    _, streams = shared_stream(load.rank, load.world_size)
    first = load.objects[f"rng.{ranks[0]}"]
    saved = first.get("streams") if isinstance(first, Mapping) else None  # None: share_stream was not called
    changed = f"saved at world size {len(ranks)}, now it is {load.world_size}"
    if len(ranks) == load.world_size and saved is not None:
        changed = f"saved with {saved} independent random streams, now there are {streams}"
    if len(ranks) == load.world_size and ranks[-1] == load.world_size - 1 and saved in (None, streams):
        load.plan.rng = load.objects[f"rng.{load.rank}"]
    elif load.options.rng_on_resize == "error":
        load.plan.mismatches.add("others", "rng", [changed])
    elif load.options.rng_on_resize == "reseed":
        load.plan.reseed = True
        load.plan.rng = load.objects[f"rng.{ranks[0]}"]
        load.plan.notes.append(f"random numbers: {changed}; each rank is reseeded from the saved state and its rank")
    else:
        load.plan.skipped["rng"] = changed


def _left_out(load: Planning) -> None:
    """Report the sections of the checkpoint, such as a scheduler's, that this job does not use."""
    live = {section(kind, name) for kind in ("model", "optimizer", "scheduler", "grad_scaler", "dataloader")
            for name in load.state.parts(kind)}  # fmt: skip
    for key, tree in load.objects.items():
        kind, _, rest = key.partition(".")
        name, _, rank = rest.partition(".")
        if kind == "extra" and name not in load.state.extra:
            if not rank:
                load.plan.leftovers[name] = tree
            elif rank == str(load.rank):
                load.plan.leftovers[f"{name}.{rank}"] = tree
        elif kind not in live and kind not in ("step", "rng", "extra", "classes", SUBCLASSES, PER_RANK):
            load.plan.skipped.setdefault(kind, "not in the training state")
        elif kind == "rng" and not load.state.rng:
            load.plan.skipped.setdefault(kind, "rng=False")
    models = load.state.parts("model")
    if not models and load.entries(Role.MODEL):
        load.plan.skipped.setdefault("model", "not in the training state")
    elif "" not in models:  # each saved name starts with its model's name
        saved = dict.fromkeys(fqn.partition(".")[0] for fqn in load.entries(Role.MODEL))
        for name in (name for name in saved if name not in models):
            load.plan.skipped.setdefault(section("model", name), "not in the training state")


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
