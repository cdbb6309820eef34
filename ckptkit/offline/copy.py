"""Copies a checkpoint of any format, or a whole ckptkit run, byte for byte, from any store to any store."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ckptkit.arguments import Location, location
from ckptkit.catalog.entry import Catalog, CatalogInfo, Digest, Role, SliceArray, TensorEntry
from ckptkit.catalog.targets import Target
from ckptkit.checkpoint.run.address import resolve_url
from ckptkit.checkpoint.run.attempt import write_hint
from ckptkit.checkpoint.run.inventory import Committed, Inventory, list_checkpoints
from ckptkit.checkpoint.run.pins import list_pins, pin_forever, pin_url
from ckptkit.checkpoint.run.unnamed import named_paths, unnamed_files
from ckptkit.digests import SHA256
from ckptkit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    IntegrityError,
    NoSpaceError,
    UsageError,
    command_line,
)
from ckptkit.formats.detect import Source
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.own.record import RECORD_NAME, CommitRecord, record_path, step_of_name
from ckptkit.formats.pickles.zip import file_size
from ckptkit.formats.trainers.steps import parse_step
from ckptkit.offline.conversion import How, carry_out, peak_memory, refusals
from ckptkit.offline.copying.copier import Progress
from ckptkit.offline.copying.plan import OutputFile, Placement, Plan
from ckptkit.offline.copying.resume import left_beside
from ckptkit.offline.gaps import find_gaps
from ckptkit.offline.publish import OutputPlace, is_one_of_many, open_target, options_of_both
from ckptkit.offline.reading import open_pinned, reads_checkpoints, watch
from ckptkit.offline.report import plain
from ckptkit.offline.verify import Check, check_committed, compare_digests, file_problems, recorded, verify
from ckptkit.storage.listing import snapshot
from ckptkit.storage.local import is_directory
from ckptkit.storage.lock import acquire_lease, check_state_directory
from ckptkit.storage.open import open_store
from ckptkit.storage.publish import check_writable
from ckptkit.storage.retry import patient
from ckptkit.storage.store import Store, split_url
from ckptkit.units import counted, first_few, format_duration, format_size, parse_size

SCHEMA = "ckptkit.copy/1"
_PINNED = 64  # maximum number of checkpoints to pin at once; each pin needs a thread that renews it
_MOST_HELD = 64 << 20  # bytes; files up to this size may be held in memory, to be written last
_MARKS = (".metadata", "config.json", "adapter_config.json", "metadata.json", "meta.pt", "latest", ".index.json")
"""Endings of the files by which readers recognize a checkpoint. On an object store, these files are written last."""


@dataclass(frozen=True, slots=True)
class CopiedCheckpoint:
    """The result of copying one checkpoint.

    Attributes:
        src, dst: URLs of the opened checkpoint and of the copy.
        files, nbytes: The number of files of the copy, and its size in bytes.
        nbytes_read: Bytes read from the source.
        digests: Number of source digests that were compared.
        unproved: Number of bytes that were not compared with any digest.
        verified: Whether the copy was read back and found equal to the source. None without `verify`.
        there: Whether `dst` already contained this checkpoint before the copy.
        left_out: Files that were not copied, each with the reason.
        notes: Notes for the user.
        faults: In a dry run, the errors that the real run would raise.
    """

    src: str
    dst: str
    format: str
    files: int
    nbytes: int
    nbytes_read: int = 0
    digests: int = 0
    unproved: int = 0
    verified: bool | None = None
    there: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of `copy`.

    Attributes:
        src, dst: The URLs as given.
        run: Whether a whole run was copied.
        checkpoints: One result per checkpoint, in the order of the run (oldest first).
        left_out: The entries of a run that were not copied, each with the reason.
        pins: Names of the checkpoints whose pins were copied.
        seconds: Wall time. 0.0 for a dry run.
        peak_memory: Peak resident memory of this process in bytes. 0 for a dry run.
        faults: In a dry run, the errors that the real run would raise.
    """

    src: str
    dst: str
    run: bool
    checkpoints: tuple[CopiedCheckpoint, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)
    pins: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    peak_memory: int = 0
    dry_run: bool = False
    faults: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """The number of bytes written. For a dry run, the number of bytes that would be written."""
        return sum(item.nbytes for item in self.checkpoints if not item.there)

    def lines(self) -> list[str]:
        """Return the lines for a terminal: notes, omitted entries, a summary of the copy, and the passed checks."""
        lines = [f"note: {note}" for note in self.notes]
        lines += _lines_of(self.left_out)
        for item in self.checkpoints:
            lines += [f"note: {note}" for note in item.notes]
            if item.left_out:
                why = next(iter(item.left_out.values()))
                lines.append(f"left out of {item.src}: {first_few(list(item.left_out))} ({why})")
            if self.run:
                state = "there already" if item.there else "would be copied" if self.dry_run else "copied"
                lines.append(f"{state:<15}  {item.dst}  {counted(item.files, 'file')}, {format_size(item.nbytes)}")
        if self.dry_run:
            faults = [*(fault for item in self.checkpoints for fault in item.faults), *self.faults]
            lines += [f"would fail: {fault}" for fault in dict.fromkeys(faults)]
            return [*lines, f"{self._counted()}; nothing was written"]
        rate = format_size(int(self.nbytes / self.seconds)) if self.seconds else "0 B"
        facts = [self._counted(), format_duration(self.seconds), f"{rate}/s"]
        facts.append(f"peak memory {format_size(self.peak_memory)}")
        return [*lines, f"{self.src} -> {self.dst} · " + " · ".join(facts), self.proof()]

    def _counted(self) -> str:
        new = [item for item in self.checkpoints if not item.there]
        counts = f"{counted(sum(item.files for item in new), 'file')}, {format_size(self.nbytes)}"
        return f"{counted(len(new), 'checkpoint')}, {counts}" if self.run else counts

    def proof(self) -> str:
        """Return one line that lists the checks that passed."""
        new = [item for item in self.checkpoints if not item.there]
        digests, unproved = sum(item.digests for item in new), sum(item.unproved for item in new)
        facts: list[str] = []
        if new:
            files = counted(sum(item.files for item in new), "file")
            facts = [f"{files}, {format_size(self.nbytes)}, each byte written once"]
        if digests:
            facts.append(f"{counted(digests, 'source digest')} checked")
        if new and all(item.verified for item in new):
            facts.append("the copy is equal to the source")
        if len(new) < len(self.checkpoints):
            old = [item for item in self.checkpoints if item.there]
            how = "verified" if all(item.verified for item in old) else "files and sizes compared"
            facts.append(f"{len(old)} there already, {how}")
        if unproved:
            facts.append(f"not proved: {format_size(unproved)} without a compared digest")
        return "proved: " + "; ".join(facts)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values (schema "ckptkit.copy/1")."""
        return {"schema": SCHEMA, "nbytes": self.nbytes, **plain(self)}


@patient()
def copy(
    src: Location,
    dst: Location,
    *,
    all_files: bool = False,
    allow_pickle: bool = False,
    workers: int = 0,
    max_memory: str | int = "512MB",
    check: bool = True,
    verify: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    src_storage_options: Mapping[str, Any] | None = None,
    dst_storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Copied:
    """Copy the checkpoint at `src`, or all committed checkpoints of the run at `src`, to `dst`.

    Files are copied byte for byte, including the optimizer and the commit record. Each checkpoint appears completely or
    not at all. The oldest checkpoint of a run is copied first, so an interrupted copy is a valid run that lacks the
    newest checkpoints. Repeating the call copies the rest: if the new run already has a checkpoint from the same save,
    that checkpoint is kept. While the copy runs, no job can delete the source or write to the destination. Pins that
    people set are copied.

    Args:
        dst: The directory of the copy. For a single file, the new file or its directory. For a run, the new run's root.
            A directory named after a step, such as step_00001000, must be a copy of that step.
        all_files: Also copy files of a checkpoint's directory that its commit record does not name.
        allow_pickle: The same as in `convert`.
        check: Compare the source's recorded digests while reading.
        verify: Read the copy back and compare it with the source.
        overwrite: Replace the checkpoint at `dst`, as `convert` does. For a run, also replace checkpoints that have the
            same name but were written by a different save.
        dry_run: Only report the files that would be copied, and the errors that the real run would raise.
        workers, max_memory, progress, storage_options: The same as in `convert`.
        src_storage_options, dst_storage_options: Override `storage_options` for the source or the destination.

    Raises:
        CheckpointNotFoundError: `src` contains no checkpoint.
        CheckpointExistsError: `dst` already exists. For a run: a checkpoint of the same name in `dst` is incomplete, or
            from another save.
        CorruptCheckpointError: The source is damaged or incomplete. If the source is a run, all undamaged checkpoints
            were copied.
        UsageError: `dst` is named after a different step, or `src` contains several checkpoints that ckptkit did not
            write.
    """
    src, dst = location("src", src), location("dst", dst)
    there, here = options_of_both(storage_options, src_storage_options, dst_storage_options)
    memory = parse_size(max_memory, "max_memory")
    how = How(workers, memory, check, verify, dry_run, overwrite, there, here, progress)
    reading = ReadOptions(allow_pickle=allow_pickle)
    found = run_at(src, storage_options=there)
    if found is None:
        copied = copy_checkpoint(src, dst, how, reading, all_files=all_files)
        report = Copied(src, dst, False, (copied,), dry_run=dry_run)
    else:
        report = _copy_run(src, dst, found, how, reading, all_files=all_files)
    if dry_run:
        return report
    return replace(report, seconds=time.perf_counter() - how.started, peak_memory=peak_memory())


def run_at(url: str, *, storage_options: Mapping[str, Any] | None = None) -> Inventory | None:
    """Return the inventory of the ckptkit run at `url`. Returns None if `url` is not a run's root directory.

    Raises:
        CheckpointNotFoundError: The run has no committed checkpoint.
    """
    if resolve_url(url, storage_options=storage_options) != url:
        return None
    root = open_store(url, storage_options=storage_options)
    try:
        if root.info(RECORD_NAME) is not None:
            return None
        inventory = list_checkpoints(root)
    except NotADirectoryError:
        return None
    if not inventory.committed and (inventory.in_progress or inventory.abandoned):
        raise CheckpointNotFoundError(
            f"{url} has no committed checkpoint: {'; '.join(_left_out(inventory).values())}. Nothing was copied."
        )
    return inventory if inventory.committed else None


# --- one checkpoint


@reads_checkpoints
def copy_checkpoint(src: str, dst: str, how: How, reading: ReadOptions, *, all_files: bool) -> CopiedCheckpoint:
    """Copy one checkpoint. The source stays pinned until the copy is complete. Raises the same errors as `copy`."""
    source = open_pinned(src, storage_options=how.there, options=reading, together=not how.dry_run)
    what = _contents(source, src, dst, how, all_files=all_files)
    for problem in file_problems(source.store, source.catalog):
        raise IncompleteCheckpointError(f"{problem.message} Nothing of this checkpoint was copied.")
    if how.check:
        check_committed(source)
        for _, message in find_gaps(source.store, source.catalog, quick=True):
            raise IncompleteCheckpointError(
                f"{message} Nothing of this checkpoint was copied. To copy it anyway: --no-check."
            )
    place = _place(what, source.url, dst, how)
    known = recorded(source.store, source.catalog, source.catalog.opaque()) if how.check else None
    if known is not None and known.problems:
        raise IntegrityError(known.problems[0].message)
    inline, apart = _split(known.checks if known is not None else ())
    plan = _plan(what, inline, place.file_name)
    copied = CopiedCheckpoint(
        source.url, dst, source.catalog.info.format, len(plan.files), plan.nbytes, left_out=what.left_out,
        notes=tuple(filter(None, [source.note])),
    )  # fmt: skip
    raw = Source(what.store, plan.catalog, source.url)
    if not what.record:  # a ckptkit checkpoint has digests and never changes, so it needs no watching
        watch(raw)
    if how.dry_run:
        return replace(copied, faults=tuple(refusals(plan, raw, place, check=how.check)))
    for problem in compare_digests(source.store, apart, how.workers, how.max_memory, None):
        raise IntegrityError(problem.message)
    try:
        outcome = carry_out(plan, raw, place, how)
    except IntegrityError as error:
        # The copier's error names only the file. `compare_digests` also names the tensor.
        of_file = [item for item in inline if str(error).startswith(f"{what.prefix}{item.path}:")]
        for problem in compare_digests(source.store, of_file, how.workers, how.max_memory, None):
            raise IntegrityError(problem.message) from error
        raise
    whole = [item for item in apart if item.parts or item.digest.algorithm == SHA256]
    covered = sum(item.nbytes for item in (*inline, *whole))
    return replace(
        copied,
        nbytes_read=outcome.copied.nbytes_read,
        digests=outcome.copied.records + len(apart),
        unproved=max(0, plan.nbytes - covered - len(what.record)),
        verified=None if outcome.verified is None else True,
        notes=(*outcome.copied.notes(), *copied.notes),
    )


@dataclass(frozen=True, slots=True)
class _Contents:
    """The files to copy.

    Attributes:
        store: The store whose root is the copied directory.
        prefix: The directory in `store` from which the catalog was read. "" means the root.
        sizes: File sizes in bytes, by path relative to the root of `store`.
        record: The commit record as bytes. b"" if there is no commit record.
        single: Whether the checkpoint is one file, not a directory.
    """

    store: Store
    prefix: str
    sizes: Mapping[str, int]
    left_out: Mapping[str, str]
    record: bytes = b""
    name: str = ""
    single: bool = False


def _contents(source: Source, src: str, dst: str, how: How, *, all_files: bool) -> _Contents:
    store, catalog = source.store, source.catalog
    if store.info(RECORD_NAME) is not None:  # a ckptkit checkpoint, whose commit record lists its files
        record = store.read(RECORD_NAME)
        stated = CommitRecord.from_json(record, file=f"{source.url}/{RECORD_NAME}")
        others = unnamed_files(store, "", stated)
        sizes = {path: catalog.info.files[path] for path in named_paths(stated)}
        left = dict.fromkeys(others, "not in the commit record; copied only with --all-files")
        if all_files:
            more, left = _readable(snapshot(store), others)
            sizes |= more
        return _Contents(store, "", {**sizes, RECORD_NAME: len(record)}, left, record, stated.name)
    name = source.url.rpartition("/")[2]
    if list(catalog.info.files) == [name] and source.url != store.url:
        return _Contents(store, "", {name: file_size(store, name)}, {}, single=True)
    prefix = _below(source, resolve_url(src, storage_options=how.there), dst, how)
    base = open_store(source.url[: -len(prefix)], storage_options=how.there) if prefix else store
    view = snapshot(base)
    sizes, left = _readable(view, [item.path for item in view.list(recursive=True)])
    return _Contents(base, prefix, sizes, left)


def _readable(store: Store, paths: Iterable[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the sizes of the files to copy, and for every other file the reason why it is not copied.

    Broken links, links that lead out of the directory, and pipes are not copied.
    """
    sizes: dict[str, int] = {}
    left: dict[str, str] = {}
    for path in paths:
        try:
            sizes[path] = file_size(store, path)
        except (CkptkitError, OSError):
            left[path] = "it is not a readable file of this directory"
    return sizes, left


