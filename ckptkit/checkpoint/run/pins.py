"""Protects checkpoints from deletion with pins. Readers' pins expire; users' pins do not."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.errors import CheckpointNotFoundError, CkptkitError, NoSpaceError, UnsafePathError, UsageError
from ckptkit.formats.own.record import CommitRecord, find_record, read_record, record_path
from ckptkit.storage.listing import snapshot
from ckptkit.storage.local import is_directory
from ckptkit.storage.lock import STATE_DIRECTORY, store_clock
from ckptkit.storage.open import open_store
from ckptkit.storage.owner import Owner, owner_in, owner_json, read_json
from ckptkit.storage.retry import BRIEF_S, Patience, timeout_s
from ckptkit.storage.staging import new_nonce
from ckptkit.storage.store import FileInfo, Store, split_url

logger = logging.getLogger(__name__)

TTL_S = 600.0  # a reader's pin expires after this time unless the reader renews it
_PINS = f"{STATE_DIRECTORY}/pins"
_DELETING = f"{STATE_DIRECTORY}/deleting"
_LEFT_S = 86400.0  # expired pins are deleted at this age
_STALE_S = 60.0  # another machine's announcement of a deletion is ignored at this age
_FOREVER = re.compile(r"keep-(.+)\.json")


@dataclass(frozen=True, slots=True)
class Pin:
    """A reason not to delete checkpoint `name`. `owner` is the process that reads `name`, or None for a user's pin."""

    name: str
    why: str
    owner: Owner | None = None

    @property
    def reason(self) -> str:
        return f"pinned: {self.why}" if self.owner is None else f"being read by {self.owner} ({self.why})"


def list_pins(root: Store, *, clean: bool = False) -> list[Pin]:
    """Return the pins in force: all users' pins, and readers' pins that have not expired.

    With `clean`, delete pins that killed readers left more than a day ago.
    """
    view = snapshot(root, _PINS)
    items = [item for item in view.list(_PINS) if item.kind == "file" and item.path.endswith(".json")]
    view.fetch(item.path for item in items)
    pins: list[Pin] = []
    left: list[FileInfo] = []
    now: float | None = None
    for item in items:
        body = read_json(view, item.path, 65536)
        if not isinstance(body, dict) or not isinstance(body.get("name"), str):
            # The file name of a user's pin also contains the checkpoint's name, so a damaged pin still counts. It is
            # safer to keep too much.
            match = _FOREVER.fullmatch(item.path.rpartition("/")[2])
            if match:
                pins.append(Pin(match[1], "(the pin's file is damaged)"))
            continue
        owner = owner_in(root, body.get("owner"))
        alive = True if owner is None else owner.alive()
        if alive is None:  # on another machine: compare only times from the store's clock
            now = store_clock(root) if now is None else now
            alive = not item.mtime or now - item.mtime < TTL_S
        if not alive:
            left.append(item)
            continue
        pins.append(Pin(body["name"], str(body.get("why", ""))[:1000], owner))
    if clean and left:
        now = store_clock(root) if now is None else now
        with contextlib.suppress(OSError):  # an expired pin has no effect, so it does no harm if it stays
            root.delete([item.path for item in left if item.mtime and now - item.mtime > _LEFT_S])
    return pins


@contextlib.contextmanager
def pin_while_reading(root: Store, name: str, *, why: str = "load") -> Iterator[CommitRecord]:
    """Protect checkpoint `name` from deletion during the `with` block. Yields its commit record.

    A thread renews the pin. If the root is not writable, logs a warning and goes on without a pin.

    Raises:
        CheckpointNotFoundError: The checkpoint was deleted, or is being deleted. List again and choose a different one.
    """
    with pin_unseen(root, name, why=why) as look:
        yield look()


@contextlib.contextmanager
def pin_unseen(root: Store, name: str, *, why: str = "load") -> Iterator[Callable[[], CommitRecord]]:
    """Pin checkpoint `name` like `pin_while_reading`, but let the caller check that the pin took effect.

    Yields a function that makes this check: it returns the commit record or raises CheckpointNotFoundError. A deletion
    that was announced before the pin was written goes on, so files may disappear before the check.
    """
    path = f"{_PINS}/read-{new_nonce()}.json"
    body = json.dumps({"name": name, "why": why, "owner": owner_json(root)}).encode()
    fresh = is_directory(root) and root.info(STATE_DIRECTORY) is None
    try:
        # The name is unique, so there is no need to ask an object store whether it is free.
        root.write(path, body, overwrite=root.asking_costs, sync=False)
    except (OSError, UnsafePathError) as error:  # UnsafePathError: the pins' directory is a link to outside the root
        reason = getattr(error, "strerror", None) or error
        text = "%s: %s is read without a pin (%s): another job's rotation may delete it before the read ends"
        logger.warning(text, root.url, name, reason)
        yield lambda: _record_of(root, name)
        return

    def look() -> CommitRecord:
        # A reader first writes its pin, then looks for announced deletions. A deleting process first announces the
        # deletion, then looks for pins. So at least one of the two sees the other.
        _wait_while_deleting(root, name)
        return _record_of(root, name)

    stop, patience = threading.Event(), Patience()
    renewal = threading.Thread(target=_renew, args=(root, path, body, stop, patience), name="ckptkit-pin", daemon=True)
    try:
        renewal.start()
        yield look
    finally:
        stop.set()
        patience.hurry()
        if renewal.ident is not None:
            renewal.join()
        try:
            with Patience(min(BRIEF_S, timeout_s())).entered():
                root.delete([path])
        except OSError as error:
            text = "%s: the pin of %s could not be removed, so rotation keeps it until this process ends: %s"
            logger.warning(text, root.url, name, error)
        if fresh and is_directory(root):  # remove the directories made for the pin, unless they contain something
            for folder in (_PINS, STATE_DIRECTORY):
                with contextlib.suppress(OSError):
                    os.rmdir(root.path_of(folder))


