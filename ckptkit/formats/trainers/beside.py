"""Finds the optimizer, the scheduler and other state in files beside the weights."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from ckptkit.catalog.entry import Catalog, Role
from ckptkit.errors import UNREADABLE
from ckptkit.formats.hf import safetensors
from ckptkit.formats.models import numbered
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.pickles.zip import sizes_in
from ckptkit.formats.state_names import ACCELERATE_FILE, MODEL_FILE, OPTIMIZER_FILE, WEIGHTS_NAMES
from ckptkit.formats.torch_save import MODEL_FILES, may_hold_model, open_file, torch_files
from ckptkit.formats.trainers.merge import assembled, renamed, state_files
from ckptkit.formats.trainers.steps import ordered, parse_step
from ckptkit.storage import Store
from ckptkit.units import first_few

_LIBRARY_FILE = re.compile(rf"(?:{WEIGHTS_NAMES})\.safetensors|adapter_model\.bin")
_ANY_CLASS = ReadOptions(allow_pickle=True)  # training_args.bin contains an instance of transformers' class
_MAX_OTHERS = 8  # how many files are opened to find out whether they contain tensors


def with_files_beside(catalog: Catalog, store: Store) -> Catalog:
    """Return the catalog with the optimizer, scheduler and random states that are in the same directory as the weights.

    If accelerate saved several models to the directory, adds the other models, too. If the state files may belong to
    another model in the directory, they are not added, and a note names these files and the other models.

    A catalog that already contains an optimizer, or whose format is neither safetensors nor torch.save, is returned
    unchanged.
    """
    if not catalog.info.format.startswith("safetensors") and catalog.info.format not in ("torch", "hf"):
        return catalog
    if catalog.has(Role.OPTIMIZER):
        return catalog
    files = sizes_in(store)
    parts = [catalog]
    models = {int(match[1]): name for name in files if (match := MODEL_FILE.fullmatch(name))}
    optimizers = [(int(match[1] or 0), name) for name in files if (match := OPTIMIZER_FILE.fullmatch(name))]
    state = {kind: name for kind, name in state_files(files).items() if kind not in catalog.objects}
    # Only accelerate numbers models and optimizers. In file names of other programs, numbers are steps or epochs.
    if not any(map(ACCELERATE_FILE.fullmatch, files)):
        models, optimizers = {}, [(0, name) for _, name in optimizers if name in ("optimizer.bin", "optimizer.pt")]
        found = [*(name for _, name in optimizers), *state.values()]
        if found and (others := _newer_or_other_models(catalog, store, files)):
            note = f"not read: {first_few(found)}, which may belong to {first_few(others)}."
            return replace(catalog, info=replace(catalog.info, notes=(*catalog.info.notes, note)))
    for index, name in sorted(models.items()):
        open_model = safetensors.open_file if name.endswith(".safetensors") else open_file
        parts.append(numbered(open_model(store, name), index))
    for index, name in sorted(optimizers):
        parts.append(numbered(renamed(open_file(store, name), "optimizer"), index))
    if len(parts) == 1 and not state:
        return catalog
    return assembled(store, parts, catalog.info, state)


def _newer_or_other_models(catalog: Catalog, store: Store, files: Collection[str]) -> list[str]:
    """Return the models, except the one in `catalog`, to which an optimizer.pt in the same directory may belong.

    If the model in `catalog` has the highest step, models of other steps are left out. Returns [] if the file name in
    `catalog` is a library's, or if no other file contains tensors (args.pt, vocab.pt).
    """
    name = next(iter(catalog.info.files), "")
    if len(catalog.info.files) > 1 or name in MODEL_FILES or _LIBRARY_FILE.fullmatch(name):
        return []  # libraries write each model to a directory of its own
    likely = [n for n in may_hold_model(files) if n != name]
    others = [*torch_files(store, likely), *(n for n in likely if n.endswith(".safetensors"))]
    steps = ordered([name, *others])
    if steps and steps[0].name == name:
        others = [other for other in others if parse_step(other) is None]
    return others if len(others) > _MAX_OTHERS or any(_may_contain_tensors(store, other) for other in others) else []


def _may_contain_tensors(store: Store, path: str) -> bool:
    try:
        return path.endswith(".safetensors") or bool(open_file(store, path, options=_ANY_CLASS).tensors)
    except UNREADABLE:
        return True
