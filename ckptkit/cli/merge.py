"""`ckptkit merge`: average several checkpoints, or the newest checkpoints of a run."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from ckptkit.cli.convert import export_options
from ckptkit.cli.frame import command_frame, storage_options_of_both
from ckptkit.cli.options import Count, GroupedCommand, OneOf, grouped
from ckptkit.cli.outcome import carry_out, outcome_options

_what = grouped("What")


@click.command("merge", cls=GroupedCommand)
@click.argument("srcs", nargs=-1, required=True, metavar="SRC...")
@click.argument("dst")
@_what(
    "--weights",
    default="uniform",
    show_default=True,
    metavar="WHICH",
    help="uniform, minus-sqrt, ema:DECAY, or one number for each SRC, such as 0.2,0.3,0.5.",
)
@_what("--last", type=Count(2), metavar="N", help="SRC is a run: merge its last N checkpoints.")
@_what("--steps", metavar="FIRST:LAST", help="SRC is a run: merge its checkpoints from step FIRST to LAST, inclusive.")
@_what(
    "--sum-dtype",
    type=OneOf(["fp32", "fp64"]),
    default="fp32",
    show_default=True,
    metavar="DTYPE",
    help="Precision of the sums: fp32 or fp64.",
)
@partial(export_options, weights="--take")
@outcome_options
@storage_options_of_both
@command_frame
def command(srcs: tuple[str, ...], dst: str, **options: Any) -> None:
    """Write the weighted average of the checkpoints SRC... to DST. Give the oldest checkpoint first.

    The sources may have different formats and world sizes, but must have the same tensors. Only model weights are
    averaged. DST has no optimizer states. The result is bit-identical for any --workers and --max-memory.
    """
    from ckptkit.offline.merge import merge

    carry_out(merge, srcs, dst, **options)
