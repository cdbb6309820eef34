"""Checks that a checkpoint is complete and undamaged: files, sizes, coverage, and every recorded digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from ckptkit.arguments import Location, check_flags, check_int, location
from ckptkit.catalog.entry import Catalog, Codec, Digest, ObjectEntry
from ckptkit.catalog.tiles import not_in_rows
from ckptkit.digests import CRC, DIGEST, SHA256, hash_of, mismatch
from ckptkit.errors import (
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    IntegrityError,
    StorageError,
    UnsafePathError,
    UnsafePickleError,
    UnsupportedFormatError,
)
from ckptkit.formats.detect import Source
from ckptkit.formats.hf.side_files import file_names
from ckptkit.formats.options import ReadOptions
from ckptkit.formats.own.outline import PREFIX, Part, outline, parts_of, spares_of
from ckptkit.formats.own.reader import OBJECTS_NAME
from ckptkit.formats.own.record import MANIFEST_NAME, RECORD_NAME
from ckptkit.formats.pickles.objects import decode_record, read_object
from ckptkit.formats.pickles.zip import Archive, file_size
from ckptkit.formats.state_names import OPTIMIZER_FILE, STATE_FILE
from ckptkit.formats.torch_save import read_torch_file
from ckptkit.offline.export.checksums import SUMS_NAME, read_checksums
from ckptkit.offline.gaps import find_gaps
from ckptkit.offline.reading import check_still_there, open_pinned, reads_checkpoints, records_of
from ckptkit.offline.report import plain
from ckptkit.storage.coalesce import BlockReader
from ckptkit.storage.pool import WorkerPool
from ckptkit.storage.retry import patient
from ckptkit.storage.store import Store
from ckptkit.units import counted, first_few, format_size, parse_size

SCHEMA = "ckptkit.verify/1"
_CHUNK = 4 << 20
_BATCH, _MOST = 4 << 20, 256  # maximum bytes and maximum number of checks per task

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in a file, and the affected tensor. The tensor is "" if the problem affects the whole file."""

    path: str
    tensor: str
    message: str


