"""`ckptkit diff`: show which tensors of two checkpoints differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli.frame import (
    command_frame,
    is_quiet,
    json_option,
    note,
    print_json,
    progress_bar,
    shortened,
    storage_option,
)
from ckptkit.units import counted

if TYPE_CHECKING:
    from ckptkit.offline.diff import DiffReport, LayerDiff, TensorDiff

_FIRST = 5  # tensors listed by name, unless --verbose


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--include", multiple=True, metavar="GLOB", help="Only these names; may be given several times.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Not these names; may be given several times.")
@click.option("--max-memory", default="512MB", show_default=True, metavar="SIZE", help="Maximum tensor data in memory.")
@click.option("--html", metavar="OUT.html", help="Write a page with a heat map of the change by layer.")
@json_option
@storage_option
@command_frame
def command(a: str, b: str, *, html: str | None, as_json: bool, **options: Any) -> None:
    """Compare the tensors and other values of the checkpoints at A and B. The exit code is 1 if they differ.

    The formats and shardings of A and B may differ. Prints a summary by layer. --verbose lists each difference; --quiet
    prints only the last line.
    """
    from ckptkit.offline.diff import diff

    with progress_bar("diff") as progress:
        report = diff(a, b, progress=progress, **options)
    for text in report.notes:
        note(f"note: {text}")
    if html:
        from ckptkit.offline.pictures.pages import write_diff_page

        write_diff_page(report, html)
        note(f"wrote {html}")
    if as_json:
        print_json(report.to_json())
    elif is_quiet():
        click.echo(report.summary())
    else:
        click.echo("\n".join(_lines(report, every=click.get_current_context().meta["ckptkit.verbose"])))
    if report.differs:
        raise SystemExit(1)


def _lines(report: DiffReport, *, every: bool) -> list[str]:
    kinds = [
        [f"only in A: {name}" for name in report.only_a],
        [f"only in B: {name}" for name in report.only_b],
        [f"shape: {name}: {list(x)} in A, {list(y)} in B" for name, (x, y) in report.shapes.items()],
        [f"dtype: {name}: {x} in A, {y} in B" for name, (x, y) in report.dtypes.items()],
        [f"value: {name}: {x} in A, {y} in B" for name, (x, y) in report.values.items()],
        [f"random state: {name} differs" for name in report.random],
        [f"not interpreted: {name} {why}" for name, why in report.records.items()],
    ]
    lines = [f"A {report.a}", f"B {report.b}"]
    for kind in kinds:
        lines += shortened(kind, ["difference"] * len(kind))
    lines += [f"not compared: {name}" for name in report.left_out] if every else []
    layers = report.layers()
    if every or len(report.different) <= max(_FIRST, len(layers)):
        if report.different:
            lines += _table("differs", report.different, [d.name for d in report.different])
    else:
        lines += [*_table("differs, by layer", layers.values(), list(layers))]
        lines.append(
            f"  {counted(len(report.different), 'tensor', 'differ')}; --verbose lists them, --exclude skips names"
        )
    if every and 1 < len(layers) < len(report.different):
        lines += ["", *_table("by layer", layers.values(), list(layers)), ""]
    lines.append(report.summary())
    return lines


def _table(title: str, rows: Iterable[TensorDiff | LayerDiff], names: list[str]) -> list[str]:
    width = max(len(title), *map(len, names))
    lines = [f"{title:<{width}}  {'differing':>10}  {'max abs':>9}  {'max rel':>9}  {'cosine':>10}"]
    for row, name in zip(rows, names, strict=True):
        numbers = f"{_shown(row.max_abs):>9}  {_shown(row.max_rel):>9}  {_shown(row.cosine, 8):>10}"
        lines.append(f"{name:<{width}}  {row.elements:>10}  {numbers}")
    return lines


def _shown(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"
