"""`ckptkit pin`: protect a checkpoint from rotation."""

from __future__ import annotations

import click

from ckptkit.cli.frame import command_frame, print_json, storage_option, with_storage_options


@click.command("pin")
@click.argument("url")
@click.option("--why", default="by hand", show_default=True, metavar="TEXT", help="Reason, shown by ls and prune.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@storage_option
@command_frame
def command(url: str, why: str, as_json: bool, storage_options: tuple[str, ...]) -> None:
    """Protect the checkpoint at URL from rotation.

    URL is RUN/step_..., RUN/latest, RUN/best or RUN/1200. RUN alone means its newest checkpoint.
    """
    from ckptkit.checkpoint.run.address import resolve_checkpoint
    from ckptkit.checkpoint.run.pins import pin_forever
    from ckptkit.errors import UsageError

    if not why.strip():
        raise UsageError("--why is empty: give a reason that others will understand.")
    options = with_storage_options(storage_options)
    name = pin_forever(resolve_checkpoint(url, storage_options=options), why, storage_options=options)
    if as_json:
        print_json({"schema": "ckptkit.pin/1", "name": name, "pinned": True, "why": why})
    else:
        click.echo(f"pinned {name}: {why}")
