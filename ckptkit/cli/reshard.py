"""`ckptkit reshard`: rewrite a checkpoint for a different number of ranks."""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli.frame import command_frame, storage_options_of_both
from ckptkit.cli.options import Count, GroupedCommand, OneOf, allow_pickle, grouped, layout
from ckptkit.cli.outcome import carry_out, outcome_options, vocabulary_options

_what = grouped("What")


@click.command("reshard", cls=GroupedCommand)
@click.argument("src")
@click.argument("dst")
@_what("--world-size", type=Count(1), required=True, metavar="N", help="Ranks of the new job.")
@_what("--mesh", metavar="NAME=N,...", help="Mesh of the new job, such as replicate=2,shard=4,tp=2.")
@_what(
    "--type",
    type=OneOf(["sharded", "local"]),
    default="sharded",
    show_default=True,
    metavar="TYPE",
    help="sharded (torch DCP) or local (one file per rank).",
)
@_what(
    "--tp-plan", metavar="FILE", help="JSON file that maps globs of parameter names to the dimension that tp splits."
)
@vocabulary_options
@allow_pickle("What")
@layout("What")
@outcome_options
@storage_options_of_both
@command_frame
def command(src: str, dst: str, **options: Any) -> None:
    """Rewrite the checkpoint at SRC for a different number of ranks or a different mesh. The result is written to DST.

    Optimizer states, master weights and schedulers are included. Each shard is stored once, in the file of a rank that
    loads it.
    """
    from ckptkit.offline.reshard import reshard

    carry_out(reshard, src, dst, **options)
