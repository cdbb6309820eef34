"""`ckptkit pin`: keep a checkpoint whatever rotation says."""

from __future__ import annotations

import click

from ckptkit.cli.frame import command_frame, print_json, storage_option, with_storage_options


@click.command("pin")
@click.argument("url")
@click.option("--why", required=True, metavar="TEXT", help="Shown by ls and prune.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@storage_option
@command_frame
def command(url: str, why: str, as_json: bool, storage_options: tuple[str, ...]) -> None:
    """Keep the checkpoint at URL (RUN/step_..., RUN/latest, RUN/best, RUN/1200) whatever rotation says."""
    from ckptkit.checkpoint.address import resolve_url
    from ckptkit.checkpoint.pins import pin_forever

    options = with_storage_options(storage_options)
    name = pin_forever(resolve_url(url, storage_options=options), why, storage_options=options)
    if as_json:
        print_json({"schema": "ckptkit.pin/1", "name": name, "pinned": True, "why": why})
    else:
        click.echo(f"pinned {name}: {why}")
