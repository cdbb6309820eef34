"""Executes the plan of `convert`, `merge` and `reshard`: copies, checks, verifies, and publishes atomically."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.arguments import check_flags, check_int
from ckptkit.catalog.entry import TensorEntry
from ckptkit.errors import CkptkitError, IncompleteCheckpointError
from ckptkit.formats.pickles.zip import file_size
from ckptkit.offline.copying.copier import Digested, Progress
from ckptkit.offline.copying.coverage import check_plan, used_sources
from ckptkit.offline.copying.execute import CopyReport, execute
from ckptkit.offline.copying.plan import Plan
from ckptkit.offline.gaps import file_sizes
from ckptkit.offline.prove import prove_equal, prove_masters
from ckptkit.offline.publish import Options, OutputPlace, Session
from ckptkit.offline.reading import check_read_as_seen
from ckptkit.offline.report import plain
from ckptkit.offline.verify import check_committed
from ckptkit.units import counted, format_duration, format_size

if TYPE_CHECKING:
    from ckptkit.formats.detect import Source
    from ckptkit.formats.own.record import CommitRecord
    from ckptkit.offline.resharding.seal import Seal
    from ckptkit.storage.store import Store


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of `convert`, `merge` and `reshard`.

    Attributes:
        src, dst: The URLs as given.
        opened: URL of the checkpoint to which `src` resolved.
        format, to: Formats of the source and of the result.
        tensors: Number of tensors.
        nbytes, nbytes_read: Number of bytes written and number of bytes read.
        checked: Number of source digests that were checked.
        verified: Number of tensors that were read back and found equal to the source. None without `verify`.
        proved: Phrases that say what was checked, with counts.
        notes: Decisions of which the user should know.
        infinite: Maps a tensor's name to the number of its finite elements that became infinite in the cast.
        warnings: Likely problems in the result, for example elements that became infinite. Each warning names the
            option that avoids the problem.
        seconds: Wall time. 0.0 for a dry run.
        faults: The errors that the real run would raise. Empty unless this was a dry run.
        serving: One line on how to serve the export with vLLM. "" if vLLM cannot serve the export, or if ckptkit cannot
            tell.
        peak_memory: Peak resident memory of this process in bytes. 0 for a dry run.
    """

    src: str
    dst: str
    opened: str
    format: str
    to: str
    plan: Plan = field(repr=False)  # that was executed, or that a dry run would execute; not public
    tensors: int
    nbytes: int
    nbytes_read: int = 0
    checked: int = 0
    verified: int | None = None
    proved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    infinite: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    peak_memory: int = 0
    dry_run: bool = False
    faults: tuple[str, ...] = ()
    serving: str = ""

    def lines(self) -> list[str]:
        """Return the lines for a terminal: notes, warnings, a summary, and a line on what was checked."""
        rate = format_size(int(self.nbytes / self.seconds)) if self.seconds else "0 B"
        done = (
            f"{self.opened} ({self.format}) -> {self.dst} ({self.to}) · {counted(self.tensors, 'tensor')} · "
            f"{format_size(self.nbytes)} · {format_duration(self.seconds)} · {rate}/s · "
            f"peak memory {format_size(self.peak_memory)}"
        )
        said = [*(f"note: {note}" for note in self.notes), *(f"warning: {text}" for text in self.warnings)]
        return [*said, done, self.proof()]

    def proof(self) -> str:
        """Return one line that lists the checks that passed."""
        return "proved: " + "; ".join(self.proved)

    def plan_lines(self) -> list[str]:
        """Return the lines for --dry-run: the plan, notes, the errors that a real run would raise, and a summary."""
        return [
            f"{self.opened} ({self.format}) -> {self.dst} ({self.to})",
            *self.plan.lines(),
            *(f"note: {note}" for note in self.notes if note not in self.plan.notes),
            *(f"would fail: {fault}" for fault in self.faults),
            f"{counted(self.tensors, 'tensor')}, {counted(len(self.plan.files), 'file')}, "
            f"{format_size(self.nbytes)}; nothing was written",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values (schema "ckptkit.convert/1")."""
        names = (
            "src", "dst", "opened", "format", "to", "tensors", "nbytes", "nbytes_read", "checked", "verified",
            "seconds", "peak_memory", "dry_run", "proved", "notes", "warnings", "infinite", "faults",
        )  # fmt: skip
        document: dict[str, Any] = {name: plain(getattr(self, name)) for name in names}
        document["left_over"] = len(self.plan.leftovers)
        if self.dry_run:
            document["plan"] = self.plan.to_json()
        else:
            document["files"] = {file.path: file.nbytes for file in self.plan.files}
        return document


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes, or 0 if unknown."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True, slots=True)
class How:
    """The options that `convert`, `merge`, `reshard` and `copy` share. See `convert` for their meaning.

    Attributes:
        there: Storage options of the source.
        here: Storage options of the destination.
        started: The value of time.perf_counter at the start of the command.
    """

    workers: int
    max_memory: int
    check: bool
    verify: bool
    dry_run: bool
    overwrite: bool
    there: Options | None
    here: Options | None
    progress: Progress | None
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        check_int("workers", self.workers, least=0)
        check_flags(check=self.check, verify=self.verify, dry_run=self.dry_run, overwrite=self.overwrite)


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of executing a plan.

    Attributes:
        masters: Number of fp32 master weights that were cast and compared with the model's weights. All were equal.
        looked: The phrase that the callback `look` returned (see `carry_out`). "" if there was no callback.
        verified: Number of written tensors that were found equal to the source. None without `verify`.
        record: The result's commit record. None if the result is not a ckptkit checkpoint.
    """

    copied: CopyReport
    masters: int
    looked: str
    verified: int | None
    record: CommitRecord | None


def conclude(
    planned: ConvertReport,
    source: Source,
    place: OutputPlace,
    how: How,
    *,
    compared: str = "",
    masters_of: Collection[str] | None = None,
    look: Callable[[Store], str] | None = None,
    sealing: Seal | None = None,
) -> ConvertReport:
    """Execute the plan in `planned`, and return the complete report.

    For a dry run, execute nothing, and only add to the report the errors that the real run would raise.

    Args:
        compared: The model with which the plan's names and shapes were compared. "" if there was no comparison.
        masters_of, look, sealing: See `carry_out`.
    """
    if how.dry_run:
        check_plan(planned.plan)
        found = refusals(planned.plan, source, place, check=how.check)
        return replace(planned, faults=(*planned.faults, *found))
    outcome = carry_out(planned.plan, source, place, how, masters_of=masters_of, look=look, sealing=sealing)
    copied, record = outcome.copied, outcome.record
    facts = [str(copied.covered)]
    if copied.records:
        facts.append(f"{counted(copied.records, 'source digest')} checked")
    elif not how.check:
        facts.append("source digests not checked (--no-check)")
    if outcome.masters:
        facts.append(f"{counted(outcome.masters, 'weight')} equal to the cast fp32 master")
    facts += [f"names and shapes match {compared}"] if compared else []
    facts += [outcome.looked] if outcome.looked else []
    if outcome.verified is not None:
        facts.append(f"{outcome.verified}/{planned.tensors} tensors equal to the source")
    if record is not None:
        facts.append(f"committed as step {record.step} of {counted(record.world_size, 'rank')}")
    return replace(
        planned,
        nbytes_read=copied.nbytes_read,
        notes=(*copied.notes(), *planned.notes),
        infinite={name: count for (name, _), count in copied.infinite.items()},
        warnings=copied.warnings(),
        checked=copied.records,
        verified=outcome.verified,
        proved=tuple(facts),
        seconds=time.perf_counter() - how.started,
        peak_memory=peak_memory(),
    )


def carry_out(
    plan: Plan,
    source: Source,
    place: OutputPlace,
    how: How,
    *,
    masters_of: Collection[str] | None = None,
    look: Callable[[Store], str] | None = None,
    sealing: Seal | None = None,
) -> Converted:
    """Execute a plan and publish the result atomically. If there are several ranks, all must call this.

    Args:
        masters_of: The source tensors to compare with their fp32 master weights. None means all tensors.
        look: A callback that checks the written files. It raises if the files are wrong, and returns a phrase that says
            what was checked.
        sealing: The fields of the manifest and the commit record, if the result is a ckptkit checkpoint.
    """

    def copy(session: Session) -> CopyReport:
        report = execute(
            plan, source.store, session.store, workers=how.workers, max_memory=how.max_memory, check=how.check,
            progress=how.progress, files=session.files, journal=session.journal, ledger=session.ledger,
            digests=sealing is not None,
        )  # fmt: skip
        for item in source.checkpoints:
            check_read_as_seen(item)
        return report

    looked, masters, verified, record = "", 0, None, None
    with place.stage(plan) as session:
        for item in source.checkpoints if how.check else ():
            session.one(partial(check_committed, item))
            masters += session.one(partial(prove_masters, item, masters_of if item is source else None))
        copies = session.everyone(partial(copy, session))
        if look is not None:
            looked = session.one(partial(look, session.store))
        if how.verify:
            prove = partial(prove_equal, max_memory=how.max_memory, workers=how.workers, progress=how.progress)
            verified = session.one(partial(prove, plan, source.store, session.store))
        if sealing is not None:
            from ckptkit.offline.resharding.seal import seal

            digested = Digested.joined(copy.digested for copy in copies)
            seal_it = partial(seal, digested=digested, workers=how.workers)
            record = session.one(partial(seal_it, plan, session.store, sealing))
    return Converted(CopyReport.joined(copies), masters, looked, verified, record)


# --- The dry run: finds the errors that the real run would raise. Writes nothing.


def refusals(plan: Plan, source: Source, place: OutputPlace, *, check: bool) -> Iterator[str]:
    """Yield, for a dry run, the reasons why the real run would fail.

    The run would fail if DST exists, is not writable or has too little space, or if source files are missing or
    truncated. With `check`, the run would also fail if a committed source file is missing or has a wrong size, or if a
    file without tensors has a wrong digest. Does not test whether an object store accepts writes.
    """
    damaged = False
    for item in source.checkpoints if check else ():
        for fault in _fault_of(partial(check_committed, item)):
            damaged = True
            yield fault
    if not damaged:  # if it is damaged, check_committed has already named the missing files
        used = [plan.catalog.tensors[key] for key in used_sources(plan)]
        yield from _fault_of(partial(check_source_files, source.store, used))
    yield from _fault_of(partial(place.check, plan))


def _fault_of(refuse: Callable[[], None]) -> Iterator[str]:
    try:
        refuse()
    except (CkptkitError, OSError) as error:
        yield str(error)


def check_source_files(store: Store, entries: Iterable[TensorEntry]) -> None:
    """Raise if a file with data of `entries` is missing or truncated. Call this before anything is written.

    Raises:
        IncompleteCheckpointError: The message names the file, and the ranks that wrote it.
    """
    ranks: dict[str, set[int]] = {}
    ends: dict[str, int] = {}
    for entry in entries:
        slices = entry.slices
        if slices.opaque:  # already checked when the metadata was read
            continue
        records = slices.records()
        for path, start, nbytes in records:
            end = 0 if slices.codecs else start + nbytes
            if ends.setdefault(path, end) < end:
                ends[path] = end
        if slices.ranks is not None:
            for (path, _, _), rank in zip(records, slices.ranks.tolist(), strict=True):
                ranks.setdefault(path, set()).add(rank)
    there = file_sizes(store, {path.rpartition("/")[0] for path in ends})
    for path, end in ends.items():
        size = there.get(path, -1)
        if size < 0:  # a web server's listing has no sizes
            with contextlib.suppress(FileNotFoundError):
                size = file_size(store, path)
        if size < end:
            whose = sorted(rank for rank in ranks.get(path, ()) if rank >= 0)
            owner = f" (written by rank {', '.join(map(str, whose))})" if whose else ""
            what = "is missing" if size < 0 else f"has {size} bytes, expected at least {end}"
            raise IncompleteCheckpointError(f"{store.url}/{path}{owner} {what}. Nothing was written.")
