"""`ckptkit copy`: copy a checkpoint or a whole run, byte for byte, from any store to any store."""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli.frame import (
    command_frame,
    if_interrupted,
    is_quiet,
    print_json,
    progress_bar,
    storage_options_of_both,
)
from ckptkit.cli.options import GroupedCommand, allow_pickle, grouped
from ckptkit.cli.outcome import interrupted_words, outcome_options, prints, results


@click.command("copy", cls=GroupedCommand)
@click.argument("src")
@click.argument("dst")
@grouped("What")("--all-files", is_flag=True, help="Also copy files that are not in a commit record.")
@allow_pickle("What")
@outcome_options
@storage_options_of_both
@command_frame
def command(src: str, dst: str, *, as_json: bool, **options: Any) -> None:
    """Copy the checkpoint or the run at SRC to DST, including optimizer states and commit records.

    The digests of SRC are checked while it is read. Each checkpoint is published only when it is complete. If SRC is a
    run, all its committed checkpoints are copied, oldest first. After an interruption, run the same command again to
    copy the rest.
    """
    from ckptkit.offline.copy import copy, run_at

    def words() -> str:
        there = {**(options["storage_options"] or {}), **(options["src_storage_options"] or {})}
        if run_at(src, storage_options=there) is None:
            return interrupted_words(dst, overwrite=options["overwrite"])
        return f"No checkpoint in {dst} is half copied. Run the same command again to copy the rest."

    if_interrupted(words)
    with progress_bar("copy") as progress:
        report = copy(src, dst, progress=progress, **options)
    if not prints():
        pass
    elif as_json:
        print_json(report.to_json())
    elif is_quiet() and not report.dry_run:
        click.echo(report.proof())
    else:
        click.echo("\n".join(results(report.lines())))
    if report.faults or any(item.faults for item in report.checkpoints):
        raise SystemExit(1)
