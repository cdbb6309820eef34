"""Reads checkpoints with separate model and optimizer directories: Oumi, NeMo Automodel, NeMo, and similar systems.

A table lists the file locations for each system. Each directory is read by the reader for its format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptkit.catalog.entry import Catalog, CatalogInfo
from ckptkit.errors import CheckpointNotFoundError
from ckptkit.formats.dcp import catalog
from ckptkit.formats.hf import safetensors
from ckptkit.formats.hf.side_files import find_side_files
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.trainers import megatron
from ckptkit.formats.trainers.merge import Open, assembled, open_part, recorded_step, renamed
from ckptkit.storage import Store


@dataclass(frozen=True, slots=True)
class DirectoryLayout:
    """The file locations that a system uses in its checkpoints.

    Attributes:
        models: Directories that may contain the weights. The first directory that exists is read.
        optimizers: Directories that may contain the optimizer. The first directory that exists is read.
        objects: (object name, file) pairs.
        steps: A JSON file, and the key in that file that holds the step.
    """

    format: str
    producer: str
    models: tuple[str, ...]
    optimizers: tuple[str, ...] = ()
    objects: tuple[tuple[str, str], ...] = ()
    steps: tuple[str, str] | None = None


LAYOUTS: tuple[DirectoryLayout, ...] = (
    DirectoryLayout(
        "oumi",
        "oumi",
        ("model",),
        ("optimizer",),
        (("dataloader", "dataloader.pt"), ("trainer_state", "trainer_state.json")),
        ("trainer_state.json", "global_step"),
    ),
    DirectoryLayout(
        "automodel",
        "nemo_automodel",
        ("model", "model/consolidated"),
        ("optim",),
        (("step_scheduler", "step_scheduler.pt"),),
    ),
    DirectoryLayout("nemo", "nemo", ("hf_weights", "hf_adapter"), (), (("trainer", "trainer.pt"),)),
    DirectoryLayout("nemo", "nemo", ("weights",), (), (("trainer", "trainer.pt"),)),
)


def layout_of(store: Store, directories: Sequence[str]) -> DirectoryLayout | None:
    """Return the layout that the directories at a checkpoint's root match, or None if no layout matches."""
    for layout in LAYOUTS:
        has_optimizer = not layout.optimizers or any(name in directories for name in layout.optimizers)
        if has_optimizer and _first(store, layout.models, directories) is not None:
            return layout
    if "model" in directories and _first(store, ("model",), directories) is not None:
        return LAYOUTS[0]
    return None


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Read the model and optimizer directories into one catalog. Paths are relative to the checkpoint's root."""
    directories = [item.path for item in store.list() if item.kind == "directory"]
    layout = layout_of(store, directories)
    found = _first(store, layout.models, directories) if layout is not None else None
    if layout is None or found is None:
        raise CheckpointNotFoundError(f"{store.url} has no checkpoint in model/, hf_weights/ or weights/.")
    parts = [open_part(found[1], store, found[0], options)]
    optimizer = _first(store, layout.optimizers, directories)
    if optimizer is not None:
        parts.append(renamed(open_part(optimizer[1], store, optimizer[0], options), "optimizer"))
    step = recorded_step(store, *layout.steps) if layout.steps is not None else None
    unread = [f"{name}/" for name in layout.optimizers if name in directories and optimizer is None]
    notes = (f"not read: {', '.join(unread)}.",) if unread else ()
    info = CatalogInfo(layout.format, producer=layout.producer, step=step, notes=notes)
    return assembled(store, parts, find_side_files(store).described_in(info), dict(layout.objects))


def _first(store: Store, names: Sequence[str], directories: Sequence[str]) -> tuple[str, Open] | None:
    """Return the first of these directories that can be read, and its reader. Returns None if there is none."""
    for name in names:
        if name.partition("/")[0] not in directories:
            continue
        files = [item.path[len(name) + 1 :] for item in store.list(name)]
        if any(file.endswith(".metadata") for file in files):
            is_megatron = megatron.METADATA in files and megatron.is_megatron(store.child(name))
            return name, megatron.open_catalog if is_megatron else catalog.open_catalog
        if any(file.endswith(".safetensors") for file in files):
            return name, safetensors.open_catalog
    return None
