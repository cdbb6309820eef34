"""Collects the tensors to export from a transformers model or from the adapters of a PEFT model."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ckptkit.catalog.targets import Target
from ckptkit.checkpoint.save.hf_config import adapter_folder, adapters_of, pretrained_class
from ckptkit.checkpoint.state.capture import capture
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import SaveError
from ckptkit.formats.dcp.subclasses import SUBCLASSES
from ckptkit.fsdp.wrap import unwrap_model
from ckptkit.keymaps.wrappers import without_infixes
from ckptkit.units import first_few

_log = logging.getLogger(__name__)
_PEFT_ROOT = "base_model.model."


@dataclass(frozen=True, slots=True)
class Exported:
    """Holds the tensors to export from a model, which may be wrapped.

    Attributes:
        model: The transformers or PEFT model inside the wrappers. If there is neither, the model without its wrappers.
        tensors: The tensors by name. Tied tensors appear once.
    """

    model: nn.Module
    tensors: dict[str, torch.Tensor]


def exported(model: nn.Module) -> Exported:
    """Return the model inside the wrappers of `model`, with its live tensors.

    Raises:
        SaveError: FSDP1 wraps a part of the model. Or some parameters are outside the transformers model (for example,
            in a value head), where `from_pretrained` would not read them. Or a tensor has no values, or is of a class
            that `from_pretrained` does not read.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise SaveError(f"{type(model).__name__} is wrapped by FSDP1, whose models are not exported. Use FSDP2.")
    inner = unwrap_model(model)
    while not _is_pretrained(inner):
        children = list(inner.children())
        own = [*inner.parameters(recurse=False), *inner.buffers(recurse=False)]
        if own or len(children) != 1:
            break
        inner = unwrap_model(children[0])
    if not _is_pretrained(inner):
        _refuse_neighbours(inner)
        inner = unwrap_model(model)
    captured = capture(TrainState(model=inner, rng=False))
    parts = captured.objects.get(SUBCLASSES)
    if parts:
        raise SaveError(
            f"{first_few(sorted(parts), 3)} are of classes that from_pretrained does not read, "
            f"such as {next(iter(parts.values()))['class']}. Save a checkpoint, or dequantize the model first."
        )
    aliases = captured.aliases["model"]
    return Exported(inner, {name: t for name, t in captured.models["model"].items() if name not in aliases})


def _is_pretrained(module: nn.Module) -> bool:
    return pretrained_class(module) is not None or bool(adapters_of(module))


def _refuse_neighbours(model: nn.Module) -> None:
    found = next(((name, child) for name, child in model.named_modules() if _is_pretrained(child)), None)
    if found is None:
        return  # no transformers model inside
    name, child = found
    inside = {id(p) for p in child.parameters()}
    beside = [n for n, p in model.named_parameters() if id(p) not in inside]
    raise SaveError(
        f"{type(model).__name__} has parameters outside of its {type(child).__name__} {name!r}, which from_pretrained "
        f"doesn't read: {_some(beside)}. Export only the inner model: save_model(model.{name}, ...), or save a "
        "checkpoint, which contains everything."
    )


def _some(names: Sequence[str]) -> str:
    return first_few(list(map(repr, names)), 3)


# --- adapters


def adapter_tensors(source: Exported, extra: dict[str, torch.Tensor]) -> dict[str, dict[str, str]]:
    """Return {folder: {key in the file: tensor name}} for all adapters. Only rank 0 calls this.

    Args:
        extra: A mapping to which this function adds the tensors that it computes for the file (prompt embeddings).

    Raises:
        SaveError: A trained tensor belongs to no adapter, or a tensor cannot be derived from the live tensors.
    """
    from peft import get_peft_model_state_dict

    model = source.model
    adapters = adapters_of(model)
    # PEFT looks tensors up by raw module names, which include the names of wrappers.
    raw = {
        without_infixes(f"{module}.{leaf}"): f"{module}.{leaf}"
        for module, owner in model.named_modules()
        for leaf in (*owner._parameters, *owner._buffers)
    }
    stand_ins = {
        raw.get(name, name): torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in source.tensors.items()
    }
    names = {id(stand_in): name for name, stand_in in zip(source.tensors, stand_ins.values(), strict=True)}
    root = "" if hasattr(model, "get_base_model") else _PEFT_ROOT  # for adapters that are inside a transformers model
    found: dict[str, dict[str, str]] = {}
    prompts: set[str] = set()
    for adapter, config in adapters.items():
        if config.is_prompt_learning:
            prompts.update(name for name in source.tensors if name.startswith("prompt_encoder."))
            if sharded := [name for name in sorted(prompts) if isinstance(source.tensors[name], DTensor)]:
                raise SaveError(
                    f"{sharded[0]!r} is sharded, but PEFT needs the full tensor to write the prompt's adapter file. "
                    "Exclude the prompt encoder from FSDP (exclude=[...]), or export on one rank."
                )
        made = get_peft_model_state_dict(model, state_dict=dict(stand_ins), adapter_name=adapter)
        folder = adapter_folder(adapter, adapters)
        files = found.setdefault(folder, {})
        for key, value in made.items():
            name = names.get(id(value))
            if name is None and value.device.type == "meta":
                raise SaveError(
                    f"PEFT computes {key!r} of the adapter {adapter!r}. Save this adapter with its save_pretrained."
                )
            if name is None:
                name = f"{folder}{key} of {adapter}"
                extra[name] = value
            files[f"{root}{without_infixes(key)}"] = name
    taken = {name for files in found.values() for name in files.values()}
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    lost = [n for n, t in source.tensors.items() if id(t) in trained and n not in taken and n not in prompts]
    if lost:
        raise SaveError(
            f"These trained tensors belong to no adapter: {_some(lost)}. An export of the adapter would lose them. Add "
            "their modules to modules_to_save of the PEFT config, or freeze them."
        )
    return found


# --- trial load


def prove(source: Exported, targets: Sequence[Target]) -> None:
    """Check on the meta device that transformers can load the names and shapes of `targets`. Only rank 0 calls this.

    Raises:
        SaveError: `from_pretrained` would ignore some weights, or initialize some weights randomly.
    """
    kind = pretrained_class(source.model)
    if kind is None:
        return
    config: Any = copy.deepcopy(source.model.config)
    state = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in targets}
    try:
        with _quiet():
            _, info = kind.from_pretrained(
                None, config=config, state_dict=state, device_map="meta", ignore_mismatched_sizes=True,
                output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # noqa: BLE001  a custom constructor or a quantizer failed: this is not about the names
        _log.warning("the export of %s could not be checked: from_pretrained failed: %s", kind.__name__, error)
        return
    problems = [f"{what}: {_some(sorted(map(str, info[key])))}" for key, what in _PROBLEMS.items() if info.get(key)]
    if problems:
        raise SaveError(
            f"{kind.__name__}.from_pretrained does not load this export. {'; '.join(problems)}. Was the model changed "
            "after it was created? Nothing was written."
        )


_PROBLEMS = {"missing_keys": "missing", "unexpected_keys": "unexpected", "mismatched_keys": "with a different shape"}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers while it loads a model on trial."""
    logging_of: Any = sys.modules["transformers"].utils.logging
    level = logging_of.get_verbosity()
    logging_of.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging_of.set_verbosity(level)
