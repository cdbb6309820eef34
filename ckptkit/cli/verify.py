"""`ckptkit verify`: check that a checkpoint is complete and undamaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options as shared
from ckptkit.cli.frame import (
    command_frame,
    is_quiet,
    json_option,
    print_json,
    progress_bar,
    storage_option,
)
from ckptkit.cli.options import Count
from ckptkit.errors import CorruptCheckpointError, command_line
from ckptkit.units import first_few

if TYPE_CHECKING:
    from ckptkit.offline.verify import Problem, VerifyReport

SHOWN_OF_A_FILE = 10  # problems shown per file; a failing disk may damage ten thousand tensors in one file


@click.command("verify")
@click.argument("url")
@click.option("--quick", is_flag=True, help="Check files, sizes, coverage and metadata; do not read the tensors.")
@click.option(
    "--workers", type=Count(0), default=0, metavar="N", help="Parallel reads. Default: chosen for this machine."
)
@shared.allow_pickle()
@shared.layout()
@json_option
@storage_option
@command_frame
def command(url: str, *, layout: str | None, allow_pickle: bool, as_json: bool, **options: Any) -> None:
    """Check that the checkpoint at URL is complete and undamaged. The exit code is 1 if it is damaged.

    If a tensor's class is unknown, only its checksum is compared. Such tensors are listed. They do not count as damage.
    """
    from ckptkit.formats.options import ReadOptions
    from ckptkit.offline.verify import Problem, VerifyReport, verify

    reading = ReadOptions(layout=layout, allow_pickle=allow_pickle)
    with progress_bar("verify") as progress:
        try:
            report = verify(url, options=reading, progress=progress, **options)
        except CorruptCheckpointError as error:  # too damaged to open, which is a result for `verify`, not a failure
            place, problem = error.checkpoint or url, Problem("", "", str(error))
            report = VerifyReport(place, quick=options["quick"], problems=(problem,))
    if as_json:
        print_json(report.to_json())
    else:
        lines = [report.url, *_lines(report)]
        if not (report.ok or is_quiet()):
            from ckptkit.offline.reading import earlier_checkpoint

            older = earlier_checkpoint(report.url, storage_options=options["storage_options"])
            lines += [f"check the previous one: {command_line('verify', older)}"] if older else []
        click.echo("\n".join(lines))
    if not report.ok:
        raise SystemExit(1)


def _lines(report: VerifyReport) -> list[str]:
    lines = [f"  {report.note}"] if report.note and not is_quiet() else []
    of_file: dict[str, list[Problem]] = {}
    for problem in report.problems:
        of_file.setdefault(problem.path, []).append(problem)
    for path, problems in of_file.items():
        lines += [f"bad: {problem.message}" for problem in problems[:SHOWN_OF_A_FILE]]
        more = [problem.tensor for problem in problems[SHOWN_OF_A_FILE:]]
        if more:
            lines.append(f"bad: {path}: {len(more)} more problems ({first_few(more, 3)}); --json lists all")
    lines += [f"not interpreted: {name} {why}" for name, why in report.uninterpreted.items()]
    return [*lines, report.summary()]
