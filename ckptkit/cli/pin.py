"""`ckptkit pin`: protect a checkpoint from rotation."""

from __future__ import annotations

import os

import click

from ckptkit.cli.frame import StorageOptions, command_frame, json_option, print_json, storage_option
from ckptkit.errors import CheckpointNotFoundError, UsageError


@click.command("pin")
@click.argument("url")
@click.option("--why", metavar="TEXT", help="Reason, shown by ls and prune. By default, the old reason, or 'by hand'.")
@json_option
@storage_option
@command_frame
def command(url: str, why: str | None, as_json: bool, storage_options: StorageOptions) -> None:
    """Protect the checkpoint at URL from rotation.

    URL is RUN/step_..., RUN/latest, RUN/best or RUN/1200. RUN alone means the newest checkpoint of the run.
    """
    from ckptkit.checkpoint.run.address import resolve_checkpoint
    from ckptkit.checkpoint.run.pins import pin_forever

    if why is not None and not why.strip():
        raise UsageError("--why is empty: give a reason that others will understand.")
    address = resolve_checkpoint(url, storage_options=storage_options)
    check_exists(address, storage_options)
    pin = pin_forever(address, why or "", storage_options=storage_options)
    if as_json:
        print_json({"schema": "ckptkit.pin/1", "name": pin.name, "pinned": True, "why": pin.why})
    else:
        click.echo(f"pinned {pin.name}: {pin.why}")


def check_exists(address: str, storage_options: StorageOptions) -> None:
    """Raise CheckpointNotFoundError if there is nothing at `address`."""
    from ckptkit.checkpoint.run.pins import split_checkpoint_url
    from ckptkit.formats.detect import not_there
    from ckptkit.storage.local import is_directory

    root, name = split_checkpoint_url(address, storage_options=storage_options)
    path = f"{root.url}/{name}"
    if is_directory(root):
        if not os.path.exists(path):
            raise CheckpointNotFoundError(not_there(path, path))
    elif root.info(name) is None and not root.list(name):
        raise CheckpointNotFoundError(f"{path} does not exist.")
