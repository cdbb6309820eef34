"""Defines file names and the commit record. A directory is a ckptkit checkpoint if it contains a commit record."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from ckptkit.arguments import wrong
from ckptkit.digests import DIGEST, hex_digest_of
from ckptkit.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    IntegrityError,
    UnsafePathError,
    UnsupportedFormatError,
    UsageError,
    command_line,
)
from ckptkit.formats.own.json import (
    MESH,
    NULL,
    TABLE,
    TEXT,
    TEXT_OR_NONE,
    Check,
    check_json,
    field_of,
    matching,
    parse,
    whole_number,
)
from ckptkit.formats.own.outline import PREFIX
from ckptkit.storage.store import Store, checked_path, is_safe_name

FORMAT = "ckptkit/1"
RECORD_NAME = "checkpoint.json"
MANIFEST_NAME = "manifest.safetensors"
NO_RECORD = (
    "that this copy is complete: the commit record and the manifest that ckptkit wrote are missing, and with them the "
    "digests and values that are not tensors"
)
"""The text of `extra["unproved"]` if the files of a committed checkpoint were found without the commit record."""
LATEST_HINT = "latest"
MAX_RECORD_BYTES = 256 << 20  # 4096 ranks with 8 files each need only about 4 MB
_FIRST_READ = 1 << 20

_FORMAT = re.compile(r"ckptkit/([0-9]{1,6})")
_STEP = re.compile(r"step_([0-9]{8,18})")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=-]{0,127}")  # "=" occurs in Lightning's "epoch=1-step=40.ckpt"
_NONCE = re.compile(r"[0-9a-f]{16}")
_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
_MAX_STEP = 10**18 - 1
_RESERVED = frozenset({"latest", "best", RECORD_NAME, MANIFEST_NAME})
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def step_name(step: int) -> str:
    """Return the directory name for `step`: 1200 -> "step_00001200". Raises UsageError if the step is not valid."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= _MAX_STEP:
        raise UsageError(f"step is {step!r:.80}, expected an int from 0 to {_MAX_STEP}.")
    return f"step_{step:08d}"