def _below(source: Source, src: str, dst: str, how: How) -> str:
    """Return the subdirectory from which the catalog was read, such as "actor/" for a verl step, or "" for the root.

    Raises:
        UsageError: `src` is a directory with several steps.
    """
    local = split_url(src)[0] in ("file", "local")
    base, opened = (os.path.realpath(split_url(url)[1]) if local else url.rstrip("/") for url in (src, source.url))
    if not source.note or not opened.startswith(f"{base}/"):
        return ""
    parts = opened[len(base) + 1 :].split("/")
    for at, part in enumerate(parts, 1):
        above = "/".join([base, *parts[: at - 1]])
        siblings = open_store(above, storage_options=how.there).list() if parse_step(part) is not None else []
        if sum(parse_step(item.path) is not None for item in siblings) > 1:
            raise UsageError(
                f"{src} contains several checkpoints of another system. Copy one at a time:\n"
                f"  {command_line('copy', f'{above}/{part}', f'{dst}/{part}')}"
            )
    return "/".join(parts) + "/"


def _place(what: _Contents, url: str, dst: str, how: How) -> OutputPlace:
    name = dst.rstrip("/").rpartition("/")[2]
    if what.name and step_of_name(name) is not None and name != what.name:
        raise UsageError(f"{dst} has the name of another step, but the checkpoint is {what.name}. Choose another name.")
    place = open_target(dst, source=url, single_file=False, overwrite=how.overwrite, storage_options=how.here)
    if not what.single:
        return place
    file = next(iter(what.sizes))
    folder, _, last = dst.rpartition("/")
    is_folder = not last or (split_url(dst)[0] in ("file", "local") and os.path.isdir(dst))
    if is_folder or os.path.splitext(last)[1] != os.path.splitext(file)[1]:
        folder, last = dst.rstrip("/"), file
    return replace(place, url=folder or ("/" if dst.startswith("/") else "."), file_name=last, is_file=True)


