"""How a load treats what does not fit, and how much memory it may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckptkit.errors import UsageError
from ckptkit.units import parse_size

__all__ = ["LoadOptions", "Merge"]

Merge = Callable[[Sequence[Any], int, int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a load treats what does not fit.

    Attributes:
        strict: Missing and unexpected keys are errors. Otherwise what fits is loaded and the rest reported.
        include, exclude: Globs, or a predicate, on the FQNs of the models: load these only (adapters, say).
        model: "restore"; "skip" leaves the models as they are: an optimizer alone is loaded.
        optimizer: "restore"; "skip" leaves the optimizer as it is; "deferred" restores it when the report's handle is
            applied.
        convert_dtype: Cast a model tensor whose dtype differs. Otherwise that is an error.
        in_place: Read straight into the model and the optimizer's live state: no second copy of them in memory, and
            faster. All that does not fit is still found first, but damage that is found while reading leaves the state
            half loaded. For a job that ends if its load fails.
        max_memory: How much of a second copy of live tensors may be held until all is checked ("2GB"); of the rest the
            digests are checked first, and it is read again then, straight into the state. None: half of the memory
            that is free, shared by the ranks of this host.
        verify: Compare every slice with its digest; those that no rank needs whole are read once more, each by one
            rank, so that no damage is loaded whatever the world size. "read" compares only what is read whole anyway,
            and reads nothing that is not needed. False trusts storage and writer.
        replicas: What several ranks need alike (replicas of HSDP or DDP): "broadcast": each reads a share of it and
            sends it to the others; "read": each reads all of it. "auto": the first from object stores, where every byte
            comes over the network; the second elsewhere, since files are read faster than they are sent.
        rng_on_resize: The number of ranks changed: "reseed" seeds every rank anew, from the saved state and its rank;
            "keep" leaves the generators alone; "error" refuses.
        per_rank_on_resize: The same for dataloaders and `PerRank` state, unless all ranks saved equal state: "error",
            "keep", or a function (states of all saved ranks, rank, world size) -> this rank's state.
    """

    strict: bool = True
    include: Sequence[str] | Callable[[str], bool] = ()
    exclude: Sequence[str] | Callable[[str], bool] = ()
    model: Literal["restore", "skip"] = "restore"
    optimizer: Literal["restore", "skip", "deferred"] = "restore"
    convert_dtype: bool = False
    in_place: bool = False
    max_memory: int | str | None = None
    verify: bool | Literal["read"] = True
    replicas: Literal["auto", "broadcast", "read"] = "auto"
    rng_on_resize: Literal["reseed", "keep", "error"] = "reseed"
    per_rank_on_resize: Literal["error", "keep"] | Merge = "error"

    @property
    def max_nbytes(self) -> int | None:
        """`max_memory` in bytes."""
        return None if self.max_memory is None else parse_size(self.max_memory)

    @property
    def whole(self) -> bool:
        """Whether models and optimizers are loaded, all of them."""
        return self.model == "restore" and self.optimizer == "restore" and not self.include and not self.exclude

    def __post_init__(self) -> None:
        if self.max_memory is not None:
            parse_size(self.max_memory)
        if self.model not in ("restore", "skip"):
            raise UsageError(f"model={self.model!r}: it is 'restore' or 'skip'.")
        if self.optimizer not in ("restore", "skip", "deferred"):
            raise UsageError(f"optimizer={self.optimizer!r}: it is 'restore', 'skip' or 'deferred'.")
        if self.verify not in (True, False, "read"):
            raise UsageError(f"verify={self.verify!r}: it is True, False or 'read'.")
        if self.replicas not in ("auto", "broadcast", "read"):
            raise UsageError(f"replicas={self.replicas!r}: it is 'auto', 'broadcast' or 'read'.")
        if self.rng_on_resize not in ("reseed", "keep", "error"):
            raise UsageError(f"rng_on_resize={self.rng_on_resize!r}: it is 'reseed', 'keep' or 'error'.")
        if self.per_rank_on_resize not in ("error", "keep") and not callable(self.per_rank_on_resize):
            raise UsageError(f"per_rank_on_resize={self.per_rank_on_resize!r}: it is 'error', 'keep' or a function.")