def step_of_name(name: str) -> int | None:
    """Return the step in the name of a step directory, or None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def check_tag(tag: str, step: int | None = None) -> str:
    """Return `tag` if it can be a directory name on every system and is not reserved.

    Raises:
        UsageError: The tag is not 1 to 128 letters, digits, ".", "_", "-" or "=", starts with ".", "-" or "=", or ends
            with ".". Also raised if it is a device name, a reserved word, or the name of a step other than `step`.
    """
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or not is_safe_name(tag):
        raise UsageError(
            f"tag {tag!r} is refused: a tag is 1 to 128 letters, digits, '.', '_', '-' or '=', starts with a letter, a "
            "digit or '_', does not end in '.', and is not a device name."
        )
    if tag.lower() in _RESERVED:
        raise UsageError(f"tag {tag!r} is refused: this word is reserved. Choose another tag.")
    stated = int(tag) if tag.isdigit() else step_of_name(tag)
    if stated is not None and stated != step:
        raise UsageError(f"tag {tag!r} is refused: it states step {stated}, but the step is {step}.")
    return tag


def checkpoint_name(step: int, tag: str | None = None) -> str:
    """Return a checkpoint's directory name: its tag, or `step_name` if `tag` is None.

    Raises:
        UsageError: The step is not valid, or the tag cannot be used (see `check_tag`).
    """
    name = step_name(step)
    return name if tag is None else check_tag(tag, step)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size of a file in a checkpoint, and the digest (16 hex digits) of the file's bytes or of its outline.

    Attributes:
        outlined: True if the digest is that of the outline, which contains digests in place of large slices (see
            `outline`).
    """

    nbytes: int
    checksum: str
    outlined: bool = False

    @property
    def digest(self) -> str:
        """The digest as a string, with the prefix "outline:" if it is the digest of the outline."""
        return f"{PREFIX}{self.checksum}" if self.outlined else self.checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """The contents of `checkpoint.json`. A checkpoint exists if and only if its directory contains this file.

    Attributes:
        step: The training step.
        tag: Name of the directory, or None if the name is derived from the step.
        save_id: 16 hex digits, new for every attempt to save.
        sequence: Number of the save in its run. Checkpoints are ordered by this number, not by clocks (see
            `inventory`).
        data: Directory of the files, relative to the record's directory: "", or `save_id` on an object store.
        created: Seconds since the epoch, by rank 0's clock. Used by `keep_daily` and for the age in listings.
        state_dict_type: "sharded", "full" or "local".
        mesh: {"shape": [...], "names": [...]}, or None if there was no mesh.
        files: Size and digest of every file under `data` except the record, by path. All files are required.
        manifest: Path of the manifest in `files`, or None if the format has no manifest.
        metrics: Values that the caller measured, which determine `best`. A value may be NaN or infinite.
        objective: (metric, "min" | "max") that defines the run's `best`, or None if no objective is set.
        client_state: JSON from the caller.
        writer: The process that saved: {"host": ..., "pid": ...}.
        versions: Library versions, by name.
        extra: Additional JSON from the writer.
    """

    step: int
    save_id: str
    state_dict_type: str
    files: Mapping[str, FileRecord]
    tag: str | None = None
    sequence: int = 0
    data: str = ""
    created: float = 0.0
    world_size: int = 1
    mesh: Mapping[str, Any] | None = None
    manifest: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    objective: tuple[str, str] | None = None
    client_state: Any = None
    writer: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    total_bytes: int = -1  # sum over all ranks, counting each file once; -1: the sum of `files`

    def __post_init__(self) -> None:
        if self.total_bytes < 0:
            object.__setattr__(self, "total_bytes", sum(item.nbytes for item in self.files.values()))

    @property
    def name(self) -> str:
        """The name of the checkpoint's directory within its run."""
        return self.tag if self.tag is not None else step_name(self.step)

    def to_json(self) -> bytes:
        """Return the bytes of `checkpoint.json`. Raises UsageError if a field is not JSON.

        Does not check the types of fields. Callers parse the result before writing it, so that a wrong type fails the
        save, not a later load.
        """
        body = {
            "format": FORMAT,
            "step": self.step,
            "tag": self.tag,
            "save_id": self.save_id,
            "sequence": self.sequence,
            "data": self.data,
            "created": datetime.fromtimestamp(self.created, timezone.utc).strftime(_TIME),
            "state_dict_type": self.state_dict_type,
            "world_size": self.world_size,
            "mesh": None if self.mesh is None else dict(self.mesh),
            "manifest": self.manifest,
            "total_bytes": self.total_bytes,
            "metrics": metrics_json(self.metrics),
            "objective": None if self.objective is None else list(self.objective),
            "client_state": self.client_state,
            "writer": dict(self.writer),
            "versions": dict(self.versions),
            "extra": dict(self.extra),
            "files": {
                path: {"nbytes": item.nbytes, "outline" if item.outlined else DIGEST: item.checksum}
                for path, item in sorted(self.files.items())
            },
        }
        check_json(self.client_state, "client_state")
        check_json(self.extra, "extra")
        body["self"] = _self_digest(body)
        return (json.dumps(body, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, *, file: str) -> CommitRecord:
        """Parse a record. Error messages call the record `file`.

        Raises:
            UnsupportedFormatError: A newer ckptkit wrote the record.
            IntegrityError: The record was modified after it was written.
            UnsafePathError: A name leads out of the checkpoint.
            CorruptCheckpointError: The record is invalid in another way.
        """
        if len(data) > MAX_RECORD_BYTES:
            raise CorruptCheckpointError(f"{file} has {len(data)} bytes; no commit record is larger than 256 MiB.")
        if not data.strip(b" \t\r\n\0"):
            raise CorruptCheckpointError(f"{file} is empty. Its write was interrupted, or it was zeroed later.")
        body = parse(data, file=file)
        if not isinstance(body, dict):
            raise CorruptCheckpointError(f"{file} contains a JSON {type(body).__name__}, expected an object.")
        match = _FORMAT.fullmatch(field_of(body, "format", TEXT, file))
        if match is None or int(match[1]) < 1:
            raise CorruptCheckpointError(f"{file}: format is {body['format']!r}, expected {FORMAT!r}.")
        if int(match[1]) > 1:
            raise UnsupportedFormatError(
                f"{file} has format {body['format']!r}; this ckptkit reads {FORMAT!r}. A newer ckptkit wrote it: "
                "upgrade."
            )
        stated = field_of(body, "self", _SELF, file)
        found = _self_digest({name: value for name, value in body.items() if name != "self"})
        if stated != found:
            raise IntegrityError(
                f"{file}: checksum mismatch: expected {stated}, found {found}. The file was changed or damaged."
            )
        known = {name: field_of(body, name, check, file) for name, check in _FIELDS.items()}
        for name, check in (("metrics", _METRIC), ("versions", TEXT)):
            for item in known[name]:
                field_of(known[name], item, check, f"{file}: {name}")
        files = {}
        for path in known["files"]:
            try:
                checked_path(path)
            except UnsafePathError as error:
                raise UnsafePathError(f"{file}: {error}") from error
            item, where = field_of(known["files"], path, TABLE, f"{file}: files"), f"{file}: files[{path!r}]"
            outlined = "outline" in item and DIGEST not in item
            digest = field_of(item, "outline" if outlined else DIGEST, _HEX, where)
            files[path] = FileRecord(field_of(item, "nbytes", _BYTES, where), digest, outlined)
        record = cls(**{
            **known,
            "created": _time_value(known["created"]),
            "files": files,
            "metrics": {name: float(_NOT_FINITE.get(value, value)) for name, value in known["metrics"].items()},
            "objective": None if known["objective"] is None else tuple(known["objective"]),
        })  # fmt: skip
        _check_record(record, file)
        return record


def _time_value(text: Any) -> float | None:
    try:
        return datetime.strptime(text, _TIME).replace(tzinfo=timezone.utc).timestamp()
    except (TypeError, ValueError):
        return None


_METRIC: Check = (
    "a number",
    (int, float, str),
    lambda value: value in _NOT_FINITE if isinstance(value, str) else abs(value) < 2**1023,
)
_SELF = matching(rf"{DIGEST}:[0-9a-f]{{16}}")
_HEX = matching("[0-9a-f]{16}")
_BYTES = whole_number(2**62)
_FIELDS: Mapping[str, Check] = {
    "step": whole_number(_MAX_STEP),
    "tag": TEXT_OR_NONE,
    "save_id": matching(_NONCE.pattern),
    "sequence": whole_number(2**62),
    "data": matching(f"({_NONCE.pattern})?"),
    "created": ("a time like 2026-01-31T12:00:00.000000Z", (str,), _time_value),
    "state_dict_type": matching("[a-z][a-z0-9_]{0,31}"),
    "world_size": whole_number(2**31),
    "mesh": MESH,
    "manifest": TEXT_OR_NONE,
    "total_bytes": _BYTES,
    "metrics": TABLE,
    "objective": (
        "[metric, 'min' or 'max']",
        (list, NULL),
        lambda pair: len(pair) == 2 and isinstance(pair[0], str) and pair[1] in ("min", "max"),
    ),
    "client_state": ("JSON", (dict, list, str, int, float, bool, NULL), None),
    "writer": TABLE,
    "versions": TABLE,
    "extra": TABLE,
    "files": TABLE,
}


def _check_record(record: CommitRecord, file: str) -> None:
    try:
        checkpoint_name(record.step, record.tag)
    except UsageError as error:
        raise UnsafePathError(f"{file}: {error}") from error
    if record.data not in ("", record.save_id):
        raise UnsafePathError(f"{file}: data is {record.data!r}, expected '' or the save id {record.save_id!r}.")
    if record.world_size < 1:
        raise CorruptCheckpointError(f"{file}: world_size is {record.world_size}, expected 1 or more.")
    if record.manifest is not None and record.manifest not in record.files:
        raise IncompleteCheckpointError(f"{file}: the manifest {record.manifest!r} is not in the table of files.")
    total = sum(item.nbytes for item in record.files.values())
    if record.total_bytes != total:
        raise CorruptCheckpointError(f"{file}: total_bytes is {record.total_bytes}, but the files add up to {total}.")


def _self_digest(body: Mapping[str, Any]) -> str:
    """Return the digest of `body` in canonical JSON (sorted keys, no spaces, ASCII)."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{DIGEST}:{hex_digest_of(canonical.encode())}"


def metrics_json(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    """Return metrics as a commit record stores them. Raises UsageError if a metric is not a number."""
    if not isinstance(metrics, Mapping):
        raise wrong("metrics", metrics, "a dict of names and numbers, such as {'val_loss': 1.5}")
    check_json(dict.fromkeys(metrics), "metrics")
    found: dict[str, float | str] = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, (bool, str)):
                raise TypeError
            number = float(value)  # also accepts numpy scalars and 0-d tensors
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise UsageError(
                f"metric {name!r} is {value!r:.80} ({type(value).__name__}), expected a number. Leave it out of "
                "`metrics` if it has no value yet."
            ) from error
        found[name] = number if math.isfinite(number) else str(number)
    return found


# --- reading from a store


def record_path(name: str) -> str:
    """Return the path of the record of checkpoint `name`, relative to the run's root."""
    return f"{name}/{RECORD_NAME}"


def find_record(store: Store, path: str = RECORD_NAME) -> CommitRecord | None:
    """Return the commit record at `path`, or None if the file does not exist. Raises as `from_json` does."""
    place = f"{store.url}/{path}"
    if store.asking_costs:
        try:
            data = store.read(path, 0, _FIRST_READ)  # a single request; asking for the size first would take three
        except FileNotFoundError:
            return None
        if len(data) < _FIRST_READ:
            return CommitRecord.from_json(data, file=place)
    found = store.info(path)
    if found is None:
        return None
    if found.kind != "file":
        raise UnsafePathError(f"{place} is a {found.kind}, not a regular file. It was not read.")
    if found.size > MAX_RECORD_BYTES:
        raise CorruptCheckpointError(f"{place} has {found.size} bytes; no commit record is larger than 256 MiB.")
    try:
        return CommitRecord.from_json(store.read(path), file=place)
    except FileNotFoundError:  # another process has just deleted it
        return None


def read_record(store: Store, path: str = RECORD_NAME) -> CommitRecord:
    """Return the commit record at `path`.

    Raises:
        CheckpointNotFoundError: The file does not exist.
        CorruptCheckpointError, UnsupportedFormatError: See `CommitRecord.from_json`.
    """
    record = find_record(store, path)
    if record is None:
        run = store.url if "/" in path else store.url.rstrip("/").rpartition("/")[0] or "/"
        raise CheckpointNotFoundError(
            f"{store.url.rstrip('/')}/{path} does not exist: this is not a ckptkit checkpoint, or its save was not "
            f"completed. Try: {command_line('ls', run)}"
        )
    return record


def data_store(store: Store, record: CommitRecord) -> Store:
    """Return the store of the checkpoint's files: `store`, which has the commit record, or a directory in `store`."""
    return store.child(record.data) if record.data else store
