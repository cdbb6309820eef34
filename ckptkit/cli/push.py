"""`ckptkit push`: upload an export to a Hugging Face repo."""

from __future__ import annotations

import click

from ckptkit.cli.frame import command_frame, if_interrupted, is_quiet, json_option, print_json


@click.command("push")
@click.argument("folder")
@click.argument("repo")
@click.option("--private/--public", default=None, help="Visibility of a new repo. Default: the owner's setting.")
@click.option("--revision", metavar="BRANCH", help="Branch to commit to.")
@json_option
@command_frame
def command(folder: str, repo: str, private: bool | None, revision: str | None, as_json: bool) -> None:
    """Upload the export in FOLDER to the Hugging Face model repo REPO. The upload is one commit."""
    from ckptkit.integrations.hub import push_folder

    if_interrupted(
        f"{repo} received all of {folder} in one commit, or nothing. Run the same command again to continue."
    )
    url = push_folder(folder, repo, private=private, revision=revision, show_progress=not is_quiet())
    if as_json:
        print_json({"schema": "ckptkit.push/1", "repo": repo, "url": url})
    else:
        click.echo(f"pushed {folder} to {url}")