def _split(checks: Iterable[Check]) -> tuple[list[Check], list[Check]]:
    """Split checks into two lists.

    The first list contains checks of disjoint byte ranges, which are made during the copy. The second list contains all
    other checks.
    """
    inline: list[Check] = []
    apart: list[Check] = []
    by_path: dict[str, list[Check]] = {}
    for item in checks:
        by_path.setdefault(item.path, []).append(item)
    for found in by_path.values():
        plain = [c for c in found if c.codec is None and not c.parts and c.digest.algorithm != SHA256]
        apart += [c for c in found if c.codec is not None or c.parts or c.digest.algorithm == SHA256]
        most = max(Counter(c.digest.algorithm for c in plain).items(), key=lambda pair: pair[1], default=("", 0))[0]
        at = 0
        for item in sorted(plain, key=lambda c: (c.digest.start, -c.digest.nbytes)):
            if item.digest.start < at or item.digest.algorithm != most:
                if item.digest.start + item.digest.nbytes > at:  # covers bytes that no other check covers
                    apart.append(item)
            elif item.digest.nbytes:
                inline.append(item)
                at = item.digest.start + item.digest.nbytes
    return inline, apart


def _plan(what: _Contents, inline: Sequence[Check], file_name: str) -> Plan:
    """Return a plan that copies each file as one tensor of bytes.

    The tensor is split into slices at the offsets at which digests begin and end.
    """
    digests: dict[str, list[Digest]] = {}
    for item in inline:
        digests.setdefault(what.prefix + item.path, []).append(item.digest)
    tensors: dict[str, TensorEntry] = {}
    files, placements = [], []
    for index, (path, size) in enumerate(what.sizes.items()):
        target = file_name or path
        if path == RECORD_NAME and what.record:
            files.append(OutputFile.of_bytes(target, what.record))
            continue
        files.append(OutputFile(target, size))
        if size:
            slices = _slices(path, size, digests.get(path, ()))
            entry = tensors[path] = TensorEntry(path, "uint8", (size,), slices, Role.OTHER)
            placements.append(Placement.whole(Target.of(entry, target), index, 0))
    late = [f.path for f in files if f.path == RECORD_NAME or (f.path.endswith(_MARKS) and f.nbytes <= _MOST_HELD)]
    info = CatalogInfo("files", files=dict(what.sizes))
    return Plan(Catalog(tensors, info=info), tuple(files), tuple(placements), tuple(late))