class UnreadableFile(Problem):
    """A file that could not be read because of permissions or a storage error. The file may be undamaged."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of `verify`: the checks that were made, and the problems that were found.

    docs/json.md explains the fields.
    """

    url: str
    note: str = ""
    format: str = ""
    step: int | None = None
    quick: bool = False
    files: int = 0
    tensors: int = 0
    digests: int = 0  # number of digests compared
    checked_bytes: int = 0  # number of bytes that the digests cover; a byte with two digests counts once
    unproved_bytes: int = 0  # number of tensor bytes without a recorded digest
    unproved_files: tuple[str, ...] = ()  # the files that contain tensor bytes without a digest
    algorithms: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    doubt: str = ""  # what the checkpoint's files cannot prove
    uninterpreted: Mapping[str, str] = field(default_factory=dict)  # tensor of an unknown class -> why it is not read

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def summary(self) -> str:
        """Return one line that says what was verified and what could not be verified."""
        if self.problems:
            if all(isinstance(problem, UnreadableFile) for problem in self.problems):
                return f"not verified: {counted(len(self.problems), 'file')} of {self.url} can't be read"
            return f"damaged: {counted(len(self.problems), 'problem')} in {self.url}"
        parts = [counted(self.files, "file"), f"{counted(self.tensors, 'tensor')} complete"]
        if self.digests:
            read = format_size(self.checked_bytes)
            parts.append(f"{counted(self.digests, 'digest')} equal ({', '.join(self.algorithms)}, {read})")
        elif self.quick:
            parts.append("contents not read (--quick)")
        if self.unproved_bytes and not self.quick:
            parts.append(
                f"not proved: {format_size(self.unproved_bytes)} in {first_few(self.unproved_files, 3)} without a "
                "recorded digest (sizes and coverage are correct)"
            )
        if self.doubt:
            parts.append(f"not proved: {self.doubt}")
        if self.uninterpreted:
            checked = "only their presence was checked" if self.quick else "only their CRC-32 was checked"
            parts.append(f"{counted(len(self.uninterpreted), 'record')} could not be interpreted ({checked})")
            return "intact as far as it can be checked: " + ", ".join(parts)
        return "ok: " + ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values (schema "ckptkit.verify/1")."""
        return {"schema": SCHEMA, "ok": self.ok, **plain(self)}


@dataclass(frozen=True, slots=True)
class Check:
    """A digest to compare.

    The digest covers a byte range of a file or, if there is a codec, of a decoded record.

    Attributes:
        parts: Byte ranges of the file that are not read for this digest, because they have digests of their own. This
            digest covers those digests instead of the bytes.
    """

    path: str
    digest: Digest
    codec: Codec | None
    names: tuple[str, ...]
    parts: Sequence[Part] = ()

    @property
    def nbytes(self) -> int:
        """The number of bytes to read."""
        return self.digest.nbytes - sum(length for _, length, _ in self.parts)

    @property
    def range_in_file(self) -> tuple[str, int, int]:
        """Path of the file, and start and stop of the byte range that is checked. The range contains all `parts`."""
        start, nbytes = (self.codec or self.digest).start, (self.codec or self.digest).nbytes
        return self.path, start, start + nbytes


@reads_checkpoints
@patient()
def verify(
    url: Location,
    *,
    quick: bool = False,
    workers: int = 0,
    max_memory: str | int = "512MB",
    storage_options: Mapping[str, Any] | None = None,
    options: ReadOptions | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check the checkpoint at `url` and return a report. Reads the data once, and changes nothing.

    A checkpoint is complete if every file exists with its full size, and every tensor element is in exactly one slice
    (or in complete replicas of that slice). The checkpoint is undamaged if all recorded digests match. ckptkit
    checkpoints record one digest per slice and per file. Others may have CRC-32s (zip files) or SHA256SUMS.

    Args:
        quick: Read only metadata, and skip the digests of files that contain tensors.
        workers: Number of worker threads. 0 means 4.
        max_memory: Maximum data in memory: bytes, or a string such as "512MB".
        storage_options: Options for the fsspec file system of a remote URL.
        options: Information that the files do not contain; see `ReadOptions`.
        progress: Called with (bytes checked, bytes in all, path of the file).

    Raises:
        CkptkitError: The checkpoint cannot be opened. The message names the file and the problem.
    """
    check_flags(quick=quick)
    check_int("workers", workers, least=0)
    limit = parse_size(max_memory, "max_memory")
    source = open_pinned(location("url", url), storage_options=storage_options, options=options)
    store, catalog = source.store, source.catalog
    uninterpreted = dict(catalog.info.extra.get("opaque", {})) if quick else catalog.opaque()
    lacking = [Problem(path, "", message) for path, message in find_gaps(store, catalog, quick=quick)]
    problems = [*file_problems(store, catalog)]
    for entry in not_in_rows(list(catalog.in_parts())):
        try:
            entry.check_coverage()
        except (CorruptCheckpointError, IncompleteCheckpointError) as error:
            problems.append(Problem("", entry.name, str(error)))
    problems += lacking
    checks, cut, bare = _state_checks(source)
    problems += cut
    state = {check.path for check in checks} | bare.keys()
    unproved: Mapping[str, int] = {}
    if quick:
        checks = []
        problems += _sums(store, catalog)[1]
        gone = {p.path for p in problems if not p.tensor}
        few = [check for check in _beside_tensors(catalog) if check.path not in gone]
        problems += compare_digests(store, few, workers, limit, progress)
    else:
        known = recorded(store, catalog, uninterpreted)
        unproved, problems = {**known.unproved, **bare}, [*problems, *known.problems]
        gone = {p.path for p in problems if not p.tensor}
        checks = [check for check in (*known.checks, *checks) if check.path not in gone]
        unreadable: set[str] = set()
        for found in compare_digests(store, checks, workers, limit, progress):
            names = _tensors_of(catalog, found.path) if found.path in known.sums and not found.tensor else ""
            whole = found
            if isinstance(found, UnreadableFile):  # one problem per file
                if found.path in unreadable:
                    continue
                unreadable.add(found.path)
                whole, names = replace(found, tensor=""), _tensors_of(catalog, found.path)
            problems.append(replace(whole, message=f"{found.message} It contains {names}.") if names else whole)
    if problems:
        check_still_there(source)
    return VerifyReport(
        url=source.url,
        note=source.note or "",
        format=catalog.info.format,
        step=catalog.info.step,
        quick=quick,
        files=len(catalog.info.files) + len(state),
        tensors=len(catalog.tensors),
        digests=len(checks),
        checked_bytes=_covered_bytes(checks),
        unproved_bytes=sum(unproved.values()),
        unproved_files=tuple(unproved),
        algorithms=tuple(sorted({check.digest.algorithm for check in checks})),
        problems=tuple(problems),
        doubt=str(catalog.info.extra.get("unproved", "")),
        uninterpreted=uninterpreted,
    )


