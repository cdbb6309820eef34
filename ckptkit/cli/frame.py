"""Gives every command the common options, error messages, exit codes, JSON output and progress bar."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import re
import shutil
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO, TypeVar, cast

import click

from ckptkit.cli.options import grouped, warn_of_pickles
from ckptkit.errors import CkptkitError, CorruptCheckpointError, UsageError
from ckptkit.redact import keep_secret, printable, without_known_secrets, without_secrets
from ckptkit.storage.retry import patient, words_of

F = TypeVar("F", bound=Callable[..., Any])
StorageOptions = Mapping[str, Any] | None
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
PROGRESS_DELAY_S = 1.0  # shorter operations show no bar
_LISTED = 5  # maximum lines of a list that are shown without --verbose
# An option in a sentence, and the word before it. Not in a command line ("ckptkit ls --all RUN").
_ADVISED = re.compile(r"ckptkit \w[^`\n]*|(?:([\w-]+) )?(?<![\w-])(--[a-z][a-z-]*[a-z])")


def command_frame(function: F) -> F:
    """Add --quiet, --verbose and --debug to a command. Turn each exception into an error message and an exit code."""
    output = grouped("Output")

    @output("-q", "--quiet", is_flag=True, help="Print results, warnings and errors only.")
    @output("-v", "--verbose", is_flag=True, help="Print what is being done, and long lists in full.")
    @output("--debug", is_flag=True, help="Show a traceback when something fails.")
    @functools.wraps(function)
    def framed(*args: Any, quiet: bool, verbose: bool, debug: bool, **kwargs: Any) -> None:
        debug = debug or bool(os.environ.get("CKPTKIT_DEBUG"))
        level = logging.ERROR if quiet else logging.DEBUG if verbose or debug else logging.WARNING
        rank = "rank %(rank)s " if int(os.environ.get("WORLD_SIZE") or 1) > 1 else ""
        # Show the module name only with --verbose.
        words = f"%(levelname)s {rank}%(name)s: " if verbose or debug else f"Warning: {rank}"
        logging.basicConfig(level=logging.WARNING, format=f"{words}%(message)s", stream=sys.stderr)
        logging.getLogger("ckptkit").setLevel(level)
        click.get_current_context().meta.update({"ckptkit.quiet": quiet, "ckptkit.verbose": verbose})
        try:
            _refuse_empty(click.get_current_context())
            if kwargs.get("allow_pickle") and not quiet:
                warn_of_pickles()
            with redirect_stdout(cast(TextIO, _Printable(sys.stdout))), patient():
                function(*args, **kwargs)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            # The program that reads our output has exited (`| head`).
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(0) from None
        except KeyboardInterrupt:
            words = click.get_current_context().meta.get("ckptkit.interrupted", "Nothing was changed.")
            _say(f"Interrupted. {words() if callable(words) else words}")
            raise SystemExit(INTERRUPTED) from None
        except Exception as error:  # noqa: BLE001 - the boundary of the process: reported, with a way to see more
            if debug:
                click.echo(printable(without_secrets(traceback.format_exc())), err=True, nl=False)
            text = _message(error)
            _say((text if debug else _shortened(text)) + _elsewhere(text) + ("" if quiet else _older(error)))
            raise SystemExit(error.exit_code if isinstance(error, CkptkitError) else 1) from None

    return framed  # type: ignore[return-value]


def _refuse_empty(context: click.Context) -> None:
    """Raise UsageError if an option is "". The usual cause is a shell variable that is not set."""
    for option in context.command.params:
        value = context.params.get(option.name or "")
        if isinstance(option, click.Option) and (value == "" or (isinstance(value, tuple) and "" in value)):
            raise UsageError(f"{option.opts[0]} is empty. Is a shell variable not set?")


def if_interrupted(words: str | Callable[[], str]) -> None:
    """Set the message that Ctrl-C prints: which files remain, and how to continue.

    If `words` is a function, it is called on Ctrl-C and returns the message.
    """
    click.get_current_context().meta["ckptkit.interrupted"] = words


def _message(error: Exception) -> str:
    if isinstance(error, CkptkitError):
        # Not str(error): OSError.__str__ puts "[Errno n]" in front.
        text = error.args[1] if isinstance(error, OSError) and len(error.args) > 1 else str(error)
        return f"Error: {text}"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"Error: {place}{error.strerror or words_of(error)}."
    return f"Error: {type(error).__name__}: {error}. This is a bug in ckptkit; --debug shows where it happened."


def _elsewhere(text: str) -> str:
    """Return a line for the options in `text` that only other commands have. Returns "" if there are none.

    Most errors come from code that several commands share.
    """
    context = click.get_current_context()
    group, name = context.find_root().command, context.info_name
    own = {option for param in context.command.params for option in param.opts}
    advised = {match[2]: match[1] for match in _ADVISED.finditer(text) if match[2] and match[2] not in own}
    if not advised or not isinstance(group, click.Group) or name not in group.list_commands(context):
        return ""
    commands = {other: group.get_command(context, other) for other in group.list_commands(context)}
    owners: dict[str, list[str]] = {}
    for option, before in advised.items():
        found = [other for other, command in commands.items() if command and _has(command, option)]
        if found and before not in found:  # in "convert --untie", the option belongs to the command before it
            owners.setdefault(found[0], []).append(option)
    then = f" Use it on the checkpoint first, then {name} the result." if name in ("merge", "diff") else ""
    return "".join(
        f"\n{' and '.join(options)} {'are options' if options[1:] else 'is an option'} of {owner}, not of {name}.{then}"
        for owner, options in owners.items()
    )


def _has(command: click.Command, option: str) -> bool:
    return any(option in param.opts for param in command.params)


def _older(error: Exception) -> str:
    """Return a line that names the run's last checkpoint before the damaged one that `error` reports.

    Returns "" if there is none, or if `error` does not report a damaged checkpoint.
    """
    if not isinstance(error, CorruptCheckpointError) or not error.checkpoint:
        return ""
    from ckptkit.offline.reading import earlier_checkpoint

    given = click.get_current_context().params
    options = {**(given.get("storage_options") or {}), **(given.get("src_storage_options") or {})}
    older = earlier_checkpoint(error.checkpoint, storage_options=options)
    return f"\nThe previous checkpoint: {older}" if older else ""


class _Printable:
    """A wrapper of stdout that removes credentials and escapes control characters."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(printable(without_known_secrets(text)) if isinstance(text, str) else text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def shortened(lines: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Keep at most five consecutive lines of the same kind, and count the others. With --verbose, keep all lines.

    `kinds` contains the kind of each line. Lines of the kind "" are always kept.
    """
    if click.get_current_context().meta.get("ckptkit.verbose"):
        return list(lines)
    shown: list[str] = []
    for kind, group in itertools.groupby(zip(lines, kinds, strict=True), lambda pair: pair[1]):
        found = [line for line, _ in group]
        shown += found[:_LISTED] if kind else found
        if kind and len(found) > _LISTED:
            indent = "  " * found[0].startswith("  ")
            shown.append(f"{indent}... and {len(found) - _LISTED} more of {len(found)}; --verbose lists them")
    return shown


def _shortened(text: str) -> str:
    """Shorten the lists in an error message. A list consists of consecutive indented lines with the same first word."""
    lines = text.splitlines()
    return "\n".join(shortened(lines, [line.split(" ", 3)[2] if line.startswith("  ") else "" for line in lines]))


def _say(text: str) -> None:
    text = printable(without_secrets(text))
    width = min(100, shutil.get_terminal_size().columns) if sys.stderr.isatty() else 0
    body = "\n".join(_filled(line, width) for line in text.splitlines()) if width else text
    head, separator, rest = body.partition(":")
    if head == "Error" and separator:
        body = click.style("Error:", fg="red", bold=True) + rest
    click.echo(body, err=True, color=_colour(sys.stderr))


def _filled(line: str, width: int) -> str:
    indent = "  " * line.startswith("  ")
    return textwrap.fill(line, width, subsequent_indent=indent * 2, break_long_words=False, break_on_hyphens=False)


def _colour(stream: Any) -> bool:
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR")


def is_quiet() -> bool:
    """Return whether --quiet was given. If so, print only results and errors."""
    return bool(click.get_current_context().meta.get("ckptkit.quiet", False))


def note(text: str) -> None:
    """Print a note on stderr. With --quiet, print nothing."""
    if not is_quiet():
        click.echo(text, err=True)


def print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, default=str, allow_nan=False))


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """Yield a function that updates a progress bar. Yield None with --quiet, or if stderr is not a terminal.

    The function takes the number of bytes done, the total number of bytes, and a text: "FILE" or "PHASE: FILE".
    """
    if is_quiet() or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    first = time.monotonic() + PROGRESS_DELAY_S
    known = _width_is_known(sys.stderr)
    with tqdm(
        desc=title,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        leave=False,
        dynamic_ncols=known,
        ncols=None if known else 80,
        delay=PROGRESS_DELAY_S,
    ) as bar:

        def update(done: int, total: int, what: str) -> None:
            if time.monotonic() < first:  # tqdm would show the bar at once when the description changes
                return
            if done < bar.n:  # a new phase has begun, such as reading the result back
                bar.reset()
            bar.total = total
            phase, _, file = what.rpartition(": ")
            if file:
                bar.set_postfix_str(file[-30:], refresh=False)
            bar.update(done - bar.n)
            if bar.desc != f"{phase or title}: ":
                bar.set_description(phase or title)

        yield update


def _width_is_known(stream: Any) -> bool:
    """Return whether the terminal reports its width. Some report 0 columns, and tqdm would draw a bar of one cell."""
    try:
        return os.get_terminal_size(stream.fileno()).columns > 0
    except OSError:
        return True


def _parsed(_context: click.Context, option: click.Parameter, pairs: tuple[str, ...]) -> Mapping[str, Any] | None:
    """Return KEY=VALUE pairs as a mapping, or None if there are no pairs. Values that are valid JSON are decoded."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise click.UsageError(f"{option.opts[0]} takes KEY=VALUE, such as endpoint_url=http://localhost:9000.")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    keep_secret(options)
    return options or None


def _storage_option(which: str, about: str) -> Callable[[F], F]:
    name = f"{which}storage-option"
    return grouped("Output")(
        f"--{name}", f"{name.replace('-', '_')}s", multiple=True, metavar="K=V", callback=_parsed, help=about
    )


storage_option = _storage_option(
    "", "Option of the fsspec file system, such as endpoint_url=http://...; may be given several times."
)


def storage_options_of_both(function: F) -> F:
    """Add --storage-option, --src-storage-option and --dst-storage-option to a command."""
    function = _storage_option("dst-", "Like --storage-option, for the destination only.")(function)
    function = _storage_option("src-", "Like --storage-option, for the source only.")(function)
    return storage_option(function)


json_option = grouped("Output")("--json", "as_json", is_flag=True, help="Print one JSON document.")
