"""Counts backward passes and optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

from torch import nn
from torch.optim import Optimizer

from ckptkit.errors import UsageError


def accumulation_steps(train_batch_size: int | None, *, micro: int, world_size: int) -> int:
    """Return how many backward passes each rank makes per optimizer step.

    Args:
        train_batch_size: Samples per optimizer step, over all ranks. None: one backward pass per step.
        micro: Samples per backward pass on one rank.
        world_size: Number of data-parallel ranks.

    Raises:
        UsageError: The sizes do not divide evenly.
    """
    if train_batch_size is None:
        return 1
    steps, rest = divmod(train_batch_size, micro * world_size)
    if rest:
        raise UsageError(
            f"train_batch_size {train_batch_size} is not a multiple of micro_train_batch_size {micro} x {world_size} "
            f"data-parallel ranks = {micro * world_size}."
        )
    return steps


@dataclass(slots=True)
class Window:
    """Counts the backward passes of one model for one optimizer step. These passes are called a window.

    Attributes:
        size: Number of passes in a full window.
        count: Number of passes so far.
        closed: Whether the last pass is done, so that optimizers may step.
        scale: The loss scale of the passes. None if the passes ran outside of FSDPStrategy.
        seen: The optimizers for which a step was requested since the last backward pass.
    """

    size: int
    count: int = 0
    closed: bool = False
    scale: float | None = None
    seen: WeakSet[Optimizer] = field(default_factory=WeakSet)

    @property
    def divisor(self) -> float | None:
        """The divisor that unscales the gradients and averages them over the passes so far. None if `scale` is None."""
        return None if self.scale is None else self.scale * (self.count / self.size)


class Windows:
    """Holds the current `Window` of each model. Several optimizers may step in one window.

    Attributes:
        held: The models whose windows stay open, even if a full window of passes was counted.
    """

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[nn.Module, Window] = WeakKeyDictionary()
        self.held: WeakSet[nn.Module] = WeakSet()

    def backward(self, root: nn.Module, size: int, *, last: bool, scale: float) -> Window:
        """Count one backward pass of `root` with loss scale `scale`. `last` closes the window early.

        Raises:
            UsageError: An earlier pass in this window had a different scale, so the gradients can't be added. Also
                raised if `last` is set while the window is held open.
        """
        if last and root in self.held:
            raise UsageError(
                "backward(last=True) was called in no_sync(), but the last pass before a step reduces gradients. "
                "Call it outside of no_sync()."
            )
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
        """Return the window to which a step of `optimizer` belongs.

        A pass that runs without this class's `backward` (for example, for a loss of two models) is not counted when it
        runs. So if no pass was counted since the optimizer's previous step, this method counts one pass.
        """
        window = self._of.get(root)
        if window is None or optimizer in window.seen:
            window = self._advanced(root, size)
        window.seen.add(optimizer)
        return window

    def open(self, *roots: nn.Module) -> int:
        """Return the number of backward passes in incomplete windows of the models `roots` (default: all models)."""
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
        window.closed = window.count >= size and root not in self.held
        window.seen.clear()
        return window


class StepCounter:
    """Counts a run's steps: the maximum over all optimizers, not the sum."""

    def __init__(self) -> None:
        self.total = 0
        self._of: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._base = 0

    def start(self, optimizer: Optimizer) -> None:
        """Count a new optimizer's steps from the current total, so that a replacement optimizer continues the count."""
        self._of[optimizer] = self.total

    def count(self, optimizer: Optimizer) -> None:
        """Count one step of `optimizer`."""
        # An optimizer that was created outside FSDPStrategy has no count yet. If other optimizers have stepped since
        # the last restart, its count starts from the total at that restart. If not, it starts from the current total.
        before = self._of.get(optimizer, self._base if self._of else self.total)
        self._of[optimizer] = before + 1
        self.total = max(self.total, before + 1)

    def restart(self, total: int) -> None:
        """Set the step count of every optimizer to `total`, for example after a load."""
        self.total = self._base = total
        self._of.clear()
