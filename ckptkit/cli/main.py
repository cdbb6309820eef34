"""Runs the `ckptkit` command.

--help is fast, because the module of a subcommand is imported only when the subcommand is called.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import re
import signal
import threading
import time
from typing import Any

import click
from click.shell_completion import CompletionItem

from ckptkit.version import __version__

# name -> one-line description. The module ckptkit.cli.<name> defines the subcommand as `command`.
_COMMANDS = {
    "convert": "Convert any checkpoint to Hugging Face, DCP, torch or LOCAL files.",
    "merge": "Average several checkpoints, or the last ones of a run.",
    "reshard": "Rewrite a checkpoint for another cluster size.",
    "copy": "Copy a checkpoint or a whole run to another place, verified.",
    "inspect": "Show the contents of a checkpoint and the rank of each slice.",
    "ls": "List the checkpoints of a run, and why each is kept.",
    "verify": "Check that a checkpoint is complete and undamaged.",
    "diff": "Show which tensors of two checkpoints differ, and by how much.",
    "prune": "Delete the checkpoints that a retention policy does not keep.",
    "pin": "Protect a checkpoint from rotation.",
    "unpin": "Let rotation delete a pinned checkpoint again.",
    "push": "Upload an export to a Hugging Face repo.",
}
# name -> two example commands and a page of docs/, shown at the end of the subcommand's help.
_EXAMPLES = {
    "": (
        "ls RUN      # after a crash: the checkpoints that remain",
        "verify RUN  # is the newest one complete and undamaged?",
        "getting-started.md",
    ),
    "convert": (
        "convert RUN OUT --verify  # the newest checkpoint, for transformers and vLLM",
        "convert RUN/best s3://bucket/out --dtype bf16",
        "how-to-vllm.md",
    ),
    "merge": (
        "merge RUN OUT --last 8  # the average of the newest eight",
        "merge A B C OUT --weights 0.2,0.3,0.5 --dtype bf16",
        "how-to-merge.md",
    ),
    "reshard": (
        "reshard RUN NEW --world-size 24",
        "reshard RUN NEW --world-size 8 --mesh replicate=2,shard=4",
        "how-to-resume.md",
    ),
    "copy": ("copy RUN s3://bucket/run", "copy s3://bucket/run/best BEST", "remote.md"),
    "inspect": ("inspect RUN/latest --depth 2", "inspect RUN/latest --html map.html", "getting-started.md"),
    "ls": ("ls RUN", "ls RUN --max-num 3  # what this policy would delete", "rotation.md"),
    "verify": ("verify RUN", "verify s3://bucket/run/latest --quick", "how-to-recover.md"),
    "diff": ("diff RUN/latest~1 RUN/latest", "diff A B --include 'model.*'  # only the weights", "getting-started.md"),
    "prune": ("prune RUN --max-num 3 --dry-run", "prune RUN --max-mem 2TB --keep-every 1000", "rotation.md"),
    "pin": ("pin RUN/best", "pin RUN/1200 --why 'table 2 of the paper'", "rotation.md"),
    "unpin": ("unpin RUN/best", "unpin RUN/1200", "rotation.md"),
    "push": ("push OUT me/model", "push OUT me/model --private", "how-to-vllm.md"),
}
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_SAME_PRESS_S = 5.0  # interrupts within this many seconds count as one
_PLACE = re.compile("FILE|URL|DIR|html")  # metavars of the options that take a path or URL


def _write_epilog(name: str, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the end of a help text: two examples, and where the documentation is."""
    from ckptkit.cli.pages import place_of  # only --help reads the metadata of the installed package

    first, second, page = _EXAMPLES[name]
    formatter.write(f"\n  Examples:\n    ckptkit {first}\n    ckptkit {second}\n\n  More: {place_of(page)}\n")


class _Commands(click.Group):
    """A click group that imports the module of a subcommand only when the subcommand is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"ckptkit.cli.{cmd_name}")
        command: click.Command = module.command
        command.format_epilog = functools.partial(_write_epilog, cmd_name)  # type: ignore[method-assign]
        for param in command.params:
            named = isinstance(param, click.Argument) or _PLACE.search(str(param.metavar or ""))
            if named and type(param.type) is click.types.StringParamType:
                param.type = _PathArgument()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else f" Known: {', '.join(_COMMANDS)}."
            raise click.UsageError(f"No such command '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # raised before or after the subcommand itself
            click.echo("Interrupted.", err=True)
            raise SystemExit(_INTERRUPTED) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_epilog("", ctx, formatter)


class _PathArgument(click.types.StringParamType):
    """A path or URL. Shells complete it as a path."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


def _print_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"ckptkit {__version__}")
        ctx.exit()


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """Convert, reshard, verify, compare, copy and rotate checkpoints of PyTorch training.

    A URL is a path, or anything that fsspec opens (s3://, gs://). If a command takes a checkpoint and you give the
    directory of a run, the command takes the run's newest committed checkpoint.

    Exit codes: 0 success; 1 failure, damage or a difference; 2 wrong usage; 130 interrupted.
    """


class _InterruptOnce:
    """Raises KeyboardInterrupt on SIGINT. Ignores further SIGINTs for 5 seconds, so that the cleanup can finish.

    A second SIGINT is common: launchers forward the terminal's signal again, and people press Ctrl-C twice.
    """

    def __init__(self) -> None:
        self._last = -_SAME_PRESS_S

    def __call__(self, _signum: int, _frame: Any) -> None:
        if time.monotonic() - self._last >= _SAME_PRESS_S:
            self._last = time.monotonic()
            raise KeyboardInterrupt


def main(args: list[str] | None = None) -> Any:
    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and before is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _InterruptOnce())
    try:
        return cli.main(args=args, prog_name="ckptkit")
    except SystemExit as end:
        if ours and end.code == _INTERRUPTED:
            # The cleanup is done. Another Ctrl-C while Python exits would change the exit code, so ignore it.
            before = signal.SIG_IGN
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