def _slices(path: str, size: int, digests: Sequence[Digest]) -> SliceArray:
    """Return a file as slices: one slice for each range with a digest, and one for each range without a digest."""
    rows: list[tuple[int, int, int, int]] = []  # start, size in bytes, digest, number of bytes that the digest covers
    at = 0
    for digest in digests:
        if digest.start > at:
            rows.append((at, digest.start - at, 0, 0))
        rows.append((digest.start, digest.nbytes, digest.value, digest.nbytes))
        at = digest.start + digest.nbytes
    if at < size:
        rows.append((at, size - at, 0, 0))
    starts, nbytes = (np.array([row[i] for row in rows], np.int64) for i in (0, 1))
    return SliceArray(
        [path], np.zeros(len(rows), np.int32), starts, nbytes, starts[:, None], nbytes[:, None],
        algorithm=digests[0].algorithm if digests else None,
        digests=np.array([row[2] for row in rows], np.uint64) if digests else None,
        digest_starts=starts if digests else None,
        digest_nbytes=np.array([row[3] for row in rows], np.int64) if digests else None,
    )  # fmt: skip


# --- a run


def _copy_run(src: str, dst: str, inventory: Inventory, how: How, reading: ReadOptions, *, all_files: bool) -> Copied:
    """Copy the checkpoints of a run, the newest last.

    If some checkpoints are damaged, raise after copying all undamaged checkpoints.
    """
    if is_one_of_many():
        raise UsageError(f"{src} is a run, which only one process can copy. Start the command without torchrun.")
    place = open_target(dst, source=src, single_file=False, overwrite=how.overwrite, storage_options=how.here)
    root, here = open_store(src, storage_options=how.there), open_store(dst, storage_options=how.here)
    view = snapshot(here)
    known = {item.name: item for item in list_checkpoints(here, view=view).committed}
    same = {
        item.name: _damage(view, known[item.name]) for item in inventory.committed
        if item.name in known and known[item.name].record.save_id == item.record.save_id
    }  # fmt: skip
    half = {name: why for name, why in same.items() if why}
    todo = [item for item in inventory.committed if same.get(item.name) != ""]
    clashes = [item for item in todo if item.name in known]
    faults = [*_faults(here, dst, todo, clashes, half, overwrite=how.overwrite)]
    stay = [name for name in known if inventory.find(name) is None]
    shown = f"DST also has {first_few(stay)}, which SRC does not have; they stay"
    if not how.dry_run:  # a dry run checks each checkpoint's destination separately
        if faults:
            raise faults[0]
        foreign = {item.path for item in view.list()} - known.keys()
        for name in [item.name for item in todo if item.name in foreign]:
            replace(place, url=f"{place.url.rstrip('/')}/{name}").check_free()
    copies: list[CopiedCheckpoint] = []
    left = _left_out(inventory)
    damaged = {item.path: CorruptCheckpointError(item.reason) for item in inventory.skipped if item.damaged}
    pins = {pin.name: pin.why for pin in list_pins(root) if pin.owner is None}
    with ExitStack() as held:
        pinned = {item.name: held.enter_context(ExitStack()) for item in inventory.committed}
        if not how.dry_run:
            held.callback(acquire_lease(here).release)
            for item in todo[:_PINNED]:
                pin = pin_url(f"{src.rstrip('/')}/{item.path}", why="copy", storage_options=how.there)
                with suppress(CheckpointNotFoundError):  # it was deleted after the listing; reported below
                    pinned[item.name].enter_context(pin)
        total, done = sum(item.record.total_bytes for item in inventory.committed), 0
        for item in inventory.committed:
            at, to = (f"{url.rstrip('/')}/{name}" for url, name in ((src, item.path), (dst, item.name)))
            part = replace(how, progress=_part(how.progress, done, total))
            try:
                if same.get(item.name) == "":
                    copies.append(_found(known[item.name], view, at, to, how))
                else:
                    copies.append(copy_checkpoint(at, to, part, reading, all_files=all_files))
            except CheckpointNotFoundError:
                left[item.name] = "it was deleted while the others were copied"
                continue
            except CorruptCheckpointError as error:
                damaged[item.name] = error
                continue
            finally:
                pinned[item.name].close()
            done += item.record.total_bytes
            if item.name in pins and not how.dry_run:
                pin_forever(to, pins[item.name], storage_options=how.here)
        if copies and not how.dry_run:
            newest = list_checkpoints(here).latest
            write_hint(here, newest.name if newest is not None else "")
    if damaged and not how.dry_run:
        raise _damaged(dst, len(copies), damaged, left) from next(iter(damaged.values()))
    pinned_names = tuple(item.name for item in inventory.committed if item.name in pins)
    faults += damaged.values()
    return Copied(
        src, dst, True, tuple(copies), left, pinned_names, (shown,) if stay else (), dry_run=how.dry_run,
        faults=tuple(map(str, faults)),
    )  # fmt: skip


