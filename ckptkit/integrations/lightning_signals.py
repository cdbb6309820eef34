"""Lets all ranks of a Trainer stop at the same batch when any rank receives SIGTERM."""

from __future__ import annotations

import logging
import signal
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import IterableDataset

from ckptkit.checkpoint.run.coordinator import Coordinator
from ckptkit.errors import RankFailedError
from ckptkit.integrations.lightning_position import FitPosition

_log = logging.getLogger(__name__)
_GATHER_S = 60.0  # how long to wait for the other ranks after an exception


class StopSignal:
    """Replaces the Trainer's handler for SIGTERM while the Trainer runs. All ranks must create this object together.

    Lightning's handler joins a broadcast as soon as a rank receives the signal. If the ranks receive the signal at
    different points of the training, they hang. The handler of this class only records the signal. Between two batches,
    the ranks agree to stop, and then stop in the same way as Lightning. The handler with which Lightning saves and
    requeues a Slurm job also runs only between two batches.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._received = False
        self._requeue = False
        self._validates_together = False
        self._votes = Coordinator()
        self._after_error = Coordinator(timeout_s=_GATHER_S)
        connector = trainer._signal_connector
        connector._sigterm_notifier_fn, connector._slurm_sigusr_handler_fn = self._note, self._note_requeue

    def _note(self, *_: Any) -> None:
        self._received = True

    def _note_requeue(self, *_: Any) -> None:
        self._requeue = True

    def after_batch(self) -> None:
        """Stop, or requeue the job, if any rank has received a signal. Takes one small all-reduce.

        Does nothing in the middle of an optimizer step. Also does nothing once `max_steps` is reached. Lightning then
        calls the end-of-epoch hooks and stops by itself. If the run stopped here instead, these hooks would never be
        called, because a resumed run does not call them.
        """
        loop = self._trainer.fit_loop.epoch_loop
        is_over = 0 <= loop.max_steps <= loop.global_step
        if loop._should_accumulate() or is_over:
            return
        if not self._votes.any(self._received or self._requeue):
            return
        if self._votes.any(self._requeue):
            connector, self._requeue = self._trainer._signal_connector, False
            type(connector)._slurm_sigusr_handler_fn(connector, signal.SIGUSR1, None)
        if self._agreed():
            raise SIGTERMException

    def prepare_validation(self) -> None:
        """Find out whether all ranks have the same number of batches and therefore can agree after each batch."""
        loop = self._trainer.fit_loop.epoch_loop.val_loop
        loaders = loop._combined_loader.flattened
        uncertain = any(isinstance(getattr(loader, "dataset", None), IterableDataset) for loader in loaders)
        counts = self._votes.all_gather(None if uncertain else list(loop.max_batches))
        self._validates_together = None not in counts and all(count == counts[0] for count in counts)

    def in_validation(self) -> None:
        """Stop like `after_batch`, if all ranks have the same number of batches.

        If the numbers differ, or if a rank's model temporarily contains other weights, such as averages, the ranks stop
        after the validation.
        """
        if self._validates_together and self._votes.any(self._received):
            replaced = FitPosition.of(self._trainer).weights_are_replaced()
            if not self._votes.any(replaced) and self._agreed():
                raise SIGTERMException

    def after_epoch(self) -> None:
        """Make Lightning stop if any rank has received SIGTERM.

        Before Lightning stops, it calls the other end-of-epoch hooks.
        """
        self._agreed()

    def _agreed(self) -> bool:
        agreed = self._votes.any(self._received)
        if agreed:
            if self._votes.is_main:
                _log.info("received SIGTERM: stopping at step %d", self._trainer.global_step)
            self._trainer._signal_connector.received_sigterm = True
        return agreed

    def problem(self, exception: BaseException) -> str | None:
        """Return why no checkpoint can be saved after `exception`, or None if one can be saved.

        Waits at most about two minutes for other ranks.
        """
        replaced = FitPosition.of(self._trainer).weights_are_replaced()
        try:
            agreed = isinstance(exception, SIGTERMException)
            others = (self._votes if agreed else self._after_error).all_gather(replaced)
        except RankFailedError:
            return "not all ranks have stopped"
        return "the weights being trained are temporarily replaced" if any(others) else None

    def close(self) -> None:
        """Restore Lightning's signal handlers."""
        connector = self._trainer._signal_connector
        for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
            vars(connector).pop(name, None)
        if self._received and not connector.received_sigterm:
            connector.received_sigterm = True
            _log.warning("received SIGTERM after the last batch: the training was already over.")
        self._votes.close()
        self._after_error.close()
