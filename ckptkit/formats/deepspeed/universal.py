"""Reads DeepSpeed's universal checkpoints: `zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`, with full tensors.

The directory that contains `zero/` also contains the model states of the converted job
(deepspeed/checkpoint/ds_to_universal.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptkit.catalog.box import row_major_strides
from ckptkit.catalog.entry import Catalog, SliceArray
from ckptkit.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsupportedFormatError
from ckptkit.formats.deepspeed.files import Shape, read_model_states
from ckptkit.formats.deepspeed.zero import catalog_of, frozen_weights
from ckptkit.formats.hf.side_files import file_names
from ckptkit.formats.options import DEFAULTS, ReadOptions
from ckptkit.formats.pickles.tensors import StoredTensor
from ckptkit.formats.torch_save import read_torch_file
from ckptkit.formats.trainers.optimizer_files import OptimizerState
from ckptkit.formats.trainers.rank_files import Joined
from ckptkit.storage import Store

_ROOT = "zero"
_STATE_FILE = re.compile(r"([A-Za-z0-9_]+)\.pt")
_WEIGHT = "fp32"


def open_catalog(store: Store, *, options: ReadOptions = DEFAULTS) -> Catalog:
    """Return the catalog of the universal checkpoint at the store's root. Reads no tensor bytes.

    Raises:
        UnsupportedFormatError: A parameter was padded or split in a way that only a live model can undo.
        IncompleteCheckpointError: A parameter's files are missing.
    """
    models = read_model_states(store, file_names(store.list()), options)
    shapes = {name: shape for group in models.param_shapes for name, shape in group.items()}
    optimizer = OptimizerState()
    masters: dict[str, Joined] = {}
    trained: set[str] = set()
    files: dict[str, int] = {}
    for name, states in _parameters(store, files, options):
        if states.keys() > {_WEIGHT}:
            trained.add(name)
        for state, value in states.items():
            if isinstance(value, (int, float)):
                optimizer.add_value(name, state, value)
                continue
            joined = _joined(value, shapes.get(name), f"{_ROOT}/{name}/{state}.pt", state)
            if state == _WEIGHT:
                masters[name] = joined
            else:
                optimizer.add(name, state, joined)
    missing = sorted(shapes.keys() - masters.keys())
    if missing:
        raise IncompleteCheckpointError(f"{_ROOT}/{missing[0]}/{_WEIGHT}.pt is missing ({len(missing)} in all).")
    # ds_to_universal.py also writes buffers and frozen parameters to `zero/`, cast to fp32. The model file contains the
    # original tensors.
    own = {**models.whole(elsewhere=models.trained), **frozen_weights(models)}
    masters = {name: joined for name, joined in masters.items() if name not in own or name in trained}
    weights = {**own, **masters}
    return catalog_of(
        store, models, weights, masters, models.shared, optimizer, layout="deepspeed-universal", files=files
    )


def _parameters(store: Store, files: dict[str, int], options: ReadOptions) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each parameter with the contents of its files. Adds the sizes of the files to `files`."""
    for item in store.list(_ROOT):
        if item.kind != "directory":
            continue
        states = {}
        for file in store.list(item.path):
            match = _STATE_FILE.fullmatch(file.path.rpartition("/")[2])
            if match and file.kind == "file":
                files[file.path] = file.size
                states[match[1]] = read_torch_file(store, file.path, options)
        yield item.path[len(_ROOT) + 1 :], states


def _joined(value: Any, shape: Shape | None, file: str, state: str) -> Joined:
    settings: Mapping[str, Any] = value if isinstance(value, dict) else {}
    tensor = settings.get("param") if settings else value
    if settings.get("vocab_tensor") or settings.get("sub_param_shape"):
        raise UnsupportedFormatError(f"{file}: its parameter was padded or split into sub-parameters.")
    if not isinstance(tensor, StoredTensor):
        raise CorruptCheckpointError(f"{file} contains no tensor.")
    if state != "step" and shape is not None and tensor.shape != shape:
        # ZeRO-3's tensors are flat, and may include the last ranks' padding.
        if len(tensor.shape) != 1 or tensor.numel < math.prod(shape):
            raise CorruptCheckpointError(
                f"{file} has shape {list(tensor.shape)}, but the model file says {list(shape)}."
            )
        tensor = replace(tensor, shape=shape, strides=row_major_strides(shape))
    return Joined(tensor.dtype, tensor.shape, SliceArray.of([tensor.slice()], len(tensor.shape)))
