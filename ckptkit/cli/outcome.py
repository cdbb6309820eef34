"""Defines the options and the output that are common to `convert`, `merge`, `reshard` and `copy`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ckptkit.cli.frame import if_interrupted, is_quiet, json_option, print_json, progress_bar, shortened
from ckptkit.cli.options import Count, OneOf, grouped
from ckptkit.storage.store import split_url
from ckptkit.units import format_size

if TYPE_CHECKING:
    from ckptkit.offline.conversion import ConvertReport


F = TypeVar("F", bound=Callable[..., Any])

_resource, _safety, _model = grouped("Resources"), grouped("Safety"), grouped("Model")
_OPTIONS = [
    _safety("--dry-run", is_flag=True, help="Print the plan; write nothing."),
    _safety("--verify", is_flag=True, help="Read the result back and compare it with the source."),
    _safety(
        "--no-check", "check", is_flag=True, flag_value=False, default=True, help="Do not check the source's digests."
    ),
    _safety("--overwrite", is_flag=True, help="Replace the checkpoint or export at DST."),
    _resource(
        "--workers", type=Count(0), default=0, metavar="N", help="Parallel copies. Default: chosen for this machine."
    ),
    _resource(
        "--max-memory", default="512MB", show_default=True, metavar="SIZE", help="Maximum tensor data in memory."
    ),
    json_option,
]


def outcome_options(function: F) -> F:
    """Add the options for safety, resources and output."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def vocabulary_options(function: F) -> F:
    """Add the options that resize the embedding and the output head."""
    sized = "Trim or pad the embedding and the output head to N rows."
    fill = "How to fill rows that --vocab-size adds: mean (the mean of the old rows, the default) or zeros."
    function = _model("--new-rows", type=OneOf(["mean", "zeros"]), metavar="WHICH", help=fill)(function)
    return _model("--vocab-size", type=Count(1), metavar="N", help=sized)(function)


def carry_out(function: Callable[..., ConvertReport], src: Any, dst: str, *, as_json: bool, **options: Any) -> None:
    """Run `function` (`convert`, `merge` or `reshard`), and print its report.

    Raises:
        SystemExit: After a dry run, if a real run would fail. The exit code is 1.
    """
    if_interrupted(lambda: interrupted_words(dst, overwrite=options["overwrite"]))
    with progress_bar(function.__name__) as progress:
        report = function(src, dst, progress=progress, **options)
    if not prints():
        pass
    elif as_json:
        print_json({"schema": "ckptkit.convert/1", **report.to_json()})
    elif report.dry_run:
        click.echo("\n".join(results(_plan_lines(report))))
    elif is_quiet():
        click.echo("\n".join([*(f"warning: {text}" for text in report.warnings), report.proof()]))
    else:
        click.echo("\n".join([*report.lines(), *filter(None, [report.serving])]))
    if report.faults:
        raise SystemExit(1)


def _plan_lines(report: ConvertReport) -> list[str]:
    lines, last = report.plan_lines(), len(report.plan.placements)
    kinds = ["tensor" if 0 < i <= last else "" for i in range(len(lines))]
    for i, line in enumerate(lines):
        if line.startswith("would fail: "):  # such as "would fail: missing: NAME"
            kinds[i] = ":".join(line.split(":")[:2])
    return shortened(lines, kinds)


def results(lines: list[str]) -> list[str]:
    """Return the lines without notes if --quiet was given."""
    return [line for line in lines if not (is_quiet() and line.startswith("note: "))]


def interrupted_words(dst: str, *, overwrite: bool) -> str:
    """Return a message that says whether DST has changed, and how to continue if a part is finished."""
    from ckptkit.offline.copying.resume import left_beside

    if split_url(dst)[0] != "file":
        old = f"{dst} is unchanged, or its complete replacement is in {dst}/.ckptkit-new"
        made = old if overwrite else f"{dst} was not created"
        return f"{made}. Run the same command again: it keeps the finished objects."
    if not overwrite and (os.path.isfile(dst) or (os.path.isdir(dst) and os.listdir(dst))):
        return f"{dst} is either complete or unchanged."
    untouched = f"{dst} is unchanged" if overwrite and os.path.exists(dst) else f"{dst} was not created"
    try:
        left = left_beside(dst)
    except OSError:
        left = None
    if left is None:
        return f"{untouched}. Run the same command again to start over."
    path, nbytes = left
    return (
        f"{untouched}. The finished part is kept in {path} ({format_size(nbytes)}): run the same "
        "command again to continue, or delete it."
    )


def prints() -> bool:
    """Return whether this process prints. Only rank 0 prints."""
    from ckptkit.offline.publish import is_one_of_many

    return int(os.environ.get("RANK", "0") or 0) == 0 or not is_one_of_many()
