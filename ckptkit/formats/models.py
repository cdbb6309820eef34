"""Tells which weights, masters, moving averages and side files of a checkpoint belong to which model.

- The name of a model is the first part of its weights' FQNs. ckptkit's key `model_actor.w` and a dict of state dicts
  ({"actor": ..., "critic": ...}) give the FQN `actor.w`. If a program only numbers its models, as accelerate does, the
  second model is `model_1` (see `numbered`). All other weights belong to one model without a name.
- A master, and the state of an optimizer, have the FQN of their weight. Weights that are tied share one master.
- A moving average (EMA) has the names of its model, after a prefix such as `ema.` or `model_ema.module.`. It belongs to
  the model that the prefix names, as in `actor_ema.`, or whose name follows the prefix. In a file of Lightning's
  WeightAveraging, the model itself is the average, and the trained weights have a prefix.
- The side files of a model or adapter are in a directory with its name: `actor/config.json`, `actor/default/...`. All
  models share the side files outside of such directories.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ckptkit.catalog.entry import Catalog, Role, TensorEntry
from ckptkit.formats.hf.side_files import find_side_files
from ckptkit.storage import Store

_NUMBERED = re.compile(r"model_(\d+)\.(.+)")
_NUMBERED_OPTIMIZER = re.compile(r"optimizer_(\d+)")
# Prefixes of averaged tensors: ckptkit's `extra`, timm's state_dict_ema, LitEma's buffers, and others.
_AVERAGE = re.compile(
    r"(?:.*?[._])??(?:ema|model_ema|ema_model|ema_weights|(?:model_)?ema_state_dict|state_dict_ema)\."
)
AVERAGED_FROM = "current_model_state"  # where Lightning's WeightAveraging stores the weights that are trained
_TRAINED = f"{AVERAGED_FROM}."
_ADAPTER = re.compile(r"\.lora_(?:embedding_)?[AB]\.(?!weight$)([^.]+)")


# --- names


def model_names(entries: Iterable[TensorEntry]) -> list[str]:
    """Return the names of the models to which these weights belong. "" stands for a model without a name."""
    tops: dict[str, None] = {}
    named: set[str] = set()
    for entry in entries:
        top = entry.fqn.partition(".")[0]
        tops.setdefault(top)
        in_dict = len(entry.key) == 2 and "." in str(entry.key[1]) and entry.fqn == f"{entry.key[0]}.{entry.key[1]}"
        if in_dict or entry.name == f"model_{entry.fqn}" or _NUMBERED.fullmatch(entry.fqn):
            named.add(top)
    return list(dict.fromkeys(top if top in named else "" for top in tops))


def numbered(catalog: Catalog, index: int) -> Catalog:
    """Return the catalog of one of several models, or of its optimizer, with names that only this model has.

    The entries of the first model (0) keep their names. The names of other entries get the prefix `model_<index>.` or
    `optimizer_<index>.`, and the FQNs of tensors get the prefix `model_<index>.`. The parameter names in an optimizer's
    settings stay as they are. `prefix_of_optimizer` returns the prefix that they need.
    """
    if index == 0:
        return catalog

    def name_of(name: str) -> str:
        top, _, rest = name.partition(".")
        return f"optimizer_{index}.{rest}" if top == "optimizer" else f"model_{index}.{name}"

    tensors = {
        name_of(name): replace(entry, name=name_of(name), fqn=entry.fqn and f"model_{index}.{entry.fqn}")
        for name, entry in catalog.tensors.items()
    }
    objects = {name_of(name): replace(item, name=name_of(name)) for name, item in catalog.objects.items()}
    return Catalog(tensors, objects, catalog.info)


def number_of(fqn: str) -> tuple[int, str]:
    """Return the number that `numbered` gave to a weight's model, and the FQN without it. The first model is 0."""
    match = _NUMBERED.fullmatch(fqn)
    return (int(match[1]), match[2]) if match else (0, fqn)


def prefix_of_optimizer(optimizer: str) -> str:
    """Return the prefix of the FQNs of an optimizer's parameters: "model_1." for "optimizer_1", otherwise ""."""
    match = _NUMBERED_OPTIMIZER.fullmatch(optimizer)
    return f"model_{match[1]}." if match else ""


# --- masters


def masters_of(catalog: Catalog) -> dict[str, TensorEntry]:
    """Return the fp32 masters by FQN. The master of tied weights is listed under each of their FQNs.

    An optimizer knows only one name of a tied parameter. The optimizers that ckptkit saves list the other names. In
    other checkpoints, weights are tied if they are the same bytes in the same files.
    """
    model, masters = catalog.by_role(Role.MODEL), catalog.by_role(Role.MASTER)
    owners = {place_of(model[name]): name for name in masters if name in model and len(model[name].slices)}
    tied = (
        {name: owners[place_of(entry)] for name, entry in model.items() if place_of(entry) in owners} if owners else {}
    )
    for item in catalog.objects.values():
        tree = item.value if item.encoding == "value" and item.role is Role.OPTIMIZER else None
        table = tree.get("tied") if isinstance(tree, dict) else None
        tied |= {name: fqn for name, fqn in table.items() if isinstance(fqn, str)} if isinstance(table, dict) else {}
    others = {
        name: replace(masters[fqn], fqn=name)
        for name, fqn in tied.items()
        if name in model and name not in masters and fqn in masters
    }
    return {**masters, **others}


def place_of(entry: TensorEntry) -> tuple[tuple[str, int, int], ...]:
    """Return where a tensor is stored: (path, start, bytes) of each slice. Tied weights may have the same place.

    If there are more than 4,096 slices, returns a place that no other tensor has.
    """
    slices = entry.slices
    if len(slices) > 4096:
        return ((entry.name, -1, len(slices)),)
    return tuple((row.path, row.start, row.nbytes) for row in slices)


