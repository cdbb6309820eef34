"""Runs one damaged input in an empty directory, with limits on CPU time and memory."""

import contextlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptkit.errors import CkptkitError
from tests.hostile.harness import memory_of, start_watching

MAX_SECONDS = 10.0  # of CPU time
MAX_BYTES = 256 << 20
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
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    here = Path.cwd()
    before = start_watching() if memory else 0
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
    if memory and (grown := memory_of("VmHWM") - before) > MAX_BYTES:
        raise Finding(f"took {grown >> 20} MB")
