"""Plans a load without changing the training state.

`plan_load` finds for each live tensor and object what is restored into it, and collects all mismatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptkit.catalog.entry import Catalog, Role
from ckptkit.catalog.targets import Target
from ckptkit.checkpoint.load.foreign import Adopted, adopt
from ckptkit.checkpoint.load.options import LoadOptions
from ckptkit.checkpoint.load.plan import LoadPlan, Planning
from ckptkit.checkpoint.load.plan_objects import plan_objects
from ckptkit.checkpoint.load.plan_optimizer import plan_optimizers
from ckptkit.checkpoint.load.plan_weights import plan_weights
from ckptkit.checkpoint.save.replicas import OwnCopies, own_copies
from ckptkit.checkpoint.state.layout import as_global, shards_of
from ckptkit.checkpoint.state.local_part import layout_of
from ckptkit.checkpoint.state.model_tensors import live_tensors, model_tensors
from ckptkit.checkpoint.state.train_state import TrainState, is_stateful, section
from ckptkit.checkpoint.state.values import JSON
from ckptkit.errors import CheckpointMismatchError, CorruptCheckpointError, UsageError, command_line
from ckptkit.formats.dcp.subclasses import SUBCLASSES
from ckptkit.formats.models import model_names
from ckptkit.formats.own.manifest import MESHES, PLACEMENTS
from ckptkit.formats.own.reader import OBJECTS_NAME
from ckptkit.storage.store import Store

if TYPE_CHECKING:
    import torch

    from ckptkit.checkpoint.load.key_map import MappedWeights


def plan_load(
    state: TrainState, catalog: Catalog, store: Store, options: LoadOptions, *, rank: int, world_size: int
) -> LoadPlan:
    """Plan a load without changing anything.

    Reads all saved values that are not tensors, and only those tensors that optimizer settings or `extra` need.

    Mismatches are collected in the plan's `mismatches`, with one exception: if a LOCAL checkpoint was saved on a
    different mesh, this raises an error.
    """
    for item in state.extra.values():
        if isinstance(item, type) and is_stateful(item):
            raise UsageError("TrainState.extra holds a class; it must hold objects.")
    if catalog.info.format == "ckptkit-local":
        _check_local(state, catalog, store.url, world_size=world_size)
    # The objects of a ckptkit checkpoint; {} for a checkpoint of another system.
    found = catalog.objects.values()
    objects = {entry.name: entry.value for entry in found if entry.path.rpartition("/")[2] == OBJECTS_NAME}
    own = own_copies(catalog, objects, rank=rank, world_size=world_size)
    catalog = own.catalog
    adopted = Adopted(catalog, own.objects)
    if options.key_map is not None:
        return _plan_mapped(state, catalog, options, rank=rank, world_size=world_size)
    stacked: MappedWeights | None = None
    if catalog.info.format == "safetensors" and options.model == "restore":
        stacked = _mapped_weights(state, catalog)
    if stacked is not None:  # files beside the weights, such as optimizer.pt, are those of the live model
        catalog = replace(stacked.catalog, objects=catalog.objects)
    weights = catalog
    if not objects:
        adopted = adopt(catalog, store, state, optimizer=options.optimizer == "restore")
    catalog = replace(adopted.catalog, tensors=dict(adopted.catalog.tensors))  # creates each lazy entry only once

    def small(key: str) -> torch.Tensor:  # rarely called, for example if a learning rate is a large tensor
        from ckptkit.formats.dcp.fill import read_whole

        return adopted.tensors[key] if key in adopted.tensors else read_whole(catalog, store, [key])[key]

    plan = LoadPlan(catalog, adopted.tensors)
    if stacked is not None:
        plan.sources, plan.filled = stacked.sources, stacked.filled
        plan.skipped.update(stacked.dropped)
    _fill_plan(
        Planning(state, adopted.objects, options, rank, world_size, small, not objects, plan, own, adopted.random)
    )
    if {**plan.mismatches.missing, **plan.mismatches.unexpected}:
        names = [name for name in model_names(weights.by_role(Role.MODEL).values()) if name]
        plan.mismatches.models = names if state.parts("model").keys().isdisjoint(names) else ()
    plan.notes += [*adopted.notes, *(stacked.notes if stacked is not None else ())]
    if own.note:
        plan.warnings.append(own.note)
    return plan


def _fill_plan(load: Planning) -> None:
    load.recipes = load.objects.get(SUBCLASSES, {})
    if not isinstance(load.recipes, dict) or not all(map(_is_recipe, load.recipes.values())):
        raise CorruptCheckpointError(f"objects.json: the value of '{SUBCLASSES}' is malformed.")
    if load.options.model == "restore":
        plan_weights(load)
    else:
        skipped = {section("model", name): 'model="skip"' for name in load.state.parts("model")}
        load.plan.skipped.update(skipped)
    plan_optimizers(load)
    plan_objects(load)


def _is_recipe(recipe: JSON) -> bool:
    """Return whether a JSON value has the fields of a recipe, which describes how a tensor subclass is split."""
    inner = recipe.get("inner") if isinstance(recipe, dict) else None
    return isinstance(inner, dict) and "context" in recipe and all(isinstance(spec, dict) for spec in inner.values())


def _plan_mapped(state: TrainState, catalog: Catalog, options: LoadOptions, *, rank: int, world_size: int) -> LoadPlan:
    from ckptkit.checkpoint.load.key_map import map_weights
    from ckptkit.keymaps.named import resolve_key_map

    key_map = resolve_key_map(options.key_map)
    assert key_map is not None
    live, config = _names_and_config(state)
    mapped = map_weights(catalog, key_map, live=live, config=config)
    plan = LoadPlan(mapped.catalog, {}, sources=mapped.sources, filled=mapped.filled)
    plan.skipped.update(mapped.dropped)
    own = OwnCopies(mapped.catalog, {})
    _fill_plan(Planning(state, {}, options, rank, world_size, dict[str, Any]().__getitem__, True, plan, own))
    plan.notes += mapped.notes
    for target in plan.models:
        if (filled := plan.filled.get(target.entry.name)) is not None:
            boxes = ", ".join(f"{list(box.sizes)} at {list(box.offsets)}" for box in filled[:3])
            plan.padded.append(target.key)
            plan.notes.append(f"{target.key} {list(target.entry.shape)}: filled {boxes}; the rest is left unchanged")
    return plan


def _names_and_config(state: TrainState) -> tuple[set[str], Mapping[str, Any]]:
    """Return the live models' tensor names, and the config of the first model that has one."""
    models = state.parts("model").values()
    configs = (getattr(getattr(module, "config", None), "to_dict", None) for module in models)
    return set(live_tensors(state)), next((to_dict() for to_dict in configs if callable(to_dict)), {})


