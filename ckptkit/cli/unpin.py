"""`ckptkit unpin`: let rotation decide on a pinned checkpoint again."""

from __future__ import annotations

import click

from ckptkit.cli.frame import command_frame, print_json, storage_option, with_storage_options


@click.command("unpin")
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@storage_option
@command_frame
def command(url: str, as_json: bool, storage_options: tuple[str, ...]) -> None:
    """Let rotation decide on the checkpoint at URL again."""
    from ckptkit.checkpoint.address import resolve_url
    from ckptkit.checkpoint.pins import unpin

    options = with_storage_options(storage_options)
    address = resolve_url(url, storage_options=options)
    was_pinned = unpin(address, storage_options=options)
    if as_json:
        print_json({"schema": "ckptkit.pin/1", "name": address.rpartition("/")[2], "pinned": False, "was": was_pinned})
    else:
        click.echo(f"unpinned {address}" if was_pinned else f"{address} was not pinned")
