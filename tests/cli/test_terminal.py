"""On a real terminal: progress bars, and Ctrl-C from the keyboard, once and three times."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

from tests.cli.commands import ran

DCP = "dcp_fsdp2_uneven_w4/ckpt"
OWN_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
WAITING = """
import contextlib, time
import ckptkit.cli.outcome, ckptkit.cli.main as commands
handle, pressed = commands._InterruptOnce.__call__, []
def progress(*_):
    print("READY", flush=True)
    end = time.monotonic() + 90
    while not pressed and time.monotonic() < end:
        time.sleep(0.01)
def noticed(self, *arguments):
    pressed.append(1)  # no lock: a second signal may come within this line
    handle(self, *arguments)
ckptkit.cli.outcome.progress_bar = lambda title: contextlib.nullcontext(progress)
commands._InterruptOnce.__call__ = noticed
commands.main(["convert", SOURCE, TARGET])
"""


BAR = """
import click, ckptkit.cli.frame as frame
frame.PROGRESS_DELAY_S = 0.0
with click.Context(click.Command("x")), frame.progress_bar("convert") as update:
    update(2_000_000, 4_000_000, "model.safetensors")
    update(4_000_000, 4_000_000, "model.safetensors")
    update(1_000_000, 4_000_000, "verify: model.safetensors")
"""


def on_a_terminal(script: str, *, keys: bytes = b"", columns: int = 100) -> tuple[int, str]:
    """Run a script on a terminal; type `keys` when it prints READY. Return exit code and screen."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    command = [sys.executable, "-c", OWN_TERMINAL + script]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    screen, deadline = b"", time.monotonic() + 120
    try:
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                data = os.read(ours, 65536)
            except OSError:  # its last process has closed the terminal
                break
            if not data:
                break
            screen += data
            if keys and b"READY" in screen:
                os.write(ours, keys)
                keys = b""
    finally:
        process.kill() if time.monotonic() >= deadline else process.wait(60)
        os.close(ours)
    return process.wait(), screen.decode(errors="replace")


@pytest.mark.parametrize("columns", [100, 0])
def test_a_terminal_shows_bytes_rate_and_file_even_if_it_reports_no_width(columns):
    code, screen = on_a_terminal(BAR, columns=columns)
    assert code == 0, screen
    assert re.search(r"convert: .*50%\|[^|]{5,}\| 2\.00M/4\.00M.*B/s.*model\.safetensors.*verify: ", screen, re.DOTALL)


@pytest.mark.parametrize("presses", [1, 3])
def test_ctrl_c_ends_a_conversion_and_prints_leftovers_and_how_to_continue(zoo, tmp_path, presses):
    names = f"SOURCE, TARGET = {str(zoo / DCP)!r}, {str(tmp_path / 'out')!r}\n"
    code, screen = on_a_terminal(names + WAITING, keys=b"\x03" * presses)
    assert code == 130, screen
    assert "Interrupted." in screen
    assert "same command again" in screen.replace("\r\n", " ")
    assert "Traceback" not in screen
    assert all(path.name.startswith(".tmp-out-") for path in tmp_path.iterdir())  # finished steps, if any
    ran("convert", zoo / DCP, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
