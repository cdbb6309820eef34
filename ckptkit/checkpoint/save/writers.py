"""How the tensors of a captured state become files: one plan a state-dict type, all with the same four verbs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ckptkit.checkpoint.state.train_state import Captured
from ckptkit.checkpoint.state.values import decode

if TYPE_CHECKING:
    import torch

    from ckptkit.formats.dcp.plan import ShardedPlan
    from ckptkit.formats.own.record import FileRecord
    from ckptkit.storage.store import Store

__all__ = ["Report", "ShardedTensors", "TensorPlan", "WrittenTensors", "load_writers"]

Report = Callable[[str, float, int], None]
"""Gets (phase, seconds, bytes)."""


@dataclass(frozen=True, slots=True)
class WrittenTensors:
    """What this rank wrote: `part` is what rank 0 must know of it."""

    part: bytes
    files: Mapping[str, FileRecord]


class TensorPlan(Protocol):
    """What this rank contributes to a save.

    Attributes:
        tensors: The memory it contributes; a stager copies these, nothing else.
        nbytes: About how much it will write.
        signature: Equal on all ranks that agree on what they hold in common.
        reused: It is laid out as the one before: most likely, agreeing with the other ranks changes nothing.
    """

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def signature(self) -> bytes: ...
    @property
    def reused(self) -> bool: ...

    def settle(self, signatures: Sequence[bytes], all_gather: Callable[[bytes], list[bytes]]) -> TensorPlan:
        """Return the plan that fits what the other ranks hold. Collective where signatures are new."""

    def write(
        self, store: Store, tensors: Sequence[torch.Tensor] | None, *, sync: bool, report: Report
    ) -> WrittenTensors:
        """Write this rank's files; `tensors` are copies of its own, in its order, None for the live ones."""

    def index(
        self,
        parts: Sequence[bytes],
        store: Store,
        *,
        save_id: str,
        extra: Mapping[str, Any],
        sync: bool,
        report: Report,
    ) -> Mapping[str, FileRecord]:
        """Write what describes all parts, on rank 0; return every file of all ranks."""


@dataclass(frozen=True, slots=True)
class ShardedTensors:
    """SHARDED: standard DCP files."""

    plan: ShardedPlan

    @classmethod
    def of(
        cls, captured: Captured, rank: int, world_size: int, previous: object, *, copied: bool = False
    ) -> ShardedTensors:
        """Return the plan for a captured state. No communication.

        Args:
            copied: Its tensors are copied at once, and `write` gets the copies: it looks at what was left out.
        """
        from ckptkit.formats.dcp.plan import plan_sharded

        last = previous.plan if isinstance(previous, ShardedTensors) else None
        state_dict, private = dcp_state_dict(captured)
        return cls(
            plan_sharded(state_dict, rank=rank, world_size=world_size, previous=last, private=private, copied=copied)
        )

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return self.plan.tensors

    @property
    def nbytes(self) -> int:
        return self.plan.nbytes

    @property
    def signature(self) -> bytes:
        return self.plan.signature

    @property
    def reused(self) -> bool:
        return self.plan.reused

    def settle(self, signatures: Sequence[bytes], all_gather: Callable[[bytes], list[bytes]]) -> ShardedTensors:
        return replace(self, plan=self.plan.settle(signatures, all_gather))

    def write(
        self, store: Store, tensors: Sequence[torch.Tensor] | None, *, sync: bool, report: Report
    ) -> WrittenTensors:
        from ckptkit.checkpoint.save.writer_process import SharedSnapshot
        from ckptkit.formats.dcp.files import write_records
        from ckptkit.formats.dcp.write import write_part

        if tensors is not None:
            self.plan.places.confirm()
        write = tensors.writer.write_records if isinstance(tensors, SharedSnapshot) else write_records
        part = write_part(self.plan, store, tensors=tensors, sync=sync, report=report, write=write)
        return WrittenTensors(part.to_bytes(), part.files)

    def index(
        self,
        parts: Sequence[bytes],
        store: Store,
        *,
        save_id: str,
        extra: Mapping[str, Any],
        sync: bool,
        report: Report,
    ) -> Mapping[str, FileRecord]:
        from ckptkit.formats.dcp.write import write_index

        return write_index(parts, store, save_id=save_id, extra=extra, sync=sync, report=report).files


def load_writers() -> None:
    """Import what the first save needs, now: training does not stand still for it then."""
    for name in ("plan", "write", "index"):
        importlib.import_module(f"ckptkit.formats.dcp.{name}")


def dcp_state_dict(captured: Captured) -> tuple[dict[str, Any], set[str]]:
    """Return a captured state as a state dict for DCP, and the keys that only this rank has.

    Nested as torch's own `get_state_dict` nests it, so that plain DCP restores a model and an optimizer from it.
    Tied weights stand under each of their names, as in `Module.state_dict`.
    """
    nested: dict[str, Any] = {name: dict(tensors) for name, tensors in captured.models.items()}
    for name, taken in captured.optimizers.items():
        states: dict[str, dict[str, Any]] = {}
        for (fqn, state), tensor in taken.tensors.items():
            states.setdefault(fqn, {})[state] = tensor
        for fqn, values in taken.tree["values"].items():
            states.setdefault(fqn, {}).update({k: v for k, v in values.items() if not isinstance(v, (dict, list))})
        groups = [
            # torch asks for names where the optimizer that it loads into was given named parameters.
            {key: decode(value, captured.loose.__getitem__) for key, value in group.items()}
            | {"param_names": group["params"]}
            for group in taken.tree["param_groups"]
        ]
        nested[name] = {"state": states, "param_groups": groups, **({"master": taken.masters} if taken.masters else {})}
    loose = captured.loose
    if not nested.keys().isdisjoint(loose):
        loose = {key: tensor for key, tensor in loose.items() if key not in nested}
    return {**nested, **loose}, captured.own - nested.keys()
