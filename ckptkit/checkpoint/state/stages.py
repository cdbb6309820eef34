"""Combines the pipeline stages on one rank into a single module with the parameter names of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from ckptkit.errors import UsageError
from ckptkit.units import first_few


class Stages(nn.Module):
    """Presents several stages of a model as one module. Parameters have the same names as in the whole model."""

    def __init__(self, stages: Sequence[nn.Module]) -> None:
        super().__init__()
        self.stages = tuple(stages)
        self.config = next((stage.config for stage in self.stages if hasattr(stage, "config")), None)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        for stage in self.stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = {}
        for stage in self.stages:
            values = stage.state_dict(*args, **kwargs)
            if both := [name for name, value in values.items() if name in found and found[name] is not value]:
                raise UsageError(f"TrainState(model=[...]): more than one stage has {first_few(both)}.")
            found.update(values)
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        results = [stage.load_state_dict(state_dict, strict=False, assign=assign) for stage in self.stages]
        left = set(state_dict).intersection(*(result.unexpected_keys for result in results))
        missing = [name for result in results for name in result.missing_keys]
        if strict and (left or missing):
            raise RuntimeError(f"missing: {missing}, unexpected: {sorted(left)}")
        return SimpleNamespace(missing_keys=missing, unexpected_keys=sorted(left))


def stages_of(module: nn.Module) -> tuple[nn.Module, ...]:
    """Return the stages that `module` combines, or `module` alone. A model's own attribute `stages` is ignored."""
    return module.stages if isinstance(module, Stages) else (module,)