def _covered_bytes(checks: Iterable[Check]) -> int:
    """Return the number of file bytes that at least one digest covers."""
    total, last, end = 0, "", 0
    for path, start, stop in sorted(check.range_in_file for check in checks):
        if path != last:
            last, end = path, 0
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def check_committed(source: Source) -> None:
    """Check that each committed file has its recorded size, and check the digests of files without tensors.

    Tensor bytes are checked when they are read.

    Raises:
        IncompleteCheckpointError: A file is missing or does not have its recorded size.
        IntegrityError: A file's digest differs from the recorded digest.
    """
    store, catalog = source.store, source.catalog
    if "digests" not in catalog.info.extra:
        return
    for problem in file_problems(store, catalog):
        raise IncompleteCheckpointError(f"{problem.message} {_ANYWAY}")
    for check in _beside_tensors(catalog):
        found = _check(store, store, check)
        if found is not None:
            raise IntegrityError(f"{found.message} {_ANYWAY}")


_ANYWAY = (
    "To use the other tensors anyway, pass --no-check, and leave out what cannot be read by --include or --exclude."
)


def _beside_tensors(catalog: Catalog) -> list[Check]:
    """Return the digests that the commit record has for files without tensors, such as `.metadata` or a tokenizer."""
    digests = catalog.info.extra.get("digests", {})
    if not digests:
        return []
    holding = catalog.paths()
    return [
        Check(path, Digest(DIGEST, int(digest, 16), 0, catalog.info.files[path]), None, ("",))
        for path, digest in sorted(digests.items())
        if path not in holding and not digest.startswith(PREFIX)
    ]


def _state_checks(source: Source) -> tuple[list[Check], list[Problem], dict[str, int]]:
    """Return the checks of training state in files beside the weights, such as the optimizer.pt of a Trainer.

    Files that are not zip archives have no CRC-32s. They are only parsed.

    Returns:
        The CRC-32s to check, the problems found, and the number of bytes without a CRC-32 in each file.
    """
    store, known = source.store, source.catalog.info
    if "digests" in known.extra or source.url.rstrip("/") != store.url.rstrip("/"):  # ours, or a single file
        return [], [], {}
    checks: list[Check] = []
    problems: list[Problem] = []
    bare: dict[str, int] = {}
    for path in sorted(file_names(store.list())):
        if path in known.files or not (OPTIMIZER_FILE.fullmatch(path) or STATE_FILE.fullmatch(path)):
            continue
        try:
            members = _members(store, path)
        except (UnsupportedFormatError, UnsafePickleError):
            continue
        except (CorruptCheckpointError, FileNotFoundError) as error:
            problems.append(Problem(path, "", f"{path} can't be read: {error}"))
            continue
        checks += [Check(path, Digest(CRC, crc, at, size), None, ("",)) for at, size, crc in members if crc is not None]
        if without := sum(size for _, size, crc in members if crc is None):
            bare[path] = without
    return checks, problems, bare


def _members(store: Store, path: str) -> list[tuple[int, int, int | None]]:
    """Return (start, nbytes, CRC-32 or None) of each part of a file of training state. JSON has no such parts."""
    if store.read(path, 0, 2) == b"PK":
        return Archive(store, path).members()
    size = file_size(store, path)
    if path.endswith(".json"):
        read_object(store, ObjectEntry(path, path, 0, size, encoding="json"))
        return []
    read_torch_file(store, path, ReadOptions(allow_pickle=True))
    return [(0, size, None)]


def file_problems(store: Store, catalog: Catalog) -> Iterator[Problem]:
    """Yield a problem for a missing commit record, and for each file that is missing, unreadable or of a wrong size."""
    ours = all(store.info(path) is not None for path in (MANIFEST_NAME, OBJECTS_NAME))
    if ours and store.info(RECORD_NAME) is None:
        missing = f"{RECORD_NAME}: the commit record is missing: the checkpoint may be incomplete."
        yield Problem(RECORD_NAME, "", missing)
    for path, size in catalog.info.files.items():
        try:
            held = file_size(store, path)  # of a link: the size of the file that a read would read
        except FileNotFoundError:
            held, words, these = 0, f"{path}: the file is missing", ", and with it"
        except (UnsafePathError, CorruptCheckpointError) as error:
            held, words, these = 0, f"{path} can't be read: {str(error).rstrip('.')}", ". It contains"
        else:
            if size < 0 or held == size:
                continue
            words = f"{path}: the file has {held} bytes, expected {size}. It is truncated or was replaced"
            these = ". The missing bytes belong to"
        names = _tensors_of(catalog, path, held)
        yield Problem(path, "", f"{words}{these} {names}." if names else f"{words}.")


