"""`ckptkit unpin`: let rotation delete a pinned checkpoint again."""

from __future__ import annotations

import click

from ckptkit.cli.frame import StorageOptions, command_frame, json_option, print_json, storage_option
from ckptkit.cli.pin import check_exists


@click.command("unpin")
@click.argument("url")
@json_option
@storage_option
@command_frame
def command(url: str, as_json: bool, storage_options: StorageOptions) -> None:
    """Unpin the checkpoint at URL, so that rotation may delete it.

    RUN alone means the newest checkpoint of the run.
    """
    from ckptkit.checkpoint.run.address import resolve_checkpoint
    from ckptkit.checkpoint.run.pins import split_checkpoint_url, unpin
    from ckptkit.formats.own.record import read_record, record_path

    address = resolve_checkpoint(url, storage_options=storage_options)
    was_pinned = unpin(address, storage_options=storage_options)
    root, shown = split_checkpoint_url(address, storage_options=storage_options)
    if not was_pinned:
        check_exists(address, storage_options)
        read_record(root, record_path(shown))  # raises if the directory is not a checkpoint
    if as_json:
        print_json({"schema": "ckptkit.pin/1", "name": shown, "pinned": False, "was": was_pinned})
    else:
        click.echo(f"unpinned {shown}" if was_pinned else f"{shown} was not pinned")
