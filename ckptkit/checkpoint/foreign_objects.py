"""Where other systems keep schedulers, random numbers and the rest, and what of it a load of ours can use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.state import section
from ckptkit.checkpoint.values import JSON, encode
from ckptkit.errors import CkptkitError

if TYPE_CHECKING:
    import torch

__all__ = ["foreign_extras", "foreign_rng", "foreign_schedulers"]

_RNG_FILE = re.compile(r"(?:random_states|rng_state|extra_state)[._](\d+)")
_SCHEDULER_FILE = re.compile(r"scheduler(?:[._](\d+))?")
_NAME = re.compile(r"[^A-Za-z0-9_-]+")


def foreign_schedulers(values: Mapping[str, Any], live: Sequence[str]) -> dict[str, Any]:
    """Return the state of each live scheduler by its key; nothing where their number differs."""
    found = _schedulers(values)
    if not live or len(found) != len(live):
        return {}
    return {section("scheduler", name): value for name, value in zip(live, found, strict=True)}


def _schedulers(values: Mapping[str, Any]) -> list[Any]:
    for holder in (values, values.get("meta")):  # Lightning: in the file, or in meta.pt
        listed = holder.get("lr_schedulers") if isinstance(holder, Mapping) else None
        if isinstance(listed, (list, tuple)):
            return [dict(item) for item in listed if isinstance(item, Mapping)]
    files = {int(m[1] or 0): v for k, v in values.items() if (m := _SCHEDULER_FILE.fullmatch(k)) and v is not None}
    if files:  # transformers, accelerate, LightRFT
        return [files[index] for index in sorted(files)]
    for name in ("lr_scheduler", "extra_state.0"):
        value = values.get(name)
        if name == "extra_state.0" and isinstance(value, Mapping):  # verl
            value = value.get("lr_scheduler")
        if isinstance(value, Mapping):
            return [dict(value)]
    flat = {key.partition(".")[2]: value for key, value in values.items() if key.startswith("lr_scheduler.")}
    return [flat] if flat else []  # torchtitan


def foreign_rng(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the random state of each rank by its key, where a rank's state of python and torch is there."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        match = _RNG_FILE.fullmatch(name)
        if match is None or not isinstance(value, Mapping):
            continue
        states = value.get("rng", value)
        made = _rng(states) if isinstance(states, Mapping) else None
        if made is not None:
            found[f"rng.{match[1]}"] = made
    return found


def _rng(states: Mapping[str, Any]) -> dict[str, Any] | None:
    import numpy as np
    import torch

    python = states.get("python", states.get("random", states.get("random_state")))
    cpu = states.get("cpu", states.get("torch_manual_seed"))
    array = states.get("numpy", states.get("numpy_random_seed"))
    if python is None or cpu is None:
        return None
    version, words, gauss = python
    made: dict[str, Any] = {
        "python": {"version": int(version), "words": torch.tensor(list(words), dtype=torch.int64), "gauss": gauss},
        "torch": torch.as_tensor(np.asarray(cpu)) if not isinstance(cpu, torch.Tensor) else cpu,
    }
    if array is not None:
        name, keys, position, has_gauss, cached = array
        made["numpy"] = {
            "name": str(name),
            "words": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        }
    return made


def foreign_extras(
    values: Mapping[str, Any], objects: dict[str, JSON], tensors: dict[str, torch.Tensor], notes: list[str]
) -> None:
    """Put what is left into `objects` as `extra.<name>`: a load returns it, or gives it to a live extra."""
    for name, value in values.items():
        if value is None or _RNG_FILE.fullmatch(name) or _SCHEDULER_FILE.fullmatch(name):
            continue
        key = f"extra.{_NAME.sub('_', name)}"
        try:
            objects[key] = encode(value, key, tensors)
        except CkptkitError as error:
            notes.append(f"{name} was left out: {error}")
