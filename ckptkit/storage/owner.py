"""Identifies a writer by process and directory, so that another process can check whether it is still alive."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptkit.storage.local import is_directory

if TYPE_CHECKING:
    from ckptkit.storage.store import Store

__all__ = ["Owner", "own_statement", "owner_in", "this_process"]


@dataclass(frozen=True, slots=True)
class Owner:
    """A process of some machine.

    Attributes:
        started: When the kernel started it, in its own ticks: a pid alone is given out again.
        machine: The boot and the pid namespace in which the pid means something: two containers of one
            name, or a machine before and after a reboot, differ.
        copied: It writes to another directory, and its statement came here with a copy of that one; None: perhaps.
    """

    host: str
    pid: int
    started: str
    machine: str
    copied: bool | None = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON."""
        return {"host": self.host, "pid": self.pid, "started": self.started, "machine": self.machine}

    @classmethod
    def from_json(cls, body: Any) -> Owner | None:
        """Return the owner that `body` states, None where it states none. Never raises."""
        if not isinstance(body, Mapping):
            return None
        host, pid, started, machine = (body.get(name) for name in ("host", "pid", "started", "machine"))
        if not (isinstance(host, str) and type(pid) is int and isinstance(started, str) and isinstance(machine, str)):
            return None
        return cls(host[:256], pid, started, machine)

    def alive(self) -> bool | None:
        """Tell whether the process lives and writes here; None where this process can't see: it is, or was, on another
        machine, or may write to the directory that this one was copied from.

        After a reboot of the same machine it is dead, though its boot is not ours. A machine without an id, as in most
        containers, may be another one of that name.
        """
        if self.machine != _machine():
            same = self.machine.split("/")[1:] == _machine().split("/")[1:] and self.host == _host()
            return False if same and not self.machine.endswith("/") else None
        if self.copied is not False:
            return False if self.copied else None
        return _start_of(self.pid) == self.started


def this_process() -> Owner:
    """Return this process as an owner."""
    return Owner(_host(), os.getpid(), _start_of(os.getpid()) or "", _machine())


def own_statement(store: Store) -> dict[str, Any]:
    """Return, as JSON, that this process writes to `store`."""
    return {**this_process().to_json(), "place": _place(store)}


def owner_in(store: Store, body: Any) -> Owner | None:
    """Return the owner that `body`, read below `store`, states; None where it states none. Never raises."""
    owner = Owner.from_json(body)
    if owner is None:
        return None
    stated, here = body.get("place"), _place(store)
    if here is None or not isinstance(stated, list) or len(stated) != len(here):
        return owner
    path, ground = stated[0] != here[0], stated[1:] != here[1:]
    if not is_directory(store):
        # One bucket can have several names: only time tells, since a living owner renews what it states.
        return replace(owner, copied=None) if path else owner
    # A moved directory, and one that is mounted twice, has another path. Some FUSE file systems change inode numbers.
    return replace(owner, copied=True if path else None) if ground else owner


def _place(store: Store) -> list[Any] | None:
    """Return what tells a directory from a copy of it: path, device, inode; on an object store bucket and key."""
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
    """Return "boot id / pid namespace / machine id"; on systems without /proc the host's name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        return f"{boot}/{namespace}/{_machine_id()}"
    except OSError:
        return f"{_host()}/-/-"


def _machine_id() -> str:
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """Return the start time of a process in ticks, None where there is no such process or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else _start_without_proc(pid)
    except (ProcessLookupError, PermissionError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the command's name may hold spaces and parentheses
    return None if fields[0] in "ZX" else fields[19]


def _start_without_proc(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return ""
    return ""
