"""Finds the checkpoint of another program that a run continues from, if ckptkit has not saved one there yet.

A new run must not begin beside a checkpoint that training could continue from. So everything in the run's directory
that may be such a checkpoint is loaded, refused, or named in a warning.
"""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ckptkit.catalog.entry import Role
from ckptkit.checkpoint.run.inventory import Inventory, list_checkpoints
from ckptkit.checkpoint.state.train_state import TrainState
from ckptkit.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CkptkitError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    UnsafePathError,
    UnsafePickleError,
    UnsupportedFormatError,
    UsageError,
)
from ckptkit.formats.detect import (
    Candidate,
    Source,
    format_of,
    identify,
    open_source,
    pointers,
    real_url,
    refuse_unsupported,
)
from ckptkit.formats.pickles.legacy import is_legacy
from ckptkit.formats.torch_save import TORCH_ENDINGS
from ckptkit.formats.trainers.beside import with_files_beside
from ckptkit.formats.trainers.steps import StepName, ordered, parse_step
from ckptkit.storage.local import is_directory
from ckptkit.storage.open import open_store
from ckptkit.storage.store import Store

_log = logging.getLogger(__name__)

_WEIGHTS = ("safetensors", "torch")  # formats of published weights, which a new run may start from
_MAX_LOOKS = 64  # how many directories of a step are examined
_MAX_BESIDE = 256  # how many files and directories beside the newest step are opened
_MAX_DIRECTORIES = 512  # how many directories are searched before a new run
_NEWEST = re.compile(r"(?:.*[-_.])?(?:last|latest)(?:[-_.].*)?", re.IGNORECASE)
_CHECKPOINT = re.compile(
    r"(?:.*[-_.])?(?:last|latest|best|checkpoints?|ckpts?)(?:-v\d+)?(?:\.(?:pt|pth|ckpt|bin|pth\.tar|th))?",
    re.IGNORECASE,
)
_STATE = re.compile(
    r".*(?:checkpoint|ckpt|snapshot|last|latest|best|state|model).*|.*\.(?:pkl|torch|pyt)", re.IGNORECASE
)
_STEP_DIRECTORY = re.compile(r"(?:checkpoint|ckpt|global_?step)s?[-_=]?\d+|iter_\d{7}", re.IGNORECASE)
_DCP_DATA = r"__\d+_\d+\.distcp"
_ANEW = "To start a new run, save to another directory."


def find_foreign(
    url: str,
    root: Store,
    state: TrainState,
    *,
    optimizer: bool = True,
    lost_steps: bool = False,
    storage_options: Mapping[str, Any] | None,
) -> str:
    """Return the URL of the newest checkpoint in `url` that another system wrote.

    Returns "" if there is no checkpoint to resume from. Ignores uncommitted ckptkit saves. Also ignores weights without
    a training step, because a new run may start from them. A log message then explains how to load such weights.

    Args:
        optimizer: Whether the load restores optimizers. If False, a checkpoint that contains only weights is accepted.
        lost_steps: Whether a pointer file (`latest`) may name a step that does not exist.

    Raises:
        CheckpointMismatchError: The checkpoint has no optimizer, but `state` has one.
        IncompleteCheckpointError: A pointer file names a step that does not exist, and `lost_steps` is False.
        CorruptCheckpointError: The checkpoint is damaged.
        UsageError: Other systems wrote several checkpoints, and it is unclear which to load.
        UnsupportedFormatError: The newest checkpoint cannot be read.
    """
    inventory = list_checkpoints(root)
    if inventory.committed or not inventory.foreign:
        return ""
    top = real_url(url)
    begun = inventory.in_progress or inventory.abandoned or inventory.skipped  # ckptkit has begun to save here
    steps = [f"{top}/{step.name}" for step in ordered(inventory.foreign)]
    source = _first_readable(steps if begun else [url], storage_options)
    wanted = optimizer and bool(state.optimizer is not None or not state.parts("model"))
    if source is not None and wanted and not begun and not _is_trained(source) and format_of(Candidate(root)):
        source = _first_readable(steps, storage_options) or source  # the Trainer saves final weights in the root
    if source is not None and (not wanted or _is_trained(source)):
        if source.note:
            _log.log(logging.WARNING if "Skipped" in source.note else logging.INFO, "%s", source.note)
        newest = _with_newer(source, top, storage_options)
        if newest is not source:
            _log.info("%s is newer than %s: step %s", newest.url, source.url, newest.catalog.info.step)
        return newest.url
    if source is not None:
        advice = f"To start from them: load(state, {source.url!r}, optimizer='skip')."
        is_step = any(map(parse_step, source.url.removeprefix(top).split("/")))
        if source.catalog.has(Role.MODEL) and (is_step or source.catalog.info.format not in _WEIGHTS):
            unread = [note for note in source.catalog.info.notes if "the optimizer" in note]
            why = f", or none that could be read: {unread[0]}" if unread else "."
            raise CheckpointMismatchError(f"{source.url} has weights but no optimizer{why} {advice} {_ANEW}")
    _refuse_unread(url, root, inventory, lost_steps, storage_options)
    if source is not None:
        _log.warning("%s has weights but no optimizer: starting a new run. %s", source.url, advice)
    return ""


