"""Identifies the writer of a directory, so that another process can check whether the writer is alive."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.storage.local import is_directory

if TYPE_CHECKING:
    from ckptkit.storage.store import Store


@dataclass(frozen=True, slots=True)
class Owner:
    """A process on a particular machine.

    Attributes:
        started: Start time of the process in clock ticks. Distinguishes processes with the same pid.
        machine: Boot id, pid namespace and machine id. Distinguishes containers with the same host name, and boots.
        copied: Whether this record was read from a copy of the owner's directory. None if unknown.
    """

    host: str
    pid: int
    started: str
    machine: str
    copied: bool | None = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def alive(self) -> bool | None:
        """Return whether the process is alive and writes to the directory from which this record was read.

        None if unknown: it may be on another machine, or the directory may be a copy. A process from before the last
        reboot of this machine is dead, but without a machine id (in most containers), a reboot cannot be detected.
        """
        if self.machine != _machine():
            same = self.machine.split("/")[1:] == _machine().split("/")[1:] and self.host == _host()
            return False if same and not self.machine.endswith("/") else None
        if self.copied is not False:
            return False if self.copied else None
        return _start_of(self.pid) == self.started


def read_json(store: Store, path: str, nbytes: int = 4096) -> Any:
    """Return the JSON in the first line of a file. Reads at most `nbytes`. None if the line is missing or damaged."""
    try:
        return json.loads(store.read(path, 0, nbytes).partition(b"\n")[0])
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def this_process() -> Owner:
    """Return the `Owner` that describes this process."""
    return Owner(_host(), os.getpid(), _start_of(os.getpid()) or "", _machine())


def owner_json(store: Store, owner: Owner | None = None) -> dict[str, Any]:
    """Return a JSON object that describes an owner (default: this process) and the directory of `store`."""
    own = owner or this_process()
    place = place_of(store)
    return {"host": own.host, "pid": own.pid, "started": own.started, "machine": own.machine, "place": place}


def owner_in(store: Store, body: Any) -> Owner | None:
    """Return the owner that `body`, read from `store`, describes. None if `body` is damaged."""
    if not isinstance(body, Mapping):
        return None
    host, pid, started, machine = (body.get(name) for name in ("host", "pid", "started", "machine"))
    if not (isinstance(host, str) and type(pid) is int and isinstance(started, str) and isinstance(machine, str)):
        return None
    owner = Owner(host[:256], pid, started, machine)
    written, here = body.get("place"), place_of(store)
    if here is None or not isinstance(written, list) or len(written) != len(here):
        return owner
    path_differs, inode_differs = written[0] != here[0], written[1:] != here[1:]
    if not is_directory(store):
        # One bucket can have several names. Only the heartbeat shows whether two names mean the same bucket.
        return replace(owner, copied=None) if path_differs else owner
    # A move or a second mount changes only the path. On some FUSE file systems, only inode numbers change.
    return replace(owner, copied=True if path_differs else None) if inode_differs else owner


def place_of(store: Store) -> list[Any] | None:
    """Return values that differ between a directory and its copies: path, device and inode, or bucket and key."""
    if not is_directory(store):
        return [store.url.partition("://")[2].strip("/")]
    try:
        found = os.stat(store.url)
        return [os.path.realpath(store.url), found.st_dev, found.st_ino]
    except OSError:
        return None


@functools.cache
def _host() -> str:
    return os.uname().nodename


@functools.cache
def _machine() -> str:
    """Return the boot id, pid namespace and machine id, joined by "/". On systems without /proc: the host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{_host()}/-/-"
    try:
        return f"{boot}/{namespace}/{Path('/etc/machine-id').read_text().strip()}"
    except OSError:
        return f"{boot}/{namespace}/"


def _start_of(pid: int) -> str | None:
    """Return the start time of a process in clock ticks. None if the process does not exist or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _start_without_proc(pid)
    except (ProcessLookupError, PermissionError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the command name may contain spaces and parentheses
    return None if fields[0] in "ZX" else fields[19]


def _start_without_proc(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""
