"""Defines the options of a load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ckptkit.arguments import check_flags, wrong
from ckptkit.checkpoint.state.train_state import Merge
from ckptkit.errors import UsageError
from ckptkit.units import parse_size

if TYPE_CHECKING:
    from ckptkit.keymaps.keymap import NameMap


_CHOICES: Mapping[str, tuple[object, ...]] = {
    "model": ("restore", "skip"),
    "optimizer": ("restore", "skip", "deferred"),
    "verify": (True, False, "read"),
    "replicas": ("auto", "broadcast", "read"),
    "rng_on_resize": ("reseed", "keep", "error"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of a load.

    Attributes:
        strict: Raise if keys are missing or unexpected. False: load the matching keys and report the others.
        include, exclude: Globs for the models' FQNs, or a predicate, to load only some parameters, such as adapters.
            With `strict`, a glob that matches nothing is an error.
        model: "restore" loads the models. "skip" leaves the models unchanged, for example to load only an optimizer.
        optimizer: "restore" loads the optimizer. "skip" leaves the optimizer unchanged. "deferred" lets you restore the
            optimizer later, with the handle in the report.
        key_map: A map from the checkpoint's names to the model's: a built-in name, a TOML or JSON file, or a NameMap.
            With a key map, only weights are loaded, and everything else is left unchanged. If the state has an
            optimizer, optimizer="skip" is required.
        convert_dtype: Cast model tensors whose dtype differs. Optimizer states that were saved in the same dtype as
            their weight are cast, too. If False, a different dtype is an error.
        atomic: Change nothing until everything is read and checked, for a job that continues after a failed load. Needs
            memory for a second copy. By default, only keys, shapes and dtypes are checked before anything is changed.
            Then tensors are read straight into model and optimizer, and damage found while reading leaves the state
            half loaded.
        max_memory: With `atomic`: the largest second copy allowed ("2GB"). The load raises if it needs more. None: this
            rank's share of the host's free memory.
        verify: True checks every slice against its digest. Slices that no rank reads completely are read once more, by
            one rank, so that damage is found on any world size. "read" checks only slices that are read completely
            anyway, without extra reads. False checks no weights.
        replicas: How to read data that several ranks need (HSDP, DDP). "broadcast": each rank reads a share and sends
            it to the others. "read": each rank reads everything. "auto": "broadcast" from object stores, where reads
            use the network; "read" from file systems, where reading is faster than sending.
        rng_on_resize: What to do with random number generators if the number of ranks changed. "reseed": seed each rank
            from the saved state and its rank. "keep": leave them unchanged. "error": raise.
        per_rank_on_resize: What to do with the states of dataloaders and `PerRank` values if the number of ranks
            changed. A function takes (states of all saved ranks, rank, world size) and returns this rank's state.
            "error" and "keep" restore a state on every rank if it is equal on all saved ranks. If the saved states
            differ, "error" raises, and "keep" leaves the live state unchanged. This option does not apply to objects
            that have a `merge_ranks` method (see `TrainState`).
    """

    strict: bool = True
    include: Sequence[str] | Callable[[str], bool] = ()
    exclude: Sequence[str] | Callable[[str], bool] = ()
    model: Literal["restore", "skip"] = "restore"
    optimizer: Literal["restore", "skip", "deferred"] = "restore"
    key_map: NameMap | str | None = None
    convert_dtype: bool = False
    atomic: bool = False
    max_memory: int | str | None = None
    verify: bool | Literal["read"] = True
    replicas: Literal["auto", "broadcast", "read"] = "auto"
    rng_on_resize: Literal["reseed", "keep", "error"] = "reseed"
    per_rank_on_resize: Literal["error", "keep"] | Merge = "error"

    def complete(self, missing: Sequence[str]) -> list[str]:
        """Return which of "model" and "optimizer" these options load completely.

        `missing`: keys not in the checkpoint.
        """
        if missing or self.include or self.exclude:
            return []
        return [kind for kind in ("model", "optimizer") if getattr(self, kind) == "restore"]

    def __post_init__(self) -> None:
        if self.max_memory is not None:
            parse_size(self.max_memory, "max_memory")
            if not self.atomic:
                raise UsageError("max_memory= limits the second copy that atomic=True makes. Pass atomic=True, too.")
        check_flags(strict=self.strict, convert_dtype=self.convert_dtype, atomic=self.atomic)
        for name in ("include", "exclude"):
            value = getattr(self, name)
            if not callable(value) and not isinstance(value, Iterable):
                raise wrong(name, value, "globs of FQNs, such as ['*.lora_*'], or a function of an FQN")
        for name, (*others, last) in _CHOICES.items():
            value = getattr(self, name)
            if value not in (*others, last):
                raise UsageError(f"{name}={value!r}: expected {', '.join(map(repr, others))} or {last!r}.")
        if self.key_map is not None and (self.model == "skip" or self.optimizer == "deferred"):
            raise UsageError("key_map= loads weights only: leave model='restore', and pass optimizer='skip'.")
        if self.per_rank_on_resize not in ("error", "keep") and not callable(self.per_rank_on_resize):
            raise UsageError(f"per_rank_on_resize={self.per_rank_on_resize!r}: expected 'error', 'keep' or a function.")


def load_options(options: LoadOptions | None, overrides: Mapping[str, Any]) -> LoadOptions:
    """Return `options` with the fields in `overrides` replaced. Raises UsageError if a field is unknown."""
    unknown = [name for name in overrides if name not in LoadOptions.__dataclass_fields__]
    if unknown:
        known = ", ".join(LoadOptions.__dataclass_fields__)
        raise UsageError(f"load has no option {unknown[0]!r}. Known: {known}.")
    return replace(options or LoadOptions(), **overrides)
