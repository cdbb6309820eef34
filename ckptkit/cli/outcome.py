"""The options and the output that `convert` and `reshard` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ckptkit.cli.frame import print_json

__all__ = ["outcome_options", "show_outcome"]

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = [
    click.option("--workers", type=click.IntRange(0), default=0, help="Copies in flight. Default: by the machine."),
    click.option("--max-memory", default="512MB", show_default=True, metavar="SIZE", help="Tensor bytes held at once."),
    click.option(
        "--no-check", "check", is_flag=True, flag_value=False, default=True, help="Skip the source's digests."
    ),
    click.option("--verify", is_flag=True, help="Read the result again and prove it equal to the source."),
    click.option("--dry-run", is_flag=True, help="Print the plan, write nothing."),
    click.option("--overwrite", is_flag=True, help="Replace DST, once the new one is complete."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
]


def outcome_options(function: F) -> F:
    """Add the options about how a result is made, checked and shown."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def show_outcome(report: Any, *, as_json: bool, dry_run: bool) -> None:
    """Print a ConvertReport: its plan for a dry run, else what was done and what was proved."""
    if as_json:
        print_json(report.to_json())
        return
    lines = report.plan_lines() if dry_run else report.lines()
    click.echo("\n".join(lines))