def _first_readable(places: Sequence[str], storage_options: Mapping[str, Any] | None) -> Source | None:
    """Open the first checkpoint among `places`. Return None if there is none. Raises if it exists but can't be read."""
    skipped: list[CheckpointNotFoundError] = []
    for place in places:
        try:
            source = open_source(place, storage_options=storage_options)
        except CheckpointNotFoundError as error:
            skipped.append(error)
        except (UnsupportedFormatError, UsageError) as error:
            raise type(error)(f"cannot resume from {place}: {error} {_ANEW}") from error
        else:
            for why in skipped:
                _log.warning("skipped a step that is newer than %s: %s", source.url, why)
            return source
    return None


def _is_trained(source: Source) -> bool:
    """Return whether the checkpoint, or another file in its directory, has an optimizer or fp32 master weights."""
    catalog = with_files_beside(source.catalog, source.store)
    return catalog.has(Role.OPTIMIZER) or catalog.has(Role.MASTER)


def _with_newer(chosen: Source, top: str, storage_options: Mapping[str, Any] | None) -> Source:
    """Return `chosen`, or a newer checkpoint in the same directory.

    Only opens checkpoints whose names cannot be compared with the name of `chosen`. For example, if `chosen` is
    step=90.ckpt, which Lightning kept as the best, last.ckpt may be newer.

    Raises:
        UsageError: A checkpoint that may be newer is damaged or has no step, or `chosen` has no step.
    """
    parts = chosen.url.removeprefix(top).strip("/").split("/")
    at = next((at for at, part in enumerate(parts) if parse_step(part)), None)
    if at is None:
        return chosen
    parent, named = "/".join([top, *parts[:at]]), parse_step(parts[at])
    place, newest = Candidate(open_store(parent, storage_options=storage_options)), chosen
    highest, folders = _step_of(chosen, named), {*place.directories}
    only_trained = _is_trained(chosen)  # weights alone, such as an export, are not newer than a training state
    for name in _not_surely_older(place, parts[at], parent):
        other, is_folder, may_be_newest = parse_step(name), name in folders, _may_be_newest(name)
        if is_folder and not identify(place.store.child(name)):
            continue
        try:
            found = open_source(f"{parent}/{name}", storage_options=storage_options)
            if only_trained and not _is_trained(found):
                continue
        except StorageError:
            raise
        except CkptkitError as error:
            if may_be_newest and (is_folder or _may_be_state(f"{parent}/{name}", place, name, storage_options)):
                raise _unclear(parent, parts[at], name, f" ({error})") from error
            _log.warning("%s/%s is ignored: %s", parent, name, error)
            continue
        step = _step_of(found, other)
        if step is None and not may_be_newest:
            _log.warning("%s/%s is ignored: it records no step", parent, name)
            continue
        if step is None or highest is None:
            raise _unclear(parent, parts[at], name)
        if step > highest:
            newest, highest = found, step
    return newest


