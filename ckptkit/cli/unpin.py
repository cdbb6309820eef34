"""`ckptkit unpin`: let rotation delete a pinned checkpoint again."""

from __future__ import annotations

import click

from ckptkit.cli.frame import StorageOptions, command_frame, json_option, print_json, storage_option


@click.command("unpin")
@click.argument("url")
@json_option
@storage_option
@command_frame
def command(url: str, as_json: bool, storage_options: StorageOptions) -> None:
    """Unpin the checkpoint at URL, so that rotation may delete it.

    RUN alone means its newest checkpoint.
    """
    from ckptkit.checkpoint.run.address import resolve_checkpoint
    from ckptkit.checkpoint.run.pins import split_checkpoint_url, unpin
    from ckptkit.errors import CheckpointNotFoundError

    address = resolve_checkpoint(url, storage_options=storage_options)
    was_pinned = unpin(address, storage_options=storage_options)
    if not was_pinned:
        root, name = split_checkpoint_url(address, storage_options=storage_options)
        if root.info(name) is None and not root.list(name):
            raise CheckpointNotFoundError(f"{address} does not exist, and nothing is pinned under that name.")
    shown = address.rstrip("/").rpartition("/")[2]
    if as_json:
        print_json({"schema": "ckptkit.pin/1", "name": shown, "pinned": False, "was": was_pinned})
    else:
        click.echo(f"unpinned {shown}" if was_pinned else f"{shown} was not pinned")