def _damaged(
    dst: str, copied: int, damaged: Mapping[str, CorruptCheckpointError], left: Mapping[str, str]
) -> CorruptCheckpointError:
    """Return the error of a run whose other checkpoints were copied."""
    name, first = next(iter(damaged.items()))
    more = f" Also not copied: {first_few(list(damaged)[1:], 3)}." if len(damaged) > 1 else ""
    message = f"{name} was not copied; {dst} has {counted(copied, 'other complete checkpoint')}.{more} {first}"
    return type(first)("\n".join([message, *_lines_of(left)]))


def _part(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Return a callback that turns the progress of one checkpoint into progress of the whole run.

    Returns None if `progress` is None.
    """
    if progress is None:
        return None
    return lambda done, _, what: progress(min(before + done, total), total, what)


def _found(item: Committed, view: Store, at: str, to: str, how: How) -> CopiedCheckpoint:
    """Return the result for a checkpoint that the destination already contains.

    With `verify`, first check the checkpoint's digests.

    Args:
        item: The checkpoint in `dst`.
        view: A snapshot of `dst`.

    Raises:
        IntegrityError: The checkpoint in `dst` is damaged.
    """
    asked = how.verify and not how.dry_run
    for problem in verify(to, storage_options=how.here).problems if asked else ():
        raise IntegrityError(f"{to} already exists, but is damaged: {problem.message}")
    form, files = f"ckptkit-{item.record.state_dict_type}", len(item.record.files) + 1
    nbytes = item.record.total_bytes + file_size(view, record_path(item.name))
    return CopiedCheckpoint(at, to, form, files, nbytes, verified=asked or None, there=True)


def _left_out(inventory: Inventory) -> dict[str, str]:
    """Return the run's entries that are not committed checkpoints, each with the reason why it is not copied."""
    found = {item.path: f"{item.name} is being saved by {item.owner}" for item in inventory.in_progress}
    found |= {item.path: f"{item.name} was not committed: its save was killed" for item in inventory.abandoned}
    found |= {item.path: item.reason for item in inventory.skipped if not item.damaged}
    return found | dict.fromkeys(inventory.foreign, "it is not a ckptkit checkpoint")


def _lines_of(left_out: Mapping[str, str]) -> list[str]:
    """Return one line for each entry of a run that was not copied."""
    return [f"left out: {name}: {why}" for name, why in left_out.items()]


def _damage(view: Store, item: Committed) -> str:
    """Return a description of the first missing or truncated file of a committed checkpoint, or ""."""
    for path, file in zip(named_paths(item.record), item.record.files.values(), strict=True):
        found, size = view.info(f"{item.path}/{path}"), file.nbytes
        if found is None:
            return f"{path} is missing"
        if found.kind == "file" and found.size != size:
            return f"{path} has {found.size} bytes, expected {size}"
    return ""


def _faults(
    here: Store,
    dst: str,
    todo: Sequence[Committed],
    clashes: Sequence[Committed],
    half: Mapping[str, str],
    *,
    overwrite: bool,
) -> Iterator[Exception]:
    """Yield the reasons why a run cannot be written to `dst`.

    Args:
        todo: The checkpoints to copy.
        clashes: The checkpoints in `todo` whose names already exist in `dst`.
        half: The checkpoints in `clashes` that are incomplete copies: name -> description of the missing files.
    """
    try:
        if is_directory(here):
            check_writable(here)
        check_state_directory(here)
    except OSError as error:
        yield error
    names = first_few([item.name for item in clashes if item.name not in half])
    for name, why in half.items() if not overwrite else ():
        yield CheckpointExistsError(
            f"{dst}/{name} already exists, but it is incomplete: {why}. Nothing was written. To copy it again, pass "
            "--overwrite."
        )
    if len(clashes) > len(half) and not overwrite:
        yield CheckpointExistsError(
            f"{dst} has {names} from another save; nothing was written. Choose another DST, or replace them with "
            "overwrite=True (--overwrite)."
        )
    held = {pin.name: pin for pin in list_pins(here)} if clashes else {}
    for item in clashes:
        if item.name in held:
            yield CheckpointExistsError(f"{dst}/{item.name} is not overwritten: it is {held[item.name].reason}.")
    free, need = here.free_bytes(), sum(item.record.total_bytes for item in todo)
    if free is None or not todo:
        return
    left = left_beside(f"{here.url}/{todo[0].name}")
    if free < need - (left[1] if left is not None else 0):
        yield NoSpaceError(
            f"{dst} has {format_size(free)} free, but the copy needs {format_size(need)}. Free some space or copy "
            "elsewhere."
        )