def _not_surely_older(place: Candidate, chosen: str, parent: str) -> list[str]:
    """Return the entries of a directory that may be newer checkpoints than `chosen`, judging by their names.

    Entries whose names contain a step, an epoch or "last" come first.
    """
    named, folders = parse_step(chosen), {*place.directories}
    found: list[str] = []
    for name in [*place.files, *place.directories]:
        other, is_folder = parse_step(name), name in folders
        if name == chosen or _leads_into(place, name):
            continue
        if place.listing[name].kind == "symlink" and (_NEWEST.fullmatch(name) or (other and named and other > named)):
            raise _unclear(parent, chosen, name)
        if named and other and other.has_step == named.has_step and is_folder == (chosen in folders):
            # Directories were compared already. Among files, those that end in .ckpt were preferred.
            is_older = is_folder or other <= named
        else:
            is_older = not is_folder and not name.endswith(TORCH_ENDINGS)
        if not is_older:
            found.append(name)
    found.sort(key=_may_be_newest, reverse=True)
    if len(found) > _MAX_BESIDE:
        _log.warning("%s: only %d of %d entries were examined", parent, _MAX_BESIDE, len(found))
    return found[:_MAX_BESIDE]


def _may_be_newest(name: str) -> bool:
    """Return whether an entry may be a run's newest checkpoint, judging by its name: a step, an epoch, or "last"."""
    return parse_step(name) is not None or _NEWEST.fullmatch(name) is not None


def _step_of(source: Source, name: StepName | None) -> int | None:
    """Return the step that a checkpoint records. If it records none, return the step in its name."""
    named = name.step if name is not None and name.has_step else None
    return named if source.catalog.info.step is None else source.catalog.info.step


def _unclear(parent: str, first: str, second: str, why: str = "") -> UsageError:
    return UsageError(
        f"{parent} contains {first} and {second}, and it is not clear which is newer{why}. Name one of them, for "
        f"example load(state, '{parent}/{first}'). {_ANEW}"
    )


def _leads_into(place: Candidate, name: str) -> bool:
    """Return whether `name` is a symlink to another entry of the same directory."""
    if place.listing[name].kind != "symlink" or not is_directory(place.store):
        return False
    return os.path.realpath(os.path.join(place.store.url, name)).startswith(f"{os.path.realpath(place.store.url)}/")


def _refuse_unread(
    url: str, root: Store, inventory: Inventory, lost_steps: bool, storage_options: Mapping[str, Any] | None
) -> None:
    """Raise if `url` contains checkpoints that training could continue from. Called if none was chosen.

    Raises:
        IncompleteCheckpointError: The files of a checkpoint are missing.
        UnsupportedFormatError: A checkpoint can't be read.
        UsageError: It is unclear which checkpoint is the newest.
    """
    top = url.rstrip("/")
    place = Candidate(root)
    names = [name for name in inventory.foreign if name in place.listing]  # some may have been deleted meanwhile
    found = list(islice(_unread(top, place, names, lost_steps, storage_options), 5))
    if found:
        listing = ", ".join(found[:4]) + ", ..." * (len(found) > 4)
        raise UsageError(
            f"{url} contains {listing}, and it is not clear which is the run's newest checkpoint. Name "
            f"it, for example load(state, '{top}/{found[-1]}'). If a checkpoint is split over "
            f"several files, read it with torch.load. {_ANEW}"
        )


