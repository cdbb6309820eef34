"""Runs commands on one directory in a forked process, with limits on time, memory and the files that they touch."""

import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 10.0  # CPU time, so that a busy machine does not matter
_HANGS_SECONDS = 300  # wall time: for commands that wait for ever, for example on a FIFO
# Twice a good run plus 256 MiB: a good run without torch takes 64 MiB, and these commands add little.
LIMIT_BYTES = (256 + 64) << 20
_ADDRESS_SPACE = 6 << 30
_SECRET = "S3CRET-OF-THE-HOST"


class Place:
    """The directories of one case.

    `src` is hostile; `outside` holds files that a hostile file tries to read; a payload creates `marker`.
    """

    def __init__(self, top: Path) -> None:
        self.top, self.marker, self.control = top, top / "PWNED", top / "control"
        self.src, self.outside, self.work = top / "src", top / "outside", top / "work"
        for path in (self.src, self.outside, self.work):
            path.mkdir(parents=True)
        (self.outside / "secret.txt").write_text(_SECRET)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The effects of one command. `bad` lists the forbidden ones."""

    code: int
    text: str
    bad: list[str]


def _read_all(url: str) -> None:
    from ckptkit.checkpoint.mapping import open_checkpoint

    checkpoint = open_checkpoint(url)
    for name in list(checkpoint)[:200]:
        value = checkpoint[name]
        if hasattr(value, "to_torch"):
            value.to_torch()


def _load(url: str) -> None:
    """Load into a job like a training script."""
    import torch

    from ckptkit.checkpoint.manager import CheckpointManager
    from ckptkit.checkpoint.state.train_state import TrainState

    with CheckpointManager(url) as manager:
        if manager.load(TrainState(model=torch.nn.Linear(4, 4))) is None:
            raise FileNotFoundError(url)


Command = Sequence[str] | Callable[[str], None]
COMMANDS: dict[str, Command] = {
    "inspect": ("inspect", "{src}"),
    "inspect --json": ("inspect", "{src}", "--json", "--tensors", "*"),
    "inspect --html": ("inspect", "{src}", "--html", "{work}/page.html"),
    "verify": ("verify", "{src}"),
    "verify --quick": ("verify", "{src}", "--quick"),
    "ls": ("ls", "{src}", "--all"),
    "diff": ("diff", "{src}", "{control}"),
    "convert hf": ("convert", "{src}", "{work}/hf"),
    "copy": ("copy", "{src}", "{work}/copy"),
    "convert local": ("convert", "{src}", "{work}/local", "--to", "local", "--world-size", "2"),
    "reshard": ("reshard", "{src}", "{work}/resharded", "--world-size", "3"),
    "open": _read_all,
    "load": _load,
    "pin": ("pin", "{src}/latest", "--why", "test"),
    "prune": ("prune", "{src}", "--max-num", "1"),
}
PINS = (".ckptkit", "pins")
CHANGING = ("pin", "prune", "load")  # may write into the run's directory: pins, lease


def run_commands(place: Place, names: Sequence[str] = tuple(COMMANDS)) -> dict[str, Outcome]:
    """Run these commands in turn on `place.src`, in a child of this process."""
    reader, writer = os.pipe()
    before = tree(place.top, without=place.work)
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(place, names, writer)
    os.close(writer)
    with os.fdopen(reader) as lines:
        outcomes = {name: Outcome(*json.loads(line)) for name, line in zip(names, lines, strict=False)}
    _, status = os.waitpid(pid, 0)
    if status or len(outcomes) != len(names):
        outcomes[names[len(outcomes)]] = Outcome(-1, "", [f"the process ended with status {status}"])
    after = tree(place.top, without=place.work)
    if before != after and not set(names) & set(CHANGING):
        changed = sorted(set(before.items()) ^ set(after.items()))[:3]
        outcomes["tree"] = Outcome(0, "", [f"files changed outside of DST: {changed}"])
    if place.marker.exists():
        outcomes["marker"] = Outcome(0, "", ["CODE FROM THE CHECKPOINT RAN"])
    return outcomes


def tree(top: Path, *, without: Path) -> dict[str, Any]:
    """Return every name below `top` with its kind, target, size and modification time, except an empty directory of
    pins, which readers of a run create."""
    found = {}
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if Path(folder, name) != without]
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.parts[-2:] == PINS and not path.is_symlink() and path.is_dir() and not any(path.iterdir()):
                continue
            status = path.lstat()
            target = os.readlink(path) if path.is_symlink() else ""
            # The size of a directory depends on the file system.
            content = (status.st_size, status.st_mtime_ns) if name in files else ()
            found[str(path)] = (status.st_mode, *content, target)
    return found


# --- the child


def _child(place: Place, names: Sequence[str], writer: int) -> None:
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        limit_address_space()
        here = place.work / "cwd"
        here.mkdir(exist_ok=True)
        os.chdir(here)
        events: list[str] = []
        sys.addaudithook(_watch(place, events))
        with os.fdopen(writer, "w") as lines:
            for name in names:
                lines.write(json.dumps(astuple(_run(place, name, events))) + "\n")
                lines.flush()
        code = 0
    finally:
        os._exit(code)


def _watch(place: Place, events: list[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """Install an audit hook that records accesses outside of SRC and DST, and every started program."""
    outside = str(place.outside)
    written = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pty.spawn", "socket.connect"):
            events.append(f"{event} {args!r:.100}")
        elif event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(args[0]))
            flags = args[2] if isinstance(args[2], int) else 0
            if path.startswith(outside) or path in ("/etc/passwd", "/dev/zero"):
                events.append(f"opened {path}")
            elif flags & written and path.startswith("/etc"):
                events.append(f"wrote {path}")

    return hook


def _run(place: Place, name: str, events: list[str]) -> Outcome:
    from click.testing import CliRunner

    from ckptkit.cli.main import cli
    from ckptkit.errors import CkptkitError

    events.clear()
    shutil.rmtree(place.work / "hf", ignore_errors=True)
    command = COMMANDS[name]
    before, started = start_watching(), time.process_time()
    signal.alarm(_HANGS_SECONDS)
    if callable(command):
        code, text, bad = 0, "", []
        try:
            command(str(place.src))
        except (CkptkitError, OSError) as error:
            code, text = 1, f"Error: {error}"
        except Exception as error:
            code, text, bad = 1, str(error), [f"raised {type(error).__name__}: {error}"]
    else:
        values = {"src": place.src, "work": place.work, "control": place.control}
        result = CliRunner().invoke(cli, [part.format(**values) for part in command], color=True)
        code, text, bad = result.exit_code, result.output, []
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            bad.append(f"raised {type(result.exception).__name__}: {result.exception}")
    signal.alarm(0)
    seconds, grown = time.process_time() - started, memory_of("VmHWM") - before
    bad += [*events, *_words(text, code, printed=not callable(command)), *_limits(seconds, grown)]
    return Outcome(code, text[-4000:], bad)


def _words(text: str, code: int, *, printed: bool) -> list[str]:
    bad = [f"it shows {word!r}" for word in ("Traceback", "bug in ckptkit", _SECRET) if word in text]
    if printed and any((ord(c) < 32 and c not in "\n\t") or c in "\x7f\u202e\u2066\u2067" for c in text):
        bad.append("it prints control characters of the checkpoint")
    if code not in (0, 1, 2):
        bad.append(f"exit code {code}")
    errors = [line for line in text.splitlines() if line.startswith("Error: ")]
    if len(errors) > 1 or any(len(line) > 3000 for line in errors):
        bad.append("its error is not a single paragraph")
    return bad


def _limits(seconds: float, grown: int) -> list[str]:
    bad = [f"it took {seconds:.1f} s"] if seconds > LIMIT_SECONDS else []
    return bad + ([f"it took {grown >> 20} MB"] if grown > LIMIT_BYTES else [])


def limit_address_space() -> None:
    """Limit the memory of this process, so that a request for gigabytes fails here."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + _ADDRESS_SPACE, size + _ADDRESS_SPACE))


def start_watching() -> int:
    """Reset the peak memory of this process, and return its memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_of("VmRSS")


def memory_of(field: str) -> int:
    """Return a field of /proc/self/status in bytes: "VmRSS", the memory of this process, or "VmHWM", its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)