def _mapped_weights(state: TrainState, catalog: Catalog) -> MappedWeights | None:
    """Map the weights of Hugging Face files to the live model's names.

    The names in the files may differ because transformers stacks experts in memory. Returns None if the names agree, or
    if no key map for the model is known.
    """
    from ckptkit.checkpoint.load.key_map import map_weights
    from ckptkit.keymaps.builtin import choose_map

    live, config = _names_and_config(state)
    if not config or live <= catalog.tensors.keys() or catalog.tensors.keys() <= live:
        return None
    targets = {name: Target.of(entry, name) for name, entry in catalog.tensors.items()}
    chosen = choose_map(targets, wanted=live, config=config).key_map
    return map_weights(catalog, chosen, live=live, config=config) if chosen.rules else None


def _check_local(state: TrainState, catalog: Catalog, url: str, *, world_size: int) -> None:
    """Raise if a LOCAL checkpoint was saved on a different number of ranks, or with a different mesh or placements."""
    from torch.distributed.tensor import DTensor

    saved = catalog.info.world_size
    why = f"it was saved at world size {saved}, this job has {world_size}" if saved != world_size else ""
    why = why or _moved(state, catalog)
    if not why:
        return
    found = [layout_of(tensor) for tensor in live_tensors(state).values() if isinstance(tensor, DTensor)]
    wide = next((layout for layout in found if len(layout.mesh_shape) > 1), None)
    mesh = f"replicate={world_size}" if not found and world_size > 1 else ""  # the default is a mesh that only shards
    if wide is not None:
        mesh = ",".join(f"{n}={s}" for n, s in zip(wide.mesh_names, wide.mesh_shape, strict=True))
    flag = ("--mesh", mesh) if mesh else ()
    line = command_line("reshard", url, "DST", "--world-size", str(world_size), *flag, "--type", "local")
    raise CheckpointMismatchError(
        f"{url} is a LOCAL checkpoint, which loads only on the mesh that wrote it: {why}. Reshard it "
        f"for this job:\n  {line}"
    )


def _placed(mesh_shape: Sequence[int], placements: Sequence[str]) -> str:
    wide = [(size, text) for size, text in zip(mesh_shape, placements, strict=True) if size > 1]
    if all(text == "R" for _, text in wide):
        return "whole on each rank"
    return str(tuple(zip(*wide, strict=True)))


def _moved(state: TrainState, catalog: Catalog) -> str:
    """Describe the first tensor that is placed differently here than in the checkpoint. Returns "" if the meshes agree.

    If any tensor is sharded in the same way here and in the checkpoint, tensors that are sharded on one side only are
    ignored. They occur even if the meshes agree, because a reshard cannot always distinguish buffers from parameters.
    """
    from torch.distributed.tensor import DTensor

    meshes, placements = catalog.info.extra.get(MESHES, []), catalog.info.extra.get(PLACEMENTS, {})
    alike, first = False, ""
    for name, module in state.parts("model").items():
        for fqn, tensor in model_tensors(module)[0].items():
            key = f"{section('model', name)}.{fqn}"
            if key not in catalog.tensors:
                continue
            saved = placements.get(key)
            was = ((), ()) if saved is None else (tuple(meshes[saved[0]]["shape"]), tuple(saved[1]))
            view = as_global(key, tensor, shards_of(state.layout, f"{name}.{fqn}" if name else fqn))
            layout = layout_of(view) if isinstance(view, DTensor) else None
            now = ((), ()) if layout is None else (layout.mesh_shape, layout.texts())
            placed = [_placed(*one) for one in (was, now)]
            if placed[0] == placed[1]:
                alike |= saved is not None and layout is not None
                continue
            first = first or f"{key} was placed {placed[0]}, but is {placed[1]} here"
            if saved is not None and layout is not None:
                return first
    return "" if alike else first
