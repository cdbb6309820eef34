"""`ckptkit reshard`: a checkpoint of one cluster size into one of another."""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli.frame import command_frame, progress_bar, storage_option, with_storage_options
from ckptkit.cli.outcome import outcome_options, show_outcome


@click.command("reshard")
@click.argument("src")
@click.argument("dst")
@click.option("--world-size", type=click.IntRange(1), required=True, help="Ranks of the new job.")
@click.option("--mesh", metavar="NAME=N,...", help="Mesh of the new job, such as replicate=2,shard=4,tp=2.")
@click.option("--type", "type_", type=click.Choice(["sharded", "local"]), default="sharded", show_default=True)
@click.option("--tp-plan", metavar="FILE", help="JSON of globs of parameters and the dimension tp cuts each along.")
@click.option("--layout", metavar="URL", help="Layout of flat parameters, for FSDP1 LOCAL.")
@outcome_options
@storage_option
@command_frame
def command(
    src: str, dst: str, *, world_size: int, type_: str, as_json: bool, storage_options: tuple[str, ...], **options: Any
) -> None:
    """Write the checkpoint at SRC for another number of ranks or another mesh to DST: model, optimizer,
    masters, schedulers. File r of DST holds just what rank r of the new job will ask for."""
    from ckptkit.offline.reshard import reshard

    with progress_bar("reshard") as progress:
        report = reshard(
            src,
            dst,
            world_size=world_size,
            type=type_,
            storage_options=with_storage_options(storage_options),
            progress=progress,
            **options,
        )
    show_outcome(report, as_json=as_json, dry_run=options["dry_run"])
