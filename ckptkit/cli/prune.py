"""`ckptkit prune`: delete the checkpoints that the retention policy does not keep."""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli.frame import command_frame, if_interrupted, json_option, print_json, storage_option
from ckptkit.cli.retention import policy_options, take_policy
from ckptkit.errors import command_line
from ckptkit.units import format_size


@click.command("prune")
@click.argument("root")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted and why; delete nothing.")
@json_option
@policy_options
@storage_option
@command_frame
def command(root: str, *, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Delete the checkpoints of the run at ROOT that its policy does not keep. Also delete the files of killed saves.

    Never deletes the newest checkpoint, a pinned checkpoint, or files that ckptkit did not write.
    Uses the policy that the run recorded. Any --max-... or --keep-... option replaces all recorded limits.
    """
    from ckptkit.offline.prune import prune

    policy = take_policy(options)
    if not dry_run:
        if_interrupted(
            "Deletions so far are final; all other checkpoints are intact. Run the same command again to "
            f"continue, or look first: {command_line('ls', root)}"
        )
    report = prune(root, policy=policy, dry_run=dry_run, **options)
    if as_json:
        print_json(report.to_json())
    else:
        for decision in report.decisions:
            verb = "keep" if decision.keep else "would delete" if dry_run else "deleted"
            if decision.name in report.failed:
                verb = "would FAIL to delete" if dry_run else "FAILED to delete"
            click.echo(f"{verb:<12}  {decision.name}  {format_size(decision.nbytes):>9}  {decision.reason}")
            if dry_run and decision.name in report.failed:
                click.echo(f"{'':<12}  {report.failed[decision.name]}")
        names = {decision.name for decision in report.decisions}
        for path in report.cleaned:
            if path.endswith(".owner"):
                continue  # this owner file belongs to the staging directory on the previous line
            how = "replaced" if path in names else "left"
            click.echo(f"{'would clean' if dry_run else 'cleaned':<12}  {path}  {how} by a save whose process is gone")
        for path in report.kept_files:
            click.echo(f"{'would stay' if dry_run else 'stayed':<12}  {path}  no commit record names it")
        click.echo(f"{'would free' if dry_run else 'freed'} {format_size(report.freed_bytes)}")
    if report.failed:
        raise SystemExit(1)
