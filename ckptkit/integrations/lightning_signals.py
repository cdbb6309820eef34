"""Lets all ranks of a Trainer stop at the same batch when any of them receives SIGTERM."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import IterableDataset

from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.errors import RankFailedError

_log = logging.getLogger(__name__)
_GATHER_S = 60.0  # how long to wait for the other ranks after an exception


class StopSignal:
    """Replaces the handler for SIGTERM that the Trainer installs while it runs. All ranks must create it together.

    Lightning's handler takes part in a broadcast, wherever the rank is. Unless all ranks receive the signal at the same
    place of the training, they hang. This one only notes the signal. Between two batches the ranks agree, and then
    Lightning stops all of them, because its `received_sigterm` is True on every rank.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._received = False
        self._validates_together = False
        self._votes = Coordinator()
        self._after_error = Coordinator(timeout_s=_GATHER_S)
        trainer._signal_connector._sigterm_notifier_fn = self._note

    def _note(self, *_: Any) -> None:
        self._received = True

    def agree(self) -> None:
        """Let Lightning stop if any rank has received the signal. Takes one small all-reduce."""
        if self._votes.any(self._received):
            if not self._trainer.received_sigterm and self._votes.is_main:
                _log.info("received SIGTERM: stopping at step %d", self._trainer.global_step)
            self._trainer._signal_connector.received_sigterm = True

    def prepare_validation(self) -> None:
        """Find out whether all ranks have the same number of batches, because then they can agree after each one."""
        loop = self._trainer.fit_loop.epoch_loop.val_loop
        uncertain = any(
            isinstance(getattr(x, "dataset", None), IterableDataset) for x in loop._combined_loader.flattened
        )
        counts = self._votes.all_gather(None if uncertain else list(loop.max_batches))
        self._validates_together = None not in counts and all(count == counts[0] for count in counts)

    def agree_in_validation(self) -> None:
        """Do what `agree` does, if all ranks have the same number of batches."""
        if self._validates_together:
            self.agree()

    def all_stop(self) -> bool:
        """Return whether all ranks call this within a minute: whether all have raised an exception."""
        try:
            self._after_error.all_gather(None)
        except RankFailedError:
            return False
        return True

    def close(self) -> None:
        """Give the handler back to Lightning."""
        vars(self._trainer._signal_connector).pop("_sigterm_notifier_fn", None)
        self._votes.close()
        self._after_error.close()
