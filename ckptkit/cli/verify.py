"""`ckptkit verify`: is a checkpoint complete and undamaged?"""

from __future__ import annotations

import click

from ckptkit.cli.frame import command_frame, print_json, progress_bar, storage_option, with_storage_options


@click.command("verify")
@click.argument("url")
@click.option("--quick", is_flag=True, help="Check files, sizes and coverage only; do not read the tensors.")
@click.option("--workers", type=click.IntRange(0), default=0, help="Reads in flight. Default: by the machine.")
@click.option("--layout", metavar="FILE", help="Names and shapes of flat parameters (FSDP1 LOCAL).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@storage_option
@command_frame
def command(
    url: str, quick: bool, workers: int, layout: str | None, as_json: bool, storage_options: tuple[str, ...]
) -> None:
    """Check that the checkpoint at URL is complete and undamaged. Exit code 1 where it is not."""
    from ckptkit.formats.options import ReadOptions
    from ckptkit.offline.verify import verify

    options = with_storage_options(storage_options)
    with progress_bar("verify") as progress:
        report = verify(
            url,
            quick=quick,
            workers=workers,
            storage_options=options,
            progress=progress,
            options=ReadOptions(layout=layout),
        )
    if as_json:
        print_json(report.to_json())
    else:
        if report.note:
            click.echo(report.note)
        for problem in report.problems:
            click.echo(f"bad: {problem.message}")
        click.echo(report.summary())
    if not report.ok:
        raise SystemExit(1)