def _unread(
    top: str, root: Candidate, names: Sequence[str], lost_steps: bool, storage_options: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield the paths of checkpoints that training could continue from.

    Searches the entries `names` and their subdirectories. Paths near the top come first. Checkpoints that have only
    weights are omitted, unless their names contain a step.
    """
    left: deque[tuple[str, Candidate, Sequence[str]]] = deque([("", root, names)])
    for _ in range(_MAX_DIRECTORIES):
        if not left:
            return
        above, place, names = left.popleft()
        where = f"{top}/{above}".rstrip("/")
        if not lost_steps:
            refuse_lost_step(where, place)
        for name in names:
            path = f"{above}/{name}".lstrip("/")
            inner = _directory(place, name)
            if inner is None:
                if _may_be_state(f"{top}/{path}", place, name, storage_options):
                    yield path
            elif inner is place:  # a symlink whose target does not exist
                yield path
            else:
                form = format_of(inner)
                is_step = parse_step(name) is not None
                if form is None and inner.has(_DCP_DATA):
                    open_source(f"{top}/{path}", storage_options=storage_options)  # raises, because it is incomplete
                if form is None and is_step and any(map(format_of, _children(inner))):
                    yield path
                elif form is None and _STEP_DIRECTORY.fullmatch(name):
                    raise IncompleteCheckpointError(
                        f"cannot resume from {top}/{path}: it contains no complete checkpoint. {_ANEW}"
                    )
                elif form is None or (form.name in _WEIGHTS and not is_step and not _resumable(inner, storage_options)):
                    left.append((path, inner, [*inner.files, *inner.directories]))
                elif above == "" or form.name != "ckptkit" or not inner.store.url.startswith(root.store.url):
                    yield path  # except checkpoints of another ckptkit run in a subdirectory: a log message names these
        try:
            refuse_unsupported([name for name in names if place.listing[name].kind in ("file", "symlink")])
        except UnsupportedFormatError as error:
            raise UnsupportedFormatError(f"cannot resume from {where}: {error} {_ANEW}") from error
    if left:
        _log.warning("%s: only %d directories were searched for checkpoints", top, _MAX_DIRECTORIES)


def _directory(place: Candidate, name: str) -> Candidate | None:
    """Return the directory `name` in `place`, or the directory to which the symlink `name` points.

    Returns `place` itself if the symlink's target does not exist and `name` is the name of a checkpoint. Returns None
    for anything else.
    """
    kind = place.listing[name].kind
    if kind == "directory" and (not name.startswith(".") or _CHECKPOINT.fullmatch(name) or parse_step(name)):
        return Candidate(place.store.child(name))
    if kind != "symlink" or not is_directory(place.store):
        return None
    target = os.path.realpath(os.path.join(place.store.url, name))
    if os.path.isdir(target):
        return Candidate(open_store(target))
    lost = not os.path.lexists(target) and (_CHECKPOINT.fullmatch(name) or _STEP_DIRECTORY.fullmatch(name))
    return place if lost else None


def _may_be_state(url: str, place: Candidate, name: str, storage_options: Mapping[str, Any] | None) -> bool:
    """Return whether a file contains an optimizer, or is a damaged torch.save file."""
    usual = name.endswith(TORCH_ENDINGS)
    if place.listing[name].kind not in ("file", "symlink") or not (usual or _STATE.fullmatch(name)):
        return False
    try:
        start = place.store.read(name, 0, 32)
        is_of_torch = start[:2] == b"PK" or is_legacy(start)
        if not usual and not is_of_torch:
            return False
        return open_source(url, storage_options=storage_options).catalog.has(Role.OPTIMIZER)
    except (UnsafePathError, FileNotFoundError):  # a symlink to a file outside the directory
        return usual
    except UnsafePickleError:
        return is_of_torch
    except CorruptCheckpointError:
        return usual and (is_of_torch or not start)
    except UnsupportedFormatError:  # a .pt file may contain anything
        return is_of_torch and _CHECKPOINT.fullmatch(name) is not None


def _resumable(place: Candidate, storage_options: Mapping[str, Any] | None) -> bool:
    """Return whether a directory with weights also contains an optimizer or fp32 master weights."""
    try:
        return _is_trained(open_source(place.store.url, storage_options=storage_options))
    except StorageError:
        raise
    except CkptkitError:  # the caller looks at the directory's files one by one
        return False


def refuse_lost_step(where: str, place: Candidate) -> None:
    """Raise IncompleteCheckpointError if a pointer file (`latest`) names a step, but `place` contains no step."""
    for pointer, target in pointers(place):
        if parse_step(target) is not None and not any(map(parse_step, place.listing)):
            raise IncompleteCheckpointError(
                f"{where}: the file {pointer} says that the newest checkpoint is {target}, but it is not there. If the "
                f"run was copied, copy the rest of it. To start over, use another directory, delete that file, or pass "
                "start_fresh='if_none_committed' (to CheckpointManager or FSDPStrategy.load_ckpt)."
            )


def _children(place: Candidate) -> Iterator[Candidate]:
    return (Candidate(place.store.child(name)) for name in place.directories[:_MAX_LOOKS])
