"""`ckptkit merge`: average several checkpoints, or the last ones of a run."""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli.convert import OTHER_NAMES, dtype_option
from ckptkit.cli.frame import command_frame, progress_bar, storage_options_of_both, with_storage_options
from ckptkit.cli.options import Count, GroupedCommand, OneOf, grouped
from ckptkit.cli.outcome import explain_interrupts, outcome_options, show_outcome

_what, _names, _model, _files = grouped("What"), grouped("Names"), grouped("Model"), grouped("Files")


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
@_what("--steps", metavar="FIRST:LAST", help="SRC is a run: merge its checkpoints from FIRST to LAST, both included.")
@_what(
    "--sum-dtype",
    type=OneOf(["fp32", "fp64"]),
    default="fp32",
    show_default=True,
    metavar="DTYPE",
    help="fp32 or fp64: the precision of the sums.",
)
@_what(
    "--take",
    type=OneOf(["auto", "model", "master"]),
    default="auto",
    show_default=True,
    metavar="WHICH",
    help="model, or master (the fp32 copies that some optimizers keep). auto: model, or master if --dtype casts.",
)
@_what(
    "--to",
    type=OneOf(["hf", "dcp", "torch", "local"], meant=OTHER_NAMES),
    default="hf",
    show_default=True,
    metavar="FORMAT",
    help="hf, dcp, torch or local, as for convert.",
)
@dtype_option
@_what("--include", multiple=True, metavar="GLOB", help="Only these tensors; may be given several times.")
@_what("--exclude", multiple=True, metavar="GLOB", help="Not these tensors; may be given several times.")
@_model("--base", metavar="DIR_OR_REPO", help="Provides config, tokenizer and the expected names, shapes and dtypes.")
@_names("--key-map", metavar="NAME_OR_FILE", help="A built-in key map, or a file of rules (docs/key-maps.md).")
@_names("--strip-prefix", metavar="P", help="Remove this prefix from every name.")
@_files("--max-shard-size", default="5GB", show_default=True, metavar="SIZE", help="Maximum size of one file.")
@_files("--world-size", type=Count(1), metavar="N", help="Number of ranks to write for (--to dcp, --to local).")
@_files("--sha256", is_flag=True, help="Write SHA256SUMS next to the files (--to hf).")
@outcome_options
@storage_options_of_both
@command_frame
def command(
    srcs: tuple[str, ...], dst: str, *, as_json: bool, storage_options: tuple[str, ...], **options: Any
) -> None:
    """Write the weighted average of the checkpoints SRC... (oldest first) to DST.

    The sources may have different formats and world sizes, but must have the same tensors. Only model weights are
    averaged; optimizer states are left out. Sums have the same bits for any number of workers and any memory.
    """
    from ckptkit.offline.merge import merge

    explain_interrupts(dst, overwrite=options["overwrite"])
    with progress_bar("merge") as progress:
        report = merge(srcs, dst, storage_options=with_storage_options(storage_options), progress=progress, **options)
    show_outcome(report, as_json=as_json)
