"""What a conversion did and proved, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ckptkit.offline.plan import Plan
from ckptkit.units import format_duration, format_size

__all__ = ["ConvertReport", "peak_memory"]


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of `convert` and `reshard`.

    Attributes:
        src, dst: As they were given; `opened` is what `src` turned out to be.
        format: Of the source.
        to: What was written.
        plan: What was, or would be, written.
        tensors: How many.
        nbytes, nbytes_read: Written and read.
        checked: Source digests that were checked.
        verified: Tensors of the result that were read again and found equal to the source; None if not asked.
        proved: Sentences, each of which was checked and holds.
        notes: Decisions a person should know.
        seconds: Wall time; 0.0 for a dry run.
        faults: What does not fit the base: a dry run lists it, a real one raises.
        peak_memory: Of this process, resident, in bytes; 0 for a dry run.
    """

    src: str
    dst: str
    opened: str
    format: str
    to: str
    plan: Plan = field(repr=False)
    tensors: int
    nbytes: int
    nbytes_read: int = 0
    checked: int = 0
    verified: int | None = None
    proved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    peak_memory: int = 0
    dry_run: bool = False
    faults: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return what a terminal shows: the notes, what was done, and as the last line what was proved."""
        rate = format_size(int(self.nbytes / self.seconds)) if self.seconds else "0 B"
        done = (
            f"{self.opened} ({self.format}) -> {self.dst} ({self.to}) · {self.tensors} tensors · "
            f"{format_size(self.nbytes)} · {format_duration(self.seconds)} · {rate}/s · "
            f"peak memory {format_size(self.peak_memory)}"
        )
        return [*(f"note: {note}" for note in self.notes), done, self.proof()]

    def proof(self) -> str:
        """Return the line of what was proved."""
        return "proved: " + ", ".join(self.proved)

    def plan_lines(self) -> list[str]:
        """Return what --dry-run prints: every source and its target, what is left over, what is missing."""
        return list(self._plan_lines())

    def _plan_lines(self) -> Iterator[str]:
        yield f"{self.opened} ({self.format}) -> {self.dst} ({self.to})"
        yield from self.plan.lines()
        yield from (f"does not fit: {fault}" for fault in self.faults)
        yield f"{self.tensors} tensors, {len(self.plan.files)} files, {format_size(self.nbytes)}; nothing was written"

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "src", "dst", "opened", "format", "to", "tensors", "nbytes", "nbytes_read", "checked", "verified",
                "seconds", "peak_memory", "dry_run",
            )
        }  # fmt: skip
        document["proved"] = list(self.proved)
        document["notes"] = list(self.notes)
        document["faults"] = list(self.faults)
        document["left_over"] = len(self.plan.leftovers)
        if self.dry_run:
            document["plan"] = self.plan.to_json()
        else:
            document["files"] = {file.path: file.nbytes for file in self.plan.files}
        return document


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes; 0 where the system doesn't tell."""
    try:
        import resource
    except ImportError:
        return 0
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)
