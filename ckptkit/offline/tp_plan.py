"""How tensor parallelism cuts a model's parameters: globs of names to dimensions, given or known for a family."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.errors import UsageError

__all__ = ["TPPlan"]

_COLUMN, _ROW = 0, 1
# What transformers' own plans say of these families: projections into heads and into the MLP are split by their
# outputs, those out of them by their inputs; the head by its vocabulary. Embeddings and norms stay whole.
_LLAMA: dict[str, int | None] = {
    **{f"*.self_attn.{name}_proj.{kind}": _COLUMN for name in "qkv" for kind in ("weight", "bias")},
    "*.self_attn.o_proj.weight": _ROW,
    **{f"*.mlp.{name}_proj.weight": _COLUMN for name in ("gate", "up")},
    "*.mlp.down_proj.weight": _ROW,
    "lm_head.weight": _COLUMN,
}
_FAMILY = frozenset(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo", "olmo2", "smollm3", "cohere"))


@dataclass(frozen=True, slots=True)
class TPPlan:
    """Which dimension of a parameter tensor parallelism cuts.

    Attributes:
        rules: Glob of the parameter's name -> dimension, None to leave it whole. The last that fits counts.
        origin: Where it comes from, for messages.
    """

    rules: Mapping[str, int | None]
    origin: str = "tp_plan"

    @classmethod
    def of(cls, given: str | Mapping[str, int | None]) -> TPPlan:
        """Return the plan in a JSON file, or in a mapping.

        Raises:
            UsageError: It is no mapping of globs to dimensions.
        """
        origin = given if isinstance(given, str) else "tp_plan"
        rules: Any = given
        if isinstance(given, str):
            try:
                rules = json.loads(Path(given).read_text("utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                raise UsageError(f"--tp-plan {origin}: it can't be read as JSON: {error}.") from error
        good = isinstance(rules, Mapping) and all(
            isinstance(glob, str) and (dim is None or (type(dim) is int and 0 <= dim < 8))
            for glob, dim in rules.items()
        )
        if not good or not rules:
            raise UsageError(
                f"{origin}: expected globs of parameter names with the dimension that each is cut along, such as "
                '{"*.q_proj.weight": 0, "*.o_proj.weight": 1}; null leaves it whole.'
            )
        return cls(dict(rules), origin)

    @classmethod
    def of_config(cls, config: Mapping[str, Any] | None, names: Iterable[str]) -> TPPlan | None:
        """Return the plan of a family that is known, told by a transformers config; None for any other model, and
        where the parameters have other names than the family's."""
        if config is None or str(config.get("model_type")) not in _FAMILY:
            return None
        plan = cls(_LLAMA, f"the plan of {config['model_type']}")
        return plan if any(name.endswith(".self_attn.q_proj.weight") for name in names) else None

    def without(self, names: Iterable[str]) -> TPPlan:
        """Return the plan that leaves these parameters whole: split, tied weights would come apart."""
        return TPPlan({**self.rules, **dict.fromkeys(names)}, self.origin)

    def dim(self, fqn: str, shape: tuple[int, ...]) -> int | None:
        """Return the dimension that a parameter is cut along, None where it is whole.

        Raises:
            UsageError: The parameter has no such dimension.
        """
        found = None
        for glob, dim in self.rules.items():
            if fnmatch.fnmatchcase(fqn, glob):
                found = dim
        if found is not None and found >= len(shape):
            raise UsageError(f"{self.origin}: {fqn!r} is cut along dimension {found}, but its shape is {list(shape)}.")
        return found

    def check_used(self, names: Iterable[str]) -> None:
        """Raise UsageError where a glob of a plan that was given fits no parameter: most often a typo."""
        known = list(names)
        idle = [glob for glob in self.rules if not any(fnmatch.fnmatchcase(name, glob) for name in known)]
        if idle:
            raise UsageError(
                f"{self.origin}: {', '.join(map(repr, idle[:4]))} fits no parameter. The source has {known[0]!r} and "
                f"{len(known) - 1} more."
            )
