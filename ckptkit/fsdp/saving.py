"""Implements FSDPStrategy's checkpoint methods with a CheckpointManager."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import nn

from ckptkit.checkpoint.manager import CheckpointManager
from ckptkit.checkpoint.report import LoadReport, SaveReport
from ckptkit.checkpoint.retention import RetentionPolicy
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import CheckpointNotFoundError, IncompleteCheckpointError, UsageError
from ckptkit.fsdp import meta

if TYPE_CHECKING:
    from ckptkit.keymaps.keymap import NameMap


logger = logging.getLogger(__name__)
_STEP = re.compile(r"(\d+)$")
_GIB = 2**30

StartFresh: TypeAlias = Literal["if_empty", "if_none_committed", "never"]


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """A run's directory and its retention limits. If `max_mem` is a plain number, it is in GiB, as in LightRFT."""

    url: str
    state_dict_type: str = "SHARDED"
    max_num: int | None = None
    max_mem: int | float | str | None = None

    def retention(self) -> RetentionPolicy:
        """Return the limits as a RetentionPolicy."""
        max_mem = self.max_mem
        if isinstance(max_mem, (int, float)) and not isinstance(max_mem, bool):
            max_mem = int(max_mem * _GIB)
        return RetentionPolicy(max_num=self.max_num, max_mem=max_mem)


def step_of(tag: str | None, step: int | None, fallback: int) -> int:
    """Return the step to save under: `step`, or else the number at the end of `tag`, or else `fallback`."""
    if step is not None:
        return step
    found = _STEP.search(tag or "")
    return int(found[1]) if found else fallback


def save_checkpoint(
    options: CheckpointOptions,
    state: TrainState,
    *,
    step: int,
    tag: str | None,
    client_state: Any = None,
    metrics: Mapping[str, float] | None = None,
) -> SaveReport:
    """Save and commit a checkpoint, then delete old ones. A checkpoint of the same step is replaced after the commit.

    Raises:
        SaveError: A part of the model has no values yet, or a rank failed. Nothing was published or deleted.
    """

    def check() -> None:
        for model in state.parts("model").values():
            meta.require_initialized(model)

    with _manager(options) as manager:
        manager.run_on_all(check, f"saving step {step}")
        return manager.save(step, state, tag=tag, client_state=client_state, metrics=metrics, overwrite=True)


def load_checkpoint(
    options: CheckpointOptions,
    state: TrainState,
    *,
    which: str | int = "latest",
    strict: bool = True,
    restore_optimizer: bool = True,
    key_map: NameMap | str | None = None,
    start_fresh: StartFresh = "if_empty",
    waiting: int = 0,
) -> LoadReport | None:
    """Load a committed checkpoint of the run. If there is none, load a checkpoint in a foreign format at the URL.

    Returns None if there is neither. Models on the meta device have values afterwards.

    Args:
        waiting: Number of backward passes on this rank that no optimizer step has used. Any number above 0 is an error.
    """

    def check() -> None:
        if waiting:
            raise UsageError(
                f"load_ckpt: {waiting} backward passes have not been used by a step; the first step after the load "
                "would use their gradients. Pass last=True to the last backward and call optimizer_step before it."
            )

    wanted = "restore" if restore_optimizer else "skip"
    with _manager(options, start_fresh) as manager:
        manager.run_on_all(check, "loading")
        report = manager.load(state, which, strict=strict, optimizer=wanted, key_map=key_map)
        if report is None:
            half = (IncompleteCheckpointError,) if start_fresh == "if_none_committed" else ()
            with contextlib.suppress(CheckpointNotFoundError, *half):
                report = manager.load(state, _as_url(options.url), strict=strict, optimizer=wanted, key_map=key_map)
    if report is None:
        return None
    for model in state.parts("model").values():
        _note_values(model, report)
    return report


@contextlib.contextmanager
def _manager(options: CheckpointOptions, start_fresh: StartFresh = "if_empty") -> Iterator[CheckpointManager]:
    if not options.url:
        raise UsageError("save_ckpt and load_ckpt need a directory, found an empty string.")
    with CheckpointManager(
        options.url,
        retention=options.retention(),
        state_dict_type=options.state_dict_type,
        start_fresh=start_fresh,
    ) as manager:
        yield manager


def _as_url(url: str) -> str:
    return url if "/" in url else f"./{url}"  # a name without a slash would be a checkpoint of this run


def _note_values(model: nn.Module, report: LoadReport) -> None:
    """Record that all tensors have values now, except those that `report` lists as missing, skipped or padded."""
    absent = [*report.missing, *report.skipped, *report.padded]
    left = {name for name in meta.uninitialized(model) if any(key.endswith(name) for key in absent)}
    filled = meta.uninitialized(model) - left
    buffers = meta.unsaved_buffers(model)
    if filled - buffers:
        meta.mark_initialized(model, *(filled - buffers))
    meta.restore_buffers(model)