def _record_of(root: Store, name: str) -> CommitRecord:
    record = find_record(root, record_path(name))
    if record is None:
        raise CheckpointNotFoundError(f"{root.url}/{name} was deleted. List again and choose another checkpoint.")
    return record


@contextlib.contextmanager
def pin_url(
    url: str, *, why: str = "load", storage_options: Mapping[str, Any] | None = None
) -> Iterator[CommitRecord | None]:
    """Protect the checkpoint at `url` from deletion during the `with` block, and yield its record.

    Yields None if ckptkit did not save the checkpoint, because ckptkit then never deletes it.
    """
    try:
        root, name = split_checkpoint_url(url, storage_options=storage_options)
        record = find_record(root, record_path(name))
    except (CkptkitError, OSError, ValueError):  # the URL is a file, or has a different format
        record = None
    if record is None or record.name != name:
        yield None
        return
    with pin_while_reading(root, name, why=why) as record:
        yield record


def _renew(root: Store, path: str, body: bytes, stop: threading.Event, patience: Patience) -> None:
    folder, _, name = path.rpartition("/")
    store = root.child(folder).existing()  # does not recreate a root that was removed
    while not stop.wait(TTL_S / 5):
        try:
            with patience.entered():
                store.write(name, body, overwrite=True, sync=False)
        except OSError as error:
            logger.warning("a pin in %s could not be renewed: %s", root.url, error)


def _wait_while_deleting(root: Store, name: str, patience_s: float = 30.0) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and _announced(root, name):
        time.sleep(0.02)


def _announced(root: Store, name: str) -> bool:
    path = f"{_DELETING}/{name}.json"
    view = snapshot(root, _DELETING)
    found = view.info(path)
    if found is None:
        return False
    owner = owner_in(root, read_json(view, path))
    alive = owner.alive() if owner else False
    return store_clock(root) - found.mtime < _STALE_S if alive is None else alive


@contextlib.contextmanager
def deleting(root: Store, name: str) -> Iterator[list[Pin]]:
    """Announce the deletion of the checkpoint `name`, and yield the pins that forbid the deletion."""
    path = f"{_DELETING}/{name}.json"
    try:
        root.write(path, json.dumps(owner_json(root)).encode(), overwrite=True, sync=False)
    except NoSpaceError as error:
        # Go on, because the deletion frees space. On a full disk, readers cannot write pins, either.
        logger.warning("%s: could not announce the deletion of %s: %s", root.url, name, error)
    try:
        yield [pin for pin in list_pins(root, clean=True) if pin.name == name]
    finally:
        try:
            root.delete([path])
        except OSError:
            # If this process may not delete the file, overwrite it: while the file names this process, readers wait.
            with contextlib.suppress(OSError):
                root.write(path, b"{}", overwrite=True, sync=False)
            raise


# --- users' pins


def split_checkpoint_url(url: str, *, storage_options: Mapping[str, Any] | None = None) -> tuple[Store, str]:
    """Split a checkpoint's URL into the run's store and the checkpoint's name."""
    if split_url(url)[0] in ("file", "local"):
        url = open_store(url).url  # absolute, because "." is no name
    head, separator, name = url.rstrip("/").rpartition("/")
    if name in ("", ".", "..") or head.endswith(":/"):
        raise UsageError(f"{url} does not name a checkpoint: give its directory, for example RUN/step_00001000.")
    parent = head or ("/" if separator else ".")
    return open_store(parent, storage_options=storage_options), name


def pin_forever(url: str, why: str = "", *, storage_options: Mapping[str, Any] | None = None) -> Pin:
    """Protect the checkpoint at `url` from rotation until it is unpinned.

    Args:
        why: The reason, shown by `ls` and `prune`. Default: the reason of the existing pin, or "by hand" if the
            checkpoint is not pinned.

    Raises:
        CheckpointNotFoundError: `url` is not a committed checkpoint.
        UsageError: The directory is a copy of another checkpoint, or was renamed.
    """
    root, name = split_checkpoint_url(url, storage_options=storage_options)
    record = read_record(root, record_path(name))
    if record.name != name:
        raise UsageError(
            f"{url} cannot be pinned: its record is that of {record.name}, so it was copied or renamed. Rotation does "
            "not delete it."
        )
    if not why:
        why = next((pin.why for pin in list_pins(root) if pin.owner is None and pin.name == name), "by hand")
    body = {"name": record.name, "why": why, "save_id": record.save_id, "owner": None, "created": time.time()}
    root.write(f"{_PINS}/keep-{name}.json", json.dumps(body).encode(), overwrite=True)
    # A deletion may have read the pins before this pin was written. That deletion is announced, so wait for it.
    _wait_while_deleting(root, name)
    if find_record(root, record_path(name)) is None:
        root.delete([f"{_PINS}/keep-{name}.json"])
        raise CheckpointNotFoundError(f"{url} was deleted while it was being pinned.")
    return Pin(name, why)


def unpin(url: str, *, storage_options: Mapping[str, Any] | None = None) -> bool:
    """Remove a user's pin from the checkpoint at `url`. Returns False if the checkpoint has no such pin."""
    root, name = split_checkpoint_url(url, storage_options=storage_options)
    path = f"{_PINS}/keep-{name}.json"
    if root.info(path) is None:
        return False
    root.delete([path])
    return True