def _tensors_of(catalog: Catalog, path: str, size: int = 0) -> str:
    """Return a phrase that names the tensors whose bytes lie beyond the first `size` bytes of the file."""
    names = []
    for entry in catalog.tensors.values():
        slices = entry.slices
        if slices.opaque:
            if any(file == path and start + nbytes > size for file, start, nbytes in slices.records()):
                names.append(entry.name)
            continue
        mine = (slices.files == slices.paths.index(path)) if path in slices.paths else None
        if mine is not None and bool((mine & (slices.starts + slices.nbytes > size)).any()):
            names.append(entry.name)
    return first_few(names, 4)


def _sums(store: Store, catalog: Catalog) -> tuple[dict[str, Digest], list[Problem]]:
    """Return the file digests in SHA256SUMS, and the problems found.

    Problems are a malformed SHA256SUMS, files in it that cannot be read, and files of the checkpoint that it lacks.
    Both results are empty for ckptkit checkpoints.
    """
    if "digests" in catalog.info.extra:
        return {}, []
    try:
        named = read_checksums(store)
    except CkptkitError as error:
        return {}, [Problem(SUMS_NAME, "", str(error))]
    sums, problems = {}, []
    for path, value in named.items():
        try:
            sums[path] = Digest(SHA256, int(value, 16), 0, file_size(store, path))
        except (CkptkitError, OSError) as error:
            problems.append(Problem(path, "", f"{path}, which {SUMS_NAME} names, can't be read: {error}"))
    for path in catalog.info.files if named else ():
        if path not in named and path != SUMS_NAME:
            words = f"{path}: {SUMS_NAME} does not list this file. One of them belongs to another export."
            problems.append(Problem(path, "", words))
    return sums, problems


@dataclass(frozen=True, slots=True)
class Recorded:
    """A checkpoint's recorded digests.

    Attributes:
        checks: The digests to compare, in disk order and without duplicates.
        unproved: Number of tensor bytes without a digest, by file.
        sums: The digests in SHA256SUMS, by file.
        problems: Problems that were found while the digests were collected, such as a damaged SHA256SUMS.
    """

    checks: Sequence[Check]
    unproved: Mapping[str, int]
    sums: Mapping[str, Digest]
    problems: Sequence[Problem]


def recorded(store: Store, catalog: Catalog, uninterpreted: Iterable[str]) -> Recorded:
    """Return a checkpoint's recorded digests. Reads no tensor bytes.

    Args:
        uninterpreted: Names of tensors of unknown classes (`Catalog.opaque`). These are stored as torch.save zips, of
            which only the members' CRC-32s are checked.
    """
    sums, problems = _sums(store, catalog)
    checks, unproved = _plan(catalog, sums)
    for name in uninterpreted:
        for path, start, nbytes in records_of(catalog, name):
            try:
                found = Archive(store, path, start, nbytes).members()
            except (CkptkitError, OSError) as error:
                problems.append(Problem(path, name, f"{path}: tensor {name!r} can't be read: {error}"))
                continue
            for at, size, crc in found:
                if crc is None:
                    unproved[path] = unproved.get(path, 0) + size
                else:
                    checks.append(Check(path, Digest(CRC, crc, at, size), None, (name,)))
    return Recorded(checks, unproved, sums, problems)


def _plan(catalog: Catalog, sums: Mapping[str, Digest]) -> tuple[list[Check], dict[str, int]]:
    """Return the digests to compare, and the number of bytes without a digest in each file.

    The digests are in disk order and without duplicates.
    """
    found: dict[tuple[str, int, int, int, int], list[str]] = {}
    codecs: dict[tuple[str, int, int, int, int], tuple[Digest, Codec | None]] = {}
    unproved: dict[str, int] = {}
    whole_files = catalog.info.extra.get("digests", {})  # path -> hex; only ckptkit checkpoints have these

    def add(name: str, path: str, digest: Digest | None, codec: Codec | None = None, nbytes: int = 0) -> None:
        if digest is not None:
            key = (path, codec.start if codec else digest.start, digest.start, digest.nbytes, digest.value)
            found.setdefault(key, []).append(name)
            codecs[key] = (digest, codec)
        elif path not in whole_files and path not in sums:
            unproved[path] = unproved.get(path, 0) + nbytes

    for path, value in whole_files.items():
        if catalog.info.files.get(path, -1) >= 0:
            add("", path, Digest(DIGEST, int(value.removeprefix(PREFIX), 16), 0, catalog.info.files[path]))
    for path, start, nbytes, copied in spares_of(catalog.info.extra):
        add("", path, Digest(DIGEST, copied, start, nbytes))
    for path, whole in sums.items():
        add("", path, whole)
    for entry in catalog.tensors.values():
        slices = entry.slices
        for row, (path, _, nbytes) in enumerate(() if slices.opaque else slices.records()):
            add(entry.name, path, slices.digest(row), slices.codecs.get(row), nbytes)
    opaque = catalog.info.extra.get("opaque", {})
    for item in catalog.objects.values():
        if item.name not in opaque and item.encoding != "value":
            add(item.name, item.path, item.digest, item.codec, item.nbytes)
    checks = [Check(key[0], *codecs[key], tuple(dict.fromkeys(found[key]))) for key in sorted(found)]
    parts = _parts(catalog, {path for path, value in whole_files.items() if value.startswith(PREFIX)})
    return [replace(c, parts=parts_of(parts.get(c.path, ()))) if _is_whole(c) else c for c in checks], unproved


