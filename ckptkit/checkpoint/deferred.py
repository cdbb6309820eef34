"""An optimizer's state that is restored later: once the optimizer, and what was added to the model, are there."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from ckptkit.checkpoint.load_plan import LoadOptions
from ckptkit.checkpoint.report import LoadReport
from ckptkit.checkpoint.state import TrainState
from ckptkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DeferredOptimizer"]

_log = logging.getLogger(__name__)


class DeferredOptimizer:
    """Restores the optimizers of a training state from the checkpoint its model was loaded from, once.

    Until then nothing but the address of the checkpoint is held; rotation keeps the checkpoint a run was resumed
    from. Call `apply` before the first step, when parameters that training adds (adapters) are in the model and the
    optimizer was built.
    """

    def __init__(
        self, state: TrainState, options: LoadOptions, restore: Callable[[TrainState, LoadOptions], LoadReport]
    ) -> None:
        self._state: TrainState | None = state
        self._options = dataclasses.replace(options, model="skip", optimizer="restore")
        self._restore: Callable[[TrainState, LoadOptions], LoadReport] | None = restore

    @property
    def pending(self) -> bool:
        """Whether `apply` still has something to do."""
        return self._restore is not None

    def apply(self, state: TrainState | None = None, *, strict: bool = True) -> LoadReport | None:
        """Restore the optimizers; all ranks must call it. The first call only: later ones return None.

        Args:
            state: Model and optimizer as they are now, where they are other objects than at the load.
            strict: The checkpoint's optimizer may not hold parameters that the live one has not. Parameters that
                were added since start without state either way, and are in the report's `missing`.

        Raises:
            CheckpointMismatchError: The state does not fit; nothing was changed, and `apply` may be called again.
        """
        if self._restore is None or self._state is None:
            return None
        whole = state if state is not None else self._state
        if whole.optimizer is None:
            raise UsageError("apply: the training state has no optimizer. Pass TrainState(model=..., optimizer=...).")
        only = TrainState(model=whole.model, optimizer=whole.optimizer, rng=False)
        options = dataclasses.replace(self._options, strict=strict)
        try:
            report = self._restore(only, options)
        finally:
            whole.half_loaded = whole.half_loaded or only.half_loaded
        self._restore = self._state = None
        return report
