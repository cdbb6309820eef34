"""Counts backward passes and steps: which backward closes a window, and how many steps a run has taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim import Optimizer

from ckptkit.errors import UsageError

__all__ = ["Window", "Windows", "StepCounter"]


@dataclass(slots=True)
class Window:
    """The backward passes of one model that make one step.

    Attributes:
        size: How many make a full window.
        count: How many there were.
        closed: The last one was there; optimizers may step.
        scale: What their losses were multiplied by, besides 1/size; None: they were run by something else.
        seen: The optimizers that have asked for a step since the last backward.
    """

    size: int
    count: int = 0
    closed: bool = False
    scale: float | None = None
    seen: WeakSet[Optimizer] = field(default_factory=WeakSet)

    @property
    def divisor(self) -> float | None:
        """What gradients are too large by: the mean is over the passes that there were; None: not known here."""
        return None if self.scale is None else self.scale * (self.count / self.size)


class Windows:
    """The current window of each model. Several optimizers may step in one window."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[nn.Module, Window] = WeakKeyDictionary()

    def backward(self, root: nn.Module, size: int, *, last: bool, scale: float) -> Window:
        """Count one backward of `root`, whose loss is multiplied by `scale`; `last` closes the window early.

        Raises:
            UsageError: The window has a backward with another scale: their gradients can't be added.
        """
        window = self._advanced(root, size)
        if window.scale not in (None, scale):
            raise UsageError(
                f"The losses of one window were scaled by {window.scale} and by {scale}, so their gradients can't be "
                "added. Pass the same optimizer to every backward until optimizer_step has stepped."
            )
        window.scale = scale
        window.closed = window.closed or last
        return window

    def step(self, root: nn.Module, size: int, optimizer: Optimizer) -> Window:
        """Return the window that `optimizer` asks to step in.

        Where no backward was counted since it last asked, one was run by other means (a loss of two models): it is
        counted now.
        """
        window = self._of.get(root)
        if window is None or optimizer in window.seen:
            window = self._advanced(root, size)
        window.seen.add(optimizer)
        return window

    def open(self, *roots: nn.Module) -> int:
        """Return how many backward passes (of `roots`; default: of all models) wait for a step that has not come."""
        windows = [window for root, window in self._of.items() if not roots or root in roots]
        return sum(window.count for window in windows if not window.closed)

    def clear(self) -> None:
        """Forget all windows."""
        self._of.clear()

    def _advanced(self, root: nn.Module, size: int) -> Window:
        window = self._of.get(root)
        if window is None or window.closed:
            window = self._of[root] = Window(size)
        window.count += 1
        window.closed = window.count >= size
        window.seen.clear()
        return window


class StepCounter:
    """The steps of a run: those of the optimizer that has taken most, not the sum over all optimizers."""

    def __init__(self) -> None:
        self.total = 0
        self._of: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._base = 0

    def start(self, optimizer: Optimizer) -> None:
        """Let a new optimizer count from here: it may replace another one."""
        self._of[optimizer] = self.total

    def count(self, optimizer: Optimizer) -> None:
        """Count one step of `optimizer`."""
        # One that was not made here starts with the run, beside those that have stepped; alone it goes on.
        before = self._of.get(optimizer, self._base if self._of else self.total)
        self._of[optimizer] = before + 1
        self.total = max(self.total, before + 1)

    def restart(self, total: int) -> None:
        """Go on from `total`, as after a load: with every optimizer."""
        self.total = self._base = total
        self._of.clear()