def _parts(catalog: Catalog, outlined: Set[str]) -> dict[str, list[Part]]:
    """Return, for each file in `outlined`, the byte ranges that have digests of their own.

    The file's digest covers these digests instead of the bytes. Every byte is therefore read only once.
    """
    parts: dict[str, list[Part]] = {path: [] for path in outlined}
    for path, *spare in spares_of(catalog.info.extra):
        if path in parts:
            parts[path].append((spare[0], spare[1], spare[2]))
    for entry in catalog.tensors.values() if outlined else ():
        for part in entry.slices:
            if part.path in parts and part.digest is not None:
                parts[part.path].append((part.digest.start, part.digest.nbytes, part.digest.value))
    return parts


def _is_whole(check: Check) -> bool:
    """Return whether the check covers a whole file.

    A check that starts at offset 0 covers the whole file, because a tensor's bytes come after a header.
    """
    return check.digest.start == 0 and check.codec is None and check.names == ("",)


def compare_digests(
    store: Store, checks: Sequence[Check], workers: int, max_memory: int, progress: Progress | None
) -> Iterable[Problem]:
    """Read the bytes that the checks cover and compare their digests. Return the mismatches as problems."""
    total = sum(check.nbytes for check in checks)
    done = 0
    workers = max(1, min(workers or 4, max_memory // _CHUNK))
    reader = BlockReader(store, workers)
    problems: list[Problem] = []

    def check_all(batch: Sequence[Check]) -> list[Problem]:
        found = (_check(store, reader, check) for check in batch)
        return [problem for problem in found if problem is not None]

    with WorkerPool(workers, thread_name_prefix="ckptkit-verify") as pool:
        batches = list(_batches(checks))
        for batch, found in zip(batches, pool.map(check_all, batches), strict=True):
            problems += found
            done += sum(check.nbytes for check in batch)
            if progress is not None:
                progress(done, total, batch[-1].path)
    return problems


def _batches(checks: Sequence[Check]) -> Iterator[Sequence[Check]]:
    """Yield batches of checks, one per task. Small checks share a task, because that is faster."""
    batch: list[Check] = []
    nbytes = 0
    for check in checks:
        batch.append(check)
        nbytes += check.nbytes
        if nbytes >= _BATCH or len(batch) == _MOST:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _check(store: Store, reader: Store | BlockReader, check: Check) -> Problem | None:
    tensor = ", ".join(name for name in check.names if name)
    what = f"tensor {tensor!r}" if tensor else "the whole file" if _is_whole(check) else "a copy that no tensor uses"
    what = "the bytes between the tensors" if check.parts else what
    digest = check.digest
    try:
        value = hash_of(_chunks(store, reader, check), digest.algorithm)
    except (PermissionError, StorageError) as error:
        words = error.strerror or str(error)
        return UnreadableFile(check.path, tensor, f"{check.path}: the file can't be read: {words.rstrip('.')}.")
    except (CkptkitError, OSError) as error:
        return Problem(check.path, tensor, f"{check.path}: {what} can't be read: {error}")
    if value == digest.value:
        return None
    told = mismatch(digest.algorithm, digest.value, value, digest.start, digest.start + digest.nbytes)
    return Problem(check.path, tensor, f"{check.path}: {what}: {told}")


def _chunks(store: Store, reader: Store | BlockReader, check: Check) -> Iterator[memoryview | bytes]:
    start, stop = check.digest.start, check.digest.start + check.digest.nbytes
    if check.codec is not None:
        yield memoryview(decode_record(store, check.path, check.codec))[start:stop]
        return
    buffer = memoryview(bytearray(min(_CHUNK, stop - start)))

    def read(start: int, stop: int) -> Iterator[memoryview]:
        while start < stop:
            view = buffer[: min(len(buffer), stop - start)]
            reader.read_into(check.path, start, view)
            yield view
            start += len(view)

    yield from outline(stop, check.parts, read) if check.parts else read(start, stop)