# --- tied weights


def tied_entries(catalog: Catalog) -> dict[str, TensorEntry]:
    """Return the names of tied weights that a FULL or LOCAL checkpoint records, but does not store.

    Each name has the entry of the weight that is stored, with the FQN of the name.
    """
    found = {}
    tables = catalog.info.extra.get("aliases", {})
    for section, table in tables.items() if isinstance(tables, Mapping) else ():
        for fqn, holder in table.items() if isinstance(table, Mapping) else ():
            entry, name = catalog.tensors.get(f"{section}.{holder}"), f"{section}.{fqn}"
            if entry is not None and name not in catalog.tensors:
                found[name] = replace(entry, fqn=entry.fqn.removesuffix(str(holder)) + fqn)
    return found


def with_tied_names(catalog: Catalog) -> Catalog:
    """Return the catalog with each tied weight under all its names, as a SHARDED checkpoint stores it."""
    found = {name: replace(entry, name=name, key=()) for name, entry in tied_entries(catalog).items()}
    return replace(catalog, tensors={**catalog.tensors, **found}) if found else catalog


# --- moving averages


def averages_of(catalog: Catalog) -> dict[str, dict[str, TensorEntry]]:
    """Return the tensors of each moving average: the prefix of their names -> the rest of the name -> the tensor."""
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in catalog.tensors.items():
        if entry.role in (Role.MODEL, Role.OTHER) and (match := _AVERAGE.match(name)):
            found.setdefault(match[0], {})[name[match.end() :]] = entry
    return found


def weights_beside_averages(catalog: Catalog) -> dict[str, TensorEntry]:
    """Return the weights without the moving averages, by FQN."""
    return {fqn: entry for fqn, entry in catalog.by_role(Role.MODEL).items() if not _AVERAGE.match(entry.name)}


def names_average_of(prefix: str, models: Collection[str]) -> bool:
    """Return whether the prefix of a moving average names one of these models, as in "actor_ema."."""
    return not {*models}.isdisjoint(re.split(r"[._]", prefix.removeprefix("extra.").removeprefix("model_")))


def is_averaged(catalog: Catalog) -> bool:
    """Return whether a Lightning checkpoint stores a moving average as the model, and the trained weights elsewhere."""
    return catalog.info.producer.startswith("lightning") and any(name.startswith(_TRAINED) for name in catalog.tensors)


def with_trained_weights(catalog: Catalog) -> Catalog:
    """Return the catalog with the trained weights as the model, and with a note about the change.

    In the result, the names of the moving average have the prefix "ema.". A catalog whose model is not a moving average
    is returned unchanged.
    """
    if not is_averaged(catalog):
        return catalog
    prefix = str(catalog.info.extra.get("module_prefix", ""))
    trained = {
        name.removeprefix(_TRAINED).removeprefix(prefix): entry
        for name, entry in catalog.tensors.items()
        if name.startswith(_TRAINED)
    }
    tensors: dict[str, TensorEntry] = {}
    for name, entry in catalog.tensors.items():
        if entry.role is Role.MODEL and entry.fqn in trained:
            tensors[name] = replace(trained[entry.fqn], name=name, role=Role.MODEL, fqn=entry.fqn)
            average = f"ema.{entry.fqn}"
            tensors[average] = replace(entry, name=average, role=Role.OTHER, fqn="", key=("ema", entry.fqn))
        elif not name.startswith(_TRAINED):
            tensors[name] = entry
    note = (
        f"the weights are those of {AVERAGED_FROM}; their moving average, which Lightning stores as state_dict, is "
        "'ema'."
    )
    return Catalog(tensors, catalog.objects, replace(catalog.info, notes=(*catalog.info.notes, note)))


# --- side files


def side_file_names(store: Store, catalog: Catalog) -> tuple[dict[str, str], dict[str, str]]:
    """Return the paths of the checkpoint's own side files (config.json, tokenizer...), each with its name in a copy.

    The checkpoint's reader lists these files (for verl, the files in `huggingface/`). In a plain DCP directory, the
    files are next to `.metadata`.

    Returns:
        Two mappings from a path to the name in a copy. The first has the files of the whole checkpoint. The second has
        the files of single models or adapters, each in a folder with the name of the model or adapter.
    """
    info = catalog.info
    paths = info.side_files
    if info.format == "dcp":
        paths = paths or find_side_files(store).carried
    folders = _side_folders(store, catalog) if info.format in ("dcp", "torch") else []
    inner = [path for folder in folders for path in find_side_files(store, folder).carried]
    in_folders = {path: name for name, path in info.model_files.items()} | dict(zip(inner, inner, strict=True))
    return {path: _export_name(path) for path in paths}, in_folders


def _side_folders(store: Store, catalog: Catalog) -> list[str]:
    """Return the directories with the side files of one of several models or adapters."""
    fqns = [entry.fqn for entry in catalog.by_role(Role.MODEL).values()]
    found = _directories(store)
    adapters = {match[1] for fqn in fqns if (match := _ADAPTER.search(fqn))}
    models = {fqn.partition(".")[0] for fqn in fqns} & found
    folders = models | (adapters & found)
    for model in models if adapters else ():
        folders |= {f"{model}/{adapter}" for adapter in adapters} & _directories(store, model)
    return sorted(folders)


def _directories(store: Store, folder: str = "") -> set[str]:
    return {entry.path for entry in store.list(folder) if entry.kind == "directory"}


def _export_name(path: str) -> str:
    """Return a file's name in the export: the path's last component, or "additional_chat_templates/..."."""
    marker = "additional_chat_templates/"
    return marker + path.rpartition(marker)[2] if marker in path else path.rpartition("/")[2]
