"""Runs one damaged input in an empty directory, with limits on CPU time and memory."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptkit.errors import CkptkitError

MAX_SECONDS = 10.0  # of CPU time
MAX_BYTES = 256 << 20
_ADDRESS_SPACE = 4 << 30
Target = Callable[[random.Random, Path], None]


class Finding(AssertionError):
    """A damaged input had a forbidden effect."""


def check_message(error: CkptkitError, *files: str) -> None:
    """Check that an error names one of these files in a readable message."""
    text = str(error)
    if (files and not any(file in text for file in files)) or max(map(len, text.split("\n"))) > 1100:
        raise Finding(f"the message does not name the file, or is too long: {text[:300]}") from error


@contextlib.contextmanager
def refused(*files: str, unless: str | None = None) -> Iterator[None]:
    """Accept an error of ckptkit with a readable message that names one of these files, or contains `unless`."""
    try:
        yield
    except CkptkitError as error:
        if unless is None or unless not in str(error):
            check_message(error, *files)


def run_input(target: Target, rng: random.Random, folder: Path, *, memory: bool = False) -> None:
    """Run one input. Raises: Finding, or any exception of the reader.

    Args:
        memory: Also limit the memory, which needs a separate process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    here = Path.cwd()
    before = _start_watching() if memory else 0
    started = time.process_time()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        try:
            target(rng, folder)
        finally:
            os.chdir(here)
        if os.listdir(empty):
            raise Finding("something was written to the working directory")
    seconds = time.process_time() - started
    if seconds > MAX_SECONDS:
        raise Finding(f"took {seconds:.1f} s")
    if memory and _memory("VmHWM") - before > MAX_BYTES:
        raise Finding(f"took {(_memory('VmHWM') - before) >> 20} MB")


def limit_address_space() -> None:
    """Limit the memory of this process, so that a request for gigabytes fails here."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + _ADDRESS_SPACE, size + _ADDRESS_SPACE))


def _clear(folder: Path) -> None:
    for top, folders, files in os.walk(folder, topdown=False):
        for name in files:
            os.unlink(os.path.join(top, name))
        for name in folders:
            path = os.path.join(top, name)
            (os.unlink if os.path.islink(path) else os.rmdir)(path)


def _start_watching() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)
