"""Scales the loss for fp16 training. The scale grows while gradients are finite and backs off on overflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptkit.errors import CheckpointMismatchError, UsageError

_KEYS = ("_scale", "_growth_step", "_hysteresis_step")


class DynamicGradScaler:
    """Keeps a loss scale with hysteresis: the scale is reduced only after several overflows.

    | step     | what happens                                                                                     |
    |----------|--------------------------------------------------------------------------------------------------|
    | overflow | growth count = 0, hysteresis count + 1; if >= `hysteresis`: scale * backoff_factor               |
    | finite   | growth count + 1; if = `growth_interval`: both counts = 0, scale * growth_factor                 |

    The scale stays within [min_scale, max_scale]. A backoff does not reset the hysteresis count. So after the first
    backoff, every further overflow reduces the scale again, until the scale grows.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        min_scale: float | None = 1.0,
        max_scale: float | None = 2.0**24,
        hysteresis: int = 2,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Start with `initial_scale`, within [min_scale, max_scale]. None means no limit.

        `dtype` is the compute dtype. It has no effect, except that fp16 allows fewer values of the factors.

        Raises:
            UsageError: An argument is invalid. fp16 needs growth_factor > 1 and 0 < backoff_factor < 1.
        """
        if dtype == torch.float16 and not (growth_factor > 1 and 0 < backoff_factor < 1):
            raise UsageError(
                f"fp16 needs growth_factor > 1 and 0 < backoff_factor < 1, found {growth_factor} and {backoff_factor}."
            )
        if not (growth_factor >= 1 and 0 < backoff_factor <= 1):
            raise UsageError(
                f"growth_factor must be >= 1 and backoff_factor in (0, 1], found {growth_factor} and {backoff_factor}."
            )
        if growth_interval < 1 or hysteresis < 1:
            raise UsageError(
                f"growth_interval and hysteresis must be 1 or more, found {growth_interval} and {hysteresis}."
            )
        low, high = min_scale or 0.0, float("inf") if max_scale is None else max_scale
        if not (initial_scale > 0 and low <= initial_scale <= high):
            raise UsageError(f"initial_scale {initial_scale} must be > 0 and within [{low}, {high}].")
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.hysteresis = growth_interval, hysteresis
        self.min_scale, self.max_scale = min_scale, max_scale
        self.dtype = dtype
        self._scale = float(initial_scale)
        self._growth_step = 0
        self._hysteresis_step = 0

    @property
    def scale(self) -> float:
        """The factor for the loss."""
        return self._scale

    @property
    def inv_scale(self) -> float:
        """The factor that unscales gradients."""
        return 1.0 / self._scale

    def update(self, overflow: bool) -> None:
        """Count one step. All ranks must pass the same `overflow`."""
        if overflow:
            self._growth_step = 0
            self._hysteresis_step += 1
            if self._hysteresis_step >= self.hysteresis:
                self._scale = max(self._scale * self.backoff_factor, self.min_scale or 0.0)
            return
        self._growth_step += 1
        if self._growth_step >= self.growth_interval:
            self._growth_step = self._hysteresis_step = 0
            grown = self._scale * self.growth_factor
            self._scale = grown if self.max_scale is None else min(grown, self.max_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and both counts, as plain numbers."""
        return {key: getattr(self, key) for key in _KEYS}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state.

        The state may come from `state_dict()`, from LightRFT (the same keys, with tensors as values), or from a scaler
        with a constant scale (only the key "scale").

        Raises:
            CheckpointMismatchError: Keys are missing, or the scale is not a positive number. The scaler is unchanged.
        """
        if "scale" in state_dict and "_scale" not in state_dict:
            state_dict = {"_scale": state_dict["scale"], "_growth_step": 0, "_hysteresis_step": 0}
        missing = [key for key in _KEYS if key not in state_dict]
        if missing:
            raise CheckpointMismatchError(
                f"The gradient scaler's state lacks {', '.join(missing)}; it has {', '.join(map(str, state_dict))}. "
                "Was it saved by another scaler?"
            )
        scale = float(state_dict["_scale"])
        if not 0 < scale < float("inf"):
            raise CheckpointMismatchError(
                f"The gradient scaler's state has scale {scale}, which is not a positive number."
            )
        self._scale = scale
        self._growth_step = int(state_dict["_growth_step"])
        self._hysteresis_step = int(state_dict["_hysteresis_step"])
