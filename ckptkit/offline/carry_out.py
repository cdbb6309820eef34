"""What convert and reshard do with a plan once it is made: copy, look, prove, seal; what is published is whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ckptkit.offline.chain_copy import Digested
from ckptkit.offline.copy import CopyReport, Progress, execute
from ckptkit.offline.masters import prove_masters
from ckptkit.offline.plan import Plan
from ckptkit.offline.publish import OutputPlace
from ckptkit.offline.reading import check_read_as_seen
from ckptkit.offline.report import ConvertReport, peak_memory

if TYPE_CHECKING:
    from ckptkit.formats.detect import Source
    from ckptkit.formats.layout import CommitRecord
    from ckptkit.offline.seal import Seal
    from ckptkit.storage.store import Store

__all__ = ["How", "Outcome", "carry_out"]


@dataclass(frozen=True, slots=True)
class How:
    """How a plan is carried out: see `convert`."""

    workers: int
    max_memory: int
    check: bool
    verify: bool
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done.

    Attributes:
        masters: Weights that were found equal to their fp32 masters, cast.
        verified: Tensors of the result that were found equal to the source; None if not asked.
        record: Of the checkpoint of ours that was committed; None for another format.
    """

    copied: CopyReport
    masters: int
    verified: int | None
    record: CommitRecord | None

    def told(self, planned: ConvertReport, *, proved: Sequence[str], started: float) -> ConvertReport:
        """Return the report of the plan with what became of it. `started`: of time.perf_counter."""
        return replace(
            planned,
            nbytes_read=self.copied.nbytes_read,
            notes=(*self.copied.notes(), *planned.notes),
            checked=self.copied.records,
            verified=self.verified,
            proved=tuple(proved),
            seconds=time.perf_counter() - started,
            peak_memory=peak_memory(),
        )


def carry_out(
    plan: Plan,
    source: Source,
    place: OutputPlace,
    how: How,
    *,
    masters_of: Collection[str] | None = None,
    look: Callable[[Store], None] | None = None,
    sealing: Seal | None = None,
) -> Outcome:
    """Write a plan and publish it, whole or not at all. Every rank of several calls it.

    Args:
        masters_of: Source tensors among which masters are proved; None for all.
        look: Called once with what was written; raises where it is wrong.
        sealing: What makes the result a committed checkpoint of ours.
    """
    verified = record = None
    with place.stage(plan) as session:

        def copied() -> CopyReport:
            report = execute(
                plan, source.store, session.store, workers=how.workers, max_memory=how.max_memory, check=how.check,
                progress=how.progress, only=session.only, journal=session.journal, ledger=session.ledger,
                digests=sealing is not None,
            )  # fmt: skip
            check_read_as_seen(source)
            return report

        def proved() -> int:
            from ckptkit.offline.prove import prove_equal

            return prove_equal(
                plan, source.store, session.store, max_memory=how.max_memory, workers=how.workers, progress=how.progress
            )

        masters = session.one(lambda: prove_masters(source, masters_of)) if how.check else 0
        copies = session.everyone(copied)
        done = CopyReport.joined(copies)
        if look is not None:
            session.one(partial(look, session.store))
        if how.verify:
            verified = session.one(proved)
        if sealing is not None:
            from ckptkit.offline.seal import seal

            digested = Digested.joined(copy.digested for copy in copies)
            sealed = partial(seal, plan, session.store, sealing, digested=digested, workers=how.workers)
            record = session.one(sealed)
    return Outcome(done, masters, verified, record)
