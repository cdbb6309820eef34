"""Reads the Hugging Face Trainer's DeepSpeed checkpoints: the config is at the root, the rest in `global_step<N>/`."""

from __future__ import annotations

from collections.abc import Sequence

from ckptkit.catalog.entry import Catalog, CatalogInfo
from ckptkit.errors import CheckpointNotFoundError
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.trainers.steps import ordered
from ckptkit.storage import Store

_OBJECTS = {"trainer_state": "trainer_state.json", "scheduler": "scheduler.pt", "rng_state": "rng_state.pth"}


def is_trainer_directory(files: Sequence[str], directories: Sequence[str]) -> bool:
    """Return whether the names belong to a single Trainer checkpoint, not to a run with several tags."""
    return "trainer_state.json" in files and any(name.startswith("global_step") for name in directories)


def open_catalog(store: Store, *, options: ReadOptions | None = None) -> Catalog:
    """Read the newest `global_step<N>/`, with the side files at the root."""
    from ckptkit.formats.deepspeed import zero  # lazy, because `is_trainer_directory` is called for every directory
    from ckptkit.formats.hf.side_files import find_side_files
    from ckptkit.formats.trainers.merge import assembled, open_part, step_in

    steps = ordered(i.path for i in store.list() if i.kind == "directory" and i.path.startswith("global_step"))
    if not steps:
        raise CheckpointNotFoundError(f"{store.url} has no global_step<N>/.")
    part = open_part(zero.open_catalog, store, steps[0].name, options)
    producer = f"transformers Trainer, {part.info.producer}"
    info = CatalogInfo("deepspeed", producer=producer, step=step_in(store, _OBJECTS["trainer_state"]))
    return assembled(store, [part], find_side_files(store).described_in(info), _OBJECTS)
