"""Copies between files that stay in the kernel: which call is the quickest where, and what to do when it can't."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from ckptkit.storage.writeback import start_writing

__all__ = ["KernelCopy", "copy_range", "pick", "shares_memory", "splice_range", "start_writing", "takes_turns"]

# (source, its start, target, its start, bytes) -> (bytes done, whether it may be asked again).
# Fewer bytes than asked, and able: the source ends.
KernelCopy: TypeAlias = Callable[[int, int, int, int, int], tuple[int, bool]]

_UNABLE = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ of linux/fcntl.h; in `fcntl` since Python 3.10 on Linux alone
_PIPE = 1 << 20  # what any user may have; the kernel's own copy takes 64 KiB at a time
_NO_SHARING = ("ext2", "ext3", "ext4")  # copy_file_range is a splice in 64 KiB steps here, slower by a fifth
_TURNS = (*_NO_SHARING, "tmpfs", "xfs", "btrfs", "f2fs", "zfs", "overlay")
_pipes = threading.local()


def pick(folder: str, *, one_file: bool = False) -> KernelCopy | None:
    """Return how to copy into files below `folder`; None where reading and writing is quicker, or all that is left.

    `one_file`: most of it goes into one file, into whose memory bytes are laid while another thread writes to it.
    """
    kind = _file_system(folder)
    if hasattr(os, "splice") and kind == "tmpfs" and not one_file:
        return splice_range
    if kind in _NO_SHARING:
        return None
    return copy_range if hasattr(os, "copy_file_range") else None


def takes_turns(folder: str) -> bool:
    """Tell whether the file system at `folder` is known to let one thread at a time write to a file.

    A second one spins at its door, which costs a processor and gains nothing.
    """
    return _file_system(folder) in _TURNS


def shares_memory(folder: str) -> bool:
    """Tell whether the files at `folder` are memory and nothing else: mapped, it takes what is not written in turn."""
    return _file_system(folder) == "tmpfs"


def copy_range(source: int, start: int, target: int, at: int, nbytes: int) -> tuple[int, bool]:
    """Copy by copy_file_range: file systems may share blocks, servers copy on their side."""
    done = 0
    while done < nbytes:
        try:
            count = os.copy_file_range(source, target, nbytes - done, start + done, at + done)
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
            return done, False
        if count == 0:
            break
        done += count
    return done, True


def splice_range(source: int, start: int, target: int, at: int, nbytes: int) -> tuple[int, bool]:
    """Copy through a large pipe: on tmpfs a tenth less work than copy_file_range, which takes smaller steps."""
    reader, writer = _pipe()
    done = 0
    try:
        while done < nbytes:
            held = os.splice(source, writer, min(nbytes - done, _PIPE), offset_src=start + done)
            if held == 0:
                break
            while held:
                count = os.splice(reader, target, held, offset_dst=at + done)
                held -= count
                done += count
    except BaseException as error:
        _drop_pipe()  # what it holds belongs nowhere now
        if isinstance(error, OSError) and error.errno in _UNABLE:
            return done, False
        raise
    return done, True


def _pipe() -> tuple[int, int]:
    """The pipe of this thread, empty."""
    held: _Pipe | None = getattr(_pipes, "own", None)
    if held is None:
        held = _pipes.own = _Pipe()
    return held.ends


def _drop_pipe() -> None:
    _pipes.own = None


class _Pipe:
    """A pipe that is closed with the thread that it belongs to."""

    def __init__(self) -> None:
        self.ends = os.pipe()
        with contextlib.suppress(OSError):  # the user has many pipes already: a small one serves too
            fcntl.fcntl(self.ends[1], _SET_PIPE_SIZE, _PIPE)

    def __del__(self) -> None:
        for end in self.ends:
            os.close(end)


def _file_system(folder: str) -> str:
    """The type of the file system at `folder`, as Linux calls it; "" where it can't be told."""
    try:
        device = os.stat(folder).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as mounts:
            for line in mounts:
                if line.split(" ", 3)[2] == wanted:
                    return line.partition(" - ")[2].split(" ", 1)[0]
    except (OSError, IndexError):
        pass
    return ""
