"""`ckptkit ls`: list the checkpoints of a run."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli.frame import command_frame, is_quiet, json_option, note, print_json, storage_option
from ckptkit.cli.retention import policy_options, take_policy
from ckptkit.errors import command_line
from ckptkit.units import counted, format_duration, format_size

_STEP = re.compile(r"step_\d+")

if TYPE_CHECKING:
    from ckptkit.offline.listing import Listed, Listing


@click.command("ls")
@click.argument("root")
@click.option("--all", "every", is_flag=True, help="List all skipped and foreign entries.")
@json_option
@click.option("--html", metavar="OUT.html", help="Write a page with the timeline of the run.")
@policy_options
@storage_option
@command_frame
def command(root: str, *, every: bool, as_json: bool, html: str | None, **options: Any) -> None:
    """List the checkpoints of the run at ROOT: step, age, size, type, ranks and metrics. For each checkpoint, show
    whether rotation would keep it or delete it, and why.

    Uses the policy that the run recorded. Any --max-... or --keep-... option replaces all recorded limits. With
    --quiet, prints only names.
    """
    from ckptkit.offline.listing import list_run

    policy = take_policy(options)
    listing = list_run(root, policy=policy, **options)
    if html:
        from ckptkit.offline.pictures.pages import write_run_page

        write_run_page(listing, html)
        note(f"wrote {html}")
    if as_json:
        print_json(listing.to_json())
    elif is_quiet():
        click.echo("".join(f"{row.name}\n" for row in listing.checkpoints if row.state == "committed"), nl=False)
    else:
        click.echo("\n".join(_lines(listing, every=every)))


def _lines(listing: Listing, *, every: bool) -> list[str]:
    shown = [
        row for row in listing.checkpoints
        if every or row.state != "skipped" or row.damaged or _STEP.fullmatch(row.name)
    ]  # fmt: skip
    table = [["name", "step", "age", "size", "type", "ranks", "metrics", "rotation"]]
    table += [_cells(row) for row in shown]
    lines = _aligned(table, shutil.get_terminal_size().columns if sys.stdout.isatty() else 0)
    count = sum(row.state == "committed" for row in shown)
    absent = f"; {counted(listing.absent, 'earlier checkpoint', 'are')} gone" if listing.absent else ""
    lines.append(f"{counted(count, 'checkpoint')}, {format_size(listing.total_bytes)}{absent}")
    hidden = len(listing.checkpoints) - len(shown)
    if hidden:
        what = "directory is" if hidden == 1 else "directories are"
        lines.append(f"{hidden} other {what} skipped; to see why: {command_line('ls', '--all', listing.url)}")
    if every and listing.foreign:
        lines.append(f"not checkpoints of this run, never touched: {', '.join(listing.foreign)}")
    return lines


def _aligned(table: list[list[str]], columns: int) -> list[str]:
    """Return the table as aligned lines.

    If any line would be wider than `columns`, the last cell of each row is put on lines of its own, below the row.
    `columns` 0 means no limit.
    """
    widths = [max(len(cells[i]) for cells in table) for i in range(len(table[0]) - 1)]
    heads = ["  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=False)) for cells in table]
    lines = [f"{head}  {cells[-1]}".rstrip() for head, cells in zip(heads, table, strict=True)]
    if not columns or max(map(len, lines)) <= columns:
        return lines
    folded = [heads[0].rstrip()]
    for head, cells in zip(heads[1:], table[1:], strict=True):
        folded += [head.rstrip(), *textwrap.wrap(cells[-1], columns, initial_indent="    ", subsequent_indent="    ")]
    return folded


def _cells(row: Listed) -> list[str]:
    metrics = ", ".join(f"{name}={value:.4g}" for name, value in (row.metrics or {}).items())
    verdict = {True: "keep: ", False: "delete: ", None: ""}[row.keep]
    state = "" if row.state == "committed" else f"{row.state}: "
    return [
        row.name,
        "" if row.step is None else str(row.step),
        "" if row.age_s is None else format_duration(row.age_s),
        "" if row.nbytes is None else format_size(row.nbytes),
        row.type,
        "" if row.world_size is None else str(row.world_size),
        metrics,
        verdict + state + row.why,
    ]
